// The kernels as PyTorch operators, and recorded steps: a list of operator calls that runs without Python.
//
// A `Program` is the record that paceline.decoder.native.program made of a step: each call's operator, its arguments,
// and the destinations of its results. Shapes never depend on data, so the list is the step. Other Python threads
// continue, since PyTorch's operators release Python's lock, and so does ctypes.
//
// A fused round can also run again on its outputs without Python: after a pass over the weights Python's code and data
// are not in the caches, and each statement takes microseconds. Inputs and outputs are those of
// paceline.target.steps.FusedStep: tokens, count and first row of a commit, limits, params, keys, features; and the
// report for the host, then tokens, count, first row and features of the next commit. Built separately from the
// kernels, because it needs PyTorch's headers.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <omp.h>
#include <stdexcept>

using at::Tensor;
using c10::IValue;
using Maybe = std::optional<Tensor>;

// ------------------------------------------------------------------------------------------ the kernels, as operators --

extern "C" {
void paceline_linear(const float*, const void*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void paceline_linear_real(const float*, const void*, const float*, float*, const int32_t*, int64_t, int64_t, int64_t,
                          int64_t, int64_t);
void paceline_attention(void* const*, const int64_t*, float, int64_t);
void paceline_mlp(void* const*, const int64_t*, float, int64_t);
void paceline_attend(const float*, const float*, const float*, void*, void*, float*, const int32_t*, const int32_t*,
                     const int32_t*, const int32_t*, const int64_t*, int64_t, int64_t, float, const float*, const float*);
void paceline_keep(void*, void*, const int32_t*, const int32_t*, const int32_t*, int32_t*, const int64_t*);
void paceline_choose(const float*, const int32_t*, const float*, const int32_t*, int32_t*, int64_t, int64_t, int64_t,
                     int64_t);
void paceline_rank(const float*, const int32_t*, const float*, const int32_t*, const int32_t*, int32_t*, float*,
                   const int64_t*);
void paceline_probs(const float*, const float*, float*, int64_t, int64_t, int64_t);
void paceline_experts(void* const*, const int64_t*);
void paceline_norm(const float*, const void*, const void*, float*, int64_t, int64_t, float, int64_t, int64_t);
void paceline_rotate(const float*, int64_t, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t);
void paceline_activate(const float*, float*, int64_t, int64_t, int64_t, int64_t);
void paceline_embed(const void*, const int32_t*, float*, int64_t, int64_t, int64_t);
}

// `Format` in vectors.h.
static int64_t code(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return 0;
    case at::kBFloat16: return 1;
    case at::kHalf: return 2;
    case at::kChar: return 3;
    case at::kFloat8_e4m3fn: return 7;
    default: TORCH_CHECK(false, "no kernel reads ", x.scalar_type());
  }
}

template <class T = void>
static T* data(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous(), "kernels read contiguous tensors");
  return static_cast<T*>(x.data_ptr());
}
template <class T = void>
static T* data(const Maybe& x) { return x ? data<T>(*x) : nullptr; }

static Tensor like(const Tensor& x, at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return at::empty(shape, x.options().dtype(type));
}

static Tensor widened(const Tensor& x, int64_t width) {
  auto shape = x.sizes().vec();
  shape.back() = width;
  return like(x, shape);
}

static Tensor row_linear(const Tensor& x, const Tensor& w, const Maybe& scales, int64_t format) {
  const Tensor out = widened(x, w.size(0));
  const int64_t width = x.size(-1);
  paceline_linear(data<float>(x), data(w), data<float>(scales), data<float>(out), x.numel() / width, width, w.size(0),
                  format);
  return out;
}

static Tensor row_linear_real(const Tensor& x, const Tensor& w, const Maybe& scales, const Tensor& count,
                              int64_t format) {
  const Tensor out = widened(x, w.size(0));
  paceline_linear_real(data<float>(x), data(w), data<float>(scales), data<float>(out), data<int32_t>(count), x.size(0),
                       x.size(1), x.size(2), w.size(0), format);
  return out;
}

static Tensor row_attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
                         const Tensor& row, const Tensor& count, const Tensor& slots, const Maybe& parents,
                         const Maybe& slopes, const Maybe& sinks, int64_t reach, double cap, bool both_ways) {
  const Tensor out = like(q, {q.size(0), q.size(1), q.size(2) * q.size(3)});
  const int64_t sizes[7] = {q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), keys.size(2), both_ways};
  paceline_attend(data<float>(q), data<float>(k), data<float>(v), data(keys), data(values), data<float>(out),
                  data<int32_t>(row), data<int32_t>(count), data<int32_t>(slots), data<int32_t>(parents), sizes,
                  code(keys), reach, (float)cap, data<float>(slopes), data<float>(sinks));
  return out;
}

static const int64_t SCALE_BYTES = 4;  // of a cache row of 8 bits

static Tensor row_attention(const Tensor& hidden, const Tensor& norm, double eps, const Tensor& qkv,
                            const Maybe& qkv_bias, const Tensor& out, const Maybe& out_bias, const Tensor& cos,
                            const Tensor& sin, const Tensor& keys, const Tensor& values, const Tensor& row,
                            const Tensor& count, const Tensor& slots, const Maybe& parents, const Maybe& qkv_scales,
                            const Maybe& out_scales, int64_t qkv_format, int64_t out_format) {
  const Tensor attended = at::empty_like(hidden);
  const int64_t groups = keys.size(1), width = keys.size(3) - (keys.element_size() == 1 ? SCALE_BYTES : 0);
  void* const pointers[17] = {data(hidden), data(attended), data(count),      data(norm),      data(qkv),   data(qkv_bias),
                              data(out),    data(out_bias), data(cos),        data(sin),       data(keys),  data(values),
                              data(row),    data(slots),    data(parents),    data(qkv_scales), data(out_scales)};
  const int64_t sizes[10] = {hidden.size(0), hidden.size(1), hidden.size(2), qkv.size(0) / width - 2 * groups, groups,
                             width, keys.size(2), qkv_format, out_format, code(keys)};
  paceline_attention(pointers, sizes, (float)eps, code(norm));
  return attended;
}

static Tensor row_mlp(const Tensor& hidden, const Tensor& norm, double eps, const Tensor& gate_up,
                      const Maybe& gate_up_bias, const Tensor& down, const Maybe& down_bias, const Maybe& count,
                      const Maybe& gate_up_scales, const Maybe& down_scales, int64_t gate_up_format,
                      int64_t down_format) {
  const Tensor result = at::empty_like(hidden);
  void* const pointers[10] = {data(hidden),       data(result), data(count),     data(norm),           data(gate_up),
                              data(gate_up_bias), data(down),   data(down_bias), data(gate_up_scales), data(down_scales)};
  const int64_t sizes[6] = {hidden.size(0), hidden.size(1), hidden.size(2), gate_up.size(0), gate_up_format, down_format};
  paceline_mlp(pointers, sizes, (float)eps, code(norm));
  return result;
}

static Tensor row_experts(const Tensor& x, const Tensor& shares, const Tensor& gate_up, const Maybe& gate_up_scales,
                          const Maybe& gate_up_bias, const Tensor& down, const Maybe& down_scales, const Maybe& count,
                          int64_t activation, int64_t gate_up_format, int64_t down_format) {
  const Tensor mixed = at::empty_like(x);
  const int64_t experts = shares.size(-1);
  void* const pointers[9] = {data(x), data(shares), data(mixed), data(count), data(gate_up), data(gate_up_scales),
                             data(down), data(down_scales), data<float>(gate_up_bias)};
  const int64_t sizes[8] = {x.size(0), x.size(1), x.size(2), experts, gate_up.size(0) / experts / 2, activation,
                            gate_up_format, down_format};
  paceline_experts(pointers, sizes);
  return mixed;
}

static Tensor row_norm(const Tensor& x, const Tensor& weight, const Maybe& bias, double eps, int64_t kind) {
  const Tensor out = at::empty_like(x);
  const int64_t width = x.size(-1);
  paceline_norm(data<float>(x), data(weight), data(bias), data<float>(out), x.numel() / width, width, (float)eps, kind,
                code(weight));
  return out;
}

// x [b, T, n, D] may be a part of wider rows.
static Tensor row_rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const int64_t lines = x.size(0), window = x.size(1), heads = x.size(2), width = x.size(3);
  const int64_t stride = window > 1 ? x.stride(1) : x.stride(0);  // of a dimension of 1 it may be any number
  TORCH_CHECK(x.stride(3) == 1 && (heads == 1 || x.stride(2) == width) &&
                  (lines == 1 || window == 1 || x.stride(0) == window * stride),
              "the heads of a row lie one after the other");
  const Tensor out = like(x, x.sizes());
  paceline_rotate(static_cast<float*>(x.data_ptr()), stride, data<float>(cos), data<float>(sin), data<float>(out),
                  x.size(0) * x.size(1), heads, width, cos.size(-1));
  return out;
}

static Tensor row_activate(const Tensor& x, int64_t activation, bool gated) {
  const int64_t width = gated ? x.size(-1) / 2 : x.size(-1);
  const Tensor out = widened(x, width);
  paceline_activate(data<float>(x), data<float>(out), out.numel() / width, width, activation, gated);
  return out;
}

static Tensor row_embed(const Tensor& table, const Tensor& ids) {
  auto shape = ids.sizes().vec();
  shape.push_back(table.size(1));
  const Tensor out = like(table, shape);
  paceline_embed(data(table), data<int32_t>(ids), data<float>(out), ids.numel(), table.size(1), code(table));
  return out;
}

static Tensor row_keep(const Tensor& keys, const Tensor& values, const Tensor& row, const Tensor& path,
                       const Tensor& slots) {
  const Tensor moved = at::empty_like(row);  // number of rows moved in each slot
  const int64_t sizes[5] = {path.size(0), path.size(1), keys.size(1), keys.size(2), keys.size(3) * keys.element_size()};
  paceline_keep(data(keys), data(values), data<int32_t>(row), data<int32_t>(path), data<int32_t>(slots),
                data<int32_t>(moved), sizes);
  return moved;
}

static Tensor row_choose(const Tensor& logits, const Tensor& positions, const Tensor& params, const Tensor& keys,
                         int64_t stream) {
  const Tensor out = like(logits, {logits.size(0), logits.size(1)}, at::kInt);
  paceline_choose(data<float>(logits), data<int32_t>(positions), data<float>(params), data<int32_t>(keys),
                  data<int32_t>(out), logits.size(0), logits.size(1), logits.size(2), stream);
  return out;
}

static std::tuple<Tensor, Tensor> row_rank(const Tensor& logits, const Tensor& positions, const Tensor& params,
                                           const Tensor& keys, const Maybe& ids, int64_t count) {
  const int64_t sizes[4] = {logits.size(0), logits.size(1), logits.size(2), count};
  const Tensor tokens = like(logits, {sizes[0], sizes[1], count}, at::kInt), logprobs = widened(logits, count);
  paceline_rank(data<float>(logits), data<int32_t>(positions), data<float>(params), data<int32_t>(keys),
                data<int32_t>(ids), data<int32_t>(tokens), data<float>(logprobs), sizes);
  return {tokens, logprobs};
}

static Tensor row_probs(const Tensor& logits, const Tensor& params) {
  const Tensor out = at::empty_like(logits);
  paceline_probs(data<float>(logits), data<float>(params), data<float>(out), logits.size(0), logits.size(1),
                 logits.size(2));
  return out;
}

#define CACHE "Tensor(a!) ks, Tensor(b!) vs, Tensor row, "

TORCH_LIBRARY(paceline, library) {
  library.def("row_linear(Tensor x, Tensor w, Tensor? scales, int format) -> Tensor");
  library.def("row_linear_real(Tensor x, Tensor w, Tensor? scales, Tensor count, int format) -> Tensor");
  library.def("row_attend(Tensor q, Tensor k, Tensor v, " CACHE
              "Tensor count, Tensor slots, Tensor? parents, Tensor? slopes, Tensor? sinks, int reach, float cap, bool both_ways) "
              "-> Tensor");
  library.def("row_attention(Tensor hidden, Tensor norm, float eps, Tensor qkv, Tensor? qkv_bias, Tensor out, "
              "Tensor? out_bias, Tensor cos, Tensor sin, " CACHE
              "Tensor count, Tensor slots, Tensor? parents, Tensor? qkv_scales, Tensor? out_scales, int qkv_format, "
              "int out_format) -> Tensor");
  library.def("row_mlp(Tensor hidden, Tensor norm, float eps, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
              "Tensor? down_bias, Tensor? count, Tensor? gate_up_scales, Tensor? down_scales, int gate_up_format, "
              "int down_format) -> Tensor");
  library.def("row_experts(Tensor x, Tensor shares, Tensor gate_up, Tensor? gate_up_scales, "
              "Tensor? gate_up_bias, Tensor down, Tensor? down_scales, Tensor? count, int activation, int gate_up_format, int down_format) -> Tensor");
  library.def("row_norm(Tensor x, Tensor weight, Tensor? bias, float eps, int kind) -> Tensor");
  library.def("row_rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  library.def("row_activate(Tensor x, int activation, bool gated) -> Tensor");
  library.def("row_embed(Tensor table, Tensor ids) -> Tensor");
  library.def("row_keep(" CACHE "Tensor path, Tensor slots) -> Tensor");
  library.def("row_choose(Tensor logits, Tensor positions, Tensor params, Tensor keys, int stream) -> Tensor");
  library.def("row_rank(Tensor logits, Tensor positions, Tensor params, Tensor keys, Tensor? ids, int count) -> "
              "(Tensor, Tensor)");
  library.def("row_probs(Tensor logits, Tensor params) -> Tensor");
}

TORCH_LIBRARY_IMPL(paceline, CPU, library) {
  library.impl("row_linear", row_linear);
  library.impl("row_linear_real", row_linear_real);
  library.impl("row_attend", row_attend);
  library.impl("row_attention", row_attention);
  library.impl("row_mlp", row_mlp);
  library.impl("row_experts", row_experts);
  library.impl("row_norm", row_norm);
  library.impl("row_rotate", row_rotate);
  library.impl("row_activate", row_activate);
  library.impl("row_embed", row_embed);
  library.impl("row_keep", row_keep);
  library.impl("row_choose", row_choose);
  library.impl("row_rank", row_rank);
  library.impl("row_probs", row_probs);
}

// ----------------------------------------------------------------------------------------------------- recorded steps --

// Kind of an argument or a result in the stream of numbers that describes a program; `Kind` in program.py.
enum Kind : int64_t { NONE, INT, FLOAT, BOOL, VALUE, INTS, FLOATS, BOOLS, VALUES, TEXT, CPU, WRAPPED };

struct Instruction {
  c10::OperatorHandle op;
  bool kernel;                                                     // ours, which a team of threads runs
  std::vector<IValue> arguments;                                   // values are put into copies of them
  std::vector<std::pair<size_t, int64_t>> values;                  // place of an argument, number of its value
  std::vector<std::pair<size_t, std::vector<int64_t>>> lists;      // the same of a list of tensors; -1: none there
  std::vector<std::vector<int64_t>> results;                       // of each result: numbers of its values, -1: unused
  std::vector<int64_t> last;                                       // values that nothing reads later
};

struct Program {
  std::mutex busy;
  std::vector<Tensor> values;  // inputs first, then constants, then results
  std::vector<std::vector<int64_t>> shapes;  // of the inputs
  std::vector<Instruction> instructions;
  std::vector<int64_t> outputs;
  bool closed = false;
  int threads = 1;  // of the kernels

  std::vector<Tensor> run(const std::vector<Tensor>& inputs) {
    TORCH_CHECK(!closed, "the step is closed");
    TORCH_CHECK(inputs.size() == shapes.size(), "a step of ", shapes.size(), " inputs was given ", inputs.size());
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK(inputs[i].sizes() == at::IntArrayRef(shapes[i]), "input ", i, " of a step has the shape ", inputs[i].sizes());
      values[i] = inputs[i].contiguous();
    }
    torch::jit::Stack stack;
    for (const auto& one : instructions) step(one, stack);
    std::vector<Tensor> made;
    for (const int64_t number : outputs) made.push_back(values[number].contiguous());
    for (size_t i = 0; i < inputs.size(); i++) values[i].reset();
    return made;
  }

  void step(const Instruction& one, torch::jit::Stack& stack) {
    stack.assign(one.arguments.begin(), one.arguments.end());
    for (const auto& [place, number] : one.values) stack[place] = values[number];
    for (const auto& [place, numbers] : one.lists) stack[place] = list(numbers);
    if (one.kernel) omp_set_num_threads(threads);
    one.op.callBoxed(stack);
    if (one.kernel) omp_set_num_threads(1);
    for (size_t i = 0; i < one.results.size(); i++) {
      const auto& numbers = one.results[i];
      if (stack[i].isTensorList()) {
        const auto list = stack[i].toTensorList();
        for (size_t j = 0; j < numbers.size(); j++) if (numbers[j] >= 0) values[numbers[j]] = list.get(j);
      } else if (numbers[0] >= 0) {
        values[numbers[0]] = std::move(stack[i]).toTensor();
      }
    }
    for (const int64_t number : one.last) values[number].reset();
  }

  IValue list(const std::vector<int64_t>& numbers) const {
    if (std::find(numbers.begin(), numbers.end(), -1) == numbers.end()) {
      c10::List<Tensor> made;
      for (const int64_t number : numbers) made.push_back(values[number]);
      return made;
    }
    c10::List<std::optional<Tensor>> made;
    for (const int64_t number : numbers) made.push_back(number < 0 ? Maybe() : Maybe(values[number]));
    return made;
  }
};

// Reads the description of a program.
struct Reader {
  const std::vector<int64_t>& numbers;
  const std::vector<double>& floats;
  const std::vector<std::string>& texts;
  size_t at = 0;

  int64_t next() { return numbers.at(at++); }
  std::vector<int64_t> several() {
    std::vector<int64_t> made(next());
    for (auto& one : made) one = next();
    return made;
  }

  Instruction instruction() {
    const std::string name = texts.at(next()), overload = texts.at(next());
    Instruction made{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()),
                     name.rfind("paceline::", 0) == 0};
    const int64_t arguments = next();
    for (int64_t place = 0; place < arguments; place++) made.arguments.push_back(argument(place, made));
    made.results.resize(next());
    for (auto& one : made.results) one = several();
    made.last = several();
    return made;
  }

  IValue argument(size_t place, Instruction& made) {
    switch (next()) {
      case NONE: return IValue();
      case INT: return next();
      case FLOAT: return floats.at(next());
      case BOOL: return next() != 0;
      case VALUE: made.values.emplace_back(place, next()); return IValue();
      case INTS: return several();
      case FLOATS: {
        std::vector<double> list;
        for (const int64_t one : several()) list.push_back(floats.at(one));
        return list;
      }
      case BOOLS: {
        c10::List<bool> list;
        for (const int64_t one : several()) list.push_back(one != 0);
        return list;
      }
      case VALUES: made.lists.emplace_back(place, several()); return IValue();
      case TEXT: return texts.at(next());
      case CPU: return c10::Device(at::kCPU);
      case WRAPPED: {
        const IValue number = argument(place, made);
        const auto type = number.isInt() ? at::kLong : number.isBool() ? at::kBool : at::kDouble;
        Tensor wrapped = at::scalar_tensor(number.toScalar(), at::TensorOptions().dtype(type));
        wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);  // its type is ignored in type promotion
        return wrapped;
      }
      default: TORCH_CHECK(false, "an argument of a recorded step has no such kind");
    }
  }
};

// Programs by address, as Python holds them. A closed one is never freed, because another thread may be about to call
// it.
static Program& at_address(int64_t program) { return *reinterpret_cast<Program*>(program); }

// ``numbers``: the number of values; shapes of inputs; the instructions; the outputs. ``constants`` are the values
// after the inputs.
static int64_t opened(const std::vector<Tensor>& constants, const std::vector<int64_t>& numbers,
                      const std::vector<double>& floats, const std::vector<std::string>& texts) {
  Reader reader{numbers, floats, texts};
  auto program = std::make_unique<Program>();
  program->values.resize(reader.next());
  program->shapes.resize(reader.next());
  for (auto& shape : program->shapes) shape = reader.several();
  std::copy(constants.begin(), constants.end(), program->values.begin() + program->shapes.size());
  for (int64_t left = reader.next(); left > 0; left--) program->instructions.push_back(reader.instruction());
  program->outputs = reader.several();
  return reinterpret_cast<int64_t>(program.release());
}

// Thread settings of a run: no gradients, and no other threads for PyTorch's own operators. Those would spin for
// milliseconds after each operator, on cores that the kernels' team needs.
struct Alone {
  const std::lock_guard<std::mutex> alone;
  const at::NoGradGuard no_gradients;
  const at::AutoDispatchBelowADInplaceOrView no_versions;
  explicit Alone(Program& program) : alone(program.busy) {
    program.threads = omp_get_max_threads();
    threads_ = program.threads;
    omp_set_num_threads(1);
  }
  ~Alone() { omp_set_num_threads(threads_); }

 private:
  int threads_;
};

static std::vector<Tensor> run(int64_t program, const std::vector<Tensor>& inputs) {
  const Alone alone(at_address(program));
  return at_address(program).run(inputs);
}

// Not an operator of PyTorch's: Python may drop a program while it traces something else, and would trace this too.
extern "C" void paceline_close(int64_t program) {
  Program& closing = at_address(program);
  const std::lock_guard<std::mutex> alone(closing.busy);
  closing.closed = true;
  closing.instructions.clear();
  closing.values.clear();
}

TORCH_LIBRARY(paceline_program, library) {
  library.def("open", opened);
  library.def("run", run);
}

// ----------------------------------------------------------------------------------------------------- several rounds --

static const size_t LIMIT = 3, AFTER = 6;  // places among the inputs: of the limits, and of what is after the keys

// A tensor that the caller keeps.
struct Lent {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dims;
  int64_t type;  // a c10::ScalarType
};

static Tensor tensor(const Lent& lent) {
  const c10::IntArrayRef sizes(lent.sizes, lent.dims), strides(lent.strides, lent.dims);
  return at::from_blob(lent.data, sizes, strides, at::TensorOptions().dtype(static_cast<c10::ScalarType>(lent.type)));
}

// Index among the inputs of the next round for an output after the first.
static size_t place(size_t output) { return output <= LIMIT ? output - 1 : AFTER + output - LIMIT - 1; }

static void copied(const Tensor& from, void* to, size_t bytes) {
  if (!from.is_contiguous() || from.nbytes() != bytes) throw std::runtime_error("an output has not its shape");
  std::memcpy(to, from.const_data_ptr(), bytes);
}

// Inputs of a call, and destinations of its results. The arrays are the caller's.
struct Call {
  Program* program;
  const Lent* inputs;
  int64_t n_inputs;
  int64_t rounds;       // at most
  double budget;        // time limit in seconds; the first round always runs
  int64_t idle;         // limit in slots without a request
  int64_t slots, width;  // of the report for the host
  int64_t* left;        // [slots], see paceline.core.types.RoundLimits; changed
  const int64_t* ends;  // [n_ends]
  int64_t n_ends;
  int32_t* told;        // [rounds, slots, width]: tokens, their count, depth of the proposal
  double* seconds;      // [rounds]
  void* const* made;    // for each output after the first
  char* why;            // reason of a failure
  int64_t room;         // its capacity in bytes

  // Whether another round may follow one with this report; its tokens are subtracted from the limits.
  bool goes_on(const int32_t* row) const {
    bool on = true;
    for (int64_t slot = 0; slot < slots; slot++, row += width) {
      if (left[slot] == idle) continue;
      left[slot] -= row[width - 2];
      on = on && left[slot] >= 0;
      for (int64_t j = 0; j < row[width - 2]; j++) on = on && std::find(ends, ends + n_ends, row[j]) == ends + n_ends;
    }
    return on;
  }

  // The limits of the next round, in place; whether one of them is above 0.
  bool limited(Tensor& limits) const {
    auto* limit = limits.data_ptr<int32_t>();
    for (int64_t slot = 0; slot < slots; slot++) limit[slot] = (int32_t)std::min<int64_t>(limit[slot], left[slot]);
    return std::any_of(limit, limit + slots, [](int32_t one) { return one > 0; });
  }
};

// Result of `work`, or -1 and the reason of the failure.
template <class Work>
static int64_t guarded(char* why, int64_t room, Work work) {
  try {
    return work();
  } catch (const std::exception& error) {
    std::strncpy(why, error.what(), room - 1);
    why[room - 1] = 0;
    return -1;
  }
}

// Number of rounds that ran.
extern "C" int64_t paceline_again(const Call* call) {
  return guarded(call->why, call->room, [&]() -> int64_t {
    const Alone alone(*call->program);
    std::vector<Tensor> inputs, outputs;
    for (int64_t i = 0; i < call->n_inputs; i++) inputs.push_back(tensor(call->inputs[i]));
    if (call->rounds > 1) inputs[LIMIT] = inputs[LIMIT].clone();
    auto* told = call->told;
    auto begin = std::chrono::steady_clock::now();
    double spent = 0;
    int64_t ran = 0;
    while (true) {
      outputs = call->program->run(inputs);
      const auto end = std::chrono::steady_clock::now();
      const double took = std::chrono::duration<double>(end - begin).count();
      call->seconds[ran++] = took;
      spent += took;
      begin = end;
      copied(outputs[0], told, call->slots * call->width * sizeof(int32_t));
      if (ran == call->rounds || spent + took > call->budget || !call->goes_on(told)) break;
      if (!call->limited(inputs[LIMIT])) break;
      told += call->slots * call->width;
      for (size_t i = 1; i < outputs.size(); i++) inputs[place(i)] = outputs[i];
    }
    for (size_t i = 1; i < outputs.size(); i++) copied(outputs[i], call->made[i - 1], inputs[place(i)].nbytes());
    return ran;
  });
}
