#pragma once
// A buffer of modules: its copy for a region, and whether the region's forward wrote to it.
//
// Note [Only what forward wrote]
// When a region begins, each buffer of its modules is noted: object, version, layout, and a copy of
// the contents that takes no memory until one of the two is written (lib/seam/lazy_copy.h). When
// the function has returned, buffers that it did not write are forgotten: a region neither holds,
// compares nor restores them.
//
// No lazy copy is possible on an accelerator, of memory that LibTorch did not allocate, and before
// LibTorch 2.13. There a buffer is copied at once in its first forwards, which show whether they
// write to it, and later only if one did. Sparse and other layouts are copied only once a version
// has changed. A buffer that is first written without a copy has no contents of forward's begin:
// recomputes then begin with those that forward left. A write of the same contents without a
// version change cannot be distinguished from a read through a mutable pointer, so no contents of
// the buffer are held: a recompute only restores the contents that it finds.
//
// Note [Statistics]
// Batch norms write running statistics, on which their result does not depend, without changing the
// version, and some count their calls beside them. Such buffers are restored, but not compared. A
// frame that saved the tensors of a batch norm reports the storages of its statistics
// (Slots::settle); a counter is the integer that follows them in its module.

#include <ATen/core/Tensor.h>

#include <any>
#include <cstdint>
#include <memory>
#include <mutex>

#include "lib/tensor/capture.h"
#include "remat/state.h"

namespace remat {

enum class Written { Not, AsStatistics, Otherwise };

/// The provider of one buffer's state; each buffer has one while any region knows it. Threads: any.
class Buffer final : public StateProvider {
 public:
  /// Returns the object of a buffer. `before`: the buffer registered before this one in the same
  /// modules, or null.
  static std::shared_ptr<Buffer> of(const at::Tensor& buffer,
                                    const std::shared_ptr<Buffer>& before);
  /// For `of` only.
  Buffer(at::Tensor buffer, const std::shared_ptr<Buffer>& before);
  ~Buffer() override;

  const at::Tensor& tensor() const { return buffer_; }

  /// Returns the state as a region's forward begins. It has no contents if they cannot be copied
  /// lazily and earlier forwards did not write to them.
  std::any note();
  /// Returns the state with contents.
  std::any capture() override;
  /// Sets layout, contents (if the state has any) and version, where they differ.
  void restore(const std::any& state) override;

  /// Returns what a forward that began with `note` has written, and teaches later forwards. An
  /// inner region does not count: it may be one of many in the same forward.
  Written written_since(const std::any& note, bool is_inner);
  /// Returns whether a forward that began with `note` gave the buffer memory of its own: by a
  /// write, or by reading through a mutable pointer.
  bool is_moved_since(const std::any& note) const;
  /// Returns whether a note has the contents of forward's begin, for a buffer that forward has
  /// written to since.
  bool has_contents(const std::any& note) const;
  /// Returns whether the buffer has been written to since it had this state, even with the same
  /// contents.
  bool is_touched_since(const std::any& state);
  /// Returns whether layout and contents are equal, on accelerators within 1e-3 of each value.
  bool is_as(const std::any& state) const { return is_as(buffer_, state); }
  static bool is_as(const at::Tensor& tensor, const std::any& state);
  /// Returns the present state of a tensor, for comparison.
  static std::any state_of(const at::Tensor& tensor);
  /// Returns whether as many writes have been counted since `now_began` as between two states of
  /// forward; false if forward's were not counted.
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
  const WeakStorage before_;  ///< of the buffer before, only compared
  std::mutex mutex_;
  WeakStorage last_copy_{c10::intrusive_ptr<c10::StorageImpl>()};
};

/// Notes that a batch norm in training mode ran with running statistics in this storage.
void note_norm(const c10::StorageImpl& storage);

}  // namespace remat
