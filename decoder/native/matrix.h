// A weight matrix in any of its formats: plain numbers, numbers of 8 bits with a scale for each row, or blocks of 32 as in
// GGUF files.
//
// Every format gives STEP numbers of a row at a time as float32, in the order `arrange_line` gives the activations; what
// bfloat16 does in place of that, where the processor can, is in pairs.h. Blocks are dequantised exactly (a scale of 11 bits
// times at most 8 bits fits float32), so that a product has the bits of the same product with the dequantised matrix in
// float32.
#pragma once

#include "vectors.h"

namespace paceline [[gnu::visibility("hidden")]] {

constexpr int STEP = 2 * VL;  // numbers of K walked at once

// STEP numbers of a weight row, or of several rows side by side, in the order `arrange_line` gives the activations.
template <class V>
struct Pair {
  V first, second;
};

// -------------------------------------------------------------------------------------------------- the plain formats --

// Rows of K numbers, from some row of a matrix on. `spread` is the bytes a STEP of one row takes.
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

  static Pair<Vec> load_pair(const W* p) {
    if constexpr (EVEN_FIRST) {  // the upper half of a float: even ones shifted up, odd ones masked
      VecU both;
      std::memcpy(&both, p, sizeof both);
      return {(Vec)(both << 16), (Vec)(both & 0xFFFF0000u)};
    } else {
      return {load(p), load(p + VL)};
    }
  }
  // Of row n, or of as many rows from it on as a V has columns.
  template <class V>
  Pair<V> pair(int64_t n, int64_t k) const {
    const W* p = data + n * K + k;
    if constexpr (sizeof(V) == sizeof(Vec)) {
      return load_pair(p);
    } else if constexpr (EVEN_FIRST) {
      VecU one, other;
      std::memcpy(&one, p, sizeof one);
      std::memcpy(&other, p + K, sizeof other);
      const WideU both = (WideU)beside<V>((Vec)one, (Vec)other);
      return {(V)(both << 16), (V)(both & 0xFFFF0000u)};
    } else {
      Pair<Vec> one = load_pair(p), other = load_pair(p + K);
      return {beside<V>(one.first, other.first), beside<V>(one.second, other.second)};
    }
  }
};

// ---------------------------------------------------------------------------------------------------- sixteen integers --

typedef int8_t Bytes __attribute__((vector_size(STEP)));
typedef int8_t HalfBytes __attribute__((vector_size(VL)));

inline Bytes load_bytes(const void* p) {
  Bytes b;
  std::memcpy(&b, p, sizeof b);
  return b;
}
inline Pair<Vec> integers(Bytes b) {
  HalfBytes low, high;
  std::memcpy(&low, &b, VL);
  std::memcpy(&high, (const char*)&b + VL, VL);
  return {__builtin_convertvector(low, Vec), __builtin_convertvector(high, Vec)};
}
#if defined(__AVX512F__) && defined(__AVX512DQ__)
// The same of two rows: the first eight of both, then the last eight of both.
inline Pair<Wide> integers(Bytes one, Bytes other) {
  const __m128i low = _mm_unpacklo_epi64((__m128i)one, (__m128i)other);
  const __m128i high = _mm_unpackhi_epi64((__m128i)one, (__m128i)other);
  return {(Wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low)), (Wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high))};
}
#endif
// Of as many rows as a V has columns; `bytes(i)` are those of row i.
template <class V, class Source>
inline Pair<V> integers_of(Source bytes) {
  if constexpr (sizeof(V) == sizeof(Vec)) return integers(bytes(0));
  else return integers(bytes(0), bytes(1));
}
// numbers(i) repeated over the column i of a V.
template <class V, class Numbers>
inline V over_columns(Numbers numbers) {
  if constexpr (sizeof(V) == sizeof(Vec)) return spread<V>(numbers(0));
  else return beside<V>(spread<Vec>(numbers(0)), spread<Vec>(numbers(1)));
}

// --------------------------------------------------------------------------------------------- int8, a scale for a row --

// A weight is scale * integer. The scale is applied to the sum.
struct Int8 {
  const int8_t* data;
  int64_t K;
  const float* scales;
  static constexpr bool EVEN_FIRST = false;
  static constexpr int64_t SPREAD = STEP;

  Int8 from(int64_t n) const { return {data + n * K, K, scales + n}; }
  const char* bytes() const { return (const char*)data; }
  float tail(int64_t n, int64_t k) const { return (float)data[n * K + k]; }
  float finished(int64_t n, float sum) const { return sum * scales[n]; }
  template <class V>
  Pair<V> pair(int64_t n, int64_t k) const {
    return integers_of<V>([&](int i) { return load_bytes(data + (n + i) * K + k); });
  }
};

// ---------------------------------------------------------------------------------- floats of 8 bits, a scale for a row --

// A weight is scale * number. What the `load` of vectors.h leaves out of every number joins the scale: both
// are powers of two, so nothing is rounded.
template <class Float8>
struct Floats8 {
  const Float8* data;
  int64_t K;
  const float* scales;
  static constexpr bool EVEN_FIRST = false;
  static constexpr int64_t SPREAD = STEP;

  Floats8 from(int64_t n) const { return {data + n * K, K, scales + n}; }
  const char* bytes() const { return (const char*)data; }
  float tail(int64_t n, int64_t k) const { return widen(data[n * K + k]); }
  float finished(int64_t n, float sum) const { return sum * Float8::UNIT * scales[n]; }
  template <class V>
  Pair<V> pair(int64_t n, int64_t k) const {
    const Float8* p = data + n * K + k;
    if constexpr (sizeof(V) == sizeof(Vec)) return {load(p), load(p + VL)};
    else return {beside<V>(load(p), load(p + K)), beside<V>(load(p + VL), load(p + K + VL))};
  }
};

// -------------------------------------------------------------------------------------------------- blocks of 32 numbers --

constexpr int64_t GROUP = 32;

inline float from_half(const uint8_t* p) {
  Float16 half;
  std::memcpy(&half, p, sizeof half);
  return (float)half;
}

// scale * integer of eight bits.
struct BlockQ8_0 {
  uint8_t d[2], q[GROUP];
  Bytes numbers(int64_t half) const { return load_bytes(q + half * STEP); }
  float scale() const { return from_half(d); }
  float least() const { return 0; }
  static constexpr bool SHIFTED = false;
};
// scale * (integer of four bits - 8). The low halves of the bytes are the first sixteen numbers.
struct BlockQ4_0 {
  uint8_t d[2], q[GROUP / 2];
  Bytes numbers(int64_t half) const { return nibbles(q, half) - 8; }
  static Bytes nibbles(const uint8_t* q, int64_t half) {
    typedef uint8_t Unsigned __attribute__((vector_size(STEP)));
    Unsigned b;
    std::memcpy(&b, q, sizeof b);
    return (Bytes)(half ? b >> 4 : b & 15);
  }
  float scale() const { return from_half(d); }
  float least() const { return 0; }
  static constexpr bool SHIFTED = false;
};
// scale * integer of four bits + the block's least number.
struct BlockQ4_1 {
  uint8_t d[2], m[2], q[GROUP / 2];
  Bytes numbers(int64_t half) const { return BlockQ4_0::nibbles(q, half); }
  float scale() const { return from_half(d); }
  float least() const { return from_half(m); }
  static constexpr bool SHIFTED = true;
};

// Rows of K / 32 blocks.
template <class Block>
struct Blocked {
  const Block* data;
  int64_t K;
  static constexpr bool EVEN_FIRST = false;
  static constexpr int64_t SPREAD = sizeof(Block) / 2;

  int64_t row() const { return K / GROUP; }
  Blocked from(int64_t n) const { return {data + n * row(), K}; }
  const char* bytes() const { return (const char*)data; }
  float tail(int64_t, int64_t) const { return 0; }  // rows are whole blocks
  float finished(int64_t, float sum) const { return sum; }
  template <class V>
  Pair<V> pair(int64_t n, int64_t k) const {
    const Block* p = data + n * row() + k / GROUP;
    auto block = [&](int i) -> const Block& { return p[i * row()]; };
    Pair<V> found = integers_of<V>([&](int i) { return block(i).numbers(k / STEP % 2); });
    const V scale = over_columns<V>([&](int i) { return block(i).scale(); });
    found.first *= scale, found.second *= scale;
    if constexpr (Block::SHIFTED) {
      const V least = over_columns<V>([&](int i) { return block(i).least(); });
      found.first += least, found.second += least;
    }
    return found;
  }
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
    case E4M3: return body(Floats8<Float8E4M3>{(const Float8E4M3*)w.data, K, w.scales});
    case E5M2: return body(Floats8<Float8E5M2>{(const Float8E5M2*)w.data, K, w.scales});
    case Q8_0: return body(Blocked<BlockQ8_0>{(const BlockQ8_0*)w.data, K});
    case Q4_0: return body(Blocked<BlockQ4_0>{(const BlockQ4_0*)w.data, K});
    default: return body(Blocked<BlockQ4_1>{(const BlockQ4_1*)w.data, K});
  }
}

// A matrix with N rows, and what is added to its product, if anything.
template <class W>
struct Matrix : Stored {
  const W* bias;
  int64_t N;
  float plus(float value, int64_t n) const { return bias ? value + widen(bias[n]) : value; }
};

}  // namespace paceline
