#pragma once
// What a region can be told: determinism and capture checks, random state, scopes, name.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "remat/policy.h"

namespace torch::nn {
class Module;
}

namespace remat {

/// How a recomputed tensor is compared with the one that forward saved (Rule 10). Every level
/// checks the number of tensors; each includes the levels before it.
enum class DeterminismCheck {
  None,      ///< the number of tensors only
  Metadata,  ///< shape, dtype, device
  Layout,    ///< + strides
  Values     ///< + the elements, bitwise, by a 64-bit hash kept per tensor
};

/// What happens when a parameter, buffer or captured tensor changed between forward and recompute.
enum class CaptureCheck {
  Raise,  ///< the recompute throws `CaptureChanged`
  Ignore  ///< it goes on with the new value
};

/// What happens to a module's buffers (running statistics, estimates) that its forward writes.
enum class BufferPolicy {
  /// A recompute sees them as forward saw them, and puts them back: after any number of steps they
  /// equal those of the module without regions. One copy of what a forward changes stays with its graph.
  Restore,
  /// A module that contains a BatchNorm runs without a region, and says so once. A script module contains one
  /// if a method of it, or of one below it, calls one.
  SkipBatchNorm,
  /// A recompute writes them once more.
  Ignore
};

/// What a region keeps of its tensor arguments for its recomputes.
enum class InputMode {
  /// What suits the call: `CopyOnWrite` in `checkpoint_sequential`, whose segments begin wherever the chain
  /// is cut, `Shared` elsewhere.
  Default,
  /// The tensors themselves, as autograd saves them. One that was changed in place before backward, by the
  /// function or by whoever has it, is an error in backward: `CheckpointError::Kind::InputChanged`.
  Shared,
  /// A copy of its own of each, so that functions that write to their arguments, as
  /// `ReLU(inplace = true)` does, and changes after the call do no harm. On the CPU nothing is copied until
  /// somebody asks for a mutable pointer to the argument's storage; then all of the storage is, once for
  /// each region that needs it, and the argument stays at its address. What is written through a pointer
  /// taken before the call is not seen, as in every mode. Copied at once is: memory that LibTorch did not
  /// allocate (`from_blob`), what is less than half of its storage, tensors on accelerators, sparse and
  /// other special tensors, and everything with a LibTorch older than 2.13.
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

  /// Where this stands; in the default initialiser of a member: where the struct is initialised with braces.
  static constexpr SourceLocation current(const char* file = __builtin_FILE(),
                                          uint32_t line = __builtin_LINE()) {
    return {file, line};
  }
};

/// The options of one region. Plain values; copied into the region's frame.
struct CheckpointOptions {
  /// Shown in errors, reports and traces. Empty: a function that is a module is called by its type, without namespace
  /// and `Impl`.
  std::string name{};
  /// The recompute draws the random numbers that forward drew (Rule 11).
  bool preserve_rng_state = true;
  /// The recompute ends with the last tensor that backward needs (Rule 5).
  bool early_stop = true;
  /// How recomputed tensors are compared with those of forward.
  DeterminismCheck determinism_check = DeterminismCheck::Metadata;
  /// If set, its text is compared instead of `determinism_check`; called under no-grad once per
  /// saved tensor in each pass, when the operator that saved the tensor has returned.
  std::function<std::string(const at::Tensor&)> fingerprint{};
  /// What happens when a parameter, buffer or captured tensor changed.
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
  /// A second read of a saved tensor in one backward is an error instead of one more recompute.
  bool strict_unpack = false;
  /// What recomputes do to the buffers of the modules below, and of the function where it is a module: a
  /// holder, a (shared) pointer, an `AnyModule`. A `Checkpointed` asks `ModuleOptions::buffers`, too: of
  /// the two the one that is not `Restore` holds.
  BufferPolicy buffers = BufferPolicy::Restore;
  /// Modules that a function calls without being one, a lambda for instance: recomputes see their training flags
  /// and, as `buffers` says, their buffers as forward saw them, and put them back; with all below them.
  /// Read when the region begins; not kept alive. Null is a `c10::ValueError`.
  std::vector<std::shared_ptr<torch::nn::Module>> modules{};
  /// What the region keeps of its tensor arguments.
  InputMode inputs = InputMode::Default;
  /// Shown in errors: where these options were written, which is the call for `checkpoint({.name = "x"}, ...)`. Set by
  /// itself where they are written with braces; not for `CheckpointOptions options;`.
  SourceLocation location = SourceLocation::current();
};

}  // namespace remat
