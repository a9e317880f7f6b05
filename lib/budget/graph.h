#pragma once
// What a budget knows: values, and the operator calls that made them.
//
// Note [Values and records]
// A value is the content of one storage at one version. A view is no value of its own: it is
// geometry over the value of its storage. A record is one operator call: what it reads are
// references to values. A value whose record is known can be dropped and made again; one without is
// a source (a parameter, a batch, the result of a call that cannot run again), which stays as long
// as a record or a saved tensor needs it.
//
// Who keeps what: a saved tensor keeps its value, a value its record, a record the values that it
// reads. A storage that is alive keeps the value of what is in it, since operators to come may read
// it. So all goes when nothing can ask for it any more.
//
// Note [Writes]
// An operator that writes gives its storage a new value. What is written past the thread's operators
// (by another thread, or when the guard's scope has ended) moves the version counter of the tensor: then
// the storage does not have the value's content, which is made again, or cannot be.
//
// Note [When nothing is saved]
// A loss that the program keeps keeps its record, and that the records of a whole step. When backward has
// let go of the last saved tensor, nobody can ask for any of it: what is alive becomes a source then, and
// all records go. Operators without grad mode are not recorded until something is saved, so an
// optimizer's steps make no chain from one to the next.
//
// Note [Blank memory]
// `empty` would run again with other bytes. What the program writes there is often unseen (NumPy, a
// pointer), so a blank that is read before an operator has filled it is a source.
//
// Note [The lock of the graph]
// One for the process, and a leaf: while it is held no operator, allocator, deleter or Python runs.
// Counts of references are plain numbers that it guards. What dies is put aside (Dead) and freed when it has
// been let go, one after the other, however long a chain of records is.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/seam/cpu_generator.h"
#include "lib/selective/op_traits.h"
#include "lib/tensor/capture.h"

namespace remat::budget {

class Runtime;
struct Record;
struct Value;

/// Where a record reads a value: a link in the value's list of readers.
struct Read {
  Value* value = nullptr;
  Record* record = nullptr;
  Read *before = nullptr, *next = nullptr;
};

struct Value {
  int64_t num_owners = 0;  ///< saved tensors, reads, its storage; guarded by the lock
  std::shared_ptr<Runtime> runtime{};
  Record* record = nullptr;  ///< null: a source
  c10::Storage held{};       ///< the budget keeps the content
  /// The storage that has the content, whoever keeps it; empty: none has.
  WeakStorage where{c10::intrusive_ptr<c10::StorageImpl>()};
  int64_t bytes = 0;
  Read* reads = nullptr;                ///< of records that read it
  c10::SmallVector<double, 2> saves{};  ///< the clock at each save that backward has not let go of
  int32_t num_locks = 0;                ///< reruns need it now
  int32_t place = -1;                   ///< in the runtime's pool of what could be evicted
  bool is_listed = false;               ///< found by its storage: `value_at`
  const void* data = nullptr;           ///< of the storage when it was listed; only compared
  bool is_rerun = false;  ///< made again and not saved: stays while one evicted needs it
  /// Counts what is written to the content that no operator of the thread shows: Note [Writes].
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t version = 0;  ///< of the counter, as long as it is the content
  uint64_t hash = 0;     ///< of the content when it was evicted, if that is checked
  // What the choice knew of it last.
  float cost = -1;
  double first = -1;

  bool is_source() const { return record == nullptr; }
  bool is_blank() const;  ///< See Note [Blank memory].
  /// Takes the tensor's counter as it stands.
  void note_version(const at::Tensor& tensor);
  /// Returns whether something wrote to the content unseen.
  bool has_changed() const { return counter.enabled() && counter.current_version() != version; }
};

/// A tensor as geometry over a value.
struct Geometry {
  Value* value = nullptr;
  c10::DispatchKeySet keys{};
  caffe2::TypeMeta dtype{};
  c10::SmallVector<int64_t, 5> sizes{}, strides{};
  int64_t offset = 0;

  Geometry() = default;
  explicit Geometry(const at::Tensor& tensor);
  /// A tensor of that geometry. `storage` has the content.
  at::Tensor on(c10::Storage storage) const;
};

/// An argument of a recorded call: a value as it is, a tensor, or a list of tensors.
struct Argument {
  c10::IValue plain{};  ///< neither of the two
  int32_t first = -1;   ///< of `Record::tensors`; -1: plain
  int32_t count = 0;
  bool is_list = false, is_list_of_optional = false;
};

struct Record {
  int64_t num_owners = 0;  ///< values that it makes; guarded by the lock
  c10::OperatorHandle op;
  const OpTraits* traits;
  c10::SmallVector<Argument, 4> arguments{};
  c10::SmallVector<Geometry, 3> tensors{};  ///< `value` is null for undefined ones
  std::vector<Read> reads{};                ///< one for each value that it reads; never grows
  c10::SmallVector<Value*, 2> written{};    ///< the old content of what it writes to
  c10::SmallVector<Value*, 2> results{};    ///< first what it writes to; null for one that is gone
  std::shared_ptr<const CpuRngState> random{};
  c10::intrusive_ptr<c10::GeneratorImpl> generator{};  ///< from which it drew
  bool grad_mode = true;
  bool is_blank = false;  ///< it makes memory that nothing was written to
  float cost = 0;         ///< [seconds]
  uint64_t number = 0;    ///< in the order of calls
  uint64_t walk = 0;      ///< the latest walk that came here

  Record(const c10::OperatorHandle& called, const OpTraits& known) : op(called), traits(&known) {}
};

inline bool Value::is_blank() const { return record != nullptr && record->is_blank; }

/// What dies under the lock, freed when this does: after the lock.
struct Dead {
  c10::SmallVector<c10::Storage, 4> storages;
  std::vector<std::unique_ptr<Record>> records;
  std::vector<std::unique_ptr<Value>> values;
  // Not unlinked yet.
  std::vector<Value*> values_to_bury;
  std::vector<Record*> records_to_bury;
  bool is_burying = false;
};

/// All budgets of the process share the graph.
class Graph {
 public:
  static Graph& get();
  std::mutex& mutex() { return mutex_; }

  // The caller holds the lock.

  uint64_t next_number() { return ++num_records_; }
  uint64_t num_records() const { return num_records_; }
  uint64_t next_walk() { return ++num_walks_; }
  /// The value of what is in a storage now; null if none is known.
  Value* value_at(c10::StorageImpl& storage);
  /// The same; a source if none is known.
  Value& value_or_source(const at::Tensor& tensor, Runtime& runtime, Dead& dead);
  /// The storage's content is a new value. `record`: null for a source.
  Value& make(c10::StorageImpl& storage, Record* record, Runtime& runtime);
  /// The storage has another content from now on: its value has none.
  void forget(c10::StorageImpl& storage, Dead& dead);
  /// The storage of a value's content; empty if it has none.
  static c10::Storage content_of(const Value& value);
  /// Lets the content of a value be this storage's.
  void set_content(Value& value, c10::Storage storage);
  /// The budget keeps the content no longer.
  void let_go(Value& value, Dead& dead);
  /// A copy keeps the content of a source, whose storage is about to be written to.
  void move_content(Value& source, c10::Storage copy, Dead& dead);
  /// A source that nobody needs is about to be written to: what was made of it and is there becomes a
  /// source.
  void settle_readers(Value& source, Dead& dead);
  /// A record without results ends.
  void discard(Record* record, Dead& dead);
  /// The value's record is forgotten: its content stays as long as somebody needs it. It has one.
  void become_source(Value& value, Dead& dead);

  void own(Value& value) { ++value.num_owners; }
  void disown(Value& value, Dead& dead);
  /// Links a record to the values that it reads, each once.
  void add_reads(Record& record, c10::ArrayRef<Value*> values);
  /// Whether a saved tensor, or a rerun, needs the value again that is made of it and has no content.
  bool is_needed(const Value& value);
  /// Nothing is saved any more: what is alive of the runtime's values becomes sources.
  /// See Note [When nothing is saved].
  void cut(const Runtime& runtime, Dead& dead);
  static bool has_content(const Value& value);

  /// Data of the counting allocator is freed, which was this storage's.
  void data_freed(const void* storage, const void* data) noexcept;

 private:
  void list(Value& value, c10::StorageImpl& storage);
  void unlist(Value& value);
  void bury(Dead& dead);
  std::mutex mutex_;
  uint64_t num_records_ = 0, num_walks_ = 0;
};

}  // namespace remat::budget
