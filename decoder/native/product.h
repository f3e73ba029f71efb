// Products of a few rows with a weight matrix, and how a team of threads shares them.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "integers.h"
#include "pairs.h"
#include "team.h"

namespace paceline [[gnu::visibility("hidden")]] {

// ---------------------------------------------------------------------------------------------------- sharing a loop --

// A loop that a team shares. Every thread has a range of its own, taken in pieces; whoever is done helps the others: a
// thread may be slow to start, or be interrupted. Set up before the team begins.
class Shared {
 public:
  // Pieces are of `unit` numbers or a multiple of it.
  Shared(int64_t count, int64_t pieces, int64_t unit = VL) : threads_(Team::most()) {
    const int64_t units = (count + unit - 1) / unit;
    for (int i = 0; i < threads_; i++) {
      parts_[i].next.store(units * i / threads_ * unit, std::memory_order_relaxed);
      parts_[i].end = std::min(count, units * (i + 1) / threads_ * unit);
    }
    piece_ = std::max<int64_t>(1, units / threads_ / pieces) * unit;
  }
  // body(begin, end) for pieces that cover the loop once. All of the team must call this, and then wait for each other.
  template <class Body>
  void run(const Team::Member& me, Body body) {
    for (int i = 0; i < threads_; i++) {
      Part& part = parts_[(me.number + i) % threads_];
      for (int64_t begin; (begin = part.next.fetch_add(piece_, std::memory_order_relaxed)) < part.end;)
        body(begin, std::min(begin + piece_, part.end));
    }
  }

 private:
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  int threads_;
  int64_t piece_;
  Part parts_[Team::MOST];
};

// ------------------------------------------------------------------------------------------- the order of activations --

// STEP numbers as the products read them: in order or, for bfloat16, the even ones and then the odd ones.
template <bool EVEN_FIRST>
inline Pair<Vec> arrange(Vec first, Vec second) {
  if constexpr (!EVEN_FIRST) return {first, second};
#ifdef __clang__
  return {__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14),
          __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15)};
#else
  return {__builtin_shuffle(first, second, VecI{0, 2, 4, 6, 8, 10, 12, 14}),
          __builtin_shuffle(first, second, VecI{1, 3, 5, 7, 9, 11, 13, 15})};
#endif
}
// How many float32 a prepared line of K numbers takes.
inline int64_t prepared(int64_t format, int64_t K) {
  if (integers(format)) return integer_line(format, K);
  return PAIRS && format == BFLOAT16 ? (K + 1) / 2 : K;
}

// A line of K numbers for a matrix of a format, each what `number` makes of its place: a vector or, behind the last whole
// STEP, a single one.
template <class Vector, class Number>
inline void arrange_line(int64_t format, float* to, int64_t K, Vector vector, Number number) {
  int64_t k = 0;
  if (integers(format)) {
    static thread_local std::vector<float> line;  // its largest number has to be known first
    if ((int64_t)line.size() < K) line.resize(K);
    arrange_line(FLOAT32, line.data(), K, vector, number);
    integer_line(format, line.data(), to, K);
  } else if (format != BFLOAT16) {
    for (; k + VL <= K; k += VL) {
      const Vec some = vector(k);
      std::memcpy(to + k, &some, sizeof some);
    }
    for (; k < K; k++) to[k] = number(k);
  } else if constexpr (PAIRS) {
    BFloat16* pairs = (BFloat16*)to;
    for (; k + VL <= K; k += VL) {
      const VecH some = __builtin_convertvector(rounded(vector(k)) >> 16, VecH);
      std::memcpy(pairs + k, &some, sizeof some);
    }
    for (; k < K; k++) narrow(pairs + k, number(k));
  } else {
    for (; k + STEP <= K; k += STEP) {
      const Pair<Vec> pair = arrange<true>((Vec)rounded(vector(k)), (Vec)rounded(vector(k + VL)));
      std::memcpy(to + k, &pair, sizeof pair);
    }
    for (; k < K; k++) to[k] = rounded(number(k));
  }
}
inline void arrange_line(int64_t format, const float* from, float* to, int64_t K) {
  if (integers(format)) return integer_line(format, from, to, K);
  arrange_line(format, to, K, [&](int64_t k) { return load(from + k); }, [&](int64_t k) { return from[k]; });
}

// M lines that take `size` float32 each, written by fill(m, line): by every thread for itself if they are few, which is
// cheaper than to wait for each other, or by all of the team together into `common`, which holds all of them.
constexpr int64_t FEW = 16;
template <class Fill>
const float* prepare(const Team::Member& me, int64_t M, int64_t size, float* common, Fill fill) {
  if (M > FEW) {
    for (int64_t m = M * me.number / me.threads; m < M * (me.number + 1) / me.threads; m++) fill(m, common + m * size);
    me.barrier();
    return common;
  }
  static thread_local std::vector<float> own;
  if ((int64_t)own.size() < M * size) own.resize(M * size);
  for (int64_t m = 0; m < M; m++) fill(m, own.data() + m * size);
  return own.data();
}

// ------------------------------------------------------------------------------------------------------- the product --

// How many rows at once fill the registers, with two columns of them. Blocks have sums of their own beside those.
template <class R, class V, int COLS = 2>
constexpr int MOST_ROWS = COLS == 4 ? 1 : sizeof(V) == sizeof(Vec) ? 5 : BLOCKS<R> ? 10 : 12;

// The results of so many rows with COLS columns of a V; found [rows, all columns]. In products.cpp, for every R.
template <class R, class V, int COLS>
void block_of(int rows, const float* x, int64_t size, const R& w, float* found);

// The first block of so many rows: as few blocks as can be, and no small remainder. With 5 at once 6 is 3 + 3, 7 is 4 + 3,
// 8 is 4 + 4.
template <class R, class V, int COLS = 2>
int64_t first_of(int64_t rows) {
  constexpr int64_t MOST = MOST_ROWS<R, V, COLS>;
  const int64_t blocks = (rows + MOST - 1) / MOST;
  return rows >= 2 * MOST - 1 ? MOST : (rows + blocks - 1) / blocks;
}

// M prepared rows, which lie `size` float32 apart, with COLS columns of V; emit(m, n, value) gets each result.
template <class V, int COLS, class R, class Emit>
inline void columns(const float* x, int64_t size, const R& w, int64_t M, Emit emit) {
  constexpr int ALL = COLS * sizeof(V) / sizeof(Vec);
  for (int64_t m = 0; m < M;) {
    float found[MOST_ROWS<R, V, COLS> * ALL];
    const int take = (int)first_of<R, V, COLS>(M - m);
    block_of<R, V, COLS>(take, x + m * size, size, w, found);
    for (int i = 0; i < take; i++)
      for (int n = 0; n < ALL; n++) emit(m + i, n, found[i * ALL + n]);
    m += take;
  }
}

// emit(m, n, value) for the rows n from `begin` to `end` of a matrix, rows of K numbers. Of few rows of x none is read
// twice from afar; of many, a block stays close while all of these weights go by.
template <class Emit>
void product(const float* x, const Stored& weight, int64_t M, int64_t K, int64_t begin, int64_t end, Emit emit) {
  const int64_t size = prepared(weight.format, K);
  const Flushed flushed(weight.format == BFLOAT16);
  in_format(weight, K, [&](auto w) {
    for (int64_t m = 0, rows; m < M; m += rows) {
      rows = M > 2 * FEW ? first_of<decltype(w), Wide>(M - m) : M;
      int64_t n = begin;
      // One row takes more columns at once: what a block costs beside its sums is as much as these.
      constexpr int COLS = INTEGERS<decltype(w)> ? 4 : 2;
      auto to = [&](int64_t i, int64_t j, float value) { emit(m + i, n + j, value); };
      if (M == 1)
        for (; n + COLS * ABREAST <= end; n += COLS * ABREAST) columns<Wide, COLS>(x, size, w.from(n), 1, to);
      for (; n + 2 * ABREAST <= end; n += 2 * ABREAST) columns<Wide, 2>(x + m * size, size, w.from(n), rows, to);
      for (; n < end; n++) columns<Vec, 1>(x + m * size, size, w.from(n), rows, to);
    }
  });
}

constexpr int64_t PIECES = 4;  // of a thread's range: fine enough to help out, coarse enough to read weights in a stream
constexpr int64_t WORTH = 16384;  // multiply-adds that are worth a team

inline void linear(const float* in, const Stored& w, float* out, int64_t M, int64_t K, int64_t N) {
  const int64_t size = prepared(w.format, K);
  Shared work(N, PIECES);
  std::vector<float> common(M > FEW ? M * size : 0);
  Team::run(M * K * N > WORTH, [&](const Team::Member& me) {
    const float* x =
        prepare(me, M, size, common.data(), [&](int64_t m, float* to) { arrange_line(w.format, in + m * K, to, K); });
    work.run(me, [&](int64_t begin, int64_t end) {
      product(x, w, M, K, begin, end, [&](int64_t m, int64_t n, float value) { out[m * N + n] = value; });
    });
  });
}

}  // namespace paceline
