#pragma once
// Seeds, and leftovers that no test may leave.

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/gradients.h"

namespace remat::testing {

/// Seeds the CPU generator, shows the seed with a failure, and restores the generator at its end.
/// Without a number: `REMAT_TEST_SEED`, else a new seed in each run of the program.
class Seed {
 public:
  Seed();
  explicit Seed(uint64_t seed);
  ~Seed();
  Seed(const Seed&) = delete;
  Seed& operator=(const Seed&) = delete;
  uint64_t value() const { return seed_; }

 private:
  uint64_t seed_;
  Tensor before_;
  Catch::ScopedMessage message_;
};

/// Returns the state of the default CPU generator.
Tensor generator_state();
void set_generator_state(const Tensor& state);

/// The state before a test.
struct Baseline {
  int64_t live_bytes = 0;
  int64_t frames_alive = 0;
  int64_t recomputed_bytes_alive = 0;
};
Baseline baseline();

/// Returns one line for each leftover that was not there at `before`: frames, recomputed bytes,
/// tensor bytes, active saved-tensor hooks or a disabled hook switch, dispatch modes, a region's
/// phase, grad mode off, inference mode, autocast.
std::vector<std::string> leftovers(const Baseline& before);

/// Everything that must be as before after a failure.
class Unchanged {
 public:
  Unchanged() : before_(baseline()) {}
  void require(const char* when) const {
    INFO(when);
    std::string found;
    for (const std::string& each : leftovers(before_)) found += each + "; ";
    REQUIRE(found.empty());
  }

 private:
  Baseline before_;
};

}  // namespace remat::testing
