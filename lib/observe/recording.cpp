#include "lib/observe/recording.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "lib/base/counters.h"
#include "lib/scope/hook_stack.h"
#include "remat/memory.h"

namespace remat {

namespace {

using Clock = std::chrono::steady_clock;

/// What regions keep, for the pictures: each storage once, however many regions keep it.
class KeptBytes {
 public:
  void add(const c10::StorageImpl* storage, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++owners_[storage] == 1) inputs_ += bytes;
  }
  void remove(const c10::StorageImpl* storage, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = owners_.find(storage);
    if (--found->second > 0) return;
    owners_.erase(found);
    inputs_ -= bytes;
  }
  void add_parameter(const c10::StorageImpl* storage, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (parameters_seen_.emplace(storage, bytes).second) parameters_ += bytes;
  }
  void forget_parameters() {
    const std::lock_guard<std::mutex> lock(mutex_);
    parameters_seen_.clear();
    parameters_ = 0;
  }
  void add_saved(int64_t bytes) { saved_ += bytes; }

  LiveKinds now(int64_t live) const {
    return {.live = live,
            .parameters = parameters_,
            .inputs = inputs_,
            .saved = saved_,
            .recomputed = live_counters.recomputed_bytes_alive.load(std::memory_order_relaxed)};
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, int64_t> owners_;
  std::unordered_map<const c10::StorageImpl*, int64_t> parameters_seen_;
  std::atomic<int64_t> inputs_{0}, saved_{0}, parameters_{0};
};

/// The recordings that are alive.
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
    if (recording::num_alive.fetch_sub(1) == 1) kept.forget_parameters();
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
  KeptBytes kept;

 private:
  using List = std::vector<std::shared_ptr<Recording>>;
  std::mutex mutex_;
  std::shared_ptr<const List> alive_ =
      std::make_shared<List>();  // never changed, so visits share it
};

Recordings& recordings() {
  static auto* const all = new Recordings;  // leaked: tensors die in static destructors
  return *all;
}

/// Set while this thread writes an event, whose own allocations are none.
thread_local bool is_writing = false;
struct Writing {
  const bool before = std::exchange(is_writing, true);
  ~Writing() { is_writing = before; }
};

/// A meter per process, made by the first recorder that samples memory.
const MemoryMeter& meter() {
  static auto* const only = new MemoryMeter;
  return *only;
}

/// Gives an event of a region, or of none, to all recordings that want it. `begin`: of what it ends.
void write(Event event, const RegionInfo* region = nullptr, Clock::time_point begin = {}) {
  const Writing writing;
  if (region != nullptr) event.depth = region->depth;
  recordings().visit([&](Recording& recording) {
    const RecorderOptions& options = recording.options();
    if (event.kind == EventKind::Operator && !options.operators) return;
    if (event.kind == EventKind::Memory && !options.memory) return;
    Event own = event;
    own.time_ns = recording.time_of(Clock::now());
    if (begin != Clock::time_point{}) own.begin_ns = recording.time_of(begin);
    if (options.memory && event.kind != EventKind::Operator)
      own.bytes = recordings().kept.now(event.kind == EventKind::Memory ? event.bytes.live
                                                                        : meter().live_bytes());
    recording.add(std::move(own), region == nullptr ? -1 : region->id);
  });
}

/// `change` gets the sums of the region's name.
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
  if (is_writing) return nullptr;
  return std::make_unique<OperatorStart>();
}
void operator_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr) return;
  write({.kind = EventKind::Operator, .text = std::make_shared<const std::string>(function.name())},
        nullptr, static_cast<OperatorStart*>(context)->begin);
}

}  // namespace

Recording::Recording(RecorderOptions options) : options_(options) {
  TORCH_CHECK_VALUE(options.max_events >= 1, "remat::Recorder: max_events was ", options.max_events,
                    ". Do: leave room for at least one event.");
}

int64_t Recording::time_of(Clock::time_point time) const {
  return std::max<int64_t>(std::chrono::nanoseconds(time - start_).count(), 0);
}

void Recording::add(Event event, int64_t frame_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (frame_id >= 0)
    event.region =
        region_numbers_.try_emplace(frame_id, static_cast<int64_t>(region_numbers_.size()) + 1)
            .first->second;
  event.thread =
      thread_numbers_
          .try_emplace(std::this_thread::get_id(), static_cast<int32_t>(thread_numbers_.size()) + 1)
          .first->second;
  events_.push_back(std::move(event));
  if (static_cast<int64_t>(events_.size()) <= options_.max_events) return;
  events_.pop_front();
  ++dropped_;
}

Report Recording::report() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {regions_, dropped_};
}

std::vector<Event> Recording::events() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {events_.begin(), events_.end()};
}

RecordedFrame::~RecordedFrame() {
  for (const auto& [storage, bytes] : inputs) recordings().kept.remove(storage, bytes);
  recordings().kept.add_saved(-saved_bytes);
}

std::optional<Span> span_of(const Event& event) {
  switch (event.kind) {
    case EventKind::RegionEnds:
      return Span{false, "returned"};
    case EventKind::RegionThrows:
      return Span{false, "threw"};
    case EventKind::RecomputeEnds:
      return Span{true, "returned"};
    case EventKind::RecomputeStops:
      return Span{true, "stopped early"};
    case EventKind::RecomputeThrows:
      return Span{true, "threw"};
    default:
      return std::nullopt;
  }
}

namespace recording {

std::atomic<int> num_alive{0};

std::unique_ptr<RecordedFrame> region_begins(const RegionInfo& info, const StorageSet& inputs) {
  const Writing writing;
  auto recorded = std::make_unique<RecordedFrame>();
  recorded->name = std::make_shared<const std::string>(info.name());
  int64_t bytes = 0;
  // Below other hooks the inputs are theirs: slots of the region around, or the user's (Rule 2).
  if (detail::innermost(detail::Ability::Hooks) == nullptr)
    inputs.visit([&](const c10::StorageImpl& storage) {
      const auto each = static_cast<int64_t>(storage.nbytes());
      recorded->inputs.emplace_back(&storage, each);
      recordings().kept.add(&storage, each);
      bytes += each;
    });
  write({.kind = EventKind::RegionBegins, .number = bytes, .text = recorded->name}, &info);
  return recorded;
}

void slot_event(EventKind kind, const RegionInfo& info, int64_t position, const std::string& text) {
  write({.kind = kind,
         .number = position,
         .text = text.empty() ? nullptr : std::make_shared<const std::string>(text)},
        &info);
}

void region_ends(const RegionInfo& info, RecordedFrame& recorded, const RegionSums& sums) {
  for (const auto& [storage, bytes] : sums.parameters)
    recordings().kept.add_parameter(storage, bytes);
  recorded.saved_bytes = sums.saved_bytes;
  recordings().kept.add_saved(sums.saved_bytes);
  const double seconds = seconds_since(recorded.begin);
  write({.kind = EventKind::RegionEnds, .number = sums.num_slots, .text = recorded.name}, &info,
        recorded.begin);
  sum(*recorded.name, [&](RegionReport& region) {
    region.calls += 1;
    region.bytes_dropped += sums.dropped_bytes;
    for (const auto& [storage, bytes] : recorded.inputs) region.bytes_inputs += bytes;
    region.bytes_saved += sums.saved_bytes;
    region.offloaded += sums.offloaded;
    region.offload_fallbacks += sums.offload_fallbacks;
    region.forward_s += seconds;
  });
}

void region_throws(const RegionInfo& info, const RecordedFrame& recorded) {
  write({.kind = EventKind::RegionThrows, .text = recorded.name}, &info, recorded.begin);
}

void memory_changes(int64_t live) {
  if (!is_writing) write({.kind = EventKind::Memory, .bytes = {.live = live}});
}

RecomputeSpan::RecomputeSpan(const RegionInfo& region, const RecordedFrame* recorded)
    : region_(region), recorded_(is_recording() ? recorded : nullptr) {
  if (recorded_ == nullptr) return;
  begin_ = Clock::now();
  write({.kind = EventKind::RecomputeBegins, .text = recorded_->name}, &region);
}

void RecomputeSpan::ends(bool was_stopped, int64_t recomputed_bytes) {
  end_ = was_stopped ? EventKind::RecomputeStops : EventKind::RecomputeEnds;
  bytes_ = recomputed_bytes;
}

RecomputeSpan::~RecomputeSpan() {
  if (recorded_ == nullptr) return;
  const double seconds = seconds_since(begin_);
  const auto name = recorded_->name;
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
  recordings().add(recording_);
}

Recorder::~Recorder() { stop(); }

void Recorder::stop() {
  if (recording_->operators) at::removeCallback(*recording_->operators);
  recording_->operators.reset();
  recordings().remove(*recording_);
}

Report Recorder::report() const { return recording_->report(); }

}  // namespace remat
