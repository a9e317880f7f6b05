#pragma once
// Saved tensors as bytes in a spool file.

#include <filesystem>

#include "hooks/spool.h"
#include "remat/place.h"

namespace remat {

class SaveOnDisk final : public Place {
 public:
  explicit SaveOnDisk(std::filesystem::path directory) : spool_(std::move(directory)) {}
  std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) override;

 private:
  Spool spool_;
};

}  // namespace remat
