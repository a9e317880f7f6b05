#pragma once
// The recordings that are alive, and whether this thread writes into them.

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lib/observe/recording.h"

namespace remat {

/// The process has one list of the recordings that are alive.
class Recordings {
 public:
  void add(std::shared_ptr<Recording> recording) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto more = std::make_shared<List>(*alive_);
    more->push_back(std::move(recording));
    alive_ = std::move(more);
    recording::num_alive.fetch_add(1);
  }
  void remove(const Recording& recording) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto fewer = std::make_shared<List>(*alive_);
    if (std::erase_if(*fewer, [&](const auto& each) { return each.get() == &recording; }) == 0)
      return;
    alive_ = std::move(fewer);
    if (recording::num_alive.fetch_sub(1) == 1) KeptBytes::all().forget_parameters();
  }
  template <class Visitor>
  void visit(Visitor&& visitor) {
    std::shared_ptr<const List> all;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      all = alive_;
    }
    for (const auto& each : *all) visitor(*each);
  }

 private:
  using List = std::vector<std::shared_ptr<Recording>>;
  std::mutex mutex_;
  std::shared_ptr<const List> alive_ =
      std::make_shared<List>();  // never changed, so visits share it
};

Recordings& recordings();
/// Returns whether a recording that is alive has the option.
bool any_wants(bool RecorderOptions::* wish);

/// Marks this thread as a writer of events for its lifetime: its own allocations and operators are
/// not recorded.
class Writing {
 public:
  Writing() : before_(std::exchange(is_writing_, true)) {}
  ~Writing() { is_writing_ = before_; }
  Writing& operator=(Writing&&) = delete;
  static bool is_here() { return is_writing_; }

 private:
  static thread_local bool is_writing_;
  const bool before_;
};

}  // namespace remat
