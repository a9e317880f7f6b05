#pragma once
// Receives the tensors of one recompute: compares them, fills the slots, and stops the recompute.

#include <cstdint>
#include <exception>
#include <vector>

#include "hooks/pack/slot.h"
#include "lib/base/waiting.h"
#include "lib/frame/recomputed_values.h"
#include "lib/frame/slot_comparer.h"
#include "lib/frame/slots.h"
#include "lib/frame/stop_rule.h"

namespace remat {

/// Receives the values of one recompute, one for each tensor that autograd saves. Threads: the
/// recompute's own, and the engine's threads that run a backward in it, several at once if that
/// backward uses several devices.
class Filler final : public SlotFiller {
 public:
  /// Wants every slot that is alive, or `only_position` alone if it is not negative. `inputs`: the
  /// arguments of this recompute.
  Filler(const Region& region, const Slots& slots, RecordedFrame* recorded,
         RecomputedValues& values, int64_t only_position, const std::vector<at::Tensor>& inputs);
  ~Filler() override;

  bool fill(const at::Tensor& saved, Kept& kept) override;
  [[noreturn]] void refuse_changed(const Kept& kept) const override;
  /// Ends a complete recompute if forward is waiting for a tensor that its function reads from its
  /// own graph.
  void stop_before_read() override { stops_.after_backward(); }
  [[noreturn]] void stop() override { stops_.stop(); }
  bool stop_at_region() override { return region_.body->stop_at_region(); }
  bool has_stopped() const { return stops_.has_stopped(); }
  bool is_on_own_ground() const { return stops_.is_on_own_ground(); }

  const Progress& progress() const { return progress_; }
  StopRule& stops() { return stops_; }
  SlotComparer& comparer() { return comparer_; }
  Differences take_differences() { return comparer_.take_differences(values_); }
  void end_operator() { comparer_.end_operator(); }
  /// Ignores tensors saved after the last slot.
  void ignore_rest() { progress_.counts_rest = false; }
  /// Reports that the operator at work is not run again, since its result was kept.
  void result_was_kept() {
    if (ChangedOperands* const operands = comparer_.operands()) operands->forgive_operator();
  }
  /// Called when the function has ended, by a return or a stop. Compares the contents that waited
  /// for this, and records the streams' work on which the tensors depend.
  void finish() {
    end_operator();
    ready_.record();
  }
  /// Notes the current exception, which counts even if user code catches it.
  void note_refusal() {
    if (refusal_ == nullptr) refusal_ = std::current_exception();
  }
  void rethrow_refusal() const {
    if (refusal_ != nullptr) std::rethrow_exception(refusal_);
  }
  /// Warns, once for each region name, if a part of the recompute's graph is still alive. Call it
  /// after the function has unwound and its arguments, which hold histories of writes to them, are
  /// gone.
  void warn_of_survivors(bool has_run_backward) const;

 private:
  void take(const SavedNow& now, const at::Tensor& kept);

  Turns saving_;
  const Region& region_;
  const Slots& slots_;
  RecordedFrame* const recorded_;
  RecomputedValues& values_;
  Progress progress_;
  StopRule stops_;
  SlotComparer comparer_;
  ReadyStreams ready_;
  int64_t num_new_ = 0, bytes_ = 0;  // for the counters, which are updated once
  std::exception_ptr refusal_;
};

}  // namespace remat
