#include "lib/seam/lazy_copy.h"

#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace remat::seam {

namespace {

template <class Storage>
constexpr bool has_materializer =
    requires(Storage& storage, void (*before_write)(c10::StorageImpl*)) {
      storage.set_materializer(before_write);
      storage.clear_materializer();
      storage.has_materializer();
    };

struct Sharer;

/// Memory that storages share; they are in no order.
struct Sharing {
  at::DataPtr memory;
  c10::SmallVector<Sharer*, 3> sharers;
};

constexpr std::size_t nowhere = SIZE_MAX;

/// The context of the pointer of each sharing storage.
struct Sharer {
  std::shared_ptr<Sharing> sharing;
  c10::StorageImpl* storage;
  bool is_original;
  std::size_t place = nowhere;  // among the sharers
};

// Guards the lists of sharers, and copies before writes. Never destroyed: tensors outlive static
// objects.
std::mutex& sharing_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

void remove(Sharer& sharer) {
  if (sharer.place == nowhere) return;  // it has memory of its own
  auto& all = sharer.sharing->sharers;
  all[sharer.place] = all.back();
  all[sharer.place]->place = sharer.place;
  sharer.place = nowhere;
  all.pop_back();
}

void add(Sharer& sharer) {
  auto& all = sharer.sharing->sharers;
  sharer.place = all.size();
  all.push_back(&sharer);
}

/// The deleter of the pointers.
void leave(void* context) {
  const std::unique_ptr<Sharer> gone(
      static_cast<Sharer*>(context));  // frees the memory after the lock
  const std::lock_guard<std::mutex> lock(sharing_mutex());
  remove(*gone);
}

Sharer* sharer_of(c10::StorageImpl& storage) {
  const at::DataPtr& pointer = storage._mutable_data_ptr_no_checks();
  return pointer.get_deleter() == &leave ? static_cast<Sharer*>(pointer.get_context()) : nullptr;
}

[[maybe_unused]] at::DataPtr pointer_of(std::unique_ptr<Sharer> sharer) {
  const at::DataPtr& memory = sharer->sharing->memory;
  void* const data = memory.get();
  const c10::Device device = memory.device();
  return {data, sharer.release(), &leave, device};
}

/// Gives a storage memory of its own, which can be copied lazily again. The other sharers keep
/// theirs.
void move_away(Sharer& sharer) {
  c10::StorageImpl& storage = *sharer.storage;
  const auto own = std::make_shared<Sharing>();
  own->memory = storage.allocator()->clone(sharer.sharing->memory.get(), storage.nbytes());
  own->sharers.push_back(&sharer);
  // From here on nothing throws.
  remove(sharer);
  storage._mutable_data_ptr_no_checks().release_context();
  sharer.sharing = own;
  storage.set_data_ptr_noswap(pointer_of(std::unique_ptr<Sharer>(&sharer)));
}

/// The materializer. If memory runs out, it throws and is called again before the next write.
void before_write(c10::StorageImpl* storage) {
  const std::lock_guard<std::mutex> lock(sharing_mutex());
  Sharer* const writer = sharer_of(*storage);
  if (writer == nullptr) return;
  auto& all = writer->sharing->sharers;
  if (!writer->is_original) {
    if (all.size() > 1) move_away(*writer);
    return;
  }
  while (all.size() > 1) move_away(*(all.back() == writer ? all.front() : all.back()));
}

template <class Storage>
c10::intrusive_ptr<Storage> make_lazy_copy(Storage& storage) {
  if constexpr (has_materializer<Storage>) {
    c10::Allocator* const allocator = storage.allocator();
    if (storage.device_type() != c10::kCPU || allocator == nullptr ||
        storage.sym_nbytes().is_heap_allocated() || storage.nbytes() == 0)
      return {};
    const std::lock_guard<std::mutex> lock(sharing_mutex());
    at::DataPtr& pointer = storage._mutable_data_ptr_no_checks();
    const bool is_new = sharer_of(storage) == nullptr;
    if (pointer.get() == nullptr ||
        (is_new && (storage.has_materializer() || !allocator->is_simple_data_ptr(pointer))))
      return {};
    const auto sharing = is_new ? std::make_shared<Sharing>() : sharer_of(storage)->sharing;
    auto original = is_new ? std::make_unique<Sharer>(sharing, &storage, true) : nullptr;
    auto sharer = std::make_unique<Sharer>(sharing, nullptr, false);
    auto copy = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
        at::DataPtr(nullptr, pointer.device()), allocator, storage.resizable());
    sharing->sharers.reserve(sharing->sharers.size() + 2);
    // From here on nothing throws.
    if (is_new) {
      sharing->memory = std::move(pointer);
      add(*original);
      storage.set_data_ptr_noswap(pointer_of(std::move(original)));
    } else if (sharing->sharers.size() == 1) {
      sharer_of(storage)->storage = &storage;  // the pointer may come from another storage
      sharer_of(storage)->is_original = true;
    }
    sharer->storage = copy.get();
    add(*sharer);
    copy->set_data_ptr_noswap(pointer_of(std::move(sharer)));
    copy->set_materializer(&before_write);
    if (!storage.has_materializer()) storage.set_materializer(&before_write);
    return copy;
  }
  return {};
}

}  // namespace

c10::intrusive_ptr<c10::StorageImpl> lazy_copy(c10::StorageImpl& storage) {
  return make_lazy_copy(storage);
}

}  // namespace remat::seam
