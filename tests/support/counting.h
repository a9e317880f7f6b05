#pragma once
// Counts of calls, copies, operators, kernels and bytes.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "remat/counters.h"
#include "remat/memory.h"
#include "tests/support/gradients.h"

namespace remat::testing {

/// Counts calls; any thread. Capture it by reference.
class Calls {
 public:
  void operator()() { ++count_; }
  int64_t count() const { return count_; }
  void reset() { count_ = 0; }

 private:
  std::atomic<int64_t> count_{0};
};

/// Returns `f` with a count of its calls in `calls`, which must outlive it.
template <class F>
auto counted(Calls& calls, F f) {
  return [&calls, f = std::move(f)](auto&&... args) {
    calls();
    return f(std::forward<decltype(args)>(args)...);
  };
}

/// Calls `first` once and `later` from then on.
template <class F, class G>
auto first_then(Calls& calls, F first, G later) {
  return [&calls, first, later](const Tensor& t) -> Tensor {
    calls();
    return calls.count() == 1 ? first(t) : later(t);
  };
}

/// A probe that fails its test at its end if the number of calls is not the expected one.
class ExpectedCalls {
 public:
  ExpectedCalls(int64_t expected, std::string what) : expected_(expected), what_(std::move(what)) {}
  ExpectedCalls(const ExpectedCalls&) = delete;
  ExpectedCalls& operator=(const ExpectedCalls&) = delete;
  ~ExpectedCalls();
  void operator()() { ++count_; }
  int64_t count() const { return count_; }

 private:
  const int64_t expected_;
  const std::string what_;
  std::atomic<int64_t> count_{0};
};

/// Counts the living copies of its probes, and fails its test if it dies before them.
class Alive {
 public:
  class Probe {
   public:
    explicit Probe(std::shared_ptr<std::atomic<int64_t>> count) : count_(std::move(count)) {
      ++*count_;
    }
    Probe(const Probe& other) : Probe(other.count_) {}
    Probe& operator=(const Probe&) = delete;
    ~Probe() { --*count_; }

   private:
    std::shared_ptr<std::atomic<int64_t>> count_;
  };

  Alive() = default;
  Alive(const Alive&) = delete;
  Alive& operator=(const Alive&) = delete;
  ~Alive();
  Probe probe() const { return Probe(count_); }
  int64_t count() const { return *count_; }

 private:
  std::shared_ptr<std::atomic<int64_t>> count_ = std::make_shared<std::atomic<int64_t>>(0);
};

/// The difference of `counters()` since its construction:
/// `Counted done; ... done.now().recomputes`. The two members that count living objects are not
/// differences.
class Counted {
 public:
  Counters now() const;

 private:
  Counters start_ = counters();
};

/// Bytes of CPU tensors since its construction, in the whole process.
class LiveBytes {
 public:
  int64_t held() const { return meter_.live_bytes() - start_; }
  int64_t peak() const { return meter_.peak_bytes() - start_; }
  void reset_peak() { meter_.reset_peak(); }

 private:
  MemoryMeter meter_;
  int64_t start_ = meter_.live_bytes();
};

/// Operator calls by name ("aten::sin") on this thread and in the backward passes it runs, as
/// `RecordFunction` sees them: composite operators and their parts, above autograd. A call that
/// early stop cut short is counted although its kernel did not run; see KernelCounter.
class OpCounter {
 public:
  OpCounter();
  ~OpCounter();
  OpCounter(const OpCounter&) = delete;
  OpCounter& operator=(const OpCounter&) = delete;
  int64_t count(const std::string& op) const;
  /// Returns every call in order.
  std::vector<std::string> names() const;
  void reset();

 private:
  uint64_t handle_;
};

/// CPU kernels that ran, by operator name: "sin", "cos", "exp", "mm", "addmm", "bmm", "mul.Tensor",
/// "relu", "sigmoid", "cumsum", "cat", "native_dropout", and those named in `more`. Counting
/// kernels replace the real ones for its lifetime, below autograd and on every thread. One at a
/// time.
class KernelCounter {
 public:
  explicit KernelCounter(const std::vector<std::string>& more = {});
  ~KernelCounter();
  KernelCounter(const KernelCounter&) = delete;
  KernelCounter& operator=(const KernelCounter&) = delete;
  int64_t count(const std::string& kernel) const;
  std::vector<std::string> names() const;
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace remat::testing
