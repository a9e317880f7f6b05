#pragma once
// Saved tensors as bytes in a spool file.

#include <filesystem>

#include "hooks/place.h"
#include "hooks/spool.h"

namespace remat {

class SaveOnDisk final : public Place {
 public:
  explicit SaveOnDisk(std::filesystem::path directory) : spool_(std::move(directory)) {}
  bool takes(const at::Tensor&) const override { return true; }
  std::shared_ptr<Waiting> put(const at::Tensor& flat) override;

 private:
  Spool spool_;
};

}  // namespace remat
