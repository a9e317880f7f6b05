#pragma once
// Writing a recorder's files: whole, or with an error that names the file.

#include <filesystem>
#include <string>

namespace remat {

void write_report_file(const std::filesystem::path& path, const std::string& text);

}  // namespace remat
