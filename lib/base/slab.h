#pragma once
// Memory for objects of one type that die together: several to an allocation, each at a fixed
// address.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace remat {

/// Returns memory, and frees it only at its own end. The caller destroys its objects before that.
/// One thread at a time.
template <class T>
class Slab {
 public:
  Slab() = default;
  Slab(Slab&&) = delete;
  ~Slab() { clear(); }

  /// Returns memory for one more object.
  void* room() {
    if (num_free_ == 0) add_block(next_block_);
    return reinterpret_cast<std::byte*>(latest_ + 1) + sizeof(T) * --num_free_;
  }
  /// Returns memory for one more object; if it is the first, allocates for `expected` objects.
  void* room(std::size_t expected) {
    if (latest_ == nullptr) add_block(std::clamp<std::size_t>(expected, 1, max_block));
    return room();
  }
  /// Frees all memory, after its objects have been destroyed.
  void clear() noexcept {
    while (latest_ != nullptr) ::operator delete(std::exchange(latest_, latest_->before));
    num_free_ = 0;
  }

 private:
  struct alignas(T) alignas(void*) Block {
    Block* before;  // the memory follows
  };
  static_assert(alignof(Block) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);

  void add_block(std::size_t count) {
    latest_ = new (::operator new(sizeof(Block) + sizeof(T) * count)) Block{latest_};
    num_free_ = static_cast<uint32_t>(count);
    next_block_ = static_cast<uint32_t>(std::min(2 * count, max_block));
  }

  static constexpr std::size_t max_block = 16;
  Block* latest_ = nullptr;
  uint32_t num_free_ = 0;
  uint32_t next_block_ = 1;  // most slabs have few objects
};

}  // namespace remat
