// Rules 1 to 3 together: models whose regions lie in one another, share layers and skip levels.

#include "tests/support/support.h"

namespace {

using Map = std::function<Tensor(const Tensor&)>;
using Wrap = std::function<Map(Map)>;

Tensor weights(int64_t out, int64_t in) { return (at::randn({out, in}) * 0.2).requires_grad_(); }

// Down, the level below, up, with the way down concatenated to what comes back: a small UNet.
struct Level {
  static constexpr int64_t features = 6;
  Tensor down = weights(features, features), up = weights(features, 2 * features);
  Calls down_calls{}, up_calls{};
};
struct Ladder {
  explicit Ladder(size_t num_levels) : levels(num_levels) {}

  Tensor run(size_t level, const Wrap& wrap, const Tensor& x) {
    Level& here = levels[level];
    return wrap([this, level, &here, &wrap](const Tensor& t) {
      const Tensor below = wrap([&here](const Tensor& u) {
        here.down_calls();
        return at::linear(u, here.down).tanh();
      })(t);
      const Tensor back =
          level + 1 < levels.size() ? run(level + 1, wrap, below) : wrap([this](const Tensor& u) {
            bottom_calls();
            return at::linear(u, bottom).sin();
          })(below);
      return wrap([&here](const Tensor& u) {
        here.up_calls();
        return at::linear(u, here.up).tanh();
      })(at::cat({below, back}, 1));
    })(x);
  }

  Parameters parameters() const {
    Parameters all{{bottom}};
    for (const Level& level : levels) all.tensors.insert(all.tensors.end(), {level.down, level.up});
    return all;
  }

  std::vector<Level> levels;
  Tensor bottom = weights(Level::features, Level::features);
  Calls bottom_calls{};
};

TEST_CASE("a ladder of nested regions with skip connections has the plain grads", "[nesting]") {
  const auto depth = static_cast<int64_t>(GENERATE(range(1, 6)));
  const bool early_stop = GENERATE(true, false);
  CAPTURE(depth, early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  Ladder ladder(static_cast<size_t>(depth));
  const Wrap plainly = [](Map f) { return f; };
  const Wrap in_region = [](Map f) {
    return [f = std::move(f)](const Tensor& x) { return remat::checkpoint(f, x); };
  };
  const Counted done;
  require_same_grads(
      ladder.parameters(), [&](const Tensor& x) { return ladder.run(0, plainly, x); },
      [&](const Tensor& x) {
        ladder.bottom_calls.reset();
        for (Level& level : ladder.levels) {
          level.down_calls.reset();
          level.up_calls.reset();
        }
        return ladder.run(0, in_region, x);
      },
      leaf({3, Level::features}));
  // Three regions a level and the one at the bottom; each recomputes once.
  CHECK(done.now().recomputes == 3 * depth + 1);
  // The bottom runs in forward, in the recompute of each level around it, and in its own.
  CHECK(ladder.bottom_calls.count() == depth + 2);
  for (int64_t i = 0; i < depth; ++i) {
    CAPTURE(i);
    const Level& level = ladder.levels[static_cast<size_t>(i)];
    CHECK(level.down_calls.count() == i + 3);
    // The level's own recompute ends where the way up has its input.
    CHECK(level.up_calls.count() == i + (early_stop ? 2 : 3));
  }
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("what a ladder of nested regions holds does not grow with its depth", "[nesting]") {
  const auto depth = static_cast<size_t>(GENERATE(1, 3, 6));
  CAPTURE(depth);
  constexpr int64_t batch = 50, tensor_bytes = batch * Level::features * 4;
  Ladder ladder(depth);
  const Tensor x = leaf({batch, Level::features});
  const Wrap in_region = [](Map f) {
    return [f = std::move(f)](const Tensor& t) { return remat::checkpoint(f, t); };
  };
  LiveBytes bytes;
  const Tensor y = ladder.run(0, in_region, x);
  CHECK(bytes.held() == tensor_bytes);  // the result; all inputs inside are slots
  CHECK(ladder.bottom_calls.count() == 1);
}

TEST_CASE("layers used again and again, in regions between plain layers, have the plain grads",
          "[nesting]") {
  constexpr int64_t size = 100;
  const bool blocks_are_regions = GENERATE(false, true);
  CAPTURE(blocks_are_regions);
  Parameters parameters;
  const auto layer = [&](Calls* calls = nullptr) -> Map {
    const Tensor w = (at::randn({size, size}) * 0.1).requires_grad_(), b = leaf({size});
    parameters.tensors.insert(parameters.tensors.end(), {w, b});
    return [=](const Tensor& t) {
      if (calls != nullptr) (*calls)();
      return at::linear(t, w, b);
    };
  };
  const Map first = layer(), between = layer(), last = layer();
  Calls calls[4];
  std::vector<Map> shared;
  for (Calls& each : calls) shared.push_back(layer(&each));
  const auto net = [&](bool as_regions, const Tensor& x) {
    const Map block = [&shared, as_regions](const Tensor& input) {
      Tensor t = input;
      for (int round = 0; round < 2; ++round) {
        for (const Map& f : shared) t = (as_regions ? remat::checkpoint(f, t) : f(t)).relu();
      }
      return t;
    };
    const bool nested = as_regions && blocks_are_regions;
    Tensor t = first(x);
    t = between(nested ? remat::checkpoint(block, t) : block(t));
    return last(nested ? remat::checkpoint(block, t) : block(t));
  };
  const Counted done;
  require_same_grads(
      parameters, [&](const Tensor& x) { return net(false, x); },
      [&](const Tensor& x) {
        for (Calls& each : calls) each.reset();
        return net(true, x);
      },
      at::randn({2, size}));
  // Four uses each, in forward, in their own recompute, and in that of the block around them.
  for (const Calls& each : calls) CHECK(each.count() == (blocks_are_regions ? 12 : 8));
  CHECK(done.now().recomputes == (blocks_are_regions ? 16 + 2 : 16));
  CHECK(remat::counters().frames_alive == 0);
}

}  // namespace
