// Attention over caches of any format; compiled here for plain ones.
#include "attention_block.h"

namespace paceline [[gnu::visibility("hidden")]] {

// In attention_narrow.cpp.
extern template void attend_typed<int8_t>(const Attend&, int64_t, int64_t, const Heads&, int8_t*, int8_t*);
extern template void attend_typed<Float8E4M3>(const Attend&, int64_t, int64_t, const Heads&, Float8E4M3*, Float8E4M3*);
extern template void attend_typed<Float8E5M2>(const Attend&, int64_t, int64_t, const Heads&, Float8E5M2*, Float8E5M2*);

void attend_group(const Attend& a, int64_t b, int64_t g, const Heads& h, const Cache& c) {
  auto typed = [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    attend_typed(a, b, g, h, (T*)c.keys, (T*)c.values);
  };
  switch (c.format) {
    case FLOAT32: return typed((float*)nullptr);
    case BFLOAT16: return typed((BFloat16*)nullptr);
    case FLOAT16: return typed((Float16*)nullptr);
    case INT8: return typed((int8_t*)nullptr);
    case E4M3: return typed((Float8E4M3*)nullptr);
    default: return typed((Float8E5M2*)nullptr);
  }
}

}  // namespace paceline
