#pragma once
// Saved tensors of an accelerator in the memory of the host.
//
// Note [Copies beside the work]
// With page-locked memory, copies run on two streams of their own for each device, one for each
// direction. Out: that stream waits for what was queued when the tensor was saved, copies, and the
// allocator is told that the device memory is in use there; forward goes on meanwhile. If forward
// writes to that memory, the copy may have the new values: so a tensor that was changed in place
// after it was saved raises when it is read, as in plain autograd. In: that stream waits for the
// copy out, copies into new device memory, and the stream that asked waits for it. Copies in are
// begun ahead: Note [Prefetching]. Host memory that is given back goes with the events of the
// copies that may still use it: the next copy into it waits. How many bytes may be on their way out
// can be bounded: Note [Bytes in flight].
//
// Where that is short, or this accelerator has none, ordinary memory serves, beside the work, too
// (Note [Copies in chunks]). Where none is asked for copies are made on the current stream, and the
// program waits.

#include <cstdint>
#include <limits>
#include <memory>

#include "hooks/host/copies_in_flight.h"
#include "remat/place.h"

namespace remat {

/// Contents on the CPU.
class HostContents : public StoredContents {
 public:
  /// The bytes, once they are there; waits for the copy. Valid while this lives. Any thread, also
  /// beside loads.
  virtual at::Tensor bytes_on_host() const = 0;
  /// Where they will be. Does not wait.
  virtual at::Tensor host_memory() const = 0;
  /// Until it is told otherwise it is an error of `finish_store` and `check_arrival` that they
  /// cannot be copied, where else it would be a warning.
  virtual void set_must_arrive(bool /*must*/) {}
  /// Throws that if it is known by now. Does not wait.
  virtual void check_arrival() {}
  /// Returns whether the copy has ended; after a failure `holds_original` stays true. Never waits.
  virtual bool is_store_over() const { return true; }
  /// Waits for that end. Runs operators only where `holds_original` was true after the store began.
  virtual void wait_for_store() const {}
  /// Whether it has a reference of its own to the original's storage.
  virtual bool holds_original() const { return false; }
};

class SaveOnCpu final : public Place {
 public:
  static constexpr int64_t unbounded = std::numeric_limits<int64_t>::max();
  /// `max_bytes_in_flight`: of copies that run beside the work.
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
