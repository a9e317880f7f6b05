#pragma once
// A place that stores saved tensors of an accelerator in the host's memory.
//
// Note [Copies beside the work]
// With page-locked memory, copies run on two separate streams for each device, one for each
// direction.
// Out: the stream waits for the work that was queued when the tensor was saved, and copies. The
// allocator is told that this stream uses the device memory; forward continues meanwhile. If
// forward writes to that memory, the copy may have the new values. Therefore a read of a tensor
// that was changed in place after its save raises an error, as in plain autograd.
// In: the stream waits for the copy out and copies into new device memory; the reading stream waits
// for it. Copies in begin ahead: Note [Prefetching].
// Freed host memory carries the events of the copies that may still use it, and the next copy into
// it waits. The bytes of running copies out can be limited: Note [Bytes in flight].
//
// If page-locked memory is short, or this accelerator has none, ordinary memory is used, also
// beside other work (Note [Copies in chunks]). Without `pin_memory`, copies run on the current
// stream, and the program waits.

#include <cstdint>
#include <limits>
#include <memory>

#include "hooks/host/copies_in_flight.h"
#include "remat/place.h"

namespace remat {

/// Contents on the CPU.
class HostContents : public StoredContents {
 public:
  /// Waits for the copy and returns the bytes, which are valid while this object lives. Any thread,
  /// also beside loads.
  virtual at::Tensor bytes_on_host() const = 0;
  /// Sets whether a failed copy is an error of `finish_store` and `check_arrival` instead of a
  /// warning.
  virtual void set_must_arrive(bool /*must*/) {}
  /// Throws that error if it is known by now. Does not wait.
  virtual void check_arrival() {}
  /// Returns whether the copy has ended; after a failure `holds_original` stays true. Never waits.
  virtual bool is_store_over() const { return true; }
  /// Waits for that end. Runs operators only where `holds_original` was true after the store began.
  virtual void wait_for_store() const {}
  /// Returns whether this object has its own reference to the original's storage.
  virtual bool holds_original() const { return false; }
};

class SaveOnCpu final : public Place {
 public:
  static constexpr int64_t unbounded = std::numeric_limits<int64_t>::max();
  /// Makes a place. `max_bytes_in_flight`: limit of the copies that run beside other work.
  explicit SaveOnCpu(bool pin_memory, int64_t max_bytes_in_flight = unbounded)
      : pin_memory_(pin_memory),
        in_flight_(max_bytes_in_flight == unbounded
                       ? nullptr
                       : std::make_unique<CopiesInFlight>(max_bytes_in_flight)) {}
  bool takes(const at::Tensor& tensor) const override { return !tensor.is_cpu(); }
  std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) override {
    return begin_host_store(flat);
  }
  std::shared_ptr<HostContents> begin_host_store(const at::Tensor& flat) const;

 private:
  const bool pin_memory_;
  const std::unique_ptr<CopiesInFlight> in_flight_;  ///< null: no bound
};

}  // namespace remat
