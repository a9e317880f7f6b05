#include "lib/snapshot.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "lib/accelerator.h"
#include "lib/planted_fault.h"

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
constexpr c10::DispatchKeySet graph_keys = c10::autograd_dispatch_keyset_with_ADInplaceOrView;

c10::DispatchKeySet exchange_hidden(c10::DispatchKeySet hidden) {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet before = keys.excluded_ & graph_keys;
  if (before == hidden) return before;
  keys.excluded_ = (keys.excluded_ - graph_keys) | hidden;
  c10::impl::_force_tls_local_dispatch_key_set(keys);
  return before;
}
}  // namespace

AmbientRestore::AmbientRestore(const Snapshot& snapshot)
    : autograd_(c10::AutogradState::get_tls_state()),
      autocast_(AutocastState::now()),
      has_cast_scope_(snapshot.autocast.is_any_enabled()) {
  if (autograd_.get_inference_mode()) no_inference_.emplace(false);
  if (!c10::GradMode::is_enabled()) c10::GradMode::set_enabled(true);
  hidden_ = exchange_hidden({});
  if (!(snapshot.autocast == autocast_) && !is_planted(Fault::Autocast)) snapshot.autocast.set();
  if (has_cast_scope_) autocast::increment_nesting();
}

AmbientRestore::~AmbientRestore() {
  // As the autocast scopes of the front ends do: the outermost one empties the cast cache.
  if (has_cast_scope_ && autocast::decrement_nesting() == 0) autocast::clear_cache();
  autocast_.set();
  exchange_hidden(hidden_);
  no_inference_.reset();
  c10::AutogradState::set_tls_state(autograd_);
}

}  // namespace remat
