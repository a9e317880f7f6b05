#pragma once
// Room for objects of one type that die together: several to an allocation, each at a place that stays.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace remat {

/// Gives out room and takes none back before it goes itself. Who makes an object in it destroys it
/// before. Not for several threads at once.
template <class T>
class Slab {
 public:
  /// Gives out room for one object more.
  void* room() {
    if (num_free_ == 0) {
      blocks_.push_back(std::make_unique_for_overwrite<Room[]>(next_block_));
      num_free_ = std::exchange(next_block_, std::min(2 * next_block_, max_block));
    }
    return blocks_.back()[--num_free_].bytes;
  }

 private:
  struct Room {
    alignas(T) std::byte bytes[sizeof(T)];
  };
  static constexpr std::size_t max_block = 16;
  std::vector<std::unique_ptr<Room[]>> blocks_;
  std::size_t num_free_ = 0;
  std::size_t next_block_ = 1;  // most regions keep little
};

}  // namespace remat
