// Definition of custom_function.h.

#include "remat/custom_function.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "lib/base/error.h"
#include "lib/seam/autograd_meta.h"
#include "lib/state/surroundings.h"

namespace remat {

namespace {

using Tensors = CustomRule::Tensors;

/// The rule as the graph keeps it, with forward's surroundings.
struct KeptRule final : torch::CustomClassHolder {
  explicit KeptRule(const CustomRule& given) : rule(given), in_forward(Snapshot::take()) {}
  const CustomRule rule;
  const Snapshot in_forward;
  int64_t num_inputs = 0;
};

bool any_requires_grad(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& each) { return each.defined() && each.requires_grad(); });
}

/// Returns whether LibTorch would refuse a node without rules for transforms and tangents.
bool is_transformed(const Tensors& tensors) {
  return c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& each) {
           return each.defined() && seam::has_tangent(each);
         });
}

/// Returns whether forward gave the same small tensor again. Kernels may round differently.
bool is_same_again(const at::Tensor& small, const at::Tensor& again) {
  const at::NoGradGuard no_grad;
  if (small.sizes() != again.sizes() || small.scalar_type() != again.scalar_type()) return false;
  if (!small.is_floating_point() && !small.is_complex()) return at::equal(small, again);
  return at::allclose(again, small, /*rtol=*/1e-2, /*atol=*/1e-3, /*equal_nan=*/true);
}

void check_again(const Tensors& small, const Tensors& again, const Tensors& inputs) {
  const bool is_same = small.size() == again.size() &&
                       std::equal(small.begin(), small.end(), again.begin(), is_same_again);
  if (!is_same)
    throw_unsupported("forward of a custom function gave other small tensors when it ran again",
                      "a backward with create_graph runs it again, and it drew random numbers or "
                      "read something that has changed",
                      "draw the numbers outside, and pass them as an input");
  for (const at::Tensor& each : again)
    if ((each.is_floating_point() || each.is_complex()) && !each.requires_grad() &&
        any_requires_grad(inputs))
      throw_unsupported("forward of a custom function gave a small tensor without a gradient",
                        "a backward with create_graph differentiates its operators, and one of "
                        "them has no derivative or ran with grad mode off",
                        "use differentiable operators while grad mode is on");
}

struct RuleFunction : torch::autograd::Function<RuleFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const c10::intrusive_ptr<KeptRule>& kept,
                                                at::TensorList given) {
    const Tensors inputs = given.vec();
    CustomRule::Result result = kept->rule.forward(inputs);
    kept->num_inputs = static_cast<int64_t>(inputs.size());
    Tensors saved = inputs;
    saved.insert(saved.end(), result.small.begin(), result.small.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["rule"] = c10::IValue::make_capsule(kept);
    return std::move(result.outputs);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const Tensors& gradients) {
    const auto capsule = context->saved_data["rule"].toCapsule();
    const auto& kept = static_cast<const KeptRule&>(*capsule);
    const Tensors saved = context->get_saved_variables();
    const auto end_of_inputs = saved.begin() + kept.num_inputs;
    Tensors small(end_of_inputs, saved.end());
    const Tensors inputs(saved.begin(), end_of_inputs);
    Tensors all = kept.rule.backward(rematerialized(kept, std::move(small), inputs), gradients);
    TORCH_CHECK_VALUE(all.size() == inputs.size(), "remat::custom_function: backward returned ",
                      all.size(), " gradients for ", inputs.size(),
                      " inputs.\nHint: return one for each input, undefined where there is none.");
    all.insert(all.begin(), at::Tensor());  // the rule's
    return all;
  }

  static Tensors rematerialized(const KeptRule& kept, Tensors small, const Tensors& inputs) {
    const bool is_differentiated = at::GradMode::is_enabled();
    const AmbientRestore ambient(kept.in_forward);
    const at::AutoGradMode as_in_backward(is_differentiated);
    if (is_differentiated) {
      Tensors again = kept.rule.forward(inputs).small;
      check_again(small, again, inputs);
      small = std::move(again);
    }
    return kept.rule.rematerialize(small, inputs);
  }
};

}  // namespace

std::vector<at::Tensor> custom_function(const CustomRule& rule,
                                        const std::vector<at::Tensor>& inputs) {
  TORCH_CHECK_VALUE(rule.forward && rule.rematerialize && rule.backward,
                    "remat::custom_function: the rule has an empty function.\nHint: set forward, "
                    "rematerialize and backward.");
  if (!at::GradMode::is_enabled() || !any_requires_grad(inputs) || is_transformed(inputs))
    return rule.forward(inputs).outputs;
  return RuleFunction::apply(c10::make_intrusive<KeptRule>(rule), at::TensorList(inputs));
}

}  // namespace remat
