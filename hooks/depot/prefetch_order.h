#pragma once
// The pieces of one depot in the order of storing, and their loads that run ahead.
//
// Note [Prefetching]
// Backward mostly reads in the reverse order of saving. Each read of a piece therefore begins the
// loads of the pieces stored before it, up to a depth. Unread loads are canceled when more of them
// run than the depth, or when the backward ends. Outside of a backward no loads run ahead, since
// neither the next read nor the time of release is known. A load that cannot begin (for lack of
// memory) is left to the read itself.
//
// With a budget of tensors in place (Note [What stays]), loads begin as soon as backward has made
// room for them, as many as there is room for. A piece that is beyond the host and has no room on
// its device yet is loaded to the host, as soon as the host has room (NearerContents). The file is
// then read from backward's first step on, and not only when a piece's turn comes. This needs no
// measured bandwidth. Each channel gets its loads in the order of backward's reads, each as early
// as the budgets allow. In another order, or later, no load would end earlier, and no read would
// wait less (docs/hooks.md, Tiers).

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
  /// A function that destroys its argument (after calling it, on success) when the backward on this
  /// thread ends. Returns false if no backward runs.
  using AtEndOfBackward = bool (*)(std::function<void()>);
  /// Makes an order. `depth`: least number of loads ahead. `staying`: its room allows more loads;
  /// may be null.
  PrefetchOrder(std::size_t depth, std::shared_ptr<Staying> staying, AtEndOfBackward at_end);

  /// Returns the number of the next saved piece, counting from 1.
  uint64_t next_number();
  void add(uint64_t number, const std::shared_ptr<Piece>& piece);
  void remove(uint64_t number);
  /// Begins the loads of the pieces before `number`, which has been read.
  void prefetch_before(uint64_t number);
  /// Begins the loads of all pieces, the last first.
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
  /// Pieces with this number or a larger one need no further check whether they are on the host.
  uint64_t looked_down_to_ = std::numeric_limits<uint64_t>::max();
  uint64_t last_number_ = 0;
  bool will_cancel_ = false;
};

}  // namespace remat
