#pragma once
// Places that store saved tensors until backward. Any program can implement the interface.
//
// `SaveElsewhereGuard` handles views, versions, shared storages, in-place changes and the times of
// copies (see hooks.h, above SaveOnCpuGuard: all rules apply here). A place only copies flat
// tensors out and back. SaveOnCpuGuard, SaveOnDiskGuard and SaveAsGuard use this interface too.
//
// Both copies have a begin and a finish, so that a place may work beside the program. A place that
// does not overrides only `begin_store` and `finish_load`. The calls, in order, and their threads:
//
//    forward    takes, begin_store on the thread that saves, in the order of saving
//               finish_store       for contents that are stored late: on that thread, if too many
//                                  bytes are under way (max_bytes_in_flight); otherwise before the
//                                  first finish_load
//    backward   begin_load         on a thread of the engine, when it reads a tensor that was
//                                  saved later
//               finish_load        on the thread that reads; also outside of backward, alone
//               cancel_load        if a begun load was not read: when that backward ends, or
//                                  earlier
//    then       ~StoredContents    on the thread that releases the last tensor with these contents
//
// A place's functions may run on several threads at once. Those of one StoredContents never do:
// each begins after the previous one has returned, and sees its writes. The runtime holds no lock
// during a call, except the one that makes readers of the same contents wait. A place computes
// outside of everything that the calling thread has enabled: autograd, autocast, dispatch modes,
// the profiler, hooks, guards and regions. Random numbers that a place draws are not preserved.
//
// Exceptions keep their type, if it derives from std::exception. A load that threw may be tried
// again, by the same backward on a retained graph.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "remat/export.h"
#include "remat/scope.h"

namespace remat {

/// The contents of a storage, or of a range of it, in a place. It lives as long as any saved tensor
/// uses these contents.
class REMAT_API StoredContents {
 public:
  virtual ~StoredContents();

  /// Returns whether `begin_store` may return before it has copied everything. The answer does not
  /// change.
  /// If so, reading a tensor that was changed in place after its save throws, as in plain autograd:
  /// it is unknown which values were copied. (The copy must survive such a change, but its result
  /// is not used.) If not, tensors have the values of the save.
  virtual bool is_stored_late() const { return false; }

  /// Waits until the original is no longer needed: its memory may then be freed, or written to by
  /// the work that this thread queues next on its current streams. Called once, unless it throws;
  /// not called for contents that are not stored late. Its exceptions reach the operator that
  /// saves, or the backward.
  virtual void finish_store() {}

  /// Begins the copy back and returns soon; called when the contents will probably be read next. Is
  /// followed by `finish_load` or `cancel_load` before the next load begins. May be called before
  /// `finish_store`, and with other current streams than `finish_load`. Its exceptions are dropped:
  /// the load then counts as not begun.
  virtual void begin_load() {}

  /// Returns a tensor like the stored one: one dimension, the same number of elements, dtype and
  /// device. It must be ready for use on the current stream, and have memory of its own, because
  /// backward may write to it. If other code holds its storage, it is copied. Called for each read
  /// that finds no tensor of an earlier read alive, with or without a `begin_load` before. A result
  /// of another form is a `c10::ValueError` of the backward.
  virtual at::Tensor finish_load() = 0;

  /// Releases a load that `begin_load` began and backward did not read. Throws nothing.
  virtual void cancel_load() {}

 protected:
  StoredContents() = default;
  StoredContents(const StoredContents&) = delete;
  StoredContents& operator=(const StoredContents&) = delete;
};

/// A place that stores contents. It lives until its guard and all its contents are gone.
class REMAT_API Place {
 public:
  virtual ~Place();

  /// Returns whether a saved tensor may be moved here, by its device, dtype and size; cheap.
  /// `tensor` is strided, owns a storage with data, and is of LibTorch's plain tensor class.
  /// Default: yes.
  virtual bool takes(const at::Tensor& tensor) const;

  /// Returns true if `begin_store` gets bytes (at::kByte), which must be restored unchanged.
  /// Otherwise it gets elements in the dtype of the tensor; a lossy place may then return other
  /// elements of that dtype.
  virtual bool stores_bytes() const { return true; }

  /// Copies `flat` out, or begins to. Return null to leave the tensor in place, for example if it
  /// cannot be compressed.
  /// `flat` has one dimension, is dense, does not require grad, and shares memory with the saved
  /// tensor: only read it. A place that reads it later must keep it until then (which keeps the
  /// memory), or record the reading stream with the allocator.
  /// An exception reaches the operator that saves. At the guard's end it is a warning, and the
  /// tensor stays. In both cases nothing was moved, and contents that were stored before are
  /// intact.
  virtual std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) = 0;

 protected:
  Place() = default;
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
};

/// Options of a `SaveElsewhereGuard`: which tensors it moves, and how many loads run ahead.
struct SaveElsewhereOptions {
  /// Smaller tensors stay [bytes].
  int64_t min_bytes = 0;
  /// `false`: parameters (leaves that require grad) and their views move too.
  bool skip_parameters = true;
  /// Number of loads that begin ahead of a read, in the reverse order of saving; 0: none. At most
  /// this many loaded tensors are in memory beside those that backward uses.
  int64_t prefetch_depth = 1;
  /// [bytes] Limit of the originals that unfinished stores hold, for contents that are stored late;
  /// a single larger one is allowed. Beyond the limit the oldest stores are finished first.
  int64_t max_bytes_in_flight = 64 << 20;
};

/// While alive, moves tensors that autograd saves on this thread to the caller's own place.
/// Backward gets them with their dtype, device, sizes, strides and `requires_grad`. Common rules:
/// hooks.h, above SaveOnCpuGuard.
///
///     const remat::SaveElsewhereGuard guard(std::make_unique<Compress>(), {.min_bytes = 1 << 14});
///
/// Throws `c10::ValueError` for a null place or a negative option. Example:
/// examples/save_compressed.cpp.
class REMAT_API SaveElsewhereGuard : detail::ScopeGuard {
 public:
  /// Opens the scope; the destructor closes it.
  explicit SaveElsewhereGuard(std::unique_ptr<Place> place, SaveElsewhereOptions options = {});
};

}  // namespace remat
