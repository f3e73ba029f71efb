// The law of the next token (temperature, top-k, top-p, min-p) and the choice of one by counter-based Gumbel noise.
#pragma once

#include <algorithm>
#include <vector>

#include "softmax.h"

namespace {

// The tables of paceline.core.noise.log_table, handed over once when the library is loaded.
const int32_t* noise_table = nullptr;
constexpr int CELLS = 2048;
constexpr int32_t LN2 = 11629080;
constexpr uint32_t GOLDEN = 0x9E3779B9u, STREAM = 0x6C8E9CF5u, ROW = 0x2545F491u;

template <class U>
inline U mix(U x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
inline VecI look_up(VecI cell) {
#ifdef __AVX2__
  return (VecI)_mm256_i32gather_epi32(noise_table, (__m256i)cell, 4);
#else
  VecI found;
  for (int i = 0; i < VL; i++) found[i] = noise_table[cell[i]];
  return found;
#endif
}
inline VecI interpolate(VecI cell, VecI part) {
  VecI left = look_up(cell);
  return left + (((look_up(cell + 1) - left) * part) >> 12);
}
inline VecI log_fixed(Vec x) {
  VecI word = (VecI)x;
  return ((word >> 23) - 127) * LN2 + interpolate((word >> 12) & (CELLS - 1), word & 0xFFF);
}
inline Vec to_float(VecI x) { return __builtin_convertvector(x, Vec); }

// The same steps as paceline.core.noise.gumbel_of_bits.
inline Vec gumbel(VecU bits) {
  VecI upper = (VecI)bits < 0;  // all ones or zero
  VecU folded = bits ^ (VecU)upper;
  Vec small = to_float((VecI)(folded >> 16)) * 0x1p-16f + (to_float((VecI)(folded & 0xFFFFu)) + 0.5f) * 0x1p-32f;
  VecI first = log_fixed(small);
  VecI rest = interpolate((VecI)((folded >> 20) & (CELLS - 1)) + CELLS + 1, (VecI)((folded >> 8) & 0xFFFu));
  VecI inner = log_fixed(larger(to_float(first) * -0x1p-24f, Vec{} + 0x1p-24f));
  return to_float(upper ? -inner : -first - rest) * 0x1p-24f;
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
    int32_t edge = search(order.data(), nullptr, V, top_k);
    float room = top_k;
    for (int64_t i = 0; i < V; i++) room -= order[i] > edge;
    for (int64_t i = 0; i < V; i++)
      if (order[i] < edge || (order[i] == edge && room-- < 1)) s[i] = NEGATIVE;
  }
  if (top_p < 1) {
    softmax(s, weights.data(), V);
    for (int64_t i = 0; i < V; i++) order[i] = ordered(weights[i]);
    int32_t edge = search(order.data(), weights.data(), V, top_p);
    float before = 0, rank = 0;
    for (int64_t i = 0; i < V; i++) before += order[i] > edge ? weights[i] : 0.0f;
    for (int64_t i = 0; i < V; i++) {
      if (order[i] > edge) continue;
      bool kept = order[i] == edge && before + rank++ * weights[i] < top_p;
      if (!kept) s[i] = NEGATIVE;
    }
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

struct Choose {
  int64_t batch, window, vocabulary, stream;
  const float *logits, *knobs;
  const int32_t *positions, *keys;
};

void choose(const Choose& c, int32_t* out) {
  const int64_t V = c.vocabulary;
#pragma omp parallel for schedule(static) if (c.batch * c.window * V > 16384)
  for (int64_t i = 0; i < c.batch * c.window; i++) {
    const float *logits = c.logits + i * V, *knobs = c.knobs + i / c.window * 4;
    if (knobs[0] <= 0) {  // one-hot: no filter removes the largest logit
      out[i] = argmax(logits, V);
      continue;
    }
    static thread_local std::vector<float> scores, weights;
    static thread_local std::vector<int32_t> order;
    scores.resize(V + VL);
    for (int64_t v = 0; v < V; v++) scores[v] = logits[v] / knobs[0];
    filter(scores.data(), V, knobs[1], knobs[2], knobs[3], weights, order);
    uint32_t low = c.keys[i / c.window * 2], high = c.keys[i / c.window * 2 + 1];
    uint32_t key = mix(mix(low ^ ROW) + (uint32_t)c.positions[i] * GOLDEN);
    key = mix((key ^ high) + (uint32_t)c.stream * STREAM);
    uint32_t second = mix(key ^ GOLDEN);
    for (int64_t v = 0; v < V; v += VL) {
      Vec drawn = load(scores.data() + v) + gumbel(mix(mix(((VecU)lanes() + (uint32_t)v) * GOLDEN + key) ^ second));
      std::memcpy(scores.data() + v, &drawn, sizeof drawn);
    }
    out[i] = argmax(scores.data(), V);
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
