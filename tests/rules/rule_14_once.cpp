// Rule 14: hooks and accumulation happen once, in the original graph; outputs require grad as plain
// ones.

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "tests/support/support.h"

namespace {

using torch::autograd::Node;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using Log = std::vector<std::string>;
using Map = std::function<Tensor(const Tensor&)>;

// ---- hooks that write down their name

struct LogBefore final : torch::autograd::FunctionPreHook {
  LogBefore(Log& log, std::string name) : log(log), name(std::move(name)) {}
  variable_list operator()(const variable_list& grads) override {
    log.push_back(name);
    return grads;
  }
  Log& log;
  std::string name;
};
struct LogAfter final : torch::autograd::FunctionPostHook {
  LogAfter(Log& log, std::string name) : log(log), name(std::move(name)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    log.push_back(name);
    return outputs;
  }
  Log& log;
  std::string name;
};
struct LogAccumulated final : torch::autograd::PostAccumulateGradHook {
  LogAccumulated(Log& log, std::string name) : log(log), name(std::move(name)) {}
  void operator()(const Variable&) override { log.push_back(name); }
  Log& log;
  std::string name;
};

void hook_tensor(const Tensor& t, Log& log, const std::string& name) {
  t.register_hook([&log, name](const Tensor&) { log.push_back(name); });
}
void hook_node(const Tensor& t, Log& log, const std::string& name) {
  t.grad_fn()->add_pre_hook(std::make_unique<LogBefore>(log, "before " + name));
  t.grad_fn()->add_post_hook(std::make_unique<LogAfter>(log, "after " + name));
}
// As data parallel training hooks a parameter.
NodePtr hook_accumulation(const Tensor& leaf, Log& log, const std::string& name) {
  NodePtr node = torch::autograd::impl::grad_accumulator(leaf);
  node->add_post_hook(std::make_unique<LogAfter>(log, "after accumulating " + name));
  torch::autograd::impl::set_post_acc_grad_hooks(
      leaf, std::make_unique<LogAccumulated>(log, "accumulated " + name));
  return node;  // a leaf holds its accumulator weakly
}

// Two parameters, used in nested regions and twice each, with a hook of every sort everywhere.
struct Hooked {
  explicit Hooked(Map (*wrap)(Map)) : wrap(wrap) {}

  Tensor operator()(const Tensor& x) {
    const Map inner = wrap([this](const Tensor& t) {
      inner_calls();
      const Tensor h = (t * q).sin();
      hook_tensor(h, log, "inner tensor");
      hook_node(h, log, "inner node");
      return (h * p).exp();
    });
    const Map outer = wrap([this, inner](const Tensor& t) {
      outer_calls();
      const Tensor h = (t * p).exp();
      hook_tensor(h, log, "outer tensor");
      hook_node(h, log, "outer node");
      const Tensor k = inner(h);
      hook_tensor(k, log, "inner result");
      return (k * q).sin();
    });
    const Tensor y = outer(x);
    hook_tensor(y, log, "result");
    hook_node(y, log, "result node");
    return y;
  }

  Map (*wrap)(Map);
  Log log{};
  Calls outer_calls{}, inner_calls{};
  Tensor x = at::linspace(-1, 1, 5).requires_grad_();
  Tensor p = at::linspace(0.5, 1, 5).requires_grad_(), q = at::linspace(1, 2, 5).requires_grad_();
  std::vector<NodePtr> accumulators{hook_accumulation(x, log, "x"), hook_accumulation(p, log, "p"),
                                    hook_accumulation(q, log, "q")};
};

Map plainly(Map f) { return f; }
Map in_region(Map f) {
  return [f = std::move(f)](const Tensor& x) { return remat::checkpoint(f, x); };
}

TEST_CASE("every hook runs as often as in plain execution, and in that order", "[rule-14]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  Hooked plain(plainly), regions(in_region);
  for (Hooked* each : {&plain, &regions}) {
    hook_tensor(each->x, each->log, "x");
    hook_tensor(each->p, each->log, "p");
    hook_tensor(each->q, each->log, "q");
  }
  int64_t backwards = 1;
  std::function<Tensors(Hooked&)> program;
  SECTION("backward") {
    program = [](Hooked& h) {
      h(h.x).sum().backward();
      return Tensors{};
    };
  }
  SECTION("two backward calls on a retained graph") {
    backwards = 2;
    program = [](Hooked& h) {
      const Tensor y = h(h.x);
      y.sum().backward({}, /*retain_graph=*/true);
      y.sum().backward();
      return Tensors{};
    };
  }
  SECTION("autograd::grad for one parameter") {
    program = [](Hooked& h) { return grad_of(h(h.x), {h.p}); };
  }
  SECTION("backward for one parameter") {
    program = [](Hooked& h) {
      const Tensor y = h(h.x);
      torch::autograd::backward({y}, {at::ones_like(y)}, std::nullopt, false, {h.q});
      return Tensors{};
    };
  }
  SECTION("a gradient of a gradient") {
    backwards = 2;
    program = [](Hooked& h) {
      const Tensor first = grad_of(h(h.x), {h.x}, {.create_graph = true})[0];
      first.sum().backward();
      return Tensors{first.detach()};
    };
  }
  const Tensors expected = program(plain);
  const Counted done;
  const Tensors actual = program(regions);
  CHECK(regions.log == plain.log);
  CHECK(regions.log.size() >= 6);
  require_bit_equal(actual, expected);
  require_bit_equal({regions.x.grad(), regions.p.grad(), regions.q.grad()},
                    {plain.x.grad(), plain.p.grad(), plain.q.grad()});
  CHECK(regions.outer_calls.count() == 1 + backwards);
  CHECK(done.now().recomputes == 2 * backwards);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("a hook that changes a gradient changes it once", "[rule-14]") {
  const Tensor x = leaf({3}), p = leaf({3});
  Calls calls;
  auto f = [&](const Tensor& t) {
    calls();
    const Tensor h = t.sin() * p;
    h.register_hook([](const Tensor& grad) { return grad * 3; });
    return h.exp();
  };
  p.register_hook([](const Tensor& grad) { return grad * 5; });
  const Tensors plain = grad_of(f(x), {x, p});
  const Tensors unhooked = grad_of((x.sin() * p.detach()).exp(), {x});
  CHECK(at::allclose(plain[0], unhooked[0] * 3));
  calls.reset();
  const Tensor y = remat::checkpoint(f, x);
  for (int i = 1; i <= 2; ++i) {
    require_bit_equal(grad_of(y, {x, p}, {.retain_graph = true}), plain);
    CHECK(calls.count() == 1 + i);
  }
}

TEST_CASE("the gradient of a parameter of many regions accumulates as in plain execution",
          "[rule-14]") {
  const Tensor x = leaf({4}), p = leaf({4});
  Calls calls, additions;
  p.register_hook([&](const Tensor&) { additions(); });
  auto block = counted(calls, [&](const Tensor& t) { return (t * p).sin() * p; });
  auto train = [&](bool as_regions) {
    x.mutable_grad() = p.mutable_grad() = Tensor();
    Tensors grads;
    for (int step = 0; step < 3; ++step) {  // the grads of the steps add up
      Tensor t = x;
      for (int i = 0; i < 5; ++i) t = as_regions ? remat::checkpoint(block, t) : block(t);
      t.sum().backward();
      grads.push_back(p.grad().clone());
    }
    grads.push_back(x.grad());
    return grads;
  };
  const Tensors plain = train(false);
  CHECK(additions.count() == 3);
  calls.reset();
  require_bit_equal(train(true), plain);
  CHECK(additions.count() == 6);
  CHECK(calls.count() == 3 * 5 * 2);
}

TEST_CASE(
    "retain_grad keeps the gradient of the original tensor, inside a region and of its result",
    "[rule-14]") {
  const Tensor x = leaf({3});
  Tensors inside;
  auto f = [&](const Tensor& t) {
    const Tensor h = t.sin();
    h.retain_grad();
    inside.push_back(h);
    return h.exp();
  };
  const Tensor plain = f(x);
  plain.retain_grad();
  plain.sum().backward();
  const Tensor expected = x.grad().clone();
  x.mutable_grad() = Tensor();

  const Tensor y = remat::checkpoint({.early_stop = false}, f, x);
  y.retain_grad();
  y.sum().backward();
  REQUIRE(inside.size() == 3);  // plain, forward, recompute
  require_bit_equal({x.grad(), y.grad(), inside[1].grad()},
                    {expected, plain.grad(), inside[0].grad()});
  CHECK_FALSE(inside[2].grad().defined());
}

TEST_CASE(
    "a gradient inside a region of a leaf with hooks, into which the region accumulates, is "
    "refused",
    "[rule-14][rule-6]") {
  const Tensor hooked = leaf({3}), bare = leaf({3}), x = leaf({3});
  hooked.register_hook([](const Tensor& grad) { return grad * 3; });
  // The gradient is taken of one leaf, while others have been accumulated into and are read.
  const auto function = [&](const Tensor& target) {
    return [&, target](const Tensor& t) {
      (t.detach() * hooked * bare).sum().backward();
      const Tensor g =
          torch::autograd::grad({(hooked * bare).exp().sum()}, {target}, {}, std::nullopt, true)[0];
      return (g.detach() * t).sin().exp();
    };
  };
  require_same_grads(
      Parameters{{hooked, bare}}, function(bare),
      [&](const Tensor& t) { return remat::checkpoint(function(bare), t); }, x);
  const Tensor y = remat::checkpoint(function(hooked), x);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
  CHECK_THAT(error.what(), contains("a captured leaf that has hooks"));
}

TEST_CASE("nodes of the recomputed graph are never executed", "[rule-14]") {
  static Calls* executed = nullptr;
  struct Counting : torch::autograd::Function<Counting> {
    static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
      ctx->save_for_backward({x});
      return x * x;
    }
    static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
      (*executed)();
      return {grads[0] * 2 * ctx->get_saved_variables()[0]};
    }
  };
  Calls calls, backwards;
  executed = &backwards;
  const Tensor x = leaf({3});
  const Tensor y = remat::checkpoint(
      counted(calls, [](const Tensor& t) { return Counting::apply(Counting::apply(t)); }), x);
  const Tensors plain = grad_of((x * x) * (x * x), {x});
  for (int i = 1; i <= 3; ++i) {
    CHECK(at::allclose(grad_of(y, {x}, {.retain_graph = true})[0], plain[0]));
    CHECK(backwards.count() == 2 * i);
    CHECK(calls.count() == 1 + i);
  }
}

// ---- requires_grad

// Results of every sort: of an input, a parameter, both, neither, cut off, integers, views, itself.
Tensors many_results(const Tensor& a, const Tensor& b, const Tensor& p, const Tensor& q) {
  Tensors results{a * p,    b + q, a.exp(), p.sin(), (a * b).detach(), a > 0, b.narrow(0, 1, 2),
                  a * 0 + 1};
  {
    at::NoGradGuard no_grad;
    results.push_back(a * q);
  }
  results.push_back(a);
  results.push_back(at::ones({2}));
  results.push_back(at::ones({2}).requires_grad_() * 2);
  results.push_back((a * q).sum() + (b * p).sum());
  return results;
}

TEST_CASE("outputs require grad as plain ones do, whatever is frozen", "[rule-14]") {
  const auto bits = static_cast<unsigned>(GENERATE(range(0, 16)));
  const bool nested = GENERATE(false, true);
  CAPTURE(bits, nested);
  Tensors t;
  for (unsigned i = 0; i < 4; ++i) t.push_back(leaf({4}).set_requires_grad((bits >> i & 1u) != 0));
  const Tensor &a = t[0], &b = t[1], &p = t[2], &q = t[3];
  using Flags = std::vector<std::pair<bool, bool>>;
  std::vector<Flags> runs;
  auto f = [&](const Tensor& u, const Tensor& v) {
    Tensors results = many_results(u, v, p, q);
    Flags flags;
    for (const Tensor& each : results) flags.emplace_back(each.requires_grad(), each.is_leaf());
    runs.push_back(flags);
    return results;
  };
  const remat::CheckpointOptions to_its_end{.early_stop = false};
  auto region = [&](const Tensor& u, const Tensor& v) {
    if (!nested) return remat::checkpoint(to_its_end, f, u, v);
    return remat::checkpoint(
        to_its_end,
        [&](const Tensor& s, const Tensor& r) { return remat::checkpoint(to_its_end, f, s, r); }, u,
        v);
  };
  require_same_grads(Parameters{{p, q}}, f, region, a, b);
  // Every run saw the same: plain, forward, and the recomputes, unless nothing was saved.
  CHECK(runs.size() == (bits == 0 ? 2u : nested ? 4u : 3u));
  for (const Flags& flags : runs) CHECK(flags == runs[0]);

  const Tensors plain = f(a, b), results = region(a, b);
  for (size_t i = 0; i < plain.size(); ++i) {
    CAPTURE(i);
    CHECK(results[i].requires_grad() == plain[i].requires_grad());
    CHECK(results[i].is_leaf() == plain[i].is_leaf());
  }
}

TEST_CASE("a region between frozen and trained layers asks for what plain execution asks for",
          "[rule-14]") {
  const Tensor x = at::randn({128, 128});
  const Tensor frozen = at::randn({128, 128}), trained = leaf({128, 128});
  KernelCounter kernels;
  auto f = [&](const Tensor& t) { return t.mm(frozen).sin().mm(trained).mm(frozen); };
  auto products_in_backward = [&](bool as_region) {
    const Tensor y = as_region ? remat::checkpoint(f, x) : f(x);
    kernels.reset();
    const Tensor grad = grad_of(y, {trained})[0];
    return std::pair(kernels.count("mm"), grad);
  };
  const auto [plain_products, plain_grad] = products_in_backward(false);
  CHECK(plain_products == 2);  // none for the frozen weight, nor below the trained one
  const auto [products, grad] = products_in_backward(true);
  // The recompute runs the first two again and stops at the third, which saves its weight.
  CHECK(products == plain_products + 2);
  require_bit_equal({grad}, {plain_grad});
}

}  // namespace
