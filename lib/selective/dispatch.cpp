#include "lib/selective/dispatch.h"

#include <ATen/autocast_mode.h>

#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>

#include "lib/frame/layers.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/selective/op_traits.h"
#include "lib/selective/operator_handler.h"

namespace remat {

namespace {

// Note [Casts of leaves]
// Autocast caches its casts of leaves while its scope lasts. Forward may have found a cast in the
// cache that the recompute must make, or the reverse. Such a call therefore has no number, no
// policy is asked about it, and its result is identified by the leaf (Note [The same call again]).
bool is_cast_of_leaf(const OpTraits& traits, const torch::jit::Stack& stack) {
  if (!traits.is_cast || !at::autocast::is_autocast_cache_enabled()) return false;
  constexpr std::size_t num_arguments = 7;  // of _to_copy: the tensor, its dtype, ...
  const auto arguments = last(stack, num_arguments);
  if (!arguments[0].isTensor() || !arguments[1].isInt()) return false;
  const at::Tensor& tensor = arguments[0].toTensor();
  return tensor.defined() && tensor.is_leaf() && tensor.requires_grad() &&
         tensor.scalar_type() == at::kFloat &&
         arguments[1].toScalarType() == at::autocast::get_autocast_dtype(tensor.device().type());
}

}  // namespace

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OpTraits& traits = traits_of(op);
  const seam::AtKernel at_kernel(traits.keys_met);
  if (traits.is_passive || is_cast_of_leaf(traits, stack)) return op.callBoxed(&stack);
  // The innermost region decides; enclosing regions only record the call.
  const detail::RegionScope* innermost = nullptr;
  OperatorHandler* deciding = nullptr;
  int64_t passed_over = -1;  // a region's scope follows that of its save_region
  bool has_innermost = false, is_outermost = true;
  struct Outer {
    OperatorHandler* handler;
    int64_t call;
  };
  c10::SmallVector<Outer, 2> outer;
  detail::visit_regions([&](detail::RegionScope& scope) {
    if (scope.region().id == passed_over) return;
    if (scope.is_save_region) {
      passed_over = scope.region().id;
      has_innermost = true;
      return;
    }
    OperatorHandler* const handler = scope.operators();
    if (!std::exchange(has_innermost, true)) {
      innermost = &scope;
      deciding = handler;
      return;
    }
    is_outermost = false;
    if (handler != nullptr) outer.push_back({handler, -1});
  });
  for (Outer& each : outer) each.call = each.handler->before_inner(op, arguments_of(op, stack));
  std::optional<StoragesOf> given;
  if (!outer.empty()) given.emplace(arguments_of(op, stack));
  if (deciding != nullptr)
    deciding->run(op, stack, *innermost, is_outermost);
  else
    op.callBoxed(&stack);
  const auto results = results_of(op, stack);
  for (const Outer& each : outer) each.handler->after_inner(op, each.call, results, *given);
}

namespace {

[[maybe_unused]] const bool handles_operators = (layers.run_operator = run_operator, true);

}  // namespace

}  // namespace remat
