// Bodies of checkpoint.h: the first run of a region.

#include "remat/checkpoint.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "hooks/drop.h"
#include "lib/base/spin_lock.h"
#include "lib/base/stack_room.h"
#include "lib/frame/frame.h"
#include "lib/frame/inner_backward.h"
#include "lib/frame/mismatch.h"
#include "lib/observe/profiler.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/selective/policy_rule.h"
#include "lib/selective/selection.h"

namespace remat::detail {

namespace {

/// The scope of a region's first run.
class ForwardScope final : public Scope {
 public:
  ForwardScope(c10::intrusive_ptr<Frame> frame, const Scope* around) : frame_(std::move(frame)) {
    is_inside_recompute = around != nullptr && around->is_inside_recompute;
    answers(Ability::Hooks);
    answers(Ability::Region);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    // See RecomputeScope: a thread that merely inherited the stack saves plainly.
    if (!is_own_thread()) return nullptr;
    return std::make_unique<Drop>(frame_);
  }
  bool is_own_thread() const override {
    return std::this_thread::get_id() == frame_->forward_thread() || seam::graph_task_id() >= 0;
  }
  Selection* selection() const override { return is_own_thread() ? frame_->selection() : nullptr; }
  Frame* frame() const override { return frame_.get(); }
  void backward_begins(const torch::autograd::edge_list& roots,
                       const torch::autograd::edge_list& targets, bool accumulates) override {
    if (!is_own_thread()) return;
    frame_->end_operator();
    frame_->note_any_backward();
    if (accumulates) frame_->note_accumulation(roots);
    const int64_t number = num_backwards_++;
    if (Selection* const selection = frame_->selection()) selection->note_backward();
    auto asked = asked_of(frame_->inputs(), roots, targets);
    if (!asked.is_nothing()) frame_->note_backward(number, std::move(asked));
  }
  void backward_ended(const torch::autograd::variable_list& gradients,
                      const torch::autograd::variable_list& given) override {
    if (!is_own_thread()) return;
    StorageSet known;  // a sum, say, gives back what it was given
    for (const at::Tensor& each : given) known.add(each);
    std::lock_guard<SpinLock> lock(mutex_);
    for (const at::Tensor& each : gradients)
      if (each.defined() && !each.is_cpu() && !known.contains(storage_of(each)))
        gradients_.push_back(weak_storage_of(each));
  }
  void hook_registered(const at::TensorBase& tensor, unsigned handle, bool) override {
    frame_->note_hook(tensor, handle);
  }
  void wait_for_engine(c10::function_ref<void(TensorVisitor)> visit_result);
  DrawLog* draw_log(const c10::GeneratorImpl& generator) const override {
    return frame_->draw_log(generator);
  }

 private:
  c10::intrusive_ptr<Frame> frame_;
  SpinLock mutex_;
  std::vector<WeakStorage> gradients_;  // that backwards inside returned, on devices
  std::atomic<int64_t> num_backwards_{0};
};

// Note [Late threads of the engine]
// The thread of a device lets go of the gradients that it has computed a little after the thread
// that waits for them goes on. Such a gradient, used in the region, would still be alive at its end,
// as what the function captures is. So a region waits for it; in vain for one that the function has
// put into an outside variable, but its recompute is refused anyway.
void ForwardScope::wait_for_engine(c10::function_ref<void(TensorVisitor)> visit_result) {
  if (gradients_.empty()) return;
  StorageSet results;
  visit_result([&](at::Tensor& tensor) { results.add(tensor); });
  constexpr std::chrono::milliseconds longest_wait(20);
  const auto start = std::chrono::steady_clock::now();
  for (const WeakStorage& each : gradients_) {
    const c10::StorageImpl* const storage = each._unsafe_get_target();
    if (each.expired() || results.contains(storage) || !frame_->has_slot_of(storage) ||
        (frame_->selection() != nullptr && frame_->selection()->holds(storage)))
      continue;
    while (!each.expired() && std::chrono::steady_clock::now() - start < longest_wait)
      std::this_thread::yield();
  }
}

FrameOptions options_in_force(const CheckpointOptions& options, const StackView& around) {
  FrameOptions in_force{.early_stop = options.early_stop,
                        .debug = options.debug,
                        .preserve_rng_state = options.preserve_rng_state,
                        .strict_unpack = options.strict_unpack,
                        .offload_inputs = options.offload_inputs,
                        .determinism_check = options.determinism_check,
                        .capture_check = options.capture_check};
  if (const Scope* guard = around.innermost(Ability::EarlyStop))
    in_force.early_stop_guard = guard->early_stop;
  if (const Scope* guard = around.innermost(Ability::Debug)) in_force.debug_guard = guard->debug;
  in_force.early_stop = in_force.early_stop_guard.value_or(options.early_stop);
  in_force.debug = in_force.debug_guard.value_or(options.debug);
  return in_force;
}

std::unique_ptr<FrameExtras> extras_of(const CheckpointOptions& options,
                                       const FrameOptions& in_force) {
  const bool has_extras = !options.name.empty() || options.fingerprint || options.context_fn ||
                          in_force.debug || options.determinism_check == DeterminismCheck::Values;
  if (!has_extras) return nullptr;
  auto extras = std::make_unique<FrameExtras>();
  extras->name = options.name;
  extras->fingerprint = options.fingerprint;
  return extras;
}

void refuse(const CheckpointOptions& options, const FrameOptions& in_force) {
  TORCH_CHECK_VALUE(!(in_force.debug && options.context_fn),
                    "remat::checkpoint: debug=True is incompatible with non-default context_fn. "
                    "Do: drop one of the two for this region.");
  // Included while the stack of transforms is not empty; functorch's own state outlives it.
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    throw_unsupported("a region was opened inside a functorch transform",
                      "functional transforms refuse saved-tensor hooks",
                      "call the function without remat::checkpoint inside the transform");
  if (!has_stack_room())
    throw_unsupported("regions are nested too deep for this thread's stack",
                      "each region runs inside the one around it",
                      "nest less deep, or use a thread with a larger stack");
}

}  // namespace

RegionBody::~RegionBody() = default;

void refuse_shared_argument() {
  throw_unsupported(
      "an argument was passed whose copies share their tensors",
      "its type offers visit_tensors, but copying it copies a handle; the region takes "
      "the tensors out of its own copy, which would take them out of yours",
      "let the copy constructor copy the tensors' handles, or pass the tensors "
      "themselves");
}

bool opens_frame() { return c10::GradMode::is_enabled() && innermost(Ability::Disable) == nullptr; }

ForwardRun::ForwardRun(const CheckpointOptions& options, std::unique_ptr<RegionBody> body) {
  const StackView stack;
  const FrameOptions in_force = options_in_force(options, stack);
  refuse(options, in_force);
  const Scope* const around = stack.innermost(Ability::Region);
  frame_ = c10::make_intrusive<Frame>(in_force, extras_of(options, in_force),
                                      around == nullptr ? 1 : around->frame()->depth() + 1);
  if (options.context_fn) frame_->extras()->contexts = options.context_fn();
  frame_->begin(std::move(body));
  profiled_ = profiler::forward_scope(*frame_);
  auto scope = std::make_shared<ForwardScope>(frame_, around);
  push(scope);
  scope_ = std::move(scope);
  if (options.policy) {
    frame_->selection_or_make(PolicyRule::of(options.policy));
    dispatch_mode_ = std::make_shared<seam::DispatchMode>();
  }
  frame_->set_sees_operators(seam::is_dispatch_mode_on());
  if (in_force.debug) logging_ = std::make_unique<OpLogScope>(&frame_->extras()->forward_log);
  if (frame_->extras() == nullptr || !frame_->extras()->contexts.forward) return;
  try {
    user_scope_ = frame_->extras()->contexts.forward();
  } catch (...) {
    close();
    throw;
  }
}

ForwardRun::~ForwardRun() {
  if (scope_ == nullptr) return;
  close();
  frame_->tell_recorders_of_throw();
}

void ForwardRun::close() {
  user_scope_.reset();
  logging_.reset();
  dispatch_mode_.reset();
  pop(*scope_);
  scope_.reset();
  profiled_.reset();
}

void ForwardRun::finish(c10::function_ref<void(TensorVisitor)> visit_result) {
  static_cast<ForwardScope&>(*scope_).wait_for_engine(visit_result);
  close();
  frame_->settle(visit_result);
}

}  // namespace remat::detail
