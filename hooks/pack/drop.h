#pragma once
// A frame's forward hook: keeps a slot and drops the tensor.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <new>
#include <utility>

#include "hooks/pack/slot.h"
#include "lib/seam/own_hooks.h"

namespace remat {

/// The hook is placed in memory of its owner, and keeps the owner alive. A region has one for each
/// saved tensor, and they die together.
class Drop final : public seam::OwnHooks {
 public:
  /// Makes a hook in `room`, which belongs to the owner.
  static std::unique_ptr<torch::autograd::SavedVariableHooks> make(
      c10::intrusive_ptr<SlotOwner> owner, void* room) {
    return std::unique_ptr<torch::autograd::SavedVariableHooks>(new (room) Drop(std::move(owner)));
  }
  Drop& operator=(Drop&&) = delete;

  /// Destroys the hook; the memory is freed with the owner.
  static void operator delete(Drop* hook, std::destroying_delete_t) noexcept {
    const c10::intrusive_ptr<SlotOwner> owner = std::move(hook->owner_);
    const int64_t position = hook->position_;
    hook->~Drop();
    if (position >= 0) owner->drop_slot(position);
  }

  void call_pack_hook(const at::Tensor& saved) override { position_ = owner_->add_slot(saved); }
  at::Tensor call_unpack_hook() override {
    if (Inspection* const inspection = Inspection::current()) {
      HeldInfo info = owner_->describe_slot(position_);
      info.frame = owner_;
      return inspection->note(std::move(info));
    }
    return owner_->read_slot(position_);
  }

 private:
  explicit Drop(c10::intrusive_ptr<SlotOwner> owner) : owner_(std::move(owner)) {}
  ~Drop() override = default;
  void refuse_tracing() const override {
    TORCH_CHECK(
        Inspection::current() != nullptr,
        "remat::checkpoint: compiled autograd cannot trace a region. Hint: run backward without "
        "compiled autograd.");
  }
  c10::intrusive_ptr<SlotOwner> owner_;
  int64_t position_ = -1;
};

}  // namespace remat
