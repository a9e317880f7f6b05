// Rule 11: a recompute sees forward's random, autocast and grad state, and leaves what surrounds it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>

#include <future>
#include <mutex>
#include <thread>

#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor dropout(const Tensor& t, double p = 0.5) { return at::dropout(t, p, /*train=*/true); }

/// autocast on the CPU, as torch.autocast opens it.
class Autocast {
 public:
  explicit Autocast(bool enabled = true, at::ScalarType dtype = at::kBFloat16, bool cache = true)
      : enabled_(at::autocast::is_autocast_enabled(at::kCPU)),
        cache_(at::autocast::is_autocast_cache_enabled()),
        dtype_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, enabled);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, enabled_);
    at::autocast::set_autocast_dtype(at::kCPU, dtype_);
    at::autocast::set_autocast_cache_enabled(cache_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool enabled_, cache_;
  at::ScalarType dtype_;
};

/// What a thread has set, to be compared before and after.
struct Ambient {
  bool grad_mode, inference_mode, forward_ad, autocast, autocast_cache, has_hooks;
  at::ScalarType autocast_dtype;
  bool operator==(const Ambient&) const = default;
};
Ambient ambient() {
  return {at::GradMode::is_enabled(),
          c10::InferenceMode::is_enabled(),
          c10::AutogradState::get_tls_state().get_fw_grad_mode(),
          at::autocast::is_autocast_enabled(at::kCPU),
          at::autocast::is_autocast_cache_enabled(),
          torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks() !=
              nullptr,
          at::autocast::get_autocast_dtype(at::kCPU)};
}

/// The gradient, taken in another thread, where nothing is set.
Tensors grad_in_thread(const Tensor& y, const Tensors& inputs, GradOptions options = {}) {
  Tensors grads;
  std::string error;
  std::thread([&] {
    try {
      grads = grad_of(y, inputs, options);
    } catch (const std::exception& e) {
      error = e.what();
    }
  }).join();
  if (!error.empty()) FAIL("in a thread: " << error);
  return grads;
}

// ---- random numbers --------------------------------------------------------------------------------

TEST_CASE("a region draws the same dropout in its recompute", "[rule-11][RNG-01][RNG-07]") {
  auto first = [](const Tensor& t) { return dropout(t); };
  auto second = [](const Tensor& t) { return dropout(t.sin()); };
  for (int repeat = 0; repeat < 5; ++repeat) {
    Calls calls;
    require_same_grads([&](const Tensor& t) { return second(first(t)); },
                       [&](const Tensor& t) {
                         return remat::checkpoint(counted(calls, second), first(t));
                       },
                       leaf({20000}));
    CHECK(calls.count() == 2);
  }
  require_same_grads([&](const Tensor& t) { return dropout(t).norm(); },
                     [&](const Tensor& t) { return remat::checkpoint(first, t).norm(); },
                     leaf({3, 3}));
}

TEST_CASE("random factors and products equal plain", "[rule-11][RNG-04][RNG-09]") {
  const Tensor parameter = leaf({100, 100});
  const Parameters parameters{{parameter}};
  auto noise = [&](const Tensor& t) { return t.mm(parameter.mm(at::randn({100, 100}))); };
  require_same_grads(parameters, noise,
                     [&](const Tensor& t) { return remat::checkpoint(noise, t); },
                     at::randn({20, 100}));

  const Tensor x = leaf({10}), y = leaf({10});
  auto f = [](const Tensor& a, const Tensor& b) { return at::sigmoid(at::rand_like(a) * b) * a; };
  require_same_grads([&](const Tensor& a, const Tensor& b) { return f(f(a, b).sin(), b); },
                     [&](const Tensor& a, const Tensor& b) {
                       return remat::checkpoint(f, remat::checkpoint(f, a, b).sin(), b);
                     },
                     x, y);
}

TEST_CASE("without preserve_rng_state a region draws anew and moves the generator",
          "[rule-11][RNG-03]") {
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
           t.exp() * at::randperm(4).to(at::kFloat) + t.cos() * at::bernoulli(t.sigmoid().detach()) +
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

TEST_CASE("a region that draws nothing copies and allocates no generator state",
          "[rule-11][GUA-16]") {
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

TEST_CASE("draws of another thread during a recompute are noticed or undone, never used",
          "[rule-11][GUA-26]") {
  // Ones in, so the gradient of two dropouts must be the output itself.
  const int disturbed = GENERATE(1, 1000000);
  CAPTURE(disturbed);
  const Tensor x = at::ones({400}).requires_grad_();
  int times = 0;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = dropout(t, 0.3);
        if (remat::is_recomputing() && times++ < disturbed) {
          std::thread([] { at::rand({37}); }).join();
        }
        return dropout(h, 0.3);
      },
      x);
  Tensors grads;
  try {
    grads = grad_of(y, {x});
  } catch (const remat::CheckpointError& e) {
    CHECK(e.kind() == remat::CheckpointError::Kind::RecomputeFailed);
  }
  if (!grads.empty()) require_bit_equal(grads, {y.detach()});
  CHECK(times >= 1);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("another thread's draws are neither lost nor repeated by a recompute",
          "[rule-11][GUA-26]") {
  const Seed seed(13);
  const Tensor x = at::ones({100}).requires_grad_();
  const Tensor y = remat::checkpoint([](const Tensor& t) { return dropout(t); }, x);
  const Tensor before = generator_state();
  grad_of(y, {x});
  Tensor drawn;
  std::thread([&] { drawn = at::rand({5}); }).join();
  set_generator_state(before);
  CHECK(at::equal(at::rand({5}), drawn));
}

/// A recompute in another thread that has begun and waits to be let go.
class RecomputeThatWaits {
 public:
  explicit RecomputeThatWaits(bool draws)
      : y_(remat::checkpoint(
            [this, draws](const Tensor& t) {
              const Tensor h = draws ? dropout(t) : t.sin();
              if (remat::is_recomputing() && !has_begun_.exchange(true)) {
                begun_.set_value();
                let_go_.get_future().wait();
              }
              return h.exp();
            },
            x_)),
        thread_([this] {
          try {
            grad_of(y_, {x_});
          } catch (const remat::CheckpointError&) {
            // the draws of this thread may have disturbed it
          }
        }) {
    begun_.get_future().wait();
  }
  void finish() {
    let_go_.set_value();
    thread_.join();
  }

 private:
  const Tensor x_ = leaf({8});
  std::promise<void> begun_, let_go_;
  std::atomic<bool> has_begun_{false};
  Tensor y_;
  std::thread thread_;
};

TEST_CASE("a recompute that ends while another region draws does not make its numbers unknown",
          "[rule-11][GUA-26]") {
  const bool draws = GENERATE(true, false);
  CAPTURE(draws);
  const Tensor x = at::ones({400}).requires_grad_();
  RecomputeThatWaits other(draws);
  Tensor y;
  y = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = dropout(t, 0.3);
        if (!remat::is_recomputing()) other.finish();
        return h * 1;
      },
      x);
  Tensors grads;
  try {
    grads = grad_of(y, {x});
  } catch (const remat::CheckpointError& e) {
    CHECK(e.kind() == remat::CheckpointError::Kind::RecomputeFailed);
  }
  if (!grads.empty()) require_bit_equal(grads, {y.detach()});
}

TEST_CASE("the recompute of a region that draws nothing leaves other threads' draws alone",
          "[rule-11][GUA-26]") {
  const Seed seed(14);
  RecomputeThatWaits other(/*draws=*/false);
  const Tensor first = at::rand({8});
  other.finish();
  const Tensor second = at::rand({8});
  CHECK_FALSE(at::equal(first, second));
}

TEST_CASE("a region that draws nothing is not disturbed by another thread's draws",
          "[rule-11][GUA-26]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({100});
  Counted done;
  const Tensor y = remat::checkpoint(
      {.early_stop = early_stop},
      [](const Tensor& t) {
        const Tensor h = t.sin();
        std::thread([] { at::rand({37}); }).join();
        return h.exp();
      },
      x);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
  CHECK(done.now().recomputes == 1);
}

TEST_CASE("threads that train with dropout beside a thread that draws get their own masks",
          "[rule-11][GUA-26]") {
  std::atomic<bool> stop{false};
  std::atomic<int> right{0}, refused{0}, wrong{0};
  std::thread beside([&] {
    while (!stop) at::rand({11});
  });
  std::vector<std::thread> trainers;
  for (int i = 0; i < 2; ++i) {
    trainers.emplace_back([&] {
      for (int step = 0; step < 200; ++step) {
        const Tensor x = at::ones({64}).requires_grad_();
        const Tensor y = remat::checkpoint(
            [](const Tensor& t) { return dropout(dropout(dropout(t, 0.2), 0.2), 0.2); }, x);
        try {
          const Tensor g = grad_of(y, {x})[0];
          ++(at::equal(g, y) ? right : wrong);
        } catch (const remat::CheckpointError&) {
          ++refused;
        }
      }
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  stop = true;
  beside.join();
  CHECK(wrong == 0);
  CHECK(right + refused == 400);
  CHECK(right > 0);
}

// ---- autocast ---------------------------------------------------------------------------------------

TEST_CASE("a recompute runs under forward's autocast, whatever surrounds the backward",
          "[rule-11]") {
  const bool in_forward = GENERATE(true, false);
  const bool in_backward = GENERATE(true, false);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(in_forward, in_backward, early_stop);
  const Tensor w = leaf({8, 8});
  const Tensor x = leaf({8, 8});
  std::vector<at::ScalarType> dtypes;
  auto f = [&](const Tensor& t) {
    const Tensor h = t.mm(w);
    dtypes.push_back(h.scalar_type());
    return h.sin().mm(w).to(at::kFloat);
  };
  auto run = [&](bool drop) {
    Tensor y;
    {
      const Autocast forward(in_forward);
      y = drop ? remat::checkpoint({.early_stop = early_stop}, f, x) : f(x);
    }
    const Autocast backward(in_backward, at::kHalf, false);
    const Ambient before = ambient();
    const Tensors grads = grad_of(y, {x, w});
    CHECK(ambient() == before);
    return grads;
  };
  const Tensors plain = run(false);
  dtypes.clear();
  require_bit_equal(run(true), plain);
  const at::ScalarType expected = in_forward ? at::kBFloat16 : at::kFloat;
  CHECK(dtypes == std::vector<at::ScalarType>{expected, expected});
}

TEST_CASE("autocast changed inside the region, its dtype and its cache flag are recomputed alike",
          "[rule-11]") {
  const bool cache = GENERATE(true, false);
  CAPTURE(cache);
  const Tensor w = leaf({8, 8}), x = leaf({8, 8});
  std::vector<std::tuple<bool, bool, at::ScalarType>> seen;
  auto note = [&] {
    seen.emplace_back(at::autocast::is_autocast_enabled(at::kCPU),
                      at::autocast::is_autocast_cache_enabled(),
                      at::autocast::get_autocast_dtype(at::kCPU));
  };
  auto f = [&](const Tensor& t) {
    note();
    Tensor h = t.mm(w);
    {
      const Autocast off(false);
      note();
      h = h.to(at::kFloat).mm(w);
    }
    note();
    return h.mm(w).to(at::kFloat).sin();
  };
  const Autocast on(true, at::kHalf, cache);
  const Tensors plain = grad_in_thread(f(x), {x, w});
  seen.clear();
  const Tensor y = remat::checkpoint(f, x);
  require_bit_equal(grad_in_thread(y, {x, w}), plain);
  REQUIRE(seen.size() == 6);
  for (size_t i = 0; i < 3; ++i) CHECK(seen[i] == seen[i + 3]);
  CHECK(seen[3] == std::tuple(true, cache, at::kHalf));
}

TEST_CASE("sibling regions that share a weight under autocast do not mismatch",
          "[rule-11][rule-10][GUA-08]") {
  const bool cache = GENERATE(true, false);
  const bool backward_inside = GENERATE(true, false);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(cache, backward_inside, early_stop);
  const Tensor w = leaf({8, 8}), bias = leaf({8}), x = leaf({8, 8});
  auto layer = [&](const Tensor& t) { return at::linear(t, w, bias).sin(); };
  auto run = [&](bool drop) {
    auto region = [&](const Tensor& t) {
      return drop ? remat::checkpoint({.early_stop = early_stop}, layer, t) : layer(t);
    };
    auto autocast = std::make_unique<Autocast>(true, at::kBFloat16, cache);
    const Tensor a = region(x);
    const Tensor b = region(a);
    const Tensor c = layer(b);  // plain, with the weight cast inside a region
    const Tensor d = region(c * 2);
    if (!backward_inside) autocast.reset();
    Tensors grads = grad_of(d.to(at::kFloat), {x, w, bias}, {.retain_graph = true});
    const Tensors again = grad_of(d.to(at::kFloat), {x, w, bias});
    require_bit_equal(again, grads);
    return grads;
  };
  const Tensors plain = run(false);
  Counted done;
  require_bit_equal(run(true), plain);
  CHECK(done.now().recomputes == 6);
}

TEST_CASE("a weight changed between the passes raises under autocast too", "[rule-11][GUA-01]") {
  const bool cache = GENERATE(true, false);
  CAPTURE(cache);
  Tensor w = leaf({8, 8});
  const Tensor x = leaf({8, 8});
  Tensor y;
  {
    const Autocast on(true, at::kBFloat16, cache);
    y = remat::checkpoint([&](const Tensor& t) { return t.mm(w).sin(); }, x);
  }
  {
    at::NoGradGuard no_grad;
    w.add_(1);
  }
  const auto error =
      error_of<remat::CheckpointError>([&] { grad_of(y.to(at::kFloat), {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::CaptureChanged);
}

TEST_CASE("a recompute neither fills nor clears the caller's autocast cache", "[rule-11]") {
  const Tensor w = leaf({8, 8}), x = leaf({8, 8});
  Tensor first;
  {
    const Autocast on;
    first = remat::checkpoint([&](const Tensor& t) { return t.mm(w).sin(); }, x);
  }
  const Autocast on;
  // The cached cast of w has one node; a cast after the backward must be that same one.
  auto cast_node = [&] { return x.mm(w).grad_fn()->next_edge(1).function.get(); };
  const auto* before = cast_node();
  const Tensor keep = x.mm(w);
  REQUIRE(cast_node() == before);
  grad_of(first.to(at::kFloat), {x, w});
  CHECK(cast_node() == before);
}

// ---- grad mode, inference mode, hooks ------------------------------------------------------------------

TEST_CASE("a recompute sees grad mode on, whatever the thread that runs backward has set",
          "[rule-11][GUA-07]") {
  const Tensor x = leaf({4});
  std::vector<Ambient> seen;
  auto f = [&](const Tensor& t) {
    seen.push_back(ambient());
    return t.sin().exp();
  };
  const Tensors plain = grad_of(x.sin().exp(), {x});
  const Tensor y = remat::checkpoint(f, x);
  Tensors grads;
  bool is_unchanged = false;
  std::thread([&] {
    const Autocast autocast(true, at::kHalf);
    at::NoGradGuard no_grad;
    const Ambient before = ambient();
    grads = grad_of(y, {x}, {.retain_graph = true});
    is_unchanged = ambient() == before;
  }).join();
  require_bit_equal(grads, plain);
  CHECK(is_unchanged);
  {
    c10::AutoFwGradMode forward_ad(false);
    const Ambient before = ambient();
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK(ambient() == before);
  }
  REQUIRE(seen.size() == 3);
  for (const Ambient& each : seen) {
    CHECK(each.grad_mode);
    CHECK_FALSE(each.inference_mode);
    CHECK_FALSE(each.autocast);
    CHECK(each.has_hooks);
  }
}

TEST_CASE("parts of a region without grad are recomputed without grad", "[rule-11]") {
  const Tensor x = leaf({4});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) {
    Tensor scale;
    {
      at::NoGradGuard no_grad;
      scale = t.exp().sum();
      const at::AutoGradMode grad(true);
      scale = scale * 2 + (t * 0).sum().detach();
    }
    return (t * scale.detach()).sin();
  });
  require_same_grads(f, [&](const Tensor& t) { return remat::checkpoint(f, t); }, x);
  CHECK(calls.count() == 3);
}

TEST_CASE("in inference mode a region runs plainly", "[rule-11][NEW-10]") {
  const Tensor x = leaf({4});
  Counted done;
  Calls calls;
  {
    const c10::InferenceMode inference;
    const Tensor y = remat::checkpoint(
        counted(calls, [](const Tensor& t) { return t.sin(); }), x);
    CHECK(y.is_inference());
  }
  {
    at::NoGradGuard no_grad;
    const Tensor y = remat::checkpoint(counted(calls,
                                               [](const Tensor& t) {
                                                 const at::AutoGradMode grad(true);
                                                 return t.sin();
                                               }),
                                       x);
    CHECK(y.requires_grad());
    const at::AutoGradMode grad(true);
    require_bit_equal(grad_of(y, {x}), grad_of(x.sin(), {x}));
  }
  CHECK(done.now().frames_created == 0);
  CHECK(calls.count() == 2);
}

/// The identity; its backward notes the thread's state before and after it reads what it saved.
std::vector<std::pair<Ambient, Ambient>> around_reads;
struct NotesState : torch::autograd::Function<NotesState> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    ctx->save_for_backward({x});
    return x * 1;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Ambient before = ambient();
    const Tensor x = ctx->get_saved_variables()[0];
    around_reads.emplace_back(before, ambient());
    return {grads[0] + x * 0};
  }
};

TEST_CASE("a recompute leaves hooks, grad mode and autocast of the backward's thread alone",
          "[rule-11][NEW-05]") {
  const bool early_stop = GENERATE(true, false);
  const bool create_graph = GENERATE(true, false);
  const bool hooks_open = GENERATE(true, false);
  const bool throws = GENERATE(true, false);
  CAPTURE(early_stop, create_graph, hooks_open, throws);
  around_reads.clear();
  const Tensor x = leaf({50000});
  Tensor y;
  bool armed = false;
  {
    const Autocast on;
    y = remat::checkpoint({.early_stop = early_stop},
                          [&](const Tensor& t) {
                            const Tensor h = NotesState::apply(t.sin());
                            if (armed) throw std::runtime_error("armed");
                            const at::AutoGradMode again(true);
                            return h.exp().exp();
                          },
                          x);
  }
  std::optional<remat::SavedTensorHooksGuard> hooks;
  if (hooks_open) {
    hooks.emplace([](const Tensor& t) { return t; }, [](const Tensor& t) { return t; });
  }
  const Ambient before = ambient();
  if (throws) {
    armed = true;
    CHECK_THROWS_WITH(grad_of(y, {x}, {.retain_graph = true}), contains("armed"));
    CHECK(ambient() == before);
    armed = false;
  }
  grad_of(y, {x}, {.retain_graph = true, .create_graph = create_graph});
  CHECK(ambient() == before);
  REQUIRE(around_reads.size() == 1);
  CHECK(around_reads[0].first == around_reads[0].second);
  CHECK(around_reads[0].first.grad_mode == create_graph);
  CHECK(around_reads[0].first.has_hooks == hooks_open);
}

}  // namespace
