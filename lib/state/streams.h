#pragma once
// The device and streams of a region's forward, and the waits around its recompute.
//
// Note [Streams]
// A recompute runs on the device and streams of its forward. These first wait for work queued on
// the streams of the backward node that asked, which are current until then: the inputs may come
// from there. Each recomputed tensor notes the stream that was current for its device when it was
// saved; at the end one event is recorded on each such stream. A reader that takes a tensor while
// another stream is current makes that stream wait for the event, and reports the use to the
// allocator. A recompute ahead runs on a stream of the library's own instead, one for each device.
// Memory that it reads may be released when its tensors are: a reader has waited for them by then,
// and forward's streams wait for tensors that no code has read.

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "lib/seam/ready.h"

namespace remat {

/// A thread's current device of the accelerator, and its current streams on all devices in use.
struct CurrentStreams {
  c10::Device device;
  c10::SmallVector<c10::Stream, 2> streams;

  /// Returns those of this thread; null if no device is in use.
  static std::unique_ptr<CurrentStreams> here();
};

/// Streams for a recompute ahead, beside those of its forward.
struct StreamsBeside {
  CurrentStreams own;
  CurrentStreams of_forward;

  /// Returns the library's own stream of each device, always the same. Null while work is captured
  /// into a graph, or without forward's streams.
  static std::unique_ptr<const StreamsBeside> of(const CurrentStreams* of_forward);
};

/// Makes forward's device and streams current while alive. Null changes nothing.
class StreamScope {
 public:
  StreamScope(const CurrentStreams* of_forward, c10::ArrayRef<at::Tensor> inputs);
  ~StreamScope();
  StreamScope& operator=(StreamScope&&) = delete;

 private:
  std::unique_ptr<CurrentStreams> before_;
  c10::SmallVector<c10::Stream, 2> replaced_;
};

/// One recompute's Ready objects, one for each stream on which a tensor was made.
class ReadyStreams {
 public:
  /// Returns the Ready of a tensor's stream; null for a tensor without one (on the CPU).
  std::shared_ptr<const Ready> of(const at::Tensor& tensor);
  void record() const;

 private:
  std::vector<std::shared_ptr<Ready>> all_;
};

}  // namespace remat
