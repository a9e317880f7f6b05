#pragma once
// TorchScript: finds the plan that a call runs, and runs the same plan again.
//
// Note [Plans of script functions]
// The executor of a script function changes its plan: it profiles the first calls, then settles on
// an optimized plan, which joins operators into graphs with derivatives of their own. Each plan
// saves other tensors, in another order, often of equal shapes, so a recompute under another plan
// than forward's can be silently wrong. The settled plan stays for good. For calls that do not fit
// the profile it falls back on functions with executors of their own, which settle in turn. With
// the thread's optimizer off an executor runs its settled plan or, without one, the operators one
// by one, and settles nothing. So there are two cases:
//   a script function as a region's function  runs the plan that it would run anyway, which is held
//                                             and run again;
//   a call inside a region's function         runs with the optimizer off, and its plan is noted.
// In both, the settled plans of nested functions are compared. No setting of the process is
// touched.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

namespace torch::jit {
struct Function;
struct Module;
}  // namespace torch::jit

namespace remat::seam {

/// The graphs that a call of a script function ran: its own, and the settled ones of nested
/// functions, null for a function that had not settled.
struct ScriptPlan {
  std::vector<std::shared_ptr<const void>> graphs;  // alive, so that addresses are unique
  bool is_known = true;                             ///< all functions that it may call were found
  bool operator==(const ScriptPlan&) const = default;
};

/// Holds the plan of one call. Threads: any, once `run` has begun.
class PinnedScript {
 public:
  /// Takes the plan that a call of the function with these arguments would run now. `module` owns
  /// the function; null if none does.
  PinnedScript(torch::jit::Function& function, const torch::jit::Module* module,
               std::vector<c10::IValue>& stack);
  ~PinnedScript();
  /// Runs the plan in forward: replaces the arguments by the result.
  void run(std::vector<c10::IValue>& stack) const;
  /// Runs the plan again, without teaching the executor's profile.
  void run_again(std::vector<c10::IValue>& stack) const;
  /// Returns whether a nested function has settled on another plan since.
  bool is_changed() const;

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

/// Checks the arguments of a call against the function's signature, and adds its defaults.
void normalize_arguments(torch::jit::Function& function, std::vector<c10::IValue>& stack);

/// Returns whether an interpreter runs on this thread, other than for a PinnedScript.
bool is_in_script();
/// Returns the plan of the script function that returned last on this thread.
ScriptPlan last_script_plan();
/// Clears the graphs of `last_script_plan` until a script function returns.
void forget_last_script_plan();

/// Keeps executors on this thread from settling while alive.
class ScriptsUnoptimized {
 public:
  ScriptsUnoptimized();
  ~ScriptsUnoptimized();
  ScriptsUnoptimized& operator=(ScriptsUnoptimized&&) = delete;

 private:
  const bool before_;
};

/// Called for each call of a script module's method, on its thread. `began` returns the argument of
/// `ended`.
struct ScriptCallObserver {
  void* (*began)();
  void (*ended)(void* begun);
};
/// Sets the observer of the process. LibTorch calls it at such calls only.
void observe_script_calls(const ScriptCallObserver& observer);

/// Returns whether a method of a script module, or of one below it, calls a batch norm operator.
bool calls_batch_norm(const torch::jit::Module& module);

/// Returns the buffers of a script module and of all modules below it.
std::vector<at::Tensor> buffers_of(const torch::jit::Module& module);
std::vector<bool> training_flags_of(const torch::jit::Module& module);
void set_training_flags(const torch::jit::Module& module, const std::vector<bool>& flags);

}  // namespace remat::seam
