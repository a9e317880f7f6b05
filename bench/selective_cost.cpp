// Measures a policy per operator, in forward and in replay, in units of a plain operator. See
// METHOD.md.

#include <ATen/core/Tensor.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <remat/checkpoint.h>
#include <remat/policy.h>

#include <cstdio>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"

namespace {

constexpr int64_t num_operators = 500;

/// Negations of one element. Autograd saves nothing of them, so any further cost is that of the
/// interception. The sine at the end makes backward recompute.
at::Tensor chain(const at::Tensor& x) {
  at::Tensor y = remat::checkpoint_name(x.neg(), "first");
  for (int64_t i = 1; i < num_operators; ++i) y = y.neg();
  return y.sin();
}

struct Variant {
  const char* name;
  remat::CheckpointOptions options;
};

std::vector<Variant> variants() {
  const remat::Policy function = [](const remat::PolicyContext&) {
    return remat::CheckpointPolicy::PreferRecompute;
  };
  return {{"no policy", {}},
          {"save_ops, none of them", {.policy = remat::save_ops({"aten::mm"})}},
          {"save_ops, all of them", {.policy = remat::save_ops({"aten::neg"})}},
          {"a policy function", {.policy = function}},
          {"save_names", {.policy = remat::save_names({"first"})}}};
}

struct Times {
  double forward = 0, backward = 0;
};

Times measure(const Variant* variant, int64_t repeats, const bench::Arguments& arguments) {
  const at::Tensor x = at::ones({1}, at::TensorOptions(arguments.device)).requires_grad_();
  Times times;
  for (int64_t i = 0; i < repeats; ++i) {
    const int64_t start = bench::now_ns(arguments);
    const at::Tensor y =
        variant == nullptr ? chain(x) : remat::checkpoint(variant->options, chain, x);
    const int64_t between = bench::now_ns(arguments);
    y.backward();
    times.backward += static_cast<double>(bench::now_ns(arguments) - between);
    times.forward += static_cast<double>(between - start);
    x.mutable_grad() = at::Tensor();
  }
  const auto divide = [&](double total) {
    return total / static_cast<double>(repeats) / static_cast<double>(num_operators);
  };
  return {divide(times.forward), divide(times.backward)};
}

at::Tensor gradient(const Variant* variant, const at::Device& device) {
  const at::Tensor x = at::ones({1}, at::TensorOptions(device)).requires_grad_();
  (variant == nullptr ? chain(x) : remat::checkpoint(variant->options, chain, x)).backward();
  return x.grad();
}

int run(int argc, char** argv) {
  std::string times_each = "40";
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--repeats N", &times_each}}, bench::RunsOn::AnyDevice);
  const int64_t repeats = std::stoll(times_each);
  const std::vector<Variant> all = variants();
  std::vector<bench::Passes> passes;
  for (const Variant& variant : all) {
    bench::require_plain({gradient(&variant, arguments.device)},
                         {gradient(nullptr, arguments.device)}, variant.name);
    passes.emplace_back(variant.name);
  }
  if (arguments.smoke) return 0;
  // The sides take turns; the first round warms up.
  std::vector<double> plain;
  for (int64_t round = -1; round < arguments.samples; ++round) {
    const Times times = measure(nullptr, repeats, arguments);
    if (round >= 0) plain.push_back(times.forward);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Times each = measure(&all[i], repeats, arguments);
      if (round < 0) continue;
      passes[i].forward.push_back(each.forward);
      passes[i].backward.push_back(each.backward);
    }
  }
  const bench::Statistics neg = bench::statistics(plain);
  std::fprintf(stderr, "a plain neg of one element, grad mode on: %.0f ns (median %.0f)\n",
               neg.min_ns, neg.median_ns);
  bench::print_passes("selective_cost", passes, arguments, "added per operator, in neg", neg.min_ns,
                      neg.median_ns);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
