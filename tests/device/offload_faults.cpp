// Copies of guards that fail, and memory of the host that is short, on the stand-in of stand_in.h.

#include <unistd.h>

#include <fstream>
#include <thread>

#include "remat/tiers.h"
#include "tests/device/offload_cases.h"
#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/far_offload.h"
#include "tests/support/files.h"
#include "tests/support/functions.h"
#include "tests/support/warnings.h"

using remat::checkpoint;

TEST_CASE("a copy of a guard's that fails, out or back, loses nothing", "[device][faults]") {
  const int64_t n_side = 16;
  const Tensor x = at::randn({n_side, n_side}).div_(n_side).to(stand_in::device()).requires_grad_();
  const auto f = [](const Tensor& t) {
    Tensor h = t.mm(t);
    for (int i = 0; i < 3; ++i) h = h.sin().mm(t);
    return h.exp();
  };
  const Tensor plain = grad_of(f(x), {x})[0].cpu();
  const int which = GENERATE(0, 1, 2);
  CAPTURE(which);
  const auto forward = [&]() -> Tensor {
    if (which == 0) {
      const remat::SaveOnCpuGuard guard({.pin_memory = true});
      return f(x);
    }
    if (which == 1) {
      const remat::SaveInTiersGuard guard({.device_bytes = 0, .min_bytes = 0});
      return f(x);
    }
    return remat::checkpoint({.offload_inputs = true}, f, x * 1);
  };
  const int64_t before = stand_in::live_bytes();
  int failed_out = 0, failed_back = 0;
  for (int64_t n = 0; n < 8; ++n) {
    CAPTURE(n);
    Tensor y;
    try {
      const remat::testing::Warnings warnings;  // tiers leave it where it was
      const FailingCopy failing(n);
      y = forward();
    } catch (const c10::Error& error) {
      ++failed_out;
      CHECK_THAT(error.what(), contains("far failed to copy"));
    }
    if (!y.defined()) {
      CHECK(stand_in::live_bytes() == before);
      y = forward();
    }
    try {
      const FailingCopy failing(n);
      require_bit_equal({grad_of(y, {x}, {.retain_graph = true})[0].cpu()}, {plain});
    } catch (const c10::Error& error) {
      ++failed_back;
      CHECK_THAT(error.what(), contains("far failed to copy"));
      drop_ready_nodes();
    }
    require_bit_equal({grad_of(y, {x})[0].cpu()}, {plain});
  }
  // The engine's thread of the device lets go late.
  for (int i = 0; i < 5000 && stand_in::live_bytes() != before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(stand_in::live_bytes() == before);
  CHECK((failed_out > 0) == (which != 1));
}

TEST_CASE("an exception between a copy and its use lets go of both, and the rest can be used",
          "[device][faults]") {
  constexpr int64_t size = 4000;
  const Tensor x = offload::stand_in_leaf(far_device, {size / 4});
  const Tensor plain = grad_of(sines(x + 1, 6), {x})[0];
  const int64_t before = stand_in::live_bytes();
  const int which = GENERATE(0, 1, 2);
  CAPTURE(which);
  const auto under_guard = [&](const auto& program) {
    if (which == 0) {
      const remat::SaveOnCpuGuard guard({.pin_memory = true, .prefetch_depth = 100});
      return program();
    }
    if (which == 1) {
      const remat::SaveOnCpuGuard guard({.pin_memory = true, .keep_last = 2});
      return program();
    }
    const remat::SaveInTiersGuard guard({.device_bytes = size, .min_bytes = 0});
    return program();
  };
  // Copies out are on their way.
  CHECK_THROWS_WITH(under_guard([&]() -> Tensor {
                      sines(x + 1, 6);
                      throw std::runtime_error("stop in forward");
                    }),
                    contains("stop in forward"));
  CHECK(stand_in::live_bytes() == before);
  // Copies back are on their way when a node of backward throws.
  Tensor middle;
  const Tensor y = under_guard([&] {
    middle = sines(x + 1, 4);
    return sines(middle, 2);
  });
  bool throws = true;
  middle.register_hook([&](const Tensor&) {
    if (throws) throw std::runtime_error("stop in backward");
  });
  middle.reset();
  const int64_t held = stand_in::live_bytes();
  CHECK_THROWS_WITH(grad_of(y, {x}, {.retain_graph = true}), contains("stop in backward"));
  drop_ready_nodes();
  CHECK(stand_in::live_bytes() == held);
  throws = false;
  offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
  offload::require_same(grad_of(y, {x}), {plain});
}

TEST_CASE(
    "page-locked memory that is short is warned about once, and what is beyond goes through chunks",
    "[device][faults]") {
  if (at::hasCUDA()) return;  // then it is CUDA's
  const Tensor x = offload::stand_in_leaf(far_device, {over_two_chunks / 4});
  const Tensor plain = grad_of(sines(x + 1, 3), {x})[0];
  const ShortPinnedMemory none(two_chunks);
  remat::testing::Warnings warnings;
  for (int i = 0; i < 2; ++i) {
    const int64_t before = stand_in::pinned_bytes();
    std::optional<remat::MoveCounters> counters;
    Tensor y;
    {
      const remat::SaveOnCpuGuard guard({.pin_memory = true});
      counters = guard.counters();
      y = sines(x + 1, 3);
    }
    CHECK(counters->now().bytes_moved == 3 * over_two_chunks);
    offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
    offload::require_same(grad_of(y, {x}), {plain});
    CHECK(stand_in::pinned_bytes() - before <= two_chunks);
  }
  CHECK(count_of(warnings.texts, "page-locked memory of the host is short") == 1);
  CHECK(count_of(warnings.texts, "9000000 bytes could not be allocated") == 1);
}

#ifndef __SANITIZE_ADDRESS__  // which has reserved more addresses than any limit leaves
TEST_CASE("memory of the host that is short is warned about once", "[device][faults]") {
  int64_t num_warnings = 0;
  for (const bool pin_memory : {false, true, false}) {
    const Tensor x = offload::stand_in_leaf(far_device, {1'000'000});
    const Tensor plain = grad_of(sines(x + 1, 2), {x})[0];
    remat::testing::Warnings warnings;
    Tensor y;
    {
      int64_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      // So much is left that all succeeds, but no twentieth of it.
      const auto used = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE));
      const Limit limit(RLIMIT_AS, used + (rlim_t{1} << 25));
      const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory});
      y = sines(x + 1, 2);
    }
    offload::require_same(grad_of(y, {x}), {plain});
    num_warnings += count_of(warnings.texts, "memory of the host is short: of ");
  }
  CHECK(num_warnings == 1);
}
#endif
