#include "lib/inner_backward.h"

#include <algorithm>
#include <optional>

#include "lib/inputs.h"
#include "lib/match.h"

namespace remat {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

constexpr char beyond[] =
    "a gradient was taken inside a region of a tensor that is reached through the history of an "
    "argument";
constexpr char hooks[] = "a gradient was taken inside a region of an argument that has hooks";
constexpr char original[] =
    "a gradient was taken inside a region that counts both an argument and the same tensor as a "
    "capture";

bool has(const edge_list& targets, const GradientPlace& place) {
  return std::any_of(targets.begin(), targets.end(),
                     [&](const Edge& each) { return GradientPlace::of(each) == place; });
}

}  // namespace

const char* InnerBackwards::against(int64_t number) const {
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [number](const auto& each) { return each.first == number; });
  return found == all_.end() ? nullptr : found->second;
}

const char* unrepeatable(const Inputs& inputs, const edge_list& roots, const edge_list& targets) {
  c10::SmallVector<GradientPlace, 4> places;
  inputs.visit_places([&](const GradientPlace& place) {
    if (place.is_somewhere()) places.push_back(place);
  });
  if (places.empty()) return nullptr;
  const auto is_input = [&places](const GradientPlace& place) {
    return std::any_of(places.begin(), places.end(),
                       [&](const GradientPlace& each) { return each.at == place.at; });
  };
  const Reached near(roots, [&](const GradientPlace& place) { return !is_input(place); });
  for (const GradientPlace& place : places) {
    Node* const node = near.node_at(place);
    if (node == nullptr) continue;
    const bool takes = targets.empty() ? is_leaf(*node) : has(targets, place);
    if (takes && !node->tensor_pre_hooks().empty()) return hooks;
    std::optional<Reached> far;  // what only forward comes to
    for (const Edge& target : targets) {
      const GradientPlace wanted = GradientPlace::of(target);
      if (wanted == place) continue;
      if (!far) far.emplace(node->next_edges());
      if (far->contain(wanted)) return beyond;
    }
  }
  return nullptr;
}

const char* meets_original(const Inputs& inputs, const std::vector<GradientPlace>& aliases,
                           const edge_list& roots, const edge_list& targets) {
  std::optional<Reached> all;
  const char* reason = nullptr;
  std::size_t number = 0;
  inputs.visit_places([&](const GradientPlace& then) {
    const GradientPlace& alias = aliases[number++];
    if (reason != nullptr || !then.is_somewhere() || !alias.is_somewhere()) return;
    if (!targets.empty() && !has(targets, then) && !has(targets, alias)) return;
    if (!all) all.emplace(roots);
    const Node* const node = all->node_at(alias);
    if (node != nullptr && all->contain(then) && (!targets.empty() || is_leaf(*node)))
      reason = original;
  });
  return reason;
}

void refuse_backward(const char* reason) {
  throw_unsupported(
      reason,
      "a recompute has its arguments without their history and their hooks, so that its "
      "backward would give another gradient than forward's did",
      "take the gradient outside the region, or of a tensor that the function makes");
}

}  // namespace remat
