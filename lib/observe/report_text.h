#pragma once
// Words, numbers and pictures of reports, for the table, the page and the trace alike; and their
// files.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lib/observe/recording.h"

namespace remat {

/// Quotes and escapes a text; see valid_text.
std::string json_string(std::string_view text);
/// Escapes &, <, > and quotes; see valid_text.
std::string xml_text(std::string_view text);
/// Writes bytes as "12.3 MB": a power of ten, three digits or more.
std::string readable_bytes(int64_t bytes);
std::string name_shown(const std::string& name);
/// As a bar is called: the region, or the way of the copy.
std::string name_of(const DeviceBar& bar);
/// As work on a file is called; null for an event of another kind.
const char* file_work_of(const Event& event);
/// Whether an event says how many bytes are alive.
inline bool has_bytes(const Event& event) {
  return event.kind != EventKind::Operator && event.kind != EventKind::Decision &&
         event.kind < EventKind::Allocation;  // which has rounded ones; memory events tell the rest
}

struct ReportTable {
  std::string title;  ///< of its section of the page; empty: none
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
};
/// Returns those that have rows: of regions, of those that offloaded, of plans that moved, and of
/// operators under budgets.
std::vector<ReportTable> tables_of(const Report& report);

/// What the table has no room for, a line each: what policies decided, devices, and what was alive
/// when allocations failed.
std::vector<std::string> notes_of(const Report& report);

/// What happened on one device: the CPU has no bars.
struct Timeline {
  c10::Device device;
  std::vector<Event> events;    ///< with bytes of the device
  std::vector<DeviceBar> bars;  ///< of its streams
};
/// One for the CPU and one for each device that was seen.
std::vector<Timeline> timelines_of(Recording& recording);

inline constexpr double drawing_width = 1080;
struct Drawing {
  std::string svg;  ///< an element
  double height;
};
/// Draws live bytes over time, stacked by kind, budgets as a line, and the regions below.
/// `last_ms`: where time ends. `top`: where the drawing begins in a drawing around it. Bars and
/// columns have titles, which browsers show under the pointer.
Drawing memory_picture(const Timeline& timeline, double last_ms, double top = 0);
/// When the last thing in any of them ends.
double last_ms_of(const std::vector<Timeline>& timelines);

/// Writes the whole text, or throws an error that names the file.
void write_report_file(const std::filesystem::path& path, const std::string& text);

}  // namespace remat
