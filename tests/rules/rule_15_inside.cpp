// Rule 15 where a region with a policy, pin or save_region has hooks, guards or threads in it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <string>

#include "tests/support/policies.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;

namespace {

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
