#pragma once
// Saved-tensor hooks for any C++ program: what autograd saves goes through two functions.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "remat/export.h"
#include "remat/scope.h"

namespace remat {

struct MoveTotals;  // hooks/depot/move_totals.h

namespace detail {

/// A packed tensor: what a pack function returned, and how to unpack it.
class PackedTensor {
 public:
  virtual ~PackedTensor() = default;
  virtual at::Tensor unpack() = 0;
};

/// A pair of user functions; shared by the guard and by every tensor it packed.
class HookPair {
 public:
  virtual ~HookPair() = default;
  virtual std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) = 0;
};

/// Returns the form in which a tensor that a pack function returned is stored.
/// See Note [Identity packs].
REMAT_API at::Tensor without_history(const at::Tensor& packed);

template <class Pack, class Unpack>
class HookPairOf final : public HookPair {
 public:
  HookPairOf(Pack pack, Unpack unpack)
      : pack_(std::move(pack)), unpack_(std::make_shared<Unpack>(std::move(unpack))) {}

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    using Packed = std::decay_t<std::invoke_result_t<Pack&, at::Tensor>>;
    if constexpr (std::same_as<Packed, at::Tensor>) {
      return std::make_unique<Slot<Packed>>(without_history(pack_(tensor)), unpack_);
    } else {
      return std::make_unique<Slot<Packed>>(pack_(tensor), unpack_);
    }
  }

 private:
  template <class Packed>
  class Slot final : public PackedTensor {
   public:
    Slot(Packed packed, std::shared_ptr<Unpack> unpack)
        : packed_(std::move(packed)), unpack_(std::move(unpack)) {}
    at::Tensor unpack() override { return (*unpack_)(std::as_const(packed_)); }

   private:
    Packed packed_;
    std::shared_ptr<Unpack> unpack_;
  };

  Pack pack_;
  std::shared_ptr<Unpack> unpack_;
};

}  // namespace detail

/// While alive, every tensor that autograd saves on this thread goes through `pack`, and comes
/// back through `unpack` when backward asks for it (user hooks outside a region see the
/// region's inputs; inside a region they hide the region's own hooks: docs/concepts.md).
///
/// `pack: at::Tensor -> P` for any copyable or movable P; called under no-grad; it must not change
/// its argument. `unpack: const P& -> at::Tensor`; may be called more than once, on any thread
/// that runs backward. Both functions live until the guard and every tensor packed under it are
/// gone. Returning the argument or a view of it from `pack` makes no reference cycle; a P that
/// wraps it in another type should hold `x.detach()`.
///
/// Throws `c10::Error` with the message of an active `DisableSavedTensorHooksGuard` (or of
/// Python's `disable_saved_tensors_hooks`). Exceptions of the functions keep their type.
/// Source: `torch.autograd.graph.saved_tensors_hooks`.
class REMAT_API SavedTensorHooksGuard : detail::ScopeGuard {
 public:
  /// Until the guard ends. Takes the two functions.
  template <class Pack, class Unpack>
  SavedTensorHooksGuard(Pack pack, Unpack unpack)
      : SavedTensorHooksGuard(
            std::shared_ptr<detail::HookPair>(std::make_shared<detail::HookPairOf<Pack, Unpack>>(
                std::move(pack), std::move(unpack)))) {
    static_assert(std::is_invocable_v<Pack&, at::Tensor>, "pack must accept an at::Tensor");
    using Packed = std::decay_t<std::invoke_result_t<Pack&, at::Tensor>>;
    static_assert(std::is_invocable_r_v<at::Tensor, Unpack&, const Packed&>,
                  "unpack must accept what pack returns, by const reference, and return a tensor");
  }

 private:
  explicit SavedTensorHooksGuard(std::shared_ptr<detail::HookPair> pair);
};

// The three guards below, and SaveElsewhereGuard of place.h, move what autograd saves on this
// thread, and backward gets it back with its dtype, device, sizes, strides and `requires_grad`.
// Common to them:
//
// * Parameters (leaves that require grad), their views, and whatever is not a plain strided tensor
//   with data (sparse, nested, quantized, ...) stay where they are, and so does a view with less
//   than a quarter of a storage unless it is dense enough. Such a view comes back at storage offset
//   0.
// * A storage is moved once for all views that are saved of it at the same version, and gone from
//   its place with the last of them, also after the guard.
// * A tensor that stays and is changed in place raises in backward as without hooks. One that was
//   moved has the values of the save; where the copy may come later (`pin_memory`, a place that
//   says so) it raises too.
// * A tensor that does not require grad is moved when the thread saves for the next operator, or at
//   the guard's end: the kernel may have yet to write it.
// * Regions: as any user hooks. Reads may come from any thread, and more than once.

/// Options of a `SaveOnCpuGuard`: the tensors that it moves, and how.
struct SaveOnCpuOptions {
  /// Use page-locked memory (up to a quarter of the machine's), for copies beside the work. Where
  /// there is none, ordinary memory.
  bool pin_memory = false;
  /// Smaller tensors stay [bytes].
  int64_t min_bytes = 0;
  /// `false`: parameters and their views move too.
  bool skip_parameters = true;
  /// Number of copies back, with `pin_memory`, that are begun ahead of the one that is read, in the
  /// reverse order of saving; 0: none.
  int64_t prefetch_depth = 2;
  /// [bytes] Limit, with `pin_memory`, of the originals whose copies are not done, so that their
  /// memory cannot be used again; a single larger one is allowed. Beyond it the program waits for
  /// the oldest copy. Default: no limit.
  int64_t max_bytes_in_flight = std::numeric_limits<int64_t>::max();
  /// Number of most recently saved tensors that stay on the device: backward asks for them first,
  /// so that moving them gains nothing. A storage counts once; a tensor that the program itself
  /// holds does not count. If the number is not 0, a tensor moves when others have been saved after
  /// it, or at the guard's end, and only if the program does not hold it then. A tensor that cannot
  /// be copied stays, with a warning.
  int64_t keep_last = 0;
};

/// Counts of the tensors that one guard has moved since it began.
struct MoveCounts {
  int64_t moves = 0;         ///< copies out
  int64_t bytes_moved = 0;   ///< [bytes] of these
  int64_t loads = 0;         ///< copies back that somebody asked for
  int64_t loads_ahead = 0;   ///< of these, those that were begun before that
  int64_t bytes_loaded = 0;  ///< [bytes] of `loads`
  /// That threads of the program spent on both: queueing copies, copying or waiting.
  double seconds_waited = 0;
};

/// The counts of one guard; also after it. Copies count the same. Threads: any.
class REMAT_API MoveCounters {
 public:
  MoveCounts now() const;  ///< what they are at this moment

 private:
  friend class SaveOnCpuGuard;
  friend class SaveOnDiskGuard;
  explicit MoveCounters(std::shared_ptr<const MoveTotals> totals) : totals_(std::move(totals)) {}
  std::shared_ptr<const MoveTotals> totals_;
};

/// While alive, tensors of an accelerator that autograd saves wait on the CPU. Tensors on the CPU
/// stay as they are. Source: `torch.autograd.graph.save_on_cpu`.
class REMAT_API SaveOnCpuGuard : detail::ScopeGuard {
 public:
  explicit SaveOnCpuGuard(SaveOnCpuOptions options = {});  ///< until the guard ends
  /// Returns the counts of the tensors that this guard has moved.
  MoveCounters counters() const { return MoveCounters(totals_); }

 private:
  SaveOnCpuGuard(const SaveOnCpuOptions& options, std::shared_ptr<MoveTotals> totals);
  std::shared_ptr<MoveTotals> totals_;
};

/// Options of a `SaveOnDiskGuard`: the tensors that it moves, and where to.
struct SaveOnDiskOptions {
  std::filesystem::path directory{};  ///< of the file; it must exist
  /// Smaller tensors stay [bytes].
  int64_t min_bytes = 1 << 16;
  /// How many reads are begun ahead of the one that is asked for, in the reverse order of saving,
  /// by a thread of the library's; 0: none.
  int64_t prefetch_depth = 1;
};

/// While alive, tensors that autograd saves wait in a file: one for the guard, with no name, which
/// only this process can read. Nothing is left of it after an exception, `_exit` or a kill. It
/// takes as many bytes as waited at the same time, until the guard and all that waits are gone.
///
/// Throws `c10::ValueError` if no file can be made in the directory. A full disk is a `c10::Error`
/// of the operator that saves (at the guard's end a warning: the tensor stays in memory); what was
/// saved before is intact, and the same may be tried again.
class REMAT_API SaveOnDiskGuard : detail::ScopeGuard {
 public:
  explicit SaveOnDiskGuard(SaveOnDiskOptions options);  ///< until the guard ends
  /// Returns the counts of the tensors that this guard has moved.
  MoveCounters counters() const { return MoveCounters(totals_); }

 private:
  SaveOnDiskGuard(SaveOnDiskOptions options, std::shared_ptr<MoveTotals> totals);
  std::shared_ptr<MoveTotals> totals_;
};

/// While alive, floating-point tensors that autograd saves are rounded to `dtype`. LOSSY: gradients
/// are computed from the rounded numbers. Backward gets them in their own dtype.
///
/// Real numbers are rounded to a real `dtype`, complex ones to a complex one, and only to one with
/// fewer bytes; integers and booleans stay. So does a tensor with a finite number that `dtype`
/// cannot hold (60000 fits `at::kHalf`, 70000 does not). Small numbers become 0. On an accelerator
/// the check waits for the device. `min_bytes`: smaller tensors stay. Throws `c10::ValueError` for
/// a `dtype` that numbers cannot be rounded to.
class REMAT_API SaveAsGuard : detail::ScopeGuard {
 public:
  explicit SaveAsGuard(at::ScalarType dtype, int64_t min_bytes = 0);  ///< until the guard ends
};

/// While alive, opening saved-tensor hooks or a region on this thread throws `c10::Error` with
/// `message`; nested guards: the innermost message. Its constructor throws the same when hooks are
/// active already, and leaves them active. Shares LibTorch's switch with Python.
class REMAT_API DisableSavedTensorHooksGuard : detail::ScopeGuard {
 public:
  explicit DisableSavedTensorHooksGuard(std::string message);  ///< until the guard ends
};

}  // namespace remat
