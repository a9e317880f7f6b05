#include "lib/selective/kept_moves.h"

#include <algorithm>
#include <utility>

#include "hooks/depot/move_totals.h"
#include "lib/move/depots.h"
#include "lib/selective/policy_rule.h"

namespace remat {

namespace {

/// Number of bits for a region's numbers; results beyond them are not loaded ahead.
constexpr int bits_of_region = 20;
constexpr uint64_t last_index = (uint64_t{1} << bits_of_region) - 2;

}  // namespace

KeptPlace KeptMoves::place_of(const at::Tensor& value, CheckpointPolicy answer, bool is_beside) {
  if (!is_offloading(answer)) return {};
  // A result that cannot be moved is refused, however small it is.
  const bool is_small = value.defined() && KeptTensor::can_be_moved(value) &&
                        static_cast<int64_t>(value.nbytes()) < options_.min_offload_bytes;
  if (is_small) return {};
  const bool must_move = answer == CheckpointPolicy::MustCpuOffload;
  KeptPlace place{must_move ? KeptWhere::OnCpu : KeptWhere::OnCpuIfPossible, this, is_beside};
  if (frame_.recorded() != nullptr && options_.keep_last > 0 && value.defined())
    place.on_late_move = frame_.recorded()->late_move(static_cast<int64_t>(value.nbytes()));
  return place;
}

// Later regions have larger numbers.
uint64_t KeptMoves::number_of(uint64_t index) const {
  const auto region = static_cast<uint64_t>(frame_.region().info.id);
  const uint64_t after = (region + 1) << bits_of_region;
  return after - 1 - std::min(index, last_index);
}

const std::shared_ptr<Depot>& KeptMoves::depot() const {
  return depot_of_kept(options_.prefetch_depth, options_.max_bytes_in_flight, options_.keep_last);
}

std::shared_ptr<SavedElsewhere> KeptMoves::keep_in_place(const at::Tensor& value, bool has_to_move,
                                                         std::function<void()> on_move) {
  if (options_.keep_last == 0) return nullptr;
  const TimeSpent time(spent_ns_);
  return depot()->keep_in_place(value, {number_of(num_moved_++), has_to_move, std::move(on_move)});
}

void KeptMoves::move_excess() {
  if (options_.keep_last == 0) return;
  const TimeSpent time(spent_ns_);
  depot()->move_excess();
}

std::shared_ptr<Piece> KeptMoves::move(const at::Tensor& value, bool is_beside, bool has_to_move) {
  const TimeSpent time(spent_ns_);
  auto piece = depot()->keep(value, number_of(num_moved_++));
  if (piece == nullptr) return nullptr;
  if (has_to_move) piece->set_must_arrive(true);
  if (!is_beside) piece->finish_store();
  return piece;
}

void KeptMoves::begin_loads() const {
  if (num_moved_ > 0) depot()->begin_loads_before(number_of(0) + 1);
}

}  // namespace remat
