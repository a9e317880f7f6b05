#pragma once
// Measurements of work: robust statistics, bytes, and the JSON line that every benchmark prints.

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <remat/memory.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"

namespace bench {

inline int64_t now_ns(Clock clock) {
  if (clock != Clock::Wall) {
    timespec time{};
    clock_gettime(clock == Clock::Thread ? CLOCK_THREAD_CPUTIME_ID : CLOCK_PROCESS_CPUTIME_ID,
                  &time);
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  }
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Waits until the device has done the work queued on the current stream.
inline void wait_for(const at::Device& device) {
  if (device.is_cpu()) return;
  c10::Event event(device.type());
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  event.synchronize();
}

/// Returns the time when all work queued so far is done.
inline int64_t now_ns(const Arguments& arguments) {
  wait_for(arguments.device);
  return now_ns(arguments.clock);
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

struct StepBytes {
  int64_t held = 0, peak = 0;
};

/// Returns the bytes of one step beyond those alive before it, after forward and at the peak.
/// `forward` returns the loss.
template <class Forward>
StepBytes bytes_of(const Forward& forward, const at::Device& device = at::kCPU) {
  remat::MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  StepBytes result;
  {
    const at::Tensor loss = forward();
    result.held = meter.live_bytes() - before;
    loss.backward();
  }
  result.peak = meter.peak_bytes() - before;
  return result;
}

/// Throws if `found` differs from the gradients of plain autograd. The comparison is bit by bit on
/// the CPU, and approximate on an accelerator, whose kernels may add in another order.
inline void require_plain(const std::vector<at::Tensor>& found,
                          const std::vector<at::Tensor>& plain, const std::string& where) {
  for (std::size_t i = 0; i < plain.size(); ++i)
    if (!found[i].equal(plain[i]) &&
        (plain[i].is_cpu() || !at::allclose(found[i], plain[i], 1e-3, 1e-5)))
      throw std::runtime_error("WRONG: " + where + ": a gradient is not the plain one");
}

template <class... Values>
std::string text(const char* format, Values... values) {
  char line[512];
  std::snprintf(line, sizeof line, format, values...);
  return line;
}

/// Prints one line. `params` and `measured` are JSON members without the braces.
inline void print_json(const char* name, const std::string& params, const Arguments& arguments,
                       const std::string& measured) {
#if defined(__clang__)
  const char* const compiler = "clang " __clang_version__;
#else
  const char* const compiler = "g++ " __VERSION__;
#endif
  const std::string device =
      arguments.device.is_cpu() ? "" : text(", \"device\": \"%s\"", arguments.device.str().c_str());
  std::printf(
      "{\"bench\": \"%s\", \"params\": {%s}, %s%s, \"threads\": %d, \"torch\": \"%s\", "
      "\"compiler\": \"%s\", \"commit\": \"%s\"}\n",
      name, params.c_str(), measured.c_str(), device.c_str(), at::get_num_threads(), TORCH_VERSION,
      compiler, arguments.commit.c_str());
  std::fflush(stdout);
}

/// Prints a line with times, and with other measurements (bytes, counts) in `measured`.
inline void print_json(const char* name, const std::string& params, const Arguments& arguments,
                       const Statistics& result, const std::string& measured = {}) {
  const char* const clock = arguments.clock == Clock::Wall     ? "wall"
                            : arguments.clock == Clock::Thread ? "thread"
                                                               : "process";
  print_json(name, params + text(", \"clock\": \"%s\"", clock), arguments,
             (measured.empty() ? "" : measured + ", ") +
                 text("\"min_ns\": %.1f, \"median_ns\": %.1f, \"mad_ns\": %.1f, \"samples\": %zu",
                      result.min_ns, result.median_ns, result.mad_ns, result.samples));
}

}  // namespace bench
