#pragma once
// The modules of a tree with their paths, which of them a choice means, and what their types are
// called.

#include <string>
#include <string_view>
#include <vector>

#include "lib/base/type_name.h"
#include "remat/apply.h"

namespace remat {

/// A module where it is in a tree. One that is registered twice is there twice.
struct TreeModule {
  std::string path, name;  // the name is the last part of the path
  torch::nn::Module* module = nullptr;
  torch::nn::Module* parent = nullptr;  // null: the root
};

/// Parents before their children, in the order of registration.
std::vector<TreeModule> tree_of(torch::nn::Module& root);
/// Those that the choice means. Throws if it is wrong or means none; `verb` is who asks.
std::vector<TreeModule> chosen_of(torch::nn::Module& root, const ModuleChoice& choice,
                                  std::string_view verb);
/// Whether it has a condition beyond `every`.
bool has_condition(const ModuleChoice& choice);

/// The class of a module as it is written in code.
std::string written_type(const torch::nn::Module& module);

}  // namespace remat
