#include "lib/apply/element_region.h"

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "remat/checkpoint.h"

namespace remat {

using torch::nn::AnyModule;
using torch::nn::AnyValue;

namespace {

/// Arguments or result of an element, whose types are known only at run time.
struct ElementValues {
  seam::AnyValues values;
};

template <class T>
bool visit_as(AnyValue& value, TensorVisitor& visitor) {
  T* const found = value.try_get<T>();
  if (found == nullptr) return false;
  detail::Tensors<T>::visit(*found, visitor);
  return true;
}

template <class... T>
void visit_one_of(AnyValue& value, TensorVisitor& visitor) {
  static_cast<void>((visit_as<T>(value, visitor) || ...));
}

/// Visits the tensors of the types that forwards take and return: one or several tensors, and the
/// types of recurrent networks and attention. Copies of each type have their own tensors.
void visit_tensors_of(AnyValue& value, TensorVisitor& visitor) {
  using at::Tensor;
  using std::optional, std::pair, std::tuple, std::vector;
  visit_one_of<Tensor, optional<Tensor>, vector<Tensor>, optional<vector<Tensor>>,
               pair<Tensor, Tensor>, tuple<Tensor>, tuple<Tensor, Tensor>,
               tuple<Tensor, Tensor, Tensor>, tuple<Tensor, Tensor, Tensor, Tensor>,
               tuple<Tensor, tuple<Tensor, Tensor>>, optional<tuple<Tensor, Tensor>>,
               tuple<Tensor, optional<Tensor>>, tuple<Tensor, vector<Tensor>>,
               tuple<vector<Tensor>, Tensor>, vector<vector<Tensor>>, vector<tuple<Tensor, Tensor>>,
               pair<Tensor, vector<Tensor>>, std::array<Tensor, 2>, std::array<Tensor, 3>,
               std::map<std::string, Tensor>, std::unordered_map<std::string, Tensor>>(value,
                                                                                       visitor);
}

}  // namespace

template <>
struct detail::Tensors<ElementValues> {
  // A copy of a hash map may be walked in another order.
  static constexpr bool any = true, ordered = false, shared = false;
  template <class Visit>
  static void visit(ElementValues& all, Visit& visit_tensor) {
    TensorVisitor visitor(visit_tensor);
    for (AnyValue& value : all.values) visit_tensors_of(value, visitor);
  }
  static void own(ElementValues&) {}
};

ElementRegion::ElementRegion(AnyModule original, ModuleOptions options, bool is_enabled)
    : StandIn(std::move(original)),
      module_(this->original().ptr()),
      region_(*module_, this->original().type_info(), std::move(options)) {
  region_.enable(is_enabled);
}

AnyValue ElementRegion::run(seam::AnyValues arguments) {
  if (!region_.is_wanted()) {
    std::optional<detail::ModuleStateGuard> state;
    if (region_.is_watched()) state.emplace(region_);
    const bool is_off_in_eval = region_.is_off_in_eval();
    AnyValue result = seam::call(original(), std::move(arguments));
    const auto watch = [&](at::Tensor& each) { region_.watch_result(each); };
    TensorVisitor visitor(watch);
    if (is_off_in_eval) visit_tensors_of(result, visitor);
    return result;
  }
  const detail::ModuleStateGuard state(region_);
  ElementValues result = checkpoint(
      region_.checkpoint_options(),
      [original = original()](ElementValues given) mutable {
        ElementValues returned;
        returned.values.push_back(seam::call(original, std::move(given.values)));
        return returned;
      },
      ElementValues{std::move(arguments)});
  return std::move(result.values.front());
}

std::shared_ptr<seam::StandIn> ElementRegion::for_clone(AnyModule clone) const {
  return std::make_shared<ElementRegion>(std::move(clone), region_.options(), region_.is_enabled());
}

}  // namespace remat
