// A row of scores to sample from: its largest, the scores that top-k, top-p and min-p keep, and the choice by noise.
#pragma once

#include <algorithm>
#include <vector>

#include "noise.h"
#include "softmax.h"

namespace paceline [[gnu::visibility("hidden")]] {

constexpr int64_t BLOCK = 64;  // scores in a block with a stored maximum
constexpr float NEGATIVE = -1.0e30f, LOWEST = -INFINITY;
constexpr float MOST_NOISE = 23.0f;

inline int32_t ordered(float x) {
  int32_t word;
  x += 0.0f;
  std::memcpy(&word, &x, 4);
  return word < 0 ? word ^ 0x7FFFFFFF : word;
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
  return (int32_t)V - 1;  // all NaN: return a legal id
}

// Scores in whole blocks with the largest of each; after the end they are the lowest value.
struct Blocks {
  int64_t count = 0;
  std::vector<float> scores, maxima;

  void resize(int64_t n) {
    count = n;
    const int64_t blocks = (n + BLOCK - 1) / BLOCK;
    scores.resize(blocks * BLOCK), maxima.resize(blocks);
    std::fill(scores.begin() + n, scores.end(), LOWEST);
  }

  void measure(int64_t block) {
    Vec tops = Vec{} + LOWEST;
    for (int64_t i = 0; i < BLOCK; i += VL) tops = larger(load(scores.data() + block * BLOCK + i), tops);
    maxima[block] = largest(tops);
  }

  void measure() {
    for (size_t block = 0; block < maxima.size(); block++) measure(block);
  }

  int64_t highest_block() const { return std::max_element(maxima.begin(), maxima.end()) - maxima.begin(); }

  // Removes the largest score and returns its position, the first of equals.
  int64_t take() {
    const int64_t block = highest_block(), first = block * BLOCK;
    int64_t place = first;
    while (place < first + BLOCK - 1 && scores[place] != maxima[block]) place++;
    scores[place] = 2 * NEGATIVE;
    measure(block);
    return std::min(place, count - 1);  // all NaN: return a legal position
  }
};

// A row to sample from: the scores after temperature that top-k keeps, in the order of ids, and their weights.
struct Row : Blocks {
  std::vector<int32_t> ids;  // of the scores, in whole blocks; empty if they are all ids in order
  std::vector<float> weights;
  float most;  // the largest score, whose weight is 1
  float mass;  // of all weights

  void temper(const float* line, int64_t n, const float* param) {
    resize(n);
    for (int64_t v = 0; v < n; v++) scores[v] = line[v] / param[0];
    ids.clear();
    measure();
    if (param[1] > 0 && param[1] < (float)n) keep_top((int64_t)param[1]);
    most = maxima[highest_block()];
  }

  // Keeps the k largest scores and all that equal the smallest of these. The k-th largest of the blocks' maxima is a
  // lower bound, so that few scores are examined.
  void keep_top(int64_t k) {
    static thread_local std::vector<float> order;
    static thread_local std::vector<int32_t> found;
    float least = LOWEST;
    auto kth = [&] {
      std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<float>());
      return order[k - 1];
    };
    if (k <= (int64_t)maxima.size()) order = maxima, least = kth();
    found.clear(), order.clear();
    for (int64_t v = 0; v < count; v++) {
      if (v % BLOCK == 0 && maxima[v / BLOCK] < least) {
        v += BLOCK - 1;
        continue;
      }
      if (scores[v] >= least) found.push_back(v), order.push_back(scores[v]);
    }
    if ((int64_t)order.size() > k) least = kth();
    int64_t left = 0;
    for (const int32_t place : found)
      if (scores[place] >= least) found[left] = place, scores[left++] = scores[place];
    if (!left) found.assign(left = 1, 0);  // all NaN: return a legal id
    resize(left);
    measure();
    ids.assign(scores.size(), 0);
    std::copy(found.begin(), found.begin() + left, ids.begin());
  }

  void weigh() {
    weights.resize(scores.size());
    Vec sum = {};
    for (int64_t i = 0; i < (int64_t)scores.size(); i += VL) {
      Vec e = exponential(load(scores.data() + i) - most);
      if (i + VL > count) e = lanes() < (int32_t)(count - i) ? e : Vec{};
      sum += e;
      std::memcpy(weights.data() + i, &e, sizeof e);
    }
    mass = total(sum);
  }

  // Whether the weights above this order reach `share` of the mass.
  bool enough(int32_t above, float share) const {
    Vec sum = {};
    for (size_t i = 0; i < weights.size(); i += VL) {
      VecI line;
      std::memcpy(&line, weights.data() + i, sizeof line);  // weights are not negative, so they compare like their bits
      sum += line > above ? load(weights.data() + i) : Vec{};
    }
    return total(sum) >= share * mass;
  }

  // Weights above the result, in their order, are inside top-p: the largest order at which they do not reach it.
  int32_t edge(float top_p) const {
    int32_t below = -1;
    for (int bit = 30; bit >= 0; bit--)
      if (enough(below + (1 << bit), top_p)) below += 1 << bit;
    return below;
  }

  // Keeps the scores whose weights are above an order and at least `floor`.
  void cut(int32_t above, float floor) {
    for (int64_t i = 0; i < count; i++)
      if (ordered(weights[i]) <= above || weights[i] < floor) scores[i] = NEGATIVE;
    measure();
  }

  // Position of the largest score plus noise, the first of equals.
  int64_t draw(const RowKeys& keys) const {
    float best = LOWEST;
    int64_t place = -1;
    auto visit = [&](int64_t block) {
      // Noise above d has a word whose upper half is at most 2^16 (1 - exp(-exp(-d))); plus two for rounding.
      const float behind = best - maxima[block];
      if (behind > MOST_NOISE) return;
      const float bound = 65536 * 1.01f * std::exp(-behind) + 2;
      const uint16_t limit = bound < 65535 ? (uint16_t)bound : 65535;
      Words high[BLOCK / WORDS], low[BLOCK / WORDS], any = {};
      for (int i = 0; i < BLOCK / WORDS; i++) {
        limbs(block * BLOCK + i * WORDS, ids.empty() ? nullptr : ids.data(), high[i], low[i]);
        words(keys, high[i], low[i]);
        any |= (Words)(high[i] <= limit);
      }
      uint64_t quarters[4];
      std::memcpy(quarters, &any, sizeof any);
      if (!(quarters[0] | quarters[1] | quarters[2] | quarters[3])) return;
      for (int i = 0; i < BLOCK / WORDS; i++) {
        float drawn[WORDS];
        gumbel(high[i], low[i], drawn);
        for (int j = 0; j < WORDS; j++) {
          const int64_t at = block * BLOCK + i * WORDS + j;
          const float score = scores[at] + drawn[j];
          if (score > best || (score == best && at < place)) best = score, place = at;
        }
      }
    };
    const int64_t first = highest_block();
    visit(first);
    for (int64_t block = 0; block < (int64_t)maxima.size(); block++)
      if (block != first) visit(block);
    return place >= 0 && place < count ? place : argmax(scores.data(), count);
  }

  int32_t id(int64_t place) const { return ids.empty() ? (int32_t)place : ids[place]; }
};

}  // namespace paceline
