#pragma once
// One budget: what it may drop, what it drops first, and what it has done.
//
// Note [What is dropped first]
// Each value that the budget keeps has a score, and the least goes: the seconds that it takes to make it
// again (with those of what was dropped of its making), over its bytes times the square root of how
// long nobody will read it. That distance is known: backward reads in the reverse order of saving, so
// it is the work between the save or read in progress and the last save of it, or of an evicted value
// that is made of it. (Dynamic Tensor Rematerialization divides by the time since the last use, and
// counts what was made of the value too; measured, that recomputes 1.3 to 2.6 times more.)
// Costs of all are worked out only for the sixteen that look cheapest by what was known of them last.
//
// Note [Below the floor]
// What an operator reads and writes and what the program holds cannot be dropped: where that alone
// is over the budget, dropping all else after each operator would only be slow. So a bound that
// could not be held is raised to what was needed and a tenth, and the report counts it.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lib/budget/graph.h"
#include "remat/budget.h"

namespace remat::budget {

/// How much an operator's call of such shapes costs. The caller holds the graph's lock.
class CostTable {
 public:
  static CostTable& get();
  /// [seconds] The least of its first calls; later ones change it no more, so that steps repeat.
  float cost(uint64_t call, float measured_s);

 private:
  struct Entry;
  static constexpr uint32_t num_learned = 3;
};

/// Threads: those that hold the graph's lock, but for what says otherwise.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  /// `live_bytes`: alive now. Any thread, without the lock.
  Runtime(const BudgetOptions& options, int64_t live_bytes);
  ~Runtime();
  Runtime& operator=(Runtime&&) = delete;

  const BudgetOptions& options() const { return options_; }
  /// The report so far, which may outlive this. Guarded by the lock.
  const std::shared_ptr<BudgetReport>& report() const { return report_; }

  /// Keeps the content of a value that can be made again.
  void hold(Value& value, c10::Storage storage);
  /// Nobody keeps the value's content for a saved tensor or a rerun any more: lets go of it.
  void drop_if_unneeded(Value& value, Dead& dead);
  void unpool(Value& value);
  /// A source holds so many bytes more, or less.
  void source_held(int64_t bytes) { report_->source_bytes += bytes; }

  /// An allocation begins. Returns the bytes that it dropped.
  int64_t make_room(int64_t bytes, int64_t live_bytes, Dead& dead);
  int64_t bound() const { return bound_; }  ///< [bytes] that may be alive
  int64_t floor_bytes() const { return report_->floor_bytes; }

  /// An operator begins, on a thread of this budget. Settles what lives on, if that is due.
  void operator_begins(bool is_in_backward, bool grad_mode, Dead& dead);
  void note_saves(int64_t more) { num_saves_ += more; }

  /// Notes calls, for the report.
  void note_operator() { ++report_->operators; }
  void note_rerun(double seconds) {
    ++report_->reruns;
    report_->rerun_s += seconds;
  }

  double clock = 0;   ///< [seconds] of operators so far
  double cursor = 0;  ///< the clock at the save, or at the save of the read, in progress

 private:
  Value* choose();
  double score_now(const Value& value) const;
  void look_closely(Value& value);

  const BudgetOptions options_;
  const int64_t base_bytes_, min_bytes_;
  int64_t bound_;
  std::vector<Value*> pool_;
  int64_t pool_bytes_ = 0;
  const std::shared_ptr<BudgetReport> report_ = std::make_shared<BudgetReport>();
  uint64_t walk_ = 0;
  uint64_t settled_at_ = 0;  // records until then
  int64_t num_saves_ = 0;    // of its values, that backward has not let go of
  bool has_run_backward_ = false, has_run_without_grad_ = false;
};

/// Visits the budgets of the process. The caller holds the graph's lock.
void visit_runtimes(c10::function_ref<void(Runtime&)> visitor);

/// Sees that the CPU's allocator announces what it allocates.
void watch_allocations();

/// Throws the error in the form of a binding's language, if there is one and it throws.
void raise_in_binding(const c10::Error& error);

}  // namespace remat::budget
