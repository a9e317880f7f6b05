// The recording of operators in the scope of a budget.

#include <ATen/Context.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "lib/base/byte_hash.h"
#include "lib/base/error.h"
#include "lib/budget/budget_scope.h"
#include "lib/budget/cost_table.h"
#include "lib/budget/kinds.h"
#include "lib/budget/room.h"
#include "lib/budget/runtime.h"
#include "lib/budget/settings.h"
#include "lib/budget/storages.h"
#include "lib/budget/trial.h"
#include "lib/budget/versions.h"
#include "lib/frame/layers.h"
#include "lib/rng/device_rng.h"
#include "lib/rng/draws.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/engine.h"
#include "lib/selective/call_record.h"
#include "lib/selective/dispatch.h"

namespace remat::budget {

namespace {

uint64_t hash_of_call(const OpTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  uint64_t hash = combine(odd_multiplier, traits.name_number);
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for (const int64_t size : tensor.sizes()) hash = combine(hash, static_cast<uint64_t>(size));
    hash = combine(hash, static_cast<uint64_t>(tensor.scalar_type()) + (tensor.is_cpu() ? 0 : 256));
  });
  for (const c10::IValue& each : arguments) {
    if (each.isInt()) hash = combine(hash, static_cast<uint64_t>(each.toInt()));
    if (each.isIntList())
      for (const int64_t number : each.toIntList())
        hash = combine(hash, static_cast<uint64_t>(number));
  }
  return hash;
}

/// Returns the accelerator's device on which a call works; nothing for a call on the CPU.
std::optional<c10::Device> far_device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    if (tensor.defined() && is_accelerator(tensor.device())) found = tensor.device();
  });
  for (const c10::IValue& each : arguments)
    if (each.isDevice() && is_accelerator(each.toDevice())) found = each.toDevice();
  if (found.has_value() && !found->has_index())
    found = c10::impl::VirtualGuardImpl(found->type()).getDevice();
  return found;
}

/// Returns the generator from which a random call draws.
at::Generator generator_of(c10::ArrayRef<c10::IValue> arguments,
                           const std::optional<c10::Device>& far) {
  for (const c10::IValue& each : arguments)
    if (each.isGenerator() && each.toGenerator().defined()) return each.toGenerator();
  return at::globalContext().defaultGenerator(far.value_or(c10::kCPU));
}

bool is_generator_ours_to_copy(c10::ArrayRef<c10::IValue> arguments,
                               const std::optional<c10::Device>& far) {
  return std::all_of(arguments.begin(), arguments.end(), [&](const c10::IValue& each) {
    return !each.isGenerator() || !each.toGenerator().defined() ||
           as_cpu_generator(each.toGenerator()) != nullptr ||
           (far.has_value() && each.toGenerator().device() == *far);
  });
}

CpuRngPosition position_of_default() {
  at::CPUGeneratorImpl& generator = default_cpu_generator();
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  return position_of(generator);
}

c10::Stream stream_of(c10::Device far) {
  return c10::impl::VirtualGuardImpl(far.type()).getStream(far);
}

void wait_for(const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(stream);
  event.synchronize();
}

bool is_whole(const at::Tensor& tensor) { return tensor.nbytes() == tensor.storage().nbytes(); }

/// Returns whether a call with these arguments can run again with the same results.
bool can_be_recorded(const Kind& kind, Runtime& runtime, c10::ArrayRef<c10::IValue> arguments,
                     const std::optional<c10::Device>& far) {
  if (!kind.can_run_again || c10::InferenceMode::is_enabled()) return false;
  // Autograd saves results of backward only if it makes a graph of them.
  // See also Note [When nothing is saved].
  if (!c10::GradMode::is_enabled() && (seam::graph_task_id() >= 0 || !runtime.has_saved()))
    return false;
  bool can = true;
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    // Foreign memory can change unseen before a rerun.
    can = can && (!tensor.defined() || ((tensor.is_cpu() || far.has_value()) && is_plain(tensor) &&
                                        is_memory_of_torch(*storage_of(tensor))));
  });
  if (!can || !is_generator_ours_to_copy(arguments, far)) return false;
  if (!far.has_value()) return true;
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  can = runtime.is_own(stream_of(*far));
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_cpu())
      can = can && runtime.is_own(stream_of(tensor.device()));
  });
  return can;
}

/// One call of an operator, from its arguments to its record.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const OpTraits& traits, const Kind& kind, Runtime& runtime,
       uint64_t hash, const std::optional<c10::Device>& far)
      : op_(op), traits_(traits), kind_(kind), runtime_(runtime), far_(far), hash_(hash) {}
  /// If `end` was not called, the operator has thrown, and may have written before.
  ~Call() {
    if (!written_.empty() || !hidden_.empty()) {
      Dead dead;
      const std::lock_guard<std::mutex> lock(Graph::get().mutex());
      forget(written_, dead);
      forget(hidden_, dead);
    }
    give_back();
  }
  Call& operator=(Call&&) = delete;

  void begin(const torch::jit::Stack& stack, bool can);
  bool has_drawn_unseen();
  void end(const torch::jit::Stack& stack, float seconds);
  bool is_recorded() const { return record_ != nullptr; }

 private:
  void keep_old_content(Value& source);
  using Tensors = c10::SmallVector<at::Tensor, 1>;
  /// Adds a tensor, unless one with its storage is there.
  static void add_storage(Tensors& to, const at::Tensor& tensor) {
    if (!tensor.defined() || storage_of(tensor) == nullptr) return;
    const bool is_known = std::any_of(to.begin(), to.end(), [&](const at::Tensor& each) {
      return storage_of(each) == storage_of(tensor);
    });
    if (!is_known) to.push_back(tensor);
  }
  /// Forgets the values of storages whose new contents cannot be made again.
  void forget(Tensors& written, Dead& dead) {
    for (const at::Tensor& each : written) {
      Graph::get().forget_written(*storage_of(each), runtime_, dead);
      if (Value* const source = Graph::get().value_at(*storage_of(each), dead)) {
        source->note_version(each);
        note_written(each);
      }
    }
    written.clear();
  }
  /// Makes sure that dropped values do not need the old content of a storage.
  void prepare_write(Value& source, c10::SmallVector<Value*, 1>& to_copy, Dead& dead) {
    Graph& graph = Graph::get();
    source.own();
    owned_.push_back(&source);
    if (source.is_needed())
      to_copy.push_back(&source);
    else
      graph.settle_readers(source, dead);
  }
  bool is_written(const at::Tensor& tensor) const {
    return std::any_of(written_.begin(), written_.end(), [&](const at::Tensor& each) {
      return storage_of(each) == storage_of(tensor);
    });
  }
  void give_back() {
    if (owned_.empty() && record_ == nullptr) return;
    Dead dead;
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    if (record_ != nullptr) Graph::get().discard(record_.release(), dead);
    for (Value* const each : owned_) Graph::get().disown(*each, dead);
    owned_.clear();
  }

  const c10::OperatorHandle& op_;
  const OpTraits& traits_;
  const Kind kind_;
  Runtime& runtime_;
  const std::optional<c10::Device>& far_;
  std::unique_ptr<Record> record_;
  c10::SmallVector<Value*, 4> owned_;
  Tensors written_;  // arguments written to, one of each storage
  Tensors hidden_;   // arguments that the schema calls read-only: see Note [Writes past the schema]
  uint64_t hash_;    // 0: not yet computed
  std::optional<NoteDraw> draw_;
  CpuRngPosition position_{};  // of the generator before the call
  std::optional<StoragesOf> given_;
  std::optional<CpuRngPosition> cpu_at_{};  // where the CPU's generator stood at a draw on a device
};

// Note [Statistics of a rerun]
// A batch norm in training updates running statistics, which its schema does not declare. Its
// results do not depend on them. A rerun passes no statistics, so they are updated once.
bool is_hidden_write(const OpTraits& traits, std::size_t argument) {
  constexpr std::size_t running_mean = 3, running_var = 4;
  return traits.is_batch_norm && (argument == running_mean || argument == running_var);
}

void Call::begin(const torch::jit::Stack& stack, bool can) {
  const auto arguments = arguments_of(op_, stack);
  given_.emplace(arguments);
  if (traits_.is_mutable)
    visit_written(op_, arguments, [&](const at::Tensor& tensor) { add_storage(written_, tensor); });
  const bool hides_writes = traits_.has_side_effect(arguments);
  if (hides_writes || kind_.may_write)
    for (std::size_t i = 0; i < arguments.size(); ++i)
      if (kind_.may_write || is_hidden_write(traits_, i))
        visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
          if (tensor.defined() && storage_of(tensor) != nullptr && !is_written(tensor))
            add_storage(hidden_, tensor);
        });
  Graph& graph = Graph::get();
  c10::SmallVector<Value*, 1> to_copy;
  {
    Dead dead;
    const std::lock_guard<std::mutex> lock(graph.mutex());
    for (const at::Tensor& each : written_) {
      Value* const old = graph.value_at(*storage_of(each), dead);
      if (old != nullptr && old->is_blank() && !(kind_.fills && is_whole(each))) {
        old->own();
        owned_.push_back(old);
        graph.become_source(*old, dead);
      }
      // The old content of a source cannot be made again, so the new content is a source, too.
      if (old == nullptr || old->is_source()) can = false;
      if (old != nullptr && old->is_source() && old->reads != nullptr)
        prepare_write(*old, to_copy, dead);
    }
    for (const at::Tensor& each : hidden_) {
      Value* const old = graph.value_at(*storage_of(each), dead);
      if (old != nullptr && old->is_source() && old->reads != nullptr)
        prepare_write(*old, to_copy, dead);
    }
    if (can) {
      record_ = std::make_unique<Record>(op_, traits_);
      c10::SmallVector<Value*, 4> read;
      const auto reference = [&](const at::Tensor& tensor) {
        Geometry& geometry = record_->tensors.emplace_back();
        if (!tensor.defined()) return;
        geometry = Geometry(tensor);
        Value& value = graph.value_or_source(tensor, runtime_, dead);
        geometry.value = &value;
        value.last_use = runtime_.clock;
        value.own();
        owned_.push_back(&value);
        if (value.is_blank() && !is_written(tensor)) graph.become_source(value, dead);
        read.push_back(&value);
      };
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        const c10::IValue& value = arguments[i];
        Argument& argument = record_->arguments.emplace_back();
        if (hides_writes && is_hidden_write(traits_, i)) continue;
        const auto first = static_cast<int32_t>(record_->tensors.size());
        if (value.isTensor()) {
          const at::Tensor& tensor = value.toTensor();
          // A number as a tensor: no other code can write to it.
          if (tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
            argument.plain = value;
            continue;
          }
          argument.first = first;
          argument.count = 1;
          reference(tensor);
        } else if (value.isTensorList() || value.isOptionalTensorList() ||
                   (value.isList() && value.toListRef().size() > 0 &&
                    value.toListRef()[0].isTensor())) {
          argument.first = first;
          argument.is_list = true;
          argument.is_list_of_optional = value.isOptionalTensorList();
          for (const c10::IValue& each : value.toListRef())
            reference(each.isTensor() ? each.toTensor() : at::Tensor());
          argument.count = static_cast<int32_t>(record_->tensors.size()) - first;
        } else {
          argument.plain = value;
        }
      }
      record_->add_reads(read);
      for (const at::Tensor& each : written_)
        record_->written.push_back(graph.value_at(*storage_of(each), dead));
    }
  }
  for (Value* const each : to_copy) keep_old_content(*each);
  if (record_ == nullptr) {
    if (Trial::get().counts_work && hash_ == 0) hash_ = hash_of_call(traits_, arguments);
    return;
  }
  record_->grad_mode = c10::GradMode::is_enabled();
  record_->settings = settings_now();
  if (hash_ == 0) hash_ = hash_of_call(traits_, arguments);
  record_->call = hash_;
  record_->of_device.is_far = far_.has_value();
  if (!traits_.is_random) return;
  const at::Generator drawn_from = generator_of(arguments, far_);
  if (at::CPUGeneratorImpl* const generator = as_cpu_generator(drawn_from)) {
    record_->generator = c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(generator);
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    position_ = position_of(*generator);
    draw_.emplace(*generator);
  } else {
    record_->of_device.generator = drawn_from;
    record_->of_device.random = DeviceRng::present(drawn_from).state;
    cpu_at_ = position_of_default();
  }
}

// Some kernels (`randperm`) draw past the operators that random numbers go through. A rerun cannot
// redirect them to another generator. A device without a kernel of its own has the CPU draw in this
// way.
bool Call::has_drawn_unseen() {
  if (cpu_at_.has_value()) return *cpu_at_ != position_of_default();
  if (!draw_) return false;
  record_->random = draw_->state();
  if (record_->random != nullptr) return false;
  auto& generator = static_cast<at::CPUGeneratorImpl&>(*record_->generator);
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  return position_of(generator) != position_;
}

// Copies the content of a source that a dropped value needs, before the operator writes to the
// source.
void Call::keep_old_content(Value& source) {
  Graph& graph = Graph::get();
  c10::Storage content;
  {
    const std::lock_guard<std::mutex> lock(graph.mutex());
    content = source.content();
  }
  if (!content) return;
  c10::Storage copy = copy_of(content);
  Dead dead;
  const std::lock_guard<std::mutex> lock(graph.mutex());
  graph.move_content(source, std::move(copy), dead);
}

void Call::end(const torch::jit::Stack& stack, float seconds) {
  const auto results = results_of(op_, stack);
  Graph& graph = Graph::get();
  NewStorages made;
  const bool can = record_ != nullptr && !has_drawn_unseen();
  draw_.reset();
  if (can) made = new_storages(results, *given_);
  Dead dead;
  const std::lock_guard<std::mutex> lock(graph.mutex());
  forget(hidden_, dead);
  if (Trial& trial = Trial::get(); trial.counts_work) {
    const float cost = CostTable::get().cost(hash_, seconds);
    trial.work.called_s += cost;
    if (record_ == nullptr) runtime_.clock += cost;
  }
  if (!can || (made.empty() && written_.empty())) return forget(written_, dead);
  Record* const record = record_.release();
  const uint64_t number = record->number = graph.next_number();
  record->is_blank = kind_.is_blank;
  record->cost = CostTable::get().cost(hash_, seconds);
  runtime_.clock += record->cost;
  runtime_.bounds().note_operator();
  for (const at::Tensor& each : written_) {
    c10::StorageImpl& storage = *storage_of(each);
    if (!is_end_known(storage)) {  // then the storage gets no value that can be dropped
      graph.forget_written(storage, runtime_, dead);
      record->results.push_back(nullptr);
      continue;
    }
    Value* const old = graph.value_at(storage, dead);  // the record owns it, if it reads it
    if (old != nullptr) old->own();
    graph.forget(storage, dead);
    Value& now = graph.make(storage, record, runtime_);
    if (old != nullptr && !old->saves.empty()) {
      runtime_.hold(now, each.storage());
      graph.move_saves(*old, now, dead);
    }
    if (old != nullptr) graph.disown(*old, dead);
    now.note_version(each);
    note_written(each);
  }
  written_.clear();
  for (const c10::Storage& each : made) {
    graph.forget(*each.unsafeGetStorageImpl(), dead);
    if (is_end_known(*each.unsafeGetStorageImpl()))
      graph.make(*each.unsafeGetStorageImpl(), record, runtime_);
    else
      record->results.push_back(nullptr);
  }
  visit_tensors_in(results, [&](const at::Tensor& tensor) {
    const auto* const storage = tensor.defined() ? storage_of(tensor) : nullptr;
    for (const c10::Storage& each : made)
      if (storage == each.unsafeGetStorageImpl())
        if (Value* const value = graph.value_at(*storage_of(tensor), dead))
          value->note_version(tensor);
  });
  if (record->num_owners == 0) graph.discard(record, dead);
  // A loop that saves nothing must not record without end. See Note [When nothing is saved].
  graph.look_for_ends(dead);
  constexpr uint64_t many = 4'096;
  if (number % many == 0 && !runtime_.has_saved()) graph.cut(runtime_, dead);
}

/// Returns whether the cost of the call is still learned.
bool is_learning(uint64_t call) {
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  return CostTable::get().is_learning(call);
}

/// Runs an operator of this thread, and records it if it can run again.
void run_in_budget(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const BudgetScope* const scope = BudgetScope::innermost();
  if (scope == nullptr) return remat::run_operator(op, stack);
  settle_versions();
  const OpTraits& traits = traits_of(op);
  const Kind& kind = kind_of(op, traits);
  const bool is_in_region = detail::innermost_region() != nullptr;
  if (is_in_region && !traits.is_mutable && !kind.may_write &&
      !traits.has_side_effect(arguments_of(op, stack)))
    return remat::run_operator(op, stack);
  if (kind.is_view_only) {
    if (kind.counts_version)
      visit_written(op, arguments_of(op, stack), [](const at::Tensor& tensor) {
        if (tensor.defined() && is_plain(tensor)) note_written(tensor);
      });
    if (is_in_region) return remat::run_operator(op, stack);
    const seam::AtKernel at_kernel(traits.keys_met);
    return op.callBoxed(&stack);
  }
  Runtime& runtime = scope->runtime();
  // See Note [Room on accelerators].
  std::optional<c10::Device> far;
  std::optional<RoomForCall> room;
  uint64_t hash = 0;
  if (!runtime.bounds().far().empty()) {
    const auto arguments = arguments_of(op, stack);
    far = far_device_of(arguments);
    hash = hash_of_call(traits, arguments);
    if (far.has_value() && is_capturing(stream_of(*far)))
      throw_unsupported("a device graph was captured inside a budget",
                        "a replay of the graph bypasses the operators that a budget records",
                        "capture the graph outside of the BudgetGuard");
    room.emplace(runtime, hash);
  }
  Call call(op, traits, kind, runtime, hash, far);
  call.begin(stack, !is_in_region && can_be_recorded(kind, runtime, arguments_of(op, stack), far));
  // The time of a call on an accelerator is known only if the host waits for it.
  const bool is_waited_for = far.has_value() && call.is_recorded() && is_learning(hash);
  if (is_waited_for) wait_for(stream_of(*far));
  const auto start = std::chrono::steady_clock::now();
  if (is_in_region) {
    remat::run_operator(op, stack);
  } else {
    const seam::AtKernel at_kernel(traits.keys_met);
    op.callBoxed(&stack);
  }
  if (is_waited_for) wait_for(stream_of(*far));
  const std::chrono::duration<float> taken = std::chrono::steady_clock::now() - start;
  if (room.has_value()) room->end();
  call.end(stack, taken.count());
  if (runtime.bounds().has_movers()) runtime.move_ahead();
}

[[maybe_unused]] const bool runs_in_budgets = (layers.run_in_budget = run_in_budget, true);

}  // namespace

}  // namespace remat::budget
