#pragma once
// A TorchScript function as the function of a region: recomputes run what forward ran.

#include <memory>
#include <vector>

#include "remat/export.h"

namespace c10 {
struct IValue;
}
namespace torch::jit {
struct Method;
struct Module;
}  // namespace torch::jit

namespace remat::detail {

/// One region's script function: `forward` of a module, or a method. The executor of such a
/// function changes what it runs after its first calls; a region keeps what its first run ran.
class REMAT_API ScriptCall {
 public:
  explicit ScriptCall(const torch::jit::Module& module);
  explicit ScriptCall(const torch::jit::Method& method);
  ~ScriptCall();
  ScriptCall(const ScriptCall&) = delete;
  ScriptCall& operator=(const ScriptCall&) = delete;
  /// The first time it runs what a plain call would run now, then the same again. Threads: any
  /// after the first.
  /// Throws what the function throws, and in a recompute CheckpointError if LibTorch no longer has
  /// what ran then.
  c10::IValue run(std::vector<c10::IValue> arguments);
  const torch::jit::Module& module() const;

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace remat::detail
