// Checks that a recompute's calls equal those of forward, and makes the error if they do not.

#include <fmt/format.h>

#include <algorithm>

#include "lib/selective/replay.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

constexpr std::size_t max_calls_listed = 8;

}  // namespace

std::string Replay::difference(const ArgumentRecord& then, const at::Tensor& now) {
  const auto was = [&then] { return then.metadata.text(); };
  const auto is_input = [this](const c10::StorageImpl* present, int64_t number) {
    return present != nullptr && number >= 0 &&
           std::find(inputs_.begin(), inputs_.end(), std::pair(present, number)) != inputs_.end();
  };
  if (!now.defined() || !then.metadata.describes(now)) {
    if (!now.defined() && then.metadata.is_undefined()) return "";
    return fmt::format("was {} and is {}", was(),
                       now.defined() ? TensorMetadata(now, false).text() : "undefined");
  }
  const c10::StorageImpl* const storage = memory_of(now);
  if (storage != nullptr && then.storage._unsafe_get_target() == storage) return "";
  if (is_input(storage, then.input)) return "";
  if (const at::Tensor* const leaf = leaf_behind(now); leaf != nullptr && leaf->has_storage()) {
    const c10::StorageImpl* const source = storage_of(*leaf);
    if (source == then.leaf._unsafe_get_target() || is_input(source, then.leaf_input)) return "";
  }
  const auto made = sources_.find(now);
  const bool has_same_contents = !then.contents || *then.contents == content_hash(now);
  const bool is_origin_known = !then.source || then.source->is_known;
  if (is_origin_known && then.source && made) {
    const bool is_same = made->source == *then.source && made->num_changes == then.num_changes;
    return is_same && has_same_contents ? ""
                                        : fmt::format("{} is the result of another call", was());
  }
  // No operator made the storage: it may belong to a number, or the function read it from
  // elsewhere. If the contents are compared, their owner does not matter: the call computes the
  // same.
  if (!is_origin_known ||
      (!then.source && then.input < 0 && (then.contents || then.storage.expired())))
    return has_same_contents ? "" : fmt::format("{} has other contents", was());
  return fmt::format("{} comes from elsewhere", was());
}

void Replay::check_arguments(const CallRecord& record, const c10::OperatorHandle& op,
                             Counted counted, c10::ArrayRef<c10::IValue> arguments) {
  std::size_t tensor_number = 0, other_number = 0;
  std::string difference_text;
  for (const c10::IValue& argument : arguments) {
    bool holds_tensors = false;
    visit_tensors_in(argument, [&](const at::Tensor& tensor) {
      holds_tensors = true;
      if (!difference_text.empty()) return;
      if (tensor_number >= record.tensors.size()) {
        difference_text = "there are more tensors";
        return;
      }
      const std::string text = difference(record.tensors[tensor_number], tensor);
      if (!text.empty()) difference_text = fmt::format("tensor {}: {}", tensor_number, text);
      ++tensor_number;
    });
    if (holds_tensors || argument.isGenerator() || !difference_text.empty()) continue;
    if (other_number >= record.others.size() ||
        !is_same_value(record.others[other_number], argument))
      difference_text = "an argument that is not a tensor has another value";
    ++other_number;
  }
  if (difference_text.empty() && (tensor_number != record.tensors.size()))
    difference_text = "there are fewer tensors";
  if (!difference_text.empty()) mismatch(op, counted, arguments, &record, difference_text);
}

void Replay::fail(CheckpointError::Kind kind, const std::string& fact, const std::string& cause,
                  const std::string& advice, const TensorIdentity& tensor) {
  const auto name = [this](uint32_t number) {
    constexpr uint32_t first_stranger = 1 << 20;
    return number >= first_stranger ? traits_of(strangers_[number - first_stranger]).name
                                    : record_.operators[number].traits->name;
  };
  const auto& forward = record_.sequence;
  std::size_t first = 0;
  while (first < std::min(forward.size(), sequence_.size()) && forward[first] == sequence_[first])
    ++first;
  if (first == sequence_.size() && first > 0) --first;  // the calls differ only in their arguments
  const std::size_t from = first < max_calls_listed / 2 ? 0 : first - max_calls_listed / 2;
  std::string text = fmt::format(
      "Operators ({} in forward, {} so far in the recompute):\n"
      "  {:>5}  {:<40} recompute\n",
      forward.size(), sequence_.size(), "", "forward");
  for (std::size_t i = from; i < from + max_calls_listed; ++i) {
    if (i >= forward.size() && i >= sequence_.size()) break;
    text += fmt::format("  {:>5}{} {:<40} {}\n", i, i == first ? ">" : " ",
                        i < forward.size() ? name(forward[i]) : "",
                        i < sequence_.size() ? name(sequence_[i]) : "");
  }
  throw Mismatch{kind, fact, cause, advice, text, tensor};
}

void Replay::note_mismatch() {
  // The recompute has every tensor it needs; user code caught the stop and continued.
  if (filler_.has_stopped()) return;
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (mismatch_ == nullptr) mismatch_ = std::current_exception();
}

void Replay::check_backward(const torch::autograd::edge_list& roots,
                            const torch::autograd::edge_list& targets) {
  try {
    roles_.check(roots, targets);
  } catch (...) {
    note_mismatch();
    if (frame_.region().body->can_be_stopped()) throw;
  }
}

void Replay::mismatch(const c10::OperatorHandle& op, Counted counted,
                      c10::ArrayRef<c10::IValue> arguments, const CallRecord* record,
                      const std::string& fact) {
  fail(CheckpointError::Kind::SelectiveMismatch,
       fmt::format("{}, call {}: {}\n  in forward: {}\n  now:        {}", traits_of(op).name,
                   counted.call, fact, record == nullptr ? "(not kept)" : text_of(*record),
                   text_of(arguments)),
       "the recompute did not repeat forward: it called other operators, in another order, or "
       "with other tensors",
       "do not let the function depend on anything that changes between forward and backward, or "
       "keep the decision itself with remat::pin");
}

}  // namespace remat
