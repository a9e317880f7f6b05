#pragma once
// Backwards that a region's function runs: those that its recompute could not repeat.
//
// Note [Backwards inside a region]
// A recompute has its arguments without their history (Note [Inputs without history]): a backward in
// it ends there, without what lies beyond and without the hooks of the original. Where forward's went
// on, the recompute's would give other gradients, of which nothing could be seen. So each backward
// that forward runs inside the region is looked at, and the recompute that comes to the same one, by
// its number, throws if it could not repeat it:
//   beyond    its targets are reached through the history of an argument
//   hooks     it takes the gradient of an argument that has hooks
//   original  (seen in the recompute) it takes the gradient of an argument whose original is in use
//             beside it, as a capture, or of that original beside the argument
// A recompute that is stopped before it gets there throws nothing.

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "lib/gradient_paths.h"

namespace remat {

class Frame;
class Inputs;

/// Of one frame: its forward's backwards that no recompute can repeat, by number, and why.
class InnerBackwards {
 public:
  void note(int64_t number, const char* reason) { all_.emplace_back(number, reason); }
  /// Null if there is nothing against it.
  const char* against(int64_t number) const;

 private:
  std::vector<std::pair<int64_t, const char*>> all_;
};

/// In forward. Null, or why a recompute with such inputs could not repeat this backward.
const char* unrepeatable(const Inputs& inputs, const torch::autograd::edge_list& roots,
                         const torch::autograd::edge_list& targets);

/// In a recompute. `aliases`: the places of the inputs that it was given.
const char* meets_original(const Inputs& inputs, const std::vector<GradientPlace>& aliases,
                           const torch::autograd::edge_list& roots,
                           const torch::autograd::edge_list& targets);

[[noreturn]] void refuse_backward(const char* reason);

}  // namespace remat
