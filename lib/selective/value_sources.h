#pragma once
// Which operator call of a region made a storage. Looked up where a kept call is described.

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "lib/tensor/capture.h"

namespace remat {

/// A value source names an operator (in its Selection), a call of it, and a result, by their
/// numbers.
struct ValueSource {
  uint32_t op = 0, call = 0, output = 0;
  bool is_factory = false;  ///< what it made may have been filled past the dispatcher
  bool is_pin = false;      ///< made in save_region: `call` is its number, `op` means nothing
  bool is_known = true;     ///< no: a value that a region recomputed for a backward inside
  bool operator==(const ValueSource& other) const {
    return op == other.op && call == other.call && output == other.output && is_pin == other.is_pin;
  }
};

/// Storages are held weakly, so that no address comes twice.
class ValueSources {
 public:
  /// What is known of a tensor. Changes in place are counted from when it was made: what comes from
  /// a hook may have been changed on the way.
  struct Made {
    ValueSource source;
    uint32_t num_changes;
  };
  void add(const at::Tensor& result, ValueSource source, uint32_t num_changes = 0);
  /// Does the same as `add`, but if the storage is known already (an operator may return a tensor
  /// that it keeps) with the notes that it has.
  void set(const at::Tensor& value, ValueSource source, uint32_t num_changes = 0);
  /// Finds the latest that made the tensor's storage, if known.
  std::optional<Made> find(const at::Tensor& tensor);
  void clear();

  /// What forward notes of a storage that an operator made (Selection).
  struct Notes {
    static constexpr uint32_t not_kept = ~uint32_t{0};
    uint32_t kept = not_kept;  ///< the number of the kept result that it is
    bool is_read = false;      ///< by an operator that a recompute will run
  };
  /// Finds the notes of the latest with that storage; null if there is none. Until the next `add`.
  Notes* notes_of(const c10::StorageImpl* storage);
  /// Visits the notes of all.
  template <class Visitor>
  void visit(Visitor&& visitor) const {
    for (const Entry& each : entries_) visitor(each.notes);
  }

 private:
  struct Entry {
    WeakStorage storage;
    ValueSource source;
    uint32_t first_version;
    Notes notes;
  };
  Entry* find(const c10::StorageImpl* storage);
  std::vector<Entry> entries_;
  ska::flat_hash_map<const c10::StorageImpl*, std::size_t> index_;  // of the first `num_indexed_`
  std::size_t num_indexed_ = 0;
};

}  // namespace remat
