#pragma once
// A tensor that lies in an argument of a save_region's function, and can be made from it again.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace remat {

/// The place of a tensor in one of the arguments: the argument itself, or a view of it.
class InArgument {
 public:
  /// Returns the place of a tensor whose memory is an argument's, and whose elements are among that
  /// argument's elements; empty for others. A view of an argument whose memory has gaps counts as
  /// another tensor.
  static std::optional<InArgument> find(const at::Tensor& tensor,
                                        const std::vector<at::Tensor>& arguments);
  uint32_t argument() const { return argument_; }
  /// Returns the tensor in the arguments of a recompute, without a history of its own. Undefined if
  /// that argument has other sizes or another type than in forward.
  at::Tensor of(const std::vector<at::Tensor>& arguments) const;

 private:
  struct Layout {
    c10::SmallVector<int64_t, 5> sizes, strides;
  };
  static Layout layout_of(const at::Tensor& tensor);

  uint32_t argument_ = 0;
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  Layout whole_;                ///< of the argument
  std::optional<Layout> view_;  ///< of the tensor; empty if it is the argument itself
  int64_t offset_ = 0;          ///< of the tensor from the argument
};

}  // namespace remat
