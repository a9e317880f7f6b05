#pragma once
// The options of a region: determinism and capture checks, random state, scopes, name.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "remat/export.h"
#include "remat/policy.h"

namespace torch::nn {
class Module;
}

namespace remat {

class RegionHandle;

/// The comparison of a recomputed tensor with the one that forward saved. Every level checks the
/// number of tensors, and includes the levels before it.
enum class DeterminismCheck {
  None,      ///< the number of tensors only
  Metadata,  ///< shape, dtype, device
  Layout,    ///< + strides
  /// + the elements, bitwise, by a 64-bit hash kept per tensor, unless `ValueComparison` differs.
  Values
};

/// The equality of elements for `DeterminismCheck::Values`. By default all bits must be equal,
/// which a 64-bit hash kept for each tensor checks: a NaN equals one with the same bits, and 0 does
/// not equal -0.
struct ValueComparison {
  /// The NaN elements that are equal to each other.
  enum class Nan {
    Bits,  ///< those with the same bits
    Any    ///< all; the parts of a complex number are compared one by one
  };

  /// Floating-point elements are equal if |recomputed - forward| <= absolute_tolerance +
  /// relative_tolerance * |forward|, or if their bits are equal; an infinity equals only itself.
  /// Other elements are compared bitwise. With a tolerance, the compared elements are kept instead
  /// of a hash: `max_elements` bounds their number.
  double absolute_tolerance = 0;
  double relative_tolerance = 0;  ///< see `absolute_tolerance`
  /// Largest number of compared elements of each tensor, spread evenly over it; 0: all. A smaller
  /// number saves the time of the hash or, with a tolerance, memory. It misses differences in other
  /// elements.
  int64_t max_elements = 0;
  Nan nan = Nan::Bits;  ///< which NaN are equal
};

/// The treatment of a parameter, buffer or captured tensor that changed between forward and
/// recompute.
enum class CaptureCheck {
  Raise,  ///< the recompute throws `CaptureChanged`
  Ignore  ///< the recompute continues with the new value
};

/// The treatment of a module's buffers (running statistics, estimates) that its forward writes.
enum class BufferPolicy {
  /// A recompute sees the written buffers as forward did, must leave them as forward did, and then
  /// restores them. After any number of steps they equal those of the module without regions. Two
  /// copies of each written buffer stay with the graph (batch norms: one). Buffers that forward
  /// only reads are neither copied nor restored.
  Restore,
  /// A module that contains a BatchNorm runs without a region, with one warning. A script module
  /// contains a BatchNorm if one of its methods, or of a module below it, calls one.
  SkipBatchNorm,
  /// A recompute writes the buffers once more.
  Ignore
};

/// The form in which a region keeps its tensor arguments for its recomputes.
enum class InputMode {
  /// `CopyOnWrite` in `checkpoint_sequential`, whose segments may begin with an in-place stage;
  /// `Shared` elsewhere.
  Default,
  /// The tensors themselves, as autograd saves them. If the function or other code changes one in
  /// place before backward, backward throws `CheckpointError::Kind::InputChanged`.
  Shared,
  /// A copy of each tensor. Functions may write to their arguments, as `ReLU(inplace = true)` does,
  /// and the program may change the arguments after the call. On the CPU the copy is made when code
  /// first asks for a mutable pointer to the argument's storage. The whole storage is then copied
  /// once for each region that needs it, and the argument keeps its address. Writes through a
  /// pointer taken before the call are not noticed, as in every mode. Each recompute begins with a
  /// copy of that copy. The following are copied at once, at the call and for each recompute:
  /// memory that LibTorch did not allocate (`from_blob`), tensors that cover less than half of
  /// their storage, tensors on accelerators, sparse and other special tensors. Before LibTorch 2.13
  /// all tensors are copied at once.
  CopyOnWrite
};

/// The treatment of a region that would be opened inside a transform of functorch (`vmap`, `grad`,
/// `jvp`) or gets an argument with a forward-mode tangent.
enum class Transforms {
  RunPlainly,  ///< the function runs without a region, with one warning in the process
  Refuse       ///< CheckpointError::Kind::Unsupported
};

/// One stage of a chain: a function from tensor to tensor.
using Stage = std::function<at::Tensor(at::Tensor)>;

/// A user scope: its construction enters the scope, and the destruction of its last copy leaves it.
using Scope = std::shared_ptr<void>;

/// Functions that make the scopes of the two passes; either may be empty. Each pass enters its
/// scope once. The pair is kept as long as the graph needs the region.
struct ContextPair {
  std::function<Scope()> forward{};    ///< makes the scope of the first run
  std::function<Scope()> recompute{};  ///< makes the scope of each recompute
};

/// A line of a program. (Not std::source_location, which needs clang 16.)
struct SourceLocation {
  const char* file = nullptr;  ///< path as passed to the compiler; null: unknown
  uint32_t line = 0;           ///< from 1

  /// Returns the location of the call. In the default initializer of a member it is the place where
  /// the struct is initialized with braces.
  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          uint32_t line = __builtin_LINE()) {
    return {file, line};
  }
};

/// The options of one region: plain values, copied into the region's frame.
struct CheckpointOptions {
  /// Name in errors, reports and traces. Empty: if the function is a module, its type is the name,
  /// without namespace and `Impl`.
  std::string name{};
  /// True if the recompute draws the same random numbers as forward.
  bool preserve_rng_state = true;
  /// True if the recompute ends with the last tensor that backward needs: docs/concepts.md, Early
  /// stop.
  bool early_stop = true;
  /// Comparison of recomputed tensors with those of forward.
  DeterminismCheck determinism_check = DeterminismCheck::Metadata;
  /// Comparison of elements by `DeterminismCheck::Values`. A tolerance that is negative or NaN, or
  /// a negative `max_elements`, is a `c10::ValueError`.
  ValueComparison values{};
  /// Function whose text is compared instead of `determinism_check`, if set. Called under no-grad,
  /// once per saved tensor in each pass, when the operator that saved the tensor has returned.
  std::function<std::string(const at::Tensor&)> fingerprint{};
  /// Treatment of a parameter, buffer or captured tensor that changed.
  CaptureCheck capture_check = CaptureCheck::Raise;
  /// True to record the operators of both passes for the error report. Costs time and memory.
  bool debug = false;
  /// Makes the user scopes; called once per `checkpoint()` call that opens a frame.
  std::function<ContextPair()> context_fn{};
  /// Policy of selective checkpointing; empty: recompute everything.
  Policy policy{};
  /// True to move the region's inputs to the CPU. This applies to inputs on an accelerator that
  /// `SaveOnCpuGuard` would move, unless an enclosing region or hook takes them. They are checked
  /// for changes like other inputs.
  bool offload_inputs = false;
  /// Number of copies back that begin ahead of a read, with `offload_inputs`, in the reverse order
  /// of the regions; 0: none. Counts inputs of regions with the same number. A negative number is a
  /// `c10::ValueError`.
  int64_t offload_prefetch_depth = 2;
  /// True if a second read of a saved tensor in one backward is an error instead of one more
  /// recompute.
  bool strict_unpack = false;
  /// Treatment of the buffers of `modules`, and of the function if it is a module: a holder, a
  /// (shared) pointer, an `AnyModule`. A `Checkpointed` also has `ModuleOptions::buffers`; if one
  /// of the two is not `Restore`, that one applies.
  BufferPolicy buffers = BufferPolicy::Restore;
  /// Modules that a function calls if it is not a module itself, such as a lambda. Recomputes see
  /// their training flags and, as `buffers` says, their buffers as forward did, and restore them
  /// afterwards; submodules are included. The list is read when the region begins, and does not
  /// keep modules alive. A null pointer is a `c10::ValueError`.
  std::vector<std::shared_ptr<torch::nn::Module>> modules{};
  /// Form in which the region keeps its tensor arguments.
  InputMode inputs = InputMode::Default;
  /// Level for `CheckpointLevelGuard`: under a guard the call is a region if
  /// `training_level >= level`, and otherwise runs plainly. Level 0 is never a region, with or
  /// without a guard; a negative level is a `c10::ValueError`. A call with a level whose function
  /// is a module in eval mode runs plainly. Guards ignore calls without a level.
  std::optional<int64_t> level{};
  /// Treatment inside functorch transforms and with forward-mode tangents.
  Transforms transforms = Transforms::RunPlainly;
  /// Handle that refers to the region when its function has returned, except in a recompute and in
  /// a call that runs plainly. Options with one handle may serve several calls: the last one
  /// counts.
  std::shared_ptr<RegionHandle> handle{};
  /// Number of regions with this option that a backward recomputes ahead, in the reverse order in
  /// which this thread ran them, whenever it first reads this one; 0: none. Regions that the
  /// backward does not run are left out. On an accelerator these recomputes run beside the backward
  /// (`RegionHandle::prepare`); their errors reach it at once. More regions in memory are the
  /// price. A negative number is a `c10::ValueError`.
  int64_t prepare_ahead = 0;
  /// Line of the program that errors show for these options: the call in
  /// `checkpoint({.name = "x"}, ...)`. It is set automatically if the options are initialized with
  /// braces, but not for `CheckpointOptions options;`.
  SourceLocation location = SourceLocation::current();
};

/// Sets the process's defaults of options, as the environment variable REMAT_OPTIONS does when the
/// first region begins: `"early_stop=false, determinism_check=values"`. They replace earlier ones;
/// an empty text ends them. A default applies to regions that begin later, wherever their option
/// has its built-in value; guards have priority. Options: preserve_rng_state, early_stop, debug
/// (not with a `context_fn`), offload_inputs, strict_unpack (true or false), determinism_check
/// (none, metadata, layout, values), capture_check (raise, ignore), input_mode (shared,
/// copy_on_write), offload_prefetch_depth. Any thread. Throws `c10::ValueError` for another name or
/// value; an invalid REMAT_OPTIONS makes every region throw it.
REMAT_API void set_default_options(std::string_view text);
/// Returns the text of the defaults in force; empty without any.
REMAT_API std::string default_options();

}  // namespace remat
