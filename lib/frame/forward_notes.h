#pragma once
// Notes of rare actions in forward that recomputes must know: backwards, accumulations, hooks.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "lib/base/spin_lock.h"
#include "lib/frame/gradient_sinks.h"
#include "lib/frame/inner_backward.h"
#include "lib/seam/script.h"
#include "lib/tensor/capture.h"

namespace remat {

/// A frame's notes for its recomputes. Threads: any.
class ForwardNotes {
 public:
  /// Notes a backward of the function that asked `asked` of the inputs.
  void note_backward(int64_t number, AskedOfInputs asked) {
    const std::lock_guard<SpinLock> lock(mutex_);
    noted().backwards.emplace_back(number, std::move(asked));
  }
  AskedOfInputs asked_by_backward(int64_t number) {
    const std::lock_guard<SpinLock> lock(mutex_);
    if (noted_ != nullptr)
      for (const auto& [each, asked] : noted_->backwards)
        if (each == number) return asked;
    return {};
  }
  bool asked_for_inputs() {
    const std::lock_guard<SpinLock> lock(mutex_);
    return noted_ != nullptr && !noted_->backwards.empty();
  }
  /// Returns whether the function has run any backward.
  bool has_run_backward() const { return has_run_backward_.load(std::memory_order_relaxed); }
  void note_any_backward() { has_run_backward_.store(true, std::memory_order_relaxed); }

  /// Notes whether a dispatch mode of ours saw operators in the first run. LibTorch's formulas ask
  /// for this (isTensorSubclassLike) and then save other tensors, so it must be the same in
  /// recomputes.
  void note_operators(bool are_seen) { sees_operators_ = are_seen; }
  bool sees_operators() const { return sees_operators_; }

  /// Notes that the function accumulates into leaves: Note [Accumulating once].
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

  /// Notes that the function registers a hook: Note [Tensors from outside].
  void note_hook(const at::TensorBase& tensor, unsigned handle) {
    const std::lock_guard<SpinLock> lock(mutex_);
    noted().hooks.push_back(
        {WeakTensor(tensor.getIntrusivePtr()), handle, /*follows_backward=*/has_run_backward()});
  }
  struct Hook {
    WeakTensor tensor;
    unsigned handle;
    bool follows_backward;  ///< the function had run a backward before
  };
  /// Returns the `number`-th hook on that tensor, if there is one.
  std::optional<Hook> hook(const at::TensorBase& tensor, std::size_t number) {
    const std::lock_guard<SpinLock> lock(mutex_);
    if (noted_ != nullptr)
      for (const Hook& each : noted_->hooks)
        if (each.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl() && number-- == 0)
          return each;
    return std::nullopt;
  }
  /// Notes the plans of the script functions that the function called. Call it when the function
  /// has returned.
  void note_scripts(std::vector<seam::ScriptPlan> plans) {
    const std::lock_guard<SpinLock> lock(mutex_);
    noted().scripts = std::move(plans);
    has_scripts_.store(true, std::memory_order_release);
  }
  /// Notes that tensors saved after the last slot are saved without slots: Note [The first script].
  void note_plain_rest() { has_plain_rest_.store(true, std::memory_order_relaxed); }
  bool has_plain_rest() const { return has_plain_rest_.load(std::memory_order_relaxed); }
  bool has_scripts() const { return has_scripts_.load(std::memory_order_acquire); }
  /// Returns the plans, which do not change. Call it only if has_scripts().
  const std::vector<seam::ScriptPlan>& scripts() const { return noted_->scripts; }

  bool has_hook_after_backward() {
    const std::lock_guard<SpinLock> lock(mutex_);
    return noted_ != nullptr && std::any_of(noted_->hooks.begin(), noted_->hooks.end(),
                                            [](const Hook& each) { return each.follows_backward; });
  }

 private:
  struct Noted {
    /// Backwards that asked something of the inputs, by number.
    std::vector<std::pair<int64_t, AskedOfInputs>> backwards{};
    std::vector<Hook> hooks{};
    AccumulatedLeaves accumulated{};
    std::vector<seam::ScriptPlan> scripts{};
  };
  Noted& noted() {
    if (noted_ == nullptr) noted_ = std::make_unique<Noted>();
    return *noted_;
  }
  SpinLock mutex_;
  bool sees_operators_ = false;
  std::atomic<bool> has_run_backward_{false}, has_scripts_{false}, has_plain_rest_{false};
  std::unique_ptr<Noted> noted_;
};

}  // namespace remat
