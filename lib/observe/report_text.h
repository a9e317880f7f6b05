#pragma once
// Words and numbers of reports, for the table, the page and the trace alike.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "remat/report.h"

namespace remat {

/// Quoted and escaped.
std::string json_string(std::string_view text);
/// "12.3 MB"; a power of ten, three digits or more.
std::string readable_bytes(int64_t bytes);
std::string name_shown(const std::string& name);

struct ReportTable {
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
};
ReportTable table_of(const Report& report);

}  // namespace remat
