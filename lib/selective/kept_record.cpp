#include "lib/selective/kept_record.h"

#include <algorithm>
#include <utility>

#include "lib/seam/engine.h"

namespace remat {

KeptRecord::KeptRecord(std::shared_ptr<const PolicyRule> of_policy)
    : rule(std::move(of_policy)), task_at_start(seam::graph_task_id()) {}

KeptIndex KeptRecord::add_call(const c10::OperatorHandle& op) {
  const auto [place, is_new] = numbers_.emplace(op, static_cast<uint32_t>(operators.size()));
  if (is_new)
    operators.push_back(
        {op,
         &traits_of(op),
         rule == nullptr ? CheckpointPolicy::PreferRecompute : rule->answer_to_all(op),
         {}});
  const uint32_t number = place->second;
  sequence.push_back(number);
  std::vector<CallRecordPtr>& calls = operators[number].calls;
  calls.emplace_back();
  return {number, static_cast<uint32_t>(calls.size() - 1)};
}

CallRecordPtr KeptRecord::make_record() {
  // Under a policy that uses names most records are deleted at the end of the forward.
  if (looks_at_names()) return CallRecordPtr(new CallRecord(/*lives_in_slab=*/false));
  return CallRecordPtr(new (slab.room()) CallRecord(/*lives_in_slab=*/true));
}

void KeptRecord::add_kept(const KeptIndex& call, const CallRecord& record) {
  ++num_kept;
  for (uint32_t i = 0; i < record.kept.size(); ++i)
    for (uint32_t j = 0; j < record.kept[i].tensors.size(); ++j)
      if (const c10::StorageImpl* const storage = record.kept[i].tensors[j].storage()) {
        ValueSources::Notes* const notes = sources.notes_of(storage);
        if (notes == nullptr) continue;  // a collective's output from outside
        notes->kept = static_cast<uint32_t>(kept_results_.size());
        kept_results_.push_back({call.op, call.call, i, j});
      }
}

void KeptRecord::note_results(const KeptIndex& call, c10::ArrayRef<c10::IValue> results,
                              const StoragesOf& given) {
  const OpRecord& op = operators[call.op];
  visit_sources(
      op.op, *op.traits, {call.op, call.call}, results, given,
      [this](const at::Tensor& tensor, const ValueSource& source) { sources.set(tensor, source); });
}

// Under policies that use names any result may be kept later.
void KeptRecord::note_read(const c10::StorageImpl* storage) {
  if (num_kept == 0 && !looks_at_names()) return;
  if (ValueSources::Notes* const notes = sources.notes_of(storage)) notes->is_read = true;
}

void KeptRecord::note_read(c10::ArrayRef<c10::IValue> arguments) {
  if (num_kept == 0 && !looks_at_names()) return;
  visit_tensors_in(arguments, [this](const at::Tensor& tensor) { note_read(storage_of(tensor)); });
}

void KeptRecord::note_read(const CallRecord& call) {
  for (const ArgumentRecord& each : call.tensors) note_read(each.storage._unsafe_get_target());
}

void KeptRecord::note_written(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                              Freed& freed) {
  visit_written(op, arguments, [&](const at::Tensor& tensor) {
    if (const KeptIndex* const place = kept_result(storage_of(tensor))) note_written(*place, freed);
  });
}

void KeptRecord::note_written(const KeptIndex& call, Freed& freed) {
  CallRecord& record = *at(call);
  // Not every operator that writes increments the version.
  if (seam::graph_task_id() == task_at_start && !record.is_preferred)
    record.is_written = true;
  else
    let_go(call, freed);
}

// Note [Writing to a kept result]
// LibTorch's own composites write in place to results of their inner operators: `linear` may be
// `mm` and then `add_` of the bias. If no operator that a recompute runs has read the result
// before, the result is kept as written, and recomputes run neither operator. Otherwise its call is
// not kept.
// A user's write, through a tensor that shares the version counter, is an error in the recompute
// (SelectiveMutation). There are two exceptions: operators that make blank tensors, which are made
// to be filled, and calls that the policy only prefers to keep. Those calls are not kept or, if the
// write comes after the forward, run again in the recompute. A backward inside the region writes to
// results of its own formulas: the user cannot avoid that, and the call is not kept.
bool KeptRecord::writes_to_kept(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                                Freed& freed) {
  const auto& declared = op.schema().arguments();
  // An operator that changes sizes and strides (transpose_) does not write to the kept contents: it
  // must run again.
  bool stays = !op.hasTag(at::Tag::inplace_view);
  c10::SmallVector<KeptIndex, 1> written;
  const bool writes_first = traits_of(op).writes_first;
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const auto* const alias = declared[i].alias_info();
    if (!(writes_first && i == 0) && (alias == nullptr || !alias->isWrite())) continue;
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      const c10::StorageImpl* const storage = storage_of(tensor);
      const KeptIndex* const place = kept_result(storage);
      if (place == nullptr) {
        stays = false;
        return;
      }
      const bool is_blank = operators[place->op].traits->is_blank;
      const KeptTensor& kept = at(*place)->kept[place->result].tensors[place->tensor];
      if (kept.shares_version_with(tensor) && !is_blank && !kept.is_on_cpu_instead()) {
        stays = false;
        return note_written(*place, freed);
      }
      // A result that may stay does not move while it has another owner.
      const bool is_in_place =
          !kept.is_elsewhere() || (kept.is_among_last() && !kept.shares_version_with(tensor));
      stays = stays && i == 0 && !is_blank && is_in_place && !sources.notes_of(storage)->is_read;
      written.push_back(*place);
    });
  }
  // In the recompute the call returns the argument to which it wrote.
  stays = stays && op.schema().returns().size() == 1 && !is_made_by(op, 0);
  if (stays && !written.empty()) return true;
  for (const KeptIndex& place : written) let_go(place, freed);
  return false;
}

const KeptIndex* KeptRecord::kept_result(const c10::StorageImpl* storage) {
  const ValueSources::Notes* const notes = num_kept == 0 ? nullptr : sources.notes_of(storage);
  return notes == nullptr || notes->kept == ValueSources::Notes::not_kept
             ? nullptr
             : &kept_results_[notes->kept];
}

void KeptRecord::let_go(const KeptIndex& call, Freed& freed) {
  CallRecord& record = *at(call);
  if (!record.is_kept) return;
  for (const KeptResult& result : record.kept)
    for (const KeptTensor& tensor : result.tensors)
      if (ValueSources::Notes* const notes = sources.notes_of(tensor.storage()))
        notes->kept = ValueSources::Notes::not_kept;
  freed.results.push_back(std::exchange(record.kept, {}));
  record.is_kept = false;
  record.is_let_go = rule->options().ask_again;
  --num_kept;
  note_read(record);
}

void KeptRecord::note_let_go(const KeptIndex& call) {
  if (!rule->options().ask_again) return;
  at(call) = make_record();
  at(call)->is_let_go = true;
}

void KeptRecord::let_go_from(std::size_t first, Freed& freed) {
  if (num_kept == 0 || first >= sequence.size()) return;
  std::vector<std::size_t> num_before;  // calls of each operator
  for (const OpRecord& op : operators) num_before.push_back(op.calls.size());
  for (std::size_t i = sequence.size(); i-- > first;) {
    const KeptIndex call{sequence[i], static_cast<uint32_t>(--num_before[sequence[i]])};
    if (at(call) != nullptr && !at(call)->is_applied) let_go(call, freed);
  }
}

void KeptRecord::let_go_regions_from(std::size_t first, Freed& freed) {
  for (std::size_t i = first; i < pins.size(); ++i) {
    if (pins[i] == nullptr || !pins[i]->is_region || pins[i]->values.empty()) continue;
    freed.values.push_back(std::exchange(pins[i]->values, {}));
    pins[i]->is_let_go = true;
  }
}

void KeptRecord::end_forward(std::vector<KeptTensor::Unfinished>& unfinished, Freed& freed) {
  kept_results_ = {};  // clear() would keep the memory
  sources.clear();
  for (OpRecord& op : operators)
    for (auto& call : op.calls) {
      if (call == nullptr) continue;
      if (call->is_kept) {
        call->results.clear();
        for (KeptResult& result : call->kept)
          for (KeptTensor& kept : result.tensors) {
            // A Function marks a collective's output as changed after the operator. The region
            // has seen every operator that wrote to it.
            if (call->writes != nullptr) kept.accept_version();
            if (auto each = kept.end_forward(); each.piece != nullptr)
              unfinished.push_back(std::move(each));
          }
      } else {
        const bool is_let_go = call->is_let_go;
        freed.records.push_back(std::exchange(call, is_let_go ? make_record() : nullptr));
        if (is_let_go) call->is_let_go = true;
      }
    }
  is_settled = true;
}

}  // namespace remat
