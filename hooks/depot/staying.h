#pragma once
// Saved tensors that stay in place until they exceed a budget.
//
// Note [What stays]
// Backward mostly reads in the reverse order of saving. The tensors that were saved last are read
// first, and moving them gains nothing. Saved tensors therefore stay in place until they exceed a
// budget; then the oldest move. A fixed number of the newest ones may stay whatever room there is.
// Bytes are those of storages, each counted once. A tensor with other owners, such as a parameter
// or a variable of the program, would not be freed by a move: it does not count, and does not move.
// No event tells when other owners release a tensor. Each save therefore checks up to 64 such
// tensors again. If there are more, they are checked when a quarter as many tensors have been saved
// since, and at the end of the guard. The cost of a save then does not grow with the tensors that
// the program holds. A tensor that the program has released may stay beyond the budget until the
// next check.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace remat {

/// A saved tensor; only its storage matters here.
class InPlace {
 public:
  virtual ~InPlace() = default;
  /// Returns the storage; null after a move.
  virtual c10::Storage storage_in_place() = 0;
};

/// The operator that saves a tensor.
struct SavingOperator {
  std::thread::id thread;
  uint64_t number;
};

class Staying {
 public:
  /// Makes the budgets. `on_cpu`, `on_each_device`: [bytes]. `host_copies`: other bytes that count
  /// in the CPU's budget. `keep_last`: number of the newest storages that stay on each device in
  /// any case.
  Staying(int64_t on_cpu, int64_t on_each_device,
          std::shared_ptr<const std::atomic<int64_t>> host_copies, int64_t keep_last);

  /// A saved tensor that may move.
  struct Entry {
    std::weak_ptr<InPlace> saved;
    SavingOperator by;
    std::optional<c10::Stream> stream;  ///< on which the operator was queued
    bool is_trusted;                    ///< nothing but in-place operators write to it
    bool is_complete;                   ///< the operator does not write to it
    uint64_t number;                    ///< in the order of saving
    bool has_to_move = false;           ///< beyond the budget, a failed move is an error
    std::function<void()> on_move{};    ///< called after a move; may be empty
    uint64_t added = 0;                 ///< set by `add`: decides between equal numbers
  };
  /// Bytes that count as long as this object lives.
  class Share {
   public:
    Share(std::shared_ptr<std::atomic<int64_t>> total, int64_t bytes)
        : total_(std::move(total)), bytes_(bytes) {
      *total_ += bytes_;
    }
    ~Share() { *total_ -= bytes_; }
    Share& operator=(Share&&) = delete;

   private:
    const std::shared_ptr<std::atomic<int64_t>> total_;
    const int64_t bytes_;
  };

  /// Returns the share of a tensor; its owner destroys it when the tensor moves or is released.
  std::unique_ptr<Share> share_of(const at::Tensor& tensor);
  /// Adds a tensor, which any thread that saves may move from now on. It is placed after entries
  /// with its number or a smaller one.
  void add(c10::Device device, Entry entry);
  /// Removes and returns the entries that must move from a device. `running`: the operator that
  /// saves now; tensors to which a running operator may still write stay. Null at the end of the
  /// guard.
  std::vector<Entry> take_excess(c10::Device device, const SavingOperator* running);
  std::vector<c10::Device> devices() const;
  /// Returns the bytes of the device's budget that are free.
  int64_t room(c10::Device device) const;

 private:
  struct OfDevice {
    /// Upper bound: a storage may count more than once.
    std::shared_ptr<std::atomic<int64_t>> bytes;
    std::deque<Entry> entries;  ///< in the order of saving
    /// Entries that had other owners at the last check.
    std::deque<Entry> held{};
    std::size_t num_since = 0;  ///< number of entries added since that check
  };
  int64_t budget(c10::Device device) const;
  static void look_at_held(OfDevice& here, bool at_all);

  const int64_t on_cpu_, on_each_device_, keep_last_;
  const std::shared_ptr<const std::atomic<int64_t>> host_copies_;
  mutable std::mutex mutex_;
  uint64_t num_added_ = 0;
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, OfDevice> devices_;
};

}  // namespace remat
