#pragma once
// The one header a test file needs: Catch2, tensors, autograd, remat, and the tools below.
//
//   leaf({2, 2})                       a random leaf that requires grad
//   grad_of(y, {x}, {.create_graph})   torch::autograd::grad of y with grad ones
//   require_same_grads(plain, checkpointed, x, y)
//                                      runs both on copies of x, y from one seed and requires
//                                      bit-equal outputs, `requires_grad`s, input and parameter
//                                      grads, and CPU generator states
//   Calls calls; ... calls(); ... calls.count()            how often a region's function ran
//   ExpectedCalls once(1, "unpack"); ... once();           checks itself when it dies
//   Alive alive; auto probe = alive.probe(); alive.count() instances of probe; checks 0 at its end
//   LiveBytes bytes; ... bytes.held(), bytes.peak()        exact tensor bytes since it was made
//   OpCounter ops; ... ops.count("aten::sin")              operator calls (also those cut short)
//   KernelCounter kernels; ... kernels.count("sin")        CPU kernels that really ran
//   graph_dies(f), nodes_below(y), WeakGraph               weak references to graph nodes
//   contains("text"), error_of<T>(f)                       matches a text; returns the error itself
//   Seed seed(7);                      seeds the CPU generator, reports it with a failure, restores
//   first_then(calls, f, g)            f the first time, then g: a recompute that differs
//   mismatch_of(y, x)                  the error of a backward that must leave nothing
//   leftovers(), Baseline, Unchanged   leftovers of tests, which main.cpp looks for after each
//
// Not here, because they cost compile time: saved_tensors.h (reads saved tensors of nodes),
// nn.h (torch::nn). Tags: a case tagged [leaves-bytes] may leave tensor bytes behind.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

// LibTorch's logging defines a CHECK of its own, which ends the process. Catch2 comes after it.
#undef CHECK
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#define REMAT_TEST_CATCH3 1
#else
#include <catch2/catch.hpp>
#define REMAT_TEST_CATCH3 0
#endif

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

// All but module.h and sequential.h, which include torch::nn: those come with nn.h.
#include "remat/checkpoint.h"
#include "remat/error.h"
#include "remat/hooks.h"
#include "remat/memory.h"
#include "remat/options.h"
#include "remat/plan.h"
#include "remat/policy.h"
#include "remat/report.h"
#include "remat/scope.h"
#include "remat/state.h"
#include "remat/version.h"

namespace remat::testing {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// ---- tensors and gradients -------------------------------------------------------------------

/// Returns a leaf of standard normal numbers that requires grad (by default `float`).
Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);
/// Returns a 0-d leaf with this value that requires grad.
Tensor leaf_of(double value, at::ScalarType dtype = at::kFloat);
/// Returns a new leaf with the values, strides and `requires_grad` of `like`.
Tensor copy_of(const Tensor& like);

struct GradOptions {
  std::optional<bool> retain_graph{};
  bool create_graph = false;
  bool allow_unused = false;
};

/// Returns d sum(y) / d inputs, by `torch::autograd::grad` with ones as the outer gradient.
Tensors grad_of(const Tensor& y, const Tensors& inputs, GradOptions options = {});

/// Returns whether dtype, sizes, layout and elements are equal; equal NaNs count as equal;
/// undefined equals undefined.
bool bit_equal(const Tensor& a, const Tensor& b);
void require_bit_equal(const Tensors& actual, const Tensors& expected);

/// Everything that one run of a program leaves for comparison.
struct Outcome {
  Tensors outputs;
  std::vector<bool> outputs_require_grad;
  Tensors input_grads, parameter_grads;
  Tensor generator_state;
};

/// Leaves whose grads are compared, too: the function captures them instead of taking them.
struct Parameters {
  Tensors tensors;
};

namespace detail {

inline void collect_tensors(Tensors& into, const Tensor& value) { into.push_back(value); }
inline void collect_tensors(Tensors& into, const Tensors& values) {
  into.insert(into.end(), values.begin(), values.end());
}
template <class... T>
void collect_tensors(Tensors& into, const std::tuple<T...>& values);
template <class T>
void collect_tensors(Tensors&, const T&) {}
template <class A, class B>
void collect_tensors(Tensors& into, const std::pair<A, B>& values) {
  collect_tensors(into, values.first);
  collect_tensors(into, values.second);
}
template <class... T>
void collect_tensors(Tensors& into, const std::tuple<T...>& values) {
  std::apply([&](const auto&... value) { (collect_tensors(into, value), ...); }, values);
}

void begin_run(const Parameters& parameters);
void finish_run(Outcome& outcome, const Parameters& parameters, const Tensors& inputs);
void require_same_outcome(const Outcome& actual, const Outcome& plain);

}  // namespace detail

struct Kernels;

/// Runs `f` on copies of `inputs` from a fixed seed, then one backward through all of its outputs
/// that require grad (tensors, vectors, pairs and tuples of them; anything else is ignored) with
/// outer gradients that differ from element to element.
template <class F, class... T>
Outcome run(const Parameters& parameters, F&& f, const T&... inputs) {
  Outcome outcome;
  detail::begin_run(parameters);
  const std::tuple copies{copy_of(inputs)...};
  detail::collect_tensors(outcome.outputs, std::apply(f, copies));
  detail::finish_run(outcome, parameters,
                     std::apply([](const auto&... copy) { return Tensors{copy...}; }, copies));
  return outcome;
}

template <class F, class G, class... T>
void require_same_grads(const Parameters& parameters, F&& plain, G&& checkpointed,
                        const T&... inputs) {
  const Outcome expected = run(parameters, std::forward<F>(plain), inputs...);
  detail::require_same_outcome(run(parameters, std::forward<G>(checkpointed), inputs...), expected);
}
template <class F, class G, class... T>
  requires(!std::same_as<std::remove_cvref_t<F>, Parameters> &&
           !std::same_as<std::remove_cvref_t<F>, Kernels>)
void require_same_grads(F&& plain, G&& checkpointed, const T&... inputs) {
  require_same_grads(Parameters{}, std::forward<F>(plain), std::forward<G>(checkpointed),
                     inputs...);
}

// ---- counting --------------------------------------------------------------------------------

/// Counts calls; any thread. Capture it by reference.
class Calls {
 public:
  void operator()() { ++count_; }
  int64_t count() const { return count_; }
  void reset() { count_ = 0; }

 private:
  std::atomic<int64_t> count_{0};
};

/// Returns `f` with a count of its calls in `calls`, which must outlive it.
template <class F>
auto counted(Calls& calls, F f) {
  return [&calls, f = std::move(f)](auto&&... args) {
    calls();
    return f(std::forward<decltype(args)>(args)...);
  };
}

/// Calls `first` once and `later` from then on.
template <class F, class G>
auto first_then(Calls& calls, F first, G later) {
  return [&calls, first, later](const Tensor& t) -> Tensor {
    calls();
    return calls.count() == 1 ? first(t) : later(t);
  };
}

/// A probe that fails its test at its end if the number of calls is not the expected one.
class ExpectedCalls {
 public:
  ExpectedCalls(int64_t expected, std::string what) : expected_(expected), what_(std::move(what)) {}
  ExpectedCalls(const ExpectedCalls&) = delete;
  ExpectedCalls& operator=(const ExpectedCalls&) = delete;
  ~ExpectedCalls();
  void operator()() { ++count_; }
  int64_t count() const { return count_; }

 private:
  const int64_t expected_;
  const std::string what_;
  std::atomic<int64_t> count_{0};
};

/// Counts the living copies of its probes, and fails its test if it dies before them.
class Alive {
 public:
  class Probe {
   public:
    explicit Probe(std::shared_ptr<std::atomic<int64_t>> count) : count_(std::move(count)) {
      ++*count_;
    }
    Probe(const Probe& other) : Probe(other.count_) {}
    Probe& operator=(const Probe&) = delete;
    ~Probe() { --*count_; }

   private:
    std::shared_ptr<std::atomic<int64_t>> count_;
  };

  Alive() = default;
  Alive(const Alive&) = delete;
  Alive& operator=(const Alive&) = delete;
  ~Alive();
  Probe probe() const { return Probe(count_); }
  int64_t count() const { return *count_; }

 private:
  std::shared_ptr<std::atomic<int64_t>> count_ = std::make_shared<std::atomic<int64_t>>(0);
};

/// The difference of `counters()` since its construction:
/// `Counted done; ... done.now().recomputes`. The two members that count living objects are not
/// differences.
class Counted {
 public:
  Counters now() const;

 private:
  Counters start_ = counters();
};

/// Bytes of CPU tensors since its construction, in the whole process.
class LiveBytes {
 public:
  int64_t held() const { return meter_.live_bytes() - start_; }
  int64_t peak() const { return meter_.peak_bytes() - start_; }
  void reset_peak() { meter_.reset_peak(); }

 private:
  MemoryMeter meter_;
  int64_t start_ = meter_.live_bytes();
};

/// Operator calls by name ("aten::sin") on this thread and in the backward passes it runs, as
/// `RecordFunction` sees them: composite operators and their parts, above autograd. A call that
/// early stop cut short is counted although its kernel did not run; see KernelCounter.
class OpCounter {
 public:
  OpCounter();
  ~OpCounter();
  OpCounter(const OpCounter&) = delete;
  OpCounter& operator=(const OpCounter&) = delete;
  int64_t count(const std::string& op) const;
  /// Returns every call in order.
  std::vector<std::string> names() const;
  void reset();

 private:
  uint64_t handle_;
};

/// CPU kernels that ran, by operator name: "sin", "cos", "exp", "mm", "addmm", "bmm", "mul.Tensor",
/// "relu", "sigmoid", "cumsum", "cat", "native_dropout", and those named in `more`. Counting
/// kernels replace the real ones for its lifetime, below autograd and on every thread. One at a
/// time.
class KernelCounter {
 public:
  explicit KernelCounter(const std::vector<std::string>& more = {});
  ~KernelCounter();
  KernelCounter(const KernelCounter&) = delete;
  KernelCounter& operator=(const KernelCounter&) = delete;
  int64_t count(const std::string& kernel) const;
  std::vector<std::string> names() const;
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The effect of a policy on kernels, over forward and backward together: those in `kept` run as
/// often as without a region, those in `again` more often.
struct Kernels {
  std::vector<std::string> kept, again{};
};

namespace detail {

using Counts = std::map<std::string, int64_t>;
Counts counts_of(const Kernels& kernels, const std::function<void()>& run);
void require_kernels(const Kernels& kernels, const Counts& actual, const Counts& plain);

}  // namespace detail

/// Requires the same gradients, and the effect of the policy that `kernels` describes.
template <class F, class G, class... T>
void require_same_grads(const Kernels& kernels, F&& plain, G&& checkpointed, const T&... inputs) {
  require_same_grads(plain, checkpointed, inputs...);
  const auto counts = [&](auto& f) {
    return detail::counts_of(kernels, [&] { run(Parameters{}, f, inputs...); });
  };
  const detail::Counts expected = counts(plain);
  detail::require_kernels(kernels, counts(checkpointed), expected);
}

// ---- the graph -------------------------------------------------------------------------------

/// The pointer of an edge: `std::shared_ptr<Node>` before LibTorch 2.13, an `intrusive_ptr` since.
using NodePtr = decltype(torch::autograd::Edge::function);

namespace detail {
template <class P>
struct WeakOf;
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T, class Null>
struct WeakOf<c10::intrusive_ptr<T, Null>> {
  using type = c10::weak_intrusive_ptr<T, Null>;
};
}  // namespace detail

using WeakNodePtr = detail::WeakOf<NodePtr>::type;

/// Returns every node reachable from `y.grad_fn()`.
std::vector<NodePtr> nodes_below(const Tensor& y);

/// Weak references to every node below some tensors.
class WeakGraph {
 public:
  explicit WeakGraph(const Tensors& roots);
  int64_t size() const { return size_; }
  /// Returns the number of live nodes, and first releases references to dead ones. Since LibTorch
  /// 2.13 a weak reference keeps a dead node's saved variables, and one with hooks owns the
  /// accumulator of its leaf.
  int64_t alive() const;

 private:
  mutable std::vector<WeakNodePtr> nodes_;
  int64_t size_ = 0;
};

/// Makes a 0-d leaf `a` and `f(a)`. Returns whether every node of the graph is gone when both are
/// out of scope. A result without a graph counts as a failure.
template <class F>
bool graph_dies(F&& f) {
  std::optional<WeakGraph> graph;
  {
    const Tensor a = leaf({});
    const Tensor out = f(a);
    graph.emplace(Tensors{out});
    if (graph->size() == 0 || graph->alive() != graph->size()) return false;
  }
  return graph->alive() == 0;
}

// ---- errors ----------------------------------------------------------------------------------

/// Returns a matcher for texts that contain `part`.
inline auto contains(const std::string& part) {
#if REMAT_TEST_CATCH3
  return Catch::Matchers::ContainsSubstring(part);
#else
  return Catch::Matchers::Contains(part);
#endif
}

/// Runs `f`, requires that it throws an `E`, and returns a copy of it.
template <class E, class F>
E error_of(F&& f) {
  std::optional<E> error;
  try {
    std::forward<F>(f)();
  } catch (const E& e) {
    error.emplace(e);
  } catch (const std::exception& e) {
    FAIL("another type was thrown: " << e.what());
  }
  if (!error) FAIL("nothing was thrown");
  return *error;
}

/// Returns the text of an error without LibTorch's backtrace.
template <class E>
std::string text_of(const E& error) {
  if constexpr (std::is_base_of_v<c10::Error, E>) {
    return error.what_without_backtrace();
  } else {
    return error.what();
  }
}

/// Drops the nodes that LibTorch's queue still holds after an error in backward, and their graph,
/// by a backward on the same thread.
void drop_ready_nodes();

/// Returns the error of a backward through `y`, which must leave nothing behind.
inline CheckpointError mismatch_of(const Tensor& y, const Tensor& x) {
  auto error = error_of<CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
  drop_ready_nodes();
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  return error;
}

/// Requires the true gradient, or LibTorch's error about in-place changes.
template <class F>
void require_error_or_gradient(F&& gradient, const Tensors& expected) {
  Tensors grads;
  try {
    grads = gradient();
  } catch (const c10::Error& e) {
    CHECK_THAT(text_of(e), contains("modified by an inplace operation"));
    return;
  }
  require_bit_equal(grads, expected);
}

// ---- random numbers --------------------------------------------------------------------------

/// Seeds the CPU generator, shows the seed with a failure, and restores the generator at its end.
/// Without a number: `REMAT_TEST_SEED`, else a new seed in each run of the program.
class Seed {
 public:
  Seed();
  explicit Seed(uint64_t seed);
  ~Seed();
  Seed(const Seed&) = delete;
  Seed& operator=(const Seed&) = delete;
  uint64_t value() const { return seed_; }

 private:
  uint64_t seed_;
  Tensor before_;
  Catch::ScopedMessage message_;
};

/// Returns the state of the default CPU generator.
Tensor generator_state();
void set_generator_state(const Tensor& state);

// ---- leftovers of tests --------------------------------------------------------------------

/// The state before a test.
struct Baseline {
  int64_t live_bytes = 0;
  int64_t frames_alive = 0;
  int64_t recomputed_bytes_alive = 0;
};
Baseline baseline();

/// Returns one line for each leftover that was not there at `before`: frames, recomputed bytes,
/// tensor bytes, active saved-tensor hooks or a disabled hook switch, dispatch modes, a region's
/// phase, grad mode off, inference mode, autocast.
std::vector<std::string> leftovers(const Baseline& before);

/// Everything that must be as before after a failure.
class Unchanged {
 public:
  Unchanged() : before_(baseline()) {}
  void require(const char* when) const {
    INFO(when);
    std::string found;
    for (const std::string& each : leftovers(before_)) found += each + "; ";
    REQUIRE(found.empty());
  }

 private:
  Baseline before_;
};

}  // namespace remat::testing

// Test files are programs: they may use these names unqualified.
using namespace remat::testing;  // NOLINT
