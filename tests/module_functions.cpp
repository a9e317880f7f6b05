// Modules as functions of regions: their buffers and flags in recomputes, their lifetime, and what
// is warned of.

#include <torch/csrc/jit/api/module.h>

#include <any>

#include "tests/support/nn.h"
#include "tests/support/warnings.h"

using remat::BufferPolicy;
using remat::checkpoint;
using remat::Checkpointed;
using remat::CheckpointOptions;
using remat::ModuleOptions;
namespace nn = torch::nn;

namespace {

struct NormedImpl : nn::Module {
  Tensor forward(const Tensor& x) { return norm(linear(x)).sin(); }
  nn::Linear linear = register_module("linear", nn::Linear(6, 6));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(6));
};
TORCH_MODULE(Normed);

Tensors copies_of(const Tensors& tensors) {
  Tensors copies;
  for (const Tensor& each : tensors) copies.push_back(each.clone());
  return copies;
}

Tensors buffers_after_plain(Normed module, const Tensor& x) {
  const Tensors before = copies_of(module->buffers());
  module(x).sum().backward();
  const Tensors after = copies_of(module->buffers());
  for (std::size_t i = 0; i < before.size(); ++i) module->buffers()[i].copy_(before[i]);
  return after;
}

template <class Region>
void require_plain_buffers(Normed module, const Tensor& x, Region&& region) {
  const Tensors expected = buffers_after_plain(module, x);
  const Counted done;
  region(x).sum().backward();
  CHECK(done.now().frames_created == 1);
  CHECK(done.now().recomputes == 1);
  require_bit_equal(module->buffers(), expected);
}

}  // namespace

// A type that cannot be a region is no valid call to a requires-expression, whatever the cause.
namespace {

template <class F, class... A>
concept MayBeRegion = requires(F& fn, A&... args) { checkpoint(fn, args...); };
template <class F, class... A>
concept MayBeRegionWithOptions = requires(const CheckpointOptions& options, F& fn, A&... args) {
  checkpoint(options, fn, args...);
};
template <class F, class... A>
concept MayBe = MayBeRegion<F, A...> && MayBeRegionWithOptions<F, A...>;
template <class F, class... A>
concept CannotBe = !MayBeRegion<F, A...> && !MayBeRegionWithOptions<F, A...>;

Tensor scaled(const Tensor& x, double = 2) { return x; }
constexpr auto takes_reference = [](Tensor& x) { return x; };
constexpr auto takes_tensor = [](const Tensor& x) { return x; };
struct WithoutForward : nn::Module {};
class WithPrivateForward : public nn::Module {
  Tensor forward(Tensor x) { return x; }
};
struct WithOverloads : nn::Module {
  Tensor forward(Tensor x) { return x; }
  Tensor forward(Tensor x, double) { return x; }
};

using Pointer = std::shared_ptr<NormedImpl>;
static_assert(MayBe<Normed, Tensor> && MayBe<NormedImpl*, Tensor> && MayBe<Pointer, Tensor>);
static_assert(MayBe<nn::AnyModule, Tensor> && MayBe<torch::jit::Module, Tensor>);
static_assert(MayBe<decltype(takes_tensor), Tensor> && MayBe<decltype(scaled), Tensor, double>);
static_assert(MayBe<decltype(takes_reference), std::reference_wrapper<Tensor>>);
static_assert(MayBe<WithOverloads*, Tensor> && MayBe<WithOverloads*, Tensor, double>);
static_assert(CannotBe<NormedImpl, Tensor>);
static_assert(CannotBe<nn::Module*, Tensor> && CannotBe<std::shared_ptr<nn::Module>, Tensor>);
static_assert(CannotBe<Normed> && CannotBe<Normed, Tensor, Tensor> &&
              CannotBe<Normed, std::string>);
static_assert(CannotBe<Pointer> && CannotBe<NormedImpl*, int>);
static_assert(CannotBe<WithoutForward*, Tensor> && CannotBe<WithPrivateForward*, Tensor>);
static_assert(CannotBe<WithOverloads*, Tensor, Tensor>);
static_assert(CannotBe<torch::jit::Module, std::vector<std::any>>);
static_assert(CannotBe<decltype(takes_reference), Tensor>);
static_assert(CannotBe<decltype(takes_tensor)> && CannotBe<decltype(takes_tensor), int, int>);
static_assert(CannotBe<decltype(scaled), Tensor> &&
              CannotBe<decltype(scaled), std::string, double>);
static_assert(CannotBe<int, Tensor> && CannotBe<Tensor, Tensor> &&
              CannotBe<CheckpointOptions, Tensor>);

}  // namespace

TEST_CASE("a region whose function is a module moves its statistics once", "[modules][module]") {
  const Seed seed;
  const Tensor x = leaf({8, 6});
  Warnings warnings;
  Normed m;
  require_plain_buffers(m, x, [&](const Tensor& t) { return checkpoint(m, t); });
  require_plain_buffers(m, x, [&](const Tensor& t) { return checkpoint(m.ptr(), t); });
  require_plain_buffers(m, x, [&](const Tensor& t) { return checkpoint(m.get(), t); });
  require_plain_buffers(m, x, [&](const Tensor& t) { return checkpoint(nn::AnyModule(m), t); });
  require_plain_buffers(m, x, [&](const Tensor& t) { return remat::checkpointed(m)(t); });
  require_plain_buffers(m, x, [&](const Tensor& t) { return remat::checkpointed(m.get())(t); });
  require_plain_buffers(
      m, x, [&](const Tensor& t) { return checkpoint(&NormedImpl::forward, m.get(), t); });
  require_plain_buffers(m, x,
                        [&](const Tensor& t) { return checkpoint(&NormedImpl::forward, m, t); });
  require_plain_buffers(m, x, [&](const Tensor& t) { return checkpoint(nn::Sequential(m), t); });
  for (int64_t segments = 1; segments <= 2; ++segments)
    require_plain_buffers(m, x, [&](const Tensor& t) {
      return remat::checkpoint_sequential(nn::Sequential(m, nn::Tanh()), segments, t,
                                          {.checkpoint_last = segments == 1});
    });
  require_plain_buffers(m, x, [&](const Tensor& t) {
    return checkpoint({.modules = {m.ptr()}}, [m](const Tensor& u) mutable { return m(u); }, t);
  });
  CHECK(warnings.texts.empty());
}

TEST_CASE("a recompute of a module sees the training flags of forward", "[modules][module]") {
  const Seed seed;
  nn::Sequential net(nn::Linear(6, 6), nn::Dropout(0.5));
  const Tensor x = leaf({8, 6});
  const Tensor y = checkpoint(net, x);
  net->eval();
  CHECK_NOTHROW(y.sum().backward());
  CHECK_FALSE(net->is_training());
  CHECK_FALSE(net[1]->is_training());
}

TEST_CASE("buffers of a module function are left alone when the option says so",
          "[modules][module]") {
  const Seed seed;
  const Tensor x = leaf({8, 6});
  Warnings warnings;
  const auto batches = [&](BufferPolicy policy) {
    Normed m;
    checkpoint({.name = "skips or ignores", .buffers = policy}, m, x).sum().backward();
    return m->norm->num_batches_tracked.item<int64_t>();
  };
  const Counted done;
  CHECK(batches(BufferPolicy::Restore) == 1);
  CHECK(batches(BufferPolicy::Ignore) == 2);
  CHECK(done.now().frames_created == 2);
  CHECK(warnings.texts.empty());
  CHECK(batches(BufferPolicy::SkipBatchNorm) == 1);
  CHECK(batches(BufferPolicy::SkipBatchNorm) == 1);
  CHECK(done.now().frames_created == 2);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("skipped for a subblock containing BatchNorm"));

  Checkpointed<NormedImpl> module(ModuleOptions{.checkpoint = {.buffers = BufferPolicy::Ignore}});
  module(x).sum().backward();
  CHECK(module->norm->num_batches_tracked.item<int64_t>() == 2);
  CHECK(warnings.texts.size() == 1);
}

TEST_CASE("a batch norm that nobody restores is warned of once a name", "[modules][module]") {
  const Seed seed;
  const Tensor x = leaf({8, 6});
  Normed m;
  nn::Linear linear(6, 6);
  nn::LayerNorm layer_norm(nn::LayerNormOptions({6}));
  Warnings warnings;
  const auto run = [&](const std::string& name) {
    return checkpoint({.name = name}, [m](const Tensor& t) mutable { return m(t); }, x);
  };
  run("warned 1").sum().backward();
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0],
             contains("a batch norm in training mode ran in region \"warned 1\"") &&
                 contains("pass the module as the function") &&
                 contains("CheckpointOptions::modules"));
  run("warned 1");
  CHECK(warnings.texts.size() == 1);
  run("warned 2");
  CHECK(warnings.texts.size() == 2);
  m->eval();
  run("warned 3");
  m->train();
  checkpoint(
      {.name = "warned 4"}, [=](const Tensor& t) mutable { return layer_norm(linear(t)); }, x);
  checkpoint(
      {.name = "warned 5", .buffers = BufferPolicy::Ignore},
      [m](const Tensor& t) mutable { return m(t); }, x);
  Checkpointed<NormedImpl> covered;
  checkpoint({.name = "warned 6"}, [=](const Tensor& t) mutable { return covered(t); }, x);
  checkpoint(
      {.name = "warned 7", .modules = {m.ptr()}},
      [&](const Tensor& t) {
        return checkpoint({.name = "warned 8"}, [m](const Tensor& u) mutable { return m(u); }, t);
      },
      x);
  CHECK(warnings.texts.size() == 2);
}

TEST_CASE("a null module in the options is refused", "[modules][options]") {
  const Tensor x = leaf({2});
  CHECK_THROWS_AS(checkpoint(
                      {.modules = {nullptr}}, [](const Tensor& t) { return t.sin(); }, x),
                  c10::ValueError);
}

TEST_CASE("a Checkpointed in somebody's region opens none of its own", "[modules][module]") {
  const Seed seed;
  Checkpointed<NormedImpl> module;
  const Tensor x = leaf({8, 6});
  const Counted done;
  checkpoint(module, x).sum().backward();
  CHECK(done.now().frames_created == 1);
  CHECK(done.now().recomputes == 1);
  CHECK(module->norm->num_batches_tracked.item<int64_t>() == 1);
}

TEST_CASE("the graph keeps a module behind a raw pointer alive", "[modules][rule-13]") {
  const Seed seed;
  const Tensor x = leaf({8, 6});
  auto list = std::make_unique<nn::ModuleList>(Normed(), Normed());
  const std::weak_ptr<nn::Module> first = (*list)->ptr(0), second = (*list)->ptr(1);
  Tensor y = checkpoint((*list)[0]->as<NormedImpl>(), x);
  y = checkpoint(&NormedImpl::forward, (*list)[1]->as<NormedImpl>(), y);
  list.reset();
  CHECK_FALSE(first.expired());
  CHECK_FALSE(second.expired());
  y.sum().backward();
  y.reset();
  CHECK(first.expired());
  CHECK(second.expired());

  NormedImpl on_stack;
  checkpoint(&on_stack, x).sum().backward();
  CHECK(on_stack.norm->num_batches_tracked.item<int64_t>() == 1);
}

// The address sanitizer puts variables on stacks of its own.
#if !defined(__SANITIZE_ADDRESS__)
TEST_CASE("debug warns of a function that refers to its caller's variables", "[modules][options]") {
  const Tensor x = leaf({4}), w = at::ones({4});
  Warnings warnings;
  const CheckpointOptions options{.name = "debugged", .debug = true};
  checkpoint(options, [w](const Tensor& t) { return (t * w).sin(); }, x);
  checkpoint({.name = "not debugged"}, [&](const Tensor& t) { return (t * w).sin(); }, x);
  CHECK(warnings.texts.empty());
  checkpoint(options, [&](const Tensor& t) { return (t * w).sin(); }, x);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0],
             contains("the function of region \"debugged\" holds the address of a local variable"));
  checkpoint(options, [&](const Tensor& t) { return (t * w).sin(); }, x);
  CHECK(warnings.texts.size() == 1);
  const auto shared = remat::checkpointed([&](const Tensor& t) { return (t * w).sin(); },
                                          {.name = "debugged 2", .debug = true});
  shared(x);
  CHECK(warnings.texts.size() == 2);

  // The variables of another thread, above this one's stack, are not its callers'.
  std::size_t in_thread = 0;
  std::thread([&, of_main = [&x, &w](const Tensor& t) { return (t * w).sin() * x.detach(); }] {
    Warnings here;
    checkpoint({.name = "debugged 3", .debug = true}, of_main, x);
    in_thread = here.texts.size();
  }).join();
  CHECK(in_thread == 0);

  // A program that makes up names for ever does not fill the memory with them.
  for (int i = 0; i < 1100; ++i)
    checkpoint(
        {.name = "made up " + std::to_string(i), .debug = true},
        [&](const Tensor& t) { return (t * w).sin(); }, x);
  CHECK(warnings.texts.size() > 900);
  CHECK(warnings.texts.size() <= 1000);
}
#endif

TEST_CASE("a Sequential and modules with overloads may be Checkpointed", "[modules][module]") {
  struct OverloadedImpl : nn::Module {
    Tensor forward(const Tensor& t) { return t.sin().sin(); }
    Tensor forward(const Tensor& t, double factor) { return (t * factor).sin(); }
  };
  const Seed seed;
  const Tensor x = leaf({8, 6});
  Checkpointed<nn::SequentialImpl> chain(nn::Linear(6, 6), nn::Tanh());
  Checkpointed<OverloadedImpl> overloaded;
  const Counted done;
  const Tensor y = overloaded(overloaded(chain(x)), 2.0);
  CHECK(done.now().frames_created == 3);
  CHECK(bit_equal(chain->forward<Tensor>(x), chain->nn::SequentialImpl::forward(x)));
  CHECK(done.now().frames_created == 4);
  y.sum().backward();
  CHECK(done.now().recomputes == 3);
}

TEST_CASE("module_type is the type without regions", "[modules][module]") {
  Checkpointed<nn::LinearImpl> region(2, 2);
  nn::Linear plain(2, 2);
  CHECK(remat::module_type(*region) == typeid(nn::LinearImpl));
  CHECK(remat::module_type(*plain) == typeid(nn::LinearImpl));
  CHECK(typeid(*region.ptr()) != typeid(nn::LinearImpl));
}

TEST_CASE("a script module is the function of a region", "[modules]") {
  torch::jit::Module module("m");
  module.define("def forward(self, x, y):\n  return (x * y).sin().sin()\n");
  const Tensor x = leaf({4}), y = at::randn({4});
  // The profiling executor runs the first calls with other operators than later ones.
  for (int i = 0; i < 4; ++i) module.forward({x, y}).toTensor().sum().backward();
  x.mutable_grad() = Tensor();
  const Counted done;
  checkpoint(module, x, y).toTensor().sum().backward();
  CHECK(done.now().recomputes == 1);
  CHECK(bit_equal(x.grad(), grad_of((x * y).sin().sin(), {x})[0]));
}

namespace {

/// Every stock module with a forward, as a Checkpointed: its class is instantiated, and so is its
/// forward.
template <class... Impls>
int64_t count_instantiated() {
  return ((sizeof(remat::CheckpointedImpl<Impls>) > sizeof(Impls)) + ...);
}

}  // namespace

namespace {

struct BeginsInPlaceImpl : nn::Module {
  Tensor forward(Tensor x) { return linear->forward(x.relu_()).sin() * x; }
  nn::Linear linear = register_module("linear", nn::Linear(6, 6));
};

}  // namespace

TEST_CASE("a Checkpointed that copies its inputs may begin with an activation in place",
          "[module][copies]") {
  const Seed seed;
  Checkpointed<BeginsInPlaceImpl> block(
      ModuleOptions{.checkpoint = {.inputs = remat::InputMode::CopyOnWrite}});
  const Tensor x = leaf({4, 6});
  const Counted done;
  const Tensors with = grad_of(block(x * 1), {x, block->linear->weight});
  CHECK(done.now().recomputes == 1);
  remat::set_checkpointing(*block, false);
  require_bit_equal(with, grad_of(block(x * 1), {x, block->linear->weight}));
}

TEST_CASE("every stock module may be Checkpointed", "[modules][module]") {
  CHECK(count_instantiated<
            nn::Conv1dImpl, nn::Conv2dImpl, nn::ConvTranspose2dImpl, nn::PixelShuffleImpl,
            nn::FoldImpl, nn::ELUImpl, nn::SoftmaxImpl, nn::PReLUImpl, nn::ReLUImpl, nn::RReLUImpl,
            nn::GELUImpl, nn::MultiheadAttentionImpl, nn::BatchNorm2dImpl, nn::InstanceNorm2dImpl,
            nn::MaxPool2dImpl, nn::MaxUnpool2dImpl, nn::FractionalMaxPool2dImpl, nn::DropoutImpl,
            nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl, nn::LSTMCellImpl, nn::TransformerEncoderImpl,
            nn::TransformerDecoderImpl, nn::LayerNormImpl, nn::GroupNormImpl,
            nn::CosineSimilarityImpl, nn::MSELossImpl, nn::CTCLossImpl, nn::CrossEntropyLossImpl,
            nn::TransformerImpl, nn::TransformerEncoderLayerImpl, nn::TransformerDecoderLayerImpl,
            nn::UpsampleImpl, nn::ZeroPad2dImpl, nn::IdentityImpl, nn::LinearImpl, nn::FlattenImpl,
            nn::UnflattenImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl,
            nn::FunctionalImpl, nn::AdaptiveLogSoftmaxWithLossImpl, nn::SequentialImpl>() == 45);
}
