#pragma once
// Names what a recompute is for: one backward call, or several that share it.

#include <cstdint>

namespace remat {

struct TaskKey {
  enum class Kind : uint8_t { Graph, Group, Cache };
  Kind kind = Kind::Graph;
  int64_t id = -1;  ///< of an engine graph task, or of a guard
  bool operator==(const TaskKey&) const = default;
};

}  // namespace remat
