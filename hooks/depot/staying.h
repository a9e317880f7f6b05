#pragma once
// Saved tensors that stay where they are until there is too much of them.
//
// Note [What stays]
// Backward reads, by and large, in the reverse order of saving. So what was saved last is asked for
// first, and moving it gains nothing: saved tensors stay where they are until they are more than a
// budget, and then those that were saved first move. A number of the last ones may stay whatever
// room there is. Bytes are those of storages, each counted once. One that others hold as well, such
// as a parameter or what the program still has in a variable, would not go with our reference: it
// takes nothing of the budget and does not move. Nobody is told when others let go of it. Each save
// looks again at up to 64 such tensors; more of them are looked at when a quarter as many tensors
// have been saved since, and at the end of the guard. So the cost of a save does not grow with what
// the program holds, but a tensor that the program has released may stay beyond the budget until
// then.

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

/// A saved tensor, of which its storage is all that counts here.
class InPlace {
 public:
  virtual ~InPlace() = default;
  /// Null when it has moved.
  virtual c10::Storage storage_in_place() = 0;
};

/// The operator that saves.
struct SavingOperator {
  std::thread::id thread;
  uint64_t number;
};

class Staying {
 public:
  /// [bytes]; `host_copies`: what else is on the CPU at its expense. `keep_last`: so many storages
  /// stay on each device in any case, those saved last.
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
    bool has_to_move = false;           ///< where it is too much: that it cannot is an error
    std::function<void()> on_move{};    ///< or empty
    uint64_t added = 0;                 ///< set by `add`: decides between equal numbers
  };
  /// Bytes that are counted as long as this lives.
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

  /// Dies when the tensor moves or nobody needs it any more.
  std::unique_ptr<Share> share_of(const at::Tensor& tensor);
  /// Takes note: from now on any thread that saves may move it. It comes after what has its number
  /// or a smaller one.
  void add(c10::Device device, Entry entry);
  /// Takes out what is to move from a device. `running`: what an operator may yet
  /// write to stays; null at the end of the guard.
  std::vector<Entry> take_excess(c10::Device device, const SavingOperator* running);
  std::vector<c10::Device> devices() const;
  /// How many bytes more may be on the device.
  int64_t room(c10::Device device) const;

 private:
  struct OfDevice {
    std::shared_ptr<std::atomic<int64_t>> bytes;  ///< at most: a storage may count more than once
    std::deque<Entry> entries;                    ///< in the order of saving
    /// The entries that others held when they were last looked at.
    std::deque<Entry> held{};
    std::size_t num_since = 0;  ///< so many have come since
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
