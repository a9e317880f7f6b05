// The functions and the exceptions that the table has as a whole.

#include "tests/table/table.h"

namespace table {

std::vector<Function>& functions() {
  static std::vector<Function> all = [] {
    std::vector<Function> rows;
    add_arguments(rows);
    add_custom(rows);
    add_views(rows);
    add_layers(rows);
    add_algebra(rows);
    add_prepared(rows);
    add_modules(rows);
    return rows;
  }();
  return all;
}

std::vector<Exception>& shared_exceptions() {
  using Kind = Exception::Kind;
  static std::vector<Exception> all{
      {Kind::Skipped, "rng_off/*", "it draws numbers, which the option gives up", "", draws},
      {Kind::Skipped, "budget*/*",
       "LibTorch's gradient is another formula under a dispatch mode, and rounds otherwise", "",
       has_two_formulas},
      {Kind::Skipped, "save_as_float/*", "the guard rounds its numbers", "", is_wide},
      {Kind::MayRaise, "strict_unpack/*", "the option forbids what the function does",
       "already unpacked once", reads_twice},
      {Kind::MayRaise, "exec_group/@(grad_thrice|partial|*_order|backward_inside)",
       "these backwards read the same saved tensors, which a group forbids", "in a GraphExecGroup"},
      {Kind::MayRaise, "policy_*/*", "a kept result was changed in place, which is refused",
       "was kept and then changed in place", writes_kept},
      {Kind::MayRaise, "*/*",
       "an input of a region was changed in place, by the region itself or after it",
       "modified by an inplace operation", writes_args},
      {Kind::Skipped, "@(captured|half_captured)/*",
       "what a function writes to captured tensors it writes again in each recompute", "",
       writes_args},
      {Kind::MayRaise, "*/*", "hooks that copy part what shares memory, which is refused",
       "shares its memory with another argument", writes_args},
      {Kind::MayRaise, "*/*", "the data of an argument were replaced", "given other data",
       replaces_data},
      {Kind::MayRaise, "*/*", "the data of a captured tensor were replaced",
       "A parameter, buffer or captured tensor changed", replaces_data},
      {Kind::Skipped, "capture_ignore/*", "the option asks for the new data", "", replaces_data},
      {Kind::Skipped, "@(disabled|policy_save_region)/*",
       "autograd itself saves there, and saves the object, which has the new data", "",
       replaces_data},
      {Kind::NotRaised, "*/*",
       "the recompute makes anew what was changed, or stops before the change; hooks may have "
       "copied it",
       "", raises_changed},
      {Kind::MayRaise, "*/backward_inside",
       "the error is that of a slot, which does not name the node it was an output of",
       "modified by an inplace operation", raises_changed},
  };
  return all;
}

}  // namespace table
