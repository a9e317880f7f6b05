// Recorder::event_log: events as lines of text.

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <fstream>
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
    (text += line_of(event)) += '\n';
  }
  return valid_text(text);
}

}  // namespace remat
