#pragma once
// The costs of one stage: it runs forward and backward, alone, as a region, and with moved saves.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "lib/plan/stage_clock.h"
#include "lib/seam/device_allocator.h"
#include "remat/binding.h"
#include "remat/checkpoint.h"
#include "remat/plan.h"

namespace remat {

class Depot;
class Place;

/// The device whose bytes and time are measured, and sums over all stages.
struct Measured {
  c10::Device device;
  StageClock clock{device};
  const StageRegion* run_region = nullptr;  ///< of a binding
  std::shared_ptr<Place> place{};           // for moved tensors; null: nothing moves
  // Sums of bytes as the stages requested them, and as the allocator rounded them.
  int64_t requested_bytes = 0, rounded_bytes = 0;
  int64_t cached_cast_bytes = 0;

  double rounding() const {
    if (requested_bytes <= 0) return 0;
    return std::max(0.0,
                    static_cast<double>(rounded_bytes) / static_cast<double>(requested_bytes) - 1);
  }
};

/// A stage and its input.
class Trial {
 public:
  Trial(const Stage& stage, at::Tensor input, std::size_t number, Measured& measured)
      : stage_(stage), input_(std::move(input)), number_(number), measured_(measured) {}

  StageCost cost(const MeasureOptions& options, bool is_last);
  /// Returns whether the input is freed when the stage moves its saved tensors.
  bool moves_input() const { return moves_input_; }
  /// Returns whether backward reads any saved tensor.
  bool reads() const { return reads_; }
  /// Returns the input of the next stage.
  at::Tensor output() const;
  /// Returns the share of the copies' time by which this stage takes longer beside copies of its
  /// own saved tensors: see Note [Times of moves].
  double held_up_share(const StageCost& cost, const MoveCost& copies,
                       const MeasureOptions& options);

 private:
  struct Saves;

  void count_cached_casts();
  int64_t bytes_of_casts_behind(const at::Tensor& input) const;
  void refuse_writing() const;

  at::Tensor forward(at::Tensor input) const;
  std::pair<at::Tensor, std::shared_ptr<Saves>> forward_noting();
  at::Tensor forward_in(const CheckpointOptions& region, at::Tensor input) const;
  void backward(const at::Tensor& output) const;
  /// Ends the work of the run before, and empties the cache of casts.
  void begin_run() const;
  /// Returns an input that only the caller holds: see Note [Inputs as in a chain].
  std::optional<at::Tensor> lone_input() const;

  void measure_bytes(StageCost& cost);
  void measure_lone_bytes(StageCost& cost) const;
  seam::DeviceBytes told() const;
  void add_rounding(const seam::DeviceBytes& before);
  void measure_bytes_without_saves(StageCost& cost);
  void measure_recompute(StageCost& cost, const MeasureOptions& options);
  void measure_seconds(StageCost& cost, int64_t repeats);

  void measure_moves(StageCost& cost, const MeasureOptions& options);
  /// Returns the bytes alive after forward if the stage alone holds its input, and whether the
  /// input is.
  std::pair<int64_t, bool> held_after_forward(const std::shared_ptr<Depot>& depot) const;
  double seconds_of_two(const std::shared_ptr<Depot>& depot) const;

  const Stage& stage_;
  const at::Tensor input_;
  const std::size_t number_;
  Measured& measured_;
  at::Tensor output_;
  int64_t cached_bytes_ = 0;  // see Note [Casts in the cache]
  bool is_last_ = false, requires_grad_ = false, moves_input_ = true, reads_ = true;
};

}  // namespace remat
