// One operator call in the innermost region: asks the policy, runs the operator, and stores the
// kept results.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "lib/scope/packing.h"
#include "lib/seam/engine.h"
#include "lib/selective/selection.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

/// Largest size of tensors whose contents are compared if their origin is unknown.
constexpr std::size_t max_compared_bytes = 4096;

/// Records the contents of arguments that no operator made, or that other code may have filled.
/// Runs operators.
void note_contents(c10::ArrayRef<c10::IValue> arguments, CallRecord& record) {
  std::size_t number = 0;
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    ArgumentRecord& each = record.tensors[number++];
    const bool may_be_filled = !each.source || each.source->is_factory;
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

bool hold_inference(c10::ArrayRef<c10::IValue> results) {
  bool found = false;
  visit_tensors_in(results, [&found](const at::Tensor& tensor) {
    found = found || (tensor.defined() && tensor.is_inference());
  });
  return found;
}

}  // namespace

/// One call, from the policy's answer to its kept results.
struct Selection::Call {
  const c10::OperatorHandle& op;
  const uint32_t number, index;  // of the operator, and of the call among its calls
  const OpTraits& traits;
  const c10::ArrayRef<c10::IValue> arguments;
  const bool is_packing = Packing::is_under_way();
  CheckpointPolicy answer = CheckpointPolicy::PreferRecompute;
  bool keeps = false;         // its results
  bool applies = false;       // its write to a kept result
  bool may_get_name = false;  // a result may get a name later, and then be kept
  bool must_run = false;      // in a recompute, too
  CallRecordPtr record{};     // null if its results cannot be kept
};

void Selection::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                    const detail::RegionScope& region, bool is_outermost) {
  Freed freed;
  std::unique_lock<SpinLock> lock(record_.mutex);
  if (record_.is_settled || rule_ == nullptr) {
    lock.unlock();
    return op.callBoxed(&stack);
  }
  Call call = begin_call(op, stack);
  answer(call, lock);
  decide(call, freed);
  lock.unlock();
  if (call.record != nullptr) note_contents(call.arguments, *call.record);

  std::optional<DrawMarks> before;
  if (call.record != nullptr && call.traits.is_random) before = frame_.surroundings().marks();
  const StoragesOf given(call.arguments);
  const int64_t num_inside = num_inside_.load(std::memory_order_relaxed);
  try {
    op.callBoxed(&stack);
  } catch (...) {
    // The call keeps nothing, and a later answer of the policy must not insist.
    lock.lock();
    if (call.keeps) note_let_go(call.number, call.index);
    throw;
  }
  const auto results = results_of(op, stack);
  if (before)
    call.record->draws = std::make_unique<DrawSkips>(
        frame_.surroundings().since(*before, devices_of(*call.record, results)));

  const bool opened_regions = num_inside_.load(std::memory_order_relaxed) != num_inside;
  if (call.applies) return apply(call, opened_regions, lock, freed);
  // Inference tensors cannot be saved. A kernel that opens regions must run again, since the
  // regions have slots.
  if (call.record != nullptr &&
      (call.must_run || opened_regions || returns_argument(*call.record, results) ||
       hold_inference(results))) {
    lock.lock();
    note_results(record_.operators[call.number], call.number, call.index, results, given);
    if (!call.keeps) return;
    for (const ArgumentRecord& each : call.record->tensors)
      note_read(each.storage._unsafe_get_target());
    return note_let_go(call.number, call.index);
  }
  if (call.keeps) {
    detail::HooksAround around = hooks();
    if (is_outermost && around == detail::HooksAround::Regions) around = detail::HooksAround::None;
    try {
      keep(*call.record, results, call.answer, region, around);
    } catch (...) {
      lock.lock();
      note_let_go(call.number, call.index);
      throw;
    }
  }
  lock.lock();
  note_results(record_.operators[call.number], call.number, call.index, results, given);
  if (call.record == nullptr) return;
  if (call.keeps) add_places(call.number, call.index, *call.record);
  if (call.may_get_name) hold_for_name({call.number, call.index, 0, 0}, *call.record, results);
  record_.operators[call.number].calls[call.index] = std::move(call.record);
  look_through_held(freed);
}

Selection::Call Selection::begin_call(const c10::OperatorHandle& op,
                                      const torch::jit::Stack& stack) {
  const uint32_t n = number(op);
  OpRecord& of_op = record_.operators[n];
  const auto index = static_cast<uint32_t>(of_op.calls.size());
  of_op.calls.emplace_back();
  record_.sequence.push_back(n);
  return {.op = op,
          .number = n,
          .index = index,
          .traits = *of_op.traits,
          .arguments = arguments_of(op, stack)};
}

/// Asks the policy, without the lock.
void Selection::answer(Call& call, std::unique_lock<SpinLock>& lock) {
  if (call.is_packing) return;
  const std::optional<CheckpointPolicy> to_all = record_.operators[call.number].answer_to_all;
  if (to_all) {
    call.answer = *to_all;
    return;
  }
  lock.unlock();
  static const std::string no_name;
  call.answer =
      rule_->answer({call.op, call.traits.name, call.arguments, /*is_recompute=*/false, no_name});
  lock.lock();
}

/// Decides which results of a call are kept, if the call succeeds.
void Selection::decide(Call& call, Freed& freed) {
  const OpTraits& traits = call.traits;
  call.keeps = is_keeping(call.answer) && traits.can_be_kept();
  call.applies =
      traits.is_mutable && record_.num_kept > 0 && writes_to_kept(call.op, call.arguments, freed);
  call.may_get_name = rule_->looks_at_names() && traits.can_be_kept() && !call.is_packing;
  if (call.keeps || call.may_get_name || call.applies) {
    call.record = make_record();
    call.record->is_preferred = call.keeps && is_preferring(call.answer);
    describe(call.arguments, *call.record);
  }
  call.must_run = traits.has_side_effect(call.arguments);
  // A view or a write that no policy wants to keep is not recorded.
  if (frame_.recorded() != nullptr && (traits.can_be_kept() || is_keeping(call.answer))) {
    const char* const against = traits.is_view      ? "returns a view"
                                : traits.is_mutable ? "writes to an argument"
                                : traits.is_blank   ? "makes a tensor to be filled"
                                : call.must_run     ? "changes what is not its result"
                                                    : nullptr;
    decisions_.push_back({call.number, call.index, call.answer, against});
  }
  // A view reads no data; a reader of the view is noticed by the shared storage.
  if (!call.keeps && !call.applies && !traits.is_view) note_read(call.arguments);
}

/// Records a call that has written to a kept result, which stays kept as written.
void Selection::apply(Call& call, bool opened_regions, std::unique_lock<SpinLock>& lock,
                      Freed& freed) {
  lock.lock();
  if (!opened_regions) {
    call.record->is_kept = call.record->is_applied = true;
    record_.operators[call.number].calls[call.index] = std::move(call.record);
    return;
  }
  for (const ArgumentRecord& each : call.record->tensors)
    if (const ResultIndex* const place = kept_result(each.storage._unsafe_get_target()))
      let_go(ResultIndex(*place), freed);
}

KeptPlace Selection::place_of(const at::Tensor& value, CheckpointPolicy answer, bool is_beside) {
  if (!is_offloading(answer)) return {};
  // A result that cannot be moved is refused, however small it is.
  const bool is_small = value.defined() && KeptTensor::can_be_moved(value) &&
                        static_cast<int64_t>(value.nbytes()) < rule_->options().min_offload_bytes;
  if (is_small) return {};
  const bool must_move = answer == CheckpointPolicy::MustCpuOffload;
  KeptPlace place{must_move ? KeptWhere::OnCpu : KeptWhere::OnCpuIfPossible, &*moves_, is_beside};
  if (frame_.recorded() != nullptr && rule_->options().keep_last > 0 && value.defined())
    place.on_late_move = frame_.recorded()->late_move(static_cast<int64_t>(value.nbytes()));
  return place;
}

/// Returns whether all writes to results made here are seen until the forward
/// ends: Note [Moving kept results].
bool Selection::sees_writers(const detail::RegionScope& region) const {
  return c10::GradMode::is_enabled() && region.is_own_thread() &&
         seam::graph_task_id() == task_at_start_;
}

bool Selection::returns_argument(const CallRecord& call, c10::ArrayRef<c10::IValue> results) const {
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

void Selection::keep(CallRecord& record, c10::ArrayRef<c10::IValue> results,
                     CheckpointPolicy answer, const detail::RegionScope& region,
                     detail::HooksAround hooks) {
  record.kept.clear();  // results of an attempt that threw
  const bool is_beside = is_offloading(answer) && sees_writers(region);
  for (const c10::IValue& result : results) {
    KeptResult& kept = record.kept.emplace_back();
    kept.is_tensor = result.isTensor();
    kept.is_list = result.isTensorList();
    if (kept.is_list) kept.tensors.reserve(result.toListRef().size());
    if (kept.is_tensor || kept.is_list)
      visit_tensors_in(result, [&](const at::Tensor& tensor) {
        kept.tensors.emplace_back(tensor, region, hooks, place_of(tensor, answer, is_beside));
      });
    else
      kept.plain = result;
  }
  if (is_offloading(answer)) moves_->move_excess();
  record.is_kept = true;
}

void Selection::add_places(uint32_t op, uint32_t call, const CallRecord& record) {
  ++record_.num_kept;
  for (std::size_t i = 0; i < record.kept.size(); ++i)
    for (std::size_t j = 0; j < record.kept[i].tensors.size(); ++j)
      if (const c10::StorageImpl* const storage = record.kept[i].tensors[j].storage()) {
        sources_.notes_of(storage)->kept = static_cast<uint32_t>(kept_results_.size());
        kept_results_.push_back({op, call, static_cast<uint32_t>(i), static_cast<uint32_t>(j)});
      }
}

void Selection::note_let_go(uint32_t op, uint32_t call) {
  if (!rule_->options().ask_again) return;
  record_.operators[op].calls[call] = make_record();
  record_.operators[op].calls[call]->is_let_go = true;
}

}  // namespace remat
