#pragma once
// The record of one operator call of a region: the arguments that a recompute must repeat, and the
// kept results.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/selective/collective_watch.h"
#include "lib/selective/kept_tensor.h"
#include "lib/selective/op_traits.h"
#include "lib/selective/value_sources.h"
#include "lib/state/surroundings.h"
#include "lib/tensor/tensor_metadata.h"
#include "remat/policy.h"

namespace remat {

// Note [The same call again]
// A kept result may only be returned to the call that it came from. The operator and the number of
// the call do not suffice: two matrix products of the same shape that swap places would swap their
// results. The record therefore has, for each tensor that a kept call reads, its shape, its dtype
// and its origin:
//   Input    the region's input of that number
//   Inside   the result of another call, by operator, number of the call, and which result of it
//   Outside  any other storage, or the leaf of which it is a cast
// A tensor passes if it has the origin or the storage of forward's tensor. A tensor without an
// origin (no operator made its storage, such as the tensor of a Python number) is compared by
// contents if it is small and on the CPU. Otherwise it passes by its metadata, if forward's storage
// is gone. Other arguments must be equal.
struct ArgumentRecord {
  TensorMetadata metadata;
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};
  WeakStorage leaf{c10::intrusive_ptr<c10::StorageImpl>()};  ///< of the leaf of which it is a cast
  int64_t input = -1, leaf_input = -1;                       ///< the region's inputs, by storage
  std::optional<ValueSource> source{};
  std::optional<uint64_t> contents{};
  uint32_t num_changes = 0;  ///< changes in place, of a tensor made inside
};

/// The facts about a result with which it can be kept later, when it gets a name.
struct ResultRecord {
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};
  at::Tensor held;  ///< for results after the first, which may have no other owner
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
};

/// A result of a kept call: a tensor, a list of tensors, or a plain value.
struct KeptResult {
  c10::SmallVector<KeptTensor, 1> tensors;
  c10::IValue plain;
  bool is_tensor = false, is_list = false;
};

/// The kept outputs of an operator that writes to its first argument past its schema: a watch for
/// each storage, since later writes of such operators do not count as changes.
using KeptWrites = std::vector<std::unique_ptr<CollectiveWatch>>;

struct CallRecord {
  explicit CallRecord(bool lives_in_slab) : is_in_slab(lives_in_slab) {}
  c10::SmallVector<ArgumentRecord, 2> tensors;
  std::vector<c10::IValue> others;
  std::vector<ResultRecord> results;  ///< only under policies that use names
  c10::SmallVector<KeptResult, 1> kept;
  bool is_kept = false;
  bool is_applied = false;  ///< wrote to a kept result, which is kept as written
  /// Released: it should be kept, but returns an argument, or a name forbade it.
  bool is_let_go = false;
  /// Kept by a Prefer answer: computed again if the result is changed in place.
  bool is_preferred = false;
  bool is_written = false;           ///< kept, and then written to by an operator of the region
  const bool is_in_slab;             ///< whose memory is freed when all records are gone
  std::unique_ptr<DrawSkips> draws;  ///< of a random operator
  /// Set if the first kept result is what the operator wrote to its first argument.
  std::unique_ptr<KeptWrites> writes{};

  bool is_changed() const;
};

struct CallRecordDeleter {
  void operator()(CallRecord* record) const {
    record->is_in_slab ? std::destroy_at(record) : delete record;
  }
};
using CallRecordPtr = std::unique_ptr<CallRecord, CallRecordDeleter>;

/// The calls of one operator in a region, in order.
struct OpRecord {
  c10::OperatorHandle op;
  const OpTraits* traits;
  std::optional<CheckpointPolicy> answer_to_all;
  std::vector<CallRecordPtr> calls;  ///< null: only known to have been made
};

/// Returns the end of a stack: an operator's arguments before its call, its results after it.
inline c10::ArrayRef<c10::IValue> last(const torch::jit::Stack& stack, std::size_t count) {
  return c10::ArrayRef<c10::IValue>(stack.data() + (stack.size() - count), count);
}
inline c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op,
                                               const torch::jit::Stack& stack) {
  return last(stack, op.schema().arguments().size());
}
inline c10::ArrayRef<c10::IValue> results_of(const c10::OperatorHandle& op,
                                             const torch::jit::Stack& stack) {
  return last(stack, op.schema().returns().size());
}

/// Visits the tensors in an operator's argument or result, undefined ones included.
template <class Visitor>
void visit_tensors_in(const c10::IValue& value, Visitor&& visitor) {
  if (value.isTensor()) {
    visitor(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) visitor(each);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef())
      visit_tensors_in(each, visitor);  // lists of lists, too
  }
}

/// Visits the tensors in several arguments or results.
template <class Visitor>
void visit_tensors_in(c10::ArrayRef<c10::IValue> values, Visitor&& visitor) {
  for (const c10::IValue& each : values) visit_tensors_in(each, visitor);
}

/// The storages of an operator's arguments. Some operators return an argument's storage without
/// declaring it (_unsafe_view): the origin of such a result is that of the argument.
class StoragesOf {
 public:
  explicit StoragesOf(c10::ArrayRef<c10::IValue> arguments) {
    visit_tensors_in(arguments, [this](const at::Tensor& tensor) {
      if (const auto* storage = storage_of(tensor)) storages_.push_back(storage);
    });
  }
  bool contain(const at::Tensor& tensor) const {
    const auto* const storage = storage_of(tensor);
    return std::find(storages_.begin(), storages_.end(), storage) != storages_.end();
  }

 private:
  c10::SmallVector<const c10::StorageImpl*, 8> storages_;
};

/// Visits the results of an operator that it has made, with their sources. `call`: the source of
/// the first one. `given`: those of the operator's arguments.
template <class Visitor>
void visit_sources(const c10::OperatorHandle& op, const OpTraits& traits, ValueSource call,
                   c10::ArrayRef<c10::IValue> results, const StoragesOf& given, Visitor&& visitor) {
  if (traits.is_view) return;
  call.is_factory = traits.is_factory;
  for (std::size_t i = 0; i < results.size(); ++i)
    visit_tensors_in(results[i], [&](const at::Tensor& tensor) {
      if (is_made_by(op, i) && !given.contain(tensor)) visitor(tensor, call);
      ++call.output;
    });
}

/// Visits the tensors that an operator writes to.
template <class Visitor>
void visit_written(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                   Visitor&& visitor) {
  const auto& declared = op.schema().arguments();
  for (std::size_t i = 0; i < declared.size(); ++i)
    if (declared[i].alias_info() != nullptr && declared[i].alias_info()->isWrite())
      visit_tensors_in(arguments[i], visitor);
}

/// Returns whether two arguments without tensors are equal; true if they cannot be compared.
bool is_same_value(const c10::IValue& a, const c10::IValue& b);
/// Writes arguments for errors: "[2, 3], 1.5".
std::string text_of(const CallRecord& call);
std::string text_of(c10::ArrayRef<c10::IValue> arguments);

}  // namespace remat
