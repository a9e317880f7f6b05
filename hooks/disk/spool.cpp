#include "hooks/disk/spool.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "hooks/disk/file_watch.h"

namespace remat {

namespace {

constexpr int64_t file_page = 4096;
/// Number of bytes ahead of the reader that the kernel is asked to read.
constexpr int64_t ahead_bytes = 64 << 20;
/// Largest number of pieces ahead: a walk over many small ones would cost more than the read.
constexpr std::size_t max_ahead = 64;

/// Counts of forks: `num_forks` grows in parent and child, `process_number` only in the child.
std::atomic<uint64_t> num_forks{0}, process_number{0};

void watch_forks() {
  static const int registered = pthread_atfork(
      nullptr, [] { ++num_forks; },
      [] {
        ++num_forks;
        ++process_number;
      });
  (void)registered;
}

/// While alive, a write beyond the process's file size limit gives an error code on this thread
/// instead of a signal, which would end the process by default. The process's handler, and a signal
/// that was pending before, stay as they are.
class NoFileSizeSignal {
 public:
  NoFileSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
    was_pending_ = is_pending();
  }
  ~NoFileSizeSignal() {
    // The kernel sends the signal to the thread that writes.
    constexpr timespec at_once{};
    if (!was_pending_ && is_pending()) ::sigtimedwait(&signal_, nullptr, &at_once);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoFileSizeSignal& operator=(NoFileSizeSignal&&) = delete;

 private:
  static bool is_pending() {
    sigset_t pending;
    return ::sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
  }
  sigset_t signal_{}, before_{};
  bool was_pending_ = false;
};

std::string words_of(int code) { return std::generic_category().message(code); }

bool is_unknown_to_file_system(int code) {
  return code == EOPNOTSUPP || code == EISDIR || code == EINVAL || code == ENOENT || code == ENOSYS;
}

int open_named_and_unlink(const char* directory) {
  const int folder = ::open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -1;
  int fd = -1;
  for (int tries = 0; tries < 64 && fd < 0; ++tries) {
    std::array<unsigned char, 16> random{};
    if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) break;
    std::string name = ".remat-spool-";
    for (const unsigned char byte : random) {
      name += "0123456789abcdef"[byte >> 4];
      name += "0123456789abcdef"[byte & 15];
    }
    fd = ::openat(folder, name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0)
      ::unlinkat(folder, name.c_str(), 0);
    else if (errno != EEXIST)
      break;
  }
  const int error = errno;
  ::close(folder);
  errno = error;
  return fd;
}

int open_unnamed(const std::filesystem::path& directory) {
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  if (fd >= 0 || !is_unknown_to_file_system(errno)) return fd;
  return open_named_and_unlink(directory.c_str());
}

}  // namespace

class SpoolFile {
 public:
  SpoolFile(const std::filesystem::path& directory, const char* user)
      : directory_(directory), user_(user) {
    watch_forks();
    process_ = process_number;
    fd_ = open_unnamed(directory);
    TORCH_CHECK_VALUE(fd_ >= 0, "remat::", user_, ": no file could be made in the directory \"",
                      directory.string(), "\".\nCause: ", words_of(errno),
                      ".\nHint: name a directory that exists and that this user may write to.");
  }
  ~SpoolFile() { ::close(fd_); }
  SpoolFile& operator=(SpoolFile&&) = delete;

  bool is_of_this_process() const { return process_ == process_number; }

  /// Writes the bytes, and returns their offset and number.
  std::pair<int64_t, uint64_t> write(const char* from, int64_t size) {
    const int64_t offset = allocate(size);
    int64_t done = 0;
    const NoFileSizeSignal no_signal;
    while (done < size) {
      const ssize_t count =
          ::pwrite(fd_, from + done, static_cast<std::size_t>(size - done), offset + done);
      if (count > 0) {
        done += count;
      } else if (count == 0 || errno != EINTR) {
        const int code = count == 0 ? ENOSPC : errno;
        release(offset, size);
        TORCH_CHECK(
            false, "remat::", user_, ": ", size,
            " bytes of a saved tensor could not be written to a file in \"", directory_.string(),
            "\".\nCause: ", words_of(code), " (after ", done,
            " bytes).\n"
            "Hint: make room there, or name another directory; tensors saved before are intact, "
            "and so is this one.");
      }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    written_.emplace(++last_number_, Written{offset, size});
    return {offset, last_number_};
  }

  void read(char* to, int64_t offset, int64_t size, uint64_t number) {
    tell_what_comes_next(number);
    read(to, offset, size);
  }
  void read(char* to, int64_t offset, int64_t size) {
    int64_t done = 0;
    while (done < size) {
      const ssize_t count =
          ::pread(fd_, to + done, static_cast<std::size_t>(size - done), offset + done);
      if (count < 0 && errno == EINTR) continue;
      TORCH_CHECK(
          count > 0, "remat::", user_, ": ", size,
          " bytes of a saved tensor could not be read back from a file in \"", directory_.string(),
          "\".\nCause: ", count == 0 ? std::string("the file was made shorter") : words_of(errno),
          ".\nHint: try the same backward again, or run forward again.");
      done += count;
    }
  }

  void drop(int64_t offset, int64_t size, uint64_t number, bool can_be_used_again) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      written_.erase(number);
    }
    if (can_be_used_again) release(offset, size);
  }

 private:
  /// Says whether the kernel was told of a piece since its last read. The read of a reminder
  /// announces further pieces.
  enum class Announced : uint8_t { No, Yes, AsReminder };
  struct Written {
    int64_t offset, size;
    Announced announced = Announced::No;
  };

  static int64_t room_for(int64_t size) { return (size + file_page - 1) / file_page * file_page; }

  int64_t allocate(int64_t size) {
    const int64_t room = room_for(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fits = free_by_size_.lower_bound({room, 0});
    if (fits != free_by_size_.end()) {
      const auto [size_there, offset] = *fits;
      take_free(free_.find(offset));
      if (size_there > room) add_free(offset + room, size_there - room);
      return offset;
    }
    return std::exchange(end_, end_ + room);
  }

  void release(int64_t offset, int64_t size) {
    int64_t room = room_for(size);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + room == next->first) {
      room += next->second;
      next = take_free(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        offset = before->first;
        room += before->second;
        take_free(before);
      }
    }
    if (offset + room == end_)
      end_ = offset;
    else
      add_free(offset, room);
  }
  void add_free(int64_t offset, int64_t room) {
    free_.emplace(offset, room);
    free_by_size_.emplace(room, offset);
  }
  std::map<int64_t, int64_t>::iterator take_free(std::map<int64_t, int64_t>::iterator each) {
    free_by_size_.erase({each->second, each->first});
    return free_.erase(each);
  }

  void tell_what_comes_next(uint64_t number) {
    std::vector<std::pair<int64_t, int64_t>> next;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto here = written_.find(number);
      if (here == written_.end()) return;
      if (std::exchange(here->second.announced, Announced::No) == Announced::Yes) return;
      int64_t bytes = 0;
      std::size_t num_pieces = 0;
      bool has_reminder = false;
      for (auto each = here; each != written_.begin();) {
        --each;
        bytes += each->second.size;
        if (bytes > ahead_bytes || ++num_pieces > max_ahead) break;
        // The read of the piece half way down announces the next ones.
        const bool is_reminder =
            !has_reminder && (bytes > ahead_bytes / 2 || num_pieces > max_ahead / 2);
        has_reminder |= is_reminder;
        const Announced before = std::exchange(
            each->second.announced, is_reminder ? Announced::AsReminder : Announced::Yes);
        if (before == Announced::No) next.emplace_back(each->second.offset, each->second.size);
      }
    }
    // The call only advises the kernel; its result does not matter.
    for (const auto& [offset, size] : next) ::posix_fadvise(fd_, offset, size, POSIX_FADV_WILLNEED);
  }

  const std::filesystem::path directory_;
  const char* const user_;
  int fd_ = -1;
  uint64_t process_ = 0;
  std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  ///< offset and size of free ranges; no two touch
  std::set<std::pair<int64_t, int64_t>> free_by_size_;  ///< size and offset of the same ranges
  int64_t end_ = 0;
  std::map<uint64_t, Written> written_;
  uint64_t last_number_ = 0;
};

SpoolRange::SpoolRange(std::shared_ptr<SpoolFile> file, int64_t offset, int64_t size,
                       uint64_t number)
    : file_(std::move(file)),
      offset_(offset),
      size_(size),
      number_(number),
      num_forks_(num_forks) {}
SpoolRange::~SpoolRange() { file_->drop(offset_, size_, number_, num_forks_ == num_forks); }
void SpoolRange::read(void* to) const {
  const WatchedFileWork watched(FileWatch::Work::Read, size_);
  file_->read(static_cast<char*>(to), offset_, size_, number_);
}
bool SpoolRange::equals(const void* memory) const noexcept {
  constexpr int64_t part = 1 << 16;  // fits the cache
  try {
    const WatchedFileWork watched(FileWatch::Work::Wait, size_);  // it loads nothing back
    std::vector<char> read(static_cast<std::size_t>(std::min(part, size_)));
    for (int64_t done = 0; done < size_; done += part) {
      const int64_t count = std::min(part, size_ - done);
      file_->read(read.data(), offset_ + done, count);
      if (std::memcmp(read.data(), static_cast<const char*>(memory) + done,
                      static_cast<std::size_t>(count)) != 0)
        return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

Spool::Spool(std::filesystem::path directory, const char* user)
    : directory_(std::move(directory)),
      user_(user),
      file_(std::make_shared<SpoolFile>(directory_, user_)) {}

std::shared_ptr<SpoolRange> Spool::write(const void* from, int64_t size) {
  const WatchedFileWork watched(FileWatch::Work::Write, size);
  std::shared_ptr<SpoolFile> file;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!file_->is_of_this_process()) file_ = std::make_shared<SpoolFile>(directory_, user_);
    file = file_;
  }
  const auto [offset, number] = file->write(static_cast<const char*>(from), size);
  return std::make_shared<SpoolRange>(std::move(file), offset, size, number);
}

}  // namespace remat
