#pragma once
// A module's training flags and buffers, as a region registers them for its recomputes.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "remat/state.h"

namespace c10 {
struct StorageImpl;
}
namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace remat {

/// The training flags of a module and of all below it, as they were when a region began. Recomputes
/// that want a flag the same way share it; it is restored when the last of them has ended.
class TrainingFlags {
 public:
  using Flag = std::pair<torch::nn::Module*, bool>;

  /// `has_buffers`: whether its buffers are to be restored.
  TrainingFlags(torch::nn::Module& root, bool has_buffers);

  /// Returns whether there were buffers to restore.
  bool has_buffers() const { return has_buffers_ && num_buffers_ > 0; }
  /// Returns the identity of the flags: of two with one subject only the first are registered.
  const void* subject() const { return subject_; }
  /// Returns the module of the flags; null if it is gone, or no shared pointer owns it.
  std::shared_ptr<torch::nn::Module> module() const { return root_.lock(); }
  /// Visits the buffers that the module has now; none if they are not to be restored.
  void visit_buffers(c10::function_ref<void(const at::Tensor&)> visitor) const;
  /// Returns whether the function assigned other tensors to names of buffers: StandInMembers.
  bool has_replaced_buffers() const;
  /// Returns whether parameters or modules were added to the module, or removed, since.
  bool has_other_members() const;

  /// Holds the flags at their values while alive. Several may be destroyed in any order.
  class Hold {
   public:
    explicit Hold(const TrainingFlags& flags);
    Hold(Hold&& other) noexcept;
    ~Hold();
    /// Returns whether others held a flag at the other value for too long.
    bool has_failed() const { return has_failed_; }

   private:
    void add(const TrainingFlags& flags, const std::shared_ptr<torch::nn::Module>& module);
    c10::SmallVector<Flag, 2> flags_;
    c10::SmallVector<std::shared_ptr<torch::nn::Module>, 2> alive_;
    std::size_t next_ = 0;  // index of the expected next module, if the tree is unchanged
    bool has_failed_ = false;
  };

 private:
  const std::weak_ptr<torch::nn::Module> root_;
  const void* const subject_;
  const bool has_buffers_;
  c10::SmallVector<Flag, 2> flags_;
  std::size_t num_parameters_ = 0, num_buffers_ = 0;
};

/// Returns a `Buffer` for each buffer of a module and of all below it. Each buffer has one such
/// object, so regions that share buffers hold each once.
std::vector<std::shared_ptr<StateProvider>> buffers_of(torch::nn::Module& root);

/// Returns, for a script module and all below it, a provider of the training flags and, unless
/// `flags_only`, one for each buffer.
std::vector<std::shared_ptr<StateProvider>> state_of(const torch::jit::Module& root,
                                                     bool flags_only);

/// Returns whether the provider restores a buffer with this storage or, if it is the user's, may do
/// so.
bool may_restore(const StateProvider& provider, const c10::StorageImpl* buffer);

/// Returns whether a provider is the user's, and not one of those above.
bool is_users(const StateProvider& provider);

/// Returns whether the module or one below it is a batch norm: LibTorch's own, or of a class named
/// so (SyncBatchNormImpl).
bool contains_batch_norm(torch::nn::Module& root);

}  // namespace remat
