#pragma once
// A private, unnamed file that stores bytes.
//
// Note [The spool file]
// One file holds many pieces, so that file descriptors do not run out. The file is opened without a
// name (O_TMPFILE). On a file system without that, it gets a random name that must not exist yet
// and is removed at once. With mode 0600 no other user can have created it or can open it, and
// nothing remains after a kill. Bytes go through pwrite and pread instead of a mapping: a full disk
// is then an error code and not a signal, and read bytes do not count twice as this process's
// memory.
//
// Backward reads in the reverse order of writing. A read tells the kernel which pieces come next
// (POSIX_FADV_WILLNEED), and the kernel reads them from the disk meanwhile. Our own reader thread
// would do the same, but with a second copy in memory, locks, and a thread that complicates fork().
// Most of the time the pages are still in the page cache, and reads do not wait.
//
// After fork() two processes share one file. The child writes to a new file of its own. Neither
// process reuses a range that was written before the fork, since the other may still read it.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>

namespace remat {

class SpoolFile;

/// Bytes in a spool; their range in the file is free again when this object dies.
class SpoolRange {
 public:
  SpoolRange(std::shared_ptr<SpoolFile> file, int64_t offset, int64_t size, uint64_t number);
  ~SpoolRange();
  SpoolRange& operator=(SpoolRange&&) = delete;
  /// Reads the bytes, on any thread. Throws c10::Error.
  void read(void* to) const;
  /// Returns whether the bytes equal those in memory; false if they cannot be read. Any thread.
  bool equals(const void* memory) const noexcept;

 private:
  const std::shared_ptr<SpoolFile> file_;
  const int64_t offset_, size_;
  const uint64_t number_;  ///< position in the order of writing
  const uint64_t num_forks_;
};

class Spool {
 public:
  /// Opens the file. `user`: name of the owner, for errors. Throws c10::ValueError if no file can
  /// be made in `directory`.
  Spool(std::filesystem::path directory, const char* user);
  /// Writes the bytes. Any thread. Throws c10::Error, and keeps nothing, if not all bytes can be
  /// written.
  std::shared_ptr<SpoolRange> write(const void* from, int64_t size);

 private:
  const std::filesystem::path directory_;
  const char* const user_;
  std::mutex mutex_;
  std::shared_ptr<SpoolFile> file_;
};

}  // namespace remat
