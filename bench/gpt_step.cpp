// Measures tokens a second and the peak of a GPT in training: plain, each block a region, matmuls
// kept, plans at half and at a quarter of plain's peak, inputs offloaded. See METHOD.md.

#include <remat/plan.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/peer.h"
#include "bench/rounds.h"
#include "examples/char_transformer/model.h"
#include "examples/target.h"

namespace {

using torch::Tensor;

struct Size {
  ModelOptions model;
  int64_t batch;
};

Size size_of(const std::string& name) {
  // GPT-2's: 124 and 355 million parameters.
  if (name == "124M")
    return {{.vocabulary = 50257,
             .blocks = 12,
             .width = 768,
             .heads = 12,
             .context = 1024,
             .dropout = 0,
             .ties_output = true},
            8};
  if (name == "350M")
    return {{.vocabulary = 50257,
             .blocks = 24,
             .width = 1024,
             .heads = 16,
             .context = 1024,
             .dropout = 0,
             .ties_output = true},
            8};
  if (name == "small")
    return {{.vocabulary = 64, .blocks = 6, .dropout = 0, .ties_output = true}, 4};
  if (name == "tiny")
    return {{.vocabulary = 64,
             .blocks = 4,
             .width = 32,
             .context = 16,
             .dropout = 0,
             .ties_output = true},
            2};
  throw std::runtime_error("--model is small, 124M or 350M, got " + name);
}

/// One way to train; all run the same stages.
struct Way {
  std::string name;
  remat::Plan plan;
  remat::CheckpointOptions options{};
};

class Gpt {
 public:
  Gpt(const Size& size, const Target& target) : model_(size.model, Checkpointing::None) {
    model_->to(target.device);
    for (Tensor& each : model_->parameters()) each.mutable_grad() = torch::zeros_like(each);
    const Tensor ids =
        torch::randint(size.model.vocabulary, {size.batch, size.model.context + 1}, torch::kLong)
            .to(target.device);
    inputs_ = ids.narrow(1, 0, size.model.context).contiguous();
    const Tensor targets = ids.narrow(1, 1, size.model.context).flatten();
    stages_ = model_->stages();
    stages_.emplace_back([targets](const Tensor& scores) {
      return torch::cross_entropy_loss(scores.flatten(0, 1), targets);
    });
    // Autocast around each stage by itself, so that each is measured as it runs.
    for (remat::Stage& stage : stages_)
      stage = [stage, target](const Tensor& x) {
        const Autocast autocast(target);
        return stage(x);
      };
  }

  Tensor loss(const Way& way) const { return remat::run(way.plan, stages_, inputs_, way.options); }
  void step(const Way& way) {
    model_->zero_grad(/*set_to_none=*/false);
    loss(way).backward();
  }
  std::vector<Tensor> gradients(const Way& way) {
    step(way);
    std::vector<Tensor> all;
    for (const Tensor& each : model_->parameters()) all.push_back(each.grad().clone());
    return all;
  }
  int64_t num_tokens() const { return inputs_.numel(); }
  int64_t num_parameters() const {
    int64_t sum = 0;
    for (const Tensor& each : model_->parameters()) sum += each.numel();
    return sum;
  }

  std::vector<Way> ways() const {
    const auto count = static_cast<int64_t>(stages_.size());
    std::vector<remat::PlanRegion> blocks;
    for (int64_t i = 2; i < count - 1; ++i) blocks.push_back({i, i});
    const remat::Plan each(count, blocks);
    const remat::Frontier frontier = remat::solve(remat::measure(stages_, inputs_));
    const int64_t keep_all = frontier.points().back().bytes;
    const auto within = [&](int64_t budget) {
      return frontier.plan(std::max(budget, frontier.points().front().bytes));
    };
    return {{"plain", remat::Plan(count)},
            {"each block", each},
            {"each block, matmuls kept", each, {.policy = remat::save_matmuls()}},
            {"plan at half of plain's peak", within(keep_all / 2)},
            {"plan at a quarter", within(keep_all / 4)},
            {"each block, inputs offloaded", each, {.offload_inputs = true}}};
  }

 private:
  CharTransformer model_;
  Tensor inputs_;
  std::vector<remat::Stage> stages_;
};

/// Trains the same model in the ways of Python.
class Python {
 public:
  Python(const std::string& interpreter, const Size& size, const std::string& dtype,
         const bench::Arguments& arguments)
      : peer_({interpreter, std::filesystem::path(REMAT_BENCH_FOLDER) / "gpt_step.py",
               arguments.device.str(), dtype, std::to_string(size.model.vocabulary),
               std::to_string(size.model.blocks), std::to_string(size.model.width),
               std::to_string(size.model.heads), std::to_string(size.model.context),
               std::to_string(size.batch)}) {}

  int64_t num_parameters() { return std::stoll(peer_.ask("parameters")); }
  bench::Cell cell(const std::string& way) {
    return bench::Cell([this, way](int64_t repeats, const bench::Arguments&) {
      std::istringstream answer(peer_.ask("sample " + way + " " + std::to_string(repeats)));
      bench::Sample sample;
      answer >> sample.ns >> sample.host_ns;
      return sample;
    });
  }
  /// [bytes]; -1 on the CPU, where Python has no meter.
  int64_t peak_bytes(const std::string& way) { return std::stoll(peer_.ask("peak " + way)); }

 private:
  bench::Peer peer_;
};

/// The measurements of one way.
struct Row {
  std::string name;
  int64_t peak_bytes;
  const bench::Cell* cell;
};

void print(const std::vector<Row>& rows, const Gpt& gpt, const std::string& model,
           const std::string& dtype, const bench::Arguments& arguments) {
  const auto tokens = static_cast<double>(gpt.num_tokens());
  const double millions = static_cast<double>(gpt.num_parameters()) / 1e6;
  std::fprintf(stderr, "%-36s %12s %10s %14s %10s\n",
               bench::text("%.1f million parameters, %s", millions, dtype.c_str()).c_str(),
               "tokens a s", "of plain", "peak bytes", "of plain");
  for (const Row& row : rows) {
    const bench::Statistics result = row.cell->result();
    const double per_second = tokens / (result.min_ns / 1e9);
    const std::string host = row.cell->host_json(arguments);
    const auto peak = static_cast<long long>(row.peak_bytes);
    bench::print_json(
        "gpt_step",
        bench::text("\"model\": \"%s\", \"dtype\": \"%s\", \"way\": \"%s\"", model.c_str(),
                    dtype.c_str(), row.name.c_str()),
        arguments, result,
        bench::text("\"tokens_per_s\": %.1f, \"peak_bytes\": %lld", per_second, peak) +
            (host.empty() ? "" : ", " + host));
    std::fprintf(stderr, "%-36s %12.0f %10.3f", row.name.c_str(), per_second,
                 rows[0].cell->result().min_ns / result.min_ns);
    if (peak >= 0)
      std::fprintf(stderr, " %14lld %10.3f", peak,
                   static_cast<double>(peak) / static_cast<double>(rows[0].peak_bytes));
    std::fprintf(stderr, "\n");
  }
}

int run(int argc, char** argv) {
  std::string name = "small", dtype = "float32", interpreter = REMAT_BENCH_PYTHON;
  const bench::Arguments arguments = bench::parse(
      argc, argv,
      {{"--model NAME", &name}, {"--dtype NAME", &dtype}, {"--python PYTHON", &interpreter}},
      bench::RunsOn::AnyDevice);
  Target target;
  target.device = arguments.device;
  target.take("--dtype", [&] { return dtype; });
  const remat::MemoryMeter first(target.device);  // before the tensors that it counts
  torch::manual_seed(1);
  const Size size = size_of(arguments.smoke ? "tiny" : name);
  Gpt gpt(size, target);
  const std::vector<Way> ways = gpt.ways();
  const std::vector<Tensor> plain = gpt.gradients(ways.front());
  for (const Way& way : ways) bench::require_plain(gpt.gradients(way), plain, way.name);

  std::optional<Python> python;
  if (interpreter.empty())
    std::fprintf(stderr, "no Python has this LibTorch as its torch: it takes no part\n");
  else if (arguments.with_peer)
    python.emplace(interpreter, size, dtype, arguments);
  if (python && python->num_parameters() != gpt.num_parameters())
    throw std::runtime_error("WRONG: Python's model has another number of parameters");
  if (arguments.smoke) return 0;

  std::vector<bench::Cell> cells;
  for (const Way& way : ways) cells.emplace_back([&gpt, &way] { gpt.step(way); });
  const std::vector<std::pair<std::string, std::string>> of_python{
      {"plain", "python, plain"},
      {"blocks", "python, each block"},
      {"matmuls", "python, each block, matmuls kept"}};
  if (python)
    for (const auto& [way, words] : of_python) cells.push_back(python->cell(way));
  bench::measure(cells, arguments);

  std::vector<Row> rows;
  for (std::size_t i = 0; i < ways.size(); ++i)
    rows.push_back({ways[i].name,
                    bench::bytes_of([&] { return gpt.loss(ways[i]); }, arguments.device).peak,
                    &cells[i]});
  if (python)
    for (const auto& [way, words] : of_python)
      rows.push_back({words, python->peak_bytes(way), &cells[rows.size()]});
  print(rows, gpt, name, dtype, arguments);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
