#pragma once
// An accelerator that is none: tensors of device PrivateUse1 in CPU memory, computed by the CPU's
// kernels, with streams and events that write down what they are told. Copies that need not wait
// and are queued on a stream of the pool run as late as the events allow; memory that is freed
// while one of them may still use it, without the allocator having been told, is overwritten.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace stand_in {

inline constexpr int num_devices = 2;

at::Device device(int index = 0);
c10::Stream stream(int index, int64_t id);

/// Whether the device has been used; a test may forget it.
bool is_in_use(int index);
void forget_use(int index);

/// The next number of a device's default generator; uses the device.
double draw(int index = 0);
/// So many of its numbers.
struct Draws {
  uint64_t seed, first;
  double uniform(uint64_t i) const;  ///< in [0, 1)
};
Draws take(int index, uint64_t count);
uint64_t position(int index = 0);

/// Whether work is captured as a graph, as far as one can ask.
void set_capturing(bool capturing);

/// What the device's clock, which events read, takes each kernel and each copy that need not wait
/// for, beside the host's time.
void set_work_time(std::chrono::nanoseconds each);
/// Without them an event that shall have a time is refused.
void set_has_event_times(bool has);
/// How often the host has waited for an event.
int64_t num_waits();

/// Copies that were queued and have not run.
int64_t num_queued_copies();
/// The copies that need not wait, after so many of them, fail once; -1: none.
void fail_copy_after(int64_t count);
/// Page-locked memory of the host. Without it `at::empty` of such memory throws.
int64_t pinned_bytes();
void set_has_pinned_memory(bool has);
/// What there is of it. An allocation above it throws `c10::OutOfMemoryError`.
void set_total_pinned_bytes(int64_t bytes);
/// Called before each copy is made or queued, on the thread that asks for it; empty: nothing is.
void set_before_copy(std::function<void()> call);

/// What each device has. An allocation above it throws `c10::OutOfMemoryError`.
inline constexpr int64_t default_total_bytes = int64_t{1} << 40;
void set_total_bytes(int64_t bytes);
/// Whether the allocator's statistics say what tensors asked for, besides what it rounded that to.
void set_tells_requests(bool tells);
/// Whether the allocator says what the device has free.
void set_tells_free(bool tells);

/// Called with the bytes of each allocation before it is made, outside of all locks; empty: nothing
/// is.
void set_before_allocation(std::function<void(int64_t bytes)> call);

/// What the allocator has given out on a device, in its sizes.
int64_t rounded_bytes(int index);

/// LibTorch's memory history as its allocator for CUDA keeps it, while it lives: "allocates 512"
/// and "frees 512" of every device, and, as its record of annotations has them, "START name" and
/// "END name" of the user scopes of this thread and those of its backwards, or of all threads.
class History {
 public:
  explicit History(bool of_all_threads = false);
  ~History();
  History(const History&) = delete;
  History& operator=(const History&) = delete;
  std::vector<std::string> entries() const;

 private:
  uint64_t callback_;
};

/// Bytes of tensors on the devices, and how often an operator ("aten::mm") was computed for them.
int64_t live_bytes();
int64_t num_kernels(const std::string& op);

/// For kernels of the device: a CPU tensor over the same memory; a kernel takes its time.
at::Tensor near(const at::Tensor& tensor);
void work_begins(const std::string& op);

/// What this thread's code does is queued on `stream` while it lives.
class OnStream {
 public:
  explicit OnStream(c10::Stream stream);
  ~OnStream();
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  c10::Stream before_;
};
c10::Stream current_stream(int index = 0);
int current_device();

/// What guards and events were told since the log was cleared: "record 3", "wait 0 for 3" (streams
/// of device 0), "use on 0".
std::vector<std::string> log();
void clear_log();

}  // namespace stand_in
