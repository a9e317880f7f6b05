#include "lib/selective/replay.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "lib/base/planted_fault.h"
#include "lib/frame/inputs.h"
#include "lib/frame/mismatch.h"
#include "lib/scope/packing.h"
#include "lib/scope/saving_input.h"
#include "lib/seam/unseen.h"
#include "lib/seam/variable_hooks.h"

namespace remat {

namespace {

/// Makes the recompute pass over the draws of an operator that does not run.
void skip(Frame& frame, const DrawSkips& draws) {
  if (is_planted(Fault::KeptDraws)) return;
  const auto logs = frame.surroundings().draw_logs();
  detail::RegionScope* const scope = detail::innermost_region();
  DrawSource* const source = scope == nullptr ? nullptr : scope->draws();
  for (std::size_t i = 0; source != nullptr && i < std::min(draws.logs.size(), logs.size()); ++i)
    if (DrawReplay* const replay = source->draw_replay(logs[i]->generator()))
      replay->skip(draws.logs[i]);
  DeviceRng::set(draws.others);
}

/// Gives the tensors of the recompute the contents that forward's operator wrote. Its results are
/// the first argument again, or forward's own.
void write_again(const CallRecord& record, const c10::IValue& first, torch::jit::Stack& stack,
                 c10::function_ref<at::Tensor(const KeptTensor&)> restore) {
  std::size_t number = 0;
  visit_tensors_in(first, [&](const at::Tensor& tensor) {
    const at::Tensor contents = restore(record.kept.front().tensors[number++]);
    if (!tensor.defined() || tensor.is_alias_of(contents)) return;
    const Unseen unseen;  // like the operator, it does not count as a change
    at::Tensor(tensor).copy_(contents);
  });
  for (std::size_t i = 1; i < record.kept.size(); ++i)
    stack.push_back(record.kept[i].plain.isNone() ? first : record.kept[i].plain);
}

}  // namespace

Replay::Replay(Frame& frame, const KeptRecord& record, Filler& filler,
               const std::vector<at::Tensor>& inputs)
    : frame_(frame), filler_(filler), record_(record), given_(inputs), roles_(frame.region()) {
  // Otherwise operators only arrive because of another region, or because forward saw them.
  looks_ = record_.rule != nullptr &&
           (!record_.is_settled || record_.num_kept > 0 || record_.rule->options().ask_again);
  for (std::size_t i = 0; i < inputs.size(); ++i)
    inputs_.emplace_back(memory_of(inputs[i]), frame.inputs().storage_number(i));
  c10::SmallVector<const KeptTensor*, 8> behind_hooks;
  {
    const auto forward = record_.lock();
    record_.visit_kept([&](const KeptTensor& each) {
      // A changed value is never returned, and its hooks might throw.
      if (each.is_behind_hooks() && !each.is_changed()) behind_hooks.push_back(&each);
    });
  }
  for (const KeptTensor* each : behind_hooks) fetched_.emplace(each, each->fetch());
}

at::Tensor Replay::restore(const KeptTensor& kept) {
  RecordedFrame* const recorded =
      is_recording() && kept.is_on_cpu_instead() ? frame_.recorded() : nullptr;
  std::optional<KeptTensor::Load> load;
  std::chrono::steady_clock::time_point begin;
  if (recorded != nullptr) begin = std::chrono::steady_clock::now();
  const auto found = fetched_.find(&kept);
  at::Tensor value =
      found == fetched_.end() ? kept.restore(&load) : kept.restore(found->second, &load);
  if (recorded != nullptr && load) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
    recorded->kept_was_loaded(load->bytes, load->was_begun, spent.count());
  }
  if (kept.is_elsewhere()) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    copies_.add(value);
  }
  return value;
}

bool Replay::is_copy(const c10::StorageImpl* storage) const {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return copies_.contains(storage);
}

Replay::Counted Replay::count(const c10::OperatorHandle& op) {
  int64_t number = record_.number_of(op);
  if (number < 0) {
    const auto known = std::find(strangers_.begin(), strangers_.end(), op);
    // This is far from the numbers of forward's operators, which may still grow.
    constexpr int64_t first_stranger = 1 << 20;
    number = first_stranger + (known - strangers_.begin());
    if (known == strangers_.end()) strangers_.push_back(op);
    sequence_.push_back(static_cast<uint32_t>(number));
    return {number, 0};
  }
  const auto index = static_cast<std::size_t>(number);
  if (counts_.size() <= index) counts_.resize(index + 1);
  sequence_.push_back(static_cast<uint32_t>(number));
  return {number, counts_[index]++};
}

int64_t Replay::before_inner(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue>) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto forward = record_.lock();
  return count(op).call;
}

void Replay::after_inner(const c10::OperatorHandle& op, int64_t call,
                         c10::ArrayRef<c10::IValue> results, const StoragesOf& given) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto forward = record_.lock();
  const int64_t number = record_.number_of(op);
  if (number < 0) return;
  visit_sources(op, traits_of(op), {static_cast<uint32_t>(number), static_cast<uint32_t>(call)},
                results, given, [this](const at::Tensor& tensor, const ValueSource& source) {
                  sources_.add(tensor, source);
                });
}

bool Replay::is_handed_out(const at::Tensor& tensor) const {
  const auto* const storage = storage_of(tensor);
  return storage != nullptr &&
         std::find(handed_out_.begin(), handed_out_.end(), storage) != handed_out_.end();
}

void Replay::finish(const std::exception_ptr& thrown) {
  if (thrown != nullptr) std::rethrow_exception(thrown);
  if (mismatch_ != nullptr) std::rethrow_exception(mismatch_);
}

void Replay::push_results(const CallRecord& record, torch::jit::Stack& stack, Counted counted) {
  const uint32_t op = static_cast<uint32_t>(counted.op);
  uint32_t output = 0;
  const CallRecord* from = &record;
  if (is_planted(Fault::KeptResult))
    for (const auto& other : record_.operators[op].calls)
      if (other != nullptr && other->kept.size() == record.kept.size()) from = other.get();
  std::vector<std::vector<at::Tensor>> restored;
  for (const KeptResult& kept : from->kept) {
    restored.emplace_back();
    for (const KeptTensor& each : kept.tensors) restored.back().push_back(restore(each));
  }
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (std::size_t i = 0; i < restored.size(); ++i) {
    const KeptResult& kept = from->kept[i];
    std::vector<at::Tensor>& tensors = restored[i];
    for (std::size_t j = 0; j < tensors.size(); ++j) {
      sources_.add(tensors[j], {op, counted.call, output++, false});
      if (const auto* storage = storage_of(tensors[j])) handed_out_.push_back(storage);
    }
    if (kept.is_tensor)
      stack.emplace_back(tensors.empty() ? at::Tensor() : std::move(tensors.front()));
    else if (kept.is_list)
      stack.emplace_back(std::move(tensors));
    else
      stack.push_back(kept.plain);
  }
}

void Replay::run_for_real(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                          Counted counted) {
  const OpTraits& traits = traits_of(op);
  const auto arguments = arguments_of(op, stack);
  if (traits.is_mutable && !handed_out_.empty())
    visit_written(op, arguments, [&](const at::Tensor& tensor) {
      if (is_handed_out(tensor))
        fail(CheckpointError::Kind::SelectiveMutation,
             fmt::format("the recompute wrote to a kept result ({}), and forward did not",
                         traits.name),
             "the recompute did not repeat forward, or forward wrote past the dispatcher",
             "do not keep a result that is changed in place");
    });
  if ((traits.kinds & OpKind::Collective) != 0) warn_of_collective(traits.name.c_str());
  const StoragesOf given(arguments);
  op.callBoxed(&stack);
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  visit_sources(op, traits, {static_cast<uint32_t>(counted.op), counted.call},
                results_of(op, stack), given,
                [this](const at::Tensor& tensor, const ValueSource& source) {
                  sources_.add(tensor, source);
                });
}

void Replay::run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                 const detail::RegionScope&, bool) {
  if (!looks_) return op.callBoxed(&stack);
  if (!go_on_after_mismatch([&] { answer(op, stack); })) op.callBoxed(&stack);
}

// Differences are found under locks and reported without them, since `raise` belongs to the
// binding. If no exception may unwind the function, the error is recorded, and thrown when the
// function has ended. Returns false after a mismatch.
template <class Attempt>
bool Replay::go_on_after_mismatch(Attempt&& attempt) {
  try {
    attempt();
    return true;
  } catch (const Mismatch& found) {
    try {
      throw_selective(frame_.region(), found.kind, found.fact, found.cause, found.advice,
                      found.lists, found.tensor, filler_.take_differences());
    } catch (...) {
      note_mismatch();
      if (frame_.region().body->can_be_stopped()) throw;
    }
    return false;
  }
}

void Replay::answer(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  torch::jit::Stack taken;  // dies after the locks: storages may run the user's deleters
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  std::unique_lock<SpinLock> forward = record_.lock();
  const Counted counted = count(op);
  const auto arguments = arguments_of(op, stack);
  const OpRecord* const known = static_cast<std::size_t>(counted.op) < record_.operators.size()
                                    ? &record_.operators[static_cast<std::size_t>(counted.op)]
                                    : nullptr;
  const CallRecord* record = known != nullptr && counted.call < known->calls.size()
                                 ? known->calls[counted.call].get()
                                 : nullptr;
  const bool is_let_go = record != nullptr && record->is_let_go;
  // Forward is still inside a backward, and has not reached this call.
  const bool is_ahead =
      !record_.is_settled && (known == nullptr || counted.call >= known->calls.size());
  if (record != nullptr && !record->is_kept) record = nullptr;
  if (record != nullptr && record->is_applied && !is_handed_out(arguments[0].toTensor()))
    record = nullptr;  // the tensor that it writes to was recomputed
  const PolicyRule& rule = *record_.rule;
  const OpTraits& traits = traits_of(op);
  bool wants_kept = record != nullptr;
  if (rule.options().ask_again && traits.can_be_kept() && !Packing::is_under_way()) {
    forward = {};
    lock.unlock();
    static const std::string no_name;
    wants_kept =
        is_keeping(rule.answer({op, traits.name, arguments, /*is_recompute=*/true, no_name}));
    lock.lock();
    wants_kept = wants_kept && !is_let_go && !is_ahead;
    if (wants_kept && record == nullptr)
      mismatch(op, counted, arguments, nullptr,
               "in the recompute the policy asked for a result that forward did not keep");
  } else if (record == nullptr && known != nullptr && counted.call >= known->calls.size() &&
             record_.is_settled &&
             std::any_of(known->calls.begin(), known->calls.end(),
                         [](const auto& call) { return call != nullptr && call->is_kept; })) {
    mismatch(op, counted, arguments, nullptr,
             fmt::format("forward made {} calls of it and kept results, but this one has no kept "
                         "result",
                         known->calls.size()));
  }
  if (!wants_kept) {
    forward = {};
    lock.unlock();
    return run_for_real(op, stack, counted);
  }
  check_arguments(*record, op, counted, arguments);
  if (record->is_changed()) {
    // Results of operators that read no tensor are often filled in place (ones().tril_()), and
    // their calls can run again.
    if (!rule.options().allow_cache_entry_mutation && !traits.is_factory && !record->is_preferred)
      fail(CheckpointError::Kind::SelectiveMutation,
           fmt::format("the result of {}, call {}, was kept and then changed in place", traits.name,
                       counted.call),
           "an in-place operator, in the region or after it, wrote to the kept tensor",
           "keep another result, use the out-of-place operator, or set "
           "SelectiveOptions::allow_cache_entry_mutation, which runs such a call again");
    forward = {};
    lock.unlock();
    return run_for_real(op, stack, counted);
  }
  if (record->draws != nullptr) skip(frame_, *record->draws);
  filler_.result_was_kept();
  if (record->is_applied) {  // Note [Writing to a kept result]
    taken = torch::jit::pop(stack, arguments.size() - 1);
    return;
  }
  taken = torch::jit::pop(stack, arguments.size());
  if (record->writes != nullptr) {
    forward = {};
    lock.unlock();
    return write_again(*record, taken.front(), stack,
                       [this](const KeptTensor& each) { return restore(each); });
  }
  if (!forward.owns_lock()) {
    lock.unlock();
    taken.clear();
  }
  push_results(*record, stack, counted);
}

const PinRecord* Replay::next_pin(const std::type_info& type, const at::Tensor* named) {
  const PinRecord* found = nullptr;
  return go_on_after_mismatch([&] { found = find_next_pin(type, named); }) ? found : nullptr;
}

const PinRecord* Replay::find_next_pin(const std::type_info& type, const at::Tensor* named) {
  filler_.end_operator();
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  const auto forward = record_.lock();
  const bool is_beyond = next_pin_ >= record_.pins.size();
  // Forward is still inside a backward before this call: later calls here are not checked.
  if (is_beyond && !record_.is_settled) return nullptr;
  if (is_beyond)
    fail(CheckpointError::Kind::SelectiveMismatch,
         "the recompute calls pin, checkpoint_name or save_region more often than forward",
         "the recompute did not repeat forward",
         "do not let these calls depend on anything that changes between forward and backward");
  const PinRecord* const pin = record_.pins[next_pin_++].get();
  if (pin == nullptr) return nullptr;
  if (*pin->type != type)
    fail(CheckpointError::Kind::SelectiveMismatch,
         fmt::format("call {} of pin, checkpoint_name or save_region differs from the one in "
                     "forward",
                     next_pin_ - 1),
         "the recompute did not repeat forward",
         "do not let these calls depend on anything that changes between forward and backward");
  for (const PinRecord::Value& each : pin->values)
    if (each.tensor.is_changed()) {
      // The value is recomputed, like a call whose result was changed.
      if (named != nullptr && pin->is_name && !each.tensor.shares_version_with(*named) &&
          record_.rule->options().allow_cache_entry_mutation) {
        if (each.made && !sources_.find(*named))
          sources_.add(*named, each.made->source, each.made->num_changes);
        return nullptr;
      }
      fail(CheckpointError::Kind::SelectiveMutation,
           "a value that pin or save_region keeps was changed in place after forward",
           "an in-place operator, in the region or after it, wrote to it",
           "pin a copy of it, or use the out-of-place operator", each.tensor.identity());
    }
  if (!pin->is_let_go) skip(frame_, pin->draws);
  return pin;
}

void Replay::fill_slots(const PinRecord& pin, FrameScope& region,
                        const std::vector<at::Tensor>& arguments) {
  SlotFiller* stops = nullptr;
  const auto tensor_in = [&](const InArgument& place) {
    at::Tensor tensor = place.of(arguments);
    if (!tensor.defined())
      fail(CheckpointError::Kind::SelectiveMismatch,
           "the recompute called save_region with arguments of other shapes or types than forward",
           "the function does not compute the same again",
           "make the arguments depend on nothing that changes between forward and backward");
    return tensor;
  };
  go_on_after_mismatch([&] {
    for (const PinRecord::Value& each : pin.values)
      if (each.argument) tensor_in(*each.argument);
    for (const InArgument& each : pin.saved_arguments) {
      const at::Tensor saved = tensor_in(each);
      const SavingInput saving(arguments[each.argument()], &stops);
      region.make_hooks()->call_pack_hook(saved);
    }
  });
  // A custom Function may have made the argument, which forbids a stop at its save.
  if (stops != nullptr || pin.is_let_go) filler_.stops().between_operators();
}

std::vector<at::Tensor> Replay::values_of(const PinRecord& pin, torch::autograd::edge_list sources,
                                          const std::vector<at::Tensor>& arguments) {
  const seam::OnlyNodeWatch unwatched(nullptr);  // kept values do not depend on changed operands
  for (const at::Tensor& each : given_)
    if (each.defined() && has_gradient_edge(each))
      sources.push_back(torch::autograd::impl::gradient_edge(each));
  std::vector<at::Tensor> values;
  for (const PinRecord::Value& each : pin.values) {
    const at::Tensor value = each.argument ? each.argument->of(arguments) : restore(each.tensor);
    values.push_back(value.defined() ? roles_.give(value, each.role, each.had_hooks, sources)
                                     : value);
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (each.made) sources_.add(values.back(), each.made->source, each.made->num_changes);
  }
  return values;
}

}  // namespace remat
