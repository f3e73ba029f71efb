// CPU kernels of a decoder: the halves of a layer, products, attention over cache rows, probabilities and choice of a token.
//
// The property everything else relies on: a row of the result is computed by the same instructions in the same order
// whatever the number of rows, its place among them, and the number of threads. So one token at a time, a window of
// five and a prompt of 256 give the same bits. Each is tested against plain PyTorch.
//
// Built with -ffp-contract=off except where a fused multiply-add is asked for by name, so that the noise of `choose`
// equals that of paceline.core.noise bit for bit. Here are most of the entry points; the work is in the headers, and what takes a
// compiler long is in files of its own (attention*.cpp, products.cpp, experts.cpp), which are compiled side by side.

#include "choice.h"
#include "handles.h"
#include "layer.h"

using namespace paceline;

// ----------------------------------------------------------------------------------------------- plain C entry points --
// dtype of norms and biases: 0 float32, 1 bfloat16, 2 float16; format of matrices and caches: those or a quantised one
// (`Format` in vectors.h). Activations are float32; products round them for bfloat16 (pairs.h), and to integers for
// integers and blocks (integers.h).

extern "C" void paceline_linear(const float* x, const void* w, const float* scales, float* out, int64_t M, int64_t K,
                                int64_t N, int64_t format) {
  linear(x, Stored{w, scales, format}, out, M, K, N);
}

// Calls `body` with a null pointer to the type of the weights.
template <class Body>
static void typed(int64_t dtype, Body body) {
  if (dtype == 0) body((float*)nullptr);
  else if (dtype == 1) body((BFloat16*)nullptr);
  else body((Float16*)nullptr);
}

// pointers: hidden, out, count; norm, qkv, its bias, result, its bias; cos, sin, keys, values, row, slots, parents, scales
// of qkv and of result. Biases, parents and scales may be null. sizes: batch, window, width, heads, kv_heads, D, rows of the cache, format of qkv, of
// result, of the cache.
extern "C" void paceline_attention(void* const* p, const int64_t* n, float eps, int64_t dtype) {
  typed(dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> W;
    const Stream s{(float*)p[0], (float*)p[1], n[0], n[1], n[2], (int32_t*)p[2], eps};
    const Attend a{n[0], n[1], n[3], n[4], n[5], n[6], (int32_t*)p[12], s.count, (int32_t*)p[13], (int32_t*)p[14]};
    const Matrix<W> qkv{{p[4], (float*)p[15], n[7]}, (W*)p[5], (n[3] + 2 * n[4]) * n[5]};
    const Matrix<W> result{{p[6], (float*)p[16], n[8]}, (W*)p[7], n[2]};
    attention_half(s, (W*)p[3], qkv, result, (float*)p[8], (float*)p[9], a, Cache{p[10], p[11], n[9]});
  });
}

// pointers: hidden, out, count; norm, gate_up, its bias, down, its bias, scales of gate_up and of down. Count, biases and
// scales may be null.
// sizes: batch, window, width, rows of gate_up, its format, the format of down
extern "C" void paceline_mlp(void* const* p, const int64_t* n, float eps, int64_t dtype) {
  typed(dtype, [&](auto* type) {
    typedef std::remove_pointer_t<decltype(type)> W;
    const Stream s{(float*)p[0], (float*)p[1], n[0], n[1], n[2], (int32_t*)p[2], eps};
    const Matrix<W> gate_up{{p[4], (float*)p[8], n[4]}, (W*)p[5], n[3]}, down{{p[6], (float*)p[9], n[5]}, (W*)p[7], n[2]};
    mlp_half(s, (W*)p[3], gate_up, down);
  });
}

// Lines of T rows of which only the first count[b] are real; the others become zero, and lines with a count below 0 are
// left as they are.
extern "C" void paceline_linear_real(const float* x, const void* w, const float* scales, float* out,
                                     const int32_t* count, int64_t lines, int64_t T, int64_t K, int64_t N,
                                     int64_t format) {
  linear_real(x, Stored{w, scales, format}, out, count, lines, T, K, N);
}

extern "C" void paceline_attend(const float* q, const float* k, const float* v, void* keys, void* values, float* out,
                                const int32_t* row, const int32_t* count, const int32_t* slots,
                                const int32_t* parents, const int64_t* sizes, int64_t format, int64_t reach, float cap,
                                const float* slopes) {
  Attend a{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], row, count, slots, parents, reach, cap, slopes};
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

// How many sums lie side by side in a register.
extern "C" int64_t paceline_abreast() { return ABREAST; }

// Whether an instruction of the processor multiplies bfloat16 in pairs.
extern "C" int64_t paceline_pairs() { return PAIRS; }

// By what products of integers are summed: 2 an instruction, 1 two of them, 0 a loop.
extern "C" int64_t paceline_integer_sums() { return INTEGER_SUMS; }

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

// ------------------------------------------------------------------------------------- entry points of compiled graphs --

namespace {

int64_t code(int32_t dtype) {
  return dtype == aoti_torch_dtype_float32()         ? FLOAT32
         : dtype == aoti_torch_dtype_bfloat16()      ? BFLOAT16
         : dtype == aoti_torch_dtype_float16()       ? FLOAT16
         : dtype == aoti_torch_dtype_int8()          ? INT8
         : dtype == aoti_torch_dtype_float8_e4m3fn() ? E4M3
                                                     : E5M2;
}
// Bytes of an element of a cache, and the numbers of a head in a row of so many elements.
int64_t element_bytes(int64_t format) { return format == FLOAT32 ? 4 : format == BFLOAT16 || format == FLOAT16 ? 2 : 1; }
int64_t head_width(int64_t elements, int64_t format) {
  return element_bytes(format) == 1 ? elements - SCALE_BYTES : elements;
}

}  // namespace

extern "C" int32_t aoti_torch_cpu_row_linear(Handle x, Handle w, Handle* scales, int64_t format, Handle* ret) {
  int64_t dim = 0, shape[4], M = 1;
  aoti_torch_get_dim(x, &dim);
  for (int64_t i = 0; i < dim; i++) shape[i] = sizes(x)[i];
  int64_t K = shape[dim - 1], N = sizes(w)[0];
  for (int64_t i = 0; i < dim - 1; i++) M *= shape[i];
  shape[dim - 1] = N;
  *ret = empty(dim, shape, aoti_torch_dtype_float32());
  paceline_linear(data<float>(x), data<void>(w), (float*)maybe(scales), data<float>(*ret), M, K, N, format);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_linear_real(Handle x, Handle w, Handle* scales, Handle count,
                                                  int64_t format, Handle* ret) {
  const int64_t *s = sizes(x), N = sizes(w)[0], shape[3] = {s[0], s[1], N};
  *ret = empty(3, shape, aoti_torch_dtype_float32());
  paceline_linear_real(data<float>(x), data<void>(w), (float*)maybe(scales), data<float>(*ret), data<int32_t>(count),
                       s[0], s[1], s[2], N, format);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_attend(Handle q, Handle k, Handle v, Handle keys, Handle values, Handle row,
                                             Handle count, Handle slots, Handle* parents, Handle* slopes,
                                             int64_t reach, double cap, Handle* ret) {
  const int64_t* s = sizes(q);
  int64_t shape[3] = {s[0], s[1], s[2] * s[3]};
  int64_t all[6] = {s[0], s[1], s[2], sizes(k)[2], s[3], sizes(keys)[2]};
  *ret = empty(3, shape, aoti_torch_dtype_float32());
  paceline_attend(data<float>(q), data<float>(k), data<float>(v), data<void>(keys), data<void>(values),
                  data<float>(*ret), data<int32_t>(row), data<int32_t>(count), data<int32_t>(slots),
                  (int32_t*)maybe(parents), all, code(dtype_of(keys)), reach, (float)cap, (float*)maybe(slopes));
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_keep(Handle keys, Handle values, Handle row, Handle path, Handle slots,
                                           Handle* ret) {
  const int64_t *p = sizes(path), *c = sizes(keys), bytes = element_bytes(code(dtype_of(keys)));
  int64_t all[5] = {p[0], p[1], c[1], c[2], c[3] * bytes};
  *ret = empty(1, p, aoti_torch_dtype_int32());
  paceline_keep(data<void>(keys), data<void>(values), data<int32_t>(row), data<int32_t>(path), data<int32_t>(slots),
                data<int32_t>(*ret), all);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_choose(Handle logits, Handle positions, Handle params, Handle keys, int64_t stream,
                                             Handle* ret) {
  const int64_t* s = sizes(logits);
  *ret = empty(2, s, aoti_torch_dtype_int32());
  paceline_choose(data<float>(logits), data<int32_t>(positions), data<float>(params), data<int32_t>(keys),
                  data<int32_t>(*ret), s[0], s[1], s[2], stream);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_rank(Handle logits, Handle positions, Handle params, Handle keys, Handle* ids,
                                           int64_t count, Handle* tokens, Handle* logprobs) {
  const int64_t *s = sizes(logits), made[3] = {s[0], s[1], count}, all[4] = {s[0], s[1], s[2], count};
  *tokens = empty(3, made, aoti_torch_dtype_int32());
  *logprobs = empty(3, made, aoti_torch_dtype_float32());
  paceline_rank(data<float>(logits), data<int32_t>(positions), data<float>(params), data<int32_t>(keys),
                ids == nullptr ? nullptr : data<int32_t>(*ids), data<int32_t>(*tokens), data<float>(*logprobs), all);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_probs(Handle logits, Handle params, Handle* ret) {
  const int64_t* s = sizes(logits);
  *ret = empty(3, s, aoti_torch_dtype_float32());
  paceline_probs(data<float>(logits), data<float>(params), data<float>(*ret), s[0], s[1], s[2]);
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_attention(Handle hidden, Handle norm, double eps, Handle qkv, Handle* qkv_bias,
                                                Handle result, Handle* result_bias, Handle cos, Handle sin, Handle keys,
                                                Handle values, Handle row, Handle count, Handle slots, Handle* parents,
                                                Handle* qkv_scales, Handle* result_scales, int64_t qkv_format,
                                                int64_t result_format, Handle* ret) {
  const int64_t *s = sizes(hidden), *c = sizes(keys), format = code(dtype_of(keys)), D = head_width(c[3], format);
  const int64_t heads = sizes(qkv)[0] / D - 2 * c[1];
  *ret = empty(3, s, aoti_torch_dtype_float32());
  void* const all[17] = {data<void>(hidden), data<void>(*ret), data<void>(count), data<void>(norm), data<void>(qkv),
                         maybe(qkv_bias), data<void>(result), maybe(result_bias), data<void>(cos), data<void>(sin),
                         data<void>(keys), data<void>(values), data<void>(row), data<void>(slots), maybe(parents),
                         maybe(qkv_scales), maybe(result_scales)};
  const int64_t numbers[10] = {s[0], s[1], s[2], heads, c[1], D, c[2], qkv_format, result_format, format};
  paceline_attention(all, numbers, (float)eps, code(dtype_of(norm)));
  return 0;
}

extern "C" int32_t aoti_torch_cpu_row_mlp(Handle hidden, Handle norm, double eps, Handle gate_up, Handle* gate_up_bias,
                                          Handle down, Handle* down_bias, Handle* count, Handle* gate_up_scales,
                                          Handle* down_scales, int64_t gate_up_format, int64_t down_format,
                                          Handle* ret) {
  const int64_t *s = sizes(hidden),
                numbers[6] = {s[0], s[1], s[2], sizes(gate_up)[0], gate_up_format, down_format};
  *ret = empty(3, s, aoti_torch_dtype_float32());
  void* const all[10] = {data<void>(hidden), data<void>(*ret),   maybe(count),          data<void>(norm),
                         data<void>(gate_up), maybe(gate_up_bias), data<void>(down),      maybe(down_bias),
                         maybe(gate_up_scales), maybe(down_scales)};
  paceline_mlp(all, numbers, (float)eps, code(dtype_of(norm)));
  return 0;
}
