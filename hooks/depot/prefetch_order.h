#pragma once
// The pieces of one depot in the order of storing, and those that are on their way back.
//
// Note [Prefetching]
// Backward reads, by and large, in the reverse order of saving. So each read of a piece begins the
// loads of those that were stored before it, up to a depth. What nobody asked for is cancelled when
// more than that are under way, or when that backward ends. Outside of a backward nothing is loaded
// ahead: there is no telling what is read next, nor when to let go of it. A load that cannot be
// begun (no memory to spare) is left to the read itself.
//
// Where saved tensors may stay in place up to a budget (Note [What stays]), loads begin as soon as
// backward has made room for them, as many as there is room for. What is further away than the host
// and has no room on its device yet comes to the host, as soon as there is room on that
// (NearerContents), so that the file is read from backward's first step on, and not when its turn
// comes. No bandwidth need be known for that. Each channel gets its loads in the order in which
// backward asks, each as early as the budgets let it: begun in another order, or later, none of
// them would end earlier, so nobody would wait less (docs/hooks.md, Tiers).

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace remat {

class Piece;
class Staying;

class PrefetchOrder : public std::enable_shared_from_this<PrefetchOrder> {
 public:
  /// Destroys its argument (after calling it, on success) when the backward that runs on this
  /// thread ends; false if none runs.
  using AtEndOfBackward = bool (*)(std::function<void()>);
  /// `depth`: so many at the least. `staying`: whose room decides how many more; null for none.
  PrefetchOrder(std::size_t depth, std::shared_ptr<Staying> staying, AtEndOfBackward at_end);

  /// Of what is saved next; counts from 1.
  uint64_t next_number();
  void add(uint64_t number, const std::shared_ptr<Piece>& piece);
  void remove(uint64_t number);
  /// `number` has been read: begins the loads of those before it.
  void prefetch_before(uint64_t number);
  /// Begins the loads of all, the last first.
  void begin_all();

 private:
  using Pieces = std::vector<std::shared_ptr<Piece>>;
  struct Further {
    Pieces to_host, others;
  };
  Pieces window_before(uint64_t number, Further& further);
  void look_for_room_on_host(uint64_t number, Further& further);
  void begin(const Pieces& window, const Pieces& to_host);
  bool cancels_at_end();
  void cancel_all();

  const std::size_t depth_;
  const std::shared_ptr<Staying> staying_;
  const AtEndOfBackward at_end_;
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Piece>> all_;
  std::deque<std::weak_ptr<Piece>> begun_;
  std::vector<std::weak_ptr<Piece>> approaching_;
  /// What has this number or a larger one needs no look whether it is on the host.
  uint64_t looked_down_to_ = std::numeric_limits<uint64_t>::max();
  uint64_t last_number_ = 0;
  bool will_cancel_ = false;
};

}  // namespace remat
