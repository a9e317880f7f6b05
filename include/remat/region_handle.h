#pragma once
// Handles of regions: recompute a region ahead of the backward that reads it.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "remat/export.h"

namespace remat {

/// Refers to one region weakly: it keeps neither the graph nor the region's tensors alive. Threads:
/// any.
class REMAT_API RegionHandle {
 public:
  /// Refers to no region, until a call with this handle in `CheckpointOptions::handle` returns.
  RegionHandle();

  /// Returns the region's name; empty if its graph is gone.
  std::string name() const;
  /// Recomputes the region now, on this thread. On an accelerator the work is queued on a stream of
  /// the library's own, and a reader waits for it there; a region with buffers, providers or
  /// observers stays on forward's streams. The tensors belong to the next backward that reads
  /// them, and are dropped at its end, or to the group or cache around this call. Until then they
  /// stay in memory, at most as long as the graph. A region inside others prepares those first. If
  /// recomputed tensors of the region are there already, nothing happens. Returns false if the
  /// graph is gone. Throws the errors of a recompute.
  bool prepare() const;
  /// Drops tensors that `prepare` computed and that belong to no backward, group or cache yet.
  void release() const;

 private:
  friend struct HandleAccess;
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> region_;
};

/// Returns the regions in the graph behind `root`, in the order in which backward reads them. Walks
/// the graph and computes nothing. A region is missing if only nodes that do not report their saved
/// tensors belong to it.
REMAT_API std::vector<RegionHandle> regions_of(const at::Tensor& root);

}  // namespace remat
