#pragma once
// An accelerator without hardware: tensors of device PrivateUse1 in CPU memory, computed by the
// CPU's kernels, with streams and events that log their calls. A non-blocking copy on a stream of
// the pool runs as late as the events allow. Memory that is freed while such a copy may still use
// it is overwritten, unless the allocator was told of the stream.

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

/// Returns whether the device has been used; `forget_use` resets that.
bool is_in_use(int index);
void forget_use(int index);

/// Returns the next number of a device's default generator; uses the device.
double draw(int index = 0);
/// Numbers reserved from a generator.
struct Draws {
  uint64_t seed, first;
  double uniform(uint64_t i) const;  ///< in [0, 1)
};
Draws take(int index, uint64_t count);
uint64_t position(int index = 0);

/// Sets whether work is captured as a graph, as LibTorch's query reports it.
void set_capturing(bool capturing);

/// Sets the time of each kernel and each non-blocking copy on the device's clock, which events
/// read, in addition to the host's time.
void set_work_time(std::chrono::nanoseconds each);
/// Returns the time on the device's clock; advances it by the time of a kernel.
int64_t device_now_ns();
void advance_clock();
/// The streams' timelines: work of a stream runs beside that of others and takes the set time each;
/// events order it, and the host takes no time of its own. [ns] since `restart`.
namespace timeline {
void restart();
/// Returns the end of the last work so far.
int64_t end();
int64_t end_of(c10::Stream stream);
void work(c10::Stream stream);
void wait(c10::Stream stream, int64_t until_ns);
void host_waits(int64_t until_ns);
/// While alive, this thread changes no timeline.
struct Paused {
  Paused();
  ~Paused();
  Paused& operator=(Paused&&) = delete;
  const bool before;
};
}  // namespace timeline
/// Sets whether events can have times; otherwise an event that needs one is refused.
void set_has_event_times(bool has);
/// Returns how often the host has waited for an event.
int64_t num_waits();

/// Returns the number of copies that were queued and have not run.
int64_t num_queued_copies();
/// Makes one non-blocking copy fail after `count` others; -1: none.
void fail_copy_after(int64_t count);
/// Returns the bytes of the host's page-locked memory in use. Without such memory, `at::empty` of
/// it throws.
int64_t pinned_bytes();
void set_has_pinned_memory(bool has);
/// Sets the size of page-locked memory. An allocation above it throws `c10::OutOfMemoryError`.
void set_total_pinned_bytes(int64_t bytes);
/// Sets a function that runs before each copy is made or queued, on the calling thread; empty:
/// none.
void set_before_copy(std::function<void()> call);

/// The size of each device's memory. An allocation above it throws `c10::OutOfMemoryError`.
inline constexpr int64_t default_total_bytes = int64_t{1} << 40;
void set_total_bytes(int64_t bytes);
/// Sets whether the allocator's statistics have requested bytes besides rounded ones.
void set_tells_requests(bool tells);
/// Sets whether the allocator reports a device's free bytes.
void set_tells_free(bool tells);

/// Sets a function that gets the bytes of each allocation before it is made, outside of all locks;
/// empty: none.
void set_before_allocation(std::function<void(int64_t bytes)> call);

/// Returns the bytes that the allocator has handed out on a device, in its sizes.
int64_t rounded_bytes(int index);

/// LibTorch's memory history for its lifetime, as the allocator for CUDA keeps it: "allocates 512"
/// and "frees 512" of every device. Like the record of annotations it also has "START name" and
/// "END name" of user scopes, of this thread and its backwards, or of all threads.
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

/// Returns the bytes of tensors on the devices; `num_kernels`, how often an operator ("aten::mm")
/// was computed for them.
int64_t live_bytes();
int64_t num_kernels(const std::string& op);

/// For kernels of the device: returns a CPU tensor over the same memory. `work_begins` takes a
/// kernel's time on the current stream of the device; -1: of the current one.
at::Tensor near(const at::Tensor& tensor);
void work_begins(const std::string& op, int index = -1);

/// Queues the work of this thread on `stream` for its lifetime.
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

/// Returns the calls of guards and events since the log was cleared: "record 3", "wait 0 for 3"
/// (streams of device 0), "use on 0".
std::vector<std::string> log();
void clear_log();

}  // namespace stand_in
