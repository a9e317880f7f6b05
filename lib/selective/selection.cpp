#include "lib/selective/selection.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "hooks/depot.h"
#include "lib/scope/packing.h"
#include "lib/seam/engine.h"
#include "lib/selective/replay.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

/// Contents of tensors up to this size are compared where their origin is not known.
constexpr std::size_t max_compared_bytes = 4096;

/// Notes the contents of arguments that no operator, or anyone else, may have filled. Runs operators.
void note_contents(c10::ArrayRef<c10::IValue> arguments, CallRecord& record) {
  std::size_t number = 0;
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    ArgumentRecord& each = record.tensors[number++];
    const bool may_be_filled = !each.source || each.source->is_factory;
    if (may_be_filled && each.input < 0 && storage_of(tensor) != nullptr && tensor.is_cpu() &&
        tensor.layout() == c10::kStrided && !tensor.is_nested() &&
        tensor.nbytes() <= max_compared_bytes && !KeptTensor::is_placeholder(tensor))
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

bool hold_arguments(c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  bool found = false;
  visit_tensors_in(results,
                   [&](const at::Tensor& tensor) { found = found || given.contain(tensor); });
  return found;
}

}  // namespace

KeptPlace Selection::place_of(const at::Tensor& value, CheckpointPolicy answer, bool is_beside) {
  if (!is_offloading(answer)) return {};
  // What cannot be moved is refused, however small.
  const bool is_small = value.defined() && KeptTensor::can_be_moved(value) &&
                        static_cast<int64_t>(value.nbytes()) < rule_->options().min_offload_bytes;
  if (is_small) return {};
  const bool must_move = answer == CheckpointPolicy::MustCpuOffload;
  return {must_move ? KeptWhere::OnCpu : KeptWhere::OnCpuIfPossible, &*moves_, is_beside};
}

/// Whether a copy would spare no memory: the value's own stays.
bool Selection::is_alive_anyway(const at::Tensor& value) const {
  const c10::StorageImpl* const storage = storage_of(value);
  return storage != nullptr && (is_parameter(value) || frame_.inputs().is_in_place(*storage));
}

/// Whether all that may write to what is made here comes to us, until the forward ends: Note [Moving kept results].
bool Selection::sees_writers(const detail::RegionScope& region) const {
  return c10::GradMode::is_enabled() && region.is_own_thread() &&
         seam::graph_task_id() == task_at_start_;
}

Selection::Selection(Frame& frame, std::shared_ptr<const PolicyRule> rule)
    : frame_(frame), rule_(std::move(rule)), task_at_start_(seam::graph_task_id()) {
  if (rule_ == nullptr) return;
  moves_.emplace(frame.region().info.id, rule_->options());
  best_ = BestRun::begin(frame, rule_->chooser());
}

detail::HooksAround Selection::hooks() const {
  return rule_ != nullptr && rule_->options().save_through_hooks ? detail::HooksAround::All
                                                                 : detail::HooksAround::Regions;
}

Selection& Selection::make(Frame& frame, std::shared_ptr<const PolicyRule> rule) {
  static SpinLock making;  // threads of one region may pin at once
  const std::lock_guard<SpinLock> lock(making);
  if (frame.keeper() == nullptr)
    frame.set_keeper(std::make_unique<Selection>(frame, std::move(rule)));
  return *of(frame);
}

uint32_t Selection::number(const c10::OperatorHandle& op) {
  const auto [place, is_new] =
      record_.numbers.emplace(op, static_cast<uint32_t>(record_.operators.size()));
  if (is_new)
    record_.operators.push_back(
        {op,
         &traits_of(op),
         rule_ == nullptr ? CheckpointPolicy::PreferRecompute : rule_->answer_to_all(op),
         {}});
  return place->second;
}

CallRecordPtr Selection::make_record() {
  // Under such a policy most are thrown away when the forward is over.
  if (looks_at_names()) return CallRecordPtr(new CallRecord(/*lives_in_slab=*/false));
  return CallRecordPtr(new (record_.slab.room()) CallRecord(/*lives_in_slab=*/true));
}

int64_t Selection::input_of(const c10::StorageImpl* storage) const {
  return storage == nullptr ? -1 : frame_.inputs().storages().number_of(storage);
}

void Selection::describe(c10::ArrayRef<c10::IValue> arguments, CallRecord& record) {
  for (const c10::IValue& argument : arguments) {
    bool holds_tensors = false;
    visit_tensors_in(argument, [&](const at::Tensor& tensor) {
      holds_tensors = true;
      describe(tensor, record.tensors.emplace_back());
    });
    if (!holds_tensors && !argument.isGenerator()) record.others.push_back(argument);
  }
}

void Selection::describe(const at::Tensor& tensor, ArgumentRecord& record) {
  if (!tensor.defined()) return;
  record.metadata = TensorMetadata(tensor, /*with_strides=*/false);
  record.storage = weak_storage_of(tensor);
  if (c10::TensorImpl* const leaf = leaf_behind(tensor); leaf != nullptr && leaf->has_storage())
    record.leaf = leaf->unsafe_storage().getWeakStorageImpl();
  record.input = input_of(storage_of(tensor));
  record.leaf_input = input_of(record.leaf._unsafe_get_target());
  if (const auto made = sources_.find(tensor)) {
    record.source = made->source;
    record.num_changes = made->num_changes;
  }
}

Selection::ResultIndex* Selection::kept_result(const c10::StorageImpl* storage) {
  const ValueSources::Notes* const notes =
      record_.num_kept == 0 ? nullptr : sources_.notes_of(storage);
  return notes == nullptr || notes->kept == ValueSources::Notes::not_kept
             ? nullptr
             : &kept_results_[notes->kept];
}

// Under policies that look at names any result may be kept later.
void Selection::note_read(const c10::StorageImpl* storage) {
  if (record_.num_kept == 0 && !looks_at_names()) return;
  if (ValueSources::Notes* const notes = sources_.notes_of(storage)) notes->is_read = true;
}

void Selection::note_read(c10::ArrayRef<c10::IValue> arguments) {
  if (record_.num_kept == 0 && !looks_at_names()) return;
  visit_tensors_in(arguments, [this](const at::Tensor& tensor) { note_read(storage_of(tensor)); });
}

void Selection::tensor_was_read(const at::Tensor& tensor) {
  if (record_.is_settled) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  note_read(storage_of(tensor));
  if (best_ != nullptr) best_->hold(storage_of(tensor));
}

void Selection::slot_added(const at::Tensor& saved, int64_t position) {
  if (record_.is_settled) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  note_read(storage_of(saved));
  if (rule_ == nullptr) return;
  if (best_ != nullptr) best_->add_slot(storage_of(saved), position);
  num_inside_.fetch_add(1, std::memory_order_relaxed);
  const auto index = static_cast<std::size_t>(position);
  if (slot_sources_.size() <= index) slot_sources_.resize(index + 1);
  slot_sources_[index] = sources_.find(saved);
}

void Selection::value_was_handed_over(const at::Tensor& value, int64_t region, int64_t position) {
  if (record_.is_settled || rule_ == nullptr) return;
  std::lock_guard<SpinLock> lock(record_.mutex);
  const auto index = static_cast<std::size_t>(position);
  if (region != frame_.region().info.id)
    sources_.set(value, {.is_known = false});
  else if (index < slot_sources_.size() && slot_sources_[index])
    sources_.set(value, slot_sources_[index]->source, slot_sources_[index]->num_changes);
}

void Selection::note_results(const OpRecord& op, uint32_t number, uint32_t call,
                             c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  if (op.traits->is_view) return;
  uint32_t output = 0;
  for (std::size_t i = 0; i < results.size(); ++i)
    visit_tensors_in(results[i], [&](const at::Tensor& tensor) {
      const ValueSource source{number, call, output++, op.traits->is_factory};
      if (is_made_by(op.op, i) && !given.contain(tensor)) sources_.set(tensor, source);
    });
}

int64_t Selection::before_inner(const c10::OperatorHandle& op,
                                c10::ArrayRef<c10::IValue> arguments) {
  Freed freed;
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (record_.is_settled) return -1;
  OpRecord& record = record_.operators[number(op)];
  record_.sequence.push_back(number(op));
  record.calls.emplace_back();
  note_read(arguments);
  if (best_ != nullptr) best_->hold(arguments);
  if (record.traits->is_mutable) note_written(op, arguments, freed);
  return static_cast<int64_t>(record.calls.size()) - 1;
}

void Selection::after_inner(const c10::OperatorHandle& op, int64_t call,
                            c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (call < 0 || record_.is_settled) return;
  const uint32_t n = number(op);
  note_results(record_.operators[n], n, static_cast<uint32_t>(call), results, given);
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
  record.kept.clear();  // of an attempt that threw
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

void Selection::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                    const detail::RegionScope& region, bool is_outermost) {
  Freed freed;
  std::unique_lock<SpinLock> lock(record_.mutex);
  if (record_.is_settled || rule_ == nullptr) {
    lock.unlock();
    return op.callBoxed(&stack);
  }
  const uint32_t n = number(op);
  const auto call = static_cast<uint32_t>(record_.operators[n].calls.size());
  record_.operators[n].calls.emplace_back();
  record_.sequence.push_back(n);
  const OpTraits& traits = *record_.operators[n].traits;
  std::optional<CheckpointPolicy> answer = record_.operators[n].answer_to_all;
  const auto arguments = arguments_of(op, stack);
  const bool is_packing = Packing::is_under_way();
  if (is_packing) answer = CheckpointPolicy::PreferRecompute;
  if (!answer) {
    lock.unlock();
    static const std::string no_name;
    answer = rule_->answer({op, traits.name, arguments, /*is_recompute=*/false, no_name});
    lock.lock();
  }
  const std::shared_ptr<BestRun> best =
      is_packing || seam::graph_task_id() != task_at_start_ ? nullptr : best_;
  std::size_t best_call = 0;
  bool is_chosen = false;
  if (best != nullptr) {
    best_call = best->begin_call(op, traits, arguments, is_keeping(*answer));
    is_chosen = best->keeps_call();
    if (is_chosen) answer = CheckpointPolicy::PreferSave;
    if (best->must_let_go()) let_go_chosen(freed);
  } else if (best_ != nullptr) {
    best_->hold(arguments);
  }
  const bool keeps = is_keeping(*answer) && traits.can_be_kept();
  const bool applies =
      traits.is_mutable && record_.num_kept > 0 && writes_to_kept(op, arguments, freed);
  const bool may_get_name = rule_->looks_at_names() && traits.can_be_kept() && !is_packing;
  CallRecordPtr record;
  if (keeps || may_get_name || applies) {
    record = make_record();
    record->is_chosen = is_chosen;
    describe(arguments, *record);
  }
  const bool must_run = traits.has_side_effect(arguments);
  // A view or a write that nobody wants to keep is not worth a line.
  if (frame_.recorded() != nullptr && (traits.can_be_kept() || is_keeping(*answer)))
    note_decision(n, call, *answer, is_chosen,
                  traits.is_view      ? "returns a view"
                  : traits.is_mutable ? "writes to an argument"
                  : traits.is_blank   ? "makes a tensor to be filled"
                  : must_run          ? "changes what is not its result"
                                      : nullptr);
  const bool is_noted = frame_.recorded() != nullptr && !decisions_.empty() &&
                        decisions_.back().op == n && decisions_.back().call == call;
  const std::size_t noted = decisions_.size() - 1;
  if (best != nullptr && is_noted) decisions_[noted].seconds = best->known_seconds();
  // A view reads nothing; who reads the view is seen by the storage that it shares.
  if (!keeps && !applies && !traits.is_view) note_read(arguments);
  lock.unlock();
  if (record != nullptr) note_contents(arguments, *record);

  std::optional<DrawMarks> before;
  if (record != nullptr && traits.is_random) before = frame_.surroundings().marks();
  const StoragesOf given(arguments);
  const int64_t num_inside = num_inside_.load(std::memory_order_relaxed);
  CallClock clock(best.get(), op, traits, arguments);
  try {
    op.callBoxed(&stack);
  } catch (...) {
    // Nothing was kept of it; asked again, the policy must not insist.
    lock.lock();
    if (best != nullptr && best_ != nullptr) best->call_threw();
    if (keeps) note_let_go(n, call);
    throw;
  }
  const auto results = results_of(op, stack);
  clock.stop(results);
  if (before)
    record->draws = std::make_unique<DrawSkips>(
        frame_.surroundings().since(*before, devices_of(*record, results)));

  const bool opened_regions = num_inside_.load(std::memory_order_relaxed) != num_inside;
  if (best != nullptr && best->is_measured()) {
    lock.lock();
    if (is_noted && noted < decisions_.size()) decisions_[noted].seconds = clock.seconds();
    // On a thread that merely inherited the stack it may end after the region.
    if (best_ != nullptr)
      best->end_call(best_call, results, given,
                     traits.can_be_kept() && !must_run && !opened_regions &&
                         !hold_arguments(results, given) && !hold_inference(results),
                     clock);
    lock.unlock();
  }
  if (applies && opened_regions) {
    lock.lock();
    for (const ArgumentRecord& each : record->tensors)
      if (const ResultIndex* const place = kept_result(each.storage._unsafe_get_target()))
        let_go(ResultIndex(*place), freed);
    return;
  }
  if (applies) {
    record->is_kept = record->is_applied = true;
    lock.lock();
    record_.operators[n].calls[call] = std::move(record);
    return;
  }
  // Inference tensors cannot be saved. A kernel that opens regions must run again: they hold slots.
  if (record != nullptr && (must_run || opened_regions || returns_argument(*record, results) ||
                            hold_inference(results))) {
    lock.lock();
    note_results(record_.operators[n], n, call, results, given);
    if (keeps)
      for (const ArgumentRecord& each : record->tensors)
        note_read(each.storage._unsafe_get_target());
    if (keeps) note_let_go(n, call);
    return;
  }
  if (keeps) {
    detail::HooksAround around = hooks();
    if (is_outermost && around == detail::HooksAround::Regions) around = detail::HooksAround::None;
    try {
      keep(*record, results, *answer, region, around);
    } catch (...) {
      lock.lock();
      note_let_go(n, call);
      throw;
    }
  }
  lock.lock();
  note_results(record_.operators[n], n, call, results, given);
  if (record == nullptr) return;
  if (keeps) add_places(n, call, *record);
  if (may_get_name) hold_for_name({n, call, 0, 0}, *record, results);
  record_.operators[n].calls[call] = std::move(record);
  look_through_held(freed);
}

PinRecord::Value Selection::keep_value(const at::Tensor& value, int64_t number, std::size_t output,
                                       const detail::RegionScope& region, const KeptPlace& place) {
  PinRecord::Value kept{KeptTensor(value, region, hooks(), place), grad_role_of(value)};
  if (rule_ == nullptr || !value.defined()) return kept;
  // The recompute gets another tensor, which must have the origin that this one has.
  std::lock_guard<SpinLock> lock(record_.mutex);
  if (!sources_.find(value))
    sources_.add(value, {.call = static_cast<uint32_t>(number),
                         .output = static_cast<uint32_t>(output),
                         .is_factory = true,
                         .is_pin = true});
  kept.made = sources_.find(value);
  return kept;
}

int64_t Selection::begin_pin() {
  frame_.slots().end_operator();
  num_inside_.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard<SpinLock> lock(record_.mutex);
  record_.pins.emplace_back();
  return static_cast<int64_t>(record_.pins.size()) - 1;
}

void Selection::keep_pin(int64_t number, std::shared_ptr<PinRecord> pin) {
  std::lock_guard<SpinLock> lock(record_.mutex);
  record_.pins[static_cast<std::size_t>(number)] = std::move(pin);
}

void Selection::keep_itself(const at::Tensor& value, int64_t number,
                            const detail::RegionScope& region, const KeptPlace& place,
                            bool is_name) {
  auto itself = std::make_shared<PinRecord>();
  itself->type = &typeid(at::Tensor);
  itself->is_name = is_name;
  itself->values.push_back(keep_value(value, number, 0, region, place));
  itself->values.back().history.is_argument = true;
  keep_pin(number, std::move(itself));
}

void Selection::note_decision(uint32_t op, uint32_t call, CheckpointPolicy answer, bool is_chosen,
                              const char* against) {
  decisions_.push_back({op, call, answer, is_chosen, against});
}

void Selection::add_to(recording::RegionSums& sums) const {
  constexpr std::array<std::string_view, 6> answers{"MustSave",       "PreferSave",
                                                    "MustRecompute",  "PreferRecompute",
                                                    "MustCpuOffload", "PreferCpuOffload"};
  for (const Decision& each : decisions_) {
    const OpRecord& op = record_.operators[each.op];
    const CallRecord* const record = op.calls[each.call].get();
    recording::DecidedCall decided{op.traits->name, "recomputed", {}, 0, each.seconds};
    decided.reason =
        each.is_chosen ? "save_best" : std::string(answers[static_cast<std::size_t>(each.answer)]);
    if (record != nullptr && record->is_kept) {
      bool is_moved = false;
      for (const KeptResult& result : record->kept)
        for (const KeptTensor& kept : result.tensors) {
          decided.bytes += kept.num_bytes();
          is_moved = is_moved || kept.is_on_cpu_instead();
        }
      decided.outcome = is_moved ? "moved" : "kept";
      if (!is_keeping(each.answer)) decided.reason = "a name";
      if (decided.bytes == 0) decided.reason += ", nobody reads it";
    } else if (is_keeping(each.answer)) {
      decided.reason += each.against == nullptr ? ", but it is written to, or cannot be given again"
                                                : fmt::format(", but it {}", each.against);
    }
    sums.decisions.push_back(std::move(decided));
  }
  record_.visit_kept([&](const KeptTensor& kept) {
    if (const int64_t bytes = kept.num_bytes(); bytes > 0)
      remat::add_to(sums.saved, kept.is_on_cpu_instead() ? c10::kCPU : kept.device(), bytes);
    sums.offloaded += kept.is_on_cpu_instead() ? 1 : 0;
    sums.bytes_offloaded += kept.is_on_cpu_instead() ? kept.num_bytes() : 0;
    sums.offload_fallbacks += kept.could_not_move() ? 1 : 0;
  });
  if (moves_) sums.offload_wait_s += 1e-9 * static_cast<double>(moves_->spent_ns());
}

bool Selection::holds(const c10::StorageImpl* storage) {
  std::lock_guard<SpinLock> lock(record_.mutex);
  bool holds = kept_result(storage) != nullptr;
  record_.visit_pinned([&](const KeptTensor& each) { holds |= each.storage() == storage; });
  return holds;
}

bool Selection::may_replace(const c10::StorageImpl* storage) {
  // Of a pin only what waits elsewhere: in its place it may be a captured tensor's too, which is
  // looked at as such.
  bool may = kept_result(storage) != nullptr;
  record_.visit_pinned(
      [&](const KeptTensor& each) { may |= each.storage() == storage && each.is_elsewhere(); });
  return may;
}

void Selection::settle() {
  std::vector<std::shared_ptr<Piece>> unfinished;
  end_forward(unfinished);
  // What the device runs next may write to what is still being copied.
  for (const auto& piece : unfinished) piece->finish_store();
}

void Selection::end_forward(std::vector<std::shared_ptr<Piece>>& unfinished) {
  Freed freed;
  std::shared_ptr<BestRun> best;
  {
    const std::lock_guard<SpinLock> lock(record_.mutex);
    best = std::exchange(best_, nullptr);
  }
  if (best != nullptr) best->end();
  std::lock_guard<SpinLock> lock(record_.mutex);
  // Who reads a placeholder ends the recompute with an exception, which a noexcept function lets none out.
  const bool may_have_placeholders = frame_.region().body->can_be_stopped();
  sources_.visit([&](const ValueSources::Notes& notes) {
    if (notes.kept == ValueSources::Notes::not_kept) return;
    const ResultIndex& place = kept_results_[notes.kept];
    KeptTensor& kept =
        record_.operators[place.op].calls[place.call]->kept[place.result].tensors[place.tensor];
    if (auto holders = kept.settle(!may_have_placeholders || notes.is_read))
      freed.holders.push_back(std::move(*holders));
  });
  kept_results_ = {};  // clear() would keep the room
  sources_.clear();
  slot_sources_.clear();
  for (OpRecord& op : record_.operators)
    for (auto& call : op.calls) {
      if (call == nullptr) continue;
      if (call->is_kept) {
        call->results.clear();
        for (KeptResult& result : call->kept)
          for (KeptTensor& kept : result.tensors)
            if (auto piece = kept.end_forward()) unfinished.push_back(std::move(piece));
      } else {
        const bool is_let_go = call->is_let_go;
        freed.records.push_back(std::exchange(call, is_let_go ? make_record() : nullptr));
        if (is_let_go) call->is_let_go = true;
      }
    }
  record_.is_settled = true;
}

std::unique_ptr<KeptReplay> Selection::begin_recompute(Filler& filler,
                                                       const std::vector<at::Tensor>& inputs) {
  // In the midst of forward names may yet come.
  if (rule_ != nullptr && record_.is_settled) rule_->warn_about_unseen();
  return std::make_unique<Replay>(frame_, *this, filler, inputs);
}

}  // namespace remat
