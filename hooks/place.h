#pragma once
// A place where contents of saved tensors can wait for backward.

#include <ATen/core/Tensor.h>

#include <memory>

namespace remat {

/// Contents in some place; gone from there when this dies.
class Waiting {
 public:
  virtual ~Waiting() = default;
  /// A flat tensor like the one that was put there, in memory of its own, ready for use on the
  /// stream that is current. Any thread, one at a time.
  virtual at::Tensor fetch() = 0;
  /// The contents may be copied after `put` has returned: what is written to the original in between
  /// may be in them.
  virtual bool is_late() const { return false; }
};

class Place {
 public:
  virtual ~Place() = default;
  /// Whether something is gained by putting it there. `tensor` is strided, owns a storage with data,
  /// and is of LibTorch's plain tensor class.
  virtual bool takes(const at::Tensor& tensor) const = 0;
  /// Bytes are kept as bytes; otherwise elements are kept as numbers.
  virtual bool keeps_bytes() const { return true; }
  /// `flat`: one dimension, dense; of bytes, or of elements. It may be freed as soon as this returns.
  /// Null: this one had better stay where it is. What it throws reaches the caller of the operator that saves; nothing was kept then.
  virtual std::shared_ptr<Waiting> put(const at::Tensor& flat) = 0;
};

}  // namespace remat
