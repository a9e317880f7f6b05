#pragma once
// A place for saved tensors that leave their device: on the CPU up to a budget, beyond that in a
// file.
//
// Note [The tiers]
// A Depot with a budget (Note [What stays]) moves tensors that exceed the device's budget to this
// place. Tensors of an accelerator are copied to the CPU and count there. When the CPU has too many
// bytes, the oldest are written to the file and leave the CPU. Tensors of the CPU itself stay in
// their own memory, count in the same budget, and are written to the file from there. Background
// does all writing. The memory is freed after the write, and a limit bounds the bytes that wait for
// it. Background also reads, and copies to the device in chunks (Note [Copies in chunks]): a load
// that begins ahead waits for neither. A tensor that cannot be written (a full disk) stays in
// memory, with one warning: no data is lost.

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "hooks/depot/comparable_place.h"
#include "hooks/disk/spool.h"
#include "hooks/host/save_on_cpu.h"
#include "remat/tiers.h"

namespace remat {

/// The counts of a guard's tiers, shared with its counters.
struct TierTotals {
  std::atomic<int64_t> to_host{0}, to_disk{0}, loaded{0}, num_loads{0}, num_waits{0}, waited_ns{0};
  std::atomic<int64_t> on_host{0}, on_disk{0}, num_failed_writes{0};
  std::atomic<int64_t> not_leaving_host{0};  ///< bytes on the CPU whose write has not begun
};

class SaveInTiers final : public ComparablePlace {
 public:
  SaveInTiers(const SaveInTiersOptions& options, std::shared_ptr<TierTotals> totals);

  bool takes(const at::Tensor& tensor) const override { return has_disk() || !tensor.is_cpu(); }
  std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) override;

 private:
  class OnHost;
  bool has_disk() const { return spool_ != nullptr; }
  void spill();

  const int64_t host_bytes_, max_bytes_in_flight_;
  const bool pin_memory_;
  const SaveOnCpu cpu_;
  const std::shared_ptr<Spool> spool_;
  const std::shared_ptr<TierTotals> totals_;
  std::mutex mutex_;
  std::deque<std::weak_ptr<OnHost>> on_host_;   ///< oldest first
  std::deque<std::weak_ptr<OnHost>> spilling_;  ///< oldest first
};

}  // namespace remat
