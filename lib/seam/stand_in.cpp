#include "lib/seam/stand_in.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <array>
#include <cstddef>
#include <typeinfo>

namespace remat::seam {

using torch::nn::AnyModule;
using torch::nn::AnyValue;

namespace {

/// The maximum for a forward called with a number of values unknown at compile time.
constexpr std::size_t max_arguments = 16;

template <std::size_t... I>
AnyValue call_with(AnyModule& module, AnyValues& arguments, std::index_sequence<I...>) {
  return module.any_forward(std::move(arguments[I])...);
}

template <std::size_t... N>
auto calls_by_number(std::index_sequence<N...>) {
  using Call = AnyValue (*)(AnyModule&, AnyValues&);
  return std::array<Call, sizeof...(N)>{[](AnyModule& module, AnyValues& arguments) {
    return call_with(module, arguments, std::make_index_sequence<N>());
  }...};
}

}  // namespace

AnyValue StandIn::forward(AnyValue argument) {
  AnyValues arguments;
  arguments.push_back(std::move(argument));
  return run(std::move(arguments));
}

AnyModule any_module_of(std::shared_ptr<StandIn> stand_in) {
  return AnyModule(std::move(stand_in));
}

std::shared_ptr<StandIn> stand_in_of(AnyModule& module) {
  if (module.is_empty() || module.type_info() != typeid(StandIn)) return nullptr;
  return std::static_pointer_cast<StandIn>(module.get<StandIn>().shared_from_this());
}

AnyValue call(AnyModule& module, AnyValues arguments) {
  static const auto calls = calls_by_number(std::make_index_sequence<max_arguments + 1>());
  TORCH_CHECK_VALUE(arguments.size() <= max_arguments, "remat: the forward of a ",
                    c10::demangle(module.type_info().name()), " was called with ", arguments.size(),
                    " arguments. Cause: an element of a Sequential that was switched on takes at "
                    "most ",
                    max_arguments, ". Hint: pass them as a tuple or a struct.");
  return calls[arguments.size()](module, arguments);
}

}  // namespace remat::seam

namespace torch::nn {

AnyValue AnyModuleHolder<remat::seam::StandIn, AnyValue>::forward(
    std::vector<AnyValue>&& arguments) {
  return module->run(std::move(arguments));
}
std::shared_ptr<Module> AnyModuleHolder<remat::seam::StandIn, AnyValue>::ptr() {
  return module->original().ptr();
}
std::unique_ptr<AnyModulePlaceholder> AnyModuleHolder<remat::seam::StandIn, AnyValue>::copy()
    const {
  return std::make_unique<AnyModuleHolder>(*this);
}
std::unique_ptr<AnyModulePlaceholder> AnyModuleHolder<remat::seam::StandIn, AnyValue>::clone_module(
    std::optional<Device> device) const {
  return std::make_unique<AnyModuleHolder>(module->for_clone(module->original().clone(device)));
}

}  // namespace torch::nn
