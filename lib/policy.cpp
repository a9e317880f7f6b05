// Bodies of policy.h.

#include "remat/policy.h"

namespace remat {

struct Policy::Impl {
  PolicyFn fn;
  SelectiveOptions options;
};

Policy::Policy() = default;
Policy::Policy(PolicyFn fn, SelectiveOptions options)
    : impl_(fn ? std::make_shared<const Impl>(Impl{std::move(fn), options}) : nullptr) {}
Policy::operator bool() const { return impl_ != nullptr; }

}  // namespace remat
