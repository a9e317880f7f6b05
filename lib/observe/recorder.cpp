// Recorder, and the functions by which regions, allocators and copies report to it.

#include "lib/observe/recording.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>

#include "hooks/copy_watch.h"
#include "hooks/file_watch.h"
#include "hooks/move_totals.h"
#include "hooks/on_stream.h"
#include "lib/observe/device_samples.h"
#include "lib/observe/recordings.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/accelerator.h"
#include "remat/memory.h"

namespace remat {

namespace {

using Clock = std::chrono::steady_clock;

/// Returns the process's meter, made by the first recorder that samples memory.
const MemoryMeter& meter() {
  static auto* const only = new MemoryMeter;
  return *only;
}

/// Adds an event, with or without a region, to all recordings that want it. `begin`: the begin of
/// the span that the event ends.
void write(Event event, const RegionInfo* region = nullptr, Clock::time_point begin = {}) {
  if (region != nullptr) {
    event.depth = region->depth;
    if (any_wants(&RecorderOptions::memory)) sample_devices();
  }
  const Writing writing;
  recordings().visit([&](Recording& recording) {
    const RecorderOptions& options = recording.options();
    if (event.kind == EventKind::Operator && !options.operators) return;
    if (event.kind == EventKind::Memory && !options.memory) return;
    Event own = event;
    own.time_ns = recording.time_of(Clock::now());
    if (begin != Clock::time_point{}) own.begin_ns = recording.time_of(begin);
    if (options.memory && event.kind != EventKind::Operator)
      own.bytes = KeptBytes::all().now(
          c10::kCPU, event.kind == EventKind::Memory ? event.bytes.live : meter().live_bytes());
    recording.add(std::move(own), region == nullptr ? -1 : region->id);
  });
}

/// Calls `change` with the sums of the region's name in each recording.
template <class Change>
void sum(const std::string& name, const Change& change) {
  recordings().visit([&](Recording& recording) { recording.sum(name, change); });
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Operators, on every thread, while a recorder that wants them is alive.
struct OperatorStart : at::ObserverContext {
  Clock::time_point begin = Clock::now();
};
std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction&) {
  if (Writing::is_here()) return nullptr;
  return std::make_unique<OperatorStart>();
}
void operator_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr) return;
  write({.kind = EventKind::Operator, .text = std::make_shared<const std::string>(function.name())},
        nullptr, static_cast<OperatorStart*>(context)->begin);
}

std::unique_ptr<at::ObserverContext> sampled_operator_begins(const at::RecordFunction&) {
  return nullptr;
}
void sampled_operator_ends(const at::RecordFunction&, at::ObserverContext*) { sample_devices(); }

/// Adds work on a device to all recordings that want it.
void write(const std::shared_ptr<const QueuedWork>& work, const DeviceBar& bar, int64_t frame_id) {
  const Writing writing;
  recordings().visit([&](Recording& recording) {
    if (recording.options().device_time) recording.add(work, bar, frame_id);
  });
}

/// Begins the timing of a region's work on the current streams of these devices.
std::vector<std::shared_ptr<QueuedWork>> work_on(const std::vector<c10::Device>& devices) {
  std::vector<std::shared_ptr<QueuedWork>> all;
  if (devices.empty() || !any_wants(&RecorderOptions::device_time)) return all;
  const Writing writing;
  recordings().visit([](Recording& each) { each.set_clocks(/*waits=*/false); });
  for (const c10::Device device : devices)
    if (auto work = QueuedWork::begin(current_stream(device))) all.push_back(std::move(work));
  return all;
}

/// Returns the log's verb of an outcome: keeps, moves, recomputes.
std::string_view verb_of(std::string_view outcome) {
  return outcome == "kept" ? "keeps" : outcome == "moved" ? "moves" : "recomputes";
}

void add(const recording::DecidedCall& call, std::vector<DecisionReport>& to) {
  auto same = std::find_if(to.begin(), to.end(), [&](const DecisionReport& each) {
    return each.op == call.op && each.outcome == call.outcome && each.reason == call.reason;
  });
  if (same == to.end())
    same = to.insert(to.end(), {std::string(call.op), std::string(call.outcome), call.reason});
  same->calls += 1;
  same->bytes += call.bytes;
}

class RecordedCopies final : public CopyWatch {
  struct Begun {
    std::shared_ptr<QueuedWork> work;
    DeviceBar bar;
  };
  std::shared_ptr<void> begins(const c10::Stream& stream, Direction direction,
                               int64_t bytes) override {
    if (!is_recording() || !any_wants(&RecorderOptions::device_time)) return nullptr;
    recordings().visit([](Recording& each) { each.set_clocks(/*waits=*/false); });
    auto work = QueuedWork::begin(stream);
    if (work == nullptr) return nullptr;
    const auto kind = direction == Direction::Out  ? DeviceBar::Kind::CopyOut
                      : direction == Direction::In ? DeviceBar::Kind::CopyIn
                                                   : DeviceBar::Kind::CopyWait;
    return std::make_shared<Begun>(
        Begun{std::move(work), {.kind = kind, .stream = stream, .bytes = bytes}});
  }
  void ends(std::shared_ptr<void> begun) override {
    const auto& copy = *static_cast<Begun*>(begun.get());
    copy.work->end();
    write(copy.work, copy.bar, -1);
  }
};

class RecordedFiles final : public FileWatch {
  void ended(const Ended& work) noexcept override {
    if (!is_recording()) return;
    const double seconds = seconds_since(work.begin);
    const EventKind kind = work.work == Work::Write  ? EventKind::FileWrite
                           : work.work == Work::Read ? EventKind::FileRead
                                                     : EventKind::FileWait;
    write({.kind = kind, .number = work.bytes}, nullptr, work.begin);
    recordings().visit([&](Recording& recording) {
      recording.sum_files([&](FileReport& files) {
        if (work.work == Work::Write) {
          files.bytes_written += work.bytes;
          files.write_s += seconds;
        } else if (work.work == Work::Read) {
          files.bytes_read += work.bytes;
          files.read_s += seconds;
        }
        if (!work.held_up) return;
        files.waits += 1;
        files.waited_s += seconds;
      });
    });
  }
};

class RecordedMoves final : public MoveWatch {
  void changes(const std::string& name, const Change& change) noexcept override {
    if (!is_recording()) return;
    recordings().visit([&](Recording& recording) {
      recording.sum_moves(name, [&](MoveReport& report) {
        report.moves += change.moves;
        report.bytes_moved += change.bytes_moved;
        report.loads += change.loads;
        report.loads_ahead += change.loads_ahead;
        report.bytes_loaded += change.bytes_loaded;
        report.wait_s += 1e-9 * static_cast<double>(change.spent_ns);
      });
    });
  }
};

}  // namespace

RecordedFrame::~RecordedFrame() { KeptBytes::all().remove(kept); }

namespace recording {

std::atomic<int> num_alive{0};

std::unique_ptr<RecordedFrame> region_begins(
    const RegionInfo& info, const StorageSet& inputs,
    c10::function_ref<bool(const c10::StorageImpl&)> is_moved) {
  auto recorded = std::make_unique<RecordedFrame>();
  recorded->kept.id = info.id;
  recorded->kept.name = std::make_shared<const std::string>(info.name());
  int64_t bytes = 0;
  // The region may work where its inputs are, and on the devices where the thread works.
  std::vector<c10::Device> devices;
  const auto add_device = [&](c10::Device device) {
    if (device.type() == present_accelerator() &&
        std::find(devices.begin(), devices.end(), device) == devices.end())
      devices.push_back(device);
  };
  // Below other hooks, these own the inputs: slots of the region around, or the user's (Rule 2).
  const bool keeps_inputs = detail::innermost(detail::Ability::Hooks) == nullptr;
  inputs.visit([&](const c10::StorageImpl& storage) {
    add_device(storage.device());
    if (!keeps_inputs) return;
    const auto each = static_cast<int64_t>(storage.nbytes());
    if (is_moved(storage)) {
      recorded->inputs_offloaded_bytes += each;
      return;
    }
    recorded->kept.inputs.push_back({&storage, storage.device(), each});
    bytes += each;
  });
  KeptBytes::all().add(recorded->kept);
  write({.kind = EventKind::RegionBegins, .number = bytes, .text = recorded->kept.name}, &info);
  if (const auto in_use = devices_in_use(); !in_use.empty())
    add_device(c10::impl::VirtualGuardImpl(in_use.front().type()).getDevice());
  recorded->forward = work_on(devices);
  return recorded;
}

void slot_event(EventKind kind, const RegionInfo& info, int64_t position, const std::string& text) {
  write({.kind = kind,
         .number = position,
         .text = text.empty() ? nullptr : std::make_shared<const std::string>(text)},
        &info);
}

void region_ends(const RegionInfo& info, RecordedFrame& recorded, const DevicesMet& met,
                 RegionSums sums) {
  for (const auto& work : recorded.forward) {
    const c10::Device device = work->stream().device();
    if (!met.has(device)) continue;
    recorded.devices.push_back(device);
    work->end();
    write(work,
          {.kind = DeviceBar::Kind::Forward, .stream = work->stream(), .name = recorded.kept.name},
          info.id);
  }
  recorded.forward.clear();
  for (const KeptStorage& each : sums.parameters) KeptBytes::all().add_parameter(each);
  int64_t saved_bytes = 0;
  for (const DeviceBytes& each : sums.saved) saved_bytes += each.bytes;
  KeptBytes::all().set_saved(recorded.kept, std::move(sums.saved));
  for (const DecidedCall& each : sums.decisions)
    write({.kind = EventKind::Decision,
           .number = each.bytes,
           .text = std::make_shared<const std::string>(fmt::format(
               "{} {}{}: {}", verb_of(each.outcome), each.op,
               each.bytes > 0 ? fmt::format(", {} bytes", each.bytes) : "", each.reason))},
          &info);
  const double seconds = seconds_since(recorded.begin);
  write({.kind = EventKind::RegionEnds, .number = sums.num_slots, .text = recorded.kept.name},
        &info, recorded.begin);
  sum(*recorded.kept.name, [&](RegionReport& region) {
    region.calls += 1;
    region.bytes_dropped += sums.dropped_bytes;
    for (const KeptStorage& each : recorded.kept.inputs) region.bytes_inputs += each.bytes;
    region.bytes_saved += saved_bytes;
    for (const DecidedCall& each : sums.decisions) add(each, region.decisions);
    region.offloaded += sums.offloaded;
    region.offload_fallbacks += sums.offload_fallbacks;
    region.bytes_offloaded += sums.bytes_offloaded;
    region.bytes_inputs_offloaded += recorded.inputs_offloaded_bytes;
    region.offload_wait_s += sums.offload_wait_s;
    region.forward_s += seconds;
  });
}

void kept_was_moved(const std::string& name, int64_t bytes) {
  sum(name, [&](RegionReport& region) {
    region.offloaded += 1;
    region.bytes_offloaded += bytes;
  });
}

void kept_was_loaded(const RecordedFrame& recorded, int64_t bytes, bool was_ahead, double seconds) {
  sum(*recorded.kept.name, [&](RegionReport& region) {
    region.offload_loads += 1;
    region.offload_loads_ahead += was_ahead ? 1 : 0;
    region.bytes_loaded += bytes;
    region.offload_wait_s += seconds;
  });
}

void region_throws(const RegionInfo& info, const RecordedFrame& recorded) {
  write({.kind = EventKind::RegionThrows, .text = recorded.kept.name}, &info, recorded.begin);
}

void memory_changes(int64_t live) {
  if (!Writing::is_here()) write({.kind = EventKind::Memory, .bytes = {.live = live}});
}

void allocation_fails(int64_t asked, int64_t live) {
  if (Writing::is_here()) return;
  const Writing writing;
  const FailedAllocation failed = KeptBytes::all().failed(c10::kCPU, asked, live);
  recordings().visit([&](Recording& each) {
    if (each.options().memory) each.add(failed);
  });
}

RecomputeSpan::RecomputeSpan(const RegionInfo& region, const RecordedFrame* recorded)
    : region_(region), recorded_(is_recording() ? recorded : nullptr) {
  if (recorded_ == nullptr) return;
  begin_ = Clock::now();
  write({.kind = EventKind::RecomputeBegins, .text = recorded_->kept.name}, &region);
}

void RecomputeSpan::ends(bool was_stopped, int64_t recomputed_bytes) {
  end_ = was_stopped ? EventKind::RecomputeStops : EventKind::RecomputeEnds;
  bytes_ = recomputed_bytes;
}

void RecomputeSpan::work_begins() { work_ = work_on(recorded_->devices); }

void RecomputeSpan::work_ends() {
  for (const auto& work : work_) {
    work->end();
    write(work,
          {.kind = DeviceBar::Kind::Recompute,
           .stream = work->stream(),
           .name = recorded_->kept.name},
          region_.id);
  }
}

RecomputeSpan::~RecomputeSpan() {
  if (recorded_ == nullptr) return;
  const double seconds = seconds_since(begin_);
  const auto name = recorded_->kept.name;
  write({.kind = end_, .number = bytes_, .text = name}, &region_, begin_);
  sum(*name, [&](RegionReport& region) {
    region.recomputes += 1;
    region.early_stops += end_ == EventKind::RecomputeStops ? 1 : 0;
    region.bytes_recompute_peak = std::max(region.bytes_recompute_peak, bytes_);
    region.recompute_s += seconds;
  });
}

}  // namespace recording

Recorder::Recorder(RecorderOptions options) : recording_(std::make_shared<Recording>(options)) {
  if (options.memory) meter();
  if (options.operators)
    recording_->operators =
        at::addGlobalCallback(at::RecordFunctionCallback(operator_begins, operator_ends)
                                  .scopes({at::RecordScope::FUNCTION}));
  if (options.memory && present_accelerator())
    recording_->samples = at::addGlobalCallback(
        at::RecordFunctionCallback(sampled_operator_begins, sampled_operator_ends)
            .scopes({at::RecordScope::FUNCTION}));
  if (options.device_time) {
    static auto* const copies = new RecordedCopies;
    CopyWatch::only.store(copies, std::memory_order_release);
    recording_->set_clocks(/*waits=*/true);
  }
  static auto* const files = new RecordedFiles;
  FileWatch::only.store(files, std::memory_order_release);
  static auto* const moves = new RecordedMoves;
  MoveWatch::only.store(moves, std::memory_order_release);
  if (options.memory) begin_samples(*recording_);
  recording::add_budgets(*recording_);
  recordings().add(recording_);
}

Recorder::~Recorder() { stop(); }

void Recorder::stop() {
  if (recording_->operators) at::removeCallback(*recording_->operators);
  recording_->operators.reset();
  if (recording_->samples) at::removeCallback(*recording_->samples);
  recording_->samples.reset();
  recordings().remove(*recording_);
}

Report Recorder::report() const { return recording_->report(); }

}  // namespace remat
