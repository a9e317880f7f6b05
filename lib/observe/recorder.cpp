// Recorder, and the functions by which regions, allocators and copies report to it.

#include "lib/observe/recording.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>

#include "hooks/depot/move_totals.h"
#include "hooks/disk/file_watch.h"
#include "hooks/host/copy_watch.h"
#include "lib/frame/layers.h"
#include "lib/observe/device_samples.h"
#include "lib/observe/recordings.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/on_stream.h"
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
    if (options.memory && event.kind != EventKind::Operator)
      own.bytes = KeptBytes::all().now(
          c10::kCPU, event.kind == EventKind::Memory ? event.bytes.live : meter().live_bytes());
    recording.add(std::move(own), region == nullptr ? -1 : region->id, begin);
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
    const EventKind kind = work.work == Work::Write  ? EventKind::FileWrite
                           : work.work == Work::Read ? EventKind::FileRead
                                                     : EventKind::FileWait;
    write({.kind = kind, .held_up = work.held_up, .number = work.bytes}, nullptr, work.begin);
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

/// The record of one recompute; the record of its region outlives it.
class Recompute final : public RecordedRecompute {
 public:
  Recompute(const RegionInfo& region, std::shared_ptr<const std::string> name,
            const std::vector<c10::Device>& devices)
      : region_(region), name_(std::move(name)), devices_(devices) {
    write({.kind = EventKind::RecomputeBegins, .text = name_}, &region_);
  }
  ~Recompute() override {
    write({.kind = end_, .number = bytes_, .text = name_}, &region_, begin_);
  }
  void function_begins() override { work_ = work_on(devices_); }
  void function_ends() override {
    for (const auto& work : work_) {
      work->end();
      write(work, {.kind = DeviceBar::Kind::Recompute, .stream = work->stream(), .name = name_},
            region_.id);
    }
  }
  void ends(bool was_stopped, int64_t recomputed_bytes) override {
    end_ = was_stopped ? EventKind::RecomputeStops : EventKind::RecomputeEnds;
    bytes_ = recomputed_bytes;
  }

 private:
  const RegionInfo& region_;
  const std::shared_ptr<const std::string> name_;
  const std::vector<c10::Device>& devices_;
  const Clock::time_point begin_ = Clock::now();
  EventKind end_ = EventKind::RecomputeThrows;
  int64_t bytes_ = 0;
  std::vector<std::shared_ptr<QueuedWork>> work_;
};

EventKind kind_of(recording::SlotEvent event) {
  switch (event) {
    case recording::SlotEvent::Packed:
      return EventKind::Pack;
    case recording::SlotEvent::Filled:
      return EventKind::Fill;
    default:
      return EventKind::Read;
  }
}

/// The record of one region.
class RecordedRegion final : public RecordedFrame {
 public:
  RecordedRegion(const RegionInfo& info, const StorageSet& inputs,
                 c10::function_ref<bool(const c10::StorageImpl&)> is_moved)
      : info_(info) {
    kept_.id = info.id;
    kept_.name = std::make_shared<const std::string>(info.name());
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
        inputs_offloaded_bytes_ += each;
        return;
      }
      kept_.inputs.push_back({&storage, storage.device(), each});
      bytes += each;
    });
    KeptBytes::all().add(kept_);
    write({.kind = EventKind::RegionBegins, .number = bytes, .text = kept_.name}, &info);
    if (const auto in_use = devices_in_use(); !in_use.empty())
      add_device(c10::impl::VirtualGuardImpl(in_use.front().type()).getDevice());
    forward_ = work_on(devices);
  }
  ~RecordedRegion() override { KeptBytes::all().remove(kept_); }

  void slot_event(recording::SlotEvent event, int64_t position, const std::string& text) override {
    write({.kind = kind_of(event),
           .number = position,
           .text = text.empty() ? nullptr : std::make_shared<const std::string>(text)},
          &info_);
  }
  void ends(const DevicesMet& met, recording::RegionSums sums) override {
    for (const auto& work : forward_) {
      const c10::Device device = work->stream().device();
      if (!met.has(device)) continue;
      devices_.push_back(device);
      work->end();
      write(work, {.kind = DeviceBar::Kind::Forward, .stream = work->stream(), .name = kept_.name},
            info_.id);
    }
    forward_.clear();
    for (const KeptStorage& each : sums.parameters) KeptBytes::all().add_parameter(each);
    int64_t saved_bytes = 0;
    for (const DeviceBytes& each : sums.saved) saved_bytes += each.bytes;
    KeptBytes::all().set_saved(kept_, std::move(sums.saved));
    for (const recording::DecidedCall& each : sums.decisions)
      write({.kind = EventKind::Decision,
             .number = each.bytes,
             .text = std::make_shared<const std::string>(fmt::format(
                 "{} {}{}: {}", verb_of(each.outcome), each.op,
                 each.bytes > 0 ? fmt::format(", {} bytes", each.bytes) : "", each.reason))},
            &info_);
    const double seconds = seconds_since(begin_);
    write({.kind = EventKind::RegionEnds, .number = sums.num_slots, .text = kept_.name}, &info_,
          begin_);
    sum(*kept_.name, [&](RegionReport& region) {
      region.calls += 1;
      region.bytes_dropped += sums.dropped_bytes;
      for (const KeptStorage& each : kept_.inputs) region.bytes_inputs += each.bytes;
      region.bytes_saved += saved_bytes;
      for (const recording::DecidedCall& each : sums.decisions) add(each, region.decisions);
      region.offloaded += sums.offloaded;
      region.offload_fallbacks += sums.offload_fallbacks;
      region.bytes_offloaded += sums.bytes_offloaded;
      region.bytes_inputs_offloaded += inputs_offloaded_bytes_;
      region.offload_wait_s += sums.offload_wait_s;
      region.forward_s += seconds;
    });
  }
  void throws() override {
    write({.kind = EventKind::RegionThrows, .text = kept_.name}, &info_, begin_);
  }
  std::unique_ptr<RecordedRecompute> recompute_begins() override {
    return std::make_unique<Recompute>(info_, kept_.name, devices_);
  }
  std::shared_ptr<RecomputedBytes> recomputed_bytes() override { return kept_.recomputed; }
  std::function<void()> late_move(int64_t bytes) override {
    return [name = kept_.name, bytes] {
      sum(*name, [&](RegionReport& region) {
        region.offloaded += 1;
        region.bytes_offloaded += bytes;
      });
    };
  }
  void kept_was_loaded(int64_t bytes, bool was_ahead, double seconds) override {
    sum(*kept_.name, [&](RegionReport& region) {
      region.offload_loads += 1;
      region.offload_loads_ahead += was_ahead ? 1 : 0;
      region.bytes_loaded += bytes;
      region.offload_wait_s += seconds;
    });
  }

 private:
  const RegionInfo& info_;
  const Clock::time_point begin_ = Clock::now();
  KeptOfRegion kept_;
  int64_t inputs_offloaded_bytes_ = 0;
  std::vector<std::shared_ptr<QueuedWork>> forward_;  // on the devices that it may use
  std::vector<c10::Device> devices_;                  // that it was found to use
};

std::unique_ptr<RecordedFrame> record(const RegionInfo& info, const StorageSet& inputs,
                                      c10::function_ref<bool(const c10::StorageImpl&)> is_moved) {
  return std::make_unique<RecordedRegion>(info, inputs, is_moved);
}

[[maybe_unused]] const bool records_regions = (layers.record = record, true);

}  // namespace

namespace recording {

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
