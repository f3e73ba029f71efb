// The arithmetic roof of a format: its instructions on registers alone, as benchmarks/roofline.py times them.
#include "product.h"

using namespace paceline;

namespace {

constexpr int SUMS = 10, EACH = sizeof(Wide) / sizeof(Vec);

// `v`, unknown to the compiler: it would take products of known numbers out of the loop.
template <class V>
V opaque(V v) {
#ifdef __AVX512F__
  asm volatile("" : "+v"(v));
#elif defined(__AVX2__)
  asm volatile("" : "+x"(v));
#endif
  return v;
}

// Runs `turn` on SUMS independent sums. -> multiply-adds
template <class V, class Turn>
int64_t run(int64_t turns, int64_t each, Turn turn) {
  V sum[SUMS] = {};
  for (int64_t i = 0; i < turns; i++)
    UNROLLED for (int n = 0; n < SUMS; n++) {
      turn(sum[n]);
      sum[n] = in_register(sum[n]);
    }
  V all = {};
  for (const V& one : sum) all += one;
  static volatile V kept;
  kept = all;
  return turns * SUMS * each * EACH;
}

}  // namespace

extern "C" int64_t roof(int64_t format, int64_t turns) {
  const Wide a = in_register(spread<Wide>(1.0f));
  const Ints<Wide> one = in_register((Ints<Wide>)a), other = in_register((Ints<Wide>)spread<Wide>(2.0f));
#ifdef PACELINE_TILES
  if (format == INT8 && tiles()) {
    const Tiles configured;
    for (int64_t i = 0; i < turns; i++)
      each<4>([](auto sum) { multiply_add_tiles<sum, 4 + sum / 2, 6 + sum % 2>(); });
    return turns * 4 * TILE_ROWS * TILE * TOGETHER;
  }
#endif
  if (format == INT8)
    return run<Ints<Wide>>(turns, STEP, [&](auto& sum) { multiply_add_integers(sum, opaque(one), other); });
  if (integers(format))
    return run<Wide>(turns, GROUP, [&](auto& sum) {
      Ints<Wide> exact = {}, first = opaque(one), second = opaque(other);
      multiply_add_integers(exact, first, other);
      multiply_add_integers(exact, second, one);
      multiply_add(sum, __builtin_convertvector(exact, Wide), a);
    });
#ifdef PACELINE_PAIRS
  if (format == BFLOAT16) return run<Wide>(turns, STEP, [&](auto& sum) { multiply_add_pairs(sum, a, a); });
#endif
  return run<Wide>(turns, VL, [&](auto& sum) { multiply_add(sum, a, a); });
}
