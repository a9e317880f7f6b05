#pragma once
// Finds a pointer's place in a list, without a scan if the list is long.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

namespace remat {

/// An index of the caller's list, which only grows and whose pointers do not change. One thread at
/// a time.
class PlaceIndex {
 public:
  /// Returns the first place of the pointer, or -1. `size`: of the list; `pointer_at`: returns the
  /// pointer of a place.
  template <class PointerAt>
  int64_t find(const void* pointer, std::size_t size, PointerAt&& pointer_at) {
    if (size > max_scanned) {
      if (places_ == nullptr) places_ = std::make_unique<Places>();
      for (; num_indexed_ < size; ++num_indexed_)
        places_->try_emplace(pointer_at(num_indexed_), static_cast<int64_t>(num_indexed_));
      const auto found = places_->find(pointer);
      return found == places_->end() ? -1 : found->second;
    }
    for (std::size_t i = 0; i < size; ++i)
      if (pointer_at(i) == pointer) return static_cast<int64_t>(i);
    return -1;
  }

 private:
  static constexpr std::size_t max_scanned = 8;
  std::size_t num_indexed_ = 0;
  using Places = std::unordered_map<const void*, int64_t>;
  std::unique_ptr<Places> places_;  // only for longer lists
};

}  // namespace remat
