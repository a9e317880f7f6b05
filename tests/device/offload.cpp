// Offloading on the stand-in of stand_in.h, whose copies run as late as they may.

#include <malloc.h>
#include <unistd.h>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include "remat/report.h"
#include "remat/tiers.h"
#include "tests/device/offload_cases.h"
#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/files.h"
#include "tests/support/functions.h"
#include "tests/support/warnings.h"

using remat::checkpoint;

namespace {

const offload::Accelerator far_device{stand_in::device(), [] { return stand_in::live_bytes(); }};

}  // namespace

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
  if (!at::hasCUDA()) CHECK(after > 0);  // else it is CUDA's
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
    CHECK(log[1].starts_with("wait "));  // the copy waits for what was queued
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
  // One that is changed afterwards raises, as one that stayed.
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

namespace {

/// Something for two page-locked chunks, whose size is the library's, and for nothing else.
constexpr int64_t two_chunks = 2 * (4 << 20);
constexpr int64_t large = 9'000'000;  // bytes of more than two chunks

/// What was begun to be copied through chunks is, or has failed: the thread that does it writes
/// files after that.
void wait_for_chunks() {
  const Folder folder;
  const Tensor near = at::randn({16}).requires_grad_();
  Tensor y;
  std::optional<remat::TierCounters> counters;
  {
    const remat::SaveInTiersGuard guard(
        {.host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
    counters = guard.counters();
    y = (near + 1).sin();
  }
  for (int i = 0; i < 5000 && counters->now().bytes_on_disk == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(counters->now().bytes_on_disk > 0);
}

int64_t count_of(const std::vector<std::string>& texts, const char* part) {
  return std::count_if(texts.begin(), texts.end(), [&](const std::string& each) {
    return each.find(part) != std::string::npos;
  });
}

}  // namespace

TEST_CASE("a copy of a guard's that fails, out or back, loses nothing", "[device][faults]") {
  const int64_t n_side = 16;
  const Tensor x = at::randn({n_side, n_side}).div_(n_side).to(stand_in::device()).requires_grad_();
  const auto f = [](const Tensor& t) {
    Tensor h = t.mm(t);
    for (int i = 0; i < 3; ++i) h = h.sin().mm(t);
    return h.exp();
  };
  const Tensor plain = grad_of(f(x), {x})[0].cpu();
  const int which = GENERATE(0, 1, 2);
  CAPTURE(which);
  const auto forward = [&]() -> Tensor {
    if (which == 0) {
      const remat::SaveOnCpuGuard guard({.pin_memory = true});
      return f(x);
    }
    if (which == 1) {
      const remat::SaveInTiersGuard guard({.device_bytes = 0, .min_bytes = 0});
      return f(x);
    }
    return remat::checkpoint({.offload_inputs = true}, f, x * 1);
  };
  const int64_t before = stand_in::live_bytes();
  int failed_out = 0, failed_back = 0;
  for (int64_t n = 0; n < 8; ++n) {
    CAPTURE(n);
    Tensor y;
    try {
      const remat::testing::Warnings warnings;  // tiers leave it where it was
      const FailingCopy failing(n);
      y = forward();
    } catch (const c10::Error& error) {
      ++failed_out;
      CHECK_THAT(error.what(), contains("far failed to copy"));
    }
    if (!y.defined()) {
      CHECK(stand_in::live_bytes() == before);
      y = forward();
    }
    try {
      const FailingCopy failing(n);
      require_bit_equal({grad_of(y, {x}, {.retain_graph = true})[0].cpu()}, {plain});
    } catch (const c10::Error& error) {
      ++failed_back;
      CHECK_THAT(error.what(), contains("far failed to copy"));
      drop_ready_nodes();
    }
    require_bit_equal({grad_of(y, {x})[0].cpu()}, {plain});
  }
  // The engine's thread of the device lets go late.
  for (int i = 0; i < 5000 && stand_in::live_bytes() != before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(stand_in::live_bytes() == before);
  CHECK((failed_out > 0) == (which != 1));
}

TEST_CASE("inputs that are on their way to the CPU hold no more of the device than 64 MiB",
          "[device]") {
  const int64_t waits = stand_in::num_waits();
  const auto forward = [&](int64_t count) {
    Tensors inputs, results;
    for (int64_t i = 0; i < count; ++i) {
      const Tensor x = at::ones({int64_t{5} << 20}).to(stand_in::device()).requires_grad_();
      inputs.push_back(x * 1);  // memory that is freed would wait for its copy by itself
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
  CHECK(stand_in::live_bytes() == before);  // nobody asked for the rest
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
  // What stays says what comes next, too.
  if (pin_memory)
    CHECK(counters->now().loads_ahead == std::max<int64_t>(0, 8 - std::max<int64_t>(1, keep_last)));
  offload::require_same(grad_of(y, {x}), {plain});
  CHECK_THROWS_AS(remat::SaveOnCpuGuard({.keep_last = -1}), c10::ValueError);
}

TEST_CASE("what stays since it was saved last and is changed in place raises", "[device]") {
  const Tensor x = offload::stand_in_leaf(far_device, {1000});
  const int which = GENERATE(0, 1);  // moved by then, or not
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

TEST_CASE("an exception between a copy and its use lets go of both, and the rest can be used",
          "[device][faults]") {
  constexpr int64_t size = 4000;
  const Tensor x = offload::stand_in_leaf(far_device, {size / 4});
  const Tensor plain = grad_of(sines(x + 1, 6), {x})[0];
  const int64_t before = stand_in::live_bytes();
  const int which = GENERATE(0, 1, 2);
  CAPTURE(which);
  const auto under_guard = [&](const auto& program) {
    if (which == 0) {
      const remat::SaveOnCpuGuard guard({.pin_memory = true, .prefetch_depth = 100});
      return program();
    }
    if (which == 1) {
      const remat::SaveOnCpuGuard guard({.pin_memory = true, .keep_last = 2});
      return program();
    }
    const remat::SaveInTiersGuard guard({.device_bytes = size, .min_bytes = 0});
    return program();
  };
  // Copies out are on their way.
  CHECK_THROWS_WITH(under_guard([&]() -> Tensor {
                      sines(x + 1, 6);
                      throw std::runtime_error("stop in forward");
                    }),
                    contains("stop in forward"));
  CHECK(stand_in::live_bytes() == before);
  // Copies back are on their way when a node of backward throws.
  Tensor middle;
  const Tensor y = under_guard([&] {
    middle = sines(x + 1, 4);
    return sines(middle, 2);
  });
  bool throws = true;
  middle.register_hook([&](const Tensor&) {
    if (throws) throw std::runtime_error("stop in backward");
  });
  middle.reset();
  const int64_t held = stand_in::live_bytes();
  CHECK_THROWS_WITH(grad_of(y, {x}, {.retain_graph = true}), contains("stop in backward"));
  drop_ready_nodes();
  CHECK(stand_in::live_bytes() == held);
  throws = false;
  offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
  offload::require_same(grad_of(y, {x}), {plain});
}

TEST_CASE(
    "page-locked memory that is short is warned about once, and what is beyond goes through chunks",
    "[device][faults]") {
  if (at::hasCUDA()) return;  // then it is CUDA's
  const Tensor x = offload::stand_in_leaf(far_device, {large / 4});
  const Tensor plain = grad_of(sines(x + 1, 3), {x})[0];
  const ShortPinnedMemory none(two_chunks);
  remat::testing::Warnings warnings;
  for (int i = 0; i < 2; ++i) {
    const int64_t before = stand_in::pinned_bytes();
    std::optional<remat::MoveCounters> counters;
    Tensor y;
    {
      const remat::SaveOnCpuGuard guard({.pin_memory = true});
      counters = guard.counters();
      y = sines(x + 1, 3);
    }
    CHECK(counters->now().bytes_moved == 3 * large);
    offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
    offload::require_same(grad_of(y, {x}), {plain});
    CHECK(stand_in::pinned_bytes() - before <= two_chunks);
  }
  CHECK(count_of(warnings.texts, "page-locked memory of the host is short") == 1);
  CHECK(count_of(warnings.texts, "9000000 bytes could not be had") == 1);
}

#ifndef __SANITIZE_ADDRESS__  // which has reserved more addresses than any limit leaves
TEST_CASE("memory of the host that is short is warned about once", "[device][faults]") {
  int64_t num_warnings = 0;
  for (const bool pin_memory : {false, true, false}) {
    const Tensor x = offload::stand_in_leaf(far_device, {1'000'000});
    const Tensor plain = grad_of(sines(x + 1, 2), {x})[0];
    remat::testing::Warnings warnings;
    Tensor y;
    {
      int64_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      // So much is left that all succeeds, but no twentieth of it.
      const auto used = static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE));
      const Limit limit(RLIMIT_AS, used + (rlim_t{1} << 25));
      const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory});
      y = sines(x + 1, 2);
    }
    offload::require_same(grad_of(y, {x}), {plain});
    num_warnings += count_of(warnings.texts, "memory of the host is short: of ");
  }
  CHECK(num_warnings == 1);
}
#endif

TEST_CASE("copies from and to ordinary memory do not hold up the program", "[device]") {
  if (at::hasCUDA()) return;  // then page-locked memory is CUDA's
  const bool has_chunks = GENERATE(true, false);
  CAPTURE(has_chunks);
  const Tensor x = offload::stand_in_leaf(far_device, {large / 4});
  const Tensor plain = grad_of(sines(x + 1, 5), {x})[0];
  const ShortPinnedMemory none(has_chunks ? two_chunks : 0);
  const int64_t before = stand_in::live_bytes();
  Tensor y;
  {
    HeldUpCopies held_up;
    const remat::SaveOnCpuGuard guard({.pin_memory = true});
    y = sines(x + 1, 5);
    CHECK(held_up.holds_one());  // by another thread, while forward has gone on
    // What is not copied yet is on the device.
    CHECK(stand_in::live_bytes() - before == 6 * large);
  }
  for (int i = 0; i < 5000 && stand_in::live_bytes() - before != large; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(stand_in::live_bytes() - before == large);
  offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
  offload::require_same(grad_of(y, {x}), {plain});
}

TEST_CASE(
    "copies through ordinary memory hold no more of the device than 64 MiB, or than asked for",
    "[device]") {
  if (at::hasCUDA()) return;
  const ShortPinnedMemory none(0);
  const int64_t max_bytes = GENERATE(int64_t{20} << 20, std::numeric_limits<int64_t>::max());
  CAPTURE(max_bytes);
  const Tensor x = offload::stand_in_leaf(far_device, {large / 4});
  const Tensor plain = grad_of(sines(x + 1, 12), {x})[0];
  const int64_t before = stand_in::live_bytes();
  int64_t most = 0;
  Tensor y;
  {
    // Nothing is copied until forward must wait for it, or has ended.
    HeldUpCopies held_up;
    const auto later = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(std::chrono::seconds(3));
      held_up.let_go();
    });
    const remat::SaveOnCpuGuard guard({.pin_memory = true, .max_bytes_in_flight = max_bytes});
    y = x + 1;
    for (int i = 0; i < 12; ++i) {
      y = y.sin();
      most = std::max(most, stand_in::live_bytes() - before);
    }
    later.wait();
  }
  // What is on its way, and the result.
  CHECK(most <= std::min(max_bytes, int64_t{64} << 20) + large);
  CHECK(most >= 2 * large);
  offload::require_same(grad_of(y, {x}), {plain});
}

TEST_CASE("a copy through chunks that fails, out or back, loses nothing", "[device][faults]") {
  if (at::hasCUDA()) return;
  const Tensor x = offload::stand_in_leaf(far_device, {large / 4});
  const Tensor plain = grad_of(sines(x + 1, 3), {x})[0];
  const ShortPinnedMemory none(two_chunks);
  const int64_t before = stand_in::live_bytes();
  int failed_out = 0, failed_back = 0;
  const auto backward = [&](const Tensor& y, int64_t failing_copy) {
    try {
      const FailingCopy failing(failing_copy);
      require_bit_equal({grad_of(y, {x}, {.retain_graph = true})[0].cpu()}, {plain.cpu()});
    } catch (const c10::Error& error) {
      ++failed_back;
      CHECK_THAT(error.what(), contains("far failed to copy"));
      drop_ready_nodes();
    }
  };
  for (int64_t n = 0; n < 10; ++n) {
    CAPTURE(n);
    Tensor y;
    {
      const remat::testing::Warnings warnings;
      {
        const FailingCopy failing(n);
        const remat::SaveOnCpuGuard guard(
            {.pin_memory = true, .prefetch_depth = n % 2 == 0 ? 0 : 2});
        y = sines(x + 1, 3);
        wait_for_chunks();
      }
      backward(y, -1);
      failed_out += static_cast<int>(
          count_of(warnings.texts, "stays on its device, since it could not be copied"));
    }
    backward(y, n);
    require_bit_equal({grad_of(y, {x})[0].cpu()}, {plain.cpu()});
  }
  for (int i = 0; i < 5000 && stand_in::live_bytes() != before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(stand_in::live_bytes() == before);
  CHECK(failed_out == 9);  // each of three chunks of three tensors
  CHECK(failed_back > 0);
}

TEST_CASE("the last chunk may be of one byte", "[device]") {
  if (at::hasCUDA()) return;
  const ShortPinnedMemory none(0);
  constexpr int64_t size = (int64_t{4} << 20) + 1;
  const Tensor x = offload::stand_in_leaf(far_device, {size});
  for (const bool is_hidden : {true, false}) {
    const Tensor hidden = at::full({size}, is_hidden, at::kBool);
    const int64_t before = stand_in::live_bytes();
    Tensor y;
    {
      const remat::SaveOnCpuGuard guard({.pin_memory = true});
      y = x.masked_fill(hidden.to(x.device()), 0);
    }
    wait_for_chunks();
    CHECK(stand_in::live_bytes() - before == 4 * size);
    CHECK(grad_of(y, {x})[0].cpu().count_nonzero().item<int64_t>() == (is_hidden ? 0 : size));
  }
}

TEST_CASE("a change in place while chunks are under way raises", "[device]") {
  if (at::hasCUDA()) return;
  const ShortPinnedMemory none(two_chunks);
  const Tensor x = offload::stand_in_leaf(far_device, {large / 4});
  Tensor h, y;
  {
    HeldUpCopies held_up;
    const remat::SaveOnCpuGuard guard({.pin_memory = true});
    h = x + 1;
    y = h.sin();
    CHECK(held_up.holds_one());
    h.detach().zero_();
  }
  CHECK_THROWS_WITH(grad_of(y, {x}), contains("modified by an inplace operation"));
  drop_ready_nodes();
}

TEST_CASE("inputs of regions, policies and tiers move through chunks, too", "[device][rule-15]") {
  if (at::hasCUDA()) return;
  const Folder folder;
  const bool has_chunks = GENERATE(true, false);
  CAPTURE(has_chunks);
  const ShortPinnedMemory none(has_chunks ? two_chunks : 0);
  const int which = GENERATE(0, 1, 2, 3);
  CAPTURE(which);
  const int64_t side = 1500;  // 9 MB
  const Tensor x = at::randn({side, side}).div_(side).to(stand_in::device()).requires_grad_();
  const auto f = [](const Tensor& t) { return t.sin().exp().sin().exp(); };
  const Tensor plain = grad_of(f(f(x * 1)), {x})[0];
  const int64_t before = stand_in::live_bytes();
  const auto run = [&]() -> Tensor {
    const remat::CheckpointOptions options{
        .policy = which == 1 ? remat::offload_ops({"aten::exp"}) : remat::Policy(),
        .offload_inputs = which == 0};
    if (which < 2) return checkpoint(options, f, checkpoint(options, f, x * 1));
    const remat::SaveInTiersGuard guard(
        which == 2 ? remat::SaveInTiersOptions{.min_bytes = 0}
                   : remat::SaveInTiersOptions{
                         .host_bytes = 2 * large, .directory = folder.path(), .min_bytes = 0});
    return f(f(x * 1));
  };
  {
    const Tensor y = run();
    for (int i = 0; i < 2; ++i)
      offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
    offload::require_same(grad_of(y, {x}), {plain});
  }
  for (int i = 0; i < 5000 && stand_in::live_bytes() != before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(stand_in::live_bytes() == before);
}

namespace {

/// The thread that copies through chunks is at the first one of another tensor.
class BusyWithChunks {
 public:
  static constexpr int64_t num_copies = 3;
  explicit BusyWithChunks(const Tensor& like) {
    const remat::SaveOnCpuGuard guard({.pin_memory = true});
    other_ = sines(like + 1, 1);
    REQUIRE(held_up_.holds_one());
  }
  void end() { held_up_.let_go(); }

 private:
  HeldUpCopies held_up_;
  Tensor other_;
};

}  // namespace

TEST_CASE("a policy's copies through chunks do not hold up the end of its region",
          "[device][rule-15]") {
  if (at::hasCUDA()) return;
  const ShortPinnedMemory none(two_chunks);
  const int64_t side = 1500;  // 9 MB
  const Tensor x = at::randn({side, side}).div_(side).to(stand_in::device()).requires_grad_();
  const auto f = [](const Tensor& t) { return t.sin().exp().sin().exp().sin(); };
  const Tensor plain = grad_of(f(x), {x})[0];
  const auto answer =
      GENERATE(remat::CheckpointPolicy::MustCpuOffload, remat::CheckpointPolicy::PreferCpuOffload);
  const remat::CheckpointOptions options{
      .policy = remat::Policy([answer](const remat::PolicyContext& question) {
        return question.op_name == "aten::exp.default" ? answer
                                                       : remat::CheckpointPolicy::PreferRecompute;
      })};
  BusyWithChunks busy(x);
  const int64_t before = stand_in::live_bytes();
  const Tensor y = checkpoint(options, f, x);
  // The result, and two that nobody has copied yet.
  CHECK(stand_in::live_bytes() - before == 3 * side * side * 4);
  busy.end();
  offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
  offload::require_same(grad_of(y, {x}), {plain});
}

TEST_CASE("a copy through chunks that fails is an error where it must be made and that is known",
          "[device][rule-15][faults]") {
  if (at::hasCUDA()) return;
  const ShortPinnedMemory none(two_chunks);
  const int64_t side = 1500;  // 9 MB
  const Tensor x = at::randn({side, side}).div_(side).to(stand_in::device()).requires_grad_();
  const auto f = [](const Tensor& t) { return t.sin().exp().sin(); };
  const Tensor plain = grad_of(f(x), {x})[0];
  const bool must = GENERATE(true, false), is_known = GENERATE(true, false);
  CAPTURE(must, is_known);
  const auto answer =
      must ? remat::CheckpointPolicy::MustCpuOffload : remat::CheckpointPolicy::PreferCpuOffload;
  const remat::CheckpointOptions options{
      .policy = remat::Policy([answer](const remat::PolicyContext& question) {
        return question.op_name == "aten::exp.default" ? answer
                                                       : remat::CheckpointPolicy::PreferRecompute;
      })};
  const int64_t before = stand_in::live_bytes();
  {
    const remat::testing::Warnings warnings;
    Tensor y;
    const auto forward = [&] {
      std::optional<BusyWithChunks> busy;
      if (!is_known) busy.emplace(x);
      const FailingCopy failing(is_known ? 0 : BusyWithChunks::num_copies);
      y = checkpoint(
          options,
          [&](const Tensor& t) {
            const Tensor result = f(t);
            if (is_known && !remat::is_recomputing())
              std::async(std::launch::async, wait_for_chunks).get();
            return result;
          },
          x);
      if (busy) busy->end();
      wait_for_chunks();
    };
    if (must && is_known) {
      CHECK_THROWS_WITH(forward(), contains("has to wait on the CPU could not be copied there"));
      CHECK_THROWS_WITH(forward(), contains("far failed to copy"));
      CHECK(!y.defined());
      CHECK(warnings.texts.empty());
      y = checkpoint(options, f, x);
      wait_for_chunks();
    } else {
      forward();
    }
    // It has stayed where it was.
    offload::require_same(grad_of(y, {x}, {.retain_graph = true}), {plain});
    CHECK(count_of(warnings.texts, "stays on its device, since it could not be copied") ==
          (must && is_known ? 0 : 1));
    offload::require_same(grad_of(y, {x}), {plain});
  }
  for (int i = 0; i < 5000 && stand_in::live_bytes() != before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(stand_in::live_bytes() == before);
}

// Last: the pool remembers that there is none.
TEST_CASE("without page-locked memory ordinary memory serves", "[device][last]") {
  const NoPinnedMemory none;
  const Tensor x = offload::stand_in_leaf(far_device, {9'000'000});  // more than the pool has free
  const remat::SaveOnCpuGuard guard({.pin_memory = true});
  const int64_t before = stand_in::pinned_bytes();
  const Tensor y = (x + 1).sin();
  CHECK(stand_in::pinned_bytes() == before);
  offload::require_same(grad_of(y, {x}), {(x + 1).cos().detach()});
}
