#include "lib/tensor/tensor_parts.h"

#include <typeinfo>

#include "lib/seam/plain_tensor.h"
#include "lib/seam/storage.h"

namespace remat {

bool TensorParts::can_take(const at::Tensor& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return typeid(impl) == typeid(c10::TensorImpl) && impl.layout() == c10::kStrided &&
         impl.has_storage() && impl.unsafe_storage() && !impl.is_inference() &&
         !impl.is_python_dispatch() && !impl.has_symbolic_sizes_strides() &&
         !seam::has_names(impl) && !impl.is_wrapped_number() && impl.get_backend_meta() == nullptr;
}

TensorParts::TensorParts(const at::Tensor& tensor)
    : storage_(tensor.unsafeGetTensorImpl()->unsafe_storage()),
      counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      keys_(tensor.key_set()),
      offset_(tensor.unsafeGetTensorImpl()->storage_offset()),
      dtype_(tensor.dtype()),
      may_change_metadata_(tensor.unsafeGetTensorImpl()->allow_tensor_metadata_change()) {
  layout_.set_sizes(tensor.sizes());
  layout_.set_strides(tensor.strides());
}

// Everything inline: a tensor is built for each input of each recompute.
[[gnu::flatten]] at::Tensor TensorParts::build() const {
  at::Tensor built = seam::plain_tensor(storage_, keys_, dtype_);
  c10::TensorImpl& impl = *built.unsafeGetTensorImpl();
  impl.set_sizes_and_strides(layout_.sizes_arrayref(), layout_.strides_arrayref(), offset_);
  impl.set_version_counter(counter_);
  impl.set_allow_tensor_metadata_change(may_change_metadata_);
  return built;
}

}  // namespace remat
