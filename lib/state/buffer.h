#pragma once
// A buffer of modules: what a region copies of it, and whether the region's forward wrote to it.
//
// Note [Only what forward wrote]
// When a region begins, each buffer of its modules is noted: object, version, layout, and a copy of
// the contents that takes no memory until somebody writes (lib/seam/lazy_copy.h). When the function
// has returned, the buffers that it left alone are forgotten: a region neither keeps, compares nor
// restores them. A copy cannot wait for a write on an accelerator, of memory that LibTorch did not
// allocate, and before LibTorch 2.13. There a buffer is copied at once in its first forwards, which
// teach whether they write to it, and later only if one did. Sparse and other layouts are copied
// only once a version has moved. A buffer that is first written without a copy has no contents of
// forward's begin: recomputes then begin with those that forward left. A write of the same contents
// that counts no version cannot be told from a read through a pointer to write with, so nothing is
// kept of the buffer: a recompute only puts back the contents that it finds.
//
// Note [Statistics]
// Batch norms write running statistics that their result does not depend on, past the version
// counter, and some count their calls beside them. Such buffers are restored, but not compared. A
// frame that saved the tensors of a batch norm says which storages they have (Slots::settle); a
// counter is the integer that follows them in its module.

#include <ATen/core/Tensor.h>

#include <any>
#include <cstdint>
#include <memory>
#include <mutex>

#include "lib/tensor/capture.h"
#include "remat/state.h"

namespace remat {

enum class Written { Not, AsStatistics, Otherwise };

/// Each buffer has one such object while any region knows it. Threads: any.
class Buffer final : public StateProvider {
 public:
  /// `before`: the buffer registered before this one in the same modules, or null.
  static std::shared_ptr<Buffer> of(const at::Tensor& buffer,
                                    const std::shared_ptr<Buffer>& before);
  /// Use `of`.
  Buffer(at::Tensor buffer, const std::shared_ptr<Buffer>& before);
  ~Buffer() override;

  const at::Tensor& tensor() const { return buffer_; }

  /// The state as a region's forward begins; without contents where none can be had for nothing,
  /// and earlier forwards did not write to them.
  std::any note();
  /// The state with contents.
  std::any capture() override;
  /// Sets layout, contents (if the state has any) and version, where they differ.
  void restore(const std::any& state) override;

  /// Returns what a forward that began with `note` has done; teaches later forwards. An inner one,
  /// in a region around, does not count: it may be one of many regions of the same forward.
  Written written_since(const std::any& note, bool is_inner);
  /// Returns whether a forward that began with `note` moved the buffer from memory that the two
  /// shared, as a write does, and a reader that asks for a pointer to write with.
  bool is_moved_since(const std::any& note) const;
  /// Returns whether the contents of a note are those of forward's begin, which has written to the
  /// buffer since.
  bool has_contents(const std::any& note) const;
  /// Returns whether the buffer has been written to since it had this state, with the same
  /// contents, too.
  bool is_touched_since(const std::any& state);
  /// Returns whether layout and contents are equal, on accelerators within 1e-3 of each value.
  bool is_as(const std::any& state) const { return is_as(buffer_, state); }
  static bool is_as(const at::Tensor& tensor, const std::any& state);
  /// The state that a tensor is in, to be compared.
  static std::any state_of(const at::Tensor& tensor);
  /// Returns whether as many writes have been counted since `now_began` as between two states of
  /// forward; no where forward's were not counted.
  bool has_writes_of(const std::any& begin, const std::any& left, const std::any& now_began) const;

 private:
  struct State;
  struct Known;
  uint32_t version() const;
  bool has_layout_of(const at::Tensor& other) const;
  bool shares_memory(const State& state) const;
  at::Tensor lazy_copy(const at::Tensor& alias);
  bool is_counter() const;
  uint64_t num_norms() const;

  const at::Tensor buffer_;
  const WeakStorage before_;  ///< of the buffer before, only to be compared
  std::mutex mutex_;
  WeakStorage last_copy_{c10::intrusive_ptr<c10::StorageImpl>()};
};

/// A batch norm in training mode ran with running statistics in this storage.
void note_norm(const c10::StorageImpl& storage);

}  // namespace remat
