// Results of a policy that stay on the device because backward reads them first, on the stand-in of
// stand_in.h.

#include <algorithm>
#include <functional>

#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/far_products.h"
#include "tests/support/far_tensors.h"
#include "tests/support/reports.h"

using remat::checkpoint;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::Recorder;
using remat::RegionReport;

TEST_CASE("the results that backward asks for first stay on the device, those of the last region",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const int64_t keep_last = GENERATE(0, 1, 2, 3, 4, 7, 9, 100);
  const int64_t depth = GENERATE(0, 2);
  CAPTURE(keep_last, depth);
  const remat::CheckpointOptions options{
      .name = "r", .policy = products(all({.prefetch_depth = depth, .keep_last = keep_last}))};
  std::function<void()> after_product;
  const auto f = [&](const Tensor& t) {
    Tensor h = t.sin();
    for (int i = 0; i < 3; ++i) {
      h = h.mm(t);
      if (after_product) after_product();
      h = h.sin();
    }
    return h.exp();
  };
  const auto plain_step = [](const Tensor& t) {
    return three_products(three_products(three_products(t)));
  };
  const Tensor plain = grad_of(plain_step(x), {x})[0];
  const Recorder recorder({.device_time = false});
  const int64_t before = settled_bytes();
  Tensor y = x, last;  // what goes into the last region
  for (int i = 0; i < 3; ++i) y = checkpoint(options, f, last = y);
  const int64_t num_staying = std::min<int64_t>(keep_last, 9);
  CHECK(only_region(recorder.report()).offloaded == 9 - num_staying);
  CHECK(only_region(recorder.report()).bytes_offloaded == (9 - num_staying) * product);
  // Results of regions are inputs of the next, or the last one.
  CHECK(stand_in::live_bytes() - before == (3 + num_staying) * product);
  // The first ones of the last region are among them.
  std::vector<int64_t> loads;
  after_product = [&] { loads.push_back(only_region(recorder.report()).offload_loads); };
  grad_of(y, {last}, {.retain_graph = true});
  after_product = nullptr;
  REQUIRE(loads.size() == 3);
  for (int64_t i = 0; i < 3; ++i)
    CHECK(loads[static_cast<std::size_t>(i)] == std::max<int64_t>(0, i + 1 - keep_last));
  CHECK(only_region(recorder.report()).offload_loads == std::max<int64_t>(0, 3 - keep_last));
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
  CHECK(comes_to(before + (3 + num_staying) * product));
  const RegionReport report = only_region(recorder.report());
  CHECK(report.offloaded == 9 - num_staying);
  CHECK(report.offload_fallbacks == 0);
  CHECK(report.offload_loads == std::max<int64_t>(0, 3 - keep_last) + 9 - num_staying);
  // The result that stays also says which one comes next.
  CHECK(report.offload_loads_ahead == (depth == 0 ? 0 : report.offload_loads));
  require_same(grad_of(y, {x})[0], plain);
  y.reset();
  last.reset();
  CHECK(comes_to(before));
}

TEST_CASE("what the program holds is none of the last, and moves when it is let go of",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  std::vector<Tensor> held;
  const auto f = [&](const Tensor& t) {
    const Tensor h = t.mm(t);
    if (!remat::is_recomputing()) held.push_back(h.detach());
    return h.sin().exp();
  };
  const remat::CheckpointOptions options{.name = "r", .policy = products(all({.keep_last = 1}))};
  const Recorder recorder({.device_time = false});
  const auto num_moved = [&] { return only_region(recorder.report()).offloaded; };
  Tensor y = x;
  for (int i = 0; i < 3; ++i) y = checkpoint(options, f, y);
  CHECK(num_moved() == 0);
  held.clear();
  y = checkpoint(options, f, y);  // its own is held
  CHECK(num_moved() == 2);        // of three, one is the last
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], grad_of(f(f(f(f(x)))), {x})[0]);
  held.clear();
  const Tensor other = checkpoint(options, f, x);
  CHECK(num_moved() == 3);
  held.clear();
  require_same(grad_of(y, {x})[0], grad_of(f(f(f(f(x)))), {x})[0]);
}

TEST_CASE("a result that stays and is written to after its region is noticed",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const bool allows = GENERATE(false, true);
  Tensor seen;
  const auto f = [&](const Tensor& t) {
    const Tensor h = t.mm(t);
    if (!remat::is_recomputing()) seen = h.detach();
    return h.sin().exp();
  };
  const Tensor plain = grad_of(f(x), {x})[0];
  const Policy policy = products(all({.allow_cache_entry_mutation = allows, .keep_last = 1}));
  const Tensor y = checkpoint({.policy = policy}, f, x);
  seen.add_(1);
  if (allows) {
    require_same(grad_of(y, {x})[0], plain);  // the product is made again
    return;
  }
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() ==
        remat::CheckpointError::Kind::SelectiveMutation);
  drop_ready_nodes();
}

TEST_CASE("a result that stayed and cannot be moved later is an error where it has to move",
          "[device][rule-15][faults]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const auto f = [](const Tensor& t) { return t.mm(t).sin().exp(); };
  const Tensor plain = grad_of(f(f(x)), {x})[0];
  const bool must = GENERATE(false, true);
  CAPTURE(must);
  const remat::CheckpointOptions options{
      .policy =
          answering(must ? CheckpointPolicy::MustCpuOffload : CheckpointPolicy::PreferCpuOffload,
                    all({.keep_last = 1}))};
  const int64_t before = settled_bytes();
  {
    const Recorder recorder({.device_time = false});
    const Tensor middle = checkpoint(options, f, x);
    Tensor y;
    const auto second = [&] {
      const FailingCopy failing(0);
      y = checkpoint(options, f, middle);
    };
    if (must) {
      CHECK_THROWS_WITH(second(), contains("far failed to copy"));
      CHECK(!y.defined());
      y = checkpoint(options, f, middle);  // it is tried again
    } else {
      second();
    }
    CHECK(recorder.report().regions.front().offloaded == (must ? 1 : 0));
    require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
    require_same(grad_of(y, {x})[0], plain);
  }
  CHECK(comes_to(before));
}

TEST_CASE("a forward that throws leaves nothing of what stayed", "[device][rule-15][rule-12]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const remat::CheckpointOptions options{.policy = products(all({.keep_last = 2}))};
  const int64_t before = settled_bytes();
  CHECK_THROWS_WITH(checkpoint(
                        options,
                        [](const Tensor& t) -> Tensor {
                          three_products(t);
                          throw std::runtime_error("stop in forward");
                        },
                        x),
                    contains("stop in forward"));
  CHECK(comes_to(before));
  CHECK_THROWS_AS(products({.keep_last = -1}), c10::ValueError);
}

TEST_CASE("what LibTorch finishes in place is kept as written, and moves then",
          "[device][rule-15]") {
  // As linear of a batch does with the product and the bias: through a tensor with a version of its
  // own.
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side)),
               w = far_leaf(at::randn({product_side, product_side}).div_(product_side)),
               b = far_leaf(at::randn({product_side}));
  const auto f = [&](const Tensor& t) {
    return at::_unsafe_view(t.mm(w), {product_side, product_side}).add_(b).sin().exp();
  };
  const Tensors plain = grad_of(f(f(x)), {x, w, b});
  const int64_t keep_last = GENERATE(0, 1);
  CAPTURE(keep_last);
  const remat::CheckpointOptions options{.name = "r",
                                         .policy = products(all({.keep_last = keep_last}))};
  const Recorder recorder({.device_time = false});
  const Tensor y = checkpoint(options, f, checkpoint(options, f, x));
  // As long as it is written to it cannot be copied.
  CHECK(only_region(recorder.report()).offloaded == (keep_last == 0 ? 0 : 1));
  const int64_t products_before = stand_in::num_kernels("aten::mm");
  const Tensors found = grad_of(y, {x, w, b});
  for (std::size_t i = 0; i < plain.size(); ++i) require_same(found[i], plain[i]);
  // Two for each gradient, and those that are made again.
  CHECK(stand_in::num_kernels("aten::mm") - products_before == (keep_last == 0 ? 6 : 4));
}

TEST_CASE("copies to the host, and numbers read from the device, are kept under save_host_copies",
          "[device][policy]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}));
  const auto f = [](const Tensor& t) {
    const double scale = t.detach().abs().sum().item<double>();
    const Tensor near = t.detach().to(at::kCPU);
    const Tensor back = (near * scale).to(t.device());  // a copy to the device: runs again
    return (t.sin() * back).exp().cos();
  };
  const Tensor plain = grad_of(f(x), {x})[0];
  for (const Policy& policy : {remat::save_host_copies(), remat::save_unrepeatable()}) {
    const Recorder recorder({.device_time = false});
    const Tensor y = checkpoint({.policy = policy}, f, x);
    require_same(grad_of(y, {x})[0], plain);
    const remat::Report report = recorder.report();
    std::vector<std::string> kept;
    int64_t num_copies = 0;
    for (const auto& each : report.regions.at(0).decisions) {
      if (each.outcome == "kept") kept.push_back(each.op);
      if (each.op == "aten::_to_copy.default") num_copies += each.calls;
    }
    std::sort(kept.begin(), kept.end());
    CHECK(kept ==
          std::vector<std::string>{"aten::_local_scalar_dense.default", "aten::_to_copy.default"});
    CHECK(num_copies == 2);
  }
}
