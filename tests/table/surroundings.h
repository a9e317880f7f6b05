#pragma once
// The guards, hooks and state that configurations put around a body or into it.

#include <ATen/core/Tensor.h>

#include <any>
#include <memory>
#include <random>

#include "remat/hooks.h"
#include "remat/state.h"

namespace table {

/// A random engine that a provider keeps.
class Engine final : public remat::StateProvider {
 public:
  /// Returns the next number, in [0.5, 1.5).
  double next() { return 0.5 + static_cast<double>(engine_()) * 0x1p-32; }
  std::any capture() override { return engine_; }
  void restore(const std::any& state) override { engine_ = std::any_cast<std::mt19937>(state); }

 private:
  std::mt19937 engine_{11};
};

/// Autocast of the CPU to bfloat16.
class Autocast {
 public:
  Autocast();
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool was_enabled_;
};

/// Returns hooks whose pack copies, and whose unpack does nothing.
std::unique_ptr<remat::SavedTensorHooksGuard> hooks_that_clone();
/// Returns hooks that both do nothing.
std::unique_ptr<remat::SavedTensorHooksGuard> hooks_that_keep();
/// Returns hooks whose pack writes the tensor's storage to a vector of bytes, which unpack reads.
std::unique_ptr<remat::SavedTensorHooksGuard> hooks_to_bytes();
/// Returns a guard with a directory that is removed with the process.
std::unique_ptr<remat::SaveOnDiskGuard> save_on_disk();

}  // namespace table
