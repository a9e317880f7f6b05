#pragma once
// The scope of a frame's runs: what the first run and recomputes have in common.

#include <c10/util/intrusive_ptr.h>

#include <utility>

#include "lib/frame/frame.h"
#include "lib/scope/region_scope.h"

namespace remat {

/// Every scope of a region but save_region's is one.
class FrameScope : public detail::RegionScope {
 public:
  Frame& frame() const { return *frame_; }

 protected:
  explicit FrameScope(c10::intrusive_ptr<Frame> frame)
      : RegionScope(frame->region().info), frame_(std::move(frame)) {
    answers(detail::Ability::Hooks);
  }

 private:
  const c10::intrusive_ptr<Frame> frame_;
};

}  // namespace remat
