#pragma once
// Exact CPU bytes of tensors: a meter and a limit, for tests, demos and planning.

#include <cstdint>

#include "remat/export.h"

namespace remat {

/// Counts the bytes that LibTorch's CPU allocator has given out and not got back.
///
/// The first meter (or limit guard) of the process puts a counting allocator in front of the one
/// that is installed; it stays until the process ends and counts nothing but the bytes asked for,
/// so numbers do not depend on the system's allocator, its rounding or its caches. Make it before
/// the tensors you want to count and, because LibTorch says so of installing allocators, preferably
/// before other threads run; later meters may be made anywhere. Memory counts from its allocation
/// to its release, whichever threads do the two.
///
/// Not counted: tensors made before the first meter and storage they are resized to, memory that
/// does not come from that allocator (the scratch space of MKL, `from_blob`, memory-mapped files,
/// pinned and accelerator memory), and everything if another allocator is installed later that does
/// not chain onto this one. Buffers which oneDNN takes from the allocator are counted; it keeps some.
///
/// Cost: a few nanoseconds and 128 bytes per allocation, the latter uncounted.
///
/// Example: examples/quickstart.cpp, examples/char_transformer/training.h.
class REMAT_API MemoryMeter {
 public:
  /// Starts this meter's own peak at the present live bytes.
  MemoryMeter();
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter(MemoryMeter&&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;
  MemoryMeter& operator=(MemoryMeter&&) = delete;

  /// [bytes] alive now, of the whole process, since the first meter or limit guard was made: the
  /// same number for every meter. Any thread.
  int64_t live_bytes() const;

  /// The most [bytes] that were alive at one moment since this meter was made or its last
  /// `reset_peak()`. Meters have peaks of their own: resetting one leaves the others' alone. Any
  /// thread; an allocation that runs at the same time may be in or not.
  int64_t peak_bytes() const;

  /// Starts a new peak at the present live bytes. Any thread.
  void reset_peak();

 private:
  int64_t peak_bytes_ = 0;  // without what the allocator has seen since any meter's last reset
};

/// While alive, an allocation that would take `live_bytes()` above `bytes` throws
/// `c10::OutOfMemoryError` and changes no count: the way to see on any machine what a small one
/// would do.
///
/// Process-wide, all threads. Every guard that is alive holds, so the smallest limit decides; they
/// may end in any order, on any thread. A limit below what is alive already refuses every new
/// allocation and frees nothing. Counts start as `MemoryMeter` says, with the first meter or guard
/// of the process, and what a meter does not count is not limited either.
///
/// Throws `c10::ValueError` if `bytes` is negative.
class REMAT_API MemoryLimitGuard {
 public:
  explicit MemoryLimitGuard(int64_t bytes);  ///< until the guard ends
  ~MemoryLimitGuard();
  MemoryLimitGuard(const MemoryLimitGuard&) = delete;
  MemoryLimitGuard(MemoryLimitGuard&&) = delete;
  MemoryLimitGuard& operator=(const MemoryLimitGuard&) = delete;
  MemoryLimitGuard& operator=(MemoryLimitGuard&&) = delete;

 private:
  int64_t bytes_;
};

}  // namespace remat
