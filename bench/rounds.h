#pragma once
// Rounds: each takes one sample of everything that is compared, one after the other.

#include <functional>
#include <utility>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"

namespace bench {

/// One thing that is timed, in all rounds.
struct Cell {
  explicit Cell(std::function<void()> work) : run(std::move(work)) {}
  Statistics result() const { return statistics(ns); }

  std::function<void()> run;
  int64_t repeats = 1;
  std::vector<double> ns{};  ///< of one run, one value a round
};

/// Every sample begins with a run that is not timed, unless a run takes longer than a sample has to.
inline void measure(std::vector<Cell>& cells, const Arguments& arguments) {
  const auto sample = [&](const Cell& cell, int64_t repeats) {
    if (cell.repeats > 1) cell.run();
    const int64_t begin = now_ns(arguments.clock);
    for (int64_t i = 0; i < repeats; ++i) cell.run();
    return now_ns(arguments.clock) - begin;
  };
  for (Cell& cell : cells) {
    cell.run();
    cell.repeats =
        calibrate([&](int64_t repeats) { return sample(cell, repeats); }, arguments.sample_ns);
  }
  for (int64_t round = 0; round < arguments.samples; ++round)
    for (Cell& cell : cells)
      cell.ns.push_back(static_cast<double>(sample(cell, cell.repeats)) /
                        static_cast<double>(cell.repeats));
}

/// Of the same rounds: what `work` takes beyond `plain` and `times` runs of `forward`, [ns] per
/// `units`. The minimum is that of the minima; median and deviation are those of the rounds.
inline Statistics overhead(const Cell& work, const Cell& plain, const Cell& forward, double times,
                           double units) {
  const auto difference = [&](double a, double b, double c) { return (a - b - times * c) / units; };
  std::vector<double> rounds;
  for (std::size_t i = 0; i < work.ns.size(); ++i)
    rounds.push_back(difference(work.ns[i], plain.ns[i], forward.ns[i]));
  Statistics result = statistics(rounds);
  result.min_ns = difference(work.result().min_ns, plain.result().min_ns, forward.result().min_ns);
  return result;
}

}  // namespace bench
