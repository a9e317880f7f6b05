// Rule 8: reading a node's saved tensor outside backward recomputes for that read and keeps
// nothing.

#include "tests/support/saved_tensors.h"
#include "tests/support/sizes.h"

namespace {

TEST_CASE("each read outside backward recomputes for itself and keeps nothing", "[rule-8]") {
  const Tensor x = leaf({tensor_side, tensor_side});
  Calls calls;
  Counted done;
  const Tensor y =
      remat::checkpoint(counted(calls, [](const Tensor& t) { return t.sin().exp().sin(); }), x);
  const Tensor operand = x.detach().sin().exp();
  LiveBytes bytes;
  for (int i = 1; i <= 3; ++i) {
    {
      const Tensor read = read_saved(y, &nodes::SinBackward0::self_);
      require_bit_equal({read.detach()}, {operand});
      CHECK(read.requires_grad());
      CHECK(remat::counters().recomputed_bytes_alive == 0);
      CHECK(bytes.held() == operand.numel() * 4);  // what was read, and nothing else
    }
    CHECK(bytes.held() == 0);
    CHECK(calls.count() == 1 + i);
    CHECK(done.now().recomputes == i);
  }
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().sin(), {x}));
  CHECK(calls.count() == 5);
}

TEST_CASE("a saved result read outside backward has its node", "[rule-8]") {
  const Tensor x = leaf({4, 5});
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
  const Tensor read = read_saved_output(y, &nodes::ExpBackward0::result_);
  require_bit_equal({read.detach()}, {y.detach()});
  CHECK(read.grad_fn() == y.grad_fn());
  CHECK(read.output_nr() == 0);
}

TEST_CASE("an input read outside backward leads to the graph above the region", "[rule-8]") {
  const Tensor x = leaf({4, 5});
  const Tensor h = x * 2;
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin(); }, h);
  const Tensor read = read_saved(y, &nodes::SinBackward0::self_);
  CHECK(read.grad_fn() == h.grad_fn());
  require_bit_equal({read.detach()}, {h.detach()});
  require_bit_equal(grad_of(read, {x}), {at::full({4, 5}, 2.)});
}

TEST_CASE("a read of an inner region's tensor recomputes its parents for that read", "[rule-8]") {
  const Tensor x = leaf({3});
  std::vector<Calls> calls(3);
  const Tensor y = remat::checkpoint(
      counted(calls[0],
              [&](const Tensor& a) {
                return remat::checkpoint(
                    counted(calls[1],
                            [&](const Tensor& b) {
                              return remat::checkpoint(
                                  counted(calls[2], [](const Tensor& d) { return d.sin(); }),
                                  b.exp());
                            }),
                    a.cos());
              }),
      x);
  Counted done;
  for (int i = 1; i <= 2; ++i) {
    const Tensor read = read_saved(y, &nodes::SinBackward0::self_);
    require_bit_equal({read.detach()}, {x.detach().cos().exp()});
    CHECK(done.now().recomputes == 3 * i);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
  }
  require_bit_equal(grad_of(y, {x}), grad_of(x.cos().exp().sin(), {x}));
}

TEST_CASE("a read sees the phase of the recompute it starts", "[rule-8]") {
  const Tensor x = leaf({3});
  std::vector<remat::PhaseInfo> phases;
  const Tensor y = remat::checkpoint(
      {.name = "read me"},
      [&](const Tensor& t) {
        phases.push_back(remat::current_phase());
        return t.sin();
      },
      x);
  read_saved(y, &nodes::SinBackward0::self_);
  REQUIRE(phases.size() == 2);
  CHECK(phases[1].phase == remat::Phase::Recompute);
  CHECK(phases[1].frame_id == phases[0].frame_id);
  CHECK(phases[1].name == "read me");
  CHECK(remat::current_phase().phase == remat::Phase::None);
}

TEST_CASE("a read works with grad mode off, inside another region and inside its own",
          "[rule-8][rule-3]") {
  const Tensor x = leaf({3});
  const Tensor expected = x.detach().sin();
  auto f = [](const Tensor& t) { return t.sin().exp().sin(); };
  auto operand_of_exp_and_sin = [](const Tensor& y) {
    return read_saved(y, &nodes::SinBackward0::self_).detach();
  };
  SECTION("grad mode off") {
    const Tensor y = remat::checkpoint(f, x);
    at::NoGradGuard no_grad;
    require_bit_equal({operand_of_exp_and_sin(y)}, {expected.exp()});
    CHECK_FALSE(at::GradMode::is_enabled());
  }
  SECTION("inside another region") {
    const Tensor y = remat::checkpoint(f, x);
    Counted done;
    const Tensor other = leaf({3});
    const Tensor z =
        remat::checkpoint([&](const Tensor& t) { return t * operand_of_exp_and_sin(y); }, other);
    CHECK(done.now().tensors_dropped == 1);
    require_bit_equal(grad_of(z, {other}), {expected.exp()});
  }
  SECTION("inside its own first run and recompute") {
    Calls calls;
    std::vector<Tensor> reads;
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          calls();
          const Tensor h = f(t);
          reads.push_back(operand_of_exp_and_sin(h));
          return h.exp();
        },
        x);
    CHECK(calls.count() == 2);
    require_bit_equal(grad_of(y, {x}), grad_of(f(x).exp(), {x}));
    for (const Tensor& read : reads) require_bit_equal({read}, {expected.exp()});
    CHECK(reads.size() >= 2);
  }
}

TEST_CASE("a read that a mismatch spoils throws at once, and the next one works",
          "[rule-8][rule-12]") {
  const Tensor x = leaf({1});
  Calls calls;
  auto f = [&](const Tensor& t) {
    calls();
    return calls.count() == 2 ? t.sin() * at::ones({2}) : t.sin().sin();
  };
  const Tensor y = remat::checkpoint(f, x);
  const auto error =
      error_of<remat::CheckpointError>([&] { read_saved(y, &nodes::SinBackward0::self_); });
  CHECK(error.kind() == remat::CheckpointError::Kind::MetadataMismatch);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  require_bit_equal({read_saved(y, &nodes::SinBackward0::self_).detach()}, {x.detach().sin()});
}

TEST_CASE("a read after the graph was freed says so and recomputes nothing", "[rule-8]") {
  const Tensor x = leaf({3});
  Calls calls;
  const Tensor y = remat::checkpoint(counted(calls, [](const Tensor& t) { return t.sin(); }), x);
  grad_of(y, {x});
  CHECK(calls.count() == 2);
  CHECK_THROWS_WITH(read_saved(y, &nodes::SinBackward0::self_), contains("already been freed"));
  CHECK(calls.count() == 2);
}

TEST_CASE("a read in a tensor hook belongs to the backward that runs", "[rule-8][rule-9]") {
  const Tensor x = leaf({3});
  Calls calls;
  Tensor read;
  const Tensor y =
      remat::checkpoint(counted(calls, [](const Tensor& t) { return t.sin().exp().sin(); }), x);
  y.register_hook([&](const Tensor&) {
    auto node = dynamic_cast<nodes::SinBackward0*>(y.grad_fn().get());
    read = node->self_.unpack().detach();
  });
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), grad_of(x.sin().exp().sin(), {x}));
  require_bit_equal({read}, {x.detach().sin().exp()});
  CHECK(calls.count() <= 3);  // the node itself reads the same tensor a second time
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("the second output of a node keeps its number through a recompute", "[rule-8]") {
  const Tensor x = leaf({4, 5});
  Calls calls;
  auto f = [](const Tensor& t) { return at::unbind(t.exp(), 0)[1].exp() * t[1]; };
  const Tensor y = remat::checkpoint(counted(calls, f), x);
  const Tensor factor = read_saved(y, &nodes::MulBackward0::other_);
  CHECK(factor.requires_grad());
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));

  const Tensor z =
      remat::checkpoint([](const Tensor& t) { return at::unbind(t.exp(), 0)[1].sin(); }, x);
  const Tensor operand = read_saved(z, &nodes::SinBackward0::self_);
  CHECK(operand.output_nr() == 1);
  CHECK(operand.grad_fn()->name() == "UnbindBackward0");
}

}  // namespace
