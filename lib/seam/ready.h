#pragma once
// An event at which the earlier work of one stream is done.

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "lib/seam/in_flight.h"
#include "lib/seam/on_stream.h"

namespace remat {

class Ready final : public InFlight {
 public:
  explicit Ready(c10::Stream stream) : stream_(stream), event_(stream.device_type()) {}
  const c10::Stream& stream() const { return stream_; }
  void record() { event_.record(stream_); }
  void block(const c10::Stream& waiting) const {
    if (waiting != stream_) event_.block(waiting);
  }
  void synchronize() const override { event_.synchronize(); }
  bool is_over() const override { return event_.query(); }
  /// Makes the result of the work usable on the current stream of its device. `storage`: memory of
  /// the result, whose use is recorded with the allocator.
  void wait_before_use(const c10::Storage& storage) const {
    if (const auto current = block_current())
      c10::impl::VirtualGuardImpl(stream_.device_type())
          .recordDataPtrOnStream(storage.data_ptr(), *current);
  }
  void wait_before_use(const at::Tensor& tensor) const {
    if (tensor.has_storage())
      wait_before_use(tensor.storage());
    else
      block_current();
  }

 private:
  /// Makes the current stream wait, if it is another one, and returns it.
  std::optional<c10::Stream> block_current() const {
    const c10::Stream current = current_stream(stream_.device());
    if (current == stream_) return std::nullopt;
    event_.block(current);
    return current;
  }

  const c10::Stream stream_;
  c10::Event event_;
};

}  // namespace remat
