#pragma once
// A determinism check beyond metadata: compares a recomputed tensor with what forward noted of its own.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>

namespace remat {

/// A check compares the tensors of one region. Threads: several recomputes may ask at once.
class TensorCheck {
 public:
  /// Compares what `fingerprint` makes of a tensor; without one, a hash of its contents.
  explicit TensorCheck(std::function<std::string(const at::Tensor&)> fingerprint)
      : fingerprint_(std::move(fingerprint)) {}
  /// What is noted of a tensor; the recomputed one must have the same. Asked when the operator that saved
  /// the tensor is over, so that its contents are there. What it runs belongs to no region.
  std::string note(const at::Tensor& saved) const;
  /// What notes are called in the table of an error.
  const char* name() const { return fingerprint_ ? "fingerprint" : "hash"; }
  /// Whether shape, dtype and device may differ where it finds tensors equal.
  bool replaces_metadata() const { return fingerprint_ != nullptr; }

 private:
  const std::function<std::string(const at::Tensor&)> fingerprint_;
};

}  // namespace remat
