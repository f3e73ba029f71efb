// A weight matrix in any of its formats: plain numbers, numbers of 8 bits with a scale for each row, or blocks of 32 as in
// GGUF files.
//
// Floats of 16, 32 and 8 bits give STEP numbers of a row at a time as float32, in the order in which `arrange_line`
// puts activations; pairs.h has the alternative for bfloat16, if the processor supports it. Integers and blocks stay
// integers: integers.h has their matmuls.
#pragma once

#include "vectors.h"

namespace paceline [[gnu::visibility("hidden")]] {

constexpr int STEP = 2 * VL;  // numbers of K processed at once

// Eight numbers at `one`, or those and the ones at `other` side by side.
template <class V, class W>
inline V beside_rows(const W* one, const W* other) {
  if constexpr (sizeof(V) == sizeof(Vec)) return load(one);
  else return beside<V>(load(one), load(other));
}

// -------------------------------------------------------------------------------------------------- the plain formats --

// Rows of K numbers, from a row of a matrix on. `spread` is the bytes a STEP of one row takes.
template <class W>
struct Plain {
  const W* data;
  int64_t K;
  static constexpr bool EVEN_FIRST = std::is_same_v<W, BFloat16>;
  static constexpr int64_t SPREAD = STEP * sizeof(W);

  Plain from(int64_t n) const { return {data + n * K, K}; }
  const char* bytes() const { return (const char*)data; }
  float tail(int64_t n, int64_t k) const { return widen(data[n * K + k]); }
  float finished(int64_t, float sum) const { return sum; }

  // Half of the STEP numbers at k, in the order of `arrange_line`, of row n, or of the rows from n on that the columns
  // of a V take. The second half of bfloat16 is the odd numbers.
  template <class V>
  V half(int64_t n, int64_t k, bool second) const {
    const W* p = data + n * K + k;
    if constexpr (EVEN_FIRST) {  // the upper half of a float: even ones shifted up, odd ones masked
      typedef std::conditional_t<sizeof(V) == sizeof(Vec), VecU, WideU> Words;
      const Words both = (Words)beside_rows<V>((const float*)p, (const float*)(p + K));
      return second ? (V)(both & 0xFFFF0000u) : (V)(both << 16);
    } else {
      return beside_rows<V>(p + second * VL, p + K + second * VL);
    }
  }
};

// ---------------------------------------------------------------------------------------------------- sixteen integers --

typedef uint8_t Bytes __attribute__((vector_size(STEP)));
typedef uint8_t WideBytes __attribute__((vector_size(ABREAST * STEP)));

// For one row per column of a V; bytes(i) is the address of row i.
template <class V, class Place>
inline auto bytes_of(Place bytes) {
  Bytes one;
  std::memcpy(&one, bytes(0), sizeof one);
  if constexpr (sizeof(V) == sizeof(Vec)) {
    return one;
  } else {
#ifdef __AVX2__
    const __m128i other = _mm_loadu_si128((const __m128i*)bytes(1));
    return (WideBytes)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)one), other, 1);
#endif
  }
}

// --------------------------------------------------------------------------------------------- int8, a scale for a row --

// A weight is scale * integer. The scale is applied to the sum.
struct Int8 {
  const int8_t* data;
  int64_t K;
  const float* scales;
  static constexpr int64_t SPREAD = STEP;

  Int8 from(int64_t n) const { return {data + n * K, K, scales + n}; }
  const char* bytes() const { return (const char*)data; }
  float scale(int64_t n) const { return scales[n]; }
};

// ---------------------------------------------------------------------------------- floats of 8 bits, a scale for a row --

// A weight is scale * number. The factor that the `load` of vectors.h omits from every number is included in the scale:
// a power of two, so nothing is rounded.
struct Floats8 {
  const Float8E4M3* data;
  int64_t K;
  const float* scales;
  static constexpr int64_t SPREAD = STEP;

  Floats8 from(int64_t n) const { return {data + n * K, K, scales + n}; }
  const char* bytes() const { return (const char*)data; }
  float tail(int64_t n, int64_t k) const { return widen(data[n * K + k]); }
  float finished(int64_t n, float sum) const { return sum * Float8E4M3::UNIT * scales[n]; }
  template <class V>
  V half(int64_t n, int64_t k, bool second) const {
    const Float8E4M3* p = data + n * K + k + second * VL;
    return beside_rows<V>(p, p + K);
  }
};

// -------------------------------------------------------------------------------------------------- blocks of 32 numbers --

constexpr int64_t GROUP = 32;

// Scales and least numbers are bits of float16. Of four bits, the low halves of the bytes are the first sixteen numbers.

// scale * integer of eight bits.
struct BlockQ8_0 {
  uint16_t d;
  uint8_t q[GROUP];
  static constexpr bool SHIFTED = false;
};
// scale * (integer of four bits - 8).
struct BlockQ4_0 {
  uint16_t d;
  uint8_t q[GROUP / 2];
  static constexpr int16_t ZERO = 8;
  static constexpr bool SHIFTED = false;
};
// scale * integer of four bits + the block's least number.
struct BlockQ4_1 {
  uint16_t d, m;
  uint8_t q[GROUP / 2];
  static constexpr int16_t ZERO = 0;
  static constexpr bool SHIFTED = true;
};

// Rows of K / 32 blocks.
template <class Block>
struct Blocked {
  const Block* data;
  int64_t K;
  static constexpr int64_t SPREAD = sizeof(Block) / 2;

  int64_t row() const { return K / GROUP; }
  Blocked from(int64_t n) const { return {data + n * row(), K}; }
  const char* bytes() const { return (const char*)data; }
  float scale(int64_t) const { return 1; }  // blocks have their own
};

// The weights of a matrix in a format; scales of its rows for numbers of 8 bits, else null.
struct Stored {
  const void* data;
  const float* scales;
  int64_t format;
};

// body(rows) for a matrix with rows of K numbers.
template <class Body>
inline void in_format(const Stored& w, int64_t K, Body body) {
  switch (w.format) {
    case FLOAT32: return body(Plain<float>{(const float*)w.data, K});
    case BFLOAT16: return body(Plain<BFloat16>{(const BFloat16*)w.data, K});
    case FLOAT16: return body(Plain<Float16>{(const Float16*)w.data, K});
    case INT8: return body(Int8{(const int8_t*)w.data, K, w.scales});
    case E4M3: return body(Floats8{(const Float8E4M3*)w.data, K, w.scales});
    case Q8_0: return body(Blocked<BlockQ8_0>{(const BlockQ8_0*)w.data, K});
    case Q4_0: return body(Blocked<BlockQ4_0>{(const BlockQ4_0*)w.data, K});
    default: return body(Blocked<BlockQ4_1>{(const BlockQ4_1*)w.data, K});
  }
}

}  // namespace paceline
