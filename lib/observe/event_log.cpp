// Recorder::event_log and the Chrome trace: events as text.

#include <fmt/format.h>

#include <c10/util/Exception.h>

#include <fstream>
#include <string>

#include "lib/observe/recording.h"
#include "lib/observe/report_file.h"
#include "lib/observe/report_text.h"

namespace remat {

namespace {

std::string line_of(const Event& event) {
  const std::string region = fmt::format("region {}", event.region);
  const std::string name =
      event.text != nullptr && !event.text->empty() ? fmt::format(" \"{}\"", *event.text) : "";
  switch (event.kind) {
    case EventKind::RegionBegins:
      return fmt::format("{}{} begins, depth {}, keeps {} bytes of inputs", region, name,
                         event.depth, event.number);
    case EventKind::RegionEnds:
      return fmt::format("{} ends, {} slots", region, event.number);
    case EventKind::RegionThrows:
      return fmt::format("{} throws", region);
    case EventKind::RecomputeBegins:
      return fmt::format("{} recompute begins", region);
    case EventKind::RecomputeEnds:
      return fmt::format("{} recompute ends", region);
    case EventKind::RecomputeStops:
      return fmt::format("{} recompute stops early", region);
    case EventKind::RecomputeThrows:
      return fmt::format("{} recompute throws", region);
    case EventKind::Pack:
      return fmt::format("{} drops {}: {}", region, event.number, *event.text);
    case EventKind::Fill:
      return fmt::format("{} fills {}", region, event.number);
    case EventKind::Read:
      return fmt::format("{} reads {}", region, event.number);
    case EventKind::Operator:
      return fmt::format("operator {}", *event.text);
    case EventKind::Memory:
      break;
  }
  return {};
}

/// A slice of a thread's time, in Chrome's trace format; "" for events that are none.
std::string slice_of(const Event& event) {
  std::string name, kind;
  switch (event.kind) {
    case EventKind::RegionEnds:
    case EventKind::RegionThrows:
      name = name_shown(*event.text);
      kind = "forward";
      break;
    case EventKind::RecomputeEnds:
    case EventKind::RecomputeStops:
    case EventKind::RecomputeThrows:
      name = name_shown(*event.text) + " (recompute)";
      kind = "recompute";
      break;
    case EventKind::Operator:
      name = *event.text;
      kind = "operator";
      break;
    default:
      return {};
  }
  const char* const how = event.kind == EventKind::RecomputeStops    ? "stopped early"
                          : event.kind == EventKind::RecomputeThrows ? "threw"
                          : event.kind == EventKind::RegionThrows    ? "threw"
                                                                     : "returned";
  return fmt::format(
      "{{\"name\": {}, \"cat\": \"{}\", \"ph\": \"X\", \"ts\": {:.3f}, \"dur\": {:.3f}, \"pid\": 1, "
      "\"tid\": {}, \"args\": {{\"region\": {}, \"depth\": {}, \"end\": \"{}\"}}}}",
      json_string(name), kind, static_cast<double>(event.begin_ns) / 1e3,
      static_cast<double>(event.time_ns - event.begin_ns) / 1e3, event.thread, event.region,
      event.depth, how);
}

std::string counter_of(const Event& event) {
  const LiveKinds& b = event.bytes;
  return fmt::format(
      "{{\"name\": \"live bytes\", \"ph\": \"C\", \"ts\": {:.3f}, \"pid\": 1, \"args\": {{\"live\": "
      "{}, \"inputs kept\": {}, \"saved by policy\": {}, \"recomputed\": {}}}}}",
      static_cast<double>(event.time_ns) / 1e3, b.live, b.inputs, b.saved, b.recomputed);
}

}  // namespace

void write_report_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  TORCH_CHECK(file.good(), "remat::Recorder: ", path.string(),
              " could not be written. Do: name a file in a folder that exists and has room.");
}

std::string Recorder::event_log() const {
  std::string text;
  if (const int64_t dropped = report().dropped_events; dropped > 0)
    text = fmt::format("({} older events are gone)\n", dropped);
  for (const Event& event : recording_->events()) {
    if (event.kind == EventKind::Memory) continue;
    text += line_of(event) += '\n';
  }
  return text;
}

void Recorder::write_chrome_trace(const std::filesystem::path& path) const {
  std::string text = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
  const char* comma = "\n";
  const auto add = [&](const std::string& entry) {
    if (entry.empty()) return;
    (text += comma) += entry;
    comma = ",\n";
  };
  for (const Event& event : recording_->events()) {
    add(slice_of(event));
    if (recording_->options().memory && event.kind != EventKind::Operator) add(counter_of(event));
  }
  write_report_file(path, text + "\n]}\n");
}

}  // namespace remat
