#pragma once
// A byte budget for any program: what autograd saved is dropped and computed again by operator, without regions.

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "remat/export.h"

namespace remat {

/// What happens to an allocation for which no room can be made.
enum class OverBudget {
  Continue,  ///< it is made, and counted as over the budget
  Throw      ///< it throws BudgetExceeded
};

/// Options of a `BudgetGuard`.
struct BudgetOptions {
  /// [bytes] that may be alive beyond what is alive when the guard is made. `INT64_MAX`: no limit,
  /// only a report.
  int64_t bytes = 0;
  /// The device whose memory is bounded. The CPU alone, so far.
  c10::Device device = c10::Device(c10::kCPU);
  OverBudget over = OverBudget::Continue;
  /// [bytes] Smaller values are never evicted. -1: a thousandth of `bytes`, at most 64 KiB.
  int64_t min_bytes = -1;
  /// Hashes contents when they are evicted and compares them when they come back; for debugging.
  bool check_values = false;
};

/// What a budget has done since its guard was made, or since `BudgetGuard::reset`.
struct REMAT_API BudgetReport {
  int64_t budget_bytes = 0;  ///< [bytes] as asked for
  int64_t peak_bytes = 0;    ///< [bytes] the most that was alive beyond what the guard found
  /// [bytes] the most that was alive at one moment and could not have been evicted, beyond what the
  /// guard found: no budget below this can hold
  int64_t floor_bytes = 0;
  int64_t source_bytes = 0;  ///< [bytes] alive now because recorded calls may need them again
  int64_t over_bytes = 0;    ///< [bytes] by how much the budget was exceeded at the most
  int64_t over_count = 0;    ///< how many allocations exceeded it
  int64_t evictions = 0;     ///< values dropped
  int64_t reruns = 0;        ///< operator calls that ran again
  int64_t moves = 0;         ///< values moved away instead: none, so far
  int64_t operators = 0;     ///< operator calls recorded
  double rerun_s = 0;        ///< [seconds] spent in calls that ran again
  double search_s = 0;       ///< [seconds] spent in choosing what to drop
  /// Writes the report as lines of text.
  std::string to_string() const;
};

/// Thrown out of an allocation that does not fit, under `OverBudget::Throw`. Nothing is left behind:
/// the same backward may be tried again under a larger budget.
class REMAT_API BudgetExceeded : public c10::OutOfMemoryError {
 public:
  BudgetExceeded(c10::SourceLocation where, std::string text, int64_t needed_bytes,
                 int64_t floor_bytes);
  int64_t needed_bytes() const {
    return needed_bytes_;
  }  ///< [bytes] the budget that would have done
  int64_t floor_bytes() const { return floor_bytes_; }  ///< [bytes] as the report says

 private:
  int64_t needed_bytes_, floor_bytes_;
};

namespace budget {
class Runtime;
struct Bound;
}  // namespace budget

/// For a binding of another language (binding.h): throws an error of a budget in the language's form:
/// BudgetExceeded out of an allocation, or an error about a rerun. May return: then the error itself is
/// thrown. On the thread that meets the error; only what derives from std::exception passes.
using BudgetRaise = void (*)(const c10::Error& error);
/// Sets it for the process, null for none. Call it when no budget is alive.
REMAT_API void set_budget_raise(BudgetRaise raise);

/// The report of one guard; also after it. Keeps no graph and no budget alive. Copies report the same.
/// Threads: any.
class REMAT_API BudgetCounters {
 public:
  BudgetReport now() const;  ///< what the guard, and backwards after it, have done so far
  void reset();              ///< as `BudgetGuard::reset`

 private:
  friend class BudgetGuard;
  explicit BudgetCounters(std::shared_ptr<budget::Bound> bound) : bound_(std::move(bound)) {}
  std::shared_ptr<budget::Bound> bound_;
};

/// While alive, what autograd saves on this thread stays within a byte budget: when an allocation
/// would exceed it, saved tensors are dropped, and computed again by the operators that made them
/// when backward asks for them. Functions never run twice, operators do. Outputs, gradients, buffers
/// and random numbers are those of the plain program, bit by bit.
///
///     remat::BudgetGuard budget({.bytes = 2'000'000'000});
///     for (const auto& batch : loader) train_step(model, batch);   // unchanged
///     std::cout << budget.report().to_string();
///
/// What counts: everything alive on the device, of all threads, gradients and kernels' scratch
/// memory included, beyond what is alive when the guard is made. What can be dropped: results of
/// LibTorch's own operators that autograd saved and that nobody else holds. One guard around a
/// training loop is best: costs of operators are learned in its first steps. A graph that is made in the
/// scope may run backward after it, within the same budget.
/// Nests: the smallest budget holds, other options are the innermost's. Regions inside are recomputed as regions.
/// Threads: a scope of this thread, carried to the threads of a backward called here. Two threads
/// with guards share the count of bytes; each drops what it saved. Only threads in the scope throw.
/// Throws: `c10::ValueError` for options that mean nothing; CheckpointError (Unsupported) for a
/// device other than the CPU.
/// Source: Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021); the choice of what to drop
/// is our own, by what backward will read last.
class REMAT_API BudgetGuard {
 public:
  explicit BudgetGuard(BudgetOptions options);
  ~BudgetGuard();
  BudgetGuard(const BudgetGuard&) = delete;
  BudgetGuard(BudgetGuard&&) = delete;
  BudgetGuard& operator=(const BudgetGuard&) = delete;
  BudgetGuard& operator=(BudgetGuard&&) = delete;

  /// What it has done so far. Any thread.
  BudgetReport report() const;
  /// Starts peak and counts anew; the bound stays. Any thread.
  void reset();
  /// The report, for after the guard. Any thread.
  BudgetCounters counters() const;

 private:
  struct Scope;
  std::shared_ptr<budget::Bound> bound_;
  std::shared_ptr<budget::Runtime> runtime_;
  std::unique_ptr<Scope> scope_;
  bool is_inside_ = false;  // of another guard
};

}  // namespace remat
