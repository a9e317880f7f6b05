// Rule 11: a recompute sees forward's autocast and grad modes, and leaves the backward's thread
// alone.

#include <ATen/LegacyVmapMode.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>

#include <thread>

#include "tests/support/autocast.h"
#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The settings of a thread, to be compared before and after.
struct Ambient {
  bool grad_mode, inference_mode, forward_ad, autocast, autocast_cache, has_hooks;
  at::ScalarType autocast_dtype;
  bool operator==(const Ambient&) const = default;
};
Ambient ambient() {
  return {
      at::GradMode::is_enabled(),
      c10::InferenceMode::is_enabled(),
      c10::AutogradState::get_tls_state().get_fw_grad_mode(),
      at::autocast::is_autocast_enabled(at::kCPU),
      at::autocast::is_autocast_cache_enabled(),
      torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks() != nullptr,
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

// ---- autocast

TEST_CASE("a parameter that changed is noticed behind autocast's cast of its view",
          "[rule-10][rule-11]") {
  struct Use {
    const char* what;
    std::function<Tensor(const Tensor& x, const Tensor& w)> run;
  };
  const std::vector<Use> uses{
      {"itself", [](const Tensor& x, const Tensor& w) { return x.mm(w); }},
      {"transposed", [](const Tensor& x, const Tensor& w) { return x.mm(w.t()); }},
      {"addmm", [](const Tensor& x, const Tensor& w) { return at::addmm(w[0], x, w.t()); }},
      {"several views",
       [](const Tensor& x, const Tensor& w) {
         return x.mm(w.view({2, 8}).view({4, 4}).narrow(0, 0, 4).t());
       }},
      {"made of it", [](const Tensor& x, const Tensor& w) { return x.mm(w * 0.5); }},
  };
  for (const Use& use : uses)
    for (const bool cache : {true, false}) {
      CAPTURE(use.what, cache);
      const Tensor x = leaf({4, 4}), w = leaf({4, 4});
      const auto forward = [&](bool drop) {
        const Autocast autocast({.cache = cache});
        const auto f = [&](const Tensor& t) { return use.run(t, w).sin(); };
        return drop ? remat::checkpoint(f, x) : f(x);
      };
      require_bit_equal(grad_of(forward(true), {x, w}), grad_of(forward(false), {x, w}));
      const Tensor y = forward(true);
      {
        const at::NoGradGuard no_grad;
        w.mul_(3);
      }
      const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x, w}); });
      CHECK(error.kind() == remat::CheckpointError::Kind::CaptureChanged);
    }
}

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
      const Autocast forward({.enabled = in_forward});
      y = drop ? remat::checkpoint({.early_stop = early_stop}, f, x) : f(x);
    }
    const Autocast backward({.enabled = in_backward, .dtype = at::kHalf, .cache = false});
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
      const Autocast off({.enabled = false});
      note();
      h = h.to(at::kFloat).mm(w);
    }
    note();
    return h.mm(w).to(at::kFloat).sin();
  };
  const Autocast on({.dtype = at::kHalf, .cache = cache});
  const Tensors plain = grad_in_thread(f(x), {x, w});
  seen.clear();
  const Tensor y = remat::checkpoint(f, x);
  require_bit_equal(grad_in_thread(y, {x, w}), plain);
  REQUIRE(seen.size() == 6);
  for (size_t i = 0; i < 3; ++i) CHECK(seen[i] == seen[i + 3]);
  CHECK(seen[3] == std::tuple(true, cache, at::kHalf));
}

TEST_CASE("sibling regions that share a weight under autocast do not mismatch",
          "[rule-11][rule-10]") {
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
    auto autocast = std::make_unique<Autocast>(AutocastOptions{.cache = cache});
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

TEST_CASE("a weight changed between the passes raises under autocast too", "[rule-11]") {
  const bool cache = GENERATE(true, false);
  CAPTURE(cache);
  Tensor w = leaf({8, 8});
  const Tensor x = leaf({8, 8});
  Tensor y;
  {
    const Autocast on({.cache = cache});
    y = remat::checkpoint([&](const Tensor& t) { return t.mm(w).sin(); }, x);
  }
  {
    at::NoGradGuard no_grad;
    w.add_(1);
  }
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y.to(at::kFloat), {x}); });
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

// ---- grad mode, inference mode, hooks

TEST_CASE("a recompute sees grad mode on, whatever the thread that runs backward has set",
          "[rule-11]") {
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
    const Autocast autocast({.dtype = at::kHalf});
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

TEST_CASE("a backward from below autograd recomputes as one from above", "[rule-11]") {
  const auto f = [](const Tensor& x) {
    Tensor y = x.sin();
    y[0].mul_(2);  // views and changes in place are recorded, too
    return y.exp().sin();
  };
  const Tensor x = leaf({4}), plain = x.detach().clone().requires_grad_();
  f(plain).sum().backward();
  const auto region = [&](const Tensor& x) { return remat::checkpoint(f, x); };
  const Tensor root = remat::checkpoint(region, x).sum();
  {
    const at::AutoDispatchBelowADInplaceOrView below;  // as in the kernel of an operator
    root.backward();
    CHECK(!x.sin().requires_grad());
  }
  CHECK(equal(x.grad(), plain.grad()));
  CHECK(x.sin().requires_grad());
}

TEST_CASE("what ran below autograd is recomputed below it", "[rule-11]") {
  struct Product : torch::autograd::Function<Product> {  // recorded there, too
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                          const Tensor& w) {
      context->save_for_backward({w});
      return x * w;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list& g) {
      return {context->get_saved_variables()[0] * g[0], Tensor()};
    }
  };
  constexpr int64_t size = 8192;  // after so large a tensor a recompute stops early
  const Tensor constant = at::arange(1, size + 1, at::kFloat), w = constant.cos();
  const auto f = [&](const Tensor& x, const Tensor& w) {
    (void)(x * constant);  // saves nothing there
    return Product::apply(x, w);
  };
  const Tensor x = at::ones({size}).requires_grad_();
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    y = remat::checkpoint(f, x, w);
  }
  y.backward(at::ones({size}));
  CHECK(equal(x.grad(), w));
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

TEST_CASE("a recompute sees no vmap mode around backward", "[rule-11]") {
  const auto f = [](const Tensor& t) { return at::dropout(t.sin(), 0.5, true).exp(); };
  const auto nested = [&](const Tensor& t) { return remat::checkpoint(f, t).sin(); };
  const Tensor x = leaf({8});
  const auto gradients = [&](const Tensor& y, bool is_batched) {
    struct Vmap {
      explicit Vmap(bool is_on) : is_on_(is_on) {
        if (is_on_) at::impl::VmapMode::increment_nesting();
      }
      ~Vmap() {
        if (is_on_) at::impl::VmapMode::decrement_nesting();
      }
      const bool is_on_;
    } const vmap(is_batched);
    Tensor found = grad_of(y, {x}, {.retain_graph = true})[0];
    CHECK(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::VmapMode) == is_batched);
    return found;
  };
  for (const bool is_nested : {false, true}) {
    at::manual_seed(3);
    const Tensor plain = gradients(is_nested ? f(x).sin() : f(x), false);
    at::manual_seed(3);
    const Tensor y = is_nested ? remat::checkpoint(nested, x) : remat::checkpoint(f, x);
    for (const bool is_batched : {true, false, true})
      require_bit_equal({gradients(y, is_batched)}, {plain});
  }
}

TEST_CASE("in inference mode a region runs plainly", "[rule-11]") {
  const Tensor x = leaf({4});
  Counted done;
  Calls calls;
  {
    const c10::InferenceMode inference;
    const Tensor y = remat::checkpoint(counted(calls, [](const Tensor& t) { return t.sin(); }), x);
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
          "[rule-11]") {
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
    y = remat::checkpoint(
        {.early_stop = early_stop},
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
