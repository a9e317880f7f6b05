// Kept results that an operator writes to: they stay kept as written, or are released.

#include <utility>

#include "lib/seam/engine.h"
#include "lib/selective/selection.h"

namespace remat {

void Selection::note_written(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                             Freed& freed) {
  visit_written(op, arguments, [&](const at::Tensor& tensor) {
    if (const ResultIndex* const place = kept_result(storage_of(tensor)))
      note_written(*place, freed);
  });
}

void Selection::note_written(const ResultIndex& place, Freed& freed) {
  CallRecord& record = *record_.operators[place.op].calls[place.call];
  // Not every operator that writes increments the version.
  if (seam::graph_task_id() == task_at_start_ && !record.is_preferred)
    record.is_written = true;
  else
    let_go(place, freed);
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
bool Selection::writes_to_kept(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                               Freed& freed) {
  const auto& declared = op.schema().arguments();
  // An operator that changes sizes and strides (transpose_) does not write to the kept contents: it
  // must run again.
  bool stays = !op.hasTag(at::Tag::inplace_view);
  c10::SmallVector<ResultIndex, 1> written;
  for (std::size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].alias_info() == nullptr || !declared[i].alias_info()->isWrite()) continue;
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      const c10::StorageImpl* const storage = storage_of(tensor);
      const ResultIndex* const place = kept_result(storage);
      if (place == nullptr) {
        stays = false;
        return;
      }
      const OpRecord& maker = record_.operators[place->op];
      const CallRecord& call = *maker.calls[place->call];
      const KeptTensor& kept = call.kept[place->result].tensors[place->tensor];
      if (kept.shares_version_with(tensor) && !maker.traits->is_blank &&
          !kept.is_on_cpu_instead()) {
        stays = false;
        return note_written(*place, freed);
      }
      // A result that may stay does not move while it has another owner.
      const bool is_in_place =
          !kept.is_elsewhere() || (kept.is_among_last() && !kept.shares_version_with(tensor));
      stays = stays && i == 0 && !maker.traits->is_blank && is_in_place &&
              !sources_.notes_of(storage)->is_read;
      written.push_back(*place);
    });
  }
  // In the recompute the call returns the argument to which it wrote.
  stays = stays && op.schema().returns().size() == 1 && !is_made_by(op, 0);
  if (stays && !written.empty()) return true;
  for (const ResultIndex& place : written) let_go(place, freed);
  return false;
}

void Selection::let_go(const ResultIndex& place, Freed& freed) {
  CallRecord& record = *record_.operators[place.op].calls[place.call];
  if (!record.is_kept) return;
  for (const KeptResult& result : record.kept)
    for (const KeptTensor& tensor : result.tensors)
      if (ValueSources::Notes* const notes = sources_.notes_of(tensor.storage()))
        notes->kept = ValueSources::Notes::not_kept;
  freed.results.push_back(std::exchange(record.kept, {}));
  record.is_kept = false;
  record.is_let_go = rule_->options().ask_again;
  --record_.num_kept;
  for (const ArgumentRecord& each : record.tensors) note_read(each.storage._unsafe_get_target());
}

}  // namespace remat
