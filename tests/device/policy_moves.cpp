// Results of a policy that wait on the CPU, on the stand-in of stand_in.h, whose copies run as late
// as they may.

#include <chrono>
#include <optional>
#include <thread>

#include "tests/device/stand_in.h"
#include "tests/support/far_products.h"
#include "tests/support/far_tensors.h"
#include "tests/support/reports.h"

using remat::checkpoint;
using remat::Policy;
using remat::Recorder;
using remat::RegionReport;
using remat::SelectiveOptions;

TEST_CASE("what a policy moves is copied beside the forward", "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}));
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
    "[device][rule-15]") {
  const Tensor values = at::randn({product_side, product_side}).div_(product_side);
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
  const int64_t before = settled_bytes();
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

TEST_CASE("no more is brought back ahead than asked for", "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
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

TEST_CASE("what was brought back ahead and nobody read leaves the device with its backward",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
  const remat::CheckpointOptions options{.policy = products(all({.prefetch_depth = 8}))};
  const Tensor middle = checkpoint(options, three_products, x);
  const Tensor y = checkpoint(options, three_products, middle);
  const int64_t before = settled_bytes();
  grad_of(y, {middle}, {.retain_graph = true});
  CHECK(comes_to(before));
  require_same(grad_of(y, {x})[0], grad_of(three_products(three_products(x)), {x})[0]);
}

TEST_CASE("copies of a policy hold no more of the device than asked for", "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
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
          "[device][rule-15]") {
  const Tensor values = at::randn({product_side, product_side}).div_(product_side);
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
  const int64_t before = settled_bytes();
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
  const Tensor values = at::randn({product_side, product_side}).div_(product_side);
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
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
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

TEST_CASE("by default a policy moves what is worth it", "[device][rule-15]") {
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

TEST_CASE("policies that are joined move as the one says that moves", "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}));
  const auto f = [](const Tensor& t) { return t.mm(t).sin().exp().tanh(); };
  for (const Policy& policy :
       {products() | remat::save_ops({"aten::exp"}), remat::save_ops({"aten::exp"}) | products()}) {
    const Recorder recorder;
    require_same(grad_of(checkpoint({.policy = policy}, f, x), {x})[0], grad_of(f(x), {x})[0]);
    CHECK(only_region(recorder.report()).offloaded == 1);
  }
}

TEST_CASE("a named parameter or argument that is there anyway is not moved", "[device][rule-15]") {
  const Tensor w = far_leaf(at::randn({product_side, product_side})),
               x = far_leaf(at::randn({product_side, product_side}));
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
  const Tensor x = far_leaf(at::randn({product_side, product_side}));
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
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}));
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

TEST_CASE("a guard around a region moves its input, and its policy what it keeps, once each",
          "[device][rule-15]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
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
          "[device]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
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

TEST_CASE("a recorder says what regions move, bring back and wait for", "[device][recorder]") {
  const Tensor x = far_leaf(at::randn({product_side, product_side}).div_(product_side));
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
