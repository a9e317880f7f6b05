#pragma once
// The device that a command line names.

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <stdexcept>
#include <string>

// Returns the device, with an index unless it is the CPU. Throws std::runtime_error if this
// LibTorch cannot use it here.
inline c10::Device usable_device(const std::string& name) {
  try {
    return at::empty({1}, at::TensorOptions(c10::Device(name))).device();
  } catch (const c10::Error& error) {
    // The first sentence only: LibTorch then lists the devices that it was built for.
    std::string text = error.what_without_backtrace();
    text = text.substr(0, std::min(text.find('\n'), text.find(". ")));
    if (text.ends_with('.')) text.pop_back();
    throw std::runtime_error(
        "--device " + name + " cannot be used with LibTorch " + TORCH_VERSION + ": " + text +
        ".\nHint: take a LibTorch for the device (TORCH_ROOT=/folder ./dev ...)");
  }
}
