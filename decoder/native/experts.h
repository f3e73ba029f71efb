// A mixture of experts (MoE) as one task of the team: every row is computed by its active experts, and no other
// expert's weights are read.
#pragma once

#include <vector>

#include "layer.h"

namespace paceline [[gnu::visibility("hidden")]] {

// ----------------------------------------------------------------------------------------------------- the activation --

// Activation between an expert's matmuls: the positions of ACTIVATIONS in paceline/decoder/kernels/plain.py.
enum Activation : int64_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU_SQUARED = 4, CLAMPED_SWISH = 5 };

// One number at a time, so that its result does not depend on its position.
template <class Function>
inline Vec one_by_one(Vec x, Function function) {
  for (int i = 0; i < VL; i++) x[i] = function(x[i]);
  return x;
}
inline Vec activated(Vec x, int64_t activation) {
  switch (activation) {
    case SILU: return silu(x);
    case GELU: return one_by_one(x, [](float v) { return 0.5f * v * (1.0f + std::erf(v * 0.70710678f)); });
    case GELU_TANH:
      return one_by_one(
          x, [](float v) { return 0.5f * v * (1.0f + std::tanh(0.79788456f * (v + 0.044715f * v * v * v))); });
    case RELU: return x < 0 ? Vec{} : x;
    case CLAMPED_SWISH: return silu((x > 7.0f ? Vec{} + 7.0f : x) * 1.702f) * (1 / 1.702f);
    default: return x < 0 ? Vec{} : x * x;
  }
}
inline Vec activated(Vec gate, Vec up, int64_t activation) {
  if (activation == CLAMPED_SWISH) up = (up > 7.0f ? Vec{} + 7.0f : up < -7.0f ? Vec{} - 7.0f : up) + 1.0f;
  return activated(gate, activation) * up;
}

// ------------------------------------------------------------------------------------------------- who goes to which --

// Pairs of a row and an expert with a nonzero share of it: by the expert's number, then in the order of rows.
struct Pairs {
  struct Expert {
    int64_t number, first, last;  // its pairs: from the first up to the last, exclusive
  };
  std::vector<Expert> experts;  // those that are active in any row
  std::vector<int64_t> rows;    // of each pair
  std::vector<float> shares;    // of each pair

  // share [rows, count]
  Pairs(const float* share, const std::vector<int64_t>& real, int64_t count) {
    for (int64_t e = 0; e < count; e++) {
      const int64_t first = rows.size();
      for (const int64_t row : real)
        if (const float own = share[row * count + e]; own != 0) rows.push_back(row), shares.push_back(own);
      if ((int64_t)rows.size() > first) experts.push_back({e, first, (int64_t)rows.size()});
    }
  }
};

// --------------------------------------------------------------------------------------------------------- the mixture --

// in and out [lines, window, width], shares [lines, window, experts]. An expert has `inner` numbers between its
// matmuls.
struct Mixture : Windows {
  const float *in, *shares;
  float* out;
  const float* bias;  // of gate and up [experts, 2 * inner], or null
  int64_t width, experts, inner, activation;
};

// out = sum of share * product(activation(gate + bias) * (up + bias)) over the experts with a share of the row, in the order of their
// numbers, independent of the experts of other rows. gate_up holds gate and up of every expert concatenated by rows
// [experts * 2 * inner, width], down [experts * width, inner].
inline void mixture(const Mixture& s, const Stored& gate_up, const Stored& down) {
  const std::vector<int64_t> real = s.rows();
  const Pairs pairs(s.shares, real, s.experts);
  const int64_t P = pairs.rows.size(), H = s.width, F = s.inner, line = (F + VL - 1) / VL * VL;
  std::vector<float> gates(P * line), ups(P * line);
  Lines x(P, H, gate_up.format, [&](int64_t p, float*) { return s.in + pairs.rows[p] * H; });
  Lines y(P, F, down.format, [&](int64_t p, float*) { return gates.data() + p * line; });
  // Over the inner numbers of all active experts, in order.
  const Loop making{(int64_t)pairs.experts.size() * line, [&](int64_t begin, int64_t end, bool begins) {
    const Prepared prepared = x.get(begins);
    for (int64_t at = begin, next; at < end; at = next) {
      const auto& [number, first, last] = pairs.experts[at / line];
      next = std::min(end, (at / line + 1) * line);
      const int64_t from = at % line, to = std::min(from + next - at, F);
      for (auto [found, start] : {std::pair{&gates, number * 2 * F}, std::pair{&ups, number * 2 * F + F}}) {
        product(prepared.from(first), gate_up, last - first, H, start + from, start + to,
                found->data() + first * line + from, line);
        for (int64_t p = first; s.bias && p < last; p++)
          for (int64_t n = from; n < to; n++) (*found)[p * line + n] += s.bias[start + n];
      }
      for (int64_t p = first; p < last; p++)
        for (int64_t n = p * line + from; n < p * line + to; n += VL) {
          const Vec gated = activated(load(&gates[n]), load(&ups[n]), s.activation);
          std::memcpy(&gates[n], &gated, sizeof gated);
        }
    }
  }, VL};
  // The thread of a column adds up all experts for it, in their order.
  const Loop adding{H, [&](int64_t begin, int64_t end, bool begins) {
    const Prepared prepared = y.get(begins);
    s.clear(s.out, H, begin, end);
    for (const int64_t row : real) std::fill(s.out + row * H + begin, s.out + row * H + end, 0.0f);
    for (const auto& [number, first, last] : pairs.experts) {
      static thread_local std::vector<float> made;
      const int64_t start = number * H, M = last - first, size = end - begin;
      if ((int64_t)made.size() < M * size) made.resize(M * size);
      product(prepared.from(first), down, M, F, start + begin, start + end, made.data(), size);
      for (int64_t m = 0; m < M; m++) {
        float* to = s.out + pairs.rows[first + m] * H + begin;
        for (int64_t n = 0; n < size; n++) to[n] += pairs.shares[first + m] * made[m * size + n];
      }
    }
  }, VL};
  Team::run(P * H * 3 * F > WORTH, x.loop(), making, y.loop(), adding);
}

}  // namespace paceline
