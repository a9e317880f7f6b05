#pragma once
// A scope for operators of our own, which neither autograd, dispatch modes nor profilers shall see.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace remat {

/// A policy or a debug log around would take them for operators of the region. Their results are
/// never inference tensors, which have no version: a backward in inference mode moves tensors that
/// a later one reads, too.
class Unseen {
 private:
  const c10::InferenceMode no_inference_{false};  // first, since it sets all that follows
  const c10::AutoGradMode no_grad_{false};
  const at::DisableRecordFunctionGuard unrecorded_;
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  const c10::impl::ExcludeDispatchKeyGuard no_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace remat
