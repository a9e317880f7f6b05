// Moves of policies, on the stand-in of stand_in.h, whose copies run as late as they may.

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <thread>

#include <ATen/Parallel.h>

#include "remat/tiers.h"
#include "tests/device/offload_cases.h"
#include "tests/device/stand_in.h"
#include "tests/support/files.h"

using remat::checkpoint;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::Recorder;
using remat::RegionReport;
using remat::SelectiveOptions;

namespace {

constexpr int64_t width = 16, product = width * width * 4;

Tensor far_leaf(const Tensor& values) {
  return values.detach().to(stand_in::device()).requires_grad_();
}

void require_same(const Tensor& actual, const Tensor& expected) {
  REQUIRE(actual.device() == expected.device());
  require_bit_equal({actual.cpu()}, {expected.cpu()});
}

/// Returns the options without a least size of moved results.
SelectiveOptions all(SelectiveOptions options = {}) {
  options.min_offload_bytes = 0;
  return options;
}

Policy products(const SelectiveOptions& options = all()) {
  return remat::offload_ops({"aten::mm"}, options);
}

Policy answering(CheckpointPolicy answer, const SelectiveOptions& options = all()) {
  return Policy(
      [answer](const remat::PolicyContext& question) {
        return question.op_name == "aten::mm.default" ? answer : CheckpointPolicy::PreferRecompute;
      },
      options);
}

/// Three products that backward reads, in the middle of recomputed operators.
Tensor three_products(const Tensor& t) {
  Tensor h = t.sin();
  for (int i = 0; i < 3; ++i) h = h.mm(t).sin();
  return h.exp();
}

/// Waits for the device's thread, which releases the last tensors after a backward has returned.
bool comes_to(int64_t bytes) {
  for (int i = 0; i < 2000 && stand_in::live_bytes() != bytes; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return stand_in::live_bytes() == bytes;
}

RegionReport only_region(const remat::Report& report) {
  REQUIRE(report.regions.size() == 1);
  return report.regions.front();
}

struct FailingCopy {
  explicit FailingCopy(int64_t after) { stand_in::fail_copy_after(after); }
  ~FailingCopy() { stand_in::fail_copy_after(-1); }
};

struct SmallDevice {
  explicit SmallDevice(int64_t bytes) { stand_in::set_total_bytes(bytes); }
  ~SmallDevice() { stand_in::set_total_bytes(stand_in::default_total_bytes); }
};

/// A kernel that is no operator and changes no version.
void triple_past_dispatcher(const Tensor& t) {
  auto* const data = static_cast<float*>(t.data_ptr());
  for (int64_t i = 0; i < t.numel(); ++i) data[i] *= 3;
}

}  // namespace

TEST_CASE("what a policy moves is copied beside the forward", "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}));
  int64_t queued = 0;
  const auto f = [&](const Tensor& t) {
    const Tensor h = t.mm(t);
    if (!remat::is_recomputing()) queued = stand_in::num_queued_copies();
    return h.sin().exp();
  };
  const Tensor y = checkpoint({.policy = products()}, f, x);
  CHECK(queued > 0);
  require_same(grad_of(y, {x})[0], grad_of(f(x), {x})[0]);
}

TEST_CASE(
    "what a policy moved comes back ahead of the recompute that reads it, the next region's too",
    "[device][rule-15][OFF-17]") {
  const Tensor values = at::randn({width, width}).div_(width);
  const auto depth = GENERATE(int64_t{0}, int64_t{1}, int64_t{2}, int64_t{100});
  CAPTURE(depth);
  const Tensor x = far_leaf(values);
  std::vector<int64_t> queued_at_begin;
  const auto f = [&](const Tensor& t) {
    if (remat::is_recomputing()) queued_at_begin.push_back(stand_in::num_queued_copies());
    return three_products(t);
  };
  const Tensor plain = grad_of(three_products(three_products(x)), {x})[0];
  const Recorder recorder({.device_time = false});
  const remat::CheckpointOptions options{.name = "r",
                                         .policy = products(all({.prefetch_depth = depth}))};
  const Tensor y = checkpoint(options, f, checkpoint(options, f, x));
  const int64_t before = stand_in::live_bytes();
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
  CHECK(comes_to(before));
  const RegionReport report = only_region(recorder.report());
  CHECK(report.offloaded == 6);
  CHECK(report.bytes_offloaded == 6 * product);
  CHECK(report.offload_loads == 6);
  CHECK(report.bytes_loaded == 6 * product);
  // Within a region in the order of its calls, then the region before it: every load begins early.
  CHECK(report.offload_loads_ahead == (depth == 0 ? 0 : 6));
  REQUIRE(queued_at_begin.size() == 2);
  CHECK((queued_at_begin[0] > 0) == (depth > 0));
  CHECK((queued_at_begin[1] > 0) == (depth > 0));
  require_same(grad_of(y, {x})[0], plain);
}

TEST_CASE("no more is brought back ahead than asked for", "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const auto held_at_begin = [&](int64_t depth) {
    int64_t held = 0;
    const auto f = [&](const Tensor& t) {
      if (remat::is_recomputing()) held = stand_in::live_bytes();
      return three_products(t);
    };
    const Tensor y = checkpoint({.policy = products(all({.prefetch_depth = depth}))}, f, x);
    grad_of(y, {x});
    return held;
  };
  const int64_t none = held_at_begin(0);
  CHECK(held_at_begin(1) == none + product);
  CHECK(held_at_begin(2) == none + 2 * product);
  CHECK(held_at_begin(8) == none + 3 * product);
}

TEST_CASE("the results that backward asks for first stay on the device, those of the last region",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
  const int64_t before = stand_in::live_bytes();
  Tensor y = x, last;  // the last region's input
  for (int i = 0; i < 3; ++i) y = checkpoint(options, f, last = y);
  const int64_t num_staying = std::min<int64_t>(keep_last, 9);
  CHECK(only_region(recorder.report()).offloaded == 9 - num_staying);
  CHECK(only_region(recorder.report()).bytes_offloaded == (9 - num_staying) * product);
  // Results of regions are inputs of the next region, or the last result.
  CHECK(stand_in::live_bytes() - before == (3 + num_staying) * product);
  // The first products of the last region are among those that moved.
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
  // Results that stay also tell which results come next.
  CHECK(report.offload_loads_ahead == (depth == 0 ? 0 : report.offload_loads));
  require_same(grad_of(y, {x})[0], plain);
  y.reset();
  last.reset();
  CHECK(comes_to(before));
}

TEST_CASE("what the program holds is none of the last, and moves when it is let go of",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
  y = checkpoint(options, f, y);  // the input of this region is held
  CHECK(num_moved() == 2);        // of three, one is the last
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], grad_of(f(f(f(f(x)))), {x})[0]);
  held.clear();
  const Tensor other = checkpoint(options, f, x);
  CHECK(num_moved() == 3);
  held.clear();
  require_same(grad_of(y, {x})[0], grad_of(f(f(f(f(x)))), {x})[0]);
}

TEST_CASE("a result that stays and is written to after its region is noticed",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
    require_same(grad_of(y, {x})[0], plain);  // the product is recomputed
    return;
  }
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() ==
        remat::CheckpointError::Kind::SelectiveMutation);
  drop_ready_nodes();
}

TEST_CASE("a result that stayed and cannot be moved later is an error where it has to move",
          "[device][rule-15][OFF-17][faults]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const auto f = [](const Tensor& t) { return t.mm(t).sin().exp(); };
  const Tensor plain = grad_of(f(f(x)), {x})[0];
  const bool must = GENERATE(false, true);
  CAPTURE(must);
  const remat::CheckpointOptions options{
      .policy =
          answering(must ? CheckpointPolicy::MustCpuOffload : CheckpointPolicy::PreferCpuOffload,
                    all({.keep_last = 1}))};
  const int64_t before = stand_in::live_bytes();
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
      y = checkpoint(options, f, middle);  // the copy is tried again
    } else {
      second();
    }
    CHECK(recorder.report().regions.front().offloaded == (must ? 1 : 0));
    require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
    require_same(grad_of(y, {x})[0], plain);
  }
  CHECK(comes_to(before));
}

TEST_CASE("a forward that throws leaves nothing of what stayed",
          "[device][rule-15][OFF-17][rule-12]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const remat::CheckpointOptions options{.policy = products(all({.keep_last = 2}))};
  const int64_t before = stand_in::live_bytes();
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
          "[device][rule-15][OFF-17]") {
  // Like linear of a batch with the product and the bias: through a tensor with a version counter
  // of its own.
  const Tensor x = far_leaf(at::randn({width, width}).div_(width)),
               w = far_leaf(at::randn({width, width}).div_(width)),
               b = far_leaf(at::randn({width}));
  const auto f = [&](const Tensor& t) {
    return at::_unsafe_view(t.mm(w), {width, width}).add_(b).sin().exp();
  };
  const Tensors plain = grad_of(f(f(x)), {x, w, b});
  const int64_t keep_last = GENERATE(0, 1);
  CAPTURE(keep_last);
  const remat::CheckpointOptions options{.name = "r",
                                         .policy = products(all({.keep_last = keep_last}))};
  const Recorder recorder({.device_time = false});
  const Tensor y = checkpoint(options, f, checkpoint(options, f, x));
  // The product cannot be copied while it is written to.
  CHECK(only_region(recorder.report()).offloaded == (keep_last == 0 ? 0 : 1));
  const int64_t products_before = stand_in::num_kernels("aten::mm");
  const Tensors found = grad_of(y, {x, w, b});
  for (std::size_t i = 0; i < plain.size(); ++i) require_same(found[i], plain[i]);
  // Two for each gradient, and the recomputed ones.
  CHECK(stand_in::num_kernels("aten::mm") - products_before == (keep_last == 0 ? 6 : 4));
}

TEST_CASE("what was brought back ahead and nobody read leaves the device with its backward",
          "[device][rule-15][OFF-14]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const remat::CheckpointOptions options{.policy = products(all({.prefetch_depth = 8}))};
  const Tensor middle = checkpoint(options, three_products, x);
  const Tensor y = checkpoint(options, three_products, middle);
  const int64_t before = stand_in::live_bytes();
  grad_of(y, {middle}, {.retain_graph = true});
  CHECK(comes_to(before));
  require_same(grad_of(y, {x})[0], grad_of(three_products(three_products(x)), {x})[0]);
}

TEST_CASE("copies of a policy hold no more of the device than asked for",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const auto waits = [&](int64_t max_bytes) {
    const int64_t before = stand_in::num_waits();
    int64_t during = 0;
    std::vector<Tensor> alive;  // freed memory would wait for its copies by itself
    const auto f = [&](const Tensor& t) {
      Tensor sum = t;
      for (int i = 0; i < 4; ++i) {
        const Tensor h = t.mm(sum);
        if (!remat::is_recomputing()) alive.push_back(h.detach());
        sum = sum + h.sin();
      }
      if (!remat::is_recomputing()) during = stand_in::num_waits() - before;
      return sum;
    };
    const Tensor y =
        checkpoint({.policy = products(all({.max_bytes_in_flight = max_bytes}))}, f, x);
    require_same(grad_of(y, {x})[0], grad_of(f(x), {x})[0]);
    return during;
  };
  CHECK(waits(SelectiveOptions().max_bytes_in_flight) == 0);
  CHECK(waits(4 * product) == 0);
  CHECK(waits(3 * product) == 1);
  CHECK(waits(2 * product - 1) == 3);
  CHECK(waits(0) == 3);  // each one is larger than that, and moves alone
}

TEST_CASE("gradients are plain ones whatever moves, in nesting, again, and of second order",
          "[device][rule-15][OFF-13]") {
  const Tensor values = at::randn({width, width}).div_(width);
  const auto depth = GENERATE(int64_t{0}, int64_t{2});
  const auto max_bytes = GENERATE(int64_t{0}, int64_t{64 << 20});
  const auto around = GENERATE(0, 1, 2);
  const auto keep_last = GENERATE(int64_t{0}, int64_t{2});
  CAPTURE(depth, max_bytes, around, keep_last);
  const Policy policy = products(
      all({.prefetch_depth = depth, .max_bytes_in_flight = max_bytes, .keep_last = keep_last}));
  const auto plain = [](const Tensor& t) {
    return three_products(three_products(t)) + three_products(t).mm(t);
  };
  const auto inner = [&](const Tensor& t) {
    return checkpoint({.policy = policy}, three_products, t);
  };
  const auto f = [&](const Tensor& t) -> Tensor {
    const auto both = [&](const Tensor& u) { return inner(inner(u)) + inner(u).mm(u); };
    if (around == 0) return both(t);
    if (around == 1) return checkpoint(both, t);
    return checkpoint({.policy = policy}, both, t);
  };
  const Tensor a = far_leaf(values), b = far_leaf(values);
  const Tensor expected = grad_of(plain(a), {a})[0];
  const int64_t before = stand_in::live_bytes();
  {
    const Tensor y = f(b);
    for (int i = 0; i < 2; ++i) require_same(grad_of(y, {b}, {.retain_graph = true})[0], expected);
    require_same(grad_of(y, {b})[0], expected);
  }
  CHECK(comes_to(before));
  const auto second = [](const Tensor& y, const Tensor& x) {
    const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
    return grad_of(first.sin(), {x})[0];
  };
  // The engine orders nodes by numbers that each thread counts for itself. So sums on the device's
  // thread have another order if that thread has made more nodes. Lost contents would differ by
  // more than a last bit.
  const Tensor plain_second = second(plain(a), a).cpu();
  CHECK(at::allclose(second(f(b), b).cpu(), plain_second, 1e-5,
                     1e-6 * plain_second.abs().max().item<double>()));
}

TEST_CASE("several threads move and read what policies keep", "[device][rule-15][threads]") {
  const Tensor values = at::randn({width, width}).div_(width);
  std::vector<Tensor> found(4);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < found.size(); ++i)
    threads.emplace_back([&, i] {
      const Tensor own = far_leaf(values);
      for (int round = 0; round < 5; ++round) {
        const remat::CheckpointOptions options{
            .policy = products(all({.max_bytes_in_flight = product, .keep_last = round % 3}))};
        const Tensor y =
            checkpoint(options, three_products, checkpoint(options, three_products, own));
        found[i] = torch::autograd::grad({y.sum()}, {own})[0].cpu();
      }
    });
  for (std::thread& each : threads) each.join();
  const Tensor expected = [&] {
    const Tensor own = far_leaf(values);
    return torch::autograd::grad({three_products(three_products(own)).sum()}, {own})[0].cpu();
  }();
  for (const Tensor& each : found) require_bit_equal({each}, {expected});
}

TEST_CASE("two backwards at once read what one region moved", "[device][rule-15][threads]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const Tensor y = checkpoint({.policy = products()}, three_products, x).sum();
  const Tensor expected = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0].cpu();
  std::vector<Tensor> found(4);
  std::vector<std::thread> threads;
  for (Tensor& each : found)
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round)
        each = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0].cpu();
    });
  for (std::thread& each : threads) each.join();
  for (const Tensor& each : found) require_bit_equal({each}, {expected});
}

TEST_CASE("by default a policy moves what is worth it", "[device][rule-15][OFF-07]") {
  const auto moved = [](int64_t side) {
    const Tensor x = far_leaf(at::randn({side, side}));
    const Recorder recorder;
    const Tensor y = checkpoint(
        {.policy = remat::offload_ops({"aten::mm"})},
        [](const Tensor& t) { return t.mm(t).sin().exp(); }, x);
    grad_of(y, {x});
    return only_region(recorder.report()).offloaded;
  };
  CHECK(moved(127) == 0);
  CHECK(moved(128) == 1);
}

TEST_CASE("policies that are joined move as the one says that moves", "[device][rule-15][OFF-07]") {
  const Tensor x = far_leaf(at::randn({width, width}));
  const auto f = [](const Tensor& t) { return t.mm(t).sin().exp().tanh(); };
  for (const Policy& policy :
       {products() | remat::save_ops({"aten::exp"}), remat::save_ops({"aten::exp"}) | products()}) {
    const Recorder recorder;
    require_same(grad_of(checkpoint({.policy = policy}, f, x), {x})[0], grad_of(f(x), {x})[0]);
    CHECK(only_region(recorder.report()).offloaded == 1);
  }
}

TEST_CASE("a named parameter or argument that is there anyway is not moved",
          "[device][rule-15][GUA-42]") {
  const Tensor w = far_leaf(at::randn({width, width})), x = far_leaf(at::randn({width, width}));
  const auto f = [&](const Tensor& t) {
    const Tensor named = remat::checkpoint_name(w.t(), "weight"),
                 argument = remat::checkpoint_name(t, "argument");
    return argument.mm(named).sin().mm(argument);
  };
  const Tensors plain = grad_of(f(x * 1), {x, w});
  const Recorder recorder;
  const int64_t before = stand_in::pinned_bytes();
  const Tensor y =
      checkpoint({.policy = remat::offload_names({"weight", "argument"}, all())}, f, x * 1);
  const Tensors found = grad_of(y, {x, w});
  require_same(found[0], plain[0]);
  require_same(found[1], plain[1]);
  CHECK(stand_in::pinned_bytes() == before);
  CHECK(only_region(recorder.report()).offloaded == 0);
}

TEST_CASE("a named argument of which the region has a copy is moved", "[device][rule-15][rule-2]") {
  const Tensor x = far_leaf(at::randn({width, width}));
  const auto f = [&](const Tensor& t) {
    const Tensor argument = remat::checkpoint_name(t, "argument");
    return argument.mm(argument).sin();
  };
  const Tensor plain = grad_of(f(x * 1), {x})[0];
  const Recorder recorder;
  const Tensor y = checkpoint({.policy = remat::offload_names({"argument"}, all()),
                               .inputs = remat::InputMode::CopyOnWrite},
                              f, x * 1);
  require_same(grad_of(y, {x})[0], plain);
  CHECK(only_region(recorder.report()).offloaded == 1);
}

TEST_CASE("what the program still has is copied before what the device does after the region",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}));
  Tensor seen;
  const auto f = [&](const Tensor& t) {
    const Tensor h = t.mm(t);
    if (!remat::is_recomputing()) seen = h.detach();
    return h.sin().exp();
  };
  const Tensor plain = grad_of(f(x), {x})[0];
  const Tensor y = checkpoint({.policy = products()}, f, x);
  triple_past_dispatcher(seen);
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain);
  require_same(grad_of(y, {x})[0], plain);
}

namespace {

/// A Function that completes a product by a kernel of its own.
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

TEST_CASE("a kernel of a Function's own may write to what a policy moves",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}));
  const auto f = [](const Tensor& t) { return TripledProduct::apply(t).sin().exp(); };
  const Tensor y = checkpoint({.policy = products()}, f, x);
  require_same(grad_of(y, {x})[0], grad_of(f(x), {x})[0]);
}

TEST_CASE("a save_region that writes to what a policy moved is not overlooked",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}));
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
  const Tensor values = at::randn({width, width}).div_(width);
  const Tensor x = far_leaf(values);
  const Tensor plain = grad_of(three_products(x), {x})[0];
  const int64_t before = stand_in::live_bytes();
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
      CHECK(stand_in::live_bytes() == before + 2 * product);  // the result, and one that stayed
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
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const auto depth = GENERATE(int64_t{0}, int64_t{2});
  CAPTURE(depth);
  const Tensor plain = grad_of(three_products(x), {x})[0];
  const Tensor y =
      checkpoint({.policy = products(all({.prefetch_depth = depth}))}, three_products, x);
  const int64_t before = stand_in::live_bytes();
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
  CHECK(failed == (depth == 0 ? 3 : 0));  // a failure ahead is left to the read
  {
    const SmallDevice small(before + product / 2);
    CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), c10::OutOfMemoryError);
    drop_ready_nodes();
  }
  require_same(grad_of(y, {x})[0], plain);
}

TEST_CASE("a guard around a region moves its input, and its policy what it keeps, once each",
          "[device][rule-15][OFF-15]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const bool through_hooks = GENERATE(false, true);
  const Tensor plain = grad_of(three_products(x * 1), {x})[0];
  SelectiveOptions options = all();
  options.save_through_hooks = through_hooks;
  const Recorder recorder;
  std::optional<remat::MoveCounters> counters;
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = true});
    counters = guard.counters();
    y = checkpoint({.policy = products(options)}, three_products, x * 1);
  }
  CHECK(counters->now().moves == 1);
  CHECK(counters->now().bytes_moved == product);
  CHECK(counters->now().loads == 0);
  require_same(grad_of(y, {x})[0], plain);
  CHECK(counters->now().loads == 1);
  CHECK(counters->now().bytes_loaded == product);
  CHECK(counters->now().seconds_waited > 0);
  const remat::Report report = recorder.report();
  CHECK(only_region(report).offloaded == 3);
  CHECK(only_region(report).bytes_offloaded == 3 * product);
  REQUIRE(!report.devices.empty());
  // Results that are saved through hooks are copied as any tensor, and not counted here.
  const int64_t counted = (through_hooks ? 1 : 4) * product;
  CHECK(report.devices.front().bytes_out == counted);
  CHECK(report.devices.front().bytes_in == counted);
}

TEST_CASE("a guard's copies hold no more of the device than asked for, and are counted",
          "[device][OFF-14]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  const Tensor plain = grad_of(three_products(x), {x})[0];
  for (const int64_t max_bytes : {int64_t{0}, product, std::numeric_limits<int64_t>::max()}) {
    CAPTURE(max_bytes);
    const int64_t before = stand_in::num_waits();
    std::optional<remat::MoveCounters> counters;
    Tensor y;
    {
      const remat::SaveOnCpuGuard guard({.pin_memory = true, .max_bytes_in_flight = max_bytes});
      counters = guard.counters();
      y = three_products(x);
    }
    CHECK((stand_in::num_waits() > before) == (max_bytes <= product));
    const remat::MoveCounts moved = counters->now();
    CHECK(moved.moves > 3);
    CHECK(moved.bytes_moved == moved.moves * product);
    require_same(grad_of(y, {x})[0], plain);
    CHECK(counters->now().loads == moved.moves);
    CHECK(counters->now().loads_ahead == moved.moves - 1);  // all but the first
    CHECK(counters->now().bytes_loaded == moved.bytes_moved);
  }
  CHECK_THROWS_AS(remat::SaveOnCpuGuard({.max_bytes_in_flight = -1}), c10::ValueError);
}

TEST_CASE("a policy in a region around moves, and nothing is brought back ahead",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
  const int64_t before = stand_in::live_bytes();
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

TEST_CASE("hooks around get a moved result's bytes, and may copy them",
          "[device][rule-15][OFF-15]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  Tensor factor = at::ones({}).to(stand_in::device());
  const auto f = [&](const Tensor& t) { return (t * factor.detach()).mm(t).sin().exp(); };
  const auto inner = [&](const Tensor& t) { return checkpoint({.policy = products()}, f, t); };
  const remat::CheckpointOptions outer{.determinism_check = remat::DeterminismCheck::Values};
  require_same(grad_of(checkpoint(outer, inner, x), {x})[0], grad_of(f(x), {x})[0]);
  const Tensor y = checkpoint(outer, inner, x);
  *static_cast<float*>(factor.data_ptr()) = 2;  // no version shows it
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() ==
        remat::CheckpointError::Kind::ValueMismatch);
  drop_ready_nodes();
}

TEST_CASE("a save_region that writes to what is moved in a region around is not overlooked",
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}));
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
          "[device][rule-15][OFF-17]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
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
  // A value changed in place is kept itself, otherwise the call that made it.
  const bool is_changed = GENERATE(false, true);
  CAPTURE(is_changed);
  const Tensor x = far_leaf(at::randn({width})), w = far_leaf(at::randn({width, 9}));
  const auto f = [is_changed](const Tensor& t, const Tensor& w) {
    Tensor made = t.exp();
    if (is_changed) made = made.mul(2).add_(1);
    const Tensor wide = remat::checkpoint_name(made.unsqueeze(1).expand({width, 9}), "wide");
    return (wide * w).sin();
  };
  const Tensors plain = grad_of(f(x * 1, w), {x, w});
  const Tensor y = checkpoint({.policy = remat::offload_names({"wide"}, all())}, f, x * 1, w);
  const Tensors gradients = grad_of(y, {x, w});
  for (std::size_t i = 0; i < 2; ++i) require_same(gradients[i], plain[i]);
}

TEST_CASE("a recorder says what regions move, bring back and wait for", "[device][recorder]") {
  const Tensor x = far_leaf(at::randn({width, width}).div_(width));
  stand_in::set_work_time(std::chrono::milliseconds(20));
  const Recorder recorder;
  const remat::CheckpointOptions options{
      .name = "r", .policy = products(all({.prefetch_depth = 0})), .offload_inputs = true};
  const Tensor y = checkpoint(options, three_products, x * 1);
  CHECK(only_region(recorder.report()).offload_wait_s > 0);  // forward's work for the copies
  grad_of(y, {x});
  stand_in::set_work_time(std::chrono::nanoseconds(0));
  const remat::Report report = recorder.report();
  const RegionReport region = only_region(report);
  CHECK(region.bytes_offloaded == 3 * product);
  CHECK(region.bytes_inputs_offloaded == product);
  CHECK(region.offload_loads == 3);
  CHECK(region.offload_loads_ahead == 0);
  CHECK(region.bytes_loaded == 3 * product);
  CHECK(region.offload_wait_s > 0);
  REQUIRE(!report.devices.empty());
  CHECK(report.devices.front().waited_s >= 0.02);  // at least a stream waited for a copy
  for (const std::string& text : {report.to_string(), recorder.to_html()}) {
    CHECK_THAT(text, contains("bytes offloaded"));
    CHECK_THAT(text, contains("brought back"));
    CHECK_THAT(text, contains("waited for what was not back"));
  }
  for (const char* each : {"\"bytes_offloaded\": 3072", "\"bytes_inputs_offloaded\": 1024",
                           "\"offload_loads\": 3", "\"offload_loads_ahead\": 0",
                           "\"bytes_loaded\": 3072", "\"offload_wait_s\": ", "\"waited_s\": "})
    CHECK_THAT(report.to_json(), contains(each));
}
