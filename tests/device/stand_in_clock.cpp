// The clock of the stand-in, the timelines of its streams, and the numbers of its generators.

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "tests/device/stand_in.h"

namespace stand_in {

namespace {

// The device's clock follows the host's, and advances by the set time of each kernel and copy.
std::atomic<int64_t> work_ns{0}, skew_ns{0};

std::mutex timelines_mutex;
std::map<std::pair<int, int64_t>, int64_t> ends_ns;  ///< by device and stream
int64_t host_ns = 0;
thread_local bool is_paused = false;

int64_t& end_on(c10::Stream stream) { return ends_ns[{stream.device_index(), stream.id()}]; }

}  // namespace

int64_t device_now_ns() {
  return skew_ns +
         std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void advance_clock() { skew_ns += work_ns; }
void set_work_time(std::chrono::nanoseconds each) { work_ns = each.count(); }

namespace timeline {

void restart() {
  const std::lock_guard<std::mutex> lock(timelines_mutex);
  ends_ns.clear();
  host_ns = 0;
}
int64_t end() {
  const std::lock_guard<std::mutex> lock(timelines_mutex);
  int64_t last = host_ns;
  for (const auto& [stream, end_ns] : ends_ns) last = std::max(last, end_ns);
  return last;
}
int64_t end_of(c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(timelines_mutex);
  return end_on(stream);
}
Paused::Paused() : before(std::exchange(is_paused, true)) {}
Paused::~Paused() { is_paused = before; }
void work(c10::Stream stream) {
  if (is_paused) return;
  const std::lock_guard<std::mutex> lock(timelines_mutex);
  int64_t& end_ns = end_on(stream);
  end_ns = std::max(end_ns, host_ns) + work_ns;
}
void wait(c10::Stream stream, int64_t until_ns) {
  if (is_paused) return;
  const std::lock_guard<std::mutex> lock(timelines_mutex);
  int64_t& end_ns = end_on(stream);
  end_ns = std::max(end_ns, until_ns);
}
void host_waits(int64_t until_ns) {
  if (is_paused) return;
  const std::lock_guard<std::mutex> lock(timelines_mutex);
  host_ns = std::max(host_ns, until_ns);
}

}  // namespace timeline

double Draws::uniform(uint64_t i) const {
  uint64_t bits = seed * 0x9e3779b97f4a7c15 + (first + i + 1) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return static_cast<double>((bits ^ (bits >> 31)) >> 11) * 0x1p-53;
}

}  // namespace stand_in
