#pragma once
// Rounds: each takes one sample of every cell, one after the other, in an order of its own.

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "bench/measure.h"

namespace bench {

/// The time of all runs of a sample.
struct Sample {
  int64_t ns = 0;       ///< until the device had done the runs
  int64_t host_ns = 0;  ///< until the runs were queued; the same on the CPU
};
/// Runs the work `repeats` times.
using Sampler = std::function<Sample(int64_t repeats, const Arguments& arguments)>;

/// One thing that is timed, in all rounds.
struct Cell {
  explicit Cell(Sampler sampler) : sample(std::move(sampler)) {}
  /// Every sample begins with a run that is not timed, unless a single run is longer than a sample
  /// must be.
  explicit Cell(std::function<void()> work)
      : sample([run = std::move(work)](int64_t repeats, const Arguments& arguments) {
          if (repeats > 1) run();
          const int64_t begin = now_ns(arguments);
          for (int64_t i = 0; i < repeats; ++i) run();
          const int64_t queued = now_ns(arguments.clock);
          return Sample{now_ns(arguments) - begin, queued - begin};
        }) {}
  Statistics result() const { return statistics(ns); }
  /// Returns a JSON member with the host's time; empty on the CPU, whose time is the host's.
  std::string host_json(const Arguments& arguments) const {
    if (arguments.device.is_cpu()) return {};
    return text("\"host_min_ns\": %.1f", statistics(host_ns).min_ns);
  }

  Sampler sample;
  int64_t repeats = 1;       ///< runs that make one sample long enough
  std::vector<double> ns{};  ///< of one run, one value a round
  std::vector<double> host_ns{};
};

/// Takes the samples of all rounds. Every round has another order, the same in every run of the
/// program, because each cell leaves its marks in caches and allocator to the next.
inline void measure(std::vector<Cell>& cells, const Arguments& arguments) {
  for (Cell& cell : cells) {
    cell.sample(1, arguments);
    while (cell.sample(cell.repeats, arguments).ns < arguments.sample_ns) cell.repeats *= 2;
  }
  std::vector<std::size_t> order(cells.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(1);
  for (int64_t round = 0; round < arguments.samples; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t each : order) {
      Cell& cell = cells[each];
      const Sample sample = cell.sample(cell.repeats, arguments);
      cell.ns.push_back(static_cast<double>(sample.ns) / static_cast<double>(cell.repeats));
      cell.host_ns.push_back(static_cast<double>(sample.host_ns) /
                             static_cast<double>(cell.repeats));
    }
  }
}

/// Returns the time that `work` takes beyond `plain` and `times` runs of `forward` in the same
/// rounds, [ns] per `units`. The minimum is that of the minima; median and deviation are those of
/// the rounds.
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

/// Forward and backward of one variant: [ns], one value a round.
struct Passes {
  explicit Passes(std::string variant) : name(std::move(variant)) {}
  std::string name;
  std::vector<double> forward{}, backward{};
};

/// Prints a JSON line for each pass, and a table of the times beyond those of the first variant, in
/// units of `unit_of_minima` and `unit_of_medians` [ns].
inline void print_passes(const char* bench, const std::vector<Passes>& all,
                         const Arguments& arguments, const char* heading, double unit_of_minima,
                         double unit_of_medians, const std::string& params = {}) {
  std::fprintf(stderr, "%-28s %9s %9s   of medians: %8s %8s\n", heading, "forward", "backward",
               "forward", "backward");
  const Statistics f0 = statistics(all[0].forward), b0 = statistics(all[0].backward);
  for (const Passes& each : all) {
    const Statistics f = statistics(each.forward), b = statistics(each.backward);
    for (const auto& [pass, result] : {std::pair("forward", f), std::pair("backward", b)})
      print_json(bench,
                 text("\"variant\": \"%s\", \"pass\": \"%s\"", each.name.c_str(), pass) + params,
                 arguments, result);
    std::fprintf(stderr, "%-28s %9.2f %9.2f               %8.2f %8.2f\n", each.name.c_str(),
                 (f.min_ns - f0.min_ns) / unit_of_minima, (b.min_ns - b0.min_ns) / unit_of_minima,
                 (f.median_ns - f0.median_ns) / unit_of_medians,
                 (b.median_ns - b0.median_ns) / unit_of_medians);
  }
}

}  // namespace bench
