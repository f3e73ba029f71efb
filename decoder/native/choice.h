// The law of the next token (temperature, top-k, top-p, min-p) and the choice of one by counter-based Gumbel noise.
#pragma once

#include <algorithm>
#include <vector>

#include "softmax.h"

namespace {

constexpr int ID_ROUNDS = 7, ROW_ROUNDS = 5;
constexpr float NOISE_SCALE = -0x1p-16f * (1 - 0x1p-24f);

// Keys of a row: two limbs of 16 bits, then the multipliers of the rounds of its ids, as paceline.core.noise.row_keys.
struct RowKeys {
  uint32_t limbs[2], multipliers[8];
  RowKeys(const int32_t* seed, int32_t position, int64_t stream) {
    const uint32_t place[2] = {(uint32_t)position & 0xFFFF, (uint32_t)(position >> 16) ^ ((uint32_t)stream << 8)};
    uint32_t x[2] = {(uint32_t)seed[0] ^ place[0], (uint32_t)seed[1] ^ place[1]};
    uint32_t y[2] = {(uint32_t)seed[2], (uint32_t)seed[3]};
    auto permute = [&](int rounds) {
      for (int i = 0; i < rounds; i++) {
        const uint32_t add = (0x9E37 + i * 0x3C6E) & 0xFFFF, first = x[0] * 0xB5 + add, second = x[1] * 0xB5 + add;
        x[0] = y[1] ^ (first >> 8), x[1] = y[0] ^ (second >> 8);
        y[0] = first & 0xFFFF, y[1] = second & 0xFFFF;
      }
    };
    permute(ROW_ROUNDS);
    x[0] ^= place[0], x[1] ^= place[1];
    permute(ROW_ROUNDS);
    limbs[0] = x[0], limbs[1] = x[1];
    uint32_t halves[4] = {y[0], y[1], 0, 0};
    permute(1);
    halves[2] = x[0], halves[3] = x[1];
    for (int i = 0; i < 4; i++) {
      multipliers[i] = (halves[i] & 0xFF) | 0x81;
      multipliers[4 + i] = (halves[i] >> 8) | 0x81;
    }
  }
};

// ln of positive, normal numbers: Cephes' logf, one rounding at a time, as paceline.core.noise._log.
inline Vec logarithm(Vec x) {
  VecI bits = (VecI)x;
  VecI exponent = ((bits >> 23) & 0xFF) - 126;
  Vec mantissa = (Vec)((bits & 0x007FFFFF) | 0x3F000000);  // 0.5 to 1
  VecI below = mantissa < 0.70710678118654752440f;         // all ones or zero
  Vec m = (below ? mantissa + mantissa : mantissa) - 1.0f;
  Vec e = __builtin_convertvector(exponent + below, Vec);
  Vec square = m * m;
  constexpr float polynomial[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                  -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                  2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  Vec y = Vec{} + polynomial[0];
  for (int i = 1; i < 9; i++) y = y * m + polynomial[i];
  y = y * m * square;
  y = y + e * -2.12194440e-4f;
  y = y - square * 0.5f;
  return (m + y) + e * 0.693359375f;
}

// The same steps as paceline.core.noise.gumbel_of_words.
inline Vec gumbel_of_words(VecI high, VecI low) {
  Vec fraction = __builtin_convertvector(low, Vec) * 0x1p-16f + 0x1p-17f;
  Vec negative = (__builtin_convertvector(high, Vec) + fraction) * NOISE_SCALE;
  Vec rest = negative + 1.0f;
  Vec exponential = logarithm(rest) / (rest - 1.0f) * -negative;
  return -logarithm(rest == 1.0f ? -negative : exponential);
}

// Noise of eight ids of a row. Limbs are below 2^16, so that signed and unsigned words are the same.
inline Vec gumbel(const RowKeys& row, VecI ids) {
  VecI high = (ids & 0xFFFF) ^ (int32_t)row.limbs[0], low = (ids >> 16) ^ (int32_t)row.limbs[1];
  for (int i = 0; i < ID_ROUNDS; i++) {
    VecI product = high * (int32_t)row.multipliers[i];
    high = low ^ (product >> 8);
    low = product & 0xFFFF;
  }
  return gumbel_of_words(high, low);
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

// Top-k, top-p and min-p on tempered logits, as paceline.core.probs.filtered.
void filter(float* s, int64_t V, float top_k, float top_p, float min_p, std::vector<float>& weights,
            std::vector<int32_t>& order) {
  weights.resize(V + VL);
  order.assign(V + VL, INT32_MIN);  // behind the end: below every edge that is ever tried
  if (top_k > 0 && top_k < (float)V) {
    for (int64_t i = 0; i < V; i++) order[i] = ordered(s[i]);
    const int32_t edge = search(order.data(), nullptr, V, top_k);
    for (int64_t i = 0; i < V; i++)
      if (order[i] < edge) s[i] = NEGATIVE;
  }
  if (top_p < 1) {
    softmax(s, weights.data(), V);
    for (int64_t i = 0; i < V; i++) order[i] = ordered(weights[i]);
    const int32_t edge = search(order.data(), weights.data(), V, top_p);
    for (int64_t i = 0; i < V; i++)
      if (order[i] < edge) s[i] = NEGATIVE;
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

// Rows of logits, how they sample, and the noise of their positions. `ids` is null for all ids in order.
struct Choose {
  int64_t batch, window, vocabulary, stream;
  const float *logits, *knobs;
  const int32_t *positions, *keys, *ids;

  // What the choice is the largest of: tempered, filtered and with noise where the row samples. Padded to whole vectors.
  void score(int64_t i, std::vector<float>& scores) const {
    const int64_t V = vocabulary;
    const float *line = logits + i * V, *knob = knobs + i / window * 4;
    scores.resize(V + VL);
    if (knob[0] <= 0) {  // one-hot: no filter removes the largest logit
      std::copy(line, line + V, scores.begin());
      return;
    }
    static thread_local std::vector<float> weights;
    static thread_local std::vector<int32_t> order;
    for (int64_t v = 0; v < V; v++) scores[v] = line[v] / knob[0];
    filter(scores.data(), V, knob[1], knob[2], knob[3], weights, order);
    const RowKeys row(keys + i / window * 4, positions[i], stream);
    for (int64_t v = 0; v < V; v += VL) {
      VecI id = lanes() + (int32_t)v;
      if (ids)
        for (int j = 0; j < VL; j++) id[j] = v + j < V ? ids[v + j] : 0;
      const Vec drawn = load(scores.data() + v) + gumbel(row, id);
      std::memcpy(scores.data() + v, &drawn, sizeof drawn);
    }
  }
};

void choose(const Choose& c, int32_t* out) {
  const int64_t V = c.vocabulary;
#pragma omp parallel for schedule(static) if (c.batch * c.window * V > 16384)
  for (int64_t i = 0; i < c.batch * c.window; i++) {
    if (c.knobs[i / c.window * 4] <= 0) {
      out[i] = argmax(c.logits + i * V, V);
      continue;
    }
    static thread_local std::vector<float> scores;
    c.score(i, scores);
    out[i] = argmax(scores.data(), V);
  }
}

// The first `count` choices of every row and their log-probabilities, as paceline.core.probs.rank_tokens.
void rank(const Choose& c, int64_t count, int32_t* tokens, float* logprobs) {
  const int64_t V = c.vocabulary;
#pragma omp parallel for schedule(static) if (c.batch * c.window * V > 16384)
  for (int64_t i = 0; i < c.batch * c.window; i++) {
    static thread_local std::vector<float> scores, weights;
    c.score(i, scores);
    weights.assign(scores.begin(), scores.end());
    const float high = *std::max_element(scores.begin(), scores.begin() + V);
    const float mass = -std::log(weigh(weights.data(), V));
    for (int64_t k = 0; k < count; k++) {
      const int32_t best = argmax(scores.data(), V);
      tokens[i * count + k] = c.ids ? c.ids[best] : best;
      logprobs[i * count + k] = scores[best] - high - mass;
      scores[best] = 2 * NEGATIVE;
    }
  }
}

// The filtered law of every row, as paceline.core.probs.probabilities; what weighs less than exp(-87) of the most is zero.
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
