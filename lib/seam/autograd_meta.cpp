#include "lib/seam/autograd_meta.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include <atomic>
#include <string_view>
#include <typeinfo>
#include <unordered_map>

namespace remat::seam {

using torch::autograd::AutogradMeta;
using torch::autograd::Node;

namespace {

AutogradMeta* meta_of(const at::TensorBase& tensor) {
  return torch::autograd::impl::get_autograd_meta(tensor);
}

/// Returns the target of a weak pointer that has not expired.
template <class Weak>
Node* target_of(const Weak& pointer) {
  if constexpr (requires { pointer._unsafe_get_target(); })
    return pointer._unsafe_get_target();
  else
    return pointer.lock().get();  // a std::weak_ptr before 2.13
}

/// Returns the node that made a tensor, or that accumulates a leaf's gradient; null if there is
/// none.
Node* either_node(const AutogradMeta& meta) {
  if (meta.grad_fn_ != nullptr) return meta.grad_fn_.get();
  return meta.grad_accumulator_.expired() ? nullptr : target_of(meta.grad_accumulator_);
}

std::atomic<HookTables*> hook_tables{nullptr};

template <class Hooks>
void shorten(Hooks& hooks, std::size_t size) {
  if (hooks.size() > size) hooks.resize(size);
}

}  // namespace

const at::Tensor& viewed(const at::Tensor& tensor) {
  const AutogradMeta* const meta = meta_of(tensor);
  if (meta != nullptr && meta->is_view_) {
    const auto* view = static_cast<const torch::autograd::DifferentiableViewMeta*>(meta);
    if (view->has_bw_view()) return view->get_backward_view().base_;
  }
  return tensor;
}

void set_requires_grad_itself(const at::TensorBase& leaf, bool requires_grad) {
  AutogradMeta* const meta = meta_of(leaf);
  if (meta != nullptr && meta->grad_fn_ == nullptr && meta->requires_grad_ != requires_grad)
    meta->requires_grad_ = requires_grad;
}

bool has_own_hooks(const at::TensorBase& tensor) {
  const AutogradMeta* const meta = meta_of(tensor);
  return meta != nullptr && !meta->hooks_.empty();
}

bool has_tangent(const at::Tensor& tensor) {
  const AutogradMeta* const meta = meta_of(tensor);
  // Asking for the tangent itself takes a lock; few tensors have ever had one.
  return meta != nullptr && meta->fw_grad_ != nullptr && tensor._fw_grad(/*level=*/0).defined();
}

Beside beside_values(const at::Tensor& result) {
  const AutogradMeta& meta = *meta_of(result);
  Beside beside{.grad = meta.grad_, .retains_grad = meta.retains_grad_};
  if (meta.output_nr_ > 0) beside.output_number = static_cast<uint32_t>(result.output_nr());
  return beside;
}

void set_grad(const at::Tensor& result, const at::Tensor& grad) { meta_of(result)->grad_ = grad; }

HooksByHand hooks_by_hand(const at::Tensor& tensor) {
  HooksByHand all;
  const AutogradMeta* const meta = meta_of(tensor);
  if (meta == nullptr) return all;
  all.on_tensor = meta->hooks_.size();
  all.after_accumulation = meta->post_acc_grad_hooks_.get();
  if (Node* const node = either_node(*meta)) {
    all.node = node;
    all.before_tensor = node->tensor_pre_hooks().size();
    all.before_node = node->pre_hooks().size();
    all.after_node = node->post_hooks().size();
  }
  const bool has_any = all.on_tensor + all.before_tensor + all.before_node + all.after_node > 0 ||
                       all.after_accumulation != nullptr;
  if (HookTables* const tables = has_any ? hook_tables.load() : nullptr)
    all.tables = tables->of(tensor);
  return all;
}

bool cut_hooks(const at::Tensor& tensor, const HooksByHand& then) {
  AutogradMeta* const meta = meta_of(tensor);
  if (meta == nullptr) return true;
  HookTables* const tables = hook_tables.load();
  const bool may_have_tables = !then.tables.empty() || !meta->hooks_.empty();
  if (tables != nullptr && may_have_tables) tables->cut(tensor, then.tables);
  // Hooks of register_hook share one entry, and were noted.
  if (meta->cpp_hooks_list_ == nullptr) shorten(meta->hooks_, then.on_tensor);
  if (Node* const node = either_node(*meta); node != nullptr && node == then.node) {
    if (meta->cpp_hooks_list_ == nullptr) shorten(node->tensor_pre_hooks(), then.before_tensor);
    shorten(node->pre_hooks(), then.before_node);
    shorten(node->post_hooks(), then.after_node);
  }
  return meta->post_acc_grad_hooks_.get() == then.after_accumulation;
}

const std::type_info& type_of_casts = typeid(torch::autograd::generated::ToCopyBackward0);

bool is_function(const Node& node) {
  // Types repeat, and their names are long.
  struct Answer {
    const std::type_info* type = nullptr;
    bool is_function = false;
  };
  constinit thread_local Answer of_this_thread;
  Answer& latest = of_this_thread;  // one look-up for all
  const std::type_info* const type = &typeid(node);
  if (latest.type != type) {
    thread_local std::unordered_map<const std::type_info*, bool> known;
    const auto [found, is_new] = known.try_emplace(type, false);
    if (is_new)
      found->second = std::string_view(type->name()).find("CppNode") != std::string_view::npos;
    latest = {type, found->second};
  }
  return latest.is_function;
}

}  // namespace remat::seam

namespace remat {

HookTables::~HookTables() = default;

void set_hook_tables(HookTables* tables) { seam::hook_tables.store(tables); }

}  // namespace remat
