// Bodies of support.h: gradients, bytes, graphs, seeds, leftovers.

#include "tests/support/support.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstdlib>
#include <random>

namespace remat::testing {

namespace {

const MemoryMeter& meter() {
  static const MemoryMeter the_meter;
  return the_meter;
}

uint64_t chosen_seed() {
  if (const char* fixed = std::getenv("REMAT_TEST_SEED")) return std::strtoull(fixed, nullptr, 10);
  static const uint64_t seed = std::random_device{}();
  return seed;
}

// Returns the tensor, or its first elements: the text of a large one would hide the failure.
Tensor shown(const Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() <= 64) return tensor;
  return tensor.detach().reshape(-1).narrow(0, 0, 16);
}

// Returns gradients that differ from element to element, which shows wrong scales and permutations.
Tensor outer_gradient(const Tensor& output) {
  at::NoGradGuard no_grad;
  Tensor ramp = at::arange(output.numel(), at::kDouble).sub_(output.numel() / 3.0).mul_(0.37);
  return ramp.cos().add_(0.1).reshape(output.sizes()).to(output.options());
}

}  // namespace

// ---- tensors and gradients -------------------------------------------------------------------

Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::randn(sizes, at::TensorOptions().dtype(dtype)).requires_grad_();
}

Tensor leaf_of(double value, at::ScalarType dtype) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(dtype)).requires_grad_();
}

Tensor copy_of(const Tensor& like) {
  if (!like.defined()) return like;
  at::NoGradGuard no_grad;
  return like.detach().clone().requires_grad_(like.requires_grad());
}

Tensors grad_of(const Tensor& y, const Tensors& inputs, GradOptions options) {
  return torch::autograd::grad({y}, inputs, {at::ones_like(y)}, options.retain_graph,
                               options.create_graph, options.allow_unused);
}

bool bit_equal(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() || a.layout() != b.layout()) {
    return false;
  }
  at::NoGradGuard no_grad;
  const Tensor left = (a.is_sparse() ? a.to_dense() : a).detach();
  const Tensor right = (b.is_sparse() ? b.to_dense() : b).detach();
  if (at::equal(left, right)) return true;
  if (!left.is_floating_point() && !left.is_complex()) return false;
  return at::equal(left.isnan(), right.isnan()) &&
         at::equal(at::nan_to_num(left), at::nan_to_num(right));
}

void require_bit_equal(const Tensors& actual, const Tensors& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    INFO("tensor " << i << ", actual:\n"
                   << shown(actual[i]) << "\nexpected:\n"
                   << shown(expected[i]));
    REQUIRE(bit_equal(actual[i], expected[i]));
  }
}

namespace detail {

void begin_run(const Parameters& parameters) {
  for (const Tensor& parameter : parameters.tensors) parameter.mutable_grad() = Tensor();
  at::manual_seed(20240917);
}

void finish_run(Outcome& outcome, const Parameters& parameters, const Tensors& inputs) {
  Tensors roots, outer;
  for (Tensor& output : outcome.outputs) {
    const bool requires_grad = output.defined() && output.requires_grad();
    outcome.outputs_require_grad.push_back(requires_grad);
    if (requires_grad) {
      roots.push_back(output);
      outer.push_back(outer_gradient(output));
    }
    if (output.defined()) output = output.detach();
  }
  if (!roots.empty()) torch::autograd::backward(roots, outer);
  for (const Tensor& input : inputs) {
    outcome.input_grads.push_back(input.defined() ? input.grad() : Tensor());
  }
  for (const Tensor& parameter : parameters.tensors) {
    outcome.parameter_grads.push_back(parameter.grad());
    parameter.mutable_grad() = Tensor();
  }
  outcome.generator_state = generator_state();
}

void require_same_outcome(const Outcome& actual, const Outcome& plain) {
  {
    INFO("outputs");
    require_bit_equal(actual.outputs, plain.outputs);
    REQUIRE(actual.outputs_require_grad == plain.outputs_require_grad);
  }
  {
    INFO("grads of inputs");
    require_bit_equal(actual.input_grads, plain.input_grads);
  }
  {
    INFO("grads of parameters");
    require_bit_equal(actual.parameter_grads, plain.parameter_grads);
  }
  INFO("CPU generator after forward and backward");
  REQUIRE(at::equal(actual.generator_state, plain.generator_state));
}

}  // namespace detail

// ---- counting --------------------------------------------------------------------------------

ExpectedCalls::~ExpectedCalls() {
  INFO("calls of " << what_);
  CHECK(count_ == expected_);
}

Alive::~Alive() {
  INFO("probes that outlive their counter");
  CHECK(*count_ == 0);
}

Counters Counted::now() const {
  Counters c = counters();
  c.frames_created -= start_.frames_created;
  c.recomputes -= start_.recomputes;
  c.early_stops -= start_.early_stops;
  c.tensors_dropped -= start_.tensors_dropped;
  c.tensors_recomputed -= start_.tensors_recomputed;
  return c;
}

// ---- the graph -------------------------------------------------------------------------------

std::vector<NodePtr> nodes_below(const Tensor& y) {
  std::vector<NodePtr> nodes;
  std::unordered_set<const torch::autograd::Node*> seen;
  auto add = [&](const NodePtr& node) {
    if (node && seen.insert(node.get()).second) nodes.push_back(node);
  };
  if (y.defined()) add(y.grad_fn());
  for (size_t i = 0; i < nodes.size(); ++i) {
    const NodePtr node = nodes[i];  // `nodes` grows below
    for (const auto& edge : node->next_edges()) add(edge.function);
  }
  return nodes;
}

WeakGraph::WeakGraph(const Tensors& roots) {
  for (const Tensor& root : roots) {
    for (const NodePtr& node : nodes_below(root)) nodes_.emplace_back(node);
  }
  size_ = static_cast<int64_t>(nodes_.size());
}

int64_t WeakGraph::alive() const {
  while (std::erase_if(nodes_, [](const WeakNodePtr& node) { return node.expired(); }) > 0) {
  }
  return static_cast<int64_t>(nodes_.size());
}

void drop_ready_nodes() {
  const Tensor one = at::ones({1}).requires_grad_();
  grad_of(one * 2, {one});
}

// ---- random numbers --------------------------------------------------------------------------

Tensor generator_state() {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(const Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

Seed::Seed() : Seed(chosen_seed()) {}

Seed::Seed(uint64_t seed)
    : seed_(seed),
      before_(generator_state()),
      message_(Catch::MessageBuilder("Seed", CATCH_INTERNAL_LINEINFO, Catch::ResultWas::Info)
               << "seed " << seed << " (REMAT_TEST_SEED repeats it)") {
  at::manual_seed(seed);
}

Seed::~Seed() { set_generator_state(before_); }

// ---- leftovers of tests --------------------------------------------------------------------

Baseline baseline() {
  const Counters now = counters();
  return {meter().live_bytes(), now.frames_alive, now.recomputed_bytes_alive};
}

std::vector<std::string> leftovers(const Baseline& before) {
  std::vector<std::string> found;
  auto expect = [&](bool is_clean, const std::string& what) {
    if (!is_clean) found.push_back(what);
  };
  const Baseline now = baseline();
  auto grew = [&](int64_t from, int64_t to, const std::string& what) {
    expect(from == to, std::to_string(to - from) + " " + what);
  };
  grew(before.frames_alive, now.frames_alive, "frames");
  grew(before.recomputed_bytes_alive, now.recomputed_bytes_alive, "recomputed bytes");
  grew(before.live_bytes, now.live_bytes, "tensor bytes");

  expect(at::SavedTensorDefaultHooks::is_enabled(), "saved-tensor hooks disabled");
  if (at::SavedTensorDefaultHooks::is_enabled()) {
    expect(
        torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks() == nullptr,
        "an active saved-tensor hook");
  }
  expect(!c10::impl::TorchDispatchModeTLS::any_modes_set(), "a dispatch mode");
  const PhaseInfo phase = current_phase();
  expect(phase.phase == Phase::None && phase.depth == 0 && !is_checkpointing() && !is_recomputing(),
         "a region's phase");
  expect(at::GradMode::is_enabled(), "grad mode off");
  expect(!c10::InferenceMode::is_enabled(), "inference mode");
  expect(!at::autocast::is_autocast_enabled(at::kCPU), "autocast");
  return found;
}

}  // namespace remat::testing
