#pragma once
// A program of several processes: the first starts the others, which are the same program.

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
  // In each worker; what it throws fails the whole program.
  std::function<void(const Place&, const Store&)> work;
  // In the first process when all workers have ended well: compares what they told; whether all is
  // as promised.
  std::function<bool(const Place&, const Store&)> judge;
};

// What another order of sums may make of a loss or a gradient, relative: rounding and nothing else.
inline double rounding(const Target& target) {
  return target.dtype == torch::kDouble ? 1e-12 : target.dtype == torch::kFloat ? 1e-4 : 5e-2;
}

inline std::string to_rounding(const std::string& what, const Target& target) {
  std::ostringstream text;
  text << what << ", to " << rounding(target);
  return text.str();
}

// How far `b` is from `a`, relative; 0 if they are bit-equal, or both undefined.
inline double difference_of(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() && !b.defined()) return 0;
  constexpr double none = std::numeric_limits<double>::infinity();
  if (!a.defined() || !b.defined()) return none;
  if (torch::equal(a, b)) return 0;
  const double difference = ((a - b).norm() / a.norm()).item<double>();
  return std::isfinite(difference) ? difference : none;
}

// Whether a training with regions came to what one without them did: the same bits, where kernels
// have one order of sums.
inline bool is_promised(double difference, const Target& target) {
  return difference <= (target.is_reproducible() ? 0 : rounding(target));
}

// "gradients are bit-equal to those without regions", where that is promised.
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

// The exit status: 0 if all is as promised, 1 if not, 2 if it was called wrongly or failed.
inline int run(const Program& program, int argc, char** argv) {
  const std::string usage =
      "usage: " + program.name +
      " [--processes N] [--device NAME] [--dtype NAME]\n"
      "  --processes N  how many workers, 1 to 16 (default: 2)\n"
      "  --device NAME  where to run: cpu, cuda, cuda:1, xpu, ... (default: cpu); without a number each\n"
      "                 process takes the next of its kind\n"
      "  --dtype NAME   float64, float32, or bfloat16 by autocast (default: float64)\n";
  std::string who = program.name;  // a worker adds its rank
  return run_example(who, usage, argc, argv, [&] {
    const Place place = parse_place(argc, argv);
    // The processes share the machine; and sums in one thread have one order.
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
