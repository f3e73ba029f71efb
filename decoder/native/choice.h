// The distribution of the next token (temperature, top-k, top-p, min-p) and the choice of one by counter-based Gumbel noise.
//
// A choice costs little more than reading its row: only ids that can still win get noise, and top-p is checked for the
// winner only, not for every token.
#pragma once

#include "row.h"
#include "team.h"

namespace paceline [[gnu::visibility("hidden")]] {

// Rows of logits, their sampling values, and the noise of their positions. `ids` is null for all ids in order.
struct Choose {
  int64_t batch, window, vocabulary, stream;
  const float *logits, *params;
  const int32_t *positions, *keys, *ids;

  int32_t id(int64_t place) const { return ids ? ids[place] : (int32_t)place; }
  const float* param(int64_t i) const { return params + i / window * 4; }
  // No request is in the slot, or the row is not used: its logits are not read.
  bool idle(int64_t i) const { return param(i)[0] < 0 || positions[i] < 0; }
  int64_t seated() const {
    int64_t found = 0;
    for (int64_t b = 0; b < batch; b++) found += !idle(b * window);
    return found;
  }
  RowKeys row_keys(int64_t i) const { return RowKeys(keys + i / window * 4, positions[i], stream); }
};

// Samples from all ids that top-k and min-p keep. The token is the choice if top-p keeps it; if not, smaller weights
// are cut too, and sampling is repeated among the larger ones.
int32_t sample(Row& row, const RowKeys& keys, const float* param) {
  const float top_p = param[2], min_p = param[3];
  if (top_p < 1 || min_p > 0) row.weigh();
  if (min_p > 0) row.cut(-1, min_p);
  for (;;) {
    const int64_t place = row.draw(keys);
    if (!(top_p < 1)) return row.id(place);
    const float weight = row.weights[place];
    if (weight >= 1 || !row.enough(ordered(weight), top_p)) return row.id(place);
    row.cut(ordered(weight), min_p);
  }
}

void choose(const Choose& c, int32_t* out) {
  const int64_t V = c.vocabulary;
  each_row(c.seated() * c.window * V > 16384, c.batch * c.window, [&](int64_t i) {
    if (c.idle(i)) {
      out[i] = 0;
      return;
    }
    if (c.param(i)[0] <= 0) {  // one-hot: no filter removes the largest logit
      out[i] = argmax(c.logits + i * V, V);
      return;
    }
    static thread_local Row row;
    row.temper(c.logits + i * V, V, c.param(i));
    out[i] = sample(row, c.row_keys(i), c.param(i));
  });
}

// Applies the temperature and all filters to a row.
void filter(Row& row, const float* line, int64_t V, const float* param) {
  row.temper(line, V, param);
  if (!(param[2] < 1 || param[3] > 0)) return;
  row.weigh();
  row.cut(param[2] < 1 ? row.edge(param[2]) : -1, param[3]);
}

// Adds noise to the scores of a row.
void disturb(Row& row, const RowKeys& keys, const Choose& c) {
  const bool listed = c.ids || !row.ids.empty();
  for (int64_t first = 0; first < row.count; first += WORDS) {
    const int64_t size = std::min<int64_t>(WORDS, row.count - first);
    int32_t list[WORDS] = {};
    for (int64_t j = 0; listed && j < size; j++) list[j] = c.id(row.id(first + j));
    float drawn[WORDS];
    Words high, low;
    limbs(listed ? 0 : (int32_t)first, listed ? list : nullptr, high, low);
    words(keys, high, low);
    gumbel(high, low, drawn);
    for (int64_t j = 0; j < size; j++) row.scores[first + j] += drawn[j];
  }
}

// The first `count` choices of every row and their log-probabilities, as paceline.core.probs.rank_tokens. Ids that the
// filters cut come last.
void rank(const Choose& c, int64_t count, int32_t* tokens, float* logprobs) {
  const int64_t V = c.vocabulary;
  each_row(c.seated() * c.window * V > 16384, c.batch * c.window, [&](int64_t i) {
    if (c.idle(i)) {
      for (int64_t k = 0; k < count; k++) tokens[i * count + k] = c.id(k), logprobs[i * count + k] = 0;
      return;
    }
    static thread_local Row row;
    static thread_local std::vector<float> whole;
    const float* line = c.logits + i * V;
    if (c.param(i)[0] <= 0) {
      row.resize(V), row.ids.clear();
      std::copy(line, line + V, row.scores.begin());
    } else {
      filter(row, line, V, c.param(i));
      disturb(row, c.row_keys(i), c);
    }
    if (!row.ids.empty()) {  // back to the whole row
      whole.assign(V, NEGATIVE);
      for (int64_t j = 0; j < row.count; j++) whole[row.id(j)] = row.scores[j];
      row.resize(V), row.ids.clear();
      std::copy(whole.begin(), whole.end(), row.scores.begin());
    }
    row.measure();
    const float high = row.most = row.maxima[row.highest_block()];
    row.weigh();
    const float mass = std::log(row.mass);
    for (int64_t k = 0; k < count; k++) {
      const float score = row.maxima[row.highest_block()];
      tokens[i * count + k] = c.id(row.take());
      logprobs[i * count + k] = score - high - mass;
    }
  });
}

// The filtered probabilities of every row, as paceline.core.probs.probabilities; weights below exp(-87) of the largest
// are zero.
void probabilities(const float* logits, const float* params, float* out, int64_t batch, int64_t window, int64_t V) {
  each_row(batch * window * V > 16384, batch * window, [&](int64_t i) {
    const float *line = logits + i * V, *param = params + i / window * 4;
    float* to = out + i * V;
    std::fill(to, to + V, 0.0f);
    if (param[0] <= 0) {
      to[param[0] < 0 ? 0 : argmax(line, V)] = 1.0f;
      return;
    }
    static thread_local Row row;
    filter(row, line, V, param);
    row.weigh();
    for (int64_t v = 0; v < row.count; v++)
      if (row.scores[v] >= row.most - 87.0f) to[row.id(v)] = row.weights[v] / row.mass;
  });
}

}  // namespace paceline
