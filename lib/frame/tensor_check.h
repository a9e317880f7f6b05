#pragma once
// A determinism check beyond metadata: compares a recomputed tensor with a note of forward's.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>

#include "remat/options.h"

namespace remat {

/// Compares the tensors of one region. Threads: several recomputes may call it at once.
class TensorCheck {
 public:
  virtual ~TensorCheck() = default;
  /// Returns the note of a tensor, with which the note of the recomputed one must agree. Called
  /// when the operator that saved the tensor is over, so that its contents are complete. Operators
  /// run here belong to no region.
  virtual std::string note(const at::Tensor& saved) const = 0;
  virtual bool agrees(const std::string& forward, const std::string& recompute) const {
    return forward == recompute;
  }
  /// Returns the error's texts for two notes that do not agree.
  virtual std::pair<std::string, std::string> texts(const std::string& forward,
                                                    const std::string& recompute) const {
    return {"hash " + forward, "hash " + recompute};
  }
  /// Returns whether shape, dtype and device may differ for tensors that agree.
  virtual bool replaces_metadata() const { return false; }
};

/// Returns the check that the options ask for; null if they ask for none.
std::unique_ptr<TensorCheck> check_for(const CheckpointOptions& options);

}  // namespace remat
