#pragma once
// Values and records: the contents that a budget can drop, and the operator calls that made them.
//
// Note [Values and records]
// A value is the content of one storage at one version. A view shares the value of its storage and
// adds only its geometry. A record is one operator call, with references to the values that the
// call reads. A value with a record can be dropped and made again. A value without a record is a
// source: a parameter, a batch, or the result of a call that cannot run again. Records and saved
// tensors keep their sources alive.
//
// Ownership: a saved tensor owns its value, a value owns its record, and a record owns the values
// that it reads. A live storage owns the value of its content, because a later operator may read
// it.
//
// Note [Writes]
// An operator that writes to a storage gives it a new value. A write outside of the thread's
// operators (on another thread, or after the guard's scope) moves the version counter of the
// tensor. The storage then no longer has the value's content: a value with a record is made again,
// a source is an error.
// Saved tensors of the old value follow to the new one, because a tensor that autograd has saved is
// an alias of the storage. If the write moved the version counter, backward refuses them anyway.
// Other writes (through `.data`, by collectives) are seen by backward as without a budget.
// The data of a source may be freed while its storage lives (`resize_(0)` of FSDP). That is a
// write, too: if a dropped value needs the data, the graph keeps it.
//
// Note [When nothing is saved]
// A loss that the program keeps would keep its record, and with it the records of the whole step.
// When backward has released the last saved tensor, no record can be needed any more: each live
// value becomes a source, and all records are freed. Operators without grad mode are not recorded
// while nothing is saved, so optimizer steps do not form a chain.
//
// Note [Blank memory]
// A rerun of `empty` would give other bytes, and the program may fill the memory unseen (NumPy, a
// pointer). So a blank that is read before an operator has filled it becomes a source.
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

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "lib/budget/moving.h"
#include "lib/seam/cpu_generator.h"
#include "lib/selective/op_traits.h"
#include "lib/tensor/capture.h"

namespace remat::budget {

class Runtime;
struct Record;
struct Value;

/// The reference of one saved tensor to its value.
struct Save {
  Value* value = nullptr;
  double clock = 0;  ///< the runtime's clock at the save
};

/// A link in the list of a value's readers: one record that reads the value.
struct Read {
  Value* value = nullptr;
  Record* record = nullptr;
  Read *before = nullptr, *next = nullptr;
};

/// The content of one storage at one version. Guarded by the graph's lock.
struct Value {
  int64_t num_owners = 0;  ///< saved tensors, reads, and the storage
  std::shared_ptr<Runtime> runtime{};
  Record* record = nullptr;  ///< null for a source
  c10::Storage held{};       ///< the content, if the budget keeps it alive
  /// The storage with the content; empty if the content is gone.
  WeakStorage where{c10::intrusive_ptr<c10::StorageImpl>()};
  int64_t bytes = 0;
  c10::Device device{c10::kCPU};
  Read* reads = nullptr;               ///< list of the records that read the value
  c10::SmallVector<Save*, 2> saves{};  ///< saved tensors that backward still holds
  int32_t num_locks = 0;               ///< reruns that use the content now
  int32_t place = -1;                  ///< index in the runtime's pool; -1: not in the pool
  bool is_short = false;               ///< in the runtime's shortlist
  bool is_counted = false;             ///< in the bytes of the runtime's pool
  bool is_listed = false;              ///< `value_at` finds the value
  const void* data = nullptr;  ///< address of the content's data; only compared. Null: unknown
  bool is_rerun = false;       ///< made again without being saved: an intermediate of a rerun
  /// The tensor's version counter: see Note [Writes].
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t version = 0;            ///< position of the counter while the content is the value's
  uint64_t hash = 0;               ///< hash of the dropped content; 0: not checked
  double last_use = 0;             ///< the runtime's clock at the latest use, for `Choice::Dtr`
  std::shared_ptr<Moved> moved{};  ///< the copy elsewhere; null: none was begun
  // The latest result of look_closely; negative: unknown.
  float cost = -1;
  double first = -1;

  bool is_source() const { return record == nullptr; }
  /// Returns whether a copy elsewhere can stand in for the content.
  bool is_away() const { return moved != nullptr && moved->is_complete(); }
  bool is_blank() const;  ///< See Note [Blank memory].
  /// Returns the clock of the latest save; -1: none.
  double last_save() const {
    double last = -1;
    for (const Save* const each : saves) last = each->clock > last ? each->clock : last;
    return last;
  }
  /// Notes the tensor's version counter and its position.
  void note_version(const at::Tensor& tensor);
  /// Returns whether the tensor's storage, for which the value is listed, still has the content.
  bool is_content_of(const at::Tensor& tensor);
  /// Returns whether the version counter has moved since `note_version`.
  bool has_changed() const { return counter.enabled() && counter.current_version() != version; }
};

/// The geometry of a tensor over a value: dtype, sizes, strides, offset.
struct Geometry {
  Value* value = nullptr;
  c10::DispatchKeySet keys{};
  caffe2::TypeMeta dtype{};
  c10::SmallVector<int64_t, 5> sizes{}, strides{};
  int64_t offset = 0;

  Geometry() = default;
  explicit Geometry(const at::Tensor& tensor);
  /// Returns a tensor with this geometry on `storage`.
  at::Tensor on(c10::Storage storage) const;
};

/// An argument of a recorded call: a plain value, a tensor, or a list of tensors.
struct Argument {
  c10::IValue plain{};  ///< the plain value
  int32_t first = -1;   ///< index of the first tensor in `Record::tensors`; -1: plain
  int32_t count = 0;
  bool is_list = false, is_list_of_optional = false;
};

/// A call on an accelerator, with the state of the generator if it draws.
struct OfDevice {
  bool is_far = false;
  at::Generator generator{};
  at::Tensor random{};
};

/// One operator call that can run again.
struct Record {
  int64_t num_owners = 0;  ///< live results; guarded by the graph's lock
  c10::OperatorHandle op;
  const OpTraits* traits;
  c10::SmallVector<Argument, 4> arguments{};
  c10::SmallVector<Geometry, 3> tensors{};  ///< `value` is null for an undefined tensor
  std::vector<Read> reads{};                ///< one for each value read; never grows
  c10::SmallVector<Value*, 2> written{};    ///< old values of the storages written to
  /// New values: first of the storages written to, then of new storages. Null for a dead value.
  c10::SmallVector<Value*, 2> results{};
  std::shared_ptr<const CpuRngState> random{};         ///< state of the generator at the call
  c10::intrusive_ptr<c10::GeneratorImpl> generator{};  ///< null for an operator that does not draw
  bool grad_mode = true;
  uint32_t settings = 0;  ///< settings_now() at the call
  bool is_blank = false;  ///< the result is unfilled memory
  float cost = 0;         ///< [seconds]
  uint64_t number = 0;    ///< number of the call in the process
  uint64_t walk = 0;      ///< number of the latest walk that visited the record
  uint64_t call = 0;      ///< hash of operator and shapes: see CostTable
  OfDevice of_device{};

  Record(const c10::OperatorHandle& called, const OpTraits& known) : op(called), traits(&known) {}
};

inline bool Value::is_blank() const { return record != nullptr && record->is_blank; }

/// Objects that died under the lock. Declare it before the lock, so that they are freed after it.
struct Dead {
  c10::SmallVector<c10::Storage, 4> storages;
  std::vector<std::unique_ptr<Record>> records;
  std::vector<std::unique_ptr<Value>> values;
  c10::SmallVector<std::shared_ptr<void>, 1> moves;  // copies, and their places
  // Objects to unlink.
  std::vector<Value*> values_to_bury;
  std::vector<Record*> records_to_bury;
  bool is_burying = false;
};

/// The values and records of the process.
class Graph {
 public:
  static Graph& get();
  std::mutex& mutex() { return mutex_; }

  // The caller of the functions below holds the lock.

  uint64_t next_number() { return ++num_records_; }
  uint64_t num_records() const { return num_records_; }
  uint64_t next_walk() { return ++num_walks_; }
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
  /// Returns the storage with a value's content; empty if the content is gone.
  static c10::Storage content_of(const Value& value);
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

  void own(Value& value) { ++value.num_owners; }
  void disown(Value& value, Dead& dead);
  /// Links a record to the values that it reads; duplicates are skipped.
  void add_reads(Record& record, c10::ArrayRef<Value*> values);
  /// Returns whether a rerun for a dropped saved tensor would read the value.
  bool is_needed(const Value& value);
  /// Makes sources of all live values of a runtime: see Note [When nothing is saved].
  void cut(const Runtime& runtime, Dead& dead);
  static bool has_content(const Value& value);
  /// Returns whether no rerun is needed for the content.
  static bool is_available(const Value& value) { return value.is_away() || has_content(value); }
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
  uint64_t num_records_ = 0, num_walks_ = 0;
};

}  // namespace remat::budget
