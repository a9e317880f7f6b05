// Rule 11: random numbers of regions beside other threads that draw.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <future>
#include <thread>

#include "tests/support/functions.h"
#include "tests/support/support.h"

namespace {

TEST_CASE("draws of another thread during a recompute are noticed or undone, never used",
          "[rule-11]") {
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

TEST_CASE("another thread's draws are neither lost nor repeated by a recompute", "[rule-11]") {
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
          "[rule-11]") {
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
  require_bit_equal(grad_of(y, {x}), {y.detach()});
}

TEST_CASE("the recompute of a region that draws nothing leaves other threads' draws alone",
          "[rule-11]") {
  const Seed seed(14);
  RecomputeThatWaits other(/*draws=*/false);
  const Tensor first = at::rand({8});
  other.finish();
  const Tensor second = at::rand({8});
  CHECK_FALSE(at::equal(first, second));
}

TEST_CASE("a region that draws nothing is not disturbed by another thread's draws", "[rule-11]") {
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
          "[rule-11]") {
  std::atomic<bool> stop{false};
  std::atomic<int> right{0};
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
        if (at::equal(grad_of(y, {x})[0], y)) ++right;
      }
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
  stop = true;
  beside.join();
  CHECK(right == 400);
}

void draw_elsewhere(int64_t n) {
  std::thread([n] { at::rand({n}); }).join();
}

TEST_CASE("draws of another thread that end at the same position change no numbers", "[rule-11]") {
  const bool nested = GENERATE(false, true);
  CAPTURE(nested);
  const Tensor x = at::ones({64}).requires_grad_();
  auto f = [](const Tensor& t) {
    if (!remat::is_recomputing()) draw_elsewhere(64);
    const Tensor h = dropout(t);
    if (remat::is_recomputing()) draw_elsewhere(64);
    return h * 1;
  };
  const Tensor y =
      nested ? remat::checkpoint([&](const Tensor& t) { return remat::checkpoint(f, t); }, x)
             : remat::checkpoint(f, x);
  require_bit_equal(grad_of(y, {x}), {y.detach()});
}

TEST_CASE("another thread's draws between a region's own are no part of it", "[rule-11]") {
  const bool in_recompute = GENERATE(false, true);
  CAPTURE(in_recompute);
  const Tensor x = at::ones({30}).requires_grad_();
  auto inner = [&](const Tensor& t) {
    Tensor h = t;
    for (int i = 0; i < 4; ++i) {
      h = dropout(h, 0.1);
      if (remat::is_recomputing() == in_recompute) draw_elsewhere(7 + i);
    }
    return h;
  };
  const Tensor y =
      remat::checkpoint([&](const Tensor& t) { return remat::checkpoint(inner, inner(t)); }, x);
  require_bit_equal(grad_of(y, {x}), {y.detach()});
}

TEST_CASE("a recompute leaves the default generator alone while it runs", "[rule-11]") {
  const Seed seed(15);
  const Tensor x = at::ones({64}).requires_grad_();
  Tensor before, drawn;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = dropout(t);
        if (remat::is_recomputing())
          std::thread([&] {
            before = generator_state();
            drawn = at::rand({5});
          }).join();
        return dropout(h);
      },
      x);
  const Tensor after_forward = generator_state();
  require_bit_equal(grad_of(y, {x}), {y.detach()});
  CHECK(at::equal(before, after_forward));
  set_generator_state(after_forward);
  CHECK(at::equal(at::rand({5}), drawn));
}

TEST_CASE("a thread that the function starts draws other numbers, which is never silent",
          "[rule-11]") {
  const Tensor x = leaf({16});
  const bool saved_early = GENERATE(false, true);
  CAPTURE(saved_early);
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        Tensor mask;
        std::thread([&] { mask = at::rand({16}); }).join();
        return saved_early ? t.exp() * mask : (t + mask).sin().exp();
      },
      x);
  at::rand({3});
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::RecomputeFailed);
  CHECK_THAT(error.what(), contains("and another thread drew random numbers during forward"));
  CHECK_THAT(error.what(), contains("preserve_rng_state = false"));
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("draws on a thread of LibTorch's pool belong to the region that launched it",
          "[rule-11]") {
  const Seed seed(16);
  const Tensor x = at::ones({64}).requires_grad_();
  const Tensor y = remat::checkpoint(
      [](const Tensor& t) {
        std::promise<Tensor> mask;
        at::launch([&] { mask.set_value(at::rand({64}).gt(0.5).to(at::kFloat)); });
        return dropout(t * mask.get_future().get());
      },
      x);
  at::rand({3});
  require_bit_equal(grad_of(y, {x}), {y.detach()});
}

Tensor draw_past_operators(const Tensor& t, at::CPUGeneratorImpl& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex_);
  return t * at::full({8}, static_cast<double>(generator.random() % 97));
}

TEST_CASE("another thread's draw does not explain away one that passed no operator", "[rule-11]") {
  const Tensor x = at::ones({8}).requires_grad_();
  auto* const generator = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  const auto f = [&](const at::Generator& of_the_other) {
    return remat::checkpoint(
        [&, of_the_other](const Tensor& t) {
          const Tensor r = draw_past_operators(t, *generator);
          if (!remat::is_recomputing())
            std::thread([&] { at::rand({3}, of_the_other, at::kFloat); }).join();
          return r.clone();
        },
        x);
  };
  draw_elsewhere(1);
  const Tensor right = f(at::detail::createCPUGenerator(9));
  require_bit_equal(grad_of(right, {x}), {right.detach()});
  const Tensor lost = f(at::detail::getDefaultCPUGenerator());
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(lost, {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::RecomputeFailed);
}

TEST_CASE("an LSTM beside a thread that draws all the time raises no alarm", "[rule-11]") {
  // Its operator saves a workspace of which it never writes all bytes.
  std::atomic<bool> stop{false};
  std::atomic<int> drawn{0};
  std::thread loader([&] {
    while (!stop) at::randperm(100), ++drawn;
  });
  while (drawn == 0) std::this_thread::yield();
  Tensors weights;
  const std::vector<std::vector<int64_t>> shapes{{16, 4}, {16, 4}, {16}, {16}};
  for (const std::vector<int64_t>& sizes : shapes) weights.push_back(leaf(sizes));
  const Tensor x = leaf({5, 2, 4}), h = at::zeros({1, 2, 4});
  const auto f = [&](const Tensor& t) {
    return std::get<0>(at::lstm(t.sin(), {h, h}, weights, true, 1, 0., true, false, false));
  };
  const Tensors plain = grad_of(f(x), {x});
  for (int i = 0; i < 20; ++i) require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), plain);
  stop = true;
  loader.join();
}

struct Nothing final : remat::StateProvider {
  std::any capture() override { return {}; }
  void restore(const std::any&) override {}
};

TEST_CASE("recomputes that use the same providers in opposite orders do not wait for each other",
          "[rule-11][state]") {
  using remat::StateProviderGuard;
  const auto a = std::make_shared<Nothing>(), b = std::make_shared<Nothing>(),
             middle = std::make_shared<Nothing>();
  const Tensor x = leaf({3});
  std::promise<void> holds_middle, may_end;
  const auto inner = [](const Tensor& t) { return t.sin(); };
  Tensors outputs;
  {
    const StateProviderGuard guard(middle);
    outputs.push_back(remat::checkpoint(
        [&](const Tensor& t) {
          if (remat::is_recomputing()) {
            holds_middle.set_value();
            may_end.get_future().wait();
          }
          return inner(t);
        },
        x));
  }
  for (const auto& [first, last] : {std::pair(a, b), std::pair(b, a)}) {
    const StateProviderGuard guard_first(first), guard_middle(middle), guard_last(last);
    outputs.push_back(remat::checkpoint(inner, x));
  }
  std::vector<std::future<Tensors>> grads;
  for (const Tensor& y : outputs) {
    grads.push_back(std::async(std::launch::async, [&x, y] { return grad_of(y, {x}); }));
    if (grads.size() == 1) holds_middle.get_future().wait();
  }
  // Long enough for both to hold what comes before `middle` in their own order.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  may_end.set_value();
  for (auto& each : grads) require_bit_equal(each.get(), grad_of(x.sin(), {x}));
}

}  // namespace
