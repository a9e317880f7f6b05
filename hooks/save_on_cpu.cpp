#include "hooks/save_on_cpu.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "hooks/on_stream.h"
#include "hooks/pinned_pool.h"

namespace remat {

namespace {

constexpr std::size_t num_prefetched = 2;

using c10::impl::VirtualGuardImpl;

struct CopyStreams {
  c10::Stream out, in;
};

/// None where the backend gives out no streams.
std::optional<CopyStreams> copy_streams(c10::Device device) {
  static std::mutex mutex;
  static auto* const all = new std::map<c10::DeviceIndex, std::optional<CopyStreams>>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = all->find(device.index());
  if (known != all->end()) return known->second;
  std::optional<CopyStreams> made;
  try {
    const VirtualGuardImpl guard(device.type());
    made =
        CopyStreams{guard.getStreamFromGlobalPool(device), guard.getStreamFromGlobalPool(device)};
  } catch (const c10::Error&) {
  }
  return all->emplace(device.index(), made).first->second;
}

class Pageable final : public Waiting {
 public:
  Pageable(at::Tensor host, c10::Device device) : host_(std::move(host)), device_(device) {}
  at::Tensor fetch() override { return host_.to(device_); }

 private:
  const at::Tensor host_;
  const c10::Device device_;
};

}  // namespace

class Pinned;

/// The pinned tensors of one guard in the order of saving, and those that are on their way back.
class CopyOrder : public std::enable_shared_from_this<CopyOrder> {
 public:
  explicit CopyOrder(SaveOnCpu::AtEndOfBackward at_end) : at_end_(at_end) {}
  uint64_t add(const std::shared_ptr<Pinned>& pinned);
  void remove(uint64_t number);
  /// `number` is being read: starts the copies of those before it.
  void prefetch_before(uint64_t number);
  void drop_prefetched();

 private:
  bool drops_at_end();

  const SaveOnCpu::AtEndOfBackward at_end_;
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<Pinned>> all_;
  std::deque<std::weak_ptr<Pinned>> prefetched_;
  uint64_t last_number_ = 0;
  bool will_drop_ = false;
};

class Pinned final : public Waiting {
 public:
  Pinned(std::shared_ptr<CopyOrder> order, CopyStreams streams, const at::Tensor& flat,
         PinnedBuffer buffer)
      : order_(std::move(order)),
        streams_(streams),
        size_(flat.numel()),
        device_(flat.device()),
        buffer_(std::move(buffer)),
        copied_(std::make_shared<Ready>(streams.out)) {
    const VirtualGuardImpl guard(device_.type());
    const c10::Stream current = guard.getStream(device_);
    Ready produced(current);
    produced.record();
    produced.block(streams_.out);
    for (const auto& use : buffer_.uses) use->block(streams_.out);
    {
      const OnStream out(streams_.out);
      host().copy_(flat, /*non_blocking=*/true);
    }
    guard.recordDataPtrOnStream(flat.storage().data_ptr(), streams_.out);
    copied_->record();
    buffer_.uses = {copied_};
  }
  ~Pinned() override {
    if (number_ > 0) order_->remove(number_);
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  void set_number(uint64_t number) { number_ = number; }
  bool is_late() const override { return true; }

  at::Tensor fetch() override {
    at::Tensor fetched;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!on_device_.defined()) copy_in();
      fetched = std::exchange(on_device_, at::Tensor());
      arrived_->wait_before_use(fetched);
    }
    order_->prefetch_before(number_);
    return fetched;
  }
  /// Whether a copy was started.
  bool prefetch() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on_device_.defined()) return false;
    copy_in();
    return true;
  }
  void drop_prefetched() {
    const std::lock_guard<std::mutex> lock(mutex_);
    on_device_.reset();
  }

 private:
  at::Tensor host() const { return buffer_.bytes.narrow(0, 0, size_); }
  void copy_in() {
    copied_->block(streams_.in);
    const OnStream in(streams_.in);
    at::Tensor target = at::empty({size_}, at::TensorOptions(at::kByte).device(device_));
    target.copy_(host(), /*non_blocking=*/true);
    auto arrived = std::make_shared<Ready>(streams_.in);
    arrived->record();
    buffer_.uses = {arrived};  // it has waited for the copy out
    arrived_ = std::move(arrived);
    on_device_ = std::move(target);
  }

  const std::shared_ptr<CopyOrder> order_;
  const CopyStreams streams_;
  const int64_t size_;
  const c10::Device device_;
  uint64_t number_ = 0;
  std::mutex mutex_;
  PinnedBuffer buffer_;
  const std::shared_ptr<Ready> copied_;
  std::shared_ptr<const Ready> arrived_;
  at::Tensor on_device_;  ///< copied back and not yet asked for
};

uint64_t CopyOrder::add(const std::shared_ptr<Pinned>& pinned) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.emplace(++last_number_, pinned);
  return last_number_;
}

void CopyOrder::remove(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.erase(number);
}

void CopyOrder::prefetch_before(uint64_t number) {
  std::vector<std::shared_ptr<Pinned>> next, too_many;  // die after the lock, for which they ask
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto each = all_.lower_bound(number);
         each != all_.begin() && next.size() < num_prefetched;)
      if (auto pinned = (--each)->second.lock()) next.push_back(std::move(pinned));
  }
  if (next.empty()) return;
  // Without a backward there is no telling what is read next, nor when to let go of it.
  if (!drops_at_end()) return;
  for (const auto& pinned : next) {
    try {
      if (!pinned->prefetch()) continue;
    } catch (const c10::Error&) {
      return;  // no device memory to spare: it will be copied when it is asked for
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    prefetched_.push_back(pinned);
    while (prefetched_.size() > num_prefetched) {
      if (auto oldest = prefetched_.front().lock()) too_many.push_back(std::move(oldest));
      prefetched_.pop_front();
    }
  }
  for (const auto& pinned : too_many) pinned->drop_prefetched();
}

bool CopyOrder::drops_at_end() {
  struct AtEnd {
    std::weak_ptr<CopyOrder> order;
    ~AtEnd() {
      if (const auto alive = order.lock()) alive->drop_prefetched();
    }
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(will_drop_, true)) return true;
  }
  if (at_end_([at_end = std::make_shared<AtEnd>(AtEnd{weak_from_this()})] {})) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  will_drop_ = false;
  return false;
}

void CopyOrder::drop_prefetched() {
  std::deque<std::weak_ptr<Pinned>> all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    all.swap(prefetched_);
    will_drop_ = false;
  }
  for (const auto& each : all)
    if (const auto pinned = each.lock()) pinned->drop_prefetched();
}

SaveOnCpu::SaveOnCpu(bool pin_memory, AtEndOfBackward at_end)
    : pin_memory_(pin_memory), order_(std::make_shared<CopyOrder>(at_end)) {}

std::shared_ptr<Waiting> SaveOnCpu::put(const at::Tensor& flat) {
  if (pin_memory_)
    if (const auto streams = copy_streams(flat.device()))
      if (auto buffer = PinnedPool::get().take(flat.numel())) {
        auto pinned = std::make_shared<Pinned>(order_, *streams, flat, std::move(*buffer));
        pinned->set_number(order_->add(pinned));
        return pinned;
      }
  return std::make_shared<Pageable>(flat.to(at::kCPU), flat.device());
}

}  // namespace remat
