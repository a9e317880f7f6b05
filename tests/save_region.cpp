// save_region: what it keeps, and what a recompute makes of its arguments.

#include <torch/csrc/autograd/custom_function.h>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::save_region;

namespace {

constexpr int64_t rows = 64, columns = 128;

/// Returns the bytes that a region's graph holds after forward, beyond its input and its result.
int64_t held_bytes(const std::function<Tensor(const Tensor&)>& function) {
  const Tensor x = leaf({rows, columns});
  const LiveBytes bytes;
  const Tensor y = checkpoint(function, x);
  return bytes.held() - static_cast<int64_t>(y.nbytes());
}

constexpr int64_t tensor_bytes = rows * columns * 4;

/// Requires the gradients of plain autograd, the same on a second backward, and those of a double
/// backward.
void require_right(const std::function<Tensor(const Tensor&)>& function) {
  const Tensor x = leaf({6, 8});
  const auto gradients = [&](const std::function<Tensor(const Tensor&)>& of) {
    const Tensor y = of(x);
    Tensors all = grad_of(y, {x}, {.retain_graph = true});
    all.push_back(grad_of(y, {x}, {.retain_graph = true})[0]);
    const Tensor slope = grad_of(y, {x}, {.create_graph = true})[0];
    if (slope.requires_grad()) all.push_back(grad_of(slope.sin(), {x})[0]);
    return all;
  };
  const Tensors expected = gradients(function);
  std::function<Tensor(const Tensor&)> nested = function;
  for (int depth = 1; depth <= 3; ++depth) {
    nested = [nested](const Tensor& t) { return checkpoint(nested, t); };
    const Tensors found = gradients(nested);
    REQUIRE(found.size() == expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) CHECK(bit_equal(found[i], expected[i]));
  }
}

}  // namespace

TEST_CASE("what a save_region's function saves of its own arguments is not kept", "[policy]") {
  const auto squared = [](const Tensor& h) { return h * h; };  // saves its argument twice
  const auto held =
      held_bytes([&](const Tensor& x) { return save_region(squared, x.sin()).cos(); });
  CHECK(held == tensor_bytes);  // the result alone, which the cosine saves
  const auto of_view = held_bytes([](const Tensor& x) {
    const auto product = [](const Tensor& h) {
      return h.view({2, rows / 2, columns}).pow(3).view({rows, columns});
    };
    return save_region(product, x.sin()).cos();
  });
  CHECK(of_view == tensor_bytes);
  // A tensor that the function made is kept.
  const auto of_own = held_bytes([&](const Tensor& x) {
    return save_region([&](const Tensor& h) { return squared(h.exp()); }, x.sin()).cos();
  });
  CHECK(of_own == 2 * tensor_bytes);
}

TEST_CASE("a save_region's result that is an argument, or lies in one, is not kept", "[policy]") {
  const auto held = held_bytes([](const Tensor& x) {
    const auto both = [](const Tensor& h) { return std::pair(h, h.t()); };
    const auto [same, turned] = save_region(both, x.sin());
    return same.cos() + turned.t().exp();
  });
  CHECK(held == 0);
  require_right([](const Tensor& x) {
    const auto both = [](const Tensor& h) { return std::tuple(h, h.t(), h.narrow(0, 1, 2)); };
    const auto [same, turned, part] = save_region(both, x.sin());
    return same.cos() * turned.t().exp() * part.sum();
  });
}

TEST_CASE("results of a save_region that no recompute reads are not kept", "[policy]") {
  Calls calls;
  const auto last = counted(calls, [](const Tensor& h) { return h * h; });
  const auto held = held_bytes([&](const Tensor& x) { return save_region(last, x.sin()) + 1; });
  CHECK(held == 0);
  calls.reset();
  const Tensor x = leaf({rows, columns});
  const Tensor expected = grad_of(x.sin().pow(2) + 1, {x})[0];
  const Tensor y = checkpoint([&](const Tensor& t) { return save_region(last, t.sin()) + 1; }, x);
  for (int i = 0; i < 2; ++i) {
    const Tensor found = grad_of(y, {x}, {.retain_graph = true})[0];
    CHECK(at::allclose(found, expected));
  }
  CHECK(calls.count() == 1);
}

TEST_CASE("a recompute that cannot end before a released save_region runs it again", "[policy]") {
  Calls calls;
  const auto last = counted(calls, [](const Tensor& h) { return h * h; });
  const Tensor x = leaf({6});
  const Tensor expected = grad_of(
      [&] {
        const Tensor h = x.sin();
        return h * h;
      }(),
      {x})[0];
  const auto function = [&](const Tensor& t) noexcept { return save_region(last, t.sin()); };
  const Tensor y = checkpoint([&](const Tensor& t) { return function(t); }, x);
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(calls.count() >= 1);
  // Without early stop each recompute runs to its end, with the kept result.
  calls.reset();
  const Tensor z = checkpoint(
      {.early_stop = false}, [&](const Tensor& t) { return save_region(last, t.sin()); }, x);
  CHECK(bit_equal(grad_of(z, {x})[0], expected));
  CHECK(calls.count() == 1);
}

TEST_CASE("gradients through a save_region's arguments are those of plain autograd", "[policy]") {
  require_right([](const Tensor& x) {  // arguments that the region computed, in several places
    const Tensor a = x.sin(), b = x.cos();
    const Tensor c =
        save_region([](const Tensor& u, const Tensor& v) { return u * v.exp(); }, a, b);
    return save_region([](const Tensor& u, const Tensor& v) { return (u * v).tanh(); }, c, a) * b;
  });
  require_right([](const Tensor& x) {  // the region's own argument, and a detached alias
    return save_region([](const Tensor& u) { return u * u.detach() * u.t().t(); }, x).exp();
  });
  require_right([](const Tensor& x) {  // an argument with gaps, and one of zero strides
    const auto product = [](const Tensor& u, const Tensor& v) { return u * v * u; };
    return save_region(product, x.slice(1, 0, 8, 2).sin(), x.sum(1, true).expand({6, 4})).exp();
  });
  require_right([](const Tensor& x) {  // tensors in a container, one of them undefined
    const auto sum = [](const std::vector<Tensor>& all) { return all[0] * all[1] * all[1]; };
    return save_region(sum, std::vector<Tensor>{x.sin(), x.exp(), Tensor()}).cos();
  });
  require_right([](const Tensor& x) {  // a region and a save_region inside
    const auto inner = [](const Tensor& u) {
      const auto squared = [](const Tensor& v) { return v * v; };
      return checkpoint(squared, save_region(squared, u)) * u;
    };
    return save_region(inner, x.sin()).cos();
  });
  require_right([](const Tensor& x) {  // a kept value as an argument
    const auto squared = [](const Tensor& v) { return v * v; };
    return save_region(squared, remat::pin(save_region(squared, x.sin()))).cos();
  });
  require_right([](const Tensor& x) {  // the function keeps no reference: nothing is saved
    return save_region([](const Tensor& u) { return u + 1; }, x.sin()).cos();
  });
}

TEST_CASE("a save_region's function that writes to an argument runs in each recompute",
          "[policy][rule-10]") {
  require_right([](const Tensor& x) {
    const auto writes = [](Tensor u, const Tensor& v) { return v.exp() * u.mul_(2); };
    const Tensor a = x.sin().detach();
    return save_region(writes, a, x.cos()).exp() * a;
  });
  // Saved, and then written: an error, as in plain autograd.
  const Tensor x = leaf({5});
  const auto breaks = [](Tensor u) {
    const Tensor squared = u * u;
    u.add_(1);
    return squared;
  };
  const auto function = [&](const Tensor& t) { return save_region(breaks, t.clone()).exp(); };
  CHECK_THROWS_WITH(function(x).sum().backward(), contains("modified by an inplace operation"));
  CHECK_THROWS_WITH(checkpoint(function, x).sum().backward(),
                    contains("modified by an inplace operation"));
}

TEST_CASE("an argument that is changed after its save_region has saved it is an error",
          "[policy][rule-10]") {
  const Tensor x = leaf({5});
  const auto squared = [](const Tensor& u) { return u * u; };
  const auto function = [&](const Tensor& t) {
    const Tensor a = t.sin().clone();
    const Tensor b = save_region(squared, a);
    a.mul_(2);
    return (b * a).exp();
  };
  CHECK_THROWS_WITH(function(x).sum().backward(), contains("modified by an inplace operation"));
  CHECK_THROWS_WITH(checkpoint(function, x).sum().backward(),
                    contains("modified by an inplace operation"));
}

TEST_CASE("a save_region whose function throws leaves the region usable", "[policy][rule-12]") {
  require_right([](const Tensor& x) {
    Tensor kept;
    const auto throws = [&](const Tensor& u) -> Tensor {
      kept = u * u;
      throw std::domain_error("thrown");
    };
    try {
      save_region(throws, x.sin());
    } catch (const std::domain_error&) {
    }
    return kept.exp();
  });
}

TEST_CASE("saved arguments pass neither hooks around the region nor its copies", "[policy]") {
  const Tensor x = leaf({6, 4});
  int packed = 0;
  const auto product = [](const Tensor& u, const Tensor& v) { return u * v * u.exp(); };
  const auto function = [&](const Tensor& t) {
    return save_region(product, t.sum(1, true).expand({6, 4}), t.sin()).cos();
  };
  const Tensor expected = grad_of(function(x), {x})[0];
  const remat::SavedTensorHooksGuard guard(
      [&](const Tensor& t) {
        ++packed;
        return t.contiguous().clone();
      },
      [](const Tensor& t) { return t; });
  const Tensor y = checkpoint(function, x);
  CHECK(packed == 4);  // the region's input; the exponential, twice, and the product before it
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
}

TEST_CASE("a custom Function's saved inputs are its save_region's arguments", "[policy]") {
  struct Cube : torch::autograd::Function<Cube> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& u) {
      const Tensor cube = u * u * u;
      context->save_for_backward({u, cube});
      return cube;
    }
    static Tensors backward(torch::autograd::AutogradContext* context, Tensors slopes) {
      const auto saved = context->get_saved_variables();
      return {slopes[0] * saved[0] * saved[0] * 3 + saved[1] * 0};
    }
  };
  Calls calls;
  const auto cube = counted(calls, [](const Tensor& u) { return Cube::apply(u); });
  require_right([&](const Tensor& x) { return save_region(cube, x.sin()).exp(); });
  calls.reset();
  const auto held = held_bytes([&](const Tensor& x) { return save_region(cube, x.sin()).exp(); });
  CHECK(held == tensor_bytes);  // the cube
  CHECK(calls.count() == 1);
}

TEST_CASE("a recompute whose save_region gets another argument is refused", "[policy][rule-10]") {
  const Tensor x = leaf({4, 4});
  int64_t size = 4;
  const auto squared = [](const Tensor& u) { return u * u; };
  const auto function = [&](const Tensor& t) {
    return save_region(squared, t.sin().narrow(0, 0, size)).sum().exp();
  };
  const Tensor y = checkpoint(function, x);
  size = 3;
  CHECK_THROWS_AS(y.backward(), CheckpointError);
}

TEST_CASE("a policy chooses a save_region by its name", "[policy]") {
  const Tensor x = leaf({6});
  Calls first, second;
  const auto function = [&](const Tensor& t) {
    const auto squared = [](const Tensor& u) { return u.exp() * u; };
    const Tensor a = save_region("attention.qkv", counted(first, squared), t.sin());
    return save_region("mlp", counted(second, squared), a.cos()).tanh();
  };
  const Tensor expected = grad_of(function(x), {x})[0];
  const auto counts_of = [&](const remat::Policy& policy) {
    first.reset();
    second.reset();
    const Tensor y = checkpoint({.policy = policy}, function, x);
    for (int i = 0; i < 2; ++i)
      CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
    return std::pair(first.count(), second.count());
  };
  using Counts = std::pair<int64_t, int64_t>;
  CHECK(counts_of({}) == Counts(1, 1));
  CHECK(counts_of(remat::save_ops({"aten::mm"})) == Counts(1, 1));
  CHECK(counts_of(remat::save_names({"mlp"})) == Counts(3, 1));
  CHECK(counts_of(remat::save_all_but_names({"mlp"})) == Counts(1, 3));
  CHECK(counts_of([](const remat::PolicyContext& call) {
          return call.op_name == "remat::save_region" && call.name.starts_with("attention.");
        }) == Counts(1, 3));
}
