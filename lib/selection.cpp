#include "lib/selection.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "lib/digest.h"
#include "lib/engine_seam.h"
#include "lib/frame.h"
#include "lib/match.h"
#include "lib/replay.h"

namespace remat {

namespace {

/// Contents of tensors up to this size are compared where their origin is not known.
constexpr std::size_t max_compared_bytes = 4096;
/// After so many more calls, results that were held for a name are looked through.
constexpr std::size_t sweep_interval = 32;

c10::ArrayRef<c10::IValue> last(const torch::jit::Stack& stack, std::size_t count) {
  return c10::ArrayRef<c10::IValue>(stack.data() + (stack.size() - count), count);
}

c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op,
                                        const torch::jit::Stack& stack) {
  return last(stack, op.schema().arguments().size());
}

bool hold_inference(c10::ArrayRef<c10::IValue> results) {
  bool found = false;
  for (const c10::IValue& result : results)
    visit_tensors_in(result, [&found](const at::Tensor& tensor) {
      found = found || (tensor.defined() && tensor.is_inference());
    });
  return found;
}

KeptWhere where_for(CheckpointPolicy answer) {
  if (answer == CheckpointPolicy::MustCpuOffload) return KeptWhere::OnCpu;
  return answer == CheckpointPolicy::PreferCpuOffload ? KeptWhere::OnCpuIfPossible
                                                      : KeptWhere::InPlace;
}

// Note [Casts of leaves]
// Autocast keeps its casts of leaves while its scope lasts: forward may have found one in the cache that
// the recompute must make, or the other way round. So such a call has no number, no policy is asked
// about it, and what it makes is known by the leaf (Note [The same call again]).
bool is_cast_of_leaf(const OpTraits& traits, const torch::jit::Stack& stack) {
  if (!traits.is_cast || !at::autocast::is_autocast_cache_enabled()) return false;
  constexpr std::size_t num_arguments = 7;  // of _to_copy: the tensor, its dtype, ...
  const auto arguments = last(stack, num_arguments);
  if (!arguments[0].isTensor() || !arguments[1].isInt()) return false;
  const at::Tensor& tensor = arguments[0].toTensor();
  return tensor.defined() && tensor.is_leaf() && tensor.requires_grad() &&
         tensor.scalar_type() == at::kFloat &&
         arguments[1].toScalarType() == at::autocast::get_autocast_dtype(tensor.device().type());
}

}  // namespace

void run_selectively(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const OpTraits& traits = traits_of(op);
  if (traits.is_passive || is_cast_of_leaf(traits, stack)) return op.callBoxed(&stack);
  // The innermost region first; those around it only take note.
  detail::Scope* innermost = nullptr;
  const Frame* passed_over = nullptr;  // its scope follows that of a stretch
  bool has_innermost = false;
  struct Outer {
    Selection* selection;
    Replay* replay;
    int64_t call;
  };
  c10::SmallVector<Outer, 2> outer;
  detail::visit(detail::Ability::Region, [&](detail::Scope& scope) {
    if (scope.frame() == passed_over) return;
    if (scope.is_kept_stretch) {
      passed_over = scope.frame();
      has_innermost = true;
      return;
    }
    if (!std::exchange(has_innermost, true)) {
      innermost = &scope;
      return;
    }
    Selection* const selection = scope.selection();
    Replay* const replay = scope.replay();
    if (selection != nullptr || replay != nullptr) outer.push_back({selection, replay, -1});
  });
  for (Outer& each : outer)
    each.call = each.selection != nullptr
                    ? each.selection->before_inner(op, arguments_of(op, stack))
                    : each.replay->before_inner(op, arguments_of(op, stack));
  if (Selection* const selection = innermost == nullptr ? nullptr : innermost->selection())
    selection->run(op, stack, *innermost);
  else if (Replay* const replay = innermost == nullptr ? nullptr : innermost->replay())
    replay->run(op, stack);
  else
    op.callBoxed(&stack);
  const auto results = last(stack, op.schema().returns().size());
  for (const Outer& each : outer)
    if (each.selection != nullptr)
      each.selection->after_inner(op, each.call, results);
    else
      each.replay->after_inner(op, each.call, results);
}

namespace {
thread_local int num_packing = 0;
}  // namespace

Packing::Packing(const at::Tensor& saved) {
  ++num_packing;
  detail::visit(detail::Ability::Region, [&](detail::Scope& scope) {
    if (Selection* const selection = scope.selection()) selection->note_saved(saved);
  });
}

Packing::~Packing() { --num_packing; }

bool Packing::is_under_way() { return num_packing > 0; }

Selection::Selection(Frame& frame, std::shared_ptr<const PolicyRule> rule)
    : frame_(frame), rule_(std::move(rule)), task_at_start_(seam::graph_task_id()) {}

detail::HooksAround Selection::hooks() const {
  return rule_ != nullptr && rule_->options().save_through_hooks ? detail::HooksAround::All
                                                                 : detail::HooksAround::Regions;
}

std::unique_lock<std::mutex> Selection::lock() const {
  return is_settled_ ? std::unique_lock<std::mutex>() : std::unique_lock<std::mutex>(mutex_);
}

uint32_t Selection::number(const c10::OperatorHandle& op) {
  const auto [place, is_new] = numbers_.emplace(op, static_cast<uint32_t>(operators_.size()));
  if (is_new)
    operators_.push_back(
        {op,
         &traits_of(op),
         rule_ == nullptr ? CheckpointPolicy::PreferRecompute : rule_->answer_to_all(op),
         {}});
  return place->second;
}

int64_t Selection::number_of(const c10::OperatorHandle& op) const {
  const auto found = numbers_.find(op);
  return found == numbers_.end() ? -1 : static_cast<int64_t>(found->second);
}

ArgumentRecord Selection::describe(const at::Tensor& tensor, Producers& producers) {
  ArgumentRecord record;
  if (!tensor.defined()) return record;
  record.description = Description(tensor, /*with_strides=*/false);
  record.storage = weak_storage_of(tensor);
  if (c10::TensorImpl* const leaf = leaf_behind(tensor); leaf != nullptr && leaf->has_storage())
    record.leaf = leaf->unsafe_storage().getWeakStorageImpl();
  const auto made = producers.find(tensor);
  if (made) {
    record.producer = made->producer;
    record.num_changes = made->num_changes;
  }
  const bool may_be_filled = !made || made->producer.is_factory;
  if (may_be_filled && tensor.is_cpu() && tensor.layout() == c10::kStrided && !tensor.is_nested() &&
      tensor.has_storage() && tensor.nbytes() <= max_compared_bytes &&
      !KeptTensor::is_shell(tensor))
    record.contents = digest_of(tensor);
  return record;
}

void Selection::note_read(const c10::StorageImpl* storage) {
  if (storage != nullptr && (looks_at_names() || kept_.find(storage) != kept_.end()))
    is_read_[storage] = true;
}

void Selection::note_read(c10::ArrayRef<c10::IValue> arguments) {
  if (kept_.empty() && !looks_at_names()) return;
  for (const c10::IValue& argument : arguments)
    visit_tensors_in(argument, [this](const at::Tensor& tensor) { note_read(storage_of(tensor)); });
}

void Selection::note_written(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (kept_.empty()) return;
  visit_written(op, arguments, [this](const at::Tensor& tensor) {
    if (const auto found = kept_.find(storage_of(tensor)); found != kept_.end())
      note_written(found->second);
  });
}

void Selection::note_written(const Place& place) {
  // Not every operator that writes counts up the version.
  if (seam::graph_task_id() == task_at_start_)
    operators_[place.op].calls[place.call]->is_written = true;
  else
    let_go(place);
}

void Selection::note_saved(const at::Tensor& saved, int64_t position) {
  if (is_settled_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  note_read(storage_of(saved));
  if (rule_ == nullptr || position < 0) return;
  const auto index = static_cast<std::size_t>(position);
  if (slot_producers_.size() <= index) slot_producers_.resize(index + 1);
  slot_producers_[index] = producers_.find(saved);
}

void Selection::note_handed_over(const at::Tensor& value, int64_t position) {
  if (is_settled_ || rule_ == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto index = static_cast<std::size_t>(position);
  if (position < 0)
    producers_.add(value, {.is_known = false});
  else if (index < slot_producers_.size() && slot_producers_[index])
    producers_.add(value, slot_producers_[index]->producer, slot_producers_[index]->num_changes);
}

void Selection::note_results(const OpRecord& op, uint32_t number, uint32_t call,
                             c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  if (op.traits->is_view) return;
  uint32_t output = 0;
  for (std::size_t i = 0; i < results.size(); ++i)
    visit_tensors_in(results[i], [&](const at::Tensor& tensor) {
      const Producer producer{number, call, output++, op.traits->is_factory};
      if (is_made_by(op.op, i) && !given.contain(tensor)) producers_.add(tensor, producer);
    });
}

int64_t Selection::before_inner(const c10::OperatorHandle& op,
                                c10::ArrayRef<c10::IValue> arguments) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_settled_) return -1;
  OpRecord& record = operators_[number(op)];
  sequence_.push_back(number(op));
  record.calls.emplace_back();
  note_read(arguments);
  if (record.traits->is_mutable) note_written(op, arguments);
  return static_cast<int64_t>(record.calls.size()) - 1;
}

void Selection::after_inner(const c10::OperatorHandle& op, int64_t call,
                            c10::ArrayRef<c10::IValue> results) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (call < 0 || is_settled_) return;
  const uint32_t n = number(op);
  note_results(operators_[n], n, static_cast<uint32_t>(call), results, StoragesOf({}));
}

bool Selection::returns_argument(const CallRecord& call, c10::ArrayRef<c10::IValue> results) const {
  bool returns = false;
  for (const c10::IValue& result : results)
    visit_tensors_in(result, [&](const at::Tensor& tensor) {
      const c10::StorageImpl* const storage = storage_of(tensor);
      returns = returns || (storage != nullptr &&
                            std::any_of(call.tensors.begin(), call.tensors.end(),
                                        [&](const ArgumentRecord& argument) {
                                          return argument.storage._unsafe_get_target() == storage;
                                        }));
    });
  return returns;
}

DrawMarks Selection::marks() const {
  DrawMarks marks;
  for (DrawLog* log : frame_.draw_logs()) marks.logs.push_back(log->mark());
  if (frame_.device_rng() != nullptr) marks.others = frame_.device_rng()->now();
  return marks;
}

DrawSkips Selection::since(const DrawMarks& marks) const {
  DrawSkips skips;
  const auto logs = frame_.draw_logs();
  for (std::size_t i = 0; i < logs.size(); ++i)
    skips.logs.push_back(i < marks.logs.size() ? logs[i]->since(marks.logs[i])
                                               : logs[i]->since_begin());
  if (frame_.device_rng() != nullptr)
    skips.others = frame_.device_rng()->moved(marks.others, frame_.device_rng()->now());
  return skips;
}

void Selection::keep(CallRecord& record, c10::ArrayRef<c10::IValue> results,
                     CheckpointPolicy answer, const detail::Scope& region) const {
  record.kept.clear();  // of an attempt that threw
  for (const c10::IValue& result : results) {
    KeptResult& kept = record.kept.emplace_back();
    kept.is_tensor = result.isTensor();
    kept.is_list = result.isTensorList();
    if (kept.is_list) kept.tensors.reserve(result.toListRef().size());
    if (kept.is_tensor || kept.is_list)
      visit_tensors_in(result, [&](const at::Tensor& tensor) {
        kept.tensors.emplace_back(tensor, region, hooks(), where_for(answer));
      });
    else
      kept.plain = result;
  }
  record.is_kept = true;
}

void Selection::add_places(uint32_t op, uint32_t call, const CallRecord& record) {
  ++num_kept_;
  for (std::size_t i = 0; i < record.kept.size(); ++i)
    for (std::size_t j = 0; j < record.kept[i].tensors.size(); ++j)
      if (const c10::StorageImpl* const storage = record.kept[i].tensors[j].storage())
        kept_[storage] = {op, call, static_cast<uint32_t>(i), static_cast<uint32_t>(j)};
}

void Selection::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                    const detail::Scope& region) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_settled_ || rule_ == nullptr) {
    lock.unlock();
    return op.callBoxed(&stack);
  }
  const uint32_t n = number(op);
  const auto call = static_cast<uint32_t>(operators_[n].calls.size());
  operators_[n].calls.emplace_back();
  sequence_.push_back(n);
  const OpTraits& traits = *operators_[n].traits;
  std::optional<CheckpointPolicy> answer = operators_[n].answer_to_all;
  const auto arguments = arguments_of(op, stack);
  const bool is_packing = Packing::is_under_way();
  if (is_packing) answer = CheckpointPolicy::PreferRecompute;
  if (!answer) {
    lock.unlock();
    static const std::string no_name;
    answer = rule_->answer({op, traits.name, arguments, /*is_recompute=*/false, no_name});
    lock.lock();
  }
  const bool keeps = is_keeping(*answer) && traits.can_be_kept();
  const bool applies = traits.is_mutable && !kept_.empty() && writes_to_kept(op, arguments);
  const bool may_get_name = rule_->looks_at_names() && traits.can_be_kept() && !is_packing;
  std::unique_ptr<CallRecord> record;
  if (keeps || may_get_name || applies) {
    record = std::make_unique<CallRecord>();
    describe(
        arguments, producers_,
        [this](const c10::StorageImpl* storage) {
          return storage == nullptr ? -1 : frame_.inputs().storages().number_of(storage);
        },
        *record);
  }
  // A view reads nothing; who reads the view is seen by the storage that it shares.
  if (!keeps && !applies && !traits.is_view) note_read(arguments);
  lock.unlock();

  std::optional<DrawMarks> before;
  if (record != nullptr && traits.is_random) before = marks();
  const StoragesOf given(arguments);
  op.callBoxed(&stack);
  if (before) record->draws = since(*before);
  const auto results = last(stack, op.schema().returns().size());

  if (applies) {
    record->is_kept = record->is_applied = true;
    lock.lock();
    operators_[n].calls[call] = std::move(record);
    return;
  }
  // Inference tensors cannot be saved.
  if (record != nullptr && (returns_argument(*record, results) || hold_inference(results))) {
    lock.lock();
    note_results(operators_[n], n, call, results, given);
    if (keeps)
      for (const ArgumentRecord& each : record->tensors)
        note_read(each.storage._unsafe_get_target());
    if (keeps && rule_->options().ask_again) {
      operators_[n].calls[call] = std::make_unique<CallRecord>();
      operators_[n].calls[call]->is_let_go = true;
    }
    return;
  }
  if (keeps) keep(*record, results, *answer, region);
  lock.lock();
  note_results(operators_[n], n, call, results, given);
  if (record == nullptr) return;
  if (keeps) add_places(n, call, *record);
  if (may_get_name) {
    bool is_first = true;
    for (const c10::IValue& result : results)
      visit_tensors_in(result, [&](const at::Tensor& tensor) {
        ResultRecord& each = record->results.emplace_back();
        if (storage_of(tensor) == nullptr || tensor.layout() != c10::kStrided || tensor.is_nested())
          return;
        each.storage = weak_storage_of(tensor);
        each.dtype = tensor.scalar_type();
        each.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
        each.strides.assign(tensor.strides().begin(), tensor.strides().end());
        each.offset = tensor.storage_offset();
        if (!std::exchange(is_first, false)) each.held = tensor.tensor_data();
      });
    if (record->results.size() > 1) holding_.push_back({n, call, 0, 0});
  }
  operators_[n].calls[call] = std::move(record);
  if (holding_.size() >= sweep_interval)
    std::erase_if(holding_, [this](const Place& place) {
      CallRecord& held = *operators_[place.op].calls[place.call];
      const bool is_over = held.results.front().storage.expired();
      if (is_over)
        for (ResultRecord& each : held.results) each.held.reset();
      return is_over;
    });
}

// Note [Writing to a kept result]
// LibTorch's own composites write in place to what an operator inside them made: `linear` may be `mm`
// and then `add_` of the bias. If nothing that a recompute runs has read the result before, it is kept
// as written, and recomputes run neither operator. Otherwise its call is not kept after all. What a
// user writes, through a tensor that shares the version counter, is an error in the recompute
// (SelectiveMutation), except for operators that make blank tensors, which are made to be filled. A
// backward inside the region writes to what its own formulas made: no user can help that, and the
// call is simply not kept.
bool Selection::writes_to_kept(const c10::OperatorHandle& op,
                               c10::ArrayRef<c10::IValue> arguments) {
  const auto& declared = op.schema().arguments();
  bool stays = true;
  c10::SmallVector<Place, 1> written;
  for (std::size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].alias_info() == nullptr || !declared[i].alias_info()->isWrite()) continue;
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      const c10::StorageImpl* const storage = storage_of(tensor);
      const auto found = storage == nullptr ? kept_.end() : kept_.find(storage);
      if (found == kept_.end()) {
        stays = false;
        return;
      }
      const OpRecord& maker = operators_[found->second.op];
      const CallRecord& call = *maker.calls[found->second.call];
      const KeptTensor& kept = call.kept[found->second.result].tensors[found->second.tensor];
      if (kept.shares_version_with(tensor) && !maker.traits->is_blank) {
        stays = false;
        return note_written(found->second);
      }
      const auto read = is_read_.find(storage);
      stays = stays && i == 0 && !maker.traits->is_blank && !kept.is_elsewhere() &&
              (read == is_read_.end() || !read->second);
      written.push_back(found->second);
    });
  }
  // What is returned in the recompute is the argument that was written.
  stays = stays && op.schema().returns().size() == 1 && !is_made_by(op, 0);
  if (stays && !written.empty()) return true;
  for (const Place& place : written) let_go(place);
  return false;
}

void Selection::let_go(const Place& place) {
  CallRecord& record = *operators_[place.op].calls[place.call];
  if (!record.is_kept) return;
  for (const KeptResult& result : record.kept)
    for (const KeptTensor& tensor : result.tensors) kept_.erase(tensor.storage());
  record.kept.clear();
  record.is_kept = false;
  record.is_let_go = rule_->options().ask_again;
  --num_kept_;
  for (const ArgumentRecord& each : record.tensors) note_read(each.storage._unsafe_get_target());
}

// Whether the call that made `value` could be kept.
bool Selection::keep_named(const at::Tensor& value, CheckpointPolicy answer,
                           const detail::Scope& region) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto made = producers_.find(value);
  if (!made || made->producer.is_stretch || !made->producer.is_known || made->num_changes > 0)
    return false;
  const Producer found = made->producer;
  CallRecord* const record = operators_[found.op].calls[found.call].get();
  if (record == nullptr || found.output >= record->results.size()) return false;
  if (record->is_kept) return true;
  if (operators_[found.op].op.schema().returns().size() != record->results.size()) return false;
  std::vector<c10::IValue> results;
  for (const ResultRecord& each : record->results) {
    if (each.dtype == c10::ScalarType::Undefined) {
      if (storage_of(each.held) != nullptr) return false;
      results.emplace_back(at::Tensor());
      continue;
    }
    c10::intrusive_ptr<c10::StorageImpl> storage = each.storage.lock();
    if (!storage) return false;
    if (each.held.defined()) {
      results.emplace_back(each.held);
      continue;
    }
    // The object may be gone, behind a view of it; what it was can be built again.
    at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(storage)), value.key_set(), c10::scalarTypeToTypeMeta(each.dtype));
    result.unsafeGetTensorImpl()->set_sizes_and_strides(each.sizes, each.strides, each.offset);
    result.unsafeGetTensorImpl()->set_version_counter(
        value.unsafeGetTensorImpl()->version_counter());
    results.emplace_back(std::move(result));
  }
  lock.unlock();
  keep(*record, results, answer, region);
  lock.lock();
  add_places(found.op, found.call, *record);
  return true;
}

void Selection::let_go(const at::Tensor& value) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto made = producers_.find(value);
  if (!made || made->producer.is_stretch || !made->producer.is_known) return;
  if (operators_[made->producer.op].calls[made->producer.call] != nullptr)
    let_go(Place{made->producer.op, made->producer.call, 0, 0});
}

void Selection::name(const at::Tensor& value, const std::string& name,
                     const detail::Scope& region) {
  const int64_t number = begin_stretch();
  rule_->see(name);
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("remat::checkpoint_name", "");
  const std::vector<c10::IValue> arguments{value, name};
  const CheckpointPolicy answer =
      rule_->answer({op, "remat::checkpoint_name", arguments, /*is_recompute=*/false, name});
  if (answer == CheckpointPolicy::MustRecompute) return let_go(value);
  if (!is_keeping(answer) || keep_named(value, answer, region)) return;
  auto itself = std::make_shared<StretchRecord>();
  itself->type = &typeid(at::Tensor);
  itself->is_name = true;
  itself->values.push_back(keep_value(value, number, 0, region, where_for(answer)));
  itself->values.back().history = KeptHistory{KeptHistory::Twin::Argument, 0};
  itself->is_kept = true;
  keep_stretch(number, std::move(itself));
}

StretchRecord::Value Selection::keep_value(const at::Tensor& value, int64_t number,
                                           std::size_t output, const detail::Scope& region,
                                           KeptWhere where) {
  StretchRecord::Value kept{KeptTensor(value, region, hooks(), where), grad_role_of(value)};
  if (rule_ == nullptr || !value.defined()) return kept;
  // The recompute gets another tensor, which must have the origin that this one has.
  std::lock_guard<std::mutex> lock(mutex_);
  if (!producers_.find(value))
    producers_.add(value, {.call = static_cast<uint32_t>(number),
                           .output = static_cast<uint32_t>(output),
                           .is_factory = true,
                           .is_stretch = true});
  kept.made = producers_.find(value);
  return kept;
}

int64_t Selection::begin_stretch() {
  frame_.break_group();
  std::lock_guard<std::mutex> lock(mutex_);
  stretches_.emplace_back();
  return static_cast<int64_t>(stretches_.size()) - 1;
}

void Selection::keep_stretch(int64_t number, std::shared_ptr<StretchRecord> stretch) {
  std::lock_guard<std::mutex> lock(mutex_);
  stretches_[static_cast<std::size_t>(number)] = std::move(stretch);
}

void Selection::add_to(recording::RegionSums& sums) const {
  const auto add = [&](const KeptTensor& kept) {
    sums.saved_bytes += kept.num_bytes();
    sums.offloaded += kept.is_on_cpu_instead() ? 1 : 0;
    sums.offload_fallbacks += kept.could_not_move() ? 1 : 0;
  };
  for (const OpRecord& op : operators_)
    for (const auto& call : op.calls) {
      if (call == nullptr) continue;
      for (const KeptResult& result : call->kept)
        for (const KeptTensor& kept : result.tensors) add(kept);
    }
  for (const auto& stretch : stretches_)
    if (stretch != nullptr)
      for (const StretchRecord::Value& value : stretch->values) add(value.tensor);
}

bool Selection::keeps(const c10::StorageImpl* storage) const {
  if (kept_.find(storage) != kept_.end()) return true;
  // Of a stretch only what waits elsewhere: in its place it may be a captured tensor's too, which is
  // looked at as such.
  return std::any_of(stretches_.begin(), stretches_.end(), [storage](const auto& stretch) {
    return stretch != nullptr && std::any_of(stretch->values.begin(), stretch->values.end(),
                                             [storage](const auto& value) {
                                               return value.tensor.is_elsewhere() &&
                                                      value.tensor.storage() == storage;
                                             });
  });
}

void Selection::end_naming() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Place& place : holding_)
    for (ResultRecord& each : operators_[place.op].calls[place.call]->results) each.held.reset();
  holding_ = {};
}

void Selection::settle() {
  std::lock_guard<std::mutex> lock(mutex_);
  // Who reads a shell ends the recompute with an exception, which a noexcept function lets none out.
  const bool may_have_shells = frame_.body().can_be_stopped();
  for (const auto& [storage, place] : kept_) {
    const auto read = is_read_.find(storage);
    operators_[place.op].calls[place.call]->kept[place.result].tensors[place.tensor].settle(
        !may_have_shells || (read != is_read_.end() && read->second));
  }
  kept_ = {};  // clear() would keep the room
  is_read_ = {};
  producers_.clear();
  slot_producers_.clear();
  for (OpRecord& op : operators_)
    for (auto& call : op.calls) {
      if (call == nullptr) continue;
      if (call->is_kept)
        call->results.clear();
      else if (call->is_let_go) {
        call = std::make_unique<CallRecord>();
        call->is_let_go = true;
      } else
        call.reset();
    }
  is_settled_ = true;
}

void Selection::run_shells_for_real() {
  const auto locked = lock();
  for (OpRecord& op : operators_)
    for (auto& call : op.calls)
      if (call != nullptr && call->has_shells()) call->runs_for_real = true;
}

}  // namespace remat
