#include "tests/device/stand_in.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>
#if __has_include(<c10/core/CachingDeviceAllocator.h>)
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace stand_in {

namespace {

std::array<std::atomic<bool>, num_devices> used{};
std::mutex log_mutex;
std::vector<std::string> entries;

void write_down(std::string entry) {
  std::lock_guard<std::mutex> lock(log_mutex);
  entries.push_back(std::move(entry));
}

// Note [Late copies]
// Streams of the pool have a queue, and an event on such a stream is a place in it. A waiter for
// the event runs the queue up to that place if it runs at once itself, or else queues the wait.
// Streams that a test names run at once.
constexpr int64_t first_pool_stream = 100;
struct Work {
  std::function<void()> run;
  bool is_mark = false;  ///< of an event, not a copy
};
struct Queue {
  std::deque<Work> work;
  uint64_t num_done = 0;
  uint64_t end() const { return num_done + work.size(); }
};
std::recursive_mutex queues_mutex;
std::map<int64_t, Queue> queues;
std::atomic<int64_t> next_pool_stream{first_pool_stream};

void run_until(int64_t stream, uint64_t place) {
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  Queue& queue = queues[stream];
  while (queue.num_done < place && !queue.work.empty()) {
    const Work work = std::move(queue.work.front());
    queue.work.pop_front();
    work.run();
    ++queue.num_done;
  }
}
void run_all(int64_t stream) { run_until(stream, UINT64_MAX); }
void enqueue(int64_t stream, std::function<void()> work, bool is_mark = false) {
  if (stream < first_pool_stream) return work();
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  queues[stream].work.push_back({std::move(work), is_mark});
}

struct Event {
  int64_t stream = 0;
  uint64_t place = 0;
  int64_t end_ns = 0;  ///< of the earlier work, on the stream's timeline
  /// The time at which the device passed an event with times; 0: not yet.
  std::shared_ptr<std::atomic<int64_t>> passed_ns;
};
std::atomic<int64_t> num_synchronized{0};

thread_local int device_index = 0;
thread_local std::array<int64_t, num_devices> stream_ids{};

std::atomic<bool> is_capturing{false}, has_event_times{true};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device next) const override {
    const c10::Device before = getDevice();
    device_index = next.index();
    return before;
  }
  c10::Device getDevice() const override { return device(device_index); }
  void setDevice(c10::Device next) const override { device_index = next.index(); }
  void uncheckedSetDevice(c10::Device next) const noexcept override { device_index = next.index(); }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return stream(d.index(), stream_ids[static_cast<size_t>(d.index())]);
  }
  // LibTorch before 2.8 calls this if gradients of several streams meet.
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d.index(), 0); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    const c10::Stream before = getStream(next.device());
    stream_ids[static_cast<size_t>(next.device_index())] = next.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return stream(d.index(), next_pool_stream++);
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    if (*event == nullptr) *event = new Event;
    std::shared_ptr<std::atomic<int64_t>> passed;
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      TORCH_CHECK(has_event_times, "far has no events with times");
      passed = std::make_shared<std::atomic<int64_t>>(0);
      enqueue(s.id(), [passed] { *passed = device_now_ns(); }, /*is_mark=*/true);
    }
    *static_cast<Event*>(*event) = {s.id(), queues[s.id()].end(), timeline::end_of(s),
                                    std::move(passed)};
    if (flag == c10::EventFlag::BACKEND_DEFAULT) return;
    write_down("record " + std::to_string(s.id()));
  }
  void block(void* event, const c10::Stream& s) const override {
    const Event e = *static_cast<Event*>(event);
    enqueue(s.id(), [e] { run_until(e.stream, e.place); }, /*is_mark=*/true);
    timeline::wait(s, e.end_ns);
    write_down("wait " + std::to_string(s.id()) + " for " + std::to_string(e.stream));
  }
  void synchronizeEvent(void* event) const override {
    const Event e = *static_cast<Event*>(event);
    ++num_synchronized;
    timeline::host_waits(e.end_ns);
    run_until(e.stream, e.place);
  }
  bool queryEvent(void* event) const override {
    const Event e = *static_cast<Event*>(event);
    const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    return queues[e.stream].num_done >= e.place;
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto passed_ns = [](void* event) {
      return static_cast<Event*>(event)->passed_ns->load();
    };
    return static_cast<double>(passed_ns(to) - passed_ns(from)) / 1e6;
  }
  // No "override": LibTorch up to 2.11 lacks this function.
  bool isStreamCapturing(const c10::Stream&) const { return is_capturing; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  uint64_t next = 0, seed_set = 0;
  explicit Generator(int index) : GeneratorImpl(stand_in::device(index), c10::DispatchKeySet()) {}
  void set_current_seed(uint64_t seed) override {
    next = 0;
    seed_set = seed;
  }
  void set_offset(uint64_t offset) override { next = offset; }
  uint64_t get_offset() const override { return next; }
  uint64_t current_seed() const override { return seed_set; }
  uint64_t seed() override {
    set_current_seed(seed_set + 1);
    return seed_set;
  }
  void set_state(const c10::TensorImpl& state) override {
    const auto* const numbers = static_cast<const int64_t*>(state.data());
    next = static_cast<uint64_t>(numbers[0]);
    seed_set = static_cast<uint64_t>(numbers[1]);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return at::tensor({static_cast<int64_t>(next), static_cast<int64_t>(seed_set)}, at::kLong)
        .getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    TORCH_CHECK(!is_capturing, "not while work is being captured as a graph");
    auto* const copy = new Generator(device_.index());
    copy->next = next;
    copy->seed_set = seed_set;
    return copy;
  }
};

at::Generator& generator(int index) {
  static std::array<at::Generator, num_devices> all{
      at::Generator(c10::make_intrusive<Generator>(0)),
      at::Generator(c10::make_intrusive<Generator>(1))};
  return all[static_cast<size_t>(index)];
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(has, "far has no page-locked memory");
    TORCH_CHECK_WITH(OutOfMemoryError, num_live_bytes + static_cast<int64_t>(bytes) <= total,
                     "far has no page-locked memory left");
    auto* const block = static_cast<char*>(std::malloc(header + bytes));
    *reinterpret_cast<int64_t*>(block) = static_cast<int64_t>(bytes);
    num_live_bytes += static_cast<int64_t>(bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    blocks[block + header] = bytes;
    return {block + header, block, &release, at::Device(at::kCPU)};
  }
  static void release(void* block) {
    num_live_bytes -= *static_cast<int64_t*>(block);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      blocks.erase(static_cast<char*>(block) + header);
    }
    std::free(block);
  }
  static bool has_given(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto next = blocks.upper_bound(data);
    if (next == blocks.begin()) return false;
    const auto& [begin, bytes] = *std::prev(next);
    return std::less<>()(data, static_cast<const char*>(begin) + std::max<size_t>(bytes, 1));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  static constexpr size_t header = 64;
  static inline std::atomic<int64_t> num_live_bytes{0};
  static inline std::atomic<bool> has{true};
  static inline std::mutex mutex;
  static inline std::map<const void*, size_t, std::less<>> blocks;  ///< alive, with their bytes
  static inline std::atomic<int64_t> total{default_total_bytes};
};
Pinned pinned;

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return Pinned::has_given(data); }
  // No "override": LibTorch 2.6 lacks this function.
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }  // for at::manual_seed
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return is_in_use(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generator(index);
  }
};

// The interface of an accelerator's allocator since LibTorch 2.9.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 9)
#define STAND_IN_HAS_STATISTICS 1
using DeviceAllocator = c10::DeviceAllocator;
#else
#define STAND_IN_HAS_STATISTICS 0
using DeviceAllocator = c10::Allocator;
#endif

std::mutex history_mutex;
std::vector<std::string> history;
std::atomic<bool> has_history{false};
void note_in_history(std::string entry) {
  if (!has_history) return;
  const std::lock_guard<std::mutex> lock(history_mutex);
  history.push_back(std::move(entry));
}

/// [bytes] of one device's tensors.
struct Sums {
  int64_t requested = 0, requested_peak = 0, rounded = 0, rounded_peak = 0, num_failed = 0;
};

struct Memory final : DeviceAllocator {
  struct Header {
    int64_t bytes;
    int index;
    std::array<std::atomic<int64_t>, 4> users;  ///< streams of the pool that may use it
  };
  c10::DataPtr allocate(size_t bytes) override {
    const int index = device_index;
    used[static_cast<size_t>(index)] = true;
    const auto wanted = static_cast<int64_t>(bytes);
    if (before_allocation) before_allocation(wanted);
    change(index, wanted);
    auto* const block = static_cast<char*>(take_block(header + bytes));
    new (block) Header{wanted, index, {}};
    report(block, index, wanted);
    return {block + header, block, &release, device(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  // Frees like a caching allocator: memory is reused at once, except for streams that it was told
  // of.
  static void release(void* block) {
    auto* const told = static_cast<Header*>(block);
    for (const auto& user : told->users)
      if (user != 0) run_all(user);
    const int64_t bytes = told->bytes;
    change(told->index, -bytes);
    report(block, told->index, -bytes);
    if (is_only_reserved(header + static_cast<size_t>(bytes))) {
      munmap(block, header + static_cast<size_t>(bytes));
      return;
    }
    std::memset(static_cast<char*>(block) + header, 0x77, static_cast<size_t>(bytes));
    const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
    freed.push_back(block);  // a late copy may still read it
    if (num_queued_copies() > 0) return;
    for (void* each : freed) std::free(each);
    freed.clear();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  // The library never touches memory held by a limit, which may exceed this machine's memory.
  static bool is_only_reserved(size_t bytes) { return bytes >= size_t{1} << 30; }
  static void* take_block(size_t bytes) {
    // Aligned like LibTorch's memory of the CPU, since results of its kernels can depend on
    // alignment.
    if (!is_only_reserved(bytes)) return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    void* const block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(block != MAP_FAILED, "the machine cannot reserve ", bytes, " bytes");
    return block;
  }

  /// Rounds like an allocator with pieces of 512 bytes.
  static int64_t rounded(int64_t bytes) { return (bytes + 511) / 512 * 512; }
  static void change(int index, int64_t bytes) {
    std::unique_lock<std::mutex> lock(sums_mutex);
    Sums& sum = sums[static_cast<size_t>(index)];
    const int64_t change = bytes > 0 ? rounded(bytes) : -rounded(-bytes);
    if (sum.rounded + change > total) {
      ++sum.num_failed;
      const auto live = static_cast<size_t>(sum.rounded);
      const int64_t free = total - sum.rounded;
      lock.unlock();
      c10::reportOutOfMemoryToProfiler(bytes, live, live, device(index));
      TORCH_CHECK_WITH(OutOfMemoryError, false, "far is out of memory: ", bytes,
                       " bytes asked for, ", free, " free");
    }
    sum.requested += bytes;
    sum.rounded += change;
    sum.requested_peak = std::max(sum.requested_peak, sum.requested);
    sum.rounded_peak = std::max(sum.rounded_peak, sum.rounded);
    num_live_bytes += bytes;
  }
  static void report(void* block, int index, int64_t bytes) {
    note_in_history((bytes > 0 ? "allocates " : "frees ") +
                    std::to_string(rounded(std::abs(bytes))));
    if (!c10::memoryProfilingEnabled()) return;
    size_t now = 0;
    {
      const std::lock_guard<std::mutex> lock(sums_mutex);
      now = static_cast<size_t>(sums[static_cast<size_t>(index)].rounded);
    }
    c10::reportMemoryUsageToProfiler(block, bytes > 0 ? rounded(bytes) : -rounded(-bytes), now, now,
                                     device(index));
  }

#if STAND_IN_HAS_STATISTICS
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream s) override {
    Guard().recordDataPtrOnStream(data, s);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const std::lock_guard<std::mutex> lock(sums_mutex);
    const Sums& sum = sums[static_cast<size_t>(index)];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.num_ooms = sum.num_failed;
    stats.allocated_bytes[0].current = sum.rounded;
    stats.allocated_bytes[0].peak = sum.rounded_peak;
    if (tells_requests) {
      stats.requested_bytes[0].current = sum.requested;
      stats.requested_bytes[0].peak = sum.requested_peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    const std::lock_guard<std::mutex> lock(sums_mutex);
    Sums& sum = sums[static_cast<size_t>(index)];
    sum.requested_peak = sum.requested;
    sum.rounded_peak = sum.rounded;
  }
  // No "override": LibTorch 2.9 lacks this function.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    TORCH_CHECK_NOT_IMPLEMENTED(tells_free, "far does not tell what is free");
    const std::lock_guard<std::mutex> lock(sums_mutex);
    return {static_cast<size_t>(total - sums[static_cast<size_t>(index)].rounded),
            static_cast<size_t>(total)};
  }
#endif

  static inline std::vector<void*> freed;
  static constexpr size_t header = 64;
  static inline std::atomic<int64_t> num_live_bytes{0};
  static inline std::mutex sums_mutex;
  static inline std::array<Sums, num_devices> sums{};
  static inline std::atomic<int64_t> total{default_total_bytes};
  static inline std::function<void(int64_t)> before_allocation;
  static inline std::atomic<bool> tells_requests{true}, tells_free{true};
};
static_assert(sizeof(Memory::Header) <= Memory::header);
Memory memory;

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const {
  write_down("use on " + std::to_string(s.id()));
  if (s.id() < first_pool_stream || data.get_context() == nullptr) return;
  for (auto& user : static_cast<Memory::Header*>(data.get_context())->users) {
    int64_t none = 0;
    if (user == s.id() || user.compare_exchange_strong(none, s.id())) return;
  }
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(where.value_or(device(device_index)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> where, std::optional<bool>) {
  const c10::DeviceGuard guard(where.value_or(device(device_index)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

std::atomic<int64_t> copies_until_failure{-1};
std::mutex before_copy_mutex;
std::function<void()> before_copy;

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  std::function<void()> before;
  {
    const std::lock_guard<std::mutex> lock(before_copy_mutex);
    before = before_copy;
  }
  if (before) before();
  const auto copy = [from = near(from), to = near(to), is_beside = non_blocking] {
    if (is_beside) advance_clock();
    // The copy is not an operator of the program, which may be inside a region when the copy runs.
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_modes(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    const_cast<at::Tensor&>(to).copy_(from);
  };
  const at::Device where = to.is_cpu() ? from.device() : to.device();
  const int64_t on = Guard().getStream(where).id();
  if (!from.is_cpu())
    timeline::wait(Guard().getStream(where), timeline::end_of(Guard().getStream(from.device())));
  timeline::work(Guard().getStream(where));
  if (non_blocking) {
    TORCH_CHECK(copies_until_failure < 0 || copies_until_failure-- != 0, "far failed to copy");
    enqueue(on, copy);
  } else {
    run_all(on);
    timeline::host_waits(timeline::end_of(Guard().getStream(where)));
    copy();
  }
  return to;
}

/// Resizes a result that was computed on the CPU. The storage grows if it must, and keeps its
/// bytes.
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(wanted);
  const auto bytes = static_cast<size_t>(impl->numel()) * self.element_size();
  if (self.storage().nbytes() < bytes) {
    const c10::DeviceGuard guard(self.device());
    const at::Storage& storage = impl->unsafe_storage();
    c10::DataPtr larger = memory.allocate(bytes);
    if (storage.nbytes() > 0) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (!to.sizes().equals(from.sizes())) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

std::mutex kernels_mutex;
std::map<std::string, int64_t> kernels;

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // A view of a copy would not be a view: writes to it would be lost.
  for (const c10::Argument& each : op.schema().returns())
    TORCH_CHECK(each.alias_info() == nullptr || each.alias_info()->isWrite(),
                "far has no kernel of the view ", op.operator_name());
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto* const far = std::find_if(arguments.begin(), arguments.end(), [](const auto& each) {
    return each.isTensor() && each.toTensor().is_privateuseone();
  });
  work_begins(op.operator_name().name,
              far == arguments.end() ? device_index : far->toTensor().device().index());
  const timeline::Paused inside;  // it copies to the CPU and back
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias",
         [](const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
           return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                             C10_AS_INTARRAYREF_SLOW(strides));
         });
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
            c10::SymIntArrayRef strides) -> at::Tensor& {
           return at::native::set_storage_cpu_(self, std::move(storage), offset.expect_int(),
                                               C10_AS_INTARRAYREF_SLOW(sizes),
                                               C10_AS_INTARRAYREF_SLOW(strides));
         });
  m.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef sizes) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
  });
}

// `copy_from` reads the bits itself. LibTorch's fallback would copy first, by copying.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

const bool is_registered = [] {
  c10::register_privateuse1_backend("far");
  c10::SetAllocator(c10::kPrivateUse1, &memory);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

at::Device device(int index) {
  return at::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
}
c10::Stream stream(int index, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}
bool is_in_use(int index) { return used[static_cast<size_t>(index)]; }
int64_t live_bytes() {
  // The device's thread of the engine may still be releasing the last backward.
  int64_t last = Memory::num_live_bytes;
  for (int same = 0; same < 3;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    const int64_t now = Memory::num_live_bytes;
    same = now == last ? same + 1 : 0;
    last = now;
  }
  return last;
}
void set_before_allocation(std::function<void(int64_t bytes)> call) {
  Memory::before_allocation = std::move(call);
}
int64_t rounded_bytes(int index) {
  const std::lock_guard<std::mutex> lock(Memory::sums_mutex);
  return Memory::sums[static_cast<size_t>(index)].rounded;
}

// Follows torch/csrc/cuda/memory_snapshot.cpp (_initRecordAnnotations).
History::History(bool of_all_threads) {
  const auto callback =
      at::RecordFunctionCallback(
          [](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
            note_in_history(std::string("START ") + fn.name());
            return nullptr;
          },
          [](const at::RecordFunction& fn, at::ObserverContext*) {
            note_in_history(std::string("END ") + fn.name());
          })
          .scopes({at::RecordScope::USER_SCOPE});
  history.clear();
  has_history = true;
  callback_ =
      of_all_threads ? at::addGlobalCallback(callback) : at::addThreadLocalCallback(callback);
}
History::~History() {
  at::removeCallback(callback_);
  has_history = false;
}
std::vector<std::string> History::entries() const {
  const std::lock_guard<std::mutex> lock(history_mutex);
  return history;
}

void set_total_bytes(int64_t bytes) { Memory::total = bytes; }
void set_tells_requests(bool tells) { Memory::tells_requests = tells; }
void set_tells_free(bool tells) { Memory::tells_free = tells; }
at::Tensor near(const at::Tensor& tensor) {
  at::Tensor result = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                    tensor.options().device(at::kCPU).pinned_memory(false));
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}
void work_begins(const std::string& op, int index) {
  {
    const std::lock_guard<std::mutex> lock(kernels_mutex);
    ++kernels[op];
  }
  const c10::Stream on = current_stream(index < 0 ? device_index : index);
  if (on.id() >= first_pool_stream) run_all(on.id());
  timeline::work(on);
  advance_clock();
}
int64_t num_kernels(const std::string& op) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  return kernels[op];
}

int64_t num_queued_copies() {
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  int64_t sum = 0;
  for (const auto& [stream, queue] : queues)
    sum += std::count_if(queue.work.begin(), queue.work.end(),
                         [](const Work& each) { return !each.is_mark; });
  return sum;
}
void fail_copy_after(int64_t count) { copies_until_failure = count; }
int64_t pinned_bytes() { return Pinned::num_live_bytes; }
void set_has_pinned_memory(bool has) { Pinned::has = has; }
void set_total_pinned_bytes(int64_t bytes) { Pinned::total = bytes; }
void set_before_copy(std::function<void()> call) {
  const std::lock_guard<std::mutex> lock(before_copy_mutex);
  before_copy = std::move(call);
}

void set_has_event_times(bool has) { has_event_times = has; }
int64_t num_waits() { return num_synchronized; }

void set_capturing(bool capturing) { is_capturing = capturing; }

void forget_use(int index) { used[static_cast<size_t>(index)] = false; }

double draw(int index) {
  used[static_cast<size_t>(index)] = true;
  at::Generator& source = generator(index);
  std::lock_guard<std::mutex> lock(source.mutex());
  auto* const impl = static_cast<Generator*>(source.unsafeGetGeneratorImpl());
  return 1 + 0.125 * static_cast<double>(++impl->next % 16);
}
Draws take(int index, uint64_t count) {
  used[static_cast<size_t>(index)] = true;
  at::Generator& source = generator(index);
  const std::lock_guard<std::mutex> lock(source.mutex());
  auto* const impl = static_cast<Generator*>(source.unsafeGetGeneratorImpl());
  return {impl->seed_set, std::exchange(impl->next, impl->next + count)};
}
uint64_t position(int index) { return generator(index).get_offset(); }

OnStream::OnStream(c10::Stream stream) : before_(Guard().exchangeStream(stream)) {}
OnStream::~OnStream() { Guard().exchangeStream(before_); }
c10::Stream current_stream(int index) { return Guard().getStream(device(index)); }
int current_device() { return device_index; }

std::vector<std::string> log() {
  std::lock_guard<std::mutex> lock(log_mutex);
  return entries;
}
void clear_log() {
  std::lock_guard<std::mutex> lock(log_mutex);
  entries.clear();
}

}  // namespace stand_in
