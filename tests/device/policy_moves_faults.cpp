// Copies of a policy that fail, and moved results that are written to, on the stand-in of
// stand_in.h.

#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/far_products.h"
#include "tests/support/far_tensors.h"
#include "tests/support/reports.h"

using remat::checkpoint;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::Recorder;

namespace {

/// A Function that finishes a product by a kernel of its own.
struct TripledProduct : torch::autograd::Function<TripledProduct> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
    const Tensor h = x.mm(x);
    triple_past_dispatcher(h);
    ctx->save_for_backward({x});
    return h;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const Tensor x = ctx->get_saved_variables()[0];
    return {3 * (grads[0].mm(x.t()) + x.t().mm(grads[0]))};
  }
};

}  // namespace

TEST_CASE("a kernel of a Function's own may write to what a policy moves", "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}));
  const auto f = [](const Tensor& t) { return TripledProduct::apply(t).sin().exp(); };
  const Tensor y = checkpoint({.policy = products()}, f, x);
  require_same(grad_of(y, {x})[0], grad_of(f(x), {x})[0]);
}

TEST_CASE("a save_region that writes to what a policy moved is not overlooked",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}));
  const auto f = [](const Tensor& t) {
    const Tensor h = t.mm(t);
    const Tensor more = remat::save_region(
        [&h](const Tensor& u) {
          const at::NoGradGuard no_grad;
          h.add_(1);
          return u * 2;
        },
        t);
    return h.sin() * more;
  };
  for (const Policy& policy : {products(), remat::save_ops({"aten::mm"})}) {
    const Tensor y = checkpoint({.policy = policy}, f, x);
    CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() ==
          remat::CheckpointError::Kind::SelectiveMutation);
    drop_ready_nodes();
  }
}

TEST_CASE("a copy of a policy's that fails loses nothing", "[device][rule-15][faults]") {
  const Tensor values = at::randn({product_side, product_side}).div_(product_side);
  const Tensor x = far_leaf(values);
  const Tensor plain = grad_of(three_products(x), {x})[0];
  const int64_t before = settled_bytes();
  for (int64_t n = 0; n < 3; ++n) {
    CAPTURE(n);
    {
      const Recorder recorder;
      Tensor y;
      {
        const FailingCopy failing(n);
        y = checkpoint({.policy = answering(CheckpointPolicy::PreferCpuOffload)}, three_products,
                       x);
      }
      CHECK(comes_to(before + 2 * product));  // the result, and the one that stayed
      require_same(grad_of(y, {x})[0], plain);
      CHECK(only_region(recorder.report()).offloaded == 2);
      CHECK(only_region(recorder.report()).offload_fallbacks == 1);
    }
    const remat::CheckpointOptions must{.policy = answering(CheckpointPolicy::MustCpuOffload)};
    {
      const FailingCopy failing(n);
      CHECK_THROWS_WITH(checkpoint(must, three_products, x), contains("far failed to copy"));
    }
    CHECK(comes_to(before));
    require_same(grad_of(checkpoint(must, three_products, x), {x})[0], plain);
  }
}

TEST_CASE("a copy back that fails is made again, or by the next try", "[device][rule-15][faults]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const auto depth = GENERATE(int64_t{0}, int64_t{2});
  CAPTURE(depth);
  const Tensor plain = grad_of(three_products(x), {x})[0];
  const Tensor y =
      checkpoint({.policy = products(all({.prefetch_depth = depth}))}, three_products, x);
  const int64_t before = settled_bytes();
  int failed = 0;
  for (int64_t n = 0; n < 4; ++n) {
    CAPTURE(n);
    try {
      const FailingCopy failing(n);
      require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
    } catch (const c10::Error& error) {
      ++failed;
      CHECK_THAT(error.what(), contains("far failed to copy"));
      drop_ready_nodes();
    }
    CHECK(comes_to(before));
    require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
  }
  CHECK(failed == (depth == 0 ? 3 : 0));  // what fails ahead is left to the read
  {
    const SmallDevice small(before + product / 2);
    CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), c10::OutOfMemoryError);
    drop_ready_nodes();
  }
  require_same(grad_of(y, {x})[0], plain);
}
