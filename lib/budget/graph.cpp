#include "lib/budget/graph.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <utility>

#include "lib/budget/runtime.h"
#include "lib/budget/storages.h"
#include "lib/observe/counted_memory.h"

namespace remat::budget {

namespace {

/// Values by the storage with their content. `Value::where` keeps each address from being reused.
using ByStorage = ska::flat_hash_map<const c10::StorageImpl*, Value*>;
ByStorage& by_storage() {
  static auto* const all = new ByStorage;  // leaked: tensors outlive static objects
  return *all;
}

}  // namespace

Graph& Graph::get() {
  static auto* const graph = new Graph;  // leaked: tensors outlive static objects
  return *graph;
}

Value* Graph::value_at(c10::StorageImpl& storage, Dead& dead) {
  const auto found = by_storage().find(&storage);
  if (found == by_storage().end()) return nullptr;
  Value& value = *found->second;
  if (value.device.is_cpu() || value.data == storage.data_ptr().get()) return &value;
  lose(value, dead);
  const auto now = by_storage().find(&storage);
  return now == by_storage().end() ? nullptr : now->second;
}

void Graph::list(Value& value, c10::StorageImpl& storage) {
  if (value.is_listed) {  // its storage died without an announcement
    unlist(value);
    if (!value.is_source()) --value.num_owners;
  }
  value.is_listed = true;
  if (!value.device.is_cpu()) ++num_far_;
  value.where = WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage));
  value.data = address_of_data(storage);
  by_storage()[&storage] = &value;
  note_storage_beside(storage);
  if (!value.is_source()) value.own();
}

void Graph::unlist(Value& value) {
  if (!std::exchange(value.is_listed, false)) return;
  if (!value.device.is_cpu()) --num_far_;
  by_storage().erase(value.where._unsafe_get_target());
  value.where = WeakStorage(c10::intrusive_ptr<c10::StorageImpl>());
}

Value& Graph::value_or_source(const at::Tensor& tensor, Runtime& runtime, Dead& dead) {
  c10::StorageImpl& storage = *storage_of(tensor);
  if (Value* const known = value_at(storage, dead)) {
    if (known->is_content_of(tensor)) return *known;
    lose(*known, dead);
    if (Value* const now = value_at(storage, dead)) {
      now->note_version(tensor);
      return *now;
    }
  }
  Value& made = make(storage, nullptr, runtime);
  made.held = tensor.storage();
  made.note_version(tensor);
  runtime.bounds().source_held(made.device, made.bytes);
  runtime.add_source(made);
  return made;
}

Value& Graph::make(c10::StorageImpl& storage, Record* record, Runtime& runtime) {
  auto* const value = new Value;
  value->runtime = runtime.shared_from_this();
  value->bytes = static_cast<int64_t>(storage.nbytes());
  value->device = storage.device();
  value->record = record;
  value->last_use = runtime.clock;
  if (record != nullptr) {
    ++record->num_owners;
    record->results.push_back(value);
  }
  list(*value, storage);
  return *value;
}

void Graph::set_content(Value& value, c10::Storage storage) {
  list(value, *storage.unsafeGetStorageImpl());
  value.runtime->hold(value, std::move(storage));
}

void Graph::let_go(Value& value, Dead& dead) {
  if (!value.held) return;
  if (value.moved != nullptr && !value.is_away()) value.runtime->end_move(value, dead);
  value.runtime->unpool(value);
  if (value.is_source()) value.runtime->bounds().source_held(value.device, -value.bytes);
  value.is_rerun = false;
  dead.storages.push_back(std::exchange(value.held, {}));
}

void Graph::forget(c10::StorageImpl& storage, Dead& dead) {
  if (Value* const value = value_at(storage, dead)) end(*value, dead);
}

// The content ends: its storage is written to, has other data, or has died.
void Graph::end(Value& value, Dead& dead) {
  const bool was_kept_by_storage = !value.is_source();
  unlist(value);
  let_go(value, dead);  // the program may empty a storage that the budget holds
  if (was_kept_by_storage) disown(value, dead);
}

// The storage has died or has other data. A saved tensor of a source reads the present data, as
// without a budget.
void Graph::lose(Value& value, Dead& dead) {
  if (!value.is_source() || !value.held) return end(value, dead);
  supersede(value, *value.held.unsafeGetStorageImpl(), *value.runtime, dead);
}

void Graph::look_for_ends(Dead& dead) {
  if (num_far_ < max_far_) return;
  std::vector<Value*> ended;
  for (const auto& [storage, value] : by_storage())
    if (!value->device.is_cpu() && !value->has_content()) ended.push_back(value);
  for (Value* const value : ended)  // one that dies in this loop is freed with `dead`
    if (value->is_listed) lose(*value, dead);
  max_far_ = std::max<std::size_t>(256, 2 * num_far_);
}

void Graph::move_saves(Value& from, Value& to, Dead& dead) {
  const auto saves = std::exchange(from.saves, {});
  for (Save* const each : saves) {
    each->value = &to;
    to.own();
    to.saves.push_back(each);
    to.runtime->note_save();
    from.runtime->note_end_of_save(dead);
    disown(from, dead);
  }
}

void Graph::forget_written(c10::StorageImpl& storage, Runtime& runtime, Dead& dead) {
  if (Value* const old = value_at(storage, dead)) supersede(*old, storage, runtime, dead);
}

void Graph::supersede(Value& old, c10::StorageImpl& storage, Runtime& runtime, Dead& dead) {
  if (old.saves.empty()) return end(old, dead);
  old.own();
  end(old, dead);
  Value& now = make(storage, nullptr, runtime);
  now.held = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage));
  runtime.bounds().source_held(now.device, now.bytes);
  runtime.add_source(now);
  move_saves(old, now, dead);
  disown(old, dead);
}

void Graph::become_source(Value& value, Dead& dead) {
  c10::Storage content = value.content();
  if (value.is_source() || (!content && !value.is_away())) return;
  value.runtime->unpool(value);
  Record& record = *std::exchange(value.record, nullptr);
  std::replace(record.results.begin(), record.results.end(), &value, static_cast<Value*>(nullptr));
  if (content) value.runtime->bounds().source_held(value.device, value.bytes);
  if (value.held)
    dead.storages.push_back(std::move(content));
  else
    value.held = std::move(content);
  if (value.held) value.runtime->add_source(value);
  if (value.is_listed) disown(value, dead);  // storages do not own sources
  if (--record.num_owners == 0) dead.records_to_bury.push_back(&record);
  bury(dead);
}

// A saved tensor of a source reads the present data of its storage, as without a budget, even after
// a write past the version counter. So the saved tensors leave the source, which keeps the old
// content for dropped values.
void Graph::move_content(Value& source, c10::Storage copy, Dead& dead) {
  unlist(source);
  source.data = address_of_data(*copy.unsafeGetStorageImpl());
  c10::Storage written = std::exchange(source.held, std::move(copy));
  source.counter = c10::VariableVersion(c10::VariableVersion::DISABLED);
  source.runtime->add_source(source);
  if (!source.saves.empty()) {
    source.own();
    Value& now = make(*written.unsafeGetStorageImpl(), nullptr, *source.runtime);
    now.held = written;
    now.runtime->bounds().source_held(now.device, now.bytes);
    now.runtime->add_source(now);
    move_saves(source, now, dead);
    disown(source, dead);
  }
  dead.storages.push_back(std::move(written));
}

void Graph::settle_readers(Value& source, Dead& dead) {
  const uint64_t walk = next_walk();
  std::vector<Value*> made_of{&source}, there;
  while (!made_of.empty()) {
    Value& next = *made_of.back();
    made_of.pop_back();
    for (const Read* read = next.reads; read != nullptr; read = read->next) {
      if (std::exchange(read->record->walk, walk) == walk) continue;
      for (Value* const result : read->record->results)
        if (result != nullptr) (result->is_available() ? there : made_of).push_back(result);
    }
  }
  for (Value* const each : there)  // a value that died in this loop is freed with `dead`
    if (each->num_owners > 0) become_source(*each, dead);
}

void Graph::discard(Record* record, Dead& dead) {
  dead.records_to_bury.push_back(record);
  bury(dead);
}

void Graph::disown(Value& value, Dead& dead) {
  if (--value.num_owners > 0) return;
  dead.values_to_bury.push_back(&value);
  bury(dead);
}

// The loop replaces recursion, since a chain of records can be as long as a program.
void Graph::bury(Dead& dead) {
  if (std::exchange(dead.is_burying, true)) return;
  while (!dead.values_to_bury.empty() || !dead.records_to_bury.empty()) {
    if (!dead.records_to_bury.empty()) {
      Record* const record = dead.records_to_bury.back();
      dead.records_to_bury.pop_back();
      for (Read& read : record->reads) {
        (read.before == nullptr ? read.value->reads : read.before->next) = read.next;
        if (read.next != nullptr) read.next->before = read.before;
        if (--read.value->num_owners == 0)
          dead.values_to_bury.push_back(read.value);
        else
          read.value->runtime->drop_if_unneeded(*read.value, dead);
      }
      dead.records.emplace_back(record);
      continue;
    }
    Value* const value = dead.values_to_bury.back();
    dead.values_to_bury.pop_back();
    unlist(*value);
    let_go(*value, dead);
    if (value->moved != nullptr) value->runtime->end_move(*value, dead);
    if (Record* const record = value->record) {
      std::replace(record->results.begin(), record->results.end(), value,
                   static_cast<Value*>(nullptr));
      if (--record->num_owners == 0) dead.records_to_bury.push_back(record);
    }
    dead.values.emplace_back(value);
  }
  dead.is_burying = false;
}

void Graph::cut(const Runtime& runtime, Dead& dead) {
  std::vector<Value*> alive;
  for (const auto& [storage, value] : by_storage())
    if (value->runtime.get() == &runtime && !value->is_source()) alive.push_back(value);
  // A value that dies in this loop is freed with `dead`.
  for (Value* const value : alive)
    if (value->is_listed && !value->is_source())
      value->has_content() ? become_source(*value, dead) : end(*value, dead);
}

bool Graph::data_freed(const void* storage, const void* data) noexcept {
  Dead dead;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = by_storage().find(static_cast<const c10::StorageImpl*>(storage));
  if (found == by_storage().end() || found->second->data != data) return false;
  Value& value = *found->second;
  if (value.is_source() && value.held && value.reads != nullptr) {
    value.own();
    const bool is_kept = value.is_needed();
    if (is_kept)
      move_content(value, storage_of_data(take_over(data), value.bytes), dead);
    else
      settle_readers(value, dead);
    disown(value, dead);
    if (is_kept) return true;
  }
  lose(value, dead);
  return false;
}

}  // namespace remat::budget
