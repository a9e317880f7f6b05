#pragma once
// The names that users know for a tensor of their modules.

#include <string>

#include "lib/state/user_state.h"
#include "lib/tensor/capture.h"

namespace remat {

class TensorNames;

/// Returns "parameter 'conv1.weight' of UNetBlock" for a tensor that is, views or shares the memory
/// of a parameter or buffer of a registered module: the innermost that has it. Empty if there is
/// none, or several share the memory. Walks the modules: for errors only.
std::string parameter_name(const UserRegistrations& registered, const TensorIdentity& tensor);
/// Returns the tensor's name as a binding reports it.
std::string parameter_name(const TensorNames& names, const TensorIdentity& tensor);

}  // namespace remat
