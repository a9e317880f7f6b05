#pragma once
// Words, numbers and pictures of reports, for the table, the page and the trace alike; and their files.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "lib/observe/recording.h"

namespace remat {

/// Quotes and escapes a text.
std::string json_string(std::string_view text);
/// Escapes &, <, > and quotes.
std::string xml_text(std::string_view text);
/// Writes bytes as "12.3 MB": a power of ten, three digits or more.
std::string readable_bytes(int64_t bytes);
std::string name_shown(const std::string& name);

struct ReportTable {
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
};
ReportTable table_of(const Report& report);

/// Draws live bytes over time, stacked by kind, with the regions below: an SVG element. Bars and
/// columns have titles, which browsers show under the pointer.
std::string memory_picture(const std::vector<Event>& events);

/// Writes the whole text, or throws an error that names the file.
void write_report_file(const std::filesystem::path& path, const std::string& text);

}  // namespace remat
