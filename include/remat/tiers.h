#pragma once
// Saved tensors in tiers: on their device as long as there is room, then on the CPU, then on disk.

#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>

#include "remat/export.h"
#include "remat/scope.h"

namespace remat {

struct TierTotals;

/// Limits of a `SaveInTiersGuard`: the bytes of saved tensors that each tier may hold.
struct SaveInTiersOptions {
  /// [bytes] Limit of saved tensors that stay on each accelerator, as they are.
  int64_t device_bytes = 0;
  /// [bytes] Limit in the CPU's memory, for copies of accelerators' tensors and for saved tensors
  /// of the CPU, as they are. Default: no limit.
  int64_t host_bytes = std::numeric_limits<int64_t>::max();
  /// Directory of the file for tensors beyond `host_bytes`; it must exist. Empty: no file, and
  /// `host_bytes` must not be given.
  std::filesystem::path directory{};
  /// Smaller tensors stay, and count nowhere [bytes].
  int64_t min_bytes = 1 << 16;
  /// Use page-locked memory (up to a quarter of the machine's memory) for copies between
  /// accelerator and CPU, so that they run beside the program. If none is available, use ordinary
  /// memory.
  bool pin_memory = true;
  /// [bytes] Limit of tensors that are being written to the file; until then their memory is held
  /// in addition to the budgets. Beyond the limit forward waits for the oldest write; a single
  /// larger tensor is allowed.
  int64_t max_bytes_in_flight = 64 << 20;
  /// Number of most recently saved tensors that are not moved, even beyond the budget of their
  /// device. Backward reads them first, so that moving them gains nothing. A storage counts once.
  int64_t keep_last = 0;
};

/// Counts of one guard, now or since it began.
struct TierCounts {
  int64_t bytes_on_host = 0;  ///< [bytes] copies of accelerators' tensors on the CPU now
  int64_t bytes_on_disk = 0;  ///< [bytes] in the file now
  int64_t bytes_to_host = 0;  ///< [bytes] moved to the CPU so far
  int64_t bytes_to_disk = 0;  ///< [bytes] written to the file so far
  int64_t bytes_loaded = 0;   ///< [bytes] loaded back so far
  int64_t loads = 0;          ///< reads that loaded a tensor back
  /// Waits for the file: by backward for a read, or by forward for a write.
  int64_t waits = 0;
  double seconds_waited = 0;  ///< [seconds] of `waits`, in all threads
  int64_t failed_writes = 0;  ///< writes that failed; their tensors stay in memory
};

/// The counts of one guard, valid also after it. Copies share the counts. Threads: any.
class REMAT_API TierCounters {
 public:
  TierCounts now() const;  ///< returns the present counts

 private:
  friend class SaveInTiersGuard;
  explicit TierCounters(std::shared_ptr<const TierTotals> totals) : totals_(std::move(totals)) {}
  std::shared_ptr<const TierTotals> totals_;
};

/// While alive, keeps tensors that autograd saves on this thread on their device within a budget.
/// Beyond it the tensors that were saved first, which backward needs last, move: from an
/// accelerator to the CPU, and from the CPU's memory to a file (without a name and for this process
/// only, as with SaveOnDiskGuard). Backward gets all tensors with their dtype, device, sizes,
/// strides and `requires_grad`. The tensors that it needs next are loaded ahead, as soon as used
/// tensors leave room. Common rules: hooks.h, above SaveOnCpuGuard.
///
///     const remat::SaveInTiersGuard guard(
///         {.device_bytes = 8 << 30, .host_bytes = 32 << 30, .directory = "/nvme"});
///     loss = model->forward(batch);
///
/// Budgets cover tensors that are held for backward alone. A tensor that the program still holds
/// counts once the program has released it; this is checked at the next save, and when the guard
/// ends. A storage counts once. One read of backward may load one tensor more than there is room
/// for. Around a region the guard applies to its inputs; inside a region it has no effect, as with
/// all hooks.
///
/// If a saved tensor was changed in place, backward raises an error as without the guard, in every
/// tier. A tensor that cannot be written to the file (a full disk) stays in memory, with a warning.
/// Throws `c10::ValueError` for a negative number, for `host_bytes` without a directory, and if no
/// file can be made there.
class REMAT_API SaveInTiersGuard : detail::ScopeGuard {
 public:
  /// Opens the scope; the destructor closes it.
  explicit SaveInTiersGuard(const SaveInTiersOptions& options);
  /// Returns the counts of the tensors that the guard's tiers hold and have moved.
  TierCounters counters() const { return TierCounters(totals_); }

 private:
  SaveInTiersGuard(const SaveInTiersOptions& options, std::shared_ptr<TierTotals> totals);
  std::shared_ptr<TierTotals> totals_;
};

}  // namespace remat
