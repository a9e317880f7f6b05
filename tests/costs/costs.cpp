// Runs each shape that grows at two sizes. Under callgrind costs_test.py counts what each run
// takes; alone it only runs.

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <remat/budget.h>
#include <remat/checkpoint.h>
#include <remat/hooks.h>
#include <remat/options.h>
#include <remat/tiers.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Callgrind writes down what it has counted, and begins anew, when this returns.
extern "C" __attribute__((noinline, visibility("default"))) void end_of_run() {
  asm volatile("" ::: "memory");
}

namespace {

using at::Tensor;

Tensor leaf() { return at::full({1}, 0.5).requires_grad_(); }

Tensor first(const Tensor& x, int64_t depth) {
  return remat::checkpoint(
      [depth](const Tensor& t) {
        const Tensor y = at::sin(t);
        return depth > 1 ? first(y, depth - 1) : y;
      },
      x);
}

Tensor last(const Tensor& x, int64_t depth) {
  return remat::checkpoint(
      [depth](const Tensor& t) { return at::sin(depth > 1 ? last(t, depth - 1) : t); }, x);
}

Tensor adds(const Tensor& x, const Tensor& captured, int64_t depth) {
  return remat::checkpoint(
      [&captured, depth](const Tensor& t) {
        const Tensor y = at::sin(t + captured);
        return depth > 1 ? adds(y, captured, depth - 1) : y;
      },
      x);
}

std::string directory() { return std::filesystem::temp_directory_path().string(); }

void save_in_file(int64_t count) {
  const remat::SaveOnDiskGuard guard({.directory = directory(), .min_bytes = 0});
  Tensor y = leaf();
  for (int64_t i = 0; i < count; ++i) y = at::sin(y);
  y.backward();
}

void save_in_tiers(int64_t count) {
  std::vector<Tensor> held{leaf()};
  const remat::SaveInTiersGuard guard(
      {.host_bytes = 100, .directory = directory(), .min_bytes = 0});
  for (int64_t i = 0; i < count; ++i) held.push_back(at::sin(held.back()));
}

void share_argument(int64_t count) {
  const Tensor x = leaf(), shared = at::full({1}, 2.0);
  std::vector<Tensor> results;
  for (int64_t i = 0; i < count; ++i)
    results.push_back(remat::checkpoint(
        {.inputs = remat::InputMode::CopyOnWrite},
        [](const Tensor& a, const Tensor& b) { return at::sin(a) * b; }, x, shared));
}

void give_arguments(int64_t count, remat::InputMode mode) {
  std::vector<Tensor> arguments;
  for (int64_t i = 0; i < count; ++i) arguments.push_back(at::full({1}, 0.5));
  arguments.front().requires_grad_();
  remat::checkpoint(
      {.inputs = mode},
      [](const std::vector<Tensor>& all) {
        Tensor sum = all.front();
        for (const Tensor& each : all) sum = sum + at::sin(each) * all.front();
        return sum;
      },
      arguments)
      .backward();
}

/// A module with so many buffers, of which forward writes to the first ones.
struct BufferedImpl : torch::nn::Module {
  explicit BufferedImpl(int64_t count, int64_t num_written) : num_written(num_written) {
    for (int64_t i = 0; i < count; ++i)
      all.push_back(register_buffer(std::to_string(i), at::ones({1})));
  }
  Tensor forward(const Tensor& x) {
    const at::NoGradGuard no_grad;
    for (int64_t i = 0; i < num_written; ++i) all[static_cast<std::size_t>(i)].add_(1);
    const at::AutoGradMode grad(true);
    return at::sin(x);
  }
  int64_t num_written;
  std::vector<Tensor> all;
};

void have_buffers(int64_t count, int64_t num_written) {
  const auto module = std::make_shared<BufferedImpl>(count, num_written);
  remat::checkpoint([module](const Tensor& x) { return remat::checkpoint(module, x); }, leaf())
      .backward();
}

/// A chain whose saved tensors take twice the budget.
void exceed_budget(int64_t count) {
  const int64_t width = 16, bytes = width * 4;
  const remat::BudgetGuard guard({.bytes = count * bytes / 2, .min_bytes = 0});
  Tensor y = at::full({width}, 0.5).requires_grad_();
  for (int64_t i = 0; i < count; ++i) y = at::sin(y);
  y.sum().backward();
}

/// A chain of `neg` on one element, within a budget without a limit or plain.
void chain(int64_t count, bool has_budget, bool has_backward) {
  std::optional<remat::BudgetGuard> guard;
  if (has_budget) guard.emplace(remat::BudgetOptions{.bytes = std::numeric_limits<int64_t>::max()});
  Tensor y = leaf();
  for (int64_t i = 0; i < count; ++i) y = at::neg(y);
  if (has_backward) y.backward();
}

struct Shape {
  const char* unit;
  int64_t small, large;
  std::function<void(int64_t)> run;
  bool is_triangle = false;  ///< backward runs each level as often as it lies deep
};

const std::vector<Shape> shapes{
    {"level that computes first", 250, 1000, [](int64_t n) { first(leaf(), n).backward(); }},
    {"level that captures", 250, 1000, [](int64_t n) { adds(leaf(), leaf(), n).backward(); }},
    {"run of a level", 50, 300, [](int64_t n) { last(leaf(), n).backward(); }, true},
    {"save in a file", 1000, 4000, save_in_file},
    {"save in tiers", 500, 2000, save_in_tiers},
    {"region that shares an argument", 1000, 4000, share_argument},
    {"buffer", 500, 2000, [](int64_t n) { have_buffers(n, 0); }},
    {"written buffer", 500, 2000, [](int64_t n) { have_buffers(n, n); }},
    {"argument", 500, 2000, [](int64_t n) { give_arguments(n, remat::InputMode::Shared); }},
    {"copied argument", 500, 2000,
     [](int64_t n) { give_arguments(n, remat::InputMode::CopyOnWrite); }},
    {"operator within a budget", 4000, 16'000, exceed_budget},
};

}  // namespace

int main() {
  at::set_num_threads(1);
  for (const Shape& shape : shapes) {
    shape.run(3);  // what the first run leaves in caches is no cost of a unit
    end_of_run();
    for (const int64_t count : {shape.small, shape.large}) {
      shape.run(count);
      end_of_run();
    }
    const auto units = [&](int64_t n) { return shape.is_triangle ? n * (n + 1) / 2 : n; };
    std::printf("%s\t%lld\t%lld\n", shape.unit, static_cast<long long>(units(shape.small)),
                static_cast<long long>(units(shape.large)));
  }
  // Instructions that an unlimited budget adds to an operator: plain, budget, forward, the whole.
  constexpr int64_t count = 2000;
  for (const bool has_backward : {false, true})
    for (const bool has_budget : {false, true}) {
      chain(3, has_budget, has_backward);
      end_of_run();
      chain(count, has_budget, has_backward);
      end_of_run();
    }
  std::printf("budget\t%lld\n", static_cast<long long>(count));
}
