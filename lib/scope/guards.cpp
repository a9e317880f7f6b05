// Bodies of scope.h: the guards, and the queries about the running region.

#include "remat/scope.h"

#include <limits>
#include <utility>

#include "lib/frame/frame.h"
#include "lib/frame/shared_recomputes.h"
#include "lib/scope/hook_stack.h"

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

class SharingScope final : public Scope {
 public:
  SharingScope(TaskKey::Kind kind, int64_t max_bytes)
      : backwards_(std::make_shared<SharedRecomputes>(kind, max_bytes)) {
    answers(kind == TaskKey::Kind::Group ? Ability::Group : Ability::Cache);
  }
  std::shared_ptr<SharedRecomputes> backwards() const override { return backwards_; }

 private:
  void on_close() override { backwards_->end(); }
  const std::shared_ptr<SharedRecomputes> backwards_;
};

std::shared_ptr<Scope> group_scope() {
  TORCH_CHECK(innermost(Ability::Group) == nullptr, "GraphExecGroup contexts cannot be nested");
  return std::make_shared<SharingScope>(TaskKey::Kind::Group, std::numeric_limits<int64_t>::max());
}

std::shared_ptr<Scope> cache_scope(int64_t max_bytes) {
  TORCH_CHECK_VALUE(max_bytes >= 0, "remat::RecomputeCacheGuard: max_bytes is ", max_bytes,
                    ". Do: give the bytes that may be kept, 0 or more.");
  return std::make_shared<SharingScope>(TaskKey::Kind::Cache, max_bytes);
}

}  // namespace
}  // namespace detail

EarlyStopGuard::EarlyStopGuard(bool enabled)
    : ScopeGuard(std::make_shared<detail::EarlyStopScope>(enabled)) {}
DebugGuard::DebugGuard(std::optional<bool> enabled)
    : ScopeGuard(std::make_shared<detail::DebugScope>(enabled)) {}
DisableCheckpointGuard::DisableCheckpointGuard()
    : ScopeGuard(std::make_shared<detail::DisableScope>()) {}

GraphExecGroup::GraphExecGroup() : ScopeGuard(detail::group_scope()) {}
RecomputeCacheGuard::RecomputeCacheGuard(RecomputeCacheOptions options)
    : ScopeGuard(detail::cache_scope(options.max_bytes)) {}

bool is_checkpointing() {
  const auto* region = detail::innermost(detail::Ability::Region);
  return region != nullptr && !region->is_inside_recompute;
}

bool is_recomputing() {
  const auto* region = detail::innermost(detail::Ability::Region);
  return region != nullptr && region->is_inside_recompute;
}

PhaseInfo current_phase() {
  const auto* region = detail::innermost(detail::Ability::Region);
  if (region == nullptr) return {};
  const Frame& frame = *region->frame();
  return {region->is_recompute ? Phase::Recompute : Phase::Forward, frame.id(), frame.depth(),
          frame.name()};
}

}  // namespace remat
