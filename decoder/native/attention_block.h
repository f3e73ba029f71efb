// Attention of one group of heads in one batch row, for every type of cache. Included by files that are compiled in
// parallel, each for some of these types.
#pragma once

#include <type_traits>

#include "attention.h"
#include "softmax.h"

namespace paceline [[gnu::visibility("hidden")]] {

// Scores of positions `from` to the token's own, the last before `seen`: capped, then reduced by distance.
inline void bend(const Attend& a, float* scores, int64_t from, int64_t seen, int64_t head) {
  if (a.cap != 0)
    for (int64_t at = from; at < seen; at++) scores[at] = a.cap * std::tanh(scores[at] / a.cap);
  if (a.slopes)
    for (int64_t at = from; at < seen; at++) scores[at] += a.slopes[head] * (float)(at - (seen - 1));
}

// Vector v of a line of D numbers, zeros after its end.
template <class T>
inline Vec part(const T* line, int64_t v, int64_t D) {
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

constexpr int64_t SOON = 2048;  // bytes of keys

// QUERIES rows of one key-value head at once, of a window of n real rows: the cache is read and widened once for all of them. Each sum has a
// separate accumulator, so a row's result does not depend on QUERIES. DEEP positions or BROAD vectors are processed
// together. In a tree the rows before the window are common to all; each row then walks its own ancestors (`ways`,
// window rows from the root down) as if they were consecutive: the arithmetic of a chain, and so the same bits. The
// scale of a key of 8 bits is applied to its score, that of a value to its weight, once the weights are summed.
template <class T, int QUERIES>
void attend_block(const Attend& a, const Heads& h, const T* keys, const T* values, int64_t first, int64_t row,
                  int64_t n, float* scratch, const Ways& ways) {
  constexpr int DEEP = ABREAST * (QUERIES == 4 ? 2 : 4), BROAD = QUERIES == 4 ? 2 * ABREAST : 4;
  const bool tree = a.parents;
  const int64_t D = a.width, group = a.group(), whole = D / VL, vectors = (D + VL - 1) / VL, padded = vectors * VL;
  const int64_t stride = a.stride(), step = row_step<T>(D);
  const float scale = 1.0f / std::sqrt((float)D);
  float *scores = scratch, *query = scores + QUERIES * stride;
  float* to[QUERIES];
  const int32_t* way[QUERIES];
  int64_t seen[QUERIES], reached[QUERIES], longest = 0, start = a.rows;
  for (int i = 0; i < QUERIES; i++) {
    int64_t t = (first + i) / group, head = (first + i) % group * D;
    const float* from = h.q + t * h.q_step + head;
    to[i] = h.out + t * h.out_step + head;
    way[i] = tree ? ways.of(t) : nullptr;
    seen[i] = row + (tree ? ways.length(t) : a.both_ways ? n : t + 1);
    reached[i] = a.first(a.both_ways ? row + t + 1 : seen[i]);
    longest = tree ? row : std::max(longest, seen[i]);
    start = std::min(start, reached[i]);
    for (int64_t d = 0; d < padded; d++) query[i * padded + d] = d < D ? from[d] * scale : 0.0f;
  }
  // Of the N positions from p on.
  auto score = [&](auto deep, int64_t p) {
    constexpr int N = decltype(deep)::value;
    using V = std::conditional_t<N % ABREAST == 0, Wide, Vec>;
    constexpr int EACH = sizeof(V) / sizeof(Vec), WIDES = N / EACH;
    if (first == 0)  // the first to read these cache lines; values are read after all scores
      for (int64_t byte = 0; byte < N * step * (int64_t)sizeof(T); byte += 64) {
        __builtin_prefetch((const char*)(keys + p * step) + byte + SOON);
        __builtin_prefetch((const char*)(values + p * step) + byte);
      }
    V sum[QUERIES * WIDES], key[WIDES];
    UNROLLED for (int i = 0; i < QUERIES * WIDES; i++) sum[i] = V{};
    auto add = [&](int64_t v) __attribute__((always_inline)) {
      UNROLLED for (int i = 0; i < QUERIES; i++) {
        const V asked = in_register(repeated<V>(query + i * padded + v * VL));
        UNROLLED for (int j = 0; j < WIDES; j++) multiply_add(sum[i * WIDES + j], asked, key[j]);
      }
    };
    for (int64_t v = 0; v < whole; v++) {
      UNROLLED for (int j = 0; j < WIDES; j++) {
        const T* line = keys + (p + j * EACH) * step + v * VL;
        if constexpr (EACH == 1) key[j] = load(line);
        else key[j] = beside<V>(load(line), load(line + step));
      }
      add(v);
    }
    if (whole < vectors) {
      Vec last[N];
      for (int j = 0; j < N; j++) last[j] = part(keys + (p + j) * step, whole, D);
      std::memcpy(key, last, sizeof last);
      add(whole);
    }
    float found[QUERIES * N];
    totals<QUERIES * WIDES>(sum, found);
    if constexpr (SCALED<T>)
      UNROLLED for (int i = 0; i < N; i++) {
        const float by = row_scale(keys + (p + i) * step, D);
        UNROLLED for (int j = 0; j < QUERIES; j++) found[j * N + i] *= by;
      }
    UNROLLED for (int i = 0; i < QUERIES; i++) std::memcpy(scores + i * stride + p, found + i * N, N * sizeof(float));
  };
  // The last ones together with some before them, which are computed again with the same result.
  const bool deep = longest - start >= DEEP;
  for (int64_t p = start; deep && p < longest; p += DEEP)
    score(std::integral_constant<int, DEEP>{}, std::min(p, longest - DEEP));
  for (int64_t p = start; !deep && p < longest; p++) score(std::integral_constant<int, 1>{}, p);
  for (int i = 0; tree && i < QUERIES; i++)
    for (int64_t at = row; at < seen[i]; at++) {
      Vec sum = {};
      const T* key = keys + (row + way[i][at - row]) * step;
      for (int64_t v = 0; v < vectors; v++) multiply_add(sum, load(query + i * padded + v * VL), part(key, v, D));
      scores[i * stride + at] = total(sum);
      if constexpr (SCALED<T>) scores[i * stride + at] *= row_scale(key, D);
    }
  float inverse[QUERIES];
  for (int i = 0; i < QUERIES; i++) {
    float* line = scores + i * stride;
    const int64_t from = reached[i], aligned = from / VL * VL;  // sums begin at whole vectors
    if (!a.plain()) bend(a, line, from, seen[i], h.head + (first + i) % group);
    std::fill(line + aligned, line + from, -1e30f);
    inverse[i] = weigh(line + aligned, seen[i] - aligned, a.sinks ? a.sinks[h.head + (first + i) % group] : -INFINITY);
    std::fill(line + std::min({start, aligned, row, from}), line + from, 0.0f);
    // A key after a row's own has weight 0; adding 0 * value changes no bit of a sum of finite numbers.
    for (int64_t later = seen[i]; later < longest; later++) scores[i * stride + later] = 0.0f;
    if constexpr (SCALED<T>)
      for (int64_t at = from; at < seen[i]; at++)
        line[at] *= row_scale(values + (tree && at >= row ? row + way[i][at - row] : at) * step, D);
  }
  // Sums of `broad` whole vectors from v on, or, if it is 1, of one that may be partial.
  auto mix_values = [&](auto broad, int64_t v) {
    constexpr int N = decltype(broad)::value;
    using V = std::conditional_t<N % ABREAST == 0, Wide, Vec>;
    constexpr int EACH = sizeof(V) / sizeof(Vec), WIDES = N / EACH;
    V sum[QUERIES * WIDES];
    UNROLLED for (int i = 0; i < QUERIES * WIDES; i++) sum[i] = V{};
    for (int64_t at = start; at < longest; at++) {
      V value[WIDES];
      UNROLLED for (int j = 0; j < WIDES; j++) {
        const T* line = values + at * step + (v + j * EACH) * VL;
        if constexpr (N == 1) value[j] = part(values + at * step, v, D);
        else if constexpr (EACH == 1) value[j] = load(line);
        else value[j] = beside<V>(load(line), load(line + VL));
      }
      UNROLLED for (int i = 0; i < QUERIES; i++) {
        const V weight = in_register(spread<V>(scores[i * stride + at]));
        UNROLLED for (int j = 0; j < WIDES; j++) multiply_add(sum[i * WIDES + j], value[j], weight);
      }
    }
    Vec made[QUERIES * N];
    std::memcpy(made, sum, sizeof made);
    for (int i = 0; tree && i < QUERIES; i++)
      for (int64_t at = row; at < seen[i]; at++)
        for (int j = 0; j < N; j++)
          multiply_add(made[i * N + j], part(values + (row + way[i][at - row]) * step, v + j, D),
                       spread<Vec>(scores[i * stride + at]));
    UNROLLED for (int i = 0; i < QUERIES; i++)
      UNROLLED for (int j = 0; j < N; j++) {
        const Vec mixed = made[i * N + j] * inverse[i];
        std::memcpy(to[i] + (v + j) * VL, &mixed, N > 1 ? sizeof mixed : std::min(VL, D - v * VL) * sizeof(float));
      }
  };
  int64_t v = 0;
  for (; v + BROAD <= whole; v += BROAD) mix_values(std::integral_constant<int, BROAD>{}, v);
  for (; v + 2 <= whole; v += 2) mix_values(std::integral_constant<int, 2>{}, v);
  for (; v < vectors; v++) mix_values(std::integral_constant<int, 1>{}, v);
}

// `attend_group` for a type of cache.
template <class T>
void attend_typed(const Attend& a, int64_t b, int64_t g, const Heads& h, const Cache& cache) {
  static thread_local std::vector<float> scratch;
  const int64_t D = a.width, n = std::min<int64_t>(a.count[b], a.window), row = a.row[b];
  const int64_t base = ((int64_t)a.slots[b] * a.kv_heads + g) * a.rows * row_step<T>(D);
  T *keys = (T*)cache.keys + base, *values = (T*)cache.values + base;
  size_t need = 4 * a.stride() + 4 * ((D + VL - 1) / VL * VL);
  if (scratch.size() < need) scratch.resize(need);
  for (int64_t t = 0; t < n; t++) {
    write_row(keys + (row + t) * row_step<T>(D), h.k + t * h.k_step, D);
    write_row(values + (row + t) * row_step<T>(D), h.v + t * h.v_step, D);
  }
  const Ways ways(a.parents ? a.parents + b * a.window : nullptr, a.window);
  for (int64_t first = 0, left = n * a.group(); left > 0;) {
    const int64_t take = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    auto block = take == 4 ? attend_block<T, 4> : take == 2 ? attend_block<T, 2> : attend_block<T, 1>;
    block(a, h, keys, values, first, row, n, scratch.data(), ways);
    first += take, left -= take;
  }
}

}  // namespace paceline
