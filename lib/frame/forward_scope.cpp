#include "lib/frame/forward_scope.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "hooks/pack/drop.h"
#include "lib/base/waiting.h"
#include "lib/seam/engine.h"

namespace remat {

ForwardScope::ForwardScope(c10::intrusive_ptr<Frame> frame, const detail::RegionScope* around,
                           std::shared_ptr<const UserRegistrations> own)
    : FrameScope(std::move(frame)), own_(std::move(own)) {
  if (own_ != nullptr) answers(detail::Ability::State);
  const RegionStart& start = this->frame().start();
  pass_over_from(start.sequence, start.thread);
  is_inside_recompute = around != nullptr && around->is_inside_recompute;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> ForwardScope::make_hooks() {
  // See RecomputeScope: a thread that merely inherited the stack saves without hooks.
  if (!is_own_thread()) return nullptr;
  if (rest_is_plain_ || (seam::is_in_script() && !may_drop_in_script())) return nullptr;
  return Drop::make(c10::intrusive_ptr<SlotOwner>::reclaim_copy(&frame()),
                    frame().slots().room_for_hook());
}

// See Note [The first script].
bool ForwardScope::may_drop_in_script() {
  if (ScriptWatch::begin_observing()) {
    rest_is_plain_ = true;
    frame().notes().note_plain_rest();
    return false;
  }
  scripts()->saw_save();
  return true;
}

void ForwardScope::backward_begins(const torch::autograd::edge_list& roots,
                                   const torch::autograd::edge_list& targets, bool accumulates) {
  frame().slots().end_operator(frame().region());
  ForwardNotes& notes = frame().notes();
  notes.note_any_backward();
  if (accumulates) notes.note_accumulation(roots);
  const int64_t number = num_backwards_++;
  if (Keeper* const keeper = frame().keeper()) keeper->backward_begins();
  auto asked = asked_of(frame().inputs(), roots, targets);
  if (!asked.is_nothing()) notes.note_backward(number, std::move(asked));
}

void ForwardScope::backward_ended(const torch::autograd::variable_list& gradients,
                                  const torch::autograd::variable_list& given) {
  StorageSet known;  // a sum, for example, returns the gradient that it was given
  for (const at::Tensor& each : given) known.add(each);
  std::lock_guard<SpinLock> lock(mutex_);
  for (const at::Tensor& each : gradients)
    if (each.defined() && !each.is_cpu() && !known.contains(storage_of(each)))
      gradients_.push_back(weak_storage_of(each));
}

void ForwardScope::hook_registered(const at::TensorBase& tensor, unsigned handle, bool) {
  frame().notes().note_hook(tensor, handle);
}

// Note [Late threads of the engine]
// The engine's thread of a device releases the gradients that it has computed a little after the
// waiting thread continues. Such a gradient, if the region uses it, would still be alive at the
// region's end, like a captured tensor. So a region waits for its release, for a bounded time. If
// the function has put the gradient into an outside variable, it is not released, but the recompute
// of such a function is refused anyway.
void ForwardScope::wait_for_gradients(c10::function_ref<void(TensorVisitor)> visit_result) {
  StorageSet results;
  visit_result([&](at::Tensor& tensor) { results.add(tensor); });
  constexpr std::chrono::milliseconds longest_wait(20);
  const auto start = std::chrono::steady_clock::now();
  const WaitForThread waiting;
  for (const WeakStorage& each : gradients_) {
    const c10::StorageImpl* const storage = each._unsafe_get_target();
    if (each.expired() || results.contains(storage) || !frame().slots().has_slot_of(storage) ||
        (frame().keeper() != nullptr && frame().keeper()->holds(storage)))
      continue;
    while (!each.expired() && std::chrono::steady_clock::now() - start < longest_wait)
      std::this_thread::yield();
  }
}

}  // namespace remat
