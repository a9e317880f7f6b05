#pragma once
// Access to fields of torch::nn::Module that have no setter, or of which only copies are public.

#include <torch/nn/cloneable.h>

#include <optional>
#include <string>

namespace remat {
class ModuleAccess;
}

namespace torch::nn {

// Every Cloneable is a friend of Module. train(on) is no substitute: it is virtual and recurses.
template <>
class Cloneable<remat::ModuleAccess> {
 public:
  static bool& training_flag(Module& module) { return module.is_training_; }
  static const auto& children(const Module& module) { return module.children_; }
  static const auto& parameters(const Module& module) { return module.parameters_; }
  static const auto& buffers(const Module& module) { return module.buffers_; }
  static std::optional<std::string>& name(Module& module) { return module.name_; }
};

}  // namespace torch::nn

namespace remat {
class ModuleAccess : public torch::nn::Cloneable<ModuleAccess> {};
}  // namespace remat
