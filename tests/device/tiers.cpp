// Tiers on the stand-in of stand_in.h: device, CPU, file.

#include "remat/tiers.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "remat/memory.h"
#include "remat/report.h"
#include "tests/device/offload_cases.h"
#include "tests/device/stand_in.h"
#include "tests/support/files.h"
#include "tests/support/functions.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::SaveInTiersGuard;
using remat::SaveInTiersOptions;
using remat::TierCounters;

namespace {

/// The added time of each read and write of a file.
std::atomic<int64_t> read_delay_ms{0}, write_delay_ms{0};

ssize_t read_slowly(int file, void* to, size_t size, int64_t offset) {
  std::this_thread::sleep_for(std::chrono::milliseconds(read_delay_ms));
  return syscall(SYS_pread64, file, to, size, offset);
}

ssize_t write_slowly(int file, const void* from, size_t size, int64_t offset) {
  std::this_thread::sleep_for(std::chrono::milliseconds(write_delay_ms));
  return syscall(SYS_pwrite64, file, from, size, offset);
}

}  // namespace

// The library's calls arrive here, since the linker searches the program first.
extern "C" ssize_t pread64(int file, void* to, size_t size, off64_t offset) {
  return read_slowly(file, to, size, offset);
}
extern "C" ssize_t pwrite64(int file, const void* from, size_t size, off64_t offset) {
  return write_slowly(file, from, size, offset);
}

namespace {

constexpr int64_t kibibyte = 1 << 10;
constexpr int length = 12;

/// One KiB on the device.
Tensor leaf_there(int index = 0) {
  return at::randn({kibibyte / 4}).to(stand_in::device(index)).requires_grad_();
}

void wait_for(const std::function<bool()>& is_so) {
  for (int i = 0; i < 5000 && !is_so(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(is_so());
}

}  // namespace

TEST_CASE("an accelerator keeps its budget, the CPU its own, the file the rest",
          "[device][tiers]") {
  const Folder folder;
  const bool pin_memory = GENERATE(false, true);
  const int64_t on_device = GENERATE(0, 2, 5, 100), on_host = GENERATE(0, 3, 100);
  const Tensor x = leaf_there();
  const Tensors plain = grad_of(sines(x, length), {x});
  const int64_t before = stand_in::live_bytes();
  {
    Tensor y;
    std::optional<TierCounters> counters;
    {
      const SaveInTiersGuard guard({.device_bytes = on_device * kibibyte,
                                    .host_bytes = on_host * kibibyte,
                                    .directory = folder.path(),
                                    .min_bytes = 0,
                                    .pin_memory = pin_memory});
      counters = guard.counters();
      y = sines(x, length);
    }
    CAPTURE(pin_memory, on_device, on_host);
    // The test holds x, and y holds its result.
    const int64_t num_left = std::max<int64_t>(0, length - 1 - on_device);
    const int64_t num_written = std::max<int64_t>(0, num_left - on_host);
    wait_for([&] { return counters->now().bytes_on_disk == num_written * kibibyte; });
    wait_for(
        [&] { return counters->now().bytes_on_host == std::min(num_left, on_host) * kibibyte; });
    CHECK(counters->now().bytes_to_host == num_left * kibibyte);
    CHECK(stand_in::live_bytes() - before ==
          (1 + std::min<int64_t>(on_device, length - 1)) * kibibyte);
    for (int i = 0; i < 2; ++i)
      offload::require_same(grad_of(y, {x}, {.retain_graph = true}), plain);
    offload::require_same(grad_of(y, {x}), plain);
    CHECK(counters->now().loads >= num_left);
  }
  wait_for([&] { return stand_in::live_bytes() == before; });  // the engine's thread releases late
}

TEST_CASE("backward on an accelerator brings back no more than there is room for",
          "[device][tiers]") {
  const Tensor x = leaf_there();
  remat::MemoryMeter meter(stand_in::device());
  /// Returns the bytes that backward needs beyond those alive before.
  const auto needed = [&](const Tensor& y) {
    const int64_t before = meter.live_bytes();
    meter.reset_peak();
    grad_of(y, {x});
    return meter.peak_bytes() - before;
  };
  const int64_t plain = needed(sines(x, 32));
  const int64_t on_device = GENERATE(0, 1, 3);
  Tensor y;
  {
    const SaveInTiersGuard guard({.device_bytes = on_device * kibibyte, .min_bytes = 0});
    y = sines(x, 32);
  }
  // The tensor that is read, the next one, and one whose copy may have ended without the
  // allocator's notice.
  CHECK(needed(y) <= plain + 3 * kibibyte);
}

TEST_CASE("two devices have a budget each, and share the CPU's", "[device][tiers]") {
  const Folder folder;
  const Tensor a = leaf_there(0), b = leaf_there(1);
  const Tensors plain_a = grad_of(sines(a, length), {a}), plain_b = grad_of(sines(b, length), {b});
  Tensor y, z;
  std::optional<TierCounters> counters;
  {
    const SaveInTiersGuard guard({.device_bytes = 4 * kibibyte,
                                  .host_bytes = 5 * kibibyte,
                                  .directory = folder.path(),
                                  .min_bytes = 0});
    counters = guard.counters();
    y = sines(a, length);
    z = sines(b, length);
  }
  CHECK(counters->now().bytes_to_host == 2 * (length - 1 - 4) * kibibyte);
  wait_for([&] { return counters->now().bytes_on_host == 5 * kibibyte; });
  offload::require_same(grad_of(z, {b}), plain_b);
  offload::require_same(grad_of(y, {a}), plain_a);
}

TEST_CASE("inputs of regions on an accelerator wait in tiers", "[device][tiers]") {
  const Folder folder;
  const Tensor x = leaf_there();
  const auto regions = [](Tensor t) {
    for (int i = 0; i < 6; ++i) t = checkpoint([](const Tensor& u) { return sines(u, 3); }, t);
    return t;
  };
  const Tensors plain = grad_of(sines(x, 18), {x});
  Tensor y;
  std::optional<TierCounters> counters;
  {
    const SaveInTiersGuard guard({.device_bytes = kibibyte,
                                  .host_bytes = 2 * kibibyte,
                                  .directory = folder.path(),
                                  .min_bytes = 0});
    counters = guard.counters();
    y = regions(x);
  }
  CHECK(counters->now().bytes_to_host == 4 * kibibyte);
  offload::require_same(grad_of(y, {x}), plain);
}

TEST_CASE("copies of tiers wait for the stream that saved", "[device][tiers]") {
  const Tensor x = leaf_there();
  const Tensors plain = grad_of(sines(x, length), {x});
  Tensor y = x;
  {
    const SaveInTiersGuard guard({.device_bytes = 3 * kibibyte, .min_bytes = 0});
    for (int i = 0; i < 3; ++i) {
      const stand_in::OnStream on(stand_in::stream(0, i + 1));
      y = sines(y, length / 3);
    }
  }
  offload::require_same(grad_of(y, {x}), plain);
}

TEST_CASE("a device keeps the last saves beyond its budget, and the rest goes on as without",
          "[device][tiers]") {
  const Folder folder;
  const Tensor x = leaf_there();
  const Tensors plain = grad_of(sines(x, length), {x});
  const int64_t keep_last = GENERATE(0, 2, 100), on_device = GENERATE(0, 1, 4);
  const int64_t before = stand_in::live_bytes();
  Tensor y;
  std::optional<TierCounters> counters;
  {
    const SaveInTiersGuard guard({.device_bytes = on_device * kibibyte,
                                  .host_bytes = 3 * kibibyte,
                                  .directory = folder.path(),
                                  .min_bytes = 0,
                                  .keep_last = keep_last});
    counters = guard.counters();
    y = sines(x, length);
  }
  const int64_t num_staying = std::min<int64_t>(length - 1, std::max(on_device, keep_last));
  CHECK(counters->now().bytes_to_host == (length - 1 - num_staying) * kibibyte);
  CHECK(stand_in::live_bytes() - before == (1 + num_staying) * kibibyte);
  for (int i = 0; i < 2; ++i)
    offload::require_same(grad_of(y, {x}, {.retain_graph = i == 0}), plain);
}

TEST_CASE("what came from a device and does not fit on the disk stays on the CPU, with a warning",
          "[device][tiers][faults]") {
  const Folder folder;
  const Tensor x = leaf_there();
  const Tensors plain = grad_of(sines(x, length), {x});
  const bool pin_memory = GENERATE(true, false);
  std::string warned;
  {
    const remat::testing::Warnings warnings;
    const FileSizeLimit limit(4 * kibibyte);
    Tensor y;
    std::optional<TierCounters> counters;
    {
      // Forward waits for each write.
      const SaveInTiersGuard guard({.host_bytes = 0,
                                    .directory = folder.path(),
                                    .min_bytes = 0,
                                    .pin_memory = pin_memory,
                                    .max_bytes_in_flight = 0});
      counters = guard.counters();
      y = sines(x, length);
    }
    CHECK(counters->now().failed_writes > 0);
    CHECK(counters->now().bytes_on_disk + counters->now().bytes_on_host == (length - 1) * kibibyte);
    for (int i = 0; i < 2; ++i)
      offload::require_same(grad_of(y, {x}, {.retain_graph = i == 0}), plain);
    for (const std::string& each : warnings.texts) warned += each;
  }
  CHECK_THAT(warned, contains("stays in memory, beyond the budget of its tier"));
  CHECK_THAT(warned, contains("could not be written to a file"));
}

TEST_CASE("what waits in the file is on its device again before backward asks for it",
          "[device][tiers]") {
  const Folder folder;
  const Tensor x = leaf_there();
  const Tensors plain = grad_of(sines(x, length), {x});
  Tensor middle, y;
  std::optional<TierCounters> counters;
  {
    const SaveInTiersGuard guard({.host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
    counters = guard.counters();
    middle = sines(x, length - 2);
    y = sines(middle, 2);
  }
  const Tensor held = std::exchange(middle, Tensor());  // the tensor stays on the device
  wait_for([&] { return counters->now().bytes_on_disk == (length - 2) * kibibyte; });
  const remat::Recorder recorder;
  const auto bytes_in = [&] {
    const remat::Report report = recorder.report();
    return report.devices.empty() ? 0 : report.devices.front().bytes_in;
  };
  int64_t before_the_second = 0;
  held.register_hook([&](const Tensor&) {
    for (int i = 0; i < 5000 && bytes_in() < kibibyte; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    before_the_second = bytes_in();
  });
  offload::require_same(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(before_the_second >= kibibyte);
  // All but the first tensor that was read.
  CHECK(bytes_in() == (length - 3) * kibibyte);
  CHECK(counters->now().loads == length - 2);
  offload::require_same(grad_of(y, {x}), plain);
}

TEST_CASE("the file is read from backward's first step on, as far as the CPU has room",
          "[device][tiers]") {
  const Folder folder;
  const Tensor x = leaf_there();
  const Tensors plain = grad_of(sines(x, length), {x});
  const bool pin_memory = GENERATE(false, true), goes_on = GENERATE(true, false);
  CAPTURE(pin_memory, goes_on);
  constexpr int64_t on_host = 4;
  Tensor y, middle;
  std::vector<int64_t> held;
  std::optional<TierCounters> counters;
  {
    const SaveInTiersGuard guard({.host_bytes = on_host * kibibyte,
                                  .directory = folder.path(),
                                  .min_bytes = 0,
                                  .pin_memory = pin_memory});
    counters = guard.counters();
    y = x;
    for (int i = 0; i < length; ++i) {
      y = y.sin();
      if (i == length - 3 && !goes_on) middle = y;
      // Runs when the node before is done.
      y.register_hook([&](const Tensor&) {
        held.push_back(counters->now().bytes_on_host / kibibyte);
        CHECK(held.back() <= on_host);
      });
    }
  }
  // Tensors that the test holds do not move.
  const int64_t written = length - 1 - (goes_on ? 0 : 1) - on_host;
  wait_for([&] { return counters->now().bytes_on_disk == written * kibibyte; });
  wait_for([&] { return counters->now().bytes_on_host == on_host * kibibyte; });
  if (!goes_on) {
    grad_of(y, {middle});
    // One tensor has been used, and the tensor that came into its room was released.
    CHECK(held.size() > 1);
    CHECK(held.back() == on_host);
    wait_for([&] { return counters->now().bytes_on_host == (on_host - 1) * kibibyte; });
    return;
  }
  offload::require_same(grad_of(y, {x}), plain);
  REQUIRE(held.size() == length);
  // A read finds its tensor on the CPU or reads the file itself, and one tensor is on its way to
  // the device. For each tensor that the CPU has released after a read, one more has come from the
  // file.
  CHECK(held[0] == on_host);
  for (int64_t i = 1; i <= written; ++i) {
    CAPTURE(i);
    CHECK(held[static_cast<std::size_t>(i)] >= on_host - 1);
  }
  CHECK(counters->now().loads == length - 1);
  wait_for([&] { return counters->now().bytes_on_host == 0; });
  wait_for([&] { return counters->now().bytes_on_disk == 0; });
  CHECK(counters->now().bytes_to_disk == written * kibibyte);
}

TEST_CASE("a slow file is hardly waited for while what is on the CPU is used", "[device][tiers]") {
  const Folder folder;
  const Tensor x = leaf_there();
  constexpr int num_saved = 16, on_host = 8;
  const Tensors plain = grad_of(sines(x, num_saved + 1), {x});
  Tensor y = x;
  std::optional<TierCounters> counters;
  int64_t num_reads = 0;
  {
    const SaveInTiersGuard guard(
        {.host_bytes = on_host * kibibyte, .directory = folder.path(), .min_bytes = 0});
    counters = guard.counters();
    for (int i = 0; i <= num_saved; ++i) {
      y = y.sin();
      y.register_hook([&](const Tensor&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        ++num_reads;
      });
    }
  }
  wait_for([&] { return counters->now().bytes_on_disk == (num_saved - on_host) * kibibyte; });
  // A read takes as long as two steps, and as many steps run without one before the first that
  // needs it.
  read_delay_ms = 40;
  const Tensors found = grad_of(y, {x});
  read_delay_ms = 0;
  offload::require_same(found, plain);
  CHECK(num_reads == num_saved + 1);
  const double waited = counters->now().seconds_waited;
  CAPTURE(waited);
  // Begun one step ahead, each read would be waited for 20 ms.
  CHECK(waited < 0.08);
}

TEST_CASE("each backward under one guard brings what it needs from the file to the CPU ahead",
          "[device][tiers]") {
  const Folder folder;
  const Tensor x = leaf_there();
  constexpr int of_first = 5;
  const Tensors plain_y = grad_of(sines(x, of_first), {x}),
                plain_z = grad_of(sines(x, length), {x});
  constexpr int64_t on_host = 4;
  std::vector<int64_t> held;
  std::optional<TierCounters> counters;
  const auto observed = [&](int count) {
    Tensor t = x;
    for (int i = 0; i < count; ++i) {
      t = t.sin();
      t.register_hook(
          [&](const Tensor&) { held.push_back(counters->now().bytes_on_host / kibibyte); });
    }
    return t;
  };
  Tensor y, z;
  {
    const SaveInTiersGuard guard(
        {.host_bytes = on_host * kibibyte, .directory = folder.path(), .min_bytes = 0});
    counters = guard.counters();
    y = observed(of_first);
    z = observed(length);
  }
  constexpr int64_t num_saved = of_first - 1 + length - 1;
  wait_for([&] { return counters->now().bytes_on_disk == (num_saved - on_host) * kibibyte; });
  offload::require_same(grad_of(z, {x}), plain_z);
  CHECK(*std::max_element(held.begin(), held.end()) == on_host);
  // Tensors that were loaded for the first one meanwhile are released with that backward.
  wait_for([&] { return counters->now().bytes_on_host == 0; });
  held.clear();
  offload::require_same(grad_of(y, {x}), plain_y);
  // Without the tensor that is read, and the one on its way to the device.
  CHECK(*std::max_element(held.begin(), held.end()) == of_first - 1 - 2);
}

TEST_CASE("what leaves the CPU for the file holds no more of it than asked for",
          "[device][tiers]") {
  const Folder folder;
  const Tensor x = leaf_there();
  const Tensors plain = grad_of(sines(x, length), {x});
  constexpr int64_t in_flight = 2;
  int64_t most = 0;
  Tensor y = x;
  std::optional<TierCounters> counters;
  {
    const SaveInTiersGuard guard({.host_bytes = 0,
                                  .directory = folder.path(),
                                  .min_bytes = 0,
                                  .max_bytes_in_flight = in_flight * kibibyte});
    counters = guard.counters();
    write_delay_ms = 10;
    for (int i = 0; i < length; ++i) {
      y = y.sin();
      most = std::max(most, counters->now().bytes_on_host / kibibyte);
    }
    write_delay_ms = 0;
  }
  CHECK(most >= 1);
  CHECK(most <= in_flight);
  offload::require_same(grad_of(y, {x}), plain);
}
