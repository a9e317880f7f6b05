#include "hooks/host/host_copy.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "hooks/host/copy_watch.h"
#include "hooks/host/host_memory.h"
#include "hooks/host/pinned_pool.h"
#include "lib/base/waiting.h"
#include "lib/seam/on_stream.h"
#include "lib/seam/unseen.h"
#include "lib/seam/warn.h"

namespace remat {

namespace {

/// Returns the process-wide limit of Note [Copies in chunks].
CopiesInFlight& copies_in_chunks() {
  constexpr int64_t max_bytes = 64 << 20;
  static auto* const copies = new CopiesInFlight(max_bytes);
  return *copies;
}

class JobInFlight final : public InFlight {
 public:
  explicit JobInFlight(std::shared_ptr<Background::Job> job) : job_(std::move(job)) {}
  bool is_over() const override { return job_->is_over(); }
  void synchronize() const override { job_->wait(); }

 private:
  const std::shared_ptr<Background::Job> job_;
};

/// Two page-locked buffers: while the device copies to or from one, the host works on the other.
class Buffers {
 public:
  /// Returns buffers for copies on a stream; empty if there is no page-locked memory.
  static std::optional<Buffers> take(const c10::Stream& stream) {
    Buffers buffers(stream);
    for (std::optional<Buffer>& each : buffers.all_) {
      auto memory = PinnedPool::get().take_chunk();
      if (!memory) return std::nullopt;
      // The host writes to the buffer at once, beside all streams.
      for (const auto& use : memory->uses) use->synchronize();
      each.emplace(Buffer{std::move(*memory), nullptr});
    }
    return buffers;
  }
  /// Returns the next buffer, after its copy is done.
  at::Tensor& next() {
    current_ = 1 - current_;
    wait(*all_[current_]);
    return all_[current_]->memory.bytes;
  }
  /// Records that a copy with the last returned buffer is queued.
  void queued() {
    auto done = std::make_shared<Ready>(stream_);
    done->record();
    all_[current_]->memory.uses = {done};
    all_[current_]->copied = std::move(done);
  }
  /// Returns the buffer before, after its copy is done.
  at::Tensor& previous() {
    wait(*all_[1 - current_]);
    return all_[1 - current_]->memory.bytes;
  }
  /// Returns the last returned buffer, after its copy is done.
  at::Tensor& last() {
    wait(*all_[current_]);
    return all_[current_]->memory.bytes;
  }

 private:
  struct Buffer {
    PinnedBuffer memory;
    std::shared_ptr<const Ready> copied;
  };
  explicit Buffers(const c10::Stream& stream) : stream_(stream) {}
  static void wait(const Buffer& buffer) {
    if (buffer.copied != nullptr) buffer.copied->synchronize();
  }
  c10::Stream stream_;
  std::array<std::optional<Buffer>, 2> all_{};
  std::size_t current_ = 0;
};

/// Calls `each` with the beginning and size of each chunk, in order.
template <class Each>
void for_each_chunk(int64_t size, const Each& each) {
  for (int64_t begin = 0; begin < size; begin += PinnedPool::chunk_bytes)
    each(begin, std::min(PinnedPool::chunk_bytes, size - begin));
}

char* bytes_at(const at::Tensor& memory, int64_t begin) {
  return static_cast<char*>(memory.data_ptr()) + begin;
}

/// Copies on `stream`, which must be current. Returns when all bytes have arrived.
void copy_out(const at::Tensor& flat, const at::Tensor& host, const c10::Stream& stream) {
  auto buffers = Buffers::take(stream);
  int64_t last_begin = 0, last_size = 0;  // of the chunk in the previous buffer
  for_each_chunk(flat.numel(), [&](int64_t begin, int64_t size) {
    const at::Tensor from = flat.narrow(0, begin, size);
    if (!buffers) {
      host.narrow(0, begin, size).copy_(from);
      return;
    }
    buffers->next().narrow(0, 0, size).copy_(from, /*non_blocking=*/true);
    buffers->queued();
    if (last_size > 0)
      std::memcpy(bytes_at(host, last_begin), bytes_at(buffers->previous(), 0),
                  static_cast<std::size_t>(last_size));
    last_begin = begin;
    last_size = size;
  });
  if (last_size > 0)
    std::memcpy(bytes_at(host, last_begin), bytes_at(buffers->last(), 0),
                static_cast<std::size_t>(last_size));
}

/// Queues copies on `stream`, which must be current. Later work on that stream sees all bytes.
void copy_in(const at::Tensor& host, const at::Tensor& flat, const c10::Stream& stream) {
  auto buffers = Buffers::take(stream);
  for_each_chunk(flat.numel(), [&](int64_t begin, int64_t size) {
    const at::Tensor to = flat.narrow(0, begin, size);
    if (!buffers) {
      to.copy_(host.narrow(0, begin, size));
      return;
    }
    at::Tensor& buffer = buffers->next();
    std::memcpy(bytes_at(buffer, 0), bytes_at(host, begin), static_cast<std::size_t>(size));
    to.copy_(buffer.narrow(0, 0, size), /*non_blocking=*/true);
    buffers->queued();
  });
}

at::Tensor memory_of_host(int64_t size) {
  warn_if_host_is_short(size);
  return at::empty({size}, at::TensorOptions(at::kByte));
}

}  // namespace

std::optional<CopyStreams> copy_streams(c10::Device device) {
  static std::mutex mutex;
  static auto* const all = new std::map<c10::DeviceIndex, std::optional<CopyStreams>>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = all->find(device.index());
  if (known != all->end()) return known->second;
  std::optional<CopyStreams> made;
  try {
    const c10::impl::VirtualGuardImpl guard(device.type());
    made =
        CopyStreams{guard.getStreamFromGlobalPool(device), guard.getStreamFromGlobalPool(device)};
  } catch (const c10::Error&) {
  }
  return all->emplace(device.index(), made).first->second;
}

struct DeviceLoad::Target {
  explicit Target(const c10::Stream& stream) : arrived(stream) {}
  at::Tensor bytes;
  Ready arrived;
  bool is_copied = false;  ///< whether the job made the copy
};

void DeviceLoad::begin(std::function<at::Tensor()> bytes, int64_t size, const c10::Stream& in,
                       c10::Device device) {
  auto target = std::make_shared<Target>(in);
  {
    const OnStream on(in);
    target->bytes = at::empty({size}, at::TensorOptions(at::kByte).device(device));
  }
  job_ = Background::get().run([target, bytes = std::move(bytes), in] {
    const at::Tensor host = bytes();
    if (!host.defined()) return;
    const Unseen unseen;
    const OnStream on(in);
    {
      const WatchedCopy copy(in, CopyWatch::Direction::In, host.numel());
      copy_in(host, target->bytes, in);
    }
    target->arrived.record();
    target->is_copied = true;
  });
  target_ = std::move(target);
}

at::Tensor DeviceLoad::finish() {
  const auto target = std::exchange(target_, nullptr);
  std::exchange(job_, nullptr)->wait();
  if (!target->is_copied) return {};
  const WatchedCopy waiting(current_stream(target->bytes.device()), CopyWatch::Direction::Wait,
                            target->bytes.numel());
  target->arrived.wait_before_use(target->bytes);
  return target->bytes;
}

void DeviceLoad::cancel() {
  if (job_ != nullptr) job_->cancel();
  job_.reset();
  target_.reset();
}

/// The copy out; the first thread that needs it makes it, once.
class HostCopy::Out {
 public:
  Out(const at::Tensor& flat, const c10::Stream& stream)
      : size_(flat.numel()),
        device_(flat.device()),
        stream_(stream),
        produced_(current_stream(device_)),
        host_(memory_of_host(size_)),
        flat_(flat) {
    produced_.record();
  }
  int64_t size() const { return size_; }
  c10::Device device() const { return device_; }
  const at::Tensor& host() const { return host_; }

  /// Makes the copy, unless it is done. Throws the error of the copy, which may be tried again.
  void make() {
    const auto lock = lock_in_turn(mutex_);
    if (!flat_.defined()) return;
    const Unseen unseen;
    const OnStream on(stream_);
    produced_.block(stream_);
    {
      const WatchedCopy copy(stream_, CopyWatch::Direction::Out, size_);
      copy_out(flat_, host_, stream_);
    }
    flat_.reset();
    has_original_ = false;
  }
  void try_to_make() noexcept {
    try {
      make();
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = seam::text_of(error);
    }
  }
  /// Returns the error of the copy once, and then empty text. May wait for the thread that makes
  /// the copy.
  std::string take_error() {
    const auto lock = lock_in_turn(mutex_);
    return std::exchange(error_, {});
  }
  void warn_if_failed() {
    if (const std::string error = take_error(); !error.empty())
      seam::warn(c10::str(
          "remat: a saved tensor stays on its device, since it could not be copied: ", error));
  }
  /// Returns the original as long as it has not been copied; then an undefined tensor.
  at::Tensor original() {
    const auto lock = lock_in_turn(mutex_);
    return flat_;
  }
  bool has_original() const { return has_original_; }

 private:
  const int64_t size_;
  const c10::Device device_;
  const c10::Stream stream_;
  Ready produced_;
  std::mutex mutex_;
  const at::Tensor host_;
  at::Tensor flat_;
  std::atomic<bool> has_original_{true};
  std::string error_;
};

HostCopy::HostCopy(const CopyStreams& streams, const at::Tensor& flat, CopiesInFlight* in_flight)
    : streams_(streams), out_(std::make_shared<Out>(flat, streams.out)) {
  CopiesInFlight::Claim of_place(in_flight, out_->size());
  CopiesInFlight::Claim of_all(&copies_in_chunks(), out_->size());
  job_ = Background::get().run([out = out_] { out->try_to_make(); });
  const auto copy = std::make_shared<JobInFlight>(job_);
  of_place.queued(copy);
  of_all.queued(copy);
}

HostCopy::~HostCopy() { job_->cancel(); }

void HostCopy::finish_store() {
  job_->wait();
  check_arrival();
  out_->warn_if_failed();
}

void HostCopy::check_arrival() {
  if (!must_arrive_ || !job_->is_over()) return;
  const std::string error = out_->take_error();
  TORCH_CHECK(error.empty(),
              "remat: a tensor that has to be kept on the CPU could not be copied there: ", error);
}

bool HostCopy::holds_original() const { return out_->has_original(); }

void HostCopy::begin_load() {
  if (job_->cancel()) return;  // it is still on the device
  if (job_->is_over() && out_->original().defined()) return;
  load_.begin(
      [out = out_, job = job_] {
        job->wait();
        return out->original().defined() ? at::Tensor() : out->host();
      },
      out_->size(), streams_.in, out_->device());
}

at::Tensor HostCopy::finish_load() {
  for (bool is_ahead = load_.is_begun();; is_ahead = false) {
    if (!load_.is_begun()) begin_load();
    at::Tensor loaded;
    try {
      if (load_.is_begun()) loaded = load_.finish();
    } catch (const std::exception&) {
      if (!is_ahead) throw;
      continue;  // there may be memory now
    }
    if (loaded.defined()) return loaded;
    if (at::Tensor original = out_->original(); original.defined()) {
      out_->warn_if_failed();
      return original;
    }
    // Meanwhile it has been copied out, for a file.
  }
}

void HostCopy::cancel_load() { load_.cancel(); }

at::Tensor HostCopy::bytes_on_host() const {
  job_->wait();
  out_->make();  // if the copy was left out or has failed
  return out_->host();
}

}  // namespace remat
