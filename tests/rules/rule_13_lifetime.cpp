// Rule 13: a frame lives as long as the graph that refers to it, and nothing makes a cycle.

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <thread>

#include "tests/support/functions.h"
#include "tests/support/maps.h"
#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- graphs die by reference count -------------------------------------------------------------

TEST_CASE("the graph of any composition of regions and gradients is freed by reference count",
          "[rule-13]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Map f = sin_exp_sin;
  struct Case {
    const char* name;
    Map map, plain;
  };
  const std::vector<Case> cases{
      {"c(f)", c(f), f},
      {"c(c(f))", c(c(f)), f},
      {"grad(c(f))", grad(c(f)), grad(f)},
      {"grad(c(c(f)))", grad(c(c(f))), grad(f)},
      {"grad(c(grad(f)))", grad(c(grad(f))), grad(grad(f))},
      {"c(grad(grad(c(f))))", c(grad(grad(c(f)))), grad(grad(f))},
      {"grad(c(grad(c(f))))", grad(c(grad(c(f)))), grad(grad(f))},
      {"grad(c(grad(grad(c(f)))))", grad(c(grad(grad(c(f))))), grad(grad(grad(f)))},
      {"grad(c(grad(c(grad(c(f))))))", grad(c(grad(c(grad(c(f)))))), grad(grad(grad(f)))},
  };
  for (const Case& each : cases) {
    for (const Backward backward : {Backward::None, Backward::Once, Backward::Retained}) {
      INFO(each.name << ", backward " << static_cast<int>(backward));
      LiveBytes bytes;
      int64_t frames = 0;
      CHECK(graph_dies([&](const Tensor& a) {
        const Tensor out = each.map(a);
        frames = remat::counters().frames_alive;
        const Tensor expected = each.plain(a);
        REQUIRE(at::allclose(out, expected));
        run_backward(backward, out);
        return out;
      }));
      CHECK(frames > 0);
      CHECK(remat::counters().frames_alive == 0);
      CHECK(bytes.held() == 0);
    }
  }
}

TEST_CASE("chains of a few and of many nodes inside one region are freed by reference count",
          "[rule-13]") {
  const int length = GENERATE(3, 2000);
  const Backward backward = GENERATE(Backward::None, Backward::Once, Backward::Retained);
  CAPTURE(length, static_cast<int>(backward));
  Calls calls;
  LiveBytes bytes;
  CHECK(graph_dies([&](const Tensor& a) {
    const Tensor y = remat::checkpoint(counted(calls,
                                               [&](Tensor t) {
                                                 for (int i = 0; i < length; ++i) t = t.sin();
                                                 return t;
                                               }),
                                       a);
    run_backward(backward, y);
    return y;
  }));
  CHECK(calls.count() == (backward == Backward::None ? 1 : 2));
  CHECK(bytes.held() == 0);
}

struct Square : torch::autograd::Function<Square> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor y = x * x;
    ctx->save_for_backward({x, y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {2 * grads[0] * ctx->get_saved_variables()[0]};
  }
};

struct HoldsProbe final : torch::autograd::FunctionPostHook {
  explicit HoldsProbe(Alive::Probe probe) : probe(std::move(probe)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    return outputs;
  }
  Alive::Probe probe;
};

TEST_CASE("a node made inside a region is freed whatever hook it has", "[rule-13]") {
  enum class Hook { None, OnTensor, OnNode };
  const bool custom = GENERATE(false, true);
  const Hook hook = GENERATE(Hook::None, Hook::OnTensor, Hook::OnNode);
  const Backward backward = GENERATE(Backward::None, Backward::Once, Backward::Retained);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(custom, static_cast<int>(hook), static_cast<int>(backward), early_stop);
  const Alive alive;
  LiveBytes bytes;
  Calls calls;
  auto f = counted(calls, [&](const Tensor& t) {
    const Tensor h = custom ? Square::apply(t) : t.exp();
    if (hook == Hook::OnTensor)
      h.register_hook([probe = alive.probe()](const Tensor& g) { return g; });
    if (hook == Hook::OnNode)
      h.grad_fn()->add_post_hook(std::make_unique<HoldsProbe>(alive.probe()));
    return h;
  });
  int64_t probes = 0;
  CHECK(graph_dies([&](const Tensor& a) {
    const Tensor y = remat::checkpoint({.early_stop = early_stop}, f, a);
    run_backward(backward, y);
    probes = alive.count();  // of the forward's node: the recomputed one is gone
    return y;
  }));
  CHECK(probes == (hook == Hook::None ? 0 : 1));
  CHECK(alive.count() == 0);
  CHECK(calls.count() == (backward == Backward::None ? 1 : 2));
  CHECK(bytes.held() == 0);
}

TEST_CASE("a tensor hook on a region's result is freed with the graph", "[rule-13]") {
  const Backward backward = GENERATE(Backward::None, Backward::Once, Backward::Retained);
  CAPTURE(static_cast<int>(backward));
  const Alive alive;
  Calls hook_calls;
  CHECK(graph_dies([&](const Tensor& a) {
    const Tensor y = remat::checkpoint(sin_exp_sin, a);
    y.register_hook([&, probe = alive.probe()](const Tensor& g) {
      hook_calls();
      return g;
    });
    CHECK(alive.count() > 0);
    run_backward(backward, y);
    return y;
  }));
  CHECK(alive.count() == 0);
  CHECK(hook_calls.count() == (backward == Backward::None ? 0 : 1));
}

TEST_CASE("retain_grad on a region's result makes no cycle", "[rule-13]") {
  const Backward backward = GENERATE(Backward::None, Backward::Once, Backward::Retained);
  CAPTURE(static_cast<int>(backward));
  LiveBytes bytes;
  CHECK(graph_dies([&](const Tensor& a) {
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          const Tensor h = t.sin();
          h.retain_grad();
          return h.exp();
        },
        a);
    y.retain_grad();
    run_backward(backward, y);
    CHECK(y.grad().defined() == (backward != Backward::None));
    return y;
  }));
  CHECK(bytes.held() == 0);
}

TEST_CASE("a leaf is held until the last output of a region's node goes", "[rule-13]") {
  const Tensor x = leaf({3, 4});
  const size_t before = x.use_count();
  Calls calls;
  auto [variance, mean] = remat::checkpoint(
      counted(calls, [](const Tensor& t) { return at::var_mean(t, /*dim=*/1); }), x);
  CHECK(x.use_count() == before + 1);  // the accumulator of its gradient; the region holds an alias
  SECTION("without a backward") {}
  SECTION("after a partial backward") {
    const Tensors plain = grad_of(std::get<1>(at::var_mean(x, 1)), {x});
    require_bit_equal(grad_of(mean, {x}, {.retain_graph = true}), plain);
    // The mean saves nothing, but its node is the variance's, so the region recomputed.
    CHECK(calls.count() == 2);
    CHECK(x.use_count() == before + 1);
  }
  mean = Tensor();
  CHECK(x.use_count() == before + 1);
  CHECK(remat::counters().frames_alive == 1);
  variance = Tensor();
  CHECK(x.use_count() == before);
  CHECK(remat::counters().frames_alive == 0);
}

// ---- what keeps a frame, and what does not ------------------------------------------------------

TEST_CASE("a node keeps its region, and goes on to when its result is gone", "[rule-13]") {
  const Alive alive;
  const Tensor x = leaf({1000});
  const Tensors plain = grad_of(sin_exp_sin(x), {x});
  LiveBytes bytes;
  NodePtr node;
  {
    const Tensor y =
        remat::checkpoint([probe = alive.probe()](const Tensor& t) { return sin_exp_sin(t); }, x);
    node = y.grad_fn();
  }
  CHECK(remat::counters().frames_alive == 1);
  CHECK(alive.count() == 1);
  CHECK(bytes.held() == 0);
  auto& engine = torch::autograd::Engine::get_default_engine();
  const torch::autograd::Edge target(torch::autograd::impl::gradient_edge(x));
  require_bit_equal(
      engine.execute({{node, 0}}, {at::ones({1000})}, /*keep_graph=*/true, false, false, {target}),
      plain);
  CHECK(alive.count() == 1);
  CHECK(bytes.held() == 0);
  node = NodePtr();
  CHECK(alive.count() == 0);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("a region's graph may die on another thread, and during its own backward", "[rule-13]") {
  const Alive alive;
  const Tensor x = leaf({3});
  Calls calls;
  Tensor y = remat::checkpoint(
      [&, probe = alive.probe()](const Tensor& t) {
        calls();
        return sin_exp_sin(t);
      },
      x);
  SECTION("on another thread") {
    std::thread([last = std::exchange(y, Tensor())]() mutable { last = Tensor(); }).join();
    CHECK(calls.count() == 1);
  }
  SECTION("in a hook of the backward that reads it") {
    const Tensors plain = grad_of(sin_exp_sin(x), {x});
    y.register_hook([&](const Tensor&) { y = Tensor(); });
    Tensor root = y.sum();
    torch::autograd::Engine& engine = torch::autograd::Engine::get_default_engine();
    torch::autograd::edge_list roots{torch::autograd::impl::gradient_edge(root)};
    root = Tensor();
    engine.execute(roots, {at::ones({})}, /*keep_graph=*/false, false, /*accumulate_grad=*/true,
                   {});
    roots.clear();
    require_bit_equal({x.grad()}, plain);
    CHECK_FALSE(y.defined());
    CHECK(calls.count() == 2);
  }
  SECTION("in its own recompute") {
    const Tensors plain = grad_of(sin_exp_sin(x), {x});
    Tensor z;
    z = remat::checkpoint(
        [&](const Tensor& t) {
          if (remat::is_recomputing()) z = Tensor();
          return sin_exp_sin(t);
        },
        x);
    z.sum().backward();
    require_bit_equal({x.grad()}, plain);
    CHECK_FALSE(z.defined());
    y = Tensor();
  }
  CHECK(alive.count() == 0);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("a region that uses its input only through detach keeps nothing above it",
          "[rule-13][rule-2]") {
  constexpr int count = 50000;
  constexpr int64_t tensor_bytes = 8 * 4;
  const bool keeps_all = GENERATE(false, true);
  CAPTURE(keeps_all);
  const Tensor p = leaf({8});
  Calls calls;
  auto f = counted(calls, [&](const Tensor& t) { return (t.detach() + p).sin(); });
  LiveBytes bytes;
  Tensors kept;
  Tensor y = p * 1, last_input;
  int64_t most_frames = 0;
  for (int i = 0; i < count; ++i) {
    last_input = y.detach();
    y = remat::checkpoint(f, y);
    if (keeps_all) kept.push_back(y);
    most_frames = std::max(most_frames, remat::counters().frames_alive);
  }
  CHECK(most_frames == (keeps_all ? count : 1));
  // The last result, and the last region's input.
  if (!keeps_all) CHECK(bytes.held() == 2 * tensor_bytes);
  require_bit_equal(grad_of(y, {p}), {(last_input + p).cos().detach()});
  CHECK(calls.count() == count + 1);
  y = last_input = Tensor();
  kept.clear();
  CHECK(remat::counters().frames_alive == 0);
  CHECK(bytes.held() == 0);
}

TEST_CASE("a function that holds another graph lets go of it with its own", "[rule-13]") {
  const Alive alive;
  const Tensor x = leaf({3}), z = leaf({3});
  Tensor held =
      remat::checkpoint([probe = alive.probe()](const Tensor& t) { return t.sin().exp(); }, x);
  Tensor y = remat::checkpoint([held](const Tensor& t) { return (t * held).sin(); }, z);
  held = Tensor();
  CHECK(alive.count() == 1);
  CHECK(remat::counters().frames_alive == 2);
  const Tensors plain = grad_of((z * x.sin().exp()).sin(), {z, x});
  require_bit_equal(grad_of(y, {z, x}, {.retain_graph = true}), plain);
  SECTION("with the graph") { y = Tensor(); }
  SECTION("when a backward frees the slots, while the result lives") {
    require_bit_equal(grad_of(y, {z, x}), plain);
  }
  CHECK(alive.count() == 0);
  CHECK(remat::counters().frames_alive == 0);
}

}  // namespace
