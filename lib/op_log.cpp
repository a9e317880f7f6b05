// RecordFunction::inputs() checks a flag that a release LibTorch never sets.
#ifndef NDEBUG
#define NDEBUG
#endif
#include "lib/op_log.h"

#include <ATen/core/ivalue.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "lib/engine_seam.h"

namespace remat {

namespace {

thread_local OpLog* current_log = nullptr;

std::string shapes_of(c10::ArrayRef<const c10::IValue> inputs) {
  std::string text;
  for (const c10::IValue& input : inputs) {
    if (!input.isTensor() || !input.toTensor().defined() || input.toTensor().is_nested()) continue;
    const auto sizes = input.toTensor().sizes();
    text += fmt::format("{}[{}]", text.empty() ? "" : ", ", fmt::join(sizes, ", "));
  }
  return text;
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& fn) {
  // Under a policy an operator comes once more, when it is run below autograd.
  if (current_log != nullptr && !seam::is_handling_operator())
    current_log->add(fmt::format("{}({})", fn.name(), shapes_of(fn.inputs())));
  return nullptr;
}

}  // namespace

void OpLog::add(std::string entry) {
  entries_.push_back(std::move(entry));
  if (entries_.size() > max_entries) {
    entries_.pop_front();
    ++forgotten_;
  }
}

std::string OpLog::at(int64_t number) const {
  const int64_t index = number - forgotten_;
  return index >= 0 && index < static_cast<int64_t>(entries_.size())
             ? entries_[static_cast<std::size_t>(index)]
             : std::string();
}

OpLogScope::OpLogScope(OpLog* log) : is_recording_(log != nullptr) {
  if (!is_recording_) return;
  previous_ = std::exchange(current_log, log);
  if (previous_ == nullptr)  // otherwise the callback of the enclosing scope serves
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_operator)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

OpLogScope::~OpLogScope() {
  if (!is_recording_) return;
  if (previous_ == nullptr) at::removeCallback(handle_);
  current_log = previous_;
}

}  // namespace remat
