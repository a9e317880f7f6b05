// What the stages of a chain cost: each is run forward and backward on its own.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include "hooks/depot.h"
#include "lib/plan/generator_scopes.h"
#include "lib/plan/measure.h"
#include "lib/plan/moves.h"
#include "lib/plan/stage_clock.h"
#include "lib/scope/offload.h"
#include "lib/seam/device_allocator.h"
#include "lib/seam/engine.h"
#include "lib/selective/policy_rule.h"
#include "remat/binding.h"
#include "remat/checkpoint.h"
#include "remat/hooks.h"
#include "remat/memory.h"
#include "remat/plan.h"

namespace remat {

namespace {

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

/// Backward on an accelerator ends before the engine's thread of the device has let go of the last
/// node's tensors; it has when it has run another one.
void wait_for_engine(c10::Device device) {
  if (device.is_cpu()) return;
  const at::Tensor nothing = at::empty({0}, at::TensorOptions(at::kFloat).device(device));
  nothing.set_requires_grad(true);
  nothing.neg().backward(at::empty_like(nothing));
}

int64_t storage_bytes(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.has_storage() || tensor.device() != device) return 0;
  return static_cast<int64_t>(tensor.storage().nbytes());
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// A gradient has the shape of its tensor and a storage of its own.
int64_t gradient_bytes(const at::Tensor& tensor, c10::Device device) {
  const bool has_gradient = tensor.requires_grad() && tensor.device() == device;
  return has_gradient ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

/// The node stands for the stage before: its gradient arrives there and dies, as it would in that. A leaf
/// would keep it, or copy it first.
at::Tensor input_from(const at::Tensor& value, bool requires_grad) {
  at::Tensor input = value.detach();
  if (requires_grad)
    torch::autograd::create_gradient_edge(input,
                                          seam::make_node<seam::EndNode>("remat::StageBefore"));
  return input;
}

/// A backward of ones through a stage, as in a chain: the stage behind hands over its gradient and keeps nothing. That
/// of the last one is the caller's, who holds it to the end.
class BackwardOfStage {
 public:
  /// What it begins with; made before bytes are counted.
  struct Start {
    at::Tensor root = at::zeros({}), gradient = at::ones({});
  };
  BackwardOfStage(const at::Tensor& output, const Start& start, bool is_last) : start_(start) {
    at::Tensor gradient = at::ones_like(output);
    if (is_last) callers_ = gradient;
    auto behind = seam::make_node<StageBehind>(std::move(gradient));
    behind->add_next_edge(torch::autograd::impl::gradient_edge(output));
    at::Tensor root = start.root;
    torch::autograd::create_gradient_edge(root, std::move(behind));
  }
  void run() const { start_.root.backward(start_.gradient); }

 private:
  class StageBehind final : public torch::autograd::Node {
   public:
    explicit StageBehind(at::Tensor gradient) : gradient_(std::move(gradient)) {}
    torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
      torch::autograd::variable_list gradients;
      gradients.push_back(std::move(gradient_));
      return gradients;
    }
    std::string name() const override { return "remat::StageBehind"; }

   private:
    at::Tensor gradient_;
  };
  const Start& start_;
  at::Tensor callers_;
};

/// Gives the leaves below a result gradients of zeros, and their own ones back at its end.
class GradientScope {
 public:
  explicit GradientScope(const at::Tensor& result) {
    seam::visit_nodes({{result.grad_fn(), 0}}, [this](const seam::NodePtr& node) {
      if (auto* const leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node.get())) {
        before_.emplace_back(leaf->variable, leaf->variable.grad());
        leaf->variable.mutable_grad() = at::zeros_like(leaf->variable);
      }
    });
  }
  ~GradientScope() {
    for (auto& [leaf, gradient] : before_) leaf.mutable_grad() = gradient;
  }
  GradientScope& operator=(GradientScope&&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

/// What autograd saved while a stage ran.
struct Saves {
  explicit Saves(const Measured& measured) : measured(measured) {}

  struct Storage {
    const c10::StorageImpl* identity;
    c10::weak_intrusive_ptr<c10::StorageImpl> alive;
    int64_t bytes;
  };
  const Measured& measured;
  std::vector<Storage> storages;  // each once
  std::unordered_set<const c10::StorageImpl*> seen;
  StageClock::Moment last;
  bool is_empty = true;

  void note(const at::Tensor& tensor) {
    is_empty = false;
    if (const auto* const identity = storage_of(tensor);
        identity != nullptr && seen.insert(identity).second)
      storages.push_back({identity, tensor.storage().getWeakStorageImpl(),
                          storage_bytes(tensor, measured.device)});
    last = measured.clock.now();
  }
  /// [bytes] of what died with the graph; without these two.
  int64_t dead_bytes(const c10::StorageImpl* input, const c10::StorageImpl* output) const {
    int64_t bytes = 0;
    for (const Storage& storage : storages)
      if (storage.alive.expired() && storage.identity != input && storage.identity != output)
        bytes += storage.bytes;
    return bytes;
  }
};

/// A stage and its input.
class Trial {
 public:
  Trial(const Stage& stage, at::Tensor input, std::size_t number, Measured& measured)
      : stage_(stage), input_(std::move(input)), number_(number), measured_(measured) {}

  StageCost cost(const MeasureOptions& options, bool is_last) {
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
      // No region of a plan that `solve` makes has the last stage: it need not be one that can run again.
      if (!is_last) throw;
    }
    measure_seconds(cost, options.repeats);
    if (!is_last && first.requires_grad()) {
      measure_policies(cost, options);
      if (measured_.place != nullptr) measure_moves(cost, options);
    }
    return cost;
  }
  /// Whether the input goes away when the stage moves what it saves.
  bool moves_input() const { return moves_input_; }
  /// Whether backward reads anything that was saved.
  bool reads() const { return reads_; }
  /// What the next stage is fed with.
  at::Tensor output() const { return input_from(output_, requires_grad_); }

 private:
  // Note [Casts in the cache]
  // Autocast caches casts of leaves, the chain's input among them, and empties its cache when its outermost scope ends.
  // Where that is around the program, casts outlive their stages: they are counted once for all plans
  // (ChainCost::cached_cast_bytes), and taken off what a stage holds. A step begins without any, and so does each run
  // here: a cast from before would be an older node, and backward comes to those later.
  void count_cached_casts() {
    cached_bytes_ = bytes_of_casts_behind(input_);
    at::Tensor chain_input = input_;
    if (number_ == 1 && input_.requires_grad()) {
      chain_input = input_.detach();
      chain_input.set_requires_grad(true);
    }
    measured_.cached_cast_bytes +=
        chain_input.is_same(input_) ? cached_bytes_ : bytes_of_casts_behind(chain_input);
  }
  int64_t bytes_of_casts_behind(const at::Tensor& input) const {
    at::autocast::clear_cache();
    stage_(input);
    wait_for_engine(measured_.device);
    const MemoryMeter meter(measured_.device);
    const int64_t with_casts = meter.live_bytes();
    at::autocast::clear_cache();
    return with_casts - meter.live_bytes();
  }
  // A plan that begins a region with such a stage would end in an error of its backward.
  void refuse_writing() const {
    if (!input_.has_storage() || input_.is_inference()) return;
    const at::Tensor input = input_from(input_.clone(), input_.requires_grad());
    const int64_t version = input._version();
    stage_(input);
    TORCH_CHECK_VALUE(input._version() == version, "remat::measure: stage ", number_,
                      " writes to its input in place.\nCause: a region that begins with it could "
                      "not be computed again, since its input is another one by then.\nDo: make it "
                      "one stage with the one before it, or let it return a new tensor (inplace = "
                      "false).");
  }

  at::Tensor forward() const { return forward(input_); }
  at::Tensor forward(at::Tensor input) const {
    at::Tensor output = stage_(std::move(input));
    TORCH_CHECK_VALUE(output.defined(), "remat::measure: stage ", number_,
                      " returned an undefined tensor.");
    return output;
  }

  std::pair<at::Tensor, std::shared_ptr<Saves>> forward_noting() {
    auto saves = std::make_shared<Saves>(measured_);
    const SavedTensorHooksGuard noting(
        [saves](const at::Tensor& tensor) {
          saves->note(tensor);
          return tensor;
        },
        [](const at::Tensor& tensor) { return tensor; });
    at::Tensor output = forward();
    output_ = output.detach();
    requires_grad_ = output.requires_grad();
    return {std::move(output), std::move(saves)};
  }

  void backward(const at::Tensor& output) const {
    if (output.requires_grad()) output.backward(at::ones_like(output));
  }

  /// What was before has ended, and left no casts.
  void begin_run() const {
    at::autocast::clear_cache();
    wait_for_engine(measured_.device);
  }

  // Note [Inputs as in a chain]
  // What a stage or region is given in a chain is held by nobody else, as a rule, and dies when those who have saved it let go of
  // it. So it is measured beside a stage whose input lives on, with an input of the same memory, on which it has the only hold.
  std::optional<at::Tensor> lone_input() const {
    const bool is_plain = input_.has_storage() && input_.layout() == at::kStrided &&
                          !input_.is_quantized() &&
                          !input_.unsafeGetTensorImpl()->is_python_dispatch();
    if (!is_plain || input_.device() != measured_.device) return std::nullopt;
    const at::NoGradGuard no_grad;
    const auto elements =
        static_cast<int64_t>(input_.storage().nbytes() / input_.dtype().itemsize());
    const at::Tensor all = input_.as_strided({elements}, {1}, 0).clone();
    return input_from(all.as_strided(input_.sizes(), input_.strides(), input_.storage_offset()),
                      input_.requires_grad());
  }

  void measure_bytes(StageCost& cost) {
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
    cost.saves_output = saves->seen.contains(storage_of(output));
    const c10::StorageImpl* const identity = storage_of(output);
    if (output.requires_grad()) {
      const BackwardOfStage backward(output, start, is_last_);
      if (!is_last_) output = output_ = at::Tensor();
      meter.reset_peak();
      backward.run();
      cost.backward_bytes = meter.peak_bytes() - before - cached_bytes_;
      add_rounding(told_before);
    }
    output = at::Tensor();
    wait_for_engine(device);
    cost.saved_bytes = saves->dead_bytes(storage_of(input_), identity);
    cost.forward_tmp_bytes =
        std::max<int64_t>(0, forward_peak - cost.saved_bytes - cost.output_bytes - cached_bytes_);
    const bool has_output = cost.saves_output || is_last_;
    cost.backward_tmp_bytes = std::max<int64_t>(
        0, cost.backward_bytes - cost.saved_bytes - (has_output ? cost.output_bytes : 0) -
               cost.grad_bytes - gradient_bytes(input_, device));
  }

  // See Note [Inputs as in a chain].
  void measure_lone_bytes(StageCost& cost) const {
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
    cost.lone_backward_bytes = meter.peak_bytes() - before - cached_bytes_;
  }

  seam::DeviceBytes told() const {
    return measured_.device.is_cpu() ? seam::DeviceBytes() : seam::device_bytes(measured_.device);
  }
  void add_rounding(const seam::DeviceBytes& before) {
    const seam::DeviceBytes now = told();
    measured_.requested_bytes += now.peak - before.live;
    measured_.rounded_bytes += now.rounded_peak - before.rounded_live;
  }

  // As in the first run of a region: what is saved dies as soon as nothing else needs it.
  void measure_bytes_without_saves(StageCost& cost) {
    output_ = at::Tensor();
    struct Dropped {};
    const SavedTensorHooksGuard dropping(
        [](const at::Tensor&) { return Dropped{}; },
        [](const Dropped&) -> at::Tensor {
          TORCH_CHECK_VALUE(false,
                            "remat::measure: a stage ran a backward of its own, which the "
                            "planner cannot price.");
        });
    begin_run();
    const MemoryMeter meter(measured_.device);
    const int64_t before = meter.live_bytes();
    output_ = forward().detach();
    cost.unsaved_tmp_bytes =
        std::max<int64_t>(0, meter.peak_bytes() - before - cost.output_bytes - cached_bytes_);
  }

  // A stop comes where regions may end, and what backward has made before it reads depends on the first
  // operators of it alone; so a region shows both.
  void measure_recompute(StageCost& cost, const MeasureOptions& options) {
    if (!requires_grad_) return;
    output_ = at::Tensor();
    const c10::Device device = measured_.device;
    const BackwardOfStage::Start start;
    begin_run();
    MemoryMeter meter(device);
    int64_t live = -1, peak = 0;  // when a recompute began, and of it
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
    cost.first_read_tmp_bytes = std::max<int64_t>(0, live - held);
    cost.stopped_tmp_bytes = std::max<int64_t>(
        0, peak - live - cost.saved_bytes - (cost.saves_output ? cost.output_bytes : 0));
    if (is_lone) cost.region_backward_bytes = meter.peak_bytes() - before - cached_bytes_;
  }

  void measure_seconds(StageCost& cost, int64_t repeats) {
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
      cost.backward_s =
          std::min(cost.backward_s, clock.seconds_between(backward_start, clock.now()));
    }
    cost.forward_to_last_save_s = std::min(cost.forward_to_last_save_s, cost.forward_s);
  }

  at::Tensor forward_under(const Policy& policy, const MeasureOptions& options) const {
    return forward_under(policy, options, input_);
  }
  at::Tensor forward_under(const Policy& policy, const MeasureOptions& options,
                           at::Tensor input) const {
    return forward_in({.early_stop = options.early_stop, .policy = policy, .location = {}},
                      std::move(input));
  }
  at::Tensor forward_in(const CheckpointOptions& region, at::Tensor input) const {
    if (measured_.run_region != nullptr)
      return (*measured_.run_region)(number_ - 1, region, std::move(input));
    return checkpoint(region, stage_, std::move(input));
  }

  // Note [Regions as measured]
  // What a region with a policy costs is measured as a whole, beside the stage without a region: what it
  // holds between forward and backward, and the peak of all that follows. How a replay hands out
  // what was kept, what else a recompute makes meanwhile and when that dies cannot be added up from parts.
  void measure_policies(StageCost& cost, const MeasureOptions& options) {
    output_ = at::Tensor();
    std::vector<KeepingCost> all;
    std::vector<double> seconds(options.policies.size(), std::numeric_limits<double>::infinity());
    for (std::size_t i = 0; i < options.policies.size(); ++i) {
      backward(forward_under(options.policies[i], options));
      all.push_back(keeping_bytes(options.policies[i], options, cost));
      all.back().policy = static_cast<int64_t>(i) + 1;
    }
    // In turns, as the difference counts.
    const StageClock& clock = measured_.clock;
    const auto seconds_of = [&](const auto& run_forward) {
      const auto start = clock.now();
      backward(run_forward());
      return clock.seconds_between(start, clock.now());
    };
    double plain_s = std::numeric_limits<double>::infinity();
    for (int64_t repeat = 0; repeat < (all.empty() ? 0 : options.repeats); ++repeat) {
      plain_s = std::min(plain_s, seconds_of([&] { return forward(); }));
      for (std::size_t i = 0; i < all.size(); ++i)
        seconds[i] = std::min(
            seconds[i], seconds_of([&] { return forward_under(options.policies[i], options); }));
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      // No region is free, and a difference of less is noise, which a search for the fastest plan would find.
      constexpr double least_share = 0.01;
      all[i].extra_s = std::max(least_share * plain_s, seconds[i] - plain_s);
      const bool is_useful = all[i].kept_bytes > 0 && all[i].kept_bytes < cost.saved_bytes;
      if (is_useful) cost.keeping.push_back(all[i]);
    }
    output_ = forward().detach();
  }

  KeepingCost keeping_bytes(const Policy& policy, const MeasureOptions& options,
                            const StageCost& cost) const {
    KeepingCost keeping;
    keeping.backward_bytes = std::max(
        keeping.kept_bytes, run_keeping(policy, options, cost, input_, keeping) - cost.grad_bytes);
    // See Note [Inputs as in a chain].
    if (std::optional<at::Tensor> lone = lone_input()) {
      const int64_t bytes = storage_bytes(*lone, measured_.device);
      keeping.lone_backward_bytes =
          std::max(keeping.kept_bytes,
                   bytes + run_keeping(policy, options, cost, *std::exchange(lone, {}), keeping) -
                       cost.grad_bytes);
    }
    keeping.movable_bytes =
        std::clamp<int64_t>(movable_kept(policy, options), 0, keeping.kept_bytes);
    return keeping;
  }

  /// The peak of its backward, beyond what was there before.
  int64_t run_keeping(const Policy& policy, const MeasureOptions& options, const StageCost& cost,
                      at::Tensor input, KeepingCost& keeping) const {
    const BackwardOfStage::Start start;
    begin_run();
    MemoryMeter meter(measured_.device);
    const int64_t before = meter.live_bytes() + cached_bytes_;
    at::Tensor output = forward_under(policy, options, std::move(input));
    keeping.kept_bytes = std::max<int64_t>(0, meter.live_bytes() - before - cost.output_bytes);
    keeping.forward_tmp_bytes =
        std::max<int64_t>(0, meter.peak_bytes() - before - cost.output_bytes - keeping.kept_bytes);
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
    if (output.has_storage()) storage = output.storage().getWeakStorageImpl();
    const BackwardOfStage backward(output, start, /*is_last=*/false);
    output = at::Tensor();
    keeping.keeps_output = storage && !storage->expired();
    meter.reset_peak();
    backward.run();
    return meter.peak_bytes() - before;
  }

  /// Of what a region keeps, what goes away when it moves: Note [Moving kept results of a plan] in run.cpp.
  int64_t movable_kept(const Policy& policy, const MeasureOptions& options) const {
    // A binding's regions send nothing through hooks on their own.
    if (measured_.place == nullptr || measured_.run_region != nullptr) return 0;
    const auto rule = PolicyRule::through_hooks(PolicyRule::of(policy));
    if (rule == nullptr) return 0;
    const auto held_by = [&](const Policy& under, const std::shared_ptr<Depot>& depot) {
      begin_run();
      const MemoryMeter meter(measured_.device);
      const int64_t before = meter.live_bytes();
      at::Tensor output;
      {
        std::optional<DepotGuard> guard;
        if (depot != nullptr) guard.emplace(depot, /*takes_kept_only=*/true);
        output = forward_under(under, options);
      }
      if (depot != nullptr) depot->finish_stores();
      return meter.live_bytes() - before;
    };
    return held_by(policy, nullptr) -
           held_by(PolicyRule::policy(rule),
                   depot_of_moves(measured_.place, options.moving->min_bytes, {}));
  }

  /// What is held for backward when nobody else holds the input, and whether that is.
  std::pair<int64_t, bool> held_after_forward(const std::shared_ptr<Depot>& depot) const {
    const c10::Device device = measured_.device;
    begin_run();
    const MemoryMeter meter(device);
    const int64_t before = meter.live_bytes();
    at::Tensor input = input_from(input_.clone(), input_.requires_grad());
    const auto storage = input.storage().getWeakStorageImpl();
    at::Tensor output;
    {
      std::optional<DepotGuard> guard;
      if (depot != nullptr) guard.emplace(depot);
      output = stage_(std::move(input));
    }
    if (depot != nullptr) depot->finish_stores();
    return {meter.live_bytes() - before, !storage.expired()};
  }

  void measure_moves(StageCost& cost, const MeasureOptions& options) {
    const auto depot = depot_of_moves(measured_.place, options.moving->min_bytes, {});
    cost.has_movable_output = requires_grad_ && depot->moves(output());
    if (!input_.has_storage()) return;
    const auto [bytes, has_input] = held_after_forward(nullptr);
    const auto [bytes_left, has_input_left] = held_after_forward(depot);
    moves_input_ = !has_input || !has_input_left;
    const int64_t of_input =
        has_input && !has_input_left ? storage_bytes(input_, measured_.device) : 0;
    cost.movable_bytes = std::clamp<int64_t>(bytes - bytes_left - of_input, 0, cost.saved_bytes);
  }

 public:
  /// The share of copies by which this stage takes longer beside those of its own saves. Note [Times of moves].
  double held_up_share(const StageCost& cost, const MoveCost& copies,
                       const MeasureOptions& options) {
    const auto bytes = static_cast<double>(cost.movable_bytes);
    const double store_s = copies.store_s_per_byte * bytes, load_s = copies.load_s_per_byte * bytes;
    if (!(store_s + load_s > 0)) return 1;
    double staying_s = std::numeric_limits<double>::infinity(), moving_s = staying_s;
    constexpr int64_t times_repeats = 3;  // it is one stage for all, and a small difference
    for (int64_t i = 0; i < times_repeats * options.repeats; ++i) {
      staying_s = std::min(staying_s, seconds_of_two(nullptr));
      const auto depot = depot_of_moves(measured_.place, options.moving->min_bytes, {});
      moving_s = std::min(moving_s, seconds_of_two(depot));
    }
    const double waiting_s =
        std::max(0.0, store_s - cost.forward_s) + std::max(0.0, load_s - cost.backward_s);
    constexpr double least_share =
        0.1;  // no move is free: less is noise, which a search would find
    return std::max(least_share, (moving_s - staying_s - waiting_s) / (store_s + load_s));
  }

 private:
  // Note [Times of moves]
  // Copies are timed alone, of as many bytes as the stage that saves most can move. What runs beside them
  // is slower: it prepares them, and shares memory and cores. How much is the difference that moving makes to a
  // stage that is run twice, so that the copies of the first run are beside the second, in forward and backward,
  // less what is waited for.
  double seconds_of_two(const std::shared_ptr<Depot>& depot) const {
    const StageClock& clock = measured_.clock;
    const auto start = clock.now();
    at::Tensor first;
    {
      std::optional<DepotGuard> guard;
      if (depot != nullptr) guard.emplace(depot);
      first = forward();
    }
    at::Tensor second = forward();
    if (depot != nullptr) {
      depot->finish_stores();
      second.register_hook([depot](const at::Tensor&) { depot->begin_loads(); });
    }
    backward(second);
    second.reset();
    backward(first);
    return clock.seconds_between(start, clock.now());
  }

  const Stage& stage_;
  const at::Tensor input_;
  const std::size_t number_;
  Measured& measured_;
  at::Tensor output_;
  int64_t cached_bytes_ = 0;  // see Note [Casts in the cache]
  bool is_last_ = false, requires_grad_ = false, moves_input_ = true, reads_ = true;
};

/// A stage that reads nothing leaves the recompute of its region to the stage before it, beside what backward has made
/// by then.
void recompute_before(const StageCost& before, StageCost& stage) {
  stage.first_read_tmp_bytes =
      std::max<int64_t>(0, before.grad_bytes + before.first_read_tmp_bytes - stage.grad_bytes);
}

ChainCost measure_all(const std::vector<Stage>& stages, const at::Tensor& sample,
                      const MeasureOptions& options, const StageRegion* run_region) {
  TORCH_CHECK_VALUE(!stages.empty(), "remat::measure: no stages were passed.");
  TORCH_CHECK_VALUE(sample.defined(), "remat::measure: the sample is an undefined tensor.");
  TORCH_CHECK_VALUE(options.warmup >= 0,
                    "remat::measure: MeasureOptions::warmup must be at least 0, got ",
                    options.warmup, ".");
  TORCH_CHECK_VALUE(options.repeats >= 1,
                    "remat::measure: MeasureOptions::repeats must be at least 1, got ",
                    options.repeats, ".");
  const GeneratorScope generator;
  const at::AutoGradMode grad_mode(true);
  const c10::Device device = MemoryMeter(options.device.value_or(sample.device())).device();
  const DeviceGeneratorScope device_generator(device);
  Measured measured{.device = device, .run_region = run_region};
  if (options.moving) measured.place = place_of(*options.moving, device, "remat::measure");
  at::Tensor input = input_from(sample, sample.requires_grad());
  ChainCost cost{.input_bytes = storage_bytes(input, device),
                 .input_grad_bytes = gradient_bytes(input, device)};
  std::unique_ptr<Trial> mover;  // of what moves most
  StageCost most_moved;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    TORCH_CHECK_VALUE(stages[i], "remat::measure: the function of stage ", i + 1, " is empty.");
    auto trial = std::make_unique<Trial>(stages[i], std::move(input), i + 1, measured);
    cost.stages.push_back(trial->cost(options, i + 1 == stages.size()));
    if (!trial->moves_input() && i > 0) cost.stages[i - 1].has_movable_output = false;
    if (!trial->reads() && i > 0) recompute_before(cost.stages[i - 1], cost.stages[i]);
    input = trial->output();
    if (cost.stages[i].movable_bytes <= most_moved.movable_bytes) continue;
    most_moved = cost.stages[i];
    mover = std::move(trial);
  }
  at::autocast::clear_cache();
  cost.rounding = measured.rounding();
  cost.cached_cast_bytes = measured.cached_cast_bytes;
  cost.held_to_end_bytes = cost.stages.back().output_bytes + cost.stages.back().grad_bytes;
  const bool has_movable_output =
      std::any_of(cost.stages.begin(), cost.stages.end(),
                  [](const StageCost& each) { return each.has_movable_output; });
  if (mover == nullptr && !has_movable_output) return cost;
  constexpr int64_t least_bytes = 1 << 20;
  cost.moving = measure_copies(*measured.place, device,
                               std::max(least_bytes, most_moved.movable_bytes), options.repeats);
  cost.moving->held_up_share =
      mover == nullptr ? 1 : mover->held_up_share(most_moved, *cost.moving, options);
  return cost;
}

}  // namespace

ChainCost measure(const std::vector<Stage>& stages, const at::Tensor& sample,
                  const MeasureOptions& options) {
  return measure_all(stages, sample, options, nullptr);
}

ChainCost measure_stages(const std::vector<Stage>& stages, const at::Tensor& sample,
                         const MeasureOptions& options, const StageRegion& run_region) {
  return measure_all(stages, sample, options, &run_region);
}

int64_t measure_peak(const Stage& chain, const at::Tensor& sample, const MeasureOptions& options) {
  const GeneratorScope generator;
  const at::AutoGradMode grad_mode(true);
  MemoryMeter meter(options.device.value_or(sample.device()));
  const c10::Device device = meter.device();
  const DeviceGeneratorScope device_generator(device);
  const at::Tensor input = input_from(sample, sample.requires_grad());
  at::autocast::clear_cache();  // the step makes its own casts
  wait_for_engine(device);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  at::Tensor output = chain(input);
  const int64_t forward_peak = meter.peak_bytes() - before;
  if (!output.requires_grad()) return forward_peak;
  const int64_t live = meter.live_bytes();
  const GradientScope gradients(output);
  const int64_t gradients_bytes = meter.live_bytes() - live;
  meter.reset_peak();
  output.backward(at::ones_like(output));
  return std::max(forward_peak, meter.peak_bytes() - before - gradients_bytes);
}

}  // namespace remat
