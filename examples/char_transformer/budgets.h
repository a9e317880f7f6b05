#pragma once
// One training step under byte budgets, beside every block checkpointed and the plans of `fit`.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../target.h"
#include "model.h"
#include "remat/budget.h"
#include "remat/fit.h"
#include "remat/memory.h"
#include "remat/report.h"
#include "text.h"

// Returns 1234567 as "1,234,567".
inline std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > 0; i -= 3) digits.insert(i, 1, ',');
  return digits;
}

// A way to run the step.
struct Way {
  std::string name;
  CharTransformer model;                // has the gradients
  std::function<torch::Tensor()> loss;  // the forward
  int64_t budget_bytes = 0;             // of a BudgetGuard; 0: without one
  int64_t peak_bytes = 0;               // of all steps, beyond the bytes alive before each
  double least_seconds = 0;             // of forward and backward
  int64_t again = 0;                    // operator calls or regions that ran again in the last step
  int64_t over_bytes = 0, floor_bytes = 0;  // from the budget's report
  bool is_equal = true;                     // all gradients of all steps are the plain ones
};

class BudgetTable {
 public:
  BudgetTable(const ModelOptions& options, const Batch& batch, uint64_t seed, const Target& target)
      : seed_(seed),
        batch_(batch),
        target_(target),
        plain_(seeded(options, Checkpointing::None)),
        checkpointed_(seeded(options, Checkpointing::EveryBlock)) {
    add("plain", plain_, loss_of(plain_));
    step(ways_.front());
    for (const torch::Tensor& each : plain_->parameters())
      gradients_.push_back(each.grad().clone());
    for (const int percent : {80, 50, 30, 15}) {
      add("budget " + std::to_string(percent) + " %", plain_, loss_of(plain_));
      ways_.back().budget_bytes = share(percent);
    }
    add("every block", checkpointed_, loss_of(checkpointed_));
    for (const int percent : {50, 30, 15}) add_plan(percent);
  }

  BudgetTable& operator=(BudgetTable&&) = delete;  // the ways refer to it

  // Takes a step of each way in turn, so that noise of the machine affects all alike.
  void measure(int64_t rounds) {
    for (int64_t i = 0; i < rounds; ++i)
      for (Way& way : ways_) step(way);
  }

  // Prints the table. Returns whether all gradients are the plain ones and all budgets held.
  bool print() const {
    const Way& plain = ways_.front();
    std::printf("%-14s %27s %19s %16s  %s\n", "", "peak of activations", "time of a step",
                "ran again", "gradients");
    bool is_right = true;
    for (const Way& way : ways_) {
      const double percent =
          100.0 * static_cast<double>(way.peak_bytes) / static_cast<double>(plain.peak_bytes);
      const bool is_budget = way.budget_bytes > 0;
      const bool ran = way.least_seconds > 0;
      const std::string again =
          &way == &plain ? "" : std::to_string(way.again) + (is_budget ? " calls" : " regions");
      const char* const equal = &way == &plain ? "" : way.is_equal ? "bit-equal" : "DIFFER";
      if (ran)
        std::printf("%-14s %12s bytes %5.1f %% %9.3f s  %5.2fx %16s  %s\n", way.name.c_str(),
                    grouped(way.peak_bytes).c_str(), percent, way.least_seconds,
                    way.least_seconds / plain.least_seconds, again.c_str(), equal);
      else
        std::printf("%-14s no plan is that small\n", way.name.c_str());
      const bool held = !is_budget || way.over_bytes > 0 || way.peak_bytes <= way.budget_bytes;
      is_right = is_right && way.is_equal && held;
      if (!held) std::printf("FAILED: that peak is above its budget.\n");
    }
    for (const Way& way : ways_)
      if (way.over_bytes > 0)
        std::printf("%s did not fit: %s bytes were over, and the floor is %s bytes.\n",
                    way.name.c_str(), grouped(way.over_bytes).c_str(),
                    grouped(way.floor_bytes).c_str());
    return is_right;
  }

  // Records one more step at 30 %, with the operators that are dropped and run again.
  void record(const std::string& folder) {
    const remat::Recorder recorder;
    Way& way = ways_[3];
    step(way);
    const auto in_folder = [&](const char* name) {
      return (std::filesystem::path(folder) / name).string();
    };
    const std::string page = in_folder("char_transformer_budget.html");
    recorder.write_html(page);
    recorder.write_memory_svg(in_folder("char_transformer_budget.svg"));
    std::printf("One step with %s:\n%sMore of it in %s\n\n", way.name.c_str(),
                recorder.report().to_string().c_str(), page.c_str());
  }

 private:
  CharTransformer seeded(const ModelOptions& options, Checkpointing checkpointing) const {
    torch::manual_seed(seed_);
    CharTransformer model(options, checkpointing);
    // Gradients exist from here on: they are not activations.
    for (torch::Tensor& each : model->parameters()) each.mutable_grad() = torch::zeros_like(each);
    return model;
  }

  std::function<torch::Tensor()> loss_of(CharTransformer model) const {
    return [model, this]() mutable {
      const Autocast autocast(target_);
      return model->loss(batch_.inputs, batch_.targets);
    };
  }

  int64_t share(int percent) const { return ways_.front().peak_bytes * percent / 100; }

  void add(std::string name, const CharTransformer& model, std::function<torch::Tensor()> loss) {
    ways_.push_back({std::move(name), model, std::move(loss)});
  }

  // Adds the fastest regions for that share of plain's peak. `fit` needs the model as a chain.
  void add_plan(int percent) {
    std::vector<remat::Stage> stages = plain_->stages();
    stages.push_back([this](const torch::Tensor& scores) {
      return torch::cross_entropy_loss(scores.flatten(0, 1), batch_.targets.flatten());
    });
    for (remat::Stage& stage : stages)
      stage = [stage, this](const torch::Tensor& x) {
        const Autocast autocast(target_);
        return stage(x);
      };
    const std::string name = "fit " + std::to_string(percent) + " %";
    try {
      remat::Fitted fitted = remat::fit(std::move(stages), batch_.inputs, share(percent));
      add(name, plain_, [fitted, this]() mutable { return fitted(batch_.inputs); });
    } catch (const remat::InfeasibleBudget&) {
      add(name, plain_, nullptr);
    }
  }

  void step(Way& way) {
    if (!way.loss) return;
    torch::manual_seed(seed_);  // the same dropout each time
    way.model->zero_grad(/*set_to_none=*/false);
    const int64_t regions_before = remat::counters().recomputes, before = meter_.live_bytes();
    meter_.reset_peak();
    const auto start = std::chrono::steady_clock::now();
    {
      // This one line is the budget. A program has it around its loop; here the ways take turns.
      std::optional<remat::BudgetGuard> budget;
      if (way.budget_bytes > 0) budget.emplace(remat::BudgetOptions{.bytes = way.budget_bytes});
      way.loss().backward();
      if (budget) {
        const remat::BudgetReport report = budget->report();
        way.again = report.reruns;
        way.over_bytes = std::max(way.over_bytes, report.over_bytes);
        way.floor_bytes = std::max(way.floor_bytes, report.floor_bytes);
      }
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    way.peak_bytes = std::max(way.peak_bytes, meter_.peak_bytes() - before);
    way.least_seconds =
        way.least_seconds > 0 ? std::min(way.least_seconds, taken.count()) : taken.count();
    if (way.budget_bytes == 0) way.again = remat::counters().recomputes - regions_before;
    const std::vector<torch::Tensor> parameters = way.model->parameters();
    for (std::size_t i = 0; i < gradients_.size(); ++i)
      way.is_equal = way.is_equal && torch::equal(parameters[i].grad(), gradients_[i]);
  }

  const uint64_t seed_;
  const Batch batch_;
  const Target target_;
  remat::MemoryMeter meter_;
  CharTransformer plain_, checkpointed_;
  std::vector<torch::Tensor> gradients_;
  std::deque<Way> ways_;
};
