#pragma once
// Selective checkpointing: policies that choose the operators of a region whose results are kept.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/export.h"
#include "remat/save_region.h"

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace remat {

class PolicyRule;  // lib/selective/policy_rule.h

/// The answer of a policy for one operator call (`torch/utils/checkpoint.py`). In eager execution
/// Prefer* acts as Must*, with three exceptions:
/// - If the program changes a kept result in place, `PreferSave` and `PreferCpuOffload` compute
///   it again. `MustSave`, `MustCpuOffload` and names that keep it give an error
///   (`SelectiveMutation`).
/// - If a tensor cannot be moved, `PreferCpuOffload` keeps it in place, and `MustCpuOffload`
///   throws.
/// - For a value with a name (`checkpoint_name`), `PreferRecompute` has no effect, and
///   `MustRecompute` releases the kept value.
enum class CheckpointPolicy {
  MustSave,
  PreferSave,
  MustRecompute,
  PreferRecompute,
  MustCpuOffload,
  PreferCpuOffload
};

/// One question to a policy. It concerns an operator below autograd: `linear` of a matrix arrives
/// as `addmm`, of a batch of matrices as `mm` and `add_`. With `op` = `remat::checkpoint_name` it
/// concerns a value that got a name, with `op` = `remat::save_region` a call with a name. All
/// references are valid during the call only. There is no question about `detach` and operators
/// that only read metadata.
///
/// Operators that return views, write to their arguments or return unfilled memory (empty_like) run
/// again in a recompute whatever the answer. They cost almost nothing, and a kept result would not
/// be the view, or would be written twice.
struct PolicyContext {
  const c10::OperatorHandle& op;    ///< the operator, or that of a name
  std::string_view op_name;         ///< "aten::mm.default"
  c10::ArrayRef<c10::IValue> args;  ///< the operator's arguments
  bool is_recompute;                ///< whether a recompute asks (only with `ask_again`)
  const std::string& name;          ///< the value's name, or empty
  /// The operator's results, with their sizes; empty unless the policy is asked after the operator
  /// (`SelectiveOptions::ask_after`).
  c10::ArrayRef<c10::IValue> results{};

  /// Returns the path of the module that runs: "layers.0.attention". It is the module that owns the
  /// parameter that the operator reads; otherwise the innermost module that is a region's function
  /// or a checkpointed module. Empty for a root, and if no module is known: see `register_tree`.
  /// (Modules of Python: the innermost whose call is under way.) Costs nothing if it is not called;
  /// the reference lives as long as the process.
  REMAT_API const std::string& module_path() const;
  /// Returns the path of the first parameter that the operator reads, also by a view or autocast's
  /// cast of it: "layers.0.attention.qkv.weight". Empty if it reads none.
  REMAT_API const std::string& parameter_path() const;
};

/// A policy's function. It must give the same answers for the same calls: a nested region is a new
/// region in each recompute of its enclosing region, and its policy is asked again. (A counter
/// would have to restart there.)
using PolicyFn = std::function<CheckpointPolicy(const PolicyContext&)>;

/// Options of a policy besides its choice. The construction of a policy with a negative number
/// throws `c10::ValueError`.
struct SelectiveOptions {
  /// True if a kept result may be changed in place later; its operator then runs again. Otherwise
  /// the recompute throws (`CheckpointError::Kind::SelectiveMutation`).
  bool allow_cache_entry_mutation = false;
  /// True if kept results pass the saved-tensor hooks around the region, as its inputs do.
  bool save_through_hooks = false;
  /// True if the policy is also asked in the recompute. There it must not save results that forward
  /// did not keep.
  bool ask_again = false;
  /// True if the policy is asked after each operator, and sees its results. Until the answer the
  /// operator's arguments are described, which costs about as much as to keep the results. Cannot
  /// be combined with `ask_again`: a recompute has no results to show.
  bool ask_after = false;
  /// [bytes] Smaller results are kept in place instead of being moved to the CPU: two copies would
  /// cost more than their memory is worth. 0: all are moved.
  int64_t min_offload_bytes = 1 << 16;
  /// Number of copies back from the CPU that begin ahead of the one that a recompute reads; 0:
  /// none. They follow the order of calls of the same region, then of the region that ran before
  /// it. At most this many results are on the device beside those that the recompute uses.
  int64_t prefetch_depth = 2;
  /// [bytes] Limit of originals whose copies to the CPU are not finished; until then their memory
  /// cannot be reused. A single larger one is allowed. Beyond the limit the program waits for the
  /// oldest copy. This limit and `prefetch_depth` count over all regions of the process whose
  /// policies agree in `prefetch_depth`, `max_bytes_in_flight` and `keep_last`.
  int64_t max_bytes_in_flight = 64 << 20;
  /// Number of results that stay on the device, because backward reads them first and moving them
  /// gains nothing. These are results of the region that ran last, in the order of its calls, then
  /// of the region before it. A result that the program itself holds does not count.
  /// If the number is not 0, a result moves when others have been kept after it or the forward of a
  /// region ends, and only if the program no longer holds it. A change in place is then also
  /// noticed after the region. Results that pass hooks (`save_through_hooks`, and in another
  /// region) move at once and do not count.
  int64_t keep_last = 0;
};

/// A policy function with its options; an empty policy recomputes everything. Copies share the
/// function, which may be called on any thread that runs a region.
class REMAT_API Policy {
 public:
  Policy() = default;
  Policy(PolicyFn fn, SelectiveOptions options = {});  ///< makes a policy that asks `fn`
  /// Makes a policy of a function that converts to a `PolicyFn`, with the default options.
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, Policy>) && std::convertible_to<F, PolicyFn>
  Policy(F&& fn) : Policy(PolicyFn(std::forward<F>(fn))) {}
  /// Makes a policy of a function that returns whether to keep the result: `true` is MustSave,
  /// `false` PreferRecompute.
  template <class F>
    requires std::same_as<std::invoke_result_t<std::decay_t<F>&, const PolicyContext&>, bool>
  Policy(F&& fn, SelectiveOptions options = {})
      : Policy(PolicyFn([fn = std::forward<F>(fn)](const PolicyContext& question) mutable {
                 return fn(question) ? CheckpointPolicy::MustSave
                                     : CheckpointPolicy::PreferRecompute;
               }),
               options) {}

  /// Parses a table (`policy_table`) from text: lines of `PATTERN = ANSWER`, separated by `;` or
  /// line breaks; a `#` begins a comment. Answers are `save`, `offload` and `recompute`
  /// (PreferSave, PreferCpuOffload, PreferRecompute), or the enumerators in small letters:
  /// `must_save`.
  ///
  ///     remat::Policy::parse("layers.*.attention.**: aten::mm = save; * = recompute")
  ///
  /// Throws `c10::ValueError` for a wrong line, with a hint.
  static Policy parse(std::string_view text, const SelectiveOptions& options = {});

  /// Returns whether the policy is not empty.
  explicit operator bool() const { return rule_ != nullptr; }

 private:
  friend class PolicyRule;
  explicit Policy(std::shared_ptr<const PolicyRule> rule);
  std::shared_ptr<const PolicyRule> rule_;
};

/// Returns a policy with MustSave for listed operators and PreferRecompute for others. "aten::mm"
/// means every overload, "aten::add.Tensor" one, "aten::mm.default" the unnamed one. Throws
/// `c10::ValueError` for a name that no loaded library has registered. Warns about an operator that
/// never reaches a policy because it consists of others.
REMAT_API Policy save_ops(std::vector<std::string> ops, SelectiveOptions options = {});
/// Returns a policy with MustCpuOffload for listed operators: their results move to the CPU.
/// Results on the CPU and results smaller than `SelectiveOptions::min_offload_bytes` are kept in
/// place. Copies run beside the device's work, and return ahead of it. A result that the region
/// writes to, or that is held when the region ends, is copied before that.
REMAT_API Policy offload_ops(std::vector<std::string> ops, SelectiveOptions options = {});
/// Returns a policy with PreferSave for matrix products, convolutions and scaled dot product
/// attention, and PreferRecompute for others. A product that an activation then overwrites in place
/// is computed again.
REMAT_API Policy save_matmuls(SelectiveOptions options = {});

// Policies for operators that must not run twice, with MustSave for the results of these operators
// and PreferRecompute for others. Unions with `save_matmuls()` and others combine them with speed.

/// Returns a policy for collectives and point-to-point communication of torch.distributed: the
/// functional operators, and those of `c10d`, which write to their first argument. A recompute
/// copies the kept contents into its own buffer. A later write to such an output is an error in the
/// recompute (`SelectiveMutation`), by a collective as well. Its Work is one that has ended.
/// Memory: the outputs, in place, as long as the graph needs the region; they are never moved.
REMAT_API Policy save_collectives(SelectiveOptions options = {});
/// Returns a policy for operators that draw random numbers. (Without it, recomputes draw the same
/// numbers again.)
REMAT_API Policy save_random(SelectiveOptions options = {});
/// Returns a policy for operators that may give another result for the same arguments: sums in any
/// order on an accelerator (`scatter_add`), choices among equal elements (`topk`, `sort`).
REMAT_API Policy save_nondeterministic(SelectiveOptions options = {});
/// Returns a policy for copies from a device to the host, `item()` among them, for which the
/// program waits.
REMAT_API Policy save_host_copies(SelectiveOptions options = {});
/// Registers an operator with a side effect for the policies that `save_effects` makes from now on.
/// Throws as `save_ops`.
REMAT_API void register_effect(const std::string& op);
/// Returns a policy for the registered operators: they run once, whether they have results or not.
REMAT_API Policy save_effects(SelectiveOptions options = {});
/// Returns the union of these policies, for expert and pipeline parallel training.
REMAT_API Policy save_unrepeatable(SelectiveOptions options = {});

/// Returns a policy that keeps the values with one of these names (`checkpoint_name`, as in
/// jax.checkpoint_policies). Warns once about a name that no value has at the first recompute.
REMAT_API Policy save_names(std::vector<std::string> names, SelectiveOptions options = {});
/// Returns a policy that keeps every value with another name, as `save_names` does.
REMAT_API Policy save_all_but_names(std::vector<std::string> names, SelectiveOptions options = {});
/// Returns a policy that keeps these values as `save_names` does, on the CPU.
REMAT_API Policy offload_names(std::vector<std::string> names, SelectiveOptions options = {});

/// One line of a table.
struct PolicyLine {
  std::string pattern;      ///< of paths, operators or names: see `policy_table`
  CheckpointPolicy answer;  ///< for the operators that the pattern matches
};
/// Returns a policy of a table: the first line whose pattern matches answers, and without one the
/// result is recomputed. A pattern is `PATHS: OPERATORS`, one of the two, or `*` for everything.
///
/// - `PATHS` are patterns for `PolicyContext::module_path`, as in `ModuleChoice`: `*` matches
///   anything but a dot, `**` anything, `?` one character; `|` separates several.
/// - `OPERATORS` are names as in `save_ops`, with `|` between them, or `name=PATTERNS` for values
///   and calls of save_region with such a name.
///
///     remat::policy_table({{"layers.*.attention.**: aten::mm|aten::bmm", PreferSave},
///                          {"name=router.*", MustSave},
///                          {"*", PreferRecompute}})
///
/// Warns once about a line whose paths match no module. Throws `c10::ValueError` for an empty
/// table, a wrong or repeated pattern, an unknown operator, and lines after one that matches
/// everything.
REMAT_API Policy policy_table(const std::vector<PolicyLine>& lines, SelectiveOptions options = {});

/// Returns a policy that keeps a result if either policy keeps it. The stronger answer wins, in the
/// order MustSave, MustCpuOffload, PreferSave, PreferCpuOffload, PreferRecompute, MustRecompute. A
/// boolean option is on if either policy has it. The numbers are those of the policy that offloads;
/// if both do, the larger ones, but the smaller `max_bytes_in_flight`.
/// Throws `c10::ValueError` if one policy saves a name and the other offloads it.
REMAT_API Policy operator|(Policy a, Policy b);

/// Returns `x` with a name for policies. If the policy of the innermost region keeps the name, the
/// operator call of this region that made `x` is kept and does not run again. An `x` that no such
/// call made, or that was changed in place, is kept itself. Differentiable. Outside of regions it
/// just returns `x`.
REMAT_API at::Tensor checkpoint_name(const at::Tensor& x, std::string name);

}  // namespace remat
