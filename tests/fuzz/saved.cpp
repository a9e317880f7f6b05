// Reads saved tensors of nodes, as programs do that look into a graph.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <type_traits>

#include "tests/fuzz/run.h"
#include "tests/support/saving_functions.h"

namespace fuzz {

namespace {

namespace nodes = torch::autograd::generated;
using Node = std::decay_t<decltype(Tensor().grad_fn())>;

template <class Generated>
bool read(const Node& node, torch::autograd::SavedVariable Generated::* saved, Tensor& found) {
  auto* const generated = dynamic_cast<Generated*>(node.get());
  if (generated == nullptr) return false;
  found = (generated->*saved).unpack(node);
  return true;
}

template <class Function>
bool read(const Node& node, Tensor& found) {
  auto* const function = dynamic_cast<torch::autograd::CppNode<Function>*>(node.get());
  if (function == nullptr) return false;
  found = function->ctx_.get_saved_variables()[0];
  return true;
}

}  // namespace

Tensor saved_of(const Tensor& a) {
  const Node node = a.grad_fn();
  Tensor found;
  if (node == nullptr) return found;
  const bool is_known = read(node, &nodes::SinBackward0::self_, found) ||
                        read(node, &nodes::CosBackward0::self_, found) ||
                        read(node, &nodes::MulBackward0::self_, found) ||
                        read(node, &nodes::DivBackward0::other_, found) ||
                        read(node, &nodes::PowBackward0::self_, found) ||
                        read(node, &nodes::ExpBackward0::result_, found) ||
                        read(node, &nodes::TanhBackward0::result_, found) ||
                        read(node, &nodes::SigmoidBackward0::result_, found) ||
                        read(node, &nodes::MmBackward0::mat2_, found) ||
                        read<remat::testing::SavesInput>(node, found) ||
                        read<remat::testing::SavesOutput>(node, found) ||
                        read<remat::testing::ReadsTwice>(node, found);
  return is_known ? found : Tensor();
}

}  // namespace fuzz
