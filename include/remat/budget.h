#pragma once
// A byte budget for any program: saved tensors are dropped, and operators make them again.

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "remat/export.h"
#include "remat/move.h"

namespace remat {

/// The treatment of an allocation for which the budget cannot make room.
enum class OverBudget {
  Continue,  ///< the allocation succeeds, and the report counts it as over the budget
  Throw      ///< the allocation throws BudgetExceeded
};

/// Options of a `BudgetGuard`.
struct BudgetOptions {
  /// [bytes] The memory that may be alive in addition to the memory alive at the guard's
  /// construction. `INT64_MAX`: no limit, only a report.
  int64_t bytes = 0;
  /// The device whose memory is bounded: the CPU or the accelerator; without an index, its current
  /// device. Each device needs a guard of its own.
  c10::Device device = c10::Device(c10::kCPU);
  OverBudget over = OverBudget::Continue;  ///< where an allocation does not fit
  /// [bytes] Smaller tensors are never dropped. -1: a thousandth of `bytes`, at most 64 KiB.
  int64_t min_bytes = -1;
  /// For debugging: hashes contents when they are dropped, and compares them when they are made
  /// again.
  bool check_values = false;
  /// If set, values may move away instead of being dropped, where the copy takes less time. Values
  /// that cannot be made again move, too. Without an accelerator and without a directory the guard
  /// throws `c10::ValueError`.
  std::optional<MoveOptions> moving{};
};

/// The activity of a budget since its guard was constructed, or since `BudgetGuard::reset`.
struct REMAT_API BudgetReport {
  int64_t budget_bytes = 0;  ///< [bytes] `BudgetOptions::bytes`
  int64_t peak_bytes = 0;    ///< [bytes] largest memory in addition to the guard's start
  /// [bytes] Largest memory seen that could not be dropped, in addition to the guard's start. A
  /// smaller budget cannot hold. Exact if the budget was exceeded, otherwise a lower bound.
  int64_t floor_bytes = 0;
  int64_t source_bytes = 0;  ///< [bytes] inputs alive now only for operators that may run again
  int64_t over_bytes = 0;    ///< [bytes] largest excess over the budget
  int64_t over_count = 0;    ///< allocations that found no room
  int64_t evictions = 0;     ///< contents dropped
  int64_t reruns = 0;        ///< operator calls that ran again
  int64_t moves = 0;         ///< contents moved away instead of dropped
  int64_t operators = 0;     ///< operator calls recorded
  double rerun_s = 0;        ///< [seconds] in operator calls that ran again
  double search_s = 0;       ///< [seconds] in the choice of contents to drop
  /// Returns the report as lines of text.
  std::string to_string() const;
};

/// The error of an allocation that does not fit, under `OverBudget::Throw`. The graph stays valid:
/// the same backward can run again under a larger budget.
class REMAT_API BudgetExceeded : public c10::OutOfMemoryError {
 public:
  /// Constructed by the library, from the place in the source, the text, and the bytes of the two
  /// functions below.
  BudgetExceeded(c10::SourceLocation where, std::string text, int64_t needed_bytes,
                 int64_t floor_bytes);
  /// Returns a budget [bytes] that would have had room for this allocation. Later ones may need
  /// more.
  int64_t needed_bytes() const { return needed_bytes_; }
  /// Returns `BudgetReport::floor_bytes` [bytes] at that moment.
  int64_t floor_bytes() const { return floor_bytes_; }

 private:
  int64_t needed_bytes_, floor_bytes_;
};

/// Makes room in the budgets of the device inside an allocation, as on the CPU. An accelerator's
/// allocator can call it before each allocation, on the thread that allocates and outside of its
/// locks. May free memory of the device. Throws: BudgetExceeded.
REMAT_API void announce_allocation(c10::Device device, int64_t bytes);

namespace budget {
class Runtime;
struct Bound;
}  // namespace budget

/// A binding's function (binding.h) that throws a budget's error in the form of its language. It
/// runs on the thread of the error, and may throw only exceptions derived from std::exception. If
/// the function returns, the error itself is thrown.
using BudgetRaise = void (*)(const c10::Error& error);
/// Sets that function for the process; null removes it. No budget may be alive.
REMAT_API void set_budget_raise(BudgetRaise raise);

/// The report of one guard, which outlives the guard and keeps no memory of the graph alive. Copies
/// share the report. Threads: any.
class REMAT_API BudgetCounters {
 public:
  /// Returns the report, which includes backwards after the guard.
  BudgetReport now() const;
  /// Does the same as `BudgetGuard::reset`.
  void reset();

 private:
  friend class BudgetGuard;
  explicit BudgetCounters(std::shared_ptr<budget::Bound> bound) : bound_(std::move(bound)) {}
  std::shared_ptr<budget::Bound> bound_;
};

/// A scope in which tensors saved by autograd stay within a byte budget.
///
///     remat::BudgetGuard budget({.bytes = 2'000'000'000});
///     for (const auto& batch : loader) train_step(model, batch);   // unchanged
///     std::cout << budget.report().to_string();
///
/// When an allocation would exceed the budget, the guard drops saved tensors. When backward reads
/// one of them, the operators that made it run again; functions never run again. Outputs,
/// gradients, buffers and random numbers equal those of the plain program bit by bit.
/// All memory on the device counts, whichever thread allocates it: gradients, optimizer state,
/// kernels' scratch memory. The guard can drop results of LibTorch's own operators that autograd
/// saved and the program does not hold.
/// Recommended: one guard around a training loop, since the guard measures operators in its first
/// steps. A graph made in the scope may run backward after it, within the same budget.
/// Nested guards: the smallest budget applies, and the other options of the innermost guard;
/// `moving` applies to the guard's own device.
/// Regions inside are recomputed as regions.
/// Threads: the scope belongs to this thread and to the threads of a backward called here. Guards
/// on two threads share the count of bytes, and each drops its own tensors.
/// Throws: `c10::ValueError` for invalid options; CheckpointError (Unsupported) for a device that
/// is neither the CPU nor the accelerator, and inside a region; BudgetExceeded from allocations of
/// the scope's threads.
/// Source: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021), with another choice of
/// the tensors to drop: docs/budget.md.
class REMAT_API BudgetGuard {
 public:
  /// Opens the scope on this thread; the destructor closes it.
  explicit BudgetGuard(BudgetOptions options);
  ~BudgetGuard();
  BudgetGuard(const BudgetGuard&) = delete;
  BudgetGuard(BudgetGuard&&) = delete;
  BudgetGuard& operator=(const BudgetGuard&) = delete;
  BudgetGuard& operator=(BudgetGuard&&) = delete;

  /// Returns the activity so far. Any thread.
  BudgetReport report() const;
  /// Sets peak and counts to zero; the budget stays. Any thread.
  void reset();
  /// Returns the report in a form that outlives the guard. Any thread.
  BudgetCounters counters() const;

 private:
  struct Scope;
  std::shared_ptr<budget::Bound> bound_;
  std::shared_ptr<budget::Runtime> runtime_;
  std::unique_ptr<Scope> scope_;
  bool is_inside_ = false;  // another guard of the thread
};

}  // namespace remat
