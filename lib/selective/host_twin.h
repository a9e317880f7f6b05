#pragma once
// What hooks around a region get of a kept result that a depot moves to the CPU: its copy there, as
// a tensor.
//
// Note [Twins]
// In another region, or with `save_through_hooks`, what is kept is saved through the hooks around,
// which want a tensor. A result that moves is given to the depot all the same, and they get its
// twin: a tensor on the CPU in the memory that the depot copies to, which keeps the piece alive.
// What comes back is looked at: a twin is brought back by its piece, beside the work and ahead of
// the read, as if no hooks were there. Anything else (a hook has copied it, or a file had it) is
// copied to the device.
//
// The bytes of a twin are there when the copy is done. The hooks of a region do not look at them:
// the slot of a forward drops it, a recompute keeps it for the read. Nor does a guard that leaves
// alone what is on the CPU. For all others, and for regions that compare contents, the host waits
// for the copy first. A forward that drops it and compares nothing gets a twin without memory, of
// which nothing is copied.
//
// Who writes to the original while it is copied is noticed by its version, until the forward that
// kept it is over: Note [Moving kept results]. The reader is another region then, an earlier
// forward of the same one, so it is the twin that remembers it.

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>
#include <string_view>

#include "hooks/depot/piece.h"

namespace remat {

class HostTwin {
 public:
  /// The twin of a tensor without gaps that is in the piece; null if that has no memory of the
  /// host. `is_beside`: what is written to it until `settle` is a change.
  static at::Tensor make(const at::Tensor& value, std::shared_ptr<Piece> piece, bool is_beside);
  /// A tensor that looks like a twin and has no data; who reads them gets `text`.
  static at::Tensor without_memory(const at::Tensor& value, std::string_view text);
  /// What a tensor is the twin of; null if it is none.
  static std::shared_ptr<HostTwin> of(const at::Tensor& tensor);

  HostTwin(const at::Tensor& value, std::shared_ptr<Piece> piece, at::Tensor host, bool is_beside);
  Piece& piece() const { return *piece_; }
  const std::shared_ptr<Piece>& shared_piece() const { return piece_; }
  /// Whether the original was written to before it was copied, for all that anybody knows.
  bool is_changed() const;
  /// The forward is over: who writes to it from now on waits for the copy.
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
