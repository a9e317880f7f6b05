// Bodies of scope.h: the guards, and the queries about the running region.

#include "remat/scope.h"

#include <utility>

#include "lib/scope/region_scope.h"

namespace remat {

namespace detail {

ScopeGuard::ScopeGuard(std::shared_ptr<Scope> scope) : scope_(std::move(scope)) { push(scope_); }
ScopeGuard::~ScopeGuard() { pop(*scope_); }

namespace {

class EarlyStopScope final : public Scope {
 public:
  explicit EarlyStopScope(bool enabled) {
    early_stop = enabled;
    answers(Ability::EarlyStop);
  }
};

class DebugScope final : public Scope {
 public:
  explicit DebugScope(std::optional<bool> enabled) {
    debug = enabled;
    answers(Ability::Debug);
  }
};

class DisableScope final : public Scope {
 public:
  DisableScope() { answers(Ability::Disable); }
};

}  // namespace
}  // namespace detail

EarlyStopGuard::EarlyStopGuard(bool enabled)
    : ScopeGuard(std::make_shared<detail::EarlyStopScope>(enabled)) {}
DebugGuard::DebugGuard(std::optional<bool> enabled)
    : ScopeGuard(std::make_shared<detail::DebugScope>(enabled)) {}
DisableCheckpointGuard::DisableCheckpointGuard()
    : ScopeGuard(std::make_shared<detail::DisableScope>()) {}

bool is_checkpointing() {
  const auto* const region = detail::innermost_region();
  return region != nullptr && !region->is_inside_recompute;
}

bool is_recomputing() {
  const auto* const region = detail::innermost_region();
  return region != nullptr && region->is_inside_recompute;
}

PhaseInfo current_phase() {
  const auto* const region = detail::innermost_region();
  if (region == nullptr) return {};
  const RegionInfo& info = region->region();
  return {region->is_recompute ? Phase::Recompute : Phase::Forward, info.id, info.depth,
          info.name()};
}

}  // namespace remat
