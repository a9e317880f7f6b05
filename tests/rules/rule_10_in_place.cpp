// Rule 10: a tensor saved and changed in place in one region raises as in plain execution, or is
// right.

#include "tests/support/support.h"

namespace {

using Kind = remat::CheckpointError::Kind;
using remat::CheckpointError;

// ---- changed in place inside the region

TEST_CASE("a tensor saved and then changed in place in the same region is never misread",
          "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  const int64_t size = GENERATE(as<int64_t>{}, 3, 100000);
  CAPTURE(early_stop, size);
  const Tensor x = leaf({size});
  auto region = [&](auto f) { return remat::checkpoint({.early_stop = early_stop}, f, x); };
  // The gradient that an unchanged copy in the place of the saved tensor gives.
  SECTION("a result") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        const Tensor saved = t.exp();
        Tensor y = copy ? saved.clone() : saved;
        y.mul_(2);
        return y.sin();
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("an operand") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        Tensor h = t * 2;
        const Tensor s = (copy ? h.clone() : h).sin();
        h.add_(1);
        return s * 3 + h;
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("through a view") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        Tensor h = t * 2;
        const Tensor s = (copy ? h.clone() : h).cos();
        h.narrow(0, 0, 2).zero_();
        return s + h;
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("a factor that does not require grad") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        Tensor mask = at::ones_like(t).detach();
        const Tensor s = t * (copy ? mask.clone() : mask);
        mask.zero_();
        return s.sin();
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("a captured buffer that the region uses and then updates") {
    auto f = [](bool copy, Tensor buffer) {
      return [copy, buffer](const Tensor& t) mutable {
        const Tensor s = t * (copy ? buffer.clone() : buffer);
        buffer.add_(1);
        return s.sin();
      };
    };
    const Tensor buffer = at::ones({size});
    CHECK_THROWS_WITH(grad_of(f(false, buffer.clone())(x), {x}),
                      contains("modified by an inplace operation"));
    Tensors grads;
    try {
      grads = grad_of(region(f(false, buffer.clone())), {x});
    } catch (const CheckpointError& e) {
      CHECK(e.kind() == Kind::CaptureChanged);
    } catch (const c10::Error& e) {
      CHECK_THAT(text_of(e), contains("modified by an inplace operation"));
    }
    if (!grads.empty()) require_bit_equal(grads, grad_of(f(true, buffer.clone())(x), {x}));
  }
}

TEST_CASE("a tensor changed in place whose old value no gradient needs raises nothing",
          "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  auto f = [](const Tensor& t) {
    Tensor changed = t.exp();
    const Tensor other = t.sin();
    {
      at::NoGradGuard no_grad;
      changed.zero_();
    }
    return std::pair(changed, other);
  };
  const auto [plain_changed, plain] = f(x);
  const auto [changed, other] = remat::checkpoint({.early_stop = early_stop}, f, x);
  require_bit_equal(grad_of(other, {x}), grad_of(plain, {x}));
}

TEST_CASE("in-place operators on views of intermediates give plain gradients", "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  std::vector<std::function<Tensor(const Tensor&)>> programs{
      [](const Tensor& t) {
        Tensor h = t.sin();
        h.narrow(0, 0, 2).mul_(t.narrow(0, 1, 2));
        return h;
      },
      [](const Tensor& t) {
        Tensor h = t * 2;
        h.select(1, 1).sin_();
        h.t().narrow(0, 2, 1).add_(t[0].sum());
        return h.cos();
      },
      [](const Tensor& t) {
        Tensor h = at::zeros({3, 4}, t.options());
        h.copy_(t);
        h.diagonal().mul_(3).sin_();
        h.view(-1).slice(0, 0, 12, 5).fill_(0);
        return h.tanh();
      },
      [](const Tensor& t) {
        Tensor h = t.clone();
        const Tensor row = h[1];
        row.mul_(h[2].exp());
        Tensor part = h.index_select(0, at::arange(2));
        part.narrow(1, 1, 2).mul_(t.select(1, 0).narrow(0, 0, 2).unsqueeze(1));
        return h * part.sum(0);
      },
      [](const Tensor& t) {
        Tensor h = t.unsqueeze(0).clone();
        h.index_put_({at::zeros({2}, at::kLong), at::arange(2)}, t.narrow(0, 1, 2).exp());
        h.masked_fill_(h > 0.5, 0.25);
        return h.sin().squeeze(0);
      },
  };
  for (size_t i = 0; i < programs.size(); ++i) {
    CAPTURE(i);
    const auto& f = programs[i];
    auto region = [&](const Tensor& t) {
      return remat::checkpoint({.early_stop = early_stop}, f, t);
    };
    const Tensor x = leaf({3, 4}, at::kDouble);
    bool plain_raises = false;
    try {
      grad_of(f(x), {x});
    } catch (const c10::Error&) {
      plain_raises = true;
    }
    REQUIRE_FALSE(plain_raises);
    require_same_grads(f, region, x);
    require_same_grads(
        [&](const Tensor& t) { return f(f(t.sin()).expand({3, 4})); },
        [&](const Tensor& t) {
          return remat::checkpoint(
              [&](const Tensor& u) { return region(region(u.sin()).expand({3, 4})); }, t);
        },
        x);
    // A numerical check along a direction.
    const Tensor weights = at::randn_like(f(x)).detach(), direction = at::randn_like(x).detach();
    const double analytic =
        (torch::autograd::grad({(region(x) * weights).sum()}, {x})[0] * direction)
            .sum()
            .item<double>();
    at::NoGradGuard no_grad;
    const double h = 1e-6;
    const double numeric =
        (((f(x + direction * h) - f(x - direction * h)) * weights).sum() / (2 * h)).item<double>();
    CHECK(std::abs(numeric - analytic) < 1e-6 * (1 + std::abs(analytic)));
  }
}

TEST_CASE("saved tensors of every kind come back as they were", "[rule-10]") {
  struct Keeps : torch::autograd::Function<Keeps> {
    static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
      ctx->save_for_backward({Tensor(), x, at::arange(3), Tensor(), at::ones({2}, at::kBool)});
      return x * 2;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   torch::autograd::variable_list grads) {
      const auto saved = ctx->get_saved_variables();
      if (saved.size() != 5 || saved[0].defined() || saved[3].defined() ||
          saved[2].scalar_type() != at::kLong || saved[4].scalar_type() != at::kBool) {
        throw std::logic_error("saved tensors came back changed");
      }
      return {grads[0] * 2 + saved[1] * 0};
    }
  };
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor sparse = (at::eye(4) * 3).to_sparse();
  auto check = [&](auto f, const Tensor& x) {
    Calls calls;
    require_same_grads(
        f,
        [&](const Tensor& t) {
          return remat::checkpoint({.early_stop = early_stop}, counted(calls, f), t);
        },
        x);
    CHECK(calls.count() == 2);
  };
  check([](const Tensor& t) { return Keeps::apply(t.sin()); }, leaf({3}));
  check([](const Tensor& t) { return at::exp(t * t); }, leaf({3}, at::kComplexFloat));
  check([&](const Tensor& t) { return at::mm(sparse, t).sin(); }, leaf({4, 2}));
  check([](const Tensor& t) { return at::gather(t.exp(), 0, at::arange(3).flip(0)); }, leaf({3}));
  check([](const Tensor& t) { return t.to(at::kHalf).sin().to(at::kFloat); }, leaf({3}));
  check([](const Tensor& t) { return t.to(at::kBFloat16).exp().to(at::kDouble); }, leaf({3}));
  check([](const Tensor& t) { return (t.narrow(0, 0, 0) * 2).exp().sum() + t.sin(); }, leaf({3}));
}

}  // namespace
