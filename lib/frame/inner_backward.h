#pragma once
// Detects backwards inside a region that its recompute could not repeat.
//
// Note [Backwards inside a region]
// A recompute gets its arguments without their history (Note [Inputs without history]). A backward
// in it ends at the arguments, without the graph beyond them and without the hooks of the
// originals. Where forward's backward continued, the recompute's would silently compute other
// gradients. So each backward that forward runs inside the region is examined. The recompute that
// reaches the same one, by its number, throws if it could not repeat it:
//   beyond    its targets are reached through the history of an argument
//   hooks     it takes the gradient of an argument that had hooks when the region began
//   original  (detected in the recompute) it takes the gradient of an argument whose original is in
//             use as a capture, too, or of that original beside the argument
// A recompute that is stopped before it gets there throws nothing.

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

#include "lib/tensor/graph_walk.h"

namespace remat {

class Inputs;
struct Region;

/// The inputs of which a backward in forward took gradients.
struct AskedOfInputs {
  const char* against = nullptr;         ///< why no recompute can repeat it
  c10::SmallVector<uint32_t, 2> inputs;  ///< those whose gradient it took
  bool is_nothing() const { return against == nullptr && inputs.empty(); }
};
AskedOfInputs asked_of(const Inputs& inputs, const torch::autograd::edge_list& roots,
                       const torch::autograd::edge_list& targets);

/// Returns why this backward of a recompute would not compute forward's gradients; null if it
/// would. `aliases`: the edges of the inputs that the recompute was given.
const char* against(const AskedOfInputs& asked, const Inputs& inputs,
                    c10::ArrayRef<WeakEdge> aliases, const torch::autograd::edge_list& roots,
                    const torch::autograd::edge_list& targets);

/// The reason for a hook that did not exist yet when forward ran the backward.
inline constexpr char hook_after_backward[] =
    "a gradient was taken inside a region whose function later registered a hook on an outside "
    "tensor";

[[noreturn]] void refuse_backward(const Region& region, const char* reason);

}  // namespace remat
