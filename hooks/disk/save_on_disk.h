#pragma once
// A place that stores saved tensors as bytes in a spool file.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "hooks/depot/comparable_place.h"
#include "hooks/disk/spool.h"
#include "hooks/host/background.h"

namespace remat {

/// Returns the bytes of a range, on the CPU. Throws c10::Error.
at::Tensor read_now(const SpoolRange& range, int64_t size);

/// Reads the bytes of a range beside the program. One thread at a time.
class SpoolLoad {
 public:
  /// Begins the read. `can_wait`: see Background::run.
  void begin(std::shared_ptr<const SpoolRange> range, int64_t size, bool can_wait = false);
  bool is_begun() const { return job_ != nullptr; }
  bool is_over() const { return is_begun() && job_->is_over(); }
  /// Waits for the read that `begin` began and returns the bytes. Throws c10::Error.
  at::Tensor finish();
  void cancel();

 private:
  at::Tensor bytes_;
  std::shared_ptr<Background::Job> job_;
};

class SaveOnDisk final : public ComparablePlace {
 public:
  explicit SaveOnDisk(std::filesystem::path directory)
      : spool_(std::move(directory), "SaveOnDiskGuard") {}
  std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) override;

 private:
  Spool spool_;
};

}  // namespace remat
