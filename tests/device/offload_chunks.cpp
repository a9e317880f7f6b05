// Copies through chunks of page-locked memory, for tensors in ordinary memory, on the stand-in of
// stand_in.h.

#include <future>
#include <thread>

#include "remat/tiers.h"
#include "tests/device/offload_cases.h"
#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/far_offload.h"
#include "tests/support/files.h"
#include "tests/support/functions.h"
#include "tests/support/warnings.h"

using remat::checkpoint;

namespace {

/// Each begun copy through chunks is done, or has failed: the thread that does it writes
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

}  // namespace

TEST_CASE("copies from and to ordinary memory do not hold up the program", "[device]") {
  if (at::hasCUDA()) return;  // then page-locked memory is CUDA's
  const bool has_chunks = GENERATE(true, false);
  CAPTURE(has_chunks);
  const Tensor x = offload::stand_in_leaf(far_device, {over_two_chunks / 4});
  const Tensor plain = grad_of(sines(x + 1, 5), {x})[0];
  const ShortPinnedMemory none(has_chunks ? two_chunks : 0);
  const int64_t before = stand_in::live_bytes();
  Tensor y;
  {
    HeldUpCopies held_up;
    const remat::SaveOnCpuGuard guard({.pin_memory = true});
    y = sines(x + 1, 5);
    CHECK(held_up.holds_one());  // by another thread, while forward has gone on
    // The rest, not copied yet, is on the device.
    CHECK(stand_in::live_bytes() - before == 6 * over_two_chunks);
  }
  for (int i = 0; i < 5000 && stand_in::live_bytes() - before != over_two_chunks; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(stand_in::live_bytes() - before == over_two_chunks);
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
  const Tensor x = offload::stand_in_leaf(far_device, {over_two_chunks / 4});
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
  // The copy that is on its way, and the result.
  CHECK(most <= std::min(max_bytes, int64_t{64} << 20) + over_two_chunks);
  CHECK(most >= 2 * over_two_chunks);
  offload::require_same(grad_of(y, {x}), {plain});
}

TEST_CASE("a copy through chunks that fails, out or back, loses nothing", "[device][faults]") {
  if (at::hasCUDA()) return;
  const Tensor x = offload::stand_in_leaf(far_device, {over_two_chunks / 4});
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
  const Tensor x = offload::stand_in_leaf(far_device, {over_two_chunks / 4});
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
        which == 2
            ? remat::SaveInTiersOptions{.min_bytes = 0}
            : remat::SaveInTiersOptions{
                  .host_bytes = 2 * over_two_chunks, .directory = folder.path(), .min_bytes = 0});
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
      CHECK_THROWS_WITH(forward(), contains("has to be kept on the CPU could not be copied there"));
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
