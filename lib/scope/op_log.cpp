// RecordFunction::inputs() checks a flag that a release LibTorch never sets.
#ifndef NDEBUG
#define NDEBUG
#endif
#include "lib/scope/op_log.h"

#include <ATen/core/ivalue.h>
#include <c10/util/env.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "lib/seam/dispatch_mode.h"

namespace remat {

namespace {

thread_local OpLog* current_log = nullptr;

constexpr std::size_t max_frames_looked_at = 48, max_frames_shown = 8, max_frame_length = 160;

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
  // Under a policy an operator is called a second time, when it runs below autograd; on the way
  // there LibTorch has a scope for the mode.
  if (current_log == nullptr || seam::is_handling_operator() ||
      std::string_view(fn.name()) == "PythonDispatchMode")
    return nullptr;
  current_log->add(
      fmt::format("{}({})", fn.name(), shapes_of(fn.inputs())),
      current_log->keeps_stacks ? c10::get_lazy_backtrace(1, max_frames_looked_at) : nullptr);
  return nullptr;
}

bool has_any(std::string_view frame, std::initializer_list<std::string_view> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](std::string_view word) { return frame.find(word) != frame.npos; });
}

/// Returns whether a frame says nothing to a reader: it leads from the call of an operator to its
/// kernel or to this log, or is a function of LibTorch's without a name.
bool is_machinery(std::string_view frame) {
  return has_any(frame, {"/libremat", "remat::detail::", "RecordFunction", "c10::Dispatcher",
                         "c10::impl::", "at::_ops::", "at::redispatch::",
                         "torch::autograd::VariableType"}) ||
         (has_any(frame, {"<unknown function>"}) &&
          has_any(frame, {"/libtorch", "/libc10", "/libc.so"}));
}

}  // namespace

void OpLog::add(std::string text, c10::Backtrace stack) {
  entries_.push_back({std::move(text), std::move(stack)});
  if (entries_.size() > max_entries) {
    entries_.pop_front();
    ++forgotten_;
  }
}

const OpLog::Entry* OpLog::find(int64_t number) const {
  const int64_t index = number - forgotten_;
  return index >= 0 && index < static_cast<int64_t>(entries_.size())
             ? &entries_[static_cast<std::size_t>(index)]
             : nullptr;
}

std::string OpLog::at(int64_t number) const {
  const Entry* const entry = find(number);
  return entry == nullptr ? std::string() : entry->text;
}

std::vector<std::string> OpLog::stack_at(int64_t number) const {
  std::vector<std::string> frames;
  const Entry* const entry = find(number);
  if (entry == nullptr || entry->stack == nullptr) return frames;
  std::string_view rest = entry->stack->get();
  while (!rest.empty() && frames.size() < max_frames_shown) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view frame = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (const std::size_t colon = frame.find(": "); frame.substr(0, 7) == "frame #" && colon < 12)
      frame.remove_prefix(colon + 2);
    // Frames from here on asked for the recompute and did not call the operator.
    if (!frames.empty() && has_any(frame, {"SavedVariable::unpack"})) break;
    if (frame.empty() || is_machinery(frame)) continue;
    frames.emplace_back(frame.substr(0, max_frame_length));
    if (frame.size() > max_frame_length) frames.back() += " …";
  }
  return frames;
}

OpLogScope::OpLogScope(OpLog* log) : is_recording_(log != nullptr) {
  if (!is_recording_) return;
  log->keeps_stacks = c10::utils::check_env("REMAT_DEBUG_STACKS").value_or(false);
  previous_ = std::exchange(current_log, log);
  if (previous_ == nullptr)  // otherwise the callback of the enclosing scope serves
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_operator)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

OpLog* OpLogScope::exchange(OpLog* log) { return std::exchange(current_log, log); }

OpLogScope::~OpLogScope() {
  if (!is_recording_) return;
  if (previous_ == nullptr) at::removeCallback(handle_);
  current_log = previous_;
}

}  // namespace remat
