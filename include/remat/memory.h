#pragma once
// Exact bytes of tensors, on the CPU or an accelerator: a meter and a limit, for tests, demos and
// planning.

#include <c10/core/Device.h>

#include <cstdint>

#include "remat/export.h"

namespace remat {

namespace detail {
struct MeteredDevice;
}

/// Counts the bytes that LibTorch's allocator of one device has given out and not got back. Memory
/// counts from its allocation to its release, whichever threads do the two.
///
/// The CPU: the first meter (or limit guard) of the process puts a counting allocator in front of
/// the one that is installed; it stays until the process ends and counts nothing but the bytes
/// asked for, so numbers do not depend on the system's allocator, its rounding or its caches. Make
/// it before the tensors you want to count and, because LibTorch says so of installing allocators,
/// preferably before other threads run; later meters may be made anywhere. Not counted: tensors
/// made before the first meter and storage they are resized to, memory that does not come from that
/// allocator (the scratch space of MKL, `from_blob`, memory-mapped files, pinned memory), and
/// everything if another allocator is installed later that does not chain onto this one. Buffers
/// which oneDNN takes from the allocator are counted; it keeps some. Cost: a few nanoseconds and
/// 128 bytes per allocation, the latter uncounted.
///
/// An accelerator: what its allocator says (`c10::DeviceAllocator`), of all of the process's
/// tensors on that device, whenever they were made. Nothing is put in front, so that nothing is
/// paid between two questions. Memory that is freed while another stream uses it counts until its
/// allocator lets go of it. A meter that starts a peak resets the allocator's own, which others may
/// read (`torch.cuda.max_memory_allocated`). Making one uses the device.
///
/// Example: examples/quickstart.cpp, examples/char_transformer/training.h.
class REMAT_API MemoryMeter {
 public:
  /// Makes a meter of the CPU, whose own peak starts at the present live bytes.
  MemoryMeter();
  /// Makes a meter of `device`; without an index, of the current one of its type. Throws
  /// `CheckpointError` (`Unsupported`) if the device's allocator does not tell, or LibTorch is
  /// older than 2.9.
  explicit MemoryMeter(c10::Device device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter(MemoryMeter&&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;
  MemoryMeter& operator=(MemoryMeter&&) = delete;

  /// Returns the device whose bytes are counted; with an index, unless it is the CPU.
  c10::Device device() const { return device_; }

  /// Returns whether bytes are those that tensors asked for, as on the CPU and on CUDA. If not,
  /// they are as the device's allocator rounds them.
  bool is_exact() const;

  /// [bytes] alive now, of the whole process (on the CPU since the first meter or limit guard was
  /// made): the same number for every meter of the device. Any thread.
  int64_t live_bytes() const;

  /// The most [bytes] that were alive at one moment since this meter was made or its last
  /// `reset_peak()`. Meters have peaks of their own: resetting one leaves the others' alone. Any
  /// thread; an allocation that runs at the same time may be in or not.
  int64_t peak_bytes() const;

  /// Starts a new peak at the present live bytes. Any thread.
  void reset_peak();

 private:
  c10::Device device_;
  detail::MeteredDevice& shared_;
};

/// While alive, an allocation that would take `live_bytes()` above `bytes` throws
/// `c10::OutOfMemoryError` and changes no count: the way to see on any machine what a small one
/// would do.
///
/// Process-wide, all threads. Every guard of a device that is alive holds, so the smallest limit
/// decides; they may end in any order, on any thread. A limit below what is alive already refuses
/// every new allocation and frees nothing. Counts are those of a `MemoryMeter`, and what it does
/// not count is not limited either.
///
/// On an accelerator the guard gives back what the allocator caches and takes the rest of the
/// device's free memory, so the error is the device's own. The limit is as fine as the allocator's
/// pieces (CUDA: 2 MiB), and moves with what other processes take and leave.
///
/// Throws `c10::ValueError` if `bytes` is negative; `CheckpointError` (`Unsupported`) as
/// `MemoryMeter` does, and if the device does not say what it has free (before LibTorch 2.10 none
/// does).
class REMAT_API MemoryLimitGuard {
 public:
  explicit MemoryLimitGuard(int64_t bytes);             ///< of the CPU, until the guard ends
  MemoryLimitGuard(int64_t bytes, c10::Device device);  ///< of a device, until the guard ends
  ~MemoryLimitGuard();
  MemoryLimitGuard(const MemoryLimitGuard&) = delete;
  MemoryLimitGuard(MemoryLimitGuard&&) = delete;
  MemoryLimitGuard& operator=(const MemoryLimitGuard&) = delete;
  MemoryLimitGuard& operator=(MemoryLimitGuard&&) = delete;

 private:
  int64_t bytes_;
  detail::MeteredDevice& shared_;
};

/// [bytes] that tensors on `device` could take now: what the device has free once its allocator has
/// given back what it caches (which waits for the device); on the CPU what the smallest
/// `MemoryLimitGuard` leaves.
/// Throws `CheckpointError` (`Unsupported`) if the device does not say, and on the CPU without a
/// limit: its memory is every program's. Any thread.
REMAT_API int64_t free_bytes(c10::Device device);

}  // namespace remat
