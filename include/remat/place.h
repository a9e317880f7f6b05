#pragma once
// Places: where saved tensors wait for backward, behind an interface that any program can
// implement.
//
// `SaveElsewhereGuard` decides what moves, when it is copied, what is shared, and what an in-place
// change means (see hooks.h, above SaveOnCpuGuard: all of it holds here too). A place sees flat
// tensors only, copies them out and back, and does not know of views, versions or graphs. What
// SaveOnCpuGuard, SaveOnDiskGuard and SaveAsGuard use are places as yours.
//
// Both copies have a begin and a finish, so that a place may work beside the program. One that does
// not overrides `begin_store` and `finish_load` only. Who is called when, and where:
//
//   forward    takes, begin_store   on the thread that saves, in the order of saving
//              finish_store         for contents that are stored late: there, when too many bytes are
//                                   under way (max_bytes_in_flight); else before the first finish_load
//   backward   begin_load           on a thread of the engine, when it reads what was saved after this
//              finish_load          on the thread that reads; or outside backward, alone
//              cancel_load          begun, and nobody came: when that backward ends, or earlier
//   then       ~StoredContents      on the thread that lets go of the last tensor with these contents
//
// A place's functions may run on several threads at once. Those of one StoredContents never do:
// each begins after the one before has returned, and what that wrote is seen. None of the runtime's
// locks is held but the one that makes readers of the same contents wait. What a place computes is
// not recorded: no autograd, no autocast, no dispatch mode or profiler, no hooks, guards or regions
// of the thread that calls; its draws of random numbers are the place's own affair.
//
// Exceptions keep their type, if it derives from std::exception. A load that threw may be tried
// again: the same backward on a retained graph asks anew.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "remat/export.h"
#include "remat/scope.h"

namespace remat {

/// The contents of a storage, or of a range of it, in a place: held for every saved tensor that
/// lies in it, and let go of with the last of them.
class REMAT_API StoredContents {
 public:
  virtual ~StoredContents();

  /// Returns whether `begin_store` may return before it has copied everything. The answer does not
  /// change. If so, a tensor that is changed in place after it was saved raises when it is read, as
  /// in plain autograd: nobody can say which values were copied. (The copy must survive such a
  /// change; what it makes of it is not used.) If not, tensors have the values of the save.
  virtual bool is_stored_late() const { return false; }

  /// Returns when the original is not needed any more: its memory may be freed, or written to by
  /// the work that this thread queues next on its current streams. Called once, unless it throws;
  /// not called for contents that are not stored late. What it throws reaches the operator that
  /// saves, or the backward.
  virtual void finish_store() {}

  /// Begins the copy back, and returns soon: it will probably be read next. At most one load is
  /// under way: this, then `finish_load` or `cancel_load`. It may come before `finish_store`, and
  /// with other current streams than `finish_load`. What it throws is dropped, and counts as not
  /// begun.
  virtual void begin_load() {}

  /// A tensor as the one that was stored: as many elements, one dimension, the same dtype and
  /// device; ready for use on the current stream, and in memory of its own (if anybody else holds
  /// its storage it is copied, for backward may write to it). Called for each read that finds none
  /// of the tensors of an earlier one alive, with or without a `begin_load` before. Returning
  /// something else is a `c10::ValueError` of the backward.
  virtual at::Tensor finish_load() = 0;

  /// Lets go of what `begin_load` began; nobody has asked for it. Throws nothing.
  virtual void cancel_load() {}

 protected:
  StoredContents() = default;
  StoredContents(const StoredContents&) = delete;
  StoredContents& operator=(const StoredContents&) = delete;
};

/// A place where contents can wait. It lives until its guard and all its contents are gone.
class REMAT_API Place {
 public:
  virtual ~Place();

  /// Returns whether a saved tensor may be moved here, by its device, dtype and size; cheap.
  /// `tensor` is strided, owns a storage with data, and is of LibTorch's plain tensor class.
  /// Default: yes.
  virtual bool takes(const at::Tensor& tensor) const;

  /// True: `begin_store` gets bytes (at::kByte), and must give back the same. False: it gets
  /// elements, in the dtype of the tensor, and may give back others of that dtype, if it is lossy.
  virtual bool stores_bytes() const { return true; }

  /// Copies `flat` out, or begins to. `flat` has one dimension, is dense, does not require grad,
  /// and shares memory with what was saved: read it only. Whoever reads it later keeps it until
  /// then (which keeps the memory), or tells the allocator of the stream that does. Null: it had
  /// better stay where it is, such as what cannot be compressed. An exception reaches the operator
  /// that saves (at the guard's end it is a warning, and the tensor stays); nothing was moved then,
  /// and what was moved before is intact.
  virtual std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) = 0;

 protected:
  Place() = default;
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
};

/// Options of a `SaveElsewhereGuard`: the tensors that it moves, and how far it runs ahead.
struct SaveElsewhereOptions {
  /// Smaller tensors stay [bytes].
  int64_t min_bytes = 0;
  /// `false`: parameters (leaves that require grad) and their views move too.
  bool skip_parameters = true;
  /// How many loads are begun ahead of the one that is read, in the reverse order of saving; 0:
  /// none. So many loaded tensors at the most are in memory beside those that backward uses.
  int64_t prefetch_depth = 1;
  /// [bytes] Limit of the originals that unfinished stores hold, of contents that are stored late;
  /// a single larger one is allowed. Beyond it the oldest stores are finished first.
  int64_t max_bytes_in_flight = 64 << 20;
};

/// While alive, what autograd saves on this thread waits in a place of the caller's own, and
/// backward gets it back with its dtype, device, sizes, strides and `requires_grad`. Common rules:
/// hooks.h, above SaveOnCpuGuard.
///
///     const remat::SaveElsewhereGuard guard(std::make_unique<Compress>(), {.min_bytes = 1 << 14});
///
/// Throws `c10::ValueError` for a null place or a negative option. Example:
/// examples/save_compressed.cpp.
class REMAT_API SaveElsewhereGuard : detail::ScopeGuard {
 public:
  /// Until the guard ends.
  explicit SaveElsewhereGuard(std::unique_ptr<Place> place, SaveElsewhereOptions options = {});
};

}  // namespace remat
