// Plans by formula, for chains without measured costs.

#include <algorithm>
#include <limits>
#include <utility>

#include "remat/plan.h"

namespace remat {

namespace {

void check_stages(const char* plan, int64_t stages) {
  TORCH_CHECK_VALUE(stages >= 1, "remat::", plan, ": a plan needs at least 1 stage, got ", stages,
                    ".");
}

void check_memory(const char* plan, const char* what, int64_t number) {
  TORCH_CHECK_VALUE(number >= 1, "remat::", plan, ": at least 1 ", what, " is needed, got ", number,
                    ".");
}

void check_segments(const char* plan, int64_t stages, int64_t segments) {
  check_stages(plan, stages);
  TORCH_CHECK_VALUE(segments >= 1 && segments <= stages, "remat::", plan, ": ", stages,
                    " stages cannot be cut into ", segments, " segments. Hint: set 1 to ", stages,
                    ".");
}

/// Returns the least t for which n stages can be reversed with no stage run more than t times
/// before its last run: n <= beta(s, t) = C(s + t, s), the formula of Griewank and Walther.
int64_t repetitions(int64_t n, int64_t s) {
  if (n <= 1) return 0;
  if (s == 1) return n - 1;
  int64_t t = 0;
  for (int64_t longest = 1; longest < n; longest = longest * (s + t) / t) {
    ++t;
    if (longest > std::numeric_limits<int64_t>::max() / (s + t)) break;  // longer than any n
  }
  return t;
}

/// Returns the largest j that minimizes j + P(j, s) + P(n - j, s - 1). P(n, s) is the least number
/// of stage calls beyond n. P is convex in n with slopes `repetitions`, so the sum falls as long as
/// the next slope of the first half is below that of the second.
int64_t revolve_split(int64_t n, int64_t s) {
  s = std::min(s, n - 1);
  if (s <= 1) return n - 1;
  int64_t low = 1, high = n - 1;
  while (low < high) {
    const int64_t j = low + (high - low + 1) / 2;
    if (repetitions(j, s) + 1 <= repetitions(n - j + 1, s - 1))
      low = j;
    else
      high = j - 1;
  }
  return low;
}

/// T(n, s) of the mixed recurrence, for all lengths and numbers of units that a plan may need.
class MixedTotals {
 public:
  MixedTotals(int64_t stages, int64_t units) {
    for (int64_t s = 1; s <= units; ++s) {
      rows_.emplace_back();
      // Each unit in use leaves one stage less to do.
      for (int64_t n = 0; n <= stages - (units - s); ++n)
        rows_.back().push_back(n <= s + 1 ? n : best(n, s).total);
    }
  }

  /// Returns the number of stages in the region that comes first; 0 for a plain stage.
  int64_t first_region(int64_t n, int64_t s) const { return best(n, s).region; }

 private:
  struct Best {
    int64_t total = 0, region = 0;
  };

  int64_t total(int64_t n, int64_t s) const {
    return rows_[static_cast<std::size_t>(s - 1)][static_cast<std::size_t>(n)];
  }

  Best best(int64_t n, int64_t s) const {
    if (s == 1) return {n * (n + 1) / 2 - 1, n - 1};
    Best best{1 + total(n - 1, s - 1), 0};
    // The rest takes a call of each stage at least, so a longer first region cannot be better.
    for (int64_t i = 2; i < n && total(i, s) < best.total - n; ++i) {
      const int64_t with_region = i + total(i, s) + total(n - i, s - 1);
      if (with_region < best.total) best = {with_region, i};
    }
    return best;
  }

  std::vector<std::vector<int64_t>> rows_;
};

/// Returns a plan of regions that are cut again. `first_region(n, memory)`: how many of n stages
/// come first as a region; 0: the first stage is plain. The stages behind have one unit of memory
/// less.
template <class FirstRegion>
Plan cut(int64_t stages, int64_t memory, const FirstRegion& first_region) {
  struct Part {
    int64_t first, stages, memory;
  };
  std::vector<PlanRegion> regions;
  // The inside of a region is cut before the stages behind it, so that regions come out in the
  // order in which they open.
  std::vector<Part> left{{1, stages, memory}};
  while (!left.empty()) {
    const auto [first, n, units] = left.back();
    left.pop_back();
    if (n == 1) continue;
    const int64_t region = first_region(n, units);
    const int64_t taken = std::max<int64_t>(region, 1);
    left.push_back({first + taken, n - taken, std::max<int64_t>(units - 1, 1)});
    if (region == 0) continue;
    left.push_back({first, region, units});
    regions.push_back({first, first + region - 1});
  }
  return Plan(stages, std::move(regions));
}

/// Returns a plan of `segments` - 1 regions, of which the first `longer` are one stage longer. The
/// stages behind them are in no region.
Plan in_segments(int64_t stages, int64_t segments, int64_t longer) {
  const int64_t length = stages / segments;
  std::vector<PlanRegion> regions;
  int64_t first = 1;
  for (int64_t i = 0; i < segments - 1; ++i) {
    const int64_t last = first + length - (i < longer ? 0 : 1);
    regions.push_back({first, last});
    first = last + 1;
  }
  return Plan(stages, std::move(regions));
}

}  // namespace

Plan revolve_plan(int64_t stages, int64_t snapshots) {
  check_stages("revolve_plan", stages);
  check_memory("revolve_plan", "snapshot", snapshots);
  return cut(stages, snapshots, revolve_split);
}

Plan mixed_plan(int64_t stages, int64_t units) {
  check_stages("mixed_plan", stages);
  check_memory("mixed_plan", "unit", units);
  if (stages - 1 <= units) return Plan(stages);
  const MixedTotals totals(stages, units);
  return cut(stages, units,
             [&](int64_t n, int64_t s) { return n <= s + 1 ? 0 : totals.first_region(n, s); });
}

Plan balanced_plan(int64_t stages, int64_t segments) {
  check_segments("balanced_plan", stages, segments);
  return in_segments(stages, segments, stages % segments);
}

Plan torch_sequential_plan(int64_t stages, int64_t segments) {
  check_segments("torch_sequential_plan", stages, segments);
  return in_segments(stages, segments, 0);
}

Plan halving_plan(int64_t stages) {
  check_stages("halving_plan", stages);
  return cut(stages, 1, [](int64_t n, int64_t) { return (n + 1) / 2; });
}

}  // namespace remat
