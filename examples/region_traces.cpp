// The traces of docs/concepts.md: the runs of a region's function, and the values that it sees.

#include <remat/remat.h>
#include <torch/torch.h>

#include <functional>
#include <iostream>
#include <string>

using torch::Tensor;

namespace {

// Prints its name whenever it runs. Autograd saves its argument.
Tensor stage(const char* name, const Tensor& x) {
  std::cout << ' ' << name;
  return x.sin();
}

// Prints a line: the label, then everything that runs in `action`.
void show(const std::string& label, const std::function<void()>& action) {
  std::cout << "  " << label << ':';
  action();
  std::cout << '\n';
}

Tensor input() { return torch::ones({4}).requires_grad_(); }

void one_region() {
  std::cout << "one region\n";
  const auto f = [](Tensor x) {
    x = stage("a", x);
    x = stage("b", x);
    std::cout << " end";
    return x + 1;
  };
  const Tensor x = input();
  Tensor y;
  show("forward", [&] { y = remat::checkpoint(f, x); });
  show("backward", [&] { y.sum().backward(); });
}

void a_nest() {
  std::cout << "a nest\n";
  const auto inner = [](Tensor x) {
    x = stage("b", x);
    return stage("c", x);
  };
  const auto outer = [inner](Tensor x) {
    x = stage("a", x);
    x = remat::checkpoint(inner, x);
    return stage("d", x);
  };
  const Tensor x = input();
  Tensor y;
  show("forward", [&] { y = remat::checkpoint(outer, x); });
  show("backward", [&] { y.sum().backward(); });
}

void three_reads() {
  std::cout << "two backwards of one graph\n";
  const auto f = [](const Tensor& x) { return stage("b", stage("a", x)); };
  const Tensor x = input();
  Tensor y;
  show("forward", [&] { y = remat::checkpoint(f, x); });
  show("backward", [&] { y.sum().backward({}, /*retain_graph=*/true); });
  show("backward", [&] { y.sum().backward(); });
}

void random_numbers() {
  std::cout << "random numbers\n";
  torch::manual_seed(0);
  const auto f = [](const Tensor& x) {
    const Tensor mask = torch::rand_like(x);
    std::cout << ' ' << mask[0].item<float>();
    return (x * mask).sin();
  };
  const Tensor x = input();
  Tensor y;
  show("forward", [&] { y = remat::checkpoint(f, x); });
  show("between", [] { std::cout << ' ' << torch::rand({1}).item<float>(); });
  show("backward", [&] { y.sum().backward(); });
}

void hooks_run_once() {
  std::cout << "hooks and gradients\n";
  const Tensor weight = input();
  weight.register_hook([](const Tensor& gradient) {
    std::cout << " hook";
    return gradient;
  });
  const auto f = [weight](const Tensor& x) { return stage("a", x * weight); };
  Tensor y;
  show("forward", [&] { y = remat::checkpoint(f, input()); });
  show("backward", [&] { y.sum().backward(); });
}

void a_changed_capture() {
  std::cout << "a captured tensor that changed\n";
  const Tensor weight = input();
  const auto f = [weight](const Tensor& x) { return (x * weight).sin(); };
  const Tensor y = remat::checkpoint(f, input());
  {
    const torch::NoGradGuard no_grad;
    weight.mul_(2);
  }
  try {
    y.sum().backward();
    std::cout << "  no error\n";
  } catch (const remat::CheckpointError& error) {
    std::cout << "  backward: CheckpointError, kind "
              << (error.kind() == remat::CheckpointError::Kind::CaptureChanged ? "CaptureChanged"
                                                                               : "other")
              << '\n';
  }
}

void kept_results() {
  std::cout << "a policy that keeps products\n";
  const Tensor weight = torch::ones({4, 4}).requires_grad_();
  const auto f = [weight](const Tensor& x) { return x.mm(weight).sin().mm(weight).sin(); };
  const Tensor x = torch::ones({4, 4}).requires_grad_();
  for (const bool keeps : {false, true}) {
    const remat::CheckpointOptions options{.policy =
                                               keeps ? remat::save_matmuls() : remat::Policy()};
    const remat::MemoryMeter meter;
    const int64_t before = meter.live_bytes();
    const Tensor y = remat::checkpoint(options, f, x);
    std::cout << (keeps ? "  save_matmuls: " : "  no policy:    ") << meter.live_bytes() - before
              << " bytes alive after forward\n";
  }
}

}  // namespace

int main() {
  one_region();
  a_nest();
  three_reads();
  random_numbers();
  hooks_run_once();
  a_changed_capture();
  kept_results();
}
