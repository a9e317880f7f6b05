#pragma once
// The twin of a kept result that a depot moves to the CPU: its copy there, as a tensor for hooks
// around the region.
//
// Note [Twins]
// In another region, or with `save_through_hooks`, kept results are saved through the enclosing
// hooks, which need a tensor. The depot moves such a result in the same way, and the hooks get its
// twin: a tensor on the CPU in the depot's target memory, which keeps the piece alive. If the hooks
// return the twin, its piece loads it beside other work and ahead of the read, as without hooks.
// Any other tensor (a copy by a hook, or one from a file) is copied to the device.
//
// The bytes of a twin are valid when the copy is done. The hooks of a region do not read them: a
// forward's slot drops the twin, and a recompute keeps it for the read. A guard that does not move
// CPU tensors does not read them either. For all other hooks, and for regions that compare
// contents, the host first waits for the copy. A forward that drops the twin and compares nothing
// gets a twin without memory, and no bytes are copied.
//
// A write to the original during the copy changes its version, which is checked until the forward
// that kept it is over: Note [Moving kept results]. The reader is another frame, of an earlier
// forward of the same region; therefore the twin itself records the change.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>
#include <string_view>

#include "hooks/depot/piece.h"

namespace remat {

class HostTwin {
 public:
  /// Returns the twin of a tensor without gaps that is in the piece; undefined if the piece has no
  /// host memory. `is_beside`: a write to the original before `settle` counts as a change.
  static at::Tensor make(const at::Tensor& value, std::shared_ptr<Piece> piece, bool is_beside);
  /// Returns a tensor like a twin but without data; a read of its data throws an error with `text`.
  static at::Tensor without_memory(const at::Tensor& value, std::string_view text);
  /// Returns the HostTwin behind a tensor; null if the tensor is no twin.
  static std::shared_ptr<HostTwin> of(const at::Tensor& tensor);

  HostTwin(const at::Tensor& value, std::shared_ptr<Piece> piece, at::Tensor host, bool is_beside);
  Piece& piece() const { return *piece_; }
  const std::shared_ptr<Piece>& shared_piece() const { return piece_; }
  /// Returns whether the original may have been written to before it was copied.
  bool is_changed() const;
  /// Ends the check for changes when the forward is over: later writes wait for the copy.
  void settle();

 private:
  enum class State : int8_t { Pending, Same, Changed };
  const std::shared_ptr<Piece> piece_;
  const at::Tensor host_;
  const c10::VariableVersion counter_;
  const uint32_t version_;
  std::atomic<State> state_;
};

}  // namespace remat
