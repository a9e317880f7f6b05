// Data parallel training of checkpointed blocks, with LibTorch's own reducer of gradients.
//
// Several processes train one model, each on its part of the batch. c10d::Reducer, the engine of
// Python's DistributedDataParallel, averages the gradients over Gloo while backward runs. Each
// block of the model is a region. The model is made difficult for the reducer: blocks share their
// parameters, one layer is used in some processes only, and one is never used.
//
// A reducer must see each gradient complete exactly once per step. It does, because a recompute
// accumulates nothing: the graph, the leaves in it and their accumulators are the forward's.
//
// Each process trains the model a second time, without regions, and compares the gradients. In the
// end one process trains it on whole batches. The program prints the losses of all, how often
// gradients were ready, and bytes.
//
// Exit status: 0 if all comparisons hold, 1 if not, 2 if it could not run.

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "processes/accumulation.h"
#include "processes/group.h"
#include "processes/program.h"
#include "remat/remat.h"
#include "target.h"

namespace {

constexpr int64_t width = 128, rows_per_process = 128, layers = 8, steps = 4;

// A block. Marked rows also go through the adapter, a layer that all blocks share.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(torch::nn::Linear shared) : adapter(shared) {  // its maker registers it
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  // (B, width), (B) -> (B, width)
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& marked) {
    const torch::Tensor y = x + down(torch::gelu(up(norm(x))));
    const torch::Tensor rows = marked.nonzero().squeeze(1);
    if (rows.numel() == 0) return y;
    const torch::Tensor more = adapter(y.index_select(0, rows)).tanh();
    return y.index_add(0, rows, more.to(y.scalar_type()));
  }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr}, adapter;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const torch::TensorOptions& options) {
    adapter = register_module("adapter", torch::nn::Linear(width, width));
    spare = register_module("spare", torch::nn::Linear(width, width));  // never used
    for (int64_t i = 0; i < layers / 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(adapter)));
    to(options.device(), torch::typeMetaToScalarType(options.dtype()));
  }

  // Runs every block twice, so that its parameters belong to two regions.
  torch::Tensor forward(torch::Tensor x, const torch::Tensor& marked) {
    for (int64_t i = 0; i < layers; ++i)
      x = remat::checkpoint({.name = "layer " + std::to_string(i)}, blocks[i / 2], x, marked);
    return x;
  }

  torch::nn::Linear adapter{nullptr}, spare{nullptr};
  std::vector<Block> blocks;
};
TORCH_MODULE(Model);

struct Batch {
  torch::Tensor input, marked, target;

  // Returns the whole batch of a step, the same in every process. The second half is marked.
  static Batch of_step(int64_t step, int64_t rows) {
    torch::manual_seed(100 + step);
    const torch::Tensor input = torch::randn({rows, width}, torch::kFloat64);
    const torch::Tensor marked = torch::arange(rows).ge(rows / 2);
    const torch::Tensor target = (input + input.roll(1, 1)).sin() + marked.unsqueeze(1);
    return {input, marked, target};
  }

  Batch part(const Place& place) const {
    const int64_t first = place.rank * rows_per_process;
    const auto rows = [&](const torch::Tensor& all) {
      return all.narrow(0, first, rows_per_process).clone();
    };
    return {rows(input), rows(marked), rows(target)};
  }
  Batch on(const Target& place) const {
    return {input.to(place.options()), marked.to(place.device), target.to(place.options())};
  }
};

// Makes the engine of DistributedDataParallel, with the same settings.
std::unique_ptr<c10d::Reducer> make_reducer(const std::vector<torch::Tensor>& parameters,
                                            const Group& group) {
  c10d::verify_params_across_processes(group.process_group, parameters, {});
  constexpr int64_t bucket_bytes = 1 << 20, first_bucket_bytes = 1 << 18;
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      parameters, {first_bucket_bytes, bucket_bytes}, std::vector<bool>(parameters.size(), false)));
  std::reverse(buckets.begin(), buckets.end());  // backward reaches the last parameters first
  // Later versions of LibTorch added the later arguments.
  const auto make = [&](auto... later) -> std::unique_ptr<c10d::Reducer> {
    using Names = std::unordered_map<size_t, std::string>;
    using Buckets = std::vector<std::vector<size_t>>;
    if constexpr (std::is_constructible_v<c10d::Reducer, std::vector<torch::Tensor>, Buckets,
                                          c10::intrusive_ptr<c10d::ProcessGroup>, std::vector<bool>,
                                          int64_t, bool, bool, Names, int64_t, decltype(later)...>)
      return std::make_unique<c10d::Reducer>(
          parameters, buckets, group.process_group, std::vector<bool>(parameters.size(), false),
          bucket_bytes, /*find_unused_parameters=*/true, /*gradient_as_bucket_view=*/false, Names(),
          first_bucket_bytes, later...);
    else
      return nullptr;
  };
  auto reducer = make(/*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
                      /*bucket_bytes_cap_list=*/std::vector<int64_t>());
  if (reducer == nullptr) reducer = make();
  TORCH_CHECK(reducer != nullptr, "this LibTorch makes its Reducer in another way");
  return reducer;
}

// One model in training in one process; with a group, together with the other processes of the
// group.
class Training {
 public:
  Training(bool has_regions, const Target& target, const Group* group)
      : target_(target), meter_(target.device), has_regions_(has_regions) {
    torch::manual_seed(1);
    model_ = Model(target.options());
    parameters_ = model_->parameters();
    optimizer_.emplace(parameters_, torch::optim::AdamOptions(1e-3));
    if (group == nullptr) return;
    reducer_ = make_reducer(parameters_, *group);
    for (size_t i = 0; i < parameters_.size(); ++i)
      counters_.emplace_back(parameters_[i], [this, i] { ++num_ready_[i]; });
  }
  Training& operator=(Training&&) = delete;  // the counters refer to it

  // Runs forward, backward and the optimizer's step. Returns the loss.
  double train(const Batch& batch) {
    optimizer_->zero_grad(/*set_to_none=*/false);  // gradients are not among the bytes below
    num_ready_.assign(parameters_.size(), 0);
    const int64_t before = meter_.live_bytes();
    meter_.reset_peak();
    if (reducer_) {
      reducer_->prepare_for_forward();
      if (reducer_->should_rebuild_buckets()) reducer_->rebuild_buckets();
    }
    const torch::Tensor loss = [&] {
      std::optional<remat::DisableCheckpointGuard> plainly;
      if (!has_regions_) plainly.emplace();
      const Autocast autocast(target_);
      return torch::mse_loss(model_(batch.input, batch.marked), batch.target);
    }();
    if (reducer_) reducer_->prepare_for_backward({loss});
    loss.backward();
    peak_bytes_ = meter_.peak_bytes() - before;
    optimizer_->step();
    return loss.item<double>();
  }

  // Returns the difference of the last step's gradients from another training's.
  double difference_from(const Training& other) const {
    double difference = 0;
    for (size_t i = 0; i < parameters_.size(); ++i)
      difference =
          std::max(difference, difference_of(other.parameters_[i].grad(), parameters_[i].grad()));
    return difference;
  }
  // Returns the number of parameters whose gradient was accumulated `times` times.
  int64_t num_ready(int64_t times) const {
    return std::count(num_ready_.begin(), num_ready_.end(), times);
  }
  int64_t num_without_gradient() const {
    return std::count_if(parameters_.begin(), parameters_.end(),
                         [](const torch::Tensor& each) { return !each.grad().defined(); });
  }
  int64_t num_parameters() const { return static_cast<int64_t>(parameters_.size()); }
  // Returns the peak [bytes] of forward and backward, beyond the bytes alive before the step.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  Target target_;
  remat::MemoryMeter meter_;
  bool has_regions_;
  Model model_{nullptr};
  std::vector<torch::Tensor> parameters_;
  std::optional<torch::optim::Adam> optimizer_;
  std::unique_ptr<c10d::Reducer> reducer_;
  std::deque<Accumulation> counters_;
  std::vector<int64_t> num_ready_;
  int64_t peak_bytes_ = 0;
};

// A worker's results, besides its losses.
enum Fact { Difference, ReadyOnce, ReadyNever, WithoutGradient, Peak, PlainPeak };

void work(const Place& place, const Store& store) {
  const Group group = join_group(store, place);
  Training training(true, place.target, &group), plain(false, place.target, &group);
  std::vector<double> losses;
  double difference = 0;  // of the gradients, and of the losses
  int64_t ready_once = training.num_parameters(), ready_never = ready_once, without_gradient = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const Batch batch =
        Batch::of_step(step, place.size * rows_per_process).part(place).on(place.target);
    losses.push_back(training.train(batch));
    const double plain_loss = plain.train(batch);
    difference = std::max({difference, std::abs(losses.back() - plain_loss) / plain_loss,
                           training.difference_from(plain)});
    ready_once = std::min(ready_once, training.num_ready(1));
    ready_never = std::min(ready_never, training.num_ready(0));
    without_gradient = std::max(without_gradient, training.num_without_gradient());
  }
  std::vector<double> facts(PlainPeak + 1);
  facts[Difference] = difference;
  facts[ReadyOnce] = static_cast<double>(ready_once);
  facts[ReadyNever] = static_cast<double>(ready_never);
  facts[WithoutGradient] = static_cast<double>(without_gradient);
  facts[Peak] = static_cast<double>(training.peak_bytes());
  facts[PlainPeak] = static_cast<double>(plain.peak_bytes());
  tell(store, "losses of " + std::to_string(place.rank), losses);
  tell(store, "facts of " + std::to_string(place.rank), facts);
  group.backend->barrier()->wait();  // no process leaves while another still needs it
}

bool judge(const Place& place, const Store& store) {
  const Target& target = place.target;
  Training alone(false, target, nullptr);
  const int64_t num_parameters = alone.num_parameters();
  if (!target.device.is_cpu() || target.dtype != torch::kDouble)
    std::printf("On %s.\n", target.name().c_str());
  std::printf(
      "%d processes, a batch of %lld rows each; %lld layers, which share %lld parameters in "
      "pairs.\n"
      "\n",
      place.size, static_cast<long long>(rows_per_process), static_cast<long long>(layers),
      static_cast<long long>(num_parameters));
  std::vector<double> mean(steps, 0);
  for (int rank = 0; rank < place.size; ++rank) {
    const std::vector<double> losses = told(store, "losses of " + std::to_string(rank));
    for (int64_t step = 0; step < steps; ++step) mean[step] += losses[step] / place.size;
  }
  std::printf("step   loss, %d processes   loss, one process\n", place.size);
  double difference = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const double loss = alone.train(Batch::of_step(step, place.size * rows_per_process).on(target));
    std::printf("%4lld %19.10f %19.10f\n", static_cast<long long>(step + 1), mean[step], loss);
    difference = std::max(difference, std::abs(mean[step] - loss) / loss);
  }

  std::printf(
      "\nIn every step:\n\nprocess  gradients ready once  never  more  without gradient"
      "  peak bytes  without regions\n");
  bool are_ready_once = true, saves = true;
  double furthest = 0;
  int64_t without_gradient = 0;
  for (int rank = 0; rank < place.size; ++rank) {
    const std::vector<double> facts = told(store, "facts of " + std::to_string(rank));
    std::printf("%7d %21.0f %6.0f %5.0f %17.0f %11.0f %16.0f\n", rank, facts[ReadyOnce],
                facts[ReadyNever], num_parameters - facts[ReadyOnce] - facts[ReadyNever],
                facts[WithoutGradient], facts[Peak], facts[PlainPeak]);
    furthest = std::max(furthest, facts[Difference]);
    are_ready_once = are_ready_once && facts[ReadyOnce] + facts[ReadyNever] == num_parameters;
    saves = saves && facts[Peak] < facts[PlainPeak] / 2;
    without_gradient += static_cast<int64_t>(facts[WithoutGradient]);
  }
  std::printf("\nlargest relative difference of a loss: %.2g\n", difference);
  const bool holds[] = {
      say(to_rounding("losses are those of one process", target), difference <= rounding(target)),
      say(as_without_regions("gradients", furthest, target), is_promised(furthest, target)),
      say("no gradient was ready more than once", are_ready_once),
      say("only the layer that nobody uses has no gradient", without_gradient == 2 * place.size),
      say("less than half of the bytes", saves)};
  return std::all_of(std::begin(holds), std::end(holds), [](bool each) { return each; });
}

}  // namespace

int main(int argc, char** argv) { return run({"data_parallel", work, judge}, argc, argv); }
