// remat/memory.h: exact bytes, peaks per meter, limits.

#include <c10/core/CPUAllocator.h>

#include <barrier>
#include <thread>

#include "tests/support/support.h"

namespace {

using remat::MemoryLimitGuard;
using remat::MemoryMeter;

Tensor bytes_of(int64_t bytes) { return at::empty({bytes}, at::kByte); }

static_assert(!std::is_copy_constructible_v<MemoryMeter>);
static_assert(!std::is_move_constructible_v<MemoryMeter>);
static_assert(!std::is_copy_constructible_v<MemoryLimitGuard>);
static_assert(!std::is_move_constructible_v<MemoryLimitGuard>);
static_assert(!std::is_convertible_v<int64_t, MemoryLimitGuard>);

// The sanitizers end the program when it asks for too much.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMayAskForTooMuch = false;
#else
constexpr bool kMayAskForTooMuch = true;
#endif

}  // namespace

TEST_CASE("a meter counts the bytes asked for while a tensor lives", "[memory]") {
  const MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  for (const int64_t bytes : {1, 7, 64, 4096, 100'003}) {
    const Tensor tensor = bytes_of(bytes);
    CHECK(meter.live_bytes() == before + bytes);
  }
  {
    const Tensor tensor = at::zeros({3, 5}, at::kDouble);
    CHECK(meter.live_bytes() == before + 120);
  }
  CHECK(meter.live_bytes() == before);
}

TEST_CASE("a storage counts once however many tensors share it, and nothing if empty", "[memory]") {
  const MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  Tensor base = bytes_of(1000);
  const Tensor row = base.view({10, 100})[3];
  const Tensor alias = base.detach();
  const Tensor empty = bytes_of(0);
  CHECK(meter.live_bytes() == before + 1000);
  base.reset();
  CHECK(meter.live_bytes() == before + 1000);
}

TEST_CASE("a resized tensor counts its new storage, and both while it is copied", "[memory]") {
  MemoryMeter meter;
  Tensor tensor = at::full({100}, 7, at::kByte);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  tensor.resize_({1000});
  CHECK(meter.live_bytes() == before + 900);
  CHECK(meter.peak_bytes() == before + 1000);
  tensor.resize_({10});
  CHECK(meter.live_bytes() == before + 900);  // LibTorch keeps a storage that is large enough
  CHECK(tensor.eq(7).all().item<bool>());
}

TEST_CASE("a peak is the most bytes alive at one moment", "[memory]") {
  MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  {
    const Tensor a = bytes_of(1000);
    {
      const Tensor b = bytes_of(500);
    }
    const Tensor c = bytes_of(200);
  }
  CHECK(meter.live_bytes() == before);
  CHECK(meter.peak_bytes() == before + 1500);
  const Tensor held = bytes_of(30);
  meter.reset_peak();
  CHECK(meter.peak_bytes() == before + 30);
}

TEST_CASE("each meter has a peak of its own and all have the same live bytes", "[memory]") {
  MemoryMeter first;
  const int64_t before = first.live_bytes();
  {
    const Tensor tensor = bytes_of(1000);
  }
  MemoryMeter second;
  CHECK(first.live_bytes() == second.live_bytes());
  CHECK(first.peak_bytes() == before + 1000);
  CHECK(second.peak_bytes() == before);
  {
    const Tensor tensor = bytes_of(300);
  }
  CHECK(second.peak_bytes() == before + 300);
  first.reset_peak();
  CHECK(first.peak_bytes() == before);
  CHECK(second.peak_bytes() == before + 300);
  {
    const MemoryMeter third;
    const Tensor tensor = bytes_of(400);
  }
  CHECK(first.peak_bytes() == before + 400);
  CHECK(second.peak_bytes() == before + 400);
}

TEST_CASE("allocations of many threads add up exactly", "[memory]") {
  constexpr int kThreads = 8;
  MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  std::barrier everyone_holds(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      const Tensor held = bytes_of(10'000);
      everyone_holds.arrive_and_wait();
      for (int turn = 0; turn < 1000; ++turn) {
        const Tensor tensor = bytes_of(1 + turn % 7);
      }
      everyone_holds.arrive_and_wait();
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(meter.live_bytes() == before);
  CHECK(meter.peak_bytes() >= before + kThreads * 10'000 + 7);
  CHECK(meter.peak_bytes() <= before + kThreads * 10'007);
}

TEST_CASE("meters that come and go while threads allocate lose no byte", "[memory]") {
  const MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  std::atomic<bool> stop{false};
  std::thread allocates([&] {
    while (!stop) const Tensor tensor = bytes_of(100);
  });
  for (int i = 0; i < 1000; ++i) {
    MemoryMeter other;
    const int64_t peak = other.peak_bytes();
    CHECK((peak == before || peak == before + 100));
    other.reset_peak();
  }
  stop = true;
  allocates.join();
  CHECK(meter.live_bytes() == before);
  CHECK(meter.peak_bytes() <= before + 100);
}

TEST_CASE("a tensor freed by another thread is given back", "[memory]") {
  const MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  Tensor tensor = bytes_of(5000);
  std::thread([tensor = std::move(tensor)]() mutable { tensor.reset(); }).join();
  CHECK(meter.live_bytes() == before);
}

TEST_CASE("data keeps its alignment and its contents in every size", "[memory]") {
  std::vector<Tensor> tensors;
  for (int64_t bytes = 1; bytes < 20'000; bytes += 1 + bytes / 16) {
    tensors.push_back(at::full({bytes}, bytes % 251, at::kByte));
    CHECK(reinterpret_cast<uintptr_t>(tensors.back().data_ptr()) % 64 == 0);
  }
  for (const Tensor& tensor : tensors) {
    CHECK(tensor.eq(tensor.numel() % 251).all().item<bool>());
  }
}

TEST_CASE("raw allocations, as oneDNN makes them, are counted and given back", "[memory]") {
  const MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  at::Allocator& allocator = *c10::GetCPUAllocator();
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100'000}}) {
    void* memory = allocator.raw_allocate(bytes);
    CHECK(meter.live_bytes() == before + static_cast<int64_t>(bytes));
    allocator.raw_deallocate(memory);
    CHECK(meter.live_bytes() == before);
  }
}

TEST_CASE("memory that another allocator made may come back through the counting one", "[memory]") {
  const MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  for (const size_t bytes : {size_t{1}, size_t{5000}, size_t{10} << 20}) {
    void* memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    c10::GetCPUAllocator()->raw_deallocate(memory);
  }
  CHECK(meter.live_bytes() == before);
}

TEST_CASE("a copy-on-write clone counts when it is written", "[memory]") {
  const MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  Tensor base = at::ones({1000}, at::kByte);
  Tensor lazy = at::_lazy_clone(base);
  CHECK(meter.live_bytes() == before + 1000);
  lazy.add_(1);
  CHECK(meter.live_bytes() == before + 2000);
  CHECK(base.eq(1).all().item<bool>());
  base = at::_lazy_clone(lazy);
  CHECK(meter.live_bytes() == before + 1000);
  lazy.reset();
  base.add_(1);  // the only one left: the storage is its own again
  CHECK(base.eq(3).all().item<bool>());
  CHECK(meter.live_bytes() == before + 1000);
}

TEST_CASE("a limit admits its last byte and refuses the next, changing no count", "[memory]") {
  MemoryMeter meter;
  const Tensor held = bytes_of(100);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  const MemoryLimitGuard limit(before + 1000);
  CHECK_THROWS_AS(bytes_of(1001), c10::OutOfMemoryError);
  CHECK(meter.live_bytes() == before);
  CHECK(meter.peak_bytes() == before);
  const Tensor fits = bytes_of(1000);
  CHECK(meter.live_bytes() == before + 1000);
  CHECK_THROWS_AS(bytes_of(1), c10::OutOfMemoryError);
  CHECK(meter.live_bytes() == before + 1000);
}

TEST_CASE("the error of a limit says what was asked for, what is live, the limit, and what to do",
          "[memory]") {
  const MemoryMeter meter;
  const int64_t live = meter.live_bytes();
  const MemoryLimitGuard limit(live + 2'500'000);
  const auto error = error_of<c10::OutOfMemoryError>([] { bytes_of(12'345'678); });
  const std::string text = text_of(error);
  CHECK_THAT(text, contains("remat::MemoryLimitGuard: out of memory"));
  CHECK_THAT(text, contains("asked for: 12345678 bytes (12.35 MB)"));
  CHECK_THAT(text, contains("live:      " + std::to_string(live)));
  CHECK_THAT(text, contains("limit:     " + std::to_string(live + 2'500'000)));
  CHECK_THAT(text, contains("Hint: "));
}

TEST_CASE("of nested limits the smallest holds, in whatever order they end", "[memory]") {
  const MemoryMeter meter;
  const int64_t live = meter.live_bytes();
  const auto admits = [](int64_t bytes) {
    try {
      bytes_of(bytes);
      return true;
    } catch (const c10::OutOfMemoryError&) {
      return false;
    }
  };
  auto outer = std::make_unique<MemoryLimitGuard>(live + 2000);
  auto inner = std::make_unique<MemoryLimitGuard>(live + 1000);
  auto looser = std::make_unique<MemoryLimitGuard>(live + 3000);
  auto same = std::make_unique<MemoryLimitGuard>(live + 1000);
  CHECK(admits(1000));
  CHECK_FALSE(admits(1001));
  inner.reset();
  CHECK_FALSE(admits(1001));
  same.reset();
  CHECK(admits(2000));
  CHECK_FALSE(admits(2001));
  outer.reset();
  CHECK(admits(3000));
  CHECK_FALSE(admits(3001));
  looser.reset();
  CHECK(admits(1'000'000));
}

TEST_CASE("a limit below what is alive refuses every new byte and frees nothing", "[memory]") {
  const MemoryMeter meter;
  const Tensor held = at::ones({1000}, at::kByte);
  const int64_t live = meter.live_bytes();
  const MemoryLimitGuard limit(0);
  CHECK_THROWS_AS(bytes_of(1), c10::OutOfMemoryError);
  CHECK(bytes_of(0).numel() == 0);
  CHECK(meter.live_bytes() == live);
}

TEST_CASE("a negative limit is refused with its value", "[memory]") {
  const auto error = error_of<c10::ValueError>([] { MemoryLimitGuard limit(-5); });
  CHECK_THAT(text_of(error), contains("-5"));
  CHECK(bytes_of(1000).numel() == 1000);  // nothing was set
}

TEST_CASE("a limit holds on every thread", "[memory]") {
  const MemoryMeter meter;
  const MemoryLimitGuard limit(meter.live_bytes() + 100);
  bool refused = false;
  std::thread([&] {
    try {
      bytes_of(101);
    } catch (const c10::OutOfMemoryError&) {
      refused = true;
    }
  }).join();
  CHECK(refused);
}

TEST_CASE("threads together never pass a limit", "[memory]") {
  MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  {
    const MemoryLimitGuard limit(before + 1000);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([] {
        for (int turn = 0; turn < 200; ++turn) {
          try {
            const Tensor tensor = bytes_of(400);
          } catch (const c10::OutOfMemoryError&) {
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(meter.live_bytes() == before);
  CHECK(meter.peak_bytes() <= before + 1000);
}

TEST_CASE("a backward stopped by a limit keeps the error's type and works when tried again",
          "[memory]") {
  const MemoryMeter meter;
  const Tensor x = leaf({1000});
  const Tensor y = x.exp().sum();
  {
    const MemoryLimitGuard limit(meter.live_bytes() + 1000);
    CHECK_THROWS_AS(torch::autograd::backward({y}, {}, /*retain_graph=*/true),
                    c10::OutOfMemoryError);
  }
  CHECK(bit_equal(grad_of(y, {x})[0], x.detach().exp()));
}

TEST_CASE("an allocation that the system refuses changes no count", "[memory]") {
  MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  CHECK_THROWS_AS(c10::GetCPUAllocator()->allocate(~size_t{0}), c10::Error);
  if (kMayAskForTooMuch) CHECK_THROWS_AS(bytes_of(int64_t{1} << 60), c10::Error);
  CHECK(meter.live_bytes() == before);
  CHECK(meter.peak_bytes() == before);
}
