// BudgetGuard: what autograd saved is dropped and made again within a byte budget, bit by bit.

#include <ATen/Parallel.h>
#include <remat/budget.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "tests/support/support.h"

using namespace remat::testing;
using remat::BudgetExceeded;
using remat::BudgetGuard;
using remat::BudgetOptions;
using remat::BudgetReport;
using remat::MemoryMeter;
using remat::OverBudget;

namespace {

constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();
constexpr int64_t side = 64, layer_bytes = side * side * 4;

/// A chain of layers, each of which saves a few tensors of `layer_bytes`.
struct Chain {
  explicit Chain(int64_t depth) {
    for (int64_t i = 0; i < depth; ++i) weights.push_back(leaf({side, side}));
  }
  Tensor operator()(Tensor x) const {
    for (const Tensor& weight : weights) x = x.mm(weight).div(8).sin().add(x).tanh();
    return x;
  }
  Tensors grads() const {
    Tensors all;
    for (const Tensor& weight : weights) all.push_back(weight.grad().clone());
    return all;
  }
  void zero_grads() const {
    for (const Tensor& weight : weights) weight.mutable_grad() = at::zeros_like(weight);
  }
  Tensors weights;
};

bool are_equal(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!a[i].equal(b[i])) return false;
  return true;
}

/// Returns the peak of a step [bytes], beyond the memory before it.
int64_t span_of(const std::function<void()>& step) {
  MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  step();
  return meter.peak_bytes() - before;
}

/// The bytes and the gradients of a step without a budget.
std::pair<int64_t, Tensors> plain_step(const Chain& chain, const Tensor& x) {
  chain.zero_grads();
  const int64_t span = span_of([&] { chain(x).sum().backward(); });
  return {span, chain.grads()};
}

/// Requires equal results of a program without a budget and under that share of its span.
void require_same_at(double share, const std::function<Tensors()>& program) {
  Tensors plain, budgeted;
  const int64_t span = span_of([&] {
    const Seed seed(3);
    plain = program();
  });
  const Seed seed(3);
  const BudgetGuard guard({.bytes = static_cast<int64_t>(share * static_cast<double>(span))});
  budgeted = program();
  REQUIRE(are_equal(plain, budgeted));
}

}  // namespace

TEST_CASE("a budget bounds the peak from the first step on, and gradients stay as they are",
          "[budget]") {
  const Chain chain(24);
  const Tensor x = at::randn({side, side});
  const auto [span, plain] = plain_step(chain, x);
  const double share = GENERATE(0.8, 0.5, 0.3, 0.2);
  const auto bytes = static_cast<int64_t>(share * static_cast<double>(span));
  MemoryMeter meter;
  chain.zero_grads();
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  BudgetReport report;
  {
    const BudgetGuard guard({.bytes = bytes});
    chain(x).sum().backward();
    report = guard.report();
  }
  const int64_t peak = meter.peak_bytes() - before;
  REQUIRE(are_equal(plain, chain.grads()));
  CHECK(peak <= bytes);
  CHECK(report.peak_bytes == peak);
  CHECK(report.budget_bytes == bytes);
  CHECK(report.over_count == 0);
  CHECK(report.evictions > 0);
  CHECK(report.reruns >= report.evictions / 2);
  CHECK(report.operators >= 24 * 5);
  CHECK(report.floor_bytes < bytes);
  CHECK(report.to_string().find("evictions") != std::string::npos);
}

TEST_CASE("every budget from 1.25 of the floor up holds", "[budget]") {
  const Chain chain(16);
  const Tensor x = at::randn({side, side});
  const auto [span, plain] = plain_step(chain, x);
  int64_t floor = 0;
  {
    chain.zero_grads();
    const BudgetGuard guard({.bytes = 1});
    chain(x).sum().backward();
    floor = guard.report().floor_bytes;
  }
  for (int64_t percent = 1; percent <= 100; ++percent) {
    const int64_t bytes = span * percent / 100;
    chain.zero_grads();
    const BudgetGuard guard({.bytes = bytes});
    chain(x).sum().backward();
    const int64_t peak = guard.report().peak_bytes;
    INFO(percent << " % of " << span << ", floor " << floor);
    REQUIRE(are_equal(plain, chain.grads()));
    CHECK(peak <= (bytes * 4 >= floor * 5 ? bytes : std::max(bytes, floor * 11 / 10)));
  }
}

TEST_CASE("without a limit nothing is dropped, and a step leaves no byte", "[budget]") {
  const Chain chain(4);
  const Tensor x = at::randn({side, side});
  chain.zero_grads();
  LiveBytes bytes;
  const BudgetGuard guard({.bytes = unlimited});
  for (int i = 0; i < 3; ++i) {
    chain(x).sum().backward();
    REQUIRE(bytes.held() == 0);
    REQUIRE(guard.report().source_bytes == 0);
  }
  CHECK(guard.report().evictions == 0);
  CHECK(guard.report().reruns == 0);
}

TEST_CASE("random numbers come again, from the default generator and from others", "[budget]") {
  const Chain chain(8);
  auto generator = at::make_generator<at::CPUGeneratorImpl>();
  require_same_at(0.3, [&] {
    chain.zero_grads();
    generator.set_current_seed(5);
    Tensor x = at::ones({side, side});
    for (const Tensor& weight : chain.weights) {
      x = at::dropout(x.mm(weight).sin(), 0.4, true);
      x = x * at::empty_like(x).uniform_(0.5, 1.5, generator);
      x = x + at::randn({side, side}) * at::rand({side, side});
    }
    x.sum().backward();
    Tensors all = chain.grads();
    all.push_back(at::detail::getDefaultCPUGenerator().get_state());
    all.push_back(generator.get_state());
    return all;
  });
}

TEST_CASE("writes in place, outputs that are given and views are made again", "[budget]") {
  const Chain chain(8);
  require_same_at(GENERATE(0.6, 0.3), [&] {
    chain.zero_grads();
    Tensor h = at::ones({side, side});
    for (const Tensor& weight : chain.weights) {
      Tensor y = h.mm(weight);
      y.add_(1.0);
      y.slice(1, 0, side / 2).mul_(0.5);
      y.relu_();
      Tensor z = y.t().contiguous().view({side / 2, side * 2});
      z.unsqueeze_(0);
      Tensor mask;
      {
        const at::NoGradGuard no_grad;
        Tensor out = at::empty({side, side});
        at::sin_out(out, y);
        mask = out.gt_(0.0);
      }
      Tensor buffer = at::zeros({side, side});
      buffer.slice(0, 0, side / 2).copy_(y.slice(0, side / 2));
      buffer.mul_(mask);
      h = (z.squeeze(0).view({side, side}) + buffer.sigmoid_()).tanh();
    }
    h.sum().backward();
    return chain.grads();
  });
}

TEST_CASE("gradients of gradients, retained graphs and several losses", "[budget]") {
  const Chain chain(6);
  require_same_at(0.5, [&] {
    chain.zero_grads();
    const Tensor x = at::ones({side, side}).requires_grad_();
    const Tensor y = chain(x);
    const Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    const Tensor gg = torch::autograd::grad({g.square().sum()}, {x}, {}, true, true)[0];
    (y.square().mean() + g.square().sum() + gg.sin().sum()).backward({}, true);
    y.sum().backward();
    Tensors all = chain.grads();
    all.insert(all.end(), {g.detach(), gg.detach()});
    return all;
  });
}

TEST_CASE("a graph made in the scope runs backward after it, within the budget", "[budget]") {
  const Chain chain(16);
  const Tensor x = at::randn({side, side});
  const auto [span, plain] = plain_step(chain, x);
  chain.zero_grads();
  MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  Tensor loss;
  {
    const BudgetGuard guard({.bytes = span / 3});
    loss = chain(x).sum();
  }
  loss.backward();
  CHECK(meter.peak_bytes() - before <= span / 3);
  CHECK(are_equal(plain, chain.grads()));
}

TEST_CASE("what a dropped value is made of is written to before backward", "[budget]") {
  const Chain chain(8);
  const auto run = [&](int64_t bytes, const std::function<void(Tensor&)>& change) {
    chain.zero_grads();
    Tensor x = at::ones({side, side});
    Tensor scale = at::full({side, side}, 2.0);
    const BudgetGuard guard({.bytes = bytes});
    Tensor y = x * scale;  // saves nothing: neither requires grad
    y = chain(y);
    change(scale);
    y.sum().backward();
    return chain.grads();
  };
  const Tensors plain = run(unlimited, [](Tensor&) {});
  const int64_t few = layer_bytes * 14;
  SECTION("by an operator of the thread") {
    CHECK(are_equal(plain, run(few, [](Tensor& scale) { scale.fill_(7); })));
  }
  SECTION("through a view") {
    CHECK(are_equal(plain, run(few, [](Tensor& scale) { scale.slice(0, 0, 1).zero_(); })));
  }
  SECTION("by another thread: an error, and no gradient") {
    const auto change = [](Tensor& scale) { std::thread([&] { scale.fill_(7); }).join(); };
    CHECK_THROWS_WITH(run(few, change), contains("an input of a dropped value has changed, so "));
  }
  SECTION("let go of") {
    CHECK(are_equal(plain, run(few, [](Tensor& scale) { scale = Tensor(); })));
  }
}

TEST_CASE("memory that LibTorch did not allocate may change unseen", "[budget]") {
  const Chain chain(8);
  std::vector<float> outside(side * side, 0.5F);
  const auto run = [&](int64_t bytes) {
    chain.zero_grads();
    std::fill(outside.begin(), outside.end(), 0.5F);
    const Tensor x = at::from_blob(outside.data(), {side, side});
    const BudgetGuard guard({.bytes = bytes});
    Tensor y = chain(x.mul(2).sin());
    std::fill(outside.begin(), outside.end(), 9.0F);  // the next batch
    y.sum().backward();
    return chain.grads();
  };
  const Tensors plain = run(unlimited);
  CHECK(are_equal(plain, run(layer_bytes * 14)));
}

TEST_CASE("a saved tensor that is changed in place is refused in LibTorch's words", "[budget]") {
  const auto text_of = [](bool has_budget) {
    std::unique_ptr<BudgetGuard> guard;
    if (has_budget) guard = std::make_unique<BudgetGuard>(BudgetOptions{.bytes = unlimited});
    const Tensor x = leaf({3});
    Tensor y = x.sin() + 1;
    const Tensor z = y.exp() * y;
    y.add_(1);
    try {
      z.sum().backward();
    } catch (const c10::Error& e) {
      const std::string text = e.what_without_backtrace();
      return text.substr(0, text.find(", which is output"));
    }
    return std::string("nothing was thrown");
  };
  const std::string plain = text_of(false), budgeted = text_of(true);
  CHECK(budgeted.rfind(plain.substr(0, plain.find("]") + 1), 0) == 0);
  CHECK(budgeted.find("is at version 1; expected version 0 instead") != std::string::npos);
}

TEST_CASE("training: optimizers and gradients within the scope", "[budget]") {
  const auto run = [](int64_t bytes) {
    const Seed seed(1);
    const Chain chain(8);
    Tensors momenta;
    for (const Tensor& weight : chain.weights) momenta.push_back(at::zeros_like(weight));
    const BudgetGuard guard({.bytes = bytes});
    for (int step = 0; step < 4; ++step) {
      chain.zero_grads();
      chain(at::randn({side, side})).square().mean().backward();
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < momenta.size(); ++i) {
        momenta[i].mul_(0.9).add_(chain.weights[i].grad());
        Tensor weight = chain.weights[i];
        weight.sub_(momenta[i], 0.1);
      }
    }
    return chain.weights;
  };
  CHECK(are_equal(run(unlimited), run(layer_bytes * 30)));
}

TEST_CASE("regions inside a budget are recomputed as regions", "[budget]") {
  const Chain chain(12);
  Calls calls;
  const auto run = [&](int64_t bytes) {
    chain.zero_grads();
    Tensor x = at::ones({side, side});
    const BudgetGuard guard({.bytes = bytes});
    for (std::size_t i = 0; i < chain.weights.size(); ++i) {
      const Tensor weight = chain.weights[i];
      x = x.sin();
      x = remat::checkpoint(
          [&calls, weight](const Tensor& t) {
            calls();
            return t.mm(weight).tanh().div(4).exp();
          },
          x);
    }
    x.sum().backward();
    return chain.grads();
  };
  const Tensors plain = run(unlimited);
  const int64_t calls_unlimited = calls.count();
  CHECK(are_equal(plain, run(layer_bytes * 16)));
  CHECK(calls.count() == 2 * calls_unlimited);
}

TEST_CASE("a budget that cannot hold is exceeded and counted, or an error", "[budget]") {
  const Chain chain(8);
  const Tensor x = at::randn({side, side});
  chain.zero_grads();
  chain(x).sum().backward();
  const Tensors plain = chain.grads();
  chain.zero_grads();
  SECTION("exceeded") {
    // Allocations within the bound that an earlier one has raised count, too.
    for (int64_t quarters = 1; quarters < 9; ++quarters) {
      const int64_t asked = quarters * layer_bytes / 4;
      const BudgetGuard guard({.bytes = asked});
      chain.zero_grads();
      chain(x).sum().backward();
      CHECK(are_equal(plain, chain.grads()));
      const BudgetReport report = guard.report();
      CHECK(report.over_count > 0);
      CHECK(report.over_bytes == report.peak_bytes - asked);
      CHECK(report.floor_bytes > asked);
    }
  }
  SECTION("an error that leaves nothing behind") {
    LiveBytes bytes;
    int64_t needed = 0;
    {
      const BudgetGuard guard({.bytes = layer_bytes, .over = OverBudget::Throw});
      try {
        chain(x).sum().backward();
        FAIL("nothing was thrown");
      } catch (const BudgetExceeded& e) {
        needed = e.needed_bytes();
        CHECK(e.floor_bytes() >= layer_bytes);
      }
    }
    CHECK(bytes.held() == 0);
    CHECK(needed > layer_bytes);
    chain.zero_grads();
    const BudgetGuard guard({.bytes = 20 * layer_bytes, .over = OverBudget::Throw});
    chain(x).sum().backward();
    CHECK(are_equal(plain, chain.grads()));
  }
  SECTION("the same backward again under a larger budget") {
    auto guard = std::make_unique<BudgetGuard>(BudgetOptions{.bytes = unlimited});
    const Tensor loss = chain(x).sum();
    guard.reset();
    {
      const BudgetGuard small({.bytes = 1, .over = OverBudget::Throw});
      CHECK_THROWS_AS(loss.backward({}, true), BudgetExceeded);
    }
    chain.zero_grads();
    loss.backward();
    CHECK(are_equal(plain, chain.grads()));
  }
}

TEST_CASE("nested budgets: the smallest holds", "[budget]") {
  const Chain chain(16);
  const Tensor x = at::randn({side, side});
  const auto [span, plain] = plain_step(chain, x);
  chain.zero_grads();
  const bool is_inner_smaller = GENERATE(true, false);
  const BudgetGuard outer({.bytes = is_inner_smaller ? span : span / 3});
  MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  {
    const BudgetGuard inner({.bytes = is_inner_smaller ? span / 3 : span});
    chain(x).sum().backward();
  }
  CHECK(meter.peak_bytes() - before <= span / 3);
  CHECK(are_equal(plain, chain.grads()));
}

TEST_CASE("two threads with budgets at a time", "[budget]") {
  const Chain a(12), b(12);
  const Tensor x = at::randn({side, side});
  Tensors plain;
  for (const Chain* const each : {&a, &b}) {
    each->zero_grads();
    (*each)(x).sum().backward();
    for (Tensor& grad : each->grads()) plain.push_back(std::move(grad));
    each->zero_grads();
  }
  const auto train = [&](const Chain& chain) {
    for (int i = 0; i < 20; ++i) {
      chain.zero_grads();
      const BudgetGuard guard({.bytes = 24 * layer_bytes});
      chain(x).sum().backward();
    }
  };
  std::thread other([&] { train(b); });
  train(a);
  other.join();
  Tensors both = a.grads();
  for (Tensor& grad : b.grads()) both.push_back(std::move(grad));
  CHECK(are_equal(plain, both));
}

TEST_CASE("long chains of calls die one after the other", "[budget]") {
  LiveBytes bytes;
  {
    const BudgetGuard guard({.bytes = unlimited});
    Tensor x = at::ones({4});
    for (int i = 0; i < 200'000; ++i) x = x.add(1);
  }
  CHECK(bytes.held() == 0);
}

TEST_CASE("many steps leave nothing", "[budget]") {
  const Chain chain(3);
  const Tensor x = at::randn({side, side});
  chain.zero_grads();
  const BudgetGuard guard({.bytes = 9 * layer_bytes});
  LiveBytes bytes;
  for (int i = 0; i < 2'000; ++i) {
    chain(x).sum().backward();
    if (i % 100 == 0) REQUIRE(bytes.held() == 0);
  }
  CHECK(guard.report().source_bytes == 0);
}

TEST_CASE("what the program keeps does not keep the history of a step", "[budget]") {
  const Chain chain(3);
  const Tensor x = at::randn({side, side});
  chain.zero_grads();
  const BudgetGuard guard({.bytes = unlimited});
  Tensors losses, moments;
  for (const Tensor& weight : chain.weights) moments.push_back(at::zeros_like(weight));
  Tensor sum = at::zeros({});
  std::optional<LiveBytes> bytes;  // since the second step
  for (int i = 0; i < 50; ++i) {
    if (i == 1) bytes.emplace();
    const Tensor batch = x + i;
    const Tensor loss = chain(batch).sum();
    sum += loss.detach();
    loss.backward();
    losses.push_back(loss.detach());
    const at::NoGradGuard no_grad;
    for (std::size_t k = 0; k < moments.size(); ++k) {
      Tensor weight = chain.weights[k];
      weight.sub_(moments[k].mul_(0.9).add_(weight.grad()), 1e-3);
      weight.mutable_grad() = Tensor();
    }
  }
  CHECK(bytes->held() <= 50 * 64);  // a number for each loss
  CHECK(guard.report().source_bytes == 0);
}

TEST_CASE("memory that nothing filled is not made again", "[budget]") {
  const Chain chain(8);
  const auto run = [&](int64_t bytes) {
    chain.zero_grads();
    const BudgetGuard guard({.bytes = bytes});
    const Tensor start = chain.weights[0].mm(at::ones({side, side}));  // something is saved
    const Tensor blank = at::empty({side, side});
    std::fill_n(blank.mutable_data_ptr<float>(), side * side, 0.25F);
    (chain(blank.sin()) + start.sin()).sum().backward();
    return chain.grads();
  };
  const Tensors plain = run(unlimited);
  CHECK(are_equal(plain, run(layer_bytes * 14)));
}

TEST_CASE("a result that is written to after the scope is made again", "[budget]") {
  const auto grad_of_program = [](int64_t bytes, bool writes) {
    const Seed seed(2);
    const Tensor w = leaf({side, side});
    Tensor a, z;
    {
      const BudgetGuard guard({.bytes = bytes});
      const Tensor first = w.sin();
      a = at::full({side, side}, 0.5);
      z = ((a + 0).sin() * w).exp().sum() + ((a + 0).cos() * w).tanh().sum() + first.exp().sum();
    }
    if (writes) a.add_(1);
    z.backward();
    return w.grad();
  };
  const Tensor plain = grad_of_program(unlimited, false);
  CHECK(plain.equal(grad_of_program(layer_bytes, false)));
  for (int64_t layers = 1; layers < 8; ++layers)
    CHECK(plain.equal(grad_of_program(layers * layer_bytes, true)));
}

TEST_CASE("only the threads of a scope are refused", "[budget]") {
  const Tensor w = leaf({side, side});
  auto guard = std::make_unique<BudgetGuard>(
      BudgetOptions{.bytes = 3 * layer_bytes, .over = OverBudget::Throw});
  const remat::BudgetCounters counters = guard->counters();
  const Tensor z = w.sin().cos();
  std::thread([] { at::zeros({8 * side, side}); }).join();
  CHECK_THROWS_AS(at::zeros({8 * side, side}), BudgetExceeded);
  guard.reset();
  at::zeros({8 * side, side});
  CHECK(counters.now().over_count == 3);
  z.sum().backward();
}

TEST_CASE("contents can be compared when they come back", "[budget]") {
  const Chain chain(8);
  const Tensor x = at::randn({side, side});
  chain.zero_grads();
  chain(x).sum().backward();
  const Tensors plain = chain.grads();
  chain.zero_grads();
  const BudgetGuard guard({.bytes = 12 * layer_bytes, .check_values = true});
  chain(x).sum().backward();
  CHECK(are_equal(plain, chain.grads()));
  CHECK(guard.report().reruns > 0);
}

TEST_CASE("what a budget refuses", "[budget]") {
  CHECK_THROWS_WITH(BudgetGuard({.bytes = 0}), contains("bytes was 0"));
  CHECK_THROWS_WITH(BudgetGuard({.bytes = -5}), contains("bytes was -5"));
  CHECK_THROWS_WITH(BudgetGuard({.bytes = 5, .min_bytes = -2}), contains("min_bytes was -2"));
  CHECK_THROWS_WITH(BudgetGuard({.bytes = 5, .device = c10::Device(c10::kCUDA, 0)}),
                    contains("a budget was requested on cuda:0"));
  const Tensor x = leaf({2});
  CHECK_THROWS_WITH(remat::checkpoint(
                        [](const Tensor& t) {
                          const BudgetGuard guard({.bytes = 100});
                          return t.sin();
                        },
                        x),
                    contains("a budget was opened inside a region"));
}
