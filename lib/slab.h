#pragma once
// Room for objects of one type that die together: several to an allocation, each at a place that stays.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

namespace remat {

/// Gives out room and takes none back before it goes itself. Who makes an object in it destroys it
/// before. Not for several threads at once.
template <class T>
class Slab {
 public:
  /// For one object more.
  void* room() {
    if (num_free_ == 0) {
      const std::size_t size = std::min(max_block, std::size_t{1} << blocks_.size());
      blocks_.push_back(std::make_unique_for_overwrite<Room[]>(size));
      num_free_ = size;
    }
    return blocks_.back()[--num_free_].bytes;
  }

 private:
  struct Room {
    alignas(T) std::byte bytes[sizeof(T)];
  };
  static constexpr std::size_t max_block = 16;  // the first is for one: most regions keep little
  std::vector<std::unique_ptr<Room[]>> blocks_;
  std::size_t num_free_ = 0;
};

}  // namespace remat
