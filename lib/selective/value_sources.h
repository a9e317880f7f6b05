#pragma once
// The operator calls of a region that made its storages, for the description of kept calls.

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "lib/tensor/capture.h"

namespace remat {

/// The source of a value: the numbers of an operator (in its Selection), of its call, and of the
/// result.
struct ValueSource {
  uint32_t op = 0, call = 0, output = 0;
  bool is_factory = false;  ///< code that bypasses the dispatcher may have filled the result
  bool is_pin = false;      ///< made in save_region: `call` is its number, `op` means nothing
  bool is_known = true;     ///< false: a value that a region recomputed for a backward inside
  bool operator==(const ValueSource& other) const {
    return op == other.op && call == other.call && output == other.output && is_pin == other.is_pin;
  }
};

/// The sources of storages. Storages are held weakly, so that no address is reused.
class ValueSources {
 public:
  /// The source of a tensor. Changes in place count from its creation; a tensor from a hook may
  /// have been changed before.
  struct Made {
    ValueSource source;
    uint32_t num_changes;
  };
  void add(const at::Tensor& result, ValueSource source, uint32_t num_changes = 0);
  /// Does the same as `add`, but keeps the notes if the storage is known already (an operator may
  /// return a tensor that it keeps).
  void set(const at::Tensor& value, ValueSource source, uint32_t num_changes = 0);
  /// Returns the latest source of the tensor's storage, if known.
  std::optional<Made> find(const at::Tensor& tensor);
  void clear();

  /// Facts that forward records about a storage that an operator made (Selection).
  struct Notes {
    static constexpr uint32_t not_kept = ~uint32_t{0};
    uint32_t kept = not_kept;  ///< number of its kept result
    bool is_read = false;      ///< read by an operator that a recompute will run
  };
  /// Returns the notes of the latest entry with that storage, or null. Valid until the next `add`.
  Notes* notes_of(const c10::StorageImpl* storage);
  /// Visits the notes of all entries.
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
  // For the first `num_indexed_` entries.
  ska::flat_hash_map<const c10::StorageImpl*, std::size_t> index_;
  std::size_t num_indexed_ = 0;
};

}  // namespace remat
