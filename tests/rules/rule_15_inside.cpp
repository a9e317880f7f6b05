// Rule 15 where a region with a policy, pin or save_region has hooks, guards or a backward in it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <string>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using remat::SelectiveOptions;

namespace {

Policy everything(SelectiveOptions options = {}) {
  return Policy([](const PolicyContext&) { return CheckpointPolicy::MustSave; }, options);
}
CheckpointOptions with(Policy policy, bool early_stop = true) {
  return {.early_stop = early_stop, .policy = std::move(policy)};
}

/// A copy that reads the data past all operators.
Tensor raw_copy(const Tensor& t) {
  Tensor copy = at::empty(t.sizes(), t.options());  // empty_like would count as reading
  std::memcpy(copy.mutable_data_ptr(), t.const_data_ptr(), t.nbytes());
  return copy;
}
Tensor same(const Tensor& t) { return t; }

}  // namespace

TEST_CASE("a pack function inside a region reads kept results past all operators", "[rule-15]") {
  const Tensor x = leaf({8});
  Calls calls;
  bool catches = false;
  // The product is made under the hooks, of what was made under them: copies of copies.
  const auto f = [&](const Tensor& x) {
    calls();
    const auto body = [&] {
      const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return raw_copy(t + 1); },
                                               [](const Tensor& t) { return t - 1; });
      return x.exp().prod() * x;
    };
    if (!catches) return body().sin();
    try {
      return body().sin();
    } catch (...) {
      return x;
    }
  };
  for (catches = false;; catches = true) {
    for (const bool strict : {false, true}) {
      calls.reset();
      CheckpointOptions inner = with(everything()), outer;
      inner.early_stop = false;
      outer.strict_unpack = strict;
      const Tensor y =
          checkpoint(outer, [&](const Tensor& x) { return checkpoint(inner, f, x.cos()); }, x);
      const Tensor gradient = grad_of(y, {x})[0];
      CHECK(calls.count() == 3);  // forward, the outer recompute, one recompute of its own
      CHECK(bit_equal(gradient, grad_of(f(x.cos()), {x})[0]));
    }
    if (catches) break;
  }
}

TEST_CASE("what a pack function reads past all operators is kept with its data", "[rule-15]") {
  const Tensor x = leaf({8});
  Calls calls;
  const auto f = counted(calls, [](const Tensor& x) {
    Tensor y;
    {
      const remat::SavedTensorHooksGuard hooks(raw_copy, same);
      y = x.exp();  // saves its own result, which no operator reads that would need the data
    }
    return y.mul(2).sin();
  });
  const Tensor y = checkpoint(with(everything()), f, x);
  const Tensor gradient = grad_of(y, {x})[0];
  CHECK(calls.count() == 2);  // no recompute more, to find out that the data are needed
  CHECK(bit_equal(gradient, grad_of(f(x), {x})[0]));
}

TEST_CASE("a pack function that throws away a C++ Function's save leaves nothing behind",
          "[rule-15]") {
  struct SavesInner : torch::autograd::Function<SavesInner> {
    static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
      const Tensor y = x.tanh();
      ctx->save_for_backward({y});
      return y;
    }
    static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& g) {
      const Tensor y = ctx->get_saved_variables()[0];
      return {g[0] * (1 - y * y)};
    }
  };
  const Tensor x = leaf({8});
  const auto f = [](const Tensor& x) {
    const remat::SavedTensorHooksGuard hooks(raw_copy, same);
    return SavesInner::apply(x).sin();
  };
  // A save that is cut short leaks in LibTorch; the listener would find the bytes.
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
}

TEST_CASE("a backward inside may write to what its own formulas made", "[rule-15]") {
  const Tensor x = leaf({8});
  const auto f = [](const Tensor& x) {
    const Tensor a = x.sin(), b = x.detach().cos();
    // The formula of maximum is where(...).masked_fill_(...).
    const Tensor slope = torch::autograd::grad({at::maximum(a, b).sum()}, {a}, {},
                                               /*retain_graph=*/true, /*create_graph=*/true)[0];
    return (slope * a).exp();
  };
  Tensor hooked;
  const auto g = [&](const Tensor& x) {
    const Tensor a = x.sin() * 1;
    a.register_hook([](const Tensor& g) { return g.clone().mul_(2); });
    const Tensor slope = torch::autograd::grad({a.exp().sum()}, {a}, {}, /*retain_graph=*/true)[0];
    return (slope * a).cos();
  };
  for (const bool asks_again : {false, true}) {
    const CheckpointOptions options = with(everything({.ask_again = asks_again}));
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(options, f, x); }, x);
    require_same_grads(g, [&](const Tensor& x) { return checkpoint(options, g, x); }, x);
    // In a region that is itself run by a backward.
    require_same_grads([&](const Tensor& x) { return f(x.cos()).sin(); },
                       [&](const Tensor& x) {
                         return checkpoint(
                             [&](const Tensor& x) { return checkpoint(options, f, x.cos()).sin(); },
                             x);
                       },
                       x);
  }
}

TEST_CASE("a recompute in the midst of forward meets no call that forward has yet to make",
          "[rule-15]") {
  struct Reads : torch::autograd::Function<Reads> {
    static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
      ctx->save_for_backward({x});
      return x.sin();
    }
    static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& g) {
      const Tensor x = ctx->get_saved_variables()[0];
      const Tensor slope = x.cos();
      return {g[0] * slope * ctx->get_saved_variables()[0] / x};
    }
  };
  const Tensor x = leaf({4});
  const auto f = [](const Tensor& x) {
    const Tensor a = x * 1;
    const Tensor slope = torch::autograd::grad({Reads::apply(a).sum()}, {a}, {},
                                               /*retain_graph=*/true, /*create_graph=*/true)[0];
    return remat::pin(remat::checkpoint_name(slope, "n")) * 2;
  };
  for (const Policy& policy : {Policy(), everything()})
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
}

TEST_CASE("a value of save_region is no captured tensor of a region inside", "[rule-15]") {
  const Tensor x = leaf({4});
  const auto f = [](const Tensor& x) {
    const Tensor mask = remat::save_region([](const Tensor& x) { return x.detach() > 0; }, x);
    return checkpoint([](const Tensor& x, const Tensor& mask) { return (x * mask).exp(); }, x,
                      mask);
  };
  const auto g = [&](const Tensor& x) { return checkpoint(f, x.sin()).cos(); };
  // While the outer region compares values it holds what was saved last, the mask.
  for (const auto check : {remat::DeterminismCheck::Metadata, remat::DeterminismCheck::Values})
    require_same_grads(
        [&](const Tensor& x) { return f(x.sin()).cos(); },
        [&](const Tensor& x) { return checkpoint({.determinism_check = check}, g, x); }, x);
}

TEST_CASE("draws in save_region from a generator that is registered there are passed over",
          "[rule-15]") {
  const Tensor x = leaf({4});
  for (const bool past_operators : {false, true}) {
    const auto f = [&](const Tensor& x, const at::Generator& generator) {
      const auto draw = [&](const Tensor& x) {
        const remat::GeneratorGuard guard(generator);
        return x * at::rand({4}, generator);
      };
      const Tensor y = remat::save_region(draw, x.sin());
      const remat::GeneratorGuard guard(generator);
      if (!past_operators) return (draw(y) * at::rand({4}, generator)).exp();
      auto* const impl = at::check_generator<at::CPUGeneratorImpl>(generator);
      std::lock_guard<std::mutex> lock(impl->mutex_);
      return y.exp() * (1.0 + impl->random() % 7);
    };
    at::Generator one = at::detail::createCPUGenerator(5),
                  other = at::detail::createCPUGenerator(5);
    require_same_grads([&](const Tensor& x) { return f(x, one); },
                       [&](const Tensor& x) { return checkpoint(f, x, other); }, x);
  }
}

namespace {
Tensor slope_of(const Tensor& z, const Tensor& of, bool allow_unused = false) {
  return torch::autograd::grad({z.sum()}, {of}, {}, /*retain_graph=*/true, /*create_graph=*/false,
                               allow_unused)[0];
}
using Function = std::function<Tensor(const Tensor&)>;

/// Which functions of `all` have other gradients in a region, and which throw Unsupported.
void require_same_or_unsupported(const std::vector<std::pair<bool, Function>>& all) {
  const Tensor x = leaf({4});
  for (std::size_t i = 0; i < all.size(); ++i) {
    INFO(i);
    const auto& [is_supported, f] = all[i];
    for (const bool early_stop : {true, false}) {
      const auto run = [&](const Tensor& x) {
        return checkpoint({.early_stop = early_stop}, f, x);
      };
      if (is_supported) {
        require_same_grads(f, run, x);
        continue;
      }
      const auto error = error_of<CheckpointError>([&] { grad_of(run(x), {x}); });
      CHECK(error.kind() == CheckpointError::Kind::Unsupported);
    }
  }
}
}  // namespace

TEST_CASE("a gradient of a kept value, inside a recompute, is right or an error", "[rule-15]") {
  require_same_or_unsupported({
      {false,
       [](const Tensor& x) {
         const Tensor q = remat::pin(x.sin());
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      // In forward q is y.
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::pin(y);
         return (slope_of(y.exp() * q, q) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::pin(y);
         return (slope_of(y.exp(), q, /*allow_unused=*/true) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.detach().clone().requires_grad_(), q = remat::pin(y);
         return (slope_of(y.exp() * q, q) * x).exp();
       }},
      {true,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::pin(y);
         return (slope_of(y.exp(), y) * q).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin();
         const Tensor q = remat::save_region([](const Tensor& y) { return y; }, y);
         return (slope_of(y.exp() * q, q) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const auto twice = [](const Tensor& y) { return std::pair(y, y); };
         const auto [p, q] = remat::save_region(twice, x.sin());
         return (slope_of(p.exp() * q, q) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), p = remat::pin(y), q = remat::pin(p);
         return (slope_of(y.exp() * q, q) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), p = remat::pin(y), q = remat::pin(y);
         return (slope_of(p.exp() * q, q) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor q = remat::save_region([](const Tensor& y) { return y * 2; }, x.sin());
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      // q is a leaf that others hold; a recompute cannot tell which.
      {false,
       [w = leaf({4})](const Tensor& x) {
         const Tensor q = remat::save_region([&w] { return w; });
         const Tensor y = x.detach().clone().requires_grad_();
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.detach().clone().requires_grad_();
         const Tensor q = remat::save_region([&] { return y; });
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin();
         const Tensor p = remat::save_region([](const Tensor& y) { return y; }, y);
         const Tensor q = remat::pin(p);
         return (slope_of(y.exp() * q, q) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor a = remat::pin(x.detach().clone().requires_grad_());
         const Tensor p = remat::pin(x.sin()), q = remat::pin(x.cos());
         const Tensors slopes =
             torch::autograd::grad({(a * p * q.exp()).sum()}, {a, p, q}, {}, true);
         return (slopes[0] * x).exp() + slopes[1] * slopes[2];
       }},
      {true,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::pin(y), z = y * q;
         return (slope_of(z.exp(), z) * x).exp();
       }},
      {false,
       [w = leaf({4})](const Tensor& x) {
         const Tensor q = remat::save_region([&w] { return w; });
         return (slope_of(w.exp() * q, w) * x).exp();
       }},
      // The leaf itself is asked for, and the kept value is another variable of it.
      {false,
       [](const Tensor& x) {
         const Tensor y = x.detach().clone().requires_grad_(), q = remat::pin(y);
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.detach().clone().requires_grad_(), q = remat::pin(y);
         (q.exp() * 2).sum().backward();
         (y * 3).sum().backward();
         return (y.grad() * x).exp();
       }},
  });
}

TEST_CASE(
    "a kept value does not have the hooks of its original, which is an error where they count",
    "[rule-15]") {
  const auto triples = [](const Tensor& y) {
    y.register_hook([](const Tensor& g) { return g.defined() ? g * 3 : g; });
    return y;
  };
  require_same_or_unsupported({
      {false,
       [=](const Tensor& x) {
         const Tensor q = triples(remat::pin(x.sin()));
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const Tensor q = remat::pin(triples(x.sin()));
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::pin(y);
         triples(y);
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const Tensor p = triples(remat::pin(x.sin())), q = remat::pin(p);
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const auto make = [=](const Tensor& x) { return triples(x.sin()); };
         const Tensor q = remat::save_region(make, x);
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const auto make = [=](const Tensor& x) { return triples(x.detach().requires_grad_()); };
         const Tensor q = remat::save_region(make, x.detach().clone());
         (q.exp() * q).sum().backward();
         return (q.grad() * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::pin(y);
         triples(q);
         return (slope_of(y.exp(), x) * q).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const auto make = [=](const Tensor& x) { return triples(x.sin()); };
         const Tensor q = remat::pin(remat::save_region(make, x));
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      {true,
       [=](const Tensor& x) {
         const Tensor q = remat::pin(triples(x.sin())), z = q.exp();
         return (slope_of(z * z, z) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const Tensor y = x.sin(), p = remat::pin(y);
         triples(remat::pin(remat::save_region([](const Tensor& y) { return y; }, y)));
         return (slope_of(p.exp() * p, p) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const Tensor y = x.sin();
         triples(remat::save_region([&] { return y; }));
         return (slope_of(y.exp(), y) * x).exp();
       }},
      // Of another value, and of another output of the operator.
      {false,
       [=](const Tensor& x) {
         const auto twice = [](const Tensor& x) { return x * 2; };
         const Tensor q = remat::save_region(twice, x.sin());
         triples(remat::save_region(twice, x.cos()));
         return (slope_of(q.exp() * q, q) * x).exp();
       }},
      {false,
       [=](const Tensor& x) {
         const std::vector<Tensor> y = x.sin().chunk(2);
         triples(y[0]);
         const Tensor q = remat::pin(y[1]);
         return (slope_of(q.exp() * q, q) * x.chunk(2)[0]).exp();
       }},
  });
}

TEST_CASE("a kept view of a leaf that was made without grad is one in the recompute", "[rule-15]") {
  // fuzz_selective_432749. It claims to require grad, and no operator sees that it does.
  require_same_or_unsupported({{true,
                                [](const Tensor& x) {
                                  Tensor view;
                                  {
                                    const at::NoGradGuard no_grad;
                                    view = remat::pin(x.view({1, 4}));
                                  }
                                  return x.sin().addcmul(x, view);
                                }},
                               {true, [](const Tensor& x) {
                                  Tensor view;
                                  {
                                    const at::NoGradGuard no_grad;
                                    view = remat::save_region(
                                        [](const Tensor& x) { return x.view({1, 4}); }, x);
                                  }
                                  return x.sin().addcmul(x, view);
                                }}});
}

TEST_CASE("what hooks around do to a region's input is no operator of a region that waits",
          "[rule-15]") {
  // fuzz_selective_426277. The inner forward waits for its backward, which makes the outer region
  // run again; its input comes back through a hook that computes.
  const Tensor x = leaf({2}), b = at::randn({2});
  const auto f = [&x](const Tensor& b) {
    const Tensor v = x.sin().exp();
    return torch::autograd::grad({((v * b).softmax(-1) * b).sum()}, {v}, {}, true)[0];
  };
  const auto inner = [&f](const Tensor& b) { return checkpoint(with(everything()), f, b); };
  const remat::SavedTensorHooksGuard doubled([](const Tensor& t) { return t * 2; },
                                             [](const Tensor& t) { return t * 0.5; });
  CHECK(bit_equal(checkpoint(inner, b), f(b)));
}

TEST_CASE("a policy is not asked about what other threads run for the region",
          "[rule-15][rule-11]") {
  const Tensor x = leaf({8});
  std::vector<std::string> asked;
  const Policy policy([&](const PolicyContext& question) {
    if (!question.is_recompute) asked.emplace_back(question.op_name);
    return CheckpointPolicy::MustSave;
  });
  const auto f = [](const Tensor& t) {
    std::promise<Tensor> cosine;
    at::launch([&] { cosine.set_value(t.detach().cos()); });
    const Tensor found = cosine.get_future().get();
    return (t.sin() * found).exp();
  };
  const Tensor y = checkpoint({.policy = policy}, f, x);
  CHECK(std::count(asked.begin(), asked.end(), "aten::sin.default") == 1);
  CHECK(std::count(asked.begin(), asked.end(), "aten::cos.default") == 0);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
}

TEST_CASE("a policy that is asked again about what forward has not come to is not held to it",
          "[rule-15]") {
  // fuzz_selective_444801. The recompute runs the backward for which forward waits.
  const Tensor x = leaf({2});
  const auto f = [](const Tensor& x) {
    const Tensor y = x.sin().exp();
    return (torch::autograd::grad({y.sum()}, {x}, {}, true)[0] * y).cos();
  };
  require_same_grads(
      f,
      [&](const Tensor& x) {
        return checkpoint(with(everything({.ask_again = true}), /*early_stop=*/false), f, x);
      },
      x);
}

TEST_CASE("a gradient past a kept value, inside a recompute, is right or an error", "[rule-15]") {
  require_same_or_unsupported({
      // save_region reads what it was not given.
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::save_region([&] { return y * 2; });
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      {true,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::save_region([&] { return y.detach() * 2; });
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::save_region([&] { return x * 2; });
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      {true,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::save_region([&] { return y * 2; });
         const Tensor z = q.exp();
         return (slope_of(z * q, z) * x).exp();
       }},
      // Another kept value is in between.
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), p = remat::save_region([&] { return y * 2; });
         const Tensor q = remat::save_region([](const Tensor& p) { return p * 2; }, p);
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), p = remat::pin(y);
         const Tensor q = remat::save_region([](const Tensor& a) { return a * 2; }, y.exp());
         return (slope_of(p * q, p) * x).exp();
       }},
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), p = remat::save_region([&] { return y * 2; });
         const Tensor q = remat::pin(p);
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      // It is read by another pin, which has nothing to do with it.
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), p = remat::pin(y), q = remat::save_region([&] { return y * 2; });
         return (slope_of(y.exp() * q, y) * p).exp();
       }},
      // It reads a leaf of the function's own.
      {false,
       [](const Tensor& x) {
         const Tensor y = x.detach().clone().requires_grad_();
         const Tensor q = remat::save_region([&] { return y * 2; });
         return (slope_of(y.exp() * q, y) * x).exp();
       }},
      // Of an operator with two results it was given one, and reads the other.
      {false,
       [](const Tensor& x) {
         const std::vector<Tensor> y = x.sin().chunk(2);
         const auto sum = [&y](const Tensor& a) { return a * 2 + y[1]; };
         const Tensor q = remat::save_region(sum, y[0]);
         return (slope_of(y[1].exp() * q, y[1]) * x.chunk(2)[0]).exp();
       }},
      // It is an error also where the function catches it.
      {false,
       [](const Tensor& x) {
         const Tensor y = x.sin(), q = remat::pin(y);
         Tensor slope = at::zeros_like(x);
         try {
           slope = slope_of(q.exp(), y);
         } catch (const std::exception&) {
         }
         return (slope * x).exp();
       }},
  });
}

TEST_CASE("formulas that ask for dispatch modes find in a recompute what they found in forward",
          "[rule-15]") {
  const Tensor x = leaf({4});
  // Where a mode is active, the gradient of prod is another formula, which saves other tensors.
  const auto f = [](const Tensor& x) {
    const Tensor a = x.sin();
    return torch::autograd::grad({a.prod()}, {a}, {}, true, /*create_graph=*/true)[0] * x.exp();
  };
  const auto g = [&](const Tensor& x) { return checkpoint(f, x.cos()).sin(); };
  const Tensor plain = grad_of(f(x), {x})[0], nested = grad_of(f(x.cos()).sin(), {x})[0];
  for (const Policy& policy : {everything(), remat::save_ops({"aten::mm"})}) {
    CHECK(at::allclose(grad_of(checkpoint(with(policy), f, x), {x})[0], plain));
    CHECK(at::allclose(grad_of(checkpoint(with(policy), g, x), {x})[0], nested));
  }
}

TEST_CASE("what the region made, and save_region returned, is no captured tensor", "[rule-15]") {
  const Tensor x = leaf({8});
  const auto f = [](const Tensor& x) {
    const auto [values, indices] = x.sort();
    const Tensor pinned = remat::pin(values.exp());
    const auto both = remat::save_region(
        [](const Tensor& v, const Tensor& i) { return std::pair(v * 2, i); }, values, indices);
    return both.first.gather(0, both.second) * pinned;
  };
  for (const auto check : {remat::DeterminismCheck::Metadata, remat::DeterminismCheck::Values})
    require_same_grads(
        f, [&](const Tensor& x) { return checkpoint({.determinism_check = check}, f, x); }, x);
}

TEST_CASE("a cast that forward found in autocast's cache is made by the recompute", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  const auto f = [](const Tensor& x, const Tensor& w) {
    return x.mm(w).sin().mm(w).to(at::kFloat).exp();
  };
  for (const bool asks_again : {false, true})
    for (const bool has_scope : {false, true}) {
      const auto run = [&](bool is_checkpointed) {
        const Tensor a = copy_of(x), w = copy_of(x);
        Tensor y;
        Tensors gradients;
        at::autocast::set_autocast_enabled(at::kCPU, true);
        at::autocast::increment_nesting();
        const Tensor before = a.mm(w);  // casts both
        const CheckpointOptions options = with(everything({.ask_again = asks_again}));
        y = before + (is_checkpointed ? checkpoint(options, f, a, w) : f(a, w));
        if (has_scope) gradients = grad_of(y, {a, w});
        if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(at::kCPU, false);
        return has_scope ? gradients : grad_of(y, {a, w});
      };
      require_bit_equal(run(true), run(false));
    }
}

TEST_CASE("inference tensors are pinned and returned by save_region", "[rule-15]") {
  const Tensor x = leaf({4});
  Tensor two;
  {
    const c10::InferenceMode mode;
    two = at::ones({4}) * 2;
  }
  const auto make = [] {
    const c10::InferenceMode mode;
    return at::ones({4}) * 2;
  };
  for (const bool pins : {false, true}) {
    const auto f = [&](const Tensor& x) {
      const Tensor w = pins ? remat::pin(two) : remat::save_region(make);
      return (x.sin() + w.clone()).exp();
    };
    const auto plain = [](const Tensor& x) { return (x.sin() + 2).exp(); };
    require_same_grads(plain, [&](const Tensor& x) { return checkpoint(f, x); }, x);
    require_same_grads([&](const Tensor& x) { return plain(x.cos()); },
                       [&](const Tensor& x) {
                         return checkpoint([&](const Tensor& x) { return checkpoint(f, x.cos()); },
                                           x);
                       },
                       x);
  }
}

TEST_CASE("a stop that user code catches under a policy is no mismatch", "[rule-5][rule-15]") {
  // fuzz_selective_241819. What runs after the caught stop takes another way than forward did.
  const remat::CheckpointOptions options{.policy = remat::save_ops({"aten::mul", "aten::gt"})};
  const auto function = [](const Tensor& x, const Tensor& other) {
    Tensor y;
    try {
      y = x.square();
      y = y * y;
    } catch (...) {
    }
    const Tensor masked = other * (other > 0);
    return y.defined() ? y : masked;
  };
  const Tensor x = leaf({2}), other = at::randn({2, 3});
  const Tensor y = remat::checkpoint(options, function, x, other);
  for (int i = 0; i < 2; ++i)
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), grad_of(function(x, other), {x}));
}

TEST_CASE("what a region inside captures and saves is no shell", "[rule-15]") {
  const Tensor x = leaf({4}), w = leaf({4});
  // The input is saved, and no operator reads it. The backward needs it in the midst of forward,
  // also when the outer region's recompute runs that forward again.
  const auto innermost = [](const Tensor&, const Tensor& x) {
    const Tensor a = x.exp();
    return torch::autograd::grad({(a * a).sum()}, {a}, {}, true, /*create_graph=*/true)[0];
  };
  const auto f = [&](const Tensor& x) {
    const Tensor captured = w + 1;  // kept
    const auto inner = [&innermost, captured](const Tensor& x) {
      return checkpoint(innermost, captured, x.sin()).cos();
    };
    return checkpoint(with(everything()), inner, x);
  };
  require_same_grads([&](const Tensor& x) { return innermost(w, x.sin()).cos(); },
                     [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
}

TEST_CASE("save_region of a function that writes to its argument keeps nothing, and is right",
          "[checkpoint][rule-15]") {
  const auto f = [](const Tensor& x, const Tensor& w) {
    const Tensor z = x * 2;
    const Tensor kept = remat::save_region(
        [](Tensor z, const Tensor& w) {
          z.mul_(2);
          return z * w;
        },
        z, w);
    return (kept * z).sin() * z;
  };
  const Tensor x = leaf({3}), w = leaf({3}), copy = copy_of(x);
  const Tensor expected = grad_of(f(copy, w), {copy})[0];
  const Tensor y = remat::checkpoint(f, x, w);
  for (int i = 0; i < 2; ++i)
    CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
}
