// Rule 14: what a function registers on tensors from outside is there once, however often it runs.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "tests/support/support.h"

using namespace remat::testing;
using Kind = remat::CheckpointError::Kind;

namespace {

Tensor twice(const Tensor& gradient) { return gradient * 2; }

struct World {
  Tensor x = leaf({3}), w = leaf({3}), b = leaf({3});
  Tensor c = w * 2;  ///< no leaf
};
using Function = std::function<Tensor(const Tensor&, World&)>;

struct Observed {
  Tensors grads;
  std::vector<bool> flags;
};

/// Two backwards through `f`, as a region or without one.
Observed observe(const Function& f, bool is_region) {
  const Seed seed(7);
  World world;
  const auto function = [&](const Tensor& x) { return f(x, world); };
  const Tensor y = is_region ? remat::checkpoint(function, world.x) : function(world.x);
  y.sum().backward({}, /*retain_graph=*/true);
  y.sum().backward();
  const auto grad = [](const Tensor& t) { return t.grad().defined() ? t.grad() : Tensor(); };
  return {{grad(world.x), grad(world.w), grad(world.b)},
          {world.x.requires_grad(), world.w.requires_grad(), world.b.requires_grad(),
           world.c.retains_grad()}};
}

void require_as_plain(const Function& f) {
  const Observed plain = observe(f, false), region = observe(f, true);
  require_bit_equal(region.grads, plain.grads);
  CHECK(region.flags == plain.flags);
}

struct Doubling final : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& g) override {
    return {g[0] * 2};
  }
};

}  // namespace

TEST_CASE("a hook that a function registers on a captured leaf acts once",
          "[checkpoint][rule-14]") {
  // b is saved by no operator, so that no slot knows it.
  require_as_plain([](const Tensor& x, World& o) {
    o.w.register_hook(twice);
    o.b.register_hook(twice);
    return (x * o.w + o.b).sin().exp();
  });
}

TEST_CASE("a hook that a function registers on a leaf argument acts once",
          "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    x.register_hook(twice);
    return (x * o.w + o.b).sin().exp();
  });
}

TEST_CASE("hooks and retain_grad on a captured result act once", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    o.c.register_hook(twice);
    o.c.retain_grad();
    return (x * o.w + o.b * o.c).sin().exp();
  });
}

TEST_CASE("several hooks on one leaf act once each, in their order", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    o.w.register_hook(twice);
    o.w.register_hook([](const Tensor& gradient) { return gradient + 1; });
    return (x * o.w + o.b).sin().exp();
  });
}

TEST_CASE("a hook that the function takes off again acts on nothing", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    const auto handle = o.w.register_hook(twice);
    const Tensor y = (x * o.w + o.b).sin();
    o.w.remove_hook(handle);
    return y.exp();
  });
}

TEST_CASE("of two hooks on one leaf the function takes off the second", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    o.w.register_hook(twice);
    const auto second = o.w.register_hook([](const Tensor& gradient) { return gradient + 1; });
    const Tensor y = (x * o.w + o.b).sin();
    o.w.remove_hook(second);
    return y.exp();
  });
}

TEST_CASE("a hook that a region inside a region registers acts once", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    return remat::checkpoint(
               [&o](const Tensor& t) {
                 o.b.register_hook(twice);
                 o.w.register_hook(twice);
                 return (t * o.w + o.b).sin().exp();
               },
               x.sin())
        .cos()
        .exp();
  });
}

TEST_CASE("recomputes leave no hooks behind, however many there are", "[checkpoint][rule-14]") {
  World o;
  const Tensor y = remat::checkpoint(
      [&o](const Tensor& x) {
        o.w.register_hook(twice);
        return (x * o.w).sin().exp();
      },
      o.x);
  const auto num_hooks = [&o] {
    return torch::autograd::impl::get_autograd_meta(o.w)->cpp_hooks_list_->size();
  };
  CHECK(num_hooks() == 1);
  for (int i = 0; i < 5; ++i) grad_of(y, {o.x}, {.retain_graph = true});
  CHECK(num_hooks() == 1);
}

TEST_CASE("a handle that a recompute stored takes off the hook of forward",
          "[checkpoint][rule-14]") {
  World o;
  unsigned handle = 99;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& x) {
        handle = o.w.register_hook(twice);
        return (x * o.w).sin().exp();
      },
      o.x);
  const Tensor before = grad_of(y, {o.w}, {.retain_graph = true})[0];
  o.w.remove_hook(handle);
  CHECK(bit_equal(2 * grad_of(y, {o.w})[0], before));
}

TEST_CASE("a hook on a tensor that the function makes acts in its own backwards",
          "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    const Tensor made = (x.detach() * 3).requires_grad_();
    made.register_hook(twice);
    const Tensor inner = torch::autograd::grad({(made * made).sin().sum()}, {made})[0];
    return (x * inner * o.w).sin().exp();
  });
}

TEST_CASE("a hook that a function registers before its own backward acts there as in forward",
          "[checkpoint][rule-14][rule-6]") {
  require_as_plain([](const Tensor& x, World& o) {
    o.w.register_hook(twice);
    const Tensor inner =
        torch::autograd::grad({(x * o.w).sin().sum()}, {o.w}, {}, /*retain_graph=*/true)[0];
    return (x * inner.detach() + o.b).sin().exp() * o.w;
  });
}

TEST_CASE("a hook that a function registers after its own backward is an error",
          "[checkpoint][rule-14][rule-6]") {
  World o;
  const Tensor y = remat::checkpoint(
      [&o](const Tensor& x) {
        const Tensor inner = torch::autograd::grad({(x * o.w).sin().sum()}, {o.w})[0];
        o.w.register_hook(twice);
        return (x * inner.detach() + o.b).sin().exp() * o.w;
      },
      o.x);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {o.x}); });
  CHECK(error.kind() == Kind::Unsupported);
  CHECK_THAT(error.what(), contains("registered a hook on an outside tensor"));
}

TEST_CASE("a flag that a function switches off and on again is on after a stop between the two",
          "[checkpoint][rule-14][rule-5]") {
  require_as_plain([](const Tensor& x, World& o) {
    o.w.set_requires_grad(false);
    const Tensor y = (x * o.w + o.b).sin().exp().sin();
    o.w.set_requires_grad(true);
    return y + o.w;
  });
  // Not saved by any operator: seen as it is called.
  require_as_plain([](const Tensor& x, World& o) {
    o.b.requires_grad_(false);
    const Tensor y = (x * o.w + o.b).sin().exp().sin();
    o.b.requires_grad_(true);
    return y + o.b;
  });
  require_as_plain([](const Tensor& x, World& o) {  // two of them
    o.w.requires_grad_(false);
    o.b.requires_grad_(false);
    const Tensor y = (x + o.w + o.b).sin().exp().sin();
    o.w.requires_grad_(true);
    o.b.requires_grad_(true);
    return y + o.w + o.b;
  });
  require_as_plain([](const Tensor& x, World& o) {
    const Tensor mine = x;
    mine.set_requires_grad(false);
    const Tensor y = (x * o.w + o.b).sin().exp().sin();
    mine.set_requires_grad(true);
    return y + mine;
  });
}

TEST_CASE("hooks put on a known leaf by hand act once", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    torch::autograd::impl::get_autograd_meta(o.w)->hooks_.push_back(std::make_unique<Doubling>());
    return (x * o.w + o.b).sin().exp();
  });
}

TEST_CASE("a hook put by hand on a captured tensor without grad is there once",
          "[checkpoint][rule-14]") {
  const Tensor x = leaf({3}), mask = at::rand({3});
  const Tensor y = remat::checkpoint(
      [mask](const Tensor& x) {
        torch::autograd::impl::materialize_autograd_meta(mask)->hooks_.push_back(
            std::make_unique<Doubling>());
        return (x * mask).sin().exp();
      },
      x);
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of((x * mask).sin().exp(), {x})[0]));
  // Were it made a leaf that requires grad now, it would meet them all.
  CHECK(torch::autograd::impl::get_autograd_meta(mask)->hooks_.size() == 1);
}

TEST_CASE("hooks put on the node of a known leaf by hand act once", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    torch::autograd::impl::grad_accumulator(o.w)->add_pre_hook(std::make_unique<Doubling>());
    return (x * o.w + o.b).sin().exp();
  });
}

TEST_CASE("a function that sets post-accumulate hooks anew is an error", "[checkpoint][rule-14]") {
  struct Counting final : torch::autograd::PostAccumulateGradHook {
    void operator()(const Tensor&) override {}
  };
  World o;
  const Tensor y = remat::checkpoint(
      [&o](const Tensor& x) {
        torch::autograd::impl::set_post_acc_grad_hooks(o.w, std::make_unique<Counting>());
        return (x * o.w).sin().exp();
      },
      o.x);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {o.x}); });
  CHECK(error.kind() == Kind::Unsupported);
  CHECK_THAT(error.what(), contains("post-accumulate hooks"));
}

TEST_CASE("a recompute that throws leaves no hooks behind", "[checkpoint][rule-14][rule-12]") {
  World o;
  bool throws = false;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& x) {
        o.w.register_hook(twice);
        o.w.set_requires_grad(false);
        const Tensor y = (x * o.w).sin();
        if (throws) throw std::runtime_error("in the middle");
        o.w.set_requires_grad(true);
        return (y * o.w).exp();
      },
      o.x);
  throws = true;
  CHECK_THROWS_AS(grad_of(y, {o.x}, {.retain_graph = true}), std::runtime_error);
  CHECK(o.w.requires_grad());
  throws = false;
  const Tensor gradient = grad_of(y, {o.w})[0];
  const Tensor copy = copy_of(o.w);
  const Tensor x = o.x.detach();
  CHECK(bit_equal(gradient, 2 * grad_of(((x * copy.detach()).sin() * copy).exp(), {copy})[0]));
}

TEST_CASE("hooks put on the node of a captured result by hand act once", "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    o.c.grad_fn()->add_pre_hook(std::make_unique<Doubling>());
    return (x * o.c * o.c).sin().exp();
  });
}

TEST_CASE("a backward inside a region accumulates into captured leaves once",
          "[checkpoint][rule-14][rule-6]") {
  // Early stop would end the recompute before it.
  require_as_plain([](const Tensor& x, World& o) {
    (x.detach() * o.w).pow(2).sum().backward();
    return x * x * x * o.w;
  });
  require_as_plain([](const Tensor& x, World& o) {
    const Tensor square = (x.detach() * o.w + o.b).pow(2);
    square.sum().backward({}, /*retain_graph=*/true);
    const Tensor inner = torch::autograd::grad({square.sum()}, {o.w})[0];
    return x * x * inner * o.w;
  });
}

TEST_CASE("a backward inside a region through a captured result into an outside leaf is an error",
          "[checkpoint][rule-14][rule-6]") {
  World o;
  const Tensor y = remat::checkpoint(
      [&o](const Tensor& x) {
        (x.detach() * o.c).pow(2).sum().backward({}, /*retain_graph=*/true);
        return x * x * x;
      },
      o.x);
  const Tensor once = o.w.grad().clone();
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {o.x}); });
  CHECK(error.kind() == Kind::Unsupported);
  CHECK_THAT(error.what(), contains("into an outside leaf"));
  CHECK(bit_equal(o.w.grad(), once));
}

TEST_CASE("a hook on a tensor that is then changed in place ends with the recompute",
          "[checkpoint][rule-14]") {
  require_as_plain([](const Tensor& x, World& o) {
    const Tensor made = x * o.w;
    made.register_hook(twice);
    made.sin_();
    return (made * o.b).exp();
  });
}
