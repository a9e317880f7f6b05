#pragma once
// A TorchScript function as the function of a region: recomputes run the same code as forward.

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
/// function changes the executed code after its first calls; a region keeps the code of its first
/// run.
class REMAT_API ScriptCall {
 public:
  explicit ScriptCall(const torch::jit::Module& module);
  explicit ScriptCall(const torch::jit::Method& method);
  ~ScriptCall();
  ScriptCall(const ScriptCall&) = delete;
  ScriptCall& operator=(const ScriptCall&) = delete;
  /// Runs the code that a plain call would run now, the first time, and the same code each later
  /// time. Threads: any after the first call.
  /// Throws the exceptions of the function, and in a recompute CheckpointError if LibTorch no
  /// longer has the code of the first run.
  c10::IValue run(std::vector<c10::IValue> arguments);
  const torch::jit::Module& module() const;

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace remat::detail
