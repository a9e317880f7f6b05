#pragma once
// The modules of a tree: their paths, those that match a choice, and the names of their types.

#include <string>
#include <string_view>
#include <vector>

#include "lib/base/type_name.h"
#include "remat/apply.h"

namespace remat {

/// A module at its place in a tree. A module that is registered twice appears twice.
struct TreeModule {
  std::string path, name;  // the name is the last part of the path
  torch::nn::Module* module = nullptr;
  torch::nn::Module* parent = nullptr;  // null: the root
};

/// Returns all modules, parents before their children, in the order of registration.
std::vector<TreeModule> tree_of(torch::nn::Module& root);
/// Returns the modules that match the choice. Throws if the choice is invalid or matches no module.
/// `verb`: the calling function, for errors.
std::vector<TreeModule> chosen_of(torch::nn::Module& root, const ModuleChoice& choice,
                                  std::string_view verb);
/// Returns whether the choice has a condition besides `every`.
bool has_condition(const ModuleChoice& choice);

/// Returns the class of a module as it is written in code.
std::string written_type(const torch::nn::Module& module);

}  // namespace remat
