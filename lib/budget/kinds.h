#pragma once
// The kinds of operators: which of them a budget can run again.
//
// Note [Writes past the schema]
// The collectives of `c10d`, FSDP's copies and operators of other libraries may write to tensors
// that their schemas call read-only. An operator of another library is trusted if it has the tag
// `pt2_compliant_tag`, which promises a true schema. After a call of any other operator, all its
// arguments count as sources.
//
// A batch norm in training writes to its running statistics: see Note [Statistics of a rerun].

#include <ATen/core/dispatch/Dispatcher.h>

#include "lib/selective/op_traits.h"

namespace remat::budget {

/// Properties of an operator that a budget needs beyond its traits.
struct Kind {
  bool can_run_again = false;   ///< LibTorch's own operator with a complete schema
  bool is_view_only = false;    ///< returns a view, or changes metadata only
  bool is_blank = false;        ///< returns unfilled memory
  bool fills = false;           ///< writes to an argument without reading it
  bool counts_version = false;  ///< moves the version of a tensor without changing its contents
  bool may_write = false;       ///< may write to any argument, whatever its schema says
};

/// Returns the kind of an operator. The reference is valid until the thread's next call.
const Kind& kind_of(const c10::OperatorHandle& op, const OpTraits& traits);

}  // namespace remat::budget
