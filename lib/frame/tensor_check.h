#pragma once
// A determinism check beyond metadata: compares a recomputed tensor with a note of forward's.
//
// A check is one file: a TensorCheck, and a RegisteredCheck that makes it if the options ask for
// it.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "remat/error.h"
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
  /// The text of the error for notes that do not agree: its kind, fact, cause and advice, and the
  /// name of notes in its table.
  struct Report {
    CheckpointError::Kind kind;
    const char *fact, *advice, *name;
  };
  virtual const Report& report() const = 0;
  virtual bool agrees(const std::string& forward, const std::string& recompute) const {
    return forward == recompute;
  }
  /// Returns the table's texts for two notes that do not agree.
  virtual std::pair<std::string, std::string> texts(const std::string& forward,
                                                    const std::string& recompute) const {
    const std::string name = std::string(report().name) + " ";
    return {name + forward, name + recompute};
  }
  /// Returns whether shape, dtype and device may differ for tensors that agree.
  virtual bool replaces_metadata() const { return false; }
};

using TensorChecks = std::vector<std::unique_ptr<TensorCheck>>;

/// Returns the checks that the options ask for.
TensorChecks checks_for(const CheckpointOptions& options);

/// Registers a check that options can ask for. Has static storage duration.
class RegisteredCheck {
 public:
  /// Makes the check; null if the options do not ask for it.
  using Make = std::unique_ptr<TensorCheck> (*)(const CheckpointOptions& options);
  explicit RegisteredCheck(Make make);

 private:
  friend TensorChecks checks_for(const CheckpointOptions& options);
  const Make make_;
  const RegisteredCheck* const next_;
};

}  // namespace remat
