#pragma once
// Bytes of an accelerator's tensor in ordinary memory of the host, copied beside the program
// without page-locked memory of that size.
//
// Note [Copies in chunks]
// Copies from and to ordinary memory make the thread wait that asks for them. So the thread of
// Background does: on the streams for copies, in chunks that go through two page-locked buffers,
// which the pool has for this when all else is taken; without any, chunk by chunk straight from
// ordinary memory. The original is held until it is copied. As no event tells the allocator when it
// may use that memory again, no more than a bound is held in the whole process: beyond that the
// program waits for the oldest copy, or makes it itself if nobody has begun it.
//
// A copy out that fails leaves the tensor where it is, with a warning; it has been given out as
// moved by then, and is read from where it is. Of what must arrive (a policy's MustCpuOffload,
// until its region's forward ends) it is an error, if it is known by then. One that nobody has
// begun when backward asks for it is left out.

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

/// One stream for each direction.
struct CopyStreams {
  c10::Stream out, in;
};
/// The same ones each time. None where the backend gives out no streams.
std::optional<CopyStreams> copy_streams(c10::Device device);

/// Bytes of the host on their way to a device, on the thread of Background.
class DeviceLoad {
 public:
  DeviceLoad() = default;
  ~DeviceLoad() { cancel(); }
  DeviceLoad& operator=(DeviceLoad&&) = delete;

  /// `bytes` says where they are, on that thread: ordinary memory, undefined for nothing to be
  /// copied. Throws if there is no memory of the device.
  void begin(std::function<at::Tensor()> bytes, int64_t size, const c10::Stream& in,
             c10::Device device);
  bool is_begun() const { return job_ != nullptr; }
  bool is_over() const { return is_begun() && job_->is_over(); }
  /// The copy, fit for use on the stream that is current; or undefined. Throws what `bytes` or
  /// copying threw. Afterwards it may be begun again.
  at::Tensor finish();
  void cancel();

 private:
  struct Target;
  std::shared_ptr<Target> target_;
  std::shared_ptr<Background::Job> job_;
};

class HostCopy final : public HostContents {
 public:
  /// `in_flight`: of the place, may be null. Throws if there is no memory of the host.
  HostCopy(const CopyStreams& streams, const at::Tensor& flat, CopiesInFlight* in_flight);
  ~HostCopy() override;
  HostCopy& operator=(HostCopy&&) = delete;

  bool is_stored_late() const override { return true; }
  void finish_store() override;
  void begin_load() override;
  at::Tensor finish_load() override;
  void cancel_load() override;
  at::Tensor bytes_on_host() const override;
  at::Tensor host_memory() const override;
  void set_must_arrive(bool must) override { must_arrive_ = must; }
  void check_arrival() override;
  bool is_store_over() const override { return job_->is_over(); }
  void wait_for_store() const override { job_->wait(); }
  bool holds_original() const override;

 private:
  class Out;

  const CopyStreams streams_;
  const std::shared_ptr<Out> out_;
  std::shared_ptr<Background::Job> job_;  ///< which makes it
  DeviceLoad load_;
  std::atomic<bool> must_arrive_{false};
};

}  // namespace remat
