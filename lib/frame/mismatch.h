#pragma once
// Writes the errors about differences between forward and recompute, and about regions that cannot
// continue.

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
  /// The recompute's operator, numbered as in a slot, until its name is known; 0 for none.
  uint64_t recompute_operator = 0;
};

/// The differences that one recompute found, in the order of the slots.
struct Differences {
  std::vector<Difference> captures, metadata, contents;
  /// Changed captures that were not saved, but from which saved tensors were computed. They have no
  /// position.
  std::vector<Difference> operands;
  /// Positions in `captures` of tensors that now have another storage. Whether the recompute itself
  /// made that storage is known after it has unwound.
  std::vector<int64_t> replaced;
  /// Positions in `captures` of leaves in whose place the recompute saved another one.
  std::vector<int64_t> other_leaves;
  /// True if contents differ in a tensor saved after another thread had drawn in forward.
  bool has_other_numbers = false;
  /// True if the recompute itself wrote to a captured tensor.
  bool function_writes = false;
  /// True if the recompute computed with a tensor whose history was made after forward began.
  bool has_new_state = false;
  /// True if the function's module has other parameters or modules than when forward began.
  bool has_other_members = false;
  /// Removes the changed capture at that position.
  void clear_capture(int64_t position);
  bool any() const { return has_captures() || !metadata.empty() || !contents.empty(); }
  bool has_captures() const { return !captures.empty() || !operands.empty(); }
  /// Returns the changed captures that were saved or, if there are none, the others.
  std::vector<Difference>& changed_captures() { return captures.empty() ? operands : captures; }
};

/// Throws the error for the first kind of difference that is not empty.
[[noreturn]] void throw_differences(const Region& region, Differences differences,
                                    const OpLog* recompute_log);
/// Throws the error for different counts: more tensors if `recompute_count` exceeds
/// `forward_count`, otherwise fewer. `differences`: those found before; their positions show where
/// the two diverged. If there are none, `parting` is the first tensor that only one of them saved.
[[noreturn]] void throw_count_mismatch(const Region& region, int64_t forward_count,
                                       int64_t recompute_count, Differences differences,
                                       std::optional<Difference> parting,
                                       const OpLog* recompute_log);
enum class ChangedBy { Function, Others };
/// Throws: argument `number` was changed in place, by the region's function or later, and neither
/// the region nor the hooks around it hold its old contents.
[[noreturn]] void throw_changed_argument(const Region& region, int64_t number,
                                         const TensorIdentity& argument, uint32_t version_then,
                                         uint32_t version_now, ChangedBy by,
                                         bool is_held_by_hooks = false);
/// Throws: argument `number` holds running statistics that a batch norm moved in forward. See
/// Inputs::note_statistics().
[[noreturn]] void throw_moved_statistics(const Region& region, int64_t number,
                                         const TensorIdentity& argument);
/// Throws: argument `number` was changed in place without the region's copy of it detecting the
/// write.
[[noreturn]] void throw_unseen_write(const Region& region, int64_t number,
                                     const TensorIdentity& argument, uint32_t version_then,
                                     uint32_t version_now);
/// Throws: argument `number` was given other data, or another shape.
[[noreturn]] void throw_replaced_argument(const Region& region, int64_t number,
                                          const at::Tensor& now);
/// Throws: the function writes to argument `number`, which shares its memory with `other`, and
/// hooks returned the two with separate memory.
[[noreturn]] void throw_parted_arguments(const Region& region, int64_t number, int64_t other);
/// Throws: a recompute wrote to a tensor that hooks hold for it, which forward had not done.
[[noreturn]] void throw_spoiled_argument(const Region& region, int64_t number);
/// See Note [Ahead of forward].
[[noreturn]] void throw_written_ahead(const Region& region, int64_t number);
[[noreturn]] void throw_double_unpack(const Region& region, int64_t position,
                                      const SlotIdentity& slot);
[[noreturn]] void throw_group_overlap(const Region& region, int64_t position,
                                      const SlotIdentity& slot);
[[noreturn]] void throw_recompute_failed(const Region& region, const std::string& fact,
                                         const std::string& cause, const std::string& advice);
/// Throws: the recompute left other contents in a buffer than forward did, whichever state it began
/// with. `name`: the buffer's.
[[noreturn]] void throw_changed_buffer(const Region& region, const std::string& name);
/// Throws: LibTorch's default dtype has changed since forward.
[[noreturn]] void throw_default_dtype(const Region& region, at::ScalarType in_forward);
/// Throws: LibTorch ran another plan of a script function in the recompute than in forward, or
/// would do so.
[[noreturn]] void throw_changed_script(const Region& region);
/// Throws: a recompute of a selective region made other calls than forward. If `seen` has a changed
/// capture, the error reports that instead. `tensor`: appended to the fact if it has a name.
[[noreturn]] void throw_selective(const Region& region, CheckpointError::Kind kind,
                                  const std::string& fact, const std::string& cause,
                                  const std::string& advice, const std::string& lists,
                                  const TensorIdentity& tensor, Differences seen);

/// Throws: the tensor was changed in place after the recompute saved it. Plain autograd refuses
/// this, too, unless the tensor was only the argument of a region inside.
[[noreturn]] void throw_changed_value(const Region& region, int64_t position,
                                      const SlotIdentity& slot, const at::Tensor& tensor,
                                      uint32_t saved_version);
/// Throws: the region's function did something unsupported; the parameters are those of
/// base/error.h.
[[noreturn]] void throw_unsupported(const Region& region, const std::string& fact,
                                    const std::string& cause, const std::string& advice);
/// Returns the facts that every error of a region states.
CheckpointError::Facts facts_of(CheckpointError::Kind kind, const Region& region);
/// Reports that a binding broke the promise that a function of RegionBody does not return.
[[noreturn]] void report_returned(const char* function);
/// Throws any other error about a region, in the form of its function's language.
[[noreturn]] void raise(const Region& region, std::string text, CheckpointError::Facts facts);

}  // namespace remat
