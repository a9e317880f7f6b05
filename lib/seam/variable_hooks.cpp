#include "lib/seam/variable_hooks.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "lib/seam/autograd_meta.h"

namespace remat::seam {

namespace {

using at::Tensor;
using at::TensorBase;
using at::impl::VariableHooksInterface;

constinit thread_local NodeWatch* innermost_watch = nullptr;
/// The watch of the recompute that runs on this thread.
constinit thread_local NodeWatch* only_watch = nullptr;

/// See Note [Seeing registrations]. Members that some LibTorch versions lack have no `override`.
class ForwardingTable final : public VariableHooksInterface {
 public:
  ForwardingTable(const VariableHooksInterface& previous, const RegistrationCallbacks& callbacks)
      : previous_(previous), callbacks_(callbacks) {}

  unsigned _register_hook(const TensorBase& tensor,
                          std::function<TensorBase(const TensorBase&)> hook) const override {
    if (const auto known = callbacks_.hook_begins(tensor)) return *known;
    const unsigned handle = previous_._register_hook(tensor, std::move(hook));
    callbacks_.hook_registered(tensor, handle);
    return handle;
  }
  void requires_grad_(const TensorBase& tensor, bool requires_grad) const override {
    callbacks_.requires_grad_changes(tensor);
    previous_.requires_grad_(tensor, requires_grad);
  }

  TensorBase tensor_data(const TensorBase& tensor) const override {
    return previous_.tensor_data(tensor);
  }
  TensorBase variable_data(const TensorBase& tensor) const override {
    return previous_.variable_data(tensor);
  }
  const NodePtr& grad_fn(const TensorBase& tensor) const override {
    const NodePtr* const instead = NodesInstead::any() ? callbacks_.node_instead(tensor) : nullptr;
    const NodePtr& node = instead != nullptr ? *instead : previous_.grad_fn(tensor);
    if (NodeWatches::any()) NodeWatches::tell(tensor, node.get());
    return node;
  }
  void remove_hook(const TensorBase& tensor, unsigned handle) const override {
    previous_.remove_hook(tensor, handle);
  }
  bool is_view(const TensorBase& tensor) const override { return previous_.is_view(tensor); }
  const TensorBase& base(const TensorBase& tensor) const override { return previous_.base(tensor); }
  const std::string& name(const TensorBase& tensor) const override {
    return previous_.name(tensor);
  }
  bool is_leaf(const TensorBase& tensor) const override { return previous_.is_leaf(tensor); }
  int64_t output_nr(const TensorBase& tensor) const override { return previous_.output_nr(tensor); }
  void set_data(const TensorBase& tensor, const TensorBase& data) const override {
    previous_.set_data(tensor, data);
  }
  TensorBase data(const TensorBase& tensor) const override { return previous_.data(tensor); }
  int64_t _version(const TensorBase& tensor) const override { return previous_._version(tensor); }
  void retain_grad(const TensorBase& tensor) const override { previous_.retain_grad(tensor); }
  bool retains_grad(const TensorBase& tensor) const override {
    return previous_.retains_grad(tensor);
  }
  void _backward(const Tensor& tensor, at::TensorList inputs, const std::optional<Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    previous_._backward(tensor, inputs, gradient, keep_graph, create_graph);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op,
                                               c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    previous_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const TensorBase& tensor) const {
    return grad_dtype_of(previous_, tensor);
  }
  void set_grad_dtype(const TensorBase& tensor, const std::optional<c10::ScalarType>& dtype) const {
    set_grad_dtype_of(previous_, tensor, dtype);
  }

 private:
  static std::optional<c10::ScalarType> grad_dtype_of(const auto& table, const TensorBase& tensor) {
    if constexpr (requires { table.grad_dtype(tensor); }) return table.grad_dtype(tensor);
    return std::nullopt;
  }
  static void set_grad_dtype_of(const auto& table, const TensorBase& tensor,
                                const std::optional<c10::ScalarType>& dtype) {
    if constexpr (requires { table.set_grad_dtype(tensor, dtype); })
      table.set_grad_dtype(tensor, dtype);
  }

  const VariableHooksInterface& previous_;
  const RegistrationCallbacks callbacks_;
};

}  // namespace

/// Releases the watches of regions that are open on a thread when it ends.
struct NodeWatches::AtThreadExit {
  ~AtThreadExit() {
    while (innermost_watch != nullptr) drop_innermost();
  }
  void touch() const {}
};

void NodeWatches::drop_innermost() {
  const std::shared_ptr<NodeWatch> alive = std::move(innermost_watch->self_);
  innermost_watch = innermost_watch->outer_;
  num_told_.fetch_sub(1, std::memory_order_relaxed);
}

void NodeWatches::begin(std::shared_ptr<NodeWatch> watch) {
  static thread_local const AtThreadExit at_thread_exit;
  at_thread_exit.touch();
  NodeWatch* const innermost = watch.get();
  innermost->outer_ = std::exchange(innermost_watch, innermost);
  innermost->self_ = std::move(watch);
  num_told_.fetch_add(1, std::memory_order_relaxed);
}

void NodeWatches::end() {
  while (innermost_watch != nullptr && !innermost_watch->is_watching()) drop_innermost();
}

bool NodeWatch::have_others_been_told(const at::TensorBase& tensor, uint64_t made_at) {
  constexpr std::size_t max_told = 16;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::VariableVersion& counter = impl.version_counter();
  if (!counter.enabled()) return false;
  const c10::StorageImpl* const storage = impl.unsafe_storage().unsafeGetStorageImpl();
  for (Told& each : told_) {
    if (each.storage != storage || !is_same_counter(each.counter, counter)) continue;
    if (each.made_at <= made_at) return true;
    each.made_at = made_at;
    return false;
  }
  if (told_.size() < max_told)
    told_.push_back({counter, storage, made_at});
  else
    told_[next_told_++ % max_told] = {counter, storage, made_at};
  return false;
}

// See Note [Nested watches].
void NodeWatches::tell(const at::TensorBase& tensor, const torch::autograd::Node* node) {
  if (only_watch != nullptr) only_watch->node_asked(tensor, node);
  for (NodeWatch* each = innermost_watch; each != nullptr; each = each->outer_) {
    const bool is_of_thread = node != nullptr && node->thread_id() == each->passed_over_thread_;
    if (is_of_thread && node->sequence_nr() >= each->passed_over_from_) return;
    if (each->is_watching()) each->node_asked(tensor, node);
    if (each->outer_ != nullptr &&
        each->have_others_been_told(tensor, is_of_thread ? node->sequence_nr() : 0))
      return;
  }
}

OnlyNodeWatch::OnlyNodeWatch(NodeWatch* watch)
    : before_(std::exchange(innermost_watch, nullptr)),
      only_before_(std::exchange(only_watch, watch)) {
  if (watch != nullptr) NodeWatches::num_told_.fetch_add(1, std::memory_order_relaxed);
}

OnlyNodeWatch::~OnlyNodeWatch() {
  // The watch of a region that began meanwhile and has not ended would leak otherwise.
  while (innermost_watch != nullptr) NodeWatches::drop_innermost();
  innermost_watch = before_;
  if (std::exchange(only_watch, only_before_) != nullptr)
    NodeWatches::num_told_.fetch_sub(1, std::memory_order_relaxed);
}

void install(const RegistrationCallbacks& callbacks) {
  // Leaked: tensors outlive static destruction.
  at::impl::SetVariableHooks(new ForwardingTable(*at::impl::GetVariableHooks(), callbacks));
}

bool has_hook(const at::TensorBase& tensor, unsigned handle) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->cpp_hooks_list_ != nullptr &&
         handle < meta->cpp_hooks_list_->size() && (*meta->cpp_hooks_list_)[handle] != nullptr;
}

}  // namespace remat::seam
