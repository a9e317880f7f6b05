#pragma once
// One model in training, with the exact bytes and the time that each of its steps takes.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../target.h"
#include "model.h"
#include "remat/memory.h"
#include "text.h"
#include "timeline.h"

struct Step {
  double loss = 0;
  double seconds = 0;               // of forward, backward and the optimizer's step
  int64_t peak_bytes = 0;           // activations: the peak, beyond the bytes alive before
  int64_t after_forward_bytes = 0;  // activations alive between forward and backward
};

class Training {
 public:
  // The same seed makes the same parameters under every kind of checkpointing.
  Training(std::string name, const ModelOptions& options, Checkpointing checkpointing,
           uint64_t seed, const Target& target)
      : name_(std::move(name)),
        seed_(seed),
        target_(target),
        meter_(target.device),
        model_(seeded_model(options, checkpointing, seed, target)),
        optimizer_(model_->parameters(), torch::optim::AdamOptions(2e-3)) {
    // Gradients and optimizer state are not activations. Gradients are made now; the first step, in
    // which Adam makes its state, does not count.
    for (torch::Tensor& parameter : model_->parameters()) {
      parameter.mutable_grad() = torch::zeros_like(parameter);
    }
  }

  const std::string& name() const { return name_; }
  c10::Device device() const { return target_.device; }

  // Runs forward, backward and the optimizer's step. A timeline samples the first two.
  Step train(const Batch& given, Timeline* timeline = nullptr) {
    Step step;
    const Batch batch = given.to(target_.device);
    torch::manual_seed(++seed_);  // the same dropout in every training, also when interleaved
    model_->train();
    optimizer_.zero_grad(/*set_to_none=*/false);

    const int64_t before = meter_.live_bytes();
    meter_.reset_peak();
    if (timeline) timeline->start();
    const auto start = std::chrono::steady_clock::now();
    {
      const torch::Tensor loss = [&] {
        const Autocast autocast(target_);
        return model_->loss(batch.inputs, batch.targets);
      }();
      step.after_forward_bytes = meter_.live_bytes() - before;
      if (timeline) timeline->backward_starts();
      loss.backward();
      step.loss = loss.item<double>();
    }
    if (timeline) timeline->stop();
    step.peak_bytes = meter_.peak_bytes() - before;
    optimizer_.step();
    target_.wait();
    step.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    steps_.push_back(step);
    return step;
  }

  double evaluate(const Batch& given) {
    torch::NoGradGuard no_grad;
    const Autocast autocast(target_);
    const Batch batch = given.to(target_.device);
    model_->eval();
    return model_->loss(batch.inputs, batch.targets).item<double>();
  }

  // Returns the median over all steps but the first.
  double median_seconds() const {
    std::vector<double> seconds;
    for (size_t i = 1; i < steps_.size(); ++i) seconds.push_back(steps_[i].seconds);
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
    return seconds[seconds.size() / 2];
  }
  int64_t peak_bytes() const { return largest(&Step::peak_bytes); }
  int64_t after_forward_bytes() const { return largest(&Step::after_forward_bytes); }

  // Returns the largest difference of any parameter's element; NaN counts as infinite.
  double difference_from(const Training& other) const {
    const std::vector<torch::Tensor> mine = model_->parameters();
    const std::vector<torch::Tensor> theirs = other.model_->parameters();
    double largest = 0;
    for (size_t i = 0; i < mine.size(); ++i) {
      const torch::Tensor difference = (mine[i] - theirs[i]).detach().abs();
      largest = std::max(largest, difference.nan_to_num(INFINITY).max().item<double>());
    }
    return largest;
  }

 private:
  static CharTransformer seeded_model(const ModelOptions& options, Checkpointing checkpointing,
                                      uint64_t seed, const Target& target) {
    torch::manual_seed(seed);
    CharTransformer model(options, checkpointing);
    model->to(target.device);
    return model;
  }

  int64_t largest(int64_t Step::* bytes) const {
    int64_t most = 0;
    for (size_t i = 1; i < steps_.size(); ++i) most = std::max(most, steps_[i].*bytes);
    return most;
  }

  std::string name_;
  uint64_t seed_;
  Target target_;
  remat::MemoryMeter meter_;
  CharTransformer model_;
  torch::optim::Adam optimizer_;
  std::vector<Step> steps_;
};
