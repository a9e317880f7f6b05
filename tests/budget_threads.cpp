// BudgetGuard on several threads at a time (for the thread sanitizer), and writes that no guard
// sees.

#include <remat/budget.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>

#include "tests/support/support.h"

using namespace remat::testing;
using remat::BudgetGuard;

namespace {

constexpr int64_t side = 64, layer_bytes = side * side * 4;

/// Returns a loss whose dropped values need random numbers, views and writes in place.
Tensor loss_of(const Tensors& weights, const Tensor& x) {
  Tensor y = x;
  for (const Tensor& weight : weights) {
    y = y.mm(weight).div(8);
    y.slice(0, 0, side / 2).mul_(0.5);
    y = at::dropout(y.sin(), 0.3, true).add(x).tanh();
  }
  return y.sum();
}

Tensors weights_of(int64_t depth) {
  Tensors all;
  for (int64_t i = 0; i < depth; ++i) all.push_back(leaf({side, side}));
  return all;
}

/// A thread that runs until the object dies.
class Meanwhile {
 public:
  explicit Meanwhile(std::function<void()> work)
      : thread_([this, work = std::move(work)] {
          while (!is_over_.load()) work();
        }) {}
  ~Meanwhile() {
    is_over_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

}  // namespace

TEST_CASE("guarded threads, backwards elsewhere, allocations and draws at a time", "[budget]") {
  const Tensor x = at::randn({side, side});
  const Meanwhile allocates([] { at::empty({4 * side, side}); });
  const Meanwhile draws([] { at::rand({3}); });
  const auto train = [&](int64_t layers, bool is_elsewhere) {
    const Tensors weights = weights_of(8);
    for (int i = 0; i < 15; ++i) {
      const BudgetGuard guard({.bytes = layers * layer_bytes, .min_bytes = 0});
      const Tensor loss = loss_of(weights, x);
      if (is_elsewhere)
        std::thread([&] { loss.backward(); }).join();
      else
        loss.backward();
    }
  };
  std::thread first([&] { train(14, false); });
  std::thread second([&] { train(20, true); });
  train(30, false);
  first.join();
  second.join();
}

TEST_CASE("a dropped mask comes again, whatever other threads draw", "[budget]") {
  const Meanwhile draws([] { at::rand({3}); });
  for (int i = 0; i < 100; ++i) {
    const Tensor x = leaf({side, side});
    Tensor mask, grad;
    {
      const BudgetGuard guard({.bytes = 4 * layer_bytes, .min_bytes = 0});
      Tensor y = at::dropout(x, 0.5, true);
      mask = y.detach() != 0;
      y = y.sin();
      for (int k = 0; k < 5; ++k) y = y.exp().sin();
      grad = torch::autograd::grad({y.sum()}, {x})[0];
    }
    REQUIRE(mask.equal(grad != 0));
  }
}

TEST_CASE("a write to a tensor that died says nothing of a new tensor at its address", "[budget]") {
  const Tensor w = leaf({side, side});
  const BudgetGuard guard({.bytes = 4 * layer_bytes, .min_bytes = 0});
  Tensor dying = at::ones({side, side});
  dying.add_(1);  // the last operator of this thread until the other thread has made its graph
  const void* const address = dying.storage().unsafeGetStorageImpl();
  dying = Tensor();
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), layer_bytes, at::getCPUAllocator(), true);
  CHECK(storage.get() != address);
  std::memset(storage->mutable_data(), 0, layer_bytes);
  Tensor grad;
  std::atomic<bool> is_made{false}, is_settled{false};
  std::thread other([&] {
    const BudgetGuard own({.bytes = 4 * layer_bytes, .min_bytes = 0});
    Tensor y = at::empty({0}).set_(c10::Storage(storage), 0, {side, side}, {}).add(1) * w;
    for (int i = 0; i < 6; ++i) y = y.exp().tanh();
    is_made = true;
    while (!is_settled) std::this_thread::yield();
    grad = torch::autograd::grad({y.sum()}, {w})[0];
  });
  while (!is_made) std::this_thread::yield();
  w.sin();
  is_settled = true;
  other.join();
  CHECK(grad.isfinite().all().item<bool>());
}

TEST_CASE("a new tensor that another thread writes to is a source", "[budget]") {
  const Tensor w = leaf({side, side});
  const auto grad_within = [&](int64_t bytes) {
    const BudgetGuard guard({.bytes = bytes, .min_bytes = 0});
    const Tensor first = w.exp();  // something is saved
    Tensor x = torch::full({side, side}, 2.0);
    std::thread([&] { x.add_(1); }).join();
    Tensor y = (x * w).sin() * first;
    x = Tensor();
    for (int i = 0; i < 4; ++i) y = y.tanh();
    return torch::autograd::grad({y.sum()}, {w})[0];
  };
  const Tensor plain = grad_within(std::numeric_limits<int64_t>::max());
  for (int64_t layers = 1; layers < 8; ++layers)
    CHECK(plain.equal(grad_within(layers * layer_bytes)));
}

TEST_CASE("the data of a source is freed before backward", "[budget]") {
  const Tensor w = leaf({side, side});
  const auto grad_within = [&](int64_t bytes) {
    const Tensor x = at::full({side, side}, 0.5);  // before the guard: a source
    const BudgetGuard guard({.bytes = bytes, .min_bytes = 0});
    Tensor y = (x * 2).sin() * w;
    y = y.exp() * (x + 1).cos() * w;
    for (int i = 0; i < 3; ++i) y = y.tanh();
    x.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, c10::kCPU));
    x.storage().unsafeGetStorageImpl()->set_nbytes(0);
    return torch::autograd::grad({y.sum()}, {w})[0];
  };
  remat::MemoryMeter meter;
  const Tensor plain = grad_within(std::numeric_limits<int64_t>::max());
  const int64_t before = meter.live_bytes();
  for (int64_t layers = 1; layers < 8; ++layers)
    CHECK(plain.equal(grad_within(layers * layer_bytes)));
  CHECK(meter.live_bytes() == before);
}
