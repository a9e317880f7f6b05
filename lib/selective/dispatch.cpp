// Who handles an operator: the innermost region decides about it, those around take note.

#include <ATen/autocast_mode.h>

#include <optional>
#include <utility>

#include "lib/frame/frame.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/selective/replay.h"
#include "lib/selective/selection.h"

namespace remat {

namespace {

// Note [Casts of leaves]
// Autocast keeps its casts of leaves while its scope lasts: forward may have found one in the cache that
// the recompute must make, or the other way round. So such a call has no number, no policy is asked
// about it, and what it makes is known by the leaf (Note [The same call again]).
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

void run_selectively(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OpTraits& traits = traits_of(op);
  const seam::AtKernel at_kernel(traits.keys_met);
  if (traits.is_passive || is_cast_of_leaf(traits, stack)) return op.callBoxed(&stack);
  // The innermost region first; those around it only take note.
  detail::Scope* innermost = nullptr;
  const Frame* passed_over = nullptr;  // its scope follows that of a pin
  bool has_innermost = false, is_outermost = true;
  struct Outer {
    Selection* selection;
    Replay* replay;
    int64_t call;
  };
  c10::SmallVector<Outer, 2> outer;
  detail::visit(detail::Ability::Region, [&](detail::Scope& scope) {
    if (scope.frame() == passed_over) return;
    if (scope.is_save_region) {
      passed_over = scope.frame();
      has_innermost = true;
      return;
    }
    if (!std::exchange(has_innermost, true)) {
      innermost = &scope;
      return;
    }
    is_outermost = false;
    Selection* const selection = scope.selection();
    Replay* const replay = scope.replay();
    if (selection != nullptr || replay != nullptr) outer.push_back({selection, replay, -1});
  });
  for (Outer& each : outer)
    each.call = each.selection != nullptr
                    ? each.selection->before_inner(op, arguments_of(op, stack))
                    : each.replay->before_inner(op, arguments_of(op, stack));
  std::optional<StoragesOf> given;
  if (!outer.empty()) given.emplace(arguments_of(op, stack));
  if (Selection* const selection = innermost == nullptr ? nullptr : innermost->selection())
    selection->run(op, stack, *innermost, is_outermost);
  else if (Replay* const replay = innermost == nullptr ? nullptr : innermost->replay())
    replay->run(op, stack);
  else
    op.callBoxed(&stack);
  const auto results = results_of(op, stack);
  for (const Outer& each : outer)
    if (each.selection != nullptr)
      each.selection->after_inner(op, each.call, results, *given);
    else
      each.replay->after_inner(op, each.call, results, *given);
}

namespace {
thread_local int num_packing = 0;
}  // namespace

Packing::Packing(const at::Tensor& saved) {
  ++num_packing;
  detail::visit(detail::Ability::Region, [&](detail::Scope& scope) {
    if (Selection* const selection = scope.selection()) selection->note_saved(saved);
  });
}

Packing::~Packing() { --num_packing; }

bool Packing::is_under_way() { return num_packing > 0; }

}  // namespace remat
