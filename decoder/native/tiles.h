// Matmuls with int8 weights by AMX: one instruction multiplies a tile of 16 rows of 64 numbers of 8 bits by 16 columns.
//
// A tile of weights is read as it is stored. An activation of 15 bits is 256 * high + low, both signed and of 8 bits; a
// tile of activations has those of eight lines, two columns for each. All sums are exact, so 256 * that of high + that
// of low is the sum of integers.h, and a matmul with or without tiles has the same bits.
#pragma once

#include "integers.h"

#if defined(__AMX_INT8__) && defined(__linux__) && defined(__AVX512F__) && defined(__AVX512DQ__)
#define PACELINE_TILES 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paceline [[gnu::visibility("hidden")]] {

// Whether the processor has AMX for 8 bits, and Linux lets this process use it.
#ifdef PACELINE_TILES
inline bool tiles() {
  static const bool found = [] {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return found;
}
#else
constexpr bool tiles() { return false; }
#endif

// Lines of activations from `first` on, of `count` that a matmul has.
struct Prepared {
  const float* data;
  int64_t first, count;

  Prepared from(int64_t m) const { return {data, first + m, count}; }
};

// The layout for tiles: of every four numbers of K the units of all lines, four high and four low parts each; then the
// lines' scales. A tile reads the units of any eight consecutive lines: those after the last are read, too.
constexpr int64_t TILE = 64, QUAD = 4, TOGETHER = 8;  // numbers of K, of a unit; lines
// A few lines stay vectors: their weights arrive from memory no faster.
inline bool tiled(int64_t format, int64_t count) { return format == INT8 && count > 4 && tiles(); }
// Bytes of a QUAD: an odd number of cache lines, which rows of a tile would else evict from level 1.
inline int64_t quad_bytes(int64_t count) { return ((count + TOGETHER - 1) / TOGETHER | 1) * TOGETHER * 2 * QUAD; }
inline int64_t tiled_scales(int64_t count, int64_t K) {  // their place, in float32
  return (K + TILE - 1) / TILE * TILE / QUAD * quad_bytes(count) / (int64_t)sizeof(float);
}
inline int64_t tiled_size(int64_t count, int64_t K) { return tiled_scales(count, K) + count + 2 * TOGETHER; }

// Writes line m, a row of integers and its scale.
inline void tiled_line(const float* line, float* to, int64_t m, int64_t count, int64_t K) {
  typedef int16_t Shorts __attribute__((vector_size(2 * STEP)));
  typedef int8_t Halves __attribute__((vector_size(STEP)));
  const int64_t stride = quad_bytes(count);
  char* unit = (char*)to + m * 2 * QUAD;
  for (int64_t k = 0; k < K; k += STEP) {
    Shorts some;
    std::memcpy(&some, (const int16_t*)line + k, sizeof some);
    const Halves high = __builtin_convertvector((some + 128) >> 8, Halves), low = __builtin_convertvector(some, Halves);
    UNROLLED for (int i = 0; i < STEP; i += QUAD, unit += stride) {
      std::memcpy(unit, (const char*)&high + i, QUAD);
      std::memcpy(unit + QUAD, (const char*)&low + i, QUAD);
    }
  }
  to[tiled_scales(count, K) + m] = line[integer_words(K)];
}

#ifdef PACELINE_TILES
constexpr int TILE_ROWS = 16;

// During its lifetime its thread's tiles have 16 rows of 64 bytes; no other code finds them in use.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
      uint8_t rows[16] = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS};
    } const shape;
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// gcc's intrinsics take no template's number.
template <int T>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "n"(T));
}
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "n"(T) : "memory");
}
template <int T>
inline void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"((int64_t)TILE), "n"(T) : "memory");
}
template <int SUM, int A, int B>
inline void multiply_add_tiles() {  // of signed numbers
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(SUM), "n"(A), "n"(B));
}
// body(i) for i from 0 to N - 1, known when compiled.
template <int N, class Body>
inline __attribute__((always_inline)) void each(Body body) {
  if constexpr (N > 0) each<N - 1>(body), body(std::integral_constant<int, N - 1>{});
}

// Sixteen rows of weights from `at` on; results are wanted of those in `wanted`, a bit each.
struct TileRows {
  int64_t at;
  __mmask16 wanted;

  // The sixteen from n on, or earlier ones if `end` is nearer: none after it is read.
  TileRows(int64_t n, int64_t end) : at(std::max<int64_t>(0, std::min(n, end - TILE_ROWS))) {
    const int64_t last = std::min<int64_t>(end - at, TILE_ROWS);
    wanted = (__mmask16)((1u << last) - (1u << (n - at)));
  }
};

// Transposes two matrices [8, 8], the halves of these registers.
inline void transpose_halves(Wide (&v)[VL]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
  UNROLLED for (int round = 0; round < 3; round++) {
    Wide next[VL];
    UNROLLED for (int i = 0; i < VL / 2; i++) {
      next[2 * i] = (Wide)_mm512_permutex2var_ps((__m512)v[i], low, (__m512)v[i + VL / 2]);
      next[2 * i + 1] = (Wide)_mm512_permutex2var_ps((__m512)v[i], high, (__m512)v[i + VL / 2]);
    }
    std::memcpy(v, next, sizeof next);
  }
}

// to [lines, stride] = results of ACROSS * 16 rows of weights from n on, but none from `end` on, for GROUPS * 8 lines
// from m on, of which `lines` are wanted.
template <int ACROSS, int GROUPS>
__attribute__((noinline)) void tile_block(const Prepared& x, int64_t m, int64_t lines, const Int8& w, int64_t n,
                                          int64_t end, float* to, int64_t stride) {
  constexpr int SUMS = ACROSS * GROUPS, A = SUMS, B = 8 - GROUPS;  // tiles: sums, weights, activations
  static_assert(ACROSS <= 2 && A + ACROSS <= B && SEGMENT % TILE == 0);
  const int64_t K = w.K, quad = quad_bytes(x.count);
  const char* units = (const char*)x.data + (x.first + m) * 2 * QUAD;
  const float* scales = x.data + tiled_scales(x.count, K) + x.first + m;
  const char* ahead = (const char*)w.data + (n + TILE_ROWS * ACROSS) * K;  // the next block: see `block`
  const bool fetch = m == 0;
  const TileRows rows[] = {{n, end}, {n + TILE_ROWS, end}};
  Wide found[SUMS][VL];  // [rows i and i + 8] of eight lines
  for (int64_t begin = 0; begin < K; begin += SEGMENT) {
    each<SUMS>([](auto sum) { clear_tile<sum>(); });
    for (int64_t k = begin; k < std::min(K, begin + SEGMENT); k += TILE) {
      each<GROUPS>([&](auto g) { load_tile<B + g>(units + k / QUAD * quad + g * TILE, quad); });
      each<ACROSS>([&](auto a) {
        constexpr int WEIGHTS = A + a;
        const int64_t at = rows[a].at;
        const int8_t* from = w.data + at * K + k;
        if (fetch)
          UNROLLED for (int i = 0; i < TILE_ROWS; i++, ahead += TILE) __builtin_prefetch(ahead, 0, 2);
        if (k + TILE <= K && at + TILE_ROWS <= end) {
          load_tile<WEIGHTS>(from, K);
        } else {  // zeros after the matrix
          int8_t part[TILE_ROWS * TILE] = {};
          for (int64_t i = 0; i < std::min<int64_t>(TILE_ROWS, end - at); i++)
            std::memcpy(part + i * TILE, from + i * K, std::min(TILE, K - k));
          load_tile<WEIGHTS>(part, TILE);
        }
        each<GROUPS>([&](auto g) { multiply_add_tiles<a * GROUPS + g, WEIGHTS, B + g>(); });
      });
    }
    alignas(64) WideI sums[SUMS][TILE_ROWS];
    each<SUMS>([&](auto sum) { store_tile<sum>(sums[sum]); });
    const __m512i high = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i low = _mm512_add_epi32(high, _mm512_set1_epi32(1));
    UNROLLED for (int sum = 0; sum < SUMS; sum++)
      UNROLLED for (int i = 0; i < VL; i++) {
        const __m512i one = (__m512i)sums[sum][i], other = (__m512i)sums[sum][i + VL];
        const __m512i upper = _mm512_slli_epi32(_mm512_permutex2var_epi32(one, high, other), 8);
        const __m512i exact = _mm512_add_epi32(upper, _mm512_permutex2var_epi32(one, low, other));
        const Wide more = (Wide)_mm512_cvtepi32_ps(exact);
        found[sum][i] = begin ? found[sum][i] + more : more;
      }
  }
  UNROLLED for (int a = 0; a < ACROSS; a++)
    UNROLLED for (int g = 0; g < GROUPS; g++) {
      Wide(&of)[VL] = found[a * GROUPS + g];
      const Wide own = repeated<Wide>(scales + g * TOGETHER);
      UNROLLED for (int i = 0; i < VL; i++) of[i] *= own;
      transpose_halves(of);
      const auto [at, wanted] = rows[a];
      const Wide scale = (Wide)_mm512_maskz_loadu_ps(wanted, w.scales + at);
      for (int i = 0; i < std::min<int64_t>(TOGETHER, lines - g * TOGETHER); i++)
        _mm512_mask_storeu_ps(to + (g * TOGETHER + i) * stride + at - n, wanted, (__m512)(of[i] * scale));
    }
}

// `product` of such lines.
inline void tiled_product(const Prepared& x, const Int8& w, int64_t M, int64_t begin, int64_t end, float* to,
                          int64_t stride) {
  const Tiles configured;
  for (int64_t n = begin; n < end; n += 2 * TILE_ROWS)
    for (int64_t m = 0; m < M; m += 2 * TOGETHER) {
      auto some = [&](auto block) { block(x, m, M - m, w, n, end, to + m * stride + n - begin, stride); };
      if (end - n > TILE_ROWS) M - m > TOGETHER ? some(tile_block<2, 2>) : some(tile_block<2, 1>);
      else M - m > TOGETHER ? some(tile_block<1, 2>) : some(tile_block<1, 1>);
    }
}
#endif

}  // namespace paceline
