// Generators with names: forks inside and around regions, states, errors.

#include <ATen/CPUGeneratorImpl.h>

#include <thread>

#include "remat/state.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::GeneratorForkGuard;
using remat::GeneratorTracker;

namespace {

std::shared_ptr<GeneratorTracker> made(uint64_t seed = 1) {
  auto tracker = std::make_shared<GeneratorTracker>();
  tracker->add("model", seed);
  tracker->add("expert", seed + 1);
  return tracker;
}

Tensor dropped(const Tensor& x) { return at::dropout(x, 0.1, true); }

/// Draws from the default generator and from two named ones.
Tensor block(const std::shared_ptr<GeneratorTracker>& tracker, const Tensor& x) {
  Tensor y = dropped(x).sin();
  {
    const GeneratorForkGuard model(tracker, "model");
    y = dropped(y).exp();
    const GeneratorForkGuard expert(tracker, "expert");
    y = dropped(y).cos();
  }
  const GeneratorForkGuard again(tracker, "model");
  return dropped(y).sin();
}

bool same_states(const GeneratorTracker& a, const GeneratorTracker& b) {
  const auto first = a.states(), second = b.states();
  for (const auto& [name, state] : first)
    if (!at::equal(state, second.at(name))) return false;
  return first.size() == second.size();
}

/// Runs `steps` steps of training with blocks as regions or plainly, from one seed.
struct Run {
  Tensors grads;
  std::shared_ptr<GeneratorTracker> tracker = made();
  Tensor default_state;

  explicit Run(bool is_region, remat::CheckpointOptions options = {}) {
    at::manual_seed(3);
    const Tensor x = leaf({64});
    for (int step = 0; step < 3; ++step) {
      Tensor y = x;
      for (int layer = 0; layer < 3; ++layer)
        y = is_region ? checkpoint(options, block, tracker, y) : block(tracker, y);
      grads.push_back(grad_of(y, {x}, {.retain_graph = true})[0]);
      grads.push_back(grad_of(y, {x})[0]);
    }
    default_state = at::detail::getDefaultCPUGenerator().get_state();
  }
};

}  // namespace

TEST_CASE("forks inside regions give the gradients and the states of a run without regions",
          "[state][rule-11]") {
  const Seed seed;
  const Run plain(false), regions(true);
  require_bit_equal(regions.grads, plain.grads);
  CHECK(same_states(*regions.tracker, *plain.tracker));
  CHECK(at::equal(regions.default_state, plain.default_state));
  // Not the same numbers for each step: the sequences went on.
  CHECK_FALSE(at::equal(plain.grads[0], plain.grads[2]));
}

TEST_CASE("forks in nested regions, and around regions", "[state][rule-11]") {
  const Seed seed;
  const auto run = [](bool is_region) {
    at::manual_seed(5);
    const auto tracker = made();
    const Tensor x = leaf({64});
    const auto inner = [&](const Tensor& t) { return block(tracker, t); };
    const auto outer = [&](const Tensor& t) {
      return dropped(is_region ? checkpoint(inner, t) : inner(t)).exp();
    };
    Tensor y;
    {
      const GeneratorForkGuard around(tracker, "expert");
      y = is_region ? checkpoint(dropped, x) : dropped(x);
    }
    y = is_region ? checkpoint(outer, y) : outer(y);
    y = is_region ? checkpoint(outer, y) : outer(y);
    Tensors all = grad_of(y, {x});
    for (const auto& [name, state] : tracker->states()) all.push_back(state);
    return all;
  };
  require_bit_equal(run(true), run(false));
}

TEST_CASE("a fork leaves the default generator's own sequence alone, also by an exception",
          "[state]") {
  const Seed seed;
  const auto tracker = made();
  at::manual_seed(9);
  const Tensor expected = at::rand({4});
  at::manual_seed(9);
  CHECK_THROWS_AS(
      [&] {
        const GeneratorForkGuard fork(tracker, "model");
        at::rand({100});
        throw std::runtime_error("out");
      }(),
      std::runtime_error);
  CHECK(at::equal(at::rand({4}), expected));
  const GeneratorForkGuard again(tracker, "model");  // is free
}

TEST_CASE("states of a tracker go to another one", "[state]") {
  const Seed seed;
  const auto draw = [](const std::shared_ptr<GeneratorTracker>& tracker) {
    const GeneratorForkGuard fork(tracker, "model");
    return at::rand({4});
  };
  const auto first = made(11);
  draw(first);
  const auto second = std::make_shared<GeneratorTracker>();
  second->set_states(first->states());
  CHECK(at::equal(draw(second), draw(first)));
  CHECK(second->states().size() == 2);
}

TEST_CASE("wrong uses of a tracker are refused", "[state]") {
  const auto tracker = made();
  CHECK_THROWS_WITH(tracker->add("model", 1), contains("already"));
  CHECK_THROWS_WITH(GeneratorForkGuard(tracker, "data"), contains("there was no \"data\""));
  const GeneratorForkGuard fork(tracker, "model");
  CHECK_THROWS_WITH(GeneratorForkGuard(tracker, "model"), contains("was forked already"));
  CHECK_THROWS_WITH(tracker->set_states({}), contains("within a fork"));
}
