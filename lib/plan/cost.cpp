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

}  // namespace

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
    bytes.add("output_bytes", stage.output_bytes, number);
    bytes.add("saved_bytes", stage.saved_bytes, number);
    bytes.add("forward_tmp_bytes", stage.forward_tmp_bytes, number);
    bytes.add("backward_tmp_bytes", stage.backward_tmp_bytes, number);
    bytes.add("grad_bytes", stage.grad_bytes, number);
    if (stage.unsaved_tmp_bytes >= 0)
      bytes.add("unsaved_tmp_bytes", stage.unsaved_tmp_bytes, number);
    bytes.add("first_read_tmp_bytes", stage.first_read_tmp_bytes, number);
    if (stage.stopped_tmp_bytes >= 0)
      bytes.add("stopped_tmp_bytes", stage.stopped_tmp_bytes, number);
    if (stage.backward_bytes >= 0) bytes.add("backward_bytes", stage.backward_bytes, number);
    if (stage.region_backward_bytes >= 0)
      bytes.add("region_backward_bytes", stage.region_backward_bytes, number);
    if (stage.lone_backward_bytes >= 0)
      bytes.add("lone_backward_bytes", stage.lone_backward_bytes, number);
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

namespace {

const StageCost& stage_of(const ChainCost& cost, int64_t k) {
  return cost.stages[static_cast<std::size_t>(k - 1)];
}
int64_t input_bytes(const ChainCost& cost, int64_t k) {
  return k == 1 ? 0 : stage_of(cost, k - 1).output_bytes;
}
int64_t input_grad_bytes(const ChainCost& cost, int64_t k) {
  return k == 1 ? cost.input_grad_bytes : stage_of(cost, k - 1).grad_bytes;
}

}  // namespace

int64_t backward_peak(const ChainCost& cost, int64_t k, InputHolder holder) {
  const StageCost& stage = stage_of(cost, k);
  const int64_t input_grad = input_grad_bytes(cost, k);
  const bool is_input_counted =
      holder == InputHolder::Region || (holder == InputHolder::Nobody && stage.saves_input);
  const int64_t input = is_input_counted ? input_bytes(cost, k) : 0;
  // The caller holds the last output.
  const bool is_last = k == static_cast<int64_t>(cost.stages.size());
  const int64_t at_begin = stage.saved_bytes + stage.grad_bytes +
                           (stage.saves_output || is_last ? stage.output_bytes : 0);
  int64_t peak = stage.backward_bytes >= 0 ? stage.backward_bytes
                                           : at_begin + input_grad + stage.backward_tmp_bytes;
  const int64_t with_input = holder == InputHolder::Region   ? stage.region_backward_bytes
                             : holder == InputHolder::Nobody ? stage.lone_backward_bytes
                                                             : -1;
  peak = with_input >= 0 ? with_input : peak + input;
  peak = std::max({peak, at_begin + input, input_grad});
  // A region holds the input for as long as it is needed, or longer.
  return holder == InputHolder::Region ? std::max(peak, backward_peak(cost, k, InputHolder::Nobody))
                                       : peak;
}

double seconds_of_copies(const MoveCost& moving, const StageCost& stage) {
  const auto bytes =
      static_cast<double>(stage.output_bytes) + static_cast<double>(stage.saved_bytes);
  return (1 + moving.held_up_share) * bytes * (moving.store_s_per_byte + moving.load_s_per_byte);
}

}  // namespace remat
