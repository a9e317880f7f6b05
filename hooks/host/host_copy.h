#pragma once
// Bytes of an accelerator's tensor in ordinary memory of the host, copied beside the program and
// without page-locked memory of their size.
//
// Note [Copies in chunks]
// Copies from and to ordinary memory block the calling thread. Therefore the thread of Background
// makes them, on the streams for copies. It copies in chunks through two page-locked buffers, which
// the pool reserves for this purpose. Without such buffers it copies each chunk directly from
// ordinary memory. The original is held until it is copied. No event tells the allocator when its
// memory may be reused, so the whole process holds at most a fixed number of bytes. Beyond that the
// program waits for the oldest copy, or makes it itself if it has not begun.
//
// A copy out that fails leaves the tensor on its device, with a warning. The tensor counts as moved
// by then, and is read from the device. For tensors that must arrive (a policy's MustCpuOffload,
// until its region's forward ends) a failure is an error, if it is known by then. A copy that has
// not begun when backward needs the tensor is left out.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "hooks/host/background.h"
#include "hooks/host/copies_in_flight.h"
#include "hooks/host/save_on_cpu.h"
#include "lib/seam/ready.h"

namespace remat {

/// The streams for copies, one for each direction.
struct CopyStreams {
  c10::Stream out, in;
};
/// Returns the same streams each time. Empty if the backend has no streams to give.
std::optional<CopyStreams> copy_streams(c10::Device device);

/// A copy of host bytes to a device, on the thread of Background.
class DeviceLoad {
 public:
  DeviceLoad() = default;
  ~DeviceLoad() { cancel(); }
  DeviceLoad& operator=(DeviceLoad&&) = delete;

  /// Begins the copy. `bytes` runs on that thread and returns ordinary memory, or an undefined
  /// tensor if no copy is needed. Throws if the device has no memory left.
  void begin(std::function<at::Tensor()> bytes, int64_t size, const c10::Stream& in,
             c10::Device device);
  bool is_begun() const { return job_ != nullptr; }
  bool is_over() const { return is_begun() && job_->is_over(); }
  /// Returns the copy, ready for use on the current stream, or an undefined tensor. Throws the
  /// error of `bytes` or of the copy. Afterwards `begin` may be called again.
  at::Tensor finish();
  void cancel();

 private:
  struct Target;
  std::shared_ptr<Target> target_;
  std::shared_ptr<Background::Job> job_;
};

class HostCopy final : public HostContents {
 public:
  /// Begins the copy out. `in_flight`: that of the place; may be null. Throws if the host has no
  /// memory left.
  HostCopy(const CopyStreams& streams, const at::Tensor& flat, CopiesInFlight* in_flight);
  ~HostCopy() override;
  HostCopy& operator=(HostCopy&&) = delete;

  bool is_stored_late() const override { return true; }
  void finish_store() override;
  void begin_load() override;
  at::Tensor finish_load() override;
  void cancel_load() override;
  at::Tensor bytes_on_host() const override;
  void set_must_arrive(bool must) override { must_arrive_ = must; }
  void check_arrival() override;
  bool is_store_over() const override { return job_->is_over(); }
  void wait_for_store() const override { job_->wait(); }
  bool holds_original() const override;

 private:
  class Out;

  const CopyStreams streams_;
  const std::shared_ptr<Out> out_;
  std::shared_ptr<Background::Job> job_;  ///< makes the copy
  DeviceLoad load_;
  std::atomic<bool> must_arrive_{false};
};

}  // namespace remat
