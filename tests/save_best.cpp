// Everything in save_best.h: what is measured, what is chosen, and that what is chosen is what happens.

#include "remat/save_best.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <latch>
#include <map>
#include <random>
#include <thread>

#include "tests/support/files.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::best_choices;
using remat::BestCall;
using remat::BestChoice;
using remat::checkpoint;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using remat::save_best;
using remat::SaveBestOptions;

namespace {

using Costs = std::map<std::string, double>;

/// What calls take, by the operator alone: as many seconds as `costs` says, others nothing.
std::function<double(const PolicyContext&)> by_operator(Costs costs) {
  return [costs = std::move(costs)](const PolicyContext& call) {
    const auto found = costs.find(std::string(call.op_name));
    return found == costs.end() ? 0. : found->second;
  };
}

SaveBestOptions told(int64_t bytes, Costs costs) {
  return {.bytes = bytes, .profile_runs = 1, .seconds_of = by_operator(std::move(costs))};
}

CheckpointOptions with(Policy policy, std::string name = "region") {
  return {.name = std::move(name), .policy = std::move(policy)};
}

std::vector<std::string> kept_calls(const BestChoice& choice) {
  std::vector<std::string> names;
  for (const BestCall& call : choice.calls)
    if (call.is_kept) names.push_back(call.op);
  return names;
}

/// The same as `checkpoint` with a region that has run twice before, so that the choice holds.
template <class F>
auto chosen(const Policy& policy, F f) {
  return [policy, f](const auto&... x) {
    for (int i = 0; i < 2; ++i) checkpoint(with(policy), f, x.detach().requires_grad_()...);
    return checkpoint(with(policy), f, x...);
  };
}

int64_t saved_bytes(const std::function<Tensor()>& forward, Tensor& y) {
  remat::Recorder recorder;
  y = forward();
  int64_t bytes = 0;
  for (const auto& region : recorder.report().regions) bytes += region.bytes_saved;
  return bytes;
}

// ---- random regions --------------------------------------------------------------------------

const Costs random_costs{{"aten::sin.default", 5},     {"aten::exp.default", 17},
                         {"aten::cos.default", 9},     {"aten::sigmoid.default", 3},
                         {"aten::mul.Tensor", 2},      {"aten::cat.default", 31},
                         {"aten::cumsum.default", 23}, {"aten::relu.default", 1}};
const std::map<std::string, std::string> kernel_names{
    {"sin", "aten::sin.default"},       {"exp", "aten::exp.default"},
    {"cos", "aten::cos.default"},       {"sigmoid", "aten::sigmoid.default"},
    {"mul.Tensor", "aten::mul.Tensor"}, {"cat", "aten::cat.default"},
    {"cumsum", "aten::cumsum.default"}, {"relu", "aten::relu.default"}};

/// A function of two vectors: so many operators, each of what came before.
std::function<Tensor(const Tensor&, const Tensor&)> random_function(unsigned seed, int num_calls) {
  return [seed, num_calls](const Tensor& x, const Tensor& y) {
    std::mt19937 random(seed);
    const auto below = [&random](std::size_t n) { return random() % n; };
    Tensors values{x, y};
    for (int i = 0; i < num_calls; ++i) {
      // Mostly of the latest, so that much of it is needed.
      const auto pick = [&] { return below(3) > 0 ? values.back() : values[below(values.size())]; };
      const Tensor a = pick();
      Tensor b = pick();
      switch (below(8)) {
        case 0:
          values.push_back(a.sin());
          break;
        case 1:
          values.push_back(a.exp());
          break;
        case 2:
          values.push_back(a.cos());
          break;
        case 3:
          values.push_back(a.sigmoid());
          break;
        case 4:
          values.push_back(a.relu());
          break;
        case 5:
          values.push_back(a.cumsum(0));
          break;
        case 6:
          values.push_back(a.sizes() == b.sizes() ? a * b : a.sin());
          break;
        default:
          values.push_back(a.numel() + b.numel() < 200 ? at::cat({a, b}) : a.cos());
      }
    }
    return (values.back().sin() * values[values.size() - 2].sum()).sum();
  };
}

/// What backward runs, in the costs above.
double cost_of_backward(const Tensor& loss, const Tensors& inputs, KernelCounter& kernels,
                        Tensors& gradients) {
  kernels.reset();
  gradients = torch::autograd::grad({loss}, inputs, {}, {}, false, /*allow_unused=*/true);
  double cost = 0;
  for (const auto& [kernel, op] : kernel_names)
    cost += static_cast<double>(kernels.count(kernel)) * random_costs.at(op);
  return cost;
}

}  // namespace

TEST_CASE("save_best keeps what no set of results in its bytes beats", "[save_best][rule-15]") {
  // Every set of calls is kept once, and what backward then really runs and holds is counted.
  const unsigned first_seed = GENERATE(1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U);
  CAPTURE(first_seed);
  const auto f = random_function(first_seed, 6);
  const Tensor x = leaf({8}), y = leaf({24});
  KernelCounter kernels;
  Tensors expected, gradients;
  const double backward_alone = cost_of_backward(f(x, y), {x, y}, kernels, expected);
  std::size_t num_calls = 0;
  struct Kept {
    int64_t bytes;
    double saved;
  };
  std::vector<Kept> sets;
  double nothing_kept = 0;
  for (std::size_t set = 0; set == 0 || set < std::size_t{1} << num_calls; ++set) {
    std::size_t number = 0;
    const Policy keep_set = [&](const PolicyContext&) { return (set >> number++ & 1) != 0; };
    Tensor loss;
    const int64_t bytes = saved_bytes([&] { return checkpoint(with(keep_set), f, x, y); }, loss);
    num_calls = number;
    const double cost = cost_of_backward(loss, {x, y}, kernels, gradients) - backward_alone;
    require_bit_equal(gradients, expected);
    if (set == 0) nothing_kept = cost;
    sets.push_back({bytes, nothing_kept - cost});
  }
  REQUIRE(num_calls <= 12);
  for (const int64_t limit : {0, 32, 100, 130, 200, 300, 420, 600, 900, 10'000}) {
    CAPTURE(limit);
    const Policy policy = save_best(told(limit, random_costs));
    checkpoint(with(policy), f, x, y);
    Tensor loss;
    const int64_t bytes = saved_bytes([&] { return checkpoint(with(policy), f, x, y); }, loss);
    const double cost = cost_of_backward(loss, {x, y}, kernels, gradients) - backward_alone;
    require_bit_equal(gradients, expected);
    double most = 0;
    for (const Kept& each : sets)
      if (each.bytes <= limit) most = std::max(most, each.saved);
    REQUIRE(best_choices(policy).size() == 1);
    const BestChoice choice = best_choices(policy)[0];
    CHECK(bytes <= limit);
    CHECK(bytes == choice.kept_bytes);
    CHECK(nothing_kept - cost == most);
    CHECK(choice.saved_seconds == most);
    CHECK(choice.bound_seconds == most);
  }
}

TEST_CASE("save_best beats taking what spares most per byte first", "[save_best]") {
  // 3.1 a byte against 3: who takes the first has no room for the other two.
  const auto f = [](const Tensor& x) {
    const Tensor a = x.narrow(0, 0, 6).exp(), b = x.narrow(0, 0, 5).sigmoid(),
                 c = x.narrow(0, 1, 5).tanh();
    return (a.sum() + b.sum() + c.sum()).sin();
  };
  const Policy policy = save_best(told(
      40,
      {{"aten::exp.default", 6 * 3.1}, {"aten::sigmoid.default", 15}, {"aten::tanh.default", 15}}));
  require_same_grads(f, chosen(policy, f), leaf({6}));
  const BestChoice choice = best_choices(policy).at(0);
  CHECK(choice.saved_seconds == 30);
  CHECK(choice.kept_bytes == 40);
  CHECK(choice.region == "region");
  double by_density = 0;
  int64_t room = 40;
  std::vector<BestCall> calls = choice.calls;
  std::stable_sort(calls.begin(), calls.end(), [](const BestCall& a, const BestCall& b) {
    return a.seconds * static_cast<double>(b.bytes) > b.seconds * static_cast<double>(a.bytes);
  });
  for (const BestCall& call : calls)
    if (call.seconds > 0 && call.bytes <= room) {
      room -= call.bytes;
      by_density += call.seconds;
    }
  CHECK(by_density == 6 * 3.1);
}

TEST_CASE("a chain that only kept calls read takes the bytes of its end", "[save_best]") {
  const auto f = [](const Tensor& x) { return (x.detach().exp().cumsum(0).sigmoid() * x).sum(); };
  const Policy policy = save_best(told(
      400, {{"aten::exp.default", 1}, {"aten::cumsum.default", 1}, {"aten::sigmoid.default", 1}}));
  const Tensor x = leaf({100});
  KernelCounter kernels;
  for (int i = 0; i < 2; ++i) {
    const LiveBytes bytes;
    const Tensor y = checkpoint(with(policy), f, x);
    CHECK(bytes.held() == 4 + (i == 0 ? 0 : 400));
    kernels.reset();
    const Tensor gradient = grad_of(y, {x})[0];
    CHECK(bit_equal(gradient, grad_of(f(x), {x})[0]));
    CHECK(kernels.count("exp") == (i == 0 ? 2 : 1));  // one is the plain run's
    CHECK(kernels.count("cumsum") == (i == 0 ? 2 : 1));
    CHECK(kernels.count("sigmoid") == (i == 0 ? 2 : 1));
  }
  const BestChoice choice = best_choices(policy).at(0);
  CHECK(kept_calls(choice) == std::vector<std::string>{"aten::exp.default", "aten::cumsum.default",
                                                       "aten::sigmoid.default"});
  CHECK(choice.calls[0].kept_bytes == 0);
  CHECK(choice.calls[2].kept_bytes == 400);
}

TEST_CASE("the clock finds out that matrix products take long", "[save_best]") {
  const auto f = [](const Tensor& x) { return (x.mm(x) + 1).mm(x).mul(2).sin().sum(); };
  const int64_t bytes = 256 * 256 * 4;
  const Policy policy = save_best({.bytes = 2 * bytes, .profile_runs = 3});
  const Tensor x = leaf({256, 256});
  for (int i = 0; i < 3; ++i) {
    CHECK(best_choices(policy).empty());
    const Tensor y = checkpoint(with(policy), f, x);
    CHECK(bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0]));
  }
  const BestChoice choice = best_choices(policy).at(0);
  CHECK(choice.saved_seconds > 0);
  CHECK(choice.saved_seconds == choice.bound_seconds);
  CHECK(choice.kept_bytes <= 2 * bytes);
  const std::vector<std::string> kept = kept_calls(choice);
  CHECK(std::count(kept.begin(), kept.end(), "aten::mm.default") == 2);
  require_same_grads(f, chosen(policy, f), x);
}

TEST_CASE("of several measured runs the least times count", "[save_best]") {
  std::map<std::string, int> runs;
  SaveBestOptions options{.bytes = 40, .profile_runs = 2};
  options.seconds_of = [&](const PolicyContext& call) {
    if (call.op_name == "aten::exp.default") return runs["exp"]++ == 0 ? 10. : 1.;
    return call.op_name == "aten::tanh.default" ? 5. : 0.;
  };
  const Policy policy = save_best(options);
  const auto f = [](const Tensor& x) { return (x.exp() * x.tanh()).sum(); };
  for (int i = 0; i < 2; ++i) checkpoint(with(policy), f, leaf({10}));
  const BestChoice choice = best_choices(policy).at(0);
  CHECK(kept_calls(choice) == std::vector<std::string>{"aten::tanh.default"});
  CHECK(choice.saved_seconds == 5);
}

TEST_CASE("what the library writes to counts as one call, what the user writes to is not chosen",
          "[save_best]") {
  const Costs costs{{"aten::mm.default", 10}, {"aten::mul.Tensor", 10}, {"aten::add_.Tensor", 1}};
  const Tensor weight = leaf({4, 4}), bias = leaf({4});
  const auto linear = [&](const Tensor& x) {
    return at::linear(x.transpose(0, 1), weight, bias).exp().sin().sum();
  };
  const auto in_place = [](const Tensor& x) { return (x * 3).add_(x).sin().sum(); };
  for (const int64_t bytes : {0, 100, 300, 10'000}) {
    const Policy of_linear = save_best(told(bytes, costs)),
                 of_in_place = save_best(told(bytes, costs));
    require_same_grads(remat::testing::Parameters{{weight, bias}}, linear,
                       chosen(of_linear, linear), leaf({2, 3, 4}));
    require_same_grads(in_place, chosen(of_in_place, in_place), leaf({9}));
    CHECK(kept_calls(best_choices(of_in_place).at(0)).empty());
    CHECK(best_choices(of_linear).at(0).kept_bytes <= bytes);
  }
}

TEST_CASE("a result that is changed in place after the region is computed again", "[save_best]") {
  const auto f = [](const Tensor& x) { return (x.exp() * 2).mul(x); };
  const Policy policy = save_best(told(10'000, random_costs));
  const auto plain = [&](const Tensor& x) { return f(x).mul_(3).sum(); };
  const auto region = [&](const Tensor& x) { return chosen(policy, f)(x).mul_(3).sum(); };
  require_same_grads(plain, region, leaf({5}));
}

TEST_CASE("regions inside regions keep what was chosen before the outer one began",
          "[save_best][nesting]") {
  const Costs costs{{"aten::exp.default", 10}, {"aten::sin.default", 3}, {"aten::cos.default", 2}};
  const Policy outer_policy = save_best(told(100, costs)), policy = save_best(told(60, costs));
  const auto inner = [](const Tensor& x) { return x.exp().sin().cos() * x; };
  const auto around = [&](const Tensor& x) {
    // The second finds that the first has been measured, and must not go by it.
    const Tensor y = checkpoint(with(policy, "inner"), inner, x.sin());
    return checkpoint(with(policy, "inner"), inner, y.cos()).exp();
  };
  const auto plain = [&](const Tensor& x) { return inner(inner(x.sin()).cos()).exp(); };
  const Tensor x = leaf({5});
  std::vector<std::pair<Tensor, Tensor>> results;
  for (int i = 0; i < 4; ++i)
    results.emplace_back(checkpoint(with(outer_policy, "outer"), around, x), plain(x));
  CHECK(best_choices(policy).at(0).kept_bytes > 0);
  // The first runs began before anything was chosen; their recomputes go by that.
  for (const auto& [y, expected] : results) {
    const Tensor gradient = grad_of(y, {x}, {.create_graph = true})[0];
    const Tensor expected_gradient = grad_of(expected, {x}, {.create_graph = true})[0];
    CHECK(bit_equal(gradient, expected_gradient));
    CHECK(bit_equal(grad_of(gradient, {x})[0], grad_of(expected_gradient, {x})[0]));
  }
  // The same without a policy around, three deep.
  const auto deep = [&](const Tensor& x) { return checkpoint(around, x.cos()); };
  for (int i = 0; i < 2; ++i) {
    const Tensor y = checkpoint(deep, x), expected = plain(x.cos());
    CHECK(bit_equal(grad_of(y, {x})[0], grad_of(expected, {x})[0]));
  }
}

TEST_CASE("what was chosen inside three regions holds from the next outermost one on",
          "[save_best][nesting]") {
  const Policy policy = save_best(told(60, {{"aten::exp.default", 10}, {"aten::sin.default", 3}}));
  const auto inner = [](const Tensor& x) { return x.exp().sin().cos() * x; };
  const auto middle = [&](const Tensor& x) {
    return checkpoint(with(policy, "inner"), inner, x.sin()).cos();
  };
  const auto outer = [&](const Tensor& x) { return checkpoint(middle, x.exp()).sin(); };
  const Tensor x = leaf({5});
  const Tensor expected = grad_of(inner(x.exp().sin()).cos().sin(), {x})[0];
  // The first run measures. Its recompute opens a new region in the middle, later than the choice.
  const Tensor first = checkpoint(outer, x), second = checkpoint(outer, x);
  CHECK(best_choices(policy).at(0).kept_bytes > 0);
  CHECK(bit_equal(grad_of(first, {x})[0], expected));
  CHECK(bit_equal(grad_of(second, {x})[0], expected));
}

TEST_CASE("other shapes are measured anew", "[save_best]") {
  const auto f = [](const Tensor& x) { return x.exp().cumsum(0).sin().sum(); };
  const Policy policy = save_best(told(100, {{"aten::cumsum.default", 1}}));
  const auto saved = [&](int64_t size) {
    const Tensor x = leaf({size});
    Tensor y;
    const int64_t bytes = saved_bytes([&] { return checkpoint(with(policy), f, x); }, y);
    CHECK(bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0]));
    return bytes;
  };
  CHECK(saved(10) == 0);
  CHECK(saved(10) == 40);
  CHECK(saved(25) == 0);  // goes another way
  CHECK(saved(25) == 0);  // is measured
  CHECK(saved(25) == 100);
  CHECK(saved(10) == 40);
  CHECK(saved(26) == 0);
  CHECK(saved(26) == 0);
  CHECK(saved(26) == 0);  // no room
  CHECK(saved(25) == 100);
  CHECK(best_choices(policy).size() == 3);
}

TEST_CASE("what was kept for another way is let go where it would take more", "[save_best]") {
  // In the way that is measured `exp` is read by a kept call alone and takes nothing.
  bool turns = false;
  const auto f = [&turns](const Tensor& x) {
    const Tensor a = x.detach().exp();
    return turns ? (a.sin() * x).sum() : (a.cumsum(0) * x).sum();
  };
  const Policy policy = save_best(
      told(40, {{"aten::exp.default", 5}, {"aten::cumsum.default", 5}, {"aten::sin.default", 1}}));
  const Tensor x = leaf({10});
  const auto saved = [&] {
    Tensor y;
    const int64_t bytes = saved_bytes([&] { return checkpoint(with(policy), f, x); }, y);
    CHECK(bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0]));
    return bytes;
  };
  CHECK(saved() == 0);
  CHECK(saved() == 40);
  turns = true;
  CHECK(saved() <= 40);
  saved();  // is measured
  CHECK(saved() == 40);
  turns = false;
  CHECK(saved() <= 40);
}

TEST_CASE("a region that always goes another way keeps nothing, with a warning", "[save_best]") {
  const auto f = [](const Tensor& x) { return x.exp().sin().sum(); };
  const Policy policy = save_best(told(1'000'000, random_costs));
  const remat::testing::Warnings warnings;
  {
    for (int64_t size = 1; size < 20; ++size) {
      const Tensor x = leaf({size});
      CHECK(bit_equal(grad_of(checkpoint(with(policy), f, x), {x})[0], grad_of(f(x), {x})[0]));
    }
  }
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("region \"region\" ran other operators, or shapes"));
}

TEST_CASE("a region is measured as often as asked, however often that is", "[save_best]") {
  SaveBestOptions options = told(1'000'000, random_costs);
  options.profile_runs = 150;
  const Policy policy = save_best(options);
  const auto f = [](const Tensor& x) { return x.exp().sin().sum(); };
  const Tensor x = leaf({3});
  for (int i = 0; i < 149; ++i) checkpoint(with(policy), f, x);
  CHECK(best_choices(policy).empty());
  checkpoint(with(policy), f, x);
  CHECK(best_choices(policy).size() == 1);
}

TEST_CASE("a new way of a region is waited for through a hundred runs of ways that it knows",
          "[save_best]") {
  const auto f = [](const Tensor& x) { return x.exp().sin().sum(); };
  const Tensor known = leaf({3}), other = leaf({4});
  for (const bool is_too_long : {false, true}) {
    const Policy policy = save_best(told(1'000'000, random_costs));
    checkpoint(with(policy), f, known);
    checkpoint(with(policy), f, other);  // the next such run is to be measured
    for (int i = 0; i < (is_too_long ? 101 : 100); ++i) checkpoint(with(policy), f, known);
    checkpoint(with(policy), f, other);
    CHECK(best_choices(policy).size() == (is_too_long ? 1 : 2));
  }
}

TEST_CASE("two functions of one name have choices of their own", "[save_best]") {
  const Policy policy = save_best(told(40, {{"aten::exp.default", 5}, {"aten::cos.default", 7}}));
  const auto f = [](const Tensor& x) { return x.sin().exp().sum(); };
  const auto g = [](const Tensor& x) { return x.sin().exp().cos().sum(); };
  const Tensor x = leaf({10});
  for (int i = 0; i < 6; ++i) {
    Tensor y, z;
    CHECK(saved_bytes([&] { return checkpoint(with(policy), f, x); }, y) <= 40);
    CHECK(saved_bytes([&] { return checkpoint(with(policy), g, x); }, z) <= 40);
    CHECK(bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0]));
    CHECK(bit_equal(grad_of(z, {x})[0], grad_of(g(x), {x})[0]));
  }
  CHECK(best_choices(policy).size() == 2);
}

TEST_CASE("a retained graph and backwards of second order go by the choice of their forward",
          "[save_best]") {
  const Policy policy = save_best(told(80, random_costs));
  const auto f = [](const Tensor& x) { return x.exp().cumsum(0).sin() * x; };
  const Tensor x = leaf({10});
  const Tensor before = checkpoint(with(policy), f, x);  // keeps nothing
  for (int i = 0; i < 3; ++i) {
    const Tensor y = checkpoint(with(policy), f, x), expected = f(x);
    for (const Tensor& each : {y, before}) {
      const Tensor first = grad_of(each, {x}, {.retain_graph = true, .create_graph = true})[0];
      const Tensor plain = grad_of(expected, {x}, {.retain_graph = true, .create_graph = true})[0];
      CHECK(bit_equal(first, plain));
      CHECK(bit_equal(grad_of(first, {x}, {.retain_graph = true})[0],
                      grad_of(plain, {x}, {.retain_graph = true})[0]));
    }
  }
}

TEST_CASE("threads share a policy that chooses", "[save_best]") {
  const Policy policy = save_best(told(80, random_costs));
  const auto f = [](const Tensor& x) { return x.exp().cumsum(0).sin().mul(x).sum(); };
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const Tensor x = at::full({10}, 0.1 * (t + 1)).requires_grad_();
      for (int i = 0; i < 20; ++i) {
        const Tensor y = checkpoint(with(policy), f, x);
        if (!bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0])) ++num_wrong;
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(num_wrong == 0);
  CHECK(best_choices(policy).size() == 1);
}

TEST_CASE("what began before a choice was there is no other way of its region", "[save_best]") {
  const Policy policy = save_best(told(80, random_costs));
  std::latch have_begun(8), may_end(1);
  const auto f = [](const Tensor& x) { return x.exp().cumsum(0).sin().mul(x).sum(); };
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      const auto g = [&](const Tensor& x) {
        have_begun.count_down();
        may_end.wait();
        return f(x);
      };
      checkpoint(with(policy), g, at::full({10}, 0.5).requires_grad_());
    });
  have_begun.wait();
  const Tensor x = leaf({10});
  for (int i = 0; i < 3; ++i) checkpoint(with(policy), f, x);
  REQUIRE(best_choices(policy).size() == 1);
  may_end.count_down();
  for (std::thread& each : threads) each.join();
  for (int i = 0; i < 3; ++i) checkpoint(with(policy), f, x);
  CHECK(best_choices(policy).size() == 1);
}

TEST_CASE("random operators that were chosen draw no other numbers", "[save_best]") {
  const Policy policy = save_best(told(1000, {{"aten::bernoulli_.float", 9},
                                              {"aten::native_dropout.default", 9},
                                              {"aten::rand_like.default", 9},
                                              {"aten::exp.default", 4}}));
  const auto f = [](const Tensor& x) {
    return (at::dropout(x.exp(), 0.5, true) * at::rand_like(x).exp() * at::dropout(x, 0.3, true))
        .sum();
  };
  for (int i = 0; i < 3; ++i)
    require_same_grads(
        f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, leaf({20}));
  CHECK(best_choices(policy).at(0).kept_bytes > 0);
}

TEST_CASE("save_best joins policies that list what to keep", "[save_best]") {
  const auto f = [](const Tensor& x) {
    return remat::checkpoint_name(x.exp(), "e").cumsum(0).sin().mul(x).sum();
  };
  const Costs costs{{"aten::exp.default", 5}, {"aten::cumsum.default", 5}};
  for (const Policy& other :
       {remat::save_ops({"aten::exp"}), remat::save_names({"e"}),
        Policy([](const PolicyContext& c) { return c.op_name == "aten::exp.default"; })}) {
    const Policy best = save_best(told(40, costs)), policy = best | other;
    require_same_grads(
        Kernels{.kept = {"exp", "cumsum"}}, f,
        [&](const Tensor& x) {
          const remat::testing::Seed same(3);
          for (int i = 0; i < 2; ++i)
            if (best_choices(policy).empty())
              checkpoint(with(policy), f, x.detach().requires_grad_());
          return checkpoint(with(policy), f, x);
        },
        leaf({10}));
  }
  CHECK_THROWS_AS(save_best({.bytes = 1}) | save_best({.bytes = 2}), c10::ValueError);
  CHECK_THROWS_AS(save_best({.bytes = -1}), c10::ValueError);
  CHECK_THROWS_AS(save_best({.profile_runs = 0}), c10::ValueError);
  CHECK(best_choices(remat::save_matmuls()).empty());
  CHECK(best_choices(Policy()).empty());
}

TEST_CASE("what another policy keeps and the function writes to is no choice of save_best's",
          "[save_best]") {
  const auto f = [](const Tensor& x) {
    const Tensor y = x * 2;
    y.add_(x);
    return y.exp().cumsum(0).sin().mul(x).sum();
  };
  remat::SelectiveOptions options;
  options.allow_cache_entry_mutation = true;
  const Policy policy = save_best(told(1'000'000, {{"aten::cumsum.default", 5}})) |
                        remat::save_ops({"aten::mul"}, options);
  require_same_grads(f, chosen(policy, f), leaf({10}));
  CHECK(kept_calls(best_choices(policy).at(0)) ==
        std::vector<std::string>{"aten::mul.Scalar", "aten::cumsum.default", "aten::mul.Tensor"});
}

TEST_CASE("a policy that is asked again does not refuse what was chosen", "[save_best]") {
  SaveBestOptions options = told(80, random_costs);
  options.selective.ask_again = true;
  const Policy policy = save_best(options);
  const auto f = [](const Tensor& x) { return x.exp().cumsum(0).sin().mul(x).sum(); };
  const Tensor x = leaf({10});
  for (int i = 0; i < 2; ++i) checkpoint(with(policy), f, x);
  KernelCounter kernels;
  const Tensor y = checkpoint(with(policy), f, x);
  const int64_t in_forward = kernels.count("exp");
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0]));
  CHECK(in_forward == 1);
  CHECK(kernels.count("exp") == 2);  // and that of the plain run
}

TEST_CASE("a recorder tells what a policy decided, and why", "[save_best][recorder]") {
  const auto f = [](const Tensor& x) {
    return (x.detach().exp().cumsum(0).view({2, 5}).sin().view({10}) * x).sum();
  };
  const Tensor x = leaf({10});
  const Policy best = save_best(told(40, {{"aten::sin.default", 2}}));
  checkpoint(with(best), f, x);
  const Policy listed([](const PolicyContext& call) {
    return call.op_name == "aten::cumsum.default" ? CheckpointPolicy::MustSave
           : call.op_name == "aten::view.default" ? CheckpointPolicy::PreferSave
                                                  : CheckpointPolicy::MustRecompute;
  });
  remat::Recorder recorder;
  checkpoint(with(best, "best"), f, x);  // is measured
  checkpoint(with(best, "best"), f, x);
  checkpoint(with(listed, "listed"), f, x);
  const auto log = recorder.event_log();
  CAPTURE(log);
  CHECK_THAT(log,
             contains("region 1 recomputes aten::sin.default, 2000.000 ms: PreferRecompute\n"));
  CHECK_THAT(log, contains("region 2 keeps aten::sin.default, 40 bytes, 2000.000 ms: save_best\n"));
  CHECK_THAT(log, contains("region 3 keeps aten::cumsum.default, 40 bytes: MustSave\n"));
  CHECK_THAT(log, contains("region 3 recomputes aten::exp.default: MustRecompute\n"));
  CHECK_THAT(
      log, contains("region 3 recomputes aten::view.default: PreferSave, but it returns a view\n"));
  const remat::Report report = recorder.report();
  REQUIRE(report.regions.size() == 2);
  const auto decided = [](const remat::RegionReport& region, const std::string& outcome,
                          const std::string& op) {
    std::pair<int64_t, int64_t> calls_and_bytes{0, 0};
    for (const remat::DecisionReport& each : region.decisions)
      if (each.outcome == outcome && each.op == op)
        calls_and_bytes = {calls_and_bytes.first + each.calls, calls_and_bytes.second + each.bytes};
    return calls_and_bytes;
  };
  CHECK(decided(report.regions[0], "kept", "aten::sin.default") ==
        std::pair<int64_t, int64_t>(1, 40));
  CHECK(decided(report.regions[0], "recomputed", "aten::sin.default") ==
        std::pair<int64_t, int64_t>(1, 0));
  CHECK(decided(report.regions[1], "kept", "aten::cumsum.default") ==
        std::pair<int64_t, int64_t>(1, 40));
  CHECK_THAT(report.to_string(),
             contains("best: kept aten::sin.default, 1 calls, 40 B, 2000.000 ms: save_best"));
  CHECK_THAT(report.to_json(), contains("\"outcome\": \"kept\", \"reason\": \"save_best\""));
  CHECK_THAT(report.to_json(), contains("\"seconds\": 2.000000000"));
  CHECK_THAT(recorder.to_html(), contains("kept aten::sin.default"));
}

namespace {

/// Options of a policy that measures once, counts how often it is asked, and has a file.
SaveBestOptions with_file(int64_t bytes, const std::string& file, int& asked) {
  SaveBestOptions options = told(bytes, random_costs);
  options.seconds_of = [&asked, of = options.seconds_of](const PolicyContext& call) {
    ++asked;
    return of(call);
  };
  options.profiles = file;
  return options;
}

void require_same(const std::vector<BestChoice>& found, const std::vector<BestChoice>& expected) {
  REQUIRE(found.size() == expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK(found[i].region == expected[i].region);
    CHECK(found[i].kept_bytes == expected[i].kept_bytes);
    CHECK(found[i].saved_seconds == expected[i].saved_seconds);
    CHECK(found[i].bound_seconds == expected[i].bound_seconds);
    REQUIRE(found[i].calls.size() == expected[i].calls.size());
    for (std::size_t j = 0; j < found[i].calls.size(); ++j) {
      CHECK(found[i].calls[j].op == expected[i].calls[j].op);
      CHECK(found[i].calls[j].seconds == expected[i].calls[j].seconds);
      CHECK(found[i].calls[j].bytes == expected[i].calls[j].bytes);
      CHECK(found[i].calls[j].kept_bytes == expected[i].calls[j].kept_bytes);
      CHECK(found[i].calls[j].is_kept == expected[i].calls[j].is_kept);
    }
  }
}

}  // namespace

TEST_CASE("what a file of profiles has is chosen for without being measured", "[save_best]") {
  const Folder folder;
  const std::string file = folder.path() + "/profiles";
  const std::string name = GENERATE(std::string("block"), std::string(), std::string("a \\n\nb\\"));
  const auto seed = GENERATE(1u, 2u, 3u);
  const auto f = [random = random_function(seed, 12)](const Tensor& a, const Tensor& b) {
    return random(a, b) + a.exp().sum() * b.sin().sum();  // some use one of them only
  };
  const Tensor x = leaf({10}), y = leaf({10});
  const Tensors plain = grad_of(f(x, y), {x, y});
  int asked = 0;
  const Policy first = save_best(with_file(200, file, asked));
  for (int i = 0; i < 2; ++i) checkpoint(with(first, name), f, x, y);
  CHECK(asked > 0);
  for (const int64_t bytes : {int64_t{0}, int64_t{100}, int64_t{200}, int64_t{1000}}) {
    CAPTURE(bytes);
    asked = 0;
    const Policy same = save_best(with_file(bytes, file, asked));
    // Another one that measures for itself.
    int others = 0;
    const Policy other = save_best(with_file(bytes, "", others));
    checkpoint(with(other, name), f, x, y);
    require_same(best_choices(same), best_choices(other));
    require_bit_equal(grad_of(checkpoint(with(same, name), f, x, y), {x, y}), plain);
    CHECK(asked == 0);
    Tensor result;
    CHECK(saved_bytes([&] { return checkpoint(with(same, name), f, x, y); }, result) ==
          best_choices(same)[0].kept_bytes);
  }
}

TEST_CASE("a region of a file that goes another way is measured, and added", "[save_best]") {
  const Folder folder;
  const std::string file = folder.path() + "/profiles";
  const auto f = random_function(5, 8);
  int asked = 0;
  const auto run = [&](const Policy& policy, int64_t size) {
    const Tensor x = leaf({size}), y = leaf({size});
    const Tensors plain = grad_of(f(x, y), {x, y});
    for (int i = 0; i < 3; ++i)
      require_bit_equal(grad_of(checkpoint(with(policy), f, x, y), {x, y}), plain);
  };
  run(save_best(with_file(200, file, asked)), 10);
  asked = 0;
  const Policy second = save_best(with_file(200, file, asked));
  run(second, 12);
  CHECK(asked > 0);
  CHECK(best_choices(second).size() == 2);
  asked = 0;
  const Policy third = save_best(with_file(200, file, asked));
  CHECK(best_choices(third).size() == 2);
  run(third, 10);
  run(third, 12);
  CHECK(asked == 0);
}

TEST_CASE("profiles that were measured otherwise are left alone, and not used", "[save_best]") {
  const Folder folder;
  const std::string file = folder.path() + "/profiles";
  const auto f = random_function(5, 8);
  const Tensor x = leaf({10}), y = leaf({10});
  int asked = 0;
  const auto run = [&](const std::string& name) {
    const Policy policy = save_best(with_file(200, file, asked));
    for (int i = 0; i < 2; ++i) checkpoint(with(policy, name), f, x, y);
  };
  run("mine");
  std::string text = text_in(file);
  const std::size_t at = text.find("LibTorch ");
  REQUIRE(at != std::string::npos);
  text.replace(at, 9, "LibTorch 1");
  std::ofstream(file) << text;
  CHECK(best_choices(save_best(with_file(200, file, asked))).empty());
  run("mine");
  run("other");
  CHECK(occurrences(text_in(file), "region mine\n") == 2);
  CHECK(occurrences(text_in(file), "region other\n") == 1);
  CHECK(best_choices(save_best(with_file(200, file, asked))).size() == 2);
}

TEST_CASE("a file that has no profiles is refused, and one that cannot be written is a warning",
          "[save_best]") {
  const Folder folder;
  const std::string file = folder.path() + "/profiles";
  const auto f = random_function(5, 8);
  const Tensor x = leaf({10}), y = leaf({10});
  int asked = 0;
  {
    const Policy policy = save_best(with_file(200, file, asked));
    for (int i = 0; i < 2; ++i) checkpoint(with(policy), f, x, y);
  }
  const std::string good = text_in(file);
  const auto refused = [&](const std::string& text) {
    std::ofstream(file) << text;
    return text_of(
        error_of<c10::ValueError>([&] { return save_best(with_file(200, file, asked)); }));
  };
  CHECK_THAT(refused("something else\n"), contains("line 1 of \"" + file + "\" does not begin"));
  CHECK_THAT(refused(good.substr(0, good.size() / 2)), contains("save_best: line "));
  std::string bad = good;
  bad.replace(bad.find("call aten"), 4, "cell");
  CHECK_THAT(refused(bad), contains("is no call of a profile"));
  bad = good;
  bad.insert(bad.find("\nvalue ") + 7, "-");
  CHECK_THAT(refused(bad), contains("is no value of a profile"));
  for (const std::size_t cut : {good.size() - 1, good.size() / 3, good.size() / 5})
    static_cast<void>(refused(good.substr(0, cut - 1) + "x"));

  const Warnings warnings;
  const Policy policy = save_best(with_file(200, folder.path() + "/none/profiles", asked));
  for (const char* name : {"one", "two"})
    for (int i = 0; i < 2; ++i)
      require_bit_equal(grad_of(checkpoint(with(policy, name), f, x, y), {x, y}),
                        grad_of(f(x, y), {x, y}));
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("profiles could not be written"));
}

TEST_CASE("regions of real blocks' size are chosen for exactly, larger ones within a bound",
          "[save_best]") {
  // Sums of costs that are all different, so that hardly a set is as good as another.
  int number = 0;
  const int num_steps = GENERATE(20, 60, 400);
  CAPTURE(num_steps);
  const Policy policy = save_best({.bytes = 4 * 20 * num_steps,
                                   .profile_runs = 1,
                                   .seconds_of = [&number](const PolicyContext&) {
                                     return std::fmod(std::sqrt(2.) * ++number, 1.) + 0.1;
                                   }});
  const auto f = [num_steps](const Tensor& x) {
    Tensor y = x;
    for (int i = 0; i < num_steps; ++i) {
      const Tensor part = y.narrow(0, 0, 20 + (i * 37) % 80);
      y = y * part.exp().sin().sum();
    }
    return y.sum();
  };
  const Tensor x = at::full({100}, 0.001, at::kDouble).requires_grad_();
  checkpoint(with(policy), f, x);
  const BestChoice choice = best_choices(policy).at(0);
  CHECK(choice.kept_bytes <= 4 * 20 * num_steps);
  CHECK(choice.saved_seconds <= choice.bound_seconds);
  if (num_steps <= 20) CHECK(choice.saved_seconds == choice.bound_seconds);
  CHECK(choice.saved_seconds > 0.99 * choice.bound_seconds);
  Tensor y;
  CHECK(saved_bytes([&] { return checkpoint(with(policy), f, x); }, y) == choice.kept_bytes);
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0]));
}
