// Policies that are worth measuring for any stage.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <string_view>

#include "remat/plan.h"

namespace remat {

namespace {

bool is_attention(const PolicyContext& question) {
  return question.op_name.find("_attention") != std::string_view::npos;
}

bool is_no_element_by_element(const PolicyContext& question) {
  return !question.op.hasTag(at::Tag::pointwise);
}

}  // namespace

// Few, as each is run for each stage. A chain of equal stages gets what is between two of them by another one for
// some of its stages.
std::vector<Policy> policies_to_try() {
  return {Policy(is_attention), save_matmuls(), Policy(is_no_element_by_element)};
}

}  // namespace remat
