#pragma once
// The origin of saved tensors: module, operator and line; sums of bytes by module.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "remat/export.h"
#include "remat/options.h"
#include "remat/report.h"

namespace remat {

/// The options of an `OriginGuard`.
struct OriginOptions {
  /// True to note each operator of the thread that makes a node. Costs 1 to 2 us for each operator.
  bool operators = false;
  /// Returns the place of the running code, such as "model.py:42"; called for each noted operator.
  /// Empty: places are those of ModuleScopes. For bindings, whose language has frames of its own.
  std::function<std::string()> place{};
};

/// While alive, notes the origin of autograd's nodes that this thread makes: the ModuleScope around
/// and, on request, the operator. `saved_tensors` shows the notes (`SavedTensorInfo::module`, `op`,
/// `place`), for nodes inside regions as well. Regions themselves pay nothing.
/// Memory: 12 bytes for each begin and end of a ModuleScope, about 150 for each noted operator,
/// until the guard ends. One guard on a thread at a time counts, the innermost.
/// Threads: belongs to its thread. Other threads may call `saved_tensors` when no forward runs.
class REMAT_API OriginGuard {
 public:
  explicit OriginGuard(OriginOptions options = {});  ///< until the guard ends
  ~OriginGuard();
  OriginGuard(const OriginGuard&) = delete;
  OriginGuard& operator=(const OriginGuard&) = delete;

 private:
  std::unique_ptr<class OriginLog> log_;
};

/// Marks the call of a module for the thread's OriginGuard: `remat::ModuleScope scope("layers.3")`
/// at the begin of a forward. A scope inside another one has its own whole path. Without a guard it
/// costs one test.
class REMAT_API ModuleScope {
 public:
  /// `path`: read before the call returns. `where`: the place for nodes whose operator has none.
  explicit ModuleScope(std::string_view path, SourceLocation where = SourceLocation::current());
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  OriginLog* const log_;
};

/// Sums of one module, without the modules below it.
struct ModuleBytes {
  std::string module;            ///< its path; empty: the root, or no ModuleScope
  int64_t saved_bytes = 0;       ///< [bytes] that the graph holds; a storage once
  int64_t dropped_bytes = 0;     ///< [bytes] that recomputes will make
  int64_t parameters_bytes = 0;  ///< [bytes] of parameters
  int64_t gradients_bytes = 0;   ///< [bytes] of their gradients
  int64_t optimizer_bytes = 0;   ///< [bytes] of the optimizer's state for them
};

/// Returns the sums of saved tensors by module, the largest first.
REMAT_API std::vector<ModuleBytes> bytes_by_module(const std::vector<SavedTensorInfo>& saved);
/// Does the same, and adds the parameters of `model` with their gradients and, if `state` is set,
/// the tensors that it returns for a parameter: those that the program's optimizer keeps for it.
/// A parameter of several modules counts for the first one.
REMAT_API std::vector<ModuleBytes> bytes_by_module(
    const std::vector<SavedTensorInfo>& saved, const torch::nn::Module& model,
    const std::function<std::vector<at::Tensor>(const at::Tensor& parameter)>& state = {});

}  // namespace remat
