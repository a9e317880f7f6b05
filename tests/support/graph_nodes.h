#pragma once
// Nodes of the graph behind a tensor, held weakly.

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tests/support/gradients.h"

namespace remat::testing {

/// The pointer of an edge: `std::shared_ptr<Node>` before LibTorch 2.13, an `intrusive_ptr` since.
using NodePtr = decltype(torch::autograd::Edge::function);

namespace detail {
template <class P>
struct WeakOf;
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T, class Null>
struct WeakOf<c10::intrusive_ptr<T, Null>> {
  using type = c10::weak_intrusive_ptr<T, Null>;
};
}  // namespace detail

using WeakNodePtr = detail::WeakOf<NodePtr>::type;

/// Returns every node reachable from `y.grad_fn()`.
std::vector<NodePtr> nodes_below(const Tensor& y);

/// Weak references to every node below some tensors.
class WeakGraph {
 public:
  explicit WeakGraph(const Tensors& roots);
  int64_t size() const { return size_; }
  /// Returns the number of live nodes, and first releases references to dead ones. Since LibTorch
  /// 2.13 a weak reference keeps a dead node's saved variables, and one with hooks owns the
  /// accumulator of its leaf.
  int64_t alive() const;

 private:
  mutable std::vector<WeakNodePtr> nodes_;
  int64_t size_ = 0;
};

/// Makes a 0-d leaf `a` and `f(a)`. Returns whether every node of the graph is gone when both are
/// out of scope. A result without a graph counts as a failure.
template <class F>
bool graph_dies(F&& f) {
  std::optional<WeakGraph> graph;
  {
    const Tensor a = leaf({});
    const Tensor out = f(a);
    graph.emplace(Tensors{out});
    if (graph->size() == 0 || graph->alive() != graph->size()) return false;
  }
  return graph->alive() == 0;
}

}  // namespace remat::testing
