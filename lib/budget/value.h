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
// Note [Blank memory]
// A rerun of `empty` would give other bytes, and the program may fill the memory unseen (NumPy, a
// pointer). So a blank that is read before an operator has filled it becomes a source.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
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

/// The place of a value in its runtime's pool.
struct InPool {
  int32_t place = -1;       ///< index; -1: not in the pool
  bool is_short = false;    ///< in the shortlist
  bool is_counted = false;  ///< in the pool's bytes
};

/// The latest result of `look_closely`.
struct CloseLook {
  float cost = -1;    ///< [seconds] of a rerun; negative: unknown
  double first = -1;  ///< the clock at which backward needs the value first
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
  InPool pooled{};
  bool is_listed = false;      ///< `value_at` finds the value
  const void* data = nullptr;  ///< address of the content's data; only compared. Null: unknown
  bool is_rerun = false;       ///< made again without being saved: an intermediate of a rerun
  /// The tensor's version counter: see Note [Writes].
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t version = 0;            ///< position of the counter while the content is the value's
  uint64_t hash = 0;               ///< hash of the dropped content; 0: not checked
  double last_use = 0;             ///< the runtime's clock at the latest use, for `Choice::Dtr`
  std::shared_ptr<Moved> moved{};  ///< the copy elsewhere; null: none was begun
  CloseLook look{};

  bool is_source() const { return record == nullptr; }
  /// Returns whether a copy elsewhere can stand in for the content.
  bool is_away() const { return moved != nullptr && moved->is_complete(); }
  bool is_blank() const;  ///< See Note [Blank memory].
  void own() { ++num_owners; }
  /// Returns the storage with the content; empty if the content is gone.
  c10::Storage content() const;
  bool has_content() const;
  /// Returns whether no rerun is needed for the content.
  bool is_available() const { return is_away() || has_content(); }
  /// Returns whether a rerun for a dropped saved tensor would read the value.
  bool is_needed() const;
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
  /// Links the record to the values that it reads; duplicates are skipped.
  void add_reads(c10::ArrayRef<Value*> values);
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

/// Returns the number of a walk, which marks the records that it has visited. The caller holds the
/// graph's lock.
uint64_t next_walk();

}  // namespace remat::budget
