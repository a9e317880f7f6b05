// Measures places for saved tensors, per saved byte, against plain autograd. See METHOD.md.

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sin.h>
#include <remat/hooks.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/rounds.h"

namespace {

constexpr int64_t num_operators = 16;

struct Variant {
  const char* name;
  bool is_exact;
  std::function<std::shared_ptr<void>()> guard;
};

std::vector<Variant> variants(const std::filesystem::path& directory, const at::Device& device) {
  const auto pinned = [] {
    return std::make_shared<remat::SaveOnCpuGuard>(remat::SaveOnCpuOptions{.pin_memory = true});
  };
  std::vector<Variant> all{{"plain", true, [] { return nullptr; }},
                           {device.is_cpu() ? "SaveOnCpuGuard (stays)" : "SaveOnCpuGuard", true,
                            [] { return std::make_shared<remat::SaveOnCpuGuard>(); }},
                           {"SaveOnDiskGuard", true,
                            [directory] {
                              return std::make_shared<remat::SaveOnDiskGuard>(
                                  remat::SaveOnDiskOptions{.directory = directory});
                            }},
                           {"SaveAsGuard(kBFloat16)", false,
                            [] { return std::make_shared<remat::SaveAsGuard>(at::kBFloat16); }},
                           {"SaveAsGuard(kHalf)", false,
                            [] { return std::make_shared<remat::SaveAsGuard>(at::kHalf); }}};
  if (!device.is_cpu()) all.insert(all.begin() + 2, {"SaveOnCpuGuard, pin_memory", true, pinned});
  return all;
}

struct Times {
  double forward_ns = 0, backward_ns = 0;
  at::Tensor gradient;
};

at::Tensor plain_gradient(const at::Tensor& at_x) {
  const at::Tensor x = at_x.detach().requires_grad_();
  at::Tensor y = x;
  for (int64_t i = 0; i <= num_operators; ++i) y = y.sin();
  y.backward(at::ones_like(y));
  return x.grad();
}

/// A chain of sines. Each saves its input, and all inputs but the first can be moved.
Times measure(const Variant& variant, int64_t numel, const bench::Arguments& arguments) {
  at::Tensor values = at::rand({numel});
  values.mutable_data_ptr<float>()[0] = 0.25f;
  const at::Tensor x = values.to(arguments.device).requires_grad_();
  Times times;
  const int64_t start = bench::now_ns(arguments);
  at::Tensor y = x;
  {
    const auto guard = variant.guard();
    for (int64_t i = 0; i <= num_operators; ++i) y = y.sin();
  }
  const int64_t between = bench::now_ns(arguments);
  y.backward(at::ones_like(y));
  times.backward_ns = static_cast<double>(bench::now_ns(arguments) - between);
  times.forward_ns = static_cast<double>(between - start);
  // Rounded tensors cannot give the plain gradient; all others must, bit by bit.
  const at::Tensor expected = plain_gradient(x);
  const bool is_right =
      variant.is_exact ? x.grad().equal(expected) : at::allclose(x.grad(), expected, 0.1, 0.1);
  if (!is_right) throw std::runtime_error(std::string("a wrong gradient: ") + variant.name);
  return times;
}

int run(int argc, char** argv) {
  std::string numels = "1048576", directory = std::filesystem::temp_directory_path().string();
  const bench::Arguments arguments =
      bench::parse(argc, argv, {{"--numel N", &numels}, {"--directory PATH", &directory}},
                   bench::RunsOn::AnyDevice);
  const int64_t numel = std::stoll(numels);
  const std::vector<Variant> all = variants(directory, arguments.device);
  if (arguments.smoke) {
    for (const Variant& variant : all) measure(variant, 1 << 15, arguments);
    return 0;
  }
  // The sides take turns; the first round warms up.
  std::vector<bench::Passes> passes;
  for (const Variant& variant : all) passes.emplace_back(variant.name);
  for (int64_t round = -1; round < arguments.samples; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Times each = measure(all[i], numel, arguments);
      if (round < 0) continue;
      passes[i].forward.push_back(each.forward_ns);
      passes[i].backward.push_back(each.backward_ns);
    }
  const double bytes = static_cast<double>(num_operators * numel * 4);
  bench::print_passes("offload", passes, arguments, "added ns per saved byte", bytes, bytes,
                      bench::text(", \"saved_bytes\": %.0f", bytes));
  std::fprintf(stderr, "plain: %.2f ns per saved byte forward, %.2f backward\n",
               bench::statistics(passes[0].forward).min_ns / bytes,
               bench::statistics(passes[0].backward).min_ns / bytes);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
