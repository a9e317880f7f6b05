#pragma once
// What regions register for the modules that their functions are or name.

#include <memory>

#include "lib/state/user_state.h"
#include "remat/options.h"

namespace remat {

/// Adds the training flags of a module and of all below it, and their buffers, unless the policy
/// ignores them.
void add_registrations(UserRegistrations& all, torch::nn::Module& module, BufferPolicy buffers);

/// Registers the state of `module` and of the script module, which may be null, and of the modules that the options name, for the regions that
/// begin here while the result lives, and for those around. Null if there are none.
/// Throws `c10::ValueError` for a null module in the options.
std::shared_ptr<void> register_modules(const CheckpointOptions& options, torch::nn::Module* module,
                                       const torch::jit::Module* script = nullptr);

}  // namespace remat
