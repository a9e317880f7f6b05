#pragma once
// Shares recomputes between several backward calls, for a GraphExecGroup or a RecomputeCacheGuard.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "lib/frame/task.h"

namespace remat {

/// Lists the members that hold recomputed tensors for a group or a cache, by their latest use.
/// Members are held weakly, and called without a lock. Threads: any.
class SharedRecomputes {
 public:
  SharedRecomputes(TaskKey::Kind kind, int64_t max_bytes);
  SharedRecomputes& operator=(SharedRecomputes&&) = delete;

  /// Returns the shared recomputes of the innermost group around, otherwise of the innermost cache,
  /// or null.
  static std::shared_ptr<SharedRecomputes> around();

  const TaskKey& key() const { return key_; }

  /// Adds a member that holds `bytes` under this key. A cache makes room by having other members
  /// drop theirs. Returns false if that is not enough or the guard is gone: the member must not
  /// keep the bytes then.
  bool add(const c10::intrusive_ptr<TaskMember>& member, int64_t bytes);
  void touch(const TaskMember& member);
  /// Makes every member drop its values, as the guard is gone.
  void end() noexcept;

 private:
  struct Entry {
    c10::weak_intrusive_ptr<TaskMember> member;
    int64_t bytes;
  };
  const TaskKey key_;
  const int64_t max_bytes_;
  void forget(const TaskMember* member);  // holds the mutex

  std::mutex mutex_;          // guards the members below
  std::list<Entry> entries_;  // least recently used first
  std::unordered_map<const TaskMember*, std::list<Entry>::iterator> entry_of_;
  std::size_t next_sweep_ = 64;
  int64_t num_bytes_ = 0;
  bool has_ended_ = false;
};

}  // namespace remat
