#include "lib/inputs.h"

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

/// A tensor with the same data and version counter as `data` and the role of the input; `data` itself if
/// that asks for no more. Its own may be another by now: a parent's recompute made it, or the user said so.
at::Tensor in_role(at::Tensor data, GradRole role) {
  if ((role == GradRole::None || role == GradRole::NoGradViewOfLeaf) && grad_role_of(data) == role)
    return data;
  at::Tensor input = data.tensor_data();
  switch (role) {
    case GradRole::None:
      break;
    case GradRole::Leaf:
      input.set_requires_grad(true);
      break;
    case GradRole::Result:
      torch::autograd::create_gradient_edge(input, seam::make_node<InputEdge>());
      break;
    case GradRole::NoGradViewOfLeaf:
      input.set_requires_grad(true);
      return without_gradient_edge(input);
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
      saved_.emplace_back();
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
    const GradRole role = grad_role_of(tensor);
    const bool has_edge = role == GradRole::Leaf || role == GradRole::Result;
    SavingInput saving(tensor);
    Input made(has_edge ? tensor.tensor_data()
                        : tensor);  // may throw, as a growing SmallVector must not
    Input& input = saved_.emplace_back(std::move(made));
    if (has_edge) {
      input.place = WatchedPlace(tensor, role);
      input.has_tensor_hooks = !torch::autograd::impl::hooks(tensor).empty();
    }
    input.role = role;
    input.same_as = same_as;
    input.storage_number = storage_number;
    impls.push_back(tensor.unsafeGetTensorImpl());
    if (input.variable.has_hooks() && !saving.is_slot() && tensor.has_storage())
      input.watched.reset(new Watched{weak_storage_of(tensor),
                                      tensor.unsafeGetTensorImpl()->version_counter(),
                                      static_cast<uint32_t>(tensor._version())});
    if (!offload || tensor.is_cpu()) return;
    // A slot of the region around, or what a user's hooks took, is not here any more.
    if (!input.variable.has_hooks() && depot_of_inputs()->moves(tensor))
      input.variable.register_hooks(std::make_unique<Elsewhere>(depot_of_inputs(), &tensor));
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
    Watched* const watched = input.watched.get();
    const uint32_t expected = watched == nullptr ? 0 : watched->version.load();
    const uint32_t version = watched == nullptr ? 0 : watched->counter.current_version();
    at::Tensor tensor = input.variable.unpack();
    if (watched != nullptr) {
      if (version != expected && storage_of(tensor) == watched->storage._unsafe_get_target())
        throw_changed_argument(frame, static_cast<int64_t>(tensors.size()), tensor, expected,
                               version);
      if (version == expected) watched->version = watched->counter.current_version();
    }
    if (tensor.defined()) tensor = in_role(std::move(tensor), input.role);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace remat
