// Rule 7: one recompute per frame and task; tasks and frames recompute in parallel, without locks.

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/support/meeting.h"
#include "tests/support/support.h"

namespace {

/// Runs `f(i)` in `count` threads; an exception in one fails the test.
template <class F>
void in_threads(int count, F f) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::vector<std::string> errors;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        f(i);
      } catch (const std::exception& e) {
        std::lock_guard<std::mutex> lock(mutex);
        errors.push_back(e.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) FAIL_CHECK("in a thread: " << error);
}

// ---- one per frame and task -------------------------------------------------------------------

TEST_CASE("one recompute fills all slots of a region, however many", "[rule-7]") {
  const int count = GENERATE(1, 2, 1000);
  const Tensor x = leaf({2});
  Calls calls;
  Counted done;
  const Tensor y = remat::checkpoint(counted(calls,
                                             [count](Tensor t) {
                                               for (int i = 0; i < count; ++i) t = t.sin();
                                               return t;
                                             }),
                                     x);
  Tensor plain = x;
  for (int i = 0; i < count; ++i) plain = plain.sin();
  require_bit_equal(grad_of(y, {x}), grad_of(plain, {x}));
  CHECK(done.now().tensors_dropped == count);
  CHECK(done.now().tensors_recomputed == count);
  CHECK(done.now().recomputes == 1);
  CHECK(calls.count() == 2);
}

TEST_CASE("one recompute serves all outputs that a backward starts from", "[rule-7]") {
  const Tensor x = leaf({2}), z = leaf({2});
  Calls calls;
  auto f = [](const Tensor& a, const Tensor& b) {
    return Tensors{a.sin(), b.exp(), a * b, (a + b).tanh()};
  };
  const Tensors ones(4, at::ones({2}));
  const Tensors plain = torch::autograd::grad(f(x, z), {x, z}, ones);
  const Tensors outputs = remat::checkpoint(counted(calls, f), x, z);
  require_bit_equal(torch::autograd::grad(outputs, {x, z}, ones), plain);
  CHECK(calls.count() == 2);
}

TEST_CASE("each backward recomputes each region of a chain once", "[rule-7]") {
  const Tensor x = leaf({2});
  std::vector<Calls> calls(10);
  Tensor y = x;
  for (Calls& each : calls) {
    y = remat::checkpoint(counted(each, [](const Tensor& t) { return t.sin() * t; }), y);
  }
  Counted done;
  for (int i = 1; i <= 3; ++i) {
    grad_of(y, {x}, {.retain_graph = true});
    for (const Calls& each : calls) CHECK(each.count() == 1 + i);
    CHECK(done.now().recomputes == 10 * i);
  }
}

// ---- threads

TEST_CASE("concurrent gradients over one retained region recompute once each, bit-equal",
          "[rule-7]") {
  constexpr int threads = 4, times = 20;
  const Tensor x = leaf({16, 16});
  const std::unordered_map<std::string, Tensor> more{{"a", leaf({16, 16})}, {"b", leaf({16, 16})}};
  Calls calls;
  auto f = [](const Tensor& t, const std::unordered_map<std::string, Tensor>& named) {
    return t.mm(named.at("a")).sin().mm(named.at("b")).exp() * t;
  };
  const Tensors plain = grad_of(f(x, more), {x});
  Counted done;
  const Tensor y = remat::checkpoint(counted(calls, f), x, more);
  std::vector<Tensors> results(threads * times);
  in_threads(threads, [&](int i) {
    for (int k = 0; k < times; ++k) {
      results[static_cast<size_t>(i * times + k)] = grad_of(y, {x}, {.retain_graph = true});
    }
  });
  for (const Tensors& result : results) require_bit_equal(result, plain);
  CHECK(done.now().recomputes == threads * times);
  CHECK(calls.count() == 1 + threads * times);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("concurrent gradients over nested regions recompute each once per backward", "[rule-7]") {
  constexpr int threads = 4, times = 10;
  const Tensor x = leaf({8, 8});
  auto inner = [](const Tensor& t) { return t.sin().exp(); };
  auto f = [&](const Tensor& t) {
    return remat::checkpoint(inner, remat::checkpoint(inner, t.cos())).tanh();
  };
  const Tensors plain = grad_of(inner(inner(x.cos())).tanh(), {x});
  const Tensor y = remat::checkpoint(f, x);
  Counted done;
  std::vector<Tensors> results(threads * times);
  in_threads(threads, [&](int i) {
    for (int k = 0; k < times; ++k) {
      results[static_cast<size_t>(i * times + k)] = grad_of(y, {x}, {.retain_graph = true});
    }
  });
  for (const Tensors& result : results) require_bit_equal(result, plain);
  CHECK(done.now().recomputes == 3 * threads * times);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  CHECK(remat::counters().frames_alive == 3);
}

TEST_CASE("two backward passes over one region recompute it at the same time", "[rule-7]") {
  // Each recompute waits inside the function for the other: a lock held across it would time out.
  // From different outputs, since a node holds its own lock while it reads what it saved.
  const Tensor x = leaf({50});
  Meeting meeting(2);
  std::atomic<int> met{0};
  const auto [a, b] = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = t.sin();
        if (remat::is_recomputing()) met += meeting.wait();
        const Tensor first = h.exp();
        return std::pair(first, t.cos());
      },
      x);
  Tensors first, second;
  in_threads(2, [&, a = a, b = b](int i) {
    (i == 0 ? first : second) = grad_of(i == 0 ? a : b, {x}, {.retain_graph = true});
  });
  CHECK(met == 2);
  require_bit_equal(first, grad_of(x.sin().exp(), {x}));
  require_bit_equal(second, grad_of(x.cos(), {x}));
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("two regions recompute at the same time in different threads", "[rule-7]") {
  const Tensor x = leaf({50}), z = leaf({50});
  Meeting meeting(2);
  std::atomic<int> met{0};
  auto f = [&](const Tensor& t) {
    const Tensor h = t.sin();
    if (remat::is_recomputing()) met += meeting.wait();
    return h.exp();
  };
  const Tensor a = remat::checkpoint(f, x), b = remat::checkpoint(f, z);
  Tensors first, second;
  in_threads(2, [&](int i) {
    if (i == 0) first = grad_of(a, {x});
    if (i == 1) second = grad_of(b, {z});
  });
  CHECK(met == 2);
  require_bit_equal(first, grad_of(x.sin().exp(), {x}));
  require_bit_equal(second, grad_of(z.sin().exp(), {z}));
}

TEST_CASE("a recompute may wait for another thread's backward over the same region", "[rule-7]") {
  const Tensor x = leaf({5});
  std::pair<Tensor, Tensor> y;
  Tensors other;
  std::atomic<bool> started{false};
  Calls calls;
  y = remat::checkpoint(
      [&](const Tensor& t) {
        calls();
        const Tensor h = t.sin();
        if (remat::is_recomputing() && !started.exchange(true)) {
          std::thread([&] { other = grad_of(y.second, {x}, {.retain_graph = true}); }).join();
        }
        const Tensor first = h.exp();
        return std::pair(first, t.cos());
      },
      x);
  require_bit_equal(grad_of(y.first, {x}, {.retain_graph = true}), grad_of(x.sin().exp(), {x}));
  require_bit_equal(other, grad_of(x.cos(), {x}));
  CHECK(calls.count() == 3);
  y = {};
}

TEST_CASE("a first run may wait for another thread's first run and recompute", "[rule-7]") {
  // No lock is shared across the functions of regions that share no tensor.
  Meeting forward(2), recompute(2);
  std::atomic<int> met{0};
  std::vector<Tensors> results(2), plain(2);
  std::vector<Tensor> leaves{leaf({20}), leaf({20})};
  for (size_t i = 0; i < 2; ++i) plain[i] = grad_of(leaves[i].cos().tanh(), {leaves[i]});
  in_threads(2, [&](int i) {
    const Tensor& x = leaves[static_cast<size_t>(i)];
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          met += (remat::is_recomputing() ? recompute : forward).wait();
          return t.cos().tanh();
        },
        x);
    results[static_cast<size_t>(i)] = grad_of(y, {x});
  });
  CHECK(met == 4);
  for (size_t i = 0; i < 2; ++i) require_bit_equal(results[i], plain[i]);
}

TEST_CASE("two threads train two models that share no tensors", "[rule-7]") {
  constexpr int steps = 30;
  auto train = [](uint64_t seed, bool drop) {
    at::Tensor w = at::arange(64, at::kFloat).reshape({8, 8}).mul(0.01).add(0.001 * seed).sin();
    const Tensor x = at::linspace(-1, 1, 64).reshape({8, 8});
    w.requires_grad_();
    for (int i = 0; i < steps; ++i) {
      auto block = [&w](const Tensor& t) { return t.mm(w).tanh().mm(w).sin(); };
      auto two = [&](const Tensor& t) {
        return drop ? remat::checkpoint(block, remat::checkpoint(block, t)) : block(block(t));
      };
      const Tensor y = drop ? remat::checkpoint(two, x) : two(x);
      const Tensor g = grad_of(y.pow(2), {w})[0];
      at::NoGradGuard no_grad;
      w.sub_(g, 0.01);
    }
    return w.detach();
  };
  const Tensors plain{train(1, false), train(2, false)};
  Tensors results(2);
  Counted done;
  in_threads(2, [&](int i) {
    results[static_cast<size_t>(i)] = train(static_cast<uint64_t>(i + 1), true);
  });
  require_bit_equal(results, plain);
  CHECK(done.now().recomputes == 2 * steps * 3);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("hook guards belong to their thread", "[rule-7][rule-16]") {
  const Tensor x = leaf({3});
  std::atomic<int> packs{0}, unpacks{0};
  const remat::SavedTensorHooksGuard hooks(
      [&](const Tensor& t) {
        ++packs;
        return t;
      },
      [&](const Tensor& t) {
        ++unpacks;
        return t;
      });
  Tensor there;
  std::thread([&] { there = x.sin(); }).join();
  CHECK(packs == 0);
  const Tensor here = x.sin();
  CHECK(packs == 1);
  Tensors grads;
  std::thread([&] { grads = grad_of(here, {x}); }).join();
  CHECK(unpacks == 1);
  require_bit_equal(grads, grad_of(there, {x}));
  CHECK(unpacks == 1);
  CHECK(packs == 1);
}

TEST_CASE("what worker threads of a region save is kept plainly, and the gradients are right",
          "[rule-7]") {
  constexpr int replicas = 4;
  constexpr int64_t side = 64;
  const Tensor w = leaf({side, side}), bias = leaf({side});
  const Tensor x = leaf({side, side});
  std::atomic<int> phases_seen{0};
  Calls calls;
  auto f = counted(calls, [&](const Tensor& t) {
    Tensors parts(replicas);
    in_threads(replicas, [&](int i) {
      if (remat::current_phase().phase != remat::Phase::None) ++phases_seen;
      parts[static_cast<size_t>(i)] = at::linear(t * (i + 1), w, bias).tanh();
    });
    Tensor sum = parts[0];
    for (int i = 1; i < replicas; ++i) sum = sum + parts[static_cast<size_t>(i)];
    return sum.sin();
  });
  const Tensors plain = grad_of(f(x), {x, w, bias});
  calls.reset();
  Counted done;
  const Tensor y = remat::checkpoint(f, x);
  CHECK(done.now().tensors_dropped == 1);  // the operand of sin
  const Tensors grads = grad_of(y, {x, w, bias});
  for (size_t i = 0; i < grads.size(); ++i) CHECK(at::allclose(grads[i], plain[i], 1e-4, 1e-5));
  CHECK(phases_seen == 0);
  CHECK(calls.count() == 2);
  CHECK(done.now().tensors_recomputed == 1);
}

TEST_CASE("ten threads run forward and backward of regions on their own leaves", "[rule-7]") {
  constexpr int threads = 10;
  Tensors leaves;
  for (int i = 0; i < threads; ++i) leaves.push_back(leaf({6, 6}));
  auto f = [](const Tensor& t) { return t.mm(t).sin().exp(); };
  Counted done;
  in_threads(threads,
             [&](int i) { remat::checkpoint(f, leaves[static_cast<size_t>(i)]).sum().backward(); });
  for (const Tensor& each : leaves) {
    require_bit_equal({each.grad()}, {torch::autograd::grad({f(each).sum()}, {each})[0]});
  }
  CHECK(done.now().recomputes == threads);
}

TEST_CASE("ten threads run forward and backward of regions on one shared leaf", "[rule-7]") {
  constexpr int threads = 10;
  const Tensor x = leaf({6, 6}, at::kDouble);
  auto f = [](const Tensor& t) { return t.mm(t).sin(); };
  Counted done;
  in_threads(threads, [&](int i) { (remat::checkpoint(f, x).sum() * (i + 1)).backward(); });
  const Tensor plain = torch::autograd::grad({f(x).sum()}, {x})[0];
  CHECK(at::allclose(x.grad(), plain * (threads * (threads + 1) / 2), 1e-9, 1e-12));
  CHECK(done.now().recomputes == threads);
}

TEST_CASE("an error in one thread's recompute leaves the other threads' alone",
          "[rule-7][rule-12]") {
  const Tensor x = leaf({5});
  std::atomic<int> recomputes{0};
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = t.sin();
        if (remat::is_recomputing() && recomputes++ % 3 == 1)
          throw std::runtime_error("now and then");
        return h.exp();
      },
      x);
  const Tensors plain = grad_of(x.sin().exp(), {x});
  std::vector<Tensors> results(40);
  std::atomic<int> failures{0};
  in_threads(4, [&](int i) {
    for (int k = 0; k < 10; ++k) {
      try {
        results[static_cast<size_t>(i * 10 + k)] = grad_of(y, {x}, {.retain_graph = true});
      } catch (const std::runtime_error& e) {
        if (std::string(e.what()) == "now and then") ++failures;
      }
    }
  });
  CHECK(failures == 13);
  int right = 0;
  for (const Tensors& result : results) {
    if (result.empty()) continue;
    require_bit_equal(result, plain);
    ++right;
  }
  CHECK(right == 27);
  CHECK(recomputes == 40);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

}  // namespace
