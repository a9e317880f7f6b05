#include "lib/inputs.h"

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "lib/engine_seam.h"
#include "lib/match.h"

namespace remat {

namespace {

thread_local const at::Tensor* being_saved = nullptr;

struct SavingInput {
  explicit SavingInput(const at::Tensor& tensor)
      : previous(std::exchange(being_saved, &tensor)) {}
  ~SavingInput() { being_saved = previous; }
  const at::Tensor* previous;
};

/// A tensor with the same data and version counter as `data` and the autograd role of the input.
at::Tensor in_the_role_of_input(const at::Tensor& data, bool is_leaf) {
  at::Tensor input = data.tensor_data();
  if (is_leaf) {
    input.set_requires_grad(true);
  } else {
    torch::autograd::create_gradient_edge(input, seam::make_node<torch::autograd::Identity>());
  }
  return input;
}

void refuse_tangent(const at::Tensor& tensor) {
  if (torch::autograd::impl::get_autograd_meta(tensor) != nullptr &&
      tensor._fw_grad(/*level=*/0).defined())
    throw_unsupported("an argument carries a forward-mode tangent",
                      "forward-mode AD does not see what a recompute does",
                      "call the function without remat::checkpoint while forward-mode AD is used");
}

}  // namespace

const at::Tensor* input_being_saved() { return being_saved; }

void Inputs::save(detail::RegionBody& body) {
  body.visit_inputs([this](at::Tensor& kept) {
    const at::Tensor tensor = std::exchange(kept, at::Tensor());
    if (!tensor.defined()) {
      saved_.push_back({{}, false, true});
      return;
    }
    refuse_tangent(tensor);
    const bool requires_grad = tensor.requires_grad();
    SavingInput saving(tensor);
    saved_.push_back({torch::autograd::SavedVariable(requires_grad ? tensor.tensor_data() : tensor,
                                                     /*is_output=*/false),
                      requires_grad, tensor.is_leaf()});
    storages_.add(tensor);
  });
}

std::vector<at::Tensor> Inputs::unpack() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(saved_.size());
  for (const Input& input : saved_) {
    at::Tensor tensor = input.variable.unpack();
    tensors.push_back(input.requires_grad ? in_the_role_of_input(tensor, input.is_leaf)
                                          : std::move(tensor));
  }
  return tensors;
}

}  // namespace remat
