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

}  // namespace

void OutsideTensors::add(at::Tensor known) {
  if (is_planted(Fault::HookTwice)) return;
  const bool requires_grad = known.requires_grad();
  const seam::HooksByHand hooks = seam::hooks_by_hand(known);
  const auto& counter = known.unsafeGetTensorImpl()->version_counter();
  const uint32_t version = counter.enabled() ? counter.current_version() : 0;
  known_.push_back({std::move(known), requires_grad, version, hooks});
}

bool OutsideTensors::has_written() const {
  return std::any_of(known_.begin(), known_.end(), [](const Known& each) {
    const auto& counter = each.tensor.unsafeGetTensorImpl()->version_counter();
    return counter.enabled() && counter.current_version() != each.version;
  });
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
  for (const Known& each : known_) {
    seam::set_requires_grad_itself(each.tensor, each.requires_grad);
    is_lost_ = !seam::cut_hooks(each.tensor, each.hooks) || is_lost_;
  }
  for (const auto& [noted, requires_grad] : requires_grad_)
    if (const auto alive = noted.lock())
      seam::set_requires_grad_itself(at::Tensor(alive), requires_grad);
  for (const auto& [noted, handle] : hooks_)
    if (auto alive = noted.lock()) {
      // An in-place operator may have begun another list of hooks.
      const at::Tensor tensor(std::move(alive));
      if (seam::has_hook(tensor, handle)) tensor.remove_hook(handle);
    }
}

void OutsideTensors::finish(const Region& region) {
  put_back();
  if (is_lost_)
    throw_unsupported(
        region, "a recompute replaced the post-accumulate hooks of an outside tensor",
        "the region's function sets such hooks each time it runs, which removes the earlier ones",
        "set such hooks outside the region");
}

}  // namespace remat
