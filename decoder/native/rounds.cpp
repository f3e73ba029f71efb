// Runs compiled graphs while other threads of Python go on: PyTorch's operators give Python's lock back, and so does
// ctypes; PyTorch's own loader of packages keeps it until a graph is done, which for a chunk of a prompt is long.
//
// A compiled fused round also runs again on what it made. Between two rounds stands no Python then: behind a pass over
// the weights its code and data are out of the caches, and each statement takes microseconds. Inputs and outputs are
// those of paceline.target.steps.FusedStep: tokens, count and start of a commit, limits, params, keys, features; and
// what the host is told, then tokens, count, start and features of the next commit. Built apart from the kernels, for it
// needs PyTorch's headers.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>

using torch::inductor::AOTIModelPackageLoader;

static const size_t LIMIT = 3, BEHIND = 6;  // places among the inputs: of the limits, and of what is behind the keys

// A tensor that the caller keeps.
struct Lent {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dims;
  int64_t type;  // a c10::ScalarType
};

static at::Tensor tensor(const Lent& lent) {
  const c10::IntArrayRef sizes(lent.sizes, lent.dims), strides(lent.strides, lent.dims);
  return at::from_blob(lent.data, sizes, strides, at::TensorOptions().dtype(static_cast<c10::ScalarType>(lent.type)));
}

// The place among the inputs that an output behind the first has in the next round.
static size_t place(size_t output) { return output <= LIMIT ? output - 1 : BEHIND + output - LIMIT - 1; }

static void copied(const at::Tensor& from, void* to, size_t bytes) {
  if (!from.is_contiguous() || from.nbytes() != bytes) throw std::runtime_error("an output has not its shape");
  std::memcpy(to, from.const_data_ptr(), bytes);
}

// Closed once, at the end of the process too, when another thread may be in the middle of a call: that is waited for, and
// no other call begins. What is left of a closed one is never freed.
struct Graph {
  std::mutex busy;
  std::unique_ptr<AOTIModelPackageLoader> loader;
  std::unordered_map<std::string, at::Tensor> constants;

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const {
    if (!loader) throw std::runtime_error("the graph is closed");
    return loader->run(inputs);
  }
};

// What a call needs, and where it leaves what it made. The arrays are the caller's.
struct Call {
  Graph* graph;
  const Lent* inputs;
  int64_t n_inputs;
  int64_t rounds;       // at most
  double budget;        // seconds that they have to fit into; the first runs anyway
  int64_t idle;         // room in slots without a text
  int64_t slots, width;  // of what the host is told
  int64_t* left;        // [slots], see paceline.core.types.Room; changed
  const int64_t* ends;  // [n_ends]
  int64_t n_ends;
  int32_t* told;        // [rounds, slots, width]: tokens, their count, how deep the proposal went
  double* seconds;      // [rounds]
  void* const* made;    // for each output behind the first
  char* why;            // it failed
  int64_t room;         // bytes there

  // Whether another round may follow one that told this; what it gained is taken off the room.
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
  bool limited(at::Tensor& limits) const {
    auto* limit = limits.data_ptr<int32_t>();
    for (int64_t slot = 0; slot < slots; slot++) limit[slot] = (int32_t)std::min<int64_t>(limit[slot], left[slot]);
    return std::any_of(limit, limit + slots, [](int32_t one) { return one > 0; });
  }
};

// What `work` says, or -1 and why there is nothing.
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

// A graph as Python holds it.
static Graph& at_address(int64_t graph) { return *reinterpret_cast<Graph*>(graph); }

static int64_t opened(const std::string& package) {
  auto graph = std::make_unique<Graph>();
  graph->loader = std::make_unique<AOTIModelPackageLoader>(package, "model", false, 1, -1);
  return reinterpret_cast<int64_t>(graph.release());
}

// Names of the tensors that it needs.
static std::vector<std::string> names(int64_t graph) { return at_address(graph).loader->get_constant_fqns(); }

// Gives it those tensors, by reference.
static void fill(int64_t graph, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  Graph& filled = at_address(graph);
  for (size_t i = 0; i < names.size(); i++) filled.constants.emplace(names[i], tensors[i]);
  filled.loader->load_constants(filled.constants, false, true, true);
}

static std::vector<at::Tensor> run(int64_t graph, const std::vector<at::Tensor>& inputs) {
  const std::lock_guard<std::mutex> alone(at_address(graph).busy);
  const at::NoGradGuard guard;
  return at_address(graph).run(inputs);
}

static void closed(int64_t graph) {
  const std::lock_guard<std::mutex> alone(at_address(graph).busy);
  at_address(graph).loader.reset();
  at_address(graph).constants.clear();
}

TORCH_LIBRARY(paceline_package, library) {
  library.def("open", opened);
  library.def("names", names);
  library.def("fill", fill);
  library.def("run", run);
  library.def("close", closed);
}

// How many rounds ran.
extern "C" int64_t paceline_again(const Call* call) {
  return guarded(call->why, call->room, [&]() -> int64_t {
    const std::lock_guard<std::mutex> alone(call->graph->busy);
    const at::NoGradGuard guard;
    std::vector<at::Tensor> inputs, outputs;
    for (int64_t i = 0; i < call->n_inputs; i++) inputs.push_back(tensor(call->inputs[i]));
    if (call->rounds > 1) inputs[LIMIT] = inputs[LIMIT].clone();
    auto* told = call->told;
    auto begin = std::chrono::steady_clock::now();
    double spent = 0;
    int64_t ran = 0;
    while (true) {
      outputs = call->graph->run(inputs);
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
