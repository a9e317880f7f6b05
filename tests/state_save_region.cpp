// Providers whose state moves inside save_region, whose function recomputes do not run.

#include <random>

#include "tests/support/nn.h"

using remat::checkpoint;
using remat::save_region;
using remat::StateProviderGuard;

namespace {

struct Engine final : remat::StateProvider {
  std::mt19937 engine{7};
  int captures = 0, restores = 0;
  std::any capture() override {
    CHECK_FALSE(at::GradMode::is_enabled());
    CHECK_FALSE(remat::is_checkpointing());
    CHECK_FALSE(remat::is_recomputing());
    ++captures;
    return engine;
  }
  void restore(const std::any& state) override {
    CHECK_FALSE(at::GradMode::is_enabled());
    CHECK_FALSE(remat::is_recomputing());
    ++restores;
    engine = std::any_cast<std::mt19937>(state);
  }
  double draw() { return std::uniform_real_distribution<double>(0.5, 1.5)(engine); }
};

}  // namespace

TEST_CASE("what a provider did in a save_region that a recompute skips has happened",
          "[state][rule-11][rule-15]") {
  const Seed seed;
  const Tensor x = leaf({5});
  const auto engine = std::make_shared<Engine>();
  Calls kept_calls;
  const auto function = [&](const Tensor& t) {
    const Tensor a = (t * engine->draw()).sin();
    const Tensor b = save_region(
        counted(kept_calls, [&](const Tensor& u) { return u * engine->draw() * engine->draw(); }),
        a);
    const Tensor c = (b * engine->draw()).sin();
    const Tensor d = save_region([&](const Tensor& u) { return u * engine->draw(); }, c);
    return (d * engine->draw()).sin();
  };
  const Tensor expected = grad_of(function(x), {x})[0];
  const auto state_after_forward = engine->engine;
  engine->engine.seed(7);
  kept_calls.reset();
  const StateProviderGuard guard(engine);
  const int nesting = GENERATE(1, 2, 3);
  std::function<Tensor(const Tensor&)> run = function;
  for (int i = 0; i < nesting; ++i) run = [run](const Tensor& t) { return checkpoint(run, t); };
  const Tensor y = run(x);
  CHECK(engine->engine == state_after_forward);
  CHECK(kept_calls.count() == 1);
  engine->engine.seed(99);
  const std::mt19937 other = engine->engine;
  for (int i = 0; i < 2; ++i) {
    CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
    CHECK(engine->engine == other);
  }
}

TEST_CASE("a provider is asked once a save_region, and not where none is around",
          "[state][rule-15]") {
  const Tensor x = leaf({5});
  const auto engine = std::make_shared<Engine>();
  const auto function = [&](const Tensor& t) {
    return save_region([&](const Tensor& u) { return u.sin(); }, t.cos()).sin();
  };
  checkpoint(function, x);
  CHECK(engine->captures == 0);
  const StateProviderGuard guard(engine);
  const Tensor y = checkpoint(function, x);
  CHECK(engine->captures == 2);  // at its begin, after the save_region
  y.sum().backward();
  CHECK(engine->captures == 3);
  CHECK(engine->restores == 3);  // at the begin, after the save_region, back
}

TEST_CASE("a provider that a save_region's function guards has its state, too",
          "[state][rule-15]") {
  const Tensor x = leaf({5});
  const auto outer = std::make_shared<Engine>(), inner = std::make_shared<Engine>();
  const auto function = [&](const Tensor& t) {
    const Tensor a = save_region(
        [&](const Tensor& u) {
          const StateProviderGuard guard(inner);
          return u * inner->draw() * outer->draw();
        },
        t.sin());
    return (a * inner->draw() * outer->draw()).sin();
  };
  const Tensor expected = grad_of(function(x), {x})[0];
  inner->engine.seed(7);
  outer->engine.seed(7);
  const StateProviderGuard guard(outer);
  const Tensor y = checkpoint(function, x);
  inner->engine.seed(8);
  outer->engine.seed(9);
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
}

TEST_CASE("a provider that throws where a save_region ends throws in forward, and leaves nothing",
          "[state][rule-12][rule-15]") {
  struct Throwing final : remat::StateProvider {
    int left = 1;
    std::any capture() override {
      if (left-- == 0) throw std::domain_error("capture");
      return 0;
    }
    void restore(const std::any&) override {}
  };
  const Tensor x = leaf({5});
  const StateProviderGuard guard(std::make_shared<Throwing>());
  CHECK_THROWS_AS(
      checkpoint(
          [](const Tensor& t) { return save_region([](const Tensor& u) { return u.sin(); }, t); },
          x),
      std::domain_error);
}

TEST_CASE("a provider whose restore in a skipped save_region throws fails the recompute cleanly",
          "[state][rule-12][rule-15]") {
  struct Number final : remat::StateProvider {
    int value = 1, restores = 0, throw_at = 0;
    std::any capture() override { return value; }
    void restore(const std::any& state) override {
      if (++restores == throw_at) throw std::domain_error("restore");
      value = std::any_cast<int>(state);
    }
  };
  const Tensor x = leaf({5});
  const auto number = std::make_shared<Number>();
  const auto function = [&](const Tensor& t) {
    const Tensor a = save_region([&](const Tensor& u) { return u * ++number->value; }, t.sin());
    return (a * number->value).sin();
  };
  const Tensor expected = grad_of(function(x), {x})[0];
  number->value = 1;
  const StateProviderGuard guard(number);
  const Tensor y = checkpoint(function, x);
  number->value = 50;
  number->throw_at = 2;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::domain_error);
  CHECK(number->value == 50);
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(number->value == 50);
}

TEST_CASE("a module's buffers are as a skipped save_region left them", "[state][module][rule-15]") {
  const Seed seed;
  const Tensor x = leaf({6, 3});
  const auto function = [](torch::nn::BatchNorm1d norm, const Tensor& t) {
    const Tensor a = save_region([&](const Tensor& u) { return norm(u); }, t.sin());
    // Read as data, as an evaluation between two steps does.
    return (a * norm->running_mean.clone() + norm->running_var.clone()).sin();
  };
  torch::nn::BatchNorm1d plain(3), norm(3);
  const Tensor expected = grad_of(function(plain, x), {x})[0];
  const Tensor y =
      checkpoint({.modules = {norm.ptr()}}, [&](const Tensor& t) { return function(norm, t); }, x);
  norm->running_mean.data().fill_(100);
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(norm->num_batches_tracked.item<int64_t>() == 1);
  CHECK(norm->running_mean[0].item<float>() == 100);
}

TEST_CASE("a provider that copies into a captured tensor in a skipped save_region is believed",
          "[state][rule-11][rule-15]") {
  struct Copies final : remat::StateProvider {
    Tensor held = at::ones({3});
    std::any capture() override { return held.clone(); }
    void restore(const std::any& state) override { held.copy_(std::any_cast<Tensor>(state)); }
  };
  const Tensor x = leaf({3});
  const auto provider = std::make_shared<Copies>();
  const auto function = [&](const Tensor& t) {
    const Tensor a = save_region(
        [&](const Tensor& u) {
          const at::NoGradGuard no_grad;
          provider->held.data().add_(1);
          at::AutoGradMode grad(true);
          return u * 2;
        },
        t.sin());
    return (a * provider->held).sin();
  };
  const Tensor expected = grad_of(function(x), {x})[0];
  provider->held.fill_(1);
  const StateProviderGuard guard(provider);
  const Tensor y = checkpoint(function, x);
  provider->held.data().fill_(30);
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
  CHECK(bit_equal(provider->held, at::full({3}, 30.f)));
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
}
