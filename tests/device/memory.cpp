// remat/memory.h on the stand-in, whose allocator rounds to 512 bytes: meters, limits.

#include "remat/memory.h"

#include <functional>
#include <optional>
#include <thread>

#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/far_tensors.h"
#include "tests/support/support.h"

using remat::CheckpointError;
using remat::MemoryLimitGuard;
using remat::MemoryMeter;

TEST_CASE("a meter of a device counts the bytes asked for, of that device", "[device][memory]") {
  const MemoryMeter first(stand_in::device(0)), second(stand_in::device(1)), cpu;
  CHECK(first.is_exact());
  CHECK(first.device() == stand_in::device(0));
  CHECK(cpu.device() == at::Device(at::kCPU));
  const int64_t before = first.live_bytes(), there = second.live_bytes(), here = cpu.live_bytes();
  for (const int64_t bytes : {1, 7, 512, 513, 100'003}) {
    const Tensor tensor = bytes_on(0, bytes);
    CHECK(first.live_bytes() == before + bytes);
    CHECK(second.live_bytes() == there);
  }
  const Tensor one = bytes_on(1, 10);
  CHECK(first.live_bytes() == before);
  CHECK(second.live_bytes() == there + 10);
  CHECK(cpu.live_bytes() == here);
  const MemoryMeter current(at::Device(at::kPrivateUse1));
  CHECK(current.device() == stand_in::device(stand_in::current_device()));
}

TEST_CASE("peaks of a device's meters are their own", "[device][memory]") {
  const at::Device device = stand_in::device(0);
  MemoryMeter outer(device);
  const int64_t before = outer.live_bytes();
  {
    const Tensor large = bytes_on(0, 5000);
  }
  MemoryMeter inner(device);
  CHECK(inner.peak_bytes() == before);
  {
    const Tensor small = bytes_on(0, 700);
  }
  CHECK(inner.peak_bytes() == before + 700);
  CHECK(outer.peak_bytes() == before + 5000);
  outer.reset_peak();
  CHECK(outer.peak_bytes() == before);
  CHECK(inner.peak_bytes() == before + 700);
}

TEST_CASE("a meter says whether the allocator tells only what it rounded", "[device][memory]") {
  struct Rounding {
    Rounding() { stand_in::set_tells_requests(false); }
    ~Rounding() { stand_in::set_tells_requests(true); }
  };
  const MemoryMeter meter(stand_in::device(0));
  const Rounding only;
  const int64_t before = meter.live_bytes();
  const Tensor tensor = bytes_on(0, 513);
  CHECK(meter.live_bytes() == before + 1024);
  CHECK_FALSE(MemoryMeter(stand_in::device(0)).is_exact());
}

TEST_CASE("a limit on a device refuses what does not fit, on that device only",
          "[device][memory]") {
  const SmallDevice small(1 << 20);
  const at::Device device = stand_in::device(0);
  MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  {
    const MemoryLimitGuard limit(before + 4096, device);
    CHECK(meter.live_bytes() == before);
    CHECK(meter.peak_bytes() == before);
    {
      const Tensor fits = bytes_on(0, 4096 - 512);
      CHECK(meter.live_bytes() == before + 4096 - 512);
      CHECK_THROWS_AS(bytes_on(0, 1024), c10::OutOfMemoryError);
      CHECK(meter.live_bytes() == before + 4096 - 512);
      const Tensor there = bytes_on(1, 100'000);
      {
        const MemoryLimitGuard looser(before + 100'000, device);
        CHECK_THROWS_AS(bytes_on(0, 1024), c10::OutOfMemoryError);
      }
      const MemoryLimitGuard tighter(0, device);
      CHECK_THROWS_AS(bytes_on(0, 1), c10::OutOfMemoryError);
    }
    const Tensor again = bytes_on(0, 4096 - 512);
  }
  const Tensor large = bytes_on(0, 500'000);
  CHECK(meter.live_bytes() == before + 500'000);
  CHECK(meter.peak_bytes() == before + 500'000);
}

TEST_CASE("a region fits under a device's limit that plain does not", "[device][memory]") {
  const SmallDevice small(1 << 20);
  const auto chain = [](const Tensor& x) {
    Tensor y = x;
    for (int i = 0; i < 8; ++i) y = y.sin();
    return y;
  };
  const Tensor x = at::randn({2048}).to(stand_in::device(0)).requires_grad_();
  const Tensor plain = grad_of(chain(x), {x})[0].cpu();
  stand_in::live_bytes();
  MemoryMeter meter(stand_in::device(0));
  const int64_t before = meter.live_bytes();
  {
    const MemoryLimitGuard limit(before + 5 * 8192, stand_in::device(0));
    CHECK_THROWS_AS(chain(x), c10::OutOfMemoryError);
    const Tensor y = remat::checkpoint(chain, x);
    CHECK(meter.peak_bytes() - before <= 5 * 8192);
    CHECK(meter.live_bytes() - before == 8192);
  }
  stand_in::live_bytes();
  const Tensor y = remat::checkpoint(chain, x);
  meter.reset_peak();
  require_bit_equal({grad_of(y, {x})[0].cpu()}, {plain});
  // Held: y and its gradient. Recomputed: the seven inputs of sin, a cosine and a product.
  CHECK(meter.peak_bytes() - before <= 11 * 8192);
  CHECK(meter.peak_bytes() - before >= 9 * 8192);
}

TEST_CASE("meters of a device in many threads", "[device][memory]") {
  const at::Device device = stand_in::device(1);
  MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        MemoryMeter own(device);
        const Tensor tensor = bytes_on(1, 1000);
        if (own.peak_bytes() < before + 1000 || own.peak_bytes() > before + 4000) ++wrong;
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(wrong == 0);
  CHECK(meter.live_bytes() == before);
  CHECK(meter.peak_bytes() >= before + 1000);
}

TEST_CASE("a device that does not say what it has free is metered, but not limited",
          "[device][memory]") {
  struct Silent {
    Silent() { stand_in::set_tells_free(false); }
    ~Silent() { stand_in::set_tells_free(true); }
  };
  const at::Device device = stand_in::device(0);
  MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  {
    const Silent silent;
    const auto error = error_of<CheckpointError>([&] { MemoryLimitGuard limit(1000, device); });
    CHECK(error.kind() == CheckpointError::Kind::Unsupported);
    CHECK_THAT(error.what(), contains("device far:0 cannot be limited"));
    CHECK_THAT(error.what(), contains("does not report how much memory is free"));
    CHECK_THAT(error_of<CheckpointError>([&] { remat::free_bytes(device); }).what(),
               contains("the free memory of device far:0 is not known"));
    const Tensor tensor = bytes_on(0, 5000);  // nothing was left behind
    CHECK(meter.live_bytes() == before + 5000);
  }
  const MemoryLimitGuard limit(before + 1024, device);
  CHECK_THROWS_AS(bytes_on(0, 5000), c10::OutOfMemoryError);
}

TEST_CASE(
    "what another thread allocates while a limit is made is counted, and refused by the one "
    "there is",
    "[device][memory]") {
  struct Hook {
    explicit Hook(std::function<void(int64_t)> call) {
      stand_in::set_before_allocation(std::move(call));
    }
    ~Hook() { stand_in::set_before_allocation({}); }
  };
  const SmallDevice small(1 << 20);
  const at::Device device = stand_in::device(0);
  const MemoryMeter meter(device);
  stand_in::live_bytes();  // waits until the device's thread has released the last backward
  const int64_t before = meter.live_bytes();
  Tensor other;
  std::optional<MemoryLimitGuard> limit;
  {
    const Hook hook([&](int64_t bytes) {
      if (bytes > 100'000 && !other.defined())  // the held memory of the limit
        std::thread([&] { other = bytes_on(0, 5000); }).join();
    });
    limit.emplace(before + 50'000, device);
  }
  REQUIRE(other.defined());
  CHECK(meter.live_bytes() == before + 5000);
  bool fits = false;
  {
    const Hook hook([&](int64_t bytes) {
      if (bytes > 200'000)
        std::thread([&] {
          try {
            bytes_on(0, 150'000);
            fits = true;
          } catch (const c10::OutOfMemoryError&) {
          }
        }).join();
    });
    const MemoryLimitGuard looser(before + 300'000, device), same(before + 50'000, device);
  }
  CHECK_FALSE(fits);
  CHECK_THROWS_AS(bytes_on(0, 100'000), c10::OutOfMemoryError);
  int64_t num_refused = 0;
  {
    const Hook hook([&](int64_t bytes) {
      if (bytes > 20'000 && bytes != 100'000)  // the held memory of the tighter limit
        std::thread([&] {
          try {
            bytes_on(0, 100'000);
          } catch (const c10::OutOfMemoryError&) {
            ++num_refused;
          }
        }).join();
    });
    const MemoryLimitGuard tighter(before + 10'000, device);
    CHECK(num_refused == 1);
    CHECK(meter.live_bytes() == before + 5000);
  }
  CHECK_THROWS_AS(bytes_on(0, 100'000), c10::OutOfMemoryError);
  const Tensor again = bytes_on(0, 40'000);
}

TEST_CASE("meters and limits of two devices at once, in threads of their own", "[device][memory]") {
  const SmallDevice small(1 << 22);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, index = i % 2] {
      const at::Device device = stand_in::device(index);
      for (int round = 0; round < 20; ++round) {
        MemoryMeter outer(device), inner(device);
        const MemoryLimitGuard limit(1 << 20, device);
        const Tensor fits = bytes_on(index, 10'000 * (index + 1));
        if (inner.peak_bytes() < 10'000 * (index + 1)) ++wrong;
        if (outer.peak_bytes() > 1 << 20) ++wrong;
        try {
          bytes_on(index, 1 << 21);
          ++wrong;
        } catch (const c10::OutOfMemoryError&) {
        }
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(wrong == 0);
  const Tensor after = bytes_on(0, 1 << 21), other = bytes_on(1, 1 << 21);  // no limit is left
}

TEST_CASE("devices whose memory nobody tells are refused", "[device][memory]") {
  const auto error = error_of<CheckpointError>([] { MemoryMeter meter((at::Device(at::kMeta))); });
  CHECK(error.kind() == CheckpointError::Kind::Unsupported);
  CHECK_THAT(error.what(), contains("the bytes of device meta"));
  CHECK_THAT(error.what(), contains("the device's allocator is not a c10::DeviceAllocator"));
  CHECK_THROWS_AS(MemoryMeter(at::Device(at::kXLA, 0)), CheckpointError);
  CHECK_THROWS_AS(MemoryLimitGuard(1, at::Device(at::kMeta)), CheckpointError);
  CHECK_THROWS_AS(MemoryLimitGuard(-1, stand_in::device(0)), c10::ValueError);
}
