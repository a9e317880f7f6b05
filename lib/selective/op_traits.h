#pragma once
// The traits of an operator that matter for keeping its results.

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>

namespace remat {

/// Note [Operators that come and go]
/// When a library is unloaded, its operators are removed. A handle is only an address, and an
/// operator that is registered later may have the same one. Facts stored by handle are therefore
/// deleted when an operator is removed. Data that outlive a region use names, which an operator has
/// again when its library is loaded again.
/// Kinds of operators that ready policies keep; bits of a mask.
enum OpKind : uint8_t {
  Collective = 1,        ///< communicates between processes
  Random = 2,            ///< draws random numbers
  Nondeterministic = 4,  ///< may give another result for the same arguments
  HostCopy = 8           ///< copies to the host, for some arguments: `copies_to_host`
};

struct OpTraits {
  std::string name;           ///< "aten::mm.default"
  uint32_t name_number = 0;   ///< one number for all operators that ever have the name
  bool is_passive = false;    ///< `detach`, or reads metadata only: no policy is asked
  bool is_view = false;       ///< returns a view of an argument
  bool is_mutable = false;    ///< writes to an argument
  bool is_composite = false;  ///< consists of other operators and never arrives below autograd
  bool is_random = false;     ///< draws numbers, or may, because it is not LibTorch's own
  bool is_factory = false;    ///< has no tensor argument, or does not read it
  bool is_blank = false;      ///< makes a tensor that other operators fill

  bool is_cast = false;            ///< `_to_copy`, as autocast casts
  c10::DispatchKeySet keys_met{};  ///< seam::keys_met()
  uint8_t kinds = 0;               ///< a mask of OpKind
  bool writes_first = false;       ///< writes to its first argument past its schema (c10d)
  bool is_batch_norm = false;      ///< may write statistics, which its schema does not declare

  bool can_be_kept() const { return !is_view && !is_mutable && !is_blank; }
  /// Returns whether this call must run in each recompute because of a side effect.
  bool has_side_effect(c10::ArrayRef<c10::IValue> arguments) const;
};

/// Returns whether this call of a HostCopy copies from a device to the host.
bool copies_to_host(c10::ArrayRef<c10::IValue> arguments);

/// Returns whether the operator makes this result, instead of returning an argument that it wrote
/// to.
bool is_made_by(const c10::OperatorHandle& op, std::size_t result);

/// Returns the traits. Cheap for an operator that the thread has used before. The reference stays
/// valid until the process ends.
const OpTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace remat
