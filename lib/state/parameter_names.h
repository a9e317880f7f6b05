#pragma once
// What users call a tensor of their modules.

#include <string>

#include "lib/state/user_state.h"
#include "lib/tensor/capture.h"

namespace remat {

class TensorNames;

/// "parameter 'conv1.weight' of UNetBlock" for a tensor that is, views or shares the memory of a
/// parameter or buffer of a module that is registered: the innermost that has it. Empty if there is
/// none, or several share the memory. Walks the modules: for errors.
std::string parameter_name(const UserRegistrations& registered, const TensorIdentity& tensor);
/// The same by what a binding says.
std::string parameter_name(const TensorNames& names, const TensorIdentity& tensor);

}  // namespace remat
