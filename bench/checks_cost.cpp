// Measures the checks of a region: a training step of regions with one option changed, over the
// same step with the defaults. See METHOD.md.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <remat/checkpoint.h>

#include <cstdio>
#include <functional>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"

namespace {

struct Variant {
  const char* name;
  remat::CheckpointOptions options;
};

std::vector<Variant> variants() {
  using remat::DeterminismCheck;
  return {{"defaults", {}},
          {"preserve_rng_state = false", {.preserve_rng_state = false}},
          {"capture_check = Ignore", {.capture_check = remat::CaptureCheck::Ignore}},
          {"determinism_check = None", {.determinism_check = DeterminismCheck::None}},
          {"determinism_check = Layout", {.determinism_check = DeterminismCheck::Layout}},
          {"determinism_check = Values", {.determinism_check = DeterminismCheck::Values}},
          {"debug = true", {.debug = true}}};
}

/// A chain of regions of one function, forward and backward.
struct Model {
  const char* name;
  int64_t num_regions;
  at::Tensor input;
  std::function<at::Tensor(const at::Tensor&)> region;

  at::Tensor step(const remat::CheckpointOptions* options) const {
    const at::Tensor x = input.detach().requires_grad_();
    at::Tensor y = x;
    const auto f = [this](const at::Tensor& t) { return region(t); };
    for (int64_t i = 0; i < num_regions; ++i)
      y = options ? remat::checkpoint(*options, f, y) : f(y);
    y.backward(at::ones_like(y));
    return x.grad();
  }
};

std::vector<Model> models() {
  const at::Tensor up = at::randn({1024, 256}).mul_(0.05).requires_grad_();
  const at::Tensor down = at::randn({256, 1024}).mul_(0.05).requires_grad_();
  // The first model is bookkeeping only: one element, four operators a region. The second has two
  // layers with an activation between them, like the MLP of a transformer; batch 64.
  return {{"one element", 20, at::full({1}, 0.5),
           [](const at::Tensor& x) { return x.sin().sin().sin().sin(); }},
          {"layers", 4, at::randn({64, 256}), [up, down](const at::Tensor& x) {
             return at::add(at::linear(at::gelu(at::linear(x, up)), down), x);
           }}};
}

int run(int argc, char** argv) {
  const bench::Arguments arguments = bench::parse(argc, argv);
  const std::vector<Variant> all = variants();
  for (const Model& model : models()) {
    const at::Tensor plain = model.step(nullptr);
    std::vector<bench::Cell> cells;
    for (const Variant& variant : all) {
      bench::require_plain({model.step(&variant.options)}, {plain},
                           bench::text("%s, %s", model.name, variant.name));
      cells.emplace_back([&model, &variant] { model.step(&variant.options); });
    }
    if (arguments.smoke) continue;
    bench::measure(cells, arguments);
    const bench::Statistics defaults = cells[0].result();
    std::fprintf(stderr, "%-44s %12s %12s %12s\n", bench::text("step of %s", model.name).c_str(),
                 "min [us]", "of default", "of medians");
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bench::Statistics result = cells[i].result();
      bench::print_json(
          "checks_cost",
          bench::text("\"model\": \"%s\", \"variant\": \"%s\"", model.name, all[i].name), arguments,
          result);
      std::fprintf(stderr, "%-44s %12.1f %12.3f %12.3f\n", all[i].name, result.min_ns / 1000,
                   result.min_ns / defaults.min_ns, result.median_ns / defaults.median_ns);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
