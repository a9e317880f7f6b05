#pragma once
// A frame's forward hook: keeps a slot, drops the tensor.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <utility>

#include "hooks/slot.h"
#include "lib/seam/own_hooks.h"

namespace remat {

class Drop final : public seam::OwnHooks {
 public:
  explicit Drop(c10::intrusive_ptr<SlotOwner> owner) : owner_(std::move(owner)) {}
  ~Drop() override {
    if (position_ >= 0) owner_->drop_slot(position_);
  }
  Drop& operator=(Drop&&) = delete;

  void call_pack_hook(const at::Tensor& saved) override { position_ = owner_->add_slot(saved); }
  at::Tensor call_unpack_hook() override {
    if (Inspection* const inspection = Inspection::current())
      return inspection->note(owner_->describe_slot(position_));
    return owner_->read_slot(position_);
  }

 private:
  void refuse_tracing() const override {
    TORCH_CHECK(
        Inspection::current() != nullptr,
        "remat::checkpoint: compiled autograd cannot trace a region. Do: run backward without "
        "it.");
  }
  c10::intrusive_ptr<SlotOwner> owner_;
  int64_t position_ = -1;
};

}  // namespace remat
