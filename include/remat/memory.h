#pragma once
// Exact bytes of tensors on the CPU or an accelerator: a meter and a limit, for tests, demos and
// planning.

#include <c10/core/Device.h>

#include <cstdint>

#include "remat/export.h"

namespace remat {

namespace detail {
struct MeteredDevice;
}

/// Counts the live bytes of LibTorch's allocator for one device. Memory counts from its allocation
/// to its release, on whatever threads these happen.
///
/// The CPU: the first meter (or limit guard) of the process puts a counting allocator in front of
/// the installed one; it stays until the process ends. It counts only the bytes asked for, so
/// numbers do not depend on the system's allocator, its rounding or its caches. Make the first
/// meter before the tensors that you want to count. Make it before other threads run, if possible:
/// LibTorch advises this for the installation of allocators. Later meters may be made anywhere.
/// Not counted: tensors made before the first meter, and storage to which they are resized. Memory
/// from elsewhere does not count either (the scratch space of MKL, `from_blob`, memory-mapped
/// files, pinned memory). The meter counts nothing if a later allocator is installed that does not
/// call this one. Buffers that oneDNN takes from the allocator are counted; oneDNN keeps some of
/// them. Cost: a few nanoseconds and 128 uncounted bytes per allocation.
///
/// An accelerator: the numbers come from its allocator (`c10::DeviceAllocator`). They include all
/// of the process's tensors on that device, whenever they were made. No allocator is put in front,
/// so there is no cost between two queries. Memory that is freed while another stream uses it
/// counts until the allocator releases it. A meter that starts a peak resets the allocator's own
/// peak, which other code may read (`torch.cuda.max_memory_allocated`). The constructor initializes
/// the device.
///
/// Example: examples/quickstart.cpp, examples/char_transformer/training.h.
class REMAT_API MemoryMeter {
 public:
  /// Makes a meter of the CPU, whose own peak starts at the present live bytes.
  MemoryMeter();
  /// Makes a meter of `device`; without an index, of the current device of its type. Throws
  /// `CheckpointError` (`Unsupported`) if the device's allocator does not report its bytes, or
  /// LibTorch is older than 2.9.
  explicit MemoryMeter(c10::Device device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter(MemoryMeter&&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;
  MemoryMeter& operator=(MemoryMeter&&) = delete;

  /// Returns the device whose bytes are counted, with an index unless it is the CPU.
  c10::Device device() const { return device_; }

  /// Returns whether bytes are as asked for by tensors (the CPU and CUDA). If not, they are as the
  /// device's allocator rounds them.
  bool is_exact() const;

  /// Returns the bytes alive now in the whole process (on the CPU, those since the first meter or
  /// limit guard): the same number for every meter of the device. Any thread.
  int64_t live_bytes() const;

  /// Returns the largest number of bytes alive at one moment since this meter was made or its last
  /// `reset_peak()`. Each meter has its own peak: resetting one does not affect the others. Any
  /// thread; an allocation that runs at the same time may be included or not.
  int64_t peak_bytes() const;

  /// Restarts the peak at the present live bytes. Any thread.
  void reset_peak();

 private:
  c10::Device device_;
  detail::MeteredDevice& shared_;
};

/// While alive, an allocation that would take `live_bytes()` above `bytes` throws
/// `c10::OutOfMemoryError` and changes no count. This shows on any machine how a program runs on a
/// small one. The error lists the live bytes by region, of regions that began under a guard or a
/// Recorder; such regions pay for their record as under a Recorder.
///
/// Applies to the whole process and all threads. All live guards of a device apply, so the smallest
/// limit decides; they may end in any order, on any thread. A limit below the bytes alive already
/// refuses every new allocation and frees nothing. Bytes are counted as by a `MemoryMeter`; memory
/// that it does not count is not limited.
///
/// On an accelerator the guard empties the allocator's cache and occupies the rest of the device's
/// free memory, so the error is the device's own. The limit is as fine as the allocator's pieces
/// (CUDA: 2 MiB), and moves when other processes allocate or free memory.
///
/// Throws `c10::ValueError` if `bytes` is negative; `CheckpointError` (`Unsupported`) as
/// `MemoryMeter` does, and if the device does not report its free memory (before LibTorch 2.10 no
/// device does).
class REMAT_API MemoryLimitGuard {
 public:
  explicit MemoryLimitGuard(int64_t bytes);             ///< limits the CPU
  MemoryLimitGuard(int64_t bytes, c10::Device device);  ///< limits a device
  ~MemoryLimitGuard();
  MemoryLimitGuard(const MemoryLimitGuard&) = delete;
  MemoryLimitGuard(MemoryLimitGuard&&) = delete;
  MemoryLimitGuard& operator=(const MemoryLimitGuard&) = delete;
  MemoryLimitGuard& operator=(MemoryLimitGuard&&) = delete;

 private:
  int64_t bytes_;
  detail::MeteredDevice& shared_;
};

/// Returns the bytes that tensors on `device` could take now. For a device this is its free memory
/// once its allocator has emptied its cache, which waits for the device. For the CPU it is the rest
/// that the smallest `MemoryLimitGuard` allows.
/// Throws `CheckpointError` (`Unsupported`) if the device does not report its free memory, and for
/// the CPU without a limit, since all programs share its memory. Any thread.
REMAT_API int64_t free_bytes(c10::Device device);

}  // namespace remat
