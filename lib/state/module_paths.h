#pragma once
// The paths of the modules and parameters of registered trees.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string>

namespace torch::nn {
class Module;
}

namespace remat {

/// The paths of a parameter and of the module that owns it; null if it is no known parameter.
struct ParameterPath {
  const std::string* parameter = nullptr;
  const std::string* owner = nullptr;
};

/// Returns the paths of the parameter that a tensor is, views, or was cast from.
ParameterPath path_of_parameter(const at::Tensor& tensor);

/// Returns the path of the innermost module of the binding's language that runs on this thread, or
/// null.
const std::string* path_in_binding();

/// The innermost module that runs on this thread as the function of a region, or as a checkpointed
/// module.
struct RunningModule {
  const std::string* path = nullptr;  ///< null if there is none
  bool is_new = false;                ///< whether its tree was registered now
};
/// Finds it. Registers the outermost of these modules if no tree has it.
RunningModule running_module();

/// Returns whether a registered tree has the module.
bool is_in_tree(const torch::nn::Module& module);

/// Visits the paths of all known modules.
void visit_module_paths(c10::function_ref<void(const std::string&)> visitor);

}  // namespace remat
