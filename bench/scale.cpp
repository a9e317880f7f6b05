// Whether a region, a level of nesting and a saved tensor cost the same when there are many of them, in
// time and in bytes that are not the program's tensors. See METHOD.md.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <remat/checkpoint.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "bench/arguments.h"
#include "bench/heap_count.h"
#include "bench/measure.h"
#include "bench/rounds.h"

namespace {

/// Gives tensors their data past the count: what they hold is the program's, not the regions'.
class DataAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const data = bytes == 0 ? nullptr : bench::take_uncounted(c10::gAlignment, bytes);
    return {data, data, &bench::give_back_uncounted, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &bench::give_back_uncounted; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

at::Tensor leaf() { return at::full({1}, 0.5).requires_grad_(); }

at::Tensor sines(at::Tensor y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y = at::sin(y);
  return y;
}

at::Tensor chain(at::Tensor y, int64_t count) {
  const auto region = [](const at::Tensor& t) { return at::sin(t); };
  for (int64_t i = 0; i < count; ++i) y = remat::checkpoint(region, y);
  return y;
}

at::Tensor one_region(const at::Tensor& x, int64_t count) {
  return remat::checkpoint([count](const at::Tensor& t) { return sines(t, count); }, x);
}

// Each level computes first: its recompute stops where the level inside begins.
at::Tensor nested_first(const at::Tensor& x, int64_t depth) {
  return remat::checkpoint(
      [depth](const at::Tensor& t) {
        const at::Tensor y = at::sin(t);
        return depth > 1 ? nested_first(y, depth - 1) : y;
      },
      x);
}

// Each level computes last: its recompute runs all levels inside.
at::Tensor nested_last(const at::Tensor& x, int64_t depth) {
  return remat::checkpoint(
      [depth](const at::Tensor& t) { return at::sin(depth > 1 ? nested_last(t, depth - 1) : t); },
      x);
}

/// A shape that grows; every work has as many `sin` as its count says.
struct Shape {
  const char* name;
  const char* unit;
  at::Tensor (*checkpointed)(const at::Tensor&, int64_t);
  std::vector<int64_t> counts;
  /// Of `sin`, that backward must run again.
  double (*recomputed)(double count);
  /// Tensors made inside that stay as inputs of regions.
  int64_t (*kept)(int64_t count);
  bool has_bytes;
  /// The unit is what comes on top of a work of one: the first shape's region is not counted.
  bool is_beyond_first;
};

double as_many(double count) { return count; }
double triangle(double count) { return count * (count + 1) / 2; }
int64_t none(int64_t) { return 0; }
int64_t all_but_one(int64_t count) { return count - 1; }

std::vector<Shape> shapes(bool smoke) {
  std::vector<Shape> all{{"regions in a chain",
                          "region",
                          [](const at::Tensor& x, int64_t n) { return chain(x, n); },
                          {1, 10, 100, 1'000, 10'000, 100'000},
                          as_many,
                          all_but_one,
                          true,
                          false},
                         {"tensors saved in a region",
                          "saved tensor",
                          one_region,
                          {1, 10, 100, 1'000, 10'000},
                          as_many,
                          none,
                          true,
                          true},
                         {"levels, each first computes",
                          "level",
                          nested_first,
                          {1, 10, 100, 1'000},
                          as_many,
                          none,
                          true,
                          false},
                         {"levels, each last computes",
                          "run of a level",
                          nested_last,
                          {1, 10, 100, 1'000},
                          triangle,
                          none,
                          false,
                          false}};
  if (smoke)
    for (Shape& shape : all) shape.counts.pop_back();
  return all;
}

double gradient(const at::Tensor& x, const at::Tensor& y) {
  x.mutable_grad() = at::Tensor();
  y.backward();
  return x.grad().item<double>();
}

/// Lets go of what a graph saved; its nodes stay.
void release_saved(const at::Tensor& root) {
  std::vector<torch::autograd::Node*> waiting{root.grad_fn().get()};
  std::unordered_set<torch::autograd::Node*> seen(waiting.begin(), waiting.end());
  while (!waiting.empty()) {
    torch::autograd::Node* const node = waiting.back();
    waiting.pop_back();
    node->release_variables();
    for (const auto& edge : node->next_edges())
      if (edge.function && seen.insert(edge.function.get()).second)
        waiting.push_back(edge.function.get());
  }
}

/// What `make` returns holds so much of the heap, once what the first call leaves in caches is there.
template <class Make>
bench::HeapCount held_by(Make make) {
  make();
  const bench::HeapCounter counter;
  const auto made = make();
  const bench::HeapCount result = counter.count();
  return result;
}

struct Bytes {
  double checkpointed = 0, plain = 0, nodes = 0, tensor = 0;  ///< [bytes] held after forward
  double bookkeeping = 0;  ///< [bytes] of the regions, beyond nodes and kept tensors
};

/// Throws if a graph that is gone has left something: a count that leaks says nothing.
Bytes bytes_of(const Shape& shape, int64_t count) {
  const at::Tensor x = leaf();
  const auto held = [](auto make) { return static_cast<double>(held_by(make).bytes); };
  Bytes result;
  result.checkpointed = held([&] { return shape.checkpointed(x, count); });
  result.plain = held([&] { return sines(x, count); });
  result.nodes = held([&] {
    const at::Tensor y = sines(x, count);
    release_saved(y);
    return y;
  });
  {
    const at::NoGradGuard no_grad;
    result.tensor = held([&] { return at::sin(x); });
  }
  result.bookkeeping =
      result.checkpointed - result.nodes - static_cast<double>(shape.kept(count)) * result.tensor;
  const bench::HeapCounter counter;
  gradient(x, shape.checkpointed(x, count));
  x.mutable_grad() = at::Tensor();
  if (counter.count().bytes != 0)
    throw std::runtime_error(std::string(shape.name) + ", " + std::to_string(count) + ": " +
                             std::to_string(counter.count().bytes) +
                             " bytes were left by a graph that is gone");
  return result;
}

void verify(const Shape& shape, int64_t count) {
  const at::Tensor x = leaf();
  const double expected = gradient(x, sines(x, count));
  const double found = gradient(x, shape.checkpointed(x, count));
  if (found != expected || !std::isfinite(found))
    throw std::runtime_error(std::string("WRONG: ") + shape.name + ", " + std::to_string(count) +
                             ": the gradient is not the plain one");
}

/// The cells of one shape and count, in this order.
enum Kind { Forward, Plain, Checkpointed, kinds };

void print_shape(const Shape& shape, const std::vector<bench::Cell>& cells,
                 const bench::Arguments& arguments) {
  std::fprintf(stderr, "%-30s %12s %10s %12s %14s %12s\n",
               (std::string("overhead per ") + shape.unit).c_str(), "min [ns]", "median",
               "plain step", "of plain+fwd", "bytes");
  double least[3] = {INFINITY, INFINITY, INFINITY}, most[3] = {0, 0, 0};
  double first_ns = 0, first_median_ns = 0, first_bytes = 0;
  for (std::size_t i = 0; i < shape.counts.size(); ++i) {
    const int64_t count = shape.counts[i];
    const bench::Cell* const cell = &cells[i * kinds];
    const double number = static_cast<double>(count), runs = shape.recomputed(number);
    // The forward that is recomputed, in plain forwards.
    bench::Statistics cost =
        bench::overhead(cell[Checkpointed], cell[Plain], cell[Forward], runs / number, 1);
    Bytes bytes;
    if (shape.has_bytes && REMAT_BENCH_COUNTS_HEAP) bytes = bytes_of(shape, count);
    double units = runs;
    const double whole_ns = cost.min_ns, whole_median_ns = cost.median_ns;
    if (shape.is_beyond_first && i > 0) {
      units -= 1;
      cost.min_ns -= first_ns;
      cost.median_ns -= first_median_ns;
    }
    const double per_unit[3] = {
        cost.min_ns / units, cell[Plain].result().min_ns / number,
        (bytes.bookkeeping - (shape.is_beyond_first && i > 0 ? first_bytes : 0)) / units};
    if (i == 0)
      first_ns = whole_ns, first_median_ns = whole_median_ns, first_bytes = bytes.bookkeeping;
    cost.min_ns /= units, cost.median_ns /= units, cost.mad_ns /= units;
    const double of_ideal =
        cell[Checkpointed].result().min_ns /
        (cell[Plain].result().min_ns + runs / number * cell[Forward].result().min_ns);
    const std::string params = std::string("\"shape\": \"") + shape.name +
                               "\", \"count\": " + std::to_string(count) + ", " +
                               arguments.clock_member();
    constexpr const char* names[] = {"forward", "plain", "checkpointed"};
    for (int kind = 0; kind < kinds; ++kind)
      bench::print_json("scale", params + ", \"kind\": \"" + names[kind] + '"', cell[kind].result(),
                        at::get_num_threads(), arguments.commit);
    char measured[512];
    std::snprintf(measured, sizeof measured,
                  "\"unit\": \"%s\", \"plain_ns_per_unit\": %.1f, \"of_plain_and_forward\": %.4f",
                  shape.unit, per_unit[1], of_ideal);
    std::string more = measured;
    if (shape.has_bytes && REMAT_BENCH_COUNTS_HEAP) {
      std::snprintf(measured, sizeof measured,
                    ", \"bytes_per_unit\": %.1f, \"held_bytes\": %.0f, \"plain_held_bytes\": %.0f, "
                    "\"nodes_bytes\": %.0f, \"tensor_bytes\": %.0f",
                    per_unit[2], bytes.checkpointed, bytes.plain, bytes.nodes, bytes.tensor);
      more += measured;
    }
    bench::print_json("scale", params + ", \"kind\": \"overhead per unit\"", cost,
                      at::get_num_threads(), arguments.commit, more);
    char in_bytes[32] = "-";
    if (shape.has_bytes && REMAT_BENCH_COUNTS_HEAP)
      std::snprintf(in_bytes, sizeof in_bytes, "%.1f", per_unit[2]);
    std::fprintf(stderr, "%-30s %12.0f %10.0f %12.0f %14.3f %12s\n",
                 (std::to_string(count) + (i == 0 ? std::string(" ") + shape.name : "")).c_str(),
                 cost.min_ns, cost.median_ns, per_unit[1], of_ideal, in_bytes);
    // One is a unit without others beside it, or another thing altogether.
    for (int k = 0; k < 3 && i > 0; ++k) {
      least[k] = std::min(least[k], per_unit[k]);
      most[k] = std::max(most[k], per_unit[k]);
    }
  }
  std::fprintf(stderr, "%-30s %12.2f %10s %12.2f %14s %12.2f\n", "    most / least, from 10 on",
               most[0] / least[0], "", most[1] / least[1], "",
               least[2] > 0 ? most[2] / least[2] : 0.0);
}

int run(int argc, char** argv) {
  std::string only;
  const bench::Arguments arguments = bench::parse(
      argc, argv, " [--unit UNIT]", [&](const std::string& word, const bench::NextWord& value) {
        if (word != "--unit") return false;
        only = value();
        return true;
      });
  at::set_num_threads(1);
  static DataAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
  std::vector<Shape> all = shapes(arguments.smoke);
  std::erase_if(all, [&](const Shape& shape) { return !only.empty() && only != shape.unit; });
  for (const Shape& shape : all)
    for (const int64_t count : shape.counts) {
      verify(shape, count);
      if (REMAT_BENCH_COUNTS_HEAP && shape.has_bytes) bytes_of(shape, count);
    }
  if (arguments.smoke) return 0;

  for (const Shape& shape : all) {
    std::vector<bench::Cell> cells;
    for (const int64_t count : shape.counts) {
      const at::Tensor x = leaf();
      cells.emplace_back([x, count] { sines(x, count); });
      cells.emplace_back([x, count] {
        x.mutable_grad() = at::Tensor();
        sines(x, count).backward();
      });
      cells.emplace_back([x, count, checkpointed = shape.checkpointed] {
        x.mutable_grad() = at::Tensor();
        checkpointed(x, count).backward();
      });
    }
    bench::measure(cells, arguments);
    print_shape(shape, cells, arguments);
  }
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
