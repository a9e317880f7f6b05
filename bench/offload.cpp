// What it costs to keep saved tensors elsewhere, per saved byte, against plain autograd. See METHOD.md.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/mul.h>
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

#include "bench/measure.h"

namespace {

using bench::Clock;

constexpr int64_t num_operators = 16;

struct Variant {
  const char* name;
  bool is_exact;
  std::function<std::shared_ptr<void>()> guard;
};

std::vector<Variant> variants(const std::filesystem::path& directory) {
  return {
      {"plain", true, [] { return nullptr; }},
      {"SaveOnCpuGuard (stays)", true, [] { return std::make_shared<remat::SaveOnCpuGuard>(); }},
      {"SaveOnDiskGuard", true,
       [directory] {
         return std::make_shared<remat::SaveOnDiskGuard>(
             remat::SaveOnDiskOptions{.directory = directory});
       }},
      {"SaveAsGuard(kBFloat16)", false,
       [] { return std::make_shared<remat::SaveAsGuard>(at::kBFloat16); }},
      {"SaveAsGuard(kHalf)", false,
       [] { return std::make_shared<remat::SaveAsGuard>(at::kHalf); }}};
}

struct Times {
  double forward_ns = 0, backward_ns = 0;
  at::Tensor gradient;
};

/// A chain of sines: each saves its input, all but the first of which can be moved.
Times measure(const Variant& variant, int64_t numel, Clock clock) {
  const at::Tensor x = at::rand({numel}).requires_grad_();
  x.mutable_data_ptr<float>()[0] = 0.25f;
  Times times;
  const int64_t start = bench::now_ns(clock);
  at::Tensor y = x;
  {
    const auto guard = variant.guard();
    for (int64_t i = 0; i <= num_operators; ++i) y = y.sin();
  }
  const int64_t between = bench::now_ns(clock);
  y.backward(at::ones_like(y));
  times.backward_ns = static_cast<double>(bench::now_ns(clock) - between);
  times.forward_ns = static_cast<double>(between - start);
  at::Tensor at_x = x.detach(), expected = at::ones_like(at_x);
  for (int64_t i = 0; i <= num_operators; ++i) {
    expected = at::mul(expected, at_x.cos());
    at_x = at_x.sin();
  }
  const double tolerance = variant.is_exact ? 1e-5 : 0.1;
  if (!at::allclose(x.grad(), expected, tolerance, tolerance))
    throw std::runtime_error(std::string("a wrong gradient: ") + variant.name);
  return times;
}

int run(int argc, char** argv) {
  bool smoke = false;
  int64_t samples = 15, numel = 1 << 20;
  Clock clock = Clock::Wall;
  std::filesystem::path directory = std::filesystem::temp_directory_path();
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--smoke")
      smoke = true;
    else if (word == "--no-peer")
      continue;
    else if (word == "--samples" && i + 1 < argc)
      samples = std::stoll(argv[++i]);
    else if (word == "--numel" && i + 1 < argc)
      numel = std::stoll(argv[++i]);
    else if (word == "--directory" && i + 1 < argc)
      directory = argv[++i];
    else if (word == "--clock" && i + 1 < argc)
      clock = std::string(argv[++i]) == "thread" ? Clock::Thread : Clock::Wall;
    else
      throw std::runtime_error(
          "usage: offload [--smoke] [--samples N] [--numel N] [--directory PATH] "
          "[--clock wall|thread]");
  }
  at::set_num_threads(1);
  const std::filesystem::path folder = REMAT_BENCH_FOLDER;
  const std::string commit =
      bench::output_of("git -C '" + folder.string() + "' describe --always --dirty");
  const std::vector<Variant> all = variants(directory);
  if (smoke) {
    for (const Variant& variant : all) measure(variant, 1 << 15, clock);
    return 0;
  }
  // The sides take turns; the first round warms up.
  std::vector<std::vector<double>> forward(all.size()), backward(all.size());
  const double bytes = static_cast<double>(num_operators * numel * 4);
  for (int64_t round = -1; round < samples; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Times each = measure(all[i], numel, clock);
      if (round < 0) continue;
      forward[i].push_back(each.forward_ns);
      backward[i].push_back(each.backward_ns);
    }
  std::fprintf(stderr, "%-26s %9s %9s   of medians: %8s %8s\n", "added ns per saved byte",
               "forward", "backward", "forward", "backward");
  const bench::Statistics f0 = bench::statistics(forward[0]), b0 = bench::statistics(backward[0]);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bench::Statistics f = bench::statistics(forward[i]), b = bench::statistics(backward[i]);
    for (const auto& [pass, result] : {std::pair("forward", f), std::pair("backward", b)})
      bench::print_json("offload",
                        std::string("\"variant\": \"") + all[i].name + "\", \"pass\": \"" + pass +
                            "\", \"saved_bytes\": " + std::to_string(static_cast<int64_t>(bytes)) +
                            ", \"clock\": \"" + (clock == Clock::Wall ? "wall" : "thread") + '"',
                        result, at::get_num_threads(), commit);
    std::fprintf(stderr, "%-26s %9.2f %9.2f               %8.2f %8.2f\n", all[i].name,
                 (f.min_ns - f0.min_ns) / bytes, (b.min_ns - b0.min_ns) / bytes,
                 (f.median_ns - f0.median_ns) / bytes, (b.median_ns - b0.median_ns) / bytes);
  }
  std::fprintf(stderr, "plain: %.2f ns per saved byte forward, %.2f backward\n", f0.min_ns / bytes,
               b0.min_ns / bytes);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
