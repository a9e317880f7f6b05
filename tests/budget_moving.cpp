// BudgetGuard with `moving`: values wait in a file, bit by bit, and the floor is lower.

#include <remat/budget.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "tests/support/files.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

using namespace remat::testing;
using remat::BudgetGuard;
using remat::BudgetOptions;
using remat::BudgetReport;
using remat::MemoryMeter;

namespace {

constexpr int64_t side = 64, layer_bytes = side * side * 4;

BudgetOptions options_in(const Folder& folder, int64_t layers) {
  BudgetOptions options{.bytes = layers * layer_bytes, .min_bytes = 0};
  options.moving = remat::MoveOptions{.directory = folder.path(), .min_bytes = 0};
  return options;
}

/// A chain whose results cannot be made again, because it reads memory that LibTorch did not
/// allocate. Each layer saves one of them.
struct Foreign {
  explicit Foreign(int64_t depth) : depth(depth) {}
  Tensor operator()() const {
    Tensor x = memory + 1;
    for (int64_t i = 0; i < depth; ++i) x = x * weight + memory;
    return x.sum();
  }
  Tensor grad() const {
    weight.mutable_grad() = Tensor();
    (*this)().backward();
    return weight.grad();
  }
  const int64_t depth;
  const Tensor weight = leaf({side, side});
  std::vector<float> numbers = std::vector<float>(side * side, 0.25F);
  const Tensor memory = at::from_blob(numbers.data(), {side, side});
};

}  // namespace

TEST_CASE("values that cannot be made again move, and the floor is lower", "[budget][moving]") {
  constexpr int64_t depth = 24;
  const Folder folder;
  const Foreign program(depth);
  const Tensor plain = program.grad();
  int64_t floor = 0;
  {
    const BudgetGuard guard({.bytes = 1, .min_bytes = 0});
    CHECK(program.grad().equal(plain));
    floor = guard.report().floor_bytes;
    CHECK(floor > depth * layer_bytes);
  }
  {
    const BudgetGuard guard(options_in(folder, 6));
    MemoryMeter meter;
    const int64_t before = meter.live_bytes();
    for (int i = 0; i < 3; ++i) CHECK(program.grad().equal(plain));
    const BudgetReport report = guard.report();
    CHECK(report.over_count == 0);
    CHECK(report.floor_bytes <= 6 * layer_bytes);
    CHECK(meter.peak_bytes() - before <= 6 * layer_bytes);
    CHECK(report.moves >= 3 * (depth - 6));
    CHECK(report.evictions == 0);
    CHECK(report.to_string().find("moves   ") != std::string::npos);
    CHECK(folder.open_files().size() == 1);
  }
  CHECK(folder.open_files().empty());
  CHECK(folder.num_entries() == 0);
}

TEST_CASE("every budget holds from 1.25 of the floor up, with moves", "[budget][moving]") {
  const Folder folder;
  const Foreign program(12);
  const Tensor plain = program.grad();
  int64_t floor = 0;
  {
    BudgetOptions options = options_in(folder, 1);
    options.bytes = 1;
    const BudgetGuard guard(options);
    CHECK(program.grad().equal(plain));
    floor = guard.report().floor_bytes;
    CHECK(floor <= 5 * layer_bytes + 64);
  }
  for (int64_t bytes = layer_bytes; bytes <= 20 * layer_bytes; bytes += layer_bytes / 2) {
    BudgetOptions options = options_in(folder, 1);
    options.bytes = bytes;
    const BudgetGuard guard(options);
    CHECK(program.grad().equal(plain));
    const int64_t peak = guard.report().peak_bytes;
    CAPTURE(bytes, floor);
    CHECK(peak <= (bytes * 4 >= floor * 5 ? bytes : std::max(bytes, floor * 11 / 10)));
  }
}

TEST_CASE("values whose source has changed move", "[budget][moving]") {
  const Folder folder;
  const Tensor weight = leaf({side, side}), start = at::randn({side, side});
  Tensor source = at::zeros({side, side});
  const auto program = [&] {
    weight.mutable_grad() = Tensor();
    source.copy_(start);
    Tensor sum = at::zeros({});
    for (int i = 0; i < 12; ++i) {
      sum = sum + ((source + 1).sin() * weight).sum();
      source.add_(0.5);
    }
    sum.backward();
    return weight.grad();
  };
  const Tensor plain = program();
  const auto floor_of = [&](const BudgetOptions& options) {
    const BudgetGuard guard(options);
    CHECK(program().equal(plain));
    return guard.report().floor_bytes;
  };
  const int64_t floor = floor_of({.bytes = 1, .min_bytes = 0});
  BudgetOptions options = options_in(folder, 1);
  options.bytes = 1;
  CHECK(floor > 12 * layer_bytes);
  CHECK(floor_of(options) < floor / 2);
}

TEST_CASE("what takes longer to make than to copy moves beside the work", "[budget][moving]") {
  constexpr int64_t width = 768;
  const Folder folder;
  const auto program = [&](const std::vector<Tensor>& weights) {
    Tensor x = at::ones({width, width});
    for (const Tensor& weight : weights) {
      x = x.mm(weight).mul(0.01).sin();
      weight.mutable_grad() = Tensor();
    }
    x.sum().backward();
    Tensors grads;
    for (const Tensor& weight : weights) grads.push_back(weight.grad());
    return grads;
  };
  std::vector<Tensor> weights;
  for (int i = 0; i < 12; ++i) weights.push_back(leaf({width, width}));
  const Tensors plain = program(weights);
  BudgetOptions options = options_in(folder, 1);
  options.bytes = 20 * width * width * 4;
  BudgetReport report;
  {
    const BudgetGuard guard(options);
    // The times are measured, and those of a busy machine may be wrong at first.
    for (int i = 0; i < 3 || (i < 40 && guard.report().moves == 0); ++i)
      require_bit_equal(program(weights), plain);
    report = guard.report();
  }
  CHECK(report.over_count == 0);
#ifndef __SANITIZE_THREAD__  // which makes writing slow
  CHECK(report.moves > 0);
#endif
}

TEST_CASE("moved values serve retained graphs, second derivatives and later scopes",
          "[budget][moving]") {
  const Folder folder;
  const Foreign program(12);
  const auto run = [&] {
    program.weight.mutable_grad() = Tensor();
    Tensor loss = program();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
    const Tensor first =
        torch::autograd::grad({loss}, {program.weight}, {}, std::nullopt, /*create_graph=*/true)[0];
    const Tensor second = torch::autograd::grad({first.sin().sum()}, {program.weight})[0];
    return Tensors{program.weight.grad(), first.detach(), second};
  };
  const Tensors plain = run();
  {
    const BudgetGuard guard(options_in(folder, 7));
    require_bit_equal(run(), plain);
    CHECK(guard.report().moves > 0);
  }
  program.weight.mutable_grad() = Tensor();
  auto guard = std::make_unique<BudgetGuard>(options_in(folder, 7));
  Tensor loss = program();
  guard.reset();
  CHECK(folder.open_files().size() == 1);
  loss.backward();
  const Tensor grad = program.weight.grad().clone();
  loss = Tensor();
  CHECK(grad.equal(program.grad()));
  CHECK(folder.open_files().empty());
}

TEST_CASE("a saved tensor that is written to after a move begins is refused as without a budget",
          "[budget][moving]") {
  const Folder folder;
  const Foreign program(10);
  const auto text = [&](bool has_budget) -> std::string {
    std::unique_ptr<BudgetGuard> guard;
    if (has_budget) guard = std::make_unique<BudgetGuard>(options_in(folder, 5));
    Tensor x = program.memory + 1;
    Tensor held = x;
    for (int i = 0; i < 10; ++i) x = x * program.weight + program.memory;
    held.add_(1);
    try {
      x.sum().backward();
    } catch (const c10::Error& error) {
      return std::string(error.what_without_backtrace()).substr(0, 95);
    }
    return "";
  };
  CHECK(text(false).find("modified by an inplace operation") != std::string::npos);
  CHECK(text(true) == text(false));
}

TEST_CASE("steps that move leave no byte, and use the same room in the file again",
          "[budget][moving]") {
  const Folder folder;
  const Foreign program(12);
  const Tensor plain = program.grad();
  const BudgetGuard guard(options_in(folder, 6));
  std::optional<LiveBytes> bytes;
  std::uintmax_t size = 0;
  for (int i = 0; i < 200; ++i) {
    REQUIRE(program.grad().equal(plain));
    if (i == 0) bytes.emplace();
    REQUIRE(bytes->held() == 0);
    const auto now = std::filesystem::file_size(folder.open_files().at(0));
    if (i == 20) size = now;
    if (i > 20) REQUIRE(now <= size + 4 * layer_bytes);
    REQUIRE(guard.report().source_bytes == 0);
  }
}

TEST_CASE("a full disk loses nothing: values stay, and one warning says so", "[budget][moving]") {
  const Folder folder;
  const Foreign program(16);
  const Tensor plain = program.grad();
  const Warnings warnings;
  const BudgetGuard guard(options_in(folder, 6));
  {
    const FileSizeLimit limit(3 * layer_bytes);
    CHECK(program.grad().equal(plain));
    CHECK(guard.report().over_count > 0);
    CHECK(program.grad().equal(plain));
  }
  CHECK(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts.at(0), contains("no more values are moved"));
}

TEST_CASE("a budget that is large enough moves nothing", "[budget][moving]") {
  const Folder folder;
  const Foreign program(12);
  const Tensor plain = program.grad();
  remat::BudgetOptions options{.bytes = 2'000'000'000};
  options.moving = remat::MoveOptions{.directory = folder.path()};
  const BudgetGuard budget(options);
  CHECK(program.grad().equal(plain));
  CHECK(budget.report().moves == 0);
}

TEST_CASE("tensors below min_bytes of moving stay", "[budget][moving]") {
  const Folder folder;
  const Foreign program(12);
  const Tensor plain = program.grad();
  BudgetOptions options = options_in(folder, 6);
  options.moving->min_bytes = layer_bytes + 1;
  const BudgetGuard guard(options);
  CHECK(program.grad().equal(plain));
  CHECK(guard.report().moves == 0);
  CHECK(guard.report().over_count > 0);
}

TEST_CASE("options of moving that a budget refuses", "[budget][moving]") {
  const auto refused = [](remat::MoveOptions moving) {
    BudgetOptions options{.bytes = 100};
    options.moving = std::move(moving);
    const BudgetGuard guard(options);
  };
  CHECK_THROWS_WITH(refused({}), contains("moving has no directory"));
  CHECK_THROWS_WITH(refused({.directory = "/nowhere"}),
                    contains("remat::BudgetGuard: no file could be made in the directory"));
  CHECK_THROWS_WITH(refused({.directory = "/tmp", .min_bytes = -1}), contains("was -1"));
}

TEST_CASE("two threads move their values in one budget", "[budget][moving]") {
  const Folder folder;
  const Foreign one(12), other(12);
  const Tensor plain_one = one.grad(), plain_other = other.grad();
  bool is_equal[2] = {true, true};
  const auto work = [&](const Foreign& program, const Tensor& plain, bool& equal) {
    const BudgetGuard guard(options_in(folder, 8));
    for (int i = 0; i < 30; ++i) equal = equal && program.grad().equal(plain);
  };
  std::thread thread([&] { work(one, plain_one, is_equal[0]); });
  work(other, plain_other, is_equal[1]);
  thread.join();
  CHECK(is_equal[0]);
  CHECK(is_equal[1]);
}

TEST_CASE("a saved source is what its storage holds, and dropped values keep the old content",
          "[budget][moving]") {
  constexpr int64_t elements = 250'000;  // cheaper to multiply again than to copy to a file
  const Folder folder;
  const auto grads = [](const Tensor& p) {
    const Tensor x = at::linspace(0.1, 1, elements).requires_grad_();
    Tensor y = p * x;                                                    // saves p itself
    for (int i = 0; i < 8; ++i) y = y + (p * (1.0 + 0.1 * i)).square();  // saves what p makes
    p.variable_data().mul_(0.5);                                         // past the version counter
    return torch::autograd::grad({y.sum()}, {p, x});
  };
  const auto weight = [] { return at::linspace(0.2, 2, elements).requires_grad_(); };
  const auto plain = grads(weight());
  int64_t evictions = 0;
  for (const int64_t tensors : {12, 9, 8, 7, 6, 5}) {
    CAPTURE(tensors);
    remat::BudgetOptions options{.bytes = tensors * elements * 4};
    options.moving = remat::MoveOptions{.directory = folder.path()};
    const Tensor p = weight();
    const BudgetGuard budget(options);
    const auto found = grads(p);
    CHECK(found[0].equal(plain[0]));
    CHECK(found[1].equal(plain[1]));
    evictions += budget.report().evictions;
  }
  CHECK(evictions > 0);
}
