#include "lib/budget/kinds.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace remat::budget {

namespace {

bool has_true_schema(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  for (const std::string_view own : {"aten::", "prim::", "prims::"})
    if (name.rfind(own, 0) == 0) return true;
  return op.hasTag(at::Tag::pt2_compliant_tag);
}

Kind find_kind(const c10::OperatorHandle& op, const OpTraits& traits) {
  const std::string& name = op.operator_name().name;
  // The recurrent kernels of accelerators move the state of their dropout, which is an argument.
  constexpr std::array<std::string_view, 3> move_arguments{
      "aten::_cudnn_rnn", "aten::_cudnn_init_dropout_state", "aten::miopen_rnn"};
  Kind kind;
  kind.may_write = !has_true_schema(op);
  // `resize_` may free the old data, which ends the value.
  kind.is_view_only = traits.is_passive || (traits.is_view && !traits.is_mutable) ||
                      op.hasTag(at::Tag::inplace_view);
  kind.counts_version = op.hasTag(at::Tag::inplace_view) && name.rfind("aten::set_", 0) != 0;
  kind.is_blank = name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0;
  const auto& declared = op.schema().arguments();
  kind.fills = traits.is_random || name == "aten::fill_" || name == "aten::zero_" ||
               name == "aten::copy_" ||
               std::any_of(declared.begin(), declared.end(),
                           [](const c10::Argument& each) { return each.is_out(); });
  kind.can_run_again =
      name.rfind("aten::", 0) == 0 && !kind.is_view_only &&
      std::none_of(move_arguments.begin(), move_arguments.end(),
                   [&](std::string_view each) { return name.rfind(each, 0) == 0; });
  return kind;
}

}  // namespace

const Kind& kind_of(const c10::OperatorHandle& op, const OpTraits& traits) {
  thread_local std::vector<std::pair<bool, Kind>>
      by_name;  // traits and their numbers live as long as the process
  if (by_name.size() <= traits.name_number) by_name.resize(traits.name_number + 1);
  auto& [is_known, kind] = by_name[traits.name_number];
  if (!is_known) {
    kind = find_kind(op, traits);
    is_known = true;
  }
  return kind;
}

}  // namespace remat::budget
