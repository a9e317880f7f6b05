// The guards of state.h: providers, generators and observers.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/GeneratorImpl.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "tests/support/counting_generator.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::GeneratorGuard;
using remat::Phase;
using remat::PhaseInfo;
using remat::RecomputeObserverGuard;
using remat::StateProviderGuard;

namespace {

/// A random engine of the standard library, as a user would preserve it.
struct Engine final : remat::StateProvider {
  std::mt19937 engine{7};
  std::any capture() override { return engine; }
  void restore(const std::any& state) override { engine = std::any_cast<std::mt19937>(state); }
  double draw() { return std::uniform_real_distribution<double>(0.5, 1.5)(engine); }
};

/// A number, and exceptions on demand.
struct Number final : remat::StateProvider {
  struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  int value = 0;
  int captures = 0, restores = 0;
  int throw_at_capture = 0, throw_at_restore = 0;
  std::any capture() override {
    CHECK_FALSE(at::GradMode::is_enabled());
    CHECK_FALSE(remat::is_checkpointing());
    CHECK_FALSE(remat::is_recomputing());
    if (++captures == throw_at_capture) throw Refused("capture");
    return value;
  }
  void restore(const std::any& state) override {
    if (++restores == throw_at_restore) throw Refused("restore");
    value = std::any_cast<int>(state);
  }
};

}  // namespace

TEST_CASE("a generator of the user's own draws what forward drew and stays where it was",
          "[state][rule-11]") {
  const bool early_stop = GENERATE(true, false), is_registered = GENERATE(true, false);
  CAPTURE(early_stop, is_registered);
  const auto program = [&](bool drop, at::Generator own) {
    const auto block = [own](const Tensor& t) {
      const Tensor mask = at::rand({20}, own, at::kFloat);
      const Tensor h = (t.sin() * mask).exp() * at::rand({20});
      return h * at::empty({20}).normal_(0, 1, own);
    };
    return [=](const Tensor& t) {
      if (!drop) return block(block(block(t)));
      std::optional<GeneratorGuard> guard;
      if (is_registered) guard.emplace(own);
      const remat::EarlyStopGuard stop(early_stop);
      return checkpoint(
          [=](const Tensor& a) { return checkpoint(block, block(checkpoint(block, a))); }, t);
    };
  };
  at::Generator plain = at::detail::createCPUGenerator(3), own = at::detail::createCPUGenerator(3);
  require_same_grads(program(false, plain), program(true, own), leaf({20}));
  CHECK(at::equal(own.get_state(), plain.get_state()));
}

TEST_CASE("a registered generator is preserved beside other threads that draw from it",
          "[state][rule-11]") {
  const at::Generator own = at::detail::createCPUGenerator(5);
  const GeneratorGuard guard(own);
  const Tensor x = at::ones({64}).requires_grad_();
  const auto elsewhere = [&] { std::thread([&] { at::rand({64}, own, at::kFloat); }).join(); };
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        if (!remat::is_recomputing()) elsewhere();
        const Tensor h = t * at::empty({64}).bernoulli_(0.5, own);
        if (remat::is_recomputing()) elsewhere();
        return h * 1;
      },
      x);
  require_bit_equal(grad_of(y, {x}), {y.detach()});
}

TEST_CASE(
    "a generator that nobody registered is drawn from again, whatever else the function does "
    "with it",
    "[state][rule-11]") {
  const auto draw = [](at::Generator& own) { return at::rand({20}, own, at::kFloat); };
  using Function = std::function<Tensor(const Tensor&, at::Generator&)>;
  const Function all[] = {
      // Seeded before, between and after draws.
      [&](const Tensor& t, at::Generator& own) {
        own.set_current_seed(8);
        return (t * draw(own)).exp();
      },
      [&](const Tensor& t, at::Generator& own) {
        const Tensor h = (t * draw(own)).exp();
        own.set_current_seed(9);
        return (h * draw(own)).sin();
      },
      [&](const Tensor& t, at::Generator& own) {
        const Tensor h = (t * draw(own)).exp();
        own.set_current_seed(9);
        return h.sin();
      },
      // The part that recomputes do not run.
      [&](const Tensor& t, at::Generator& own) {
        const Tensor h = remat::save_region([&](const Tensor& a) { return a * draw(own); }, t);
        return (h.exp() * draw(own)).sin();
      },
      // For the first time in a region inside.
      [&](const Tensor& t, at::Generator& own) {
        const Tensor h =
            checkpoint([&own, &draw](const Tensor& a) { return (a * draw(own)).exp(); }, t);
        return (h * draw(own)).sin();
      },
  };
  for (const Function& function : all) {
    at::Generator plain = at::detail::createCPUGenerator(3),
                  own = at::detail::createCPUGenerator(3);
    const Tensor x = leaf({20});
    const auto twice = [&](at::Generator& one, bool drop) {
      Tensor t = x;
      for (int i = 0; i < 2; ++i)
        t = drop ? checkpoint([&](const Tensor& a) { return function(a, one); }, t)
                 : function(t, one);
      return t;
    };
    const Tensor expected = twice(plain, false), found = twice(own, true);
    draw(plain);
    draw(own);
    for (int i = 0; i < 2; ++i)
      require_bit_equal(grad_of(found, {x}, {.retain_graph = true}),
                        grad_of(expected, {x}, {.retain_graph = true}));
    CHECK(at::equal(own.get_state(), plain.get_state()));
  }
}

TEST_CASE("without preserve_rng_state a generator moves on", "[state][rule-11]") {
  const at::Generator own = at::detail::createCPUGenerator(6);
  std::optional<GeneratorGuard> guard;
  if (GENERATE(true, false)) guard.emplace(own);
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(
      {.preserve_rng_state = false},
      [&](const Tensor& t) { return t.sin() * at::rand({4}, own, at::kFloat); }, x);
  const Tensor before = own.get_state();
  grad_of(y, {x});
  CHECK_FALSE(at::equal(own.get_state(), before));
}

TEST_CASE("a generator that is no CPU generator is set back and put forward again",
          "[state][rule-11]") {
  auto impl = c10::make_intrusive<CountingGenerator>(at::Device(at::kPrivateUse1, 0));
  const at::Generator far(impl);
  const Tensor x = leaf({3});
  const auto f = [impl](const Tensor& t) {
    const Tensor h = (t * impl->draw()).exp();
    return h * impl->draw();
  };
  Tensor first, second;
  {
    const GeneratorGuard guard(far);
    first = checkpoint(f, x);
    second = checkpoint([&](const Tensor& t) { return checkpoint(f, t.sin()); }, x);
  }
  CHECK(impl->position == 4);
  impl->draw();
  const auto expected = [&](const Tensor& t, double a) { return (t * a).exp() * (a + 1); };
  require_bit_equal(grad_of(second, {x}), grad_of(expected(x.sin(), 3), {x}));
  require_bit_equal(grad_of(first, {x}), grad_of(expected(x, 1), {x}));
  CHECK(impl->position == 5);
}

TEST_CASE("a provider's state is the forward's in each recompute and put back after it",
          "[state][rule-11]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const auto program = [&](bool drop, const std::shared_ptr<Engine>& engine) {
    const auto block = [engine](const Tensor& t) {
      const Tensor h = (t * engine->draw()).sin();
      return (h * engine->draw()).exp();
    };
    return [=](const Tensor& t) {
      if (!drop) return block(block(block(block(t))));
      const StateProviderGuard guard(engine);
      const remat::EarlyStopGuard stop(early_stop);
      const Tensor nested = checkpoint(
          [=](const Tensor& a) { return checkpoint(block, block(checkpoint(block, a))); }, t);
      return checkpoint(block, nested);
    };
  };
  const auto plain = std::make_shared<Engine>(), ours = std::make_shared<Engine>();
  require_same_grads(program(false, plain), program(true, ours), leaf({5}));
  CHECK(plain->engine == ours->engine);
}

TEST_CASE("several forwards before one backward keep the state of each", "[state]") {
  const auto number = std::make_shared<Number>();
  const Tensor x = leaf({2});
  const auto f = [&](const Tensor& t) { return (t * number->value).sin(); };
  Tensors outputs;
  {
    const StateProviderGuard guard(number);
    for (number->value = 1; number->value <= 3; ++number->value)
      outputs.push_back(checkpoint(f, x));
  }
  CHECK(number->captures == 3);
  checkpoint(f, x);
  CHECK(number->captures == 3);
  number->value = 10;
  const Tensor sum = outputs[0] + outputs[1] + outputs[2];
  require_bit_equal(grad_of(sum, {x}), grad_of((x * 1).sin() + (x * 2).sin() + (x * 3).sin(), {x}));
  CHECK(number->value == 10);
}

TEST_CASE("a module that guards its own state is right inside a region of somebody else",
          "[state]") {
  const auto program = [](bool drop) {
    const auto engine = std::make_shared<Engine>();
    const at::Generator own = at::detail::createCPUGenerator(3);
    const auto part = [=](const Tensor& t) {
      return (t * engine->draw() * at::rand({8}, own, at::kFloat)) * t;
    };
    const auto module = [=](const Tensor& t) {
      if (!drop) return part(part(t)).sin();
      const StateProviderGuard guard_engine(engine);
      const GeneratorGuard guard_own(own);
      return checkpoint(part, checkpoint(part, t)).sin();
    };
    return [=](const Tensor& t) {
      const auto around = [=](const Tensor& a) {
        const Tensor h = module(a);
        return module(h.exp()) * h;
      };
      return drop ? checkpoint([=](const Tensor& a) { return checkpoint(around, a.cos()); }, t)
                  : around(t.cos());
    };
  };
  require_same_grads(program(false), program(true), leaf({8}));
}

TEST_CASE("what a recompute does under guards that forward has not come to is undone",
          "[state][rule-6][rule-11]") {
  // A backward inside the region makes it run again while forward waits. User code catches the
  // stop, so that the recompute runs on, past where forward is.
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>(11);
  at::Generator far = at::make_generator<CountingGenerator>(at::Device(at::kPrivateUse1, 0));
  const auto number = std::make_shared<Number>();
  int runs = 0;
  std::vector<at::ThreadLocalState> threads;  // that a run began, say, and that have not ended
  const auto region = [&](const at::Tensor& x) {
    ++runs;
    try {
      const at::Tensor y = x.square();
      torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true);
    } catch (...) {
    }
    const GeneratorGuard guard_own(own), guard_far(far);
    const StateProviderGuard guard_number(number);
    own.set_current_seed(own.current_seed() + 1);
    const at::Tensor noise = at::rand({3}, own);
    far.get<CountingGenerator>()->draw();
    ++number->value;
    threads.emplace_back();
    return x.sin() * noise;
  };
  const auto reset = [&] {
    own.set_current_seed(3);
    far.get<CountingGenerator>()->position = 0;
    number->value = 0;
    runs = 0;
    threads.clear();
  };
  const at::Tensor x = at::ones({3}).requires_grad_();
  const auto gradient = [&](bool is_region) {
    reset();
    const at::Tensor y = is_region ? checkpoint(region, x) : region(x);
    const bool ran_on = runs > 1;
    CHECK(ran_on == is_region);
    CHECK(number->value == 1);
    CHECK(far.get<CountingGenerator>()->position == 1);
    const at::Tensor state = own.get_state();
    const at::Tensor gradient = torch::autograd::grad({y.sum()}, {x}).front();
    CHECK(own.get_state().equal(state));
    CHECK(number->value == 1);
    CHECK(far.get<CountingGenerator>()->position == 1);
    return std::pair(gradient, state);
  };
  const auto [plain, plain_state] = gradient(false);
  const auto [found, state] = gradient(true);
  CHECK(found.equal(plain));
  CHECK(state.equal(plain_state));
}

TEST_CASE("what cannot be undone of a guard that forward has not come to is a warning",
          "[state][rule-6][rule-12]") {
  struct Stuck final : remat::StateProvider {
    bool throws = true;
    std::any capture() override { return 0; }
    void restore(const std::any&) override {
      if (throws) throw std::runtime_error("stuck");
    }
  };
  const auto stuck = std::make_shared<Stuck>();
  const auto region = [stuck](const at::Tensor& x) {
    try {
      const at::Tensor y = x.square();
      torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true);
    } catch (...) {
    }
    const StateProviderGuard guard(stuck);
    return x.sin().exp();
  };
  const at::Tensor x = at::ones({3}).requires_grad_();
  remat::testing::Warnings warnings;
  const at::Tensor y = checkpoint(region, x);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0],
             contains("the state of a guard could not be restored after a recompute: stuck"));
  stuck->throws = false;
  CHECK(torch::autograd::grad({y.sum()}, {x})[0].equal(
      torch::autograd::grad({x.sin().exp().sum()}, {x})[0]));
}

TEST_CASE("a gradient inside is right where its recompute runs on past it and opens guards",
          "[state][rule-6][rule-11]") {
  at::Generator own = at::make_generator<at::CPUGeneratorImpl>(11);
  const auto number = std::make_shared<Number>();
  const auto rest = [&](const at::Tensor& x, const at::Tensor& slope) {
    const GeneratorGuard guard_own(own);
    const StateProviderGuard guard_number(number);
    ++number->value;
    return x.sin() * at::rand({3}, own) + slope * number->value;
  };
  const auto catches = [&](const at::Tensor& x) {
    at::Tensor slope = at::zeros_like(x);
    try {
      const at::Tensor y = x.square();
      slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
    } catch (...) {
    }
    return rest(x, slope);
  };
  const auto cannot_be_stopped = [&](const at::Tensor& x) noexcept {
    const at::Tensor y = x.square();
    const at::Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
    return rest(x, slope);
  };
  const at::Tensor x = at::linspace(1, 2, 3).requires_grad_();
  const auto outcome = [&](const auto& run) {
    own.set_current_seed(3);
    number->value = 0;
    const at::Tensor y = run(x);
    const int value = number->value;
    const at::Tensor state = own.get_state();
    const at::Tensor gradient = torch::autograd::grad({y.sum()}, {x}).front();
    CHECK(number->value == value);
    CHECK(own.get_state().equal(state));
    CHECK(value == 1);
    return std::tuple(y.detach(), gradient, state);
  };
  CHECK(std::get<0>(outcome(catches)).equal(std::get<0>(outcome([&](const at::Tensor& t) {
    return checkpoint(catches, t);
  }))));
  CHECK(std::get<1>(outcome(catches)).equal(std::get<1>(outcome([&](const at::Tensor& t) {
    return checkpoint(catches, t);
  }))));
  const auto plain = outcome(cannot_be_stopped);
  const auto found = outcome([&](const at::Tensor& t) { return checkpoint(cannot_be_stopped, t); });
  CHECK(std::get<0>(found).equal(std::get<0>(plain)));
  CHECK(std::get<1>(found).equal(std::get<1>(plain)));
  CHECK(std::get<2>(found).equal(std::get<2>(plain)));
}

TEST_CASE("guards of what each run makes anew are right in every recompute", "[state][rule-11]") {
  const bool has_backward_inside = GENERATE(false, true);
  CAPTURE(has_backward_inside);
  struct Shared final : remat::StateProvider {
    std::shared_ptr<std::mt19937> engine;
    explicit Shared(std::shared_ptr<std::mt19937> e) : engine(std::move(e)) {}
    std::any capture() override { return *engine; }
    void restore(const std::any& state) override { *engine = std::any_cast<std::mt19937>(state); }
  };
  const auto engine = std::make_shared<std::mt19937>(5);
  const auto region = [&](const at::Tensor& x) {
    const StateProviderGuard keeps(std::make_shared<Shared>(engine));
    const double factor = 1 + static_cast<double>((*engine)() % 7);
    at::Generator own = at::make_generator<at::CPUGeneratorImpl>(1);
    const GeneratorGuard guard(own);
    const at::Tensor a = at::rand({8}, own);
    own.set_current_seed(2);
    const at::Tensor b = at::rand({8}, own);
    at::Tensor y = (x * a * b * factor).sin();
    if (has_backward_inside)
      y = y + torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true).front();
    const double second = 1 + static_cast<double>((*engine)() % 7);
    return (y * second).sin();
  };
  const at::Tensor x = at::linspace(0, 1, 8).requires_grad_();
  const auto gradients = [&](bool is_region) {
    engine->seed(5);
    std::vector<at::Tensor> found;
    for (int i = 0; i < 3; ++i) {
      const at::Tensor y = is_region ? checkpoint(region, x) : region(x);
      const std::mt19937 before = *engine;
      found.push_back(torch::autograd::grad({y.sum()}, {x}).front());
      CHECK(*engine == before);
      (*engine)();
    }
    return found;
  };
  const auto plain = gradients(false), found = gradients(true);
  for (std::size_t i = 0; i < plain.size(); ++i) CHECK(found[i].equal(plain[i]));
}

TEST_CASE("a provider may run a backward of its own", "[state][rule-6]") {
  struct Backwards final : remat::StateProvider {
    void work() {
      const at::AutoGradMode grad_mode(true);
      const Tensor t = leaf({3});
      require_bit_equal(grad_of(t * t, {t}), {(t * 2).detach()});
    }
    std::any capture() override { return work(), 1; }
    void restore(const std::any&) override { work(); }
  };
  const StateProviderGuard guard(std::make_shared<Backwards>());
  const Tensor x = leaf({50'000});
  const auto f = [](const Tensor& t) { return t.sin().exp().clone(); };
  require_bit_equal(grad_of(checkpoint(f, x), {x}), grad_of(f(x), {x}));
}

TEST_CASE("what a provider throws keeps its type and loses nothing", "[state][rule-12]") {
  const auto first = std::make_shared<Number>(), second = std::make_shared<Number>();
  const StateProviderGuard guard_1(first), guard_2(second);
  const Tensor x = leaf({2});
  Calls calls;
  const auto f =
      counted(calls, [&](const Tensor& t) { return (t * (first->value + second->value)).sin(); });
  second->throw_at_capture = 1;
  CHECK_THROWS_AS(checkpoint(f, x), Number::Refused);
  CHECK(calls.count() == 0);
  CHECK(remat::counters().frames_alive == 0);

  first->value = second->value = 2;
  const Tensor y = checkpoint(f, x);
  const Tensor expected = grad_of((x * 4).sin(), {x})[0];
  first->value = 5;
  second->value = 6;
  SECTION("before the recompute") { second->throw_at_restore = 1; }
  SECTION("before the recompute, in capture") { second->throw_at_capture = second->captures + 1; }
  SECTION("after the recompute") { second->throw_at_restore = 2; }
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), Number::Refused);
  CHECK(first->value == 5);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  second->value = 6;
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), {expected});
  CHECK(first->value == 5);
  CHECK(second->value == 6);
}

TEST_CASE("a recompute that throws or stops puts the provider's state back",
          "[state][rule-11][rule-12]") {
  const auto number = std::make_shared<Number>();
  const StateProviderGuard guard(number);
  const Tensor x = leaf({50'000});
  bool throws = false;
  number->value = 1;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        const Tensor h = (t * number->value++).sin();
        if (throws && remat::is_recomputing()) throw std::domain_error("in the recompute");
        number->value += 10;
        return h.cos().clone();
      },
      x);
  const Tensor expected = grad_of((x * 1).sin().cos(), {x})[0];
  number->value = 70;
  throws = true;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::domain_error);
  CHECK(number->value == 70);
  throws = false;
  require_bit_equal(grad_of(y, {x}), {expected});
  CHECK(number->value == 70);
}

TEST_CASE("recomputes in two threads take turns over one provider", "[state]") {
  const auto number = std::make_shared<Number>();
  std::vector<Tensor> leaves, outputs;
  {
    const StateProviderGuard guard(number);
    for (number->value = 1; number->value <= 4; ++number->value) {
      leaves.push_back(leaf({100}));
      outputs.push_back(checkpoint(
          [&](const Tensor& t) {
            const int before = number->value;
            const Tensor h = (t * number->value).sin();
            std::this_thread::yield();
            CHECK(number->value == before);
            return (h * number->value).exp();
          },
          leaves.back()));
    }
  }
  number->value = 99;
  std::vector<Tensor> grads(4);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] { grads[i] = grad_of(outputs[i], {leaves[i]})[0]; });
  for (std::thread& each : threads) each.join();
  for (std::size_t i = 0; i < 4; ++i) {
    const int k = static_cast<int>(i) + 1;
    require_bit_equal({grads[i]}, grad_of(((leaves[i] * k).sin() * k).exp(), {leaves[i]}));
  }
  CHECK(number->value == 99);
}

TEST_CASE("a recompute inside another one takes its turn over a provider that a third has",
          "[state][rule-6]") {
  const auto number = std::make_shared<Number>();
  std::atomic<bool> is_late = false, is_held = false, was_held = false;
  int both = 0;
  const auto block = [&](const Tensor& t) {
    both += is_held ? 1 : 0;
    return (t * number->value).sin().cos();
  };
  const Tensor x = leaf({16}), u = leaf({16}), other = leaf({16});
  Tensor captured, held;
  {
    const StateProviderGuard guard(number);
    number->value = 2;
    captured = checkpoint({.early_stop = false}, block, u);
    number->value = 3;
    held = checkpoint(
        {.early_stop = false},
        [&](const Tensor& t) {
          if (is_late) {
            is_held = was_held = true;
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            is_held = false;
          }
          return (t * number->value).sin();
        },
        other);
  }
  // The region around uses no provider, the one for whose backward it waits does.
  const Tensor y = checkpoint(
      {.early_stop = false},
      [&](const Tensor& t) {
        while (is_late && !was_held) std::this_thread::yield();
        return (t * grad_of(captured, {u}, {.retain_graph = true})[0]).sin();
      },
      x);
  const Tensor plain = grad_of((x * grad_of((u * 2).sin().cos(), {u})[0]).sin(), {x})[0];
  number->value = 99;
  is_late = true;
  std::thread holder([&] { grad_of(held, {other}); });
  const Tensors found = grad_of(y, {x});
  holder.join();
  require_bit_equal(found, {plain});
  CHECK(both == 0);
  CHECK(number->value == 99);
}

TEST_CASE("observers are told of every recompute, in pairs, also when it stops or throws",
          "[state]") {
  std::vector<std::string> log;
  const auto observer = [&](const std::string& name) {
    return remat::RecomputeObserver{
        .begin =
            [&log, name](const PhaseInfo& info) {
              CHECK(info.phase == Phase::Recompute);
              CHECK_FALSE(remat::is_recomputing());
              log.push_back(name + " begins " + info.name + " " + std::to_string(info.depth));
            },
        .end =
            [&log, name](const PhaseInfo& info) {
              log.push_back(name + " ends " + info.name + " " + std::to_string(info.depth));
            }};
  };
  const Tensor x = leaf({50'000});
  bool throws = false;
  Tensor y;
  {
    const RecomputeObserverGuard a(observer("a")), b(observer("b"));
    y = checkpoint(
        {.name = "outer"},
        [&](const Tensor& t) {
          const Tensor h =
              checkpoint({.name = "inner"}, [](const Tensor& s) { return s.sin(); }, t);
          if (throws) throw std::domain_error("in the recompute");
          return h.exp().clone();
        },
        x);
  }
  CHECK(log.empty());
  grad_of(y, {x}, {.retain_graph = true});
  const std::vector<std::string> once{"a begins outer 1", "b begins outer 1", "b ends outer 1",
                                      "a ends outer 1",   "a begins inner 2", "b begins inner 2",
                                      "b ends inner 2",   "a ends inner 2"};
  CHECK(log == once);
  log.clear();
  throws = true;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::domain_error);
  CHECK(log == std::vector<std::string>(once.begin(), once.begin() + 4));
}

TEST_CASE("an observer that throws fails the recompute, and those told before are told the end",
          "[state][rule-12]") {
  int begun = 0, ended = 0;
  bool throws = true;
  const RecomputeObserverGuard first(
      {.begin = [&](const PhaseInfo&) { ++begun; }, .end = [&](const PhaseInfo&) { ++ended; }});
  const RecomputeObserverGuard second({.begin = [&](const PhaseInfo&) {
    if (throws) throw std::domain_error("no parameters");
  }});
  const RecomputeObserverGuard nothing({});
  const Tensor x = leaf({3});
  const Tensor y = checkpoint([](const Tensor& t) { return t.sin(); }, x);
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::domain_error);
  CHECK(begun == 1);
  CHECK(ended == 1);
  throws = false;
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin(), {x}));
  CHECK(begun == 2);
  CHECK(ended == 2);
}

TEST_CASE("parameters that an observer gathers and frees are there in the recompute", "[state]") {
  // As sharded training does it: the storage is emptied after each use.
  const Tensor w = leaf({100}), x = leaf({100});
  const Tensor values = w.detach().clone();
  const auto fill = [&](const PhaseInfo&) {
    w.storage().set_nbytes(400);
    w.data().copy_(values);
  };
  int gathered = 0;
  Tensor y;
  {
    const RecomputeObserverGuard guard({.begin = [&](const PhaseInfo& p) { ++gathered, fill(p); }});
    y = checkpoint([&](const Tensor& t) { return (t * w).sin(); }, x);
  }
  require_bit_equal(grad_of(y, {x, w}), grad_of((x * w).sin(), {x, w}));
  CHECK(gathered == 1);
}

TEST_CASE("state guards refuse what is not there", "[state]") {
  CHECK_THROWS_AS(StateProviderGuard(nullptr), c10::ValueError);
  CHECK_THROWS_AS(GeneratorGuard(at::Generator()), c10::ValueError);
}
