#include "lib/frame/recompute_scope.h"

#include <exception>
#include <utility>

#include "hooks/pack/collect.h"
#include "lib/base/planted_fault.h"
#include "lib/frame/mismatch.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/engine.h"
#include "lib/seam/variable_hooks.h"

namespace remat {

using detail::Ability;

namespace {

/// Returns the owner of the recompute in which this thread is about to recompute another region, or
/// null.
const LockOwner* lock_owner_around() {
  const LockOwner* around = nullptr;
  detail::visit_regions([&](const detail::RegionScope& scope) {
    if (around == nullptr) around = scope.lock_owner;
  });
  return around;
}

}  // namespace

RecomputeScope::RecomputeScope(c10::intrusive_ptr<Frame> recomputed, Filler& filler)
    : FrameScope(std::move(recomputed)), filler_(filler), own_lock_{lock_owner_around()} {
  frame().surroundings().visit_draw_logs([this](DrawLog& log) { draws_.add(log); });
  const RegionOptions& options = frame().region().options;
  early_stop = options.early_stop_guard;
  debug = options.debug_guard;
  is_recompute = is_inside_recompute = true;
  lock_owner = &own_lock_;
  if (frame().surroundings().user_state() != nullptr) answers(Ability::State);
  if (early_stop) answers(Ability::EarlyStop);
  if (debug) answers(Ability::Debug);
  if (const auto& extras = frame().region().extras; extras && extras->training_level)
    answers(Ability::Level);
}

std::unique_ptr<torch::autograd::SavedVariableHooks> RecomputeScope::make_hooks() {
  // A thread that merely inherited the stack (at::launch) saves without hooks. An engine thread
  // that runs a backward inside the region fills slots while the owner waits for it.
  if (!is_own_thread()) return nullptr;
  if (frame().notes().has_scripts() && seam::is_in_script()) scripts()->saw_save();
  return std::make_unique<Collect>(filler_);
}

void RecomputeScope::begin(const std::vector<at::Tensor>& inputs) {
  ForwardNotes& notes = frame().notes();
  if (notes.asked_for_inputs())
    for (const at::Tensor& each : inputs)
      aliases_.push_back(each.defined() ? WeakEdge(each) : WeakEdge());
  if (notes.has_run_backward())  // See Note [Accumulating once].
    if (auto leaves = notes.accumulated_leaves(); !leaves.is_empty())
      sinks_ = std::make_unique<GradientSinks>(std::move(leaves));
  if (draws_.uses_original() || notes.has_hook_after_backward()) filler_.stops().forbid();
  if (notes.has_plain_rest()) filler_.ignore_rest();
  if (notes.has_scripts()) filler_.stops().forbid_in_scripts();
  if (frame().keeper() == nullptr) return;
  replay_ = frame().keeper()->begin_recompute(filler_, inputs);
  filler_.comparer().set_replay(replay_.get());
}

void RecomputeScope::move_providers(const std::vector<std::any>& states) {
  if (user_restore_ == nullptr || states.empty()) return;
  const seam::DispatchModeOff unseen;
  user_restore_->move_to(states);
  filler_.comparer().set_vouched(user_restore_->written());
}

// A refusal counts even if the function catches it.
template <class Throw>
void RecomputeScope::refuse(Throw&& refusal) {
  try {
    refusal();
  } catch (...) {
    filler_.note_refusal();
    // It cannot pass a noexcept function: there it is thrown when the recompute ends.
    if (frame().region().body->can_be_stopped() && std::uncaught_exceptions() == 0) throw;
  }
}

void RecomputeScope::backward_begins(const torch::autograd::edge_list& roots,
                                     const torch::autograd::edge_list& targets, bool accumulates) {
  filler_.end_operator();
  const AskedOfInputs asked = frame().notes().asked_by_backward(num_backwards_++);
  // If the run is complete already, its gradients are not used.
  const char* reason = filler_.progress().is_complete()
                           ? nullptr
                           : against(asked, frame().inputs(), aliases_, roots, targets);
  if (sinks_ && reason == nullptr) reason = sinks_->against(roots, targets, accumulates);
  if (reason != nullptr) refuse([&] { refuse_backward(frame().region(), reason); });
  if (replay_) replay_->check_backward(roots, targets);
}

const seam::NodePtr* RecomputeScope::gradient_sink(const at::TensorBase& tensor) {
  return sinks_ ? sinks_->sink_of(tensor) : nullptr;
}

// See Note [Tensors from outside].
std::optional<unsigned> RecomputeScope::known_hook(const at::TensorBase& tensor) {
  if (outside_ == nullptr || is_planted(Fault::HookTwice)) return std::nullopt;
  const auto note = frame().notes().hook(tensor, outside_->count_hook(tensor));
  if (!note || !seam::has_hook(tensor, note->handle)) return std::nullopt;
  if (note->follows_backward && num_backwards_ > 0)
    refuse([&] { refuse_backward(frame().region(), hook_after_backward); });
  return note->handle;
}

void RecomputeScope::hook_registered(const at::TensorBase& tensor, unsigned handle, bool is_new) {
  if (is_new && outside_ != nullptr) outside_->note_hook(tensor, handle);
}

void RecomputeScope::requires_grad_changes(const at::TensorBase& tensor) {
  if (outside_ != nullptr) outside_->note_requires_grad(tensor);
}

DrawReplay* RecomputeScope::draw_replay(const c10::GeneratorImpl& generator) {
  if (DrawReplay* const replay = draws_.draw_replay(generator)) return replay;
  return early_guards_.replay_of(generator);
}

void RecomputeScope::guard_opened(const UserRegistrations& opened, const std::vector<std::any>&) {
  if (filler_.progress().is_forward_over()) return;
  early_guards_.add(opened, frame().surroundings().user_state(), *this,
                    frame().region().options.preserve_rng_state,
                    std::this_thread::get_id() == owner);
}

}  // namespace remat
