#pragma once
// The operators a thread runs, by name and argument shapes, for debug reports. Bounded.

#include <ATen/record_function.h>

#include <cstdint>
#include <deque>
#include <string>

namespace remat {

/// The latest operators of one pass; older ones are forgotten, but stay counted.
class OpLog {
 public:
  static constexpr std::size_t max_entries = 1024;
  void add(std::string entry);
  /// Operators seen so far, the forgotten ones included.
  int64_t size() const { return forgotten_ + static_cast<int64_t>(entries_.size()); }
  /// The text of the operator with that number (from 0), empty if forgotten or not seen.
  std::string at(int64_t number) const;

 private:
  std::deque<std::string> entries_;
  int64_t forgotten_ = 0;
};

/// While alive, every operator that this thread runs goes into `log` (null: no recording).
class OpLogScope {
 public:
  explicit OpLogScope(OpLog* log);
  ~OpLogScope();
  OpLogScope(const OpLogScope&) = delete;
  OpLogScope& operator=(const OpLogScope&) = delete;

 private:
  OpLog* previous_ = nullptr;
  at::CallbackHandle handle_ = 0;
  bool is_recording_;
};

}  // namespace remat
