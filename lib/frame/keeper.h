#pragma once
// Interface of a frame to the keeper of results that are not recomputed.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "lib/frame/recorded_frame.h"
#include "lib/scope/region_scope.h"

namespace remat {

class Filler;
class Frame;

/// Returns the kept results again, in one recompute of a region that keeps something.
class KeptReplay {
 public:
  virtual ~KeptReplay() = default;
  /// Returns the handler of the recompute's operators.
  virtual OperatorHandler* operators() = 0;
  /// Checks a backward that begins in the recompute. Throws if it asks for the gradient of a kept
  /// value that the recompute cannot compute.
  virtual void check_backward(const torch::autograd::edge_list& roots,
                              const torch::autograd::edge_list& targets) = 0;
  /// Returns whether a result with this storage that it returned is a copy, from the CPU or from
  /// hooks.
  virtual bool is_copy(const c10::StorageImpl* storage) const = 0;
  /// Drops the recompute's graph, so that ownership checks see only the recomputed tensors. Call it
  /// when the function has ended.
  virtual void end() = 0;
  /// Ends the replay of a recompute that ended by `thrown`, or normally if that is null. Throws the
  /// exception that ended it, or the difference from forward, even if the function caught that.
  virtual void finish(const std::exception_ptr& thrown) = 0;
};

/// Keeps results of one region. The region's forward reports its events to the keeper; a recompute
/// asks the keeper for a KeptReplay.
class Keeper : public detail::ReadWatcher {
 public:
  /// Returns the handler of the forward's operators.
  virtual OperatorHandler* operators() = 0;
  /// Reports that autograd saved a tensor of the region, in that slot.
  virtual void slot_added(const at::Tensor& saved, int64_t position) = 0;
  /// Reports that a backward begins in the forward.
  virtual void backward_begins() = 0;
  /// Returns whether it keeps the storage alive.
  virtual bool holds(const c10::StorageImpl* storage) = 0;
  /// Returns whether a kept result has this storage and may be returned with another one. Call it
  /// at the forward's end.
  virtual bool may_replace(const c10::StorageImpl* storage) = 0;
  /// Releases results held for a possible name, as the forward is over. Call it before checking
  /// which storages are gone.
  virtual void end_naming() = 0;
  /// Ends the forward. Releases results that no recompute will read.
  virtual void settle() = 0;
  /// Adds the kept bytes, and where they are, to `sums`. Call it after the forward.
  virtual void add_to(recording::RegionSums& sums) const = 0;

  /// Begins the replay of one recompute, whose inputs are `inputs`. May make the region around
  /// recompute.
  virtual std::unique_ptr<KeptReplay> begin_recompute(Filler& filler,
                                                      const std::vector<at::Tensor>& inputs) = 0;
};

}  // namespace remat
