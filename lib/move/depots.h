#pragma once
// Saved tensors that wait elsewhere: the depots of what regions keep.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "hooks/depot/depot.h"
#include "remat/place.h"
#include "remat/scope.h"

namespace remat {

/// The process has one depot for the results that policies move to the CPU with these options. Who
/// gives it something numbers it: Note [Moving kept results].
const std::shared_ptr<Depot>& depot_of_kept(int64_t prefetch_depth, int64_t max_bytes_in_flight,
                                            int64_t keep_last);

/// A depot that moves all that nobody else holds, and that can be told to end its stores and to
/// begin its loads. `name`: under which recorders see what it moves; empty: they do not.
std::shared_ptr<Depot> depot_of_moves(std::shared_ptr<Place> place, int64_t min_bytes,
                                      std::string name);

/// While alive, what autograd saves on this thread is taken by a depot.
class DepotGuard : detail::ScopeGuard {
 public:
  explicit DepotGuard(std::shared_ptr<Depot> depot);
};

}  // namespace remat
