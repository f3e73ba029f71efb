// Blocks of the product of a few rows with a weight matrix, for every format and every number of rows: most of what there
// is to compile of the products.
#include "product.h"

namespace paceline [[gnu::visibility("hidden")]] {

constexpr int64_t AHEAD = 8192;  // bytes: weights come from memory in the time that a few rows of them take

// What a block multiplies at k: STEP numbers of its columns with those of each row of x.
template <class R, class V, int ROWS, int COLS>
inline __attribute__((always_inline)) void step(const float* x, int64_t size, const R& w, int64_t k, V* sum) {
  constexpr int EACH = sizeof(V) / sizeof(Vec);
  if constexpr (PAIRED<R>) {
#ifdef PACELINE_PAIRS
    V column[COLS];
    unrolled<COLS>([&](auto n) { column[n] = load_pairs<V>(w.data + n * EACH * w.K + k, w.K); });
    unrolled<ROWS>([&](auto m) {
      V row = in_register(repeated<V>(x + m * size + k / 2));
      unrolled<COLS>([&](auto n) { multiply_add_pairs(sum[m * COLS + n], column[n], row); });
    });
#endif
  } else {
    Pair<V> column[COLS];
    unrolled<COLS>([&](auto n) { column[n] = w.template pair<V>(n * EACH, k); });
    if constexpr (ROUNDED<R>) unrolled<COLS>([&](auto n) { std::swap(column[n].first, column[n].second); });
    constexpr int FIRST = ROUNDED<R> ? VL : 0;  // the odd ones come first: the order of pairs
    unrolled<ROWS>([&](auto m) {
      V row = in_register(repeated<V>(x + m * size + k + FIRST));
      unrolled<COLS>([&](auto n) { multiply_add(sum[m * COLS + n], column[n].first, row); });
    });
    unrolled<ROWS>([&](auto m) {
      V row = in_register(repeated<V>(x + m * size + k + (VL - FIRST)));
      unrolled<COLS>([&](auto n) { multiply_add(sum[m * COLS + n], column[n].second, row); });
    });
  }
}

// Number k of a prepared line, behind the last whole STEP.
template <class R>
inline float last(const float* line, int64_t k) {
  if constexpr (PAIRED<R>) return widen(((const BFloat16*)line)[k]);
  else return line[k];
}

// ROWS x (COLS x columns of a V) results at once. One accumulator for each, walked along K: the same arithmetic for every
// ROWS, COLS and V. A function by itself, so that nothing around it costs it a register. found [ROWS, all columns]
template <class R, class V, int ROWS, int COLS>
__attribute__((noinline)) void block(const float* x, int64_t size, const R w, float* found) {
  constexpr int EACH = sizeof(V) / sizeof(Vec), ALL = COLS * EACH;
  const int64_t K = w.K;
  // Into level 1; into level 2 where the rows of x need level 1 for themselves.
  constexpr int CACHE = ROWS == 1 || PAIRED<R> || INTEGERS<R> ? 3 : 2;
  // A block reads all of its columns from the start, so the next one's are fetched while it is computed. One row takes so
  // little time that those of a short block are asked for at once.
  const int64_t bytes = ALL * K / STEP * R::SPREAD;
  const bool at_once = (PAIRED<R> || INTEGERS<R>) && ROWS == 1 && bytes <= AHEAD;
  const char* ahead = w.bytes() + std::max(AHEAD, bytes);
  if (at_once)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, CACHE);
  int64_t due = 0;  // bytes that were read and not yet fetched ahead
  auto fetch = [&]() __attribute__((always_inline)) {
    if (!at_once)
      for (due += ALL * R::SPREAD; due >= 64; due -= 64, ahead += 64) __builtin_prefetch(ahead, 0, CACHE);
  };
  if constexpr (INTEGERS<R>) {
    multiply<V, ROWS, COLS>(x, size, w, found, fetch);
    float scale[ALL];
    for (int n = 0; n < ALL; n++) scale[n] = w.scale(n);
    for (int m = 0; m < ROWS; m++) {
      const float own = x[m * size + integer_words(K)];
      float line[ALL];
      std::memcpy(line, found + m * ALL, sizeof line);
      for (int n = 0; n < ALL; n++) line[n] = line[n] * own * scale[n];
      std::memcpy(found + m * ALL, line, sizeof line);
    }
  } else {
    V sum[ROWS * COLS];
    unrolled<ROWS * COLS>([&](auto i) { sum[i] = V{}; });
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
      fetch();
      step<R, V, ROWS, COLS>(x, size, w, k, sum);
    }
    totals<ROWS * COLS>(sum, found);
    for (; k < K; k++)
      for (int m = 0; m < ROWS; m++)
        for (int n = 0; n < ALL; n++)
          found[m * ALL + n] = __builtin_fmaf(last<R>(x + m * size, k), w.tail(n, k), found[m * ALL + n]);
    for (int m = 0; m < ROWS; m++)
      for (int n = 0; n < ALL; n++) found[m * ALL + n] = w.finished(n, found[m * ALL + n]);
  }
}

// `block` for a number of rows that is not known before. Here alone are all of them made.
template <class R, class V, int COLS>
__attribute__((noinline)) void block_of(int rows, const float* x, int64_t size, const R& w, float* found) {
  unrolled<MOST_ROWS<R, V, COLS>>([&](auto less) {
    if (rows == less + 1) block<R, V, less + 1, COLS>(x, size, w, found);
  });
}

#define OF_ROWS(V, COLS, ...) \
  template void block_of<__VA_ARGS__, V, COLS>(int, const float*, int64_t, const __VA_ARGS__&, float*);
#define FOR_ROWS(...) OF_ROWS(Wide, 2, __VA_ARGS__) OF_ROWS(Vec, 1, __VA_ARGS__)
#define FOR_INTEGERS(...) FOR_ROWS(__VA_ARGS__) OF_ROWS(Wide, 4, __VA_ARGS__)

FOR_ROWS(Plain<float>)
FOR_ROWS(Plain<BFloat16>)
FOR_ROWS(Plain<Float16>)
FOR_INTEGERS(Int8)
FOR_ROWS(Floats8<Float8E4M3>)
FOR_ROWS(Floats8<Float8E5M2>)
FOR_INTEGERS(Blocked<BlockQ8_0>)
FOR_INTEGERS(Blocked<BlockQ4_0>)
FOR_INTEGERS(Blocked<BlockQ4_1>)

}  // namespace paceline
