#pragma once
// The operators that a thread runs, by name and argument shapes, for debug reports. Bounded.

#include <ATen/record_function.h>
#include <c10/util/Backtrace.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace remat {

/// The latest operators of one pass; older ones are forgotten, but stay counted.
class OpLog {
 public:
  static constexpr std::size_t max_entries = 1024;
  /// Adds an operator. `stack` may be null; it becomes text only when a report reads it.
  void add(std::string text, c10::Backtrace stack);
  /// Returns the number of operators seen so far, with the forgotten ones.
  int64_t size() const { return forgotten_ + static_cast<int64_t>(entries_.size()); }
  /// Returns the text of the operator with that number (from 0); empty if forgotten or not seen.
  std::string at(int64_t number) const;
  /// Returns the C++ functions that called the operator, innermost first, without those that lead
  /// from the call to this log. Empty unless REMAT_DEBUG_STACKS was 1 when the pass began.
  std::vector<std::string> stack_at(int64_t number) const;
  bool keeps_stacks = false;

 private:
  struct Entry {
    std::string text;
    c10::Backtrace stack;
  };
  const Entry* find(int64_t number) const;
  std::deque<Entry> entries_;
  int64_t forgotten_ = 0;
};

/// Adds every operator that this thread runs to `log` for its lifetime (null: no recording).
class OpLogScope {
 public:
  explicit OpLogScope(OpLog* log);
  ~OpLogScope();
  /// Makes `log` the log of this thread, null for none, and returns the previous one.
  static OpLog* exchange(OpLog* log);
  OpLogScope& operator=(OpLogScope&&) = delete;

 private:
  OpLog* previous_ = nullptr;
  at::CallbackHandle handle_ = 0;
  bool is_recording_;
};

}  // namespace remat
