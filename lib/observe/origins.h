#pragma once
// The notes of OriginGuards about the nodes of autograd.

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "remat/origin.h"

namespace remat {

struct NodeOrigin {
  std::string module, op, place;
};

/// The notes of one guard, by the sequence numbers that autograd gives the nodes of a thread. They
/// only grow, so a list of changes is enough: the module of a node is that of the last change at or
/// before its number.
class OriginLog {
 public:
  explicit OriginLog(OriginOptions options);
  ~OriginLog();
  OriginLog& operator=(OriginLog&&) = delete;

  void enter(std::string_view path, const SourceLocation& where);
  void leave();
  /// Returns the origin of a node of a thread; null members where nothing is known.
  NodeOrigin of(uint64_t sequence) const;
  uint64_t thread() const { return thread_; }
  /// Returns the log of this thread, or null.
  static OriginLog* here();

 private:
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& operation);
  void note_change();

  struct Change {
    uint64_t sequence;
    int32_t module;  // number of its text; -1: none
  };
  const OriginOptions options_;
  const uint64_t thread_ = at::RecordFunction::currentThreadId();
  std::vector<std::pair<std::string, std::string>> modules_;  // paths with places, in use or not
  std::unordered_map<std::string, int32_t> numbers_;          // of `modules_`, by path and place
  std::vector<int32_t> open_;                                 // the scopes, innermost last
  std::vector<Change> changes_;
  std::unordered_map<uint64_t, std::pair<std::string, std::string>> operators_;  // op, place
  at::CallbackHandle handle_ = 0;
  OriginLog* const outer_;
};

/// Returns the origin of a node, by all guards that are alive.
NodeOrigin origin_of(uint64_t thread, uint64_t sequence);

}  // namespace remat
