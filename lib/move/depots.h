#pragma once
// Makes the depots that move saved tensors elsewhere.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "hooks/depot/depot.h"
#include "remat/place.h"
#include "remat/scope.h"

namespace remat {

/// Returns the process's depot for results that policies move to the CPU with these options. The
/// caller numbers its results: Note [Moving kept results].
const std::shared_ptr<Depot>& depot_of_kept(int64_t prefetch_depth, int64_t max_bytes_in_flight,
                                            int64_t keep_last);

/// Makes a depot that moves all tensors without another owner, and whose stores and loads can be
/// ended and begun explicitly. `name`: shown to recorders with its transfers; empty: they are not
/// recorded.
std::shared_ptr<Depot> depot_of_moves(std::shared_ptr<Place> place, int64_t min_bytes,
                                      std::string name);

/// Gives tensors that autograd saves on this thread to a depot, while alive.
class DepotGuard : detail::ScopeGuard {
 public:
  explicit DepotGuard(std::shared_ptr<Depot> depot);
};

}  // namespace remat
