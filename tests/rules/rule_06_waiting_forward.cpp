// Rule 6: a recompute that a forward waits for, which must not run ahead of that forward.

#include <torch/csrc/autograd/generated/Functions.h>

#include <future>

#include "tests/support/saving_functions.h"
#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

TEST_CASE("a recompute never runs ahead of the forward that waits for it", "[rule-6][rule-11]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  Calls before, after;
  const Tensor y = remat::checkpoint(
      {.early_stop = early_stop},
      [&](const Tensor& t) {
        before();
        const Tensor h = t.sin() * t;
        const Tensor g = grad_of(h, {t}, {.retain_graph = true})[0];
        after();
        return h * g;
      },
      x);
  CHECK(before.count() == 2);
  CHECK(after.count() == 1);
  require_bit_equal(grad_of(y, {x}), grad_of((x.sin() * x) * grad_of(x.sin() * x, {x})[0], {x}));
}

TEST_CASE("a recompute for a backward inside runs nothing that comes after that backward",
          "[rule-6]") {
  // The hook's region reads an argument that the outer region saved, inside of the engine, where no
  // recompute can be stopped; what follows saves nothing.
  const bool accumulates = GENERATE(false, true);
  const Tensor w = leaf({2});
  int late = 0;
  const auto f = [&](const Tensor& t) {
    const Tensor y = w * 2;
    y.register_hook([](const Tensor& g) {
      const at::AutoGradMode with_grad(true);
      const Tensor a = g.detach().requires_grad_();
      const Tensor b = remat::checkpoint([](const Tensor& u) { return u.sin().exp(); }, a);
      return g * grad_of(b, {a})[0];
    });
    if (accumulates)
      y.backward(at::ones_like(y), /*retain_graph=*/true, /*create_graph=*/false, {{w}});
    else
      torch::autograd::grad({y}, {y}, {at::ones_like(y)}, /*retain_graph=*/true);
    ++late;
    t.mul_(3);  // in place, on the argument
    return Tensors{t};
  };
  const Tensor x = leaf({2});
  const Tensor plain = x * 1, checkpointed = x * 1;
  const Tensors expected = f(plain);
  w.mutable_grad().reset();
  const Tensors results = remat::checkpoint(f, checkpointed);
  CHECK(late == 2);
  CHECK(at::equal(checkpointed, plain));
  CHECK(checkpointed._version() == plain._version());
  require_bit_equal(grad_of(results[0], {x}), grad_of(expected[0], {x}));
  w.mutable_grad().reset();
}

TEST_CASE(
    "a recompute for a saved tensor that forward reads runs nothing that comes after that read",
    "[rule-6][rule-5]") {
  const bool by_function = GENERATE(false, true);
  const Tensor w = leaf({2});
  int late = 0;
  Tensor read;
  const auto f = [&](const Tensor& t) {
    const Tensor y = by_function ? SavesExp::apply(w) : w.exp();
    const auto node = y.grad_fn();
    if (by_function)
      read = dynamic_cast<torch::autograd::CppNode<SavesExp>&>(*node).ctx_.get_saved_variables()[0];
    else
      read = dynamic_cast<torch::autograd::generated::ExpBackward0&>(*node).result_.unpack(node);
    read = read.detach().clone();
    ++late;
    t.mul_(3);  // in place, on the argument
    return Tensors{t};
  };
  const Tensor x = leaf({2});
  const Tensor plain = x * 1, checkpointed = x * 1;
  const Tensors expected = f(plain);
  const Tensors results = remat::checkpoint(f, checkpointed);
  CHECK(late == 2);
  CHECK(at::equal(read, w.exp()));
  CHECK(at::equal(checkpointed, plain));
  require_bit_equal(grad_of(results[0], {x}), grad_of(expected[0], {x}));
}

Tensor read_result(const Tensor& exponential) {
  const auto node = exponential.grad_fn();
  return dynamic_cast<torch::autograd::generated::ExpBackward0&>(*node).result_.unpack(node);
}

remat::SavedTensorHooksGuard copying_hooks() {
  return remat::SavedTensorHooksGuard([](const Tensor& t) { return t.detach().clone(); },
                                      [](const Tensor& t) { return t; });
}

TEST_CASE(
    "a recompute that goes on past the point where forward waits does not write there unnoticed",
    "[rule-6][rule-11]") {
  // No recompute can be stopped while it waits for another thread, nor in a function that is
  // noexcept.
  const Tensor w = leaf({2}), x = leaf({2});
  const auto f = [&w](const Tensor& t, auto&& wait_for) {
    const Tensor y = (w * 2).exp();
    const Tensor g = wait_for([&] { return grad_of(y, {w}, {.retain_graph = true})[0].detach(); });
    t.mul_(3);
    return t * g;
  };
  const auto here = [](auto&& gradient) { return gradient(); };
  const auto elsewhere = [](auto&& gradient) {
    return std::async(std::launch::async, gradient).get();
  };
  const auto by_thread = [&](const Tensor& t) { return f(t, elsewhere); };
  const auto without_stop = [&](const Tensor& t) noexcept { return f(t, here); };
  const Tensors expected = grad_of(f(x * 1, here), {x});
  const remat::CheckpointOptions copies{.inputs = remat::InputMode::CopyOnWrite};
  require_bit_equal(grad_of(remat::checkpoint(copies, by_thread, x * 1), {x}), expected);
  require_bit_equal(grad_of(remat::checkpoint(copies, without_stop, x * 1), {x}), expected);
  const auto error = error_of<remat::CheckpointError>([&] { remat::checkpoint(by_thread, x * 1); });
  CHECK(error.kind() == remat::CheckpointError::Kind::InputChanged);
  CHECK_THAT(error.what(), contains("before forward did, while forward waits for the recompute"));
}

TEST_CASE("what a recompute has kept and changed in place since it does not read again",
          "[rule-6][rule-10]") {
  // The region inside waits for a recompute of its own, in forward and in each recompute of the one
  // around it. There it would begin with the argument that its function has written to.
  const auto check = GENERATE(remat::DeterminismCheck::Metadata, remat::DeterminismCheck::Values);
  const auto inputs = GENERATE(remat::InputMode::Shared, remat::InputMode::CopyOnWrite);
  CAPTURE(static_cast<int>(check), static_cast<int>(inputs));
  const Tensor w = leaf({2}), b = leaf({2});
  const auto f = [&](const Tensor& t) {
    const Tensor s = remat::checkpoint(
        {.determinism_check = check, .inputs = inputs},
        [](const Tensor&, const Tensor& a) {
          a.sin_();
          return read_result(a.exp()).detach().clone();
        },
        t, t);
    return b * s;
  };
  const Tensors expected = [&] {
    const remat::DisableCheckpointGuard plain;
    return grad_of(f(w * 1), {b});
  }();
  Tensor y;
  {
    const auto hooks = copying_hooks();
    y = remat::checkpoint({.determinism_check = check}, f, w * 1);
  }
  if (inputs == remat::InputMode::CopyOnWrite) {
    require_bit_equal(grad_of(y, {b}), expected);
    return;
  }
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {b}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::ValueMismatch);
  CHECK_THAT(error.what(), contains("modified by an inplace operation"));
  CHECK_THAT(error.what(),
             contains("as an argument of an inner region, is at version 1; expected version 0"));
}

TEST_CASE(
    "values are compared as they were when they were saved, whatever is written to them later",
    "[rule-6][rule-10]") {
  // In forward the function goes on after the point where a recompute ends.
  const remat::CheckpointOptions options{.determinism_check = remat::DeterminismCheck::Values,
                                         .inputs = remat::InputMode::CopyOnWrite};
  const Tensor w = leaf({2}), x = leaf({2});
  SECTION("an argument of a region inside, after a backward in there") {
    const auto f = [&](const Tensor& t) {
      return remat::checkpoint(
          [&](const Tensor& a) {
            const Tensor y = w / a;
            grad_of(y, {y}, {.retain_graph = true});
            a.sin_();
            return a;
          },
          t);
    };
    const Tensors expected = [&] {
      const remat::DisableCheckpointGuard plain;
      return grad_of(f(x * 1), {x});
    }();
    require_bit_equal(grad_of(remat::checkpoint(options, f, x * 1), {x}), expected);
  }
  SECTION("a tensor that its own node saved, after a read of it") {
    const auto f = [&](const Tensor& t) {
      Tensor y = t.exp();
      const Tensor read = read_result(y).detach().clone();
      {
        const at::NoGradGuard no_grad;
        y.mul_(2);
      }
      return (t * read).sin();
    };
    require_bit_equal(grad_of(remat::checkpoint(options, f, x * 1), {x}), grad_of(f(x * 1), {x}));
  }
}

}  // namespace
