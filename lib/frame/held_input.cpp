#include "lib/frame/held_input.h"

#include <utility>

#include "lib/scope/hook_stack.h"
#include "lib/seam/engine.h"

namespace remat {

namespace {

std::unique_ptr<torch::autograd::SavedVariable> save(const at::Tensor& tensor) {
  return std::make_unique<torch::autograd::SavedVariable>(tensor, /*is_output=*/false);
}

/// Returns whether the tensor would be saved without hooks. Does not make our own hooks, since they
/// would not be used.
bool meets_no_hook(const at::Tensor& tensor) {
  return !tensor.is_inference() && detail::innermost(detail::Ability::Hooks) == nullptr &&
         seam::saves_plainly();
}

}  // namespace

HeldInput::HeldInput(const at::Tensor& tensor, bool without_history) {
  if (meets_no_hook(tensor)) {
    if (!without_history)
      tensor_ = tensor;
    else if (TensorParts::can_take(tensor))
      parts_.emplace(tensor);
    else
      tensor_ = tensor.tensor_data();
    return;
  }
  const at::Tensor given = without_history ? tensor.tensor_data() : tensor;
  saved_ = save(given);
  if (saved_->has_hooks()) return;
  saved_.reset();
  tensor_ = given;
}

void HeldInput::offload(std::unique_ptr<torch::autograd::SavedVariableHooks> hooks) {
  saved_ = save(unpack());
  saved_->register_hooks(std::move(hooks));
  parts_.reset();
  tensor_.reset();
  is_offloaded_ = true;
}

at::Tensor HeldInput::unpack() const {
  if (parts_) return parts_->build();
  return saved_ == nullptr ? tensor_ : saved_->unpack();
}

}  // namespace remat
