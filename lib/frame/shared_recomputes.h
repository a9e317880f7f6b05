#pragma once
// Several backward calls that share recomputes: what a GraphExecGroup or a RecomputeCacheGuard
// holds.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "lib/frame/task.h"

namespace remat {

/// The members that hold recomputed tensors for it, in the order of their latest use. Members are
/// held weakly, and called without a lock. Threads: any.
class SharedRecomputes {
 public:
  SharedRecomputes(TaskKey::Kind kind, int64_t max_bytes);
  SharedRecomputes& operator=(SharedRecomputes&&) = delete;

  /// Returns that of the innermost group around, else of the innermost cache; null if there is
  /// neither.
  static std::shared_ptr<SharedRecomputes> around();

  const TaskKey& key() const { return key_; }

  /// The member holds so many bytes under this key. A cache makes room by having other members drop
  /// theirs; false if even that does not do, or if it is over: then the member may not keep them.
  bool add(const c10::intrusive_ptr<TaskMember>& member, int64_t bytes);
  void touch(const TaskMember& member);
  /// The guard is gone: every member drops what it holds for it.
  void end() noexcept;

 private:
  struct Entry {
    c10::weak_intrusive_ptr<TaskMember> member;
    int64_t bytes;
  };
  const TaskKey key_;
  const int64_t max_bytes_;
  void forget(const TaskMember* member);  // holds the mutex

  std::mutex mutex_;          // guards what follows
  std::list<Entry> entries_;  // the one used least recently first
  std::unordered_map<const TaskMember*, std::list<Entry>::iterator> entry_of_;
  std::size_t next_sweep_ = 64;
  int64_t num_bytes_ = 0;
  bool has_ended_ = false;
};

}  // namespace remat
