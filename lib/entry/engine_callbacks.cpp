// The callbacks of LibTorch's engine and tensors: they notify the thread's regions of the events
// that these watch.

#include <memory>
#include <optional>
#include <utility>

#include "hooks/pack/in_recompute.h"
#include "hooks/pack/slot.h"
#include "lib/frame/active_recomputes.h"
#include "lib/frame/layers.h"
#include "lib/scope/region_scope.h"

namespace remat::detail {

namespace {

/// Visits the watcher of each region to which this thread belongs, innermost first.
template <class Visitor>
void visit_registrations(Visitor&& visitor) {
  visit_regions([&](RegionScope& scope) {
    RegistrationWatcher* const watcher = scope.is_own_thread() ? scope.registrations() : nullptr;
    if (watcher != nullptr) visitor(*watcher);
  });
}

void hook_registered(const at::TensorBase& tensor, unsigned handle, bool is_new) {
  visit_registrations(
      [&](RegistrationWatcher& watcher) { watcher.hook_registered(tensor, handle, is_new); });
}

std::optional<unsigned> hook_begins(const at::TensorBase& tensor) {
  std::optional<unsigned> known;
  visit_registrations([&](RegistrationWatcher& watcher) {
    if (!known) known = watcher.known_hook(tensor);
  });
  if (known) hook_registered(tensor, *known, /*is_new=*/false);
  return known;
}

void new_hook_registered(const at::TensorBase& tensor, unsigned handle) {
  hook_registered(tensor, handle, /*is_new=*/true);
}

void requires_grad_changes(const at::TensorBase& tensor) {
  visit_registrations([&](RegistrationWatcher& watcher) { watcher.requires_grad_changes(tensor); });
}

const seam::NodePtr* node_instead(const at::TensorBase& tensor) {
  const seam::NodePtr* sink = nullptr;
  visit_registrations([&](RegistrationWatcher& watcher) {
    if (sink == nullptr) sink = watcher.gradient_sink(tensor);
  });
  return sink;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> surround_foreign(
    std::unique_ptr<torch::autograd::SavedVariableHooks> hooks) {
  if (SlotFiller::running() == nullptr) return hooks;
  return std::make_unique<InRecompute>(std::move(hooks));
}

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (layers.run_in_budget != nullptr) return layers.run_in_budget(op, stack);
  if (layers.run_operator != nullptr) return layers.run_operator(op, stack);
  op.callBoxed(&stack);
}

constexpr seam::EngineCallbacks callbacks{
    make_top_hooks,
    surround_foreign,
    backward_begins,
    backward_ended,
    backward_returned,
    run_operator,
    {hook_begins, new_hook_registered, requires_grad_changes, node_instead}};

}  // namespace

const seam::EngineCallbacks& engine_callbacks() { return callbacks; }

}  // namespace remat::detail
