// Policies that move results of a region inside another one, on the stand-in of stand_in.h.

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <thread>

#include "remat/tiers.h"
#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/far_products.h"
#include "tests/support/far_tensors.h"
#include "tests/support/files.h"
#include "tests/support/reports.h"

using remat::checkpoint;
using remat::CheckpointPolicy;
using remat::Recorder;
using remat::RegionReport;
using remat::SelectiveOptions;

TEST_CASE("a policy in a region around moves, and nothing is brought back ahead",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const auto depth = GENERATE(int64_t{0}, int64_t{2});
  CAPTURE(depth);
  const Tensor plain = grad_of(three_products(three_products(x)), {x})[0];
  const Recorder recorder;
  const remat::CheckpointOptions inner{.name = "inner",
                                       .policy = products(all({.prefetch_depth = depth}))};
  const auto both = [&](const Tensor& t) {
    return checkpoint(inner, three_products, checkpoint(inner, three_products, t));
  };
  const Tensor y = checkpoint({.name = "outer"}, both, x);
  const int64_t before = settled_bytes();
  for (int pass = 1; pass <= 2; ++pass) {
    CAPTURE(pass);
    require_same(grad_of(y, {x}, {.retain_graph = pass == 1})[0], plain);
    const remat::Report report = recorder.report();
    const auto found = std::find_if(report.regions.begin(), report.regions.end(),
                                    [](const RegionReport& each) { return each.name == "inner"; });
    REQUIRE(found != report.regions.end());
    CHECK(found->offload_loads == pass * 6);
    CHECK(found->bytes_loaded == pass * 6 * product);
    CHECK(found->offload_loads_ahead == 0);
    if (pass == 1) CHECK(comes_to(before));
  }
}

TEST_CASE("hooks around get a moved result's bytes, and may copy them", "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const Tensor plain = grad_of(three_products(x * 1), {x})[0];
  const bool copies = GENERATE(false, true);
  CAPTURE(copies);
  SelectiveOptions options = all();
  options.save_through_hooks = true;
  const Recorder recorder({.device_time = false});
  Tensors seen, expected;
  const auto f = [&](const Tensor& t) {
    Tensor h = t.sin();
    for (int i = 0; i < 3; ++i) {
      h = h.mm(t);
      if (!remat::is_recomputing()) expected.push_back(h.detach().cpu());
      h = h.sin();
    }
    return h.exp();
  };
  Tensor y;
  {
    const remat::SavedTensorHooksGuard guard(
        [&](const Tensor& t) {
          if (t.is_cpu()) seen.push_back(t.clone());
          return copies ? t.clone() : t;
        },
        [](const Tensor& t) { return t; });
    y = checkpoint({.policy = products(options)}, f, x * 1);
  }
  require_bit_equal(seen, expected);
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
  const RegionReport region = only_region(recorder.report());
  CHECK(region.offload_loads == 3);
  CHECK(region.offload_loads_ahead == 0);
  require_same(grad_of(y, {x})[0], plain);
}

TEST_CASE("what a policy moves goes on to the file of tiers around it, if it passes their hooks",
          "[device][tiers][rule-15]") {
  const Folder folder;
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const Tensor plain = grad_of(three_products(x * 1), {x})[0];
  SelectiveOptions options = all();
  options.save_through_hooks = true;
  const int64_t pinned = stand_in::pinned_bytes();
  std::optional<remat::TierCounters> counters;
  Tensor y;
  {
    const remat::SaveInTiersGuard guard(
        {.host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
    counters = guard.counters();
    y = checkpoint({.policy = products(options)}, three_products, x * 1);
  }
  // The input, and three results.
  for (int i = 0; i < 5000 && counters->now().bytes_on_disk != 4 * product; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(counters->now().bytes_on_disk == 4 * product);
  CHECK(counters->now().bytes_to_host == product);
  CHECK(stand_in::pinned_bytes() >= pinned);
  for (int i = 0; i < 2; ++i) require_same(grad_of(y, {x}, {.retain_graph = i == 0})[0], plain);
  CHECK(counters->now().loads >= 4);
}

TEST_CASE("a region that compares contents compares those of what is moved inside",
          "[device][rule-10][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  Tensor factor = at::ones({}).to(stand_in::device());
  const auto f = [&](const Tensor& t) { return (t * factor.detach()).mm(t).sin().exp(); };
  const auto inner = [&](const Tensor& t) { return checkpoint({.policy = products()}, f, t); };
  const remat::CheckpointOptions outer{.determinism_check = remat::DeterminismCheck::Values};
  require_same(grad_of(checkpoint(outer, inner, x), {x})[0], grad_of(f(x), {x})[0]);
  const Tensor y = checkpoint(outer, inner, x);
  *static_cast<float*>(factor.data_ptr()) = 2;  // no version tells of it
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() ==
        remat::CheckpointError::Kind::ValueMismatch);
  drop_ready_nodes();
}

TEST_CASE("a save_region that writes to what is moved in a region around is not overlooked",
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
  const auto inner = [&](const Tensor& t) { return checkpoint({.policy = products()}, f, t); };
  const Tensor y = checkpoint(inner, x);
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() ==
        remat::CheckpointError::Kind::SelectiveMutation);
  drop_ready_nodes();
}

TEST_CASE("what a region around does with a moved result afterwards changes nothing",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const auto product_of = [](const Tensor& t) { return t.mm(t); };
  const auto plain = [&](const Tensor& t) { return product_of(t.sin()).add_(1).exp().sin(); };
  const auto f = [&](const Tensor& t) {
    return checkpoint({.policy = products()}, product_of, t.sin()).add_(1).exp().sin();
  };
  const Tensor expected = grad_of(plain(x), {x})[0];
  const Tensor y = checkpoint(f, x);
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], expected);
  require_same(grad_of(y, {x})[0], expected);
}

TEST_CASE("a policy moves on a thread that the function of a region around starts",
          "[device][rule-15][threads]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const auto inner = [&](const Tensor& t) {
    return checkpoint({.policy = products()}, three_products, t);
  };
  const auto elsewhere = [&](const Tensor& t) {
    std::promise<Tensor> result;
    at::launch([&] {
      try {
        result.set_value(inner(t));
      } catch (...) {
        result.set_exception(std::current_exception());
      }
    });
    return result.get_future().get();
  };
  const Tensor y = checkpoint(elsewhere, x);
  const Tensor plain = grad_of(three_products(x), {x})[0];
  for (int i = 0; i < 2; ++i) require_same(grad_of(y, {x}, {.retain_graph = i == 0})[0], plain);
}

TEST_CASE("an expanded value that has moved comes back expanded", "[device][rule-15]") {
  // A result that was changed in place is kept itself, else the call that made it.
  const bool is_changed = GENERATE(false, true);
  CAPTURE(is_changed);
  const Tensor x = far_leaf(at::randn({product_side})), w = far_leaf(at::randn({product_side, 9}));
  const auto f = [is_changed](const Tensor& t, const Tensor& w) {
    Tensor made = t.exp();
    if (is_changed) made = made.mul(2).add_(1);
    const Tensor wide = remat::checkpoint_name(made.unsqueeze(1).expand({product_side, 9}), "wide");
    return (wide * w).sin();
  };
  const Tensors plain = grad_of(f(x * 1, w), {x, w});
  const Tensor y = checkpoint({.policy = remat::offload_names({"wide"}, all())}, f, x * 1, w);
  const Tensors gradients = grad_of(y, {x, w});
  for (std::size_t i = 0; i < 2; ++i) require_same(gradients[i], plain[i]);
}
