// Matmuls with bfloat16 weights: activations are rounded to bfloat16 too, once per matmul, and multiplied in pairs.
//
// One instruction (`vdpbf16ps` of AVX512_BF16) adds two products to a float32 sum: a fused multiply-add of the odd
// numbers, then one of the even numbers, each rounded to nearest, with denormal inputs and results as zeros. Without
// it, two fused multiply-adds in that order are used, with denormals treated in the same way if the processor has such
// a mode (x86). So the sums have the same bits.
#pragma once

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "matrix.h"

namespace paceline [[gnu::visibility("hidden")]] {

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#define PACELINE_PAIRS 1
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// Whether activations are rounded for these rows, and whether they are then stored in 16 bits, in their order.
template <class R>
constexpr bool ROUNDED = std::is_same_v<R, Plain<BFloat16>>;
template <class R>
constexpr bool PAIRED = PAIRS && ROUNDED<R>;

// During its lifetime its thread treats denormal inputs and results as zeros, like the instruction.
class Flushed {
 public:
#ifdef __SSE2__
  explicit Flushed(bool wanted) : before_(_mm_getcsr()) {
    if (wanted) _mm_setcsr(before_ | 0x8040);
  }
  ~Flushed() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  explicit Flushed(bool) {}
#endif
 public:
  Flushed(const Flushed&) = delete;
  Flushed& operator=(const Flushed&) = delete;
};

// The bits of these numbers rounded to bfloat16, as `narrow` rounds them, in the upper halves.
inline VecU rounded(Vec x) {
  const VecU word = (VecU)x, found = (word + 0x7fff + ((word >> 16) & 1)) & 0xFFFF0000u;
  const VecU number = (VecU)(x == x);  // all ones, or zeros if it is NaN
  return (found & number) | (0x7fc00000u & ~number);
}
inline float rounded(float x) {
  BFloat16 found;
  narrow(&found, x);
  return widen(found);
}

#ifdef PACELINE_PAIRS
// STEP numbers of a row, or of two rows side by side, as pairs of bfloat16.
template <class V>
V load_pairs(const BFloat16* p, int64_t K);
template <>
inline Vec load_pairs<Vec>(const BFloat16* p, int64_t) {
  return load((const float*)p);
}
template <>
inline Wide load_pairs<Wide>(const BFloat16* p, int64_t K) {
  return beside<Wide>(load((const float*)p), load((const float*)(p + K)));
}
inline void multiply_add_pairs(Vec& sum, Vec a, Vec b) {
  sum = (Vec)_mm256_dpbf16_ps((__m256)sum, (__m256bh)a, (__m256bh)b);
}
inline void multiply_add_pairs(Wide& sum, Wide a, Wide b) {
  sum = (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

}  // namespace paceline
