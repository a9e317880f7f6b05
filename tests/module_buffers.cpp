// Buffers that a checkpointed module's forward writes: running statistics, estimates.

#include <array>
#include <thread>

#include "tests/support/nn.h"
#include "tests/support/warnings.h"

using remat::BufferPolicy;
using remat::checkpoint;
using remat::Checkpointed;
using remat::CheckpointedImpl;
using remat::ModuleOptions;
namespace nn = torch::nn;

namespace {

/// Like spectral normalisation: forward moves an estimate in a buffer and reads what it wrote, so a
/// recompute that started from another estimate would give other values.
struct EstimatedImpl : nn::Cloneable<EstimatedImpl> {
  EstimatedImpl() { reset(); }
  void reset() override {
    weight = register_parameter("weight", at::randn({6, 6}));
    estimate = register_buffer("estimate", at::ones({6}));
    constant = register_buffer("constant", at::full({6}, 0.5));
  }
  Tensor forward(const Tensor& x) {
    if (is_training()) {
      const at::NoGradGuard no_grad;
      const Tensor next = weight.mv(estimate);
      estimate.copy_(next / next.norm());
    }
    // Used as data: a saved tensor that is changed in place later would be an error in plain
    // autograd too.
    return x.matmul(weight / estimate.clone().norm()) * constant;
  }
  Tensor weight, estimate, constant;
};

/// Normalisations of every kind, over (N, 6) inputs.
struct NormsImpl : nn::Cloneable<NormsImpl> {
  NormsImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", nn::Linear(6, 6));
    one = register_module("one", nn::BatchNorm1d(6));
    two = register_module("two", nn::BatchNorm2d(nn::BatchNormOptions(2).momentum(std::nullopt)));
    three = register_module("three", nn::BatchNorm3d(3));
    instance = register_module(
        "instance", nn::InstanceNorm1d(nn::InstanceNorm1dOptions(2).track_running_stats(true)));
    estimated = register_module("estimated", std::make_shared<EstimatedImpl>());
  }
  Tensor forward(const Tensor& x) {
    Tensor y = one(linear(x));
    y = two(y.reshape({-1, 2, 3, 1})).reshape({-1, 6});
    y = three(y.reshape({-1, 3, 2, 1, 1})).reshape({-1, 6});
    y = instance(y.reshape({-1, 2, 3})).reshape({-1, 6});
    return estimated->forward(y).sin();
  }
  nn::Linear linear = nullptr;
  nn::BatchNorm1d one = nullptr;
  nn::BatchNorm2d two = nullptr;
  nn::BatchNorm3d three = nullptr;
  nn::InstanceNorm1d instance = nullptr;
  std::shared_ptr<EstimatedImpl> estimated;
};

struct OuterImpl : nn::Cloneable<OuterImpl> {
  OuterImpl() { reset(); }
  void reset() override {
    inner = register_module("inner", Checkpointed<NormsImpl>());
    norm = register_module("norm", nn::BatchNorm1d(6));
  }
  Tensor forward(const Tensor& x) { return norm(inner(norm(x))); }
  Checkpointed<NormsImpl> inner = nullptr;
  nn::BatchNorm1d norm = nullptr;
};

/// Regions by call inside a checkpointed module.
struct CallsImpl : nn::Cloneable<CallsImpl> {
  CallsImpl() { reset(); }
  void reset() override {
    norms = register_module("norms", std::make_shared<NormsImpl>());
    norm = register_module("norm", nn::BatchNorm1d(6));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = checkpoint(norms, norm(x));
    return norm(checkpoint(norms, y)).exp();
  }
  std::shared_ptr<NormsImpl> norms;
  nn::BatchNorm1d norm = nullptr;
};

/// One way to run a net as regions beside its plain twin, which has the same parameters and
/// buffers.
struct Placement {
  const char* name;
  std::function<std::shared_ptr<nn::Module>()> make;
  std::function<Tensor(nn::Module&, const Tensor&)> run;
};

using RegionOfNorms = CheckpointedImpl<NormsImpl>;
using RegionOfOuter = CheckpointedImpl<OuterImpl>;

template <class Module>
Tensor call(nn::Module& module, const Tensor& x) {
  return dynamic_cast<Module&>(module).forward(x);
}

std::vector<Placement> placements() {
  const auto norms = [](remat::CheckpointOptions options) {
    return
        [options] { return std::make_shared<RegionOfNorms>(ModuleOptions{.checkpoint = options}); };
  };
  const auto plain_call = [](nn::Module& m, const Tensor& x) { return call<RegionOfNorms>(m, x); };
  return {
      {"alone", norms({}), plain_call},
      {"without early stop", norms({.early_stop = false}), plain_call},
      {"with contents compared", norms({.determinism_check = remat::DeterminismCheck::Values}),
       plain_call},
      {"three regions around", norms({}),
       [=](nn::Module& m, const Tensor& x) {
         const auto once = [&m, plain_call](const Tensor& t) { return plain_call(m, t); };
         const auto twice = [once](const Tensor& t) { return checkpoint(once, t); };
         return checkpoint([twice](const Tensor& t) { return checkpoint(twice, t); }, x);
       }},
      {"twice in one region", norms({}),
       [=](nn::Module& m, const Tensor& x) {
         return checkpoint(
             [&m, plain_call](const Tensor& t) { return plain_call(m, plain_call(m, t)); }, x);
       }},
      {"switched off, inside a region",
       [norms] {
         const auto module = norms({})();
         module->set_checkpointing(false);
         return module;
       },
       [=](nn::Module& m, const Tensor& x) {
         return checkpoint([&m, plain_call](const Tensor& t) { return plain_call(m, t).exp(); }, x);
       }},
      {"with products kept", norms({.policy = remat::save_ops({"aten::addmm", "aten::mm"})}),
       plain_call},
      {"around regions by call", [] { return std::make_shared<CheckpointedImpl<CallsImpl>>(); },
       [](nn::Module& m, const Tensor& x) { return call<CheckpointedImpl<CallsImpl>>(m, x); }},
      {"under a cache", norms({}),
       [=](nn::Module& m, const Tensor& x) {
         const remat::RecomputeCacheGuard cache;
         return plain_call(m, x);
       }},
      {"a region in a region that shares its norm",
       [] { return std::make_shared<RegionOfOuter>(ModuleOptions{.level = 2}); },
       [](nn::Module& m, const Tensor& x) { return call<RegionOfOuter>(m, x); }},
  };
}

void require_same_buffers(const nn::Module& regions, const nn::Module& plain) {
  const auto actual = regions.named_buffers(), expected = plain.named_buffers();
  REQUIRE(actual.keys() == expected.keys());
  for (const auto& buffer : actual) {
    CAPTURE(buffer.key());
    CHECK(bit_equal(buffer.value(), expected[buffer.key()]));
    CHECK(buffer.value()._version() == expected[buffer.key()]._version());
  }
}

/// A random mix of what a training program does with a net.
void act(int64_t action, nn::Module& net, const std::function<Tensor(const Tensor&)>& run,
         std::vector<Tensor>& kept) {
  const Tensor x = at::randn({4, 6}).requires_grad_();
  const Tensors inputs = [&] {
    Tensors all = net.parameters();
    all.push_back(x);
    return all;
  }();
  const auto options = [](bool retain, bool create) {
    return GradOptions{.retain_graph = retain, .create_graph = create, .allow_unused = true};
  };
  switch (action) {
    case 0:
      run(x).sum().backward();
      kept.push_back(x.grad());
      break;
    case 1: {
      const at::NoGradGuard no_grad;
      kept.push_back(run(x));
      break;
    }
    case 2:
      net.eval();
      kept.push_back(run(x));
      run(x).sum().backward();
      net.train();
      break;
    case 3:
      kept.push_back(run(x).detach());  // never followed by backward
      break;
    case 4: {
      const Tensor y = run(x);
      for (const bool retain : {true, false}) {
        const Tensors grads = grad_of(y, inputs, options(retain, false));
        kept.insert(kept.end(), grads.begin(), grads.end());
      }
      break;
    }
    case 5: {
      const Tensor gradient = grad_of(run(x), {x}, options(true, true))[0];
      kept.push_back(grad_of(gradient.pow(2), {x}, options(false, false))[0]);
      break;
    }
    case 6: {
      const Tensor first = run(x), second = run(x.sin());
      kept.push_back(grad_of(first, {x})[0]);
      kept.push_back(grad_of(second, {x})[0]);
      break;
    }
    default: {
      const Tensor y = run(x);
      net.eval();
      kept.push_back(grad_of(y, {x})[0]);
      net.train();
    }
  }
}

}  // namespace

TEST_CASE("after any mix of uses the buffers and their versions equal the plain run's",
          "[module]") {
  const Seed seed;
  for (const Placement& placement : placements()) {
    CAPTURE(placement.name);
    const auto regions = placement.make(), plain = regions->clone();
    remat::set_checkpointing(*plain, false);
    for (int step = 0; step < 24; ++step) {
      const int64_t action = step < 8 ? step : at::randint(8, {}, at::kLong).item<int64_t>();
      CAPTURE(step, action);
      const Tensor state = generator_state();
      Tensors expected, actual;
      {
        const remat::DisableCheckpointGuard off;
        act(action, *plain, [&](const Tensor& x) { return placement.run(*plain, x); }, expected);
      }
      set_generator_state(state);
      act(action, *regions, [&](const Tensor& x) { return placement.run(*regions, x); }, actual);
      require_bit_equal(actual, expected);
      require_same_buffers(*regions, *plain);
    }
  }
}

TEST_CASE("a region that does not restore buffers updates statistics twice", "[module]") {
  const Seed seed;
  const Tensor x = at::randn({8, 6}).requires_grad_();
  const auto batches = [&](BufferPolicy policy) {
    Checkpointed<nn::BatchNorm1dImpl> norm(ModuleOptions{.buffers = policy}, 6);
    const Counted done;
    norm(x).sum().backward();
    CHECK(done.now().recomputes == (policy == BufferPolicy::SkipBatchNorm ? 0 : 1));
    return norm->num_batches_tracked.item<int64_t>();
  };
  CHECK(batches(BufferPolicy::Restore) == 1);
  CHECK(batches(BufferPolicy::Ignore) == 2);
  CHECK(batches(BufferPolicy::SkipBatchNorm) == 1);
}

namespace {

struct SyncBatchNormImpl : nn::Module {  // somebody's own
  Tensor forward(const Tensor& x) { return x.sin(); }
};
struct OwnBatchNorm1dImpl : SyncBatchNormImpl {};
struct OwnBatchNorm3dImpl : SyncBatchNormImpl {};
struct OwnBatchNorm4dImpl : SyncBatchNormImpl {};  // there is no such thing
struct HoldsOneImpl : nn::Module {
  HoldsOneImpl() { register_module("norm", std::make_shared<SyncBatchNormImpl>()); }
  Tensor forward(const Tensor& x) { return x.exp().exp(); }
};

}  // namespace

TEST_CASE("SkipBatchNorm knows a batch norm of somebody's own by its name", "[module]") {
  const auto recomputes = [](auto&& norm) {
    const Counted done;
    norm(leaf({4})).sum().backward();
    return done.now().recomputes;
  };
  const ModuleOptions skip{.buffers = BufferPolicy::SkipBatchNorm};
  Warnings warnings;
  CHECK(recomputes(Checkpointed<SyncBatchNormImpl>(skip)) == 0);
  CHECK(recomputes(Checkpointed<OwnBatchNorm1dImpl>(skip)) == 0);
  CHECK(recomputes(Checkpointed<OwnBatchNorm3dImpl>(skip)) == 0);
  CHECK(recomputes(Checkpointed<OwnBatchNorm4dImpl>(skip)) == 1);
}

TEST_CASE("SkipBatchNorm runs a module with a BatchNorm plainly, and says so once", "[module]") {
  const Seed seed;
  Warnings warnings;
  const ModuleOptions skip{.buffers = BufferPolicy::SkipBatchNorm};
  Checkpointed<NormsImpl> norms(skip);
  Checkpointed<HoldsOneImpl> holds_one(skip);
  Checkpointed<nn::LinearImpl> linear(skip, 6, 6);
  const Tensor x = leaf({4, 6});
  const Counted done;
  {
    const at::NoGradGuard no_grad;
    norms(x);
  }
  norms->eval();
  norms(x);
  CHECK(warnings.texts.empty());
  norms->train();
  norms(x);
  norms(x);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0],
             contains("Activation checkpointing skipped for a subblock containing BatchNorm"));
  holds_one(x);
  CHECK(warnings.texts.size() == 2);
  CHECK(done.now().frames_created == 0);
  linear(x);
  CHECK(warnings.texts.size() == 2);
  CHECK(done.now().frames_created == 1);
}

TEST_CASE("recomputes of one module in several threads do not mix its buffers", "[module]") {
  const Seed seed;
  Checkpointed<EstimatedImpl> module;
  const Tensor x = leaf({4, 6});
  constexpr int num_threads = 4, num_graphs = 10;
  std::vector<Tensor> expected;
  std::vector<Tensor> graphs;
  {
    auto plain = std::dynamic_pointer_cast<CheckpointedImpl<EstimatedImpl>>(module->clone());
    plain->set_checkpointing(false);
    for (int i = 0; i < num_threads * num_graphs; ++i)
      expected.push_back(grad_of(plain->forward(x), {x})[0]);
  }
  for (int i = 0; i < num_threads * num_graphs; ++i) graphs.push_back(module(x));
  const Tensor after = module->estimate.clone();
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t)
    threads.emplace_back([&, t] {
      for (int i = t; i < num_threads * num_graphs; i += num_threads)
        if (!bit_equal(grad_of(graphs[static_cast<size_t>(i)], {x})[0],
                       expected[static_cast<size_t>(i)]))
          ++num_wrong;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(num_wrong == 0);
  CHECK(bit_equal(module->estimate, after));
}

TEST_CASE("buffers are put back after a recompute that throws", "[module][rule-12]") {
  struct FailingImpl : nn::Module {
    FailingImpl() { register_module("norm", norm); }
    Tensor forward(const Tensor& x) {
      const Tensor y = norm(x).exp();
      if (fails && remat::is_recomputing()) throw std::runtime_error("as asked");
      return y.exp();
    }
    nn::BatchNorm1d norm{6};
    bool fails = true;
  };
  const Seed seed;
  Checkpointed<FailingImpl> module;
  const Tensor x = leaf({4, 6});
  const Tensor y = module(x);
  const Tensor mean = module->norm->running_mean.clone();
  const auto version = module->norm->num_batches_tracked._version();
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::runtime_error);
  drop_ready_nodes();
  CHECK(bit_equal(module->norm->running_mean, mean));
  CHECK(module->norm->num_batches_tracked.item<int64_t>() == 1);
  CHECK(module->norm->num_batches_tracked._version() == version);
  module->fails = false;
  CHECK(grad_of(y, {x})[0].defined());
  CHECK(bit_equal(module->norm->running_mean, mean));
}
