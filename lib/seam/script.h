#pragma once
// TorchScript: which plan a call runs, and the same plan again.
//
// Note [Plans of script functions]
// The executor of a script function changes what it runs: it profiles the first calls, then settles
// on an optimised plan, which joins operators into graphs with derivatives of their own. Each plan
// saves other tensors, in another order, often of equal shapes, so that a recompute under another
// plan than forward's can be silently wrong. The settled plan stays for good; what it falls back
// on, where a call does not fit what was profiled, are functions with executors of their own, which
// settle in turn. With the thread's optimiser off an executor runs its settled plan, or, if it has
// none, the operators one by one, and settles nothing. So
//   a script function that is a region's   runs the plan that it would run anyhow, which is kept and run again;
//   called inside a region's function      it runs with the optimiser off, and which plan it was is noted;
// and in both the plans that nested functions had settled on are compared. No setting of the
// process is touched.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

namespace torch::jit {
struct Function;
struct Module;
}  // namespace torch::jit

namespace remat::seam {

/// Tells what a call of a script function ran: its graph, and those that nested functions had
/// settled on, null for one that had not.
struct ScriptPlan {
  std::vector<std::shared_ptr<const void>> graphs;  // alive, so that no other one has the address
  bool is_known = true;                             ///< all functions that it may call were found
  bool operator==(const ScriptPlan&) const = default;
};

/// The plan of one call, kept. Threads: any, once `run` has begun.
class PinnedScript {
 public:
  /// What a call of the function with these arguments would run now. `module` owns the function;
  /// null if none does.
  PinnedScript(torch::jit::Function& function, const torch::jit::Module* module,
               std::vector<c10::IValue>& stack);
  ~PinnedScript();
  /// Forward: replaces the arguments by the result.
  void run(std::vector<c10::IValue>& stack) const;
  /// The same again, without what the executor would learn from it.
  void run_again(std::vector<c10::IValue>& stack) const;
  /// Whether a nested function has settled on another plan since.
  bool is_changed() const;

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

/// Checks the arguments of a call against the function's signature, and adds its defaults.
void normalize_arguments(torch::jit::Function& function, std::vector<c10::IValue>& stack);

/// Whether an interpreter runs on this thread, other than for a PinnedScript.
bool is_in_script();
/// The plan of the script function that returned last on this thread.
ScriptPlan last_script_plan();
/// From now until a script function returns, `last_script_plan` has no graphs.
void forget_last_script_plan();

/// While alive, executors settle nothing on this thread.
class ScriptsUnoptimized {
 public:
  ScriptsUnoptimized();
  ~ScriptsUnoptimized();
  ScriptsUnoptimized& operator=(ScriptsUnoptimized&&) = delete;

 private:
  const bool before_;
};

/// Told of each call of a script module's method, on its thread. `began` returns what `ended` gets.
struct ScriptCallObserver {
  void* (*began)();
  void (*ended)(void* begun);
};
/// For the process. LibTorch asks it at such calls only.
void observe_script_calls(const ScriptCallObserver& observer);

/// Whether a method of a script module, or of one below it, calls an operator that is a batch norm.
bool calls_batch_norm(const torch::jit::Module& module);

/// The tensors that a script module and all below it hold as buffers; where their training flags
/// are.
std::vector<at::Tensor> buffers_of(const torch::jit::Module& module);
std::vector<bool> training_flags_of(const torch::jit::Module& module);
void set_training_flags(const torch::jit::Module& module, const std::vector<bool>& flags);

}  // namespace remat::seam
