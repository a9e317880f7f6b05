#pragma once
// Saved tensors that leave their device: on the CPU up to a budget, beyond that in a file.
//
// Note [The tiers]
// A Depot with a budget (Note [What stays]) gives a place what is too much for the device. What
// comes from an accelerator is copied to the CPU, and counts there; when the CPU has too much, what
// came first is written to the file and leaves the CPU. What the CPU has saved itself waits in its
// own memory, at the expense of the same budget, and goes to the file from there. All writing is
// done by Background; the memory is given back when it is done, and no more than a bound waits for
// that. So is reading, and with it the copy to the device, in chunks (Note [Copies in chunks]):
// with a load begun ahead neither is waited for. What cannot be written (a full disk) stays where
// it is, with one warning: nothing is lost.

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

/// What a guard's tiers count; shared with its counters.
struct TierTotals {
  std::atomic<int64_t> to_host{0}, to_disk{0}, loaded{0}, num_loads{0}, num_waits{0}, waited_ns{0};
  std::atomic<int64_t> on_host{0}, on_disk{0}, num_failed_writes{0};
  std::atomic<int64_t> not_leaving_host{0};  ///< of those on the CPU, what no write was begun for
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
