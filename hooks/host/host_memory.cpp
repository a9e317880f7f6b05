#include "hooks/host/host_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

#include "lib/seam/warn.h"

namespace remat {

namespace {

/// Memory of the machine, a group or a limit [bytes].
struct Room {
  int64_t free = 0, all = 0;
};

/// Returns the number in the line of `file` that begins with `word`; for an empty `word`, the first
/// number of the file.
std::optional<int64_t> number_in(const std::string& file, const std::string& word) {
  std::ifstream in(file);
  std::string first;
  int64_t number = 0;
  if (word.empty()) return in >> number ? std::optional(number) : std::nullopt;
  for (std::string line; in >> first; std::getline(in, line))
    if (first == word) return in >> number ? std::optional(number) : std::nullopt;
  return std::nullopt;
}

std::optional<Room> of_machine() {
  constexpr int64_t kibibyte = 1024;
  const auto free = number_in("/proc/meminfo", "MemAvailable:");
  const auto all = number_in("/proc/meminfo", "MemTotal:");
  if (!free || !all) return std::nullopt;
  return Room{kibibyte * *free, kibibyte * *all};
}

/// Returns the room in this process's control group, such as a container.
std::optional<Room> of_group() {
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("0::")) continue;
    const std::string folder = "/sys/fs/cgroup" + line.substr(3) + "/";
    const auto all = number_in(folder + "memory.max", ""),
               used = number_in(folder + "memory.current", "");
    if (!all || !used) return std::nullopt;  // "max": there is no limit
    // Bytes that the page cache could release.
    const int64_t cached = number_in(folder + "memory.stat", "inactive_file").value_or(0);
    return Room{*all - *used + cached, *all};
  }
  return std::nullopt;
}

std::optional<Room> of_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  const auto pages = number_in("/proc/self/statm", "");
  if (!pages) return std::nullopt;
  const auto all = static_cast<int64_t>(limit.rlim_cur);
  return Room{all - *pages * ::sysconf(_SC_PAGESIZE), all};
}

}  // namespace

void warn_if_host_is_short(int64_t bytes) {
  static std::atomic<bool> has_warned{false};
  if (has_warned.load(std::memory_order_relaxed)) return;
  constexpr int64_t least_share = 20;
  for (const auto& room : {of_limit(), of_group(), of_machine()}) {
    if (!room || room->free - bytes >= room->all / least_share) continue;
    if (has_warned.exchange(true)) return;
    seam::warn(c10::str(
        "remat: the memory of the host is short: of ", room->all, " bytes ",
        std::max<int64_t>(0, room->free), " are free, and ", bytes,
        " more are about to be copied there.\n"
        "Cause: tensors that backward needs are moved to the CPU, which does not have enough "
        "room for them.\n"
        "Hint: move less, recompute more, or let a SaveInTiersGuard with host_bytes move the "
        "rest to a file."));
    return;
  }
}

}  // namespace remat
