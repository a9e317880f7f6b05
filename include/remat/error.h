#pragma once
// The error that reports a difference between a recompute and its forward, or why a region cannot
// continue.

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

#include "remat/export.h"

namespace remat {

/// The error of `checkpoint()` and of backward. Exceptions of user code keep their type, except
/// those that do not derive from `std::exception`: the engine cannot carry them, so a
/// CheckpointError replaces them.
class REMAT_API CheckpointError : public c10::Error {
 public:
  /// The kinds of errors.
  enum class Kind {
    FewerTensors,      ///< the recompute saved fewer tensors than forward
    MoreTensors,       ///< it tried to save more (seen only with early stop off)
    MetadataMismatch,  ///< other shape, dtype, device or strides (`Layout`)
    /// Other elements (`Values`) or fingerprint, or a change in place after the save.
    ValueMismatch,
    CaptureChanged,     ///< a parameter, buffer or captured tensor is not the one that forward used
    DoubleUnpack,       ///< `strict_unpack`: read twice in one backward
    SelectiveMismatch,  ///< the recompute needs a result that forward did not keep
    SelectiveMutation,  ///< a kept result was changed in place
    GroupOverlap,       ///< two backward calls of a group use the same saved tensors
    Unsupported,        ///< LibTorch or this version does not support the call
    RecomputeFailed,    ///< the recompute could not be completed
    InputChanged        ///< an argument of the region is not as it was at the call
  };

  /// One saved tensor that differs. With `debug`, the operators are known, with the shapes of their
  /// arguments. Otherwise `forward_op` may be the name of a node, such as "ConvolutionBackward0";
  /// an unknown operator is empty.
  struct Mismatch {
    /// Position of the saved tensor in its region, from 0; -1: the region does not save it.
    int64_t position;
    std::string forward;       ///< description of the tensor that forward saved
    std::string recompute;     ///< description of the tensor that the recompute saved
    std::string forward_op;    ///< the operator that saved it in forward
    std::string recompute_op;  ///< the operator that saved it in the recompute
    /// The parameter or buffer that forward saved, such as "parameter 'conv1.weight' of UNetBlock".
    /// Empty if it belongs to no module that the region knows: its function, those in
    /// `CheckpointOptions::modules`, those of enclosing regions.
    std::string forward_tensor{};
    std::string recompute_tensor{};  ///< the one that the recompute saved
  };

  /// The facts of the error besides its text; counts are -1 where they have no meaning.
  struct Facts {
    Kind kind = Kind::RecomputeFailed;   ///< kind of the error
    std::string region{};                ///< the region's name
    int64_t frame_id = -1;               ///< as `current_phase()` says it
    int64_t forward_count = -1;          ///< tensors that forward saved
    int64_t recompute_count = -1;        ///< tensors that the recompute saved
    std::vector<Mismatch> mismatches{};  ///< the saved tensors that differ
  };

  /// Makes an error with this text and these facts.
  CheckpointError(std::string message, Facts facts);

  /// Returns the kind of the error.
  Kind kind() const { return facts_.kind; }
  /// Returns the region's name or default name (`CheckpointOptions::name`); empty if it has none.
  const std::string& region() const { return facts_.region; }
  /// Returns the id of the region's run, as in `current_phase()`; -1 if there is none.
  int64_t frame_id() const { return facts_.frame_id; }
  /// Returns the number of tensors that forward saved; -1 where it has no meaning.
  int64_t forward_count() const { return facts_.forward_count; }
  /// Returns the number of tensors that the recompute saved; -1 where it has no meaning.
  int64_t recompute_count() const { return facts_.recompute_count; }
  /// Returns the saved tensors that differ, if the error is such a difference.
  const std::vector<Mismatch>& mismatches() const { return facts_.mismatches; }

 private:
  Facts facts_;
};

}  // namespace remat
