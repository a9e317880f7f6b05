#include "lib/frame/inner_backward.h"

#include <algorithm>
#include <optional>

#include "lib/frame/inputs.h"
#include "lib/frame/mismatch.h"

namespace remat {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

constexpr char beyond[] =
    "a gradient was taken inside a region with respect to a tensor in the history of an argument";
constexpr char hooks[] =
    "a gradient was taken inside a region with respect to an argument that "
    "has hooks";
constexpr char original[] =
    "a gradient was taken inside a region with respect to a tensor that is both an argument and "
    "a capture";

bool has(const edge_list& edges, const GradientPlace& place) {
  return std::any_of(edges.begin(), edges.end(),
                     [&](const Edge& each) { return GradientPlace::of(each) == place; });
}

}  // namespace

AskedOfInputs asked_of(const Inputs& inputs, const edge_list& roots, const edge_list& targets) {
  struct Place {
    GradientPlace place;
    bool has_hooks;
  };
  c10::SmallVector<Place, 4> places;  // in the order of the inputs
  bool has_any = false;
  inputs.visit_edges([&](const GradientPlace& place, bool has_hooks) {
    places.push_back({place, has_hooks});
    has_any |= place.is_somewhere();
  });
  AskedOfInputs asked;
  if (!has_any) return asked;
  const Reached near(roots, [&places](const GradientPlace& place) {
    return std::none_of(places.begin(), places.end(),
                        [&](const Place& each) { return each.place == place; });
  });
  edge_list below;
  bool leads_on = false;  // from an input to another target
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& [place, has_hooks] = places[i];
    Node* const node = near.node_at(place);
    if (node == nullptr) continue;
    const bool is_target = has(targets, place);
    if (is_target || (targets.empty() && is_leaf(*node)))
      asked.inputs.push_back(static_cast<uint32_t>(i));
    // The engine runs the hooks of a root even if no path from it leads to a target.
    if (has_hooks && (has(roots, place) || (targets.empty() ? is_leaf(*node) : is_target)))
      asked.against = hooks;
    below.insert(below.end(), node->next_edges().begin(), node->next_edges().end());
    leads_on |= std::any_of(targets.begin(), targets.end(),
                            [&](const Edge& each) { return GradientPlace::of(each) != place; });
  }
  if (asked.against != nullptr || !leads_on || below.empty()) return asked;
  const Reached far = Reached::towards(targets, below);  // the part that only forward reaches
  if (std::any_of(targets.begin(), targets.end(),
                  [&far](const Edge& each) { return far.contain(each); }))
    asked.against = beyond;
  return asked;
}

// The input was a target of forward's backward. Its original may be a target now, or its alias.
// LibTorch replaces the node of an alias that nothing uses.
const char* against(const AskedOfInputs& asked, const Inputs& inputs,
                    c10::ArrayRef<WeakEdge> aliases, const edge_list& roots,
                    const edge_list& targets) {
  if (asked.against != nullptr || asked.inputs.empty()) return asked.against;
  const Reached all(roots);
  bool is_short = false;
  uint32_t number = 0;
  inputs.visit_edges([&](const GradientPlace& then, bool) {
    const uint32_t i = number++;
    if (std::find(asked.inputs.begin(), asked.inputs.end(), i) == asked.inputs.end()) return;
    const GradientPlace alias = aliases.at(i).get();
    if (alias == then) return;  // a leaf as it is
    const bool takes_original = has(targets, then);
    const bool takes_alias = !takes_original || has(targets, alias);
    is_short |= targets.empty()
                    ? all.contain(then) && all.contain(alias)
                    : (takes_original && all.contain(alias)) || (takes_alias && all.contain(then));
  });
  return is_short ? original : nullptr;
}

void refuse_backward(const Region& region, const char* reason) {
  throw_unsupported(
      region, reason,
      "in a recompute the arguments have no history and no hooks, so this gradient would differ "
      "from that of forward",
      "take the gradient outside the region, or with respect to a tensor that the function "
      "creates");
}

}  // namespace remat
