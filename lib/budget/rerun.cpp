#include "lib/budget/rerun.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/invariant.h"
#include "lib/base/waiting.h"
#include "lib/budget/room.h"
#include "lib/budget/runtime.h"
#include "lib/budget/settings.h"
#include "lib/budget/storages.h"
#include "lib/budget/trial.h"
#include "lib/observe/recording.h"
#include "lib/rng/device_rng.h"
#include "lib/rng/draws.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/ready.h"
#include "lib/selective/call_record.h"

namespace remat::budget {

namespace {

/// The turns of reruns: one thread of the process at a time makes values again.
Turns& turns() {
  static auto* const all = new Turns;  // leaked: backwards may run in static destructors
  return *all;
}

/// An error about a rerun. It is thrown under the lock, and converted for a binding after the lock.
class RerunError final : public c10::Error {
 public:
  using Error::Error;
};

[[noreturn]] void throw_changed_source(const Record& record) {
  throw RerunError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str(
          "remat::BudgetGuard: an input of a dropped value has changed, so ", record.traits->name,
          " cannot run again.\n"
          "Cause: the budget did not see the write: it was done by another thread, after the end "
          "of the guard's scope, or past LibTorch's operators.\n"
          "Hint: write to the tensor inside the scope, or after the backward, or raise the "
          "budget."));
}

[[noreturn]] void throw_other_settings(const Record& record, uint32_t now) {
  throw RerunError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str("remat::BudgetGuard: ", difference_of_settings(record.settings, now),
               " has changed between forward and backward, so that ", record.traits->name,
               " could give other results when it runs again.\n"
               "Cause: the setting applies to the whole process, so a rerun cannot change it for "
               "itself.\n"
               "Hint: restore the setting before the backward, or raise the budget."));
}

[[noreturn]] void throw_other_results(const Record& record) {
  throw RerunError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str("remat::BudgetGuard: ", record.traits->name,
               " gave other results when it ran again (BudgetOptions::check_values).\n"
               "Cause: the operator is not deterministic, leaves bytes of its results unwritten, "
               "or has an input that was changed past LibTorch's operators.\n"
               "Hint: use a deterministic operator, or do not change its inputs before the "
               "backward."));
}

/// Transforms around a backward (`is_grads_batched`, `torch.func.vmap`), which reruns exclude.
constexpr c10::DispatchKeySet transform_keys({c10::DispatchKey::VmapMode,
                                              c10::DispatchKey::FuncTorchVmapMode,
                                              c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                              c10::DispatchKey::FuncTorchDynamicLayerBackMode});

/// The runtime whose values this thread makes again; or null.
thread_local const Runtime* rerun_of = nullptr;

/// Gives a device's generator the state of forward for its lifetime.
class FarDraws {
 public:
  FarDraws(const at::Generator& generator, const at::Tensor& state)
      : before_{DeviceRng::present(generator)} {
    DeviceRng::set({{generator, state}});
  }
  ~FarDraws() { DeviceRng::set(before_); }
  FarDraws& operator=(FarDraws&&) = delete;

 private:
  const std::vector<GeneratorState> before_;
};

/// Makes the streams of forward current for its lifetime. They wait for the streams that were
/// current before, and those wait for them at the end.
class OnOwnStreams {
 public:
  explicit OnOwnStreams(c10::ArrayRef<c10::Stream> own) {
    for (const c10::Stream& each : own) {
      const c10::Stream current = current_stream(each.device());
      if (current != each) before_.push_back(exchange(current, each));
    }
  }
  ~OnOwnStreams() {
    for (const c10::Stream& each : before_) exchange(current_stream(each.device()), each);
  }
  OnOwnStreams& operator=(OnOwnStreams&&) = delete;

 private:
  static c10::Stream exchange(const c10::Stream& current, const c10::Stream& next) {
    Ready ready(current);
    ready.record();
    ready.block(next);
    return c10::impl::VirtualGuardImpl(next.device_type()).exchangeStream(next);
  }
  c10::SmallVector<c10::Stream, 1> before_;
};

/// One rerun of a record. It owns the contents that the record reads.
class Rerun {
 public:
  Rerun(Record& record, const Runtime& runtime, Dead& dead);
  void run();
  /// Takes the results. The caller holds the lock.
  void end(Dead& dead);
  /// Returns the bytes of the contents made, and the device of the last one, after `end`.
  int64_t made_bytes() const { return made_bytes_; }
  c10::Device device() const { return device_; }

 private:
  c10::Storage storage_for(Value& value);

  Record& record_;
  struct Content {
    Value* value;
    c10::Storage storage;
    bool is_written = false, is_stolen = false;
  };
  c10::SmallVector<Content, 4> contents_;
  c10::SmallVector<c10::Storage, 2> made_;
  c10::SmallVector<c10::Stream, 1> streams_;
  int64_t made_bytes_ = 0;
  c10::Device device_ = c10::kCPU;
};

// The caller holds the lock and has locked the contents of all values that the record reads.
Rerun::Rerun(Record& record, const Runtime& runtime, Dead& dead) : record_(record) {
  const uint32_t settings = settings_now();
  if (settings != record.settings) throw_other_settings(record, settings);
  if (record.of_device.is_far) streams_ = runtime.own_streams();
  for (const Read& read : record_.reads) contents_.push_back({read.value, read.value->content()});
  for (Content& each : contents_) {
    Value& value = *each.value;
    each.is_written =
        std::find(record_.written.begin(), record_.written.end(), &value) != record_.written.end();
    if (!each.is_written || value.is_source() || !value.saves.empty() || value.num_locks > 1 ||
        each.storage.use_count() > 2)  // this object's and the budget's
      continue;
    bool is_needed = false;
    for (const Read* read = value.reads; read != nullptr; read = read->next)
      if (read->record != &record_)
        for (const Value* const result : read->record->results)
          is_needed = is_needed || (result != nullptr && !result->has_content());
    if (is_needed || !value.held) continue;
    each.is_stolen = true;
    Graph::get().forget(*each.storage.unsafeGetStorageImpl(), dead);
  }
  for (const Content& each : contents_)
    if (each.is_written && !each.is_stolen) ++Trial::get().work.copies;
}

void Rerun::run() {
  const OnOwnStreams on_own_streams(streams_);
  for (Content& each : contents_)
    if (each.is_written && !each.is_stolen) each.storage = copy_of(each.storage);
  const auto tensor_at = [&](int32_t place) {
    const Geometry& geometry = record_.tensors[static_cast<std::size_t>(place)];
    if (geometry.value == nullptr) return at::Tensor();
    const auto* const content =
        std::find_if(contents_.begin(), contents_.end(),
                     [&](const Content& each) { return each.value == geometry.value; });
    return geometry.on(content->storage);
  };
  torch::jit::Stack stack;
  stack.reserve(record_.arguments.size());
  for (const Argument& each : record_.arguments) {
    if (each.first < 0) {
      stack.push_back(each.plain);
    } else if (each.is_list_of_optional) {
      c10::List<std::optional<at::Tensor>> list;
      for (int32_t i = 0; i < each.count; ++i) {
        at::Tensor tensor = tensor_at(each.first + i);
        list.push_back(tensor.defined() ? std::optional<at::Tensor>(std::move(tensor))
                                        : std::nullopt);
      }
      stack.emplace_back(std::move(list));
    } else if (each.is_list) {
      c10::List<at::Tensor> list;
      for (int32_t i = 0; i < each.count; ++i) list.push_back(tensor_at(each.first + i));
      stack.emplace_back(std::move(list));
    } else {
      stack.emplace_back(tensor_at(each.first));
    }
  }
  const StoragesOf given(stack);
  std::optional<at::Generator> generator;
  std::optional<DrawsFrom> draws;
  if (record_.random != nullptr) {
    auto& original = static_cast<at::CPUGeneratorImpl&>(*record_.generator);
    generator = at::make_generator<at::CPUGeneratorImpl>();
    set_state(*generator->get<at::CPUGeneratorImpl>(), *record_.random);
    draws.emplace(*generator, original);
  }
  std::optional<FarDraws> far_draws;
  if (record_.of_device.random.defined())
    far_draws.emplace(record_.of_device.generator, record_.of_device.random);
  const at::AutoGradMode grad_mode(record_.grad_mode);
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(record_.traits->keys_met);
  const c10::impl::ExcludeDispatchKeyGuard below_transforms(transform_keys);
  record_.op.callBoxed(stack);
  made_.clear();
  for (const Value* const value : record_.written) {
    const auto* const content =
        std::find_if(contents_.begin(), contents_.end(),
                     [&](const Content& each) { return each.value == value; });
    made_.push_back(content->storage);
  }
  for (c10::Storage& each : new_storages(stack, given)) made_.push_back(std::move(each));
  contents_.clear();
}

void Rerun::end(Dead& dead) {
  Graph& graph = Graph::get();
  REMAT_INVARIANT(made_.size() == record_.results.size(), "{} made {} storages again, not {}",
                  record_.traits->name, made_.size(), record_.results.size());
  for (std::size_t i = 0; i < made_.size(); ++i) {
    Value* const value = record_.results[i];
    if (value == nullptr || value->has_content()) {
      dead.storages.push_back(std::move(made_[i]));
      continue;
    }
    if (value->hash != 0 && value->hash != hash_of(*made_[i].unsafeGetStorageImpl()))
      throw_other_results(record_);
    value->counter = c10::VariableVersion(c10::VariableVersion::DISABLED);
    value->is_rerun = value->saves.empty();
    value->last_use = value->runtime->clock;
    made_bytes_ += value->bytes;
    device_ = value->device;
    graph.set_content(*value, std::move(made_[i]));
  }
}

/// Makes the content of one value, and first the contents that its record reads. A loop replaces
/// recursion, since chains can be as long as a program.
///
/// Note [What a rerun keeps meanwhile]
/// A record's missing inputs are made before its present inputs are locked, the oldest first,
/// because it has the longest chain. So a long chain needs little more memory than its widest call.
/// A present input may be dropped meanwhile and is then made again, at most once, since inputs that
/// were made stay locked.
class Again {
 public:
  explicit Again(Value& wanted)
      : runtime_(*wanted.runtime),
        wanted_(wanted),
        outer_(std::exchange(rerun_of, wanted.runtime.get())) {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    if (!wanted.is_away()) push(wanted);
  }
  ~Again() {
    rerun_of = outer_;
    Dead dead;
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    while (!stack_.empty()) pop(dead);
    for (Value* const each : kept_) unlock(*each, dead);
  }
  Again& operator=(Again&&) = delete;
  void run();

 private:
  struct Step {
    Record* record;
    c10::SmallVector<Value*, 4> locked{};  // inputs of the record
  };
  void push(Value& value) {
    REMAT_INVARIANT(!value.is_source(), "the content of a source is gone");
    stack_.push_back({value.record});
  }
  void pop(Dead& dead) {
    for (Value* const each : stack_.back().locked) unlock(*each, dead);
    stack_.pop_back();
  }
  Value* prepare(Dead& dead);
  void read_back(Value& value);
  void finish(Rerun& rerun, Record& record, double seconds);
  static void unlock(Value& value, Dead& dead) {
    --value.num_locks;
    value.runtime->drop_if_unneeded(value, dead);
  }

  Runtime& runtime_;
  Value& wanted_;
  std::vector<Step> stack_;
  std::vector<Value*> kept_;  // latest results, locked until the next step has locked its inputs;
                              // those of the last step until the caller has taken them
  const Runtime* const outer_;
};

/// Returns whether a source's storage got other data, as by `resize_` of the storage.
bool has_other_data(const Value& source) {
  if (source.data == nullptr) return false;
  const c10::Storage content = source.content();
  return content.data_ptr().get() != source.data ||
         static_cast<int64_t>(content.nbytes()) < source.bytes;
}

/// Returns whether a value has its content. A content that was changed unseen is released.
bool is_there(Value& value, const Record& reader, Dead& dead) {
  if (value.has_changed() && (!value.is_source() || value.is_away()))
    if (c10::Storage content = value.content()) {
      Graph::get().forget(*content.unsafeGetStorageImpl(), dead);
      dead.storages.push_back(std::move(content));  // may be the last reference
    }
  const bool is_there = !value.has_changed() && value.has_content();
  if (value.is_source() && !value.is_away() && (!is_there || has_other_data(value)))
    throw_changed_source(reader);
  return is_there;
}

// Finds the next record whose inputs have their contents, and locks them. Returns an input that is
// to be read back before that; or null. The caller holds the lock.
Value* Again::prepare(Dead& dead) {
  for (;;) {
    Step& step = stack_.back();
    Value *oldest = nullptr, *away = nullptr;
    for (const Read& read : step.record->reads) {
      if (is_there(*read.value, *step.record, dead)) continue;
      if (read.value->is_away())
        away = read.value;
      else if (oldest == nullptr || read.value->record->number < oldest->record->number)
        oldest = read.value;
    }
    if (oldest != nullptr) {
      push(*oldest);
      continue;
    }
    if (away != nullptr) return away;
    for (const Read& read : step.record->reads) {
      if (std::find(step.locked.begin(), step.locked.end(), read.value) != step.locked.end())
        continue;
      ++read.value->num_locks;
      read.value->last_use = runtime_.clock;
      step.locked.push_back(read.value);
    }
    return nullptr;
  }
}

// Reads a content back, and locks it: for the last record, or until the end.
void Again::read_back(Value& value) {
  const std::shared_ptr<Moved> moved = value.moved;  // stays as long as the value, which is owned
  c10::SmallVector<c10::Stream, 1> streams;
  for (const Bound* const bound : runtime_.bounds().far())
    if (bound->is_of(value.device))
      announce(value.device, value.bytes, bound->memory.live_bytes(), /*in_allocator=*/false);
  if (!value.device.is_cpu()) {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    streams = runtime_.own_streams();
  }
  c10::Storage content;
  {
    const OnOwnStreams on_own_streams(streams);
    content = moved->load();
  }
  {
    Dead dead;
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    value.counter = c10::VariableVersion(c10::VariableVersion::DISABLED);
    value.is_rerun = !value.is_source() && value.saves.empty();
    if (value.has_content())
      dead.storages.push_back(std::move(content));
    else
      Graph::get().set_content(value, std::move(content));
    ++value.num_locks;
    if (stack_.empty())
      kept_.push_back(&value);
    else
      stack_.back().locked.push_back(&value);
  }
  if (is_recording()) recording::budget_reads_back(value.device, value.bytes);
}

// Takes the results of the last record, and locks those that the next one reads.
void Again::finish(Rerun& rerun, Record& record, double seconds) {
  Dead dead;
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  rerun.end(dead);
  for (Value* const each : record.results)
    if (each != nullptr && each->has_content()) {
      ++each->num_locks;
      kept_.push_back(each);
    }
  if (!kept_.empty()) {
    kept_.front()->runtime->bounds().note_rerun(seconds);
    kept_.front()->runtime->clock += record.cost;
    Trial::get().work.rerun_s += record.cost;
  }
  pop(dead);
  if (stack_.empty()) return;
  Step& step = stack_.back();
  for (const Read& read : step.record->reads) {
    const bool is_made = std::find(kept_.begin(), kept_.end(), read.value) != kept_.end();
    if (!is_made ||
        std::find(step.locked.begin(), step.locked.end(), read.value) != step.locked.end())
      continue;
    ++read.value->num_locks;
    step.locked.push_back(read.value);
  }
  // Unlock before the next call runs: an in-place operator can steal only a content with a single
  // lock.
  for (Value* const each : kept_) unlock(*each, dead);
  kept_.clear();
}

void Again::run() {
  Graph& graph = Graph::get();
  if (stack_.empty()) read_back(wanted_);
  while (!stack_.empty()) {
    std::optional<Rerun> rerun;
    Record* record = nullptr;
    Value* away = nullptr;
    {
      Dead dead;
      const std::lock_guard<std::mutex> lock(graph.mutex());
      away = prepare(dead);
      record = stack_.back().record;
      if (away == nullptr) rerun.emplace(*record, runtime_, dead);
    }
    if (away != nullptr) {
      read_back(*away);
      continue;
    }
    std::optional<RoomForCall> room;
    if (!runtime_.bounds().far().empty()) room.emplace(runtime_, record->call);
    const std::string_view name = record->traits->name;  // the record may end with its rerun
    const auto start = std::chrono::steady_clock::now();
    rerun->run();
    if (room.has_value()) room->end();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    finish(*rerun, *record, taken.count());
    if (is_recording()) recording::budget_reruns(name, rerun->device(), rerun->made_bytes(), start);
  }
}

}  // namespace

void end_reruns_of_others() { turns().end_turn_of_others(); }

const Runtime* rerun_on_this_thread() { return rerun_of; }

c10::Storage content_again(const Save& save, Runtime& runtime) {
  Graph& graph = Graph::get();
  Value* value = nullptr;
  const auto present = [&]() -> c10::Storage {
    Dead dead;  // ends a copy under way before the content is handed out
    const std::lock_guard<std::mutex> lock(graph.mutex());
    runtime.cursor = save.clock;
    value = save.value;
    value->last_use = runtime.clock;
    c10::Storage content = value->content();
    if (!content && value->is_source() && value->held) {  // other data came unseen
      graph.lose(*value, dead);
      value = save.value;
      content = value->content();
    }
    if (!content) return content;
    value->runtime->hold(*value, content);
    if (value->moved != nullptr && !value->is_away()) value->runtime->end_move(*value, dead);
    return content;
  };
  if (c10::Storage content = present()) return content;
  const Turns::Turn turn(turns());
  if (c10::Storage content = present()) return content;
  const seam::DispatchModeOff unseen;
  const detail::NoScopes no_scopes;
  Again again(*value);
  try {
    again.run();
  } catch (const RerunError& error) {
    raise_in_binding(error);
    throw;
  }
  c10::Storage content = present();
  REMAT_INVARIANT(static_cast<bool>(content), "a value was not made again");
  return content;
}

}  // namespace remat::budget
