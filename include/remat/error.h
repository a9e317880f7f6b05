#pragma once
// The error that says how a recompute and its forward differ, or why a region cannot go on.

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

#include "remat/export.h"

namespace remat {

/// Thrown by `checkpoint()` and by backward. Exceptions of user code are never replaced by it,
/// except those that do not derive from `std::exception` (the engine could not carry them).
class REMAT_API CheckpointError : public c10::Error {
 public:
  /// The kinds of errors.
  enum class Kind {
    FewerTensors,      ///< the recompute saved fewer tensors than forward
    MoreTensors,       ///< it tried to save more (seen only with early stop off)
    MetadataMismatch,  ///< other shape, dtype, device or strides (`Layout`)
    ValueMismatch,  ///< other elements (`Values`) or fingerprint, or changed in place after the save
    CaptureChanged,     ///< a parameter, buffer or captured tensor is not what forward used
    DoubleUnpack,       ///< `strict_unpack`: read twice in one backward
    SelectiveMismatch,  ///< a replay asks for a result that forward did not keep
    SelectiveMutation,  ///< a kept result was changed in place
    GroupOverlap,       ///< two backward calls of a group use the same saved tensors
    Unsupported,        ///< something LibTorch or this version cannot do
    RecomputeFailed,    ///< the recompute could not be completed
    InputChanged        ///< an argument of the region is not what the call was given
  };

  /// One saved tensor that differs. With `debug` the operators are known, with the shapes of their
  /// arguments; without, of some tensors the node of forward's, such as "ConvolutionBackward0";
  /// else they are empty.
  struct Mismatch {
    int64_t
        position;  ///< of the saved tensor in its region, from 0; -1: the region does not save it
    std::string forward;       ///< what forward saved
    std::string recompute;     ///< what the recompute saved instead
    std::string forward_op;    ///< the operator that saved it in forward
    std::string recompute_op;  ///< the operator that saved it in the recompute
    /// The parameter or buffer that forward saved, such as "parameter 'conv1.weight' of UNetBlock";
    /// empty if it was none of a module that the region knows: its function, those in
    /// `CheckpointOptions::modules`, those of regions around.
    std::string forward_tensor{};
    std::string recompute_tensor{};  ///< the same of the recompute
  };

  /// The facts of the error besides its text; counts are -1 where they have no meaning.
  struct Facts {
    Kind kind = Kind::RecomputeFailed;   ///< what went wrong
    std::string region{};                ///< the region's name
    int64_t frame_id = -1;               ///< as `current_phase()` says it
    int64_t forward_count = -1;          ///< tensors that forward saved
    int64_t recompute_count = -1;        ///< tensors that the recompute saved
    std::vector<Mismatch> mismatches{};  ///< the saved tensors that differ
  };

  /// An error with this text and these facts.
  CheckpointError(std::string message, Facts facts);

  /// Returns the kind of the error.
  Kind kind() const { return facts_.kind; }
  /// The region's name, empty if it has none; the default one, too (`CheckpointOptions::name`).
  const std::string& region() const { return facts_.region; }
  /// The run of the region, as `current_phase()` says it; -1 where there is none.
  int64_t frame_id() const { return facts_.frame_id; }
  /// How many tensors forward saved; -1 where it has no meaning.
  int64_t forward_count() const { return facts_.forward_count; }
  /// How many tensors the recompute saved; -1 where it has no meaning.
  int64_t recompute_count() const { return facts_.recompute_count; }
  /// The saved tensors that differ, if that is what went wrong.
  const std::vector<Mismatch>& mismatches() const { return facts_.mismatches; }

 private:
  Facts facts_;
};

}  // namespace remat
