#pragma once
// An element of a Sequential whose calls are regions, with any arguments and results.

#include <memory>

#include "lib/seam/stand_in.h"
#include "remat/module.h"

namespace remat {

class ElementRegion final : public seam::StandIn, public detail::HasModuleRegion {
 public:
  ElementRegion(torch::nn::AnyModule original, ModuleOptions options, bool is_enabled);
  torch::nn::AnyValue run(seam::AnyValues arguments) override;
  std::shared_ptr<StandIn> for_clone(torch::nn::AnyModule clone) const override;

 private:
  detail::ModuleRegion& remat_region() override { return region_; }
  const std::type_info& plain_type() const override { return original().type_info(); }

  const std::shared_ptr<torch::nn::Module> module_;
  detail::ModuleRegion region_;
};

}  // namespace remat
