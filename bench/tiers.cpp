// Compares moving with recomputing for the same peak: saved tensors are in a file, or are
// recomputed, or both. See METHOD.md.

#include <remat/checkpoint.h>
#include <remat/report.h>
#include <remat/tiers.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"
#include "examples/char_transformer/model.h"

namespace {

using torch::Tensor;
namespace nn = torch::nn;

/// A model twice: without regions, and with every block a region.
struct Model {
  std::string name;
  std::vector<Tensor> parameters;
  std::function<Tensor()> plain, in_regions;
};

Model demo(bool smoke) {
  const ModelOptions options{.vocabulary = 64,
                             .blocks = smoke ? 2 : 12,
                             .width = smoke ? 32 : 128,
                             .context = smoke ? 16 : 128};
  torch::manual_seed(1);
  CharTransformer plain(options, Checkpointing::None);
  torch::manual_seed(1);
  CharTransformer regions(options, Checkpointing::EveryBlock);
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    regions->parameters()[i].set_data(plain->parameters()[i].data());
  const Tensor ids = torch::randint(64, {8, options.context});
  const auto loss_of = [ids](CharTransformer model) {
    return [model, ids]() mutable {
      torch::manual_seed(2);
      return model->loss(ids, ids.roll(-1, 1));
    };
  };
  std::vector<Tensor> parameters = plain->parameters();
  // Both share one set of gradients.
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = at::zeros_like(parameters[i]);
    regions->parameters()[i].mutable_grad() = parameters[i].grad();
  }
  return {"the demo's model", parameters, loss_of(plain), loss_of(regions)};
}

Model deep(bool smoke) {
  const int64_t depth = smoke ? 6 : 64, width = smoke ? 16 : 256, batch = smoke ? 64 : 1024;
  torch::manual_seed(1);
  std::vector<Tensor> weights;
  for (int64_t i = 0; i < depth; ++i)
    weights.push_back((at::randn({width, width}) / 16).requires_grad_());
  for (Tensor& each : weights) each.mutable_grad() = at::zeros_like(each);
  const Tensor x = at::randn({batch, width});
  const auto layer = [](const Tensor& t, const Tensor& weight) {
    return at::gelu(at::mm(t, weight));
  };
  const auto loss_of = [=](const auto& run) {
    return [=] {
      Tensor y = x;
      for (const Tensor& weight : weights) y = run(y, weight);
      return y.square().sum();
    };
  };
  return {"64 layers", weights, loss_of(layer), loss_of([layer](const Tensor& t, const Tensor& w) {
            return remat::checkpoint(layer, t, w);
          })};
}

/// Steps under guards with `host_bytes`; the counts are those of the last step.
struct Tiers {
  std::string directory;
  int64_t host_bytes = 0, min_bytes = 1 << 16;
  std::optional<remat::TierCounters> counters{};

  Tensor forward(const std::function<Tensor()>& loss) {
    const remat::SaveInTiersGuard guard({.host_bytes = host_bytes,
                                         .directory = directory,
                                         .min_bytes = min_bytes,
                                         .max_bytes_in_flight = 4 << 20});
    counters = guard.counters();
    return loss();
  }
};

void zero(const Model& model) {
  for (const Tensor& each : model.parameters) each.grad().zero_();
}

std::vector<Tensor> gradients(const Model& model, const std::function<Tensor()>& loss) {
  zero(model);
  loss().backward();
  std::vector<Tensor> found;
  for (const Tensor& each : model.parameters) found.push_back(each.grad().clone());
  return found;
}

int64_t peak_of(const Model& model, const std::function<Tensor()>& loss) {
  zero(model);
  return bench::bytes_of(loss).peak;
}

/// Returns the most bytes that may stay for a peak of at most `wanted`.
int64_t fit(const Model& model, Tiers& tiers, const std::function<Tensor()>& loss, int64_t wanted) {
  int64_t low = 0, high = wanted;
  for (int i = 0; i < 8; ++i) {
    tiers.host_bytes = (low + high + 1) / 2;
    const bool fits = peak_of(model, [&] { return tiers.forward(loss); }) <= wanted;
    (fits ? low : high) = tiers.host_bytes;
  }
  tiers.host_bytes = low;
  return low;
}

/// Records a step; the page shows the work that ran side by side.
void write_page(const std::string& path, const Model& model, const std::function<Tensor()>& loss) {
  zero(model);
  const remat::Recorder recorder;
  loss().backward();
  recorder.write_html(path);
  std::fprintf(stderr, "%s\n%s\n", path.c_str(), recorder.report().to_string().c_str());
}

void measure(const Model& model, const std::string& directory, const bench::Arguments& arguments,
             const std::string& page) {
  const std::vector<Tensor> expected = gradients(model, model.plain);
  bench::require_plain(gradients(model, model.in_regions), expected, model.name + ", regions");
  const int64_t plain_peak = peak_of(model, model.plain);
  const int64_t peak = peak_of(model, model.in_regions);
  Tiers moved{directory}, both{directory};
  if (arguments.smoke) moved.min_bytes = both.min_bytes = 0;
  fit(model, moved, model.plain, peak);
  struct Side {
    const char* name;
    std::function<Tensor()> loss;
    const Tiers* tiers;
  };
  const std::vector<Side> sides{
      {"plain", model.plain, nullptr},
      {"every block a region", model.in_regions, nullptr},
      {"tiers, the regions' peak", [&] { return moved.forward(model.plain); }, &moved},
      {"regions, inputs in the file", [&] { return both.forward(model.in_regions); }, &both}};
  std::vector<bench::Cell> cells;
  for (const Side& side : sides) {
    bench::require_plain(gradients(model, side.loss), expected, model.name + ", " + side.name);
    cells.emplace_back([&] {
      zero(model);
      side.loss().backward();
    });
  }
  if (!page.empty()) return write_page(page, model, sides[2].loss);
  if (arguments.smoke) {
    // If backward comes before a write has begun, no write is needed any more.
    for (int i = 0; i < 1000 && moved.counters->now().bytes_to_disk == 0; ++i) {
      zero(model);
      const Tensor loss = sides[2].loss();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      loss.backward();
    }
    if (moved.counters->now().bytes_to_disk == 0)
      throw std::runtime_error("WRONG: nothing was moved in " + model.name);
    return;
  }
  bench::measure(cells, arguments);
  const double plain_ns = cells[0].result().min_ns;
  std::fprintf(stderr, "%-28s %12s %9s %9s %9s %9s\n", model.name.c_str(), "peak [byte]",
               "of plain", "step", "moved", "waited");
  for (std::size_t i = 0; i < sides.size(); ++i) {
    const int64_t bytes = peak_of(model, sides[i].loss);
    const remat::TierCounts counts =
        sides[i].tiers == nullptr ? remat::TierCounts{} : sides[i].tiers->counters->now();
    const bench::Statistics step = cells[i].result();
    const double waited = 1e9 * counts.seconds_waited / step.min_ns;
    bench::print_json(
        "tiers",
        bench::text(
            "\"model\": \"%s\", \"side\": \"%s\", \"peak_bytes\": %lld, \"moved_bytes\": %lld, "
            "\"waited\": %.4f",
            model.name.c_str(), sides[i].name, static_cast<long long>(bytes),
            static_cast<long long>(counts.bytes_to_disk), waited),
        arguments, step);
    std::fprintf(
        stderr, "%-28s %12lld %9.2f %9.2f %9.2f %8.1f%%\n", sides[i].name,
        static_cast<long long>(bytes), static_cast<double>(bytes) / static_cast<double>(plain_peak),
        step.min_ns / plain_ns,
        static_cast<double>(counts.bytes_to_disk) / static_cast<double>(plain_peak), 100 * waited);
  }
}

int run(int argc, char** argv) {
  std::string directory = std::filesystem::temp_directory_path().string();
  std::string page;  // path of a page about one step of the demo's model, instead of times
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--directory PATH", &directory}, {"--page FILE", &page}});
  at::set_num_threads(1);
  measure(demo(arguments.smoke), directory, arguments, page);
  if (page.empty()) measure(deep(arguments.smoke), directory, arguments, page);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
