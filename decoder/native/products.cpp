// The matmul of a few rows with a weight matrix, for every format and number of rows.
#include "product.h"

#include <array>

namespace paceline [[gnu::visibility("hidden")]] {

// Number of rows that fill the registers, for a number of columns. Blocks need additional sums. Few columns remain
// after the last whole group; weights of four bits in narrow registers also take one for many rows.
template <class R, class V, int COLS>
constexpr int MOST_ROWS = COLS == 4 ? 1 : sizeof(V) != sizeof(Vec) ? (BLOCKS<R> ? 10 : 12)
                        : COLS == 2 ? 5 : FOUR_BITS<R> && ABREAST == 1 ? 10 : 1;

constexpr int64_t LEVEL_1 = 32768;  // bytes of the cache
constexpr int64_t AHEAD = 8192;  // bytes: weights come from memory in the time that a few rows of them take

// Multiplies STEP numbers at k of a block's columns by those of each row of x.
template <class R, class V, int ROWS, int COLS>
inline __attribute__((always_inline)) void step(const float* x, int64_t size, const R& w, int64_t k, V* sum) {
  constexpr int EACH = sizeof(V) / sizeof(Vec);
  if constexpr (PAIRED<R>) {
#ifdef PACELINE_PAIRS
    V column[COLS];
    UNROLLED for (int n = 0; n < COLS; n++) column[n] = load_pairs<V>(w.data + n * EACH * w.K + k, w.K);
    UNROLLED for (int m = 0; m < ROWS; m++) {
      V row = in_register(repeated<V>(x + m * size + k / 2));
      UNROLLED for (int n = 0; n < COLS; n++) multiply_add_pairs(sum[m * COLS + n], column[n], row);
    }
#endif
  } else {
    UNROLLED for (int i = 0; i < 2; i++) {
      const bool second = ROUNDED<R> ? !i : i;  // the odd ones come first: the order of pairs
      V column[COLS];
      UNROLLED for (int n = 0; n < COLS; n++) column[n] = w.template half<V>(n * EACH, k, second);
      UNROLLED for (int m = 0; m < ROWS; m++) {
        V row = in_register(repeated<V>(x + m * size + k + second * VL));
        UNROLLED for (int n = 0; n < COLS; n++) multiply_add(sum[m * COLS + n], column[n], row);
      }
      // Both halves come from the same words, which are loaded twice: sums of five rows leave no register to keep them.
      if (sizeof(V) == sizeof(Vec)) asm("" ::: "memory");
    }
  }
}

// Adds the products of numbers after the last whole STEP, from k on, to the sums of all rows and columns.
template <class R>
__attribute__((noinline)) void add_tail(const float* x, int64_t size, const R& w, int64_t k, float* found, int rows,
                                        int columns) {
  for (; k < w.K; k++)
    for (int m = 0; m < rows; m++)
      for (int n = 0; n < columns; n++) {
        float number;
        if constexpr (PAIRED<R>) number = widen(((const BFloat16*)(x + m * size))[k]);
        else number = x[m * size + k];
        found[m * columns + n] = __builtin_fmaf(number, w.tail(n, k), found[m * columns + n]);
      }
}

// ROWS x (COLS x columns of a V) results at once. One accumulator for each, along K: the same arithmetic for every
// ROWS, COLS and V. A separate function, so that no surrounding code takes a register. Rows of results are `stride`
// apart.
template <class R, class V, int ROWS, int COLS>
__attribute__((noinline)) void block(const float* x, int64_t size, const R w, float* to, int64_t stride) {
  constexpr int EACH = sizeof(V) / sizeof(Vec), ALL = COLS * EACH;
  const int64_t K = w.K;
  // A block reads all of its columns from the start, so the next one's are fetched while it is computed: into level 2, as
  // level 1 has the rows of x.
  const char* ahead = w.bytes() + std::max(AHEAD, ALL * K / STEP * R::SPREAD);
  auto fetch = [&](auto bytes) __attribute__((always_inline)) {  // so many of every column
    constexpr int64_t SPAN = ALL * decltype(bytes)::value;
    UNROLLED for (int64_t at = 0; at < SPAN; at += 64) __builtin_prefetch(ahead + at, 0, 2);
    ahead += SPAN;
  };
  float several[ROWS * ALL], *found = ROWS == 1 ? to : several;
  if constexpr (INTEGERS<R>) {
    multiply<V, ROWS, COLS>(x, size, w, found, fetch);
    float scale[ALL];
    for (int n = 0; n < ALL; n++) scale[n] = w.scale(n);
    UNROLLED for (int m = 0; m < ROWS; m++) {
      const float own = x[m * size + integer_words(K)];
      UNROLLED for (int n = 0; n < ALL; n++) found[m * ALL + n] = found[m * ALL + n] * own * scale[n];
    }
  } else {
    V sum[ROWS * COLS];
    UNROLLED for (int i = 0; i < ROWS * COLS; i++) sum[i] = V{};
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
      fetch(std::integral_constant<int64_t, R::SPREAD>{});
      step<R, V, ROWS, COLS>(x, size, w, k, sum);
    }
    totals<ROWS * COLS>(sum, found);
    if (k < K) add_tail(x, size, w, k, found, ROWS, ALL);
    UNROLLED for (int m = 0; m < ROWS; m++)
      UNROLLED for (int n = 0; n < ALL; n++) found[m * ALL + n] = w.finished(n, found[m * ALL + n]);
  }
  // Unrolled: a loop would read with one instruction what several have just written; store forwarding would fail each
  // time, and matmuls of a few rows would take up to twice as long.
  if (ROWS > 1)
    UNROLLED for (int m = 0; m < ROWS; m++) std::memcpy(to + m * stride, found + m * ALL, sizeof(float) * ALL);
}

// `block` for numbers of rows from 1 on.
template <class R, class V, int COLS, int... LESS>
constexpr auto blocks(std::integer_sequence<int, LESS...>) {
  return std::array{&block<R, V, LESS + 1, COLS>...};
}

// Rows of the first block: the fewest blocks, without a small remainder. With 5 at once 6 is 3 + 3, 7 is 4 + 3,
// 8 is 4 + 4.
constexpr int64_t first_of(int64_t rows, int64_t most) {
  const int64_t blocks = (rows + most - 1) / most;
  return rows >= 2 * most - 1 ? most : (rows + blocks - 1) / blocks;
}

// Results from n on of M rows of x, which are `size` float32 apart, with COLS columns of V at a time, up to `end`. ->
// the next n
template <class V, int COLS, class R>
int64_t columns(const float* x, int64_t size, const R& w, int64_t M, int64_t n, int64_t end, float* to, int64_t stride) {
  constexpr int ALL = COLS * sizeof(V) / sizeof(Vec), MOST = MOST_ROWS<R, V, COLS>;
  static constexpr auto of_rows = blocks<R, V, COLS>(std::make_integer_sequence<int, MOST>{});
  int64_t rows[2 * FEW], count = 0;  // of each block
  for (int64_t m = 0; m < M && n + ALL <= end; m += rows[count++]) rows[count] = first_of(M - m, MOST);
  for (; n + ALL <= end; n += ALL, to += ALL)
    for (int64_t i = 0, m = 0; i < count; m += rows[i++])
      of_rows[rows[i] - 1](x + m * size, size, w.from(n), to + m * stride, stride);
  return n;
}

// Few rows of x stay in the cache; of many, a block stays in it while all of these weights are read.
void product(const Prepared& lines, const Stored& weight, int64_t M, int64_t K, int64_t begin, int64_t end, float* to,
             int64_t stride) {
#ifdef PACELINE_TILES
  if (tiled(weight.format, lines.count))
    return tiled_product(lines, Int8{(const int8_t*)weight.data, K, weight.scales}, M, begin, end, to, stride);
#endif
  const int64_t size = prepared(weight.format, K);
  const float* x = lines.data + lines.first * size;
  const Flushed flushed(weight.format == BFLOAT16);
  in_format(weight, K, [&](const auto& w) {
    typedef std::decay_t<decltype(w)> R;
    // Ten rows of one column share the work of unpacking four bits, but every column reads the rows again, so these have
    // to stay in level 1. Up to five rows, two columns are faster.
    constexpr int64_t PAIR = MOST_ROWS<R, Wide, 2>, SINGLE = MOST_ROWS<R, Vec, 1>;
    const int64_t together = M > 2 * FEW ? SINGLE : M;
    const bool single = SINGLE > PAIR && M > PAIR && together * size * (int64_t)sizeof(float) <= LEVEL_1;
    for (int64_t m = 0, rows; m < M; m += rows) {
      rows = M > 2 * FEW ? first_of(M - m, single ? SINGLE : PAIR) : M;
      int64_t n = begin;
      auto some = [&](auto columns) {
        n = columns(x + m * size, size, w, rows, n, end, to + m * stride + n - begin, stride);
      };
      // One row takes more columns at once: the overhead of a block equals the cost of its sums.
      if (INTEGERS<R> && M == 1) some(columns<Wide, INTEGERS<R> ? 4 : 2, R>);
      if (!single) some(columns<Wide, 2, R>);
      some(columns<Vec, 1, R>);
    }
  });
}

}  // namespace paceline
