#pragma once
// Backwards that a region's function runs: those that its recompute could not repeat.
//
// Note [Backwards inside a region]
// A recompute has its arguments without their history (Note [Inputs without history]): a backward
// in it ends there, without what lies beyond and without the hooks of the original. Where forward's
// went on, the recompute's would give other gradients, of which nothing could be seen. So each
// backward that forward runs inside the region is looked at, and the recompute that comes to the
// same one, by its number, throws if it could not repeat it:
//   beyond    its targets are reached through the history of an argument
//   hooks     it takes the gradient of an argument that had hooks when the region began
//   original  (seen in the recompute) it takes the gradient of an argument whose original is in use
//             beside it, as a capture, or of that original beside the argument
// A recompute that is stopped before it gets there throws nothing.

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

#include "lib/tensor/graph_walk.h"

namespace remat {

class Inputs;
struct Region;

/// What a backward in forward asks of the inputs.
struct AskedOfInputs {
  const char* against = nullptr;         ///< why no recompute can repeat it
  c10::SmallVector<uint32_t, 2> inputs;  ///< whose gradient it took
  bool is_nothing() const { return against == nullptr && inputs.empty(); }
};
AskedOfInputs asked_of(const Inputs& inputs, const torch::autograd::edge_list& roots,
                       const torch::autograd::edge_list& targets);

/// Says why this backward of a recompute would not give what forward's did; null if it would.
/// `aliases`: of the inputs that the recompute was given.
const char* against(const AskedOfInputs& asked, const Inputs& inputs,
                    c10::ArrayRef<WeakEdge> aliases, const torch::autograd::edge_list& roots,
                    const torch::autograd::edge_list& targets);

/// A hook that was not there yet when forward ran the backward gives this reason.
inline constexpr char hook_after_backward[] =
    "a gradient was taken inside a region whose function later registers a hook on a tensor from "
    "outside";

[[noreturn]] void refuse_backward(const Region& region, const char* reason);

}  // namespace remat
