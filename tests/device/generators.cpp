// Threads that draw from the generators of devices (Rule 11), on the stand-in of stand_in.h.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <thread>

#include "tests/device/stand_in.h"
#include "tests/support/far_tensors.h"
#include "tests/support/meeting.h"
#include "tests/support/support.h"

using remat::checkpoint;

TEST_CASE("threads with a device each draw again what they drew, and disturb nobody",
          "[device][rule-11]") {
  for (int i = 0; i < stand_in::num_devices; ++i) stand_in::draw(i);  // both are in use
  std::vector<std::thread> threads;
  std::atomic<int> num_right{0};
  constexpr int num_steps = 200;
  for (int device = 0; device < stand_in::num_devices; ++device)
    threads.emplace_back([&, device] {
      for (int step = 0; step < num_steps; ++step) {
        std::vector<double> drawn;
        const auto f = [&](const Tensor& t) {
          drawn.push_back(stand_in::draw(device));
          const Tensor between = (t * drawn.back()).sin();
          drawn.push_back(stand_in::draw(device));
          return (between * drawn.back()).sin();
        };
        const Tensor x = far_leaf(at::ones({3}), device);
        const uint64_t start = stand_in::position(device);
        const Tensor y = checkpoint({.early_stop = false}, f, x);
        grad_of(y, {x});
        const bool is_right = drawn.size() == 4 && drawn[2] == drawn[0] && drawn[3] == drawn[1] &&
                              stand_in::position(device) == start + 2;
        num_right += is_right ? 1 : 0;
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(num_right == stand_in::num_devices * num_steps);
}

TEST_CASE("what another thread draws on its device while save_region runs is passed over by nobody",
          "[device][rule-11][rule-15]") {
  for (int i = 0; i < stand_in::num_devices; ++i) stand_in::draw(i);  // both are in use
  std::vector<double> others;  // of the thread that owns device 1
  enum class Turn { Main, Other, End };
  std::atomic<Turn> turn{Turn::Other};
  const auto await = [&turn](Turn mine) {
    while (turn != mine && turn != Turn::End) std::this_thread::yield();
    return turn == mine;
  };
  std::thread other([&] {
    const Tensor x = far_leaf(at::ones({3}), 1);
    const Tensor y = checkpoint([](const Tensor& t) { return t.sin(); }, x);  // claims it
    turn = Turn::Main;
    while (await(Turn::Other)) {
      others.push_back(stand_in::draw(1));
      turn = Turn::Main;
    }
  });
  const auto let_other_draw = [&] {
    turn = Turn::Other;
    await(Turn::Main);
  };
  std::vector<double> drawn;
  std::thread own([&] {  // has claimed no other device
    await(Turn::Main);
    const Tensor x = far_leaf(at::ones({3}), 0);
    const Tensor y = checkpoint(
        {.early_stop = false},
        [&](const Tensor& t) {
          const auto draw = [&](const Tensor& t) {
            drawn.push_back(stand_in::draw(0));
            let_other_draw();
            return t * drawn.back();
          };
          const Tensor saved = remat::save_region(draw, t.sin());
          let_other_draw();
          drawn.push_back(stand_in::draw(0));
          return (saved * drawn.back()).sin();
        },
        x);
    let_other_draw();
    grad_of(y, {x});
  });
  own.join();
  turn = Turn::End;
  other.join();
  REQUIRE(drawn.size() == 3);  // save_region draws once
  CHECK(drawn[2] == drawn[1]);
  REQUIRE(others.size() == 4);
  for (std::size_t i = 1; i < others.size(); ++i)
    CHECK(std::count(others.begin(), others.end(), others[i]) == 1);
}

TEST_CASE("recomputes of several threads take turns at a device's generator", "[device][rule-11]") {
  constexpr int num_threads = 2;
  struct Program {
    Tensor x, y;
    std::vector<double> drawn;
  };
  std::array<Program, num_threads> programs;
  Meeting meeting(num_threads, std::chrono::milliseconds(300));
  std::atomic<bool> is_forward = true, have_met = false;
  for (Program& each : programs) {
    each.x = leaf({3});
    // The tensor that backward reads first is on the CPU, so the recompute runs on the calling
    // thread.
    const auto f = [&](const Tensor& t) {
      each.drawn.push_back(stand_in::draw(0));
      const Tensor between = (t.to(stand_in::device(0)) * each.drawn.back()).sin().to(at::kCPU);
      if (!is_forward && meeting.wait()) have_met = true;
      each.drawn.push_back(stand_in::draw(0));
      return (between * each.drawn.back()).sin();
    };
    each.y = checkpoint({.early_stop = false}, f, each.x);
  }
  is_forward = false;
  const uint64_t position = stand_in::position(0);
  std::vector<std::thread> threads;
  for (Program& each : programs) threads.emplace_back([&each] { grad_of(each.y, {each.x}); });
  for (std::thread& each : threads) each.join();
  for (const Program& each : programs) {
    REQUIRE(each.drawn.size() == 4);
    CHECK(each.drawn[2] == each.drawn[0]);
    CHECK(each.drawn[3] == each.drawn[1]);
  }
  CHECK(!have_met);
  CHECK(stand_in::position(0) == position);
}

TEST_CASE("a recompute inside another one, on the device's thread, need not wait for it",
          "[device][rule-11]") {
  std::vector<std::vector<double>> runs;  // numbers drawn by each run of the region itself
  std::vector<double> inner;
  const auto f = [&](const Tensor& t) {
    std::vector<double> drawn{stand_in::draw(0)};
    const Tensor y = t.to(stand_in::device(0)) * drawn[0];
    const auto block = [&](const Tensor& u) {
      inner.push_back(stand_in::draw(0));
      return (u * inner.back()).sin();
    };
    const Tensor z = checkpoint(block, y);
    const Tensor slope = torch::autograd::grad({z.sum()}, {y}, {}, /*retain_graph=*/true)[0];
    drawn.push_back(stand_in::draw(0));
    const Tensor result = (y * slope * drawn[1]).sin().to(at::kCPU) * t;
    runs.push_back(std::move(drawn));
    return result;
  };
  const Tensor x = leaf({3});
  const auto start = std::chrono::steady_clock::now();
  const Tensor y = checkpoint({.early_stop = false}, f, x);
  grad_of(y, {x});
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  REQUIRE(runs.size() >= 2);
  for (const auto& each : runs) CHECK(each == runs[0]);
  REQUIRE(inner.size() >= 4);
  for (const double each : inner) CHECK(each == inner[0]);
}

TEST_CASE("a provider is restored inside a recompute that has restored it, on the device's thread",
          "[device][rule-11]") {
  struct Number final : remat::StateProvider {
    std::atomic<int> value = 1;
    std::any capture() override { return value.load(); }
    void restore(const std::any& state) override { value = std::any_cast<int>(state); }
  };
  const auto number = std::make_shared<Number>();
  std::vector<int> seen;
  const auto f = [&](const Tensor& t) {
    const Tensor y = t.to(stand_in::device(0)) * number->value.load();
    const auto block = [&](const Tensor& u) {
      seen.push_back(number->value);
      return (u * number->value.load()).sin();
    };
    const Tensor z = checkpoint(block, y);
    const Tensor slope = torch::autograd::grad({z.sum()}, {y}, {}, /*retain_graph=*/true)[0];
    return (y * slope).sin().to(at::kCPU) * t;
  };
  const Tensor x = leaf({3});
  Tensor y;
  {
    const remat::StateProviderGuard guard(number);
    y = checkpoint({.early_stop = false}, f, x);
  }
  number->value = 99;
  const auto start = std::chrono::steady_clock::now();
  grad_of(y, {x});
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CHECK(number->value == 99);
  REQUIRE(seen.size() >= 4);
  for (const int each : seen) CHECK(each == 1);
}

TEST_CASE("a region draws on a device on which none of its tensors is", "[device][rule-11]") {
  for (int i = 0; i < stand_in::num_devices; ++i) stand_in::draw(i);  // both are in use
  const bool keeps = GENERATE(false, true);
  CAPTURE(keeps);
  std::vector<double> drawn;
  const auto f = [&](const Tensor& t) {
    // Autograd is not interested in the added numbers and their device.
    const auto add = [&](const Tensor& u) {
      const Tensor noise = at::full({3}, stand_in::draw(1)).to(stand_in::device(1));
      return (u.to(stand_in::device(1)) + noise).to(stand_in::device(0));
    };
    const Tensor noisy = keeps ? remat::save_region(add, t) : add(t);
    drawn.push_back(stand_in::draw(1));
    return ((noisy.to(stand_in::device(1)) * drawn.back()).to(stand_in::device(0))).sin();
  };
  const Tensor x = far_leaf(at::ones({3}), 0);
  const Tensor y = checkpoint({.early_stop = false}, f, x);
  for (int i = 0; i < 3; ++i) stand_in::draw(1);
  const uint64_t position = stand_in::position(1);
  grad_of(y, {x});
  REQUIRE(drawn.size() == 2);
  CHECK(drawn[1] == drawn[0]);
  CHECK(stand_in::position(1) == position);
}

TEST_CASE("a recompute that waits for a backward lets others have its generator",
          "[device][rule-11]") {
  stand_in::draw(0);
  std::atomic<bool> is_backward = false, has_drawn = false;
  struct Drawn {
    std::deque<std::vector<double>> runs{};
    void check() const {
      REQUIRE(runs.size() >= 2);
      REQUIRE(runs.back().size() == 2);
      for (const auto& each : runs)  // a recompute for which forward waited was stopped early
        for (std::size_t i = 0; i < each.size(); ++i) CHECK(each[i] == runs.front()[i]);
    }
    std::vector<double>& begin() { return runs.emplace_back(); }
  } first, second;
  // Runs on the CPU's thread; its own backward needs the device's.
  const auto f = [&](const Tensor& t) {
    std::vector<double>& drawn = first.begin();
    const Tensor u = t.to(stand_in::device(0)) * drawn.emplace_back(stand_in::draw(0));
    if (is_backward) {
      has_drawn = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    const Tensor slope = torch::autograd::grad({u.sin().sum()}, {u}, {}, true)[0];
    return (u * slope * drawn.emplace_back(stand_in::draw(0))).to(at::kCPU) * t;
  };
  // Runs on the device's thread meanwhile.
  const auto g = [&](const Tensor& t) {
    std::vector<double>& drawn = second.begin();
    const Tensor u = (t * drawn.emplace_back(stand_in::draw(0))).sin();
    std::this_thread::sleep_for(std::chrono::milliseconds(is_backward ? 100 : 0));
    return (u * drawn.emplace_back(stand_in::draw(0))).sin();
  };
  const Tensor x = leaf({3}), z = far_leaf(at::ones({3}), 0);
  const Tensor a = checkpoint({.early_stop = false}, f, x);
  const Tensor b = checkpoint({.early_stop = false}, g, z);
  b.register_hook([&](const Tensor&) {
    for (int i = 0; i < 1000 && !has_drawn; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  is_backward = true;
  const uint64_t position = stand_in::position(0);
  const auto start = std::chrono::steady_clock::now();
  grad_of(a + b.to(at::kCPU), {x, z});
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
  CHECK(stand_in::position(0) == position);
  second.check();
  first.check();
}

TEST_CASE("recomputes of one thread need not wait for each other", "[device][rule-11]") {
  for (int i = 0; i < stand_in::num_devices; ++i) stand_in::draw(i);
  // While the first waits for the other device, its thread starts the second.
  std::atomic<bool> is_backward = false;
  const auto f = [&](const Tensor& t) {
    const Tensor u = t * stand_in::draw(0);
    const Tensor w = u.to(stand_in::device(1)).sin();
    w.register_hook([&](const Tensor&) {
      if (is_backward) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    });
    const Tensor slope = torch::autograd::grad({w.exp().sum()}, {u}, {}, true)[0];
    return (u * slope) * t;
  };
  const auto g = [](const Tensor& t) { return (t * stand_in::draw(0)).sin(); };
  const Tensor x = far_leaf(at::ones({3}), 0), z = far_leaf(at::ones({3}), 0);
  const Tensor b = checkpoint(g, z), a = checkpoint({.early_stop = false}, f, x);
  is_backward = true;
  const auto start = std::chrono::steady_clock::now();
  grad_of(a + b, {x, z});
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

TEST_CASE("a region does not wait for gradients that it keeps or was given", "[device]") {
  const Tensor x = far_leaf(at::ones({3, 3}), 0), v = at::ones({3, 3}).to(stand_in::device(0));
  // The cost of regions beside their functions, which take longer under a sanitizer, say.
  constexpr int num_regions = 50;
  const auto seconds = [&](const remat::CheckpointOptions& options, const auto& f) {
    const auto timed = [&](const auto& run) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < num_regions; ++i) run();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    const double plain = timed([&] { f(x); });
    return timed([&] { checkpoint(options, f, x); }) - plain;
  };
  constexpr double in_vain = 0.5 * num_regions * 0.02;
  const auto slope = [&](const Tensor& t) {
    return torch::autograd::grad({t.mm(t)}, {t}, {v}, /*retain_graph=*/true)[0];
  };
  const auto squared = [&](const Tensor& t) {
    const Tensor g = slope(t);
    return (g * g * t).sin();
  };
  CHECK(seconds({}, squared) < in_vain);
  CHECK(seconds({.policy = remat::save_ops({"aten::mm", "aten::add", "aten::mul"})}, squared) <
        in_vain);
  CHECK(seconds({}, [&](const Tensor& t) {
          const Tensor g = remat::pin(slope(t));
          return (g * g * t).sin();
        }) < in_vain);
  CHECK(seconds({}, [&](const Tensor& t) {
          return (t * torch::autograd::grad({t + 1}, {t}, {v}, true)[0]).sin();
        }) < in_vain);
}
