#pragma once
// What a frame needs from whoever keeps some of its region's results instead of having them
// recomputed.

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

/// A kept replay gives the kept results out again, in one recompute of a region that keeps
/// something.
class KeptReplay {
 public:
  virtual ~KeptReplay() = default;
  /// What handles the operators of the recompute.
  virtual OperatorHandler* operators() = 0;
  /// Autograd saves a tensor in the recompute.
  virtual void check_saved(const at::Tensor& saved) = 0;
  /// A backward begins in the recompute; throws if it asks a kept value for what that does not
  /// know.
  virtual void check_backward(const torch::autograd::edge_list& roots,
                              const torch::autograd::edge_list& targets) = 0;
  /// Whether what it gave out with this storage is a copy: it came back from the CPU or out of
  /// hooks.
  virtual bool is_copy(const c10::StorageImpl* storage) const = 0;
  /// The function has ended. Who looks at what only the recompute owns must not find its graph
  /// alive.
  virtual void end() = 0;
  /// The recompute is over, by this exception if it is not null. False if it is worth nothing,
  /// since data are missing which nobody had seemed to need: the next one will have them. Otherwise
  /// throws what ended it, or what differed from forward, also if the function caught that.
  virtual bool finish(const std::exception_ptr& thrown) = 0;
};

/// A keeper keeps results of one region. Its forward tells it what happens; a recompute asks it for
/// a KeptReplay.
class Keeper : public detail::ReadWatcher {
 public:
  /// What handles the operators of the forward.
  virtual OperatorHandler* operators() = 0;
  /// Autograd saved a tensor in the region, in that slot.
  virtual void slot_added(const at::Tensor& saved, int64_t position) = 0;
  /// A backward begins in the forward.
  virtual void backward_begins() = 0;
  /// Whether it keeps the storage alive.
  virtual bool holds(const c10::StorageImpl* storage) = 0;
  /// Whether what it keeps has this storage, and may come back with another one. At the forward's
  /// end.
  virtual bool may_replace(const c10::StorageImpl* storage) = 0;
  /// The forward is over: what was held in case it gets a name is nobody's. Before anyone asks what
  /// is gone.
  virtual void end_naming() = 0;
  /// Lets go of what no recompute will read.
  virtual void settle() = 0;
  /// What it keeps, and where. After the forward.
  virtual void add_to(recording::RegionSums& sums) const = 0;

  /// Begins the replay of one recompute, whose inputs are `inputs`. May make the region around
  /// recompute.
  virtual std::unique_ptr<KeptReplay> begin_recompute(Filler& filler,
                                                      const std::vector<at::Tensor>& inputs) = 0;
};

}  // namespace remat
