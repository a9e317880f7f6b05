// BudgetGuard on the stand-in: pools by device, room before operators and inside allocations,
// streams, generators.

#include <remat/budget.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tests/device/stand_in.h"
#include "tests/support/files.h"
#include "tests/support/support.h"

using namespace remat::testing;
using remat::BudgetGuard;
using remat::BudgetReport;
using remat::CheckpointError;
using remat::MemoryMeter;

namespace {

constexpr int64_t side = 48;

/// A chain of layers on a device; each saves several tensors.
struct Chain {
  explicit Chain(int64_t depth, int index = 0) : device(stand_in::device(index)) {
    for (int64_t i = 0; i < depth; ++i)
      weights.push_back(at::randn({side, side}).to(device).requires_grad_());
  }
  Tensor operator()(Tensor x) const {
    for (const Tensor& weight : weights) x = x.mm(weight).mul(0.125).sin().add(x).tanh();
    return x;
  }
  Tensors take_grads() const {
    Tensors all;
    for (const Tensor& weight : weights) {
      all.push_back(weight.grad().cpu());
      weight.mutable_grad().zero_();
    }
    return all;
  }
  void begin() const {
    for (const Tensor& weight : weights) weight.mutable_grad() = at::zeros_like(weight);
  }
  const at::Device device;
  Tensors weights;
};

Tensors step(const Chain& chain, const Tensor& x) {
  chain(x).sum().backward();
  return chain.take_grads();
}

/// Returns the bytes and the gradients of a step without a budget.
std::pair<int64_t, Tensors> plain_step(const Chain& chain, const Tensor& x) {
  chain.begin();
  MemoryMeter meter(chain.device);
  const int64_t before = meter.live_bytes();
  Tensors grads = step(chain, x);
  return {meter.peak_bytes() - before, std::move(grads)};
}

int64_t share_of(double share, int64_t bytes) {
  return static_cast<int64_t>(share * static_cast<double>(bytes));
}

/// Makes the device's allocator announce its allocations for its lifetime.
struct Announced {
  Announced() {
    stand_in::set_before_allocation([](int64_t bytes) {
      remat::announce_allocation(stand_in::device(stand_in::current_device()), bytes);
    });
  }
  ~Announced() { stand_in::set_before_allocation({}); }
  Announced(const Announced&) = delete;
  Announced& operator=(const Announced&) = delete;
};

/// Returns the error's text, or "" for none.
std::string refusal(const remat::BudgetOptions& options) {
  try {
    const BudgetGuard guard(options);
  } catch (const CheckpointError& error) {
    CHECK(error.kind() == CheckpointError::Kind::Unsupported);
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace

TEST_CASE("an allocator that announces holds every budget of a device from the first step on",
          "[device][budget]") {
  const Announced announced;
  const Chain chain(12);
  const Tensor x = at::randn({side, side}).to(chain.device);
  const auto [span, plain] = plain_step(chain, x);
  int64_t floor = 0;
  {
    const BudgetGuard guard({.bytes = 1, .device = chain.device});
    require_bit_equal(step(chain, x), plain);
    floor = guard.report().floor_bytes;
    CHECK(guard.report().over_count > 0);
    CHECK(guard.report().peak_bytes <= floor * 11 / 10);
  }
  for (int64_t percent = 1; percent <= 100; ++percent) {
    const int64_t bytes = span * percent / 100;
    CAPTURE(percent, floor, span);
    MemoryMeter meter(chain.device);
    const int64_t before = meter.live_bytes();
    const BudgetGuard guard({.bytes = bytes, .device = chain.device});
    require_bit_equal(step(chain, x), plain);
    const BudgetReport report = guard.report();
    const int64_t peak = meter.peak_bytes() - before;
    if (bytes >= floor * 5 / 4) {
      CHECK(peak <= bytes);
      CHECK(report.over_count == 0);
      if (percent < 80) CHECK(report.evictions > 0);
    } else {
      CHECK(peak <= std::max(bytes, floor * 11 / 10));
    }
  }
}

TEST_CASE("without announcements a device's budget holds once each operator has run",
          "[device][budget]") {
  const Chain chain(12);
  const Tensor x = at::randn({side, side}).to(chain.device);
  const auto [span, plain] = plain_step(chain, x);
  const double share = GENERATE(0.7, 0.5, 0.35);
  MemoryMeter meter(chain.device);
  const int64_t before = meter.live_bytes();
  const BudgetGuard guard({.bytes = share_of(share, span), .device = chain.device});
  require_bit_equal(step(chain, x), plain);
  meter.reset_peak();
  require_bit_equal(step(chain, x), plain);
  CHECK(meter.peak_bytes() - before <= share_of(share, span));
  CHECK(guard.report().evictions > 0);
  CHECK(guard.report().reruns > 0);
  CHECK(guard.report().peak_bytes >= meter.peak_bytes() - before);
}

TEST_CASE("steps on a device leave no byte and no record", "[device][budget]") {
  const Chain chain(6);
  const Tensor x = at::randn({side, side}).to(chain.device);
  const auto [span, plain] = plain_step(chain, x);
  const BudgetGuard guard({.bytes = share_of(0.5, span), .device = chain.device});
  MemoryMeter meter(chain.device);
  int64_t after_first = 0;
  for (int i = 0; i < 200; ++i) {
    require_bit_equal(step(chain, x), plain);
    if (i == 0) after_first = meter.live_bytes();
    REQUIRE(meter.live_bytes() == after_first);
    REQUIRE(guard.report().source_bytes == 0);
  }
}

TEST_CASE("each device has a budget of its own", "[device][budget]") {
  const Announced announced;
  const Chain first(10, 0), second(10, 1);
  const Tensor values = at::randn({side, side});
  const Tensor x = values.to(first.device);
  first.begin();
  second.begin();
  const auto program = [&] {
    second(first(x).to(second.device)).sum().backward();
    Tensors grads = first.take_grads();
    for (Tensor& each : second.take_grads()) grads.push_back(std::move(each));
    return grads;
  };
  const auto peaks = [&](const std::function<void()>& run) {
    MemoryMeter one(first.device), two(second.device);
    const int64_t there = one.live_bytes(), beyond = two.live_bytes();
    run();
    return std::pair(one.peak_bytes() - there, two.peak_bytes() - beyond);
  };
  Tensors plain, budgeted;
  const auto spans = peaks([&] { plain = program(); });
  const int64_t of_first = share_of(0.5, spans.first), of_second = share_of(0.4, spans.second);
  remat::BudgetOptions outermost{.bytes = of_first, .device = first.device};
  if (GENERATE(false, true)) outermost.moving = remat::MoveOptions{.min_bytes = 0};
  const auto held = peaks([&] {
    const BudgetGuard outer(outermost);
    const BudgetGuard inner({.bytes = of_second, .device = second.device});
    budgeted = program();
    CHECK(outer.report().peak_bytes <= of_first);
    CHECK(inner.report().peak_bytes <= of_second);
  });
  require_bit_equal(budgeted, plain);
  CHECK(held.first <= of_first);
  CHECK(held.second <= of_second);
}

TEST_CASE("random operators on a device draw forward's numbers when they run again",
          "[device][budget]") {
  const Chain chain(8);
  const Tensor x = at::randn({side, side}).to(chain.device);
  chain.begin();
  const auto program = [&] {
    at::Generator generator = at::globalContext().defaultGenerator(chain.device);
    generator.set_current_seed(5);
    Tensor y = x;
    for (const Tensor& weight : chain.weights)
      y = std::get<0>(at::native_dropout(y.mm(weight).mul(0.125).sin(), 0.4, true)).exp();
    y.sum().backward();
    Tensors all = chain.take_grads();
    all.push_back(at::scalar_tensor(static_cast<double>(stand_in::position())));
    return all;
  };
  const Tensors plain = program();
  const BudgetGuard guard({.bytes = 14 * side * side * 4, .device = chain.device});
  require_bit_equal(program(), plain);
  CHECK(guard.report().reruns > 0);
}

TEST_CASE("operators run again on the stream of forward, for which a reader elsewhere waits",
          "[device][budget]") {
  const Announced announced;
  const Chain chain(8);
  const Tensor x = at::randn({side, side}).to(chain.device);
  const auto [span, plain] = plain_step(chain, x);
  const BudgetGuard guard({.bytes = share_of(0.4, span), .device = chain.device});
  Tensor y;
  {
    const stand_in::OnStream on(stand_in::stream(0, 3));
    y = chain(x).sum();
  }
  stand_in::clear_log();
  y.backward();
  require_bit_equal(chain.take_grads(), plain);
  CHECK(guard.report().reruns > 0);
  // Results on another stream than the first are not dropped.
  const int64_t recorded = guard.report().operators;
  {
    const stand_in::OnStream on(stand_in::stream(0, 4));
    const Tensor other = chain(x);
    CHECK(guard.report().operators == recorded);
  }
}

TEST_CASE("a storage on a device that is emptied, or gets other data, has its value no more",
          "[device][budget]") {
  const Announced announced;
  const Chain chain(2);
  const auto bytes = static_cast<int64_t>(side * side * 4);
  const Tensor x = at::randn({side, side}).to(chain.device);
  chain.begin();
  const auto program = [&](bool empties) {
    const Tensor made = x.mul(0.5);
    const Tensor y = made.mm(chain.weights[0]).sin().mm(chain.weights[1]);
    if (empties) {
      made.storage().set_data_ptr_noswap(
          c10::GetAllocator(chain.device.type())->allocate(static_cast<std::size_t>(bytes)));
      at::Tensor(made.detach()).fill_(7);
    }
    y.sum().backward();
    return chain.take_grads();
  };
  const Tensors plain = program(false);
  const BudgetGuard guard({.bytes = std::numeric_limits<int64_t>::max(), .device = chain.device});
  require_bit_equal(program(false), plain);
  CHECK_THROWS_AS(program(true), c10::Error);
}

TEST_CASE("budgets of a device refuse what they cannot do", "[device][budget]") {
  CHECK(refusal({.bytes = 1, .device = at::kMeta}) != "");
  CHECK(refusal({.bytes = 1, .device = stand_in::device(), .check_values = true})
            .find("check_values") != std::string::npos);
  CHECK_THROWS_AS(refusal({.bytes = 1, .moving = remat::MoveOptions()}), c10::ValueError);
  const Tensor x = at::randn({4}).to(stand_in::device()).requires_grad_();
  const BudgetGuard guard({.bytes = 1 << 20, .device = at::Device(at::kPrivateUse1)});
  stand_in::set_capturing(true);
  CHECK_THROWS_AS(x.sin(), CheckpointError);
  stand_in::set_capturing(false);
}

namespace {

/// A chain whose results cannot be made again, because it reads memory of another allocator. Each
/// layer saves one of them.
struct Kept {
  Tensor operator()() const {
    Tensor x = memory + 1;
    for (int64_t i = 0; i < depth; ++i) x = x * weight + memory;
    return x.sum();
  }
  Tensor grad() const {
    weight.mutable_grad() = Tensor();
    (*this)().backward();
    return weight.grad().cpu();
  }
  const int64_t depth = 16;
  const Tensor weight = at::randn({side, side}).to(stand_in::device()).requires_grad_();
  std::vector<float> numbers = std::vector<float>(side * side, 0.25F);
  const Tensor memory = at::for_blob(numbers.data(), {side, side})
                            .options(at::TensorOptions().device(stand_in::device()))
                            .target_device(stand_in::device())
                            .make_tensor();
};

constexpr int64_t layer = side * side * 4;

remat::BudgetOptions moving(int64_t layers, const std::string& directory = "") {
  remat::BudgetOptions options{
      .bytes = layers * layer, .device = stand_in::device(), .min_bytes = 0};
  options.moving = remat::MoveOptions{.directory = directory, .min_bytes = 0};
  return options;
}

}  // namespace

TEST_CASE("values of a device that cannot be made again wait on the CPU, to the byte",
          "[device][budget][moving]") {
  const Kept program;
  const Tensor plain = program.grad();
  int64_t floor = 0;
  {
    remat::BudgetOptions options = moving(1);
    options.moving.reset();
    const BudgetGuard guard(options);
    CHECK(program.grad().equal(plain));
    floor = guard.report().floor_bytes;
  }
  const Folder folder;
  const bool has_file = GENERATE(false, true);
  MemoryMeter meter(stand_in::device());
  const int64_t before = meter.live_bytes();
  {
    const BudgetGuard guard(moving(8, has_file ? folder.path() : ""));
    CHECK(program.grad().equal(plain));  // learns the allocations of operators
    for (int i = 0; i < 3; ++i) {
      guard.counters().reset();
      meter.reset_peak();
      CHECK(program.grad().equal(plain));
      const BudgetReport report = guard.report();
      CHECK(report.moves > 0);
      CHECK(report.over_count == 0);
      CHECK(meter.peak_bytes() - before <= 8 * layer);
    }
    CHECK(floor > 16 * layer);
    CHECK(folder.open_files().size() == (has_file ? 1 : 0));
  }
  CHECK(folder.open_files().empty());
  program.weight.mutable_grad() = Tensor();
  CHECK(meter.live_bytes() <= before);
}

TEST_CASE("operators of a device whose results are copied in less time run once",
          "[device][budget][moving]") {
  const Chain chain(12);
  const Tensor x = at::randn({side, side}).to(chain.device);
  const auto [span, plain] = plain_step(chain, x);
  const bool is_announced = GENERATE(false, true);
  std::optional<Announced> announced;
  if (is_announced) announced.emplace();
  remat::BudgetOptions options = moving(1);
  options.bytes = share_of(0.5, span);
  const BudgetGuard guard(options);
  MemoryMeter meter(chain.device);
  int64_t after_first = 0;
  for (int i = 0; i < 20; ++i) {
    require_bit_equal(step(chain, x), plain);
    if (i == 0) after_first = meter.live_bytes();
    REQUIRE(meter.live_bytes() == after_first);
  }
  const BudgetReport report = guard.report();
  CHECK(report.evictions + report.moves > 0);
}

TEST_CASE("a moved value is read back on the stream of forward", "[device][budget][moving]") {
  const Kept program;
  const Tensor plain = program.grad();
  const BudgetGuard guard(moving(8));
  for (int i = 0; i < 2; ++i) {
    program.weight.mutable_grad() = Tensor();
    Tensor loss;
    {
      const stand_in::OnStream on(stand_in::stream(0, 3));
      loss = program();
    }
    loss.backward();
    CHECK(program.weight.grad().cpu().equal(plain));
  }
  CHECK(guard.report().moves > 0);
}
