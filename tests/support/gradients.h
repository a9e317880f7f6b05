#pragma once
// Leaves, gradients, and the comparison of a program with itself without regions.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <concepts>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace remat::testing {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Kernels;

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

}  // namespace remat::testing
