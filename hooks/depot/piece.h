#pragma once
// A range of a storage whose contents are in a place, for every saved tensor that lies in it.

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

class Depot;

/// Calls its argument; what a place computes in it belongs to no region.
using AroundPlace = void (*)(c10::function_ref<void()>);

class Piece {
 public:
  /// Bytes `begin` to `end` of the tensor's storage, as elements of `kind`. `is_trusted`: nothing
  /// but in-place operators write to it. `totals`: null if nobody counts. `begin_store` comes
  /// before anything else.
  Piece(std::weak_ptr<Depot> depot, std::shared_ptr<Place> place, AroundPlace around,
        std::shared_ptr<MoveTotals> totals, const at::Tensor& tensor, int64_t begin, int64_t end,
        c10::ScalarType kind, bool is_trusted);
  ~Piece();
  Piece& operator=(Piece&&) = delete;

  /// False: the place wants it to stay where it is.
  bool begin_store(const at::Tensor& tensor);
  /// The original is not needed any more.
  void finish_store();
  /// Whether it has to be in the place: see HostContents::set_must_arrive.
  void set_must_arrive(bool must) const;
  /// Throws if it is known by now that it is not.
  void check_arrival() const;
  /// The memory of the CPU that it is copied to; undefined if there is none. The bytes may not be
  /// there yet.
  at::Tensor host_memory() const;
  /// Returns when they are.
  void wait_for_host() const;
  /// Reads of it begin the loads of others.
  void set_order(std::shared_ptr<PrefetchOrder> order, uint64_t number);
  /// Nobody writes to the original until that batch is over.
  void set_batch(uint64_t batch) { batch_ = batch; }
  /// Whether a tensor's bytes `begin` to `end` are in here, with the contents that they have now.
  /// `batch`: which is not over, or 0.
  bool has(const at::Tensor& tensor, int64_t begin, int64_t end, c10::ScalarType kind,
           bool is_trusted, uint64_t batch) const;

  const c10::StorageImpl* source() const { return source_._unsafe_get_target(); }
  /// Whether anybody has the original yet, but for a copy that is under way.
  bool is_source_alive() const;
  c10::Device device() const { return device_; }
  /// In the order of storing.
  uint64_t number() const { return number_; }
  int64_t begin() const { return begin_; }
  int64_t num_bytes() const { return end_ - begin_; }
  bool is_stored_late() const { return is_stored_late_; }
  /// Whether a load was begun: not if one is under way, or there is nothing to load.
  bool begin_load() noexcept;
  void cancel_load() noexcept;
  /// [bytes] of the host that it would take to have it nearer. See NearerContents.
  int64_t bytes_to_approach() const;
  bool begin_approach() noexcept;
  struct Loaded {
    c10::Storage storage;          ///< of its own
    c10::VariableVersion counter;  ///< of tensors in it
    bool is_new = false;           ///< came from the place just now
    bool was_begun = false;        ///< and had been begun before it was asked for
  };
  /// Shared while any tensor keeps it and none was changed in place.
  Loaded load();

 private:
  at::Tensor flat_view(const at::Tensor& tensor) const;
  const char* bytes_of(const at::Tensor& tensor) const;
  uint64_t hash_of(const at::Tensor& tensor) const;
  void use_place(c10::function_ref<void()> use) const;
  void finish_store_once();
  Loaded load_or_share();
  void check_loaded(const at::Tensor& loaded) const;

  const std::weak_ptr<Depot> depot_;
  const std::shared_ptr<Place> place_;  ///< dies after the contents
  const AroundPlace around_;
  const std::shared_ptr<MoveTotals> totals_;
  const c10::weak_intrusive_ptr<c10::StorageImpl> source_;
  const int64_t begin_, end_;
  const c10::Device device_;
  const c10::ScalarType kind_;
  const c10::VariableVersion counter_;
  const uint32_t version_;
  const bool is_trusted_;
  const bool is_comparable_;  ///< by the place; else by a hash, if on the CPU
  bool is_stored_late_ = false;
  uint64_t hash_ = 0, number_ = 0, batch_ = 0;
  std::shared_ptr<PrefetchOrder> order_;
  std::shared_ptr<StoredContents> contents_;
  std::optional<Ready> stored_;  ///< on an accelerator

  std::mutex turn_;  ///< of those that call the contents
  bool is_store_finished_ = false, is_load_begun_ = false, is_approaching_ = false;
  c10::weak_intrusive_ptr<c10::StorageImpl> loaded_{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::VariableVersion loaded_counter_{c10::VariableVersion::DISABLED};
  std::optional<Ready> loaded_on_;
};

}  // namespace remat
