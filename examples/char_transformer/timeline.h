#pragma once
// Live bytes over the time of one training step, sampled at every operator.

#include <ATen/record_function.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "remat/memory.h"

struct Sample {
  double ms = 0;      // before (negative) or after the start of the backward
  int64_t bytes = 0;  // beyond those alive when the timeline started
};

// Samples the operators of the thread that starts it, backward included. One at a time.
class Timeline {
 public:
  explicit Timeline(c10::Device device) : meter_(device) {}
  ~Timeline() { stop(); }
  Timeline& operator=(Timeline&&) = delete;

  void start() {
    start_bytes_ = meter_.live_bytes();
    meter_.reset_peak();
    current_ = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&Timeline::enter, &Timeline::leave)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    sample();
  }
  void backward_starts() { backward_start_ = Clock::now(); }
  void stop() {
    if (current_ != this) return;
    sample();
    at::removeCallback(handle_);
    current_ = nullptr;
  }

  std::vector<Sample> samples() const {
    std::vector<Sample> result;
    for (const auto& [time, bytes] : samples_) {
      const std::chrono::duration<double, std::milli> ms = time - backward_start_;
      result.push_back({ms.count(), bytes - start_bytes_});
    }
    return result;
  }

 private:
  using Clock = std::chrono::steady_clock;

  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction&) {
    current_->sample();
    return nullptr;
  }
  static void leave(const at::RecordFunction&, at::ObserverContext*) { current_->sample(); }

  // Memory that the operator allocated and freed in between shows as a peak at its end.
  void sample() {
    const Clock::time_point now = Clock::now();
    samples_.emplace_back(now, meter_.peak_bytes());
    samples_.emplace_back(now, meter_.live_bytes());
    meter_.reset_peak();
  }

  static inline Timeline* current_ = nullptr;
  remat::MemoryMeter meter_;
  int64_t start_bytes_ = 0;
  at::CallbackHandle handle_ = 0;
  Clock::time_point backward_start_{};
  std::vector<std::pair<Clock::time_point, int64_t>> samples_;
};
