#pragma once
// Replaces a module in an AnyModule: called with its arguments, of any number and types.
//
// Note [Standing in]
// An AnyModule calls its module through AnyModuleHolder, a LibTorch template over the module's type
// and the argument types of its forward. It exposes neither and has no conversions, so a module
// that forwards a call would have to be written for each signature. The template is specialized
// here for a type of our own, which receives the values unchanged. Its ptr() is the original
// module, so a container shows, registers, saves and clones the original. Only get<T>() and
// ptr<T>() ask for the called type, and throw. No patched table of virtual functions, and nothing
// private of LibTorch.

#include <torch/nn/modules/container/any.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace remat::seam {

using AnyValues = std::vector<torch::nn::AnyValue>;

class StandIn : public torch::nn::Module {
 public:
  explicit StandIn(torch::nn::AnyModule original) : original_(std::move(original)) {}
  /// Called instead of the original's forward.
  virtual torch::nn::AnyValue run(AnyValues arguments) = 0;
  /// Returns a stand-in for a clone of the original.
  virtual std::shared_ptr<StandIn> for_clone(torch::nn::AnyModule clone) const = 0;
  const torch::nn::AnyModule& original() const { return original_; }
  torch::nn::AnyModule& original() { return original_; }
  /// Required by AnyModule, which accepts no module without a forward.
  torch::nn::AnyValue forward(torch::nn::AnyValue argument);

 private:
  torch::nn::AnyModule original_;
};

/// Returns an AnyModule whose calls go to `stand_in`.
torch::nn::AnyModule any_module_of(std::shared_ptr<StandIn> stand_in);
/// Returns the stand-in of the module, or null.
std::shared_ptr<StandIn> stand_in_of(torch::nn::AnyModule& module);
/// Calls the module's forward. Throws AnyModule's error for arguments that do not fit.
torch::nn::AnyValue call(torch::nn::AnyModule& module, AnyValues arguments);

}  // namespace remat::seam

namespace torch::nn {

template <>
struct AnyModuleHolder<remat::seam::StandIn, AnyValue> final : AnyModulePlaceholder {
  explicit AnyModuleHolder(std::shared_ptr<remat::seam::StandIn>&& stand_in)
      : AnyModulePlaceholder(typeid(remat::seam::StandIn)), module(std::move(stand_in)) {}
  AnyValue forward(std::vector<AnyValue>&& arguments) override;
  std::shared_ptr<Module> ptr() override;
  std::unique_ptr<AnyModulePlaceholder> copy() const override;
  std::unique_ptr<AnyModulePlaceholder> clone_module(std::optional<Device> device) const override;

  std::shared_ptr<remat::seam::StandIn> module;  // LibTorch's name: AnyModule::get reads it
};

}  // namespace torch::nn
