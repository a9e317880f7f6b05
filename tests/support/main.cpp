// Runs the tests, fails any case that leaves a frame, a hook or a byte behind, and lists the
// slowest.

// For Catch2 2, whose one header comes with support.h, after LibTorch's macro CHECK is undefined.
#define CATCH_CONFIG_RUNNER

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/support.h"

namespace {

// A library built by `./dev mutate` records the places that a case has reached, and the case's
// time; negative for a failed case.
using CaseEnded = void (*)(const char* name, double seconds);
CaseEnded case_ended = nullptr;

int cases_with_leftovers = 0;
std::vector<std::pair<double, std::string>> seconds_of_cases;

#if REMAT_TEST_CATCH3
using ListenerBase = Catch::EventListenerBase;
const Catch::TestCaseInfo& info_of(const Catch::TestCaseStats& stats) { return *stats.testInfo; }
#else
using ListenerBase = Catch::TestEventListenerBase;
const Catch::TestCaseInfo& info_of(const Catch::TestCaseStats& stats) { return stats.testInfo; }
#endif

// Assertions are not allowed in a listener, so it keeps its own count of failures.
class LeftoverListener : public ListenerBase {
 public:
  using ListenerBase::ListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo&) override {
    before_ = baseline();
    start_ = std::chrono::steady_clock::now();
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const Catch::TestCaseInfo& info = info_of(stats);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
    seconds_of_cases.emplace_back(seconds.count(), info.name);
    if (info.tagsAsString().find("[leaves-bytes]") != std::string::npos) {
      before_.live_bytes = baseline().live_bytes;
    }
    std::vector<std::string> found = leftovers(before_);
    // A thread of the engine's pool may still be releasing the last backward.
    for (int tries = 0; tries < 50 && !found.empty(); ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      found = leftovers(before_);
    }
    if (case_ended != nullptr) {
      const bool has_passed = stats.totals.assertions.allOk() && found.empty();
      case_ended(info.name.c_str(), has_passed ? seconds.count() : -1);
    }
    if (found.empty()) return;
    ++cases_with_leftovers;
    std::cerr << "\nLEFT BEHIND by \"" << info.name << "\":";
    for (const std::string& what : found) std::cerr << "\n  " << what;
    std::cerr << '\n';
  }

 private:
  Baseline before_;
  std::chrono::steady_clock::time_point start_;
};

// One line each, for tools/sum_tests.py.
void print_slowest() {
  std::sort(seconds_of_cases.rbegin(), seconds_of_cases.rend());
  if (seconds_of_cases.size() > 10) seconds_of_cases.resize(10);
  for (const auto& [seconds, name] : seconds_of_cases) {
    std::cerr << "took " << seconds << " s: " << name << '\n';
  }
}

// Allocates the memory that LibTorch allocates once per process, which would otherwise count
// against the first test.
void warm_up() {
  const Tensor x = leaf({4, 4});
  at::dropout(x.mm(x).exp(), 0.5, true).sum().backward();
}

}  // namespace

CATCH_REGISTER_LISTENER(LeftoverListener)

int main(int argc, char** argv) {
  // One thread: bit-equal sums, and no worker of a pool holds memory after a test.
  at::set_num_threads(1);
  baseline();  // starts the byte counter before the first tensor
  warm_up();
  case_ended = reinterpret_cast<CaseEnded>(dlsym(RTLD_DEFAULT, "remat_mutation_case_ended"));
  if (case_ended != nullptr) case_ended("", 0);  // the places reached before the first case
  const int failures = Catch::Session().run(argc, argv);
  print_slowest();
  if (cases_with_leftovers > 0) {
    std::cerr << cases_with_leftovers << " test cases left something behind\n";
  }
  return failures != 0 ? failures : (cases_with_leftovers != 0 ? 1 : 0);
}
