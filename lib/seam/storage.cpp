#include "lib/seam/storage.h"

#include <string>

namespace remat::seam {

c10::Storage storage_without_data(std::size_t num_bytes, c10::Device device,
                                  std::string_view text) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, at::DataPtr(nullptr, device),
                       /*allocator=*/nullptr, /*resizable=*/false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      std::string(text));
  return storage;
}

bool has_storage_without_data(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  // Only such a storage has bytes and no data, outside of tracing. The pointer is checked last:
  // another thread may be making a lazy copy of a storage that has an allocator.
  auto& impl = const_cast<c10::StorageImpl&>(*tensor.storage().unsafeGetStorageImpl());
  return impl.allocator() == nullptr && !impl.resizable() && impl.nbytes() > 0 &&
         !tensor.is_meta() && impl._mutable_data_ptr_no_checks().get() == nullptr;
}

namespace {
template <class Impl>
bool asks_for_names(const Impl& impl) {
  if constexpr (requires { impl.has_named_tensor_meta(); }) return impl.has_named_tensor_meta();
  return false;
}
}  // namespace

bool has_names(const c10::TensorImpl& impl) { return asks_for_names(impl); }

}  // namespace remat::seam
