// Definitions of binding.h, except the first run (checkpoint.cpp) and waits (lib/base/waiting.cpp).

#include "remat/binding.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <utility>

#include "lib/frame/active_recomputes.h"
#include "lib/scope/hook_stack.h"

namespace remat {

int loaded_binding_abi() noexcept { return binding_abi; }

RegionBody::~RegionBody() = default;

void RegionBody::stop() { throw StopSignal{}; }
bool RegionBody::stop_soon() { return false; }
bool RegionBody::stop_at_region() { return false; }

void RegionBody::raise(CheckpointError error) { throw std::move(error); }

const TensorNames* RegionBody::tensor_names() const { return nullptr; }

TensorNames::~TensorNames() = default;

BackwardMark::BackwardMark(const torch::autograd::edge_list& roots,
                           const torch::autograd::edge_list& targets, bool accumulates) {
  backward_begins(roots, targets, accumulates);
}

BackwardMark::~BackwardMark() {
  if (!has_ended_) backward_ended({}, {});
}

void BackwardMark::finish(const torch::autograd::variable_list& gradients,
                          const torch::autograd::variable_list& given) {
  TORCH_CHECK_VALUE(!has_ended_,
                    "remat::BackwardMark: finish was called twice.\n"
                    "Cause: the first call ended the backward.\n"
                    "Hint: create one mark for each backward.");
  has_ended_ = true;
  backward_ended(gradients, given);
  backward_returned();
}

}  // namespace remat
