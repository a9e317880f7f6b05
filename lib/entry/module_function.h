#pragma once
// What regions register for the modules that their functions are or name.

#include <memory>
#include <string>

#include "lib/state/user_state.h"
#include "remat/options.h"

namespace remat {

/// Warns that BufferPolicy::SkipBatchNorm skipped a module of that type.
void warn_of_batch_norm(const std::string& type);

/// Adds the training flags of a module and of all below it, and their buffers, unless the policy
/// ignores them.
void add_registrations(UserRegistrations& all, torch::nn::Module& module, BufferPolicy buffers);

/// Collects the state of `module` and of the script module, which may be null, and of the modules
/// that the options name, and tells the regions around; null if there are no modules.
/// Throws `c10::ValueError` for a null module in the options.
std::shared_ptr<const UserRegistrations> register_modules(const CheckpointOptions& options,
                                                          torch::nn::Module* module,
                                                          const torch::jit::Module* script);

/// A call that is no region gets the same: while the result lives, the regions that begin here
/// restore that state, too. Null if there are no modules.
std::shared_ptr<void> register_plain_call(const CheckpointOptions& options,
                                          torch::nn::Module* module,
                                          const torch::jit::Module* script);

}  // namespace remat
