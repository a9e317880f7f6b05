// Rule 11: a recompute draws what forward drew, and leaves the generator where it was.

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <torch/library.h>

#include <mutex>

#include "tests/support/counting_generator.h"
#include "tests/support/functions.h"
#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

TEST_CASE("a region draws the same dropout in its recompute", "[rule-11]") {
  auto first = [](const Tensor& t) { return dropout(t); };
  auto second = [](const Tensor& t) { return dropout(t.sin()); };
  for (int repeat = 0; repeat < 5; ++repeat) {
    Calls calls;
    require_same_grads(
        [&](const Tensor& t) { return second(first(t)); },
        [&](const Tensor& t) { return remat::checkpoint(counted(calls, second), first(t)); },
        leaf({20000}));
    CHECK(calls.count() == 2);
  }
  require_same_grads([&](const Tensor& t) { return dropout(t).norm(); },
                     [&](const Tensor& t) { return remat::checkpoint(first, t).norm(); },
                     leaf({3, 3}));
}

TEST_CASE("random factors and products equal plain", "[rule-11]") {
  const Tensor parameter = leaf({100, 100});
  const Parameters parameters{{parameter}};
  auto noise = [&](const Tensor& t) { return t.mm(parameter.mm(at::randn({100, 100}))); };
  require_same_grads(
      parameters, noise, [&](const Tensor& t) { return remat::checkpoint(noise, t); },
      at::randn({20, 100}));

  const Tensor x = leaf({10}), y = leaf({10});
  auto f = [](const Tensor& a, const Tensor& b) { return at::sigmoid(at::rand_like(a) * b) * a; };
  require_same_grads([&](const Tensor& a, const Tensor& b) { return f(f(a, b).sin(), b); },
                     [&](const Tensor& a, const Tensor& b) {
                       return remat::checkpoint(f, remat::checkpoint(f, a, b).sin(), b);
                     },
                     x, y);
}

TEST_CASE("without preserve_rng_state a region draws anew and moves the generator", "[rule-11]") {
  const Seed seed(11);
  const Tensor x = leaf({2});
  Calls calls;
  const Tensor y = remat::checkpoint({.preserve_rng_state = false},
                                     counted(calls, [](const Tensor& t) { return dropout(t); }), x);
  const Tensor before = generator_state();
  grad_of(y, {x});
  CHECK(calls.count() == 2);
  CHECK_FALSE(at::equal(generator_state(), before));
}

TEST_CASE("every way of drawing is drawn again, in nested regions too", "[rule-11]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  auto draws = [](const Tensor& t) {
    return t.sin() * at::rand({4}) + dropout(t) * at::randn({}) +
           t.exp() * at::randperm(4).to(at::kFloat) +
           t.cos() * at::bernoulli(t.sigmoid().detach()) +
           at::rrelu(t, 0.1, 0.9, true) * at::randint(5, {4}).to(at::kFloat) +
           t * at::normal(0.0, 1.0, {4}) + t.tanh() * at::empty({4}).exponential_();
  };
  require_same_grads(
      [&](const Tensor& t) {
        const Tensor inner = draws(draws(t));
        const Tensor factor = at::rand({4});
        return draws(inner * factor);
      },
      [&](const Tensor& t) {
        return remat::checkpoint(
            [&](const Tensor& a) {
              const Tensor inner = remat::checkpoint(
                  [&](const Tensor& b) { return draws(remat::checkpoint(draws, b)); }, a);
              const Tensor factor = at::rand({4});
              return draws(inner * factor);
            },
            t);
      },
      leaf({4}));
}

TEST_CASE("one draw between the pieces of a Gaussian pair is drawn again", "[rule-11]") {
  // A generator keeps the second of two normal numbers for the next draw: part of its state.
  auto odd = [](const Tensor& t) { return t.sin() * at::randn({1}) * at::randn({3}).sum(); };
  auto program = [&](bool drop) {
    return [&, drop](const Tensor& t) {
      Tensor h = t * at::randn({1});
      for (int i = 0; i < 3; ++i) h = drop ? remat::checkpoint(odd, h) : odd(h);
      return h * at::randn({1});
    };
  };
  require_same_grads(program(false), program(true), leaf({5}));
}

TEST_CASE("a region that seeds the generator itself leaves it where plain execution does",
          "[rule-11]") {
  auto f = [](const Tensor& t) {
    const Tensor first = t.sin() * at::rand({4});
    at::manual_seed(99);
    return first.exp() * at::rand({4});
  };
  require_same_grads(f, [&](const Tensor& t) { return remat::checkpoint(f, t); }, leaf({4}));
}

TEST_CASE("draws in forward, between regions and in backward keep their order", "[rule-11]") {
  struct DrawsInBackward : torch::autograd::Function<DrawsInBackward> {
    static Tensor forward(AutogradContext*, const Tensor& x) { return x * 1; }
    static variable_list backward(AutogradContext*, variable_list grads) {
      return {grads[0] * at::rand_like(grads[0])};
    }
  };
  auto block = [](const Tensor& t) { return dropout(DrawsInBackward::apply(dropout(t)).sin()); };
  auto program = [&](bool drop) {
    return [&, drop](const Tensor& t) {
      Tensor h = t;
      for (int i = 0; i < 4; ++i) {
        h = (drop ? remat::checkpoint(block, h) : block(h)) * at::rand({50});
        h = DrawsInBackward::apply(h);
      }
      return h;
    };
  };
  require_same_grads(program(false), program(true), leaf({50}));
}

TEST_CASE("the generator is where it was after a recompute that stops, throws or is read by hand",
          "[rule-11][rule-12]") {
  struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const Seed seed(12);
  const Tensor x = leaf({50000});
  bool throws = false;
  auto f = [&](const Tensor& t) {
    const Tensor h = dropout(t.sin());
    if (throws && remat::is_recomputing()) throw Refused("in the recompute");
    return dropout(h.exp()) * at::rand({50000});
  };
  const Tensor y = remat::checkpoint(f, x);
  const Tensor before = generator_state();
  const Tensors grads = grad_of(y, {x}, {.retain_graph = true});
  CHECK(at::equal(generator_state(), before));
  throws = true;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), Refused);
  CHECK(at::equal(generator_state(), before));
  throws = false;
  at::rand({13});  // the generator moves on in between
  const Tensor moved = generator_state();
  require_bit_equal(grad_of(y, {x}), grads);
  CHECK(at::equal(generator_state(), moved));
}

TEST_CASE("a region that draws nothing copies and allocates no generator state", "[rule-11]") {
  const Tensor x = leaf({1});
  LiveBytes bytes;
  const Tensor before = generator_state();
  const int64_t one_state = bytes.held();
  REQUIRE(one_state > 1000);
  bytes.reset_peak();
  Tensors outputs;
  for (int i = 0; i < 100; ++i) {
    outputs.push_back(remat::checkpoint([](const Tensor& t) { return t.sin(); }, x));
  }
  CHECK(bytes.peak() - one_state == 100 * 4);
  for (const Tensor& y : outputs) grad_of(y, {x});
  CHECK(bytes.peak() - one_state < 1000);
  CHECK(at::equal(generator_state(), before));
}

TEST_CASE("numbers that pass no operator are drawn again", "[rule-11]") {
  // A kernel of the user's own takes them from the default generator.
  auto direct = [](const Tensor& t) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    return t * static_cast<double>(generator.get<at::CPUGeneratorImpl>()->random() % 1000);
  };
  auto f = [&](const Tensor& t) {
    return direct(dropout(direct(t).sin()).exp()).cos() * at::rand({8});
  };
  for (const bool nested : {false, true})
    require_same_grads(
        [&](const Tensor& t) { return f(f(t)); },
        [&](const Tensor& t) {
          if (!nested) return remat::checkpoint(f, remat::checkpoint(f, t));
          return remat::checkpoint(
              [&](const Tensor& a) { return remat::checkpoint(f, remat::checkpoint(f, a)); }, t);
        },
        leaf({8}));
}

TEST_CASE("a seed that changes nothing in forward does not repeat numbers after the recompute",
          "[rule-11]") {
  auto seeded = [](const Tensor& t) {
    at::manual_seed(7);
    return dropout(t) * t;
  };
  auto later = [](const Tensor& t) { return dropout(t) * t; };
  auto program = [&](bool drop) {
    at::manual_seed(7);
    const Tensor x = at::ones({50}).requires_grad_();
    Tensors grads;
    const Tensor y = drop ? remat::checkpoint(seeded, x) : seeded(x);
    const Tensor z = drop ? remat::checkpoint(later, x) : later(x);
    grads.push_back(grad_of(y + z, {x})[0]);
    const Tensor q = drop ? remat::checkpoint(later, x) : later(x);
    grads.push_back(grad_of(q, {x})[0]);
    return grads;
  };
  const Seed seed(22);
  require_bit_equal(program(true), program(false));
}

TEST_CASE("a random operator that throws in a region moves the numbers as in plain execution",
          "[rule-11][rule-12]") {
  auto f = [](const Tensor& t) {
    const Tensor first = dropout(t.sin());
    CHECK_THROWS(at::empty({4}).exponential_(-1));
    CHECK_THROWS(at::multinomial(at::zeros({3}), 2));
    return dropout(first.exp()) * at::rand({50});
  };
  require_same_grads(f, [&](const Tensor& t) { return remat::checkpoint(f, t); }, leaf({50}));
}

TEST_CASE("a generator of the user's own is drawn from as it is", "[rule-11]") {
  const Seed seed(21);
  const at::Generator own = at::detail::createCPUGenerator(5);
  const Tensor x = leaf({50});
  const Tensor before = generator_state();
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) { return t.sin() * at::rand({50}, own, at::kFloat); }, x);
  CHECK(at::equal(generator_state(), before));
  CHECK(at::equal(y, x.sin() * at::rand({50}, at::detail::createCPUGenerator(5), at::kFloat)));
}

TEST_CASE("a gradient inside a region that seeds a registered generator disturbs nothing",
          "[rule-11][rule-6]") {
  const bool past_operators = GENERATE(true, false);
  CAPTURE(past_operators);
  at::Generator own = at::detail::createCPUGenerator(3);
  const auto f = [&](const Tensor& t) {
    double factor = 2;
    Tensor h = t * at::rand({3}, own, at::kFloat);
    {
      std::lock_guard<std::mutex> lock(own.mutex());
      if (past_operators)
        factor = own.get<at::CPUGeneratorImpl>()->random() * 0x1p-32;
      else
        own.set_current_seed(5);
    }
    h = (h * at::rand({3}, own, at::kFloat)).sin() * h * factor;
    h = h * grad_of(h, {t}, {.retain_graph = true})[0];
    return h * at::rand({3}, own, at::kFloat);
  };
  const Tensor x = leaf({3}), start = own.get_state();
  const Tensors plain = grad_of(f(x), {x});
  const Tensor end = own.get_state();
  own.set_state(start);
  const remat::GeneratorGuard guard(own);
  const Tensor y = remat::checkpoint(f, x);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(at::equal(own.get_state(), end));
}

/// While alive, `random_` knows this generator; LibTorch's kernel would take it for its own kind.
class KnowsCountingGenerator {
 public:
  KnowsCountingGenerator() {
    struct Quiet final : c10::WarningHandler {
      void process(const c10::Warning&) override {}  // about the replaced kernel
    } quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    library_.impl("random_", [](Tensor& self, std::optional<at::Generator> generator) -> Tensor& {
      std::lock_guard<std::mutex> lock(generator->mutex());
      auto* impl = dynamic_cast<CountingGenerator*>(generator->unsafeGetGeneratorImpl());
      TORCH_CHECK(impl != nullptr, "random_ was given another generator");
      return self.fill_(++impl->position);
    });
  }

 private:
  torch::Library library_{torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__};
};

TEST_CASE("a CPU generator of a foreign kind is set back and put forward again", "[rule-11]") {
  const KnowsCountingGenerator known;
  const auto impl = c10::make_intrusive<CountingGenerator>();
  const at::Generator foreign(impl);
  const auto drawn = [foreign] { return at::empty({3}).random_(foreign); };
  const auto block = [=](const Tensor& t) {
    const Tensor h = (t * drawn()).sin();
    return h * drawn();
  };
  const Tensor x = leaf({3});
  const Tensors plain = grad_of((x * 1).sin() * 2, {x});
  SECTION("guarded around a region, nested or not") {
    const bool nested = GENERATE(true, false);
    CAPTURE(nested);
    Tensor y;
    {
      const remat::GeneratorGuard guard(foreign);
      y = nested
              ? remat::checkpoint([&](const Tensor& t) { return remat::checkpoint(block, t); }, x)
              : remat::checkpoint(block, x);
    }
    CHECK(impl->position == 2);
    impl->position = 40;
    for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK(impl->position == 40);
  }
  SECTION("guarded inside a region of somebody else") {
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          const remat::GeneratorGuard guard(foreign);
          const Tensor h = remat::checkpoint(block, t);
          return h * block(t);
        },
        x);
    impl->position = 40;
    const Tensors both = grad_of(((x * 1).sin() * 2) * ((x * 3).sin() * 4), {x});
    for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), both);
    CHECK(impl->position == 40);
  }
  SECTION("guarded inside a kept stretch that draws nothing") {
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          const Tensor kept = remat::save_region(
              [&](const Tensor& u) {
                const remat::GeneratorGuard guard(foreign);
                return u.sin();
              },
              t);
          return kept.exp();
        },
        x);
    impl->position = 40;
    require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
    CHECK(impl->position == 40);
  }
  SECTION("drawn from in a kept stretch and set back behind it") {
    Tensor y;
    {
      const remat::GeneratorGuard guard(foreign);
      y = remat::checkpoint(
          [&](const Tensor& t) {
            const Tensor kept = remat::save_region(block, t);
            const Tensor h = kept * drawn();
            impl->position = 0;
            return h.sin();
          },
          x);
    }
    impl->position = 40;
    require_bit_equal(grad_of(y, {x}), grad_of((((x * 1).sin() * 2) * 3).sin(), {x}));
    CHECK(impl->position == 40);
  }
  SECTION("without a guard it moves on") {
    const Tensor y = remat::checkpoint(block, x);
    require_bit_equal(grad_of(y, {x}), grad_of((x * 3).sin() * 4, {x}));
    CHECK(impl->position == 4);
  }
}

}  // namespace
