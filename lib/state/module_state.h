#pragma once
// A module's training flags and buffers, as a region registers them for its recomputes.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <memory>
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

/// Something that is one way while recomputes run and goes back when the last of them has ended.
/// Unlike the state of a provider, recomputes that want it the same way share it.
class HeldState {
 public:
  virtual ~HeldState();
  /// The subject tells held states apart: of two with one subject only the first is kept, which is
  /// how it was when the region began.
  virtual const void* subject() const = 0;
  /// Holds the state; null if others hold it another way for so long that it seems they never end.
  virtual std::shared_ptr<void> hold() = 0;
  /// The module whose state it is, for errors that name its tensors; null if it is that of none, or of one that is gone
  /// or that no shared pointer owns.
  virtual std::shared_ptr<torch::nn::Module> module() const { return nullptr; }
  /// Visits the buffers that the module has now; none where they are not to be restored.
  virtual void visit_buffers(c10::function_ref<void(const at::Tensor&)> /*visitor*/) const {}
  /// Returns whether the function gave names of buffers to other tensors: StandInMembers.
  virtual bool has_replaced_buffers() const { return false; }
  /// Whether parameters or modules came to the subject, or went, since.
  virtual bool has_other_members() const { return false; }
};

/// The flags as they are now, of a module and all below it, whose buffers are restored or not.
std::shared_ptr<HeldState> training_flags_of(torch::nn::Module& root, bool has_buffers);

/// A `Buffer` for each buffer of a module and of all below it; for one buffer it is the same
/// object, whoever asks, so regions that share buffers keep each once.
std::vector<std::shared_ptr<StateProvider>> buffers_of(torch::nn::Module& root);

/// Of a script module and all below it: a provider of its training flags and, unless `flags_only`, one for each
/// buffer.
std::vector<std::shared_ptr<StateProvider>> state_of(const torch::jit::Module& root,
                                                     bool flags_only);

/// Whether the provider restores a buffer with this storage, or may, since it is the user's.
bool may_restore(const StateProvider& provider, const c10::StorageImpl* buffer);

/// Whether a provider is the user's, and not one of those above.
bool is_users(const StateProvider& provider);

/// Whether the module or one below it is a batch norm: LibTorch's own, or of a class that says so (SyncBatchNormImpl).
bool contains_batch_norm(torch::nn::Module& root);

}  // namespace remat
