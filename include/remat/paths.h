#pragma once
// The paths of modules and parameters, by which policies and tables of policies choose.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <string>
#include <string_view>

#include "remat/export.h"

namespace torch::nn {
class Module;
}

namespace remat {

/// Registers a tree of modules, so that policies know the paths of its modules and parameters:
/// those of `named_modules()`, such as "layers.0.attention". Call it once, when the tree is
/// complete; call it again if modules or parameters were added or replaced. Values may change at
/// any time, and so may devices and types.
///
/// Without a registration, a region whose function is a module counts as the root of its own tree,
/// and paths are relative to that module. `apply_checkpointing` registers its root if no
/// registered tree has it.
///
/// Memory: the paths, for the life of the process; no module or parameter is kept alive. Threads:
/// any; no other thread may change the tree during the call.
REMAT_API void register_tree(const torch::nn::Module& root);

namespace detail {

/// Finds the paths of modules of another language. Functions are called on any thread that runs a
/// region with a policy that asks for paths.
class REMAT_API PathSource {
 public:
  PathSource() = default;
  virtual ~PathSource() = default;
  PathSource& operator=(PathSource&&) = delete;
  /// Returns the path of the innermost module that runs on this thread; null if none of them runs.
  virtual const std::string* module_path() = 0;
  /// Returns the path of a parameter; null if it is none.
  virtual const std::string* parameter_path(const at::Tensor& parameter) = 0;
  /// Visits the paths of all modules that it knows.
  virtual void visit_paths(c10::function_ref<void(const std::string&)> visitor) = 0;
};

/// Sets the source of a binding, which must live as long as the process.
REMAT_API void set_path_source(PathSource& source);
/// Returns the one object for a path, which lives as long as the process.
REMAT_API const std::string& path_of_text(std::string_view text);

}  // namespace detail
}  // namespace remat
