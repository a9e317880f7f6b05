#pragma once
// Base of our saved-tensor hooks: answers the questions of all LibTorch versions.

#include <c10/core/SafePyObject.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <optional>
#include <utility>

namespace remat::seam {

/// Compiled autograd asks hooks for Python objects before it unpacks a variable, also when the
/// tensors saved by a node are listed (hooks/pack/inspection.h).
class OwnHooks : public torch::autograd::SavedVariableHooks {
 public:
  // No `override`: LibTorch 2.6 lacks it.
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const {
    refuse_tracing();
    return std::nullopt;
  }

 private:
  /// Throws, unless only a list is made.
  virtual void refuse_tracing() const = 0;
};

}  // namespace remat::seam
