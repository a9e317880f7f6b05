#pragma once
// What one stage costs: it is run forward and backward, alone, as a region, and with what it saves
// moved.

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

/// What is measured: bytes of one device, and time on it.
struct Measured {
  c10::Device device;
  StageClock clock{device};
  const StageRegion* run_region = nullptr;  ///< a binding's
  std::shared_ptr<Place> place{};           // for what moves; null: nothing does
  // Of what the stages asked for, and of what the allocator made of it.
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
  /// Whether the input goes away when the stage moves what it saves.
  bool moves_input() const { return moves_input_; }
  /// Whether backward reads anything that was saved.
  bool reads() const { return reads_; }
  /// What the next stage is fed with.
  at::Tensor output() const;
  /// The share of copies by which this stage takes longer beside those of its own
  /// saves. Note [Times of moves].
  double held_up_share(const StageCost& cost, const MoveCost& copies,
                       const MeasureOptions& options);

 private:
  struct Saves;

  void count_cached_casts();
  int64_t bytes_of_casts_behind(const at::Tensor& input) const;
  void refuse_writing() const;

  at::Tensor forward() const { return forward(input_); }
  at::Tensor forward(at::Tensor input) const;
  std::pair<at::Tensor, std::shared_ptr<Saves>> forward_noting();
  at::Tensor forward_in(const CheckpointOptions& region, at::Tensor input) const;
  void backward(const at::Tensor& output) const;
  /// What was before has ended, and left no casts.
  void begin_run() const;
  /// See Note [Inputs as in a chain].
  std::optional<at::Tensor> lone_input() const;

  void measure_bytes(StageCost& cost);
  void measure_lone_bytes(StageCost& cost) const;
  seam::DeviceBytes told() const;
  void add_rounding(const seam::DeviceBytes& before);
  void measure_bytes_without_saves(StageCost& cost);
  void measure_recompute(StageCost& cost, const MeasureOptions& options);
  void measure_seconds(StageCost& cost, int64_t repeats);

  void measure_moves(StageCost& cost, const MeasureOptions& options);
  /// What is held for backward when nobody else holds the input, and whether that is.
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
