// Rule 15 where a gradient is taken inside a region with a policy, pin or save_region.

#include <functional>

#include "tests/support/policies.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::Policy;

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
      // The results belong to another value, and to another output of the operator.
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
      // It was given one of the two results of an operator, and reads the other.
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
