// counters(): exact, also after errors, early stops and backward calls that never come.

#include "tests/support/support.h"

using remat::checkpoint;

TEST_CASE("counters equal hand counts over a forward and two backward calls", "[report]") {
  constexpr int64_t size = 100'000;
  const Tensor x = leaf({size});
  const Counted done;
  Tensor y = checkpoint([](const Tensor& t) { return t.sin().cos().exp().sin() * 2; }, x);
  CHECK(done.now().frames_created == 1);
  CHECK(done.now().tensors_dropped == 4);
  CHECK(done.now().recomputes == 0);
  CHECK(remat::counters().frames_alive == 1);

  y.sum().backward({}, true);
  CHECK(done.now().recomputes == 1);
  CHECK(done.now().tensors_recomputed == 4);
  CHECK(done.now().early_stops == 1);  // the last sin does not run again
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  CHECK(remat::counters().frames_alive == 1);

  y.sum().backward();
  CHECK(done.now().recomputes == 2);
  CHECK(done.now().early_stops == 2);
  CHECK(done.now().tensors_recomputed == 8);
  CHECK(done.now().tensors_dropped == 4);
  CHECK(done.now().frames_created == 1);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("with early stop off no stop is counted", "[report]") {
  const Tensor x = leaf({100'000});
  const Counted done;
  checkpoint(
      {.early_stop = false}, [](const Tensor& t) { return t.sin().cos(); }, x)
      .sum()
      .backward();
  CHECK(done.now().recomputes == 1);
  CHECK(done.now().early_stops == 0);
}

TEST_CASE("a recompute that fails is counted, and leaves no bytes", "[report]") {
  const Tensor x = leaf({1000});
  Calls calls;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        calls();
        const Tensor half = t.sin().cos();
        if (calls.count() > 1) throw std::runtime_error("foo");
        return half.exp();
      },
      x);
  const Counted done;
  LiveBytes bytes;
  CHECK_THROWS_AS(y.sum().backward(), std::runtime_error);
  CHECK(done.now().recomputes == 1);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  CHECK(bytes.held() == 0);
}

TEST_CASE("the bytes of recomputed tensors are counted until they are handed over", "[report]") {
  constexpr int64_t size = 1000, bytes = size * 4;
  const Tensor x = leaf({size});
  std::vector<int64_t> alive;
  const auto note = [&](const Tensor&) {
    alive.push_back(remat::counters().recomputed_bytes_alive);
  };
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        const Tensor a = t.sin();  // saves t
        const Tensor b = a.cos();  // saves a
        const Tensor c = b.sin();  // saves b
        if (a.requires_grad() && !remat::is_recomputing()) {
          a.register_hook(note);
          b.register_hook(note);
          c.register_hook(note);
        }
        return c * 2;
      },
      x);
  y.sum().backward();
  // Before c's node nothing is recomputed; then each node hands one tensor over. `t` counts like
  // any other slot, although its bytes are those of the input.
  REQUIRE(alive.size() == 3);
  CHECK(alive[0] == 0);
  CHECK(alive[1] - alive[2] == bytes);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}
