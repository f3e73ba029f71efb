// Counter-based Gumbel noise, the same bits as paceline.core.noise.
#pragma once

#include "vectors.h"

namespace paceline [[gnu::visibility("hidden")]] {

constexpr int WORDS = 16;  // ids whose words are computed together
typedef uint16_t Words __attribute__((vector_size(WORDS * 2)));

constexpr int ID_ROUNDS = 7, ROW_ROUNDS = 5;
constexpr float NOISE_SCALE = -0x1p-16f * (1 - 0x1p-24f);

// Keys of a row: two 16-bit halves, then the multipliers of the rounds of its ids, as paceline.core.noise.row_keys.
struct RowKeys {
  uint16_t limbs[2], multipliers[8];
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

// The upper half of every product with an 8-bit multiplier; the lower half is its low 16 bits.
inline Words upper(Words limb, uint16_t multiplier) {
#ifdef __AVX2__
  return (Words)_mm256_mulhi_epu16((__m256i)limb, _mm256_set1_epi16((int16_t)(multiplier << 8)));
#else
  for (int i = 0; i < WORDS; i++) limb[i] = (uint16_t)(((uint32_t)limb[i] * multiplier) >> 8);
  return limb;
#endif
}

// Converts the halves of ids, the lower one in `high`, to the random words of these ids.
inline void words(const RowKeys& row, Words& high, Words& low) {
  high ^= row.limbs[0], low ^= row.limbs[1];
  for (int i = 0; i < ID_ROUNDS; i++) {
    const Words product = high * row.multipliers[i];
    high = low ^ upper(high, row.multipliers[i]);
    low = product;
  }
}

// Halves of WORDS ids: those from `first` on, a multiple of WORDS, or those of a list.
inline void limbs(int32_t first, const int32_t* list, Words& high, Words& low) {
  if (list) {
    for (int i = 0; i < WORDS; i++) high[i] = (uint16_t)list[first + i], low[i] = (uint16_t)(list[first + i] >> 16);
  } else {
    constexpr Words order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    high = order + (uint16_t)first, low = Words{} + (uint16_t)(first >> 16);
  }
}

// Noise of WORDS words.
inline void gumbel(Words high, Words low, float* out) {
  VecH halves[4];
  std::memcpy(halves, &high, sizeof high), std::memcpy(halves + 2, &low, sizeof low);
  for (int i = 0; i < 2; i++) {
    const Vec drawn =
        gumbel_of_words(__builtin_convertvector(halves[i], VecI), __builtin_convertvector(halves[2 + i], VecI));
    std::memcpy(out + i * VL, &drawn, sizeof drawn);
  }
}

}  // namespace paceline
