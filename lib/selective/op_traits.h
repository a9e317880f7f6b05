#pragma once
// What kind of operator one is, as far as keeping its results is concerned.

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>

namespace remat {

/// Note [Operators that come and go]
/// A library that is unloaded takes its operators along, and what is registered next may have the
/// address of one of them, which is all that a handle is. So what is known of operators by their
/// handles is forgotten when one goes, and what outlives a region goes by names, which an operator
/// has again when its library comes back.
struct OpTraits {
  std::string name;           ///< "aten::mm.default"
  uint32_t name_number = 0;   ///< the same for all that ever have the name
  bool is_passive = false;    ///< `detach`, or reads metadata only: no policy is asked
  bool is_view = false;       ///< returns a view of an argument
  bool is_mutable = false;    ///< writes to an argument
  bool is_composite = false;  ///< consists of others and is never met below autograd
  bool is_random = false;     ///< draws numbers, or may: it is not one of LibTorch's own
  bool is_factory = false;    ///< has no tensor argument, or does not read it
  bool is_blank = false;      ///< makes a tensor that others will fill

  bool is_cast = false;            ///< `_to_copy`, as autocast casts
  c10::DispatchKeySet keys_met{};  ///< seam::keys_met()
  bool is_batch_norm = false;      ///< may write statistics, which its schema does not say

  bool can_be_kept() const { return !is_view && !is_mutable && !is_blank; }
  /// This call must run in each recompute, for what it does beside returning a result.
  bool has_side_effect(c10::ArrayRef<c10::IValue> arguments) const;
};

/// Whether the operator makes the result of that number: it returns no argument it wrote to.
bool is_made_by(const c10::OperatorHandle& op, std::size_t result);

/// Cheap for an operator that the thread has met. The reference is valid for good.
const OpTraits& traits_of(const c10::OperatorHandle& op);

}  // namespace remat
