// CPU kernels of a decoder: the halves of a layer, products, attention over cache rows, probabilities and choice of a token.
//
// Everything else relies on one property: a row of the result is computed by the same instructions in the same order
// for any number of rows, position among them, and number of threads. So one token at a time, a window of
// five and a prompt of 256 give the same bits. Each is tested against plain PyTorch.
//
// Built with -ffp-contract=off, and fused multiply-adds are called explicitly, so that the noise of `choose`
// equals that of paceline.core.noise bit for bit. The entry points are in this file and in rows.cpp; the work is in the
// headers. Code that takes long to compile is in separate files (attention.cpp, products.cpp), which are compiled in
// parallel.

#include "choice.h"
#include "experts.h"
#include "layer.h"

using namespace paceline;

// ----------------------------------------------------------------------------------------------- plain C entry points --
// dtype of norms and biases: 0 float32, 1 bfloat16, 2 float16; format of matrices and caches: those or a quantised one
// (`Format` in vectors.h). Activations are float32; products round them for bfloat16 (pairs.h), and to integers for
// integers and blocks (integers.h).

extern "C" void paceline_linear(const float* x, const void* w, const float* scales, float* out, int64_t M, int64_t K,
                                int64_t N, int64_t format) {
  linear(x, Stored{w, scales, format}, out, {1, M, nullptr}, K, N);
}

// pointers: hidden, out, count; norm, qkv, its bias, result, its bias; cos, sin, keys, values, row, slots, parents, scales
// of qkv and of result. Biases, parents and scales may be null. sizes: batch, window, width, heads, kv_heads, D, rows of the cache, format of qkv, of
// result, of the cache.
extern "C" void paceline_attention(void* const* p, const int64_t* n, float eps, int64_t dtype) {
  const Stream s{{n[0], n[1], (int32_t*)p[2]}, (float*)p[0], (float*)p[1], n[2], eps};
  const Attend a{n[0], n[1], n[3], n[4], n[5], n[6], (int32_t*)p[12], s.count, (int32_t*)p[13], (int32_t*)p[14]};
  const Matrix qkv{{p[4], (float*)p[15], n[7]}, {p[5], dtype}, (n[3] + 2 * n[4]) * n[5]};
  const Matrix result{{p[6], (float*)p[16], n[8]}, {p[7], dtype}, n[2]};
  attention_half(s, {p[3], dtype}, qkv, result, (float*)p[8], (float*)p[9], a, Cache{p[10], p[11], n[9]});
}

// pointers: hidden, out, count; norm, gate_up, its bias, down, its bias, scales of gate_up and of down. Count, biases and
// scales may be null.
// sizes: batch, window, width, rows of gate_up, its format, the format of down
extern "C" void paceline_mlp(void* const* p, const int64_t* n, float eps, int64_t dtype) {
  const Stream s{{n[0], n[1], (int32_t*)p[2]}, (float*)p[0], (float*)p[1], n[2], eps};
  const Matrix gate_up{{p[4], (float*)p[8], n[4]}, {p[5], dtype}, n[3]}, down{{p[6], (float*)p[9], n[5]}, {p[7], dtype}, n[2]};
  mlp_half(s, {p[3], dtype}, gate_up, down);
}

// pointers: x, shares, out, count; gate_up, its scales, down, its scales, the bias of gate_up. Count, scales and bias may
// be null.
// sizes: lines, window, width, experts, inner numbers of one, code of the activation, format of gate_up, of down
extern "C" void paceline_experts(void* const* p, const int64_t* n) {
  const Mixture all{{n[0], n[1], (int32_t*)p[3]}, (float*)p[0], (float*)p[1], (float*)p[2], (float*)p[8], n[2], n[3], n[4], n[5]};
  mixture(all, Stored{p[4], (float*)p[5], n[6]}, Stored{p[6], (float*)p[7], n[7]});
}

// Batch rows of T rows of which only the first count[b] are real; the others are set to zero, or with a count of -1 - n
// for n real rows not changed.
extern "C" void paceline_linear_real(const float* x, const void* w, const float* scales, float* out,
                                     const int32_t* count, int64_t lines, int64_t T, int64_t K, int64_t N,
                                     int64_t format) {
  linear(x, Stored{w, scales, format}, out, {lines, T, count}, K, N);
}

extern "C" void paceline_attend(const float* q, const float* k, const float* v, void* keys, void* values, float* out,
                                const int32_t* row, const int32_t* count, const int32_t* slots,
                                const int32_t* parents, const int64_t* sizes, int64_t format, int64_t reach, float cap,
                                const float* slopes, const float* sinks) {
  Attend a{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], row, count, slots, parents, reach, cap, slopes,
           sinks, sizes[6] != 0};
  attend(a, q, k, v, Cache{keys, values, format}, out);
}

// sizes: slots, depth, heads, rows, bytes of a row
extern "C" void paceline_keep(void* keys, void* values, const int32_t* row, const int32_t* path, const int32_t* slots,
                              int32_t* moved, const int64_t* sizes) {
  keep((char*)keys, row, path, slots, moved, sizes);
  keep((char*)values, row, path, slots, moved, sizes);
}

extern "C" void paceline_choose(const float* logits, const int32_t* positions, const float* params, const int32_t* keys,
                                int32_t* out, int64_t batch, int64_t window, int64_t vocabulary, int64_t stream) {
  choose(Choose{batch, window, vocabulary, stream, logits, params, positions, keys, nullptr}, out);
}

// sizes: batch, window, vocabulary, count
extern "C" void paceline_rank(const float* logits, const int32_t* positions, const float* params, const int32_t* keys,
                              const int32_t* ids, int32_t* tokens, float* logprobs, const int64_t* sizes) {
  rank(Choose{sizes[0], sizes[1], sizes[2], 0, logits, params, positions, keys, ids}, sizes[3], tokens, logprobs);
}

extern "C" void paceline_probs(const float* logits, const float* params, float* out, int64_t batch, int64_t window,
                             int64_t vocabulary) {
  probabilities(logits, params, out, batch, window, vocabulary);
}

// Number of sums in a register.
extern "C" int64_t paceline_abreast() { return ABREAST; }

// Whether an instruction of the processor multiplies bfloat16 in pairs.
extern "C" int64_t paceline_pairs() { return PAIRS; }

// Instructions that sum products of integers: 2: one, 1: two, 0: a loop.
extern "C" int64_t paceline_integer_sums() { return INTEGER_SUMS; }

// Whether matmuls with int8 rows use AMX.
extern "C" int64_t paceline_tiles() { return tiles(); }

// The noise of ids 0 to n - 1 of one row, to be compared with paceline.core.noise.
extern "C" void paceline_gumbel(const int32_t* seed, int64_t position, int64_t stream, float* out, int64_t n) {
  const RowKeys row(seed, (int32_t)position, stream);
  for (int64_t v = 0; v < n; v += WORDS) {
    float drawn[WORDS];
    Words high, low;
    limbs((int32_t)v, nullptr, high, low);
    words(row, high, low);
    gumbel(high, low, drawn);
    std::memcpy(out + v, drawn, sizeof(float) * std::min<int64_t>(WORDS, n - v));
  }
}
