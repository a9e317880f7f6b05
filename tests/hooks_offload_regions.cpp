// Guards of hooks.h that keep saved tensors elsewhere, with regions, graphs and threads.

#include <thread>

#include "tests/support/each_guard.h"
#include "tests/support/files.h"
#include "tests/support/sizes.h"

using remat::checkpoint;
using remat::SaveAsGuard;
using remat::SaveOnDiskGuard;

TEST_CASE("offload guards and regions work in both orders", "[hooks][offload]") {
  const auto block = [](const Tensor& t) { return (t * t.sin()).exp().sin(); };
  const auto plain = [&](const Tensor& x) { return block(block(x + 1)); };
  with_each_guard([&](auto make) {
    const bool early_stop = GENERATE(true, false);
    require_same_grads(
        plain,
        [&](const Tensor& x) {
          const auto guard = make();
          const Tensor h = checkpoint({.early_stop = early_stop}, block, x + 1);
          return checkpoint(
              {.early_stop = early_stop}, [&](const Tensor& t) { return checkpoint(block, t); }, h);
        },
        leaf({6, 5}));
    Calls calls;
    require_same_grads(
        plain,
        [&](const Tensor& x) {
          return checkpoint(
              {.early_stop = early_stop, .policy = remat::save_ops({"aten::exp"})},
              [&](const Tensor& t) {
                calls();
                const Tensor h = block(t + 1);
                const auto guard = make();
                return block(h);
              },
              x);
        },
        leaf({6, 5}));
    CHECK(calls.count() == 2);
  });
}

TEST_CASE("a region under a SaveOnDiskGuard holds nothing in memory", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({1024});
  Calls calls;
  const auto block = counted(calls, [](const Tensor& t) { return t.sin().sin().sin(); });
  const Tensor h = (x + 1).detach().requires_grad_() * 1;
  const LiveBytes bytes;
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    y = checkpoint(block, checkpoint(block, h));
    CHECK(bytes.held() == bytes_of(y));
    CHECK(folder.status().st_size == 2 * 4096);  // the two inputs
  }
  const Tensor grad = grad_of(y, {h})[0];
  CHECK(calls.count() == 4);
  const auto f = [](const Tensor& t) { return t.sin().sin().sin(); };
  require_bit_equal({grad}, grad_of(f(f(h)), {h}));
}

TEST_CASE("a backward in inference mode reads what was moved", "[hooks][offload][rule-11]") {
  const Tensor x = leaf({64});
  const auto program = [&] { return (x * 1).sin().exp(); };
  const auto region = [&] {
    return remat::checkpoint([](const Tensor& t) { return (t * 1).sin().exp(); }, x * 1);
  };
  const auto offloading = [&] {
    const auto f = [](const Tensor& t) { return (t * 1).sin().exp(); };
    return remat::checkpoint({.offload_inputs = true}, f, x * 1);
  };
  const auto keeping = [&] {
    const auto f = [](const Tensor& t) { return (t * 1).sin().exp(); };
    return remat::checkpoint({.policy = remat::save_ops({"aten::sin"})}, f, x * 1);
  };
  const Tensors plain = grad_of(program(), {x});
  const Tensors rounded = [&] {
    const SaveAsGuard guard(at::kBFloat16);
    return grad_of(program(), {x});
  }();
  const auto check = [&](const Tensor& y, const Tensors& expected) {
    for (const bool is_inference : {true, false, true}) {
      const c10::InferenceMode mode(is_inference);
      const Tensors found = torch::autograd::grad({y}, {x}, {at::ones_like(y)},
                                                  /*retain_graph=*/true);
      const c10::InferenceMode normal(false);
      require_bit_equal({found[0].clone()}, expected);
    }
  };
  {
    Tensor y;
    {
      const SaveAsGuard guard(at::kBFloat16);
      y = program();
    }
    check(y, rounded);
  }
  with_each_guard([&](auto make) {
    for (const std::function<Tensor()>& each :
         std::initializer_list<std::function<Tensor()>>{program, region, offloading, keeping}) {
      Tensor y;
      {
        const auto guard = make();
        y = each();
      }
      check(y, plain);
    }
  });
}

TEST_CASE("double backward goes through tensors that were moved", "[hooks][offload]") {
  const Tensor x = leaf({9}, at::kDouble);
  const auto f = [](const Tensor& t) { return (t + 1).sin().exp() * t; };
  const auto second = [&](const Tensor& y) {
    const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
    const Tensor twice = grad_of(first.sin(), {x}, {.create_graph = true})[0];
    return grad_of(twice, {x})[0];
  };
  const Tensor plain = second(f(x));
  with_each_guard([&](auto make) {
    Tensor y;
    {
      const auto guard = make();
      y = f(x);
    }
    require_bit_equal({second(y)}, {plain});
    const auto guard = make();
    require_bit_equal({second(f(x))}, {plain});
  });
}

TEST_CASE("graphs die under each guard, and leave nothing", "[hooks][offload]") {
  const Folder folder;
  with_each_guard([](auto make) {
    const auto identity = [&](const Tensor& a) {
      const auto guard = make();
      const Tensor b = a + 1;
      const Tensor mask = at::ones({});
      return (b * mask * b.exp() * a).sin() * a.view({1});
    };
    CHECK(graph_dies(identity));
    CHECK(graph_dies([&](const Tensor& a) { return checkpoint(identity, a); }));
    CHECK(graph_dies([&](const Tensor& a) {
      const auto guard = make();
      return checkpoint([](const Tensor& t) { return t.exp().sin(); }, a + 1);
    }));
  });
}

TEST_CASE("threads that save and read under one guard get their own values",
          "[hooks][offload][threads]") {
  with_each_guard([](auto make) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    const Tensor shared = at::full({257}, 1.5f);
    for (int index = 0; index < 4; ++index)
      threads.emplace_back([&, index] {
        const auto guard = make();
        for (int step = 0; step < 20; ++step) {
          const Tensor x = at::full({257}, 0.1f * index + 0.01f * step).requires_grad_();
          const Tensor y = ((x + 1).sin() * shared).exp();
          const Tensor first = grad_of(y, {x}, {.retain_graph = true})[0];
          const Tensor s = (x + 1).sin().detach(), e = (s * shared).exp();
          if (!at::allclose(first, e * shared * (x + 1).cos().detach())) ++wrong;
          if (!at::equal(grad_of(y, {x})[0], first)) ++wrong;
        }
      });
    for (std::thread& each : threads) each.join();
    CHECK(wrong == 0);
  });
}

TEST_CASE("several threads read the same moved tensors of a retained graph at once",
          "[hooks][offload][threads]") {
  const Folder folder;
  const Tensor x = leaf({2000});
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    y = (x + 1).sin().exp().sin();
  }
  const Tensor expected = grad_of(y, {x}, {.retain_graph = true})[0];
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int index = 0; index < 4; ++index)
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i)
        if (!at::equal(grad_of(y, {x}, {.retain_graph = true})[0], expected)) ++wrong;
    });
  for (std::thread& each : threads) each.join();
  CHECK(wrong == 0);
}

TEST_CASE("offload_inputs changes nothing on the CPU", "[hooks][offload]") {
  const Tensor mask = at::randn({6}) > 0;
  const auto f = [](const Tensor& t, const Tensor& m) { return (t * m).sin().exp(); };
  require_same_grads(
      [&](const Tensor& x) { return f(x + 1, mask); },
      [&](const Tensor& x) { return checkpoint({.offload_inputs = true}, f, x + 1, mask); },
      leaf({6}));
  const Tensor x = leaf({6}), h = x + 1;
  const Tensor y = checkpoint({.offload_inputs = true}, f, h, mask);
  h.detach().mul_(2);
  CHECK_THROWS_WITH(grad_of(y, {x}), contains(changed_in_place));
  drop_ready_nodes();
}
