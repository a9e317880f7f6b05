#pragma once
// Words, numbers and pictures of reports, shared by table, page and trace, and their files.

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
/// Returns the name of a bar: the region, or the direction of the copy.
std::string name_of(const DeviceBar& bar);
/// Returns the name of work on a file; null for an event of another kind.
const char* file_work_of(const Event& event);
/// Returns whether an event has the number of live bytes. Allocations have rounded ones, and memory
/// events the exact ones beside them.
inline bool has_bytes(const Event& event) {
  return event.kind != EventKind::Operator && event.kind != EventKind::Decision &&
         event.kind < EventKind::Allocation;
}

struct ReportTable {
  std::string title;  ///< of its section of the page; empty: none
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
};
/// Returns the tables that have rows: of regions, of regions that offloaded, of plans that moved,
/// and of operators under budgets.
std::vector<ReportTable> tables_of(const Report& report);

/// Returns lines beside the table: decisions of policies, devices, and live bytes when allocations
/// failed.
std::vector<std::string> notes_of(const Report& report);

/// The events of one device. The CPU has no bars.
struct Timeline {
  c10::Device device;
  std::vector<Event> events;    ///< with bytes of the device
  std::vector<DeviceBar> bars;  ///< of its streams
};
/// Returns a timeline for the CPU and one for each device that was used.
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
/// Returns the end of the last event or bar [ms].
double last_ms_of(const std::vector<Timeline>& timelines);

/// Writes the whole text, or throws an error that names the file.
void write_report_file(const std::filesystem::path& path, const std::string& text);

}  // namespace remat
