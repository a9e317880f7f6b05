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
/// that want a flag the same way share it; it goes back when the last of them has ended.
class TrainingFlags {
 public:
  using Flag = std::pair<torch::nn::Module*, bool>;

  /// `has_buffers`: they are to be restored.
  TrainingFlags(torch::nn::Module& root, bool has_buffers);

  /// Whether there were buffers to restore.
  bool has_buffers() const { return has_buffers_ && num_buffers_ > 0; }
  /// The subject tells flags apart: of two of one subject only the first are kept.
  const void* subject() const { return subject_; }
  /// The module whose flags they are; null if it is gone, or no shared pointer owns it.
  std::shared_ptr<torch::nn::Module> module() const { return root_.lock(); }
  /// Visits the buffers that the module has now; none where they are not to be restored.
  void visit_buffers(c10::function_ref<void(const at::Tensor&)> visitor) const;
  /// Returns whether the function gave names of buffers to other tensors: StandInMembers.
  bool has_replaced_buffers() const;
  /// Whether parameters or modules came to the module, or went, since.
  bool has_other_members() const;

  /// While alive, the flags are so. Need not be the last of several to die.
  class Hold {
   public:
    explicit Hold(const TrainingFlags& flags);
    Hold(Hold&& other) noexcept;
    ~Hold();
    /// Others held a flag the other way for so long that it seems they never end.
    bool has_failed() const { return has_failed_; }

   private:
    void add(const TrainingFlags& flags, const std::shared_ptr<torch::nn::Module>& module);
    c10::SmallVector<Flag, 2> flags_;
    c10::SmallVector<std::shared_ptr<torch::nn::Module>, 2> alive_;
    std::size_t next_ = 0;  // where the next module is expected, if the tree is as it was
    bool has_failed_ = false;
  };

 private:
  const std::weak_ptr<torch::nn::Module> root_;
  const void* const subject_;
  const bool has_buffers_;
  c10::SmallVector<Flag, 2> flags_;
  std::size_t num_parameters_ = 0, num_buffers_ = 0;
};

/// A `Buffer` for each buffer of a module and of all below it; for one buffer it is the same
/// object, whoever asks, so regions that share buffers keep each once.
std::vector<std::shared_ptr<StateProvider>> buffers_of(torch::nn::Module& root);

/// Of a script module and all below it: a provider of its training flags and, unless `flags_only`,
/// one for each buffer.
std::vector<std::shared_ptr<StateProvider>> state_of(const torch::jit::Module& root,
                                                     bool flags_only);

/// Whether the provider restores a buffer with this storage, or may, since it is the user's.
bool may_restore(const StateProvider& provider, const c10::StorageImpl* buffer);

/// Whether a provider is the user's, and not one of those above.
bool is_users(const StateProvider& provider);

/// Whether the module or one below it is a batch norm: LibTorch's own, or of a class that says so
/// (SyncBatchNormImpl).
bool contains_batch_norm(torch::nn::Module& root);

}  // namespace remat
