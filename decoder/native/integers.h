// Matmuls with quantised weights: activations are converted to 16-bit integers with one scale per row, once per matmul,
// and multiplied as integers.
//
// A row x becomes round(x * (LARGEST / max |x|)), ties to even; a row with a NaN or infinity gives NaN. Weights are
// integers of at most 8 bits, and sums of products are exact int32, so that every processor has the same bits with any
// instruction (`vpdpwssd` of AVX512_VNNI and AVX_VNNI, `vpmaddwd`, `smull` of NEON, or a loop; ARM's dot products add
// four numbers of 8 bits, so they cannot).
//
// Rows with one scale: LARGEST is 16383, so that an int32 holds the sum of a SEGMENT of numbers in any order, which
// AMX's 8-bit halves need (tiles.h). It is converted to float32 once, and segments are added in order.
//
// Blocks of 32: LARGEST is 32767. Lane j of eight sums the products of numbers 2j and 2j + 1 of every STEP; it is
// converted to float32 and multiplied by the block's scale. tests/decoder/test_integer_products.py has both in NumPy.
#pragma once

#include <algorithm>
#include <vector>

#include "matrix.h"

namespace paceline [[gnu::visibility("hidden")]] {

// Whether activations are converted to integers for these rows or this format, and whether the weights are in blocks.
template <class R>
constexpr bool BLOCKS = false;
template <class Block>
constexpr bool BLOCKS<Blocked<Block>> = true;
template <class R>
constexpr bool FOUR_BITS = BLOCKS<R> && R::SPREAD < STEP;
template <class R>
constexpr bool INTEGERS = std::is_same_v<R, Int8> || BLOCKS<R>;
inline bool integers(int64_t format) { return format == INT8 || format == Q8_0 || format == Q4_0 || format == Q4_1; }

// The instruction for sums of products: 2 adds to a sum, 1 needs an addition, 0 is a loop.
#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
constexpr int INTEGER_SUMS = 2;
#elif defined(__AVX2__)
constexpr int INTEGER_SUMS = 1;
#else
constexpr int INTEGER_SUMS = 0;
#endif

constexpr float LEAST_TOP = 0x1p-100f;  // a row's largest number counts as at least this: LARGEST / it is finite
inline float largest_integer(int64_t format) { return format == INT8 ? 16383.0f : 32767.0f; }
constexpr int64_t SEGMENT = 1024;  // numbers of K
static_assert(SEGMENT * 128 * 16383 < (int64_t)1 << 31);
static_assert((int64_t)GROUP / VL * 128 * 32767 < (int64_t)1 << 31);

// A line: the integers, zeros up to a whole STEP; the scale; of blocks with a least number the sums of each block's
// integers, zeros up to a whole vector. Counted in float32.
inline int64_t integer_words(int64_t K) { return (K + STEP - 1) / STEP * (STEP / 2); }
inline int64_t sums_place(int64_t K) { return integer_words(K) + 1; }
inline int64_t integer_line(int64_t format, int64_t K) {
  const int64_t sums = format == Q4_1 ? (K / GROUP + VL - 1) / VL * VL : 0;
  return (sums_place(K) + sums + VL - 1) / VL * VL;
}

// Converts x [K] to such a line.
inline void integer_line(int64_t format, const float* x, float* to, int64_t K) {
  VecI tops = {};
  int32_t top = 0;
  int64_t k = 0;
  auto bits = [](auto number, auto zero) {
    std::memcpy(&zero, &number, sizeof zero);
    return zero & 0x7fffffff;  // the order of non-negative numbers is that of their bits; NaN is above
  };
  for (; k + VL <= K; k += VL) {
    const VecI some = bits(load(x + k), VecI{});
    tops = some > tops ? some : tops;
  }
  for (; k < K; k++) top = std::max(top, bits(x[k], int32_t{}));
  for (int j = 0; j < VL; j++) top = std::max(top, tops[j]);
  float most;
  std::memcpy(&most, &top, sizeof most);
  const bool finite = top < 0x7f800000;
  if (most < LEAST_TOP) most = LEAST_TOP;
  const float inverse = finite ? largest_integer(format) / most : 0.0f;
  int16_t* integer = (int16_t*)to;
  // Added to a number whose last bit is worth 1, a value is rounded to an integer, in the lower bits.
  constexpr float BESIDE = 0x1.8p23f;
  for (k = 0; finite && k + VL <= K; k += VL) {
    const VecH some = __builtin_convertvector((VecU)(load(x + k) * inverse + BESIDE), VecH);
    std::memcpy(integer + k, &some, sizeof some);
  }
  if (!finite) k = 0;
  for (; k < 2 * integer_words(K); k++) {
    const float sum = (finite && k < K ? x[k] * inverse : 0.0f) + BESIDE;
    uint32_t word;
    std::memcpy(&word, &sum, sizeof word);
    integer[k] = (int16_t)word;
  }
  to[integer_words(K)] = finite ? most / largest_integer(format) : NAN;
  if (format != Q4_1) return;
  float* sums = to + sums_place(K);
  const int64_t groups = K / GROUP;
  for (int64_t g = 0; g < (groups + VL - 1) / VL * VL; g++) {
    int32_t sum = 0;
    if (g < groups)
      for (int64_t i = 0; i < GROUP; i++) sum += integer[g * GROUP + i];
    sums[g] = (float)sum;
  }
}

// ----------------------------------------------------------------------------------------------- registers of integers --
// As wide as a V, of int32 or of twice as many int16. Not a V that holds them: gcc then keeps sums in memory.

template <class V>
using Ints = std::conditional_t<sizeof(V) == sizeof(Vec), VecI, WideI>;

// sum + products of pairs
inline void multiply_add_integers(VecI& sum, VecI a, VecI b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  sum = (VecI)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVXVNNI__)
  sum = (VecI)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  sum = (VecI)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
#elif defined(__aarch64__)
  for (int i = 0; i < 2; i++) {
    const int16x8_t x = half_of<int16x8_t>(a, i), y = half_of<int16x8_t>(b, i);
    const int32x4_t pairs = vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
    const int32x4_t found = vaddq_s32(half_of<int32x4_t>(sum, i), pairs);
    std::memcpy((char*)&sum + i * sizeof found, &found, sizeof found);
  }
#else
  int16_t one[2 * VL], other[2 * VL];
  std::memcpy(one, &a, sizeof one);
  std::memcpy(other, &b, sizeof other);
  for (int i = 0; i < VL; i++) sum[i] += one[2 * i] * other[2 * i] + one[2 * i + 1] * other[2 * i + 1];
#endif
}
// STEP integers of 8 bits as 16 bits, of a row or of two side by side; `Number` is int8_t or uint8_t.
template <class Number>
inline VecI widened(Bytes b) {
#ifdef __AVX2__
  if constexpr (std::is_signed_v<Number>) return (VecI)_mm256_cvtepi8_epi16((__m128i)b);
  return (VecI)_mm256_cvtepu8_epi16((__m128i)b);
#else
  typedef Number Numbers __attribute__((vector_size(STEP)));
  typedef int16_t Shorts __attribute__((vector_size(2 * STEP)));
  return (VecI)__builtin_convertvector((Numbers)b, Shorts);
#endif
}
// The scales of blocks, one for each column of a V. block(i) is column i's.
template <class V, class Of>
inline V scales_of(Of block) {
  if constexpr (sizeof(V) == sizeof(Vec)) {
    return widened_halves(VecH{} + block(0).d);
  } else {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    // Both columns' numbers are widened together, and each scale is spread over its own half.
    const __m128 wide = _mm_cvtph_ps(_mm_insert_epi16(_mm_cvtsi32_si128(block(0).d), block(1).d, 1));
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return (V)_mm512_permutexvar_ps(halves, _mm512_castps128_ps512(wide));
#endif
  }
}
// The least numbers of `count` blocks (at most eight) of a column from this one on, and zeros after them.
template <class Block>
inline Vec least_of(const Block* block, int64_t count) {
  VecH bits = {};
  UNROLLED for (int i = 0; i < VL; i++)
    if (i < count) bits[i] = block[i].m;
  return widened_halves(bits);
}
#if defined(__AVX512F__) && defined(__AVX512DQ__)
inline void multiply_add_integers(WideI& sum, WideI a, WideI b) {
#ifdef __AVX512VNNI__
  sum = (WideI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  sum = (WideI)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#else
  VecI half[2], one[2], other[2];
  std::memcpy(half, &sum, sizeof half);
  std::memcpy(one, &a, sizeof one);
  std::memcpy(other, &b, sizeof other);
  for (int i = 0; i < 2; i++) multiply_add_integers(half[i], one[i], other[i]);
  std::memcpy(&sum, half, sizeof half);
#endif
}
template <class Number>
inline WideI widened(WideBytes b) {
#ifdef __AVX512BW__
  if constexpr (std::is_signed_v<Number>) return (WideI)_mm512_cvtepi8_epi16((__m256i)b);
  return (WideI)_mm512_cvtepu8_epi16((__m256i)b);
#else
  Bytes one[2];
  std::memcpy(one, &b, sizeof one);
  return (WideI)beside<Wide>((Vec)widened<Number>(one[0]), (Vec)widened<Number>(one[1]));
#endif
}
#endif
// The numbers of blocks, one for each column of a V: the first sixteen of each, and the last.
template <class V, class Of>
inline void numbers_of(Of block, Ints<V> (&half)[2]) {
  if constexpr (sizeof(block(0).q) == GROUP) {
    UNROLLED for (int i = 0; i < 2; i++)
      half[i] = widened<int8_t>(bytes_of<V>([&](int n) { return block(n).q + i * STEP; }));
  } else {
    typedef int16_t Shorts __attribute__((vector_size(sizeof(V))));
    constexpr int16_t zero = std::decay_t<decltype(block(0))>::ZERO;
    const Shorts both = (Shorts)widened<uint8_t>(bytes_of<V>([&](int n) { return block(n).q; }));
    half[0] = (Ints<V>)((both & 15) - zero), half[1] = (Ints<V>)((both >> 4) - zero);
  }
}
template <class V>
inline Ints<V> row_integers(const float* p) {
  return in_register((Ints<V>)repeated<V>(p));
}

// ---------------------------------------------------------------------------------------------------------------- sums --

// found [ROWS, COLS x columns of a V] = the sums of products with integers that have a scale for a row. fetch(n) prefetches
// the next n bytes of every column.
template <class V, int ROWS, int COLS, class Fetch>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t size, const Int8& w, float* found,
                                                    Fetch fetch) {
  constexpr int EACH = sizeof(V) / sizeof(Vec), ALL = COLS * EACH;
  const int64_t K = w.K;
  for (int64_t k = 0, end = std::min(K, SEGMENT); k < K; k = end, end = std::min(K, end + SEGMENT)) {
    Ints<V> exact[ROWS * COLS];
    UNROLLED for (int i = 0; i < ROWS * COLS; i++) exact[i] = Ints<V>{};
    auto step = [&](int64_t at, auto address) __attribute__((always_inline)) {
      Ints<V> column[COLS];
      UNROLLED for (int n = 0; n < COLS; n++)
        column[n] = widened<int8_t>(bytes_of<V>([&](int i) { return address(n * EACH + i, at); }));
      UNROLLED for (int m = 0; m < ROWS; m++) {
        const Ints<V> row = row_integers<V>(x + m * size + at / 2);
        UNROLLED for (int n = 0; n < COLS; n++) {
          multiply_add_integers(exact[m * COLS + n], column[n], row);
          exact[m * COLS + n] = in_register(exact[m * COLS + n]);  // else both steps are added first, and sums spill
        }
      }
    };
    auto weight = [&](int n, int64_t at) { return w.data + n * K + at; };
    int64_t at = k;
    for (; at + 2 * STEP <= end; at += 2 * STEP) {
      fetch(std::integral_constant<int64_t, 2 * STEP>{});
      step(at, weight), step(at + STEP, weight);
    }
    if (at + STEP <= end) step(at, weight), at += STEP;
    if (at < end) {
      int8_t rest[ALL][STEP] = {};
      for (int n = 0; n < ALL; n++) std::memcpy(rest[n], weight(n, at), end - at);
      step(at, [&](int n, int64_t) { return rest[n]; });
    }
    if (k == 0) {
      totals<ROWS * COLS>(exact, found);
    } else {
      float more[ROWS * ALL];
      totals<ROWS * COLS>(exact, more);
      for (int i = 0; i < ROWS * ALL; i++) found[i] += more[i];
    }
  }
}

// The same for blocks of 32 numbers: each adds its scale times its sums and, once per eight blocks, their least numbers
// times the sums of activations.
template <class V, int ROWS, int COLS, class Block, class Fetch>
inline __attribute__((always_inline)) void multiply(const float* x, int64_t size, const Blocked<Block>& w,
                                                    float* found, Fetch fetch) {
  constexpr int EACH = sizeof(V) / sizeof(Vec);
  const int64_t groups = w.row();
  const float* sums = x + sums_place(w.K);
  V sum[ROWS * COLS];
  UNROLLED for (int i = 0; i < ROWS * COLS; i++) sum[i] = V{};
  auto least = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    if constexpr (Block::SHIFTED)
      UNROLLED for (int n = 0; n < COLS; n++) {
        auto of = [&](int i) { return least_of(w.data + (n * EACH + i) * groups + first, count); };
        const V column = side_by_side<V>(of);
        UNROLLED for (int m = 0; m < ROWS; m++)
          multiply_add(sum[m * COLS + n], column, repeated<V>(sums + m * size + first));
      }
  };
  for (int64_t g = 0; g < groups; g++) {
    if (g % VL == 0) fetch(std::integral_constant<int64_t, VL * sizeof(Block)>{});
    Ints<V> column[COLS][2];
    V scale[COLS];
    UNROLLED for (int n = 0; n < COLS; n++) {
      auto block = [&](int i) -> const Block& { return w.data[(n * EACH + i) * groups + g]; };
      numbers_of<V>(block, column[n]);
      scale[n] = scales_of<V>(block);
    }
    UNROLLED for (int m = 0; m < ROWS; m++) {
      const float* row = x + m * size + g * (GROUP / 2);
      const Ints<V> one = row_integers<V>(row), other = row_integers<V>(row + STEP / 2);
      UNROLLED for (int n = 0; n < COLS; n++) {
        Ints<V> exact = {};
        multiply_add_integers(exact, column[n][0], one);
        multiply_add_integers(exact, column[n][1], other);
        multiply_add(sum[m * COLS + n], __builtin_convertvector(exact, V), scale[n]);
        if (ROWS == 1) sum[n] = in_register(sum[n]);  // else all columns are read first, and sums spill
      }
    }
    if (g % VL == VL - 1) least(g - (VL - 1), VL);
  }
  if (const int64_t rest = groups % VL) least(groups - rest, rest);
  totals<ROWS * COLS>(sum, found);
}

}  // namespace paceline
