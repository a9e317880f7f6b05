// Plans executed, all nestings of short chains: under autocast, and of stages whose backward reads
// late.

#include <ATen/autocast_mode.h>

#include "tests/plan_chains.h"
#include "tests/support/autocast.h"
#include "tests/support/support.h"

namespace {

using remat::ChainCost;
using remat::Plan;
using remat::Stage;
using remat::testing::canonical_plans;
namespace autocast = at::autocast;

/// As in training: it has a gradient.
Tensor parameter(at::IntArrayRef sizes) {
  const Tensor made = leaf(sizes);
  made.mutable_grad() = at::zeros_like(made);
  return made;
}

struct Block {
  explicit Block(int64_t width)
      : width(width),
        scale(parameter({width})),
        shift(parameter({width})),
        widen(parameter({4 * width, width})),
        widen_bias(parameter({4 * width})),
        narrow(parameter({width, 4 * width})),
        narrow_bias(parameter({width})) {}

  /// Its last operator that saves is the dropout, before the output is there; its backward begins
  /// with a cast.
  Tensor operator()(const Tensor& x) const {
    const Tensor wide =
        at::gelu(at::linear(at::layer_norm(x, {width}, scale, shift), widen, widen_bias));
    return x + at::dropout(at::linear(wide, narrow, narrow_bias), 0.1, true);
  }
  /// The first operator casts its input.
  Tensor without_norm(const Tensor& x) const {
    return at::linear(at::gelu(at::linear(x, widen, widen_bias)), narrow, narrow_bias)
        .to(at::kFloat);
  }

  int64_t width;
  Tensor scale, shift, widen, widen_bias, narrow, narrow_bias;
};

Tensor loss_of(const Tensor& x) { return x.logsumexp(-1).mean(); }

struct Bytes {
  int64_t peak, predicted;
  bool is_exact() const { return peak == predicted; }
  bool fits() const { return peak <= predicted; }
};

/// `begin` makes what is around forward, and around backward if `is_around_backward`.
template <class Begin>
void visit_plans(const std::vector<Stage>& stages, const Tensor& x, const Begin& begin,
                 bool is_around_backward, const std::function<void(Bytes)>& visit) {
  ChainCost cost;
  {
    const auto around = begin();
    cost = remat::measure(stages, x, {.repeats = 1});
  }
  for (const Plan& plan : canonical_plans(static_cast<int64_t>(stages.size()))) {
    x.mutable_grad() = Tensor();
    LiveBytes bytes;
    {
      auto around = begin();
      const Tensor loss = remat::run(plan, stages, x);
      if (!is_around_backward) around.reset();
      loss.backward();
    }
    INFO(plan.to_string());
    visit({bytes.peak(), remat::simulate(cost, plan).peak_bytes});
  }
  x.mutable_grad() = Tensor();
}

const auto nothing_around = [] { return std::unique_ptr<Autocast>(); };

}  // namespace

TEST_CASE("every plan of stages under autocast peaks as predicted, to the byte", "[plan]") {
  for (const bool is_cached : {false, true})
    for (const int64_t width : {16, 64})
      for (const int64_t rows : {8, 128})
        for (const int64_t depth : {2, 3}) {
          INFO("width " << width << ", " << rows << " rows" << (is_cached ? ", cached" : ""));
          std::vector<Stage> stages;
          for (int64_t i = 0; i < depth; ++i)
            stages.emplace_back([block = Block(width), is_cached](const Tensor& x) {
              const Autocast scope({.cache = is_cached});
              return block(x);
            });
          stages.emplace_back(loss_of);
          visit_plans(stages, leaf({rows, width}), nothing_around, true, [](Bytes bytes) {
            CHECK(bytes.peak > 0);
            CHECK(bytes.peak == bytes.predicted);
          });
        }
}

TEST_CASE("casts that autocast caches around a whole step are in every predicted peak", "[plan]") {
  for (const int64_t width : {16, 128})
    for (const bool has_norm : {true, false}) {
      INFO("width " << width << (has_norm ? "" : ", without norm"));
      std::vector<Stage> stages;
      for (int64_t i = 0; i < 3; ++i)
        stages.emplace_back([block = Block(width), has_norm](const Tensor& x) {
          return has_norm ? block(x) : block.without_norm(x);
        });
      stages.emplace_back(loss_of);
      const Tensor x = leaf({64, width});
      const auto around = [] { return std::make_unique<Autocast>(); };
      int64_t casts = 3 * 2 * (2 * 4 * width * width + 5 * width);
      if (!has_norm) casts += 2 * x.numel();  // a leaf, too
      {
        const auto scope = around();
        CHECK(remat::measure(stages, x, {.repeats = 1}).cached_cast_bytes == casts);
      }
      visit_plans(stages, x, around, true, [&](Bytes bytes) {
        CHECK(bytes.predicted >= casts);
        CHECK(bytes.fits());
        if (has_norm) CHECK(bytes.is_exact());
      });
      visit_plans(stages, x, around, false, [](Bytes bytes) { CHECK(bytes.fits()); });
      // Without the cache they are casts of their stages.
      const auto uncached = [] {
        return std::make_unique<Autocast>(AutocastOptions{.cache = false});
      };
      visit_plans(stages, x, uncached, true, [&](Bytes bytes) {
        CHECK(bytes.fits());
        if (has_norm) CHECK(bytes.is_exact());
      });
    }
}

TEST_CASE("a recompute is counted beside what backward has made before it reads", "[plan]") {
  static constexpr int64_t num = 20'000;
  const std::vector<std::vector<Stage>> chains{
      // Both products are made before the first read; one is alive then beside the output's
      // gradient.
      std::vector<Stage>{[](const Tensor& x) { return x.sin().cos().mul(2).mul(3); },
                         [](const Tensor& x) { return x + x.sin().cos().neg(); },
                         [](const Tensor& x) { return x.exp().tanh().mul(3).add(1).neg(); }},
      // Dropout saves its mask before the output is there.
      std::vector<Stage>{
          [](const Tensor& x) { return at::cat({x, at::dropout(x.sin(), 0.1, true)}); },
          [](const Tensor& x) { return at::dropout(x.sin(), 0.1, true) + x; },
          [](const Tensor& x) { return x.cos().slice(0, 0, num); }},
      // Backward of the second stage reads nothing: the gradient of its input is larger than that
      // of its output.
      std::vector<Stage>{[](const Tensor& x) { return x.exp().sin().cos(); },
                         [](const Tensor& x) { return x.to(at::kBFloat16); },
                         [](const Tensor& x) { return x.sin().to(at::kFloat); }},
  };
  for (std::size_t i = 0; i < chains.size(); ++i) {
    INFO("chain " << i);
    std::vector<Stage> stages = chains[i];
    stages.emplace_back([](const Tensor& x) { return x.sin().square().mean(); });
    int64_t num_exact = 0;
    visit_plans(stages, leaf({num}), nothing_around, true, [&](Bytes bytes) {
      CHECK(bytes.fits());
      num_exact += bytes.is_exact() ? 1 : 0;
    });
    CHECK(num_exact > 0);
  }
  const ChainCost cost = remat::measure(chains[0], leaf({num}), {.repeats = 1});
  CHECK(cost.stages[0].first_read_tmp_bytes == 0);  // in place of the gradient that it was made of
  CHECK(cost.stages[0].stopped_tmp_bytes == 0);
  const remat::StageCost late = remat::measure(chains[1], leaf({num}), {.repeats = 1}).stages[1];
  CHECK(late.stopped_tmp_bytes == late.forward_tmp_bytes + late.output_bytes);
}

TEST_CASE("an input that no stage saves is in no peak after its stage has run", "[plan]") {
  constexpr int64_t kNum = 10'000;
  const auto adds = [](const Tensor& x) { return x + 1; };  // saves nothing
  const auto narrows = [](const Tensor& x) { return x.slice(0, 0, x.numel() / 2).mul(2).sin(); };
  const auto widens = [](const Tensor& x) { return at::cat({x, x}).sin(); };
  const auto wide_inside = [](const Tensor& x) {
    return at::cat({x, x, x}).sin().slice(0, x.numel(), 2 * x.numel()).sin() + 1;
  };
  const auto saves_output = [](const Tensor& x) { return x.exp(); };
  const auto saves_both = [](const Tensor& x) { return x * x.tanh(); };
  const auto ends_late = [](const Tensor& x) { return at::cat({x.sin(), x}).mul(2); };
  const auto loss = [](const Tensor& x) { return x.sin().square().mean(); };
  const std::vector<std::vector<Stage>> chains{
      {saves_both, widens, narrows, widens, loss},
      {saves_output, widens, narrows, widens, saves_output, loss},
      {ends_late, narrows, saves_both, ends_late, saves_output, loss},
      {widens, narrows, widens, narrows, widens,
       [](const Tensor& x) { return (x + 1).sin().mean(); }},
      // A region of a stage that saves nothing is charged for its input all the same.
      {saves_output, widens, narrows, adds, widens, loss},
      {adds, wide_inside, saves_output, wide_inside, adds, loss},
  };
  for (std::size_t i = 0; i < chains.size(); ++i) {
    INFO("chain " << i + 1);
    const bool is_each_saving = i < 4;
    visit_plans(chains[i], leaf({kNum}), nothing_around, true, [&](Bytes bytes) {
      CHECK(bytes.fits());
      if (is_each_saving) CHECK(bytes.predicted <= bytes.peak);
    });
  }
  const ChainCost cost = remat::measure(chains[0], leaf({kNum}), {.repeats = 1});
  CHECK(cost.stages[0].saves_input);
  CHECK_FALSE(cost.stages[1].saves_input);
  CHECK_FALSE(cost.stages[2].saves_input);
  // Kept to the end of backward by others, as long as the sine needs it by nobody else.
  CHECK(cost.stages[0].lone_backward_bytes <= cost.stages[0].backward_bytes + cost.input_bytes);
}

TEST_CASE("plans of a U-Net's chain peak as predicted, to the byte, with regions that keep, too",
          "[plan]") {
  constexpr int64_t kSide = 8, kWidth = 4;
  const auto weight = [](int64_t from, int64_t to) { return parameter({to, from, 3, 3}); };
  const auto block = [](const Tensor& x, const Tensor& kernel) {
    return at::silu(
        at::instance_norm(at::conv2d(x, kernel, {}, 1, 1), {}, {}, {}, {}, true, 0.1, 1e-5, false));
  };
  // The input that waits for the way up goes through the stages below, as part of one tensor.
  const int64_t wide = kWidth * kSide * kSide, small = 2 * kWidth * kSide * kSide / 4;
  const auto picture = [=](const Tensor& flat) {
    return flat.slice(0, 0, wide).view({1, kWidth, kSide, kSide});
  };
  const auto below = [=](const Tensor& flat) {
    return flat.slice(0, wide, wide + small).view({1, 2 * kWidth, kSide / 2, kSide / 2});
  };
  const auto both = [](const Tensor& a, const Tensor& b) {
    return at::cat({a.flatten(), b.flatten()});
  };
  const Tensor w1 = weight(3, kWidth), w2 = weight(kWidth, 2 * kWidth),
               w3 = weight(2 * kWidth, 2 * kWidth), w4 = weight(3 * kWidth, kWidth);
  const std::vector<Stage> stages{
      [=](const Tensor& x) { return block(x, w1); },
      [=](const Tensor& x) { return both(x, block(at::max_pool2d(x, 2), w2)); },
      [=](const Tensor& flat) { return both(picture(flat), block(below(flat), w3)); },
      // Saves what it puts together, not what it is given.
      [=](const Tensor& flat) {
        return block(
            at::cat({picture(flat), at::upsample_nearest2d(below(flat), {kSide, kSide})}, 1), w4);
      },
      [](const Tensor& x) { return x.square().mean(); }};
  const Tensor x = leaf({1, 3, kSide, kSide});
  CHECK_FALSE(remat::measure(stages, x, {.repeats = 1}).stages[3].saves_input);
  visit_plans(stages, x, nothing_around, true, [](Bytes bytes) { CHECK(bytes.is_exact()); });
}
