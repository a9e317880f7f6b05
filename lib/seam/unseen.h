#pragma once
// A scope for the library's own operators, hidden from autograd, dispatch modes and profilers.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace remat {

/// Hides operators from an enclosing policy or debug log, which would take them for operators of
/// the region. Their results are never inference tensors, which have no version: a later backward
/// may read tensors that a backward in inference mode moved.
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
