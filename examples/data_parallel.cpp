// Data parallel training of checkpointed blocks, with LibTorch's own reducer of gradients.
//
// Several processes train one model, each on its part of the batch. c10d::Reducer, the engine of
// Python's DistributedDataParallel, averages the gradients over Gloo while backward runs. Each block
// of the model is a region. The model is made to be difficult for the reducer: blocks share their
// parameters, a layer is used by some processes only, and one by none.
//
// A reducer must see each gradient complete exactly once per step. It does, because a recompute
// accumulates nothing: the graph, the leaves in it and their accumulators are the forward's.
//
// Each process trains the model a second time, without regions, and compares the gradients. In the end
// one process trains it on whole batches. Prints the losses of all, how often gradients were ready,
// and bytes.
//
// Exit status: 0 if all of that is as it should be, 1 if not, 2 if it could not run.

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

namespace {

constexpr int64_t width = 128, rows_per_process = 128, layers = 8, steps = 4;
constexpr double promised_difference = 1e-12;  // of a loss, relative: rounding and nothing else

// Some rows are marked; those go through the adapter as well, a layer that all blocks share.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(torch::nn::Linear shared) : adapter(shared) {  // whoever made it registers it
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  // (B, width), (B) -> (B, width)
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& marked) {
    const torch::Tensor y = x + down(torch::gelu(up(norm(x))));
    const torch::Tensor rows = marked.nonzero().squeeze(1);
    if (rows.numel() == 0) return y;
    return y.index_add(0, rows, adapter(y.index_select(0, rows)).tanh());
  }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr}, adapter;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    adapter = register_module("adapter", torch::nn::Linear(width, width));
    spare = register_module("spare", torch::nn::Linear(width, width));  // never used
    for (int64_t i = 0; i < layers / 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Block(adapter)));
    to(torch::kFloat64);
  }

  // Every block twice: its parameters belong to two regions.
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

  // The whole batch of a step, the same in every process. The second half is marked.
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
};

// The engine of DistributedDataParallel, set up as that does it.
std::unique_ptr<c10d::Reducer> make_reducer(const std::vector<torch::Tensor>& parameters,
                                            const Group& group) {
  c10d::verify_params_across_processes(group.process_group, parameters, {});
  constexpr int64_t bucket_bytes = 1 << 20, first_bucket_bytes = 1 << 18;
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      parameters, {first_bucket_bytes, bucket_bytes}, std::vector<bool>(parameters.size(), false)));
  std::reverse(buckets.begin(), buckets.end());  // backward reaches the last parameters first
  // Later arguments came with later versions of LibTorch.
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

// One model in training, in one process; with a group, together with the others of that.
class Training {
 public:
  Training(bool has_regions, const Group* group) : has_regions_(has_regions) {
    torch::manual_seed(1);
    model_ = Model();
    parameters_ = model_->parameters();
    optimizer_.emplace(parameters_, torch::optim::AdamOptions(1e-3));
    if (group == nullptr) return;
    reducer_ = make_reducer(parameters_, *group);
    for (size_t i = 0; i < parameters_.size(); ++i)
      counters_.emplace_back(parameters_[i], [this, i] { ++num_ready_[i]; });
  }
  Training& operator=(Training&&) = delete;  // the counters refer to it

  // Forward, backward and the optimizer's step; returns the loss.
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
      return torch::mse_loss(model_(batch.input, batch.marked), batch.target);
    }();
    if (reducer_) reducer_->prepare_for_backward({loss});
    loss.backward();
    peak_bytes_ = meter_.peak_bytes() - before;
    optimizer_->step();
    return loss.item<double>();
  }

  // Of the last step.
  bool has_gradients_of(const Training& other) const {
    return std::equal(parameters_.begin(), parameters_.end(), other.parameters_.begin(),
                      [](const torch::Tensor& a, const torch::Tensor& b) {
                        if (!a.grad().defined() || !b.grad().defined())
                          return a.grad().defined() == b.grad().defined();
                        return torch::equal(a.grad(), b.grad());
                      });
  }
  // How many of the parameters had their gradient accumulated so often.
  int64_t num_ready(int64_t times) const {
    return std::count(num_ready_.begin(), num_ready_.end(), times);
  }
  int64_t num_without_gradient() const {
    return std::count_if(parameters_.begin(), parameters_.end(),
                         [](const torch::Tensor& each) { return !each.grad().defined(); });
  }
  int64_t num_parameters() const { return static_cast<int64_t>(parameters_.size()); }
  // [bytes] Forward's and backward's, beyond what was alive before the step.
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
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

// What a worker tells of itself, beside its losses.
enum Fact { EqualGradients, ReadyOnce, ReadyNever, WithoutGradient, Peak, PlainPeak };

void work(const Place& place, const Store& store) {
  const Group group = join_group(store, place);
  Training training(true, &group), plain(false, &group);
  std::vector<double> losses;
  bool are_equal = true;
  int64_t ready_once = training.num_parameters(), ready_never = ready_once, without_gradient = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const Batch batch = Batch::of_step(step, place.size * rows_per_process).part(place);
    losses.push_back(training.train(batch));
    are_equal = losses.back() == plain.train(batch) && are_equal;
    are_equal = training.has_gradients_of(plain) && are_equal;
    ready_once = std::min(ready_once, training.num_ready(1));
    ready_never = std::min(ready_never, training.num_ready(0));
    without_gradient = std::max(without_gradient, training.num_without_gradient());
  }
  std::vector<double> facts(PlainPeak + 1);
  facts[EqualGradients] = are_equal;
  facts[ReadyOnce] = static_cast<double>(ready_once);
  facts[ReadyNever] = static_cast<double>(ready_never);
  facts[WithoutGradient] = static_cast<double>(without_gradient);
  facts[Peak] = static_cast<double>(training.peak_bytes());
  facts[PlainPeak] = static_cast<double>(plain.peak_bytes());
  tell(store, "losses of " + std::to_string(place.rank), losses);
  tell(store, "facts of " + std::to_string(place.rank), facts);
  group.gloo->barrier()->wait();  // nobody leaves while another still talks to it
}

bool judge(const Place& place, const Store& store) {
  Training alone(false, nullptr);
  const int64_t num_parameters = alone.num_parameters();
  std::printf(
      "%d processes, a batch of %lld rows each; %lld layers, which share %lld parameters in pairs.\n\n",
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
    const double loss = alone.train(Batch::of_step(step, place.size * rows_per_process));
    std::printf("%4lld %19.10f %19.10f\n", static_cast<long long>(step + 1), mean[step], loss);
    difference = std::max(difference, std::abs(mean[step] - loss) / loss);
  }

  std::printf(
      "\nIn every step:\n\nprocess  gradients ready once  never  more  without gradient"
      "  peak bytes  without regions\n");
  bool are_equal = true, are_ready_once = true, saves = true;
  int64_t without_gradient = 0;
  for (int rank = 0; rank < place.size; ++rank) {
    const std::vector<double> facts = told(store, "facts of " + std::to_string(rank));
    std::printf("%7d %21.0f %6.0f %5.0f %17.0f %11.0f %16.0f\n", rank, facts[ReadyOnce],
                facts[ReadyNever], num_parameters - facts[ReadyOnce] - facts[ReadyNever],
                facts[WithoutGradient], facts[Peak], facts[PlainPeak]);
    are_equal = are_equal && facts[EqualGradients] != 0;
    are_ready_once = are_ready_once && facts[ReadyOnce] + facts[ReadyNever] == num_parameters;
    saves = saves && facts[Peak] < facts[PlainPeak] / 2;
    without_gradient += static_cast<int64_t>(facts[WithoutGradient]);
  }
  const auto say = [](const char* what, bool holds) {
    std::printf("%s: %s\n", what, holds ? "yes" : "NO");
    return holds;
  };
  std::printf("\nlargest relative difference of a loss: %.2g\n", difference);
  const bool holds[] = {
      say("losses are those of one process, to 1e-12", difference <= promised_difference),
      say("gradients are bit-equal to those without regions", are_equal),
      say("no gradient was ready more than once", are_ready_once),
      say("only the layer that nobody uses has no gradient", without_gradient == 2 * place.size),
      say("less than half of the bytes", saves)};
  return std::all_of(std::begin(holds), std::end(holds), [](bool each) { return each; });
}

}  // namespace

int main(int argc, char** argv) { return run({"data_parallel", work, judge}, argc, argv); }
