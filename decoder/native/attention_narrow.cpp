// Attention over caches of 8 bits.
#include "attention_block.h"

namespace paceline [[gnu::visibility("hidden")]] {

template void attend_typed<int8_t>(const Attend&, int64_t, int64_t, const Heads&, int8_t*, int8_t*);
template void attend_typed<Float8E4M3>(const Attend&, int64_t, int64_t, const Heads&, Float8E4M3*, Float8E4M3*);
template void attend_typed<Float8E5M2>(const Attend&, int64_t, int64_t, const Heads&, Float8E5M2*, Float8E5M2*);

}  // namespace paceline
