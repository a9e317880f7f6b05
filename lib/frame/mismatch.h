#pragma once
// Writes the errors that say how forward and recompute differ, or why a region cannot go on.

#include <optional>
#include <string>
#include <vector>

#include "lib/frame/naming.h"
#include "lib/frame/region.h"
#include "remat/error.h"

namespace remat {

/// A saved tensor that differs; it gets its names when the error is built.
struct Difference {
  CheckpointError::Mismatch mismatch;
  SlotIdentity forward;
  TensorIdentity recompute{};
  /// As a slot's, of the recompute, until the name of that operator is known; 0 for none.
  uint64_t recompute_operator = 0;
};

/// What one recompute found to differ, in the order of the slots.
struct Differences {
  std::vector<Difference> captures, metadata, contents;
  /// Captures that nothing saved, with which something was computed that was saved. They have no
  /// position.
  std::vector<Difference> operands;
  /// The check that found the first of `contents`.
  const TensorCheck* check = nullptr;
  /// Positions in `captures` of tensors that came back in other storage. Whether the recompute made
  /// that itself is known when it has unwound.
  std::vector<int64_t> replaced;
  /// Positions in `captures` of leaves in whose place the recompute saved another one.
  std::vector<int64_t> other_leaves;
  /// The recompute wrote to a captured tensor itself.
  bool function_writes = false;
  /// The recompute computed with a tensor whose history was made after forward began.
  bool has_new_state = false;
  /// The function's module has other parameters or modules than when forward began.
  bool has_other_members = false;
  /// The tensor at that position is no changed capture.
  void clear_capture(int64_t position);
  bool any() const { return has_captures() || !metadata.empty() || !contents.empty(); }
  bool has_captures() const { return !captures.empty() || !operands.empty(); }
  /// Those that were saved; if there are none, the others.
  std::vector<Difference>& changed_captures() { return captures.empty() ? operands : captures; }
};

/// Throws the error for the first kind of difference that is not empty.
[[noreturn]] void throw_differences(const Region& region, Differences differences,
                                    const OpLog* recompute_log);
/// Counts differ: more tensors if `recompute_count` exceeds `forward_count`, else fewer.
/// `differences`: what was seen before; its positions say where the two parted. If there are none,
/// `parting` is the first tensor that only one of them saved.
[[noreturn]] void throw_count_mismatch(const Region& region, int64_t forward_count,
                                       int64_t recompute_count, Differences differences,
                                       std::optional<Difference> parting,
                                       const OpLog* recompute_log);
enum class ChangedBy { Function, Others };
/// Argument `number` was changed in place, by the region's function or later; and nothing holds
/// what it was, neither the region nor the hooks around it.
[[noreturn]] void throw_changed_argument(const Region& region, int64_t number,
                                         const TensorIdentity& argument, uint32_t version_then,
                                         uint32_t version_now, ChangedBy by,
                                         bool is_held_by_hooks = false);
/// Argument `number` holds running statistics that a batch norm moved in forward: see
/// Inputs::note_statistics().
[[noreturn]] void throw_moved_statistics(const Region& region, int64_t number,
                                         const TensorIdentity& argument);
/// Argument `number` was changed in place, past the copy that the region keeps of it.
[[noreturn]] void throw_unseen_write(const Region& region, int64_t number,
                                     const TensorIdentity& argument, uint32_t version_then,
                                     uint32_t version_now);
/// Argument `number` was given other data, or another shape.
[[noreturn]] void throw_replaced_argument(const Region& region, int64_t number,
                                          const at::Tensor& now);
/// The function writes to `number`, which shares its memory with `other`; hooks gave them back
/// apart.
[[noreturn]] void throw_parted_arguments(const Region& region, int64_t number, int64_t other);
/// A recompute has written to what hooks hold for it, though forward had not.
[[noreturn]] void throw_spoiled_argument(const Region& region, int64_t number);
/// See Note [Ahead of forward].
[[noreturn]] void throw_written_ahead(const Region& region, int64_t number);
[[noreturn]] void throw_double_unpack(const Region& region, int64_t position,
                                      const SlotIdentity& slot);
[[noreturn]] void throw_group_overlap(const Region& region, int64_t position,
                                      const SlotIdentity& slot);
[[noreturn]] void throw_recompute_failed(const Region& region, const std::string& fact,
                                         const std::string& cause, const std::string& advice);
/// The recompute left other contents in a buffer than forward did, whichever state it began with.
/// `name`: the buffer's.
[[noreturn]] void throw_changed_buffer(const Region& region, const std::string& name);
/// LibTorch's default dtype is not what it was in forward.
[[noreturn]] void throw_default_dtype(const Region& region, at::ScalarType in_forward);
/// LibTorch ran another plan of a script function in the recompute than in forward, or would.
[[noreturn]] void throw_changed_script(const Region& region);
/// A recompute of a selective region met other calls than forward. A changed capture in `seen` is
/// the better explanation. `tensor`: what the fact ends with, if it has a name.
[[noreturn]] void throw_selective(const Region& region, CheckpointError::Kind kind,
                                  const std::string& fact, const std::string& cause,
                                  const std::string& advice, const std::string& lists,
                                  const TensorIdentity& tensor, Differences seen);

/// The tensor was changed in place after the recompute saved it, which plain autograd refuses too,
/// unless only a region inside had it as an argument.
[[noreturn]] void throw_changed_value(const Region& region, int64_t position,
                                      const SlotIdentity& slot, const at::Tensor& tensor,
                                      uint32_t saved_version);
/// The region's function did what is not supported; the words are as those of base/error.h.
[[noreturn]] void throw_unsupported(const Region& region, const std::string& fact,
                                    const std::string& cause, const std::string& advice);
/// What every error of a region says of it.
CheckpointError::Facts facts_of(CheckpointError::Kind kind, const Region& region);
/// A binding broke the promise that a function of RegionBody does not return.
[[noreturn]] void report_returned(const char* function);
/// Whatever else is to be said about a region, in the form of its function's language.
[[noreturn]] void raise(const Region& region, std::string text, CheckpointError::Facts facts);

}  // namespace remat
