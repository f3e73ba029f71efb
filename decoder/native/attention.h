// Attention over the live rows of a cache, for chains and for trees of tokens; and moving an accepted path. A group of
// heads is computed in attention_block.h, a separate file because it takes long to compile.
#pragma once

#include <algorithm>
#include <vector>

#include "cache_rows.h"
#include "team.h"

namespace paceline [[gnu::visibility("hidden")]] {

struct Attend {
  int64_t batch, window, heads, kv_heads, width, rows;  // rows: of the cache, per slot and head
  const int32_t *row, *count, *slots;
  const int32_t* parents;  // of a tree: [batch, window], the parent of each row of a window; null for a chain
  int64_t reach = 0;  // positions that a token attends to, its own included; 0: all; -n: those of its chunk of n
  float cap = 0;  // scores become cap * tanh(score / cap); 0: no cap
  const float* slopes = nullptr;  // [heads], times the distance of a key, added to scores; null: none
  const float* sinks = nullptr;  // [heads], a score beside those of keys whose weight goes nowhere; null: none
  bool both_ways = false;  // every real row of a window attends to all of them, also to those after it; without slopes
  bool plain() const { return !reach && cap == 0 && !slopes; }
  int64_t group() const { return heads / kv_heads; }
  int64_t first(int64_t seen) const {  // first position in reach
    return reach < 0 ? (seen - 1) / -reach * -reach : reach && seen > reach ? seen - reach : 0;
  }
  int64_t stride() const { return (rows + VL - 1) / VL * VL; }
};

// Inputs and outputs of a group of heads in one batch row of a window: the first token's numbers, and the stride
// between tokens. A token's query heads are consecutive, in `q` and in `out`.
struct Heads {
  const float *q, *k, *v;
  float* out;
  int64_t q_step, k_step, v_step, out_step;
  int64_t head;  // index of the first
};

// One group of heads in batch row b: write its keys and values to their rows, then attend. In attention.cpp.
void attend_group(const Attend& a, int64_t b, int64_t g, const Heads& h, const Cache& c);

// All batch rows and groups; q and out [batch, window, heads, width], k and v [batch, window, kv_heads, width].
inline void attend(const Attend& a, const float* q, const float* k, const float* v, const Cache& cache, float* out) {
  const int64_t D = a.width, line = a.heads * D, kv_line = a.kv_heads * D, group = a.group() * D;
  Team::run(a.batch * a.heads * a.window * a.rows > 2048, Loop{a.batch * a.kv_heads, [&](int64_t begin, int64_t end, bool) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t b = item / a.kv_heads, g = item % a.kv_heads;
      const int64_t at = b * a.window * line + g * group, kv_at = b * a.window * kv_line + g * D, head = g * a.group();
      const Heads own{q + at, k + kv_at, v + kv_at, out + at, line, kv_line, kv_line, line, head};
      attend_group(a, b, g, own, cache);
      for (int64_t t = std::min<int64_t>(a.count[b], a.window); t < a.window; t++)
        std::fill_n(out + at + t * line, group, 0.0f);
    }
  }});
}

// Moves the rows of an accepted path after the root. They ascend, so none is overwritten before it is read.
inline void keep(char* cache, const int32_t* row, const int32_t* path, const int32_t* slots, int32_t* moved,
          const int64_t* sizes) {
  const int64_t batch = sizes[0], depth = sizes[1], heads = sizes[2], rows = sizes[3], bytes = sizes[4];
  std::fill(moved, moved + batch, 0);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < depth && path[b * depth + i] >= 0; i++) {
      if (path[b * depth + i] == i + 1) continue;
      moved[b]++;
      for (int64_t g = 0; g < heads; g++) {
        char* line = cache + (((int64_t)slots[b] * heads + g) * rows + row[b]) * bytes;
        std::memcpy(line + (i + 1) * bytes, line + path[b * depth + i] * bytes, bytes);
      }
    }
}

}  // namespace paceline
