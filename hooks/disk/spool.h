#pragma once
// A private, unnamed file that bytes wait in.
//
// Note [The spool file]
// One file for many pieces, so that file descriptors do not run out. It has no name from the moment
// it is open (O_TMPFILE; where a file system has not that, a random name that must not exist yet,
// removed at once), mode 0600: nobody else can have placed it, opens it, or finds it after a kill.
// Bytes go through pwrite and pread, not through a mapping: a full disk is then an error code and
// not a signal, and what is read does not count as this process's memory twice.
//
// Backward reads in the reverse order of writing. A read tells the kernel which pieces come next
// (POSIX_FADV_WILLNEED), and the kernel reads them from the disk meanwhile. A reader thread of our
// own would do the same with a second copy in memory, locks and a thread to fork around; most of
// the time the pages are still in the page cache, and there is nothing to wait for.
//
// After fork() two processes have one file. The child writes to a new file of its own, and neither
// uses a range again that was written before the fork: the other may still read it.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>

namespace remat {

class SpoolFile;

/// Bytes in a spool; their place in the file is free again when this dies.
class SpoolRange {
 public:
  SpoolRange(std::shared_ptr<SpoolFile> file, int64_t offset, int64_t size, uint64_t number);
  ~SpoolRange();
  SpoolRange& operator=(SpoolRange&&) = delete;
  /// Reads the bytes, on any thread. Throws c10::Error.
  void read(void* to) const;
  /// Whether they are those in memory. False if they cannot be read. Any thread.
  bool equals(const void* memory) const noexcept;

 private:
  const std::shared_ptr<SpoolFile> file_;
  const int64_t offset_, size_;
  const uint64_t number_;  ///< in the order of writing
  const uint64_t num_forks_;
};

class Spool {
 public:
  /// `user`: whose file it is, for errors. Throws c10::ValueError if no file can be made there.
  Spool(std::filesystem::path directory, const char* user);
  /// Writes the bytes, on any thread. Throws c10::Error, upon which nothing is kept, if not all
  /// bytes can be written.
  std::shared_ptr<SpoolRange> write(const void* from, int64_t size);

 private:
  const std::filesystem::path directory_;
  const char* const user_;
  std::mutex mutex_;
  std::shared_ptr<SpoolFile> file_;
};

}  // namespace remat
