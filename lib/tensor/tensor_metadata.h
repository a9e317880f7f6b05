#pragma once
// The description of a saved tensor with which its recomputed twin is compared.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace remat {

/// The shape, dtype, device and layout of a tensor, and its strides on request. Small: up to four
/// dimensions (two with strides) need no memory of their own.
class TensorMetadata {
 public:
  TensorMetadata() = default;
  TensorMetadata(const at::Tensor& tensor, bool with_strides);

  bool describes(const at::Tensor& tensor) const;
  /// Returns "Float[2, 3] on cpu", with strides if they were requested.
  std::string text() const;

  /// Returns the number of elements; 0 if unknown (nested tensors).
  int64_t numel() const;
  /// Returns the bytes of the elements; 0 if their number is unknown.
  int64_t num_bytes() const {
    return is_undefined() ? 0 : numel() * static_cast<int64_t>(c10::elementSize(dtype_));
  }
  /// Returns the sizes; empty if unknown (nested tensors).
  std::vector<int64_t> sizes() const;
  /// Returns the number of dimensions; 0 if unknown.
  int64_t dim() const { return dim_; }
  c10::ScalarType dtype() const { return dtype_; }
  c10::Device device() const { return device_; }
  bool has_strides() const { return has_strides_; }
  bool is_undefined() const { return dtype_ == c10::ScalarType::Undefined; }

 private:
  static constexpr std::size_t num_inline = 4;
  int64_t* words() { return more_ ? more_.get() : inline_.data(); }
  const int64_t* words() const { return more_ ? more_.get() : inline_.data(); }

  std::array<int64_t, num_inline> inline_{};
  std::unique_ptr<int64_t[]> more_{};
  c10::Device device_ = c10::kCPU;
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  c10::Layout layout_ = c10::kStrided;
  uint8_t dim_ = 0;
  bool has_sizes_ = true;
  bool has_strides_ = false;
};

}  // namespace remat
