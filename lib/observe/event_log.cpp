// Recorder::event_log and the Chrome trace: events as text.

#include <fmt/format.h>

#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <set>
#include <string>

#include "lib/base/valid_text.h"
#include "lib/observe/report_text.h"

namespace remat {

namespace {

/// The log's lines, by kind of event. Their arguments: the region's number, a number, a text, a
/// depth, the live bytes and the device.
constexpr std::array<const char*, 22> lines{
    "region {0}{2} begins, depth {3}, keeps {1} bytes of inputs",
    "region {0} ends, {1} slots",
    "region {0} throws",
    "region {0} recompute begins",
    "region {0} recompute ends",
    "region {0} recompute stops early",
    "region {0} recompute throws",
    "region {0} drops {1}: {2}",
    "region {0} fills {1}",
    "region {0} reads {1}",
    "",
    "region {0} {2}",
    "operator {2}",
    "writes {1} bytes to a file",
    "reads {1} bytes from a file",
    "waits for {1} bytes of a file",
    "",
    "budget drops the result of {2}, {1} bytes, {4} alive",
    "budget runs {2} again, {1} bytes, {4} alive",
    "budget of {1} bytes alive on {5}",
    "budget moves away {1} bytes of {2}, {4} alive",
    "budget reads back {1} bytes, {4} alive"};
static_assert(lines.size() == static_cast<std::size_t>(EventKind::ReadBack) + 1);

std::string line_of(const Event& event) {
  if (event.kind == EventKind::Allocation)
    return fmt::format("{}{} {} bytes on {}, {} alive",
                       event.region == 0 ? "" : fmt::format("region {} ", event.region),
                       event.number < 0 ? "frees" : "allocates", std::abs(event.number),
                       event.device.str(), event.bytes.live);
  if (event.kind == EventKind::Budget && event.number == recording::no_budget)
    return "no budget any more on " + event.device.str();
  std::string text = event.text == nullptr ? "" : *event.text;
  if (event.kind == EventKind::RegionBegins && !text.empty()) text = " \"" + text + '"';
  return fmt::format(fmt::runtime(lines[static_cast<std::size_t>(event.kind)]), event.region,
                     event.number, text, event.depth, event.bytes.live, event.device.str());
}

/// Returns a span of a thread's time in Chrome's trace format; "" for an event without a span.
std::string slice_of(const Event& event) {
  const bool is_operator = event.kind == EventKind::Operator;
  const std::optional<Span> span = span_of(event);
  if (const char* const work = file_work_of(event))
    return fmt::format(
        "{{\"name\": \"{}\", \"cat\": \"file\", \"ph\": \"X\", \"ts\": {:.3f}, \"dur\": {:.3f}, "
        "\"pid\": 1, \"tid\": {}, \"args\": {{\"bytes\": {}}}}}",
        work, static_cast<double>(event.begin_ns) / 1e3,
        static_cast<double>(event.time_ns - event.begin_ns) / 1e3, event.thread, event.number);
  if (event.kind == EventKind::Rerun)
    return fmt::format(
        "{{\"name\": {}, \"cat\": \"rerun\", \"ph\": \"X\", \"ts\": {:.3f}, \"dur\": {:.3f}, "
        "\"pid\": 1, \"tid\": {}, \"args\": {{\"bytes\": {}}}}}",
        json_string(*event.text + " (again)"), static_cast<double>(event.begin_ns) / 1e3,
        static_cast<double>(event.time_ns - event.begin_ns) / 1e3, event.thread, event.number);
  if (!span && !is_operator) return {};
  const bool is_recompute = span && span->is_recompute;
  const std::string name = is_operator ? *event.text : name_shown(*event.text);
  return fmt::format(
      "{{\"name\": {}, \"cat\": \"{}\", \"ph\": \"X\", \"ts\": {:.3f}, \"dur\": {:.3f}, \"pid\": 1, "
      "\"tid\": {}, \"args\": {{\"region\": {}, \"depth\": {}, \"end\": \"{}\"}}}}",
      json_string(is_recompute ? name + " (recompute)" : name),
      is_operator    ? "operator"
      : is_recompute ? "recompute"
                     : "forward",
      static_cast<double>(event.begin_ns) / 1e3,
      static_cast<double>(event.time_ns - event.begin_ns) / 1e3, event.thread, event.region,
      event.depth, span ? span->end : "returned");
}

/// Returns a device's process in a trace; the host is the first process.
int process_of(c10::Device device) { return 2 + device.index(); }

/// Returns a span of a stream's time in Chrome's trace format.
std::string slice_of(const DeviceBar& bar) {
  constexpr std::array<const char*, 4> categories{"forward", "recompute", "copy", "copy"};
  const bool is_recompute = bar.kind == DeviceBar::Kind::Recompute;
  return fmt::format(
      "{{\"name\": {}, \"cat\": \"{}, device\", \"ph\": \"X\", \"ts\": {:.3f}, \"dur\": {:.3f}, "
      "\"pid\": {}, \"tid\": {}, \"args\": {{\"region\": {}, \"bytes\": {}}}}}",
      json_string(is_recompute ? name_of(bar) + " (recompute)" : name_of(bar)),
      categories[static_cast<std::size_t>(bar.kind)], static_cast<double>(bar.begin_ns) / 1e3,
      static_cast<double>(bar.end_ns - bar.begin_ns) / 1e3, process_of(bar.stream.device()),
      bar.stream.id(), bar.region, bar.bytes);
}

std::string name_of_process(c10::Device device) {
  return fmt::format(
      "{{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": {}, \"args\": {{\"name\": {}}}}}",
      process_of(device), json_string(device.str()));
}

/// Returns the moment at which a budget drops or moves a result, or its limit as a counter; "" for
/// other events.
std::string budget_entry_of(const Event& event) {
  const double us = static_cast<double>(event.time_ns) / 1e3;
  if (event.kind == EventKind::Eviction || event.kind == EventKind::MoveAway)
    return fmt::format(
        "{{\"name\": {}, \"cat\": \"eviction\", \"ph\": \"i\", \"s\": \"t\", \"ts\": {:.3f}, "
        "\"pid\": 1, \"tid\": {}, \"args\": {{\"bytes\": {}}}}}",
        json_string((event.kind == EventKind::MoveAway ? "moves " : "drops ") + *event.text), us,
        event.thread, event.number);
  if (event.kind != EventKind::Budget) return {};
  return fmt::format(
      "{{\"name\": {}, \"ph\": \"C\", \"ts\": {:.3f}, \"pid\": 1, \"args\": "
      "{{\"bytes\": {}}}}}",
      json_string(event.device.is_cpu() ? "budget" : "budget of " + event.device.str()), us,
      event.number == recording::no_budget ? 0 : event.number);
}

/// Returns the moment of an allocation on its thread, and the allocator's bytes at that moment.
std::string moment_of(const Event& event) {
  const std::string name = event.text == nullptr ? "" : name_shown(*event.text);
  return fmt::format(
      "{{\"name\": \"{0} on {1}\", \"cat\": \"allocation\", \"ph\": \"i\", \"s\": \"t\", \"ts\": {2:.3f}, "
      "\"pid\": 1, \"tid\": {3}, \"args\": {{\"bytes\": {4}, \"region\": {5}, \"name\": {6}, \"inputs kept\": "
      "{7}, \"saved by policy\": {8}, \"recomputed\": {9}}}}},\n"
      "{{\"name\": \"allocated on {1}\", \"ph\": \"C\", \"ts\": {2:.3f}, \"pid\": 1, \"args\": {{\"rounded\": "
      "{10}}}}}",
      event.number < 0 ? "frees" : "allocates", event.device.str(),
      static_cast<double>(event.time_ns) / 1e3, event.thread, std::abs(event.number), event.region,
      json_string(name), event.bytes.inputs, event.bytes.saved, event.bytes.recomputed,
      event.bytes.live);
}

std::string counter_of(const Event& event) {
  const LiveKinds& b = event.bytes;
  const std::string name =
      event.device.is_cpu() ? "live bytes" : "live bytes of " + event.device.str();
  return fmt::format(
      "{{\"name\": {}, \"ph\": \"C\", \"ts\": {:.3f}, \"pid\": 1, \"args\": {{\"live\": "
      "{}, \"inputs kept\": {}, \"saved by policy\": {}, \"recomputed\": {}}}}}",
      json_string(name), static_cast<double>(event.time_ns) / 1e3, b.live, b.inputs, b.saved,
      b.recomputed);
}

}  // namespace

void write_report_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  TORCH_CHECK(file.good(), "remat::Recorder: ", path.string(),
              " could not be written. Hint: name a file in a folder that exists and has room.");
}

std::string Recorder::event_log() const {
  std::string text;
  if (const int64_t dropped = report().dropped_events; dropped > 0)
    text = fmt::format("({} older events are gone)\n", dropped);
  for (const Event& event : recording_->events()) {
    if (event.kind == EventKind::Memory) continue;
    text += valid_text(line_of(event)) += '\n';
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
    add(budget_entry_of(event));
    if (event.kind == EventKind::Allocation) add(moment_of(event));
    if (recording_->options().memory && has_bytes(event)) add(counter_of(event));
  }
  std::set<c10::DeviceIndex> named;
  for (const DeviceBar& bar : recording_->bars()) {
    if (named.insert(bar.stream.device_index()).second) add(name_of_process(bar.stream.device()));
    add(slice_of(bar));
  }
  write_report_file(path, text + "\n]}\n");
}

}  // namespace remat
