#pragma once
// Devices in the forms that Python programs give.

#include <torch/csrc/Device.h>

#include <c10/core/Device.h>

#include "python.h"

namespace remat::python {

/// A `torch.device`, a text or a number, as torch's own functions take them. None: the CPU. Throws
/// py::error_already_set.
inline c10::Device device_in(const py::object& device) {
  if (device.is_none()) return c10::kCPU;
  if (THPDevice_Check(device.ptr())) return reinterpret_cast<THPDevice*>(device.ptr())->device;
  static PyObject* const type = imported("torch", "device");
  return reinterpret_cast<THPDevice*>(py::handle(type)(device).ptr())->device;
}

}  // namespace remat::python
