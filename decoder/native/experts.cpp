// The entry points of a mixture of experts.
#include "experts.h"

#include "handles.h"

using namespace paceline;

// pointers: x, shares, out, count; gate_up, its scales, down, its scales. Count and scales may be null.
// sizes: lines, window, width, experts, inner numbers of one, code of the activation, format of gate_up, of down
extern "C" void paceline_experts(void* const* p, const int64_t* n) {
  const Mixture all{(float*)p[0], (float*)p[1], (float*)p[2], (int32_t*)p[3], n[0], n[1], n[2], n[3], n[4], n[5]};
  mixture(all, Stored{p[4], (float*)p[5], n[6]}, Stored{p[6], (float*)p[7], n[7]});
}

extern "C" int32_t aoti_torch_cpu_row_experts(Handle x, Handle shares, Handle gate_up, Handle* gate_up_scales,
                                              Handle down, Handle* down_scales, Handle* count, int64_t activation,
                                              int64_t gate_up_format, int64_t down_format, Handle* ret) {
  const int64_t *s = sizes(x), experts = sizes(shares)[2], inner = sizes(gate_up)[0] / experts / 2;
  *ret = empty(3, s, aoti_torch_dtype_float32());
  void* const all[8] = {data<void>(x),       data<void>(shares),    data<void>(*ret), maybe(count),
                        data<void>(gate_up), maybe(gate_up_scales), data<void>(down), maybe(down_scales)};
  const int64_t numbers[8] = {s[0], s[1], s[2], experts, inner, activation, gate_up_format, down_format};
  paceline_experts(all, numbers);
  return 0;
}
