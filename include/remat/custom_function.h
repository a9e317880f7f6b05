#pragma once
// custom_function(): a function with a gradient rule of its own, which rebuilds in backward the
// tensors that it needs.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "remat/export.h"

namespace remat {

/// The rule of a function: `forward` returns its outputs and small tensors, `rematerialize`
/// rebuilds from these the tensors that backward needs, and `backward` is the usual formula over
/// them. An attention keeps the log-sum-exp of its scores in this way instead of its probabilities.
/// The three functions are kept as long as the graph, and may be called on any thread. They run
/// with grad mode off, except in a backward with `create_graph`: that runs all three with grad mode
/// on, `forward` included, and autograd differentiates their operators. So `forward` may use a
/// kernel without a derivative only while grad mode is off.
struct CustomRule {
  using Tensors = std::vector<at::Tensor>;  ///< tensors in the order of the rule
  /// The results of `forward`.
  struct Result {
    Tensors outputs;  ///< results of custom_function()
    Tensors small;    ///< kept for `rematerialize`
  };
  /// Computes the outputs and the small tensors.
  std::function<Result(const Tensors& inputs)> forward{};
  /// Returns the tensors that `backward` reads.
  /// Must not draw random numbers. Runs under forward's autocast state, as `forward` does.
  std::function<Tensors(const Tensors& small, const Tensors& inputs)> rematerialize{};
  /// Returns a gradient for each input, undefined for none. `gradients`: those of the outputs;
  /// zeros for an output that the backward does not reach.
  std::function<Tensors(const Tensors& saved, const Tensors& gradients)> backward{};
};

/// Runs `rule.forward` and returns its outputs, which are differentiable by the rule. The graph
/// keeps the inputs and the small tensors, as autograd saves tensors: in a region they are computed
/// again, hooks may move them, and a change in place is an error. With grad mode off, without an
/// input that requires grad, inside functorch transforms and with forward-mode tangents only
/// `forward` runs, in the grad mode around.
/// Throws `c10::ValueError` for a rule with a missing function or with another number of gradients
/// than inputs. A backward with `create_graph` throws CheckpointError (Unsupported) if `forward`,
/// run again, gives other small tensors (it drew random numbers), or a floating-point one without a
/// gradient.
REMAT_API std::vector<at::Tensor> custom_function(const CustomRule& rule,
                                                  const std::vector<at::Tensor>& inputs);

}  // namespace remat
