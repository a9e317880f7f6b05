// CheckpointLevelGuard: which calls with a level are regions.

#include "tests/support/nn.h"

using remat::checkpoint;
using remat::CheckpointLevelGuard;
using remat::CheckpointOptions;
namespace nn = torch::nn;

namespace {

Tensor sines(const Tensor& x) { return x.sin().exp(); }

/// Returns true if a call of this level is a region here; its gradient is right either way.
bool is_region(std::optional<int64_t> level) {
  const Tensor x = leaf({3});
  bool is_checkpointing = false;
  const Counted done;
  const Tensor y = checkpoint(
      {.level = level},
      [&](const Tensor& t) {
        is_checkpointing |= remat::is_checkpointing();
        return sines(t);
      },
      x);
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of(sines(x), {x})[0]));
  CHECK(done.now().recomputes == (is_checkpointing ? 1 : 0));
  return is_checkpointing;
}

}  // namespace

TEST_CASE("a call is a region if the guard's level reaches its own", "[scope][levels]") {
  for (int64_t training_level = 0; training_level <= 3; ++training_level) {
    const CheckpointLevelGuard guard(training_level);
    for (int64_t level = 0; level <= 4; ++level) {
      CAPTURE(training_level, level);
      CHECK(is_region(level) == (level > 0 && training_level >= level));
    }
    CHECK(is_region(std::nullopt));
  }
}

TEST_CASE("without a guard every level but 0 is a region, and the innermost guard decides",
          "[scope][levels]") {
  CHECK(is_region(1));
  CHECK(is_region(5));
  CHECK_FALSE(is_region(0));
  const CheckpointLevelGuard outer(1);
  CHECK_FALSE(is_region(2));
  {
    const CheckpointLevelGuard inner(2);
    CHECK(is_region(2));
    const remat::DisableCheckpointGuard off;
    CHECK_FALSE(is_region(2));
  }
  CHECK_FALSE(is_region(2));
}

TEST_CASE("recomputes see the level that forward saw", "[scope][levels][rule-3]") {
  const Seed seed;
  const Tensor x = leaf({3});
  const auto inner = [](const Tensor& t) { return checkpoint({.level = 2}, sines, t).sin(); };
  const Tensor expected = grad_of(sines(x).sin().cos(), {x})[0];
  for (const int64_t training_level : {1, 2}) {
    CAPTURE(training_level);
    Tensor y;
    {
      const CheckpointLevelGuard guard(training_level);
      y = checkpoint([&](const Tensor& t) { return checkpoint(inner, t).cos(); }, x);
    }
    // Backward runs under another one: with forward's, and the same number of saved tensors.
    const CheckpointLevelGuard other(3 - training_level);
    const Counted done;
    CHECK(bit_equal(grad_of(y, {x})[0], expected));
    CHECK(done.now().recomputes == (training_level == 1 ? 2 : 3));
  }
}

TEST_CASE(
    "a call that its level keeps from being a region leaves its modules' state to those around",
    "[scope][levels]") {
  const Seed seed;
  const Tensor x = leaf({4, 3});
  const auto run = [&](int64_t training_level, bool names_it) {
    nn::BatchNorm1d norm(3);
    const CheckpointLevelGuard guard(training_level);
    const CheckpointOptions options{
        .modules = names_it ? std::vector<std::shared_ptr<nn::Module>>{norm.ptr()}
                            : std::vector<std::shared_ptr<nn::Module>>{},
        .level = 2};
    const Tensor y = checkpoint(
        [&](const Tensor& t) {
          const Tensor z = names_it ? checkpoint(
                                          options, [&](const Tensor& u) { return norm(u); }, t)
                                    : checkpoint(options, norm, t);
          return z.sin();
        },
        x);
    y.sum().backward();
    return norm->num_batches_tracked.item<int64_t>();
  };
  for (const bool names_it : {false, true}) {
    CHECK(run(1, names_it) == 1);
    CHECK(run(2, names_it) == 1);
  }
}

TEST_CASE("levels work in checkpointed functions and chains, and modules have their own",
          "[scope][levels]") {
  const Tensor x = leaf({3});
  const auto function = remat::checkpointed(sines, {.level = 2});
  remat::Checkpointed<nn::LinearImpl> module(remat::ModuleOptions{.level = 3}, 3, 3);
  const std::vector<remat::Stage> stages{sines, sines, sines};
  const auto count = [&](int64_t training_level, auto&& call) {
    const CheckpointLevelGuard guard(training_level);
    const Counted done;
    call().sum().backward();
    return done.now().recomputes;
  };
  CHECK(count(1, [&] { return function(x); }) == 0);
  CHECK(count(2, [&] { return function(x); }) == 1);
  CHECK(count(1, [&] { return module(x); }) == 1);
  const auto chain = [&] {
    return remat::checkpoint_sequential(stages, 3, x, {.checkpoint = {.level = 2}});
  };
  CHECK(count(1, chain) == 0);
  CHECK(count(2, chain) == 2);
  remat::set_checkpoint_level(*module, 2);
  CHECK(count(5, [&] { return module(x); }) == 0);
}

TEST_CASE("a negative level is an error", "[scope][levels]") {
  const Tensor x = leaf({3});
  CHECK_THROWS_WITH(checkpoint({.level = -1}, sines, x), contains("level was -1"));
  CHECK_THROWS_AS(checkpoint({.level = -1}, nn::Linear(3, 3), x), c10::ValueError);
  CHECK_FALSE(remat::is_checkpointing());
}

TEST_CASE("a call with a level whose function is a module in eval mode runs plainly",
          "[scope][levels]") {
  const Seed seed;
  const Tensor x = leaf({2, 3});
  nn::Linear linear(3, 3);
  const auto frames = [&](const CheckpointOptions& options) {
    return frames_of([&] { return checkpoint(options, linear, x).sin(); });
  };
  CHECK(frames({.level = 1}) == 1);
  linear->eval();
  CHECK(frames({.level = 1}) == 0);
  CHECK(frames({}) == 1);
  const auto forward = [&](std::optional<int64_t> level) {
    return checkpoint({.level = level}, &nn::LinearImpl::forward, linear.ptr(), x).exp();
  };
  CHECK(frames_of([&] { return forward(1); }) == 0);
  CHECK(bit_equal(grad_of(forward(1), {x})[0], grad_of(forward({}), {x})[0]));
}
