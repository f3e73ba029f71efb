// Operations between the matmuls of layers that are not computed by one kernel: norms, rotations, activations, and rows
// of an embedding. Each row is computed separately.
#include "experts.h"

using namespace paceline;

// Calls body(row) for all rows, on the team if there are many numbers.
template <class Body>
static void each(int64_t rows, int64_t width, Body body) {
  constexpr int64_t MANY = 1 << 16;
  each_row(rows * width > MANY, rows, body);
}

// Eight numbers of a row from `k` on, those after its end as zeros.
static Vec part(const float* x, int64_t k, int64_t K) {
  if (k + VL <= K) return load(x + k);
  Vec found = {};
  for (int64_t i = k; i < K; i++) found[i - k] = x[i];
  return found;
}
static void put(float* to, int64_t k, int64_t K, Vec value) {
  std::memcpy(to + k, &value, std::min<int64_t>(VL, K - k) * sizeof(float));
}
template <class W>
static Vec weights(const W* w, int64_t k, int64_t K) {
  if (k + VL <= K) return load(w + k);
  Vec found = {};
  for (int64_t i = k; i < K; i++) found[i - k] = widen(w[i]);
  return found;
}

enum Norm : int64_t { RMS = 0, RMS_PLUS_ONE = 1, LAYER = 2 };  // paceline/decoder/kernels/plain.py

template <class W>
static void norm(const float* x, const W* w, const W* bias, float* to, int64_t K, float eps, int64_t kind) {
  float middle = 0;
  if (kind == LAYER) {
    Vec sum = {};
    for (int64_t k = 0; k < K; k += VL) sum += part(x, k, K);
    middle = total(sum) / (float)K;
  }
  Vec squares = {};
  for (int64_t k = 0; k + VL <= K; k += VL) multiply_add(squares, load(x + k) - middle, load(x + k) - middle);
  float sum = total(squares);
  for (int64_t k = K / VL * VL; k < K; k++) sum = __builtin_fmaf(x[k] - middle, x[k] - middle, sum);
  const float scale = 1.0f / std::sqrt(sum / (float)K + eps);
  for (int64_t k = 0; k < K; k += VL) {
    const Vec weight = weights(w, k, K);
    Vec value = (kind == RMS_PLUS_ONE ? weight + 1.0f : weight) * ((part(x, k, K) - middle) * scale);
    if (bias) value += weights(bias, k, K);
    put(to, k, K, value);
  }
}

// x and out [rows, K], weight and bias [K] of a dtype; bias may be null.
extern "C" void paceline_norm(const float* x, const void* weight, const void* bias, float* out, int64_t rows, int64_t K,
                              float eps, int64_t kind, int64_t dtype) {
  Numbers{weight, dtype}.typed([&](auto* w) {
    each(rows, K, [&](int64_t row) { norm(x + row * K, w, (decltype(w))bias, out + row * K, K, eps, kind); });
  });
}

// x: rows of heads [D] that are `stride` numbers apart; the first R numbers of each head are rotated by cos and sin
// [rows, R]. out [rows, heads, D]
extern "C" void paceline_rotate(const float* x, int64_t stride, const float* cos, const float* sin, float* out,
                                int64_t rows, int64_t heads, int64_t D, int64_t R) {
  each(rows, heads * D, [&](int64_t row) {
    for (int64_t head = 0; head < heads; head++) {
      const float* from = x + row * stride + head * D;
      float* to = out + (row * heads + head) * D;
      rotate(from, cos + row * R, sin + row * R, to, R);
      std::copy(from + R, from + D, to + R);
    }
  });
}

// x [rows, 2 F] if gated, else [rows, F]; out [rows, F]
extern "C" void paceline_activate(const float* x, float* out, int64_t rows, int64_t F, int64_t activation,
                                  int64_t gated) {
  each(rows, F, [&](int64_t row) {
    const float* gate = x + row * (gated ? 2 * F : F);
    for (int64_t k = 0; k < F; k += VL) {
      const Vec from = part(gate, k, F);
      put(out + row * F, k, F, gated ? activated(from, part(gate + F, k, F), activation) : activated(from, activation));
    }
  });
}

// Rows of a table [n, K] of a dtype, ids [rows]; out [rows, K]
extern "C" void paceline_embed(const void* table, const int32_t* ids, float* out, int64_t rows, int64_t K,
                               int64_t dtype) {
  Numbers{table, dtype}.typed([&](auto* numbers) {
    each(rows, K, [&](int64_t row) {
      for (int64_t k = 0; k < K; k += VL) put(out + row * K, k, K, weights(numbers + ids[row] * K, k, K));
    });
  });
}
