#pragma once
// Reads and writes the autograd data of a tensor without creating any: its own flag, node and
// hooks. Also recognizes the few nodes that are known by name.

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

/// Returns the tensor whose history counts: the base of a differentiable view, otherwise the tensor
/// itself.
const at::Tensor& viewed(const at::Tensor& tensor);

/// Returns the stored node, null for a leaf. A view whose node must be made anew still has its old
/// one.
inline torch::autograd::Node* node_of(const at::TensorBase& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta == nullptr ? nullptr : meta->grad_fn_.get();
}

/// Returns whether the tensor itself requires grad; a view of such a tensor only claims to.
inline bool requires_grad_itself(const at::TensorBase& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->requires_grad_;
}
/// Sets the flag of a leaf, without checking whether that is allowed.
void set_requires_grad_itself(const at::TensorBase& leaf, bool requires_grad);

/// Returns `tensor._version()`, without LibTorch's table of functions.
inline uint32_t version_of(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

/// Returns whether two tensors share a version counter, which is a pointer without an accessor.
inline bool is_same_counter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof(void*)) ==
         0;
}

/// Returns whether the tensor itself has hooks, apart from its node.
bool has_own_hooks(const at::TensorBase& tensor);

/// Returns whether the tensor carries a forward-mode tangent.
bool has_tangent(const at::Tensor& tensor);

/// Properties of a tensor with a history, beside its values.
struct Beside {
  at::Tensor grad{};
  uint32_t output_number = 0;
  bool retains_grad = false;
};
Beside beside_values(const at::Tensor& result);
/// Returns whether any of these is set.
inline bool has_beside(const at::Tensor& result) {
  const auto& meta = *torch::autograd::impl::get_autograd_meta(result);
  return meta.grad_.defined() || meta.output_nr_ > 0 || meta.retains_grad_;
}
void set_grad(const at::Tensor& result, const at::Tensor& grad);

/// Counts the hooks of a tensor and its node that were added by hand, without
/// `Tensor::register_hook`, or in a binding's language.
struct HooksByHand {
  const void* node = nullptr;
  std::size_t on_tensor = 0, before_tensor = 0, before_node = 0, after_node = 0;
  const void* after_accumulation = nullptr;
  std::vector<HookTable> tables{};  ///< in the binding's language
};
HooksByHand hooks_by_hand(const at::Tensor& tensor);
/// Removes hooks added since `then`. Returns false if some of the earlier ones are gone.
bool cut_hooks(const at::Tensor& tensor, const HooksByHand& then);

extern const std::type_info& type_of_casts;
/// Returns whether the node is a cast to another type. Called for every saved tensor, so it
/// compares the address of the type, which only LibTorch defines.
inline bool is_cast(const torch::autograd::Node& node) { return &typeid(node) == &type_of_casts; }
/// Returns whether the node belongs to a C++ autograd Function.
bool is_function(const torch::autograd::Node& node);

}  // namespace remat::seam
