#pragma once
// Finds captured tensors that a region's function computed with and that have changed since,
// including those that autograd did not save.
//
// Note [Captures that nothing saves]
// `x + bias` saves nothing. A recompute would use the bias as it is by then, and tensors saved
// after it would differ from forward's. An operator asks each tensor through which its gradient may
// flow for its node (seam::NodeWatch), so forward notes the tensors asked that come from outside:
// leaves, tensors without grad and older results. It also notes arguments of which the region or
// the hooks around it have a copy, since the function may have captured the same tensor. Noted
// tensors are identified by their version counters, which views share.
//
// When a recompute begins, their versions and storages are compared, and the recompute is watched
// only if some changed. An operator that is given a changed tensor, or the result of a tainted
// operator, is tainted. A tensor that backward needs and that a tainted operator made is a changed
// capture (Rule 10). A changed tensor that the recompute does not reach, or that does not affect a
// saved tensor, raises nothing. A changed tensor that the function itself writes to in this
// recompute before reading it counts as made there.
//
// Note [State with a history]
// A function may assign a captured variable anew: `v = v * 0.5 + x`. Its recompute then finds the
// tensor that forward, a later call or an earlier recompute assigned. So a captured tensor whose
// history was made after forward began is a changed capture, too, and an operator that is given one
// is tainted. Node numbers grow on each thread. On forward's thread they show whether a node is
// younger than forward; on the recompute's own thread, whether it is older than the recompute. In
// the second case forward may have read the tensor, and has noted it then. A view or a cast of a
// leaf is judged by the leaf. Nodes of other threads are ignored, since a function may make those
// anew in each run: a recompute on a third thread does not recognize the state that a failed
// recompute on a second thread left.
//
// Three changes are not detected. First, tensors read by operators without any gradient (a mask
// computed from a changed tensor). Second, another tensor in the place of an unsaved one, unless
// its history is younger than forward. Third, other data (`set_data`) of a result that is both an
// argument and captured: detecting it would require noting every argument, 1,300 instructions a
// region.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "lib/seam/variable_hooks.h"
#include "lib/tensor/capture.h"

namespace remat {

class Inputs;

/// A captured tensor that a region's forward computed with.
struct CapturedOperand {
  c10::VariableVersion counter;
  WeakTensor object;  ///< the tensor or a view of it; expired if that was temporary
  WeakStorage storage;
  uint32_t version = 0;
  uint32_t offset = 0;  ///< the object's offset in its storage (low bits)

  /// Returns whether the tensor was changed in place or given other data.
  bool is_changed() const;
  bool is_alive() const { return !object.expired() || !storage.expired(); }
};

/// The captured operands of one frame. Noted on the forward's thread; read when forward is over.
class CapturedOperands {
 public:
  /// Notes a tensor from outside that an operator computes with, unless it is noted already.
  /// `inputs`: the region's inputs.
  void note(const at::TensorBase& tensor, const Inputs& inputs);
  /// Forgets operands that are gone. Call it when the forward is over.
  void settle();
  /// Returns the operands that have changed since; they live as long as this object.
  std::vector<const CapturedOperand*> changed() const;
  /// Returns whether there are no operands, as in most regions.
  bool is_empty() const { return noted_ == nullptr; }
  void clear() { noted_.reset(); }
  bool has(const c10::VariableVersion& counter) const {
    return noted_ != nullptr && noted_->has(counter);
  }

 private:
  struct Noted {
    bool has(const c10::VariableVersion& counter) const;

    std::vector<CapturedOperand> all;
    std::unordered_set<const void*> index;  // of the counters, if there are many
  };
  std::unique_ptr<Noted> noted_;
};

/// Follows the computations of one recompute with changed captures. Used on the recompute's thread.
class ChangedOperands final : public seam::NodeWatch {
 public:
  /// Forward began at `forward` and noted `noted`, of which `changed` have changed. `vouched`:
  /// storages that providers restored to forward's contents, or null. `is_given` tells whether a
  /// tensor is an argument of the recompute. The arguments must outlive this object.
  ChangedOperands(const RegionStart& forward, const CapturedOperands& noted,
                  const std::vector<const CapturedOperand*>& changed, const StorageSet* vouched,
                  c10::function_ref<bool(const at::Tensor&)> is_given);

  /// Clears the taint of the operator at work, whose result was kept and not computed.
  void forgive_operator();
  /// Returns whether a tensor that autograd saves now was computed with a changed capture.
  /// `is_made_inside`: whether forward's tensor in this slot was made inside the region.
  bool made(const at::Tensor& saved, bool is_made_inside);
  struct Change {
    const CapturedOperand* then;
    uint32_t version;  ///< when the recompute began
    bool is_read;      ///< whether an operator has read it so far
    std::string name;  ///< known to a region in which it is read; may be empty
  };
  const std::vector<Change>& changes() const { return changes_; }
  /// A captured tensor whose history was made after forward began.
  struct NewState {
    TensorIdentity tensor;
    std::string text;
  };
  /// Returns the first few new states that operators were given.
  const std::vector<NewState>& new_state() const { return new_state_; }

  bool is_watching() const override { return true; }
  void node_asked(const at::TensorBase& tensor, const torch::autograd::Node* node) override;

 private:
  bool is_made_here(const torch::autograd::Node& node) const {
    return node.thread_id() == here_.thread && node.sequence_nr() >= here_.sequence;
  }
  bool is_tainted(const torch::autograd::Node& node) const;
  bool is_new_state(const at::TensorBase& tensor, const torch::autograd::Node& node);
  std::vector<Change> changes_;
  std::vector<NewState> new_state_;
  const RegionStart forward_, here_ = RegionStart::here();
  const CapturedOperands& noted_;
  const StorageSet* const vouched_;
  const c10::function_ref<bool(const at::Tensor&)> is_given_;
  std::vector<const torch::autograd::Node*> new_nodes_;  // of new state; only compared
  const torch::autograd::Node* passed_node_ = nullptr;   // of an argument
  std::unordered_set<uint64_t> tainted_, forgiven_;      // sequence numbers of operators' nodes
  bool is_work_tainted_ = false;  // the operator at work was given a tainted tensor
  uint64_t at_work_ = 0;          // the number of the operator with these operands:
  c10::SmallVector<const c10::StorageImpl*, 4> operands_;
};

}  // namespace remat
