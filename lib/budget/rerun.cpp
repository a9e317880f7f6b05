#include "lib/budget/rerun.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/invariant.h"
#include "lib/base/waiting.h"
#include "lib/budget/record_rerun.h"
#include "lib/budget/room.h"
#include "lib/budget/trial.h"
#include "lib/observe/recording.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/dispatch_mode.h"

namespace remat::budget {

namespace {

/// The turns of reruns: one thread of the process at a time makes values again.
Turns& turns() {
  static auto* const all = new Turns;  // leaked: backwards may run in static destructors
  return *all;
}

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

/// The runtime whose values this thread makes again; or null.
thread_local const Runtime* rerun_of = nullptr;

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
