#include "lib/seam/storage.h"

namespace remat::seam {

namespace {
template <class Impl>
bool asks_for_names(const Impl& impl) {
  if constexpr (requires { impl.has_named_tensor_meta(); }) return impl.has_named_tensor_meta();
  return false;
}
}  // namespace

bool has_names(const c10::TensorImpl& impl) { return asks_for_names(impl); }

}  // namespace remat::seam
