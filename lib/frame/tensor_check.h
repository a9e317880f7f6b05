#pragma once
// A determinism check beyond metadata: compares a recomputed tensor with what forward noted of its
// own.
//
// A check is one file: a TensorCheck, and a RegisteredCheck that makes it where the options ask for
// it.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "remat/error.h"
#include "remat/options.h"

namespace remat {

/// A check compares the tensors of one region. Threads: several recomputes may ask at once.
class TensorCheck {
 public:
  virtual ~TensorCheck() = default;
  /// What is noted of a tensor; that of the recomputed one must agree. Asked when the operator that
  /// saved the tensor is over, so that its contents are there. What it runs belongs to no region.
  virtual std::string note(const at::Tensor& saved) const = 0;
  /// What the error says, if one has another note: its kind, the fact, cause and advice; and what
  /// notes are called in its table.
  struct Report {
    CheckpointError::Kind kind;
    const char *fact, *advice, *name;
  };
  virtual const Report& report() const = 0;
  virtual bool agrees(const std::string& forward, const std::string& recompute) const {
    return forward == recompute;
  }
  /// What the table says of two notes that do not agree.
  virtual std::pair<std::string, std::string> texts(const std::string& forward,
                                                    const std::string& recompute) const {
    const std::string name = std::string(report().name) + " ";
    return {name + forward, name + recompute};
  }
  /// Whether shape, dtype and device may differ where it finds tensors equal.
  virtual bool replaces_metadata() const { return false; }
};

using TensorChecks = std::vector<std::unique_ptr<TensorCheck>>;

/// The checks that the options ask for.
TensorChecks checks_for(const CheckpointOptions& options);

/// Puts a check among those that options can ask for. Of static storage.
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
