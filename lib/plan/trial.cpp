#include "lib/plan/trial.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/GradMode.h>

#include <limits>
#include <unordered_set>
#include <vector>

#include "lib/plan/one_stage.h"
#include "remat/hooks.h"
#include "remat/memory.h"

namespace remat {

/// The tensors that autograd saved while a stage ran.
struct Trial::Saves {
  explicit Saves(const Measured& measured) : measured(measured) {}

  struct Storage {
    const c10::StorageImpl* identity;
    c10::weak_intrusive_ptr<c10::StorageImpl> alive;
    int64_t bytes;
  };
  const Measured& measured;
  std::vector<Storage> storages;  // each storage once
  std::unordered_set<const c10::StorageImpl*> seen;
  StageClock::Moment last;
  bool is_empty = true;

  void note(const at::Tensor& tensor) {
    is_empty = false;
    if (const auto* const identity = identity_of(tensor);
        identity != nullptr && seen.insert(identity).second)
      storages.push_back({identity, tensor.storage().getWeakStorageImpl(),
                          storage_bytes(tensor, measured.device)});
    last = measured.clock.now();
  }
  /// Returns the bytes of storages that died with the graph, without those of the input and output.
  int64_t dead_bytes(const c10::StorageImpl* input, const c10::StorageImpl* output) const {
    int64_t bytes = 0;
    for (const Storage& storage : storages)
      if (storage.alive.expired() && storage.identity != input && storage.identity != output)
        bytes += storage.bytes;
    return bytes;
  }
};

StageCost Trial::cost(const MeasureOptions& options, bool is_last) {
  is_last_ = is_last;
  refuse_writing();
  count_cached_casts();
  const at::Tensor first = forward_noting().first;
  const GradientScope gradients(first);
  backward(first);
  for (int64_t i = 0; i < options.warmup; ++i) backward(forward_noting().first);
  StageCost cost;
  measure_bytes(cost);
  measure_lone_bytes(cost);
  measure_bytes_without_saves(cost);
  try {
    measure_recompute(cost, options);
  } catch (const CheckpointError&) {
    // No plan of `solve` has the last stage in a region, so that stage need not be able to run
    // again.
    if (!is_last) throw;
  }
  measure_seconds(cost, options.repeats);
  if (!is_last && first.requires_grad() && measured_.place != nullptr) measure_moves(cost, options);
  return cost;
}

at::Tensor Trial::output() const { return input_from(output_, requires_grad_); }

// Note [Casts in the cache]
// Autocast caches casts of leaves, the chain's input among them, and empties its cache when its
// outermost scope ends. If that scope is around the program, casts outlive their stages. They are
// counted once for all plans (ChainCost::cached_cast_bytes), and subtracted from the bytes of
// stages. A step begins without casts, and so does each run here: an earlier cast would be an older
// node, which backward reaches later.
void Trial::count_cached_casts() {
  cached_bytes_ = bytes_of_casts_behind(input_);
  at::Tensor chain_input = input_;
  if (number_ == 1 && input_.requires_grad()) {
    chain_input = input_.detach();
    chain_input.set_requires_grad(true);
  }
  measured_.cached_cast_bytes +=
      chain_input.is_same(input_) ? cached_bytes_ : bytes_of_casts_behind(chain_input);
}

int64_t Trial::bytes_of_casts_behind(const at::Tensor& input) const {
  at::autocast::clear_cache();
  stage_(input);
  wait_for_engine(measured_.device);
  const MemoryMeter meter(measured_.device);
  const int64_t with_casts = meter.live_bytes();
  at::autocast::clear_cache();
  return at_least_none(with_casts - meter.live_bytes());
}

// A plan that begins a region with a stage that writes to its input would fail in backward.
void Trial::refuse_writing() const {
  if (!input_.has_storage() || input_.is_inference()) return;
  const at::Tensor input = input_from(input_.clone(), input_.requires_grad());
  const int64_t version = input._version();
  stage_(input);
  TORCH_CHECK_VALUE(input._version() == version, "remat::measure: stage ", number_,
                    " writes to its input in place.\n"
                    "Cause: a region that begins with this stage could not be recomputed, since "
                    "its input has changed by then.\n"
                    "Hint: join the stage with the stage before it, or let it return a new "
                    "tensor (inplace = false).");
}

at::Tensor Trial::forward(at::Tensor input) const {
  at::Tensor output = stage_(std::move(input));
  TORCH_CHECK_VALUE(output.defined(), "remat::measure: stage ", number_,
                    " returned an undefined tensor.");
  return output;
}

std::pair<at::Tensor, std::shared_ptr<Trial::Saves>> Trial::forward_noting() {
  auto saves = std::make_shared<Saves>(measured_);
  const SavedTensorHooksGuard noting(
      [saves](const at::Tensor& tensor) {
        saves->note(tensor);
        return tensor;
      },
      [](const at::Tensor& tensor) { return tensor; });
  at::Tensor output = forward(input_);
  output_ = output.detach();
  requires_grad_ = output.requires_grad();
  return {std::move(output), std::move(saves)};
}

void Trial::backward(const at::Tensor& output) const {
  if (output.requires_grad()) output.backward(at::ones_like(output));
}

void Trial::begin_run() const {
  at::autocast::clear_cache();
  wait_for_engine(measured_.device);
}

at::Tensor Trial::forward_in(const CheckpointOptions& region, at::Tensor input) const {
  if (measured_.run_region != nullptr)
    return (*measured_.run_region)(number_ - 1, region, std::move(input));
  return checkpoint(region, stage_, std::move(input));
}

// Note [Inputs as in a chain]
// In a chain, a stage or region is usually the only holder of its input. The input then dies when
// those who have saved it release it. So a stage is also measured with an input of the same memory
// that it alone holds, beside the runs with an input that lives on.
std::optional<at::Tensor> Trial::lone_input() const {
  const bool is_plain = input_.has_storage() && input_.layout() == at::kStrided &&
                        !input_.is_quantized() &&
                        !input_.unsafeGetTensorImpl()->is_python_dispatch();
  if (!is_plain || input_.device() != measured_.device) return std::nullopt;
  const at::NoGradGuard no_grad;
  const auto elements = static_cast<int64_t>(input_.storage().nbytes() / input_.dtype().itemsize());
  const at::Tensor all = input_.as_strided({elements}, {1}, 0).clone();
  return input_from(all.as_strided(input_.sizes(), input_.strides(), input_.storage_offset()),
                    input_.requires_grad());
}

void Trial::measure_bytes(StageCost& cost) {
  output_ = at::Tensor();
  const c10::Device device = measured_.device;
  const BackwardOfStage::Start start;
  begin_run();
  MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  const seam::DeviceBytes told_before = told();
  auto [output, saves] = forward_noting();
  const int64_t forward_peak = meter.peak_bytes() - before;
  add_rounding(told_before);
  cost.output_bytes = storage_bytes(output, device);
  cost.grad_bytes = gradient_bytes(output, device);
  cost.saves_output = saves->seen.contains(identity_of(output));
  const c10::StorageImpl* const identity = identity_of(output);
  if (output.requires_grad()) {
    const BackwardOfStage backward(output, start, is_last_);
    if (!is_last_) output = output_ = at::Tensor();
    meter.reset_peak();
    backward.run();
    cost.backward_bytes = at_least_none(meter.peak_bytes() - before - cached_bytes_);
    add_rounding(told_before);
  }
  output = at::Tensor();
  wait_for_engine(device);
  cost.saved_bytes = saves->dead_bytes(identity_of(input_), identity);
  cost.forward_tmp_bytes =
      at_least_none(forward_peak - cost.saved_bytes - cost.output_bytes - cached_bytes_);
  const bool has_output = cost.saves_output || is_last_;
  cost.backward_tmp_bytes =
      at_least_none(cost.backward_bytes - cost.saved_bytes - (has_output ? cost.output_bytes : 0) -
                    cost.grad_bytes - gradient_bytes(input_, device));
}

// See Note [Inputs as in a chain].
void Trial::measure_lone_bytes(StageCost& cost) const {
  const BackwardOfStage::Start start;
  begin_run();
  MemoryMeter meter(measured_.device);
  const int64_t before = meter.live_bytes();
  std::optional<at::Tensor> input = lone_input();
  if (!input) return;
  const auto storage = input->storage().getWeakStorageImpl();
  at::Tensor output = forward(std::move(*input));
  if (!output.requires_grad()) return;
  const BackwardOfStage backward(output, start, is_last_);
  if (!is_last_) output = at::Tensor();
  cost.saves_input = !storage.expired();
  meter.reset_peak();
  backward.run();
  cost.lone_backward_bytes = at_least_none(meter.peak_bytes() - before - cached_bytes_);
}

seam::DeviceBytes Trial::told() const {
  return measured_.device.is_cpu() ? seam::DeviceBytes() : seam::device_bytes(measured_.device);
}

void Trial::add_rounding(const seam::DeviceBytes& before) {
  const seam::DeviceBytes now = told();
  measured_.requested_bytes += now.peak - before.live;
  measured_.rounded_bytes += now.rounded_peak - before.rounded_live;
}

// Saved tensors die as soon as they are unused, as in the first run of a region.
void Trial::measure_bytes_without_saves(StageCost& cost) {
  output_ = at::Tensor();
  struct Dropped {};
  const SavedTensorHooksGuard dropping(
      [](const at::Tensor&) { return Dropped{}; },
      [](const Dropped&) -> at::Tensor {
        TORCH_CHECK_VALUE(false,
                          "remat::measure: a stage ran a backward itself, and the planner cannot "
                          "estimate its cost.");
      });
  begin_run();
  const MemoryMeter meter(measured_.device);
  const int64_t before = meter.live_bytes();
  output_ = forward(input_).detach();
  cost.unsaved_tmp_bytes =
      at_least_none(meter.peak_bytes() - before - cost.output_bytes - cached_bytes_);
}

// Runs the stage as a region, which shows two things. A stop is possible only where a region may
// end. The memory that backward makes before its first read depends on its first operators alone.
void Trial::measure_recompute(StageCost& cost, const MeasureOptions& options) {
  if (!requires_grad_) return;
  output_ = at::Tensor();
  const c10::Device device = measured_.device;
  const BackwardOfStage::Start start;
  begin_run();
  MemoryMeter meter(device);
  int64_t live = -1, peak = 0;  // the bytes when a recompute began, and its peak
  const auto watch = [&]() -> Scope {
    live = meter.live_bytes();
    meter.reset_peak();
    return Scope(nullptr, [&](void*) {
      peak = meter.peak_bytes();
      meter.reset_peak();
    });
  };
  const int64_t before = meter.live_bytes();
  std::optional<at::Tensor> lone = lone_input();
  const bool is_lone = lone.has_value();
  at::Tensor input = is_lone ? *std::exchange(lone, {}) : input_;
  at::Tensor output =
      forward_in({.early_stop = options.early_stop,
                  .context_fn = [&] { return ContextPair{.forward = {}, .recompute = watch}; },
                  .location = {}},
                 std::move(input));
  const BackwardOfStage backward(output, start, is_last_);
  if (!is_last_) output = at::Tensor();
  const int64_t held = meter.live_bytes();  // with the gradient of the output
  backward.run();
  reads_ = live >= 0;
  if (!reads_) return;
  cost.first_read_tmp_bytes = at_least_none(live - held);
  cost.stopped_tmp_bytes =
      at_least_none(peak - live - cost.saved_bytes - (cost.saves_output ? cost.output_bytes : 0));
  if (is_lone)
    cost.region_backward_bytes = at_least_none(meter.peak_bytes() - before - cached_bytes_);
}

void Trial::measure_seconds(StageCost& cost, int64_t repeats) {
  cost.forward_s = cost.backward_s = cost.forward_to_last_save_s =
      std::numeric_limits<double>::infinity();
  const StageClock& clock = measured_.clock;
  for (int64_t i = 0; i < repeats; ++i) {
    at::autocast::clear_cache();
    const auto start = clock.now();
    auto [output, saves] = forward_noting();
    const auto end = clock.now();
    cost.forward_s = std::min(cost.forward_s, clock.seconds_between(start, end));
    cost.forward_to_last_save_s =
        std::min(cost.forward_to_last_save_s,
                 saves->is_empty ? 0 : clock.seconds_between(start, saves->last));
    const auto backward_start = clock.now();
    backward(output);
    output = at::Tensor();
    cost.backward_s = std::min(cost.backward_s, clock.seconds_between(backward_start, clock.now()));
  }
  cost.forward_to_last_save_s = std::min(cost.forward_to_last_save_s, cost.forward_s);
}

}  // namespace remat
