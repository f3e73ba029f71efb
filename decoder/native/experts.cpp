// The entry point of a mixture of experts.
#include "experts.h"

using namespace paceline;

// pointers: x, shares, out, count; gate_up, its scales, down, its scales. Count and scales may be null.
// sizes: lines, window, width, experts, inner numbers of one, code of the activation, format of gate_up, of down
extern "C" void paceline_experts(void* const* p, const int64_t* n) {
  const Mixture all{(float*)p[0], (float*)p[1], (float*)p[2], (int32_t*)p[3], n[0], n[1], n[2], n[3], n[4], n[5]};
  mixture(all, Stored{p[4], (float*)p[5], n[6]}, Stored{p[6], (float*)p[7], n[7]});
}
