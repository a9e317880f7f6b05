#pragma once
// The stream that is current on this thread for a device.

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace remat {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// While alive, makes a stream the current one of its device.
class OnStream {
 public:
  explicit OnStream(const c10::Stream& stream)
      : guard_(stream.device_type()), before_(guard_.exchangeStream(stream)) {}
  ~OnStream() { guard_.exchangeStream(before_); }
  OnStream& operator=(OnStream&&) = delete;

 private:
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream before_;
};

}  // namespace remat
