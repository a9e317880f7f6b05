// Bodies of scope.h: the guards, and the queries about the running region.

#include "remat/scope.h"

#include <utility>

#include "lib/scope/op_log.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/variable_hooks.h"

namespace remat {

namespace detail {

ScopeGuard::ScopeGuard(std::shared_ptr<Scope> scope) : scope_(std::move(scope)) { push(scope_); }
ScopeGuard::~ScopeGuard() { pop(*scope_); }

namespace {

/// The scope of a guard that answers one question.
class GuardScope final : public Scope {
 public:
  explicit GuardScope(Ability ability, std::optional<bool> stops = {},
                      std::optional<bool> debugs = {}) {
    early_stop = stops;
    debug = debugs;
    answers(ability);
  }
};

class LevelScope final : public Scope {
 public:
  explicit LevelScope(int64_t training_level) : training_level_(training_level) {
    answers(Ability::Level);
  }
  int64_t training_level() const override { return training_level_; }

 private:
  const int64_t training_level_;
};

}  // namespace
}  // namespace detail

EarlyStopGuard::EarlyStopGuard(bool enabled)
    : ScopeGuard(std::make_shared<detail::GuardScope>(detail::Ability::EarlyStop, enabled)) {}
DebugGuard::DebugGuard(std::optional<bool> enabled)
    : ScopeGuard(
          std::make_shared<detail::GuardScope>(detail::Ability::Debug, std::nullopt, enabled)) {}
DisableCheckpointGuard::DisableCheckpointGuard()
    : ScopeGuard(std::make_shared<detail::GuardScope>(detail::Ability::Disable)) {}
CheckpointLevelGuard::CheckpointLevelGuard(int64_t training_level)
    : ScopeGuard(std::make_shared<detail::LevelScope>(training_level)) {}

struct UnseenGuard::Impl {
  const detail::NoScopes no_regions{detail::NoScopes::Hidden::Regions};
  const seam::OnlyNodeWatch no_watches{nullptr};
  OpLog* const log = OpLogScope::exchange(nullptr);
  ~Impl() { OpLogScope::exchange(log); }
};

UnseenGuard::UnseenGuard()
    : impl_(detail::innermost_region() == nullptr ? nullptr : std::make_unique<Impl>()) {}
UnseenGuard::~UnseenGuard() = default;

bool is_checkpointing_disabled() { return detail::innermost(detail::Ability::Disable) != nullptr; }

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
