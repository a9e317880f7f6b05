#pragma once
// The tensor arguments of a region, saved as autograd saves a tensor.

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <memory>
#include <vector>

#include "lib/capture.h"
#include "lib/gradient_paths.h"
#include "remat/checkpoint.h"

namespace remat {

class Frame;

/// Note [Inputs without history]
/// A region's input is saved through whatever hooks are active around the region: under a parent
/// frame it becomes a slot of the parent (Rule 2). A tensor that requires grad is saved as an alias
/// without its history, so that a frame never keeps the graph above it alive; what is needed to
/// rebuild `requires_grad` and leaf-ness is kept beside it. A tensor that does not require grad is
/// the same object in every run. One tensor passed twice is one tensor in the recompute too.
class Inputs {
 public:
  /// Takes the tensors out of the body's kept arguments and saves them. `offload`: those that no
  /// hooks around the region take wait on the CPU. Throws what the hooks around throw, and LibTorch's
  /// error for inference tensors.
  void save(detail::RegionBody& body, bool offload);
  /// Fresh arguments for one recompute of `frame`; may make parents recompute. Throws LibTorch's error
  /// when an input was changed in place, and CheckpointError if a user's hooks kept it as it was.
  std::vector<at::Tensor> unpack(const Frame& frame) const;
  /// The tensors die here.
  void clear() { saved_.clear(); }

  const StorageSet& storages() const { return storages_; }
  /// Which of the inputs' storages one has: equal for inputs that share theirs, -1 for none.
  int64_t storage_number(std::size_t input) const { return saved_[input].storage_number; }
  /// Of each input: where its gradient goes in forward (nowhere, if it is gone), and whether it had hooks.
  template <class Visitor>
  void visit_places(Visitor&& visitor) const {
    for (const Input& each : saved_) visitor(each.place.get(), each.has_tensor_hooks);
  }
  /// The region's function has returned: the storages are not compared any more.
  void settle() { storages_.clear(); }

 private:
  /// LibTorch does not look at the version of what comes from hooks. They may have kept a copy, which a
  /// change of the original leaves alone, or the original.
  struct Watched {
    WeakStorage storage;
    c10::VariableVersion counter;
    std::atomic<uint32_t> version;  ///< the hooks themselves may write when they give it back
  };
  struct Input {
    Input() = default;
    explicit Input(const at::Tensor& saved) : variable(saved, /*is_output=*/false) {}
    torch::autograd::SavedVariable variable;
    std::unique_ptr<Watched> watched;  ///< where a user's hooks took it
    WatchedPlace place;
    int32_t storage_number = -1;
    int32_t same_as : 29 = -1;  ///< the input that is the same tensor, or -1
    GradRole role : 2 =
        GradRole::None;  ///< of forward's; what requires grad is an alias in each run
    bool has_tensor_hooks : 1 = false;
  };
  c10::SmallVector<Input, 1> saved_;
  StorageSet storages_;
};

/// While the inputs of a region are saved: the tensor whose alias is being packed, else null. A
/// parent frame judges the alias by the tensor it stands for.
const at::Tensor* input_being_saved();
/// The same, for a frame that makes a slot of it, or fills one with it.
const at::Tensor* take_input_being_saved();
class SavingInput {
 public:
  explicit SavingInput(const at::Tensor& tensor);
  ~SavingInput();
  SavingInput(const SavingInput&) = delete;
  SavingInput& operator=(const SavingInput&) = delete;
  bool is_slot() const { return is_slot_; }

 private:
  friend const at::Tensor* input_being_saved();
  friend const at::Tensor* take_input_being_saved();
  const at::Tensor* const tensor_;
  SavingInput* const previous_;
  bool is_slot_ = false;
};

}  // namespace remat
