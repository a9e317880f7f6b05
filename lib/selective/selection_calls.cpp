// One operator call in the innermost region: asks the policy, runs the operator, and stores the
// kept results.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "lib/scope/packing.h"
#include "lib/seam/collectives.h"
#include "lib/seam/engine.h"
#include "lib/selective/selection.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

/// Largest size of tensors whose contents are compared if their origin is unknown.
constexpr std::size_t max_compared_bytes = 4096;

const std::string no_name;

/// Records the contents of arguments that no operator made, or that other code may have filled.
/// Runs operators.
void note_contents(c10::ArrayRef<c10::IValue> arguments, const OpTraits& traits,
                   CallRecord& record) {
  std::size_t number = 0, num_outputs = 0;  // buffers that the operator fills
  if (traits.writes_first)
    visit_tensors_in(arguments[0], [&num_outputs](const at::Tensor&) { ++num_outputs; });
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    ArgumentRecord& each = record.tensors[number++];
    const bool may_be_filled = number > num_outputs && (!each.source || each.source->is_factory);
    if (may_be_filled && each.input < 0 && storage_of(tensor) != nullptr && tensor.is_cpu() &&
        tensor.layout() == c10::kStrided && !tensor.is_nested() &&
        tensor.nbytes() <= max_compared_bytes)
      each.contents = content_hash(tensor);
  });
}

DevicesMet devices_of(const CallRecord& record, c10::ArrayRef<c10::IValue> results) {
  DevicesMet met;
  for (const ArgumentRecord& each : record.tensors) met.add(each.metadata.device());
  visit_tensors_in(results, [&met](const at::Tensor& tensor) { met.add(tensor); });
  return met;
}

/// Returns what stands for a collective's Work in a recompute.
c10::IValue ended(const c10::IValue& work) {
  return seam::ended_work == nullptr ? work : seam::ended_work();
}

template <class Values>
bool hold_inference(const Values& values) {
  bool found = false;
  visit_tensors_in(values, [&found](const at::Tensor& tensor) {
    found = found || (tensor.defined() && tensor.is_inference());
  });
  return found;
}

int64_t input_of(Frame& frame, const c10::StorageImpl* storage) {
  return storage == nullptr ? -1 : frame.inputs().storages().number_of(storage);
}

void describe(const at::Tensor& tensor, Frame& frame, ValueSources& sources,
              ArgumentRecord& record) {
  if (!tensor.defined()) return;
  record.metadata = TensorMetadata(tensor, /*with_strides=*/false);
  record.storage = weak_memory_of(tensor);
  if (const at::Tensor* const leaf = leaf_behind(tensor); leaf != nullptr && leaf->has_storage())
    record.leaf = weak_storage_of(*leaf);
  record.input = input_of(frame, memory_of(tensor));
  record.leaf_input = input_of(frame, record.leaf._unsafe_get_target());
  if (const auto made = sources.find(tensor)) {
    record.source = made->source;
    record.num_changes = made->num_changes;
  }
}

bool returns_argument(const CallRecord& call, c10::ArrayRef<c10::IValue> results) {
  bool returns = false;
  visit_tensors_in(results, [&](const at::Tensor& tensor) {
    const c10::StorageImpl* const storage = storage_of(tensor);
    returns = returns || (storage != nullptr &&
                          std::any_of(call.tensors.begin(), call.tensors.end(),
                                      [&](const ArgumentRecord& argument) {
                                        return argument.storage._unsafe_get_target() == storage;
                                      }));
  });
  return returns;
}

/// Keeps the contents that an operator wrote to its first argument.
void keep_written(CallRecord& record, const c10::IValue& written,
                  c10::ArrayRef<c10::IValue> results, const detail::RegionScope& region,
                  bool meets_none) {
  record.kept.clear();
  record.writes = std::make_unique<KeptWrites>();
  KeptResult& contents = record.kept.emplace_back();
  contents.is_list = true;
  visit_tensors_in(written, [&](const at::Tensor& tensor) {
    contents.tensors.emplace_back(
        tensor, region, meets_none ? detail::HooksAround::None : detail::HooksAround::Regions,
        KeptPlace{});
    record.writes->push_back(std::make_unique<CollectiveWatch>(storage_of(tensor)));
  });
  // A result that is no Work is the first argument.
  for (const c10::IValue& result : results)
    record.kept.emplace_back().plain = result.isObject() ? result : c10::IValue();
  record.is_kept = true;
}

}  // namespace

/// One call, from the policy's answer to its kept results.
struct Selection::Call {
  const c10::OperatorHandle& op;
  const KeptIndex place;
  const OpTraits& traits;
  const c10::ArrayRef<c10::IValue> arguments;
  const bool is_packing = Packing::is_under_way();
  CheckpointPolicy answer = CheckpointPolicy::PreferRecompute;
  bool keeps = false;         // its results
  bool applies = false;       // its write to a kept result
  bool may_get_name = false;  // a result may get a name later, and then be kept
  bool must_run = false;      // in a recompute, too
  bool asks_after = false;    // the policy sees the results
  CallRecordPtr record{};     // null if its results cannot be kept

  /// Asks the policy when the operator has run.
  void decide_after(Selection& selection, c10::ArrayRef<c10::IValue> arguments_then,
                    c10::ArrayRef<c10::IValue> results);
  /// Notes the answer for recorders.
  void note_decision(Selection& selection) const;
};

void Selection::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                    const detail::RegionScope& region, bool is_outermost) {
  Freed freed;
  std::unique_lock<SpinLock> lock(record_.mutex);
  if (record_.is_settled || rule_ == nullptr) {
    lock.unlock();
    return op.callBoxed(&stack);
  }
  const KeptIndex place = record_.add_call(op);
  Call call{.op = op,
            .place = place,
            .traits = *record_.operators[place.op].traits,
            .arguments = arguments_of(op, stack)};
  const std::optional<CheckpointPolicy> to_all = record_.operators[place.op].answer_to_all;
  if (to_all && !call.is_packing) call.answer = *to_all;
  const bool is_asked = !to_all && !call.is_packing;
  call.asks_after = is_asked && rule_->asks_after();
  if (is_asked && !call.asks_after) {
    lock.unlock();
    call.answer =
        rule_->answer({op, call.traits.name, call.arguments, /*is_recompute=*/false, no_name});
    lock.lock();
  }
  decide(call, freed);
  lock.unlock();
  std::vector<c10::IValue> arguments_then;  // the operator takes its arguments off the stack
  if (call.asks_after) arguments_then = call.arguments.vec();
  if (call.record != nullptr) note_contents(call.arguments, call.traits, *call.record);

  std::optional<DrawMarks> before;
  if (call.record != nullptr && call.traits.is_random) before = frame_.surroundings().marks();
  const StoragesOf given(call.arguments);
  const c10::IValue written =
      call.keeps && call.traits.writes_first ? call.arguments[0] : c10::IValue();
  const int64_t num_inside = num_inside_.load(std::memory_order_relaxed);
  try {
    op.callBoxed(&stack);
  } catch (...) {
    // The call keeps nothing, and a later answer of the policy must not insist.
    lock.lock();
    if (call.keeps) record_.note_let_go(place);
    throw;
  }
  const auto results = results_of(op, stack);
  if (call.asks_after) call.decide_after(*this, arguments_then, results);
  if (before)
    call.record->draws = std::make_unique<DrawSkips>(
        frame_.surroundings().since(*before, devices_of(*call.record, results)));

  const bool opened_regions = num_inside_.load(std::memory_order_relaxed) != num_inside;
  if (call.applies) {
    lock.lock();
    if (!opened_regions) {
      call.record->is_kept = call.record->is_applied = true;
      record_.at(place) = std::move(call.record);
      return;
    }
    for (const ArgumentRecord& each : call.record->tensors)
      if (const auto* const written = record_.kept_result(each.storage._unsafe_get_target()))
        record_.let_go(KeptIndex(*written), freed);
    return;
  }
  // Inference tensors cannot be saved. A kernel that opens regions must run again, since the
  // regions have slots.
  if (call.record != nullptr &&
      (call.must_run || opened_regions || hold_inference(written) || hold_inference(results) ||
       (written.isNone() && returns_argument(*call.record, results)))) {
    lock.lock();
    record_.note_results(place, results, given);
    if (!call.keeps) return;
    record_.note_read(*call.record);
    return record_.note_let_go(place);
  }
  if (call.keeps) {
    const bool meets_none = is_outermost && hooks_ == detail::HooksAround::Regions;
    try {
      const detail::HooksAround hooks = meets_none ? detail::HooksAround::None : hooks_;
      // Asynchronous communication may not have filled its output yet: nothing may read it now.
      const bool is_collective = (call.traits.kinds & OpKind::Collective) != 0;
      if (written.isNone())
        keep(*call.record, results, is_collective ? CheckpointPolicy::MustSave : call.answer,
             region,
             is_collective && hooks == detail::HooksAround::All ? detail::HooksAround::Regions
                                                                : hooks);
      else
        keep_written(*call.record, written, results, region, meets_none);
      for (KeptResult& each : call.record->kept)
        if (is_collective && each.plain.isObject()) each.plain = ended(each.plain);
    } catch (...) {
      lock.lock();
      record_.note_let_go(place);
      throw;
    }
  }
  lock.lock();
  record_.note_results(place, results, given);
  if (call.record == nullptr) return;
  if (call.keeps) record_.add_kept(place, *call.record);
  record_.at(place) = std::move(call.record);
  if (call.may_get_name) held_for_names_.add(place, results, freed);
}

/// Decides which results of a call are kept, if the call succeeds.
void Selection::decide(Call& call, Freed& freed) {
  const OpTraits& traits = call.traits;
  call.keeps = is_keeping(call.answer) && traits.can_be_kept();
  call.applies = (traits.is_mutable || traits.writes_first) && record_.num_kept > 0 &&
                 record_.writes_to_kept(call.op, call.arguments, freed);
  call.may_get_name = record_.looks_at_names() && traits.can_be_kept() && !call.is_packing;
  const bool may_be_kept_after = call.asks_after && traits.can_be_kept();
  if (call.keeps || call.may_get_name || call.applies || may_be_kept_after) {
    call.record = record_.make_record();
    call.record->is_preferred = call.keeps && is_preferring(call.answer);
    for (const c10::IValue& argument : call.arguments) {
      bool holds_tensors = false;
      visit_tensors_in(argument, [&](const at::Tensor& tensor) {
        holds_tensors = true;
        describe(tensor, frame_, record_.sources, call.record->tensors.emplace_back());
      });
      if (!holds_tensors && !argument.isGenerator()) call.record->others.push_back(argument);
    }
  }
  call.must_run = traits.has_side_effect(call.arguments);
  if (!call.asks_after) call.note_decision(*this);
  // A view reads no data; a reader of the view is noticed by the shared storage.
  if (!call.keeps && !call.applies && !traits.is_view && !may_be_kept_after)
    record_.note_read(call.arguments);
}

void Selection::Call::decide_after(Selection& selection, c10::ArrayRef<c10::IValue> arguments_then,
                                   c10::ArrayRef<c10::IValue> results) {
  answer = selection.rule_->answer(
      {op, traits.name, arguments_then, /*is_recompute=*/false, no_name, results});
  keeps = is_keeping(answer) && traits.can_be_kept();
  std::lock_guard<SpinLock> lock(selection.record_.mutex);
  note_decision(selection);
  if (record == nullptr) return;
  record->is_preferred = keeps && is_preferring(answer);
  if (!keeps && !applies) selection.record_.note_read(*record);
}

// A view or a write that no policy wants to keep is not recorded.
void Selection::Call::note_decision(Selection& selection) const {
  if (selection.frame_.recorded() == nullptr || (!traits.can_be_kept() && !is_keeping(answer)))
    return;
  const char* const against = traits.is_view      ? "returns a view"
                              : traits.is_mutable ? "writes to an argument"
                              : traits.is_blank   ? "makes a tensor to be filled"
                              : must_run          ? "changes what is not its result"
                                                  : nullptr;
  selection.decisions_.push_back({place, answer, against});
}

void Selection::keep(CallRecord& record, c10::ArrayRef<c10::IValue> results,
                     CheckpointPolicy answer, const detail::RegionScope& region,
                     detail::HooksAround hooks) {
  record.kept.clear();  // results of an attempt that threw
  // True if all writes to the results are seen until the forward ends: Note [Moving kept results].
  const bool is_beside = is_offloading(answer) && c10::GradMode::is_enabled() &&
                         region.is_own_thread() && seam::graph_task_id() == record_.task_at_start;
  for (const c10::IValue& result : results) {
    KeptResult& kept = record.kept.emplace_back();
    kept.is_tensor = result.isTensor();
    kept.is_list = result.isTensorList();
    if (kept.is_list) kept.tensors.reserve(result.toListRef().size());
    if (kept.is_tensor || kept.is_list)
      visit_tensors_in(result, [&](const at::Tensor& tensor) {
        kept.tensors.emplace_back(tensor, region, hooks,
                                  moves_->place_of(tensor, answer, is_beside));
      });
    else
      kept.plain = result;
  }
  if (is_offloading(answer)) moves_->move_excess();
  record.is_kept = true;
}

}  // namespace remat
