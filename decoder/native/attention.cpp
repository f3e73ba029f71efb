// Attention over caches of any format.
#include "attention_block.h"

namespace paceline [[gnu::visibility("hidden")]] {

void attend_group(const Attend& a, int64_t b, int64_t g, const Heads& h, const Cache& c) {
  switch (c.format) {
    case FLOAT32: return attend_typed<float>(a, b, g, h, c);
    case BFLOAT16: return attend_typed<BFloat16>(a, b, g, h, c);
    case FLOAT16: return attend_typed<Float16>(a, b, g, h, c);
    case INT8: return attend_typed<int8_t>(a, b, g, h, c);
    default: return attend_typed<Float8E4M3>(a, b, g, h, c);
  }
}

}  // namespace paceline
