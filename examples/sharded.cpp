// Trains with parameters that no process holds as a whole.
//
// Each of several processes owns an equal part of the parameters of each block, with its part of
// the optimizer's state, and works on its part of the batch. A block's parameters are gathered over
// Gloo before the block runs forward, and freed after it. Backward needs them again, for the
// recompute of the block and for the gradients that follow it. So each block is a region, and a
// RecomputeObserverGuard gathers before the recompute. When the block's gradient is complete, it is
// averaged, each process keeps its part, and the gathered parameters are freed. At most one block
// is whole at any time.
//
// Without regions autograd reads the parameters in backward without asking, so gathered parameters
// must stay until then: all blocks at once. For comparison the program also trains in that way, and
// once in a single process that holds everything.
//
// Exit status: 0 if losses and bytes are as described, 1 if not, 2 if it could not run.

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "processes/group.h"
#include "processes/program.h"
#include "remat/remat.h"
#include "sharded/block.h"
#include "sharded/shard.h"
#include "target.h"

namespace {

constexpr int64_t width = 128, num_blocks = 12, rows_per_process = 32, steps = 4;
const Block block{width};

std::vector<torch::Tensor> initial_parameters(const Target& target) {
  torch::manual_seed(1);
  std::vector<torch::Tensor> all;
  for (int64_t i = 0; i < num_blocks; ++i) all.push_back(block.initial(target.options()));
  return all;
}

struct Batch {
  torch::Tensor input, target;

  // Returns the whole batch of a step, the same in every process.
  static Batch of_step(int64_t step, int64_t rows) {
    torch::manual_seed(100 + step);
    const torch::Tensor input = torch::randn({rows, width}, torch::kFloat64);
    return {input, (input + input.roll(1, 1)).sin()};
  }

  Batch part(const Place& place) const {
    const int64_t first = place.rank * rows_per_process;
    return {input.narrow(0, first, rows_per_process).clone(),
            target.narrow(0, first, rows_per_process).clone()};
  }
  Batch on(const Target& place) const {
    return {input.to(place.options()), target.to(place.options())};
  }
};

// The results of a training.
struct Outcome {
  std::vector<double> losses;
  double peak_bytes = 0;  // of everything: parameters, gradients, Adam's state, activations
  double gathered_peak_bytes = 0;         // of gathered parameters
  double num_gathers = 0;                 // in one step
  std::vector<torch::Tensor> parameters;  // in the end, of this process
};

class ShardedModel {
 public:
  ShardedModel(const Place& place, const Group& group, bool has_regions)
      : target_(place.target), has_regions_(has_regions) {
    for (const torch::Tensor& initial : initial_parameters(target_)) {
      names_.push_back("block " + std::to_string(names_.size()));
      by_name_[names_.back()] = &shards_.emplace_back(initial, place, group, gathered_);
    }
  }

  // (B, width) -> (B, width)
  torch::Tensor forward(torch::Tensor x) {
    std::optional<remat::DisableCheckpointGuard> plainly;
    if (!has_regions_) plainly.emplace();
    const Autocast autocast(target_);
    // Nothing at `end`: the gradients that follow the recompute read the parameters, too. The shard
    // frees them when those gradients are complete.
    const remat::RecomputeObserverGuard gathers(
        {.begin = [this](const remat::PhaseInfo& region) { gather(*by_name_.at(region.name)); }});
    for (const std::string& name : names_) {
      Shard* const shard = by_name_.at(name);
      gather(*shard);
      x = remat::checkpoint(
          {.name = name},
          [shard](const torch::Tensor& input) { return block.forward(shard->whole(), input); }, x);
      if (has_regions_) shard->free();
    }
    return x;
  }

  std::vector<torch::Tensor> parts() {
    std::vector<torch::Tensor> all;
    for (Shard& shard : shards_) all.push_back(shard.part());
    return all;
  }
  const Gathered& gathered() const { return gathered_; }
  int64_t num_gathers() const { return num_gathers_; }

 private:
  void gather(Shard& shard) {
    ++num_gathers_;
    shard.gather();
  }

  const Target target_;
  bool has_regions_;
  Gathered gathered_;
  int64_t num_gathers_ = 0;
  std::deque<Shard> shards_;
  std::vector<std::string> names_;
  std::map<std::string, Shard*> by_name_;
};

// Trains `forward` by its `parameters`; `first_bytes` were alive before those were made.
template <class Forward>
Outcome train(const std::vector<torch::Tensor>& parameters, const Forward& forward,
              const std::function<Batch(int64_t)>& batch_of_step, const Target& target,
              int64_t first_bytes) {
  remat::MemoryMeter meter(target.device);
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(5e-4));
  Outcome outcome;
  for (int64_t step = 0; step < steps; ++step) {
    const Batch batch = batch_of_step(step).on(target);
    optimizer.zero_grad();
    meter.reset_peak();
    const torch::Tensor loss = torch::mse_loss(forward(batch.input), batch.target);
    loss.backward();
    optimizer.step();
    outcome.losses.push_back(loss.item<double>());
    outcome.peak_bytes = static_cast<double>(meter.peak_bytes() - first_bytes);  // the last step's
  }
  for (const torch::Tensor& each : parameters) outcome.parameters.push_back(each.detach().clone());
  return outcome;
}

Outcome train_sharded(const Place& place, const Group& group, bool has_regions) {
  const int64_t first_bytes = remat::MemoryMeter(place.target.device).live_bytes();
  ShardedModel model(place, group, has_regions);
  const auto batch = [&](int64_t step) {
    return Batch::of_step(step, place.size * rows_per_process).part(place);
  };
  Outcome outcome = train(
      model.parts(), [&](const torch::Tensor& x) { return model.forward(x); }, batch, place.target,
      first_bytes);
  outcome.gathered_peak_bytes = static_cast<double>(model.gathered().peak_bytes);
  outcome.num_gathers = static_cast<double>(model.num_gathers()) / steps;
  return outcome;
}

Outcome train_alone(const Place& place) {
  const Target& target = place.target;
  const int64_t first_bytes = remat::MemoryMeter(target.device).live_bytes();
  std::vector<torch::Tensor> parameters = initial_parameters(target);
  for (torch::Tensor& each : parameters) each.requires_grad_();
  const auto forward = [&](torch::Tensor x) {
    const Autocast autocast(target);
    for (const torch::Tensor& each : parameters) x = block.forward(each, x);
    return x;
  };
  const auto batch = [&](int64_t step) {
    return Batch::of_step(step, place.size * rows_per_process);
  };
  return train(parameters, forward, batch, target, first_bytes);
}

// A worker's results, besides its losses.
enum Fact { Difference, Peak, PlainPeak, Whole, PlainWhole, Gathers, PlainGathers };

void work(const Place& place, const Store& store) {
  const Target& target = place.target;
  const remat::MemoryMeter meter(target.device);  // before the first tensor
  const Group group = join_group(store, place);
  const Outcome plain = train_sharded(place, group, false);
  const Outcome outcome = train_sharded(place, group, true);
  std::vector<double> facts(PlainGathers + 1);
  for (size_t i = 0; i < outcome.parameters.size(); ++i)
    facts[Difference] =
        std::max(facts[Difference], difference_of(plain.parameters[i], outcome.parameters[i]));
  for (size_t i = 0; i < outcome.losses.size(); ++i)
    facts[Difference] = std::max(facts[Difference],
                                 std::abs(outcome.losses[i] - plain.losses[i]) / plain.losses[i]);
  facts[Peak] = outcome.peak_bytes;
  facts[PlainPeak] = plain.peak_bytes;
  facts[Whole] = outcome.gathered_peak_bytes;
  facts[PlainWhole] = plain.gathered_peak_bytes;
  facts[Gathers] = outcome.num_gathers;
  facts[PlainGathers] = plain.num_gathers;
  tell(store, "losses of " + std::to_string(place.rank), outcome.losses);
  tell(store, "facts of " + std::to_string(place.rank), facts);
  group.backend->barrier()->wait();  // no process leaves while another still needs it
}

bool judge(const Place& place, const Store& store) {
  const Target& target = place.target;
  const remat::MemoryMeter meter(target.device);
  const double block_bytes = static_cast<double>(block.initial(target.options()).nbytes());
  const Outcome alone = train_alone(place);
  std::vector<double> mean(steps, 0), facts(PlainGathers + 1, 0);  // facts: the largest ones
  for (int rank = 0; rank < place.size; ++rank) {
    const std::vector<double> losses = told(store, "losses of " + std::to_string(rank));
    for (int64_t step = 0; step < steps; ++step) mean[step] += losses[step] / place.size;
    const std::vector<double> its = told(store, "facts of " + std::to_string(rank));
    for (size_t i = 0; i < its.size(); ++i) facts[i] = std::max(facts[i], its[i]);
  }
  // Bytes of parameters, their gradients and Adam's two moments.
  const double owned_bytes = 4 * num_blocks * block_bytes / place.size;
  if (!target.device.is_cpu() || target.dtype != torch::kDouble)
    std::printf("On %s.\n", target.name().c_str());
  std::printf(
      "%d processes, a batch of %lld rows each; %lld blocks of %.0f bytes.\n"
      "A process owns %.0f bytes of parameters, gradients and optimizer state.\n\n",
      place.size, static_cast<long long>(rows_per_process), static_cast<long long>(num_blocks),
      block_bytes, owned_bytes);
  std::printf("step   loss, %d processes   loss, one process\n", place.size);
  double difference = 0;
  for (int64_t step = 0; step < steps; ++step) {
    std::printf("%4lld %19.10f %19.10f\n", static_cast<long long>(step + 1), mean[step],
                alone.losses[step]);
    difference = std::max(difference, std::abs(mean[step] - alone.losses[step]) / mean[step]);
  }
  std::printf("\n%-27s %13s %18s %18s\n", "", "gathers, step", "gathered at most",
              "peak of a process");
  std::printf("%-27s %13s %18s %18.0f\n", "one process, whole batch", "", "", alone.peak_bytes);
  std::printf("%-27s %13.0f %18.0f %18.0f\n", "sharded, without regions", facts[PlainGathers],
              facts[PlainWhole], facts[PlainPeak]);
  std::printf("%-27s %13.0f %18.0f %18.0f\n", "sharded, blocks are regions", facts[Gathers],
              facts[Whole], facts[Peak]);
  const double padded_bytes =
      block_bytes + static_cast<double>(target.options().dtype().itemsize()) * place.size;
  std::printf("\nlargest relative difference of a loss: %.2g\n", difference);
  const bool holds[] = {
      say(to_rounding("losses are those of one process", target), difference <= rounding(target)),
      say(as_without_regions("parameters", facts[Difference], target),
          is_promised(facts[Difference], target)),
      say("at most one block was gathered", facts[Whole] <= padded_bytes),
      say("without regions all of them were", facts[PlainWhole] >= num_blocks * block_bytes),
      say("beyond what it owns, a process held less than half of them",
          facts[Peak] < owned_bytes + num_blocks / 2 * block_bytes)};
  return std::all_of(std::begin(holds), std::end(holds), [](bool each) { return each; });
}

}  // namespace

int main(int argc, char** argv) { return run({"sharded", work, judge}, argc, argv); }
