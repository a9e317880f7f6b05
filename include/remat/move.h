#pragma once
// The place of tensors that plans and budgets move away.

#include <cstdint>
#include <filesystem>

namespace remat {

/// The place where moved tensors are stored.
struct MoveOptions {
  /// The directory of a file without a name, as with `SaveOnDiskGuard`; it must exist. Empty:
  /// tensors of an accelerator move to the CPU, and tensors of the CPU do not move.
  std::filesystem::path directory{};
  int64_t min_bytes = 1 << 16;  ///< [bytes] smaller tensors stay
  /// Use page-locked memory for copies between accelerator and CPU, if it is available.
  bool pin_memory = true;
};

}  // namespace remat
