#pragma once
// What a region can be told: determinism and capture checks, random state, scopes, name.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "remat/policy.h"

namespace torch::nn {
class Module;
}

namespace remat {

/// How a recomputed tensor is compared with the one that forward saved. Every level
/// checks the number of tensors; each includes the levels before it.
enum class DeterminismCheck {
  None,      ///< the number of tensors only
  Metadata,  ///< shape, dtype, device
  Layout,    ///< + strides
  Values  ///< + the elements, bitwise, by a 64-bit hash kept per tensor, unless `ValueComparison` says otherwise
};

/// When `DeterminismCheck::Values` finds the elements of two tensors equal. By itself: if all their
/// bits are, by a 64-bit hash that is kept of each tensor; then a NaN equals one of the same bits,
/// and 0 does not equal -0.
struct ValueComparison {
  /// The choice of equal NaN elements.
  enum class Nan {
    Bits,  ///< those of the same bits
    Any    ///< all; of a complex number each part by itself
  };

  /// Elements of floating point are equal if |recomputed - forward| <= absolute_tolerance +
  /// relative_tolerance * |forward|, or if their bits are; an infinity equals itself only. Others
  /// are compared bitwise. With a tolerance the elements that are compared are kept, instead of a
  /// hash: `max_elements` bounds them.
  double absolute_tolerance = 0;
  double relative_tolerance = 0;  ///< see `absolute_tolerance`
  /// Largest number of compared elements of each tensor, spread evenly over it; 0: all. A smaller
  /// number saves the time of the hash or, with a tolerance, memory, and misses differences in
  /// other elements.
  int64_t max_elements = 0;
  Nan nan = Nan::Bits;  ///< which NaN are equal
};

/// The treatment of a parameter, buffer or captured tensor that changed between forward and
/// recompute.
enum class CaptureCheck {
  Raise,  ///< the recompute throws `CaptureChanged`
  Ignore  ///< it goes on with the new value
};

/// The treatment of a module's buffers (running statistics, estimates) that its forward writes.
enum class BufferPolicy {
  /// A recompute sees the written buffers as forward saw them, must leave them as forward did, and
  /// puts them back: after any number of steps they equal those of the module without regions. Two
  /// copies of what a forward writes stay with its graph, one for batch norms. Buffers that forward
  /// only reads are neither copied nor restored.
  Restore,
  /// A module that contains a BatchNorm runs without a region, and says so once. A script module
  /// contains one if a method of it, or of one below it, calls one.
  SkipBatchNorm,
  /// A recompute writes them once more.
  Ignore
};

/// The form in which a region keeps its tensor arguments for its recomputes.
enum class InputMode {
  /// The mode that suits the call: `CopyOnWrite` in `checkpoint_sequential`, whose segments begin
  /// wherever the chain is cut, `Shared` elsewhere.
  Default,
  /// The tensors themselves, as autograd saves them. One that was changed in place before backward,
  /// by the function or by whoever has it, is an error in backward:
  /// `CheckpointError::Kind::InputChanged`.
  Shared,
  /// A copy of its own of each, so that functions that write to their arguments, as
  /// `ReLU(inplace = true)` does, and changes after the call do no harm. On the CPU nothing is
  /// copied until somebody asks for a mutable pointer to the argument's storage; then all of the
  /// storage is, once for each region that needs it, and the argument stays at its address. What is
  /// written through a pointer taken before the call is not seen, as in every mode. Each recompute
  /// begins with a copy of that copy. Copied at once, at the call and for each recompute, is:
  /// memory that LibTorch did not allocate (`from_blob`), what is less than half of its storage,
  /// tensors on accelerators, sparse and other special tensors, all before LibTorch 2.13.
  CopyOnWrite
};

/// One stage of a chain: a function from tensor to tensor.
using Stage = std::function<at::Tensor(at::Tensor)>;

/// A user scope: entered when made, left when the last copy is destroyed.
using Scope = std::shared_ptr<void>;

/// Makes the scopes of the two passes; either may be empty. Each pass enters its scope once. The
/// pair is kept as long as the graph needs the region.
struct ContextPair {
  std::function<Scope()> forward{};    ///< of the first run
  std::function<Scope()> recompute{};  ///< of each recompute
};

/// A line of a program. (Not std::source_location, which clang knows from 16 on only.)
struct SourceLocation {
  const char* file = nullptr;  ///< as the compiler was given it; null: not known
  uint32_t line = 0;           ///< from 1

  /// Returns the location of the call; in the default initialiser of a member, the place where the
  /// struct is initialised with braces.
  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          uint32_t line = __builtin_LINE()) {
    return {file, line};
  }
};

/// The options of one region. Plain values; copied into the region's frame.
struct CheckpointOptions {
  /// Shown in errors, reports and traces. Empty: a function that is a module is called by its type,
  /// without namespace and `Impl`.
  std::string name{};
  /// The recompute draws the random numbers that forward drew.
  bool preserve_rng_state = true;
  /// The recompute ends with the last tensor that backward needs: docs/concepts.md, Early stop.
  bool early_stop = true;
  /// How recomputed tensors are compared with those of forward.
  DeterminismCheck determinism_check = DeterminismCheck::Metadata;
  /// How `DeterminismCheck::Values` compares elements. A tolerance that is negative or NaN, or a
  /// negative `max_elements`, is a `c10::ValueError`.
  ValueComparison values{};
  /// If set, its text is compared instead of `determinism_check`; called under no-grad once per
  /// saved tensor in each pass, when the operator that saved the tensor has returned.
  std::function<std::string(const at::Tensor&)> fingerprint{};
  /// Treatment of a parameter, buffer or captured tensor that changed.
  CaptureCheck capture_check = CaptureCheck::Raise;
  /// Record the operators of both passes, for the error report. Costs time and memory.
  bool debug = false;
  /// Called once per `checkpoint()` call that opens a frame.
  std::function<ContextPair()> context_fn{};
  /// Selective checkpointing; empty: recompute everything.
  Policy policy{};
  /// The region's inputs wait on the CPU: those on an accelerator that `SaveOnCpuGuard` would move,
  /// and that no region or hook around this one takes. They are checked for changes like others.
  bool offload_inputs = false;
  /// Number of copies back, with `offload_inputs`, that are begun ahead of the one that is read, in
  /// the reverse order of the regions, of inputs of regions with the same number; 0: none. A
  /// negative number is a `c10::ValueError`.
  int64_t offload_prefetch_depth = 2;
  /// A second read of a saved tensor in one backward is an error instead of one more recompute.
  bool strict_unpack = false;
  /// Treatment of the buffers of the modules below, and of the function where it is a module: a
  /// holder, a (shared) pointer, an `AnyModule`. A `Checkpointed` has `ModuleOptions::buffers`,
  /// too: of the two the one that is not `Restore` holds.
  BufferPolicy buffers = BufferPolicy::Restore;
  /// Modules that a function calls without being one, a lambda for instance: recomputes see their
  /// training flags and, as `buffers` says, their buffers as forward saw them, and put them back;
  /// with all below them. Read when the region begins; not kept alive. Null is a `c10::ValueError`.
  std::vector<std::shared_ptr<torch::nn::Module>> modules{};
  /// Form in which the region keeps its tensor arguments.
  InputMode inputs = InputMode::Default;
  /// Under a `CheckpointLevelGuard` the call is a region if `training_level >= level`, else it runs
  /// plainly. Level 0 is never a region, with or without guard. No level: guards do not matter.
  std::optional<int64_t> level{};
  /// Shown in errors: where these options were written, which is the call for
  /// `checkpoint({.name = "x"}, ...)`. Set by itself where they are written with braces; not for
  /// `CheckpointOptions options;`.
  SourceLocation location = SourceLocation::current();
};

}  // namespace remat
