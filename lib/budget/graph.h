#pragma once
// The values and records of the process, by the storages with their contents.
//
// Note [When nothing is saved]
// A loss that the program keeps would keep its record, and with it the records of the whole step.
// When backward has released the last saved tensor, no record can be needed any more: each live
// value becomes a source, and all records are freed. Operators without grad mode are not recorded
// while nothing is saved, so optimizer steps do not form a chain.
//
// Note [Ends on accelerators]
// The CPU's counting allocator announces the end of a storage's data. Other allocators do not, so
// the graph looks for itself: a value has its content as long as the storage has the same data.
// Values of dead storages are released whenever the number of values on accelerators has doubled.
//
// Note [The lock of the graph]
// The process has one graph and one lock. The lock is a leaf: no operator, allocator, deleter or
// Python code runs under it. It also guards the counts of owners, which are plain numbers. Dead
// objects are collected in `Dead` and freed after the lock is released, without recursion.

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/budget/value.h"

namespace remat::budget {

/// The values and records of the process.
class Graph {
 public:
  static Graph& get();
  std::mutex& mutex() { return mutex_; }

  // The caller of the functions below holds the lock.

  uint64_t next_number() { return ++num_records_; }
  /// Returns the value of the storage's content; null if it is unknown.
  Value* value_at(c10::StorageImpl& storage, Dead& dead);
  /// Returns the value of a tensor's storage; makes a source if the value is unknown.
  Value& value_or_source(const at::Tensor& tensor, Runtime& runtime, Dead& dead);
  /// Makes the value of a storage's new content. `record`: null for a source.
  Value& make(c10::StorageImpl& storage, Record* record, Runtime& runtime);
  /// Separates a storage from its value, because the content changes.
  void forget(c10::StorageImpl& storage, Dead& dead);
  /// Separates a storage from its value after a write whose result cannot be made again. Saved
  /// tensors get the new content as a source.
  void forget_written(c10::StorageImpl& storage, Runtime& runtime, Dead& dead);
  /// Gives the saved tensors of a value to another one: see Note [Writes].
  void move_saves(Value& from, Value& to, Dead& dead);
  /// Makes the storage the value's content, which the budget keeps alive.
  void set_content(Value& value, c10::Storage storage);
  /// Ends the budget's hold on the content.
  void let_go(Value& value, Dead& dead);
  /// Replaces a source's content by a copy, before its storage is written to.
  void move_content(Value& source, c10::Storage copy, Dead& dead);
  /// Makes sources of the live values that depend on a source, before its storage is written to. No
  /// dropped value needs the source.
  void settle_readers(Value& source, Dead& dead);
  /// Frees a record without results.
  void discard(Record* record, Dead& dead);
  /// Makes a source of a value that has its content.
  void become_source(Value& value, Dead& dead);

  void disown(Value& value, Dead& dead);
  /// Makes sources of all live values of a runtime: see Note [When nothing is saved].
  void cut(const Runtime& runtime, Dead& dead);
  /// Releases the values of dead storages: see Note [Ends on accelerators].
  void look_for_ends(Dead& dead);

  /// Called when the counting allocator frees the data of a storage; the address `storage` is only
  /// compared. Returns true if dropped values need the data: the graph then owns it.
  bool data_freed(const void* storage, const void* data) noexcept;

  /// Separates a value from its storage, which has died or has other data.
  void lose(Value& value, Dead& dead);

 private:
  void list(Value& value, c10::StorageImpl& storage);
  void unlist(Value& value);
  void bury(Dead& dead);
  void end(Value& value, Dead& dead);
  void supersede(Value& old, c10::StorageImpl& storage, Runtime& runtime, Dead& dead);
  std::mutex mutex_;
  std::size_t num_far_ = 0, max_far_ = 256;  // listed values on accelerators
  uint64_t num_records_ = 0;
};

}  // namespace remat::budget
