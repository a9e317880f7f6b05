// Saved-tensor hooks around, inside and after regions.

#include "tests/support/saved_hooks.h"
#include "tests/support/saved_tensors.h"

using remat::checkpoint;
using remat::SavedTensorHooksGuard;
using torch::autograd::AutogradContext;
using torch::autograd::Function;

namespace {

std::atomic<int> applications{0};

struct CountedExp : Function<CountedExp> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    ++applications;
    const Tensor y = x.exp();
    context->save_for_backward({y});
    return y;
  }
  static Tensors backward(AutogradContext* context, Tensors grads) {
    return {grads[0] * context->get_saved_variables()[0]};
  }
};

struct CountedSin : Function<CountedSin> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    ++applications;
    context->save_for_backward({x});
    return x.sin();
  }
  static Tensors backward(AutogradContext* context, Tensors grads) {
    return {grads[0] * context->get_saved_variables()[0].cos()};
  }
};

}  // namespace

TEST_CASE("a recompute builds a fresh graph of custom Functions", "[hooks][rule-3]") {
  const Tensor x = leaf({3});
  const auto fn = [](const Tensor& t) { return CountedSin::apply(CountedExp::apply(t)); };
  applications = 0;
  const Tensor y = checkpoint(fn, x);
  CHECK(applications == 2);
  y.sum().backward();
  CHECK(applications == 4);
  require_bit_equal({x.grad()}, grad_of(x.exp().sin(), {x}));
}

TEST_CASE("a saved output of a multi-output node keeps its number after a recompute", "[hooks]") {
  const Tensor x = leaf({2, 3});
  const Tensor y = checkpoint([](const Tensor& t) { return t.unbind()[1].sin(); }, x);
  const Tensor saved = read_saved(y, &nodes::SinBackward0::self_);
  CHECK(saved.output_nr() == 1);
  CHECK(saved.grad_fn()->name() == "UnbindBackward0");
  CHECK(at::equal(saved, x[1]));
}

TEST_CASE("an inference tensor is refused as an argument", "[hooks]") {
  Tensor x;
  {
    const c10::InferenceMode inference;
    x = at::randn({3});
  }
  const Tensor weight = leaf({3});
  Calls calls;
  const auto fn = counted(calls, [&](const Tensor& t) { return t * weight; });
  CHECK_THROWS_WITH(checkpoint(fn, x), contains("Inference tensors cannot be saved for backward"));
  CHECK(remat::counters().frames_alive == 0);
  CHECK_FALSE(hooks_are_active());
}

TEST_CASE("hooks around a region see its input and nothing from inside", "[hooks][rule-16]") {
  const Tensor x = leaf({4, 6});
  std::vector<std::vector<int64_t>> packed;
  Calls unpacks;
  const auto fn = [](const Tensor& t) { return t.t().mm(t).relu().sum(); };
  Tensor y;
  {
    const SavedTensorHooksGuard guard(
        [&](const Tensor& t) {
          packed.push_back(t.sizes().vec());
          return t;
        },
        counted(unpacks, identity));
    y = checkpoint(fn, x);
  }
  CHECK(packed == std::vector<std::vector<int64_t>>{{4, 6}});
  y.backward();
  CHECK(packed.size() == 1);
  CHECK(unpacks.count() == 1);
  CHECK(at::equal(x.grad(), grad_of(fn(x), {x})[0]));
}

TEST_CASE("an exception of a hook that sees a region's input keeps its type",
          "[hooks][rule-12][rule-16]") {
  struct UserError : std::exception {};
  const Tensor x = leaf({5});
  Calls calls, unpacks;
  const auto fn = counted(calls, [](const Tensor& t) { return t.sin().exp(); });
  {
    const SavedTensorHooksGuard guard([](const Tensor&) -> Tensor { throw UserError(); }, identity);
    CHECK_THROWS_AS(checkpoint(fn, x), UserError);
    CHECK(calls.count() == 0);
  }
  CHECK(remat::counters().frames_alive == 0);
  Tensor y;
  {
    const SavedTensorHooksGuard guard(identity, [&](const Tensor& t) {
      unpacks();
      if (unpacks.count() == 1) throw UserError();
      return t;
    });
    y = checkpoint(fn, x);
  }
  CHECK_THROWS_AS(y.sum().backward({}, true), UserError);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
  CHECK(calls.count() == 2);
}

TEST_CASE("a write to an argument that hooks part from its view is refused", "[hooks][rule-2]") {
  const Tensor x = leaf({4}), a = at::rand({4});
  const auto copy = [](const Tensor& t) { return t.clone(); };
  const bool is_first = GENERATE(true, false);
  const auto f = [](Tensor written, const Tensor& view, const Tensor& x) {
    written.mul_(2);
    return (x * view * written).exp();
  };
  Tensor y;
  {
    const SavedTensorHooksGuard guard(copy, copy);
    if (is_first)
      y = checkpoint(f, a, a.view({4}), x);
    else
      y = checkpoint([f](const Tensor& x, Tensor a, const Tensor& view) { return f(a, view, x); },
                     x, a, a.view({4}));
  }
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
  CHECK_THAT(error.what(), contains("returned the two in separate memory"));
}

TEST_CASE("an argument that was changed is refused although hooks gave back a copy once",
          "[hooks][rule-2]") {
  const Tensor x = leaf({4}), plain = grad_of((x * 1).sin().exp(), {x})[0];
  const Tensor a = x * 1;
  int unpacks = 0;
  Tensor y;
  {
    const SavedTensorHooksGuard guard([](const Tensor& t) { return std::pair(t, t.clone()); },
                                      [&](const std::pair<Tensor, Tensor>& both) {
                                        return ++unpacks == 1 ? both.second : both.first;
                                      });
    y = checkpoint([](const Tensor& t) { return t.sin().exp(); }, a);
  }
  {
    const at::NoGradGuard no_grad;
    a.add_(1);
  }
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], plain));
  for (int i = 0; i < 2; ++i)
    CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), remat::CheckpointError);
}

TEST_CASE("hooks inside a region hide the region's own, in both passes", "[hooks][rule-16]") {
  const Tensor x = leaf({5});
  Calls packs, unpacks;
  const auto fn = [&](const Tensor& t) {
    const Tensor a = t.sin();
    Tensor b;
    {
      const SavedTensorHooksGuard guard(counted(packs, doubled), counted(unpacks, halved));
      b = a.exp();
    }
    return b.cos();
  };
  const Counted done;
  const Tensor y = checkpoint(fn, x);
  CHECK(packs.count() == 1);
  CHECK(done.now().tensors_dropped == 2);
  const Tensor grad = grad_of(y, {x})[0];
  CHECK(unpacks.count() == 1);
  CHECK(packs.count() == 2);  // the recompute ran the same guard
  CHECK(at::equal(grad, grad_of(x.sin().exp().cos(), {x})[0]));
  CHECK(done.now().recomputes == 1);
}

TEST_CASE("hooks active only around backward change nothing of a region", "[hooks][rule-3]") {
  const Tensor x = leaf({5});
  const auto fn = [](const Tensor& t) { return t.sin().exp().cos(); };
  const Tensor y = checkpoint(fn, x);
  Calls packs;
  {
    const SavedTensorHooksGuard guard(counted(packs, identity), identity);
    y.sum().backward();
  }
  CHECK(packs.count() == 0);
  require_bit_equal({x.grad()}, grad_of(fn(x), {x}));
}
