// The bodies of MemoryMeter that the cases of the Rules need, for a library without its layer of
// byte counts: the CPU's allocator counts.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <remat/memory.h>

#include <atomic>
#include <new>
#include <utility>

namespace remat {

namespace {

std::atomic<int64_t> live{0}, peak{0};

/// The size lies in front of the data, since oneDNN takes its buffers by their data alone.
struct alignas(64) Header {
  at::DataPtr memory;
  int64_t bytes;
};

class Counting final : public at::Allocator {
 public:
  explicit Counting(at::Allocator& previous) : previous_(previous) {}
  at::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::kCPU};
    at::DataPtr memory = previous_.allocate(bytes + sizeof(Header));
    auto* const header = static_cast<Header*>(memory.get());
    new (header) Header{std::move(memory), static_cast<int64_t>(bytes)};
    const int64_t now = live += header->bytes;
    int64_t most = peak;
    while (most < now && !peak.compare_exchange_weak(most, now)) {
    }
    return {header + 1, header + 1, &release, c10::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    default_copy_data(to, from, count);
  }

 private:
  static void release(void* data) {
    if (data == nullptr) return;
    auto* const header = static_cast<Header*>(data) - 1;
    live -= header->bytes;
    const at::DataPtr memory = std::move(header->memory);
    header->~Header();
  }
  at::Allocator& previous_;
};

}  // namespace

namespace detail {
struct MeteredDevice {};
}  // namespace detail

namespace {
detail::MeteredDevice cpu;
}

MemoryMeter::MemoryMeter() : device_(c10::kCPU), shared_(cpu) {
  static Counting* const counting = [] {
    auto* const made = new Counting(*c10::GetCPUAllocator());
    c10::SetCPUAllocator(made, /*priority=*/255);
    return made;
  }();
  (void)counting;
}
MemoryMeter::~MemoryMeter() = default;
int64_t MemoryMeter::live_bytes() const { return live.load(); }
int64_t MemoryMeter::peak_bytes() const { return peak.load(); }
void MemoryMeter::reset_peak() { peak = live.load(); }

}  // namespace remat
