#pragma once
// The device and precision of an example: --device NAME and --dtype NAME.

#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <string>

#include "command_line.h"
#include "device.h"

#define REMAT_TARGET_USAGE                                                      \
  "  --device NAME  where to run: cpu, cuda, cuda:1, xpu, ... (default: cpu)\n" \
  "  --dtype NAME   float32, or bfloat16 by autocast (default: float32)\n"

struct Target {
  torch::Device device = torch::kCPU;
  torch::ScalarType dtype = torch::kFloat;
  bool has_float64 = false;  // whether --dtype may be float64

  // Takes one of the two options. Returns whether `name` was one.
  template <class Value>
  bool take(const std::string& name, const Value& value) {
    if (name == "--device") {
      device = usable_device(value());
    } else if (name == "--dtype") {
      const std::string dtype_name = value();
      const bool is_float64 = has_float64 && dtype_name == "float64";
      if (!is_float64 && dtype_name != "float32" && dtype_name != "bfloat16")
        throw UsageError(std::string("--dtype is ") + (has_float64 ? "'float64', " : "") +
                         "'float32' or 'bfloat16', got '" + dtype_name + "'");
      dtype = is_float64                 ? torch::kDouble
              : dtype_name == "bfloat16" ? torch::kBFloat16
                                         : torch::kFloat;
    } else {
      return false;
    }
    return true;
  }

  // Returns whether sums have one order: kernels of an accelerator may add in another order each
  // time, but those of the CPU here do not.
  bool is_reproducible() const { return device.is_cpu(); }
  // Returns the options of parameters and inputs.
  torch::TensorOptions options() const {
    return torch::TensorOptions(device).dtype(dtype == torch::kBFloat16 ? torch::kFloat : dtype);
  }
  std::string dtype_name() const {
    return dtype == torch::kDouble ? "float64" : dtype == torch::kFloat ? "float32" : "bfloat16";
  }
  std::string name() const {
    return device.str() + ", " + dtype_name() + (dtype == torch::kBFloat16 ? " by autocast" : "");
  }
  // Waits until the device has done the work queued on the current stream.
  void wait() const {
    if (device.is_cpu()) return;
    c10::Event event(device.type());
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    event.synchronize();
  }
};

// Autocast to the target's precision for its lifetime. A weight is cast at each use: autocast's
// cache would keep casts longer than their stage.
class Autocast {
 public:
  explicit Autocast(const Target& target)
      : type_(target.device.type()),
        was_enabled_(at::autocast::is_autocast_enabled(type_)),
        was_cached_(at::autocast::is_autocast_cache_enabled()),
        dtype_before_(at::autocast::get_autocast_dtype(type_)) {
    at::autocast::set_autocast_enabled(type_, target.dtype == torch::kBFloat16);
    at::autocast::set_autocast_dtype(type_, torch::kBFloat16);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~Autocast() {
    at::autocast::set_autocast_cache_enabled(was_cached_);
    at::autocast::set_autocast_dtype(type_, dtype_before_);
    at::autocast::set_autocast_enabled(type_, was_enabled_);
  }
  Autocast& operator=(Autocast&&) = delete;

 private:
  const torch::DeviceType type_;
  const bool was_enabled_, was_cached_;
  const torch::ScalarType dtype_before_;
};
