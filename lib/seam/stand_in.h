#pragma once
// What stands in a module's place in an AnyModule, and is called with its arguments, of any number
// and types.
//
// Note [Standing in]
// An AnyModule calls its module through AnyModuleHolder, a template of LibTorch's over the type of
// the module and the types that its forward takes; it tells neither, and has no conversions, so a
// module that passes a call on would have to be written for each signature. The template is
// specialised here for a type of our own: it gets the values as they are. Its ptr() is the original
// module, so what a container shows, registers, saves and clones is what it was; only get<T>() and
// ptr<T>() ask for the type that is called, and throw. No patched table of virtual functions, and
// nothing of LibTorch's that is private.

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
  /// Called in the place of the original's forward.
  virtual torch::nn::AnyValue run(AnyValues arguments) = 0;
  /// The same for a clone of the original.
  virtual std::shared_ptr<StandIn> for_clone(torch::nn::AnyModule clone) const = 0;
  const torch::nn::AnyModule& original() const { return original_; }
  torch::nn::AnyModule& original() { return original_; }
  /// An AnyModule takes no module without.
  torch::nn::AnyValue forward(torch::nn::AnyValue argument);

 private:
  torch::nn::AnyModule original_;
};

/// An AnyModule whose calls are those of `stand_in`.
torch::nn::AnyModule any_module_of(std::shared_ptr<StandIn> stand_in);
/// Null if none stands in there.
std::shared_ptr<StandIn> stand_in_of(torch::nn::AnyModule& module);
/// Calls the module's forward; throws what AnyModule throws for arguments that do not fit.
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
