#include "hooks/host/save_on_cpu.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "hooks/host/copy_watch.h"
#include "hooks/host/host_copy.h"
#include "hooks/host/host_memory.h"
#include "hooks/host/pinned_pool.h"
#include "lib/seam/on_stream.h"

namespace remat {

namespace {

using c10::impl::VirtualGuardImpl;

class Pageable final : public HostContents {
 public:
  Pageable(at::Tensor host, c10::Device device) : host_(std::move(host)), device_(device) {}
  at::Tensor finish_load() override { return host_.to(device_); }
  at::Tensor bytes_on_host() const override { return host_; }

 private:
  const at::Tensor host_;
  const c10::Device device_;
};

class Pinned final : public HostContents {
 public:
  Pinned(CopyStreams streams, const at::Tensor& flat, PinnedBuffer buffer)
      : streams_(streams),
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
      const WatchedCopy copy(streams_.out, CopyWatch::Direction::Out, size_);
      host().copy_(flat, /*non_blocking=*/true);
    }
    guard.recordDataPtrOnStream(flat.storage().data_ptr(), streams_.out);
    copied_->record();
    buffer_.uses = {copied_};
  }

  std::shared_ptr<const Ready> copied() const { return copied_; }
  bool is_stored_late() const override { return true; }
  void finish_store() override {
    if (!arrived_) copied_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  void begin_load() override {
    copied_->block(streams_.in);
    const OnStream in(streams_.in);
    at::Tensor target = at::empty({size_}, at::TensorOptions(at::kByte).device(device_));
    {
      const WatchedCopy copy(streams_.in, CopyWatch::Direction::In, size_);
      target.copy_(host(), /*non_blocking=*/true);
    }
    auto arrived = std::make_shared<Ready>(streams_.in);
    arrived->record();
    buffer_.uses = {arrived};  // the copy in has waited for the copy out
    arrived_ = std::move(arrived);
    on_device_ = std::move(target);
  }
  at::Tensor finish_load() override {
    if (!on_device_.defined()) begin_load();
    const WatchedCopy waiting(current_stream(device_), CopyWatch::Direction::Wait, size_);
    arrived_->wait_before_use(on_device_);
    return std::exchange(on_device_, at::Tensor());
  }
  void cancel_load() override { on_device_.reset(); }
  at::Tensor bytes_on_host() const override {
    copied_->synchronize();
    return host();
  }
  bool is_store_over() const override { return copied_->is_over(); }
  void wait_for_store() const override { copied_->synchronize(); }

 private:
  at::Tensor host() const { return buffer_.bytes.narrow(0, 0, size_); }

  const CopyStreams streams_;
  const int64_t size_;
  const c10::Device device_;
  PinnedBuffer buffer_;
  const std::shared_ptr<Ready> copied_;
  std::shared_ptr<const Ready> arrived_;
  at::Tensor on_device_;  ///< copied back and not yet read
};

}  // namespace

std::shared_ptr<HostContents> SaveOnCpu::begin_host_store(const at::Tensor& flat) const {
  const auto streams = pin_memory_ ? copy_streams(flat.device()) : std::nullopt;
  if (!streams) {
    warn_if_host_is_short(flat.numel());
    return std::make_shared<Pageable>(flat.to(at::kCPU), flat.device());
  }
  auto buffer = PinnedPool::get().take(flat.numel());
  if (!buffer) return std::make_shared<HostCopy>(*streams, flat, in_flight_.get());
  CopiesInFlight::Claim claim(in_flight_.get(), flat.numel());
  auto contents = std::make_shared<Pinned>(*streams, flat, std::move(*buffer));
  claim.queued(contents->copied());
  return contents;
}

}  // namespace remat
