// Definitions of apply.h: finds how a module of a tree is called; switches, refuses and reports
// modules.

#include "remat/apply.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <string_view>

#include "lib/apply/element_region.h"
#include "lib/apply/module_tree.h"
#include "lib/seam/stand_in.h"
#include "lib/state/module_paths.h"
#include "lib/tensor/graph_walk.h"
#include "remat/paths.h"

namespace remat {

using torch::nn::AnyModule;
using torch::nn::SequentialImpl;

namespace {

/// Returns the element that a Sequential calls for one of its children: the k-th child with this
/// module is the k-th element with it. Null if the Sequential calls another module instead.
AnyModule* element_of(const TreeModule& child) {
  auto* const sequential = dynamic_cast<SequentialImpl*>(child.parent);
  if (sequential == nullptr) return nullptr;
  int64_t same_before = 0;
  for (const auto& sibling : sequential->named_children()) {
    if (sibling.key() == child.name) break;
    same_before += sibling.value().get() == child.module ? 1 : 0;
  }
  for (AnyModule& element : *sequential)
    if (!element.is_empty() && element.ptr().get() == child.module && same_before-- == 0)
      return &element;
  return nullptr;
}

/// The way in which a chosen module is called.
struct Way {
  const TreeModule* chosen = nullptr;
  AnyModule* element = nullptr;             // an element that a stand-in can replace
  std::shared_ptr<seam::StandIn> stand_in;  // keeps the region
  detail::ModuleRegion* region = nullptr;   // an existing region

  bool is_possible() const { return element != nullptr || region != nullptr; }
};

Way way_to(const TreeModule& chosen) {
  Way way;
  way.chosen = &chosen;
  AnyModule* const element = element_of(chosen);
  if (element != nullptr) way.stand_in = seam::stand_in_of(*element);
  if (way.stand_in != nullptr) {
    way.region = detail::region_of(*way.stand_in);
    return way;
  }
  // A Checkpointed that was pushed as its wrapped type is called without its own forward: a
  // stand-in can replace it.
  const bool is_called_past = element != nullptr && element->type_info() != typeid(*chosen.module);
  if (!is_called_past) way.region = detail::region_of(*chosen.module);
  if (way.region == nullptr) way.element = element;
  return way;
}

ChosenModule named(const TreeModule& module) { return {module.path, written_type(*module.module)}; }

std::string last_part(const std::string& type) {
  const auto colons = type.find('<') == type.npos ? type.rfind("::") : type.npos;
  return colons == type.npos ? type : type.substr(colons + 2);
}

std::string in_words(const std::string& path, const std::string& type) {
  return fmt::format("{} ({})", path.empty() ? "the root" : path, type);
}

/// Returns the Checkpointed type to write for a module.
std::string checkpointed_type(const TreeModule& module) {
  return fmt::format("remat::Checkpointed<{}>", plain_type(written_type(*module.module)));
}

RefusedModule refused(const TreeModule& chosen) {
  const std::string type = written_type(*chosen.module);
  const std::string children = chosen.path.empty() ? "*" : chosen.path + ".*";
  const auto is_a = [](torch::nn::Module* module, auto* like) {
    return dynamic_cast<decltype(like)>(module) != nullptr;
  };
  torch::nn::ModuleListImpl* const list = nullptr;
  torch::nn::ModuleDictImpl* const dict = nullptr;
  SequentialImpl* const sequential = nullptr;
  std::string reason, cure;
  if (is_a(chosen.module, list) || is_a(chosen.module, dict)) {
    reason = "it has no forward, so it cannot be a region";
    cure = fmt::format("choose its elements: name={}", children);
  } else if (is_a(chosen.module, sequential)) {
    reason = "a Sequential is called through its own type, so remat cannot intercept the call";
    cure = fmt::format(
        "choose its elements (name={}), or call remat::checkpoint_sequential(sequential, "
        "segments, x)",
        children);
  } else if (is_a(chosen.parent, list)) {
    reason =
        "an element of a ModuleList is called through its own type, so remat cannot "
        "intercept the call";
    cure = fmt::format(
        "fill the list with push_back({0}(...)), and call list[i]->as<{0}>()->forward(...)",
        checkpointed_type(chosen));
  } else if (is_a(chosen.parent, dict)) {
    reason =
        "an element of a ModuleDict is called through its own type, so remat cannot "
        "intercept the call";
    cure = fmt::format(
        "put a {0}(...) into the dictionary, and call dict[\"{1}\"]->as<{0}>()->forward(...)",
        checkpointed_type(chosen), chosen.name);
  } else if (is_a(chosen.parent, sequential)) {
    reason =
        "replace_module() registered it in the Sequential, but the Sequential still calls "
        "the former module";
    cure = "build the Sequential again with this module";
  } else if (chosen.parent == nullptr) {
    reason =
        "the program calls the root of the tree through its own type, so remat cannot intercept "
        "the call";
    cure = fmt::format("call remat::checkpoint(module, ...), or create the module as {}(...)",
                       checkpointed_type(chosen));
  } else {
    const std::string owner = last_part(written_type(*chosen.parent));
    reason = fmt::format(
        "{} calls its member through the member's own type, so remat cannot intercept the call",
        owner);
    cure = fmt::format("declare the member {1} of {2} as {0}", checkpointed_type(chosen),
                       chosen.name, owner);
  }
  return {chosen.path, type, std::move(reason), std::move(cure)};
}

std::string line_of(const RefusedModule& refused) {
  return fmt::format("{}: {}. Hint: {}.", in_words(refused.path, refused.type), refused.reason,
                     refused.cure);
}

ModuleOptions options_at(const std::string& path, ModuleOptions options) {
  std::string& name = options.checkpoint.name;
  if (!path.empty()) name += (name.empty() ? "" : " ") + path;
  return options;
}

void switch_on(const Way& way, const ModuleOptions* options, const Policy& policy) {
  const std::string& path = way.chosen->path;
  ModuleOptions own = options != nullptr      ? *options
                      : way.region != nullptr ? way.region->options()
                                              : ModuleOptions{};
  if (options != nullptr || own.checkpoint.name.empty()) own = options_at(path, std::move(own));
  if (policy) own.checkpoint.policy = policy;
  if (way.region != nullptr) {
    way.region->set_options(std::move(own));
    way.region->enable(true);
    return;
  }
  *way.element =
      seam::any_module_of(std::make_shared<ElementRegion>(*way.element, std::move(own), true));
}

AppliedCheckpointing apply(torch::nn::Module& root, const ModuleChoice& choice,
                           const ModuleOptions* options, bool all_or_nothing) {
  const std::string_view verb =
      all_or_nothing ? "remat::require_checkpointing" : "remat::apply_checkpointing";
  TORCH_CHECK_VALUE(
      has_condition(choice), verb,
      ": the choice had no condition. Cause: every module would become a region inside the "
      "region of its parent. Hint: choose by name, type or a function: "
      "{.type = \"Bottleneck\", .every = 2}.");
  TORCH_CHECK_VALUE(options == nullptr || options->enabled, verb,
                    ": ModuleOptions::enabled was false. Cause: this function only switches "
                    "regions on. Hint: call remat::remove_checkpointing(root), or "
                    "remat::set_checkpointing(root, false).");
  TORCH_CHECK_VALUE(options == nullptr || options->level >= 0, verb, ": ModuleOptions::level was ",
                    options == nullptr ? 0 : options->level,
                    ". Hint: set 0 for never, or the checkpoint level from which the module is a "
                    "region (1 or more).");
  TORCH_CHECK_VALUE(!choice.policy || options == nullptr || !options->checkpoint.policy, verb,
                    ": the choice had a policy, and the options had one. Hint: leave one out, or "
                    "join them with |.");
  const std::vector<TreeModule> chosen = chosen_of(root, choice, verb);
  AppliedCheckpointing done;
  std::vector<Way> ways;
  for (const TreeModule& each : chosen) {
    ways.push_back(way_to(each));
    if (ways.back().is_possible())
      done.regions.push_back(named(each));
    else
      done.refused.push_back(refused(each));
  }
  if (all_or_nothing && !done.refused.empty()) {
    std::string lines;
    for (const RefusedModule& each : done.refused) lines += "\n  " + line_of(each);
    TORCH_CHECK_VALUE(false, verb, ": ", done.refused.size(), " of ", chosen.size(),
                      " chosen modules cannot be made regions from outside; no module was "
                      "changed.",
                      lines);
  }
  for (const Way& way : ways)
    if (way.is_possible()) switch_on(way, options, choice.policy);
  if (!is_in_tree(root)) register_tree(root);
  return done;
}

std::vector<ChosenModule> switch_off(const std::vector<TreeModule>& chosen) {
  std::vector<ChosenModule> removed;
  for (const TreeModule& each : chosen) {
    const Way way = way_to(each);
    if (way.region == nullptr) continue;
    if (way.region->is_enabled()) removed.push_back(named(each));
    way.region->enable(false);
    if (way.stand_in != nullptr) *element_of(each) = AnyModule(way.stand_in->original());
  }
  return removed;
}

// ---- unused regions -----------------------------------------------------------------------------

/// Returns the region that the module should run in, also for a Checkpointed whose own forward is
/// not called.
detail::ModuleRegion* region_at(const Way& way) {
  return way.region != nullptr ? way.region : detail::region_of(*way.chosen->module);
}

bool has_parameter_in(const Reached& graph, torch::nn::Module& module) {
  return std::ranges::any_of(module.parameters(), [&](const at::Tensor& parameter) {
    return graph.contain(GradientPlace::of(parameter));
  });
}

UnusedRegion unused(const Way& way) {
  const TreeModule& module = *way.chosen;
  UnusedRegion found{module.path, written_type(*module.module), "", ""};
  const std::string plain = plain_type(found.type);
  if (way.stand_in != nullptr) {
    found.reason = fmt::format(
        "{} was switched on as an element of a Sequential, and its parameters are in the graph, "
        "but the Sequential never called it: the program called the module through its own type",
        in_words(module.path, found.type));
    found.cure = fmt::format(
        "call the Sequential, or its elements (for (auto& element : *sequential) x = "
        "element.forward(x)), instead of sequential->ptr(i)->as<{}>()->forward(...)",
        plain);
    return found;
  }
  found.reason = fmt::format(
      "{} is switched on, and its parameters are in the graph, but its own forward was never "
      "called: the program called the forward of {}, which is not virtual, or the forwards of "
      "its children",
      in_words(module.path, found.type), plain);
  const std::string checkpointed = checkpointed_type(module);
  if (way.element != nullptr)
    found.cure = fmt::format(
        "add it with push_back() as a {}: the Sequential holds a {}, and calls that "
        "one",
        checkpointed, plain);
  else if (dynamic_cast<torch::nn::ModuleListImpl*>(module.parent) != nullptr ||
           dynamic_cast<torch::nn::ModuleDictImpl*>(module.parent) != nullptr ||
           dynamic_cast<SequentialImpl*>(module.parent) != nullptr)
    found.cure = fmt::format("call it as [i]->as<{0}>()->forward(...), instead of as<{1}>()",
                             checkpointed, plain);
  else
    found.cure = fmt::format(
        "hold and call it as a {0}, instead of through a holder, shared pointer or reference of "
        "{1}",
        checkpointed, plain);
  return found;
}

}  // namespace

std::string AppliedCheckpointing::to_string() const {
  std::string text;
  for (const ChosenModule& each : regions)
    text += "region: " + in_words(each.path, each.type) + "\n";
  for (const RefusedModule& each : refused) text += "no region: " + line_of(each) + "\n";
  return text;
}

AppliedCheckpointing apply_checkpointing(torch::nn::Module& root, const ModuleChoice& choice) {
  return apply(root, choice, nullptr, false);
}

AppliedCheckpointing apply_checkpointing(torch::nn::Module& root, const ModuleChoice& choice,
                                         const ModuleOptions& options) {
  return apply(root, choice, &options, false);
}

std::vector<ChosenModule> require_checkpointing(torch::nn::Module& root,
                                                const ModuleChoice& choice) {
  return apply(root, choice, nullptr, true).regions;
}

std::vector<ChosenModule> require_checkpointing(torch::nn::Module& root, const ModuleChoice& choice,
                                                const ModuleOptions& options) {
  return apply(root, choice, &options, true).regions;
}

std::vector<ChosenModule> remove_checkpointing(torch::nn::Module& root) {
  return switch_off(tree_of(root));
}

std::vector<ChosenModule> remove_checkpointing(torch::nn::Module& root,
                                               const ModuleChoice& choice) {
  return switch_off(chosen_of(root, choice, "remat::remove_checkpointing"));
}

std::vector<UnusedRegion> unused_regions(torch::nn::Module& root, const at::Tensor& result) {
  TORCH_CHECK_VALUE(
      result.defined() && result.requires_grad(),
      "remat::unused_regions: the result had no graph. Cause: it does not require grad, or was "
      "computed without grad mode. Hint: pass the tensor on which backward is called.");
  const Reached graph({torch::autograd::impl::gradient_edge(result)});
  std::vector<UnusedRegion> found;
  for (const TreeModule& each : tree_of(root)) {
    const Way way = way_to(each);
    detail::ModuleRegion* const region = region_at(way);
    if (region != nullptr && region->is_on() && !region->was_called() &&
        has_parameter_in(graph, *each.module))
      found.push_back(unused(way));
  }
  return found;
}

void reset_unused_regions(torch::nn::Module& root) {
  for (const TreeModule& each : tree_of(root))
    if (detail::ModuleRegion* const region = region_at(way_to(each))) region->forget_calls();
}

}  // namespace remat
