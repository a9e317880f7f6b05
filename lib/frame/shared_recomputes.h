#pragma once
// Several backward calls that share recomputes: what a GraphExecGroup or a RecomputeCacheGuard holds.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "lib/frame/frame.h"
#include "lib/frame/task_key.h"

namespace remat {

/// The frames that hold recomputed tensors for it, in the order of their latest use. Frames are held
/// weakly, and called without a lock. Threads: any.
class SharedRecomputes {
 public:
  SharedRecomputes(TaskKey::Kind kind, int64_t max_bytes);
  SharedRecomputes(const SharedRecomputes&) = delete;
  SharedRecomputes& operator=(const SharedRecomputes&) = delete;

  const TaskKey& key() const { return key_; }
  bool is_cache() const { return key_.kind == TaskKey::Kind::Cache; }

  /// The frame holds so many bytes under this key. A cache makes room by having other frames drop
  /// theirs; false if even that does not do, or if it is over: then the frame may not keep them.
  bool add(const c10::intrusive_ptr<Frame>& frame, int64_t bytes);
  void touch(const Frame& frame);
  /// The guard is gone: every frame drops what it holds for it.
  void end() noexcept;

 private:
  struct Entry {
    c10::weak_intrusive_ptr<Frame> frame;
    int64_t bytes;
  };
  const TaskKey key_;
  const int64_t max_bytes_;
  void forget(const Frame* frame);  // holds the mutex

  std::mutex mutex_;          // guards what follows
  std::list<Entry> entries_;  // the one used least recently first
  std::unordered_map<const Frame*, std::list<Entry>::iterator> places_;
  std::size_t next_sweep_ = 64;
  int64_t num_bytes_ = 0;
  bool has_ended_ = false;
};

}  // namespace remat
