// Compares a step's peak with theory, to the byte, on stages with known saves. See METHOD.md.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/sum.h>
#include <remat/checkpoint.h>
#include <remat/memory.h>
#include <remat/plan.h>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"

namespace {

/// A chain of stages of `sines` `sin` each, and a loss: the sum of one more `sin`.
struct Chain {
  int64_t stages, sines, bytes;  ///< `sines` of each stage; [bytes] of a tensor
  int64_t loss_bytes = 4;        ///< the loss, which the caller holds beside all bytes of `cost`

  /// A stage saves the tensors that its `sin` read, but for its own input, which the stage before
  /// saves.
  remat::ChainCost cost() const {
    remat::ChainCost result{.input_bytes = bytes, .input_grad_bytes = bytes};
    for (int64_t i = 0; i < stages; ++i)
      result.stages.push_back({.forward_s = static_cast<double>(sines),
                               .backward_s = static_cast<double>(2 * sines),
                               .forward_to_last_save_s = static_cast<double>(sines - 1),
                               .output_bytes = bytes,
                               .saved_bytes = (sines - 1) * bytes,
                               // The cosine. The product is the gradient of the stage before.
                               .backward_tmp_bytes = bytes,
                               .grad_bytes = bytes,
                               .saves_output = false,
                               // The input of a `sin` is alive until the `sin` has written.
                               .unsaved_tmp_bytes = bytes});
    result.stages.push_back({.forward_s = 1,
                             .backward_s = 2,
                             .forward_tmp_bytes = bytes,
                             .backward_tmp_bytes = bytes,
                             .saves_output = false});
    return result;
  }

  std::vector<remat::Stage> functions() const {
    const auto stage = [count = sines](at::Tensor y) {
      for (int64_t i = 0; i < count; ++i) y = at::sin(y);
      return y;
    };
    std::vector<remat::Stage> result(static_cast<std::size_t>(stages), stage);
    result.emplace_back([](const at::Tensor& y) { return at::sin(y).sum(); });
    return result;
  }
};

struct Case {
  std::string name;
  remat::Plan plan;
  /// [bytes] counted by hand, for plans that are short enough.
  std::optional<int64_t> by_hand{};
};

std::vector<Case> cases(const Chain& chain) {
  const int64_t all = chain.stages + 1;  // with the loss
  std::vector<remat::PlanRegion> each;
  for (int64_t i = 1; i < all; ++i) each.push_back({i, i});
  // At the begin of backward: all inputs of `sin` but for the chain's input, a cosine and a
  // product.
  const int64_t plain = chain.stages * chain.sines + 2;
  // At the begin of the last stage's backward: the inputs of regions but for the chain's, the
  // gradient from the loss, the recomputed inputs inside the stage, a cosine and a product.
  const int64_t regions = (chain.stages - 1) + 1 + (chain.sines - 1) + 2;
  return {
      {"no regions", remat::Plan(all), plain * chain.bytes + chain.loss_bytes},
      {"every stage a region", remat::Plan(all, each), regions * chain.bytes + chain.loss_bytes},
      {"four segments", remat::balanced_plan(all, 4)},
      {"halves of halves", remat::halving_plan(all)},
      {"revolve, 2 states", remat::revolve_plan(all, 2)}};
}

int64_t measured_peak(const Chain& chain, const remat::Plan& plan, const at::Device& device,
                      at::Tensor& gradient) {
  const at::Tensor x = at::rand({chain.bytes / 4}).to(device).requires_grad_();
  const at::Tensor one = at::ones({}).to(device);
  const std::vector<remat::Stage> stages = chain.functions();
  remat::MemoryMeter meter(device);
  const int64_t before = meter.live_bytes();
  meter.reset_peak();
  const at::Tensor loss = remat::run(plan, stages, x);
  loss.backward(one);
  const int64_t peak = meter.peak_bytes() - before;
  gradient = x.grad();
  return peak;
}

int run(int argc, char** argv) {
  const bench::Arguments arguments = bench::parse(argc, argv, {}, bench::RunsOn::AnyDevice);
  const remat::MemoryMeter first;  // before the tensors that it counts
  const int64_t bytes = arguments.smoke ? 1 << 16 : 1 << 20;
  bool all_right = true;
  for (const Chain& chain : {Chain{8, 2, bytes}, Chain{8, 5, bytes}, Chain{16, 3, bytes}}) {
    const auto stages = static_cast<long long>(chain.stages);
    const auto sines = static_cast<long long>(chain.sines);
    const auto tensor = static_cast<long long>(chain.bytes);
    std::fprintf(
        stderr, "%-40s %14s %14s %10s\n",
        bench::text("%lld stages of %lld tensors of %lld KiB", stages, sines, tensor >> 10).c_str(),
        "theory [B]", "measured [B]", "in tensors");
    for (const Case& each : cases(chain)) {
      const remat::ChainCost cost = chain.cost();
      at::Tensor expected, found;
      at::manual_seed(1);
      measured_peak(chain, remat::Plan(chain.stages + 1), arguments.device, expected);
      at::manual_seed(1);
      const int64_t measured = measured_peak(chain, each.plan, arguments.device, found);
      const int64_t simulated = remat::simulate(cost, each.plan).peak_bytes + chain.loss_bytes;
      const int64_t theory = each.by_hand.value_or(simulated);
      const bool is_right = measured == theory && simulated == theory && found.equal(expected);
      all_right &= is_right;
      bench::print_json(
          "peak_bytes",
          bench::text("\"plan\": \"%s\", \"stages\": %lld, \"sines\": %lld, \"tensor_bytes\": %lld",
                      each.name.c_str(), stages, sines, tensor),
          arguments,
          bench::text("\"theory_bytes\": %lld, \"peak_bytes\": %lld",
                      static_cast<long long>(theory), static_cast<long long>(measured)));
      std::fprintf(stderr, "%-40s %14lld %14lld %10.3f%s\n", each.name.c_str(),
                   static_cast<long long>(theory), static_cast<long long>(measured),
                   static_cast<double>(measured) / static_cast<double>(chain.bytes),
                   is_right                ? ""
                   : found.equal(expected) ? "  WRONG: bytes"
                                           : "  WRONG: gradient");
    }
  }
  return all_right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
