#include "lib/observe/recording.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "lib/seam/accelerator.h"
#include "lib/seam/on_stream.h"

namespace remat {

Recording::Recording(RecorderOptions options) : options_(options) {
  TORCH_CHECK_VALUE(options.max_events >= 1, "remat::Recorder: max_events was ", options.max_events,
                    ". Hint: set 1 or more.");
}

RegionReport& Recording::of_name(const std::string& name) {
  const auto [known, is_new] = by_name_.try_emplace(name, regions_.size());
  if (is_new) regions_.emplace_back().name = name;
  return regions_[known->second];
}

DeviceReport& Recording::of_device(c10::Device device) {
  return report_of(devices_, &DeviceReport::device, device);
}

int64_t Recording::number_of(int64_t frame_id) {
  if (frame_id < 0) return 0;
  return region_numbers_.try_emplace(frame_id, static_cast<int64_t>(region_numbers_.size()) + 1)
      .first->second;
}

// The caller holds the lock.
void Recording::sum(const Event& event, double seconds) {
  using Op = EvictionReport;
  const auto add = [&](int64_t Op::* calls, int64_t Op::* bytes) -> Op& {
    Op& op = report_of(evictions_, &Op::op, *event.text);
    op.*calls += 1;
    op.*bytes += event.number;
    return op;
  };
  switch (event.kind) {
    case EventKind::FileWrite:
      files_.bytes_written += event.number;
      files_.write_s += seconds;
      break;
    case EventKind::FileRead:
      files_.bytes_read += event.number;
      files_.read_s += seconds;
      break;
    case EventKind::Eviction:
      add(&Op::evictions, &Op::bytes_evicted);
      break;
    case EventKind::MoveAway:
      add(&Op::moves, &Op::bytes_moved);
      break;
    case EventKind::Rerun:
      add(&Op::reruns, &Op::bytes_rerun).rerun_s += seconds;
      break;
    case EventKind::RecomputeStops:
      of_name(*event.text).early_stops += 1;
      [[fallthrough]];
    case EventKind::RecomputeEnds:
    case EventKind::RecomputeThrows: {
      RegionReport& region = of_name(*event.text);
      region.recomputes += 1;
      region.bytes_recompute_peak = std::max(region.bytes_recompute_peak, event.number);
      region.recompute_s += seconds;
      break;
    }
    default:
      break;
  }
  if (!event.held_up) return;
  files_.waits += 1;
  files_.waited_s += seconds;
}

void Recording::add(Event event, int64_t frame_id, std::chrono::steady_clock::time_point begin) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  const auto since_start = [this](std::chrono::steady_clock::time_point time) {
    return std::max<int64_t>(std::chrono::nanoseconds(time - start_).count(), 0);
  };
  if (event.time_ns < 0) event.time_ns = since_start(now);
  event.begin_ns = since_start(begin);
  sum(event, std::chrono::duration<double>(now - begin).count());
  event.region = number_of(frame_id);
  event.thread =
      thread_numbers_
          .try_emplace(std::this_thread::get_id(), static_cast<int32_t>(thread_numbers_.size()) + 1)
          .first->second;
  latest_.events.push_back(std::move(event));
  if (static_cast<int64_t>(latest_.events.size()) <= options_.max_events) return;
  if (latest_.events.front().kind == EventKind::Budget) {
    std::erase_if(latest_.budgets_before,
                  [&](const Event& each) { return each.device == latest_.events.front().device; });
    latest_.budgets_before.push_back(std::move(latest_.events.front()));
  }
  latest_.events.pop_front();
  ++latest_.dropped;
}

void Recording::add(std::shared_ptr<const QueuedWork> work, DeviceBar bar, int64_t frame_id) {
  bool are_many = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    bar.region = number_of(frame_id);
    pending_.push_back({std::move(work), std::move(bar)});
    constexpr std::size_t many = 1024;  // devices do not have events without end
    are_many = pending_.size() % many == 0;
  }
  if (are_many) collect(/*waits=*/false);
}

void Recording::add(FailedAllocation failed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.size() < max_failed) failed_.push_back(std::move(failed));
}

void Recording::saw(c10::Device device, bool is_exact, int64_t peak_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceReport& report = of_device(device);
  report.is_exact = is_exact;
  report.peak_bytes = std::max(report.peak_bytes, peak_bytes);
}

void Recording::set_clocks(bool waits) {
  if (!options_.device_time) return;
  for (const c10::Device device : devices_in_use()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (clocks_.contains(device)) continue;
    }
    auto clock = DeviceClock::set(current_stream(device), waits);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (clock != nullptr) clocks_.emplace(device, std::move(clock));
  }
}

// The caller holds the lock.
void Recording::finish(const Pending& pending) {
  const auto clock = clocks_.find(pending.bar.stream.device());
  if (clock == clocks_.end()) return;
  const auto times = pending.work->times(*clock->second);
  if (!times) return;
  const double seconds = static_cast<double>(times->end_ns - times->begin_ns) / 1e9;
  DeviceBar bar = pending.bar;
  const auto start = std::chrono::nanoseconds(start_.time_since_epoch()).count();
  bar.begin_ns = std::max<int64_t>(times->begin_ns - start, 0);
  bar.end_ns = std::max<int64_t>(times->end_ns - start, 0);
  DeviceReport& device = of_device(bar.stream.device());
  switch (bar.kind) {
    case DeviceBar::Kind::Forward:
      of_name(*bar.name).device_forward_s += seconds;
      break;
    case DeviceBar::Kind::Recompute:
      of_name(*bar.name).device_recompute_s += seconds;
      break;
    case DeviceBar::Kind::CopyOut:
      device.bytes_out += bar.bytes;
      device.copies_out_s += seconds;
      break;
    case DeviceBar::Kind::CopyIn:
      device.bytes_in += bar.bytes;
      device.copies_in_s += seconds;
      break;
    case DeviceBar::Kind::CopyWait:
      device.waited_s += seconds;
      return;  // the copy has a bar, and so has the work that waits
  }
  bars_.push_back(std::move(bar));
  if (static_cast<int64_t>(bars_.size()) <= options_.max_events) return;
  bars_.pop_front();
  ++latest_.dropped;
}

void Recording::collect(bool waits) {
  std::deque<Pending> pending;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    pending.swap(pending_);
  }
  std::deque<Pending> unfinished;
  for (Pending& each : pending) {
    if (waits) each.work->wait();
    if (!waits && !each.work->is_done()) {
      unfinished.push_back(std::move(each));
      continue;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    finish(each);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.insert(pending_.begin(), std::make_move_iterator(unfinished.begin()),
                  std::make_move_iterator(unfinished.end()));
}

Report Recording::report() {
  collect(/*waits=*/true);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<EvictionReport> evictions = evictions_;
  std::stable_sort(
      evictions.begin(), evictions.end(), [](const EvictionReport& a, const EvictionReport& b) {
        return std::pair(a.rerun_s, a.bytes_evicted) > std::pair(b.rerun_s, b.bytes_evicted);
      });
  return {regions_, latest_.dropped, devices_, failed_, files_, moves_, std::move(evictions)};
}

std::vector<DeviceBar> Recording::bars() {
  collect(/*waits=*/true);
  const std::lock_guard<std::mutex> lock(mutex_);
  return {bars_.begin(), bars_.end()};
}

std::vector<Event> Recording::events() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Event> all = latest_.budgets_before;
  all.insert(all.end(), latest_.events.begin(), latest_.events.end());
  return all;
}

}  // namespace remat
