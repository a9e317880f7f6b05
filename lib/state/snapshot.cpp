#include "lib/state/snapshot.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "lib/base/planted_fault.h"
#include "lib/seam/accelerator.h"

namespace remat {

namespace autocast = at::autocast;

AutocastState AutocastState::now() {
  AutocastState state;
  const auto add = [&state](c10::DeviceType type) {
    state.devices.push_back(
        {type, autocast::is_autocast_enabled(type), autocast::get_autocast_dtype(type)});
  };
  add(c10::kCPU);
  if (const auto type = present_accelerator(); type && autocast::is_autocast_available(*type))
    add(*type);
  state.cache_enabled = autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::set() const {
  for (const Device& device : devices) {
    if (autocast::is_autocast_enabled(device.type) != device.enabled)
      autocast::set_autocast_enabled(device.type, device.enabled);
    if (autocast::get_autocast_dtype(device.type) != device.dtype)
      autocast::set_autocast_dtype(device.type, device.dtype);
  }
  if (autocast::is_autocast_cache_enabled() != cache_enabled)
    autocast::set_autocast_cache_enabled(cache_enabled);
}

bool AutocastState::is_any_enabled() const {
  return std::any_of(devices.begin(), devices.end(), [](const Device& d) { return d.enabled; });
}

namespace {

/// The keys that operators pass on their way to a kernel; code inside a kernel may be below them.
constexpr c10::DispatchKeySet watched_keys =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView |
    c10::DispatchKeySet(
        {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});

c10::DispatchKeySet hidden_keys() {
  return c10::impl::tls_local_dispatch_key_set().excluded_ & watched_keys;
}

/// The keys of vmap and other transforms, in which no region runs, but a backward may (with batched
/// gradients, for example).
constexpr c10::DispatchKeySet transform_keys{c10::DispatchKey::VmapMode,
                                             c10::DispatchKey::FuncTorchVmapMode,
                                             c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                             c10::DispatchKey::FuncTorchDynamicLayerBackMode};

void exchange_included(c10::DispatchKeySet without, c10::DispatchKeySet with) {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = (keys.included_ - without) | with;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

void hide_only(c10::DispatchKeySet hidden) {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = (keys.excluded_ - watched_keys) | hidden;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
}

}  // namespace

Snapshot Snapshot::take() {
  return {AutocastState::now(), c10::get_default_dtype_as_scalartype(), hidden_keys()};
}

bool Snapshot::has_default_dtype() const {
  return c10::get_default_dtype_as_scalartype() == default_dtype;
}

AmbientRestore::AmbientRestore(const Snapshot& snapshot)
    : autograd_(c10::AutogradState::get_tls_state()),
      autocast_(AutocastState::now()),
      has_cast_scope_(snapshot.autocast.is_any_enabled()) {
  if (autograd_.get_inference_mode()) no_inference_.emplace(false);
  if (!c10::GradMode::is_enabled()) c10::GradMode::set_enabled(true);
  transforms_ = c10::impl::tls_local_dispatch_key_set().included_ & transform_keys;
  if (!transforms_.empty()) exchange_included(transforms_, {});
  hidden_ = hidden_keys();
  if (hidden_ != snapshot.hidden) hide_only(snapshot.hidden);
  if (!(snapshot.autocast == autocast_) && !is_planted(Fault::Autocast)) snapshot.autocast.set();
  if (has_cast_scope_) autocast::increment_nesting();
}

AmbientRestore::~AmbientRestore() {
  // As in the autocast scopes of the front ends, the outermost one empties the cast cache.
  if (has_cast_scope_ && autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast_.set();
  if (hidden_keys() != hidden_) hide_only(hidden_);
  if (!transforms_.empty()) exchange_included({}, transforms_);
  no_inference_.reset();
  c10::AutogradState::set_tls_state(autograd_);
}

}  // namespace remat
