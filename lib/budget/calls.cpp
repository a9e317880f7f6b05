#include "lib/budget/calls.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "hooks/byte_hash.h"
#include "lib/budget/budget_scope.h"
#include "lib/budget/runtime.h"
#include "lib/budget/storages.h"
#include "lib/budget/versions.h"
#include "lib/observe/counted_memory.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/engine.h"
#include "lib/selective/call_record.h"
#include "lib/selective/dispatch.h"

namespace remat::budget {

namespace {

/// Properties of an operator that a budget needs beyond its traits.
struct Kind {
  bool can_run_again = false;   ///< LibTorch's own operator with a complete schema
  bool is_view_only = false;    ///< returns a view, or changes metadata only
  bool is_blank = false;        ///< returns unfilled memory
  bool fills = false;           ///< writes to an argument without reading it
  bool counts_version = false;  ///< moves the version of a tensor without changing its contents
};

Kind find_kind(const c10::OperatorHandle& op, const OpTraits& traits) {
  const std::string& name = op.operator_name().name;
  // It draws from the generator inside its kernel, so a rerun cannot give it another one.
  constexpr std::string_view draws_by_itself = "aten::randperm";
  Kind kind;
  // `resize_` may free the old data, which ends the value.
  kind.is_view_only = traits.is_passive || (traits.is_view && !traits.is_mutable) ||
                      op.hasTag(at::Tag::inplace_view);
  kind.counts_version = op.hasTag(at::Tag::inplace_view) && name.rfind("aten::set_", 0) != 0;
  kind.is_blank = name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
  const auto& declared = op.schema().arguments();
  kind.fills = traits.is_random || name == "aten::fill_" || name == "aten::zero_" ||
               name == "aten::copy_" ||
               std::any_of(declared.begin(), declared.end(),
                           [](const c10::Argument& each) { return each.is_out(); });
  kind.can_run_again =
      name.rfind("aten::", 0) == 0 && !kind.is_view_only && name.rfind(draws_by_itself, 0) != 0;
  return kind;
}

const Kind& kind_of(const c10::OperatorHandle& op, const OpTraits& traits) {
  thread_local std::vector<std::pair<bool, Kind>>
      by_name;  // traits and their numbers live as long as the process
  if (by_name.size() <= traits.name_number) by_name.resize(traits.name_number + 1);
  auto& [is_known, kind] = by_name[traits.name_number];
  if (!is_known) {
    kind = find_kind(op, traits);
    is_known = true;
  }
  return kind;
}

uint64_t hash_of_call(const OpTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  uint64_t hash = combine(odd_multiplier, traits.name_number);
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for (const int64_t size : tensor.sizes()) hash = combine(hash, static_cast<uint64_t>(size));
    hash = combine(hash, static_cast<uint64_t>(tensor.scalar_type()));
  });
  for (const c10::IValue& each : arguments)
    if (each.isInt()) hash = combine(hash, static_cast<uint64_t>(each.toInt()));
  return hash;
}

bool is_generator_ours_to_copy(c10::ArrayRef<c10::IValue> arguments) {
  return std::all_of(arguments.begin(), arguments.end(), [](const c10::IValue& each) {
    return !each.isGenerator() || !each.toGenerator().defined() ||
           as_cpu_generator(each.toGenerator()) != nullptr;
  });
}

at::CPUGeneratorImpl& generator_of(c10::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& each : arguments)
    if (each.isGenerator() && each.toGenerator().defined())
      return *as_cpu_generator(each.toGenerator());
  return default_cpu_generator();
}

/// Returns whether a call with these arguments can run again with the same results.
bool can_be_recorded(const Kind& kind, const Runtime& runtime,
                     c10::ArrayRef<c10::IValue> arguments) {
  if (!kind.can_run_again || c10::InferenceMode::is_enabled()) return false;
  // Autograd saves results of backward only if it makes a graph of them.
  // See also Note [When nothing is saved].
  if (!c10::GradMode::is_enabled() && (seam::graph_task_id() >= 0 || !runtime.has_saved()))
    return false;
  bool can = true;
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    // Foreign memory can change unseen before a rerun.
    can = can &&
          (!tensor.defined() || (is_plain(tensor) && is_cpu_memory_of_torch(*storage_of(tensor))));
  });
  return can && is_generator_ours_to_copy(arguments);
}

/// One call of an operator, from its arguments to its record.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const OpTraits& traits, const Kind& kind, Runtime& runtime)
      : op_(op), traits_(traits), kind_(kind), runtime_(runtime) {}
  ~Call() { give_back(); }
  Call& operator=(Call&&) = delete;

  void begin(const torch::jit::Stack& stack, bool can);
  void end(const torch::jit::Stack& stack, float seconds);

 private:
  void keep_old_content(Value& source);
  bool is_written(const at::Tensor& tensor) const {
    return std::any_of(written_.begin(), written_.end(), [&](const at::Tensor& each) {
      return storage_of(each) == storage_of(tensor);
    });
  }
  /// Adds a result. Returns false if the allocator does not announce the end of its storage: then
  /// the storage gets no value.
  bool add(c10::StorageImpl& storage, Record& record) {
    if (is_end_told(storage)) {
      Graph::get().make(storage, &record, runtime_);
      return true;
    }
    record.results.push_back(nullptr);
    return false;
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
  std::unique_ptr<Record> record_;
  c10::SmallVector<Value*, 4> owned_;
  c10::SmallVector<at::Tensor, 1> written_;  // arguments written to, one of each storage
  uint64_t hash_ = 0;
  std::optional<StoragesOf> given_;
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
    visit_written(op_, arguments, [&](const at::Tensor& tensor) {
      const auto* const storage = tensor.defined() ? storage_of(tensor) : nullptr;
      if (storage == nullptr) return;
      const bool is_known =
          std::any_of(written_.begin(), written_.end(),
                      [&](const at::Tensor& each) { return storage_of(each) == storage; });
      if (!is_known) written_.push_back(tensor);
    });
  // See Note [Statistics of a rerun].
  const bool hides_writes = traits_.has_side_effect(arguments);
  Graph& graph = Graph::get();
  c10::SmallVector<Value*, 1> to_copy;
  {
    Dead dead;
    const std::lock_guard<std::mutex> lock(graph.mutex());
    for (const at::Tensor& each : written_) {
      Value* const old = graph.value_at(*storage_of(each));
      if (old != nullptr && old->is_blank() && !kind_.fills) {
        graph.own(*old);
        owned_.push_back(old);
        graph.become_source(*old, dead);
      }
      // The old content of a source cannot be made again, so the new content is a source, too.
      if (old == nullptr || old->is_source()) can = false;
      if (old == nullptr || !old->is_source() || old->reads == nullptr) continue;
      graph.own(*old);
      owned_.push_back(old);
      if (graph.is_needed(*old))
        to_copy.push_back(old);
      else
        graph.settle_readers(*old, dead);
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
        graph.own(value);
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
      graph.add_reads(*record_, read);
      for (const at::Tensor& each : written_)
        record_->written.push_back(graph.value_at(*storage_of(each)));
    }
  }
  for (Value* const each : to_copy) keep_old_content(*each);
  if (record_ == nullptr) return;
  record_->grad_mode = c10::GradMode::is_enabled();
  hash_ = hash_of_call(traits_, arguments);
  if (!traits_.is_random) return;
  at::CPUGeneratorImpl& generator = generator_of(arguments);
  const std::lock_guard<std::mutex> lock(generator.mutex_);
  record_->random = state_of(generator);
  record_->generator = c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(&generator);
}

// The operator is about to write to a source that a dropped value needs.
void Call::keep_old_content(Value& source) {
  Graph& graph = Graph::get();
  c10::Storage content;
  {
    const std::lock_guard<std::mutex> lock(graph.mutex());
    content = Graph::content_of(source);
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
  if (record_ != nullptr) made = new_storages(results, *given_);
  Dead dead;
  const std::lock_guard<std::mutex> lock(graph.mutex());
  if (record_ == nullptr || (made.empty() && written_.empty())) {
    for (const at::Tensor& each : written_) graph.forget(*storage_of(each), dead);
    return;
  }
  Record* const record = record_.release();
  record->number = graph.next_number();
  record->is_blank = kind_.is_blank;
  record->cost = CostTable::get().cost(hash_, seconds);
  runtime_.clock += record->cost;
  runtime_.note_operator();
  for (const at::Tensor& each : written_) {
    graph.forget(*storage_of(each), dead);
    if (!add(*storage_of(each), *record)) continue;
    graph.value_at(*storage_of(each))->note_version(each);
    note_written(each);
  }
  for (const c10::Storage& each : made) {
    graph.forget(*each.unsafeGetStorageImpl(), dead);
    add(*each.unsafeGetStorageImpl(), *record);
  }
  visit_tensors_in(results, [&](const at::Tensor& tensor) {
    const auto* const storage = tensor.defined() ? storage_of(tensor) : nullptr;
    for (const c10::Storage& each : made)
      if (storage == each.unsafeGetStorageImpl())
        if (Value* const value = graph.value_at(*storage_of(tensor))) value->note_version(tensor);
  });
  if (record->num_owners == 0) graph.discard(record, dead);
  // A loop that saves nothing must not record without end. See Note [When nothing is saved].
  constexpr uint64_t many = 4'096;
  if (graph.num_records() % many == 0 && !runtime_.has_saved()) graph.cut(runtime_, dead);
}

}  // namespace

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const BudgetScope* const scope = BudgetScope::innermost();
  if (scope == nullptr) return remat::run_operator(op, stack);
  settle_versions();
  const OpTraits& traits = traits_of(op);
  const Kind& kind = kind_of(op, traits);
  const bool is_in_region = detail::innermost_region() != nullptr;
  if (is_in_region && !traits.is_mutable) return remat::run_operator(op, stack);
  if (kind.is_view_only) {
    if (kind.counts_version)
      visit_written(op, arguments_of(op, stack), [](const at::Tensor& tensor) {
        if (tensor.defined() && is_plain(tensor)) note_written(tensor);
      });
    const seam::AtKernel at_kernel(traits.keys_met);
    return op.callBoxed(&stack);
  }
  Call call(op, traits, kind, scope->runtime());
  call.begin(stack,
             !is_in_region && can_be_recorded(kind, scope->runtime(), arguments_of(op, stack)));
  const auto start = std::chrono::steady_clock::now();
  if (is_in_region) {
    remat::run_operator(op, stack);
  } else {
    const seam::AtKernel at_kernel(traits.keys_met);
    op.callBoxed(&stack);
  }
  const std::chrono::duration<float> taken = std::chrono::steady_clock::now() - start;
  call.end(stack, taken.count());
}

}  // namespace remat::budget
