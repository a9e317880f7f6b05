#include "lib/frame/active_recomputes.h"

#include <c10/util/SmallVector.h>

#include <utility>
#include <vector>

#include "hooks/pack/slot.h"
#include "lib/scope/region_scope.h"

namespace remat {

namespace {

struct Entry {
  ValuesByTask* all;
  RecomputedValues* values;
  Filler* filler;
  const LockOwner* owner;
};

struct ThreadState {
  std::vector<Entry> entries;  ///< innermost last
  bool is_preparing = false;
};
ThreadState& here() {
  thread_local ThreadState state;
  return state;
}

c10::SmallVector<const LockOwner*, 4> lock_owners() {
  c10::SmallVector<const LockOwner*, 4> owners;
  for (const Entry& each : here().entries) owners.push_back(each.owner);
  return owners;
}

void tell_regions(const torch::autograd::edge_list& roots,
                  const torch::autograd::edge_list& targets, bool accumulates) {
  int64_t passed_over = -1;
  detail::visit_regions([&](detail::RegionScope& scope) {
    // Recomputes do not run the function of save_region.
    if (scope.is_save_region) passed_over = scope.region().id;
    if (scope.region().id == passed_over || !scope.is_own_thread()) return;
    if (detail::BackwardWatcher* const watcher = scope.backwards())
      watcher->backward_begins(roots, targets, accumulates);
  });
}

}  // namespace

ActiveRecompute::ActiveRecompute(ValuesByTask& all, RecomputedValues& values, Filler& filler,
                                 const LockOwner& owner) {
  ThreadState& state = here();
  state.entries.push_back({&all, &values, &filler, &owner});
  SlotFiller::running() = &filler;
  state.is_preparing = false;
}
ActiveRecompute::~ActiveRecompute() {
  ThreadState& state = here();
  state.entries.pop_back();
  SlotFiller::running() = state.entries.empty() ? nullptr : state.entries.back().filler;
  state.is_preparing = true;
}

bool& is_preparing_recompute() { return here().is_preparing; }

void backward_begins(const torch::autograd::edge_list& roots,
                     const torch::autograd::edge_list& targets, bool accumulates) {
  const ThreadState& state = here();
  if (!state.entries.empty()) {
    state.entries.back().filler->stops().between_operators();
    for (const Entry& each : state.entries) each.all->owner_waits_for_backward(*each.values);
  }
  if (!state.is_preparing) tell_regions(roots, targets, accumulates);
  if (const auto owners = lock_owners(); !owners.empty())
    recompute_lock().yield_to_backward(owners);
}

void backward_returned() {
  const ThreadState& state = here();
  if (!state.entries.empty()) state.entries.back().filler->stops().after_backward();
}

void backward_ended(const torch::autograd::variable_list& gradients,
                    const torch::autograd::variable_list& given) {
  if (const auto owners = lock_owners(); !owners.empty())
    recompute_lock().resume_after_backward(owners);
  if (gradients.empty()) return;
  detail::visit_regions([&](detail::RegionScope& scope) {
    detail::BackwardWatcher* const watcher = scope.is_own_thread() ? scope.backwards() : nullptr;
    if (watcher != nullptr) watcher->backward_ended(gradients, given);
  });
}

}  // namespace remat
