#pragma once
// The state that regions register for their function's module and for the modules in their options.

#include <memory>
#include <string>

#include "lib/state/user_state.h"
#include "remat/options.h"

namespace remat {

/// Warns that BufferPolicy::SkipBatchNorm skipped a module of that type.
void warn_of_batch_norm(const std::string& type);

/// Adds the training flags of a module and its submodules, and their buffers unless the policy
/// ignores them.
void add_registrations(UserRegistrations& all, torch::nn::Module& module, BufferPolicy buffers);

/// Collects the state of `module`, of the script module and of the modules in the options, and
/// registers it with enclosing regions. The two pointers may be null. Returns null if there are no
/// modules.
/// Throws `c10::ValueError` for a null module in the options.
std::shared_ptr<const UserRegistrations> register_modules(const CheckpointOptions& options,
                                                          torch::nn::Module* module,
                                                          const torch::jit::Module* script);

/// Makes regions that begin on this thread restore that state, too, while the result lives. Null
/// for null.
std::shared_ptr<void> watch_modules(std::shared_ptr<const UserRegistrations> own);

/// Does both for a call that is no region. Returns null if there are no modules.
std::shared_ptr<void> register_plain_call(const CheckpointOptions& options,
                                          torch::nn::Module* module,
                                          const torch::jit::Module* script);

}  // namespace remat
