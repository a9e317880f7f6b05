#pragma once
// The cost of a chain of stages, as `measure` returns it and `solve` takes it.

#include <cstdint>
#include <optional>
#include <vector>

namespace remat {

/// The cost of one stage of a chain: time in [s], memory in [bytes], each storage once. Budgets do
/// not include parameters and their gradients. All numbers are finite, and negative only where a
/// comment gives that a meaning.
struct StageCost {
  double forward_s = 0;   ///< [seconds] of a forward in grad mode
  double backward_s = 0;  ///< [seconds] of its backward
  /// [seconds] of a forward that early stop ends at the stage's last save; at most `forward_s`.
  /// Negative: `forward_s`. A stage that saves only its input has 0.
  double forward_to_last_save_s = -1;
  int64_t output_bytes = 0;  ///< [bytes] of the stage's result
  /// [bytes] that autograd saves, without the stage's input, its output and parameters.
  int64_t saved_bytes = 0;
  /// [bytes] at the peak of a forward that saves, beyond the other members.
  int64_t forward_tmp_bytes = 0;
  /// [bytes] at the peak of a backward, beyond the other members.
  int64_t backward_tmp_bytes = 0;
  int64_t grad_bytes = 0;    ///< [bytes] of the gradient of the output
  bool saves_output = true;  ///< whether autograd saves the output
  /// [bytes] Replaces `forward_tmp_bytes` for a forward that saves nothing, such as a region's
  /// first run. The tensors of `saved_bytes` are then temporaries. Negative: `forward_tmp_bytes`.
  int64_t unsaved_tmp_bytes = -1;
  /// [bytes] of `saved_bytes` that are freed when the saved tensors of the stage move.
  int64_t movable_bytes = 0;
  /// True if `output_bytes` are freed when the next stage, or a region that begins with it, moves
  /// its input.
  bool has_movable_output = false;
  /// [bytes] that a backward has allocated, beyond `grad_bytes`, when it first reads a saved
  /// tensor. A region that ends with the stage is recomputed while they are alive.
  int64_t first_read_tmp_bytes = 0;
  /// [bytes] Replaces `forward_tmp_bytes` in a recompute that early stop ends in the stage: bytes
  /// beyond `saved_bytes`, and beyond the output if autograd saves it. Negative:
  /// `forward_tmp_bytes`.
  int64_t stopped_tmp_bytes = -1;
  /// True if autograd saves the input of the stage. If not, the input is freed after the stage's
  /// forward, unless it has another owner: the stage before, if it saves its output; the caller; or
  /// an outermost region that begins with the stage.
  bool saves_input = true;
  /// [bytes] of the stage at the peak of its backward: saved tensors, both gradients and
  /// temporaries, without the input, which has other owners until the end. Saved tensors die
  /// operator by operator, so this may be less than the sum of the members above. Negative: that
  /// sum.
  int64_t backward_bytes = -1;
  /// [bytes] `backward_bytes` with the input, for a region that begins with the stage: it holds the
  /// input until all its saved tensors are read. Negative: the sum of both.
  int64_t region_backward_bytes = -1;
  /// [bytes] `backward_bytes` with the input, if only autograd holds it. Negative: the sum of both.
  int64_t lone_backward_bytes = -1;
};

/// The cost of copies of saved tensors to the place that stores them, and back. No number is
/// negative.
struct MoveCost {
  double store_s_per_byte = 0;  ///< [seconds per byte] of copies there, without other work
  double load_s_per_byte = 0;   ///< [seconds per byte] of copies back
  /// Share of these seconds by which a program slows down beside the copies; above 1 if preparing
  /// copies takes longer than copying.
  double held_up_share = 0;
};

/// The cost of a chain of stages. Each stage gets the output of the one before; the last is the
/// loss.
struct ChainCost {
  int64_t input_bytes = 0;       ///< [bytes] of the input, for information: budgets do not count it
  int64_t input_grad_bytes = 0;  ///< [bytes] of the input's gradient; 0 if there is none
  std::vector<StageCost> stages{};  ///< in the order in which they run
  /// Share by which the allocator's rounding increased the bytes at the measured peaks. Budgets do
  /// not count it; `free_budget` subtracts it.
  double rounding = 0;
  /// Cost of moves; empty: plans move no tensors.
  std::optional<MoveCost> moving{};
  /// [bytes] of casts of weights that autocast's cache keeps beyond their stages, if autocast is
  /// enabled around all stages. They count in every peak, from beginning to end, and in no stage's
  /// bytes.
  int64_t cached_cast_bytes = 0;
  /// [bytes] of the last stage that the caller of `backward()` holds until it returns: the result
  /// and its gradient. They count in the backward peaks of all earlier stages.
  int64_t held_to_end_bytes = 0;
};

}  // namespace remat
