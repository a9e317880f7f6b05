// Compares the cost of a region, a level of nesting and a saved tensor between few and many of
// them, in time and bytes besides the program's tensors. See METHOD.md.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <remat/checkpoint.h>
#include <remat/hooks.h>
#include <remat/options.h>
#include <remat/tiers.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "bench/arguments.h"
#include "bench/heap_count.h"
#include "bench/measure.h"
#include "bench/rounds.h"

namespace {

using bench::text;

/// Allocates the data of tensors without counting it: this data is the program's, not the regions'.
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

// Each level computes first: its recompute stops where the inner level begins.
at::Tensor nested_first(const at::Tensor& x, int64_t depth) {
  return remat::checkpoint(
      [depth](const at::Tensor& t) {
        const at::Tensor y = at::sin(t);
        return depth > 1 ? nested_first(y, depth - 1) : y;
      },
      x);
}

// Each level computes last: its recompute runs all inner levels.
at::Tensor nested_last(const at::Tensor& x, int64_t depth) {
  return remat::checkpoint(
      [depth](const at::Tensor& t) { return at::sin(depth > 1 ? nested_last(t, depth - 1) : t); },
      x);
}

std::string directory() { return std::filesystem::temp_directory_path().string(); }

at::Tensor saved_in_file(const at::Tensor& x, int64_t count) {
  const remat::SaveOnDiskGuard guard({.directory = directory(), .min_bytes = 0});
  return sines(x, count);
}

// The program holds the saved tensors, so they neither count in the budget nor move.
at::Tensor saved_in_tiers(const at::Tensor& x, int64_t count) {
  const remat::SaveInTiersGuard guard({.host_bytes = 1, .directory = directory(), .min_bytes = 0});
  std::vector<at::Tensor> held{x};
  for (int64_t i = 0; i < count; ++i) held.push_back(at::sin(held.back()));
  return held.back();
}

at::Tensor sharing_chain(at::Tensor y, int64_t count) {
  const at::Tensor shared = at::full({1}, 2.0);
  for (int64_t i = 0; i < count; ++i)
    y = remat::checkpoint(
        {.inputs = remat::InputMode::CopyOnWrite},
        [](const at::Tensor& t, const at::Tensor&) { return at::sin(t); }, y, shared);
  return y;
}

at::Tensor many_arguments(const at::Tensor& x, int64_t count, remat::InputMode mode) {
  std::vector<at::Tensor> arguments{x};
  for (int64_t i = 1; i < count; ++i) arguments.push_back(at::full({1}, 2.0));
  return remat::checkpoint(
      {.inputs = mode},
      [](const std::vector<at::Tensor>& all) {
        return sines(all.front(), static_cast<int64_t>(all.size()));
      },
      arguments);
}

/// A shape that grows. Every work has `count` calls of `sin`.
struct Shape {
  const char* name;
  const char* unit;
  at::Tensor (*checkpointed)(const at::Tensor&, int64_t);
  std::vector<int64_t> counts;
  /// True if all tensors made inside but the last stay, as inputs of regions.
  bool keeps_inputs = false;
  /// True if a unit counts beyond a work of one: then the first shape's region does not count.
  bool is_beyond_first = false;
  /// True if backward must run each level again as often as it is deep; then its bytes mean
  /// nothing.
  bool is_triangle = false;
  bool recomputes = true;
  /// True if all bytes beyond those of the plain graph are bookkeeping.
  bool says_bytes = true;

  /// Returns the number of `sin` calls that backward must run again.
  double recomputed(double count) const {
    if (!recomputes) return 0;
    return is_triangle ? count * (count + 1) / 2 : count;
  }
  double units(double count) const { return is_triangle ? recomputed(count) : count; }
  bool counts_bytes() const { return REMAT_BENCH_COUNTS_HEAP && says_bytes && !is_triangle; }
};

std::vector<Shape> shapes(bool smoke) {
  std::vector<Shape> all{
      {.name = "regions in a chain",
       .unit = "region",
       .checkpointed = [](const at::Tensor& x, int64_t n) { return chain(x, n); },
       .counts = {1, 10, 100, 1'000, 10'000, 100'000},
       .keeps_inputs = true},
      {.name = "tensors saved in a region",
       .unit = "saved tensor",
       .checkpointed = one_region,
       .counts = {1, 10, 100, 1'000, 10'000},
       .is_beyond_first = true},
      {.name = "levels, each first computes",
       .unit = "level",
       .checkpointed = nested_first,
       .counts = {1, 10, 100, 1'000}},
      {.name = "levels, each last computes",
       .unit = "run of a level",
       .checkpointed = nested_last,
       .counts = {1, 10, 100, 1'000},
       .is_triangle = true},
      {.name = "saves in a file",
       .unit = "save in a file",
       .checkpointed = saved_in_file,
       .counts = {1, 10, 1'000, 100'000},
       .recomputes = false,
       .says_bytes = false},
      {.name = "saves in tiers, all held",
       .unit = "save in tiers",
       .checkpointed = saved_in_tiers,
       .counts = {1, 10, 1'000, 10'000},
       .recomputes = false,
       .says_bytes = false},
      {.name = "regions that share a copy",
       .unit = "region that shares a copied argument",
       .checkpointed = [](const at::Tensor& x, int64_t n) { return sharing_chain(x, n); },
       .counts = {1, 10, 1'000, 100'000},
       .says_bytes = false},
      {.name = "arguments of a region",
       .unit = "argument",
       .checkpointed = [](const at::Tensor& x,
                          int64_t n) { return many_arguments(x, n, remat::InputMode::Shared); },
       .counts = {1, 10, 1'000, 8'000},
       .says_bytes = false},
      {.name = "copied arguments of a region",
       .unit = "copied argument",
       .checkpointed =
           [](const at::Tensor& x, int64_t n) {
             return many_arguments(x, n, remat::InputMode::CopyOnWrite);
           },
       .counts = {1, 10, 1'000, 8'000},
       .says_bytes = false}};
  if (smoke)
    for (Shape& shape : all) shape.counts.pop_back();
  return all;
}

double gradient(const at::Tensor& x, const at::Tensor& y) {
  x.mutable_grad() = at::Tensor();
  y.backward();
  return x.grad().item<double>();
}

/// Releases the saved tensors of a graph; its nodes stay.
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

/// Returns the heap bytes that the result of `make` holds. A first call fills the caches.
template <class Make>
double held_by(Make make) {
  make();
  const bench::HeapCounter counter;
  const auto made = make();
  return static_cast<double>(counter.count().bytes);
}

struct Bytes {
  double checkpointed = 0, plain = 0;  ///< [bytes] held after forward
  double nodes = 0;                    ///< [bytes] of the plain graph without its saved tensors
  double tensor = 0;                   ///< [bytes] of one tensor
  double bookkeeping = 0;              ///< [bytes] of the regions, beyond nodes and kept tensors
};

/// Throws if a freed graph has left bytes, since a count that leaks means nothing.
Bytes bytes_of(const Shape& shape, int64_t count) {
  const at::Tensor x = leaf();
  Bytes result;
  result.checkpointed = held_by([&] { return shape.checkpointed(x, count); });
  result.plain = held_by([&] { return sines(x, count); });
  result.nodes = held_by([&] {
    const at::Tensor y = sines(x, count);
    release_saved(y);
    return y;
  });
  {
    const at::NoGradGuard no_grad;
    result.tensor = held_by([&] { return at::sin(x); });
  }
  const auto kept = static_cast<double>(shape.keeps_inputs ? count - 1 : 0);
  result.bookkeeping = result.checkpointed - result.nodes - kept * result.tensor;
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
constexpr const char* kind_names[] = {"forward", "plain", "checkpointed"};

/// The costs of one count of a shape.
struct Row {
  int64_t count = 0;
  const char* unit = "";
  bench::Statistics overhead{};  ///< [ns] per unit
  double plain_ns = 0;           ///< of the plain step, per `sin`
  double of_ideal = 0;           ///< checkpointed step over plain step and recomputed forwards
  std::optional<Bytes> bytes{};
  double bytes_per_unit = 0;
};

std::vector<Row> rows_of(const Shape& shape, const std::vector<bench::Cell>& cells) {
  std::vector<Row> rows;
  bench::Statistics first;
  double first_bytes = 0;
  for (std::size_t i = 0; i < shape.counts.size(); ++i) {
    const bench::Cell* const cell = &cells[i * kinds];
    const double count = static_cast<double>(shape.counts[i]), runs = shape.recomputed(count);
    // If backward runs more again than forward has, that many forwards are not overhead.
    const double forwards = runs / count;
    Row row{.count = shape.counts[i], .unit = shape.unit};
    row.overhead = bench::overhead(cell[Checkpointed], cell[Plain], cell[Forward], forwards, 1);
    row.plain_ns = cell[Plain].result().min_ns / count;
    row.of_ideal = cell[Checkpointed].result().min_ns /
                   (cell[Plain].result().min_ns + forwards * cell[Forward].result().min_ns);
    if (shape.counts_bytes()) row.bytes = bytes_of(shape, row.count);
    row.bytes_per_unit = row.bytes ? row.bytes->bookkeeping : 0;
    double units = shape.units(count);
    if (shape.is_beyond_first && i == 0) {
      row.unit = "all of it";
      first = row.overhead;
      first_bytes = row.bytes_per_unit;
    } else if (shape.is_beyond_first) {
      units -= 1;
      row.overhead.min_ns -= first.min_ns;
      row.overhead.median_ns -= first.median_ns;
      row.bytes_per_unit -= first_bytes;
    }
    for (double* each :
         {&row.overhead.min_ns, &row.overhead.median_ns, &row.overhead.mad_ns, &row.bytes_per_unit})
      *each /= units;
    rows.push_back(row);
  }
  return rows;
}

void print_lines(const Shape& shape, const std::vector<bench::Cell>& cells,
                 const std::vector<Row>& rows, const bench::Arguments& arguments) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const std::string params =
        text("\"shape\": \"%s\", \"count\": %lld", shape.name, static_cast<long long>(row.count));
    for (std::size_t kind = 0; kind < kinds; ++kind)
      bench::print_json("scale", params + text(", \"kind\": \"%s\"", kind_names[kind]), arguments,
                        cells[i * kinds + kind].result());
    std::string measured =
        text("\"unit\": \"%s\", \"plain_ns_per_unit\": %.1f, \"of_plain_and_forward\": %.4f",
             row.unit, row.plain_ns, row.of_ideal);
    if (row.bytes)
      measured += text(
          ", \"bytes_per_unit\": %.1f, \"held_bytes\": %.0f, \"plain_held_bytes\": %.0f, "
          "\"nodes_bytes\": %.0f, \"tensor_bytes\": %.0f",
          row.bytes_per_unit, row.bytes->checkpointed, row.bytes->plain, row.bytes->nodes,
          row.bytes->tensor);
    bench::print_json("scale", params + ", \"kind\": \"overhead per unit\"", arguments,
                      row.overhead, measured);
  }
}

void print_table(const Shape& shape, const std::vector<Row>& rows) {
  std::fprintf(stderr, "%-34s %9s %9s %11s %13s %9s\n", text("overhead per %s", shape.unit).c_str(),
               "min [ns]", "median", "plain step", "of plain+fwd", "bytes");
  const auto bytes = [](bool is_there, const char* format, double value) {
    return is_there ? text(format, value) : std::string("-");
  };
  for (const Row& row : rows)
    std::fprintf(stderr, "%-34s %9.0f %9.0f %11.0f %13.3f %9s\n",
                 text("%lld%s", static_cast<long long>(row.count),
                      &row == rows.data() ? text(" (%s)", shape.name).c_str() : "")
                     .c_str(),
                 row.overhead.min_ns, row.overhead.median_ns, row.plain_ns, row.of_ideal,
                 bytes(row.bytes.has_value(), "%.1f", row.bytes_per_unit).c_str());
  // Without the first row: a single unit has no others beside it, or differs in kind.
  const auto spread = [&](auto value) {
    const auto [least, most] =
        std::minmax_element(rows.begin() + 1, rows.end(),
                            [&](const Row& a, const Row& b) { return value(a) < value(b); });
    return value(*most) / value(*least);
  };
  std::fprintf(stderr, "%-34s %9.2f %9.2f %11.2f %13s %9s\n", "    most / least, from 10 on",
               spread([](const Row& row) { return row.overhead.min_ns; }),
               spread([](const Row& row) { return row.overhead.median_ns; }),
               spread([](const Row& row) { return row.plain_ns; }), "",
               bytes(rows.back().bytes.has_value(), "%.2f",
                     spread([](const Row& row) { return row.bytes_per_unit; }))
                   .c_str());
}

int run(int argc, char** argv) {
  std::string only;
  const bench::Arguments arguments = bench::parse(argc, argv, {{"--unit UNIT", &only}});
  static DataAllocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
  std::vector<Shape> all = shapes(arguments.smoke);
  std::erase_if(all, [&](const Shape& shape) { return !only.empty() && only != shape.unit; });
  for (const Shape& shape : all)
    for (const int64_t count : shape.counts) {
      verify(shape, count);
      if (shape.counts_bytes()) bytes_of(shape, count);
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
    const std::vector<Row> rows = rows_of(shape, cells);
    print_lines(shape, cells, rows, arguments);
    print_table(shape, rows);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
