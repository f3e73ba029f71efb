// CPU kernels of a decoder: a product with a weight matrix, attention over cache rows, the law and choice of a token.
//
// The property everything else relies on: a row of the result is computed by the same instructions in the same order
// whatever the number of rows, its place among them, and the number of threads. So one token at a time, a window of
// five and a prompt of 256 give the same bits. Each is tested against plain PyTorch.
//
// Built with -ffp-contract=off except where a fused multiply-add is asked for by name, so that the noise of `choose`
// equals that of paceline.core.noise bit for bit. The stable C interface of AOTInductor is declared by hand: no
// PyTorch header is needed and the file builds in seconds.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <type_traits>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int VL = 8;  // lanes of a vector; fixed, so that every machine sums in the same order
typedef float Vec __attribute__((vector_size(VL * 4)));
typedef int32_t VecI __attribute__((vector_size(VL * 4)));
typedef uint32_t VecU __attribute__((vector_size(VL * 4)));
typedef uint16_t VecH __attribute__((vector_size(VL * 2)));
typedef _Float16 VecF16 __attribute__((vector_size(VL * 2)));

struct BFloat16 {
  uint16_t bits;
};
typedef _Float16 Float16;

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
inline Vec load(const Float16* p) {
#if defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  VecF16 h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, Vec);
#endif
}
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
inline void multiply_add(Vec& sum, Vec a, Vec b) {
#if defined(__AVX2__) && defined(__FMA__)
  sum = (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  for (int i = 0; i < VL; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
#endif
}
inline float total(Vec v) {  // ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))
#ifdef __AVX2__
  __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#endif
}
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline float largest(Vec v) {
  float best = v[0];
  for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
  return best;
}
inline Vec in_register(Vec v) {  // keeps the compiler from loading the same vector again for every use
#ifdef __AVX2__
  asm("" : "+x"(v));
#endif
  return v;
}
inline VecI lanes() { return VecI{0, 1, 2, 3, 4, 5, 6, 7}; }

// ---------------------------------------------------------------------------------------------------------- linear --

constexpr int STEP = 2 * VL;  // numbers of K walked at once

// Two vectors that hold STEP numbers of a weight row between them, in the order `arrange` gives the activations.
struct Pair {
  Vec first, second;
};
template <class W>
inline Pair load_pair(const W* p) {
  return {load(p), load(p + VL)};
}
inline Pair load_pair(const BFloat16* p) {  // a bfloat16 is the upper half of a float: even ones shifted up, odd ones masked
  VecU both;
  std::memcpy(&both, p, sizeof both);
  return {(Vec)(both << 16), (Vec)(both & 0xFFFF0000u)};
}
template <class W>
const float* arrange(const float* x, int64_t, int64_t) {
  return x;
}
template <>
const float* arrange<BFloat16>(const float* x, int64_t M, int64_t K) {  // every STEP: the even ones, then the odd ones
  static thread_local std::vector<float> scratch;
  if ((int64_t)scratch.size() < M * K) scratch.resize(M * K);
  for (int64_t m = 0; m < M; m++) {
    const float* from = x + m * K;
    float* to = scratch.data() + m * K;
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP)
      for (int i = 0; i < VL; i++) to[k + i] = from[k + 2 * i], to[k + VL + i] = from[k + 2 * i + 1];
    std::copy(from + k, from + K, to + k);
  }
  return scratch.data();
}

// ROWS x COLS results at once. One accumulator for each, walked along K: the same arithmetic for every ROWS and COLS.
template <class W, int ROWS, int COLS>
inline void block(const float* x, const W* w, float* out, int64_t K, int64_t N) {
  Vec sum[ROWS][COLS];
  for (int m = 0; m < ROWS; m++)
    for (int n = 0; n < COLS; n++) sum[m][n] = Vec{};
  int64_t k = 0;
  for (; k + STEP <= K; k += STEP) {
    Pair column[COLS];
    for (int n = 0; n < COLS; n++) column[n] = load_pair(w + n * K + k);
    const char* ahead = (const char*)(w + COLS * K + k * COLS) + 1024;  // the next rows lie right behind these
    for (size_t byte = 0; byte < COLS * STEP * sizeof(W); byte += 64) __builtin_prefetch(ahead + byte);
    for (int m = 0; m < ROWS; m++) {
      Vec row = in_register(load(x + m * K + k));
      for (int n = 0; n < COLS; n++) multiply_add(sum[m][n], column[n].first, row);
    }
    for (int m = 0; m < ROWS; m++) {
      Vec row = in_register(load(x + m * K + k + VL));
      for (int n = 0; n < COLS; n++) multiply_add(sum[m][n], column[n].second, row);
    }
  }
  for (int m = 0; m < ROWS; m++)
    for (int n = 0; n < COLS; n++) {
      float value = total(sum[m][n]);
      for (int64_t j = k; j < K; j++) value = __builtin_fmaf(x[m * K + j], widen(w[n * K + j]), value);
      out[m * N + n] = value;
    }
}

template <class W, int COLS>
void columns(const float* x, const W* w, float* out, int64_t M, int64_t K, int64_t N) {
  int64_t m = 0;
  while (m < M) {
    int64_t left = M - m;
    const float* row = x + m * K;
    float* to = out + m * N;
    // Five at a time fill the registers; no small remainder is left over: 6 is 3 + 3, 7 is 4 + 3, 8 is 4 + 4.
    int take = left >= 9 || left == 5 ? 5 : left >= 7 || left == 4 ? 4 : left == 6 ? 3 : (int)left;
    switch (take) {
      case 5: block<W, 5, COLS>(row, w, to, K, N); break;
      case 4: block<W, 4, COLS>(row, w, to, K, N); break;
      case 3: block<W, 3, COLS>(row, w, to, K, N); break;
      case 2: block<W, 2, COLS>(row, w, to, K, N); break;
      default: block<W, 1, COLS>(row, w, to, K, N);
    }
    m += take;
  }
}

template <class W>
void linear(const float* in, const W* w, float* out, int64_t M, int64_t K, int64_t N) {
  const float* x = arrange<W>(in, M, K);
#pragma omp parallel if (M * K * N > 16384)
  {
    int64_t threads = omp_get_num_threads(), me = omp_get_thread_num(), pairs = (N + 1) / 2;
    int64_t n = pairs * me / threads * 2, end = std::min(N, pairs * (me + 1) / threads * 2);
    for (; n + 2 <= end; n += 2) columns<W, 2>(x, w + n * K, out + n, M, K, N);
    for (; n < end; n++) columns<W, 1>(x, w + n * K, out + n, M, K, N);
  }
}

// --------------------------------------------------------------------------------------------------------- softmax --

// exp(x) for x <= 0, by range reduction and a polynomial of degree 6 (coefficients of Cephes' expf). Error 2 ulp.
inline Vec exponential(Vec x) {
  for (int i = 0; i < VL; i++) x[i] = x[i] < -87.0f ? -87.0f : x[i];
  Vec shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits of the mantissa
  Vec n = shifted - 12582912.0f;
  Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = ((((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f) * r) * r + r + 1.0f;
  VecI exponent = ((VecI)shifted - 0x4B400000 + 127) << 23;
  return p * (Vec)exponent;
}

// Turns n scores into weights exp(score - max) and returns 1 / their sum; the buffer is padded to whole vectors.
inline float weigh(float* s, int64_t n) {
  for (int64_t i = n; i < (n + VL - 1) / VL * VL; i++) s[i] = -1e30f;
  Vec tops = load(s);
  for (int64_t i = VL; i < n; i += VL) tops = larger(tops, load(s + i));
  const float best = largest(tops);
  Vec sum = {};
  for (int64_t i = 0; i < n; i += VL) {
    Vec e = exponential(load(s + i) - best);
    if (i + VL > n) e = lanes() < (int32_t)(n - i) ? e : Vec{};
    sum += e;
    std::memcpy(s + i, &e, sizeof e);
  }
  return 1.0f / total(sum);
}

// ---------------------------------------------------------------------------------------------------------- attend --

struct Attend {
  int64_t batch, window, heads, kv_heads, width, rows;  // rows: of the cache, per slot and head
  const int32_t *row, *count, *slots;
  const int32_t* parents;  // of a tree: [batch, window], the row each row of a window hangs on; null for a chain
};

template <class T>
inline Vec part(const T* line, int64_t v, int64_t D) {  // vector v of a line of D numbers, zeros behind its end
  if ((v + 1) * VL <= D) return load(line + v * VL);
  Vec found = {};
  for (int64_t d = v * VL; d < D; d++) found[d - v * VL] = widen(line[d]);
  return found;
}

// For every row of a window that is a tree: the rows from the root down to it.
struct Ways {
  int64_t window = 0;
  std::vector<int32_t> rows, lengths;
  Ways(const int32_t* parents, int64_t T) : window(T) {
    if (!parents) return;
    rows.resize(T * T);
    lengths.resize(T);
    for (int64_t t = 0; t < T; t++) {
      int64_t parent = parents[t], above = parent < 0 ? 0 : lengths[parent];
      if (above) std::copy_n(&rows[parent * T], above, &rows[t * T]);
      rows[t * T + above] = (int32_t)t;
      lengths[t] = (int32_t)above + 1;
    }
  }
  const int32_t* of(int64_t t) const { return &rows[t * window]; }
  int64_t length(int64_t t) const { return lengths[t]; }
};

// QUERIES rows of one key-value head at once: the cache is read and widened once for all of them. Each sum has an
// accumulator of its own, so a row's result does not depend on QUERIES. DEEP = positions or vectors walked abreast.
// In a TREE the rows before the window are common to all; each row then walks its own ancestors (`ways`, window rows
// from the root down) as if they lay behind each other: the arithmetic of a chain, so also its bits.
template <class T, int QUERIES, bool TREE>
void attend_block(const Attend& a, const float* q, const T* keys, const T* values, float* out, int64_t first,
                  int64_t row, float* scratch, const Ways& ways) {
  constexpr int DEEP = QUERIES == 1 ? 4 : QUERIES == 2 ? 4 : 2;
  const int64_t D = a.width, group = a.heads / a.kv_heads, vectors = (D + VL - 1) / VL, padded = vectors * VL;
  const int64_t stride = (a.rows + VL - 1) / VL * VL;
  const float scale = 1.0f / std::sqrt((float)D);
  float *scores = scratch, *query = scores + QUERIES * stride;
  float* to[QUERIES];
  const int32_t* way[QUERIES];
  int64_t seen[QUERIES], longest = 0;
  for (int i = 0; i < QUERIES; i++) {
    int64_t t = (first + i) / group, at = (t * a.heads + (first + i) % group) * D;
    to[i] = out + at;
    way[i] = TREE ? ways.of(t) : nullptr;
    seen[i] = row + (TREE ? ways.length(t) : t + 1);
    longest = TREE ? row : std::max(longest, seen[i]);
    for (int64_t d = 0; d < padded; d++) query[i * padded + d] = d < D ? q[at + d] * scale : 0.0f;
  }
  auto score = [&](auto deep, int64_t p) {
    constexpr int N = decltype(deep)::value;
    Vec sum[N][QUERIES] = {};
    for (int64_t v = 0; v < vectors; v++)
      for (int j = 0; j < N; j++) {
        Vec key = part(keys + (p + j) * D, v, D);
        for (int i = 0; i < QUERIES; i++) multiply_add(sum[j][i], load(query + i * padded + v * VL), key);
      }
    for (int j = 0; j < N; j++)
      for (int i = 0; i < QUERIES; i++) scores[i * stride + p + j] = total(sum[j][i]);
  };
  int64_t p = 0;
  for (; p + DEEP <= longest; p += DEEP) score(std::integral_constant<int, DEEP>{}, p);
  for (; p < longest; p++) score(std::integral_constant<int, 1>{}, p);
  if (TREE)
    for (int i = 0; i < QUERIES; i++)
      for (int64_t at = row; at < seen[i]; at++) {
        Vec sum = {};
        for (int64_t v = 0; v < vectors; v++)
          multiply_add(sum, load(query + i * padded + v * VL), part(keys + (row + way[i][at - row]) * D, v, D));
        scores[i * stride + at] = total(sum);
      }
  float inverse[QUERIES];
  for (int i = 0; i < QUERIES; i++) {
    inverse[i] = weigh(scores + i * stride, seen[i]);
    // A key behind a row's own weighs nothing; adding 0 * value changes no bit of a sum of finite numbers.
    for (int64_t later = seen[i]; later < longest; later++) scores[i * stride + later] = 0.0f;
  }
  auto mix_values = [&](auto deep, int64_t v) {
    constexpr int N = decltype(deep)::value;
    Vec sum[N][QUERIES] = {};
    for (int64_t at = 0; at < longest; at++)
      for (int j = 0; j < N; j++) {
        Vec value = part(values + at * D, v + j, D);
        for (int i = 0; i < QUERIES; i++) multiply_add(sum[j][i], value, Vec{} + scores[i * stride + at]);
      }
    if (TREE)
      for (int i = 0; i < QUERIES; i++)
        for (int64_t at = row; at < seen[i]; at++)
          for (int j = 0; j < N; j++)
            multiply_add(sum[j][i], part(values + (row + way[i][at - row]) * D, v + j, D),
                         Vec{} + scores[i * stride + at]);
    for (int j = 0; j < N; j++)
      for (int i = 0; i < QUERIES; i++)
        for (int64_t d = 0; d < VL && (v + j) * VL + d < D; d++) to[i][(v + j) * VL + d] = sum[j][i][d] * inverse[i];
  };
  int64_t v = 0;
  for (; v + DEEP <= vectors; v += DEEP) mix_values(std::integral_constant<int, DEEP>{}, v);
  for (; v < vectors; v++) mix_values(std::integral_constant<int, 1>{}, v);
}

template <class T, bool TREE>
void attend(const Attend& a, const float* q, const float* k, const float* v, T* keys, T* values, float* out) {
  const int64_t D = a.width, group = a.heads / a.kv_heads;
  const int64_t stride = (a.rows + VL - 1) / VL * VL, padded = (D + VL - 1) / VL * VL;
#pragma omp parallel for collapse(2) schedule(static) if (a.batch * a.heads * a.window * a.rows > 2048)
  for (int64_t b = 0; b < a.batch; b++)
    for (int64_t g = 0; g < a.kv_heads; g++) {
      static thread_local std::vector<float> scratch;
      size_t need = 4 * stride + 4 * padded;
      if (scratch.size() < need) scratch.resize(need);
      int64_t base = ((int64_t)a.slots[b] * a.kv_heads + g) * a.rows * D;
      int64_t n = std::min<int64_t>(a.count[b], a.window), row = a.row[b];
      for (int64_t t = 0; t < n; t++) {
        int64_t from = ((b * a.window + t) * a.kv_heads + g) * D;
        for (int64_t d = 0; d < D; d++) {
          narrow(keys + base + (row + t) * D + d, k[from + d]);
          narrow(values + base + (row + t) * D + d, v[from + d]);
        }
      }
      const Ways ways(TREE ? a.parents + b * a.window : nullptr, a.window);
      int64_t start = (b * a.window * a.heads + g * group) * D;
      for (int64_t first = 0, left = n * group; left > 0;) {
        const int64_t take = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        auto block = take == 4   ? attend_block<T, 4, TREE>
                     : take == 2 ? attend_block<T, 2, TREE>
                                 : attend_block<T, 1, TREE>;
        block(a, q + start, keys + base, values + base, out + start, first, row, scratch.data(), ways);
        first += take, left -= take;
      }
      for (int64_t t = n; t < a.window; t++)
        std::fill(out + start + t * a.heads * D, out + start + (t * a.heads + group) * D, 0.0f);
    }
}

template <class T>
void attend(const Attend& a, const float* q, const float* k, const float* v, T* keys, T* values, float* out) {
  if (a.parents) attend<T, true>(a, q, k, v, keys, values, out);
  else attend<T, false>(a, q, k, v, keys, values, out);
}

// Moves the rows of an accepted path behind the root. They ascend, so none is overwritten before it is read.
void keep(char* cache, const int32_t* row, const int32_t* path, const int32_t* slots, int32_t* moved,
          const int64_t* sizes) {
  const int64_t batch = sizes[0], depth = sizes[1], heads = sizes[2], rows = sizes[3], bytes = sizes[4];
  std::fill(moved, moved + batch, 0);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < depth && path[b * depth + i] >= 0; i++) {
      if (path[b * depth + i] == i + 1) continue;
      moved[b]++;
      for (int64_t g = 0; g < heads; g++) {
        char* line = cache + (((int64_t)slots[b] * heads + g) * rows + row[b]) * bytes;
        std::memcpy(line + (i + 1) * bytes, line + path[b * depth + i] * bytes, bytes);
      }
    }
}

// ---------------------------------------------------------------------------------------------------------- choose --

// The tables of paceline.core.noise.log_table, handed over once when the library is loaded.
const int32_t* noise_table = nullptr;
constexpr int CELLS = 2048;
constexpr int32_t LN2 = 11629080;
constexpr uint32_t GOLDEN = 0x9E3779B9u, STREAM = 0x6C8E9CF5u, ROW = 0x2545F491u;

template <class U>
inline U mix(U x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
inline VecI look_up(VecI cell) {
#ifdef __AVX2__
  return (VecI)_mm256_i32gather_epi32(noise_table, (__m256i)cell, 4);
#else
  VecI found;
  for (int i = 0; i < VL; i++) found[i] = noise_table[cell[i]];
  return found;
#endif
}
inline VecI interpolate(VecI cell, VecI part) {
  VecI left = look_up(cell);
  return left + (((look_up(cell + 1) - left) * part) >> 12);
}
inline VecI log_fixed(Vec x) {
  VecI word = (VecI)x;
  return ((word >> 23) - 127) * LN2 + interpolate((word >> 12) & (CELLS - 1), word & 0xFFF);
}
inline Vec to_float(VecI x) { return __builtin_convertvector(x, Vec); }

// The same steps as paceline.core.noise.gumbel_of_bits.
inline Vec gumbel(VecU bits) {
  VecI upper = (VecI)bits < 0;  // all ones or zero
  VecU folded = bits ^ (VecU)upper;
  Vec small = to_float((VecI)(folded >> 16)) * 0x1p-16f + (to_float((VecI)(folded & 0xFFFFu)) + 0.5f) * 0x1p-32f;
  VecI first = log_fixed(small);
  VecI rest = interpolate((VecI)((folded >> 20) & (CELLS - 1)) + CELLS + 1, (VecI)((folded >> 8) & 0xFFFu));
  VecI inner = log_fixed(larger(to_float(first) * -0x1p-24f, Vec{} + 0x1p-24f));
  return to_float(upper ? -inner : -first - rest) * 0x1p-24f;
}

inline int32_t ordered(float x) {
  int32_t word;
  x += 0.0f;
  std::memcpy(&word, &x, 4);
  return word < 0 ? word ^ 0x7FFFFFFF : word;
}

// The largest edge for which the weights of all entries at or above it reach `target`; without weights they count 1.
int32_t search(const int32_t* order, const float* weights, int64_t V, float target) {
  auto enough = [&](int32_t trial) {
    Vec sum = {};
    for (int64_t i = 0; i < V; i += VL) {
      VecI line;
      std::memcpy(&line, order + i, sizeof line);
      sum += line >= trial ? (weights ? load(weights + i) : Vec{} + 1.0f) : Vec{};
    }
    return total(sum) >= target;
  };
  int32_t edge = enough(0) ? 0 : INT32_MIN;
  for (int bit = 30; bit >= 0; bit--)
    if (enough(edge + (1 << bit))) edge += 1 << bit;
  return edge;
}

constexpr float NEGATIVE = -1.0e30f;

void softmax(const float* scores, float* weights, int64_t V) {
  std::copy(scores, scores + V, weights);
  weigh(weights, V);  // zeros behind the end
  Vec sum = {};
  for (int64_t i = 0; i < V; i += VL) sum += load(weights + i);
  const float all = total(sum);  // divided by, as PyTorch does: equal logits must give the same bits
  for (int64_t i = 0; i < V; i++) weights[i] /= all;
}

// Top-k, top-p and min-p on tempered logits, as paceline.core.law.filtered.
void filter(float* s, int64_t V, float top_k, float top_p, float min_p, std::vector<float>& weights,
            std::vector<int32_t>& order) {
  weights.resize(V + VL);
  order.assign(V + VL, INT32_MIN);  // behind the end: below every edge that is ever tried
  if (top_k > 0 && top_k < (float)V) {
    for (int64_t i = 0; i < V; i++) order[i] = ordered(s[i]);
    int32_t edge = search(order.data(), nullptr, V, top_k);
    float room = top_k;
    for (int64_t i = 0; i < V; i++) room -= order[i] > edge;
    for (int64_t i = 0; i < V; i++)
      if (order[i] < edge || (order[i] == edge && room-- < 1)) s[i] = NEGATIVE;
  }
  if (top_p < 1) {
    softmax(s, weights.data(), V);
    for (int64_t i = 0; i < V; i++) order[i] = ordered(weights[i]);
    int32_t edge = search(order.data(), weights.data(), V, top_p);
    float before = 0, rank = 0;
    for (int64_t i = 0; i < V; i++) before += order[i] > edge ? weights[i] : 0.0f;
    for (int64_t i = 0; i < V; i++) {
      if (order[i] > edge) continue;
      bool kept = order[i] == edge && before + rank++ * weights[i] < top_p;
      if (!kept) s[i] = NEGATIVE;
    }
  }
  if (min_p > 0) {
    softmax(s, weights.data(), V);
    float floor = min_p * *std::max_element(weights.begin(), weights.begin() + V);
    for (int64_t i = 0; i < V; i++)
      if (weights[i] < floor) s[i] = NEGATIVE;
  }
}

int32_t argmax(const float* s, int64_t V) {
  Vec tops = Vec{} + s[0];
  int64_t i = 0;
  for (; i + VL <= V; i += VL) tops = larger(load(s + i), tops);
  float best = largest(tops);
  for (; i < V; i++) best = s[i] > best ? s[i] : best;
  for (i = 0; i + VL <= V; i += VL) {
    VecI same = load(s + i) == best;
    int64_t any = 0;
    for (int j = 0; j < VL; j++) any |= same[j];
    if (any) break;
  }
  for (; i < V; i++)
    if (s[i] == best) return (int32_t)i;
  return (int32_t)V - 1;  // not a number anywhere: stay a legal id
}

struct Choose {
  int64_t batch, window, vocabulary, stream;
  const float *logits, *knobs;
  const int32_t *positions, *keys;
};

void choose(const Choose& c, int32_t* out) {
  const int64_t V = c.vocabulary;
#pragma omp parallel for schedule(static) if (c.batch * c.window * V > 16384)
  for (int64_t i = 0; i < c.batch * c.window; i++) {
    const float *logits = c.logits + i * V, *knobs = c.knobs + i / c.window * 4;
    if (knobs[0] <= 0) {  // one-hot: no filter removes the largest logit
      out[i] = argmax(logits, V);
      continue;
    }
    static thread_local std::vector<float> scores, weights;
    static thread_local std::vector<int32_t> order;
    scores.resize(V + VL);
    for (int64_t v = 0; v < V; v++) scores[v] = logits[v] / knobs[0];
    filter(scores.data(), V, knobs[1], knobs[2], knobs[3], weights, order);
    uint32_t low = c.keys[i / c.window * 2], high = c.keys[i / c.window * 2 + 1];
    uint32_t key = mix(mix(low ^ ROW) + (uint32_t)c.positions[i] * GOLDEN);
    key = mix((key ^ high) + (uint32_t)c.stream * STREAM);
    uint32_t second = mix(key ^ GOLDEN);
    for (int64_t v = 0; v < V; v += VL) {
      Vec drawn = load(scores.data() + v) + gumbel(mix(mix(((VecU)lanes() + (uint32_t)v) * GOLDEN + key) ^ second));
      std::memcpy(scores.data() + v, &drawn, sizeof drawn);
    }
    out[i] = argmax(scores.data(), V);
  }
}

// The filtered law of every row, as paceline.core.law.probabilities; what weighs less than exp(-87) of the most is zero.
void law(const float* logits, const float* knobs, float* out, int64_t batch, int64_t window, int64_t V) {
#pragma omp parallel for schedule(static) if (batch * window * V > 16384)
  for (int64_t i = 0; i < batch * window; i++) {
    const float *line = logits + i * V, *knob = knobs + i / window * 4;
    float* to = out + i * V;
    if (knob[0] <= 0) {
      std::fill(to, to + V, 0.0f);
      to[argmax(line, V)] = 1.0f;
      continue;
    }
    static thread_local std::vector<float> scores, weights;
    static thread_local std::vector<int32_t> order;
    scores.resize(V + VL);
    for (int64_t v = 0; v < V; v++) scores[v] = line[v] / knob[0];
    filter(scores.data(), V, knob[1], knob[2], knob[3], weights, order);
    weights.resize(V + VL);
    softmax(scores.data(), weights.data(), V);
    const float least = *std::max_element(scores.begin(), scores.begin() + V) - 87.0f;
    for (int64_t v = 0; v < V; v++) to[v] = scores[v] < least ? 0.0f : weights[v];
  }
}

}  // namespace

// ----------------------------------------------------------------------------------------------- plain C entry points --
// dtype of weights and caches: 0 float32, 1 bfloat16, 2 float16. Activations are float32.

extern "C" void paceline_linear(const float* x, const void* w, float* out, int64_t M, int64_t K, int64_t N,
                                int64_t dtype) {
  if (dtype == 0) linear(x, (const float*)w, out, M, K, N);
  else if (dtype == 1) linear(x, (const BFloat16*)w, out, M, K, N);
  else linear(x, (const Float16*)w, out, M, K, N);
}

// Lines of T rows of which only the first count[b] are real; the others become zero.
extern "C" void paceline_linear_real(const float* x, const void* w, float* out, const int32_t* count, int64_t lines,
                                     int64_t T, int64_t K, int64_t N, int64_t dtype) {
  for (int64_t b = 0; b < lines; b++) {
    const int64_t real = std::min<int64_t>(count[b], T);
    paceline_linear(x + b * T * K, w, out + b * T * N, real, K, N, dtype);
    std::fill(out + (b * T + real) * N, out + (b + 1) * T * N, 0.0f);
  }
}

extern "C" void paceline_attend(const float* q, const float* k, const float* v, void* keys, void* values, float* out,
                                const int32_t* row, const int32_t* count, const int32_t* slots,
                                const int32_t* parents, const int64_t* sizes, int64_t dtype) {
  Attend a{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], row, count, slots, parents};
  if (dtype == 0) attend(a, q, k, v, (float*)keys, (float*)values, out);
  else if (dtype == 1) attend(a, q, k, v, (BFloat16*)keys, (BFloat16*)values, out);
  else attend(a, q, k, v, (Float16*)keys, (Float16*)values, out);
}

// sizes: slots, depth, heads, rows, bytes of a row
extern "C" void paceline_keep(void* keys, void* values, const int32_t* row, const int32_t* path, const int32_t* slots,
                              int32_t* moved, const int64_t* sizes) {
  keep((char*)keys, row, path, slots, moved, sizes);
  keep((char*)values, row, path, slots, moved, sizes);
}

extern "C" void paceline_choose(const float* logits, const int32_t* positions, const float* knobs, const int32_t* keys,
                                int32_t* out, int64_t batch, int64_t window, int64_t vocabulary, int64_t stream) {
  choose(Choose{batch, window, vocabulary, stream, logits, knobs, positions, keys}, out);
}

extern "C" void paceline_law(const float* logits, const float* knobs, float* out, int64_t batch, int64_t window,
                             int64_t vocabulary) {
  law(logits, knobs, out, batch, window, vocabulary);
}

extern "C" void paceline_set_noise_table(const int32_t* table) { noise_table = table; }

// ------------------------------------------------------------------------------------- entry points of compiled graphs --

typedef struct AtenTensorOpaque* Handle;
extern "C" {
int32_t aoti_torch_get_data_ptr(Handle, void**);
int32_t aoti_torch_get_sizes(Handle, int64_t**);
int32_t aoti_torch_get_dim(Handle, int64_t*);
int32_t aoti_torch_get_dtype(Handle, int32_t*);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_device_type_cpu();
}

namespace {

template <class T>
T* data(Handle handle) {
  void* pointer = nullptr;
  aoti_torch_get_data_ptr(handle, &pointer);
  return (T*)pointer;
}
const int64_t* sizes(Handle handle) {
  int64_t* found = nullptr;
  aoti_torch_get_sizes(handle, &found);
  return found;
}
int64_t code(int32_t dtype) {
  return dtype == aoti_torch_dtype_float32() ? 0 : dtype == aoti_torch_dtype_bfloat16() ? 1 : 2;
}
int32_t dtype_of(Handle handle) {
  int32_t dtype = 0;
  aoti_torch_get_dtype(handle, &dtype);
  return dtype;
}
Handle empty(int64_t dim, const int64_t* shape, int32_t dtype) {
  int64_t strides[4] = {1, 1, 1, 1};
  for (int64_t i = dim - 2; i >= 0; i--) strides[i] = strides[i + 1] * shape[i + 1];
  Handle made = nullptr;
  aoti_torch_empty_strided(dim, shape, strides, dtype, aoti_torch_device_type_cpu(), 0, &made);
  return made;
}

}  // namespace

extern "C" int32_t aoti_torch_cpu_row_linear(Handle x, Handle w, Handle* ret) {
  int64_t dim = 0, shape[4], M = 1;
  aoti_torch_get_dim(x, &dim);
  for (int64_t i = 0; i < dim; i++) shape[i] = sizes(x)[i];
  int64_t K = shape[dim - 1], N = sizes(w)[0];
  for (int64_t i = 0; i < dim - 1; i++) M *= shape[i];
  shape[dim - 1] = N;
  *ret = empty(dim, shape, aoti_torch_dtype_float32());
  paceline_linear(data<float>(x), data<void>(w), data<float>(*ret), M, K, N, code(dtype_of(w)));
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_linear_real(Handle x, Handle w, Handle count, Handle* ret) {
  const int64_t *s = sizes(x), N = sizes(w)[0], shape[3] = {s[0], s[1], N};
  *ret = empty(3, shape, aoti_torch_dtype_float32());
  paceline_linear_real(data<float>(x), data<void>(w), data<float>(*ret), data<int32_t>(count), s[0], s[1], s[2], N,
                       code(dtype_of(w)));
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_attend_tree(Handle q, Handle k, Handle v, Handle keys, Handle values, Handle row,
                                                  Handle count, Handle slots, Handle parents, Handle* ret) {
  const int64_t* s = sizes(q);
  int64_t shape[3] = {s[0], s[1], s[2] * s[3]};
  int64_t all[6] = {s[0], s[1], s[2], sizes(k)[2], s[3], sizes(keys)[2]};
  *ret = empty(3, shape, aoti_torch_dtype_float32());
  paceline_attend(data<float>(q), data<float>(k), data<float>(v), data<void>(keys), data<void>(values),
                  data<float>(*ret), data<int32_t>(row), data<int32_t>(count), data<int32_t>(slots),
                  parents ? data<int32_t>(parents) : nullptr, all, code(dtype_of(keys)));
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_attend(Handle q, Handle k, Handle v, Handle keys, Handle values, Handle row,
                                             Handle count, Handle slots, Handle* ret) {
  return aoti_torch_cpu_row_attend_tree(q, k, v, keys, values, row, count, slots, nullptr, ret);
}

extern "C" int32_t aoti_torch_cpu_row_keep(Handle keys, Handle values, Handle row, Handle path, Handle slots,
                                           Handle* ret) {
  const int64_t *p = sizes(path), *c = sizes(keys), bytes = dtype_of(keys) == aoti_torch_dtype_float32() ? 4 : 2;
  int64_t all[5] = {p[0], p[1], c[1], c[2], c[3] * bytes};
  *ret = empty(1, p, aoti_torch_dtype_int32());
  paceline_keep(data<void>(keys), data<void>(values), data<int32_t>(row), data<int32_t>(path), data<int32_t>(slots),
                data<int32_t>(*ret), all);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_choose(Handle logits, Handle positions, Handle knobs, Handle keys, int64_t stream,
                                             Handle* ret) {
  const int64_t* s = sizes(logits);
  *ret = empty(2, s, aoti_torch_dtype_int32());
  paceline_choose(data<float>(logits), data<int32_t>(positions), data<float>(knobs), data<int32_t>(keys),
                  data<int32_t>(*ret), s[0], s[1], s[2], stream);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_law(Handle logits, Handle knobs, Handle* ret) {
  const int64_t* s = sizes(logits);
  *ret = empty(3, s, aoti_torch_dtype_float32());
  paceline_law(data<float>(logits), data<float>(knobs), data<float>(*ret), s[0], s[1], s[2]);
  return 0;
}
