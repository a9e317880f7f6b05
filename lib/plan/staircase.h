#pragma once
// A function of the budget that falls in steps: the least ticks for a number of bytes.

#include <cstdint>
#include <vector>

namespace remat {

/// From `bytes` on, up to the next point, `ticks` are needed.
struct Step {
  int64_t bytes = 0, ticks = 0;
  friend bool operator==(const Step&, const Step&) = default;
};

/// Bytes rise and ticks fall strictly; below the first step nothing is feasible.
using Staircase = std::vector<Step>;

/// Needs no ticks at any budget. Budgets of a chain's end may be negative, since they leave out
/// bytes that are held to the end.
inline const Staircase kFree{{INT64_MIN / 4, 0}};

/// The budget or the ticks of an infeasible point.
inline constexpr int64_t kInfeasible = INT64_MAX;

/// Returns whether these ticks are fewer by more than the rounding of sums of costs that are not
/// whole numbers. Zero ticks are never rounded. See Note [Whole ticks].
inline constexpr int kBitsOfTicks = 62;
inline constexpr bool is_gain(int64_t ticks, int64_t over) {
  return ticks < over && (ticks == 0 || over - ticks >= int64_t{1} << (kBitsOfTicks - 50));
}

/// Returns the ticks for a budget, `kInfeasible` below the first step.
int64_t value_at(const Staircase& stairs, int64_t bytes);

/// The lower envelope of staircases that are sums and shifts of others. Reuses its memory.
class Envelope {
 public:
  void clear() { stairs_.clear(); }
  void start(const Staircase& stairs) { stairs_ = stairs; }
  /// Lowers to `stairs`, moved by `bytes`, where the budget is at least `from`.
  void lower(const Staircase& stairs, int64_t bytes, int64_t from);
  /// Lowers to `a` moved by `bytes`, plus `b`, plus `ticks`, where the budget is at least `from`.
  void lower_to_sum(const Staircase& a, int64_t bytes, const Staircase& b, int64_t ticks,
                    int64_t from);
  /// Drops steps with no gain over the last remaining one, or with a gain below a share `eps` of
  /// it; never the first.
  void thin(double eps);
  const Staircase& stairs() const { return stairs_; }

 private:
  std::size_t end_of_gain(const Staircase& a, int64_t bytes, const Staircase& b, int64_t ticks,
                          int64_t from) const;

  Staircase stairs_, lowered_;
};

}  // namespace remat
