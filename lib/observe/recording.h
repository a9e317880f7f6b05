#pragma once
// What recorders write down of regions: an event a moment, and sums a region.
//
// Note [Recording]
// Every place that can record asks `is_recording()` first, which reads one flag; the rest is out of line.
// A frame notes at its begin whether it is recorded; one that began before any recorder stays
// unrecorded, so that sums hold whole regions only. Events go to every recording that is alive.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lib/scope/region_info.h"
#include "lib/tensor/capture.h"
#include "remat/report.h"

namespace c10 {
struct StorageImpl;
}

namespace remat {

enum class EventKind : uint8_t {
  RegionBegins,
  RegionEnds,
  RegionThrows,
  RecomputeBegins,
  RecomputeEnds,
  RecomputeStops,
  RecomputeThrows,
  Pack,
  Fill,
  Read,
  Memory,
  Operator
};

struct Event;
/// How a run of a region went that ends with an event.
struct Span {
  bool is_recompute = false;
  std::string_view end;  ///< "returned", "stopped early", "threw"
};
/// Nothing for an event that ends none.
std::optional<Span> span_of(const Event& event);

/// [bytes] alive by kind; what is in none of the kinds is the rest of `live`.
struct LiveKinds {
  int64_t live = 0, parameters = 0, inputs = 0, saved = 0, recomputed = 0;
};

struct Event {
  EventKind kind;
  int32_t depth = 0;
  int32_t thread = 0;    ///< from 1, in order of appearance
  int64_t region = 0;    ///< from 1, in order of appearance; 0: none
  int64_t number = 0;    ///< of a slot; or [bytes]
  int64_t time_ns = 0;   ///< since the recording began
  int64_t begin_ns = 0;  ///< of what ends here
  std::shared_ptr<const std::string>
      text{};  ///< a region's name, an operator's, a tensor's metadata
  LiveKinds bytes{};
};

/// What the graph keeps of a region on its own account, in a frame that is recorded.
class RecordedFrame {
 public:
  ~RecordedFrame();
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::shared_ptr<const std::string> name;
  std::vector<std::pair<const c10::StorageImpl*, int64_t>> inputs;
  int64_t saved_bytes = 0;
};

class Recording {
 public:
  explicit Recording(RecorderOptions options);

  const RecorderOptions& options() const { return options_; }
  void add(Event event, int64_t frame_id);
  /// `change` gets the sums of the region's name.
  template <class Change>
  void sum(const std::string& name, Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [known, is_new] = by_name_.try_emplace(name, regions_.size());
    if (is_new) regions_.emplace_back().name = name;
    change(regions_[known->second]);
  }
  Report report() const;
  std::vector<Event> events() const;
  /// [ns] from the recording's begin.
  int64_t time_of(std::chrono::steady_clock::time_point time) const;
  /// LibTorch's handle of the callback for operators, if they are recorded.
  std::optional<uint64_t> operators{};

 private:
  const RecorderOptions options_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::deque<Event> events_;
  int64_t dropped_ = 0;
  std::vector<RegionReport> regions_;
  std::map<std::string, std::size_t> by_name_;
  std::unordered_map<int64_t, int64_t> region_numbers_;
  std::unordered_map<std::thread::id, int32_t> thread_numbers_;
};

namespace recording {

extern std::atomic<int> num_alive;

/// A region's inputs are saved.
std::unique_ptr<RecordedFrame> region_begins(const RegionInfo& region, const StorageSet& inputs);
/// Autograd saved a tensor in it; a recompute filled its slot; backward read it.
void slot_event(EventKind kind, const RegionInfo& region, int64_t position,
                const std::string& text);
/// The function has returned. `dropped_bytes`: what became slots.
struct RegionSums {
  int64_t dropped_bytes = 0, num_slots = 0, saved_bytes = 0, offloaded = 0, offload_fallbacks = 0;
  std::vector<std::pair<const c10::StorageImpl*, int64_t>> parameters{};
};
void region_ends(const RegionInfo& region, RecordedFrame& recorded, const RegionSums& sums);
void region_throws(const RegionInfo& region, const RecordedFrame& recorded);
/// The bytes of CPU tensors alive have become `live`.
void memory_changes(int64_t live);

/// A span records one recompute, from its begin to its end.
class RecomputeSpan {
 public:
  /// `recorded`: null if the region is not recorded. Both outlive it.
  RecomputeSpan(const RegionInfo& region, const RecordedFrame* recorded);
  /// Without `ends` it was thrown out of.
  ~RecomputeSpan();
  RecomputeSpan& operator=(RecomputeSpan&&) = delete;
  void ends(bool was_stopped, int64_t recomputed_bytes);

 private:
  const RegionInfo& region_;
  const RecordedFrame* recorded_;
  std::chrono::steady_clock::time_point begin_;
  EventKind end_ = EventKind::RecomputeThrows;
  int64_t bytes_ = 0;
};

}  // namespace recording

inline bool is_recording() { return recording::num_alive.load(std::memory_order_relaxed) != 0; }

}  // namespace remat
