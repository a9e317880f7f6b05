#pragma once
// What part a tensor plays in a backward, and what a backward comes to on its way from its roots.

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <unordered_map>

#include "lib/tensor/capture.h"

namespace remat {

/// Whether operators see a tensor that requires grad. A view of a leaf made under no-grad claims to
/// (its base does), but has no gradient edge; it goes through as it is.
bool has_gradient_edge(const at::Tensor& tensor);
/// Whether they do, as far as it is known: the node of a view that has to be made anew is not.
bool has_raw_gradient_edge(const at::Tensor& tensor);
/// An alias of a leaf that requires grad, made as such a view is.
at::Tensor without_gradient_edge(const at::Tensor& leaf);

/// A tensor plays one of these parts.
enum class GradRole : uint8_t {
  None,
  Leaf,    ///< that requires grad
  Result,  ///< with a history
  NoGradViewOfLeaf
};
GradRole grad_role_of(const at::Tensor& value);

/// Where the gradient of a tensor goes, by identity: it keeps nothing alive, and is only compared.
/// A leaf's is known by the leaf itself, since its node is made when it is first needed.
struct GradientPlace {
  const void* at = nullptr;  ///< null: nowhere
  uint32_t sequence = 0;     ///< of the node, low bits: another may have its address later
  uint32_t output = 0;

  static constexpr uint32_t leaf = UINT32_MAX;  ///< the sequence of leaves
  static GradientPlace of(const at::Tensor& tensor);
  static GradientPlace of(const torch::autograd::Edge& edge);
  bool is_somewhere() const { return at != nullptr; }
  bool operator==(const GradientPlace&) const = default;
};

/// The place of a tensor that may die. While a leaf is watched, no other gets its address.
class WeakEdge {
 public:
  WeakEdge() = default;
  explicit WeakEdge(const at::Tensor& tensor);
  /// Makes the edge of a tensor whose role is known.
  WeakEdge(const at::Tensor& tensor, GradRole role);
  /// Nowhere, once the leaf is gone.
  GradientPlace get() const {
    return place_.sequence == GradientPlace::leaf && leaf_.expired() ? GradientPlace{} : place_;
  }
  /// The leaf, if it is one and alive; else undefined.
  at::Tensor leaf() const;

 private:
  GradientPlace place_;
  WeakTensor leaf_{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

/// Whether a node adds to the gradient of a leaf.
bool is_leaf(const torch::autograd::Node& node);

class Reached {
 public:
  /// Goes on below a node if `goes_on` says so of one of the places there.
  explicit Reached(const torch::autograd::edge_list& roots,
                   c10::function_ref<bool(const GradientPlace&)> goes_on = everywhere)
      : Reached(roots, goes_on, 0) {}
  /// Only what may lead to `targets`.
  static Reached towards(const torch::autograd::edge_list& targets,
                         const torch::autograd::edge_list& roots);
  bool contain(const GradientPlace& place) const { return node_at(place) != nullptr; }
  bool contain(const torch::autograd::Edge& edge) const { return contain(GradientPlace::of(edge)); }
  /// Returns null if the place was not reached.
  torch::autograd::Node* node_at(const GradientPlace& place) const;

 private:
  /// `least`: of the topological numbers of what is wanted; nodes below do not lead to it.
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
