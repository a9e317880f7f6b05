#pragma once
// A range of a storage whose contents are in a place, shared by every saved tensor in that range.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "hooks/depot/move_totals.h"
#include "hooks/depot/prefetch_order.h"
#include "lib/seam/ready.h"
#include "remat/place.h"

namespace remat {

/// A function that calls its argument; computations of a place in that call belong to no region.
using AroundPlace = void (*)(c10::function_ref<void()>);

class Piece {
 public:
  /// Makes a piece of bytes `begin` to `end` of the tensor's storage, as elements of `kind`.
  /// `totals`: may be null. `begin_store` must be the first call.
  Piece(std::shared_ptr<Place> place, AroundPlace around, std::shared_ptr<MoveTotals> totals,
        const at::Tensor& tensor, int64_t begin, int64_t end, c10::ScalarType kind);
  ~Piece();
  Piece& operator=(Piece&&) = delete;

  /// Begins the store. Returns false if the place leaves the tensor in place.
  bool begin_store(const at::Tensor& tensor);
  /// Waits until the original is no longer needed.
  void finish_store();
  /// Sets whether the contents must reach the place: see HostContents::set_must_arrive.
  void set_must_arrive(bool must) const;
  /// Throws if the contents must arrive and are known to have failed.
  void check_arrival() const;
  /// Sets the order in which reads of this piece begin the loads of others.
  void set_order(std::shared_ptr<PrefetchOrder> order, uint64_t number);
  /// Returns whether `bytes` equal the contents. Call it only if the place is a ComparablePlace,
  /// for a tensor on the CPU.
  bool has_bytes_of(const char* bytes) const;

  /// Returns whether the original has an owner besides a running copy.
  bool is_source_alive() const;
  c10::Device device() const { return device_; }
  int64_t begin() const { return begin_; }
  int64_t num_bytes() const { return end_ - begin_; }
  bool is_stored_late() const { return is_stored_late_; }
  /// Returns whether a load was begun. Begins none if one is running or the contents are loaded.
  bool begin_load() noexcept;
  void cancel_load() noexcept;
  /// Returns the bytes of host memory that `begin_approach` would take. See NearerContents.
  int64_t bytes_to_approach() const;
  bool begin_approach() noexcept;
  struct Loaded {
    c10::Storage storage;          ///< of its own
    c10::VariableVersion counter;  ///< of tensors in it
    bool is_new = false;           ///< was loaded by this call
    bool was_begun = false;        ///< and the load had begun before this call
  };
  /// Loads the contents. They are shared while a tensor keeps them and none of their tensors was
  /// changed in place.
  Loaded load();

 private:
  at::Tensor flat_view(const at::Tensor& tensor) const;
  void use_place(c10::function_ref<void()> use) const;
  void finish_store_once();
  Loaded load_or_share();
  void check_loaded(const at::Tensor& loaded) const;

  const std::shared_ptr<Place> place_;  ///< dies after the contents
  const AroundPlace around_;
  const std::shared_ptr<MoveTotals> totals_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  const int64_t begin_, end_;
  const c10::Device device_;
  const c10::ScalarType kind_;
  bool is_stored_late_ = false;
  uint64_t number_ = 0;
  std::shared_ptr<PrefetchOrder> order_;
  std::shared_ptr<StoredContents> contents_;
  std::optional<Ready> stored_;  ///< on an accelerator

  std::mutex turn_;  ///< held by the thread that calls the contents
  bool is_store_finished_ = false, is_load_begun_ = false, is_approaching_ = false;
  c10::weak_intrusive_ptr<c10::StorageImpl> loaded_{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::VariableVersion loaded_counter_{c10::VariableVersion::DISABLED};
  std::optional<Ready> loaded_on_;
};

}  // namespace remat
