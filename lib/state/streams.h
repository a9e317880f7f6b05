#pragma once
// The device and streams of a region's forward, and who waits for whom around its recompute.
//
// Note [Streams]
// A recompute runs on the device and the streams that forward ran on. These first wait for what was
// queued on the streams of the backward node that asked, which are current until then: its inputs
// may come from there. Each recomputed tensor notes the stream that was current for its device when
// it was saved; at the end one event is recorded on each. Whoever takes a tensor while another
// stream is current makes that stream wait for the event, and tells the allocator of the use.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "lib/seam/ready.h"

namespace remat {

/// A thread has a current device of the accelerator, and a current stream of each of its devices in
/// use.
struct CurrentStreams {
  c10::Device device;
  c10::SmallVector<c10::Stream, 2> streams;

  /// Returns null where no device is in use.
  static std::unique_ptr<CurrentStreams> here();
};

/// While alive the device and streams are those of forward. Null: nothing is changed.
class StreamScope {
 public:
  StreamScope(const CurrentStreams* of_forward, c10::ArrayRef<at::Tensor> inputs);
  ~StreamScope();
  StreamScope& operator=(StreamScope&&) = delete;

 private:
  std::unique_ptr<CurrentStreams> before_;
  c10::SmallVector<c10::Stream, 2> replaced_;
};

/// One recompute has a Ready for each stream on which a tensor was made.
class ReadyStreams {
 public:
  /// Returns null for a tensor that is on no stream (on the CPU).
  std::shared_ptr<const Ready> of(const at::Tensor& tensor);
  void record() const;

 private:
  std::vector<std::shared_ptr<Ready>> all_;
};

}  // namespace remat
