// Regions on a real accelerator; passes over itself where there is none. What the CPU's tests and
// the stand-in's cannot show: real generators, streams, device threads, allocators and kernels.

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "tests/support/autocast.h"
#include "tests/support/device_stats.h"
#include "tests/support/nn.h"

using remat::checkpoint;
namespace nn = torch::nn;

namespace {

const at::Device device(at::kCUDA, 0);

bool has_cuda(int devices = 1) {
  const auto type = at::getAccelerator(/*checked=*/false);
  const bool has =
      has_device_stats && type && *type == at::kCUDA && num_devices(at::kCUDA) >= devices;
  if (!has)
    WARN("fewer CUDA devices than " << devices << ", or LibTorch before 2.9: nothing is tested");
  return has;
}

void synchronize() { c10::impl::VirtualGuardImpl(at::kCUDA).synchronizeDevice(0); }

int64_t live_bytes() {
  // The engine's thread may still be letting go of a backward.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return device_bytes(0);
}
int64_t peak_bytes() { return device_peak_bytes(0); }

Tensor randn_on(at::IntArrayRef sizes, int index = 0) {
  return at::randn(sizes).to(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index)));
}
Tensor cuda_leaf(at::IntArrayRef sizes, int index = 0) {
  return randn_on(sizes, index).requires_grad_();
}

Tensor generator_state(int index = 0) {
  return at::globalContext()
      .defaultGenerator(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index)))
      .get_state();
}

void require_same(const Tensors& actual, const Tensors& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    REQUIRE(actual[i].defined() == expected[i].defined());
    if (!actual[i].defined()) continue;
    REQUIRE(actual[i].device() == expected[i].device());
    require_bit_equal({actual[i].cpu()}, {expected[i].cpu()});
  }
}

/// Outputs, gradients and the generators' states of a program that is run from one seed.
Tensors outcome(const std::function<Tensor()>& program, const Tensors& leaves) {
  at::manual_seed(11);
  const Tensor y = program();
  Tensors all{y.detach()};
  const Tensor state = generator_state();
  for (const Tensor& each : grad_of(y, leaves, {.allow_unused = true})) all.push_back(each);
  REQUIRE(at::equal(generator_state(), state));
  all.push_back(state);
  return all;
}

/// The work of this thread is queued on a stream of the pool while it lives.
class OnOtherStream {
 public:
  OnOtherStream() : guard_(at::kCUDA), before_(guard_.getStream(device)) {
    guard_.exchangeStream(guard_.getStreamFromGlobalPool(device, false));
  }
  ~OnOtherStream() { guard_.exchangeStream(before_); }
  OnOtherStream(const OnOtherStream&) = delete;
  OnOtherStream& operator=(const OnOtherStream&) = delete;
  c10::Stream stream() const { return guard_.getStream(device); }
  c10::Stream before() const { return before_; }

 private:
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream before_;
};

void wait(const c10::Stream& waits, const c10::Stream& runs) {
  c10::Event event(at::kCUDA);
  event.record(runs);
  event.block(waits);
}

struct NormalisedImpl : nn::Cloneable<NormalisedImpl> {
  NormalisedImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)));
    norm = register_module("norm", nn::BatchNorm2d(8));
    last = register_module("last", nn::Conv2d(nn::Conv2dOptions(8, 3, 1)));
  }
  Tensor forward(const Tensor& x) {
    return last(at::dropout(norm(first(x)).relu(), 0.2, is_training()));
  }
  nn::Conv2d first = nullptr, last = nullptr;
  nn::BatchNorm2d norm = nullptr;
};

/// This program again with the cases of a tag, in a process that has not used a device.
int run_alone(const std::string& tag) {
  return std::system(
      (std::filesystem::read_symlink("/proc/self/exe").string() + " '" + tag + "' >&2").c_str());
}

}  // namespace

TEST_CASE("cuda: regions draw forward's dropout and leave the generator where it was",
          "[cuda][rule-11]") {
  if (!has_cuda()) return;
  const bool early_stop = GENERATE(true, false);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = cuda_leaf({64, 33});
  const auto block = [](const Tensor& t) {
    return at::dropout(at::rrelu(t, 0.1, 0.9, true).sin(), 0.4, true) * at::rand_like(t);
  };
  const Tensors plain = outcome([&] { return block(block(block(x))); }, {x});
  require_same(outcome(
                   [&] {
                     return checkpoint([&](const Tensor& t) { return checkpoint(block, block(t)); },
                                       checkpoint(block, x));
                   },
                   {x}),
               plain);
}

TEST_CASE("cuda: a stack of blocks equals plain and holds its inputs only", "[cuda][rule-4]") {
  if (!has_cuda()) return;
  constexpr int64_t rows = 512, width = 256, layers = 6, one = rows * width * 4;
  Tensors weights;
  for (int64_t i = 0; i < layers; ++i)
    weights.push_back((randn_on({width, width}) / 16).requires_grad_());
  const Tensor x = randn_on({rows, width});
  const auto block = [&](std::size_t i, const Tensor& t) {
    return t.mm(weights[i]).sin().exp().tanh().mm(weights[i]).sigmoid();
  };
  struct Run {
    int64_t held, peak;
    Tensors grads;
  };
  const auto run = [&](bool drop) {
    synchronize();
    const int64_t before = live_bytes();
    reset_device_peak(0);
    Tensor h = x;
    for (std::size_t i = 0; i < static_cast<std::size_t>(layers); ++i)
      h = drop ? checkpoint([&block, i](const Tensor& t) { return block(i, t); }, h) : block(i, h);
    const int64_t held = live_bytes() - before;
    Tensors grads = grad_of(h, weights);
    return Run{held, peak_bytes() - before, std::move(grads)};
  };
  run(false);  // cuBLAS allocates its workspace
  const Run plain = run(false), dropped = run(true);
  require_same(dropped.grads, plain.grads);
  // The sigmoid's output of each block; plainly also what sin, exp and tanh save.
  CHECK(dropped.held == layers * one);
  CHECK(plain.held == layers * 4 * one);
  CHECK(dropped.peak < plain.peak);
}

TEST_CASE("cuda: half precision casts of autocast are those of forward", "[cuda][rule-11]") {
  if (!has_cuda()) return;
  const at::ScalarType dtype = GENERATE(at::kHalf, at::kBFloat16);
  nn::Sequential stages(nn::Linear(8, 8), nn::Linear(8, 8), nn::Linear(8, 8));
  stages->to(device);
  const Tensor x = randn_on({8, 8}).to(at::kHalf);
  const auto run = [&](bool drop) {
    Tensor y;
    {
      const Autocast autocast({.device = at::kCUDA, .dtype = dtype});
      y = drop ? remat::checkpoint_sequential(stages, 2, x) : stages->forward(x);
    }
    CHECK(y.scalar_type() == dtype);
    CHECK(y.requires_grad());
    return grad_of(y, stages->parameters());
  };
  const Tensors plain = run(false);
  require_same(run(true), plain);
}

TEST_CASE("cuda: kept products stay on the device, go to the CPU, or through the hooks",
          "[cuda][rule-15]") {
  if (!has_cuda()) return;
  const Tensor x = (randn_on({64, 64}) / 8).requires_grad_();
  const auto f = [](const Tensor& t) { return t.mm(t).sin().mm(t).exp(); };
  const Tensors plain = grad_of(f(x), {x});
  const int64_t product = 64 * 64 * 4;
  const auto held = [&](const remat::Policy& policy, bool hooks) {
    const int64_t before = live_bytes();
    Tensor y;
    {
      std::optional<remat::SaveOnCpuGuard> around;
      if (hooks) around.emplace();
      y = checkpoint({.policy = policy}, f, x);
    }
    const int64_t bytes = live_bytes() - before - product;
    require_same(grad_of(y, {x}), plain);
    return bytes / product;
  };
  CHECK(held({}, false) == 0);
  CHECK(held(remat::save_ops({"aten::mm"}), false) == 2);
  CHECK(held(remat::save_ops({"aten::mm"}), true) == 2);
  CHECK(held(remat::save_ops({"aten::mm"}, {.save_through_hooks = true}), true) == 0);
  CHECK(held(remat::offload_ops({"aten::mm"}, {.min_offload_bytes = 0}), false) == 0);
}

TEST_CASE("cuda: kept random operators move the generator as they did", "[cuda][rule-15]") {
  if (!has_cuda()) return;
  const Tensor x = cuda_leaf({257});
  const auto f = [](const Tensor& t) {
    const Tensor kept = remat::save_region(
        [](const Tensor& u) { return at::dropout(u.sin(), 0.5, true); }, t.exp());
    return at::dropout(std::get<0>(at::native_dropout(kept.sin(), 0.2, true)), 0.5, true) *
           at::rand_like(t);
  };
  const Tensors plain = outcome([&] { return f(x); }, {x});
  require_same(outcome([&] { return checkpoint(f, x); }, {x}), plain);
  const remat::Policy kept = remat::save_ops({"aten::native_dropout", "aten::rand_like"});
  require_same(outcome([&] { return checkpoint({.policy = kept}, f, x); }, {x}), plain);
}

TEST_CASE("cuda: scopes of the calling thread are seen on the device's backward thread", "[cuda]") {
  if (!has_cuda()) return;
  const Tensor x = cuda_leaf({4});
  std::thread::id ran_on;
  remat::PhaseInfo phase;
  const auto branch = [&](const Tensor& t) {
    if (remat::is_recomputing()) {
      ran_on = std::this_thread::get_id();
      phase = remat::current_phase();
    }
    return std::vector<Tensor>{t.sin(), t.exp()};
  };
  int64_t packed = 0;
  std::vector<Tensor> y;
  {
    const remat::SavedTensorHooksGuard hooks(
        [&](const Tensor& t) {
          ++packed;
          return t;
        },
        [](Tensor t) { return t; });
    y = checkpoint({.name = "far"}, branch, x);
  }
  CHECK(packed == 1);
  const Counted done;
  const remat::GraphExecGroup group;
  require_same(grad_of(y[0], {x}, {.retain_graph = true}), {x.cos().detach()});
  require_same(grad_of(y[1], {x}, {.retain_graph = true}), {x.exp().detach()});
  CHECK(done.now().recomputes == 1);
  CHECK(ran_on != std::this_thread::get_id());
  CHECK(phase.name == "far");
}

TEST_CASE("cuda: inputs that the region moves to the device, and numbers of the CPU beside it",
          "[cuda]") {
  if (!has_cuda()) return;
  const Tensor x = leaf({65}), scale = leaf({});
  const auto f = [](const Tensor& t, const Tensor& s) {
    const Tensor moved = t.to(device);
    return at::dropout(moved * s, 0.3, true).sin() * moved;
  };
  const Tensors plain = outcome([&] { return f(x, scale); }, {x, scale});
  require_same(outcome([&] { return checkpoint(f, x, scale); }, {x, scale}), plain);
}

TEST_CASE("cuda: first used inside a region, in this process", "[.][cuda-first-use]") {
  const Tensor x = leaf({65});
  Tensors drawn;
  const auto f = [&](const Tensor& t) {
    const Tensor moved = t.to(device);
    const Tensor numbers = at::rand_like(moved);
    drawn.push_back(numbers.clone());
    return (moved * numbers).sin();
  };
  const Tensor y = checkpoint({.early_stop = false}, f, x);
  at::rand({3}, at::TensorOptions(device));
  const Tensors grads = grad_of(y, {x});
  REQUIRE(drawn.size() == 2);
  require_same({drawn[1]}, {drawn[0]});
  require_same(grads, grad_of((x.to(device) * drawn[0]).sin(), {x}));
}

TEST_CASE("cuda: a device that is first used inside a region draws the same numbers again",
          "[cuda]") {
  if (!has_cuda()) return;
  CHECK(run_alone("[cuda-first-use]") == 0);
}

TEST_CASE("cuda: regions on side streams for a hundred steps", "[cuda][streams]") {
  if (!has_cuda()) return;
  const bool switches_inside = GENERATE(false, true);
  const Tensor start = randn_on({256, 256}) / 16;
  // The other stream comes long after the first: a missing wait would show.
  const auto slow = [](Tensor t) {
    for (int i = 0; i < 20; ++i) t = t.mm(t).tanh();
    return t;
  };
  const auto run = [&](bool on_streams) {
    Tensor w = start.clone().requires_grad_();
    for (int step = 0; step < 100; ++step) {
      const auto block = [&w, &slow, on_streams, switches_inside](const Tensor& t) {
        if (!on_streams || !switches_inside) return slow(t.mm(w).sin().exp());
        OnOtherStream other;
        wait(other.stream(), other.before());
        const Tensor y = slow(t.mm(w).sin().exp());
        wait(other.before(), other.stream());
        return y;
      };
      Tensor y;
      const Tensor x = start + step;
      if (on_streams) {
        OnOtherStream other;
        wait(other.stream(), other.before());
        y = checkpoint(block, x);
        wait(other.before(), other.stream());
      } else {
        y = block(x);
      }
      const Tensor grad = grad_of(y, {w})[0];
      w = (w - 0.01 * grad).detach().requires_grad_();
    }
    return w.detach();
  };
  const Tensor plain = run(false);
  require_same({run(true)}, {plain});
}

TEST_CASE("cuda: one region that two devices' threads reach", "[cuda]") {
  if (!has_cuda(2)) return;
  const Tensor x = cuda_leaf({65}, 0), y = cuda_leaf({65}, 1);
  const auto f = [](const std::vector<Tensor>& t) {
    return std::vector<Tensor>{at::dropout(t[0], 0.5, true).sin().exp(),
                               at::dropout(t[1], 0.5, true).sin().exp()};
  };
  const auto run = [&](bool drop) {
    at::manual_seed(3);
    const std::vector<Tensor> in{x, y};
    const auto out = drop ? checkpoint(f, in) : f(in);
    return grad_of(out[0].sum() + out[1].to(at::Device(at::kCUDA, 0)).sum(), {x, y});
  };
  const Tensors plain = run(false);
  for (int i = 0; i < 50; ++i) {
    const Counted done;
    require_same(run(true), plain);
    CHECK(done.now().recomputes == 1);
  }
}

TEST_CASE("cuda: gradients of gradients, also inside regions", "[cuda][rule-6][rule-2]") {
  if (!has_cuda()) return;
  const Tensor x = cuda_leaf({33});
  const auto inner = [](const Tensor& t) {
    const Tensor a = t.sin();
    const Tensor b = (a.exp() * a).tanh();
    return grad_of(b, {a}, {.create_graph = true})[0] * b;
  };
  const auto program = [&](bool drop) {
    const auto region = [&](const Tensor& t) { return drop ? checkpoint(inner, t) : inner(t); };
    const Tensor y = drop ? checkpoint(region, x.exp()) : region(x.exp());
    const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
    Tensors found{first.detach()};
    for (const Tensor& each : grad_of(first.sin(), {x})) found.push_back(each);
    return found;
  };
  const Tensors plain = program(false);
  for (int i = 0; i < 20; ++i) {
    const Tensors found = program(true);
    REQUIRE(found.size() == plain.size());
    for (std::size_t k = 0; k < found.size(); ++k)
      CHECK(at::allclose(found[k], plain[k], 1e-5, 1e-6));
  }
}

TEST_CASE("cuda: many threads run regions and backwards of one device", "[cuda]") {
  if (!has_cuda()) return;
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int step = 0; step < 25; ++step) {
        const Tensor x = (at::ones({257}, at::TensorOptions(device)) * (i + 1)).requires_grad_();
        const auto f = [](const Tensor& t) { return t.sin().exp(); };
        const Tensor y = checkpoint([&](const Tensor& t) { return checkpoint(f, f(t)); }, x);
        const Tensor plain = grad_of(f(f(x)), {x})[0];
        if (at::equal(grad_of(y, {x})[0], plain)) ++right;
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(right == 100);
}

TEST_CASE("cuda: the device's own out-of-memory in a recompute, then once more",
          "[cuda][rule-12]") {
  if (!has_cuda()) return;
  const Tensor x = cuda_leaf({64});
  bool fails = false;
  const auto f = [&](const Tensor& t) {
    const Tensor a = t.sin();
    if (fails) at::empty({int64_t{1} << 44}, t.options());
    return a.exp();
  };
  const Tensors plain = grad_of(f(x), {x});
  const int64_t before = live_bytes();
  {
    const Tensor y = checkpoint(f, x);
    fails = true;
    CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), c10::OutOfMemoryError);
    fails = false;
    require_same(grad_of(y, {x}), plain);
  }
  CHECK(live_bytes() == before);
}

TEST_CASE("cuda: what the checks say on a device", "[cuda][rule-10]") {
  if (!has_cuda()) return;
  const Tensor x = cuda_leaf({64}), w = cuda_leaf({64});
  SECTION("another shape") {
    const auto f = [](const Tensor& t) {
      return (remat::is_recomputing() ? t.narrow(0, 0, 32) : t).sin().exp();
    };
    CHECK_THROWS_AS(grad_of(checkpoint(f, x), {x}), remat::CheckpointError);
  }
  SECTION("another device") {
    const auto f = [](const Tensor& t) {
      return (remat::is_recomputing() ? t.cpu() : t).sin().exp();
    };
    const auto error = error_of<remat::CheckpointError>([&] { grad_of(checkpoint(f, x), {x}); });
    CHECK_THAT(std::string(error.what()), contains("cuda:0"));
  }
  SECTION("other values, if asked for") {
    const auto f = [](const Tensor& t) {
      return (remat::is_recomputing() ? t + 1 : t + 0).sin().exp();
    };
    const auto run = [&](remat::DeterminismCheck check) {
      return grad_of(checkpoint({.determinism_check = check}, f, x), {x});
    };
    CHECK_NOTHROW(run(remat::DeterminismCheck::Metadata));
    CHECK_THROWS_AS(run(remat::DeterminismCheck::Values), remat::CheckpointError);
  }
  SECTION("a captured tensor that changed") {
    const Tensor c = w.detach().clone();
    const Tensor y = checkpoint([&](const Tensor& t) { return (t * c).sin(); }, x);
    c.add_(1);
    CHECK_THROWS_AS(grad_of(y, {x}), remat::CheckpointError);
  }
}

TEST_CASE("cuda: statistics of normalisations equal plain", "[cuda][module]") {
  if (!has_cuda()) return;
  // Convolutions may take another algorithm each time unless asked not to.
  at::globalContext().setDeterministicCuDNN(true);
  const auto run = [](auto make) {
    at::manual_seed(2);
    const auto model = make();
    model->to(device);
    Tensors all;
    const Tensor x = randn_on({4, 3, 16, 16});
    for (int step = 0; step < 3; ++step) {
      const Tensor y = model->forward(x);
      for (const Tensor& each : grad_of(y.sin(), model->parameters())) all.push_back(each);
      for (const Tensor& each : model->buffers()) all.push_back(each.clone());
    }
    return all;
  };
  const Tensors plain = run([] { return std::make_shared<NormalisedImpl>(); });
  require_same(run([] { return std::make_shared<remat::CheckpointedImpl<NormalisedImpl>>(); }),
               plain);
  at::globalContext().setDeterministicCuDNN(false);
}

TEST_CASE("cuda: attention with dropout, whose kernels draw by themselves", "[cuda][rule-11]") {
  if (!has_cuda()) return;
  const bool flash = GENERATE(false, true);
  at::globalContext().setSDPUseFlash(flash);
  const Tensor q = (randn_on({2, 4, 64, 32})).to(at::kHalf).requires_grad_();
  const auto f = [](const Tensor& t) {
    return at::scaled_dot_product_attention(t, t, t, {}, 0.3, true).sin();
  };
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  const Tensors plain = outcome([&] { return f(f(q)); }, {q});
  require_same(outcome([&] { return checkpoint(f, checkpoint(f, q)); }, {q}), plain);
  at::globalContext().setDeterministicAlgorithms(false, false);
  at::globalContext().setSDPUseFlash(true);
}

// cuDNN draws a recurrent layer's dropout from a state of its own, which nobody can set back.
TEST_CASE("cuda: recurrent layers with dropout are refused, not recomputed with another mask",
          "[cuda][rule-10][rule-11]") {
  if (!has_cuda()) return;
  nn::LSTM lstm(nn::LSTMOptions(16, 16).num_layers(2).dropout(0.5));
  lstm->to(device);
  const Tensor x = cuda_leaf({5, 4, 16});
  Tensor first, again;
  const auto f = [&](const Tensor& t) {
    const Tensor y = std::get<0>(lstm->forward(t));
    (remat::is_recomputing() ? again : first) = y.detach().clone();
    return y.sin();
  };
  for (int step = 0; step < 4; ++step) {
    const Tensor y = checkpoint({.early_stop = step % 2 == 0}, f, x);
    try {
      grad_of(y, lstm->parameters());
      CHECK(at::equal(first, again));
    } catch (const remat::CheckpointError& error) {
      CHECK(error.kind() == remat::CheckpointError::Kind::CaptureChanged);
    }
  }
  // The way around: the layer is not run again.
  const auto kept = [&](const Tensor& t) {
    return remat::save_region([&](const Tensor& u) { return std::get<0>(lstm->forward(u)); }, t)
        .sin();
  };
  const Tensor y = checkpoint(kept, x);
  CHECK_NOTHROW(grad_of(y, lstm->parameters()));
}

TEST_CASE("cuda: saved tensors in a file and in a smaller type", "[cuda][hooks]") {
  if (!has_cuda()) return;
  const Tensor x = cuda_leaf({1000});
  const auto f = [&] { return x.sin().exp().tanh(); };
  const Tensors plain = grad_of(f(), {x});
  Tensor y;
  {
    const auto folder = std::filesystem::temp_directory_path() / "remat-cuda-test";
    std::filesystem::create_directories(folder);
    const remat::SaveOnDiskGuard guard({.directory = folder.string()});
    y = f();
  }
  require_same(grad_of(y, {x}), plain);
  {
    const remat::SaveAsGuard guard(at::kHalf);
    y = f();
  }
  CHECK(at::allclose(grad_of(y, {x})[0], plain[0], 1e-2, 1e-2));
}
