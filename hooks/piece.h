#pragma once
// A range of a storage whose contents wait elsewhere, for every saved tensor that lies in it.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "hooks/place.h"
#include "hooks/ready.h"

namespace remat {

class Depot;

class Piece {
 public:
  /// Bytes `begin` to `end` of the tensor's storage, as elements of `kind`. `is_trusted`: nothing
  /// but in-place operators write to it. `copy` comes before anything else.
  Piece(std::weak_ptr<Depot> depot, const at::Tensor& tensor, int64_t begin, int64_t end,
        c10::ScalarType kind, bool is_trusted);
  ~Piece();
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;

  /// False: the place had rather not.
  bool copy(const at::Tensor& tensor, Place& place);
  /// Whether a tensor's bytes `begin` to `end` are in here, with the contents that they have now.
  bool has(const at::Tensor& tensor, int64_t begin, int64_t end, c10::ScalarType kind,
           bool is_trusted) const;

  const c10::StorageImpl* source() const { return source_._unsafe_get_target(); }
  int64_t begin() const { return begin_; }
  bool is_late() const { return waiting_->is_late(); }
  /// The contents in a storage of their own, and the version counter of tensors in it. Shared while
  /// any tensor keeps it and none was changed in place.
  std::pair<c10::Storage, c10::VariableVersion> fetch();

 private:
  at::Tensor flat_view(const at::Tensor& tensor) const;
  uint64_t hash_of(const at::Tensor& tensor) const;

  const std::weak_ptr<Depot> depot_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  const int64_t begin_, end_;
  const c10::ScalarType kind_;
  const c10::VariableVersion counter_;
  const uint32_t version_;
  const bool is_trusted_;
  uint64_t hash_ = 0;
  std::shared_ptr<Waiting> waiting_;
  std::optional<Ready> copied_;  ///< on an accelerator

  std::mutex mutex_;
  c10::weak_intrusive_ptr<c10::StorageImpl> fetched_{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::VariableVersion fetched_counter_{c10::VariableVersion::DISABLED};
  std::optional<Ready> fetched_on_;
};

}  // namespace remat
