#include "lib/plan/staircase.h"

#include <algorithm>
#include <cstddef>

namespace remat {

namespace {

/// Returns the number of steps that begin at or below a budget.
std::size_t steps_within(const Staircase& stairs, int64_t bytes) {
  return static_cast<std::size_t>(
      std::upper_bound(stairs.begin(), stairs.end(), bytes,
                       [](int64_t budget, const Step& step) { return budget < step.bytes; }) -
      stairs.begin());
}

/// Returns the number of steps that begin below a budget.
std::size_t steps_below(const Staircase& stairs, int64_t bytes) {
  return static_cast<std::size_t>(
      std::lower_bound(stairs.begin(), stairs.end(), bytes,
                       [](const Step& step, int64_t budget) { return step.bytes < budget; }) -
      stairs.begin());
}

/// Returns the first of the steps before `end` from which on all satisfy a predicate, or `end`. The
/// search is fast if that step is near the end.
template <class Predicate>
std::size_t first_from_above(const Staircase& stairs, std::size_t end, Predicate holds) {
  std::size_t stride = 1, low = end;
  while (low > 0 && holds(stairs[low - 1])) {
    end = low - 1;
    low -= std::min(stride, low);
    stride *= 2;
  }
  // Steps from `end` on satisfy the predicate; the step before `low` does not.
  while (low < end) {
    const std::size_t middle = low + (end - low) / 2;
    if (holds(stairs[middle]))
      end = middle;
    else
      low = middle + 1;
  }
  return end;
}

/// Walks a staircase upwards.
class Walk {
 public:
  Walk(const Staircase& stairs, std::size_t number_within, int64_t bytes)
      : next_(stairs.data() + number_within), end_(stairs.data() + stairs.size()), shift_(bytes) {}

  int64_t ticks() const { return next_[-1].ticks; }
  int64_t next_bytes() const { return next_ == end_ ? kInfeasible : next_->bytes + shift_; }
  void advance_to(int64_t bytes) {
    if (next_bytes() == bytes) ++next_;
  }

 private:
  const Step* next_;
  const Step* end_;
  int64_t shift_;
};

}  // namespace

int64_t value_at(const Staircase& stairs, int64_t bytes) {
  const std::size_t within = steps_within(stairs, bytes);
  return within == 0 ? kInfeasible : stairs[within - 1].ticks;
}

void Envelope::lower(const Staircase& stairs, int64_t bytes, int64_t from) {
  lower_to_sum(stairs, bytes, kFree, 0, from);
}

// The sum falls, so at budgets below a given one it is at least its value just before that one.
// Steps of the envelope that are not above this bound are settled. The steps below have a tighter
// bound, and so on. Returns the index of the first settled step, which is 0 for most sums.
std::size_t Envelope::end_of_gain(const Staircase& a, int64_t bytes, const Staircase& b,
                                  int64_t ticks, int64_t from) const {
  std::size_t end = stairs_.size(), in_a = a.size(), in_b = b.size();
  while (end > 0) {
    const int64_t bound = a[in_a - 1].ticks + b[in_b - 1].ticks + ticks;
    const std::size_t settled =
        first_from_above(stairs_, end, [&](const Step& step) { return step.ticks <= bound; });
    if (settled == end) break;
    end = settled;
    const int64_t budget = stairs_[end].bytes;
    if (budget <= from) return 0;
    in_a =
        first_from_above(a, in_a, [&](const Step& step) { return step.bytes + bytes >= budget; });
    in_b = first_from_above(b, in_b, [&](const Step& step) { return step.bytes >= budget; });
  }
  return end;
}

void Envelope::lower_to_sum(const Staircase& a, int64_t bytes, const Staircase& b, int64_t ticks,
                            int64_t from) {
  if (a.empty() || b.empty()) return;
  from = std::max({from, a.front().bytes + bytes, b.front().bytes});
  const std::size_t end = end_of_gain(a, bytes, b, ticks, from);
  const int64_t end_bytes = end < stairs_.size() ? stairs_[end].bytes : kInfeasible;
  if (end_bytes <= from) return;

  const std::size_t begin = steps_below(stairs_, from);
  Walk in_a(a, steps_within(a, from - bytes), bytes), in_b(b, steps_within(b, from), 0);
  std::size_t in_stairs = begin;  // the next step of the envelope
  int64_t now = begin == 0 ? kInfeasible : stairs_[begin - 1].ticks;
  int64_t lowest = now;
  bool is_lower = false;
  lowered_.clear();
  for (int64_t budget = from; budget < end_bytes;) {
    if (in_stairs < end && stairs_[in_stairs].bytes == budget) now = stairs_[in_stairs++].ticks;
    const int64_t sum = in_a.ticks() + in_b.ticks() + ticks;
    is_lower |= sum < now;
    if (const int64_t value = std::min(sum, now); value < lowest) {
      lowered_.push_back({budget, value});
      lowest = value;
    }
    const int64_t next_in_stairs = in_stairs < end ? stairs_[in_stairs].bytes : end_bytes;
    const int64_t next = std::min({in_a.next_bytes(), in_b.next_bytes(), next_in_stairs});
    if (next >= end_bytes) break;
    in_a.advance_to(next);
    in_b.advance_to(next);
    budget = next;
  }
  if (!is_lower) return;
  // Steps behind are lower than the sum, except for a step that is just as low.
  std::size_t after = end;
  while (after < stairs_.size() && stairs_[after].ticks >= lowest) ++after;
  const auto first = stairs_.begin() + static_cast<std::ptrdiff_t>(begin);
  const auto last = stairs_.begin() + static_cast<std::ptrdiff_t>(after);
  const std::ptrdiff_t room = last - first;
  const auto wanted = static_cast<std::ptrdiff_t>(lowered_.size());
  const auto overwritten = std::min(room, wanted);
  std::copy(lowered_.begin(), lowered_.begin() + overwritten, first);
  if (wanted > room)
    stairs_.insert(last, lowered_.begin() + overwritten, lowered_.end());
  else
    stairs_.erase(first + overwritten, last);
}

void Envelope::thin(double eps) {
  std::size_t kept = std::min<std::size_t>(1, stairs_.size());
  for (std::size_t i = 1; i < stairs_.size(); ++i) {
    const int64_t best = stairs_[kept - 1].ticks, ticks = stairs_[i].ticks;
    const auto share = static_cast<int64_t>(eps * static_cast<double>(best));
    if (is_gain(ticks, best) && best - ticks >= share) stairs_[kept++] = stairs_[i];
  }
  stairs_.resize(kept);
}

}  // namespace remat
