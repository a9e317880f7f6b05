#pragma once
// A program of several processes: the first process starts the others, which run the same program.

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <sstream>
#include <string>

#include "place.h"
#include "store.h"
#include "workers.h"

struct Program {
  std::string name;
  // Runs in each worker. An exception fails the whole program.
  std::function<void(const Place&, const Store&)> work;
  // Runs in the first process when all workers have ended well: compares their results. Returns
  // whether all promises hold.
  std::function<bool(const Place&, const Store&)> judge;
};

// Returns the relative difference that another order of sums can make to a loss or a gradient.
inline double rounding(const Target& target) {
  return target.dtype == torch::kDouble ? 1e-12 : target.dtype == torch::kFloat ? 1e-4 : 5e-2;
}

inline std::string to_rounding(const std::string& what, const Target& target) {
  std::ostringstream text;
  text << what << ", to " << rounding(target);
  return text.str();
}

// Returns the relative difference of `b` from `a`; 0 if they are bit-equal, or both undefined.
inline double difference_of(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() && !b.defined()) return 0;
  constexpr double none = std::numeric_limits<double>::infinity();
  if (!a.defined() || !b.defined()) return none;
  if (torch::equal(a, b)) return 0;
  const double difference = ((a - b).norm() / a.norm()).item<double>();
  return std::isfinite(difference) ? difference : none;
}

// Returns whether a training with regions has the results of one without: the same bits, if kernels
// have one order of sums.
inline bool is_promised(double difference, const Target& target) {
  return difference <= (target.is_reproducible() ? 0 : rounding(target));
}

// Returns "gradients are bit-equal to those without regions", if that is promised.
inline std::string as_without_regions(const std::string& what, double difference,
                                      const Target& target) {
  if (target.is_reproducible()) return what + " are bit-equal to those without regions";
  std::ostringstream text;
  text << to_rounding(what + " are those without regions", target) << " (furthest: " << difference
       << ")";
  return text.str();
}

// Prints a promise, and returns whether it holds.
inline bool say(const std::string& what, bool holds) {
  std::printf("%s: %s\n", what.c_str(), holds ? "yes" : "NO");
  return holds;
}

// Returns the exit status: 0 if all promises hold, 1 if not, 2 if it was called wrongly or failed.
inline int run(const Program& program, int argc, char** argv) {
  const std::string usage =
      "usage: " + program.name +
      " [--processes N] [--device NAME] [--dtype NAME]\n"
      "  --processes N  how many workers, 1 to 16 (default: 2)\n"
      "  --device NAME  where to run: cpu, cuda, cuda:1, xpu, ... (default: cpu); without a "
      "number each\n"
      "                 process takes the next of its kind\n"
      "  --dtype NAME   float64, float32, or bfloat16 by autocast (default: float64)\n";
  std::string who = program.name;  // a worker adds its rank
  return run_example(who, usage, argc, argv, [&] {
    const Place place = parse_place(argc, argv);
    // The processes share the machine, and sums in one thread have one order.
    torch::set_num_threads(1);
    if (place.rank >= 0) {
      Workers::follow(place.leader);
      who += ", process " + std::to_string(place.rank);
      program.work(place, connect_store(place.port));
      return 0;
    }
    uint16_t port = 0;
    const Store store = serve_store(port);
    Workers workers(place, port);
    workers.wait(std::chrono::seconds(180));
    return program.judge(place, store) ? 0 : 1;
  });
}
