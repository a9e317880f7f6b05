#pragma once
// Samples of timed work: calibration, robust statistics, the JSON line that every benchmark prints.

#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace bench {

/// What the samples measure: the wall's time, or this thread's time on a core, which a busy
/// machine disturbs less. The same for work that one thread does alone.
enum class Clock { Wall, Thread };

inline int64_t now_ns(Clock clock) {
  if (clock == Clock::Thread) {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  }
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Runs the work so many times and returns the [ns] that all runs took together.
using Sampler = std::function<int64_t(int64_t repeats)>;

/// The repeats that make one sample at least `sample_ns` long; the runs on the way warm up.
inline int64_t calibrate(const Sampler& sampler, int64_t sample_ns) {
  int64_t repeats = 1;
  while (sampler(repeats) < sample_ns) repeats *= 2;
  return repeats;
}

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

struct Statistics {
  double min_ns = 0, median_ns = 0, mad_ns = 0;  ///< mad: median distance from the median
  std::size_t samples = 0;
};

inline Statistics statistics(const std::vector<double>& values) {
  const double middle = median(values);
  std::vector<double> distances;
  for (const double value : values)
    distances.push_back(value > middle ? value - middle : middle - value);
  return {*std::min_element(values.begin(), values.end()), middle, median(distances),
          values.size()};
}

/// One line on stdout. `params` are JSON members without the braces; so is what was `measured`.
inline void print_json(const char* name, const std::string& params, int threads,
                       const std::string& commit, const std::string& measured) {
#if defined(__clang__)
  const char* const compiler = "clang " __clang_version__;
#else
  const char* const compiler = "g++ " __VERSION__;
#endif
  std::printf(
      "{\"bench\": \"%s\", \"params\": {%s}, %s, \"threads\": %d, \"torch\": \"%s\", "
      "\"compiler\": \"%s\", \"commit\": \"%s\"}\n",
      name, params.c_str(), measured.c_str(), threads, TORCH_VERSION, compiler, commit.c_str());
  std::fflush(stdout);
}

/// The same of times, and of what else was measured (bytes, counts).
inline void print_json(const char* name, const std::string& params, const Statistics& result,
                       int threads, const std::string& commit, const std::string& measured = {}) {
  char times[160];
  std::snprintf(times, sizeof times,
                "\"min_ns\": %.1f, \"median_ns\": %.1f, \"mad_ns\": %.1f, \"samples\": %zu",
                result.min_ns, result.median_ns, result.mad_ns, result.samples);
  print_json(name, params, threads, commit, (measured.empty() ? "" : measured + ", ") + times);
}

/// What a command prints on its first line; empty if it fails.
inline std::string output_of(const std::string& command) {
  std::string line;
  if (FILE* const pipe = popen((command + " 2>/dev/null").c_str(), "r")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof buffer, pipe) != nullptr) line = buffer;
    pclose(pipe);
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return line;
}

}  // namespace bench
