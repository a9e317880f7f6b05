// Definitions of script_call.h: runs a script function as a region does.

#include "remat/script_call.h"

#include <torch/csrc/jit/api/method.h>
#include <torch/csrc/jit/api/module.h>

#include <memory>
#include <optional>
#include <utility>

#include "lib/frame/frame_scope.h"
#include "lib/frame/mismatch.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/script.h"

namespace remat::detail {

struct ScriptCall::Impl {
  torch::jit::Module module;
  torch::jit::Method method;
  std::unique_ptr<seam::PinnedScript> pinned{};
};

ScriptCall::ScriptCall(const torch::jit::Module& module)
    : impl_(new Impl{module, module.get_method("forward")}) {}

ScriptCall::ScriptCall(const torch::jit::Method& method)
    : impl_(new Impl{method.owner(), method}) {}

ScriptCall::~ScriptCall() = default;

const torch::jit::Module& ScriptCall::module() const { return impl_->module; }

c10::IValue ScriptCall::run(std::vector<c10::IValue> arguments) {
  arguments.insert(arguments.begin(), impl_->module._ivalue());
  torch::jit::Function& function = impl_->method.function();
  seam::normalize_arguments(function, arguments);
  if (impl_->pinned == nullptr) {
    impl_->pinned = std::make_unique<seam::PinnedScript>(function, &impl_->module, arguments);
    impl_->pinned->run(arguments);
  } else {
    if (impl_->pinned->is_changed())
      throw_changed_script(static_cast<FrameScope&>(*innermost_region()).frame().region());
    impl_->pinned->run_again(arguments);
  }
  return std::move(arguments.front());
}

}  // namespace remat::detail
