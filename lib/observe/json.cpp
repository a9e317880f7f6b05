// Report::to_json and Recorder::write_chrome_trace: reports and events as JSON.

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "lib/base/valid_text.h"
#include "lib/observe/report_text.h"

using Json = nlohmann::ordered_json;

template <>
struct nlohmann::adl_serializer<c10::Device> {
  static void to_json(Json& json, const c10::Device& device) { json = device.str(); }
};

// Makes an object whose keys are the names of the members, in this order: the library's own macro
// sorts them.
#define REMAT_JSON(Type, ...)                                                \
  static void to_json(Json& nlohmann_json_j, const Type& nlohmann_json_t) {  \
    NLOHMANN_JSON_EXPAND(NLOHMANN_JSON_PASTE(NLOHMANN_JSON_TO, __VA_ARGS__)) \
  }

namespace remat {

REMAT_JSON(DecisionReport, op, outcome, reason, calls, bytes)
REMAT_JSON(RegionReport, name, calls, recomputes, early_stops, bytes_dropped, bytes_inputs,
           bytes_saved, bytes_recompute_peak, offloaded, offload_fallbacks, bytes_offloaded,
           bytes_inputs_offloaded, offload_loads, offload_loads_ahead, bytes_loaded, offload_wait_s,
           forward_s, recompute_s, device_forward_s, device_recompute_s, decisions)
REMAT_JSON(DeviceReport, device, is_exact, peak_bytes, bytes_out, bytes_in, copies_out_s,
           copies_in_s, waited_s)
REMAT_JSON(FailedAllocation::Held, region, regions, inputs_bytes, saved_bytes, recomputed_bytes)
REMAT_JSON(FailedAllocation, device, asked_bytes, live_bytes, parameters_bytes, held)
REMAT_JSON(MoveReport, name, moves, bytes_moved, loads, loads_ahead, bytes_loaded, wait_s)
REMAT_JSON(EvictionReport, op, evictions, bytes_evicted, reruns, bytes_rerun, rerun_s, moves,
           bytes_moved)
REMAT_JSON(FileReport, bytes_written, bytes_read, write_s, read_s, waits, waited_s)
REMAT_JSON(Report, regions, devices, failed_allocations, moves, evictions, files, dropped_events)

namespace {

/// Returns the JSON as text that any parser accepts. `indent`: of one level; -1: all in one line.
std::string json_text(const Json& json, int indent = -1) {
  return without_noncharacters(json.dump(indent, ' ', false, Json::error_handler_t::replace));
}

// Entries of Chrome's trace format.

double us_of(int64_t ns) { return static_cast<double>(ns) / 1e3; }

/// Returns a device's process in a trace; the host is the first process.
int process_of(c10::Device device) { return 2 + device.index(); }

Json json_of(const Slice& slice) {
  using Kind = Slice::Kind;
  constexpr std::array<const char*, 7> categories{"forward", "recompute", "operator", "rerun",
                                                  "file",    "file",      "copy"};
  const char* const suffix = slice.kind == Kind::Recompute ? " (recompute)"
                             : slice.kind == Kind::Rerun   ? " (again)"
                                                           : "";
  Json args{{"bytes", slice.bytes}};
  if (slice.on)
    args["region"] = slice.region;
  else if (slice.kind <= Kind::Operator)
    args = {{"region", slice.region}, {"depth", slice.depth}, {"end", slice.end}};
  return {{"name", slice.name + suffix},
          {"cat", fmt::format("{}{}", categories[static_cast<std::size_t>(slice.kind)],
                              slice.on ? ", device" : "")},
          {"ph", "X"},
          {"ts", us_of(slice.begin_ns)},
          {"dur", us_of(slice.end_ns - slice.begin_ns)},
          {"pid", slice.on ? process_of(*slice.on) : 1},
          {"tid", slice.lane},
          {"args", std::move(args)}};
}

/// Returns a name of values of one device; the CPU is not named.
std::string of_device(const char* name, c10::Device device) {
  return device.is_cpu() ? name : fmt::format("{} of {}", name, device.str());
}

/// Returns a moment of the event's thread.
Json moment(const std::string& name, const char* category, const Event& event, Json args) {
  return {{"name", name},
          {"cat", category},
          {"ph", "i"},
          {"s", "t"},
          {"ts", us_of(event.time_ns)},
          {"pid", 1},
          {"tid", event.thread},
          {"args", std::move(args)}};
}

/// Returns values that hold from the event on.
Json counter(const std::string& name, const Event& event, Json args) {
  return {{"name", name},
          {"ph", "C"},
          {"ts", us_of(event.time_ns)},
          {"pid", 1},
          {"args", std::move(args)}};
}

/// Returns the moment of an allocation, or of a result that a budget drops or moves; or a budget's
/// limit.
std::optional<Json> moment_of(const Event& event) {
  const LiveKinds& b = event.bytes;
  switch (event.kind) {
    case EventKind::Eviction:
      return moment("drops " + *event.text, "eviction", event, {{"bytes", event.number}});
    case EventKind::MoveAway:
      return moment("moves " + *event.text, "eviction", event, {{"bytes", event.number}});
    case EventKind::Budget:
      return counter(of_device("budget", event.device), event,
                     {{"bytes", event.number == recording::no_budget ? 0 : event.number}});
    case EventKind::Allocation:
      return moment((event.number < 0 ? "frees on " : "allocates on ") + event.device.str(),
                    "allocation", event,
                    {{"bytes", std::abs(event.number)},
                     {"region", event.region},
                     {"name", event.text == nullptr ? "" : name_shown(*event.text)},
                     {"inputs kept", b.inputs},
                     {"saved by policy", b.saved},
                     {"recomputed", b.recomputed}});
    default:
      return std::nullopt;
  }
}

}  // namespace

std::string Report::to_json() const { return json_text(*this, 2) + '\n'; }

void Recorder::write_chrome_trace(const std::filesystem::path& path) const {
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
  const char* comma = "\n";
  const auto add = [&](const std::optional<Json>& entry) {
    if (!entry) return;
    (text += comma) += json_text(*entry);
    comma = ",\n";
  };
  for (const Event& event : recording_->events()) {
    const LiveKinds& b = event.bytes;
    if (const std::optional<Slice> slice = slice_of(event)) add(json_of(*slice));
    add(moment_of(event));
    if (event.kind == EventKind::Allocation)
      add(counter("allocated on " + event.device.str(), event, {{"rounded", b.live}}));
    if (recording_->options().memory && has_bytes(event))
      add(counter(of_device("live bytes", event.device), event,
                  {{"live", b.live},
                   {"inputs kept", b.inputs},
                   {"saved by policy", b.saved},
                   {"recomputed", b.recomputed}}));
  }
  std::set<c10::DeviceIndex> named;
  for (const DeviceBar& bar : recording_->bars()) {
    const c10::Device device = bar.stream.device();
    if (named.insert(device.index()).second)
      add(Json{{"name", "process_name"},
               {"ph", "M"},
               {"pid", process_of(device)},
               {"args", {{"name", device.str()}}}});
    add(json_of(slice_of(bar)));
  }
  write_report_file(path, text + "\n]}\n");
}

}  // namespace remat
