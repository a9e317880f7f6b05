// Compares a frontier of plans with the best schedules of any kind, on chains that are small enough
// to try all schedules. See METHOD.md.

#include <remat/plan.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"

namespace {

using remat::ChainCost;
using remat::StageCost;

// ================================================================================
// Schedules of any kind
// ================================================================================

/// Finds the least time [whole seconds] in which a chain can run forward and backward under any
/// schedule. One operation and one copy run at a time. Each value (the output of a stage, or the
/// rest of its graph's tensors) may be dropped, made again, copied away and copied back at any full
/// second. Values are x_k and t_k as in lib/plan/simulator.cpp. A backward needs both values of its
/// stage, and its input. The search is breadth first by time.
class Schedules {
 public:
  explicit Schedules(const ChainCost& cost) : cost_(cost), last_(int64_t(cost.stages.size())) {
    if (last_ > kMostStages) throw std::runtime_error("too many stages to try all schedules");
  }

  /// Returns the least seconds; nothing if no schedule within `most` seconds fits.
  std::optional<int64_t> least_seconds(int64_t budget, int64_t most) {
    budget_ = budget;
    known_.clear();
    State start;
    start.backward = last_;
    std::vector<State> now{start};
    known_.insert(key(start));
    for (left_ = most; !now.empty(); --left_) {
      std::vector<State> later;
      // The list grows inside this loop, by states that take no time.
      for (std::size_t i = 0; i < now.size(); ++i) {
        const State state = now[i];
        if (state.backward == 0) return most - left_;
        decide(state, now);
        if (state.operation.left > 0 || state.copy.left > 0) {
          --left_;
          visit(second_later(state), later);
          ++left_;
        }
      }
      now = std::move(later);
    }
    return std::nullopt;
  }

 private:
  static constexpr int64_t kMostStages = 6;
  enum class Kind : uint8_t { None, Forward, SavingForward, Backward, Store, Load };

  struct Work {
    Kind kind = Kind::None;
    int64_t value = 0;  ///< the stage of an operation; the value that is copied
    int64_t left = 0;   ///< [seconds]
  };

  /// Values are bits: x_k is bit k, t_k is bit k + 8.
  struct State {
    uint32_t here = 0, away = 0;
    int64_t backward = 0;  ///< the stage whose backward is next
    Work operation{}, copy{};
  };

  static constexpr uint32_t x(int64_t k) { return 1U << k; }
  static constexpr uint32_t t(int64_t k) { return 1U << (k + 8); }

  const StageCost& stage(int64_t k) const { return cost_.stages[std::size_t(k - 1)]; }
  int64_t gradient_of(int64_t k) const {
    return k == 0 ? cost_.input_grad_bytes : stage(k).grad_bytes;
  }
  int64_t bytes(uint32_t values) const {
    int64_t sum = 0;
    for (int64_t k = 1; k <= last_; ++k)
      sum += ((values & x(k)) != 0 ? stage(k).output_bytes : 0) +
             ((values & t(k)) != 0 ? stage(k).saved_bytes : 0);
    return sum;
  }

  /// Returns the values that an operation reads; `written_by`, those that exist before it ends.
  uint32_t read_by(const State& state) const {
    const int64_t k = state.operation.value;
    switch (state.operation.kind) {
      case Kind::Forward:
      case Kind::SavingForward:
        return x(k - 1);
      case Kind::Backward:
        return x(k - 1) | x(k) | t(k);
      default:
        return 0;
    }
  }
  static uint32_t written_by(const Work& work) {
    switch (work.kind) {
      case Kind::Forward:
        return x(work.value);
      case Kind::SavingForward:
        return x(work.value) | t(work.value);
      case Kind::Load:
        return uint32_t(work.value);
      default:
        return 0;
    }
  }
  bool fits(const State& state) const {
    const uint32_t values = state.here | written_by(state.operation) | written_by(state.copy);
    const int64_t gradients =
        gradient_of(state.backward) +
        (state.operation.kind == Kind::Backward ? gradient_of(state.backward - 1) : 0);
    return bytes(values) + gradients <= budget_;
  }

  void visit(const State& state, std::vector<State>& states) {
    if (seconds_to_go(state) <= left_ && known_.insert(key(state)).second) states.push_back(state);
  }

  /// Returns a lower bound of the seconds left: each backward, and a forward for each value that is
  /// stored nowhere.
  int64_t seconds_to_go(const State& state) const {
    const uint32_t kept = state.here | state.away | written_by(state.operation);
    int64_t operations = state.operation.left, copies = state.copy.left;
    for (int64_t k = 1; k <= state.backward; ++k) {
      const bool is_running = state.operation.kind == Kind::Backward && k == state.backward;
      if (!is_running) operations += seconds(stage(k).backward_s);
      if ((kept & t(k)) == 0) operations += seconds(stage(k).forward_s);
    }
    return std::max(operations, copies);
  }

  /// Continues with `state`, in which an operation or copy has just begun. If it does not fit,
  /// values are dropped, in all ways that drop nothing needlessly. An earlier drop is never better.
  void begin(const State& state, std::vector<State>& states) {
    const uint32_t stored = state.copy.kind == Kind::Store ? uint32_t(state.copy.value) : 0;
    const uint32_t can_go = state.here & ~read_by(state) & ~stored & ~written_by(state.operation);
    for (uint32_t gone = 0;; gone = (gone - can_go) & can_go) {  // each subset
      State next = state;
      next.here &= ~gone;
      if (fits(next) && !fits_with_one_more(next, gone)) {
        if (next.operation.kind != Kind::None && next.operation.left == 0) end_operation(next);
        visit(next, states);
      }
      if (gone == can_go) break;
    }
  }
  bool fits_with_one_more(State state, uint32_t gone) const {
    const uint32_t here = state.here;
    for (; gone != 0; gone &= gone - 1) {
      state.here = here | (gone & -gone);
      if (fits(state)) return true;
    }
    return false;
  }

  /// Begins every operation and copy that can begin in this second.
  void decide(const State& state, std::vector<State>& states) {
    const uint32_t here = state.here | x(0);
    const auto operate = [&](Kind kind, int64_t k, double exact_seconds) {
      State next = state;
      next.operation = {kind, k, seconds(exact_seconds)};
      begin(next, states);
    };
    if (state.operation.kind == Kind::None) {
      const uint32_t loaded = written_by(state.copy);
      for (int64_t k = 1; k <= state.backward; ++k) {
        if ((here & x(k - 1)) == 0 || (loaded & (x(k) | t(k))) != 0) continue;
        if ((here & x(k)) == 0) operate(Kind::Forward, k, stage(k).forward_s);
        if ((here & x(k)) == 0 || (here & t(k)) == 0)
          operate(Kind::SavingForward, k, stage(k).forward_s);
      }
      const int64_t k = state.backward;
      const uint32_t needed = x(k - 1) | x(k) | t(k);
      if ((here & needed) == needed) operate(Kind::Backward, k, stage(k).backward_s);
    }
    if (state.copy.kind != Kind::None || !cost_.moving) return;
    for (int64_t k = 1; k <= state.backward; ++k)
      for (const uint32_t value : {x(k), t(k)}) {
        const auto bytes_of_it = double(bytes(value));
        State next = state;
        if (bytes_of_it == 0 || (written_by(state.operation) & value) != 0) continue;
        if ((state.here & value) != 0 && (state.away & value) == 0)
          next.copy = {Kind::Store, value, seconds(bytes_of_it * cost_.moving->store_s_per_byte)};
        else if ((state.here & value) == 0 && (state.away & value) != 0)
          next.copy = {Kind::Load, value, seconds(bytes_of_it * cost_.moving->load_s_per_byte)};
        else
          continue;
        begin(next, states);
      }
  }

  static State second_later(State state) {
    if (state.operation.left > 0 && --state.operation.left == 0) end_operation(state);
    if (state.copy.left > 0 && --state.copy.left == 0) {
      if (state.copy.kind == Kind::Store) state.away |= uint32_t(state.copy.value);
      state.here |= written_by(state.copy);
      state.copy = {};
      forget_what_is_done(state);
    }
    return state;
  }

  static void end_operation(State& state) {
    state.here |= written_by(state.operation);
    if (state.operation.kind == Kind::Backward) --state.backward;
    state.operation = {};
    forget_what_is_done(state);
  }

  static void forget_what_is_done(State& state) {
    const uint32_t needed = (2U << state.backward) - 1;
    const uint32_t copied = state.copy.kind == Kind::None ? 0 : uint32_t(state.copy.value);
    state.here &= needed | (needed << 8) | copied;
    state.away &= needed | (needed << 8);
  }

  static int64_t seconds(double exact) {
    const int64_t whole = std::llround(exact);
    if (std::abs(exact - double(whole)) > 1e-9) throw std::runtime_error("no whole second");
    return whole;
  }

  static uint64_t key(const State& state) {
    const auto values = [](uint32_t bits) -> uint64_t {
      return (bits & 0x7f) | (bits >> 8 & 0x7f) << 7;
    };
    uint64_t key = values(state.here);
    const auto append = [&key](uint64_t number, int bits) { key = key << bits | number; };
    append(values(state.away), 14);
    append(uint64_t(state.backward), 3);
    append(uint64_t(state.operation.kind), 3);
    append(uint64_t(state.operation.value), 3);
    append(uint64_t(state.operation.left), 5);
    append(uint64_t(state.copy.kind), 3);
    // At most one bit is set.
    uint64_t value = 0;
    for (uint32_t left = uint32_t(state.copy.value); left != 0; left >>= 1) ++value;
    append(value, 5);
    append(uint64_t(state.copy.left), 5);
    return key;
  }

  ChainCost cost_;
  int64_t last_;
  int64_t budget_ = 0, left_ = 0;       // [bytes], [seconds]
  std::unordered_set<uint64_t> known_;  // states seen so far; earlier is never worse
};

// ================================================================================
// Chains
// ================================================================================

struct Family {
  std::string name;
  ChainCost (*make)(std::mt19937_64& random, int64_t stages);
};

int64_t number(std::mt19937_64& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

void add_stage(ChainCost& cost, int64_t seconds, int64_t output, int64_t saved) {
  cost.stages.push_back({.forward_s = double(seconds),
                         .backward_s = double(2 * seconds),
                         .output_bytes = output,
                         .saved_bytes = saved,
                         .grad_bytes = output,
                         .movable_bytes = saved,
                         .has_movable_output = true});
}

/// Blocks that save much more than they return.
ChainCost blocks(std::mt19937_64& random, int64_t stages) {
  ChainCost cost;
  const int64_t saved = number(random, 2, 5);
  for (int64_t i = 0; i < stages; ++i) add_stage(cost, number(random, 2, 3), 1, saved);
  return cost;
}

/// Outputs that halve, as in convolutional networks; times halve, too.
ChainCost shrinking(std::mt19937_64& random, int64_t stages) {
  ChainCost cost;
  for (int64_t i = 0; i < stages; ++i) {
    const int64_t size = std::max<int64_t>(1, 6 >> i);
    add_stage(cost, std::min<int64_t>(4, size + number(random, 0, 1)), size,
              number(random, 0, size));
  }
  return cost;
}

ChainCost anything(std::mt19937_64& random, int64_t stages) {
  ChainCost cost;
  for (int64_t i = 0; i < stages; ++i)
    add_stage(cost, number(random, 1, 4), number(random, 1, 4), number(random, 0, 4));
  return cost;
}

// ================================================================================
// Output
// ================================================================================

struct Gap {
  int64_t budgets = 0, equal = 0, below_the_first = 0;
  double sum = 0, worst = 1;
};

/// Compares at each point of the frontier. Without moves, it also compares one byte below the first
/// point, where a schedule may take three times the plain step.
void compare(const ChainCost& cost, Gap& gap) {
  double plain = 0;
  for (const StageCost& stage : cost.stages) plain += stage.forward_s + stage.backward_s;
  const remat::Frontier frontier = remat::solve(cost, {.early_stop = false});
  Schedules schedules(cost);
  if (!cost.moving &&
      schedules.least_seconds(frontier.points().front().bytes - 1, std::llround(3 * plain)))
    ++gap.below_the_first;
  for (const remat::FrontierPoint& point : frontier.points()) {
    const double ours = plain + point.extra_s;
    const std::optional<int64_t> least = schedules.least_seconds(point.bytes, std::llround(ours));
    if (!least || double(*least) > ours + 1e-9)
      throw std::runtime_error(bench::text(
          "a plan of %.0f s for %lld bytes is faster than all schedules: %lld", ours,
          static_cast<long long>(point.bytes), static_cast<long long>(least.value_or(-1))));
    const double ratio = ours / double(*least);
    ++gap.budgets;
    gap.equal += ratio < 1 + 1e-9;
    gap.sum += ratio;
    gap.worst = std::max(gap.worst, ratio);
  }
}

int run(int argc, char** argv) {
  const bench::Arguments arguments = bench::parse(argc, argv);
  const int64_t chains = arguments.smoke ? 2 : 10;
  const int64_t stages = arguments.smoke ? 2 : 4;
  const std::array<Family, 3> families{
      {{"equal outputs", blocks}, {"outputs that halve", shrinking}, {"random", anything}}};
  if (!arguments.smoke)
    std::fprintf(stderr, "%-20s %-10s %8s %8s %12s %12s %16s\n", "step time over least", "moving",
                 "budgets", "equal", "mean", "worst", "below the first");
  for (const Family& family : families)
    for (const double seconds_per_byte : {0.0, 1.0, 2.0}) {
      std::mt19937_64 random(4);
      Gap gap;
      for (int64_t i = 0; i < chains; ++i) {
        ChainCost cost = family.make(random, stages);
        cost.stages.emplace_back();  // the loss
        if (seconds_per_byte > 0)
          cost.moving = remat::MoveCost{.store_s_per_byte = seconds_per_byte,
                                        .load_s_per_byte = seconds_per_byte};
        compare(cost, gap);
      }
      if (arguments.smoke) continue;
      const std::string moving =
          seconds_per_byte > 0 ? bench::text("%.0f s/byte", seconds_per_byte) : "nothing";
      const double mean = gap.sum / double(gap.budgets);
      bench::print_json(
          "plan_gap",
          bench::text("\"family\": \"%s\", \"moving\": \"%s\"", family.name.c_str(),
                      moving.c_str()),
          arguments,
          bench::text(
              "\"budgets\": %lld, \"equal\": %lld, \"mean_ratio\": %.4f, \"worst_ratio\": %.4f",
              static_cast<long long>(gap.budgets), static_cast<long long>(gap.equal), mean,
              gap.worst));
      const std::string below = seconds_per_byte > 0 ? "-" : std::to_string(gap.below_the_first);
      std::fprintf(stderr, "%-20s %-10s %8lld %8lld %12.4f %12.4f %16s\n", family.name.c_str(),
                   moving.c_str(), static_cast<long long>(gap.budgets),
                   static_cast<long long>(gap.equal), mean, gap.worst, below.c_str());
    }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
