// Checkpointed modules: what they are, how they are called, switched, cloned and saved.

#include <torch/optim/adam.h>
#include <torch/serialize.h>

#include <array>
#include <sstream>
#include <thread>

#include "tests/support/nn.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::Checkpointed;
using remat::CheckpointedImpl;
using remat::ModuleOptions;
namespace nn = torch::nn;

namespace {

/// This module shows the cost of a recompute: it counts the runs of its forward.
struct CountingImpl : nn::Cloneable<CountingImpl> {
  explicit CountingImpl(int64_t width = 4) : width(width) { reset(); }
  void reset() override { linear = register_module("linear", nn::Linear(width, width)); }
  Tensor forward(const Tensor& x) {
    ++num_calls;
    return linear(x).sin();
  }
  int64_t width, num_calls = 0;
  nn::Linear linear = nullptr;
};
TORCH_MODULE(Counting);

/// No parameter, no buffer, no child: nothing in it tells two of them apart.
struct BareImpl : nn::Cloneable<BareImpl> {
  void reset() override {}
  Tensor forward(Tensor x) { return x.sin().exp(); }
};

struct ParentImpl : nn::Cloneable<ParentImpl> {
  ParentImpl() { reset(); }
  void reset() override {
    first = register_module("first", Checkpointed<CountingImpl>(ModuleOptions{.level = 3}, 4));
    bare = register_module("bare", Checkpointed<BareImpl>());
    other = register_module("other", Checkpointed<BareImpl>());
    last = register_module("last", Checkpointed<CountingImpl>(4));
  }
  Tensor forward(const Tensor& x) { return last(other(bare(first(x)))); }
  Checkpointed<CountingImpl> first = nullptr, last = nullptr;
  Checkpointed<BareImpl> bare = nullptr, other = nullptr;
};
TORCH_MODULE(Parent);

std::vector<std::string> names_in(const torch::OrderedDict<std::string, Tensor>& tensors) {
  return tensors.keys();
}

template <class To, class From>
void copy_through_archive(To& to, const From& from) {
  std::stringstream file;
  torch::save(from, file);
  torch::load(to, file);
}

}  // namespace

TEST_CASE("a Checkpointed has the names of the module it is, and its archives go both ways",
          "[module]") {
  const Seed seed;
  Checkpointed<CountingImpl> region(4);
  Counting plain(4);
  CHECK(names_in(region->named_parameters()) == names_in(plain->named_parameters()));
  CHECK(region->named_children().keys() == plain->named_children().keys());
  CHECK(names_in(region->named_buffers()) == names_in(plain->named_buffers()));

  copy_through_archive(plain, region);
  require_bit_equal(plain->parameters(), region->parameters());
  Checkpointed<CountingImpl> back(4);
  copy_through_archive(back, plain);
  require_bit_equal(back->parameters(), plain->parameters());

  Checkpointed<nn::LinearImpl> linear(nn::LinearOptions(10, 10).bias(false));
  nn::Linear plain_linear(nn::LinearOptions(10, 10).bias(false));
  copy_through_archive(plain_linear, linear);
  require_bit_equal(plain_linear->parameters(), linear->parameters());
  copy_through_archive(linear, plain_linear);
  require_bit_equal(linear->parameters(), plain_linear->parameters());
  static_assert(std::derived_from<CheckpointedImpl<nn::LinearImpl>, nn::LinearImpl>);
  CHECK(linear->as<nn::Linear>() != nullptr);
}

TEST_CASE("a Checkpointed is a region from its holder, a Sequential and an AnyModule", "[module]") {
  const Seed seed;
  Checkpointed<CountingImpl> region(4);
  const Tensor x = leaf({3, 4});
  const auto plain = [&](const Tensor& t) { return region->linear(t).sin(); };
  const auto same = [&](const std::function<Tensor(const Tensor&)>& call) {
    const Counted done;
    region->num_calls = 0;
    require_same_grads(parameters_of(*region), plain, call, x);
    CHECK(done.now().frames_created == 1);
    CHECK(region->num_calls == 2);
  };
  same([&](const Tensor& t) { return region(t); });
  same([&](const Tensor& t) { return region->forward(t); });
  same([&](const Tensor& t) { return nn::Sequential(region)->forward(t); });
  same([&](const Tensor& t) { return nn::AnyModule(region).forward(t); });
  same([&](const Tensor& t) { return nn::AnyModule(region.ptr()).forward<Tensor>(t); });
  // Through the plain type the call is not virtual.
  CHECK(frames_of([&] { return static_cast<CountingImpl&>(*region).forward(x); }) == 0);
}

TEST_CASE("default arguments of a forward work on the holder and in a Sequential", "[module]") {
  const Seed seed;
  Checkpointed<ScaledImpl> region(ModuleOptions{});
  const Tensor x = leaf({3, 4}), shift = leaf({4});
  const auto plain = [&](const Tensor& t, const Tensor&) { return region->linear(t).exp() * 2.0; };
  const auto shifted = [&](const Tensor& t, const Tensor& s) {
    return region->linear(t).exp() * 3.0 + s;
  };
  const Parameters parameters = parameters_of(*region);
  const Counted done;
  const auto with_x = [](Tensor y, const Tensor& s) { return std::pair(y, s * 1); };
  require_same_grads(
      parameters, [&](const Tensor& t, const Tensor& s) { return with_x(plain(t, s), s); },
      [&](const Tensor& t, const Tensor& s) { return with_x(region(t), s); }, x, shift);
  require_same_grads(
      parameters, [&](const Tensor& t, const Tensor& s) { return with_x(plain(t, s), s); },
      [&](const Tensor& t, const Tensor& s) {
        return with_x(nn::Sequential(region)->forward(t), s);
      },
      x, shift);
  require_same_grads(
      parameters, shifted,
      [&](const Tensor& t, const Tensor& s) { return region(t, 3.0, std::optional(s)); }, x, shift);
  CHECK(done.now().frames_created == 3);
  CHECK(done.now().recomputes == 3);
}

namespace {

struct BaseImpl : nn::Module {
  virtual Tensor forward(const Tensor& x) = 0;
};
struct ConcreteImpl : BaseImpl {
  Tensor forward(const Tensor& x) override { return x.exp().exp(); }
};
struct ConstImpl : nn::Module {
  Tensor forward(const Tensor& x) const { return x.exp().exp(); }
};
struct NoexceptImpl : nn::Module {
  Tensor forward(Tensor x) noexcept { return x.exp().exp(); }
};
struct RvalueImpl : nn::Module {
  std::tuple<Tensor, int64_t> forward(Tensor&& x, std::vector<Tensor> more,
                                      const std::string& text) {
    return {x.exp() * more.at(0), static_cast<int64_t>(text.size())};
  }
};

}  // namespace

TEST_CASE("any signature of a forward may be checkpointed", "[module]") {
  const Seed seed;
  const Tensor x = leaf({3});
  const auto same = [&](auto& module) {
    const Counted done;
    require_same_grads([](const Tensor& t) { return t.exp().exp(); },
                       [&](const Tensor& t) { return module(t); }, x);
    require_same_grads([](const Tensor& t) { return t.exp().exp(); },
                       [&](const Tensor& t) { return module->forward(t); }, x);
    CHECK(done.now().recomputes == 2);
  };
  SECTION("virtual: a call through the base is a region too") {
    Checkpointed<ConcreteImpl> module;
    same(module);
    CHECK(frames_of([&] { return static_cast<BaseImpl&>(*module).forward(x); }) == 1);
  }
  SECTION("const") {
    Checkpointed<ConstImpl> module;
    same(module);
  }
  SECTION("noexcept: it is not stopped early, which would end the process") {
    Checkpointed<NoexceptImpl> module;
    same(module);
  }
  SECTION("rvalue and container arguments, a tuple as result") {
    Checkpointed<RvalueImpl> module;
    const auto call = [&](const Tensor& t) {
      return std::get<0>(module(Tensor(t), std::vector<Tensor>{t.sin()}, "four"));
    };
    require_same_grads([](const Tensor& t) { return t.exp() * t.sin(); }, call, x);
    CHECK(std::get<1>(module->forward(Tensor(x), {x}, "four")) == 4);
  }
}

TEST_CASE("the switch and the levels turn regions on and off", "[module]") {
  const Seed seed;
  const Tensor x = leaf({2, 4});
  Checkpointed<CountingImpl> off(ModuleOptions{.enabled = false}, 4);
  CHECK_FALSE(off->checkpointing());
  CHECK(frames_of([&] { return off(x); }) == 0);
  off->set_checkpointing(true);
  CHECK(off->checkpointing());
  CHECK(frames_of([&] { return off(x); }) == 1);

  struct Model : nn::Module {
    Model() {
      for (int64_t level = 0; level < 4; ++level)
        parts->push_back(Checkpointed<CountingImpl>(ModuleOptions{.level = level}, 4));
      register_module("parts", parts);
    }
    std::string on() const {
      std::string text;
      for (const auto& part : parts->children())
        text += part->as<CheckpointedImpl<CountingImpl>>()->checkpointing() ? '1' : '0';
      return text;
    }
    nn::Sequential parts;
  };
  Model model;
  CHECK(model.on() == "0111");  // level 0: never, unless asked for by name
  const std::array<const char*, 5> by_level{"0000", "0100", "0110", "0111", "0111"};
  for (int64_t level = 0; level < 5; ++level) {
    remat::set_checkpoint_level(model, level);
    CHECK(model.on() == by_level[static_cast<std::size_t>(level)]);
    const Counted done;
    model.parts->forward(x);
    CHECK(done.now().frames_created == std::min<int64_t>(level, 3));
  }
  remat::set_checkpoint_level(model, -1);
  CHECK(model.on() == "0000");
  remat::set_checkpointing(model, true);
  CHECK(model.on() == "1111");
  remat::set_checkpointing(model, false);
  CHECK(model.on() == "0000");

  const auto error = error_of<c10::ValueError>(
      [] { Checkpointed<CountingImpl> module(ModuleOptions{.level = -1}, 4); });
  CHECK_THAT(text_of(error), contains("ModuleOptions::level was -1"));
}

TEST_CASE("a backward through a module that eval mode switched off is warned of once", "[module]") {
  struct OffInEvalImpl : nn::LinearImpl {
    using nn::LinearImpl::LinearImpl;
  };
  const Seed seed;
  const Tensor x = leaf({2, 4});
  Checkpointed<OffInEvalImpl> first(4, 4), second(4, 4);
  Checkpointed<OffInEvalImpl> always(ModuleOptions{.training_only = false}, 4, 4);
  first->eval();
  second->eval();
  always->eval();
  const auto texts_of = [](auto&& run) {
    const remat::testing::Warnings warnings;
    run();
    return warnings.texts;
  };
  const auto forward = [&] { return second(first(x)).sum(); };
  CHECK(texts_of([&] { always(x).sum().backward(); }).empty());
  CHECK(texts_of([&] { forward(); }).empty());                       // no backward
  CHECK(texts_of([&] { checkpoint(forward).backward(); }).empty());  // a region around drops all
  CHECK(texts_of([&] {
          const remat::DisableCheckpointGuard off;
          forward().backward();
        }).empty());
  const auto texts = texts_of([&] {
    const Tensor y = forward();
    grad_of(y, {x}, {.retain_graph = true, .create_graph = true});
    y.backward();
  });
  REQUIRE(texts.size() == 1);
  CHECK_THAT(texts[0], contains("in eval mode, which ran without a region"));
  CHECK(texts_of([&] { forward().backward(); }).empty());
}

TEST_CASE("a Checkpointed runs plainly without grad, in eval mode and where checkpoints are off",
          "[module]") {
  const Seed seed;
  const Tensor x = leaf({2, 4});
  Checkpointed<CountingImpl> training_only(4);
  Checkpointed<CountingImpl> always(ModuleOptions{.training_only = false}, 4);
  CHECK(frames_of([&] { return training_only(x); }) == 1);
  training_only->eval();
  always->eval();
  CHECK(frames_of([&] { return training_only(x); }) == 0);
  CHECK(frames_of([&] { return always(x); }) == 1);
  training_only->train();
  {
    const remat::DisableCheckpointGuard off;
    CHECK(frames_of([&] { return training_only(x); }) == 0);
  }
  {
    const at::NoGradGuard no_grad;
    CHECK(frames_of([&] { return training_only(x); }) == 0);
    CHECK(frames_of([&] { return always(x); }) == 0);
  }
  // An input without grad is no reason: the parameters need theirs.
  CHECK(frames_of([&] { return training_only(at::randn({2, 4})); }) == 1);
}

namespace {

struct NestedImpl : nn::Module {
  NestedImpl() { register_module("layers", layers); }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers{Checkpointed<nn::LinearImpl>(10, 10)};
};
TORCH_MODULE(Nested);

}  // namespace

TEST_CASE("checkpointed layers in blocks give every weight and bias a grad", "[module]") {
  nn::Sequential blocks, plain;
  {
    const Seed seed;
    for (int block = 0; block < 3; ++block) {
      blocks->push_back(Checkpointed<nn::LinearImpl>(10, 10));
      blocks->push_back(Nested());
      blocks->push_back(nn::BatchNorm1d(10));
    }
  }
  {
    const Seed seed;  // the same weights
    for (int block = 0; block < 3; ++block) {
      for (int layer = 0; layer < 2; ++layer) plain->push_back(nn::Linear(10, 10));
      plain->push_back(nn::BatchNorm1d(10));
    }
  }
  const Seed seed;
  for (int iteration = 0; iteration < 6; ++iteration) {
    const Tensor x = at::randn({4, 10});
    const Counted done;
    blocks->forward(x).exp().sum().backward();
    CHECK(done.now().frames_created == 6);
    plain->forward(x).exp().sum().backward();
    const auto parameters = blocks->parameters(), expected = plain->parameters();
    REQUIRE(parameters.size() == expected.size());
    for (size_t i = 0; i < parameters.size(); ++i)
      require_bit_equal({parameters[i].detach(), parameters[i].grad()},
                        {expected[i].detach(), expected[i].grad()});
    require_bit_equal(blocks->buffers(), plain->buffers());
  }
}

TEST_CASE("checkpointed blocks need the bytes of blocks called as regions", "[module]") {
  const Seed seed;
  struct BlockImpl : nn::SequentialImpl {
    BlockImpl() {
      for (int i = 0; i < 3; ++i) push_back(nn::Linear(256, 256));
    }
    Tensor forward(const Tensor& x) { return nn::SequentialImpl::forward(x); }
  };
  std::vector<Checkpointed<BlockImpl>> blocks;
  for (int i = 0; i < 8; ++i) blocks.emplace_back(ModuleOptions{});
  const Tensor x = at::randn({10000, 256});
  const auto peak_of = [&](bool by_call) {
    remat::set_checkpointing(*blocks[0], true);
    for (auto& block : blocks) {
      block->set_checkpointing(!by_call);
      for (Tensor& parameter : block->parameters())
        parameter.mutable_grad() = at::zeros_like(parameter);
    }
    const Counted done;
    const LiveBytes bytes;
    {
      Tensor y = x;
      for (auto& block : blocks) y = by_call ? checkpoint(block, y) : block(y);
      y.sum().backward();
    }
    CHECK(done.now().recomputes == 8);
    return bytes.peak();
  };
  const int64_t by_call = peak_of(true);
  CHECK(peak_of(false) == by_call);
  CHECK(by_call > 0);
}

TEST_CASE("a clone has the options and the switch of the original", "[module]") {
  const Seed seed;
  const Tensor x = leaf({2, 4});
  SECTION("alone") {
    Checkpointed<CountingImpl> original(ModuleOptions{.training_only = false, .level = 7}, 4);
    original->set_checkpointing(false);
    const auto copy = std::dynamic_pointer_cast<CheckpointedImpl<CountingImpl>>(original->clone());
    REQUIRE(copy != nullptr);
    CHECK_FALSE(copy->checkpointing());
    require_bit_equal(copy->parameters(), original->parameters());
    CHECK_FALSE(copy->parameters()[0].is_alias_of(original->parameters()[0]));
    CHECK(copy->linear.get() == copy->children()[0].get());
    remat::set_checkpoint_level(*copy, 6);
    CHECK_FALSE(copy->checkpointing());
    remat::set_checkpoint_level(*copy, 7);
    CHECK(copy->checkpointing());
    CHECK_FALSE(original->checkpointing());
    copy->eval();
    CHECK(frames_of([&] { return copy->forward(x); }) == 1);
    CHECK(copy->name() == original->name());
  }
  SECTION("in a parent, with children that nothing but their place tells apart") {
    Parent original;
    original->bare->set_checkpointing(false);
    original->last->set_checkpointing(false);
    std::shared_ptr<nn::Module> twice;
    {
      const auto once = original->clone();
      twice = once->clone();
    }
    const auto copy = std::dynamic_pointer_cast<ParentImpl>(twice);
    CHECK(copy->first->checkpointing());
    CHECK_FALSE(copy->bare->checkpointing());
    CHECK(copy->other->checkpointing());
    CHECK_FALSE(copy->last->checkpointing());
    remat::set_checkpoint_level(*copy, 2);
    CHECK_FALSE(copy->first->checkpointing());  // its level came along
    CHECK(copy->last->checkpointing());
    remat::set_checkpoint_level(*copy, 3);
    CHECK(copy->first->checkpointing());
    for (const auto& child : copy->children()) CHECK_THAT(child->name(), !contains("clone"));
    const Counted done;
    copy->forward(x).sum().backward();
    CHECK(done.now().recomputes == 4);
    CHECK(original->first->linear->weight.grad().defined() == false);
  }
  SECTION("in a checkpointed parent, and in a Sequential") {
    Checkpointed<ParentImpl> original(ModuleOptions{.level = 5});
    original->last->set_checkpointing(false);
    const auto copy = std::dynamic_pointer_cast<CheckpointedImpl<ParentImpl>>(original->clone());
    REQUIRE(copy != nullptr);
    CHECK(copy->checkpointing());
    CHECK_FALSE(copy->last->checkpointing());
    remat::set_checkpoint_level(*copy, 4);
    CHECK_FALSE(copy->checkpointing());
    CHECK(copy->first->checkpointing());

    nn::Sequential sequential(Checkpointed<CountingImpl>(ModuleOptions{.enabled = false}, 4));
    const auto sequential_copy = std::dynamic_pointer_cast<nn::SequentialImpl>(sequential->clone());
    const auto child =
        std::dynamic_pointer_cast<CheckpointedImpl<CountingImpl>>(sequential_copy->ptr(0));
    REQUIRE(child != nullptr);
    CHECK_FALSE(child->checkpointing());
  }
  SECTION("a module that cannot be cloned as itself says so") {
    struct NarrowImpl : nn::LinearImpl {
      NarrowImpl() : nn::LinearImpl(2, 2) {}
      Tensor forward(const Tensor& x) { return nn::LinearImpl::forward(x); }
    };
    Checkpointed<NarrowImpl> module;
    CHECK_THAT(text_of(error_of<c10::Error>([&] { module->clone(); })),
               contains("the clone() of a module did not return a"));
  }
}

TEST_CASE("a graph keeps its checkpointed module alive, and no longer", "[module][rule-13]") {
  const Seed seed;
  std::weak_ptr<nn::Module> module;
  const Tensor x = leaf({2, 4});
  {
    Tensor y;
    {
      Checkpointed<CountingImpl> region(4);
      module = region.ptr();
      y = region(x);
    }
    CHECK_FALSE(module.expired());
    y.sum().backward();
  }
  CHECK(x.grad().defined());
  CHECK(module.expired());

  CheckpointedImpl<CountingImpl> on_the_stack(4);
  const auto error = error_of<c10::ValueError>([&] { on_the_stack.forward(x); });
  CHECK_THAT(text_of(error), contains("but no shared pointer owns it"));
  const at::NoGradGuard no_grad;
  CHECK(on_the_stack.forward(x).defined());
}

namespace {

struct DropoutBlockImpl : nn::Cloneable<DropoutBlockImpl> {
  DropoutBlockImpl() { reset(); }
  void reset() override {
    linear = register_module("linear", nn::Linear(8, 8));
    dropout = register_module("dropout", nn::Dropout(0.5));
  }
  Tensor forward(const Tensor& x) { return dropout(linear(x).exp()).sin(); }
  nn::Linear linear = nullptr;
  nn::Dropout dropout = nullptr;
};

}  // namespace

TEST_CASE("a recompute has the training flags that forward had", "[module]") {
  const Seed seed(3);
  const Tensor x = leaf({4, 8});
  Checkpointed<DropoutBlockImpl> block(ModuleOptions{.training_only = false});
  const bool was_training = GENERATE(true, false);
  const bool in_a_region = GENERATE(false, true);
  CAPTURE(was_training, in_a_region);
  block->train(was_training);
  block->dropout->train();  // a flag that is not its parent's

  const auto gradient = [&](bool checkpointing, bool switched) {
    at::manual_seed(5);
    block->set_checkpointing(checkpointing);
    Tensor y = in_a_region && checkpointing ? checkpoint(block, x) : block(x);
    if (switched) {
      block->train(!was_training);
      block->dropout->eval();
    }
    const Tensor gradient = grad_of(y, {x})[0];
    CHECK(block->is_training() == (switched ? !was_training : was_training));
    CHECK(block->dropout->is_training() == !switched);
    block->train(was_training);
    block->dropout->train();
    return gradient;
  };
  const Tensor plain = gradient(false, false);
  CHECK(bit_equal(gradient(true, false), plain));
  CHECK(bit_equal(gradient(true, true), plain));
}

TEST_CASE("two graphs of one module with other flags may be recomputed at once", "[module]") {
  const Seed seed(4);
  const Tensor x = leaf({4, 8});
  Checkpointed<DropoutBlockImpl> block(ModuleOptions{.training_only = false});
  const auto forward = [&](bool training) {
    at::manual_seed(6);
    block->train(training);
    return block(x);
  };
  const auto plain = [&](bool training) {
    block->set_checkpointing(false);
    const Tensor gradient = grad_of(forward(training), {x})[0];
    block->set_checkpointing(true);
    return gradient;
  };
  const Tensor plain_train = plain(true), plain_eval = plain(false);
  constexpr int rounds = 20;
  std::vector<Tensor> train_graphs, eval_graphs;
  for (int i = 0; i < rounds; ++i) train_graphs.push_back(forward(true));
  for (int i = 0; i < rounds; ++i) eval_graphs.push_back(forward(false));
  std::atomic<int> num_wrong{0};
  const auto backward = [&](const std::vector<Tensor>& graphs, const Tensor& expected) {
    for (const Tensor& y : graphs)
      if (!bit_equal(grad_of(y, {x})[0], expected)) ++num_wrong;
  };
  std::thread other([&] { backward(train_graphs, plain_train); });
  backward(eval_graphs, plain_eval);
  other.join();
  CHECK(num_wrong == 0);
  CHECK_FALSE(block->is_training());
}

namespace {

struct AttentionBlockImpl : nn::Cloneable<AttentionBlockImpl> {
  AttentionBlockImpl() { reset(); }
  void reset() override {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({16})));
    in = register_module("in", nn::Linear(16, 48));
    out = register_module("out", nn::Linear(16, 16));
    up = register_module("up", nn::Linear(16, 32));
    down = register_module("down", nn::Linear(32, 16));
  }
  Tensor forward(const Tensor& x) {
    const Tensors qkv = in(norm(x)).chunk(3, -1);
    const Tensor attended = at::scaled_dot_product_attention(
        qkv[0].unsqueeze(1), qkv[1].unsqueeze(1), qkv[2].unsqueeze(1), {}, 0.0, true);
    const Tensor y = x + out(attended.squeeze(1));
    return y + at::dropout(down(at::gelu(up(y))), 0.1, is_training());
  }
  nn::LayerNorm norm = nullptr;
  nn::Linear in = nullptr, out = nullptr, up = nullptr, down = nullptr;
};

}  // namespace

TEST_CASE("ten Adam steps of a transformer of Checkpointed blocks have the plain losses",
          "[module]") {
  const Seed seed(0);
  enum class Mode { Plain, ByCall, ByModule };
  const auto train = [](Mode mode) {
    at::manual_seed(1);
    std::vector<Checkpointed<AttentionBlockImpl>> blocks;
    std::vector<Tensor> parameters;
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back(ModuleOptions{.enabled = mode == Mode::ByModule});
      for (const Tensor& parameter : blocks.back()->parameters()) parameters.push_back(parameter);
    }
    const Tensor data = at::randn({4, 6, 16}), target = at::randn({4, 6, 16});
    torch::optim::Adam optimizer(parameters, 1e-2);
    std::vector<float> losses;
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      Tensor x = data;
      for (auto& block : blocks) x = mode == Mode::ByCall ? checkpoint(block, x) : block(x);
      const Tensor loss = at::mse_loss(x, target);
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<float>());
    }
    return losses;
  };
  const std::vector<float> plain = train(Mode::Plain);
  CHECK(plain.back() < plain.front());
  CHECK(train(Mode::ByCall) == plain);
  const Counted done;
  CHECK(train(Mode::ByModule) == plain);
  CHECK(done.now().recomputes == 30);
}
