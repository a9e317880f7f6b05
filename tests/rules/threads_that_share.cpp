// Sharing between threads besides graphs: modules of one type made and copied, plans, choices
// and reports.

#include <thread>

#include "remat/fit.h"
#include "remat/report.h"
#include "tests/support/nn.h"

namespace {

namespace nn = torch::nn;

constexpr int num_threads = 4, rounds = 10;

/// All begin at once. Returns how often `work` was right.
int right_in_threads(const std::function<bool(int)>& work) {
  std::atomic<int> right{0}, ready{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i)
    threads.emplace_back([&, i] {
      ++ready;
      while (ready < num_threads) std::this_thread::yield();
      for (int round = 0; round < rounds; ++round) right += work(i) ? 1 : 0;
    });
  for (std::thread& each : threads) each.join();
  return right;
}

TEST_CASE("threads make, copy, train and drop modules of one type", "[threads][module]") {
  const int right = right_in_threads([](int) {
    remat::Checkpointed<nn::LinearImpl> first(6, 6), second(6, 6);
    nn::Sequential model(first, second);
    const auto copy = std::dynamic_pointer_cast<nn::SequentialImpl>(model->clone());
    const Tensor x = leaf({4, 6});
    const Tensor plain =
        at::linear(at::linear(x, first->weight, first->bias), second->weight, second->bias);
    const Tensors expected = grad_of(plain, {x});
    return at::equal(grad_of(model->forward(x), {x})[0], expected[0]) &&
           at::equal(grad_of(copy->forward(x), {x})[0], expected[0]);
  });
  CHECK(right == num_threads * rounds);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("threads ask for a plan while others run by it", "[threads][fit]") {
  const Tensor w = leaf({16, 16}), x = at::randn({8, 16});
  const remat::Stage stage = [w](const Tensor& t) { return t.matmul(w).tanh().exp().tanh(); };
  const remat::Fitted fitted =
      remat::fit({stage, stage, stage}, x, 1 << 20, {.measure = {.warmup = 0, .repeats = 1}});
  const Tensor plain = stage(stage(stage(x)));
  const Tensor expected = grad_of(plain, {w})[0];
  const int right = right_in_threads([&](int i) {
    if (i % 2 == 1) return fitted.plan().stages() == 3 && fitted.cost().stages.size() == 3;
    return at::equal(grad_of(fitted(x), {w})[0], expected);
  });
  CHECK(right == num_threads * rounds);
}

TEST_CASE("threads read reports while others run", "[threads][recorder]") {
  remat::Recorder recorder;
  const Tensor x = leaf({64});
  const auto f = [](const Tensor& t) { return t.sin().exp().tanh(); };
  const Tensor expected = grad_of(f(x), {x})[0];
  const int right = right_in_threads([&](int i) {
    if (i == 0) return !recorder.to_html().empty() && recorder.report().regions.size() <= 1;
    return at::equal(grad_of(remat::checkpoint({.name = "shared"}, f, x), {x})[0], expected);
  });
  CHECK(right == num_threads * rounds);
  CHECK(recorder.report().regions.at(0).recomputes == (num_threads - 1) * rounds);
}

}  // namespace
