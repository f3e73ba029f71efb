// The two halves of a Llama layer, each with its norm and its addition to the residual stream, as one task of the team:
// as separate operations, the steps between the matmuls would cost more than their computation.
#pragma once

#include <vector>

#include "attention.h"
#include "product.h"
#include "softmax.h"

namespace paceline [[gnu::visibility("hidden")]] {

// A window of tokens in every batch row, of which the first count[b] are real and the others padding; without count all
// are real. A count of -1 - n means n real rows, whose padding is not written.
struct Windows {
  int64_t lines, window;
  const int32_t* count;  // [lines], or null

  std::vector<int64_t> rows() const {
    std::vector<int64_t> found;
    found.reserve(lines * window);
    for (int64_t b = 0; b < lines; b++)
      for (int64_t t = 0; t < real(b); t++) found.push_back(b * window + t);
    return found;
  }
  int64_t real(int64_t b) const {
    if (!count) return window;
    return std::min<int64_t>(count[b] < 0 ? -1 - count[b] : count[b], window);
  }
  // Makes numbers `begin` to `end` of the padding of out [lines, window, N] zero, except in batch rows with a count
  // below 0, whose padding is not read.
  void clear(float* out, int64_t N, int64_t begin, int64_t end) const {
    for (int64_t b = 0; count && b < lines; b++)
      for (int64_t t = count[b]; t >= 0 && t < window; t++)
        std::fill(out + (b * window + t) * N + begin, out + (b * window + t) * N + end, 0.0f);
  }
};

// Matmul of the real rows with a matrix of N rows, in one pass over the weights.
inline void linear(const float* in, const Stored& w, float* out, const Windows& windows, int64_t K, int64_t N) {
  const std::vector<int64_t> rows = windows.rows();
  const int64_t M = rows.size();
  Lines x(M, K, w.format, [&](int64_t m, float*) { return in + rows[m] * K; });
  Team::run(M * K * N > WORTH, x.loop(), Loop{N, [&](int64_t begin, int64_t end, bool first) {
              windows.clear(out, N, begin, end);
              if (M == windows.lines * windows.window)
                return product(x.get(first), w, M, K, begin, end, out + begin, N);
              product_rows(x.get(first), w, rows, K, begin, end, [&](int64_t row, float* made, int64_t size) {
                std::copy_n(made, size, out + row * N + begin);
              });
            }, VL});
}

// A norm's weights or a bias.
struct Numbers {
  const void* data;
  int64_t dtype;

  // body(numbers) with a pointer to their type.
  template <class Body>
  void typed(Body body) const {
    switch (dtype) {
      case FLOAT32: return body((const float*)data);
      case BFLOAT16: return body((const BFloat16*)data);
      default: return body((const Float16*)data);
    }
  }
};

// A matrix with N rows, and the bias of its matmul, if any.
struct Matrix : Stored {
  Numbers bias;
  int64_t N;

  // line[n - begin] += bias[n]
  void add_bias(float* line, int64_t begin, int64_t end) const {
    if (bias.data)
      bias.typed([&](auto* from) {
        for (int64_t n = begin; n < end; n++) line[n - begin] += widen(from[n]);
      });
  }
};

// to = weight * x / sqrt(mean(x^2) + eps)
inline const float* norm(const float* x, const Numbers& weight, float eps, float* to, int64_t K) {
  Vec squares = {};
  int64_t k = 0;
  for (; k + VL <= K; k += VL) multiply_add(squares, load(x + k), load(x + k));
  float sum = total(squares);
  for (; k < K; k++) sum = __builtin_fmaf(x[k], x[k], sum);
  const float scale = 1.0f / std::sqrt(sum / (float)K + eps);
  weight.typed([&](auto* by) {
    for (k = 0; k + VL <= K; k += VL) {
      const Vec some = load(by + k) * (load(x + k) * scale);
      std::memcpy(to + k, &some, sizeof some);
    }
    for (; k < K; k++) to[k] = widen(by[k]) * (x[k] * scale);
  });
  return to;
}

// hidden and out [lines, window, width]; rows that are padding become zero.
struct Stream : Windows {
  const float* hidden;
  float* out;
  int64_t width;
  float eps;

  // A half's last loop: out = hidden + product(x)
  template <class Fill>
  auto add(const Lines<Fill>& x, const Matrix& matrix, const std::vector<int64_t>& rows, int64_t K) const {
    return Loop{width, [&, K](int64_t begin, int64_t end, bool first) {
                  clear(out, width, begin, end);
                  product_rows(x.get(first), matrix, rows, K, begin, end, [&](int64_t row, float* made, int64_t size) {
                    const int64_t at = row * width + begin;
                    matrix.add_bias(made, begin, end);
                    for (int64_t n = 0; n < size; n++) out[at + n] = hidden[at + n] + made[n];
                  });
                }, VL};
  }
};

// from [D] rotated by the angles of cos and sin [D], as paceline.decoder.models.rope.apply_rope.
inline void rotate(const float* from, const float* cos, const float* sin, float* to, int64_t D) {
  for (int64_t d = 0, half = D / 2; d < half; d++) {
    to[d] = from[d] * cos[d] + -from[d + half] * sin[d];
    to[d + half] = from[d + half] * cos[d + half] + from[d] * sin[d + half];
  }
}

// out = hidden + product(attend(rotate(product(norm(hidden))))); cos and sin [lines, window, D].
inline void attention_half(const Stream& s, const Numbers& weight, const Matrix& qkv, const Matrix& result,
                           const float* cos, const float* sin, const Attend& a, const Cache& cache) {
  const std::vector<int64_t> rows = s.rows();
  const int64_t M = rows.size(), H = s.width, D = a.width, all = a.heads * D, group = a.group();
  std::vector<int64_t> lines, first;  // batch rows with real rows, and the index of each one's first among these
  for (int64_t m = 0; m < M; m++)
    if (const int64_t b = rows[m] / s.window; !m || b != lines.back()) lines.push_back(b), first.push_back(m);
  std::vector<float> mixed(M * qkv.N), seen(M * all);
  Lines x(M, H, qkv.format, [&](int64_t m, float* to) { return norm(s.hidden + rows[m] * H, weight, s.eps, to, H); });
  Lines y(M, all, result.format, [&](int64_t m, float*) { return seen.data() + m * all; });
  const Loop making{qkv.N, [&](int64_t begin, int64_t end, bool first) {
                      product(x.get(first), qkv, M, H, begin, end, mixed.data() + begin, qkv.N);
                      for (int64_t m = 0; m < M; m++) qkv.add_bias(mixed.data() + m * qkv.N + begin, begin, end);
                    }, VL};
  const Loop looking{(int64_t)lines.size() * a.kv_heads, [&](int64_t begin, int64_t end, bool) {
    static thread_local std::vector<float> turned;
    for (int64_t item = begin; item < end; item++) {
      const int64_t b = lines[item / a.kv_heads], begins = first[item / a.kv_heads], g = item % a.kv_heads;
      const int64_t n = std::min<int64_t>(a.count[b], a.window);
      const float* line = mixed.data() + begins * qkv.N;
      turned.resize(n * (group + 1) * D);  // of each token: the group's queries, then its key
      for (int64_t t = 0; t < n; t++) {
        const float *row = line + t * qkv.N, *c = cos + (b * s.window + t) * D, *i = sin + (b * s.window + t) * D;
        float* to = turned.data() + t * (group + 1) * D;
        for (int64_t h = 0; h < group; h++) rotate(row + (g * group + h) * D, c, i, to + h * D, D);
        rotate(row + all + g * D, c, i, to + group * D, D);
      }
      const float *q = turned.data(), *v = line + all + (a.kv_heads + g) * D;
      float* to = seen.data() + begins * all + g * group * D;
      const Heads own{q, q + group * D, v, to, (group + 1) * D, (group + 1) * D, qkv.N, all, g * group};
      attend_group(a, b, g, own, cache);
    }
  }};
  Team::run(M * H * qkv.N > WORTH, x.loop(), making, looking, y.loop(), s.add(y, result, rows, all));
}

// out = hidden + product(silu(gate) * up), where gate and up are the halves of product(norm(hidden)).
inline void mlp_half(const Stream& s, const Numbers& weight, const Matrix& gate_up, const Matrix& down) {
  const std::vector<int64_t> rows = s.rows();
  const int64_t M = rows.size(), H = s.width, F = gate_up.N / 2, line = (F + VL - 1) / VL * VL;
  std::vector<float> gates(M * line), ups(M * line);
  Lines x(M, H, gate_up.format, [&](int64_t m, float* to) {
    return norm(s.hidden + rows[m] * H, weight, s.eps, to, H);
  });
  Lines y(M, F, down.format, [&](int64_t m, float*) { return gates.data() + m * line; });
  const Loop making{F, [&](int64_t begin, int64_t end, bool first) {
    const Prepared prepared = x.get(first);
    product(prepared, gate_up, M, H, begin, end, gates.data() + begin, line);
    product(prepared, gate_up, M, H, F + begin, F + end, ups.data() + begin, line);
    for (int64_t m = 0; m < M; m++) {
      float *gate = gates.data() + m * line, *up = ups.data() + m * line;
      gate_up.add_bias(gate + begin, begin, end);
      gate_up.add_bias(up + begin, F + begin, F + end);
      for (int64_t n = begin; n < end; n += VL) {
        const Vec gated = silu(load(gate + n)) * load(up + n);
        std::memcpy(gate + n, &gated, sizeof gated);
      }
    }
  }, VL};
  Team::run(M * H * gate_up.N > WORTH, x.loop(), making, y.loop(), s.add(y, down, rows, F));
}

}  // namespace paceline
