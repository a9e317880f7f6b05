#pragma once
// What LibTorch keeps of a tensor for autograd, read and written without making anything: its own
// flag, node, hooks; and the few nodes that are known by name.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <typeinfo>
#include <vector>

#include "remat/binding.h"

namespace remat::seam {

/// The tensor whose history counts: the base of a differentiable view, else the tensor itself.
const at::Tensor& viewed(const at::Tensor& tensor);

/// Its node as it is; the node of a view that has to be made anew is not known. Null for a leaf.
inline torch::autograd::Node* node_of(const at::TensorBase& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta == nullptr ? nullptr : meta->grad_fn_.get();
}

/// Whether it requires grad itself, which a view of such a tensor only claims to do.
inline bool requires_grad_itself(const at::TensorBase& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->requires_grad_;
}
/// Sets the flag of a leaf, without asking whether it may.
void set_requires_grad_itself(const at::TensorBase& leaf, bool requires_grad);

/// `tensor._version()`, without LibTorch's table of functions.
inline uint32_t version_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// Whether tensors count their versions together. A counter is nothing but a pointer, which it does
/// not show.
inline bool is_same_counter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof(void*)) ==
         0;
}

/// Whether hooks were put on it, and not on its node.
bool has_own_hooks(const at::TensorBase& tensor);

/// Whether it carries a forward-mode tangent.
bool has_tangent(const at::Tensor& tensor);

/// What a tensor with a history has beside its values.
struct Beside {
  at::Tensor grad{};
  uint32_t output_number = 0;
  bool retains_grad = false;
};
Beside beside_values(const at::Tensor& result);
/// Whether there is anything.
inline bool has_beside(const at::Tensor& result) {
  const auto& meta = *torch::autograd::impl::get_autograd_meta(result);
  return meta.grad_.defined() || meta.output_nr_ > 0 || meta.retains_grad_;
}
void set_grad(const at::Tensor& result, const at::Tensor& grad);

/// How many hooks a tensor and its node have, of those that were put there by hand, past
/// `Tensor::register_hook`, or in a binding's language.
struct HooksByHand {
  const void* node = nullptr;
  std::size_t on_tensor = 0, before_tensor = 0, before_node = 0, after_node = 0;
  const void* after_accumulation = nullptr;
  std::vector<HookTable> tables{};  ///< of the binding's language
};
HooksByHand hooks_by_hand(const at::Tensor& tensor);
/// Takes off those that came since. False if some that were there are gone.
bool cut_hooks(const at::Tensor& tensor, const HooksByHand& then);

extern const std::type_info& type_of_casts;
/// Whether the node is that of a cast to another type. Every saved tensor asks: LibTorch alone has
/// such a type, so its address tells.
inline bool is_cast(const torch::autograd::Node& node) { return &typeid(node) == &type_of_casts; }
/// Whether it is that of a C++ autograd Function.
bool is_function(const torch::autograd::Node& node);

}  // namespace remat::seam
