#pragma once
// Whether saved-tensor hooks are active.

#include <torch/csrc/autograd/engine.h>

namespace remat::testing {

/// Whether autograd would call a hook, of remat or of anyone, here and now.
inline bool hooks_are_active() {
  return torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks() !=
         nullptr;
}

}  // namespace remat::testing
