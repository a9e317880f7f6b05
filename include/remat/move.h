#pragma once
// The place where tensors wait that plans and budgets move away.

#include <cstdint>
#include <filesystem>

namespace remat {

/// The place where moved tensors wait.
struct MoveOptions {
  /// The directory of a file without a name, as with `SaveOnDiskGuard`; it must exist. Empty:
  /// tensors of an accelerator wait on the CPU, and tensors of the CPU do not move.
  std::filesystem::path directory{};
  int64_t min_bytes = 1 << 16;  ///< [bytes] smaller tensors stay
  /// Copies between accelerator and CPU use page-locked memory, if there is some.
  bool pin_memory = true;
};

}  // namespace remat
