#include "lib/frame/shared_recomputes.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "lib/scope/hook_stack.h"
#include "remat/scope.h"

#include "lib/frame/task.h"

namespace remat {

namespace {

int64_t next_id() {
  static std::atomic<int64_t> next{0};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

namespace detail {

namespace {

class SharingScope final : public Scope {
 public:
  SharingScope(TaskKey::Kind kind, int64_t max_bytes)
      : shared_(std::make_shared<SharedRecomputes>(kind, max_bytes)) {
    answers(kind == TaskKey::Kind::Group ? Ability::Group : Ability::Cache);
  }
  const std::shared_ptr<SharedRecomputes>& shared() const { return shared_; }

 private:
  void on_close() override { shared_->end(); }
  const std::shared_ptr<SharedRecomputes> shared_;
};

std::shared_ptr<Scope> group_scope() {
  TORCH_CHECK(innermost(Ability::Group) == nullptr, "GraphExecGroup contexts cannot be nested");
  return std::make_shared<SharingScope>(TaskKey::Kind::Group, std::numeric_limits<int64_t>::max());
}

std::shared_ptr<Scope> cache_scope(int64_t max_bytes) {
  TORCH_CHECK_VALUE(max_bytes >= 0, "remat::RecomputeCacheGuard: max_bytes is ", max_bytes,
                    ". Hint: set the number of bytes to keep, 0 or more.");
  return std::make_shared<SharingScope>(TaskKey::Kind::Cache, max_bytes);
}

}  // namespace

}  // namespace detail

GraphExecGroup::GraphExecGroup() : ScopeGuard(detail::group_scope()) {}
RecomputeCacheGuard::RecomputeCacheGuard(RecomputeCacheOptions options)
    : ScopeGuard(detail::cache_scope(options.max_bytes)) {}

std::shared_ptr<SharedRecomputes> SharedRecomputes::around() {
  using detail::Ability, detail::is_any_open;
  if (!is_any_open(Ability::Group) && !is_any_open(Ability::Cache)) return nullptr;
  const detail::StackView around;
  const detail::Scope* sharing = around.innermost(detail::Ability::Group);
  if (sharing == nullptr) sharing = around.innermost(detail::Ability::Cache);
  return sharing == nullptr ? nullptr : static_cast<const detail::SharingScope&>(*sharing).shared();
}

SharedRecomputes::SharedRecomputes(TaskKey::Kind kind, int64_t max_bytes)
    : key_{kind, next_id()}, max_bytes_(max_bytes) {}

void SharedRecomputes::forget(const TaskMember* member) {
  const auto found = entry_of_.find(member);
  if (found == entry_of_.end()) return;
  num_bytes_ -= found->second->bytes;
  entries_.erase(found->second);
  entry_of_.erase(found);
}

bool SharedRecomputes::add(const c10::intrusive_ptr<TaskMember>& member, int64_t bytes) {
  std::vector<c10::intrusive_ptr<TaskMember>> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_ended_ || bytes > max_bytes_) return false;
    forget(member.get());
    while (num_bytes_ > max_bytes_ - bytes) {
      const TaskMember* const least_recent = entries_.front().member._unsafe_get_target();
      if (auto alive = entries_.front().member.lock()) dropped.push_back(std::move(alive));
      forget(least_recent);
    }
    // Members die while it lasts; forgetting them at every doubling keeps the list short.
    if (entries_.size() >= next_sweep_) {
      for (auto each = entries_.begin(); each != entries_.end();) {
        const auto next = std::next(each);
        if (each->member.expired()) forget(each->member._unsafe_get_target());
        each = next;
      }
      next_sweep_ = std::max<std::size_t>(64, 2 * entries_.size());
    }
    entries_.push_back({c10::weak_intrusive_ptr<TaskMember>(member), bytes});
    entry_of_[member.get()] = std::prev(entries_.end());
    num_bytes_ += bytes;
  }
  for (const auto& each : dropped) each->end_task(key_);
  return true;
}

void SharedRecomputes::touch(const TaskMember& member) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = entry_of_.find(&member); found != entry_of_.end())
    entries_.splice(entries_.end(), entries_, found->second);
}

void SharedRecomputes::end() noexcept {
  std::list<Entry> held;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
    held.swap(entries_);
    entry_of_.clear();
    num_bytes_ = 0;
  }
  for (const Entry& each : held)
    if (const auto member = each.member.lock()) member->end_task(key_);
}

}  // namespace remat
