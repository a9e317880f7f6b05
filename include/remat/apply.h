#pragma once
// Regions of a module tree whose source stays unchanged: chosen, switched and checked from outside.

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/export.h"
#include "remat/module.h"

namespace remat {

/// A choice of modules in a tree: a module is chosen if it meets every condition that is set.
///
///     {.name = "layers.*"}                       the children of `layers`
///     {.type = "Bottleneck", .every = 2}         the first match, the third, ...
///     remat::choose<BottleneckImpl>()            by the C++ type, derived types included
///     remat::ModuleChoice::parse("every=2,name=layers.*,type=Bottleneck")
///     remat::ModuleChoice::parse("name=layers.*,policy=**.attention: aten::mm=save; *=recompute")
///
/// Paths are those of `named_modules()`, without a prefix: "layers.0.conv". The root has no path.
struct ModuleChoice {
  /// A pattern for the path: `*` matches anything but a dot, `**` anything, `?` one character; `|`
  /// separates several patterns. A pattern never matches the root.
  std::string name{};
  /// The name of a class as it is written in code, or a pattern; `|` separates several. Namespaces
  /// and a final `Impl` may be omitted. A `Checkpointed<BlockImpl>` is also a `Block`.
  std::string type{};
  /// A predicate over path and module, called after the other conditions.
  std::function<bool(const std::string& path, torch::nn::Module& module)> where{};
  /// Chooses the first and every n-th later one of the modules that meet the other conditions, in
  /// the order of the tree.
  int64_t every = 1;
  /// The policy of the chosen modules' regions, in place of the one in their options; empty:
  /// theirs.
  Policy policy{};

  /// Parses a choice from text: `key=value` pairs with commas between them; the keys are `name`,
  /// `type`, `every` and `policy` (text for `Policy::parse`, without commas). Throws
  /// `c10::ValueError`, which names the fault and the valid keys and shows an example.
  REMAT_API static ModuleChoice parse(std::string_view text);
};

/// Returns `rest`, limited to modules of type `T`: an Impl type or its holder.
template <class T>
ModuleChoice choose(ModuleChoice rest = {}) {
  if constexpr (requires { typename T::ContainedType; }) {
    return choose<typename T::ContainedType>(std::move(rest));
  } else {
    static_assert(std::is_base_of_v<torch::nn::Module, T>,
                  "remat::choose takes the type of a module: choose<LinearImpl>()");
    rest.where = [also = std::move(rest.where)](const std::string& path,
                                                torch::nn::Module& module) {
      return dynamic_cast<T*>(&module) != nullptr && (!also || also(path, module));
    };
    return rest;
  }
}

/// A module of a tree that a choice selected.
struct ChosenModule {
  std::string path{};  ///< in the tree; "" is the root
  std::string type{};  ///< as it is written in code
};

/// A module that cannot be made a region from outside.
struct RefusedModule {
  std::string path{};    ///< in the tree; "" is the root
  std::string type{};    ///< as it is written in code
  std::string reason{};  ///< why it cannot be a region
  std::string cure{};    ///< the code to write instead
};

/// The result of `apply_checkpointing`.
struct AppliedCheckpointing {
  std::vector<ChosenModule> regions{};   ///< the chosen modules that are regions now
  std::vector<RefusedModule> refused{};  ///< the chosen modules that are called as before
  /// Returns one line for each module.
  REMAT_API std::string to_string() const;
};

/// Makes the chosen modules regions, without a change of the model's source. Suitable modules are:
///
/// - every `Checkpointed`, anywhere in the tree: it is switched on;
/// - every element of a `torch::nn::Sequential`, or of a class that derives from it, of any
///   module type, with any arguments and results. The Sequential then calls a region around the
///   module's own forward. The module itself, its name, `children()`, parameters, buffers, archives
///   and printed text stay as they are, and so do `ptr(i)` and `[i]`. Only `at<T>(i)`, `ptr<T>(i)`
///   and AnyModule's `get<T>()` throw for such an element; use `ptr(i)->as<T>()` instead. Clones of
///   the Sequential, and of modules that contain it, have regions of their own.
///
/// Elements of a ModuleList or ModuleDict, members and the root are called through their own type,
/// where remat cannot intercept the call. They are listed in `refused`, with the code to write
/// instead. Each recompute sees training flags and buffers (running statistics) as forward did; see
/// `Checkpointed` and `BufferPolicy`. Tensors in arguments are inputs of the region if the type is
/// a tensor or a standard container of tensors; a struct is copied as it is. Leave out elements
/// whose forward is noexcept: remat cannot detect it, and a stop or an error would end the process.
/// `set_checkpointing` and `set_checkpoint_level` switch these regions, too.
///
/// Without options, a Checkpointed keeps its own options and an element that is a region already
/// keeps its current ones. Other elements get `ModuleOptions{}`; regions without a name are named
/// by their path. With options, all chosen modules get those, and a name is followed by the
/// module's path. A second call changes the options only. Registers the tree (`register_tree`),
/// unless a registered one has its root.
/// Memory: that of a region, as `checkpoint()` says. Existing graphs keep their tensors.
/// Threads: during the call no other thread may use the tree, and no forward of it may run;
/// afterwards as for `Checkpointed`.
/// Throws `c10::ValueError` for a choice that has no condition, matches no module or is invalid,
/// for options with `enabled = false`, and for a policy in both.
/// Source: `apply_activation_checkpointing` of torch/distributed/algorithms/_checkpoint.
[[nodiscard]] REMAT_API AppliedCheckpointing apply_checkpointing(torch::nn::Module& root,
                                                                 const ModuleChoice& choice);
/// Does the same with options for all chosen modules.
[[nodiscard]] REMAT_API AppliedCheckpointing apply_checkpointing(torch::nn::Module& root,
                                                                 const ModuleChoice& choice,
                                                                 const ModuleOptions& options);

/// Does the same, all or nothing: if one of the chosen modules cannot be a region, the function
/// changes nothing and throws `c10::ValueError` with the reasons and cures of all such modules.
/// Returns the regions.
REMAT_API std::vector<ChosenModule> require_checkpointing(torch::nn::Module& root,
                                                          const ModuleChoice& choice);
/// Does the same with options for all chosen modules.
REMAT_API std::vector<ChosenModule> require_checkpointing(torch::nn::Module& root,
                                                          const ModuleChoice& choice,
                                                          const ModuleOptions& options);

/// Makes all modules of the tree run without regions: Sequentials call their elements as before,
/// and each `Checkpointed` is switched off. Returns the modules that were regions; other modules
/// stay as they were. Existing graphs still recompute. Threads and errors: as
/// `apply_checkpointing`.
REMAT_API std::vector<ChosenModule> remove_checkpointing(torch::nn::Module& root);
/// Makes the chosen modules run without regions.
REMAT_API std::vector<ChosenModule> remove_checkpointing(torch::nn::Module& root,
                                                         const ModuleChoice& choice);

/// A module that should be a region, but is called in a way that bypasses it.
struct UnusedRegion {
  std::string path{};    ///< in the tree; "" is the root
  std::string type{};    ///< as it is written in code
  std::string reason{};  ///< the evidence
  std::string cure{};    ///< the code to write instead
};

/// Finds modules that should be regions and never were. Candidates are each enabled `Checkpointed`
/// below `root`, and each enabled element of `apply_checkpointing`. A candidate is returned if some
/// of its parameters are in the graph of `result`, but its own call was never reached. Typical
/// causes are `list[i]->as<Block>()->forward(x)` and a plain holder of a Checkpointed: the results
/// are right, but no memory is saved. Call the function once, after a forward:
///
///     for (const auto& unused : remat::unused_regions(*net, loss))
///       std::cerr << unused.cure << '\n';
///
/// "Never" means since the construction of the module or the last `reset_unused_regions`: a module
/// that is called both ways is not found. Modules that are switched off at the time of this call,
/// or in eval mode with `training_only`, are left out. A call under a `DisableCheckpointGuard`, or
/// one that `SkipBatchNorm` runs plainly, counts as reached. A call without grad mode does not
/// count, since it leaves no graph. A module without parameters that require grad is never found. A
/// module that shares its parameters with others may be found although it was never called. The
/// function walks the graph once; a backward may have run before. Threads: no forward of `root` may
/// run meanwhile.
/// Throws `c10::ValueError` for a `result` without a graph.
[[nodiscard]] REMAT_API std::vector<UnusedRegion> unused_regions(torch::nn::Module& root,
                                                                 const at::Tensor& result);
/// Forgets which calls were reached, for all modules below `root`.
REMAT_API void reset_unused_regions(torch::nn::Module& root);

}  // namespace remat
