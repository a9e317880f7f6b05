#pragma once
// Words, numbers and pictures of reports, shared by table, page and trace, and their files.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/observe/recording.h"

namespace remat {

/// Writes bytes as "12.3 MB": a power of ten, three digits or more.
std::string readable_bytes(int64_t bytes);
std::string name_shown(const std::string& name);

/// Work with a begin and an end: of a thread, or of a device's stream.
struct Slice {
  enum class Kind : uint8_t { Forward, Recompute, Operator, Rerun, File, FileWait, Copy };
  Kind kind;
  std::string name;
  int64_t begin_ns, end_ns;
  int64_t lane;  ///< thread or stream
  int64_t region, depth, bytes;
  std::string_view end = "returned";  ///< or "stopped early", "threw"
  std::optional<c10::Device> on{};    ///< of the stream
};
/// Returns the work that the event ends; nothing if it ends none.
std::optional<Slice> slice_of(const Event& event);
Slice slice_of(const DeviceBar& bar);
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

/// Returns a sentence about an allocation that did not fit: the live bytes by region.
std::string text_of(const FailedAllocation& failed);
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
