#pragma once
// Which operators of a region keep their result: selective checkpointing.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "remat/call.h"
#include "remat/export.h"

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace remat {

class PolicyRule;  // lib/selective/policy_rule.h

/// The answer of a policy for one operator call (`torch/utils/checkpoint.py`). In eager execution
/// Prefer* acts as Must*, with three exceptions. A result that the program changes in place is
/// computed again if the answer about its operator was `PreferSave` or `PreferCpuOffload`; it is an
/// error (`SelectiveMutation`) if that was `MustSave` or `MustCpuOffload`, or if a name keeps it.
/// `PreferCpuOffload` keeps a tensor where it is when it cannot be moved, where `MustCpuOffload`
/// throws. About a value with a name (`checkpoint_name`) `PreferRecompute` says nothing, while
/// `MustRecompute` lets go of what was kept.
enum class CheckpointPolicy {
  MustSave,
  PreferSave,
  MustRecompute,
  PreferRecompute,
  MustCpuOffload,
  PreferCpuOffload
};

/// One question to a policy: about an operator below autograd (`linear` of a matrix arrives as
/// `addmm`, of a batch of them as `mm` and `add_`), or, with `op` = `remat::checkpoint_name`, about
/// a value that was given a name. All references are valid during the call only. Never asked about:
/// `detach`, operators that only read metadata.
///
/// Kept or not, operators that return views, write to their arguments or return unfilled memory
/// (empty_like) run again in a recompute: they cost next to nothing, and a kept result would not be
/// the view, or would be written twice.
struct PolicyContext {
  const c10::OperatorHandle& op;    ///< the operator, or `remat::checkpoint_name`
  std::string_view op_name;         ///< "aten::mm.default"
  c10::ArrayRef<c10::IValue> args;  ///< the operator's arguments
  bool is_recompute;                ///< asked in a recompute (only with `ask_again`)
  const std::string& name;          ///< the value's name, empty unless it was given one
};

/// Must answer alike for like calls: a region that is nested in another one is a new region in each
/// recompute of that one, and its policy is asked anew. (A counter would have to begin anew there.)
using PolicyFn = std::function<CheckpointPolicy(const PolicyContext&)>;

/// Options of a policy beside its choice. A negative number is a `c10::ValueError` where the policy
/// is made.
struct SelectiveOptions {
  /// A kept result may be changed in place later: its operator then runs again. Otherwise the
  /// recompute throws (`CheckpointError::Kind::SelectiveMutation`).
  bool allow_cache_entry_mutation = false;
  /// Kept results pass the saved-tensor hooks around the region, as its inputs do.
  bool save_through_hooks = false;
  /// The policy is asked in the recompute too, which must not want to save what forward did not.
  bool ask_again = false;
  /// [bytes] Results smaller than this stay where they are when the policy wants them on the CPU: a
  /// copy each way would cost more than their memory is worth. 0: all are moved.
  int64_t min_offload_bytes = 1 << 16;
  /// How many copies back from the CPU are begun ahead of the one that a recompute reads: of the
  /// same region, in the order of its calls, then of the region that ran before it; 0: none. So
  /// many results at the most are on the device beside those that the recompute uses.
  int64_t prefetch_depth = 2;
  /// [bytes] Of originals whose copies to the CPU are not done, so that their memory cannot be used
  /// again, unless a single one is larger. Beyond that the program waits for the oldest copy.
  /// Counted, as the depth is, over all regions of the process whose policies have the same last
  /// three of these.
  int64_t max_bytes_in_flight = 64 << 20;
  /// Number of results that stay on the device because backward asks for them first, so that moving
  /// them gains nothing: results of the region that ran last, in the order of its calls, then of
  /// the region before it. A result that the program itself holds does not count. If the number is
  /// not 0, a result moves when others have been kept after it or the forward of a region ends, and
  /// only if the program does not hold it then; a change in place is noticed also after the region.
  /// Results that pass hooks (`save_through_hooks`, and in another region) move at once, and do not
  /// count.
  int64_t keep_last = 0;
};

/// A policy function with its options; empty means "recompute everything". Copies share the
/// function, which may be called from any thread that runs a region.
class REMAT_API Policy {
 public:
  Policy();
  Policy(PolicyFn fn, SelectiveOptions options = {});  ///< asks `fn`
  /// Makes a policy of anything that a `PolicyFn` can be made of, with the default options.
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, Policy>) && std::convertible_to<F, PolicyFn>
  Policy(F&& fn) : Policy(PolicyFn(std::forward<F>(fn))) {}
  /// Makes a policy of a function that only says whether to keep the result: `true` is MustSave,
  /// `false` PreferRecompute.
  template <class F>
    requires std::same_as<std::invoke_result_t<std::decay_t<F>&, const PolicyContext&>, bool>
  Policy(F&& fn, SelectiveOptions options = {})
      : Policy(PolicyFn([fn = std::forward<F>(fn)](const PolicyContext& question) mutable {
                 return fn(question) ? CheckpointPolicy::MustSave
                                     : CheckpointPolicy::PreferRecompute;
               }),
               options) {}

  /// Returns whether the policy is not empty.
  explicit operator bool() const { return rule_ != nullptr; }

 private:
  friend class PolicyRule;
  explicit Policy(std::shared_ptr<const PolicyRule> rule);
  std::shared_ptr<const PolicyRule> rule_;
};

/// Listed operators: MustSave, others: PreferRecompute. "aten::mm" means every overload,
/// "aten::add.Tensor" one, "aten::mm.default" the unnamed one. Throws `c10::ValueError` for a name
/// that no loaded library has registered; warns about one that never reaches a policy because it
/// consists of others.
REMAT_API Policy save_ops(std::vector<std::string> ops, SelectiveOptions options = {});
/// Listed: MustCpuOffload; the results wait on the CPU. Results that are there are simply kept, and
/// so are those of less than `SelectiveOptions::min_offload_bytes`. Copies run beside the device's
/// work, and come back ahead of it; a result that the region writes to, or that is held when it
/// ends, is copied before that.
REMAT_API Policy offload_ops(std::vector<std::string> ops, SelectiveOptions options = {});
/// Matrix products, convolutions and scaled dot product attention: PreferSave, others:
/// PreferRecompute. A product that an activation then overwrites in place is computed again.
REMAT_API Policy save_matmuls(SelectiveOptions options = {});

/// Keeps the values that `checkpoint_name` gave one of these names (jax.checkpoint_policies). A
/// name that no value has by the first recompute is warned about, once.
REMAT_API Policy save_names(std::vector<std::string> names, SelectiveOptions options = {});
/// Keeps every value with a name but these, as `save_names` keeps its own.
REMAT_API Policy save_all_but_names(std::vector<std::string> names, SelectiveOptions options = {});
/// Keeps these values as `save_names` does; they wait on the CPU.
REMAT_API Policy offload_names(std::vector<std::string> names, SelectiveOptions options = {});

/// Keeps what either keeps; the stronger wish to save wins, in the order MustSave, MustCpuOffload,
/// PreferSave, PreferCpuOffload, PreferRecompute, MustRecompute. An option that either has is on;
/// the numbers are those of the one that offloads (of both: the larger ones, of
/// `max_bytes_in_flight` the smaller).
/// Throws `c10::ValueError` if a name is to be saved by one and offloaded by the other.
REMAT_API Policy operator|(Policy a, Policy b);

/// `x`, with a name for policies. If the policy of the innermost region keeps the name, the
/// operator call of this region that made `x` is kept and does not run again; an `x` that none
/// made, or that was changed in place, is kept itself. Differentiable; outside of regions nothing
/// but `x`.
REMAT_API at::Tensor checkpoint_name(const at::Tensor& x, std::string name);

/// Inside a region: keeps the value of `x`, and recomputes go on with it, whatever they computed
/// themselves. For discrete decisions (the indices of topk, a routing mask, a sample) that rounding
/// could flip. Memory: that of `x`, as long as the region's frame lives. Throws, in the recompute,
/// if `x` was changed in place. A gradient taken inside the recompute through it throws
/// (Unsupported); so does one of the pinned value where `x` itself is used as well.
REMAT_API at::Tensor pin(const at::Tensor& x);

namespace detail {

/// One call of save_region() or pin(): what it kept in forward, or is to keep.
class REMAT_API SavedRegion {
 public:
  /// `type`: of what `emptied` points to. `visit_arguments` visits what the function is given.
  SavedRegion(const std::type_info& type, c10::function_ref<void(TensorVisitor)> visit_arguments);
  ~SavedRegion();
  SavedRegion(const SavedRegion&) = delete;
  SavedRegion& operator=(const SavedRegion&) = delete;
  /// A recompute: the result is there, nothing is to be run.
  bool is_kept() const;
  /// An `Emptied` of the result's type, null for void; and the tensors for it.
  void* emptied() const;
  std::vector<at::Tensor> tensors();
  /// Keeps what `visit_tensors` visits, and `emptied`. The region has run.
  void keep(std::shared_ptr<void> emptied, c10::function_ref<void(TensorVisitor)> visit_tensors);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null outside of regions
};

}  // namespace detail

/// Inside a region: keeps what autograd saves in `fn(args...)` and what it returns, so that `fn` is
/// not run again. For kernels that no operator policy sees: custom Functions, calls past the
/// dispatcher, communication. Outside of regions: `fn(args...)`.
///
/// It belongs to the innermost region; when the recompute of an enclosing one runs that region's
/// forward again, `fn` runs again. Types: as for `checkpoint`, and the result must be copyable. A
/// gradient taken inside the recompute through the result throws (Unsupported); so does one of
/// tensors older than the result if `fn` read others that require grad than its arguments.
template <class Fn, class... Args>
auto save_region(Fn&& fn, Args&&... args) {
  using Result = std::decay_t<decltype(detail::call(fn, std::forward<Args>(args)...))>;
  const auto visit_arguments = [&]([[maybe_unused]] TensorVisitor visitor) {
    (detail::Tensors<std::decay_t<Args>>::visit(const_cast<std::decay_t<Args>&>(args), visitor),
     ...);
  };
  if constexpr (std::is_void_v<Result>) {
    detail::SavedRegion region(typeid(void), visit_arguments);
    if (region.is_kept()) return;
    detail::call(fn, std::forward<Args>(args)...);
    region.keep(nullptr, [](TensorVisitor) {});
  } else {
    static_assert(std::copy_constructible<Result>,
                  "remat::save_region: the result must be copyable, since each recompute gets a "
                  "copy of it");
    detail::SavedRegion region(typeid(detail::Emptied<Result>), visit_arguments);
    if (region.is_kept()) {
      std::vector<at::Tensor> tensors = region.tensors();
      return static_cast<detail::Emptied<Result>*>(region.emptied())->filled(tensors);
    }
    Result result = detail::call(fn, std::forward<Args>(args)...);
    auto emptied = std::make_shared<detail::Emptied<Result>>(std::as_const(result));
    region.keep(emptied, [&](TensorVisitor visitor) { emptied->visit(visitor); });
    return result;
  }
}

}  // namespace remat
