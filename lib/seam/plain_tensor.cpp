#include "lib/seam/plain_tensor.h"

#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <typeinfo>
#include <utility>

namespace remat::seam {

namespace {

/// Accesses protected members that LibTorch offers to classes of tensors.
struct OfClass : c10::TensorImpl {
  static void set_keys(c10::TensorImpl& impl, c10::DispatchKeySet keys) {
    impl.*(&OfClass::key_set_) = keys;
  }
  static void copy(c10::TensorImpl& from, c10::TensorImpl& to) {
    copy_tensor_metadata(&from, &to, from.version_counter(), from.allow_tensor_metadata_change());
  }
};

/// A tensor without keys gets no version counter.
c10::intrusive_ptr<c10::TensorImpl> without_counter(c10::Storage storage, caffe2::TypeMeta dtype) {
  return c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage),
                                              c10::DispatchKeySet(), dtype);
}

}  // namespace

at::Tensor plain_tensor(c10::Storage storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype) {
  auto impl = without_counter(std::move(storage), dtype);
  OfClass::set_keys(*impl, keys);
  return at::Tensor(std::move(impl));
}

at::Tensor alias_without_history(const at::Tensor& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (typeid(impl) != typeid(c10::TensorImpl) || impl.is_python_dispatch() || impl.is_inference() ||
      !impl.unsafe_storage() ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python))  // modes are asked
    return tensor.tensor_data();
  auto alias = without_counter(c10::Storage(impl.unsafe_storage()), impl.dtype());
  OfClass::copy(impl, *alias);
  return at::Tensor(std::move(alias));
}

}  // namespace remat::seam
