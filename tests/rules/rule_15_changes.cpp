// Rule 15: kept results that are written to, by the region, by an operator or by the program.

#include "tests/support/policies.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using remat::SelectiveOptions;

TEST_CASE("a kept result that is changed in place is an error unless that is allowed",
          "[rule-15]") {
  const Tensor x = leaf({3, 3});
  const auto f = [](const Tensor& x) {
    Tensor y = x.mm(x);
    y.add_(1);
    return y.sin();
  };
  CHECK(kind_of(checkpoint(saving({"aten::mm"}), f, x), {x}) ==
        CheckpointError::Kind::SelectiveMutation);
  require_same_grads(
      f,
      [&](const Tensor& x) {
        return checkpoint(saving({"aten::mm"}, {.allow_cache_entry_mutation = true}), f, x);
      },
      x);
  // After the region, through its result.
  const auto g = [](const Tensor& x) { return x.mm(x); };
  const auto h = [&](const Tensor& x) {
    Tensor y = checkpoint(saving({"aten::mm"}, {.allow_cache_entry_mutation = true}), g, x);
    y.mul_(2);
    return y.exp();
  };
  require_same_grads([&](const Tensor& x) { return g(x).mul_(2).exp(); }, h, x);
}

TEST_CASE("what a composite operator writes to its own kept part is kept as written", "[rule-15]") {
  const Tensor x = leaf({2, 3, 4}), w = leaf({5, 4}), b = leaf({5});
  KernelCounter kernels;
  // As linear does where it does not take addmm: the result of mm is written through another
  // tensor.
  const auto f = [](const Tensor& x, const Tensor& w, const Tensor& b) {
    Tensor y = at::_unsafe_view(x.reshape({6, 4}).mm(w.t()), {2, 3, 5});
    y.add_(b).mul_(2);
    return y.sigmoid().exp();
  };
  const auto g = [&](const Tensor& x, const Tensor& w, const Tensor& b) {
    return checkpoint(saving({"aten::mm"}), f, x, w, b);
  };
  require_same_grads(f, g, x, w, b);
  const Tensor y = g(x, w, b);
  kernels.reset();
  grad_of(y, {x, w, b}, {.retain_graph = true});
  CHECK(kernels.count("mm") == 2);  // of the gradients
  kernels.reset();
  grad_of(y, {x, w, b});
  CHECK(kernels.count("mm") == 2);
  // Read before it was written, it has to be computed again.
  const auto read = [](const Tensor& x, const Tensor& w, const Tensor& b) {
    const Tensor product = x.reshape({6, 4}).mm(w.t());
    const Tensor before = product.detach().sigmoid();
    Tensor y = at::_unsafe_view(product, {2, 3, 5});
    y.add_(b);
    return (y.sigmoid() * before.view({2, 3, 5})).exp();
  };
  require_same_grads(
      read,
      [&](const Tensor& x, const Tensor& w, const Tensor& b) {
        return checkpoint(saving({"aten::mm"}), read, x, w, b);
      },
      x, w, b);
}

TEST_CASE("keeping everything lets go of blank tensors that are filled", "[rule-15]") {
  const Tensor x = leaf({32});
  const auto f = [](const Tensor& x) {
    Tensor filled = at::empty_like(x.detach()).fill_(3);
    filled.add_(at::zeros({32}).normal_());
    return at::dropout(x.sin() * filled, 0.5, true).exp();
  };
  require_same_grads(
      {.kept = {"sin", "exp"}, .again = {"fill_.Scalar"}}, f,
      [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
}

TEST_CASE("in-place operators after a kept result that they do not write work", "[rule-15]") {
  const Tensor x = leaf({3, 3});
  const auto f = [](const Tensor& x) {
    Tensor y = x.mm(x).sin();
    y.mul_(2);
    y.narrow(0, 0, 1).add_(1);
    return y.mm(x).exp();
  };
  require_same_grads(
      {.kept = {"mm"}, .again = {"sin", "exp"}}, f,
      [&](const Tensor& x) { return checkpoint(saving({"aten::mm"}), f, x); }, x);
}

TEST_CASE("a result made by an operator that also writes an argument has an origin", "[rule-15]") {
  const Tensor x = leaf({8});
  // rrelu_with_noise fills `noise`. Its result outlives forward, so its storage is no proof.
  std::vector<Tensor> alive;
  const auto f = [&](const Tensor& x) {
    const Tensor y = at::rrelu(x.sin(), 0.1, 0.4, true);
    alive.push_back(y);
    return y.exp().cos();
  };
  require_same_grads(
      f, [&](const Tensor& x) { return checkpoint(saving({"aten::exp"}), f, x); }, x);
  // Inside a region of its own, which only counts for the one around.
  const auto g = [&](const Tensor& x) { return checkpoint(f, x).exp().cos(); };
  require_same_grads([&](const Tensor& x) { return f(x).exp().cos(); },
                     [&](const Tensor& x) { return checkpoint(saving({"aten::exp"}), g, x); }, x);
  alive.clear();
}

TEST_CASE("everything is kept around operators that fill memory of their own", "[rule-15]") {
  const Tensor x = leaf({32});
  const auto f = [](const Tensor& x) {
    // On a CPU dropout is empty_like and bernoulli_, rrelu empty_like and an operator that fills
    // it.
    return at::rrelu(at::dropout(x.sin(), 0.5, true).exp(), 0.1, 0.4, true).cos();
  };
  for (const Policy& policy : {everything(), remat::save_all_but_names({"none"})})
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
}

TEST_CASE("a write that counts up no version is seen", "[rule-15]") {
  const Tensor x = leaf({8});
  const auto f = [](const Tensor& x) {
    Tensor noise = x.detach() * 0;  // kept, and then filled
    const Tensor y = at::rrelu_with_noise(x.sin(), noise, 0.1, 0.4, true);
    return (y * noise).exp();
  };
  const auto allowing = [](bool allowed) {
    return with(Policy([](const PolicyContext&) { return CheckpointPolicy::MustSave; },
                       SelectiveOptions{.allow_cache_entry_mutation = allowed}));
  };
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(allowing(true), f, x); }, x);
  CHECK(kind_of(checkpoint(allowing(false), f, x), {x}) ==
        CheckpointError::Kind::SelectiveMutation);
}

TEST_CASE("a pinned value that was changed is said to be, whatever the region made anew before it",
          "[rule-15][rule-10]") {
  // fuzz_selective_233264. Mean and deviation were held for a name, a mask by the region inside.
  const auto norm = [](const Tensor& x) { return remat::pin(at::layer_norm(x, {3})); };
  const auto masked = [](const Tensor& x) {
    const Tensor mask = x.detach() * 2;
    const Tensor y = checkpoint([mask](const Tensor& x) { return x.sin() * mask; }, x);
    return remat::pin(y * mask);
  };
  const Policy policy([](const PolicyContext&) { return CheckpointPolicy::PreferRecompute; });
  const CheckpointOptions options{.determinism_check = remat::DeterminismCheck::Values,
                                  .policy = policy};
  const Tensor x = leaf({3});
  for (const auto& f : {std::function<Tensor(const Tensor&)>(norm), {masked}}) {
    Tensor y = checkpoint(options, f, x);
    y.mul_(2);
    CHECK(kind_of(y, {x}) == CheckpointError::Kind::SelectiveMutation);
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(options, f, x); }, x);
  }
}

TEST_CASE("a kept constant that is filled in place is made again", "[rule-15]") {
  const Tensor x = leaf({3, 3});
  const auto f = [](const Tensor& x) {
    const Tensor mask = at::ones({3, 3}).tril_();
    return (x * mask).exp().sin();
  };
  require_same_grads(
      {.kept = {"exp", "sin"}, .again = {"tril_"}}, f,
      [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
}

TEST_CASE("a named captured tensor that changed after forward is an error all the same",
          "[rule-15][rule-10]") {
  const auto names = [](const remat::PolicyContext& call) {
    return call.name.empty() ? CheckpointPolicy::PreferRecompute : CheckpointPolicy::MustSave;
  };
  const Policy policy(names, {.allow_cache_entry_mutation = true});
  const Tensor x = leaf({4}), captured = at::randn({4});
  // Nothing that autograd saves is the captured tensor.
  const Tensor y = checkpoint(
      with(policy),
      [&](const Tensor& t) { return t * remat::checkpoint_name(captured, "captured").sin(); }, x);
  captured.add_(1);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::SelectiveMutation);
}

TEST_CASE("a named value that is changed in place is computed again where changes are allowed",
          "[rule-15]") {
  const bool allows = GENERATE(true, false);
  const auto names = [](const remat::PolicyContext& call) {
    return call.name.empty() ? CheckpointPolicy::PreferRecompute : CheckpointPolicy::MustSave;
  };
  const Policy policy(names, {.allow_cache_entry_mutation = allows});
  // No call of the outer region makes it, so that the value itself is kept.
  const auto f = [](const Tensor& x) {
    const Tensor inner = checkpoint([](const Tensor& t) { return t.sin(); }, x);
    const Tensor named = remat::checkpoint_name(inner, "inner");
    const Tensor y = (named * 2).mm(x);
    return (named.exp_() * y).tanh();
  };
  const Tensor x = leaf({4, 4});
  const auto region = [&](const Tensor& t) { return checkpoint(with(policy), f, t); };
  if (allows) return require_same_grads(f, region, x);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(region(x), {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::SelectiveMutation);
}
