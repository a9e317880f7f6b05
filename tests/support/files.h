#pragma once
// Directories for tests, their files, and files that may not grow.

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/support.h"

namespace remat::testing {

inline std::string text_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

inline int64_t occurrences(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// An empty directory, which is removed at its end.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "remat-test-XXXXXX").string()) {
    REQUIRE(::mkdtemp(path_.data()) != nullptr);
  }
  // Not std::filesystem::remove_all: PyPI's LibTorch exports parts of std::filesystem of another
  // libstdc++, which replace those of this one and crash.
  ~Folder() {
    for (const auto& each : std::filesystem::directory_iterator(path_))
      ::unlink(each.path().c_str());
    ::rmdir(path_.c_str());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  int64_t num_entries() const {
    return std::distance(std::filesystem::directory_iterator(path_),
                         std::filesystem::directory_iterator());
  }
  /// Returns the open files of this process that were in the directory. Most have no name any more.
  std::vector<std::filesystem::path> open_files() const {
    std::vector<std::filesystem::path> found;
    for (const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(each.path(), gone).string();
      if (!gone && target.starts_with(path_ + "/")) found.push_back(each.path());
    }
    return found;
  }
  /// Returns the status of the directory's only open file.
  struct stat status() const {
    const auto files = open_files();
    REQUIRE(files.size() == 1);
    struct stat status{};
    REQUIRE(::stat(files[0].c_str(), &status) == 0);
    return status;
  }

 private:
  std::string path_;
};

/// Sets the soft limit of a resource for its lifetime.
class Limit {
 public:
  Limit(__rlimit_resource resource, rlim_t value) : resource_(resource) {
    REQUIRE(::getrlimit(resource_, &before_) == 0);
    rlimit limit = before_;
    limit.rlim_cur = value;
    REQUIRE(::setrlimit(resource_, &limit) == 0);
  }
  ~Limit() { ::setrlimit(resource_, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  const __rlimit_resource resource_;
  rlimit before_{};
};

/// For its lifetime, a file that grows beyond a limit gives an error code instead of a signal.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : limit_(RLIMIT_FSIZE, bytes) {}
  ~FileSizeLimit() { std::signal(SIGXFSZ, before_); }

 private:
  void (*before_)(int) = std::signal(SIGXFSZ, SIG_IGN);
  Limit limit_;
};

}  // namespace remat::testing
