#pragma once
// The pieces of one depot in the order of storing, and those that are on their way back.
//
// Note [Prefetching]
// Backward reads, by and large, in the reverse order of saving. So each read of a piece begins the
// loads of those that were stored before it, up to a depth. What nobody asked for is cancelled when
// more than that are under way, or when that backward ends. Outside of a backward nothing is loaded
// ahead: there is no telling what is read next, nor when to let go of it. A load that cannot be begun
// (no memory to spare) is left to the read itself.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace remat {

class Piece;

class PrefetchOrder : public std::enable_shared_from_this<PrefetchOrder> {
 public:
  /// Destroys its argument (after calling it, on success) when the backward that runs on this thread
  /// ends; false if none runs.
  using AtEndOfBackward = bool (*)(std::function<void()>);
  PrefetchOrder(std::size_t depth, AtEndOfBackward at_end) : depth_(depth), at_end_(at_end) {}

  /// Numbers count from 1.
  uint64_t add(const std::shared_ptr<Piece>& piece);
  void remove(uint64_t number);
  /// `number` has been read: begins the loads of those before it.
  void prefetch_before(uint64_t number);

 private:
  bool cancels_at_end();
  void cancel_all();

  const std::size_t depth_;
  const AtEndOfBackward at_end_;
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Piece>> all_;
  std::deque<std::weak_ptr<Piece>> begun_;
  uint64_t last_number_ = 0;
  bool will_cancel_ = false;
};

}  // namespace remat
