#pragma once
// Determines a tensor's role in a backward, and the places that a backward reaches from its roots.

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <unordered_map>

#include "lib/tensor/capture.h"

namespace remat {

/// Returns whether operators see a tensor that requires grad. A view of a leaf made under no-grad
/// claims to (its base does), but has no gradient edge; it is passed on unchanged.
bool has_gradient_edge(const at::Tensor& tensor);
/// Returns the same without making the node of a view anew.
bool has_raw_gradient_edge(const at::Tensor& tensor);
/// Returns an alias of a leaf that requires grad, made like such a view.
at::Tensor without_gradient_edge(const at::Tensor& leaf);

/// The role of a tensor in a backward.
enum class GradRole : uint8_t {
  None,
  Leaf,    ///< that requires grad
  Result,  ///< with a history
  NoGradViewOfLeaf
};
GradRole grad_role_of(const at::Tensor& value);

/// The destination of a tensor's gradient, by identity: it holds nothing, and is only compared. A
/// leaf's is identified by the leaf itself, since its node is made when it is first needed.
struct GradientPlace {
  const void* at = nullptr;  ///< null for nowhere
  uint32_t sequence = 0;     ///< low bits of the node's: its address may be reused
  uint32_t output = 0;

  static constexpr uint32_t leaf = UINT32_MAX;  ///< the sequence of leaves
  static GradientPlace of(const at::Tensor& tensor);
  static GradientPlace of(const torch::autograd::Edge& edge);
  bool is_somewhere() const { return at != nullptr; }
  bool operator==(const GradientPlace&) const = default;
};

/// The place of a tensor that may die. While it watches a leaf, the leaf's address is not reused.
class WeakEdge {
 public:
  WeakEdge() = default;
  explicit WeakEdge(const at::Tensor& tensor);
  /// Makes the edge of a tensor whose role is known.
  WeakEdge(const at::Tensor& tensor, GradRole role);
  /// Returns the place; nowhere once the leaf is gone.
  GradientPlace get() const {
    return place_.sequence == GradientPlace::leaf && leaf_.expired() ? GradientPlace{} : place_;
  }
  /// Returns the leaf if it is one and alive; otherwise an undefined tensor.
  at::Tensor leaf() const;

 private:
  GradientPlace place_;
  WeakTensor leaf_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

/// Returns whether a node accumulates the gradient of a leaf.
bool is_leaf(const torch::autograd::Node& node);

class Reached {
 public:
  /// Collects the places reached from `roots`. Continues below a node if `goes_on` returns true for
  /// one of its places.
  explicit Reached(const torch::autograd::edge_list& roots,
                   c10::function_ref<bool(const GradientPlace&)> goes_on = everywhere)
      : Reached(roots, goes_on, 0) {}
  /// Collects only places that may lead to `targets`.
  static Reached towards(const torch::autograd::edge_list& targets,
                         const torch::autograd::edge_list& roots);
  bool contain(const GradientPlace& place) const { return node_at(place) != nullptr; }
  bool contain(const torch::autograd::Edge& edge) const { return contain(GradientPlace::of(edge)); }
  /// Returns null if the place was not reached.
  torch::autograd::Node* node_at(const GradientPlace& place) const;

 private:
  /// `least`: the lowest topological number of the targets; nodes with lower ones do not lead to
  /// them.
  Reached(const torch::autograd::edge_list& roots,
          c10::function_ref<bool(const GradientPlace&)> goes_on, uint64_t least);
  static bool everywhere(const GradientPlace&) { return true; }
  struct Visit {
    torch::autograd::Node* node;
    uint32_t sequence;
    bool is_passed = false;
    c10::SmallVector<uint32_t, 2> outputs;
  };
  std::unordered_map<const void*, Visit> visits_;
};

}  // namespace remat
