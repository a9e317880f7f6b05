// The cost of a plan: the Rules applied to sizes, event by event.

#include <algorithm>
#include <utility>

#include "lib/plan/cost.h"

namespace remat {

namespace {

/// Follows one forward and one backward of a plan. It uses nothing of the recurrence in solver.cpp,
/// which is checked against it.
///
/// x_k is the output of stage k, d_k the gradient of x_k, and t_k the other tensors that the graph
/// of stage k keeps. Each counts once, from its first holder to its last.
class Simulator {
 public:
  Simulator(const ChainCost& cost, const Plan& plan, const SolveOptions& options)
      : cost_(cost), options_(options), last_(plan.stages()) {
    const auto stages = static_cast<std::size_t>(last_);
    holders_of_x_.resize(stages + 1);
    owner_.resize(stages + 1);
    calls_.resize(stages + 1);
    stopped_calls_.resize(stages + 1);
    region_holds_.resize(stages + 1);
    load_before_.resize(stages + 1);
    moves_.resize(stages + 1);
    // Frame 0 is the program around all regions; its values exist from the start.
    frames_.push_back({.stages = {1, last_}, .is_recomputed = true});
    for (const PlanRegion& region : plan.regions()) frames_.push_back({.stages = region});
    std::vector<std::vector<PlanItem>> items = items_of(plan);
    for (std::size_t i = 0; i < items.size(); ++i) {
      for (const PlanItem item : items[i])
        (item > 0 ? owner_[item] : frames_[static_cast<std::size_t>(-item)].parent) = i;
      frames_[i].items = std::move(items[i]);
    }
    for (const Frame& frame : frames_)
      if (&frame != &frames_.front() && frame.parent == 0) region_holds_[frame.stages.first] = true;
    if (cost.moving) moving_ = *cost.moving;
    for (const int64_t first : plan.moved()) moves_[first].is_planned = true;
  }

  Simulation result() {
    run_forward();
    run_backward();
    Simulation result;
    result.peak_bytes = peak_ + cost_.cached_cast_bytes;
    result.frames = static_cast<int64_t>(frames_.size()) - 1;
    result.extra_s = options_.frame_cost_s * static_cast<double>(result.frames) + seconds_of_moves_;
    for (int64_t k = 1; k <= last_; ++k) {
      const auto complete = static_cast<double>(calls_[k] - 1);
      result.extra_s += complete * stage(k).forward_s +
                        static_cast<double>(stopped_calls_[k]) * stage(k).forward_to_last_save_s;
      result.calls.push_back(calls_[k] + stopped_calls_[k]);
    }
    return result;
  }

 private:
  struct Frame {
    PlanRegion stages;
    std::size_t parent = 0;
    std::vector<PlanItem> items{};
    bool is_recomputed = false;
  };

  /// The tensors that an item moves, by the item's first stage.
  struct Move {
    bool is_planned = false;  ///< the plan moves the item's saved tensors; of a region, its input
    bool has_input = false;
    int64_t saved_bytes = 0;  ///< besides the input
    int64_t next = 0;         ///< the first stage of the item behind
  };

  const StageCost& stage(int64_t k) const { return cost_.stages[static_cast<std::size_t>(k - 1)]; }
  int64_t bytes_of_x(int64_t k) const { return k == 0 ? 0 : stage(k).output_bytes; }
  int64_t bytes_of_d(int64_t k) const {
    return k == 0 ? cost_.input_grad_bytes : stage(k).grad_bytes;
  }
  void add(int64_t bytes) {
    live_ += bytes;
    peak_ = std::max(peak_, live_);
  }
  void hold_x(int64_t k) {
    if (holders_of_x_[k]++ == 0) add(bytes_of_x(k));
  }
  void drop_x(int64_t k) {
    if (--holders_of_x_[k] == 0) add(-bytes_of_x(k));
  }
  void use(int64_t temporary) {
    add(temporary);
    add(-temporary);
  }

  // Adds the saved tensors of stage k: t_k, and its input and output if it saves them.
  void save(int64_t k) {
    if (stage(k).saves_input) hold_x(k - 1);
    if (stage(k).saves_output) hold_x(k);
    add(stage(k).saved_bytes);
  }
  void release(int64_t k) {
    if (stage(k).saves_input) drop_x(k - 1);
    if (stage(k).saves_output) drop_x(k);
    add(-stage(k).saved_bytes);
  }

  /// Runs the backward of stage k, whose saved tensors are all present. Releases these, its output
  /// and its gradient.
  void finish(int64_t k) {
    const bool is_held_by_region = region_holds_[k];
    const bool is_saved = stage(k).saves_input;
    const int64_t own = (is_saved ? 1 : 0) + (is_held_by_region ? 1 : 0);
    const bool others_hold = holders_of_x_[k - 1] > own;
    const InputHolder holder = others_hold         ? InputHolder::Others
                               : is_held_by_region ? InputHolder::Region
                                                   : InputHolder::Nobody;
    const bool has_output = stage(k).saves_output || k == last_;
    const int64_t counted = stage(k).saved_bytes + bytes_of_d(k) +
                            (has_output ? bytes_of_x(k) : 0) +
                            (!others_hold && own > 0 ? bytes_of_x(k - 1) : 0);
    use(backward_peak(stage(k), holder) - counted);
    release(k);  // a saved tensor is released when it is unpacked (Rule 4)
    if (is_held_by_region) drop_x(k - 1);
    add(-bytes_of_d(k));
    if (k == last_) drop_x(k);
    if (k == last_ && k > 1) add(cost_.held_to_end_bytes);
    add(bytes_of_d(k - 1));
  }

  /// Runs a region for the first time: none of its saved tensors stay, and regions inside make no
  /// difference. Takes over the hold on the input and leaves one on the output.
  void sweep(const PlanRegion& region) {
    for (int64_t k = region.first; k <= region.last; ++k) {
      ++calls_[k];
      hold_x(k);
      use(stage(k).unsaved_tmp_bytes);
      drop_x(k - 1);
    }
  }

  // The program's own items, of which some move their saved tensors. Moved tensors stay in memory
  // until the item behind has run, and return at the beginning of that item's backward.

  /// Ends an item. Waits for copies of the item before, if that moves, and begins those of this
  /// item.
  void end_item(int64_t first, int64_t last) {
    if (moved_before_ > 0) {
      Move& before = moves_[moved_before_];
      before.next = first;
      wait_for(before, moving_.store_s_per_byte, forward_seconds(first, last));
      add(-before.saved_bytes);
      if (before.has_input) drop_x(moved_before_ - 1);
      load_before_[last] = moved_before_;
    }
    moved_before_ = 0;
    Move& move = moves_[first];
    if (move.is_planned) {
      const bool is_stage = owner_[first] == 0;
      const bool holds_input = !is_stage || stage(first).saves_input;
      move.has_input = first > 1 && stage(first - 1).has_movable_output && holds_input &&
                       holders_of_x_[first - 1] == 1;
      move.saved_bytes = is_stage ? stage(first).movable_bytes : 0;
      const double copies = moving_.store_s_per_byte + moving_.load_s_per_byte;
      seconds_of_moves_ += moving_.held_up_share * copies * bytes_of(move, first);
      moved_before_ = first;
    }
  }

  double bytes_of(const Move& move, int64_t first) const {
    return static_cast<double>(move.saved_bytes + (move.has_input ? bytes_of_x(first - 1) : 0));
  }
  void wait_for(const Move& move, double s_per_byte, double beside) {
    const auto first = static_cast<int64_t>(&move - moves_.data());
    seconds_of_moves_ += std::max(0.0, s_per_byte * bytes_of(move, first) - beside);
  }
  double forward_seconds(int64_t first, int64_t last) const {
    double seconds = 0;
    for (int64_t k = first; k <= last; ++k) seconds += stage(k).forward_s;
    return seconds;
  }

  /// Reads moved tensors back at the beginning of the backward of the item that ends with stage k.
  void load_before(int64_t k) {
    const int64_t first = load_before_[k];
    if (first == 0) return;
    const Move& move = moves_[first];
    double beside = 0;
    for (int64_t each = move.next; each <= k; ++each) beside += stage(each).backward_s;
    if (owner_[k] != 0)
      beside += forward_seconds(move.next, k - 1) + stage(k).forward_to_last_save_s;
    wait_for(move, moving_.load_s_per_byte, beside);
    add(move.saved_bytes);
    if (move.has_input) hold_x(first - 1);
  }

  /// Runs a frame's items and keeps their saved tensors. This is forward for the program, and a
  /// recompute for a region (Rules 2, 3), which ends at its last save (Rule 5). Returns the last
  /// stage whose output is held.
  int64_t fill(const Frame& frame) {
    const bool may_stop = options_.early_stop && &frame != &frames_.front();
    int64_t reached = frame.stages.first - 1;
    hold_x(reached);
    for (const PlanItem& item : frame.items) {
      const bool is_last = may_stop && &item == &frame.items.back();
      if (item < 0) {
        const PlanRegion& inner = frames_[static_cast<std::size_t>(-item)].stages;
        hold_x(reached);  // the inner region's input, which this frame saves
        if (is_last) return reached;
        sweep(inner);
        reached = inner.last;
        if (&frame == &frames_.front()) end_item(inner.first, inner.last);
        continue;
      }
      const int64_t k = item;
      if (is_last) {
        ++stopped_calls_[k];
        const bool is_cut = stage(k).forward_to_last_save_s < stage(k).forward_s;
        if (!is_cut || stage(k).saves_output) hold_x(k);
        save(k);
        use(is_cut ? stage(k).stopped_tmp_bytes : stage(k).forward_tmp_bytes);
        if (!is_cut || stage(k).saves_output) drop_x(k);
        return reached;
      }
      ++calls_[k];
      hold_x(k);
      save(k);
      use(stage(k).forward_tmp_bytes);
      drop_x(reached);
      reached = k;
      if (&frame == &frames_.front()) end_item(k, k);
    }
    return reached;
  }

  void run_forward() {
    // The caller holds the input throughout, in no budget, and receives and keeps the output.
    hold_x(0);
    fill(frames_.front());
  }

  void run_backward() {
    add(bytes_of_d(last_));
    for (int64_t k = last_; k >= 1; --k) {
      load_before(k);
      recompute(owner_[k], stage(k).first_read_tmp_bytes);
      finish(k);
    }
  }

  /// Recomputes a frame once in a backward (Rule 7), after the frames around it, which hold its
  /// input. Happens at the first read, beside the memory that backward has made by then.
  void recompute(std::size_t frame, int64_t first_read_tmp_bytes) {
    std::vector<std::size_t> waiting;
    for (; !frames_[frame].is_recomputed; frame = frames_[frame].parent) waiting.push_back(frame);
    if (waiting.empty()) return;
    add(first_read_tmp_bytes);
    for (; !waiting.empty(); waiting.pop_back()) {
      Frame& next = frames_[waiting.back()];
      // A slot of the region around has held the input until now. Regions of the program hold their
      // inputs themselves.
      if (next.parent > 0) drop_x(next.stages.first - 1);
      drop_x(fill(next));
      next.is_recomputed = true;
    }
    add(-first_read_tmp_bytes);
  }

  const ChainCost& cost_;
  const SolveOptions& options_;
  const int64_t last_;
  std::vector<Frame> frames_;
  std::vector<std::size_t> owner_;  // the innermost frame of a stage
  std::vector<int64_t> holders_of_x_;
  // Stages with which an outermost region begins, which holds the input of the stage.
  std::vector<bool> region_holds_;
  std::vector<int64_t> calls_, stopped_calls_;  // complete calls; calls that early stop ended
  MoveCost moving_{};
  std::vector<Move> moves_;  // by the item's first stage
  // Maps an item's last stage to the move that is read back beside the item's backward.
  std::vector<int64_t> load_before_;
  int64_t moved_before_ = 0;  // the first stage of the item before, if that moves; else 0
  double seconds_of_moves_ = 0;
  int64_t live_ = 0, peak_ = 0;
};

}  // namespace

Simulation simulate(const ChainCost& cost, const Plan& plan, const SolveOptions& options) {
  const ChainCost full = complete(cost, options);
  TORCH_CHECK_VALUE(static_cast<int64_t>(cost.stages.size()) == plan.stages(),
                    "remat::simulate: the plan has ", plan.stages(), " stages, the chain has ",
                    cost.stages.size(), ".");
  TORCH_CHECK_VALUE(
      cost.moving || !moves_anything(plan),
      "remat::simulate: the plan moves items, but the chain has no ChainCost::moving.\n"
      "Hint: measure with MeasureOptions::moving.");
  Simulation result = Simulator(full, plan, options).result();
  result.depth = plan.depth();
  return result;
}

}  // namespace remat
