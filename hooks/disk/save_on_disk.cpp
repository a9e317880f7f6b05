#include "hooks/disk/save_on_disk.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "hooks/disk/file_watch.h"

namespace remat {

namespace {

class OnDisk final : public ComparableContents {
 public:
  OnDisk(std::shared_ptr<const SpoolRange> range, int64_t size, c10::Device device)
      : range_(std::move(range)), size_(size), device_(device) {}
  void begin_load() override { load_.begin(range_, size_); }
  at::Tensor finish_load() override {
    const at::Tensor bytes = load_.is_begun() ? load_.finish() : read_now(*range_, size_);
    return device_.is_cpu() ? bytes : bytes.to(device_);
  }
  void cancel_load() override { load_.cancel(); }
  bool has_bytes_of(const void* memory) override { return range_->equals(memory); }

 private:
  const std::shared_ptr<const SpoolRange> range_;
  const int64_t size_;
  const c10::Device device_;
  SpoolLoad load_;
};

}  // namespace

at::Tensor read_now(const SpoolRange& range, int64_t size) {
  at::Tensor bytes = at::empty({size}, at::TensorOptions(at::kByte).device(at::kCPU));
  range.read(bytes.mutable_data_ptr());
  return bytes;
}

void SpoolLoad::begin(std::shared_ptr<const SpoolRange> range, int64_t size, bool can_wait) {
  bytes_ = at::empty({size}, at::TensorOptions(at::kByte).device(at::kCPU));
  job_ = Background::get().run(
      [range = std::move(range), bytes = bytes_] { range->read(bytes.mutable_data_ptr()); },
      can_wait);
}

at::Tensor SpoolLoad::finish() {
  const auto job = std::exchange(job_, nullptr);
  at::Tensor bytes = std::exchange(bytes_, at::Tensor());
  if (!job->is_over()) {
    const WatchedFileWork watched(FileWatch::Work::Wait, bytes.numel());
    job->wait();
  }
  job->wait();  // throws the error of the job
  return bytes;
}

void SpoolLoad::cancel() {
  if (job_ != nullptr) job_->cancel();
  job_.reset();
  bytes_.reset();
}

std::shared_ptr<StoredContents> SaveOnDisk::begin_store(const at::Tensor& flat) {
  const at::Tensor near = flat.is_cpu() ? flat : flat.to(at::kCPU);
  auto range = spool_.write(near.const_data_ptr(), near.numel());
  return std::make_shared<OnDisk>(std::move(range), near.numel(), flat.device());
}

}  // namespace remat
