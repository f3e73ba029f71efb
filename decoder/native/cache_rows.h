// Rows of a cache: D numbers of one head at one position, plain, or of 8 bits followed by their common scale
// (paceline.decoder.kernels.cache_rows defines the layout, and writes the same bytes).
#pragma once

#include "vectors.h"

namespace paceline [[gnu::visibility("hidden")]] {

constexpr int64_t SCALE_BYTES = 4;

template <class T>
constexpr bool SCALED = sizeof(T) == 1;

template <class T>
inline int64_t row_step(int64_t D) {  // elements from row to row
  return SCALED<T> ? D + SCALE_BYTES : D;
}

// Factor of sums of products with a row's elements.
template <class T>
inline float row_scale(const T* row, int64_t D) {
  float scale;
  std::memcpy(&scale, row + D, sizeof scale);
  if constexpr (!std::is_same_v<T, int8_t>) scale *= T::UNIT;  // a power of two
  return scale;
}

template <class T>
inline void write_row(T* row, const float* from, int64_t D) {
  if constexpr (!SCALED<T>) {
    for (int64_t d = 0; d < D; d++) narrow(row + d, from[d]);
  } else {
    float largest = 0;
    for (int64_t d = 0; d < D; d++) largest = std::fmax(largest, std::fabs(from[d]));
    const float scale = largest > 0 ? largest / LARGEST<T> : 1;
    for (int64_t d = 0; d < D; d++) narrow(row + d, from[d] / scale);
    std::memcpy(row + D, &scale, sizeof scale);
  }
}

// Keys and values of a layer; `format` as `Format` of matrix.h: plain, INT8 or E4M3.
struct Cache {
  void *keys, *values;
  int64_t format;
};

}  // namespace paceline
