// fit: what it chooses, keeps, finds again and says.

#include "remat/fit.h"

#include <ATen/autocast_mode.h>

#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "remat/memory.h"
#include "tests/support/files.h"
#include "tests/support/nn.h"

using remat::fit;
using remat::FitOptions;
using remat::Fitted;
using remat::Stage;

namespace {

struct Chain {
  Tensors weights;
  std::vector<Stage> stages;
  std::shared_ptr<std::atomic<int>> calls = std::make_shared<std::atomic<int>>(0);

  explicit Chain(int count = 8, int64_t width = 64) {
    for (int i = 0; i < count; ++i) {
      const Tensor weight = (at::randn({width, width}) / 8).requires_grad_();
      weight.mutable_grad() = at::zeros_like(weight);
      weights.push_back(weight);
      stages.emplace_back([weight, calls = calls](const Tensor& x) {
        ++*calls;
        return at::gelu(at::mm(x, weight)).sin();
      });
    }
    stages.emplace_back([](const Tensor& x) { return x.square().sum(); });
  }
  Tensor plain(Tensor x) const {
    for (const Stage& each : stages) x = each(x);
    return x;
  }
  Tensors gradients(const Tensor& loss) const {
    for (const Tensor& each : weights) each.grad().zero_();
    loss.backward();
    Tensors found;
    for (const Tensor& each : weights) found.push_back(each.grad().clone());
    return found;
  }
  /// [bytes] of a step, beyond what there is before it.
  template <class F>
  int64_t peak(F&& f) const {
    remat::MemoryMeter meter;
    const int64_t before = meter.live_bytes();
    gradients_zero();
    meter.reset_peak();
    f().backward();
    return meter.peak_bytes() - before;
  }
  void gradients_zero() const {
    for (const Tensor& each : weights) each.grad().zero_();
  }
};

const FitOptions quick{.measure = {.warmup = 0, .repeats = 1}};

}  // namespace

TEST_CASE("fit keeps a step under its budget, with plain gradients", "[fit]") {
  const remat::MemoryMeter meter;
  const Chain chain;
  const Tensor x = at::randn({128, 64});
  const int64_t plain_peak = chain.peak([&] { return chain.plain(x); });
  const int64_t share = GENERATE(2, 3);
  const int64_t budget = plain_peak / share;
  const Fitted fitted = fit(chain.stages, x, budget, quick);
  CHECK(chain.peak([&] { return fitted(x); }) <= budget);
  CHECK(fitted.plan().frames() > 0);
  REQUIRE(fitted.measured_peak());
  CHECK(*fitted.measured_peak() <= budget);
  CHECK(fitted.predicted().peak_bytes <= budget);
  const Tensors expected = chain.gradients(chain.plain(x));
  require_bit_equal(chain.gradients(fitted(x)), expected);
  // Nothing is recomputed where there is room.
  CHECK(fit(chain.stages, x, 2 * plain_peak, quick).plan().frames() == 0);
}

TEST_CASE("fit measures and plans anew for inputs of another kind, once each", "[fit]") {
  const Chain chain;
  const Tensor x = at::randn({128, 64}), larger = at::randn({256, 64});
  const int64_t budget = chain.peak([&] { return chain.plain(x); });
  const Fitted fitted = fit(chain.stages, x, budget, quick);
  CHECK(fitted.plan().frames() == 0);
  require_bit_equal(chain.gradients(fitted(larger)), chain.gradients(chain.plain(larger)));
  CHECK(fitted.plan().frames() > 0);
  CHECK(chain.peak([&] { return fitted(larger); }) <= budget);
  const int before = *chain.calls;
  fitted(x);
  CHECK(*chain.calls - before == 8);
  CHECK(fitted.plan().frames() == 0);
  CHECK_THROWS_AS(fitted(at::randn({1 << 14, 64})), remat::InfeasibleBudget);
  fitted(x);  // as before
}

TEST_CASE("measurements are kept in a file, and used again", "[fit]") {
  const Folder folder;
  const std::string file = folder.path() + "/measurements";
  const Chain chain;
  const Tensor x = at::randn({128, 64});
  FitOptions options = quick;
  options.measurements = file;
  options.verify = false;
  const int64_t budget = chain.peak([&] { return chain.plain(x); }) / 2;
  const Fitted first = fit(chain.stages, x, budget, options);
  CHECK(first.was_measured());
  const int before = *chain.calls;
  const Fitted again = fit(chain.stages, x, budget, options);
  CHECK_FALSE(again.was_measured());
  CHECK(*chain.calls == before);
  CHECK(again.plan() == first.plan());
  CHECK(again.table() == first.table());
  // Each kind of sample has its own, and the first one's stay.
  CHECK(fit(chain.stages, at::randn({64, 64}), budget, options).was_measured());
  CHECK_FALSE(fit(chain.stages, x, budget, options).was_measured());
  // So has autocast around them.
  at::autocast::set_autocast_enabled(at::kCPU, true);
  CHECK(fit(chain.stages, x, budget, options).was_measured());
  CHECK_FALSE(fit(chain.stages, x, budget, options).was_measured());
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK_FALSE(fit(chain.stages, x, budget, options).was_measured());
  CHECK(folder.num_entries() == 1);
}

TEST_CASE("a file that is none of measurements is refused, and left alone", "[fit]") {
  const Folder folder;
  const std::string file = folder.path() + "/notes";
  const Chain chain(2);
  FitOptions options = quick;
  options.measurements = file;
  const auto refused = [&](const std::string& contents) {
    std::ofstream(file) << contents;
    const std::string text = text_of(error_of<c10::ValueError>(
        [&] { fit(chain.stages, at::randn({4, 64}), 1 << 30, options); }));
    std::ifstream in(file);
    std::stringstream now;
    now << in.rdbuf();
    CHECK(now.str() == contents);
    return text;
  };
  CHECK_THAT(refused("milk\n"), contains("at line 1"));
  CHECK_THAT(refused("remat measurements 5\nsomething\nchain 1 2 0 0 0 1\n"),
             contains("was not written as a file of measurements by this version of remat"));
  CHECK_THAT(refused(R"({"format": "remat measurements 7", "chains": {}})"),
             contains("its format is \"remat measurements 7\", not \"remat measurements 6\""));
  CHECK_THAT(refused(R"({"format": "remat measurements 6", "chains": {"x": {"rounding": "two"}}})"),
             contains("type must be number"));
  // Where the disk is full, nothing is left beside the file.
  options.measurements = folder.path() + "/full";
  {
    const FileSizeLimit limit(10);
    CHECK_THAT(text_of(error_of<c10::ValueError>(
                   [&] { fit(chain.stages, at::randn({4, 64}), 1 << 30, options); })),
               contains("could not be written"));
  }
  CHECK(folder.num_entries() == 1);
  options.measurements = "/does/not/exist/file";
  CHECK_THAT(text_of(error_of<c10::ValueError>(
                 [&] { fit(chain.stages, at::randn({4, 64}), 1 << 30, options); })),
             contains("could not be written"));
}

TEST_CASE("fit says what is possible where the budget is too small", "[fit]") {
  const Chain chain;
  const Tensor x = at::randn({128, 64});
  const auto error = error_of<remat::InfeasibleBudget>([&] { fit(chain.stages, x, 1000, quick); });
  CHECK(error.minimum_bytes() > 1000);
  CHECK_NOTHROW(fit(chain.stages, x, 2 * error.minimum_bytes(), quick));
  CHECK_THAT(text_of(error_of<c10::ValueError>([&] { fit(chain.stages, x, -1, quick); })),
             contains("the budget is -1"));
  CHECK_THAT(text_of(error_of<c10::ValueError>([&] { fit(chain.stages, Tensor(), 1, quick); })),
             contains("the sample is an undefined tensor"));
}

TEST_CASE("fit takes the smallest budget that its frontier says, and no smaller one", "[fit]") {
  const Chain chain;
  const Tensor x = at::randn({128, 64});
  FitOptions options = quick;
  const Folder folder;
  options.measurements =
      folder.path() + "/measured";  // times differ from one measurement to the next
  const Fitted loose = fit(chain.stages, x, 1 << 30, options);
  const remat::Frontier frontier = loose.frontier();
  for (const remat::FrontierPoint& point : frontier.points()) {
    const Fitted fitted = fit(chain.stages, x, point.bytes, options);
    CHECK(fitted.measured_peak() == point.bytes);
    CHECK(fitted.predicted().peak_bytes == point.bytes);
    CHECK(chain.peak([&] { return fitted(x); }) <= point.bytes);
  }
  const int64_t least = frontier.points().front().bytes;
  CHECK(error_of<remat::InfeasibleBudget>([&] {
          fit(chain.stages, x, least - 1, options);
        }).minimum_bytes() == least);
}

TEST_CASE("fit sees what stages' costs do not say", "[fit]") {
  // Each call of a stage leaves something behind.
  const remat::MemoryMeter meter;
  const auto kept = std::make_shared<Tensors>();
  const Chain chain;
  std::vector<Stage> stages = chain.stages;
  stages[3] = [kept, stage = stages[3]](const Tensor& x) {
    Tensor y = stage(x);
    kept->push_back(at::zeros({16, 64}));
    return y;
  };
  const Tensor x = at::randn({128, 64});
  const auto peak = [&](const Fitted& fitted) {
    kept->clear();
    return chain.peak([&] { return fitted(x); });
  };
  const FitOptions verified = quick;
  FitOptions unverified = verified;
  unverified.verify = false;
  const auto points = fit(stages, x, 1 << 30, unverified).frontier().points();
  // Nothing is recomputed there: at the peak all is there that stages have left behind.
  const int64_t budget = points.back().bytes + 1000;
  const Fitted trusted = fit(stages, x, budget, unverified),
               tried = fit(stages, x, budget, verified);
  CHECK(peak(trusted) > trusted.predicted().peak_bytes + 1000);
  CHECK(tried.predicted().peak_bytes < trusted.predicted().peak_bytes);
  CHECK(*tried.measured_peak() <= budget);
  CHECK(peak(tried) <= budget);
}

TEST_CASE("fit puts back gradients and random numbers", "[fit]") {
  Chain chain;
  chain.stages.insert(chain.stages.begin() + 1,
                      [](const Tensor& x) { return at::dropout(x, 0.5, true); });
  for (const Tensor& each : chain.weights) each.grad().fill_(3);
  const Tensor x = at::randn({128, 64});
  const Tensor state = generator_state();
  const Fitted fitted = fit(chain.stages, x, 1 << 30, quick);
  CHECK(bit_equal(generator_state(), state));
  for (const Tensor& each : chain.weights) CHECK(bit_equal(each.grad(), at::full_like(each, 3)));
}

TEST_CASE("a fitted chain plans in a region as outside of one, for a new kind of input", "[fit]") {
  Chain chain(3);
  chain.stages.insert(chain.stages.begin() + 1,
                      [](const Tensor& x) { return at::dropout(x, 0.5, true); });
  const Tensor x = at::randn({24, 64}).requires_grad_();
  const auto gradients = [&](const auto& run) {
    at::manual_seed(7);
    const Tensor y = run(x);
    Tensors all = chain.gradients(y);
    all.push_back(x.grad().clone());
    x.mutable_grad() = Tensor();
    return all;
  };
  const auto around = [](const auto& inner) {
    return [&inner](const Tensor& t) { return inner(at::dropout(t.sin(), 0.5, true)) + 1; };
  };
  const auto plain = [&](const Tensor& t) { return chain.plain(t); };
  const Tensors expected = gradients(around(plain));

  for (const bool has_policy : {false, true}) {
    const Fitted fitted = fit(chain.stages, at::randn({128, 64}), 1 << 30, quick);
    remat::CheckpointOptions options{.location = {}};
    if (has_policy) options.policy = remat::save_matmuls();
    const Tensors found =
        gradients([&](const Tensor& t) { return remat::checkpoint(options, around(fitted), t); });
    REQUIRE(found.size() == expected.size());
    require_bit_equal(found, expected);
    const int before = *chain.calls;
    fitted(x);
    CHECK(*chain.calls - before == 3);
  }
  // In a recompute it is measured again, and no more.
  const Tensors found = gradients([&](const Tensor& t) {
    return remat::checkpoint(
        [&](const Tensor& input) {
          remat::measure(chain.stages, input, quick.measure);
          return around(plain)(input);
        },
        t);
  });
  require_bit_equal(found, expected);
}

TEST_CASE("a stage that calls the chain it is measured for is refused, and may do so with others",
          "[fit]") {
  const Tensor weight = at::randn({4, 4}).requires_grad_();
  std::optional<Fitted> fitted;
  bool calls_itself = true;
  const std::vector<Stage> stages{[&](const Tensor& x) {
                                    if (!fitted || x.size(0) < 2) return at::mm(x, weight);
                                    if (calls_itself) (*fitted)(x);
                                    (*fitted)(x.narrow(0, 0, 1));
                                    return at::mm(x, weight);
                                  },
                                  [](const Tensor& x) { return x.square().sum(); }};
  fitted.emplace(fit(stages, at::randn({8, 4}), 1 << 20, quick));
  const Tensor x = at::randn({3, 4});
  for (int i = 0; i < 2; ++i) {
    const auto error = error_of<remat::CheckpointError>([&] { (*fitted)(x); });
    CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
    CHECK_THAT(text_of(error), contains("called by one of its own stages"));
  }
  calls_itself = false;
  (*fitted)(x).backward();
  CHECK(weight.grad().defined());
  fitted.reset();
}

TEST_CASE("a table and a picture say what was chosen", "[fit]") {
  const Chain chain;
  const Tensor x = at::randn({128, 64});
  const int64_t budget = 500'000;
  const Fitted fitted = fit(chain.stages, x, budget, quick);
  const std::string table = fitted.table();
  CHECK_THAT(table, contains("chosen for 500,000 "));
  CHECK_THAT(table, contains("plan: " + fitted.plan().to_string()));
  CHECK_THAT(table, contains("... as one step has shown"));
  CHECK(std::count(table.begin(), table.end(), '\n') == 9 + 9);
  const std::string picture = fitted.picture();
  CHECK(picture.rfind("<svg", 0) == 0);
  CHECK_THAT(picture, contains("budget"));
  CHECK_THAT(picture, contains("<circle"));
  // Each axis is cut into 4 to 10 steps.
  const int64_t lines_across = occurrences(picture, "text-anchor=\"end\""),
                lines_up = occurrences(picture, "text-anchor=\"middle\"") - 1;  // the words below
  CAPTURE(picture);
  CHECK(lines_across - 1 >= 3);
  CHECK(lines_across - 1 <= 10);
  CHECK(lines_up - 1 >= 4);
  CHECK(lines_up - 1 <= 10);
}

TEST_CASE("fit finds what it measured again in its file", "[fit]") {
  const remat::MemoryMeter meter;
  const Folder folder;
  const Chain chain(8, 128);
  const Tensor x = at::randn({32, 128});
  FitOptions options{.measure = {.warmup = 1, .repeats = 5}};
  options.measurements = folder.path() + "/measurements";
  const int64_t plain_peak = chain.peak([&] { return chain.plain(x); });
  const int64_t budget = plain_peak * 3 / 4;
  const Fitted fitted = fit(chain.stages, x, budget, options);
  const remat::ChainCost cost = fitted.cost();
  CHECK(chain.peak([&] { return fitted(x); }) <= budget);
  require_bit_equal(chain.gradients(fitted(x)), chain.gradients(chain.plain(x)));
  const std::string table = fitted.table();
  CHECK_THAT(table, contains("   recomputed\n"));
  CHECK_THAT(table, contains("   kept\n"));  // the loss
  const Fitted again = fit(chain.stages, x, budget, options);
  CHECK_FALSE(again.was_measured());
  CHECK(again.table() == table);
  for (std::size_t i = 0; i < cost.stages.size(); ++i) {
    const remat::StageCost of_file = again.cost().stages[i], &measured = cost.stages[i];
    CHECK(of_file.saves_input == measured.saves_input);
    CHECK(of_file.backward_bytes == measured.backward_bytes);
    CHECK(of_file.region_backward_bytes == measured.region_backward_bytes);
    CHECK(of_file.lone_backward_bytes == measured.lone_backward_bytes);
  }
}

TEST_CASE("README: one call for a budget", "[fit][readme]") {
  const Chain chain;
  const std::vector<Stage>& stages = chain.stages;
  const Tensor sample = at::randn({64, 64}), input = sample;
  const int64_t budget = 1 << 20;
  // clang-format off
  const remat::Fitted model = remat::fit(stages, sample, budget);
  std::cout << model.table();        // what was chosen, and beside what
  // As planned; an input of another shape is measured and planned for anew.
  const at::Tensor sum = model(input);
  sum.backward();
  // clang-format on
  CHECK(bit_equal(sum, chain.plain(input)));
}

TEST_CASE("what is measured while another thread allocates and frees is of use to solve",
          "[fit][threads]") {
  const Chain chain;
  const Tensor x = at::randn({128, 64});
  std::atomic<bool> is_over = false;
  std::thread other([&] {
    for (int64_t i = 0; !is_over; ++i) {
      Tensors held;
      for (int64_t k = 0; k < 8; ++k) held.push_back(at::empty({(i + k) % 32 * 4096}));
    }
  });
  int64_t num_solved = 0;
  try {
    for (int i = 0; i < 20; ++i) {
      const remat::ChainCost cost = remat::measure(chain.stages, x, {.warmup = 0, .repeats = 1});
      num_solved += remat::solve(cost).points().empty() ? 0 : 1;
    }
  } catch (const std::exception& error) {
    UNSCOPED_INFO(error.what());
  }
  is_over = true;
  other.join();
  CHECK(num_solved == 20);
}

TEST_CASE("threads call a fitted chain at once", "[fit][threads]") {
  const Chain chain;
  const Tensor x = at::randn({128, 64});
  const Fitted fitted = fit(chain.stages, x, 1 << 30, quick);
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const Tensor mine = x.narrow(0, 0, 32 + 8 * (i % 2)).clone().requires_grad_();
      const Tensor found = torch::autograd::grad({fitted(mine)}, {mine})[0];
      right += bit_equal(found, torch::autograd::grad({chain.plain(mine)}, {mine})[0]);
    });
  for (std::thread& each : threads) each.join();
  CHECK(right == 4);
}
