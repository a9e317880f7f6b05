#pragma once
// One forward of a region under save_best: which calls the choice keeps, and what is measured of them.
//
// Note [Results that are written to]
// An operator that writes in place to what a call made is applied to the kept result, and skipped with
// it, where LibTorch itself writes and nothing has read the result before, as the
// text of Note [Writing to a kept result] has it. Then both count as one call. What is written to otherwise would be
// computed again all the same, so such a call is not for choice.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/flat_hash_map.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/frame/frame.h"
#include "lib/selective/best_chooser.h"
#include "lib/selective/call_record.h"

namespace remat {

class BestRun {
 public:
  /// A region's forward begins, on this thread. Null if nothing chooses for it.
  static std::unique_ptr<BestRun> begin(const Frame& frame,
                                        const std::shared_ptr<BestChooser>& chooser);
  BestRun(std::shared_ptr<BestChooser> chooser, const Frame& frame);

  bool is_measured() const { return is_measured_; }
  // Not for several threads at once:
  /// A call begins; returns its number. `is_kept_anyway`: by another policy.
  std::size_t begin_call(const c10::OperatorHandle& op, const OpTraits& traits,
                         c10::ArrayRef<c10::IValue> arguments, bool is_kept_anyway);
  /// Whether the choice keeps the results of the call that has begun.
  bool keeps_call() const { return keeps_last_; }
  /// What that call has taken when it was measured [seconds]; 0: it was not.
  double known_seconds() const {
    return current_ == nullptr ? 0 : current_->measured.calls[num_calls_ - 1].seconds;
  }
  /// Whether all that was kept by choice has to be let go: it was for another way, in which it would
  /// have taken fewer bytes. Once.
  bool must_let_go();
  /// It has returned. `can_be_kept`: its results could have been.
  void end_call(std::size_t call, c10::ArrayRef<c10::IValue> results, const StoragesOf& given,
                bool can_be_kept, const class CallClock& clock);
  /// It threw.
  void call_threw() { is_whole_ = false; }
  /// Somebody reads tensors whom no choice spares it.
  void hold(const c10::StorageImpl* storage);
  void hold(c10::ArrayRef<c10::IValue> values);
  /// Autograd saves a tensor in that slot.
  void add_slot(const c10::StorageImpl* storage, int64_t position);
  /// The region has returned, and its slots are settled.
  void end();

 private:
  friend class CallClock;
  struct Made {
    WeakStorage storage;  // so that no address comes twice
    uint32_t value;
    c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  };
  Made* made(const c10::StorageImpl* storage);
  void match(const OpTraits& op, uint64_t arguments);
  void note_writes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                   std::size_t call);
  std::size_t calls_before_stop() const;

  const std::shared_ptr<BestChooser> chooser_;
  const Frame& frame_;
  bool is_measured_ = false;
  /// That agree so far, the oldest first; whether they hold for this run.
  std::vector<std::pair<std::shared_ptr<const ChosenWay>, bool>> ways_;
  std::size_t num_ways_ = 0;  ///< that it began with
  const ChosenWay* current_ = nullptr;
  bool has_switched_ = false, keeps_last_ = false, is_whole_ = true;
  std::size_t num_calls_ = 0;
  int64_t spent_ = 0;  ///< [bytes] of all results kept by choice, as if all were read
  // Of a run that is measured:
  std::unique_ptr<MeasuredCalls> measured_;
  struct {
    std::vector<uint32_t> maker;                        ///< a call
    std::vector<char> is_read;                          ///< so far
  } values_;                                            // by value
  std::vector<std::pair<uint32_t, uint32_t>> applied_;  ///< calls that write, and those that made
  std::vector<uint32_t> not_for_choice_;                ///< calls
  std::vector<uint32_t> slot_calls_;                    ///< by slot: calls begun before it
  ska::flat_hash_map<const c10::StorageImpl*, std::size_t> index_;
  std::vector<Made> made_;
};

/// Around one call, on any thread. `seconds_of` of the options is asked when it is made.
class CallClock {
 public:
  /// `run`: null, or not measured: nothing is done.
  CallClock(const BestRun* run, const c10::OperatorHandle& op, const OpTraits& traits,
            c10::ArrayRef<c10::IValue> arguments);
  void stop(c10::ArrayRef<c10::IValue> results);
  double seconds() const { return seconds_; }
  /// Whether it could be measured.
  bool is_true() const { return is_true_; }

 private:
  bool is_on_ = false, is_true_ = true;
  double seconds_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace remat
