// Matmuls of a few rows with a weight matrix, and their division among a team of threads.
#pragma once

#include <algorithm>
#include <vector>

#include "pairs.h"
#include "team.h"
#include "tiles.h"

namespace paceline [[gnu::visibility("hidden")]] {

// ------------------------------------------------------------------------------------------- the order of activations --

// Number of float32 in a prepared line of K numbers.
inline int64_t prepared(int64_t format, int64_t K) {
  if (integers(format)) return integer_line(format, K);
  return PAIRS && format == BFLOAT16 ? (K + 1) / 2 : K;
}

// A line of K numbers in the layout that matmuls with a format read: integers with a scale; for bfloat16 rounded, in
// pairs or, of every STEP, the even ones and then the odd ones; else as it is.
inline void arrange_line(int64_t format, const float* from, float* to, int64_t K) {
  int64_t k = 0;
  if (integers(format)) {
    integer_line(format, from, to, K);
  } else if (format != BFLOAT16) {
    std::memcpy(to, from, K * sizeof(float));
  } else if constexpr (PAIRS) {
    BFloat16* pairs = (BFloat16*)to;
    for (; k + VL <= K; k += VL) {
      const VecH some = __builtin_convertvector(rounded(load(from + k)) >> 16, VecH);
      std::memcpy(pairs + k, &some, sizeof some);
    }
    for (; k < K; k++) narrow(pairs + k, from[k]);
  } else {
    for (; k + STEP <= K; k += STEP) {
      const Vec first = (Vec)rounded(load(from + k)), second = (Vec)rounded(load(from + k + VL));
#ifdef __clang__
      const Vec even = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14);
      const Vec odd = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
#else
      const Vec even = __builtin_shuffle(first, second, VecI{0, 2, 4, 6, 8, 10, 12, 14});
      const Vec odd = __builtin_shuffle(first, second, VecI{1, 3, 5, 7, 9, 11, 13, 15});
#endif
      std::memcpy(to + k, &even, sizeof even), std::memcpy(to + k + VL, &odd, sizeof odd);
    }
    for (; k < K; k++) to[k] = rounded(from[k]);
  }
}

constexpr int64_t FEW = 16;

// Room for prepared lines, at the beginning of a cache line: a load that crosses two takes twice as long.
class Room {
 public:
  float* data(int64_t size) {
    constexpr int64_t LINE = 64 / sizeof(float);
    if ((int64_t)numbers_.size() < size + LINE) numbers_.resize(size + LINE);
    return (float*)(((uintptr_t)numbers_.data() + 63) & ~(uintptr_t)63);
  }

 private:
  std::vector<float> numbers_;
};

// M lines for a matrix of a format, made of the K numbers that fill(m, line) writes: by every thread separately if they
// are few, which is cheaper than waiting, or by the whole team, in a loop before that of the matmul.
template <class Fill>
class Lines {
 public:
  Lines(int64_t M, int64_t K, int64_t format, Fill fill)
      : M_(M), K_(K), format_(format), size_(prepared(format, K)), fill_(fill),
        all_(tiled(format, M) ? tiled_size(M, K) : M * size_), common_(M > FEW ? room_.data(all_) : nullptr) {}

  auto loop() {
    return Loop{common_ ? M_ : 0, [this](int64_t begin, int64_t end, bool) {
                  for (int64_t m = begin; m < end; m++) write(m, common_);
                }};
  }
  // For a thread that begins with the matmul; `first`: its first piece.
  Prepared get(bool first) const {
    if (common_) return {common_, 0, M_};
    static thread_local Room own;
    float* lines = own.data(all_);
    for (int64_t m = 0; first && m < M_; m++) write(m, lines);
    return {lines, 0, M_};
  }

 private:
  void write(int64_t m, float* to) const {
    static thread_local std::vector<float> line;
    if ((int64_t)line.size() < K_ + size_) line.resize(K_ + size_);
    const float* from = fill_(m, line.data());
    if (!tiled(format_, M_)) return arrange_line(format_, from, to + m * size_, K_);
    arrange_line(format_, from, line.data() + K_, K_);
    tiled_line(line.data() + K_, to, m, M_, K_);
  }
  int64_t M_, K_, format_, size_;
  Fill fill_;
  int64_t all_;
  Room room_;
  float* common_;
};

// ------------------------------------------------------------------------------------------------------- the product --

// to [M, stride] = results n from `begin` to `end` of M prepared rows with a matrix whose rows have K numbers. In
// products.cpp.
void product(const Prepared& x, const Stored& weight, int64_t M, int64_t K, int64_t begin, int64_t end, float* to,
             int64_t stride);

// The same for some of the rows of an output [all rows, N]: take(to, made, size) gets each row's address and its
// results.
template <class Take>
void product_rows(const Prepared& x, const Stored& weight, const std::vector<int64_t>& rows, int64_t K, int64_t begin,
                  int64_t end, Take take) {
  static thread_local std::vector<float> made;
  const int64_t M = rows.size(), size = end - begin;
  if ((int64_t)made.size() < M * size) made.resize(M * size);
  product(x, weight, M, K, begin, end, made.data(), size);
  for (int64_t m = 0; m < M; m++) take(rows[m], made.data() + m * size, size);
}

constexpr int64_t WORTH = 16384;  // minimum number of multiply-adds for a team

}  // namespace paceline
