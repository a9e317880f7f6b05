#pragma once
// Autocast for a time.

#include <ATen/autocast_mode.h>

namespace remat::testing {

struct AutocastOptions {
  at::DeviceType device = at::kCPU;
  bool enabled = true;
  at::ScalarType dtype = at::kBFloat16;
  bool cache = true;
};

/// Opens autocast as torch.autocast does, and puts it back when it dies.
class Autocast {
 public:
  explicit Autocast(const AutocastOptions& options = {}) : device_(options.device) {
    at::autocast::set_autocast_enabled(device_, options.enabled);
    at::autocast::set_autocast_dtype(device_, options.dtype);
    at::autocast::set_autocast_cache_enabled(options.cache);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_before_);
    at::autocast::set_autocast_cache_enabled(was_cached_);
  }
  Autocast& operator=(Autocast&&) = delete;

 private:
  const at::DeviceType device_;
  const bool was_enabled_ = at::autocast::is_autocast_enabled(device_);
  const bool was_cached_ = at::autocast::is_autocast_cache_enabled();
  const at::ScalarType dtype_before_ = at::autocast::get_autocast_dtype(device_);
};

}  // namespace remat::testing
