#pragma once
// Finds captured tensors that a region's function computes with, which autograd need not save, and
// that changed.
//
// Note [Captures that nothing saves]
// `x + bias` saves nothing: a recompute would take the bias as it is by then, and what is saved
// after it would be another forward's. But an operator asks each tensor through which its gradient
// may flow for its node (seam::NodeWatch). So forward notes those that come from outside: leaves,
// tensors without grad, older results; arguments, too, of which the region or the hooks around it
// have a copy, since the function may have captured the same tensor. They are told apart by their
// version counters, which views share. When a recompute begins, their versions and storages are
// compared. If some changed, and only then, the recompute is watched: an operator that is given one
// of them, or the result of such an operator, is tainted; and a tensor that backward needs which
// such an operator made is a changed capture (Rule 10). What the recompute does not reach, and what
// does not come into a saved tensor, does no harm, and raises nothing. One that the function itself
// has written to in this recompute before it reads it is taken as made there.
//
// Note [State with a history]
// A function may assign a captured variable anew: `v = v * 0.5 + x`. Its recompute finds the tensor
// that forward left there, or a later call, or an earlier recompute. So a captured tensor whose
// history was made after forward began is a changed capture, too, and an operator that is given one
// is tainted. Node numbers grow on each thread. On forward's thread they show whether a node is
// younger than forward; on the recompute's own thread, whether it is older than the recompute.
// There forward may have read the tensor, and has noted it then. A view or a cast of a leaf is
// judged by the leaf. Nodes of other threads pass, since a function may make those anew in each
// run: a recompute on a third thread does not recognise what one that failed on a second thread has
// left.
//
// Not seen: tensors that operators without any gradient read (a mask that is computed of a changed
// tensor), another tensor in the place of one that nothing saved unless its history is younger than
// forward, and other data (`set_data`) of a result that is an argument and captured, too, which
// would take noting every argument: 1,300 instructions a region.

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
  WeakTensor object;  ///< it, or a view of it; dead if that was made for the call
  WeakStorage storage;
  uint32_t version = 0;
  uint32_t offset = 0;  ///< where in its storage the object began (low bits)

  /// Whether it was changed in place or given other data.
  bool is_changed() const;
  bool is_alive() const { return !object.expired() || !storage.expired(); }
};

/// A frame has these. Noted on the forward's thread; read when forward is over.
class CapturedOperands {
 public:
  /// An operator computes with a tensor from outside. The first time counts. `inputs`: the
  /// region's.
  void note(const at::TensorBase& tensor, const Inputs& inputs);
  /// The forward is over.
  void settle();
  /// Returns those that have changed since; they live as long as this.
  std::vector<const CapturedOperand*> changed() const;
  /// There are none, in most regions.
  bool is_empty() const { return noted_ == nullptr; }
  bool has(const c10::VariableVersion& counter) const {
    return noted_ != nullptr && noted_->has(counter);
  }
  void clear() { noted_.reset(); }

 private:
  struct Noted {
    bool has(const c10::VariableVersion& counter) const;

    std::vector<CapturedOperand> all;
    std::unordered_set<const void*> index;  // of their counters, if they are many
  };
  std::unique_ptr<Noted> noted_;
};

/// Follows what one recompute computes with changed captures. On its thread.
class ChangedOperands final : public seam::NodeWatch {
 public:
  /// Forward began at `forward`, and noted `noted`, of which `changed` have changed. `vouched`: of
  /// these storages providers say that they are as forward saw them; null for none. `is_given`:
  /// whether a tensor is an argument of the recompute. The arguments outlive this.
  ChangedOperands(const RegionStart& forward, const CapturedOperands& noted,
                  const std::vector<const CapturedOperand*>& changed, const StorageSet* vouched,
                  c10::function_ref<bool(const at::Tensor&)> is_given);

  /// The operator at work has its result from elsewhere.
  void forgive_operator();
  /// Whether a tensor that autograd saves now was computed with a changed capture.
  /// `is_made_inside`: as forward's was.
  bool made(const at::Tensor& saved, bool is_made_inside);
  struct Change {
    const CapturedOperand* then;
    uint32_t version;  ///< when the recompute began
    bool is_read;      ///< by an operator so far
    std::string name;  ///< that a region knows in which it is read
  };
  const std::vector<Change>& changes() const { return changes_; }
  /// A captured tensor whose history was made after forward began.
  struct NewState {
    TensorIdentity tensor;
    std::string text;
  };
  /// The first of those that operators were given.
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
  std::vector<const torch::autograd::Node*> new_nodes_;  // of new state; only to be compared
  const torch::autograd::Node* passed_node_ = nullptr;   // of an argument
  std::unordered_set<uint64_t> tainted_, forgiven_;      // sequence numbers of operators' nodes
  bool is_work_tainted_ = false;  // the operator at work was given one of these
  uint64_t at_work_ = 0;          // the number of the operator whose tensors these are:
  c10::SmallVector<const c10::StorageImpl*, 4> operands_;
};

}  // namespace remat
