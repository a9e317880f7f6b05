#include "lib/frame/tensor_check.h"

#include <utility>

namespace remat {

namespace {
constinit const RegisteredCheck* first = nullptr;
}  // namespace

RegisteredCheck::RegisteredCheck(Make make) : make_(make), next_(std::exchange(first, this)) {}

TensorChecks checks_for(const CheckpointOptions& options) {
  TensorChecks checks;
  for (const RegisteredCheck* each = first; each != nullptr; each = each->next_)
    if (auto check = each->make_(options)) checks.push_back(std::move(check));
  return checks;
}

}  // namespace remat
