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

#include <atomic>
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

/// What one guard asks for, and what has been done under it. Guarded by the graph's lock.
struct Bound {
  Bound(const BudgetOptions& options, int64_t live_bytes);
  const BudgetOptions options;
  const int64_t base_bytes;  ///< alive when the guard was made
  int64_t most_bytes;        ///< that may be alive
  BudgetReport report;
};

/// What the guards of a nest have in common: the values of a thread. Threads: those that hold the graph's
/// lock, but for what says otherwise.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  /// The first guard of a nest, whose bound stays as long as there are values. Any thread, without the
  /// lock, as is what follows.
  explicit Runtime(std::shared_ptr<Bound> bound);
  ~Runtime();
  Runtime& operator=(Runtime&&) = delete;
  /// A guard inside.
  void add(std::shared_ptr<Bound> bound);
  void remove(const Bound& bound);

  /// Keeps the content of a value that can be made again.
  void hold(Value& value, c10::Storage storage);
  /// Nobody keeps the value's content for a saved tensor or a rerun any more: lets go of it.
  void drop_if_unneeded(Value& value, Dead& dead);
  void unpool(Value& value);
  /// A source holds so many bytes more, or less.
  void source_held(int64_t bytes);

  /// A tensor is saved that has a value of this runtime, or is no longer.
  void note_save() { num_saved_.fetch_add(1, std::memory_order_relaxed); }
  void note_end_of_save(Dead& dead) {
    if (num_saved_.fetch_sub(1, std::memory_order_relaxed) == 1) Graph::get().cut(*this, dead);
  }
  /// Any thread, without the lock.
  bool has_saved() const { return num_saved_.load(std::memory_order_relaxed) > 0; }

  /// An allocation begins. Returns the bytes that it dropped.
  int64_t make_room(int64_t bytes, int64_t live_bytes, Dead& dead);
  /// The bound that the allocation exceeds and that refuses it; or null.
  const Bound* refusing(int64_t alive) const;

  void note_operator();
  void note_rerun(double seconds);

  double clock = 0;   ///< [seconds] of operators so far
  double cursor = 0;  ///< the clock at the save, or at the save of the read, in progress

 private:
  Value* choose();
  double score_now(const Value& value) const;
  void look_closely(Value& value);
  const BudgetOptions& options() const { return bounds_.back()->options; }
  int64_t most_bytes() const;

  std::vector<std::shared_ptr<Bound>> bounds_;  // outermost first
  int64_t min_bytes_ = 0;
  std::vector<Value*> pool_;
  int64_t pool_bytes_ = 0;
  std::atomic<int64_t> num_saved_{0};
};

/// Visits the budgets of the process. The caller holds the graph's lock.
void visit_runtimes(c10::function_ref<void(Runtime&)> visitor);

/// Throws the error in the form of a binding's language, if there is one and it throws.
void raise_in_binding(const c10::Error& error);

}  // namespace remat::budget
