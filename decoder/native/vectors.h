// Vectors of eight numbers, registers that hold one or two of them, the three formats of weights, and sums in a fixed
// order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif

namespace paceline [[gnu::visibility("hidden")]] {

constexpr int64_t VL = 8;  // lanes of a vector; fixed, so that every machine sums in the same order
typedef float Vec __attribute__((vector_size(VL * 4)));
typedef int32_t VecI __attribute__((vector_size(VL * 4)));
typedef uint32_t VecU __attribute__((vector_size(VL * 4)));
typedef uint16_t VecH __attribute__((vector_size(VL * 2)));
#ifdef __aarch64__
typedef __fp16 Float16;  // gcc 12 has the standard's name on x86 only
#else
typedef _Float16 Float16;
#endif
typedef Float16 VecF16 __attribute__((vector_size(VL * 2)));

// Codes of the formats of matrices. The first three also apply to norms and biases; these and the 8-bit formats without
// blocks apply to caches.
enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, Q8_0 = 4, Q4_0 = 5, Q4_1 = 6, E4M3 = 7 };

struct BFloat16 {
  uint16_t bits;
};

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Vec load(const BFloat16* p) {
#ifdef __AVX2__
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  VecH h;
  std::memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, VecU) << 16);
#endif
}
inline Vec widened_halves(VecH bits) {  // of float16
#if defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps((__m128i)bits);
#else
  return __builtin_convertvector((VecF16)bits, Vec);
#endif
}
inline Vec load(const Float16* p) {
  VecH bits;
  std::memcpy(&bits, p, sizeof bits);
  return widened_halves(bits);
}
// Floats of 8 bits. Their bits, shifted to the positions of a 16-bit float, are the number divided by UNIT, because the
// exponent's bias differs; also for subnormal numbers.
struct Float8E4M3 {
  uint8_t bits;
  static constexpr float UNIT = 256;  // 2^(15 - 7)
  static constexpr int BIAS = 7, FRACTION = 3;
  static uint16_t half(uint16_t b) { return (uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7); }
};
inline float widen(Float8E4M3 x) {
  const uint16_t word = Float8E4M3::half(x.bits);
  Float16 value;
  std::memcpy(&value, &word, 2);
  return (float)value;
}
inline Vec load(const Float8E4M3* p) {
#if defined(__AVX2__) && defined(__F16C__)
  const __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
  const __m128i sign = _mm_and_si128(_mm_slli_epi16(b, 8), _mm_set1_epi16((int16_t)0x8000));
  const __m128i rest = _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x7f)), 7);
  return (Vec)_mm256_cvtph_ps(_mm_or_si128(sign, rest));
#else
  Vec v;
  for (int i = 0; i < VL; i++) v[i] = widen(p[i]);
  return v;
#endif
}
inline Vec load(const int8_t* p) {
  typedef int8_t VecB __attribute__((vector_size(VL)));
  VecB b;
  std::memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, Vec);
}
inline float widen(int8_t x) { return (float)x; }
inline float widen(float x) { return x; }
inline float widen(Float16 x) { return (float)x; }
inline float widen(BFloat16 x) {
  uint32_t word = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline void narrow(float* p, float x) { *p = x; }
inline void narrow(Float16* p, float x) { *p = (Float16)x; }
inline void narrow(BFloat16* p, float x) {  // round to nearest, ties to even, as PyTorch does
  uint32_t word;
  std::memcpy(&word, &x, 4);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
// The largest number of a type of 8 bits.
template <class T>
constexpr float LARGEST = std::is_same_v<T, int8_t> ? 127.0f : 448.0f;
inline void narrow(int8_t* p, float x) {  // to nearest, ties to even
  x = std::nearbyint(x);
  *p = (int8_t)(x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x);
}
inline void narrow(Float8E4M3* p, float x) {  // to nearest, ties to even; saturating
  constexpr int DROPPED = 23 - Float8E4M3::FRACTION;
  const float most = LARGEST<Float8E4M3>;
  x = x > most ? most : x < -most ? -most : x;
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint32_t sign = word >> 31 << 7;
  word &= 0x7fffffff;
  if (word < (uint32_t)(127 - Float8E4M3::BIAS + 1) << 23) {
    // Subnormal: added to a number whose last bit is worth the smallest step, the value is rounded to such steps.
    const uint32_t beside = (uint32_t)(127 - Float8E4M3::BIAS + DROPPED + 1) << 23;
    float value, base;
    std::memcpy(&value, &word, 4);
    std::memcpy(&base, &beside, 4);
    value += base;
    std::memcpy(&word, &value, 4);
    word -= beside;
  } else {
    const uint32_t odd = word >> DROPPED & 1;
    word = (word - ((uint32_t)(127 - Float8E4M3::BIAS) << 23) + ((1u << (DROPPED - 1)) - 1) + odd) >> DROPPED;
  }
  p->bits = (uint8_t)(sign | word);
}
#ifdef __aarch64__
// Half of a vector as a register of NEON.
template <class Half, class V>
inline Half half_of(const V& v, int i) {
  Half half;
  std::memcpy(&half, (const char*)&v + i * sizeof half, sizeof half);
  return half;
}
#endif
inline void multiply_add(Vec& sum, Vec a, Vec b) {
#if defined(__AVX2__) && defined(__FMA__)
  sum = (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  typedef float32x4_t Half;
  for (int i = 0; i < 2; i++) {
    const Half found = vfmaq_f32(half_of<Half>(sum, i), half_of<Half>(a, i), half_of<Half>(b, i));
    std::memcpy((char*)&sum + i * sizeof found, &found, sizeof found);
  }
#else
  for (int i = 0; i < VL; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
#endif
}
// The numbers of a V, and a vector of four of them.
template <class V>
using Lane = std::decay_t<decltype(std::declval<V&>()[0])>;
template <class V>
struct FourOf {
  typedef Lane<V> type __attribute__((vector_size(16)));
};
template <class V>
using Four = typename FourOf<V>::type;
#ifdef __AVX2__
template <class V>
inline Four<V> folded(V v) {
  return (Four<V>)_mm256_castps256_ps128((__m256)v) + (Four<V>)_mm256_extractf128_ps((__m256)v, 1);
}
#endif
// ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)); the sum of integers is exact, and then rounded.
template <class V>
inline float total(V v) {
#ifdef __AVX2__
  Four<V> half = folded(v);
  half += (Four<V>)_mm_movehl_ps((__m128)half, (__m128)half);
  return (float)(half[0] + half[1]);
#else
  return (float)(((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])));
#endif
}
// The totals of four vectors, each summed as `total` does: together they take half of the instructions.
template <class V>
inline void totals(V a, V b, V c, V d, float* to) {
#ifdef __AVX2__
  auto pairs = [&](V first, V second) {
    const __m128 x = (__m128)folded(first), y = (__m128)folded(second);
    return (__m128)((Four<V>)_mm_movelh_ps(x, y) + (Four<V>)_mm_movehl_ps(y, x));
  };
  const __m128 left = pairs(a, b), right = pairs(c, d);
  const Four<V> all = (Four<V>)_mm_shuffle_ps(left, right, 0x88) + (Four<V>)_mm_shuffle_ps(left, right, 0xdd);
  const Four<Vec> found = __builtin_convertvector(all, Four<Vec>);
  std::memcpy(to, &found, sizeof found);
#else
  to[0] = total(a), to[1] = total(b), to[2] = total(c), to[3] = total(d);
#endif
}
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline float largest(Vec v) {
  float best = v[0];
  for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
  return best;
}
template <class V>
inline V in_register(V v) {  // keeps the compiler from loading the same vector again for every use
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__AVX2__)
  asm("" : "+x"(v));
#endif
  return v;
}
// Before a loop of known length: it is unrolled, so that arrays stay in registers.
#define UNROLLED _Pragma("GCC unroll 64")

inline VecI lanes() { return VecI{0, 1, 2, 3, 4, 5, 6, 7}; }

// ------------------------------------------------------------------------------------------------------ wide registers --

// Contents of a register: ABREAST vectors, one or two. Each is summed separately, so that a machine with wider
// registers has the same results.
#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int ABREAST = 2;
#else
constexpr int ABREAST = 1;
#endif
typedef float Wide __attribute__((vector_size(ABREAST * VL * 4)));
typedef uint32_t WideU __attribute__((vector_size(ABREAST * VL * 4)));
typedef int32_t WideI __attribute__((vector_size(ABREAST * VL * 4)));

// The same eight numbers in all of them.
template <class V>
V repeated(const float* p);
template <>
inline Vec repeated<Vec>(const float* p) {
  return load(p);
}
template <class V>
V spread(float x);
template <>
inline Vec spread<Vec>(float x) {
  return Vec{x, x, x, x, x, x, x, x};
}
template <class V>
V beside(Vec a, Vec b);
template <class V, class Of>
inline V side_by_side(Of of) {  // of(i) for each vector of a V
  if constexpr (sizeof(V) == sizeof(Vec)) return of(0);
  else return beside<V>(of(0), of(1));
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)
template <>
inline Wide repeated<Wide>(const float* p) {
  return (Wide)_mm512_broadcast_f32x8(_mm256_loadu_ps(p));
}
template <>
inline Wide spread<Wide>(float x) {
  return (Wide)_mm512_set1_ps(x);
}
template <>
inline Wide beside<Wide>(Vec a, Vec b) {
  return (Wide)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)a), (__m256)b, 1);
}
inline void multiply_add(Wide& sum, Wide a, Wide b) { sum = (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
template <class V>
inline void wide_totals(V a, V b, V c, V d, float* to) {  // each as `total` adds it
  auto halves = [](V x, V y) {
    const __m512 p = (__m512)x, q = (__m512)y;
    return (__m512)((V)_mm512_shuffle_f32x4(p, q, 0x88) + (V)_mm512_shuffle_f32x4(p, q, 0xdd));
  };
  const __m512 left = halves(a, b), right = halves(c, d);
  const V pairs = (V)_mm512_shuffle_ps(left, right, 0x44) + (V)_mm512_shuffle_ps(left, right, 0xee);
  const Wide all = __builtin_convertvector(pairs + (V)_mm512_permute_ps((__m512)pairs, 0xb1), Wide);
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_permutexvar_ps(places, (__m512)all)));
}
#endif

// found[i] = the total of vector i of these sums
template <int N, class V>
inline __attribute__((always_inline)) void totals(const V* sum, float* found) {
  if constexpr (sizeof(V) == sizeof(Vec)) {
    UNROLLED for (int i = 0; i + 4 <= N; i += 4) totals(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], found + i);
    UNROLLED for (int i = N / 4 * 4; i < N; i++) found[i] = total(sum[i]);
  } else {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    typedef std::conditional_t<std::is_same_v<V, Wide>, Vec, VecI> Half;
    UNROLLED for (int i = 0; i + 4 <= N; i += 4)
      wide_totals(sum[i], sum[i + 1], sum[i + 2], sum[i + 3], found + 2 * i);
    UNROLLED for (int i = N / 4 * 4; i < N; i++) {
      found[2 * i] = total((Half)_mm512_castps512_ps256((__m512)sum[i]));
      found[2 * i + 1] = total((Half)_mm512_extractf32x8_ps((__m512)sum[i], 1));
    }
#endif
  }
}

}  // namespace paceline
