#include "lib/scope/saving_input.h"

#include <utility>

namespace remat {

namespace {
thread_local SavingInput* being_saved = nullptr;
}  // namespace

const at::Tensor* input_being_saved() {
  const SavingInput* const saving = being_saved;  // one look-up for all
  return saving == nullptr ? nullptr : saving->tensor_;
}
const at::Tensor* take_input_being_saved() {
  SavingInput* const saving = being_saved;
  if (saving == nullptr) return nullptr;
  saving->is_slot_ = true;
  return saving->tensor_;
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
