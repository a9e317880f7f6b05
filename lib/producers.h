#pragma once
// Which operator call of a region made a storage. Looked up where a kept call is described.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "lib/capture.h"

namespace remat {

/// Numbers of an operator (in its Selection), of a call of it, and of a result.
struct Producer {
  uint32_t op = 0, call = 0, output = 0;
  bool is_factory = false;  ///< what it made may have been filled past the dispatcher
  bool is_known = true;     ///< no: a value that a region recomputed for a backward inside
  bool operator==(const Producer& other) const {
    return op == other.op && call == other.call && output == other.output;
  }
};

/// Storages are held weakly, so that no address comes twice.
class Producers {
 public:
  void add(const at::Tensor& result, Producer producer);
  /// The latest that made the tensor's storage, or null.
  const Producer* find(const at::Tensor& tensor);
  void clear();

 private:
  struct Entry {
    WeakStorage storage;
    Producer producer;
  };
  std::vector<Entry> entries_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> index_;  // of the first `num_indexed_`
  std::size_t num_indexed_ = 0;
};

}  // namespace remat
