#include "lib/inputs.h"

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "hooks/elsewhere.h"
#include "lib/engine_seam.h"
#include "lib/match.h"
#include "lib/offload.h"

namespace remat {

namespace {

thread_local SavingInput* being_saved = nullptr;

/// Ends the gradient of a recompute's own backward at the input: the edge leads nowhere.
struct InputEdge final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
  std::string name() const override { return "remat::InputEdge"; }
};

/// A tensor with the same data and version counter as `data` and the autograd role of the input.
at::Tensor in_the_role_of_input(const at::Tensor& data, bool is_leaf) {
  at::Tensor input = data.tensor_data();
  if (is_leaf) {
    input.set_requires_grad(true);
  } else {
    torch::autograd::create_gradient_edge(input, seam::make_node<InputEdge>());
  }
  return input;
}

void refuse_tangent(const at::Tensor& tensor) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(tensor);
  // Asking for the tangent itself takes a lock; hardly any tensor has ever had one.
  if (meta != nullptr && meta->fw_grad_ != nullptr && tensor._fw_grad(/*level=*/0).defined())
    throw_unsupported("an argument carries a forward-mode tangent",
                      "forward-mode AD does not see what a recompute does",
                      "call the function without remat::checkpoint while forward-mode AD is used");
}

}  // namespace

bool has_gradient_edge(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return tensor.requires_grad() && meta != nullptr &&
         (meta->requires_grad_ || tensor.grad_fn() != nullptr);
}

at::Tensor without_gradient_edge(const at::Tensor& leaf) {
  at::NoGradGuard no_grad;
  return at::alias(leaf);
}

const at::Tensor* input_being_saved() {
  return being_saved == nullptr ? nullptr : being_saved->tensor_;
}
const at::Tensor* take_input_being_saved() {
  if (being_saved != nullptr) being_saved->is_slot_ = true;
  return input_being_saved();
}
SavingInput::SavingInput(const at::Tensor& tensor)
    : tensor_(&tensor), previous_(std::exchange(being_saved, this)) {}
SavingInput::~SavingInput() { being_saved = previous_; }

void Inputs::save(detail::RegionBody& body, bool offload) {
  c10::SmallVector<const c10::TensorImpl*, 8> impls;
  body.visit_inputs([&](at::Tensor& kept) {
    const at::Tensor tensor = std::exchange(kept, at::Tensor());
    if (!tensor.defined()) {
      saved_.push_back({{}, nullptr, {}, false, true, -1, -1});
      impls.push_back(nullptr);
      return;
    }
    // Saved once more all the same: in a parent's recompute the two may be different tensors, and
    // the number of slots must not depend on that.
    const auto known = std::find(impls.begin(), impls.end(), tensor.unsafeGetTensorImpl());
    const auto same_as = static_cast<int32_t>(known == impls.end() ? -1 : known - impls.begin());
    storages_.add(tensor);
    const auto storage_number = static_cast<int32_t>(storages_.number_of(storage_of(tensor)));
    refuse_tangent(tensor);
    const bool gets_role = has_gradient_edge(tensor);
    SavingInput saving(tensor);
    saved_.push_back({torch::autograd::SavedVariable(gets_role ? tensor.tensor_data() : tensor,
                                                     /*is_output=*/false),
                      nullptr, gets_role ? GradientPlace::of(tensor) : GradientPlace{}, gets_role,
                      tensor.is_leaf(), same_as, storage_number});
    impls.push_back(tensor.unsafeGetTensorImpl());
    if (saved_.back().variable.has_hooks() && !saving.is_slot() && tensor.has_storage())
      saved_.back().watched.reset(new Watched{weak_storage_of(tensor),
                                              tensor.unsafeGetTensorImpl()->version_counter(),
                                              static_cast<uint32_t>(tensor._version())});
    if (!offload || tensor.is_cpu()) return;
    auto& variable = saved_.back().variable;
    // A slot of the region around, or what a user's hooks took, is not here any more.
    if (!variable.has_hooks() && depot_of_inputs()->moves(tensor))
      variable.register_hooks(std::make_unique<Elsewhere>(depot_of_inputs(), &tensor));
  });
}

std::vector<at::Tensor> Inputs::unpack(const Frame& frame) const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(saved_.size());
  for (const Input& input : saved_) {
    if (input.same_as >= 0) {
      tensors.push_back(tensors[static_cast<std::size_t>(input.same_as)]);
      continue;
    }
    at::Tensor tensor = input.variable.unpack();
    if (const Watched* const watched = input.watched.get();
        watched != nullptr && watched->counter.current_version() != watched->version &&
        storage_of(tensor) == watched->storage._unsafe_get_target())
      throw_changed_argument(frame, static_cast<int64_t>(tensors.size()), tensor, watched->version,
                             watched->counter.current_version());
    if (input.gets_role)
      tensor = in_the_role_of_input(tensor, input.is_leaf);
    else if (tensor.defined() &&
             has_gradient_edge(tensor))  // a parent's recompute made a leaf of it
      tensor = without_gradient_edge(tensor);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace remat
