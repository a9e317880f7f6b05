#pragma once
// Saved-tensor hooks for any C++ program: tensors that autograd saves go through two functions.

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

/// A packed tensor: the result of a pack function, with the function that unpacks it.
class PackedTensor {
 public:
  virtual ~PackedTensor() = default;
  virtual at::Tensor unpack() = 0;
};

/// A pair of user functions, shared by the guard and by every tensor that they packed.
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

/// While alive, every tensor that autograd saves on this thread goes through `pack`. Backward gets
/// it through `unpack` when it needs it. User hooks outside a region see the region's inputs;
/// inside a region they hide the region's own hooks (docs/concepts.md).
///
/// `pack: at::Tensor -> P` for any copyable or movable P; called under no-grad; must not change its
/// argument. `unpack: const P& -> at::Tensor`; may be called more than once, on any thread that
/// runs backward. Both functions live until the guard and every tensor packed under it are gone.
/// `pack` may return its argument or a view of it without a reference cycle; a P that wraps the
/// argument in another type should hold `x.detach()`.
///
/// Throws `c10::Error` with the message of an active `DisableSavedTensorHooksGuard` (or of
/// Python's `disable_saved_tensors_hooks`). Exceptions of the functions keep their type.
/// Source: `torch.autograd.graph.saved_tensors_hooks`.
class REMAT_API SavedTensorHooksGuard : detail::ScopeGuard {
 public:
  /// Opens the scope, and takes the two functions.
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

// The three guards below, and SaveElsewhereGuard of place.h, move tensors that autograd saves on
// this thread. Backward gets them with their dtype, device, sizes, strides and `requires_grad`.
// Common rules:
//
// * Parameters (leaves that require grad), their views, and tensors that are not plain strided
//   ones with data (sparse, nested, quantized, ...) are not moved. A view with less than a quarter
//   of its storage is not moved either, unless it is dense enough; such a view has storage offset 0
//   in backward.
// * A storage is moved once for all its views that are saved at the same version. It is removed
//   from its place with the last of them, also after the guard.
// * If a tensor that was not moved is changed in place, backward raises an error as without
//   hooks. A tensor that was moved has the values of the save. If its copy may come later
//   (`pin_memory`, a place that says so), backward raises an error here too.
// * A tensor that does not require grad is moved when the thread saves for the next operator, or
//   at the guard's end, because the kernel may not have written it yet.
// * Regions treat these guards as any user hooks. Reads may come from any thread, and more than
//   once.

/// Options of a `SaveOnCpuGuard`: which tensors it moves, and how.
struct SaveOnCpuOptions {
  /// Use page-locked memory (up to a quarter of the machine's memory), so that copies run beside
  /// other work. If none is available, use ordinary memory.
  bool pin_memory = false;
  /// Smaller tensors stay [bytes].
  int64_t min_bytes = 0;
  /// `false`: parameters and their views move too.
  bool skip_parameters = true;
  /// Number of copies back that begin ahead of a read, in the reverse order of saving, with
  /// `pin_memory`; 0: none.
  int64_t prefetch_depth = 2;
  /// [bytes] Limit, with `pin_memory`, of originals whose copies are not finished; until then their
  /// memory cannot be reused. A single larger one is allowed. Beyond the limit the program waits
  /// for the oldest copy. Default: no limit.
  int64_t max_bytes_in_flight = std::numeric_limits<int64_t>::max();
  /// Number of most recently saved tensors that stay on the device. Backward reads them first, so
  /// that moving them gains nothing. A storage counts once; a tensor that the program itself holds
  /// does not count. If the number is not 0, a tensor moves when others have been saved after it,
  /// or at the guard's end, and only if the program no longer holds it. A tensor that cannot be
  /// copied stays, with a warning.
  int64_t keep_last = 0;
};

/// Counts of the tensors that one guard has moved since it began.
struct MoveCounts {
  int64_t moves = 0;         ///< copies out
  int64_t bytes_moved = 0;   ///< [bytes] of `moves`
  int64_t loads = 0;         ///< copies back that backward read
  int64_t loads_ahead = 0;   ///< number of `loads` that began before the read
  int64_t bytes_loaded = 0;  ///< [bytes] of `loads`
  /// [seconds] that threads of the program spent on copies in both directions: queueing, copying or
  /// waiting.
  double seconds_waited = 0;
};

/// The counts of one guard, valid also after it. Copies share the counts. Threads: any.
class REMAT_API MoveCounters {
 public:
  MoveCounts now() const;  ///< returns the present counts

 private:
  friend class SaveOnCpuGuard;
  friend class SaveOnDiskGuard;
  explicit MoveCounters(std::shared_ptr<const MoveTotals> totals) : totals_(std::move(totals)) {}
  std::shared_ptr<const MoveTotals> totals_;
};

/// While alive, moves tensors of an accelerator that autograd saves to the CPU. Tensors on the CPU
/// stay as they are.
/// Source: `torch.autograd.graph.save_on_cpu`.
class REMAT_API SaveOnCpuGuard : detail::ScopeGuard {
 public:
  explicit SaveOnCpuGuard(SaveOnCpuOptions options = {});  ///< until the guard ends
  /// Returns the counts of the tensors that this guard has moved.
  MoveCounters counters() const { return MoveCounters(totals_); }

 private:
  SaveOnCpuGuard(const SaveOnCpuOptions& options, std::shared_ptr<MoveTotals> totals);
  std::shared_ptr<MoveTotals> totals_;
};

/// Options of a `SaveOnDiskGuard`: which tensors it moves, and where to.
struct SaveOnDiskOptions {
  std::filesystem::path directory{};  ///< directory of the file; it must exist
  /// Smaller tensors stay [bytes].
  int64_t min_bytes = 1 << 16;
  /// Number of loads that a thread of the library begins ahead of a read, in the reverse order of
  /// saving; 0: none.
  int64_t prefetch_depth = 1;
};

/// While alive, moves tensors that autograd saves to a file: one for the guard, without a name,
/// which only this process can read. Nothing of the file remains after an exception, `_exit` or a
/// kill. Its size is the largest number of bytes that were in it at once; it lives until the guard
/// and all moved tensors are gone.
///
/// Throws `c10::ValueError` if no file can be made in the directory. A full disk is a `c10::Error`
/// of the operator that saves. At the guard's end it is a warning, and the tensor stays in memory.
/// Tensors that were saved before are intact, and the same operator may be tried again.
class REMAT_API SaveOnDiskGuard : detail::ScopeGuard {
 public:
  explicit SaveOnDiskGuard(SaveOnDiskOptions options);  ///< until the guard ends
  /// Returns the counts of the tensors that this guard has moved.
  MoveCounters counters() const { return MoveCounters(totals_); }

 private:
  SaveOnDiskGuard(SaveOnDiskOptions options, std::shared_ptr<MoveTotals> totals);
  std::shared_ptr<MoveTotals> totals_;
};

/// While alive, rounds floating-point tensors that autograd saves to `dtype`. LOSSY: gradients are
/// computed from the rounded numbers. Backward gets the tensors in their own dtype.
///
/// Real numbers are rounded to a real `dtype` and complex ones to a complex `dtype`, and only if it
/// has fewer bytes; integers and booleans stay. A tensor with a finite number that `dtype` cannot
/// hold also stays (60000 fits `at::kHalf`, 70000 does not). Small numbers become 0. On an
/// accelerator the check waits for the device. `min_bytes` [bytes]: smaller tensors stay.
/// Throws `c10::ValueError` for a `dtype` to which numbers cannot be rounded.
class REMAT_API SaveAsGuard : detail::ScopeGuard {
 public:
  explicit SaveAsGuard(at::ScalarType dtype, int64_t min_bytes = 0);  ///< until the guard ends
};

/// While alive, opening saved-tensor hooks or a region on this thread throws `c10::Error` with
/// `message`; nested guards: the innermost message. Its constructor throws the same error if hooks
/// are active already, and leaves them active. Shares LibTorch's switch with Python.
class REMAT_API DisableSavedTensorHooksGuard : detail::ScopeGuard {
 public:
  explicit DisableSavedTensorHooksGuard(std::string message);  ///< until the guard ends
};

}  // namespace remat
