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

/// How much of what autograd saves may be where.
struct SaveInTiersOptions {
  /// Bytes that may stay on each accelerator, as they are.
  int64_t device_bytes = 0;
  /// Bytes that may be in the CPU's memory: copies of accelerators' tensors, and saved tensors of
  /// the CPU's own, as they are. Default: no limit.
  int64_t host_bytes = std::numeric_limits<int64_t>::max();
  /// Directory of the file for tensors beyond `host_bytes`; it must exist. Empty: no file, and
  /// `host_bytes` must not be given.
  std::filesystem::path directory{};
  /// Smaller tensors stay, and count nowhere [bytes].
  int64_t min_bytes = 1 << 16;
  /// Copies between accelerator and CPU use page-locked memory (up to a quarter of the machine's),
  /// beside the program. Where there is none, ordinary memory.
  bool pin_memory = true;
  /// Beyond the budgets: what is on its way to the file is in memory until it is written. Beyond so
  /// many bytes forward waits for the oldest; a single one may be larger.
  int64_t max_bytes_in_flight = 64 << 20;
  /// Number of most recently saved tensors that are not moved, also beyond the budget of their
  /// device: backward asks for them first, so that moving them gains nothing. A storage counts
  /// once.
  int64_t keep_last = 0;
};

/// Counts of one guard, now or since it began.
struct TierCounts {
  int64_t bytes_on_host = 0;  ///< copies of accelerators' tensors that are on the CPU now
  int64_t bytes_on_disk = 0;  ///< ... that are in the file now
  int64_t bytes_to_host = 0;  ///< moved to the CPU so far
  int64_t bytes_to_disk = 0;  ///< written so far
  int64_t bytes_loaded = 0;   ///< brought back so far
  int64_t loads = 0;          ///< reads that brought something back
  int64_t waits =
      0;  ///< for the file: reads that had not ended when backward came, writes that forward waited for
  double seconds_waited = 0;  ///< in all threads
  int64_t failed_writes = 0;  ///< what they were to move stays in memory
};

/// The counts of one guard; also after it. Copies count the same. Threads: any.
class REMAT_API TierCounters {
 public:
  TierCounts now() const;  ///< what they are at this moment

 private:
  friend class SaveInTiersGuard;
  explicit TierCounters(std::shared_ptr<const TierTotals> totals) : totals_(std::move(totals)) {}
  std::shared_ptr<const TierTotals> totals_;
};

/// While alive, what autograd saves on this thread stays where it is as long as that takes no more
/// than a budget. Beyond it what was saved first, which backward needs last, moves on: from an
/// accelerator to the CPU, and from the CPU's memory to a file (as with SaveOnDiskGuard: without a
/// name, for this process only). Backward gets all back with its dtype, device, sizes, strides and
/// `requires_grad`; what it will need next is brought back ahead, as soon as what it has used
/// leaves room. Common rules: hooks.h, above SaveOnCpuGuard.
///
///     const remat::SaveInTiersGuard guard({.device_bytes = 8 << 30, .host_bytes = 32 << 30, .directory = "/nvme"});
///     loss = model->forward(batch);
///
/// Budgets are of what is held for backward alone: what the program itself still holds counts when
/// it has let go of it, and is looked at when something else is saved, or the guard ends. A storage
/// counts once. One read of backward may bring back one tensor more than there is room for. Around
/// a region: its inputs. Inside one: nothing, as with all hooks.
///
/// A saved tensor that is changed in place raises in backward as without the guard, wherever it is.
/// What cannot be written to the file (a full disk) stays in memory, with a warning.
/// Throws `c10::ValueError` for a negative number, for `host_bytes` without a directory, and if no
/// file can be made there.
class REMAT_API SaveInTiersGuard : detail::ScopeGuard {
 public:
  /// Until the guard ends.
  explicit SaveInTiersGuard(const SaveInTiersOptions& options);
  /// Returns the counts of the tensors that this guard's tiers hold and have moved.
  TierCounters counters() const { return TierCounters(totals_); }

 private:
  SaveInTiersGuard(const SaveInTiersOptions& options, std::shared_ptr<TierTotals> totals);
  std::shared_ptr<TierTotals> totals_;
};

}  // namespace remat
