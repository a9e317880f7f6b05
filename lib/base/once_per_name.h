#pragma once
// Remembers names, so that a warning is issued once for each.

#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_set>

namespace remat {

/// Threads: any. After the first thousand names, new names do not count as first.
class OncePerName {
 public:
  bool is_first(const std::string& name) {
    constexpr std::size_t most = 1000;
    const std::lock_guard<std::mutex> lock(mutex_);
    return names_.size() < most && names_.insert(name).second;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<std::string> names_;
};

}  // namespace remat
