#pragma once
// A scope for operators of our own, which neither autograd, dispatch modes nor profilers shall see.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace remat {

/// A policy or a debug log around would take them for operators of the region.
class Unseen {
 private:
  const c10::AutoGradMode no_grad_{false};
  const at::DisableRecordFunctionGuard unrecorded_;
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  const c10::impl::ExcludeDispatchKeyGuard no_modes_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace remat
