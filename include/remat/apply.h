#pragma once
// Regions of a tree of modules that somebody else wrote: chosen, switched and checked from outside.

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

/// A choice of modules of a tree: a module is chosen if it fits every condition that is set.
///
///     {.name = "layers.*"}                       the children of `layers`
///     {.type = "Bottleneck", .every = 2}         the first of these, the third, ...
///     remat::choose<BottleneckImpl>()            by the C++ type, and what derives from it
///     remat::ModuleChoice::parse("every=2,name=layers.*,type=Bottleneck")
///
/// Paths are those of `named_modules()`, without a prefix: "layers.0.conv". The root has none.
struct ModuleChoice {
  /// A pattern over the path: `*` is anything but a dot, `**` anything, `?` one character; with `|`
  /// between several. It never means the root.
  std::string name{};
  /// A name of a class as it is written in code, or a pattern; with `|` between several. Namespaces
  /// in front and `Impl` at the end may be left out. A `Checkpointed<BlockImpl>` is also a `Block`.
  std::string type{};
  /// Asked last, with the path and the module.
  std::function<bool(const std::string& path, torch::nn::Module& module)> where{};
  /// Among the modules that fit the other conditions, in the order of the tree, the first and every
  /// n-th after it are chosen.
  int64_t every = 1;

  /// Makes one of text: `key=value` with commas between, where the keys are `name`, `type` and
  /// `every`. Throws `c10::ValueError`, which says what was wrong, which keys there are, and how an
  /// example looks.
  REMAT_API static ModuleChoice parse(std::string_view text);
};

/// Chooses, of what `rest` chooses, the modules that are a `T`: an Impl type or its holder.
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

/// A module of a tree that a choice meant.
struct ChosenModule {
  std::string path{};  ///< in the tree; "" is the root
  std::string type{};  ///< as it is written in code
};

/// A module that cannot be made a region from outside.
struct RefusedModule {
  std::string path{};    ///< in the tree; "" is the root
  std::string type{};    ///< as it is written in code
  std::string reason{};  ///< why not
  std::string cure{};    ///< what to write instead
};

/// The result of `apply_checkpointing`.
struct AppliedCheckpointing {
  std::vector<ChosenModule> regions{};   ///< chosen, and regions now
  std::vector<RefusedModule> refused{};  ///< chosen, and called as before
  /// A line for each.
  REMAT_API std::string to_string() const;
};

/// Makes the chosen modules regions, without a change of the model's source. What can be:
///
/// - every `Checkpointed`, wherever it is: it is switched on;
/// - every element of a `torch::nn::Sequential`, or of a class that derives from it, of any module
///   type, with any arguments and results. What the Sequential calls becomes a region around the
///   module's own forward; the module itself, its name, `children()`, parameters, buffers, archives
///   and printed text stay as they are, and so do `ptr(i)` and `[i]`. Only `at<T>(i)`, `ptr<T>(i)`
///   and AnyModule's `get<T>()` of such an element throw meanwhile: `ptr(i)->as<T>()` does it.
///   Clones of the Sequential, and of modules that contain it, have regions of their own.
///
/// Elements of a ModuleList or ModuleDict, members and the root are called through their own type,
/// where nothing can step in: they are in `refused`, with what to write instead. Training flags and
/// buffers (running statistics) are those of forward in each recompute, as `Checkpointed` and
/// `BufferPolicy` say. Tensors in arguments are inputs of the region where the type is a tensor or
/// a standard container of tensors; a struct is copied as it is. A forward that is noexcept cannot
/// be told: no stop or error could pass it, and the process would end; leave such elements out.
/// `set_checkpointing` and `set_checkpoint_level` switch these regions, too.
///
/// Without options a Checkpointed keeps its own, an element that is on keeps what it has, and
/// others get `ModuleOptions{}`; those without a name are named by their path. With options all
/// chosen get those, named by their path; a name gets the path behind it. Doing so again changes
/// the options, and no more.
/// Memory: of a region, as `checkpoint()` says. Graphs that exist keep what they have.
/// Threads: no other thread may use the tree meanwhile, and no forward of it run; after it, as
/// `Checkpointed`.
/// Throws `c10::ValueError` for a choice without a condition, one that fits nothing, or one that is
/// wrong, and for options with `enabled = false`.
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

/// Ends that for all modules of the tree: Sequentials call their elements as before, and each
/// `Checkpointed` is switched off. Returns those that were regions; what was none stays as it was.
/// Graphs that exist still recompute. Threads and errors: as `apply_checkpointing`.
REMAT_API std::vector<ChosenModule> remove_checkpointing(torch::nn::Module& root);
/// Ends it for the chosen modules.
REMAT_API std::vector<ChosenModule> remove_checkpointing(torch::nn::Module& root,
                                                         const ModuleChoice& choice);

/// A module that should be a region, and is called past it.
struct UnusedRegion {
  std::string path{};    ///< in the tree; "" is the root
  std::string type{};    ///< as it is written in code
  std::string reason{};  ///< what was seen
  std::string cure{};    ///< what to write instead
};

/// Finds what should be a region and never was: each `Checkpointed` below `root`, and each element
/// that `apply_checkpointing` switched on, which is on, some of whose parameters are in the graph
/// of `result`, and whose own call was never reached. That is how
/// `list[i]->as<Block>()->forward(x)` ends, or a plain holder of a Checkpointed: the results are
/// right, and all memory is held. Ask it once, after a forward:
///
///     for (const auto& unused : remat::unused_regions(*net, loss)) std::cerr << unused.cure << '\n';
///
/// "Never" is since the module was made, or since `reset_unused_regions`: a module that is called
/// both ways is not found. What is switched off, or in eval mode with `training_only`, when this
/// asks is left out. A call under a `DisableCheckpointGuard`, or one that `SkipBatchNorm` runs
/// plainly, counts as reached; one without grad mode does not, as it leaves nothing in a graph. A
/// module without parameters that require grad is never found, and one whose parameters others use,
/// too, may be found though nobody called it. It walks the graph once, with or without a backward
/// before it. Threads: no forward of `root` may run meanwhile.
/// Throws `c10::ValueError` for a `result` without a graph.
[[nodiscard]] REMAT_API std::vector<UnusedRegion> unused_regions(torch::nn::Module& root,
                                                                 const at::Tensor& result);
/// Forgets which calls were reached, for all below `root`.
REMAT_API void reset_unused_regions(torch::nn::Module& root);

}  // namespace remat
