// The check that runs after every test case sees what it says it sees.

#include <ATen/autocast_mode.h>

#include "tests/support/support.h"

TEST_CASE("a clean test leaves nothing", "[support]") {
  const Baseline before = baseline();
  const Tensor x = leaf({3});
  {
    const Baseline with_leaf = baseline();
    remat::checkpoint([](const Tensor& t) { return t.sin(); }, x).sum();
    CHECK(leftovers(with_leaf).empty());
  }
  CHECK(leftovers(before) == std::vector<std::string>{"12 tensor bytes"});
}

TEST_CASE("leftovers are named one by one", "[support]") {
  const Tensor x = leaf({3});
  const Baseline before = baseline();
  using Lines = std::vector<std::string>;
  SECTION("a frame, with its output") {
    const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin(); }, x);
    CHECK(leftovers(before) == Lines{"1 frames", "12 tensor bytes"});
  }
  SECTION("a hook") {
    const auto identity = [](const Tensor& t) { return t; };
    const remat::SavedTensorHooksGuard guard(identity, identity);
    CHECK(leftovers(before) == Lines{"an active saved-tensor hook"});
  }
  SECTION("hooks disabled") {
    const remat::DisableSavedTensorHooksGuard guard("off");
    CHECK(leftovers(before) == Lines{"saved-tensor hooks disabled"});
  }
  SECTION("a region") {
    Lines inside;
    remat::checkpoint([&](const Tensor&) { inside = leftovers(before); }, x);
    CHECK(std::count(inside.begin(), inside.end(), "a region's phase") == 1);
    CHECK(std::count(inside.begin(), inside.end(), "an active saved-tensor hook") == 1);
  }
  SECTION("grad mode, inference mode, autocast") {
    {
      const at::NoGradGuard no_grad;
      CHECK(leftovers(before) == Lines{"grad mode off"});
    }
    {
      const c10::InferenceMode inference;
      const Lines found = leftovers(before);
      CHECK(std::count(found.begin(), found.end(), "inference mode") == 1);
    }
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const Lines found = leftovers(before);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    CHECK(found == Lines{"autocast"});
  }
  CHECK(leftovers(before).empty());
}

TEST_CASE("the comparison of gradients sees a difference", "[support]") {
  const Tensor x = leaf({3});
  const auto plain = [](const Tensor& t) { return t.sin(); };
  const Outcome expected = run({}, plain, x);
  const auto differs = [&](const Outcome& other, auto member) {
    return !bit_equal((other.*member)[0], (expected.*member)[0]);
  };
  CHECK_FALSE(differs(run({}, plain, x), &Outcome::outputs));
  CHECK_FALSE(differs(run({}, plain, x), &Outcome::input_grads));
  const Outcome other = run({}, [](const Tensor& t) { return t.sin() * 2; }, x);
  CHECK(differs(other, &Outcome::outputs));
  CHECK(differs(other, &Outcome::input_grads));
  const Outcome drew = run({}, [](const Tensor& t) { return t.sin() + 0 * at::rand({1}); }, x);
  CHECK_FALSE(differs(drew, &Outcome::input_grads));
  CHECK_FALSE(at::equal(drew.generator_state, expected.generator_state));
}

TEST_CASE("kernel counts see what ran, operator counts what was called", "[support]") {
  const Tensor x = leaf({3});
  const KernelCounter kernels;
  const OpCounter ops;
  const auto refuse = [](const Tensor&) -> Tensor { throw std::runtime_error("no"); };
  const remat::SavedTensorHooksGuard guard(refuse, [](const Tensor& t) { return t; });
  CHECK_THROWS(x.sin());  // saves its input, and is stopped before its kernel
  CHECK(kernels.count("sin") == 0);
  CHECK(ops.count("aten::sin") == 1);
  CHECK_THROWS(x.exp());  // saves its result
  CHECK(kernels.count("exp") == 1);
  x.detach().sin();
  CHECK(kernels.names() == std::vector<std::string>{"exp", "sin"});
}

TEST_CASE("graph_dies sees a cycle", "[support]") {
  CHECK(graph_dies([](const Tensor& a) { return a.sin().exp(); }));
  CHECK_FALSE(graph_dies([](const Tensor& a) { return a.detach(); }));
  Tensor kept;
  CHECK_FALSE(graph_dies([&](const Tensor& a) {
    kept = a.sin();
    return kept.exp();
  }));
}
