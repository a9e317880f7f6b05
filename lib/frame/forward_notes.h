#pragma once
// What few functions do in forward that their recomputes must know: backwards, accumulations, hooks.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "lib/base/spin_lock.h"
#include "lib/frame/gradient_sinks.h"
#include "lib/frame/inner_backward.h"
#include "lib/frame/outside_tensors.h"

namespace remat {

/// A frame holds these notes, for its recomputes. Threads: any.
class ForwardNotes {
 public:
  /// The function runs a backward; `asked` of the inputs, if it is anything.
  void note_backward(int64_t number, InnerBackwards::Asked asked) {
    const std::lock_guard<SpinLock> lock(mutex_);
    if (!noted().backwards) noted().backwards.emplace();
    noted().backwards->note(number, std::move(asked));
  }
  InnerBackwards::Asked asked_by_backward(int64_t number) {
    const std::lock_guard<SpinLock> lock(mutex_);
    return noted_ == nullptr || !noted_->backwards ? InnerBackwards::Asked{}
                                                   : noted_->backwards->asked(number);
  }
  bool asked_for_inputs() {
    const std::lock_guard<SpinLock> lock(mutex_);
    return noted_ != nullptr && noted_->backwards.has_value();
  }
  /// Whether the function has run any backward.
  bool has_run_backward() const { return has_run_backward_.load(std::memory_order_relaxed); }
  void note_any_backward() { has_run_backward_.store(true, std::memory_order_relaxed); }

  /// The function accumulates into leaves: Note [Accumulating once].
  void note_accumulation(const torch::autograd::edge_list& roots) {
    AccumulatedLeaves all = accumulated_leaves();
    all.add_below(roots);
    const std::lock_guard<SpinLock> lock(mutex_);
    noted().accumulated = std::move(all);
  }
  AccumulatedLeaves accumulated_leaves() {
    const std::lock_guard<SpinLock> lock(mutex_);
    return noted_ == nullptr ? AccumulatedLeaves() : noted_->accumulated;
  }

  /// The function registers a hook: Note [Tensors from outside].
  void note_hook(const at::TensorBase& tensor, unsigned handle) {
    const std::lock_guard<SpinLock> lock(mutex_);
    noted().hooks.add(tensor, handle, has_run_backward());
  }
  /// Returns the `number`-th hook on that tensor, if there is one.
  std::optional<HookNotes::Note> hook(const at::TensorBase& tensor, std::size_t number) {
    const std::lock_guard<SpinLock> lock(mutex_);
    const HookNotes::Note* const note =
        noted_ == nullptr ? nullptr : noted_->hooks.find(tensor, number);
    return note == nullptr ? std::nullopt : std::optional(*note);
  }
  bool has_hook_after_backward() {
    const std::lock_guard<SpinLock> lock(mutex_);
    return noted_ != nullptr && noted_->hooks.any_follows_backward();
  }

 private:
  struct Noted {
    std::optional<InnerBackwards> backwards{};  ///< those that asked for something
    HookNotes hooks{};
    AccumulatedLeaves accumulated{};
  };
  Noted& noted() {
    if (noted_ == nullptr) noted_ = std::make_unique<Noted>();
    return *noted_;
  }
  SpinLock mutex_;
  std::atomic<bool> has_run_backward_{false};
  std::unique_ptr<Noted> noted_;
};

}  // namespace remat
