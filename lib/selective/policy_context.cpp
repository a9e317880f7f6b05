// Definitions of policy.h: the paths that a policy may ask for.

#include "lib/selective/call_record.h"
#include "lib/state/module_paths.h"
#include "remat/policy.h"

namespace remat {

namespace {

const std::string no_path;

ParameterPath parameter_in(c10::ArrayRef<c10::IValue> args) {
  ParameterPath found;
  visit_tensors_in(args, [&](const at::Tensor& tensor) {
    if (found.parameter == nullptr) found = path_of_parameter(tensor);
  });
  return found;
}

const std::string& path_or_none(const std::string* path) {
  return path == nullptr ? no_path : *path;
}

}  // namespace

const std::string& PolicyContext::parameter_path() const {
  ParameterPath found = parameter_in(args);
  if (found.parameter == nullptr && running_module().is_new) found = parameter_in(args);
  return path_or_none(found.parameter);
}

const std::string& PolicyContext::module_path() const {
  if (const std::string* const path = path_in_binding()) return *path;
  if (const ParameterPath found = parameter_in(args); found.owner != nullptr) return *found.owner;
  const RunningModule running = running_module();
  if (running.is_new)
    if (const ParameterPath found = parameter_in(args); found.owner != nullptr) return *found.owner;
  return path_or_none(running.path);
}

}  // namespace remat
