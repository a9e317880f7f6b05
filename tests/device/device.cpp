// Regions on an accelerator: generators, streams and the engine's device threads (Rule 11), on the
// stand-in of stand_in.h.

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/device/stand_in.h"
#include "tests/support/far_tensors.h"
#include "tests/support/meeting.h"
#include "tests/support/nn.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/support.h"

using remat::checkpoint;
using torch::autograd::generated::ExpBackward0;
using torch::autograd::generated::SinBackward0;

namespace {

/// A "dropout" of the far device: a number of its generator times the tensor.
Tensor noisy(const Tensor& t) { return (t * stand_in::draw(t.device().index())).sin(); }

}  // namespace

TEST_CASE("a region on a device draws what forward drew and leaves the generator where it was",
          "[device][rule-11]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor values = at::randn({6});
  const auto program = [&](bool drop) {
    const Tensor x = far_leaf(values);
    const uint64_t start = stand_in::position();
    const remat::EarlyStopGuard guard(early_stop);
    const auto block = [](const Tensor& t) { return noisy(noisy(t).exp()); };
    const Tensor y =
        drop ? checkpoint([&](const Tensor& t) { return checkpoint(block, block(t)); }, x)
             : block(block(x));
    const uint64_t drawn = stand_in::position() - start;
    const Tensor grad = grad_of(y, {x})[0];
    CHECK(stand_in::position() - start == drawn);
    CHECK(drawn == 4);
    at::Tensor both = at::stack({y.detach().cpu(), grad.cpu()});
    for (int i = 0; i < 12; ++i) stand_in::draw();  // back to the same numbers
    return both;
  };
  const Tensor plain = program(false);
  require_bit_equal({program(true)}, {plain});
}

TEST_CASE("with copies a function may write to its argument on a device", "[device][copies]") {
  const Tensor values = at::randn({6});
  const auto block = [](Tensor t) { return (t.mul_(2).sin() * t).exp(); };
  const auto program = [&](auto run) {
    const Tensor x = far_leaf(values);
    const Tensor given = x * 3;
    const Tensor y = run(given);
    given.mul_(0);  // later changes do no harm either
    return grad_of(y, {x})[0];
  };
  Calls calls;
  const Tensor with = program([&](const Tensor& t) {
    return checkpoint({.inputs = remat::InputMode::CopyOnWrite}, counted(calls, block), t);
  });
  CHECK(calls.count() == 2);
  require_same(with, program([&](const Tensor& t) { return block(t.clone()); }));
}

TEST_CASE("with copies each recompute begins with the data of the call on a device",
          "[device][copies]") {
  const Tensor values = at::randn({6});
  const bool in_version = GENERATE(true, false);
  CAPTURE(in_version);
  const auto f = [&](const Tensor& x, Tensor m) {
    if (in_version)
      m.mul_(2);
    else
      m.data().mul_(2);
    return (x * m).exp();
  };
  const auto program = [&](auto run) {
    const Tensor x = far_leaf(values);
    const Tensor y = run(x, far_leaf(values).detach());
    Tensors all;
    for (int i = 0; i < 3; ++i) all.push_back(grad_of(y, {x}, {.retain_graph = true})[0]);
    const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
    all.push_back(first.detach());
    for (int i = 0; i < 2; ++i) all.push_back(grad_of(first, {x}, {.retain_graph = true})[0]);
    return all;
  };
  const Tensors with = program([&](const Tensor& x, const Tensor& m) {
    return checkpoint({.inputs = remat::InputMode::CopyOnWrite}, f, x, m);
  });
  const Tensors plain = program(f);
  for (std::size_t i = 0; i < plain.size(); ++i) require_same(with[i], plain[i]);
  drop_ready_nodes();
}

TEST_CASE("tensors on two devices: both generators are preserved", "[device]") {
  const Tensor values = at::randn({4});
  const std::vector<Tensor> x{far_leaf(values, 0), far_leaf(values, 1)};
  std::vector<double> drawn;
  const auto f = [&](const std::vector<Tensor>& t) {
    std::vector<Tensor> out;
    for (const Tensor& each : t) {
      drawn.push_back(stand_in::draw(each.device().index()));
      out.push_back((each * drawn.back()).sin());
    }
    return out;
  };
  const std::vector<Tensor> y = checkpoint({.early_stop = false}, f, x);
  const uint64_t at_0 = stand_in::position(0), at_1 = stand_in::position(1);
  stand_in::draw(0);
  for (int i = 0; i < 2; ++i) {
    const auto index = static_cast<size_t>(i);
    require_same(grad_of(y[index], {x[index]}, {.retain_graph = true})[0],
                 grad_of((x[index] * drawn[index]).sin(), {x[index]})[0]);
  }
  REQUIRE(drawn.size() == 6);
  CHECK(drawn[2] == drawn[0]);
  CHECK(drawn[3] == drawn[1]);
  CHECK(stand_in::position(0) == at_0 + 1);
  CHECK(stand_in::position(1) == at_1);
}

TEST_CASE("a device that is first used inside a region draws the same numbers again", "[device]") {
  const Tensor x = leaf({4});
  std::vector<double> drawn;
  stand_in::forget_use(1);
  // Its generator is at the start of its stream, like that of a new device.
  const auto f = [&](const Tensor& t) {
    const Tensor moved = t.to(stand_in::device(1));
    drawn.push_back(stand_in::draw(1));
    return (moved * drawn.back()).sin().to(at::kCPU);
  };
  const at::Generator generator = at::globalContext().defaultGenerator(stand_in::device(1));
  at::Generator(generator).set_offset(0);
  stand_in::forget_use(1);
  const Tensor y = checkpoint(f, x);
  stand_in::draw(1);
  const Tensor grad = grad_of(y, {x})[0];
  REQUIRE(drawn.size() == 2);
  CHECK(drawn[0] == drawn[1]);
  require_bit_equal({grad}, grad_of((x * drawn[0]).sin(), {x}));
  CHECK(stand_in::position(1) == 2);
}

TEST_CASE("a region that would keep the random state of a device is not captured in a graph",
          "[device][rule-11]") {
  const Tensor x = far_leaf(at::randn({4}));
  const auto f = [](const Tensor& t) { return t.sin().exp(); };
  const Counted done;
  stand_in::set_capturing(true);
  const auto error = error_of<remat::CheckpointError>([&] { checkpoint(f, x); });
  const Tensor y = checkpoint({.preserve_rng_state = false}, f, x);
  stand_in::set_capturing(false);
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
  CHECK_THAT(error.what_without_backtrace(), contains("captured in a graph"));
  CHECK_THAT(error.what_without_backtrace(), contains("preserve_rng_state = false"));
  require_same(grad_of(y, {x})[0], grad_of(f(x), {x})[0]);
  require_same(grad_of(checkpoint(f, x), {x})[0], grad_of(f(x), {x})[0]);
  CHECK(done.now().frames_alive == 0);
}

TEST_CASE("a registered default generator of a device is put back where it was",
          "[device][rule-11]") {
  const Tensor x = far_leaf(at::randn({4}));
  Tensor y;
  {
    const remat::GeneratorGuard guard(at::globalContext().defaultGenerator(stand_in::device()));
    y = checkpoint(noisy, x);
  }
  stand_in::draw();
  const uint64_t before = stand_in::position();
  grad_of(y, {x});
  CHECK(stand_in::position() == before);
}

TEST_CASE("a region of forward is not recomputed in a graph that is captured",
          "[device][rule-11]") {
  const Tensor x = far_leaf(at::randn({4}));
  const Tensor y = checkpoint(noisy, x);
  const uint64_t before = stand_in::position();
  stand_in::set_capturing(true);
  const auto error =
      error_of<remat::CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
  stand_in::set_capturing(false);
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
  CHECK(stand_in::position() == before);
  grad_of(y, {x});
}

TEST_CASE("each recompute sees a device's buffers as its forward did, whoever wrote to them",
          "[device][module]") {
  struct Counts : torch::nn::Module {
    Counts() {
      register_buffer("steps", steps);
      register_buffer("mean", mean);
    }
    Tensor forward(const Tensor& x) {
      {
        const at::NoGradGuard no_grad;
        steps.add_(1);
        const at::AutoDispatchBelowADInplaceOrView below;  // as kernels of running statistics
        mean.add_(1);
      }
      return (x * (steps.to(at::kFloat) * 10 + mean)).sin();
    }
    Tensor steps = at::zeros({1}, at::kLong).to(stand_in::device());
    Tensor mean = at::zeros({1}).to(stand_in::device());
  };
  const auto gradient = [](const auto& call) {
    const Tensor x = far_leaf(at::arange(4, at::kFloat));
    const auto module = std::make_shared<Counts>();
    const Tensor first = call(module, x), second = call(module, x), third = call(module, x);
    return grad_of(second + third + first, {x})[0];
  };
  require_same(gradient([](const auto& module, const Tensor& x) { return checkpoint(module, x); }),
               gradient([](const auto& module, const Tensor& x) { return module->forward(x); }));
}

TEST_CASE("a device's buffer of integers that does not change is kept once for all graphs",
          "[device][module]") {
  struct Table : torch::nn::Module {
    Table() { register_buffer("table", table); }
    Tensor forward(const Tensor& x) { return x * table[0].to(at::kFloat) * x; }
    Tensor table = at::ones({1000}, at::kLong).to(stand_in::device());
  };
  const Tensor x = far_leaf(at::ones({1}));
  const auto module = std::make_shared<Table>();
  Tensors graphs{checkpoint(module, x)};
  const int64_t first = stand_in::live_bytes();
  for (int i = 0; i < 5; ++i) graphs.push_back(checkpoint(module, x));
  CHECK(stand_in::live_bytes() - first < 8'000);
  for (const Tensor& y : graphs) y.backward(at::ones_like(y));
}

TEST_CASE("a number on the CPU combined with device tensors", "[device]") {
  const Tensor values = at::randn({4});
  const Tensor x = far_leaf(values), s = leaf({});
  const Tensor near = leaf({4});
  const auto f = [](const Tensor& t, const Tensor& scale) { return (t * scale).sin() * t; };
  const Tensors grads = grad_of(checkpoint(f, x, s), {x, s});
  const Tensors plain = grad_of(f(x, s), {x, s});
  require_same(grads[0], plain[0]);
  require_bit_equal({grads[1]}, {plain[1]});
}

TEST_CASE("scopes of the calling thread are seen on the device's backward thread", "[device]") {
  const Tensor x = far_leaf(at::randn({4}));
  std::thread::id ran_on;
  remat::PhaseInfo phase;
  const auto branch = [&](const Tensor& t) {
    if (remat::is_recomputing()) {
      ran_on = std::this_thread::get_id();
      phase = remat::current_phase();
    }
    return std::vector<Tensor>{t.sin(), t.exp()};
  };
  std::vector<Tensor> y;
  int64_t packed = 0;
  {
    const remat::SavedTensorHooksGuard hooks(
        [&](const Tensor& t) {
          ++packed;
          return t;
        },
        [](Tensor t) { return t; });
    y = checkpoint({.name = "far"}, branch, x);
  }
  CHECK(packed == 1);  // the input
  const Counted done;
  const remat::GraphExecGroup group;
  require_same(grad_of(y[0], {x}, {.retain_graph = true})[0], x.cos().detach());
  require_same(grad_of(y[1], {x}, {.retain_graph = true})[0], x.exp().detach());
  CHECK(done.now().recomputes == 1);
  CHECK(ran_on != std::this_thread::get_id());
  CHECK(phase.name == "far");
  CHECK(phase.phase == remat::Phase::Recompute);
}

TEST_CASE("many threads of backward on two devices", "[device]") {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int step = 0; step < 10; ++step) {
        const Tensor x = far_leaf(at::ones({3}) * (i + 1), i % 2);
        const auto f = [](const Tensor& t) { return t.sin().exp(); };
        const Tensor y = checkpoint([&](const Tensor& t) { return checkpoint(f, f(t)); }, x);
        const Tensor plain = grad_of(f(f(x)), {x})[0];
        if (at::equal(grad_of(y, {x})[0].cpu(), plain.cpu())) ++right;
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(right == 40);
}

TEST_CASE("what an inner backward saves on threads of two devices is right or a mismatch",
          "[device][rule-6][rule-10][threads]") {
  const auto f = [](const Tensor& x, const Tensor& w) {
    Tensor a = x, b = w;
    for (int i = 0; i < 30; ++i) {
      a = a.sin();
      b = b.sin();
    }
    const auto first =
        torch::autograd::grad({a.sum(), b.sum()}, {x, w}, {}, {}, /*create_graph=*/true);
    return std::pair((first[0] * first[0]).sum(), (first[1] * first[1]).sum());
  };
  const Tensor values = at::rand({8});
  const auto grads = [&](bool is_region) {
    const Tensor x = values.detach().requires_grad_(), w = far_leaf(values);
    const auto both = is_region ? checkpoint(f, x, w) : f(x, w);
    const auto found = torch::autograd::grad({both.first, both.second}, {x, w});
    return at::stack({found[0], found[1].cpu()});
  };
  const Tensor plain = grads(false);
  int num_right = 0, num_refused = 0;
  for (int step = 0; step < 40; ++step) {
    try {
      num_right += at::equal(grads(true), plain) ? 1 : 0;
    } catch (const remat::CheckpointError&) {
      ++num_refused;
    }
  }
  CAPTURE(num_right);
  CHECK(num_right + num_refused == 40);
  // The device's thread releases a failed backward before it begins another one.
  CHECK(at::equal(grads(false), plain));
}

namespace {

Meeting* meeting = nullptr;
std::atomic<int> num_met{0};

/// sin, whose backward reads its saved tensor at the same time as another backward.
struct SinThatMeets : torch::autograd::Function<SinThatMeets> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
    ctx->save_for_backward({x});
    return x.sin();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    if (meeting != nullptr && meeting->wait()) ++num_met;
    return {g[0] * ctx->get_saved_variables()[0].cos()};
  }
};

}  // namespace

TEST_CASE("two engine threads of one backward ask for one region together", "[device][rule-7]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor values = at::randn({6});
  Calls calls;
  const auto f = counted(calls, [](const Tensor& a, const Tensor& b) {
    return std::pair(SinThatMeets::apply(a.exp()).exp(), SinThatMeets::apply(b.cos()).exp());
  });
  const auto grads = [](const std::pair<Tensor, Tensor>& both, const Tensors& x) {
    return torch::autograd::grad({both.first.sum(), both.second.sum()}, x);
  };
  const Tensors x{far_leaf(values, 0), far_leaf(values, 1)};
  const Tensors plain = grads(f(x[0], x[1]), x);
  for (int step = 0; step < 20; ++step) {
    calls.reset();
    const auto both = checkpoint({.early_stop = early_stop}, f, x[0], x[1]);
    Meeting of_two(2);
    meeting = &of_two;
    num_met = 0;
    const Tensors actual = grads(both, x);
    meeting = nullptr;
    REQUIRE(num_met == 2);
    CHECK(calls.count() == 2);
    for (size_t i = 0; i < 2; ++i) require_same(actual[i], plain[i]);
  }
}

TEST_CASE("a recompute runs on the device and streams of forward", "[device][streams]") {
  const Tensor x = far_leaf(at::randn({4}));
  std::vector<int64_t> streams;
  std::vector<int> devices;
  const auto f = [&](const Tensor& t) {
    streams.push_back(stand_in::current_stream().id());
    devices.push_back(stand_in::current_device());
    return t.sin();
  };
  Tensor y;
  {
    const stand_in::OnStream on(stand_in::stream(0, 3));
    const c10::DeviceGuard device(stand_in::device(1));
    y = checkpoint(f, x);
  }
  stand_in::clear_log();
  SECTION("read by hand, on another stream") {
    const Tensor saved = read_saved(y, &SinBackward0::self_);
    require_same(saved.detach(), x.detach());
    // Forward's stream waits for the reader's; then the reader's for the results on forward's.
    CHECK(stand_in::log() == std::vector<std::string>{"record 0", "wait 3 for 0", "record 0",
                                                      "wait 3 for 0", "use on 3", "record 3",
                                                      "wait 0 for 3", "use on 0"});
  }
  SECTION("read by a backward, on the stream of the node") {
    require_same(grad_of(y, {x})[0], x.cos().detach());
  }
  CHECK(streams == std::vector<int64_t>{3, 3});
  CHECK(devices == std::vector<int>{1, 1});
  CHECK(stand_in::current_stream().id() == 0);
  CHECK(stand_in::current_device() == 0);
}

TEST_CASE("streams and device are put back when the recompute throws", "[device][rule-12]") {
  const Tensor x = far_leaf(at::randn({4}));
  Tensor y;
  {
    const stand_in::OnStream on(stand_in::stream(0, 5));
    y = checkpoint(
        [](const Tensor& t) -> Tensor {
          if (remat::is_recomputing()) throw std::domain_error("in the recompute");
          return t.sin();
        },
        x);
  }
  CHECK_THROWS_AS(read_saved(y, &SinBackward0::self_), std::domain_error);
  CHECK(stand_in::current_stream().id() == 0);
  CHECK_THROWS_AS(grad_of(y, {x}), std::domain_error);
}

TEST_CASE("a function that switches streams: each reader waits for the stream of its tensor",
          "[device][streams]") {
  const Tensor x = far_leaf(at::randn({4}));
  const auto f = [](const Tensor& t) {
    Tensor h;
    {
      const stand_in::OnStream on(stand_in::stream(0, 7));
      h = t.sin();
    }
    return std::pair(h, h.exp());
  };
  const auto [h, y] = checkpoint({.early_stop = false}, f, x);
  stand_in::clear_log();
  read_saved(h, &SinBackward0::self_);
  const auto log = stand_in::log();
  CHECK(std::count(log.begin(), log.end(), "wait 0 for 7") == 1);
  CHECK(std::count(log.begin(), log.end(), "use on 0") == 1);
  stand_in::clear_log();
  read_saved_output(y, &ExpBackward0::result_);  // made on the current stream
  const auto second_log = stand_in::log();
  CHECK(std::count(second_log.begin(), second_log.end(), "use on 0") == 0);
}

TEST_CASE("a policy moves what it keeps to the CPU and back", "[device][rule-15]") {
  const Tensor values = at::randn({32, 32});
  const auto f = [](const Tensor& x) { return x.mm(x).sin().mm(x).exp(); };
  const Tensor plain = far_leaf(values);
  const Tensor plain_grad = grad_of(f(plain), {plain})[0];
  const int64_t product = 32 * 32 * 4;
  struct Held {
    int64_t on_device, kept, kernels, offloaded;
  };
  const auto held = [&](const remat::Policy& policy) {
    const Tensor x = far_leaf(values);
    const remat::Recorder recorder;
    const int64_t before = settled_bytes();
    const Tensor y = checkpoint({.policy = policy}, f, x);
    const int64_t on_device = stand_in::live_bytes() - before - product;
    const int64_t kernels = stand_in::num_kernels("aten::mm");
    require_same(grad_of(y, {x})[0], plain_grad);
    const remat::RegionReport report = recorder.report().regions.at(0);
    return Held{on_device / product, report.bytes_saved / product,
                stand_in::num_kernels("aten::mm") - kernels, report.offloaded};
  };
  const Held none = held({}), kept = held(remat::save_ops({"aten::mm"})),
             moved = held(remat::offload_ops({"aten::mm"}, {.min_offload_bytes = 0})),
             small = held(remat::offload_ops({"aten::mm"}, {.min_offload_bytes = product + 1})),
             large = held(remat::offload_ops({"aten::mm"}, {.min_offload_bytes = product}));
  CHECK(none.on_device == 0);
  CHECK(kept.on_device == 2);  // sin reads the first, exp the second
  CHECK(kept.kept == 2);
  CHECK(moved.on_device == 0);
  CHECK(moved.kept == 2);
  CHECK(small.on_device == 2);
  CHECK(small.offloaded == 0);
  CHECK(large.offloaded == 2);
  CHECK(kept.offloaded == 0);
  CHECK(moved.offloaded == 2);
  CHECK(kept.kernels < none.kernels);
  CHECK(moved.kernels == kept.kernels);
}

TEST_CASE("what a policy moves is copied before anybody can write to it", "[device][rule-15]") {
  // Copies run late here, and a write past the version counter is seen by nobody.
  const Tensor values = at::randn({32, 32});
  const auto f = [](const Tensor& x) {
    const Tensor product = x.mm(x);
    return std::pair(product, product.sin());
  };
  const Tensor plain = far_leaf(values), x = far_leaf(values);
  const Tensor plain_grad = grad_of(f(plain).second, {plain})[0];
  const auto [product, sine] =
      checkpoint({.policy = remat::offload_ops({"aten::mm"}, {.min_offload_bytes = 0})}, f, x);
  product.data().mul_(3);
  for (int i = 0; i < 3; ++i)
    require_same(grad_of(sine, {x}, {.retain_graph = true})[0], plain_grad);
}

TEST_CASE("a result that waits on the CPU, and that the region writes to, is computed again",
          "[device][rule-15]") {
  // The waiting copy is from before the write, which the recompute has to repeat.
  const Tensor values = at::randn({8, 8});
  const auto f = [](const Tensor& x) { return x.mm(x).mul_(2).sin(); };
  const Tensor plain = far_leaf(values), x = far_leaf(values);
  const Tensor plain_grad = grad_of(f(plain), {plain})[0];
  const Tensor y =
      checkpoint({.policy = remat::offload_ops({"aten::mm"}, {.min_offload_bytes = 0})}, f, x);
  require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain_grad);
  require_same(grad_of(y, {x})[0], plain_grad);
}

TEST_CASE("what was copied back and nobody read leaves the device when its backward ends",
          "[device]") {
  const Tensor x = far_leaf(at::randn({64, 64}));
  Tensor middle, y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = true, .prefetch_depth = 2});
    middle = (x + 1).sin().cos();
    y = middle.exp().tan();
  }
  const int64_t before = settled_bytes();
  stand_in::clear_log();
  grad_of(y, {middle}, {.retain_graph = true});
  CHECK(comes_to(before));
  require_same(grad_of(y, {x})[0], grad_of((x + 1).sin().cos().exp().tan(), {x})[0]);
}

TEST_CASE("an offloaded argument without grad leaves the device with the program's last hold on it",
          "[device]") {
  const Tensor values = at::rand({32, 32}), x = far_leaf(at::randn({32, 32}));
  const auto f = [](const Tensor& t, const Tensor& mask) { return (t * mask).sin(); };
  const Tensor plain = grad_of(f(x, values.to(stand_in::device())), {x})[0];
  const int64_t before = settled_bytes();
  const Tensor y = checkpoint({.offload_inputs = true}, f, x, values.to(stand_in::device()));
  CHECK(stand_in::live_bytes() - before == 32 * 32 * 4);  // the result
  require_same(grad_of(y, {x})[0], plain);
}

TEST_CASE("a named value that waits on the CPU is no call of the region's", "[device][rule-15]") {
  const Tensor values = at::randn({8, 8});
  // The function also copies to and from the CPU, so its calls are compared with forward's.
  const auto f = [](const Tensor& x) {
    // No single call made this value, so it is kept itself; an argument would stay where it is.
    const Tensor named = remat::checkpoint_name((x * 1).add_(0), "named");
    const Tensor there = named.sin().to(at::kCPU).exp();
    return there.to(x.device()).mm(named).tanh();
  };
  const auto everything = [](const remat::PolicyContext&) {
    return remat::CheckpointPolicy::MustCpuOffload;
  };
  const Tensor plain = far_leaf(values);
  const Tensor plain_grad = grad_of(f(plain * 1), {plain})[0];
  for (const remat::Policy& policy : {remat::offload_names({"named"}, {.min_offload_bytes = 0}),
                                      remat::Policy(everything, {.min_offload_bytes = 0})})
    for (const bool early_stop : {true, false}) {
      const Tensor x = far_leaf(values);
      const Tensor y = checkpoint({.early_stop = early_stop, .policy = policy}, f, x * 1);
      require_same(grad_of(y, {x}, {.retain_graph = true})[0], plain_grad);
      require_same(grad_of(y, {x})[0], plain_grad);
    }
}

TEST_CASE("what waits on the CPU comes back with its strides", "[device][rule-15]") {
  const Tensor values = at::randn({8, 8});
  // No single call makes a view, so it is kept itself.
  const auto f = [](const Tensor& t, Tensor (*view)(const Tensor&)) {
    return remat::checkpoint_name(view(t * 1), "view").sin().exp();
  };
  const auto views = {+[](const Tensor& t) { return t.slice(1, 0, 8, 2); },
                      +[](const Tensor& t) { return t.t(); },
                      +[](const Tensor& t) { return t.select(1, 3); },
                      +[](const Tensor& t) { return t.select(0, 3).expand({5, 8}); }};
  for (const auto view : views) {
    const Tensor x = far_leaf(values), z = far_leaf(values);
    const remat::Policy moved = remat::offload_names({"view"}, {.min_offload_bytes = 0});
    const remat::CheckpointOptions options{.determinism_check = remat::DeterminismCheck::Values,
                                           .policy = moved};
    const remat::CheckpointOptions layout{.determinism_check = remat::DeterminismCheck::Layout,
                                          .policy = moved};
    const Tensor plain = grad_of(f(z, view), {z})[0];
    for (const auto& each : {options, layout}) {
      const remat::Recorder recorder;
      require_same(grad_of(checkpoint(each, f, x, view), {x})[0], plain);
      CHECK(recorder.report().regions.at(0).offloaded == 1);
    }
  }
}

TEST_CASE("kept random operators of a device move its generator", "[device][rule-15]") {
  const Tensor values = at::randn({64});
  const auto f = [](const Tensor& t) {
    const Tensor kept = remat::save_region([](const Tensor& u) { return noisy(u); }, t.exp());
    return noisy(kept);
  };
  const Tensor x = far_leaf(values), z = far_leaf(values);
  const Tensor plain = grad_of(f(x), {x})[0];
  for (int i = 0; i < 14; ++i) stand_in::draw();  // the numbers repeat after 16
  require_same(grad_of(checkpoint(f, z), {z})[0], plain);
}
