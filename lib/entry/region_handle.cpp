// Definitions of region_handle.h.

#include "remat/region_handle.h"

#include <torch/csrc/autograd/function.h>

#include <unordered_set>

#include "hooks/pack/inspection.h"
#include "lib/base/error.h"
#include "lib/frame/ahead.h"
#include "lib/frame/frame.h"
#include "lib/seam/engine.h"
#include "lib/seam/saved_of_node.h"

namespace remat {

RegionHandle::RegionHandle() : region_(c10::intrusive_ptr<c10::intrusive_ptr_target>()) {}

std::string RegionHandle::name() const {
  const auto frame = HandleAccess::frame_of(*this);
  return frame ? frame->region().info.name() : std::string();
}

bool RegionHandle::prepare() const {
  const auto frame = HandleAccess::frame_of(*this);
  if (!frame) return false;
  if (!frame->slots().view_for(-1).is_settled)
    throw_unsupported("a region was prepared before its function returned",
                      "its recompute would not know the tensors that are still to be saved",
                      "prepare it after the call of remat::checkpoint");
  remat::prepare(frame);
  return true;
}

void RegionHandle::release() const {
  if (const auto frame = HandleAccess::frame_of(*this)) frame->end_task(prepared);
}

std::vector<RegionHandle> regions_of(const at::Tensor& root) {
  std::vector<RegionHandle> handles;
  std::unordered_set<const void*> seen;
  for (const seam::NodePtr& node : seam::nodes_below(root)) {
    Inspection inspection;
    seam::saved_of(node);
    for (const HeldInfo& held : inspection.found()) {
      if (!held.frame || !seen.insert(held.frame.get()).second) continue;
      HandleAccess::set(handles.emplace_back(), c10::intrusive_ptr<Frame>::reclaim_copy(
                                                    static_cast<Frame*>(held.frame.get())));
    }
  }
  return handles;
}

}  // namespace remat
