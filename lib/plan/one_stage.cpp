#include "lib/plan/one_stage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "lib/seam/engine.h"

namespace remat {

namespace {

class StageBehind final : public torch::autograd::Node {
 public:
  explicit StageBehind(at::Tensor gradient) : gradient_(std::move(gradient)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    torch::autograd::variable_list gradients;
    gradients.push_back(std::move(gradient_));
    return gradients;
  }
  std::string name() const override { return "remat::StageBehind"; }

 private:
  at::Tensor gradient_;
};

}  // namespace

void wait_for_engine(c10::Device device) {
  if (device.is_cpu()) return;
  const at::Tensor nothing = at::empty({0}, at::TensorOptions(at::kFloat).device(device));
  nothing.set_requires_grad(true);
  nothing.neg().backward(at::empty_like(nothing));
}

int64_t storage_bytes(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.has_storage() || tensor.device() != device) return 0;
  return static_cast<int64_t>(tensor.storage().nbytes());
}

const c10::StorageImpl* identity_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

int64_t gradient_bytes(const at::Tensor& tensor, c10::Device device) {
  const bool has_gradient = tensor.requires_grad() && tensor.device() == device;
  return has_gradient ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

at::Tensor input_from(const at::Tensor& value, bool requires_grad) {
  at::Tensor input = value.detach();
  if (requires_grad)
    torch::autograd::create_gradient_edge(input,
                                          seam::make_node<seam::EndNode>("remat::StageBefore"));
  return input;
}

BackwardOfStage::BackwardOfStage(const at::Tensor& output, const Start& start, bool is_last)
    : start_(start) {
  at::Tensor gradient = at::ones_like(output);
  if (is_last) callers_ = gradient;
  auto behind = seam::make_node<StageBehind>(std::move(gradient));
  behind->add_next_edge(torch::autograd::impl::gradient_edge(output));
  at::Tensor root = start.root;
  torch::autograd::create_gradient_edge(root, std::move(behind));
}

// The constructor delegates. If a gradient does not fit into memory, the destructor therefore runs
// and removes those made before.
GradientScope::GradientScope(const at::Tensor& result) : GradientScope() {
  seam::visit_nodes({{result.grad_fn(), 0}}, [this](const seam::NodePtr& node) {
    if (auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) {
      before_.emplace_back(leaf->variable, leaf->variable.grad());
      leaf->variable.mutable_grad() = at::zeros_like(leaf->variable);
      hooks_.push_back(std::make_unique<seam::HooksOff>(leaf->variable, node));
    }
  });
}
GradientScope::~GradientScope() {
  for (auto& [leaf, gradient] : before_) leaf.mutable_grad() = gradient;
}

// Note [Measuring in a region]
// A program may measure, or call a `Fitted` with an input of a new kind, in a region. Tensors that
// the stages save would then wait for a recompute of that region, which would measure everything
// again, and so on. So the stages run as if there were no region. Guards around the region do not
// apply either, since their scopes are below the region's.
OutsideRegions::OutsideRegions() {
  if (detail::innermost(detail::Ability::Region) != nullptr) no_scopes_.emplace();
}
OutsideRegions::~OutsideRegions() = default;

}  // namespace remat
