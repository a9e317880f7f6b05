#include "lib/seam/hooks_off.h"

#include <utility>

namespace remat::seam {

HooksOff::HooksOff(at::Tensor leaf, NodePtr accumulator)
    : leaf_(std::move(leaf)), accumulator_(std::move(accumulator)) {
  exchange();
}

void HooksOff::exchange() noexcept {
  torch::autograd::AutogradMeta& meta = *torch::autograd::impl::get_autograd_meta(leaf_);
  meta.hooks_.swap(of_tensor_);
  meta.cpp_hooks_list_.swap(registered_);
  meta.post_acc_grad_hooks_.swap(after_accumulation_);
  accumulator_->pre_hooks().swap(before_node_);
  accumulator_->post_hooks().swap(after_node_);
}

}  // namespace remat::seam
