// remat/plan.h: plans as text and by formula, run with regions, and stages measured.

#include <torch/nn.h>

#include <cmath>
#include <numeric>
#include <set>

#include "remat/fit.h"
#include "tests/plan_chains.h"
#include "tests/plan_vectors.h"
#include "tests/support/executed_plans.h"
#include "tests/support/nn.h"

namespace {

using remat::ChainCost;
using remat::Plan;
using remat::PlanRegion;
using remat::Stage;
using remat::StageCost;
using remat::testing::all_plans;
using remat::testing::canonical_plans;
namespace vectors = remat::testing::plan_vectors;

int64_t sum_of(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

/// A chain of stages on a few elements that counts its calls.
class CountedChain {
 public:
  explicit CountedChain(int64_t stages) : calls_(static_cast<std::size_t>(stages)) {
    for (std::size_t k = 0; k < calls_.size(); ++k)
      functions_.push_back([this, k](const Tensor& x) {
        ++calls_[k];
        return x.sin();
      });
  }

  /// The calls of each stage in one forward and backward.
  std::vector<int64_t> run(const Plan& plan, const remat::CheckpointOptions& options = {}) {
    std::fill(calls_.begin(), calls_.end(), 0);
    const Tensor x = leaf({2});
    remat::run(plan, functions_, x, options).sum().backward();
    return calls_;
  }

 private:
  std::vector<int64_t> calls_;
  std::vector<Stage> functions_;
};

constexpr int64_t kElements = 20'000;  // enough for a stop to be worth its throw
constexpr int64_t kBytes = kElements * static_cast<int64_t>(sizeof(float));

/// Stages that save different things, and a loss; of one width.
std::vector<Stage> various_stages() {
  return {
      [](const Tensor& x) { return x.sin(); },                 // its input
      [](const Tensor& x) { return (x * x.exp()).tanh(); },    // input, a temporary, its output
      [](const Tensor& x) { return x.cos().mul(0.5).cos(); },  // two values besides its input
      [](const Tensor& x) { return at::cat({x, x.sin()}); },   // twice as wide from here on
      [](const Tensor& x) { return x * x; },
      [](const Tensor& x) { return x.sin().square().mean(); },
  };
}

constexpr int64_t kVocabulary = 50, kWidth = 32, kContext = 64;

/// A small pre-norm transformer, one stage a block; a loss that needs no targets.
struct Transformer {
  explicit Transformer(int64_t blocks) {
    embedding = torch::nn::Embedding(kVocabulary, kWidth);
    add(*embedding);
    for (int64_t i = 0; i < blocks; ++i) {
      norms.emplace_back(torch::nn::LayerNormOptions({kWidth}));
      mixes.emplace_back(kWidth, 3 * kWidth);
      widens.emplace_back(kWidth, 4 * kWidth);
      narrows.emplace_back(4 * kWidth, kWidth);
      for (torch::nn::Module* module : std::initializer_list<torch::nn::Module*>{
               norms.back().get(), mixes.back().get(), widens.back().get(), narrows.back().get()})
        add(*module);
    }
    head = torch::nn::Linear(kWidth, kVocabulary);
    add(*head);
  }
  void add(const torch::nn::Module& module) {
    for (const Tensor& parameter : module.parameters()) parameters.push_back(parameter);
  }

  std::vector<Stage> stages() const {
    std::vector<Stage> stages{
        [e = embedding](const Tensor& ids) mutable { return e->forward(ids); }};
    for (std::size_t i = 0; i < norms.size(); ++i)
      stages.push_back([norm = norms[i], mix = mixes[i], widen = widens[i],
                        narrow = narrows[i]](const Tensor& x) mutable {
        const auto qkv = mix->forward(norm->forward(x)).chunk(3, -1);
        const Tensor y = x + at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]);
        return y + narrow->forward(at::dropout(at::gelu(widen->forward(y)), 0.0, true));
      });
    stages.push_back([h = head](const Tensor& x) mutable { return h->forward(x); });
    stages.push_back([](const Tensor& scores) { return scores.logsumexp(-1).mean(); });
    return stages;
  }

  torch::nn::Embedding embedding{nullptr};
  std::vector<torch::nn::LayerNorm> norms;
  std::vector<torch::nn::Linear> mixes, widens, narrows;
  torch::nn::Linear head{nullptr};
  Tensors parameters;
};

}  // namespace

TEST_CASE("a plan is read from its text and written as the same text", "[plan]") {
  for (const char* const text :
       {"[1]", "[1 2]", "[ck[1]]", "[ck[ck[1]]]", "[ck[ck[1] 2] ck[3] 4 5]", "[1 ck[2 ck[3] 4] 5]",
        "[ck[1 2 3 4 5 6 7 8 9 10 11]]", "[ck[1] ck[2] ck[3]]"})
    CHECK(Plan::parse(text).to_string() == text);
  for (int64_t stages = 1; stages <= 5; ++stages)
    for (const Plan& plan : all_plans(stages)) REQUIRE(Plan::parse(plan.to_string()) == plan);
  const Plan plan = Plan::parse("[ck[ck[1] 2] ck[3] 4 5]");
  CHECK(plan.stages() == 5);
  CHECK(plan.depth() == 2);
  CHECK(plan.frames() == 3);
  CHECK(plan.calls() == std::vector<int64_t>{3, 2, 2, 1, 1});
  CHECK((plan.regions() == std::vector<PlanRegion>{{1, 2}, {1, 1}, {3, 3}}));
  CHECK(Plan(5, plan.regions()) == plan);
  CHECK(plan != Plan(5));
}

TEST_CASE("a text that is no plan is refused with the position and what is wrong", "[plan]") {
  const std::vector<std::pair<const char*, const char*>> wrong{
      {"", "a plan begins with '[', but the end of the text was found at position 0"},
      {"1 2", "a plan begins with '[', but '1' was found at position 0"},
      {"[]", "stage 1 or 'ck[' was expected, but ']' was found at position 1"},
      {"[1 2", "or ']', was expected, but the end of the text was found at position 4"},
      {"[1 2]]", "nothing was expected after the plan, but ']' was found at position 5"},
      {"[1 2] ", "nothing was expected after the plan, but ' ' was found at position 5"},
      {"[1  2]", "stage 2 or 'ck[' was expected, but ' ' was found at position 3"},
      {"[1 2 ]", "stage 3 or 'ck[' was expected, but ']' was found at position 5"},
      {"[2]", "stage 1 was expected, but '2' was found at position 1"},
      {"[1 3]", "stage 2 was expected, but '3' was found at position 3"},
      {"[1 1]", "stage 2 was expected, but '1' was found at position 3"},
      {"[ck[2] 1]", "stage 1 was expected, but '2' was found at position 4"},
      {"[01]", "stage 1 was expected, but '01' was found at position 1"},
      {"[-1]", "but '-' was found at position 1"},
      {"[1 99999999999999999999999]", "too many digits at position 3"},
      {"[ck[] 1]", "but ']' was found at position 4"},
      {"[ck[1]2]", "but '2' was found at position 6"},
      {"[ck [1] 2]", "but 'c' was found at position 1"},
      {"[ck1[1] 2]", "but 'c' was found at position 1"},
      {"[ck-1[1] 2]", "but 'c' was found at position 1"},
      {"[[1] 2]", "but '[' was found at position 1"}};
  for (const auto& [text, fact] : wrong) {
    INFO(text);
    CHECK_THAT(error_of_parse(text), contains(fact));
    CHECK_THAT(error_of_parse(text), contains(std::string("text: ") + text));
  }
  std::string much = Plan(10'000).to_string();
  much.insert(20'000, "x");
  CHECK(error_of_parse(much).size() < 500);
  CHECK_THAT(error_of_parse(much), contains("'4' was found at position 19999"));
}

TEST_CASE("regions that are no tree are refused", "[plan]") {
  const auto text = [](int64_t stages, std::vector<PlanRegion> regions) {
    return text_of(error_of<c10::ValueError>([&] { Plan(stages, std::move(regions)); }));
  };
  CHECK_THAT(text(0, {}), contains("at least 1 stage, got 0"));
  CHECK_THAT(text(3, {{0, 1}}), contains("stages 0 to 1"));
  CHECK_THAT(text(3, {{2, 1}}), contains("stages 2 to 1 is empty"));
  CHECK_THAT(text(3, {{2, 4}}), contains("outside of 1 to 3"));
  CHECK_THAT(text(3, {{2, 2}, {1, 1}}), contains("begins later"));
  CHECK_THAT(text(3, {{1, 2}, {2, 3}}), contains("stages 2 to 3 overlaps one of stages 1 to 2"));
  CHECK_THAT(text(3, {{1, 1}, {1, 2}}), contains("overlaps"));
}

TEST_CASE("plans by formula are the known ones", "[plan]") {
  CHECK(remat::revolve_plan(10, 3).to_string() ==
        "[ck[ck[1] ck[2] ck[3] 4] ck[ck[5] ck[6] 7] ck[ck[8] 9] 10]");
  CHECK(remat::revolve_plan(10, 3).calls() == std::vector<int64_t>{3, 3, 3, 2, 3, 3, 2, 3, 2, 1});
  CHECK(sum_of(remat::revolve_plan(50, 7).calls()) == 50 + 105);
  CHECK(remat::revolve_plan(1, 1) == Plan(1));
  CHECK(remat::mixed_plan(4, 1).to_string() == "[ck[ck[1 2] 3] 4]");
  CHECK(remat::mixed_plan(5, 4) == Plan(5));
  CHECK(remat::halving_plan(8).to_string() == "[ck[ck[ck[1] 2] ck[3] 4] ck[ck[5] 6] ck[7] 8]");
  CHECK(remat::balanced_plan(9, 5).to_string() == "[ck[1 2] ck[3 4] ck[5 6] ck[7 8] 9]");
  CHECK(remat::torch_sequential_plan(9, 5).to_string() == "[ck[1] ck[2] ck[3] ck[4] 5 6 7 8 9]");
  CHECK(remat::torch_sequential_plan(19, 10).frames() == 9);
  CHECK((remat::torch_sequential_plan(19, 10).regions().back() == PlanRegion{9, 9}));
  CHECK(remat::torch_sequential_plan(9, 1) == Plan(9));
  CHECK(remat::balanced_plan(3, 3).to_string() == "[ck[1] ck[2] 3]");
  for (const vectors::HalvingRow& row : vectors::halving) {
    const Plan plan = remat::halving_plan(row.stages);
    CHECK(sum_of(plan.calls()) == row.stages + row.extra);
    CHECK(plan.depth() == row.depth);
  }
  for (const vectors::MixedRow& row : vectors::mixed_100)
    CHECK(sum_of(remat::mixed_plan(100, row.units).calls()) == 100 + row.extra);
}

TEST_CASE("plans by formula refuse numbers out of range", "[plan]") {
  const auto text = [](auto make) {
    return text_of(error_of<c10::ValueError>([&] { static_cast<void>(make()); }));
  };
  CHECK_THAT(text([] { return remat::revolve_plan(0, 1); }), contains("got 0"));
  CHECK_THAT(text([] { return remat::revolve_plan(5, 0); }), contains("1 snapshot is needed"));
  CHECK_THAT(text([] { return remat::mixed_plan(5, -2); }), contains("unit is needed, got -2"));
  CHECK_THAT(text([] { return remat::mixed_plan(-1, 2); }),
             contains("remat::mixed_plan: a plan needs at least 1 stage, got -1"));
  CHECK_THAT(text([] { return remat::balanced_plan(5, 6); }),
             contains("5 stages cannot be cut into 6 segments"));
  CHECK_THAT(text([] { return remat::balanced_plan(5, 0); }), contains("into 0 segments"));
  CHECK_THAT(text([] { return remat::torch_sequential_plan(5, 6); }), contains("6 segments"));
  CHECK_THAT(text([] { return remat::torch_sequential_plan(0, 0); }), contains("got 0"));
  CHECK_THAT(text([] { return remat::halving_plan(0); }), contains("got 0"));
}

TEST_CASE("run calls each stage as often as every plan of up to six stages says", "[plan]") {
  for (int64_t stages = 1; stages <= 6; ++stages) {
    CountedChain chain(stages);
    for (const Plan& plan : canonical_plans(stages)) {
      INFO(plan.to_string());
      REQUIRE(chain.run(plan) == plan.calls());
    }
  }
  for (int64_t stages = 1; stages <= 4; ++stages) {
    CountedChain chain(stages);
    ChainCost cost = unit_chain(stages - 1);
    for (const Plan& plan : all_plans(stages)) {
      INFO(plan.to_string());
      REQUIRE(chain.run(plan) == plan.calls());
      const remat::Simulation complete = remat::simulate(cost, plan, {.early_stop = false});
      REQUIRE(chain.run(plan, {.early_stop = false}) == complete.calls);
    }
  }
}

TEST_CASE("revolve's plans take the least number of calls when they are run", "[plan]") {
  for (const vectors::RevolveRow& row : vectors::revolve) {
    CountedChain chain(row.stages);
    for (std::size_t i = 0; i < row.extra.size(); ++i) {
      const Plan plan = remat::revolve_plan(row.stages, static_cast<int64_t>(i) + 1);
      INFO(row.stages << " stages, " << i + 1 << " snapshots");
      CHECK(sum_of(chain.run(plan)) == row.stages + row.extra[i]);
    }
  }
  for (int64_t stages = 1; stages <= 100; ++stages) {
    // t * n - C(s + t, s + 1), t being the least with n <= C(s + t, s); s = 2.
    int64_t t = 0;
    while ((t + 2) * (t + 1) / 2 < stages) ++t;
    const int64_t extra = t * stages - (t + 2) * (t + 1) * t / 6;
    CHECK(sum_of(CountedChain(stages).run(remat::revolve_plan(stages, 2))) == stages + extra);
  }
}

TEST_CASE("the plans of the known chains run with their calls", "[plan]") {
  for (const vectors::Case& known : vectors::chains) {
    CountedChain chain(static_cast<int64_t>(known.chain.forward_s.size()));
    for (const vectors::Point& point : known.frontier) {
      INFO(known.name << " " << point.plan);
      CHECK(chain.run(Plan::parse(point.plan)) == point.calls);
    }
  }
}

TEST_CASE("run names its regions, passes options on, and refuses the wrong number of stages",
          "[plan]") {
  std::vector<std::string> names;
  const Stage noting = [&](const Tensor& x) {
    names.push_back(remat::current_phase().name);
    return x.sin();
  };
  const std::vector<Stage> stages(4, noting);
  const Tensor x = leaf({2});
  remat::run(Plan::parse("[ck[ck[1] 2] ck[3] 4]"), stages, x);
  CHECK(names == std::vector<std::string>{"stage 1", "stages 1 to 2", "stage 3", ""});
  names.clear();
  remat::run(Plan::parse("[1 ck[2 3] 4]"), stages, x, {.name = "encoder"});
  CHECK(names ==
        std::vector<std::string>{"", "encoder, stages 2 to 3", "encoder, stages 2 to 3", ""});
  CHECK_THAT(text_of(error_of<c10::ValueError>([&] { remat::run(Plan(3), stages, x); })),
             contains("the plan has 3 stages, but 4 functions were passed"));
  CHECK_THAT(text_of(error_of<c10::ValueError>([&] { remat::run(Plan(2), {noting, nullptr}, x); })),
             contains("the function of stage 2 is empty"));
}

TEST_CASE("the stages of a run may die before its backward", "[plan]") {
  const Tensor x = leaf({8});
  Tensor y;
  {
    std::vector<Stage> stages(3,
                              [w = at::full({8}, 2.0)](const Tensor& t) { return (t * w).sin(); });
    y = remat::run(Plan::parse("[ck[ck[1] 2] 3]"), stages, x);
  }
  const Tensor gradient = grad_of(y, {x})[0];
  const auto stage = [](const Tensor& t) { return (t * at::full({8}, 2.0)).sin(); };
  CHECK(bit_equal(gradient, grad_of(stage(stage(stage(x))), {x})[0]));
}

TEST_CASE("measure finds the bytes of stages whose saves are known", "[plan]") {
  const Tensor x = leaf({kElements});
  const Tensor weight = leaf({kElements}), constant = at::ones({kElements});
  const std::vector<Stage> stages{
      [](const Tensor& t) { return t.sin(); },
      [](const Tensor& t) { return t.exp(); },
      [&](const Tensor& t) { return t * weight; },
      [&](const Tensor& t) { return (t + constant).cos(); },
      [](const Tensor& t) { return t.sin().exp().cos(); },
      [](const Tensor& t) { return t.view({100, kElements / 100}).t(); },
      [](const Tensor& t) { return t.sum(); },
  };
  const ChainCost cost = remat::measure(stages, x, {.warmup = 0, .repeats = 2});
  CHECK(cost.input_bytes == kBytes);
  CHECK(cost.input_grad_bytes == kBytes);
  REQUIRE(cost.stages.size() == stages.size());
  const auto check = [&](std::size_t k, int64_t saved, int64_t tmp, int64_t unsaved_tmp,
                         int64_t backward_tmp, bool saves_output) {
    INFO("stage " << k + 1);
    const StageCost& stage = cost.stages[k];
    CHECK(stage.output_bytes == kBytes);
    CHECK(stage.grad_bytes == kBytes);
    CHECK(stage.saved_bytes == saved * kBytes);
    CHECK(stage.forward_tmp_bytes == tmp * kBytes);
    CHECK(stage.unsaved_tmp_bytes == unsaved_tmp * kBytes);
    CHECK(stage.backward_tmp_bytes == backward_tmp * kBytes);
    CHECK(stage.saves_output == saves_output);
    CHECK(stage.forward_s > 0);
    CHECK(stage.backward_s > 0);
    CHECK(stage.forward_to_last_save_s >= 0);
    CHECK(stage.forward_to_last_save_s <= stage.forward_s);
  };
  check(0, 0, 0, 0, 1, false);  // sin saves its input; its backward needs the cosine
  check(1, 0, 0, 0, 0, true);   // exp saves its output
  check(2, 0, 0, 0, 1, false);  // the weight is a parameter; its gradient is a temporary
  check(3, 1, 0, 1, 2, false);  // the sum, not the constant
  check(4, 1, 1, 2, 2, false);  // the exponential, once; C++ keeps the sine to the statement's end
  check(5, 0, 0, 0, 0, false);  // a view counts with the storage that it keeps
  CHECK(cost.stages[6].output_bytes == 4);
  CHECK(cost.stages[6].grad_bytes == 4);
  CHECK(cost.stages[6].saved_bytes == 0);
  CHECK(cost.stages[0].forward_to_last_save_s < cost.stages[4].forward_to_last_save_s);
}

TEST_CASE("measure leaves gradients and random numbers as they were", "[plan]") {
  const Tensor weight = leaf({8}), other = leaf({8});
  other.mutable_grad() = at::full({8}, 3.0);
  const Tensor kept = other.grad();
  const Tensor before = generator_state();
  const std::vector<Stage> stages{
      [&](const Tensor& t) { return at::dropout(t * weight, 0.5, true); },
      [&](const Tensor& t) { return (t * other).sum(); }};
  {
    const at::NoGradGuard no_grad;
    remat::measure(stages, at::ones({8}));
  }
  CHECK(at::equal(generator_state(), before));
  CHECK_FALSE(weight.grad().defined());
  CHECK(other.grad().is_same(kept));
  CHECK(at::equal(kept, at::full({8}, 3.0)));
  CHECK(remat::measure(stages, at::ones({8})).input_grad_bytes == 0);

  const auto text = [&](const std::vector<Stage>& wrong, const Tensor& sample,
                        remat::MeasureOptions options = {}) {
    return text_of(error_of<c10::ValueError>([&] { remat::measure(wrong, sample, options); }));
  };
  CHECK_THAT(text({}, at::ones({1})), contains("no stages"));
  CHECK_THAT(text(stages, Tensor()), contains("undefined tensor"));
  CHECK_THAT(text(stages, at::ones({8}), {.repeats = 0}), contains("repeats must be at least 1"));
  CHECK_THAT(text(stages, at::ones({8}), {.warmup = -1}), contains("warmup must be at least 0"));
  CHECK_THAT(text({stages[0], nullptr}, at::ones({8})), contains("stage 2 is empty"));
  CHECK_THAT(text({[](const Tensor&) { return Tensor(); }}, at::ones({8})),
             contains("stage 1 returned an undefined tensor"));
  for (const bool requires_grad : {true, false})
    CHECK_THAT(text({[](const Tensor& x) { return x * 2; }, [](Tensor x) { return x.relu_(); }},
                    at::ones({8}).set_requires_grad(requires_grad)),
               contains("stage 2 writes to its input in place") && contains("inplace = false"));
}

namespace {

struct CountAfter final : torch::autograd::PostAccumulateGradHook {
  explicit CountAfter(int& calls) : calls(calls) {}
  void operator()(const Tensor& leaf) override {
    ++calls;
    leaf.mutable_grad() = Tensor();  // as an optimizer that steps in backward
  }
  int& calls;
};

struct CountAtNode final : torch::autograd::FunctionPostHook {
  explicit CountAtNode(int& calls) : calls(calls) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ++calls;
    return outputs;
  }
  int& calls;
};

}  // namespace

TEST_CASE("measure and fit run no hooks of parameters, and leave them there", "[plan][fit]") {
  const Tensor weight = leaf({4, 4});
  int own = 0, after = 0, at_node = 0;
  weight.register_hook([&](const Tensor&) { ++own; });
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<CountAfter>(after));
  const auto node = torch::autograd::impl::grad_accumulator(weight);
  node->add_post_hook(std::make_unique<CountAtNode>(at_node));
  bool throws = false;
  int runs = 0;
  const std::vector<Stage> stages{[&](const Tensor& x) { return x.mm(weight).sin(); },
                                  [&](const Tensor& x) {
                                    TORCH_CHECK(!throws || ++runs < 4, "the stage gave up");
                                    return (x.mm(weight)).sum();
                                  }};
  const Tensor x = at::ones({4, 4});
  const auto check_unchanged = [&] {
    CHECK(own == 0);
    CHECK(after == 0);
    CHECK(at_node == 0);
    CHECK_FALSE(weight.grad().defined());
    x.mm(weight).sum().backward();
    CHECK(std::exchange(own, 0) == 1);
    CHECK(std::exchange(after, 0) == 1);
    CHECK(std::exchange(at_node, 0) == 1);
    CHECK_FALSE(weight.grad().defined());
  };
  remat::measure(stages, x);
  check_unchanged();
  remat::fit(stages, x, 1 << 20);
  check_unchanged();
  throws = true;
  CHECK_THROWS_WITH(remat::measure(stages, x), contains("the stage gave up"));
  check_unchanged();
}

TEST_CASE("measure needs no last stage that can run again, as no plan of solve has a region there",
          "[plan]") {
  int calls = 0;
  const Stage irregular = [&](const Tensor& t) {
    return ++calls % 2 == 0 ? t.sin() : t.exp().exp();
  };
  const Stage last = [&](const Tensor& t) { return irregular(t).sum(); };
  const Tensor sample = leaf({8});
  const remat::MeasureOptions options{.warmup = 0, .repeats = 1};
  CHECK(remat::measure({[](const Tensor& t) { return t.cos(); }, last}, sample, options)
            .stages.size() == 2);
  CHECK_THROWS_AS(
      remat::measure({irregular, [](const Tensor& t) { return t.sum(); }}, sample, options),
      remat::CheckpointError);
}

TEST_CASE("the peak of every plan that runs is the simulated one, to the byte", "[plan]") {
  const std::vector<Stage> stages = various_stages();
  const Tensor x = leaf({kElements});
  const ChainCost cost = remat::measure(stages, x);
  const Tensor plain = execute(Plan(6), stages, x).gradient;
  for (const bool early_stop : {true, false})
    for (const Plan& plan : canonical_plans(6)) {
      INFO(plan.to_string() << (early_stop ? "" : ", early stop off"));
      const Executed executed = execute(plan, stages, x, {.early_stop = early_stop});
      const int64_t simulated = remat::simulate(cost, plan, {.early_stop = early_stop}).peak_bytes;
      CHECK(executed.peak_bytes == simulated);
      CHECK(bit_equal(executed.gradient, plain));
    }
}

TEST_CASE("every plan of a transformer's frontier keeps its budget within 2 % and its gradients",
          "[plan]") {
  const Transformer model(5);
  const Tensor ids = at::randint(kVocabulary, {4, kContext}, at::kLong);
  const std::vector<Stage> stages = model.stages();
  const ChainCost cost = remat::measure(stages, ids);
  CHECK(cost.input_bytes == ids.numel() * 8);
  CHECK(cost.input_grad_bytes == 0);
  const remat::Frontier frontier = remat::solve(cost);
  REQUIRE(frontier.points().size() > 5);

  // As in training: gradients exist, and a step adds to them.
  for (const Tensor& parameter : model.parameters)
    parameter.mutable_grad() = at::zeros_like(parameter);
  const auto step = [&](const Plan& plan) {
    for (const Tensor& parameter : model.parameters) parameter.mutable_grad().zero_();
    LiveBytes bytes;
    remat::run(plan, stages, ids).backward();
    return bytes.peak();
  };
  const int64_t plain_peak = step(Plan(static_cast<int64_t>(stages.size())));
  Tensors plain;
  for (const Tensor& parameter : model.parameters) plain.push_back(parameter.grad().clone());
  int64_t last_peak = 0;
  for (const remat::FrontierPoint& point : frontier.points()) {
    const Plan plan = frontier.plan(point.bytes);
    INFO(plan.to_string() << ", " << point.bytes << " bytes");
    const int64_t peak = step(plan);
    CHECK(static_cast<double>(peak) <= 1.0001 * static_cast<double>(point.bytes));
    CHECK(static_cast<double>(peak) >= 0.98 * static_cast<double>(point.bytes));
    CHECK(peak >= last_peak);
    last_peak = peak;
    for (std::size_t i = 0; i < plain.size(); ++i)
      REQUIRE(bit_equal(model.parameters[i].grad(), plain[i]));
  }
  CHECK(last_peak == plain_peak);
  CHECK(frontier.points().front().bytes < plain_peak / 3);
}
