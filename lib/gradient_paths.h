#pragma once
// What a backward comes to on its way from its roots.

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <unordered_map>

namespace remat {

/// Where the gradient of a tensor goes, by identity: it keeps nothing alive, and is only compared.
/// A leaf's is known by the leaf itself, since its node is made when it is first needed.
struct GradientPlace {
  const void* at = nullptr;  ///< null: nowhere
  uint32_t output = 0;

  static GradientPlace of(const at::Tensor& tensor);
  static GradientPlace of(const torch::autograd::Edge& edge);
  bool is_somewhere() const { return at != nullptr; }
  bool operator==(const GradientPlace&) const = default;
};

/// Whether a node adds to the gradient of a leaf.
bool is_leaf(const torch::autograd::Node& node);

class Reached {
 public:
  /// Goes on below a node if `goes_on` says so of the place.
  explicit Reached(const torch::autograd::edge_list& roots,
                   c10::function_ref<bool(const GradientPlace&)> goes_on = everywhere);
  bool contain(const GradientPlace& place) const { return node_at(place) != nullptr; }
  bool contain(const torch::autograd::Edge& edge) const { return contain(GradientPlace::of(edge)); }
  /// Null if the place was not reached.
  torch::autograd::Node* node_at(const GradientPlace& place) const;

 private:
  static bool everywhere(const GradientPlace&) { return true; }
  struct Visit {
    torch::autograd::Node* node;
    c10::SmallVector<uint32_t, 2> outputs;
  };
  std::unordered_map<const void*, Visit> visits_;
};

}  // namespace remat
