// exp, silu and softmax of a line of numbers.
#pragma once

#include "vectors.h"

namespace paceline [[gnu::visibility("hidden")]] {

// exp(x) for x <= 0, by range reduction and a polynomial of degree 6 (coefficients of Cephes' expf). Error 2 ulp.
inline Vec exponential(Vec x) {
  x = x < -87.0f ? Vec{} - 87.0f : x;
  Vec shifted = x * 1.44269504f + 12582912.0f;  // rounds to an integer in the low bits of the mantissa
  Vec n = shifted - 12582912.0f;
  Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vec p = ((((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
             1.6666665459e-1f) * r + 5.0000001201e-1f) * r) * r + r + 1.0f;
  VecI exponent = ((VecI)shifted - 0x4B400000 + 127) << 23;
  return p * (Vec)exponent;
}

// x / (1 + exp(-x))
inline Vec silu(Vec x) {
  Vec e = exponential(x > 0 ? -x : x);
  return x * (x > 0 ? Vec{} + 1.0f : e) / (e + 1.0f);
}

// Turns n scores into weights exp(score - max) and returns 1 / their sum; the buffer is padded to whole vectors. A sink
// is a score beside them whose weight goes nowhere.
inline float weigh(float* s, int64_t n, float sink = -INFINITY) {
  for (int64_t i = n; i < (n + VL - 1) / VL * VL; i++) s[i] = -1e30f;
  Vec tops = load(s);
  for (int64_t i = VL; i < n; i += VL) tops = larger(tops, load(s + i));
  const float best = std::max(largest(tops), sink);
  Vec sum = {};
  for (int64_t i = 0; i < n; i += VL) {
    Vec e = exponential(load(s + i) - best);
    if (i + VL > n) e = lanes() < (int32_t)(n - i) ? e : Vec{};
    sum += e;
    std::memcpy(s + i, &e, sizeof e);
  }
  return 1.0f / (total(sum) + std::exp(sink - best));
}

}  // namespace paceline
