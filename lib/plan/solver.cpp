#include "lib/plan/solver.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace remat::detail {

namespace {

constexpr int32_t kUnsolved = -1;

}  // namespace

FrontierTable::FrontierTable(ChainCost cost, const SolveOptions& options)
    : chain_(std::move(cost)), options_(options) {
  scale_seconds();
  find_equal_chains();
  measure_sweeps();
  const auto cells =
      holders.size() * static_cast<std::size_t>(chain_.num_stages * chain_.num_stages);
  const bool is_limited = options.max_depth > 0 && options.max_depth < chain_.num_stages - 1;
  if (!is_limited) {
    levels_.push_back({std::vector<int32_t>(cells, kUnsolved), 0, true});
    fill(0, false);
    fill_outermost(0);
    return;
  }
  levels_.push_back({std::vector<int32_t>(cells, kUnsolved), 0, false});
  fill(0, false);
  // A level that finds nothing new is dropped and ends the loop: higher levels would be the same.
  for (int64_t depth = 1; depth < options.max_depth; ++depth) {
    const std::size_t below = levels_.size() - 1;
    levels_.push_back({std::vector<int32_t>(cells, kUnsolved), below, true});
    fill(below + 1, false);
    if (levels_[below + 1].stairs != levels_[below].stairs) continue;
    levels_.pop_back();
    break;
  }
  levels_.push_back({std::vector<int32_t>(cells, kUnsolved), levels_.size() - 1, true});
  fill_outermost(levels_.size() - 1);
}

void FrontierTable::fill_outermost(std::size_t number) {
  if (chain_.cost.moving)
    fill_moving();
  else
    fill(number, true);
}

// See Note [Whole ticks].
void FrontierTable::scale_seconds() {
  double sum = 0;
  for (const StageCost& each : chain_.cost.stages) {
    sum += each.forward_s + options_.frame_cost_s;
    if (chain_.cost.moving) sum += each.backward_s + seconds_of_copies(*chain_.cost.moving, each);
  }
  std::frexp(sum * static_cast<double>(chain_.num_stages), &exponent_);
  exponent_ -= kBitsOfTicks;
  const auto ticks = [this](double seconds) {
    return static_cast<int64_t>(std::llround(std::ldexp(seconds, -exponent_)));
  };
  frame_ticks_ = ticks(options_.frame_cost_s);
  if (chain_.cost.moving) {
    store_ticks_ = std::ldexp(chain_.cost.moving->store_s_per_byte, -exponent_);
    load_ticks_ = std::ldexp(chain_.cost.moving->load_s_per_byte, -exponent_);
    busy_ticks_ = chain_.cost.moving->held_up_share * (store_ticks_ + load_ticks_);
  }
  ticks_.resize(static_cast<std::size_t>(chain_.num_stages) + 1);
  forward_before_.resize(ticks_.size() + 1);
  backward_before_.resize(ticks_.size() + 1);
  for (int64_t k = 1; k <= chain_.num_stages; ++k) {
    ticks_[k] = {ticks(chain_.stage(k).forward_s), ticks(chain_.stage(k).forward_to_last_save_s)};
    if (chain_.cost.moving)
      backward_before_[k + 1] = backward_before_[k] + ticks(chain_.stage(k).backward_s);
    forward_before_[k + 1] = forward_before_[k] + ticks_[k].forward;
  }
}

// See Note [Equal stages].
void FrontierTable::find_equal_chains() {
  using Costs = std::vector<int64_t>;
  std::map<Costs, int32_t> costs;
  std::vector<int32_t> cost_of(static_cast<std::size_t>(chain_.num_stages) + 1);
  for (int64_t k = 1; k <= chain_.num_stages; ++k) {
    const StageCost& each = chain_.stage(k);
    Costs key{ticks_[k].forward,
              ticks_[k].to_last_save,
              each.output_bytes,
              each.saved_bytes,
              each.forward_tmp_bytes,
              each.unsaved_tmp_bytes,
              each.grad_bytes,
              each.first_read_tmp_bytes,
              each.stopped_tmp_bytes,
              each.saves_output ? 1 : 0,
              k == chain_.num_stages ? int64_t{1} : 0};
    for (const InputHolder holder : holders) {
      key.push_back(chain_.backward_bytes(k, holder));
      key.push_back(chain_.freed_bytes(k, holder));
    }
    cost_of[k] = costs.emplace(key, static_cast<int32_t>(costs.size())).first->second;
  }
  class_of_.resize(holders.size() *
                   static_cast<std::size_t>(chain_.num_stages * chain_.num_stages));
  std::map<Costs, int32_t> single;
  // The key is the class of the chain in front, with the costs of the last stage.
  std::unordered_map<int64_t, int32_t> longer;
  int32_t classes = 0;
  for (int64_t s = 1; s <= chain_.num_stages; ++s) {
    for (const InputHolder holder : holders) {
      const auto begins =
          single.try_emplace({chain_.grad_before(s), cost_of[s], chain_.backward_bytes(s, holder),
                              chain_.freed_bytes(s, holder),
                              chain_.backward_bytes(s, holder_inside(holder, chain_.num_stages))},
                             classes);
      classes += begins.second ? 1 : 0;
      int32_t chain = class_of_[cell(s, s, holder)] = begins.first->second;
      for (int64_t t = s + 1; t <= chain_.num_stages; ++t) {
        const auto goes_on =
            longer.try_emplace(int64_t{chain} * chain_.num_stages + cost_of[t], classes);
        classes += goes_on.second ? 1 : 0;
        chain = class_of_[cell(s, t, holder)] = goes_on.first->second;
      }
    }
  }
}

void FrontierTable::measure_sweeps() {
  sweep_bytes_.resize(static_cast<std::size_t>(chain_.num_stages * chain_.num_stages));
  for (int64_t s = 1; s < chain_.num_stages; ++s) {
    int64_t most = 0;
    for (int64_t e = s; e < chain_.num_stages; ++e) {
      const int64_t input = e == s ? 0 : chain_.stage(e - 1).output_bytes;
      most =
          std::max(most, input + chain_.stage(e).output_bytes + chain_.stage(e).unsaved_tmp_bytes);
      sweep_bytes_[sub_chain(s, e)] = most;
    }
  }
}

/// Returns the bytes to run stage s with its saves, and to run its backward, in a sub-chain up to
/// t.
int64_t FrontierTable::bytes_to_save(int64_t s, int64_t t, InputHolder holder) const {
  const StageCost& each = chain_.stage(s);
  const bool is_recompute = t < chain_.num_stages;
  const bool is_cut = is_recompute && s == t && ticks_[s].to_last_save < ticks_[s].forward;
  const int64_t temporary = is_cut ? each.stopped_tmp_bytes : each.forward_tmp_bytes;
  const int64_t forward = chain_.grad_waiting(t) + each.saved_bytes +
                          (is_cut && !each.saves_output ? 0 : each.output_bytes) + temporary;
  return std::max(forward - chain_.held_to_end(t),
                  chain_.backward_bytes(s, holder) - chain_.held_to_end(s));
}

int64_t FrontierTable::sweep_ticks(int64_t s, int64_t e) const {
  return forward_before_[e] - forward_before_[s] + ticks_[e].to_last_save + frame_ticks_;
}

void FrontierTable::fill(std::size_t number, bool is_last) {
  Level& level = levels_[number];
  std::unordered_map<int32_t, int32_t> solved;
  const auto fill_cell = [&](int64_t s, int64_t t, InputHolder holder) {
    const std::size_t here = cell(s, t, holder);
    int32_t& target = level.stairs[here];
    if (const auto found = solved.find(class_of_[here]); found != solved.end()) {
      target = found->second;
      return;
    }
    solve_chain(level, s, t, holder);
    const Level* const below = below_of(level, here);
    if (below != nullptr && stairs(*below, here) == envelope_.stairs()) {
      target = below->stairs[here];
    } else {
      staircases_.push_back(envelope_.stairs());
      target = static_cast<int32_t>(staircases_.size() - 1);
    }
    solved.emplace(class_of_[here], target);
  };
  if (is_last) {
    for (int64_t s = chain_.num_stages; s >= 1; --s)
      for (const InputHolder holder : {InputHolder::Others, InputHolder::Nobody})
        fill_cell(s, chain_.num_stages, holder);
    return;
  }
  for (int64_t length = 1; length < chain_.num_stages; ++length)
    for (int64_t s = 1; s + length - 1 < chain_.num_stages; ++s)
      for (const InputHolder holder : holders) fill_cell(s, s + length - 1, holder);
}

/// Returns the level below if that has this sub-chain, too; else null.
const FrontierTable::Level* FrontierTable::below_of(const Level& level, std::size_t cell) const {
  const Level& below = levels_[level.inside];
  return &below != &level && below.stairs[cell] != kUnsolved ? &below : nullptr;
}

void FrontierTable::solve_chain(Level& level, int64_t s, int64_t t, InputHolder holder) {
  envelope_.clear();
  if (s == t) {
    envelope_.lower(kFree, 0, bytes_to_save(s, s, holder));
    return;
  }
  // A level allows all plans of the level below. Sums of staircases that both levels share are in
  // the result of that level already.
  const Level* const below = below_of(level, cell(s, t, holder));
  const Level* const below_that =
      below != nullptr && below->has_regions ? &levels_[below->inside] : nullptr;
  if (below != nullptr) envelope_.start(stairs(*below, cell(s, t, holder)));
  const std::size_t behind = cell(s + 1, t, holder_behind(chain_.stage(s).saves_output));
  if (below == nullptr || level.stairs[behind] != below->stairs[behind])
    envelope_.lower(stairs(level, behind), chain_.charge(s, holder), bytes_to_save(s, t, holder));
  if (level.has_regions) {
    const Level& inside = levels_[level.inside];
    for (int64_t q = s + 1; q <= t; ++q) {
      const std::size_t rest = cell(q, t, InputHolder::Nobody),
                        region = cell(s, q - 1, holder_inside(holder, t));
      if (below_that != nullptr && level.stairs[rest] == below->stairs[rest] &&
          inside.stairs[region] == below_that->stairs[region])
        continue;
      envelope_.lower_to_sum(stairs(level, rest), chain_.stage(q - 1).output_bytes,
                             stairs(inside, region), sweep_ticks(s, q - 1),
                             bytes_to_sweep(s, q - 1, t));
    }
  }
  envelope_.thin(options_.eps);
}

std::vector<FrontierPoint> FrontierTable::points() const {
  std::vector<FrontierPoint> points;
  for (const Step& step :
       chain_.cost.moving ? moving_[1].at({})
                          : stairs(levels_.back(), cell(1, chain_.num_stages, InputHolder::Others)))
    points.push_back({step.bytes + chain_.cost.cached_cast_bytes + chain_.cost.held_to_end_bytes,
                      std::ldexp(static_cast<double>(step.ticks), exponent_)});
  return points;
}

Plan FrontierTable::plan(int64_t bytes) const {
  bytes -= chain_.cost.cached_cast_bytes + chain_.cost.held_to_end_bytes;
  if (chain_.cost.moving) return plan_moving(bytes);
  std::vector<PlanRegion> regions;
  append_regions({1, chain_.num_stages, bytes, levels_.size() - 1, InputHolder::Others}, regions);
  return Plan(chain_.num_stages, std::move(regions));
}

void FrontierTable::append_regions(const Part& part, std::vector<PlanRegion>& regions) const {
  std::vector<Part> waiting{part};
  while (!waiting.empty()) {
    auto [s, t, budget, number, holder] = waiting.back();
    waiting.pop_back();
    while (s < t) {
      const Level& level = levels_[number];
      const InputHolder inner_holder = holder_inside(holder, t);
      // Ties go to the plain stage, then to the shortest region. With `eps` the tables may promise
      // less than their entries make possible, so the search takes the least time, not the promised
      // one.
      int64_t best = kInfeasible, end = s;  // of a region s..end - 1; s: a plain stage
      const InputHolder behind = holder_behind(chain_.stage(s).saves_output);
      if (budget >= bytes_to_save(s, t, holder))
        best = value_at(stairs(level, cell(s + 1, t, behind)), budget - chain_.charge(s, holder));
      if (level.has_regions) {
        const Level& inside = levels_[level.inside];
        for (int64_t q = s + 1; q <= t; ++q) {
          if (budget < bytes_to_sweep(s, q - 1, t)) break;
          const int64_t rest = value_at(stairs(level, cell(q, t, InputHolder::Nobody)),
                                        budget - chain_.stage(q - 1).output_bytes);
          const int64_t of_region = value_at(stairs(inside, cell(s, q - 1, inner_holder)), budget);
          if (rest == kInfeasible || of_region == kInfeasible) continue;
          const int64_t value = rest + of_region + sweep_ticks(s, q - 1);
          if (is_gain(value, best)) std::tie(best, end) = std::pair(value, q);
        }
      }
      if (end == s) {
        budget -= chain_.charge(s, holder);
        holder = behind;
        ++s;
        continue;
      }
      regions.push_back({s, end - 1});
      waiting.push_back(
          {end, t, budget - chain_.stage(end - 1).output_bytes, number, InputHolder::Nobody});
      t = end - 1;
      number = level.inside;
      holder = inner_holder;
    }
  }
}

}  // namespace remat::detail
