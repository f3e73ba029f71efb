// The two halves of a Llama layer, each with its norm and its sum onto the stream, in one piece of work for the team:
// what lies between the products costs more as operations of their own than it takes to compute.
#pragma once

#include <vector>

#include "attention.h"
#include "product.h"
#include "softmax.h"

namespace paceline [[gnu::visibility("hidden")]] {

// Lines of a window, of which some tokens are padding: the numbers of those that are real.
inline std::vector<int64_t> real_rows(int64_t batch, int64_t window, const int32_t* count) {
  std::vector<int64_t> rows;
  rows.reserve(batch * window);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t t = 0; t < (count ? std::min<int64_t>(count[b], window) : window); t++) rows.push_back(b * window + t);
  return rows;
}

// Makes the padding of lines of T rows of N numbers zero, but for lines whose count is below 0, which nobody reads. Of
// the team each thread has every so many-th line; who needs the zeros waits for all.
inline void clear_padding(const Team::Member& me, float* out, const int32_t* count, int64_t lines, int64_t T, int64_t N) {
  if (!count) return;
  for (int64_t b = me.number; b < lines; b += me.threads)
    if (count[b] >= 0) std::fill(out + (b * T + std::min<int64_t>(count[b], T)) * N, out + (b + 1) * T * N, 0.0f);
}

// `linear` of the real rows of lines of T, in one pass over the weights; see `clear_padding` for the others.
inline void linear_real(const float* in, const Stored& w, float* out, const int32_t* count, int64_t lines, int64_t T,
                        int64_t K, int64_t N) {
  const std::vector<int64_t> rows = real_rows(lines, T, count);
  const int64_t M = rows.size(), size = prepared(w.format, K);
  Shared work(N, PIECES);
  std::vector<float> common(M > FEW ? M * size : 0);
  Team::run(M * K * N > WORTH, [&](const Team::Member& me) {
    clear_padding(me, out, count, lines, T, N);
    const float* x = prepare(me, M, size, common.data(), [&](int64_t m, float* to) {
      arrange_line(w.format, in + rows[m] * K, to, K);
    });
    work.run(me, [&](int64_t begin, int64_t end) {
      product(x, w, M, K, begin, end, [&](int64_t m, int64_t n, float value) { out[rows[m] * N + n] = value; });
    });
  });
}

// weight * x / sqrt(mean(x^2) + eps), in the order a product with a matrix of that format reads it.
template <class W>
void norm_line(const float* x, const W* weight, float eps, int64_t format, float* to, int64_t K) {
  Vec squares = {};
  int64_t k = 0;
  for (; k + VL <= K; k += VL) multiply_add(squares, load(x + k), load(x + k));
  float sum = total(squares);
  for (; k < K; k++) sum = __builtin_fmaf(x[k], x[k], sum);
  const float scale = 1.0f / std::sqrt(sum / (float)K + eps);
  arrange_line(
      format, to, K, [&](int64_t k) { return load(weight + k) * (load(x + k) * scale); },
      [&](int64_t k) { return widen(weight[k]) * (x[k] * scale); });
}

// hidden and out [batch, window, width]; rows that are padding become zero.
struct Stream {
  const float* hidden;
  float* out;
  int64_t batch, window, width;
  const int32_t* count;  // [batch], or null: every row is real
  float eps;
  std::vector<int64_t> rows() const { return real_rows(batch, window, count); }
  void clear(const Team::Member& me) const { clear_padding(me, out, count, batch, window, width); }
};

// from [D] turned by the angles of cos and sin [D], as paceline.decoder.models.rope.apply_rope.
inline void rotate(const float* from, const float* cos, const float* sin, float* to, int64_t D) {
  for (int64_t d = 0, half = D / 2; d < half; d++) {
    to[d] = from[d] * cos[d] + -from[d + half] * sin[d];
    to[d + half] = from[d + half] * cos[d + half] + from[d] * sin[d + half];
  }
}

// out = hidden + product(attend(rotate(product(norm(hidden))))); cos and sin [batch, window, D].
template <class W>
void attention_half(const Stream& s, const W* norm, const Matrix<W>& qkv, const Matrix<W>& result, const float* cos,
                    const float* sin, const Attend& a, const Cache& cache) {
  const std::vector<int64_t> rows = s.rows();
  const int64_t M = rows.size(), H = s.width, D = a.width, all = a.heads * D, group = a.group();
  std::vector<int64_t> lines, first;  // lines with real rows, and the place among these of each one's first
  for (int64_t m = 0; m < M; m++)
    if (const int64_t b = rows[m] / s.window; !m || b != lines.back()) lines.push_back(b), first.push_back(m);
  const int64_t room = std::max(prepared(qkv.format, H), prepared(result.format, all));
  std::vector<float> mixed(M * qkv.N), seen(M * all), common(M > FEW ? M * room : 0);
  Shared making(qkv.N, PIECES), looking(lines.size() * a.kv_heads, PIECES, 1), adding(H, PIECES);
  Team::run(M * H * qkv.N > WORTH, [&](const Team::Member& me) {
    s.clear(me);
    const float* x = prepare(me, M, prepared(qkv.format, H), common.data(), [&](int64_t m, float* to) {
      norm_line(s.hidden + rows[m] * H, norm, s.eps, qkv.format, to, H);
    });
    making.run(me, [&](int64_t begin, int64_t end) {
      product(x, qkv, M, H, begin, end, [&](int64_t m, int64_t n, float value) {
        mixed[m * qkv.N + n] = qkv.plus(value, n);
      });
    });
    me.barrier();
    looking.run(me, [&](int64_t begin, int64_t end) {
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
    });
    me.barrier();
    const float* y = prepare(me, M, prepared(result.format, all), common.data(), [&](int64_t m, float* to) {
      arrange_line(result.format, seen.data() + m * all, to, all);
    });
    adding.run(me, [&](int64_t begin, int64_t end) {
      product(y, result, M, all, begin, end, [&](int64_t m, int64_t n, float value) {
        s.out[rows[m] * H + n] = s.hidden[rows[m] * H + n] + result.plus(value, n);
      });
    });
  });
}

// out = hidden + product(silu(gate) * up), where gate and up are the halves of product(norm(hidden)).
template <class W>
void mlp_half(const Stream& s, const W* norm, const Matrix<W>& gate_up, const Matrix<W>& down) {
  const std::vector<int64_t> rows = s.rows();
  const int64_t M = rows.size(), H = s.width, F = gate_up.N / 2, line = (F + VL - 1) / VL * VL;
  const int64_t room = std::max(prepared(gate_up.format, H), prepared(down.format, F));
  std::vector<float> gates(M * line), ups(M * line), common(M > FEW ? M * room : 0);
  Shared making(F, PIECES), adding(H, PIECES);
  Team::run(M * H * gate_up.N > WORTH, [&](const Team::Member& me) {
    s.clear(me);
    const float* x = prepare(me, M, prepared(gate_up.format, H), common.data(), [&](int64_t m, float* to) {
      norm_line(s.hidden + rows[m] * H, norm, s.eps, gate_up.format, to, H);
    });
    making.run(me, [&](int64_t begin, int64_t end) {
      product(x, gate_up, M, H, begin, end, [&](int64_t m, int64_t n, float value) {
        gates[m * line + n] = gate_up.plus(value, n);
      });
      product(x, gate_up, M, H, F + begin, F + end, [&](int64_t m, int64_t n, float value) {
        ups[m * line + n - F] = gate_up.plus(value, n);
      });
      for (int64_t m = 0; m < M; m++)
        for (int64_t n = m * line + begin; n < m * line + end; n += VL) {
          Vec gated = silu(load(&gates[n])) * load(&ups[n]);
          std::memcpy(&gates[n], &gated, sizeof gated);
        }
    });
    me.barrier();
    const float* y = prepare(me, M, prepared(down.format, F), common.data(), [&](int64_t m, float* to) {
      arrange_line(down.format, gates.data() + m * line, to, F);
    });
    adding.run(me, [&](int64_t begin, int64_t end) {
      product(y, down, M, F, begin, end, [&](int64_t m, int64_t n, float value) {
        s.out[rows[m] * H + n] = s.hidden[rows[m] * H + n] + down.plus(value, n);
      });
    });
  });
}

}  // namespace paceline
