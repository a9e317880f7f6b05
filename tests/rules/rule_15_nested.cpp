// Rule 15: regions with a policy inside others, and a backward inside them.

#include "tests/support/policies.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using remat::SelectiveOptions;

TEST_CASE("selective regions nest, and the innermost decides", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  KernelCounter kernels;
  const auto inner = [](const Tensor& x) { return x.mm(x).sigmoid().mm(x); };
  const auto nested = [&](const CheckpointOptions& outer_options,
                          const CheckpointOptions& inner_options) {
    const auto outer = [=](const Tensor& x) {
      return checkpoint(inner_options, inner, x.mm(x).sin()).exp().mm(x);
    };
    const auto plain = [=](const Tensor& x) { return inner(x.mm(x).sin()).exp().mm(x); };
    require_same_grads(
        plain, [&](const Tensor& x) { return checkpoint(outer_options, outer, x); }, x);
    const LiveBytes bytes;
    const Tensor y = checkpoint(outer_options, outer, x);
    const int64_t held = bytes.held() - static_cast<int64_t>(y.storage().nbytes());
    kernels.reset();
    grad_of(y, {x});
    return std::pair(held / 64, kernels.count("mm"));
  };
  const auto save = saving({"aten::mm"});
  const auto none = nested({}, {});
  const auto outer = nested(save, {});
  const auto inside = nested({}, save);
  const auto both = nested(save, save);
  CHECK(none.first == 0);
  CHECK(inside.first == 0);  // the region around drops what the one inside keeps
  CHECK(outer.first == 1);   // its own first product; the last one is nobody's need
  CHECK(outer.second < none.second);
  CHECK(inside.second < none.second);
  CHECK(both.second < outer.second);
}

TEST_CASE("a backward inside a selective region", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  const auto f = [](const Tensor& x) {
    const Tensor y = x.mm(x).sin().mm(x);
    const Tensor slope =
        torch::autograd::grad({y.exp().sum()}, {x}, {}, /*retain_graph=*/true, true)[0];
    return (slope * y).sum();
  };
  const auto keeping = [&](const Policy& policy) {
    return [&f, policy](const Tensor& x) { return checkpoint(with(policy), f, x); };
  };
  require_same_grads({.kept = {"mm"}, .again = {"sin"}}, f, keeping(remat::save_ops({"aten::mm"})),
                     x);
  require_same_grads({.kept = {"mm", "sin", "exp"}}, f, keeping(everything()), x);
}

TEST_CASE("what an inner region keeps does not make the outer one recompute in its own forward",
          "[rule-15]") {
  const Tensor x = leaf({4});
  Calls outer_calls;
  const auto inner = [](const Tensor& x) { return x.sin().cos().exp(); };
  const auto f = [&](const Tensor& x) {
    outer_calls();
    return checkpoint(with(everything()), inner, x.exp()).sin();
  };
  for (const CheckpointOptions& options : {CheckpointOptions{}, with(everything())}) {
    outer_calls.reset();
    const Tensor y = checkpoint(options, f, x);
    CHECK(outer_calls.count() == 1);
    grad_of(y, {x});
  }
  require_same_grads([&](const Tensor& x) { return inner(x.exp()).sin(); },
                     [&](const Tensor& x) { return checkpoint(f, x); }, x);
}

TEST_CASE("a result that an inner region keeps and changes is a selective error there too",
          "[rule-15]") {
  const Tensor x = leaf({4, 4});
  const auto f = [](const Tensor& x, bool allowed) {
    const Policy policy([](const PolicyContext&) { return CheckpointPolicy::MustSave; },
                        SelectiveOptions{.allow_cache_entry_mutation = allowed});
    const auto inner = [](const Tensor& x) {
      Tensor y = x.sin();
      y.mul_(2);
      return y.exp();
    };
    return checkpoint(with(policy), inner, x.cos()).sin();
  };
  const Tensor y = checkpoint(f, x, false);
  CHECK(kind_of(y, {x}) == CheckpointError::Kind::SelectiveMutation);
  require_same_grads([&](const Tensor& x) { return (x.cos().sin() * 2).exp().sin(); },
                     [&](const Tensor& x) { return checkpoint(f, x, true); }, x);
}

TEST_CASE("what a region inside save_region keeps is kept by no slot of the region around",
          "[rule-15]") {
  const Tensor x = leaf({4});
  for (const bool pins : {false, true}) {
    const auto inner = [pins](const Tensor& x) {
      const Tensor y = x.sin().cos();
      return (pins ? remat::pin(y) : y).exp();
    };
    const auto f = [&](const Tensor& x) {
      const auto body = [&](const Tensor& x) {
        return checkpoint(with(pins ? Policy() : everything()), inner, x.exp()).cos();
      };
      return remat::save_region(body, x.cos()).sin();
    };
    require_same_grads([&](const Tensor& x) { return inner(x.cos().exp()).cos().sin(); },
                       [&](const Tensor& x) { return checkpoint(f, x); }, x);
    require_same_grads([&](const Tensor& x) { return inner(x.cos().exp()).cos().sin().exp(); },
                       [&](const Tensor& x) {
                         return checkpoint([&](const Tensor& x) { return checkpoint(f, x).exp(); },
                                           x);
                       },
                       x);
  }
}

TEST_CASE("a region without a policy is recomputed in the forward of one with a policy",
          "[rule-15]") {
  const Tensor x = leaf({4});
  const auto inner = [](const Tensor& x) { return remat::pin(x.sin()).exp(); };
  const auto f = [&](const Tensor& x) {
    const Tensor a = x.cos();
    const Tensor y = checkpoint(inner, a);
    return torch::autograd::grad({y.sum()}, {a}, {}, /*retain_graph=*/true)[0].detach() * y;
  };
  require_same_grads(
      [&](const Tensor& x) {
        const Tensor a = x.cos(), y = inner(a);
        return torch::autograd::grad({y.sum()}, {a}, {}, /*retain_graph=*/true)[0].detach() * y;
      },
      [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
}

TEST_CASE("a value of a region inside that is named in a backward is kept itself", "[rule-15]") {
  // It belongs to no call of this region: none is kept in its place.
  struct NamesWhatItSaved : torch::autograd::Function<NamesWhatItSaved> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& t) {
      context->save_for_backward({t});
      return t * 2;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list grads) {
      return {grads[0] * remat::checkpoint_name(context->get_saved_variables()[0], "value")};
    }
  };
  const auto f = [](const Tensor& x) {
    const Tensor y = x.sin();
    const auto inner = [](const Tensor& t) { return NamesWhatItSaved::apply(t.exp()); };
    const Tensor slope = grad_of(checkpoint(inner, y), {y})[0];
    return (slope * y).exp();
  };
  const Tensor x = leaf({4});
  KernelCounter kernels;
  Warnings warnings;
  const Tensor y = checkpoint(with(remat::save_names({"value"})), f, x);
  kernels.reset();
  const Tensor gradient = grad_of(y, {x})[0];
  CHECK(kernels.count("sin") == 1);
  // The backward makes this region recompute in the midst of forward, before it meets the name.
  CHECK(warnings.texts.empty());
  CHECK(bit_equal(gradient, grad_of(f(x), {x})[0]));
}
