#include "lib/frame/outside_tensors.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "lib/base/planted_fault.h"
#include "lib/frame/mismatch.h"
#include "lib/seam/variable_hooks.h"

namespace remat {

namespace {

WeakTensor weak(const at::TensorBase& tensor) { return WeakTensor(tensor.getIntrusivePtr()); }

bool is_of(const WeakTensor& weak, const at::TensorBase& tensor) {
  return weak._unsafe_get_target() == tensor.unsafeGetTensorImpl();
}

/// The node that made a tensor, or that adds to a leaf's gradient; null if there is none.
torch::autograd::Node* node_of(const torch::autograd::AutogradMeta& meta) {
  if (meta.grad_fn_ != nullptr) return meta.grad_fn_.get();
  return meta.grad_accumulator_.expired() ? nullptr : meta.grad_accumulator_._unsafe_get_target();
}

template <class Hooks>
void shorten(Hooks& hooks, std::size_t size) {
  if (hooks.size() > size) hooks.resize(size);
}

}  // namespace

void HookNotes::add(const at::TensorBase& tensor, unsigned handle, bool follows_backward) {
  all_.push_back({weak(tensor), handle, follows_backward});
}

const HookNotes::Note* HookNotes::find(const at::TensorBase& tensor, std::size_t number) const {
  for (const Note& each : all_)
    if (is_of(each.tensor, tensor) && number-- == 0) return &each;
  return nullptr;
}

bool HookNotes::any_follows_backward() const {
  return std::any_of(all_.begin(), all_.end(),
                     [](const Note& each) { return each.follows_backward; });
}

void OutsideTensors::add(at::Tensor known) {
  if (is_planted(Fault::HookTwice)) return;
  const bool requires_grad = known.requires_grad();
  known_.push_back({std::move(known), requires_grad, {}});
  known_.back().hooks = hand_made(known_.back().tensor);
}

OutsideTensors::HandMade OutsideTensors::hand_made(const at::Tensor& tensor) {
  HandMade all;
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) return all;
  all.on_tensor = meta->hooks_.size();
  all.after_accumulation = meta->post_acc_grad_hooks_.get();
  if (torch::autograd::Node* const node = node_of(*meta)) {
    all.node = node;
    all.before_tensor = node->tensor_pre_hooks().size();
    all.before_node = node->pre_hooks().size();
    all.after_node = node->post_hooks().size();
  }
  return all;
}

/// False if something is lost.
bool OutsideTensors::put_back(const Known& known) {
  const at::Tensor& tensor = known.tensor;
  auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (meta == nullptr) return true;
  if (meta->grad_fn_ == nullptr && meta->requires_grad_ != known.requires_grad)
    meta->requires_grad_ = known.requires_grad;
  const HandMade& then = known.hooks;
  // Hooks of register_hook share one entry there, and were noted.
  if (meta->cpp_hooks_list_ == nullptr) shorten(meta->hooks_, then.on_tensor);
  if (torch::autograd::Node* const node = node_of(*meta); node != nullptr && node == then.node) {
    if (meta->cpp_hooks_list_ == nullptr) shorten(node->tensor_pre_hooks(), then.before_tensor);
    shorten(node->pre_hooks(), then.before_node);
    shorten(node->post_hooks(), then.after_node);
  }
  return meta->post_acc_grad_hooks_.get() == then.after_accumulation;
}

void OutsideTensors::note_requires_grad(const at::TensorBase& tensor) {
  for (const auto& [noted, requires_grad] : requires_grad_)
    if (is_of(noted, tensor)) return;
  requires_grad_.emplace_back(weak(tensor), tensor.requires_grad());
}

void OutsideTensors::note_hook(const at::TensorBase& tensor, unsigned handle) {
  hooks_.emplace_back(weak(tensor), handle);
}

std::size_t OutsideTensors::count_hook(const at::TensorBase& tensor) {
  for (auto& [counted, number] : counts_)
    if (is_of(counted, tensor)) return number++;
  counts_.emplace_back(weak(tensor), 1);
  return 0;
}

void OutsideTensors::put_back() noexcept {
  if (std::exchange(is_over_, true) || is_planted(Fault::HookTwice)) return;
  for (const Known& each : known_) is_lost_ = !put_back(each) || is_lost_;
  for (const auto& [noted, requires_grad] : requires_grad_)
    if (const auto alive = noted.lock()) {
      auto* const meta = torch::autograd::impl::get_autograd_meta(at::Tensor(alive));
      if (meta != nullptr && meta->grad_fn_ == nullptr) meta->requires_grad_ = requires_grad;
    }
  for (const auto& [noted, handle] : hooks_)
    if (auto alive = noted.lock()) {
      // An operator in place has begun another list of hooks.
      const at::Tensor tensor(std::move(alive));
      if (seam::has_hook(tensor, handle)) tensor.remove_hook(handle);
    }
}

void OutsideTensors::finish(const Region& region) {
  put_back();
  if (is_lost_)
    throw_unsupported(
        region, "a recompute replaced the post-accumulate hooks of a tensor from outside",
        "the region's function sets them each time it runs, and those that were there "
        "before are gone",
        "set such hooks outside the region");
}

}  // namespace remat
