#include "lib/scope/saving_input.h"

#include <utility>

namespace remat {

namespace {
thread_local SavingInput* being_saved = nullptr;
}  // namespace

const at::Tensor* input_being_saved() {
  return being_saved == nullptr ? nullptr : being_saved->tensor_;
}
const at::Tensor* take_input_being_saved() {
  if (being_saved != nullptr) being_saved->is_slot_ = true;
  return input_being_saved();
}
bool stop_after_inputs(SlotFiller& filler) {
  if (being_saved == nullptr || being_saved->stops_later_ == nullptr) return false;
  *being_saved->stops_later_ = &filler;
  return true;
}
SavingInput::SavingInput(const at::Tensor& tensor, SlotFiller** stops_later)
    : tensor_(&tensor), stops_later_(stops_later), previous_(std::exchange(being_saved, this)) {}
SavingInput::~SavingInput() { being_saved = previous_; }

}  // namespace remat
