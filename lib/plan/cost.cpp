#include "lib/plan/cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace remat {

namespace {

void check_seconds(const char* name, double seconds, std::size_t stage) {
  TORCH_CHECK_VALUE(std::isfinite(seconds) && seconds >= 0, "remat::plan: ", name, " of stage ",
                    stage, " must be finite and at least 0 seconds, got ", seconds, ".");
}

void check_move(const char* name, double number) {
  TORCH_CHECK_VALUE(std::isfinite(number) && number >= 0, "remat::plan: MoveCost::", name,
                    " must be finite and at least 0, got ", number, ".");
}

struct BytesOfStage {
  const char* name;
  int64_t StageCost::* member;
  bool may_be_left_out = false;  ///< negative then
};
constexpr BytesOfStage bytes_of_stages[]{
    {"output_bytes", &StageCost::output_bytes},
    {"saved_bytes", &StageCost::saved_bytes},
    {"forward_tmp_bytes", &StageCost::forward_tmp_bytes},
    {"backward_tmp_bytes", &StageCost::backward_tmp_bytes},
    {"grad_bytes", &StageCost::grad_bytes},
    {"unsaved_tmp_bytes", &StageCost::unsaved_tmp_bytes, true},
    {"first_read_tmp_bytes", &StageCost::first_read_tmp_bytes},
    {"stopped_tmp_bytes", &StageCost::stopped_tmp_bytes, true},
    {"backward_bytes", &StageCost::backward_bytes, true},
    {"region_backward_bytes", &StageCost::region_backward_bytes, true},
    {"lone_backward_bytes", &StageCost::lone_backward_bytes, true}};

/// Sums bytes, and refuses negative numbers and overflow.
class Bytes {
 public:
  void add(const char* name, int64_t bytes, std::size_t stage) {
    const std::string where = stage == 0 ? name : c10::str(name, " of stage ", stage);
    TORCH_CHECK_VALUE(bytes >= 0, "remat::plan: ", where, " must be at least 0 bytes, got ", bytes,
                      ".");
    TORCH_CHECK_VALUE(
        bytes <= std::numeric_limits<int64_t>::max() - sum_,
        "remat::plan: the bytes of the chain add up to more than an int64_t holds, at ", where,
        " = ", bytes, ".");
    sum_ += bytes;
  }

 private:
  int64_t sum_ = 0;
};

/// Throws `c10::ValueError` for costs or options that are out of range. After it, sums of bytes
/// cannot overflow: everything that the chain could ever hold adds up to an int64_t.
void check(const ChainCost& cost, const SolveOptions& options) {
  TORCH_CHECK_VALUE(!cost.stages.empty(), "remat::plan: a chain needs at least one stage, got 0.");
  TORCH_CHECK_VALUE(options.max_depth >= 0,
                    "remat::plan: SolveOptions::max_depth must be at least 0 (any), got ",
                    options.max_depth, ".");
  TORCH_CHECK_VALUE(std::isfinite(options.frame_cost_s) && options.frame_cost_s >= 0,
                    "remat::plan: SolveOptions::frame_cost_s must be finite and at least 0, got ",
                    options.frame_cost_s, ".");
  TORCH_CHECK_VALUE(options.eps >= 0 && options.eps < 1,
                    "remat::plan: SolveOptions::eps must be in [0, 1), got ", options.eps, ".");
  if (cost.moving) {
    check_move("store_s_per_byte", cost.moving->store_s_per_byte);
    check_move("load_s_per_byte", cost.moving->load_s_per_byte);
    check_move("held_up_share", cost.moving->held_up_share);
  }
  Bytes bytes;
  bytes.add("input_bytes", cost.input_bytes, 0);
  bytes.add("input_grad_bytes", cost.input_grad_bytes, 0);
  bytes.add("cached_cast_bytes", cost.cached_cast_bytes, 0);
  bytes.add("held_to_end_bytes", cost.held_to_end_bytes, 0);
  double seconds = 0;
  for (std::size_t i = 0; i < cost.stages.size(); ++i) {
    const StageCost& stage = cost.stages[i];
    const std::size_t number = i + 1;
    check_seconds("forward_s", stage.forward_s, number);
    check_seconds("backward_s", stage.backward_s, number);
    TORCH_CHECK_VALUE(std::isfinite(stage.forward_to_last_save_s) &&
                          stage.forward_to_last_save_s <= stage.forward_s,
                      "remat::plan: forward_to_last_save_s of stage ", number,
                      " must be finite and at most its ", "forward_s of ", stage.forward_s,
                      ", got ", stage.forward_to_last_save_s, ".");
    for (const auto& [name, member, may_be_left_out] : bytes_of_stages)
      if (!may_be_left_out || stage.*member >= 0) bytes.add(name, stage.*member, number);
    seconds += stage.forward_s + options.frame_cost_s;
    TORCH_CHECK_VALUE(stage.movable_bytes >= 0 && stage.movable_bytes <= stage.saved_bytes,
                      "remat::plan: movable_bytes of stage ", number,
                      " must be at least 0 and at most its saved_bytes of ", stage.saved_bytes,
                      ", got ", stage.movable_bytes, ".");
    if (cost.moving) seconds += stage.backward_s + seconds_of_copies(*cost.moving, stage);
  }
  const StageCost& last = cost.stages.back();
  TORCH_CHECK_VALUE(
      cost.held_to_end_bytes <= last.output_bytes + last.grad_bytes,
      "remat::plan: held_to_end_bytes must be at most the output_bytes and grad_bytes of "
      "the last stage, ",
      last.output_bytes + last.grad_bytes, ", got ", cost.held_to_end_bytes, ".");
  // Every stage may be called once more for every stage behind it.
  const auto stages = static_cast<double>(cost.stages.size());
  TORCH_CHECK_VALUE(
      std::isfinite(seconds * stages),
      "remat::plan: the seconds of the chain add up to more than a double holds, with "
      "forward_s of all stages and frame_cost_s = ",
      options.frame_cost_s, ".");
}

}  // namespace

ChainCost complete(ChainCost cost, const SolveOptions& options) {
  check(cost, options);
  const auto give = [](int64_t& bytes, int64_t otherwise) {
    bytes = bytes < 0 ? otherwise : bytes;
  };
  int64_t input = 0, input_grad = cost.input_grad_bytes;
  for (StageCost& each : cost.stages) {
    give(each.unsaved_tmp_bytes, each.forward_tmp_bytes);
    give(each.stopped_tmp_bytes, each.forward_tmp_bytes);
    if (!options.early_stop || each.forward_to_last_save_s < 0)
      each.forward_to_last_save_s = each.forward_s;
    // The caller holds the last output.
    const bool has_output = each.saves_output || &each == &cost.stages.back();
    const int64_t at_begin =
        each.saved_bytes + each.grad_bytes + (has_output ? each.output_bytes : 0);
    const int64_t saved_input = each.saves_input ? input : 0;
    int64_t &others = each.backward_bytes, &region = each.region_backward_bytes,
            &lone = each.lone_backward_bytes;
    give(others, at_begin + input_grad + each.backward_tmp_bytes);
    give(region, others + input);
    give(lone, others + saved_input);
    others = std::max({others, at_begin, input_grad});
    lone = std::max({lone, at_begin + saved_input, input_grad});
    // A region holds the input for as long as it is needed, or longer.
    region = std::max({region, at_begin + input, input_grad, lone});
    input = each.output_bytes;
    input_grad = each.grad_bytes;
  }
  return cost;
}

double seconds_of_copies(const MoveCost& moving, const StageCost& stage) {
  const auto bytes =
      static_cast<double>(stage.output_bytes) + static_cast<double>(stage.saved_bytes);
  return (1 + moving.held_up_share) * bytes * (moving.store_s_per_byte + moving.load_s_per_byte);
}

}  // namespace remat
