// Hooks and guards that keep saved tensors without changing them.

#include "tests/table/surroundings.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

namespace table {

namespace {

using at::Tensor;
using remat::SavedTensorHooksGuard;

/// A storage as bytes, with the other parts of a tensor; a tensor without storage is kept itself.
struct Bytes {
  Tensor kept;
  std::vector<char> bytes;
  at::TensorOptions options;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  bool is_conj = false, is_neg = false;
};

bool has_plain_storage(const Tensor& t) {
  return t.layout() == at::kStrided && t.has_storage() && !t._is_zerotensor() && !t.is_nested();
}

Bytes to_bytes(const Tensor& t) {
  if (!has_plain_storage(t)) return {t.detach(), {}, {}, {}, {}};
  const auto* data = static_cast<const char*>(t.storage().data());
  return {Tensor(),          {data, data + t.storage().nbytes()},
          t.options(),       t.sizes().vec(),
          t.strides().vec(), t.storage_offset(),
          t.is_conj(),       t.is_neg()};
}

Tensor from_bytes(const Bytes& packed) {
  if (packed.kept.defined()) return packed.kept;
  Tensor all = at::empty({static_cast<int64_t>(packed.bytes.size())}, at::kByte);
  if (!packed.bytes.empty()) std::memcpy(all.data_ptr(), packed.bytes.data(), packed.bytes.size());
  Tensor tensor = at::empty({0}, packed.options)
                      .set_(all.storage(), packed.offset, packed.sizes, packed.strides);
  tensor._set_conj(packed.is_conj);
  tensor._set_neg(packed.is_neg);
  return tensor;
}

/// Returns a copy with the layout of the original, so that the same kernels read it.
Tensor exact_copy(const Tensor& t) {
  return has_plain_storage(t) ? from_bytes(to_bytes(t)) : t.detach().clone();
}

const std::string& directory() {
  struct Directory {
    Directory() {
      char text[] = "/tmp/remat-table-XXXXXX";
      const char* made = mkdtemp(text);
      TORCH_CHECK(made != nullptr, "no temporary directory could be made");
      path = made;
    }
    ~Directory() { rmdir(path.c_str()); }
    std::string path;
  };
  static const Directory made;
  return made.path;
}

}  // namespace

Autocast::Autocast() : was_enabled_(at::autocast::is_autocast_enabled(at::kCPU)) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
}

std::unique_ptr<SavedTensorHooksGuard> hooks_that_clone() {
  return std::make_unique<SavedTensorHooksGuard>(exact_copy, [](const Tensor& t) { return t; });
}

std::unique_ptr<SavedTensorHooksGuard> hooks_that_keep() {
  auto same = [](const Tensor& t) { return t; };
  return std::make_unique<SavedTensorHooksGuard>(same, same);
}

std::unique_ptr<SavedTensorHooksGuard> hooks_to_bytes() {
  return std::make_unique<SavedTensorHooksGuard>(to_bytes, from_bytes);
}

std::unique_ptr<remat::SaveOnDiskGuard> save_on_disk() {
  return std::make_unique<remat::SaveOnDiskGuard>(
      remat::SaveOnDiskOptions{.directory = directory(), .min_bytes = 0});
}

}  // namespace table
