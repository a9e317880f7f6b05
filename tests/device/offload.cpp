// Offloading on the stand-in of stand_in.h, whose copies run as late as they may.

#include <malloc.h>

#include <filesystem>

#include "remat/report.h"
#include "tests/device/offload_cases.h"
#include "tests/device/stand_in.h"
#include "tests/support/far_offload.h"
#include "tests/support/functions.h"

using remat::checkpoint;

TEST_CASE("under SaveOnCpuGuard the device holds what it holds without grad", "[device]") {
  offload::device_bytes_are_those_without_grad(far_device, GENERATE(false, true));
}
TEST_CASE("tensors smaller than min_bytes stay on the device", "[device]") {
  offload::smaller_tensors_stay(far_device, GENERATE(false, true));
}
TEST_CASE("what three layers save waits on the CPU", "[device]") {
  offload::what_three_layers_save_leaves_the_device(far_device, GENERATE(false, true));
}
TEST_CASE("a block with offloaded inputs holds less on the device", "[device]") {
  offload::an_offloaded_block_holds_less(far_device);
}
TEST_CASE("regions with offloaded inputs and masks give plain gradients", "[device]") {
  const auto [count, width, rows] =
      GENERATE(std::tuple(3, 10, 2), std::tuple(4, 16, 5), std::tuple(4, 256, 8));
  offload::offloaded_inputs_give_plain_gradients(far_device, count, width, rows);
}
TEST_CASE("a view of an unpacked tensor is intact two nodes later", "[device]") {
  offload::a_view_of_an_unpacked_tensor_lives(far_device, GENERATE(false, true));
}
TEST_CASE("a recomputed view of an offloaded input keeps its values", "[device]") {
  offload::views_of_restored_inputs_keep_their_values(far_device);
}
TEST_CASE("views with offset or strides come back from the CPU exactly", "[device]") {
  offload::views_come_back_exactly(far_device, GENERATE(false, true));
}
TEST_CASE("two backward calls read offloaded tensors", "[device]") {
  offload::a_second_backward_reads_again(far_device, GENERATE(false, true));
}

TEST_CASE("with pin_memory the host buffers are page-locked, and used again", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {5000});
  const auto step = [&](bool pin_memory) {
    const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory});
    const Tensor y = (x + 1).sin().exp().sin();
    offload::require_same(grad_of(y, {x}), {(x + 1).sin().exp().cos().detach() *
                                            (x + 1).sin().exp().detach() * (x + 1).cos().detach()});
  };
  const int64_t before = stand_in::pinned_bytes();
  step(false);
  CHECK(stand_in::pinned_bytes() == before);
  step(true);
  const int64_t after = stand_in::pinned_bytes();
  if (!at::hasCUDA()) CHECK(after > 0);  // else CUDA owns page-locked memory
  step(true);
  CHECK(stand_in::pinned_bytes() == after);
}

TEST_CASE("a small tensor does not take a page-locked buffer that a large one needs again",
          "[device]") {
  if (at::hasCUDA()) return;  // then it is CUDA's
  constexpr int64_t small = 300'000, large = 2'000'000;
  const auto saved = [](int64_t size) {
    const Tensor x = offload::stand_in_leaf(far_device, {size});
    const remat::SaveOnCpuGuard guard({.pin_memory = true});
    return (x + 1).sin();
  };
  saved(large);  // its buffer is free
  const int64_t before = stand_in::pinned_bytes();
  const Tensor one = saved(small), other = saved(large);
  CHECK(stand_in::pinned_bytes() - before < 2 * large);
}

TEST_CASE("a guard that stays open forgets what it has let go", "[device]") {
  const remat::SaveOnCpuGuard guard;
  const Tensor x = offload::stand_in_leaf(far_device, {16});
  const auto step = [&] { (x + 1).sin(); };
  for (int i = 0; i < 100; ++i) step();
  const auto bytes = [] {
    stand_in::clear_log();
    return static_cast<int64_t>(mallinfo2().uordblks);
  };
  const int64_t before = bytes();
  for (int i = 0; i < 2000; ++i) step();
  CHECK(bytes() - before < 100'000);
}

TEST_CASE("copies run beside the work, and reads wait for them", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {5000});
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = true});
    const Tensor a = x + 1;
    stand_in::clear_log();
    y = a.sin();
    const auto log = stand_in::log();
    CHECK(stand_in::num_queued_copies() > 0);  // forward did not wait
    REQUIRE(log.size() >= 4);
    CHECK(log[0] == "record 0");
    CHECK(log[1].starts_with("wait "));  // the copy waits for the queued work
    CHECK(std::count_if(log.begin(), log.end(),
                        [](const std::string& e) { return e.starts_with("use on "); }) == 1);
  }
  CHECK(stand_in::num_queued_copies() == 0);  // `a` was freed, which had to wait
  offload::require_same(grad_of(y, {x}), {(x + 1).cos().detach()});
}

TEST_CASE("tensors on the device wait on disk and in narrower types", "[device]") {
  std::string folder = (std::filesystem::temp_directory_path() / "remat-test-XXXXXX").string();
  REQUIRE(::mkdtemp(folder.data()) != nullptr);
  const Tensor x = offload::stand_in_leaf(far_device, {40, 30});
  const auto f = [&] { return ((x + 1).sin() * (x + 2).t().exp().t()).sin(); };
  const Tensor plain = grad_of(f(), {x})[0].cpu();
  const int64_t before = far_device.live_bytes();
  {
    Tensor y, z;
    {
      const remat::SaveOnDiskGuard guard({.directory = folder, .min_bytes = 0});
      y = f();
      CHECK(far_device.live_bytes() - before == offload::bytes_of(y));
    }
    {
      const remat::SaveAsGuard guard(at::kBFloat16);
      z = (x + 1).sin();
    }
    require_bit_equal({grad_of(y, {x})[0].cpu()}, {plain});
    const Tensor rounded = (x.detach().cpu() + 1).to(at::kBFloat16).to(at::kFloat);
    require_bit_equal({grad_of(z, {x})[0].cpu()}, {rounded.cos()});
  }
  std::filesystem::remove(folder);
}

TEST_CASE("parameters, their views and offloaded inputs of nested regions", "[device]") {
  const Tensor p = offload::stand_in_leaf(far_device, {64, 64});
  for (const Tensor& t : {p, p.t(), p.view({-1})})
    CHECK(offload::through(t, true).data_ptr() == t.data_ptr());
  const auto f = [](const Tensor& t, const Tensor& w) { return t.mm(w).sin(); };
  const Tensor x = offload::stand_in_leaf(far_device, {64, 64});
  const int64_t before = far_device.live_bytes();
  const Tensor y = remat::checkpoint(
      {.offload_inputs = true},
      [&](const Tensor& t, const Tensor& w) {
        return remat::checkpoint({.offload_inputs = true}, f, f(t, w), w);
      },
      x * 2, p);
  CHECK(far_device.live_bytes() - before == offload::bytes_of(y));
  offload::require_same(grad_of(y, {x, p}), grad_of(f(f(x * 2, p), p), {x, p}));
  // An input that is changed later raises, like one that stayed.
  const Tensor h = x * 2;
  const Tensor z = remat::checkpoint({.offload_inputs = true}, f, h, p);
  h.detach().add_(1);
  CHECK_THROWS_WITH(grad_of(z, {x}), contains("modified by an inplace operation"));
  drop_ready_nodes();
}

TEST_CASE("a change in place while the copy is under way raises", "[device]") {
  const bool requires_grad = GENERATE(true, false);
  const Tensor x = offload::stand_in_leaf(far_device, {3000});
  const remat::SaveOnCpuGuard guard({.pin_memory = true});
  const Tensor h = requires_grad ? x + 1 : (x + 1).detach();
  const Tensor y = h * x, next = x.exp();
  CHECK(stand_in::num_queued_copies() > 0);
  h.detach().zero_();
  CHECK_THROWS_WITH(grad_of(y, {x}), contains("modified by an inplace operation"));
  drop_ready_nodes();
}

TEST_CASE("writes through data are seen between two saves that do not require grad", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {32});
  const remat::SaveOnCpuGuard guard;  // with page-locked memory the copy may come after the write
  const Tensor scale = at::ones({32}).to(stand_in::device());
  const Tensor first = x * scale, next = x.exp();
  scale.data().fill_(3);
  const Tensor second = x * scale;
  require_bit_equal({grad_of(first, {x})[0].cpu()}, {at::ones({32})});
  require_bit_equal({grad_of(second, {x})[0].cpu()}, {at::full({32}, 3.f)});
}

TEST_CASE("side streams: what one saves another reads", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {3000});
  const remat::SaveOnCpuGuard guard({.pin_memory = true});
  Tensor y;
  {
    const stand_in::OnStream side(stand_in::stream(0, 3));
    y = (x + 1).sin().exp();
  }
  offload::require_same(grad_of(y, {x}), {y.detach() * (x + 1).cos().detach()});
}

TEST_CASE("what waits for its operator is copied after it on its stream", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {3000});
  const remat::SaveOnCpuGuard guard({.pin_memory = true});
  Tensor y;
  {
    const stand_in::OnStream side(stand_in::stream(0, 3));
    y = x * at::full({3000}, 2.f).to(stand_in::device());
  }
  stand_in::clear_log();
  const Tensor next = x.exp();
  const auto log = stand_in::log();
  REQUIRE(log.size() > 1);
  CHECK(log[0] == "record 3");
  offload::require_same(grad_of(y, {x}), {at::full({3000}, 2.f).to(stand_in::device())});
}

TEST_CASE("kept results wait on the CPU if they go through the hooks around", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {64, 64});
  const bool through_hooks = GENERATE(true, false);
  const auto f = [](const Tensor& t) { return t.mm(t).sin().exp(); };
  const Tensor plain = grad_of(f(x), {x})[0];
  const int64_t before = far_device.live_bytes();
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard;
    y = checkpoint({.policy = remat::save_ops({"aten::mm"}, {.save_through_hooks = through_hooks})},
                   f, x);
  }
  CHECK(far_device.live_bytes() - before == offload::bytes_of(y) * (through_hooks ? 1 : 2));
  const int64_t products = stand_in::num_kernels("aten::mm");
  offload::require_same(grad_of(y, {x}), {plain});
  CHECK(stand_in::num_kernels("aten::mm") == products + 2);  // those of backward
}

TEST_CASE("with skip_parameters off parameters move too, and still get their gradients",
          "[device]") {
  const bool pin_memory = GENERATE(true, false);
  const Tensor p = offload::stand_in_leaf(far_device, {64, 64});
  const auto f = [&] { return p.t().mm(p).sin(); };
  const Tensor plain = grad_of(f(), {p})[0];
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory, .skip_parameters = false});
    y = f();
    CHECK(torch::autograd::SavedVariable(p, false).unpack().data_ptr() != p.data_ptr());
  }
  offload::require_same(grad_of(y, {p}), {plain});
  y = f();
  y.backward(at::ones_like(y));
  offload::require_same({p.grad()}, {plain});
}

TEST_CASE("inputs that are on their way to the CPU hold no more of the device than 64 MiB",
          "[device]") {
  const int64_t waits = stand_in::num_waits();
  const auto forward = [&](int64_t count) {
    Tensors inputs, results;
    for (int64_t i = 0; i < count; ++i) {
      const Tensor x = at::ones({int64_t{5} << 20}).to(stand_in::device()).requires_grad_();
      inputs.push_back(x * 1);  // freed memory would wait for its copy by itself
      results.push_back(remat::checkpoint(
          {.offload_inputs = true}, [](const Tensor& t) { return t.sin(); }, inputs.back()));
    }
    return stand_in::num_waits() - waits;
  };
  CHECK(forward(3) == 0);
  CHECK(forward(4) > 0);  // 80 MiB
}

TEST_CASE("a guard begins as many copies back ahead as it is told", "[device]") {
  constexpr int64_t size = 4000;
  const Tensor x = offload::stand_in_leaf(far_device, {size / 4});
  const Tensor plain = grad_of(sines(x + 1, 6), {x})[0];
  const int64_t depth = GENERATE(0, 1, 2, 3, 100);
  CAPTURE(depth);
  const remat::Recorder recorder;
  std::optional<remat::MoveCounters> counters;
  Tensor middle, y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = true, .prefetch_depth = depth});
    counters = guard.counters();
    middle = sines(x + 1, 5);
    y = middle.sin();
  }
  const int64_t before = stand_in::live_bytes();
  grad_of(y, {middle}, {.retain_graph = true});
  const auto bytes_in = [&] { return recorder.report().devices.front().bytes_in; };
  CHECK(bytes_in() == (1 + std::min<int64_t>(depth, 5)) * size);
  CHECK(counters->now().loads == 1);
  CHECK(stand_in::live_bytes() == before);  // no read of the rest
  offload::require_same(grad_of(y, {x}), {plain});
  CHECK(counters->now().loads == 1 + 6);
  CHECK(counters->now().loads_ahead == (depth == 0 ? 0 : 5));
}

TEST_CASE("as many inputs of regions come back ahead as their options say", "[device]") {
  constexpr int64_t size = 4000;
  const Tensor x = offload::stand_in_leaf(far_device, {size / 4});
  const int64_t depth = GENERATE(0, 1, 2, 100);
  CAPTURE(depth);
  const auto region = [](const Tensor& t) { return t.sin().exp(); };
  const auto f = [&](Tensor t, int count) {
    for (int i = 0; i < count; ++i)
      t = checkpoint({.offload_inputs = true, .offload_prefetch_depth = depth}, region, t);
    return t;
  };
  Tensor plain = x + 1;
  for (int i = 0; i < 6; ++i) plain = region(plain);
  plain = grad_of(plain, {x})[0];
  const remat::Recorder recorder;
  const Tensor middle = f(x + 1, 5), y = f(middle, 1);
  const int64_t before = stand_in::live_bytes();
  grad_of(y, {middle}, {.retain_graph = true});
  CHECK(recorder.report().devices.front().bytes_in == (1 + std::min<int64_t>(depth, 5)) * size);
  CHECK(stand_in::live_bytes() == before);
  offload::require_same(grad_of(y, {x}), {plain});
  CHECK_THROWS_AS(checkpoint({.offload_prefetch_depth = -1}, region, x), c10::ValueError);
}

TEST_CASE("the last saves stay on the device, and are read there", "[device]") {
  constexpr int64_t size = 4000;
  const Tensor x = offload::stand_in_leaf(far_device, {size / 4});
  const Tensor plain = grad_of(sines(x + 1, 8), {x})[0];
  const int64_t keep_last = GENERATE(0, 1, 3, 7, 8, 100);
  const bool pin_memory = GENERATE(true, false);
  CAPTURE(keep_last, pin_memory);
  std::optional<remat::MoveCounters> counters;
  const int64_t before = stand_in::live_bytes();
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory, .keep_last = keep_last});
    counters = guard.counters();
    y = sines(x + 1, 8);
  }
  const int64_t num_staying = std::min<int64_t>(keep_last, 8);
  CHECK(counters->now().moves == 8 - num_staying);
  CHECK(stand_in::live_bytes() - before == (1 + num_staying) * size);
  offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
  CHECK(counters->now().loads == 8 - num_staying);
  // Tensors that stay also tell which tensors come next.
  if (pin_memory)
    CHECK(counters->now().loads_ahead == std::max<int64_t>(0, 8 - std::max<int64_t>(1, keep_last)));
  offload::require_same(grad_of(y, {x}), {plain});
  CHECK_THROWS_AS(remat::SaveOnCpuGuard({.keep_last = -1}), c10::ValueError);
}

TEST_CASE("what stays since it was saved last and is changed in place raises", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {1000});
  const int which = GENERATE(0, 1);  // moved before the change, or not
  Tensor h, y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = true, .keep_last = 1});
    h = x + 1;
    y = h.sin();
    const Tensor alias = which == 0 ? h.detach() : Tensor();
    if (which == 0) h.reset();
    y = sines(y, 2);
    if (which == 0) alias.zero_();
  }
  if (which == 1) h.detach().zero_();
  CHECK_THROWS_WITH(grad_of(y, {x}), contains("modified by an inplace operation"));
  drop_ready_nodes();
}
