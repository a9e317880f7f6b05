// Trains a small character transformer on a real text under byte budgets and with checkpoints, and
// compares both with the plain program.
//
// First the same step runs within 80, 50, 30 and 15 % of its own memory, bounded by a BudgetGuard,
// beside every block checkpointed and the plans of `fit`. The gradients must be bit-equal. A page
// shows the operators that one budget dropped and ran again.
//
// Then the same model trains from the same seed five times, step by step in turn:
// * without checkpoints,
// * with every block checkpointed,
// * with groups of blocks checkpointed around the checkpointed blocks,
// * with every block checkpointed but for its matmuls,
// * with every block checkpointed but for one named value.
//
// A table shows activation bytes, time and loss; the parameters must be bit-equal in the end. A
// memory limit follows under which training without checkpoints fails and training with them
// succeeds. The program also draws the memory of one step over time, and writes a page about the
// regions of one step.
//
// With --device it trains on an accelerator: bytes, limit and pictures are of that device, and the
// budgets are left out.
//
// Exit status: 0; 1 if gradients or parameters differ on the CPU, a budget does not hold, or the
// limit does not separate the trainings; 2 if it was called wrongly or could not run.

#include <torch/torch.h>

#include <cstdio>
#include <deque>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "char_transformer/budgets.h"
#include "char_transformer/model.h"
#include "char_transformer/picture.h"
#include "char_transformer/text.h"
#include "char_transformer/timeline.h"
#include "char_transformer/training.h"
#include "command_line.h"
#include "remat/remat.h"

namespace {

constexpr uint64_t kSeed = 1611;

constexpr const char* kUsage =
    "usage: char_transformer [--text FILE] [--steps N] [--rounds N] [--small]\n"
    "                        [--out DIR] [--device NAME] [--dtype NAME]\n"
    "  --text FILE  the text to learn (default: " REMAT_EXAMPLE_TEXT
    ")\n"
    "  --steps N    training steps of each model, at least 2 (default: 20)\n"
    "  --rounds N   steps of each way under budgets (default: 9)\n"
    "  --small      a tiny model and few steps: a few seconds, to see that everything works\n"
    "  --out DIR    where to write the picture and the page (default: " REMAT_EXAMPLE_OUT
    ")\n" REMAT_TARGET_USAGE "  --help         this text\n";

struct Options {
  std::string text = REMAT_EXAMPLE_TEXT;
  std::string out = REMAT_EXAMPLE_OUT;
  int64_t steps = 20;
  int64_t batch_size = 16;
  int64_t rounds = 9;  // steps of each way under budgets
  ModelOptions model;
  Target target;
};

Options parse(int argc, char** argv) {
  Options options;
  std::optional<int64_t> steps;
  parse_options(argc, argv, [&](const std::string& name, const auto& value) {
    if (name == "--text") {
      options.text = value();
    } else if (name == "--steps") {
      steps = parse_number<int64_t>(name, value(), 2, 1'000'000);
    } else if (name == "--rounds") {
      options.rounds = parse_number<int64_t>(name, value(), 1, 1'000'000);
    } else if (name == "--out") {
      options.out = value();
    } else if (name == "--small") {
      options.model.blocks = 4;
      options.model.group = 2;
      options.model.width = 32;
      options.model.context = 32;
      options.batch_size = 4;
      options.steps = 4;
      options.rounds = 4;
    } else {
      return options.target.take(name, value);
    }
    return true;
  });
  options.steps = steps.value_or(options.steps);
  return options;
}

// Runs a step under byte budgets. Returns whether all gradients are the plain ones and all budgets
// held.
bool show_budgets(const Text& text, const ModelOptions& model, const Options& options) {
  if (!options.target.device.is_cpu()) {
    std::printf("A byte budget without regions bounds the memory of the CPU only.\n\n");
    return true;
  }
  std::printf(
      "Forward and backward of the same step; changed is one line:\n"
      "  remat::BudgetGuard budget({.bytes = ...});\n\n");
  std::fflush(stdout);
  std::mt19937 random(kSeed);
  BudgetTable table(model, text.training_batch(options.batch_size, random), kSeed, options.target);
  table.measure(options.rounds);
  const bool is_right = table.print();
  std::printf(
      "\nBytes are exact, and the largest of %lld steps, the first one included. Time: the least\n"
      "of these, taken in turns, without the optimizer. Gradients of all steps are compared with\n"
      "plain's bit by bit.\n\n",
      static_cast<long long>(options.rounds));
  if (!is_right) std::printf("FAILED: gradients differ, or a budget did not hold.\n\n");
  table.record(options.out);
  return is_right;
}

// Trains step by step in turn, so that noise of the machine affects all trainings alike.
void train(std::deque<Training>& trainings, const Text& text, const Options& options,
           std::mt19937& random) {
  for (int64_t i = 0; i < options.steps; ++i) {
    const Batch batch = text.training_batch(options.batch_size, random);
    std::printf("step %*lld/%lld ", static_cast<int>(std::to_string(options.steps).size()),
                static_cast<long long>(i + 1), static_cast<long long>(options.steps));
    double loss = 0;
    for (Training& training : trainings) {
      const Step step = training.train(batch);
      loss = step.loss;
      std::printf(" %s %.3f s ", training.name().c_str(), step.seconds);
      std::fflush(stdout);
    }
    std::printf(" loss %.4f\n", loss);
    std::fflush(stdout);
  }
}

// Prints the table. Returns whether all parameters equal those of the first training.
bool compare(std::deque<Training>& trainings, const Batch& held_out, int64_t steps,
             bool is_reproducible) {
  const Training& plain = trainings.front();
  bool equal = true;
  std::printf("\n%-16s %24s %20s %15s %14s %12s\n", "", "peak activation", "held after", "time per",
              "loss after", "largest");
  std::printf("%-16s %24s %20s %15s %14s %12s\n", "mode", "bytes", "forward, bytes", "step",
              (std::to_string(steps) + " steps").c_str(), "difference");
  for (Training& training : trainings) {
    const double difference = training.difference_from(plain);
    equal = equal && difference == 0;
    const double percent = 100.0 * training.peak_bytes() / plain.peak_bytes();
    const double seconds = training.median_seconds();
    std::printf("%-16s %15s (%4.1f %%) %20s %7.3f s %.2fx %14.6f %12g\n", training.name().c_str(),
                grouped(training.peak_bytes()).c_str(), percent,
                grouped(training.after_forward_bytes()).c_str(), seconds,
                seconds / plain.median_seconds(), training.evaluate(held_out), difference);
  }
  std::printf(
      "\n"
      "Bytes are exact (remat::MemoryMeter) and count what a step's forward and backward have "
      "alive beyond\n"
      "the parameters, gradients, optimizer state and batch that are there before. Time: median, "
      "with the\n"
      "optimizer's step; the first step is left out of both. Loss: of held-out text, in nats per "
      "character.\n"
      "Difference: of any parameter from the plain run.\n"
      "\n");
  if (!equal)
    std::printf("%sthe parameters are not those of the plain run%s.\n",
                is_reproducible ? "FAILED: " : "",
                is_reproducible ? "" : ", as kernels of the device may add in another order");
  return equal;
}

// Draws one more step of each training.
void draw(std::deque<Training>& trainings, const Batch& batch, int64_t limit_bytes,
          const std::string& folder) {
  const std::vector<std::string> colors{"#4c72b0", "#dd8452", "#2e8b57", "#8172b2", "#b5651d"};
  std::vector<Curve> curves;
  for (size_t i = 0; i < trainings.size(); ++i) {
    Timeline timeline(trainings[i].device());
    trainings[i].train(batch, &timeline);
    curves.push_back({trainings[i].name(), colors[i % colors.size()], timeline.samples()});
  }
  const std::string path = (std::filesystem::path(folder) / "char_transformer_memory.svg").string();
  memory_picture("Activation memory during one training step", curves, limit_bytes).write(path);
  std::printf("Memory over the time of one step: %s\n\n", path.c_str());
}

// Records the regions of one more step.
void record(Training& training, const Batch& batch, const std::string& folder) {
  const remat::Recorder recorder;
  training.train(batch);
  const std::string path = (std::filesystem::path(folder) / "char_transformer_step.html").string();
  recorder.write_html(path);
  std::printf("The regions of one step with %s:\n%sMore of it in %s\n\n", training.name().c_str(),
              recorder.report().to_string().c_str(), path.c_str());
}

// Returns whether `training` can take a few steps under a limit of `limit_bytes` beyond those
// alive.
bool trains_within(Training& training, const Text& text, const Options& options,
                   int64_t limit_bytes) {
  std::mt19937 random(kSeed);
  std::printf("%s:\n", training.name().c_str());
  try {
    for (int i = 0; i < 3; ++i) {
      const Batch batch = text.training_batch(options.batch_size, random);
      const torch::Device device = options.target.device;
      const int64_t live_bytes = remat::MemoryMeter(device).live_bytes();
      const remat::MemoryLimitGuard limit(live_bytes + limit_bytes, device);
      std::printf("  a step, loss %.4f\n", training.train(batch).loss);
      std::fflush(stdout);
    }
    return true;
  } catch (const c10::OutOfMemoryError& error) {
    std::printf("  failed: %s\n", error.what_without_backtrace());
    return false;
  }
}

int run(const Options& options) {
  std::filesystem::create_directories(options.out);  // an error here comes before the work
  const Text text(options.text, options.model.context);
  ModelOptions model = options.model;
  model.vocabulary = text.vocabulary();
  std::printf("Text: %s, %s characters, %lld different ones.\n", options.text.c_str(),
              grouped(text.size()).c_str(), static_cast<long long>(text.vocabulary()));
  std::printf(
      "Model: %lld blocks of width %lld, %lld heads; batches of %lld x %lld characters; "
      "%d threads; %s.\n\n",
      static_cast<long long>(model.blocks), static_cast<long long>(model.width),
      static_cast<long long>(model.heads), static_cast<long long>(options.batch_size),
      static_cast<long long>(model.context), torch::get_num_threads(),
      options.target.name().c_str());
  std::fflush(stdout);

  const bool budgets_are_right = show_budgets(text, model, options);

  std::deque<Training> trainings;
  trainings.emplace_back("plain", model, Checkpointing::None, kSeed, options.target);
  trainings.emplace_back("every block", model, Checkpointing::EveryBlock, kSeed, options.target);
  trainings.emplace_back("nested groups", model, Checkpointing::NestedGroups, kSeed,
                         options.target);
  trainings.emplace_back("save matmuls", model, Checkpointing::SaveMatmuls, kSeed, options.target);
  trainings.emplace_back("save by name", model, Checkpointing::SaveByName, kSeed, options.target);
  Training& plain = trainings[0];
  Training& checkpointed = trainings[1];

  std::mt19937 random(kSeed);
  train(trainings, text, options, random);
  const Batch held_out = text.held_out_batch(4 * options.batch_size, random);
  const bool equal = compare(trainings, held_out, options.steps, options.target.is_reproducible());

  const int64_t limit_bytes = (plain.peak_bytes() + checkpointed.peak_bytes()) / 2;
  draw(trainings, text.training_batch(options.batch_size, random), limit_bytes, options.out);
  record(trainings[2], text.training_batch(options.batch_size, random), options.out);

  std::printf(
      "With a limit of %s bytes of activations, between the two peaks. The limit in the error\n"
      "also counts parameters, gradients and optimizer states:\n",
      grouped(limit_bytes).c_str());
  const bool plain_fails = !trains_within(plain, text, options, limit_bytes);
  const bool checkpointed_works = trains_within(checkpointed, text, options, limit_bytes);
  if (!plain_fails) std::printf("FAILED: the plain run should not fit.\n");
  if (!checkpointed_works) std::printf("FAILED: the checkpointed run should fit.\n");
  const bool is_right = budgets_are_right && (equal || !options.target.is_reproducible());
  return is_right && plain_fails && checkpointed_works ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return run_example("char_transformer", kUsage, argc, argv,
                     [&] { return run(parse(argc, argv)); });
}
