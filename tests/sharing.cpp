// Backward calls that share recomputes: GraphExecGroup and RecomputeCacheGuard of scope.h.

#include <thread>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::GraphExecGroup;
using remat::RecomputeCacheGuard;
using Kind = remat::CheckpointError::Kind;

namespace {

/// Two branches that need different saved tensors: {sin(x), exp(w)}.
Tensors branches(const Tensor& x, const Tensor& w) { return {x.sin().cos(), w.exp().tanh()}; }

const remat::CheckpointOptions whole{.early_stop = false};

int64_t bytes_alive() { return remat::counters().recomputed_bytes_alive; }

}  // namespace

TEST_CASE("a group recomputes each region once over several backward calls", "[scope][group]") {
  const Tensor x = leaf({8}), w = leaf({8});
  const Tensors y = checkpoint(branches, x, w);
  const Tensors expected{grad_of(x.sin().cos(), {x})[0], grad_of(w.exp().tanh(), {w})[0]};
  const auto both = [&] {
    require_bit_equal(grad_of(y[0], {x}, {.retain_graph = true}), {expected[0]});
    require_bit_equal(grad_of(y[1], {w}, {.retain_graph = true}), {expected[1]});
  };
  Counted done;
  both();
  CHECK(done.now().recomputes == 2);
  for (int group_number = 1; group_number <= 2; ++group_number) {
    {
      const GraphExecGroup group;
      both();
      CHECK(bytes_alive() == 0);
    }
    CHECK(done.now().recomputes == 2 + group_number);
  }
  both();
  CHECK(done.now().recomputes == 6);
  {
    const GraphExecGroup group;
    grad_of(y[0], {x}, {.retain_graph = true});
    CHECK(bytes_alive() == 2 * 8 * 4);
  }
  CHECK(bytes_alive() == 0);
  CHECK(done.now().recomputes == 7);
}

TEST_CASE("groups cannot be nested, and one after another works", "[scope][group]") {
  {
    const GraphExecGroup group;
    CHECK_THROWS_WITH(GraphExecGroup(), contains("GraphExecGroup contexts cannot be nested"));
    CHECK_THROWS_AS(GraphExecGroup(), c10::Error);
    std::thread([] { const GraphExecGroup of_another_thread; }).join();
  }
  const GraphExecGroup next;
}

TEST_CASE("a second backward over the same tensors in a group is an error", "[scope][group]") {
  const Tensor x = leaf({8});
  const Tensor y = checkpoint({.name = "twice"}, [](const Tensor& t) { return t.sin().cos(); }, x);
  {
    const GraphExecGroup group;
    grad_of(y, {x}, {.retain_graph = true});
    const auto error =
        error_of<remat::CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
    CHECK(error.kind() == Kind::GroupOverlap);
    CHECK(error.region() == "twice");
    CHECK_THAT(error.what(), contains("Performing two backward calls that overlap"));
  }
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().cos(), {x}));
  CHECK(bytes_alive() == 0);
}

TEST_CASE("nested regions are recomputed once each in a group", "[scope][group]") {
  const Tensor x = leaf({8}), w = leaf({8});
  Calls inner_calls, outer_calls;
  const Tensors y = checkpoint(whole,
                               counted(outer_calls,
                                       [&](const Tensor& a, const Tensor& b) {
                                         const Tensors inner = checkpoint(
                                             whole, counted(inner_calls, branches), a * 2, b * 3);
                                         return Tensors{inner[0].exp(), inner[1].exp()};
                                       }),
                               x, w);
  const Counted done;
  {
    const GraphExecGroup group;
    require_bit_equal(grad_of(y[0], {x}, {.retain_graph = true}),
                      grad_of((x * 2).sin().cos().exp(), {x}));
    require_bit_equal(grad_of(y[1], {w}, {.retain_graph = true}),
                      grad_of((w * 3).exp().tanh().exp(), {w}));
  }
  CHECK(done.now().recomputes == 2);
  CHECK(outer_calls.count() == 2);
  CHECK(inner_calls.count() == 3);
  CHECK(bytes_alive() == 0);
}

TEST_CASE("a backward that fails in a group leaves the others right", "[scope][group][rule-12]") {
  const Tensor x = leaf({8}), w = leaf({8});
  bool throws = true;
  const Tensors y = checkpoint(
      [&](const Tensor& a, const Tensor& b) {
        if (throws && remat::is_recomputing()) throw std::domain_error("in the recompute");
        return branches(a, b);
      },
      x, w);
  const GraphExecGroup group;
  CHECK_THROWS_AS(grad_of(y[0], {x}, {.retain_graph = true}), std::domain_error);
  CHECK(bytes_alive() == 0);
  throws = false;
  require_bit_equal(grad_of(y[0], {x}, {.retain_graph = true}), grad_of(x.sin().cos(), {x}));
  require_bit_equal(grad_of(y[1], {w}, {.retain_graph = true}), grad_of(w.exp().tanh(), {w}));
}

TEST_CASE("a Jacobian by fifty overlapping calls costs one recompute per region",
          "[scope][cache]") {
  constexpr int64_t n = 50;
  const Tensor x = leaf({n}), w = leaf({n, n});
  const auto block = [&](const Tensor& t) { return t.matmul(w).sin().exp(); };
  const auto model = [&](bool drop) {
    if (!drop) return block(block(block(x)));
    return checkpoint(block,
                      checkpoint([&](const Tensor& t) { return checkpoint(block, block(t)); }, x));
  };
  const auto jacobian = [&](const Tensor& y) {
    Tensors rows;
    for (int64_t i = 0; i < n; ++i) {
      const Tensors row = grad_of(y[i], {x, w}, {.retain_graph = true});
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  };
  const Tensors plain = jacobian(model(false));
  const Tensor y = model(true);
  const int64_t max_bytes = GENERATE(std::numeric_limits<int64_t>::max(), 600, 250, 1, 0);
  CAPTURE(max_bytes);
  const Counted done;
  {
    const RecomputeCacheGuard cache({.max_bytes = max_bytes});
    const Tensors first = grad_of(y[0], {x}, {.retain_graph = true});
    CHECK(bytes_alive() <= max_bytes);
    require_bit_equal(jacobian(y), plain);
    CHECK(bytes_alive() <= max_bytes);
    if (max_bytes > 100'000) {
      CHECK(done.now().recomputes == 3);
      CHECK(bytes_alive() > 0);
    } else {
      CHECK(done.now().recomputes > 3);
    }
  }
  CHECK(bytes_alive() == 0);
}

TEST_CASE("the region that was used least recently leaves the cache first", "[scope][cache]") {
  const Tensor x = leaf({100});
  const auto f = [](const Tensor& t) { return t.sin().exp(); };  // saves 800 bytes
  const Tensor a = checkpoint(whole, f, x), b = checkpoint(whole, f, x),
               c = checkpoint(whole, f, x);
  const RecomputeCacheGuard cache({.max_bytes = 1600});
  const auto recomputes = [&](const Tensor& y) {
    const Counted done;
    grad_of(y, {x}, {.retain_graph = true});
    CHECK(bytes_alive() <= 1600);
    return done.now().recomputes;
  };
  CHECK(recomputes(a) == 1);
  CHECK(recomputes(b) == 1);
  CHECK(recomputes(a) == 0);
  CHECK(recomputes(c) == 1);  // b goes
  CHECK(recomputes(a) == 0);
  CHECK(recomputes(b) == 1);  // c goes
  CHECK(recomputes(a) == 0);
}

TEST_CASE("a capture or an input that changed is never served from the cache",
          "[scope][cache][rule-10]") {
  const Tensor x = leaf({8}), w = leaf({8}), buffer = at::rand({8});
  const Tensor y = checkpoint([&](const Tensor& t) { return (t * w * buffer).sin(); }, x);
  const RecomputeCacheGuard cache;
  const Tensors expected = grad_of(y, {x, w}, {.retain_graph = true});
  const Counted done;
  require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), expected);
  CHECK(done.now().recomputes == 0);
  SECTION("a parameter, in place") {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  SECTION("a parameter, other storage") { w.set_data(at::rand({8})); }
  SECTION("a buffer") { buffer.add_(1); }
  SECTION("the input") {
    const at::NoGradGuard no_grad;
    x.add_(1);
  }
  try {
    grad_of(y, {x, w}, {.retain_graph = true});
    FAIL("the change was not seen");
  } catch (const remat::CheckpointError& e) {
    CHECK((e.kind() == Kind::CaptureChanged || e.kind() == Kind::InputChanged));
  }
  CHECK(bytes_alive() == 0);
}

TEST_CASE("cached tensors serve create_graph and a second order", "[scope][cache]") {
  const Tensor x = leaf({8});
  const auto f = [](const Tensor& t) { return t.sin().exp() * t; };
  const auto second = [&](const Tensor& y) {
    const Tensor first = grad_of(y, {x}, {.retain_graph = true, .create_graph = true})[0];
    return grad_of(first * first, {x}, {.retain_graph = true})[0];
  };
  const Tensor expected = second(f(x));
  const Tensor y = checkpoint(f, x);
  const RecomputeCacheGuard cache;
  for (int i = 0; i < 3; ++i) require_bit_equal({second(y)}, {expected});
}

TEST_CASE("strict_unpack and a group inside a cache keep their meaning", "[scope][cache][rule-9]") {
  const Tensor x = leaf({8});
  const Tensor y =
      checkpoint({.strict_unpack = true}, [](const Tensor& t) { return t.sin().cos(); }, x);
  const RecomputeCacheGuard cache;
  const Counted done;
  for (int i = 0; i < 3; ++i)
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), grad_of(x.sin().cos(), {x}));
  CHECK(done.now().recomputes == 1);
  const GraphExecGroup group;
  grad_of(y, {x}, {.retain_graph = true});
  CHECK(done.now().recomputes == 2);
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); }).kind() ==
        Kind::GroupOverlap);
}

TEST_CASE("a cache that ends while its graph lives, or outlives it, leaves nothing",
          "[scope][cache]") {
  const Tensor x = leaf({8});
  auto cache = std::make_unique<RecomputeCacheGuard>();
  {
    const Tensor y = checkpoint([](const Tensor& t) { return t.sin().cos(); }, x);
    grad_of(y, {x}, {.retain_graph = true});
    CHECK(bytes_alive() > 0);
  }
  CHECK(bytes_alive() == 0);
  const Tensor y = checkpoint([](const Tensor& t) { return t.sin().cos(); }, x);
  grad_of(y, {x}, {.retain_graph = true});
  cache.reset();
  CHECK(bytes_alive() == 0);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().cos(), {x}));
}

TEST_CASE("a negative cache size is refused", "[scope][cache]") {
  CHECK_THROWS_AS(RecomputeCacheGuard({.max_bytes = -1}), c10::ValueError);
}
