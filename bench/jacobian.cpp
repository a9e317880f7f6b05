// Measures K partial gradients through one retained graph: plain, with regions, and with regions
// that share their recomputes. See METHOD.md.

#include <remat/checkpoint.h>
#include <remat/memory.h>
#include <remat/report.h>
#include <remat/scope.h>
#include <torch/torch.h>

#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"

namespace {

using torch::Tensor;

struct Sizes {
  int64_t regions = 8, width = 128, batch = 64, outputs = 50;
};

/// Linear, GELU, linear and a residual, like the MLP of a transformer. (B, width) -> (B, width)
class LayersImpl : public torch::nn::Module {
 public:
  explicit LayersImpl(int64_t width)
      : norm_(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up_(register_module("up", torch::nn::Linear(width, 4 * width))),
        down_(register_module("down", torch::nn::Linear(4 * width, width))) {}
  Tensor forward(const Tensor& x) { return x + down_(torch::gelu(up_(norm_(x)))); }

 private:
  torch::nn::LayerNorm norm_;
  torch::nn::Linear up_, down_;
};
TORCH_MODULE(Layers);

enum class Way { Plain, Regions, Cached };
constexpr const char* way_names[] = {"plain", "regions", "regions, RecomputeCacheGuard"};

class Network {
 public:
  explicit Network(const Sizes& sizes) : sizes_(sizes), output_(sizes.width, sizes.outputs) {
    for (int64_t i = 0; i < sizes.regions; ++i) layers_.emplace_back(sizes.width);
    input_ = torch::randn({sizes.batch, sizes.width}).requires_grad_();
  }

  /// Runs one forward, then `rows` calls of grad(). Row k is the gradient of the k-th output,
  /// averaged over the batch, by the input.
  std::vector<Tensor> jacobian(Way way, int64_t rows) {
    Tensor y = input_;
    for (Layers& each : layers_) y = way == Way::Plain ? each(y) : remat::checkpoint(each, y);
    const std::vector<Tensor> outputs = output_(y).mean(0).unbind(0);
    std::optional<remat::RecomputeCacheGuard> cache;
    if (way == Way::Cached) cache.emplace();
    std::vector<Tensor> gradients;
    for (int64_t k = 0; k < rows; ++k)
      gradients.push_back(torch::autograd::grad({outputs[static_cast<std::size_t>(k)]}, {input_},
                                                {}, /*retain_graph=*/k + 1 < rows)[0]);
    return gradients;
  }

  int64_t expected_recomputes(Way way, int64_t rows) const {
    if (way == Way::Plain) return 0;
    return way == Way::Cached ? sizes_.regions : rows * sizes_.regions;
  }

 private:
  Sizes sizes_;
  std::vector<Layers> layers_;
  torch::nn::Linear output_;
  Tensor input_;
};

struct Facts {
  int64_t recomputes = 0, peak_bytes = 0;
};

/// Runs once and counts. Throws if a row differs from the plain one, or if regions ran a wrong
/// number of times.
Facts verify(Network& network, Way way, int64_t rows) {
  const std::vector<Tensor> expected = network.jacobian(Way::Plain, rows);
  remat::MemoryMeter meter;
  const int64_t live_bytes = meter.live_bytes(), recomputes = remat::counters().recomputes;
  meter.reset_peak();
  const std::vector<Tensor> found = network.jacobian(way, rows);
  const Facts facts{remat::counters().recomputes - recomputes, meter.peak_bytes() - live_bytes};
  const std::string what =
      std::string(way_names[static_cast<int>(way)]) + ", " + std::to_string(rows) + " rows";
  bench::require_plain(found, expected, what);
  if (facts.recomputes != network.expected_recomputes(way, rows))
    throw std::runtime_error("WRONG: " + what + ": " + std::to_string(facts.recomputes) +
                             " recomputes");
  return facts;
}

int run(int argc, char** argv) {
  std::string threads = "1";
  const bench::Arguments arguments = bench::parse(argc, argv, {{"--threads N", &threads}});
  at::set_num_threads(std::stoi(threads));
  torch::manual_seed(1);
  Sizes sizes;
  std::vector<int64_t> all_rows{1, 2, 5, 10, 20, 50};
  if (arguments.smoke) sizes = {3, 16, 4, 5}, all_rows = {1, 2, 5};
  Network network(sizes);
  network.jacobian(Way::Plain, 1);

  constexpr Way ways[] = {Way::Plain, Way::Regions, Way::Cached};
  std::vector<Facts> facts;
  std::vector<bench::Cell> cells;
  for (const int64_t rows : all_rows)
    for (const Way way : ways) {
      facts.push_back(verify(network, way, rows));
      cells.emplace_back([&network, way, rows] { network.jacobian(way, rows); });
    }
  if (arguments.smoke) return 0;

  bench::measure(cells, arguments);
  std::fprintf(stderr, "%-40s %10s %10s %12s %11s %14s\n", "rows of a Jacobian", "min [ms]",
               "of plain", "of medians", "recomputes", "peak bytes");
  std::size_t i = 0;
  for (const int64_t rows : all_rows) {
    const bench::Statistics plain = cells[i].result();
    for (const Way way : ways) {
      const bench::Statistics result = cells[i].result();
      const char* const name = way_names[static_cast<int>(way)];
      const auto count = static_cast<long long>(rows);
      const auto recomputes = static_cast<long long>(facts[i].recomputes);
      const auto peak = static_cast<long long>(facts[i].peak_bytes);
      bench::print_json(
          "jacobian", bench::text("\"way\": \"%s\", \"rows\": %lld", name, count), arguments,
          result, bench::text("\"recomputes\": %lld, \"peak_bytes\": %lld", recomputes, peak));
      std::fprintf(stderr, "%-40s %10.2f %10.2f %12.2f %11lld %14lld\n",
                   bench::text("%lld, %s", count, name).c_str(), result.min_ns / 1e6,
                   result.min_ns / plain.min_ns, result.median_ns / plain.median_ns, recomputes,
                   peak);
      ++i;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
