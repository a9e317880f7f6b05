// Regions of modules from outside: what is switched on in a Sequential, what stays as it was, and
// off again.

#include "remat/apply.h"

#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <sstream>
#include <thread>

#include "tests/support/nn.h"
#include "tests/support/warnings.h"

using remat::apply_checkpointing;
using remat::Checkpointed;
using remat::ModuleOptions;
using remat::remove_checkpointing;
using remat::require_checkpointing;
namespace nn = torch::nn;

namespace {

/// A residual block as somebody else wrote it: not a word about regions.
struct ResidualImpl : nn::Cloneable<ResidualImpl> {
  explicit ResidualImpl(int64_t channels = 4) : channels(channels) { reset(); }
  void reset() override {
    conv1 = register_module(
        "conv1", nn::Conv2d(nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)));
    bn1 = register_module("bn1", nn::BatchNorm2d(channels));
    conv2 = register_module(
        "conv2", nn::Conv2d(nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)));
    bn2 = register_module("bn2", nn::BatchNorm2d(channels));
    drop = register_module("drop", nn::Dropout(0.2));
  }
  Tensor forward(const Tensor& x) {
    ++num_calls;
    return at::relu(x + drop(bn2(conv2(at::relu(bn1(conv1(x)))))));
  }
  int64_t channels, num_calls = 0;
  nn::Conv2d conv1 = nullptr, conv2 = nullptr;
  nn::BatchNorm2d bn1 = nullptr, bn2 = nullptr;
  nn::Dropout drop = nullptr;
};
TORCH_MODULE(Residual);

/// A classifier whose stages are Sequentials of blocks.
struct ResNetImpl : nn::Cloneable<ResNetImpl> {
  ResNetImpl() { reset(); }
  void reset() override {
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1)));
    layer1 = register_module("layer1", nn::Sequential(Residual(4), Residual(4)));
    layer2 = register_module("layer2", nn::Sequential(Residual(4), Residual(4), Residual(4)));
    head = register_module("head", nn::Linear(4, 3));
  }
  Tensor forward(const Tensor& x) {
    return head(layer2->forward(layer1->forward(stem(x))).mean({2, 3}));
  }
  nn::Conv2d stem = nullptr;
  nn::Sequential layer1 = nullptr, layer2 = nullptr;
  nn::Linear head = nullptr;
};
TORCH_MODULE(ResNet);

struct SinesImpl : nn::Module {
  explicit SinesImpl(int64_t width = 4) : linear(width, width) {
    register_module("linear", linear);
  }
  Tensor forward(const Tensor& x) {
    ++num_calls;
    return linear(x).sin().sin();
  }
  std::atomic<int64_t> num_calls{0};  // threads run it side by side
  nn::Linear linear;
};
TORCH_MODULE(Sines);

/// As programs write it to put one Sequential into another, which needs a forward that is no
/// template.
struct StackImpl : nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  Tensor forward(const Tensor& x) { return SequentialImpl::forward(x); }
};
TORCH_MODULE(Stack);

std::vector<std::string> paths_of(const std::vector<remat::ChosenModule>& modules) {
  std::vector<std::string> paths;
  for (const auto& module : modules) paths.push_back(module.path);
  return paths;
}
using Paths = std::vector<std::string>;

std::string printed(const nn::Module& module) {
  std::stringstream text;
  text << module;
  return text.str();
}

std::vector<std::string> names_of(const nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) names.push_back(item.key());
  for (const auto& item : module.named_buffers()) names.push_back(item.key());
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    names.push_back(item.key() + " " + item.value()->name());
  return names;
}

}  // namespace

TEST_CASE("an element of a Sequential is a region when it is switched on, and none after",
          "[apply]") {
  const Seed seed;
  Sines first(4), second(4);
  nn::Sequential net(first, second);
  const Tensor x = leaf({8, 4});
  const Parameters parameters = parameters_of(*net);
  const auto plain = [&](const Tensor& t) {
    return second->linear(first->linear(t).sin().sin()).sin().sin();
  };
  const auto call = [&](const Tensor& t) { return net->forward(t); };
  const Outcome expected = run(parameters, plain, x);

  const remat::AppliedCheckpointing applied = apply_checkpointing(*net, {.name = "1"});
  CHECK(paths_of(applied.regions) == Paths{"1"});
  CHECK(applied.regions[0].type == "SinesImpl");
  CHECK(applied.refused.empty());
  CHECK(applied.to_string() == "region: 1 (SinesImpl)\n");
  for (int step = 0; step < 2; ++step) {
    const Counted done;
    first->num_calls = second->num_calls = 0;
    remat::testing::detail::require_same_outcome(run(parameters, call, x), expected);
    CHECK(done.now().frames_created == 1);
    CHECK(done.now().recomputes == 1);
    CHECK(first->num_calls == 1);
    CHECK(second->num_calls == 2);
  }
  const auto held = [&] {
    const LiveBytes bytes;
    const Tensor y = net->forward(x);
    return bytes.held();
  };
  // Four tensors of an element are held as they are: the input of the first sine, of the second,
  // and the result; as a region its result. (Its input is the result of the first.)
  constexpr int64_t tensor_bytes = 8 * 4 * 4;
  CHECK(held() == (3 + 1) * tensor_bytes);
  CHECK(paths_of(remove_checkpointing(*net)) == Paths{"1"});
  CHECK(held() == 2 * 3 * tensor_bytes);
  CHECK(frames_of([&] { return net->forward(x); }) == 0);
}

TEST_CASE("names, children, archives, text and types of a switched Sequential are what they were",
          "[apply]") {
  const Seed seed;
  ResNet net;
  const std::vector<std::string> names = names_of(*net);
  const std::string text = printed(*net);
  std::vector<const std::type_info*> types;
  std::vector<nn::Module*> modules;
  for (nn::AnyModule& element : *net->layer2) {
    types.push_back(&element.type_info());
    modules.push_back(element.ptr().get());
  }
  require_checkpointing(*net, remat::choose<Residual>());
  CHECK(names_of(*net) == names);
  CHECK(printed(*net) == text);
  std::size_t next = 0;
  for (nn::AnyModule& element : *net->layer2) {
    CHECK(element.ptr().get() == modules[next]);
    CHECK(net->layer2->ptr(next).get() == modules[next]);
    CHECK(net->layer2->ptr(next)->as<Residual>() == modules[next]);
    CHECK_THROWS_AS(element.get<ResidualImpl>(), c10::Error);
    CHECK_THROWS_AS(net->layer2->ptr<ResidualImpl>(next), c10::Error);
    ++next;
  }

  std::stringstream file;
  torch::save(net, file);
  ResNet plain;
  torch::load(plain, file);
  require_bit_equal(plain->parameters(), net->parameters());
  std::stringstream back;
  for (Tensor& parameter : plain->parameters()) parameter.detach().zero_();
  torch::save(plain, back);
  torch::load(net, back);
  require_bit_equal(net->parameters(), plain->parameters());

  net->to(at::kDouble);
  CHECK(net->layer2->ptr(0)->as<Residual>()->conv1->weight.scalar_type() == at::kDouble);
  net->eval();
  CHECK_FALSE(net->layer2->ptr(0)->as<Residual>()->bn1->is_training());
  net->layer2->ptr(0)->as<Residual>()->conv1->weight.mutable_grad() =
      at::ones_like(net->layer2->ptr(0)->as<Residual>()->conv1->weight);
  net->zero_grad();
  CHECK_FALSE(net->layer2->ptr(0)->as<Residual>()->conv1->weight.grad().defined());

  CHECK(remove_checkpointing(*net).size() == 5);
  next = 0;
  for (nn::AnyModule& element : *net->layer2) {
    CHECK(element.type_info() == *types[next]);
    CHECK(&element.get<ResidualImpl>() == modules[next]);
    CHECK(net->layer2->ptr<ResidualImpl>(next).get() == modules[next]);
    ++next;
  }
}

TEST_CASE("ten training steps of somebody else's model are those without regions, in fewer bytes",
          "[apply]") {
  struct Trained {
    std::vector<double> losses;
    Tensors parameters, buffers;
    Tensor next_random;
    int64_t peak_bytes = 0, recomputes = 0;
  };
  const Seed seed;
  const auto train = [](const std::string& choice) {
    at::manual_seed(1);
    ResNet net;
    if (!choice.empty()) require_checkpointing(*net, remat::ModuleChoice::parse(choice));
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const Tensor images = at::randn({4, 1, 12, 12}), labels = at::randint(3, {4}, at::kLong);
    Trained done;
    const Counted counted;
    for (int step = 0; step < 10; ++step) {
      optimizer.zero_grad();
      const LiveBytes bytes;
      const Tensor loss = at::cross_entropy_loss(net->forward(images), labels);
      loss.backward();
      if (step == 5) done.peak_bytes = bytes.peak();
      optimizer.step();
      done.losses.push_back(loss.item<double>());
    }
    done.recomputes = counted.now().recomputes;
    done.parameters = net->parameters();
    done.buffers = net->buffers();
    done.next_random = at::rand({4});
    return done;
  };
  const Trained plain = train("");
  CHECK(plain.recomputes == 0);
  CHECK(plain.losses.back() < plain.losses.front());
  const auto same = [&](const std::string& choice, int64_t recomputes) {
    CAPTURE(choice);
    const Trained regions = train(choice);
    CHECK(regions.recomputes == 10 * recomputes);
    CHECK(regions.losses == plain.losses);
    require_bit_equal(regions.parameters, plain.parameters);
    require_bit_equal(regions.buffers, plain.buffers);
    CHECK(bit_equal(regions.next_random, plain.next_random));
    CHECK(regions.peak_bytes < plain.peak_bytes);
    return regions.peak_bytes;
  };
  const int64_t all = same("type=Residual", 5);
  const int64_t some = same("every=2,name=layer*.*", 3);
  CHECK(all < some);
}

namespace {

struct Pair {
  Tensor first, second;
};
struct SplitImpl : nn::Module {
  SplitImpl() { register_module("linear", linear); }
  Pair forward(const Tensor& x) { return {linear(x).sin(), x.exp()}; }
  nn::Linear linear{4, 4};
};
struct JoinImpl : nn::Module {
  Tensor forward(Pair pair) { return pair.first.sin() * pair.second.cos(); }
};
struct ToTupleImpl : nn::Module {
  std::tuple<Tensor, Tensor> forward(std::vector<Tensor> all) {
    return {all.at(0).sin() * all.at(1), all.at(1).exp()};
  }
};
struct FromTupleImpl : nn::Module {
  Tensor forward(std::tuple<Tensor, Tensor> both) {
    return std::get<0>(both).sin() * std::get<1>(both).sin();
  }
};
struct LastStateImpl : nn::Module {
  Tensor forward(std::tuple<Tensor, std::tuple<Tensor, Tensor>> out) {
    return std::get<0>(out).sin() * std::get<0>(std::get<1>(out)).sin();
  }
};

struct ManyImpl : nn::Module {
  Tensor forward(Tensor x, double a, double b, double c, double d, double e, double f, double g,
                 double h, double i, double j, double k, double l, double m, double n, double o,
                 double p) {
    return x.sin() * (a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p);
  }
};
struct MostImpl : nn::Module {
  Tensor forward(Tensor x, double a, double b, double c, double d, double e, double f, double g,
                 double h, double i, double j, double k, double l, double m, double n, double o) {
    return x.sin() * (a + b + c + d + e + f + g + h + i + j + k + l + m + n + o);
  }
};

}  // namespace

TEST_CASE("an element takes and returns what its forward does: tuples, structs, default arguments",
          "[apply]") {
  const Seed seed;
  const Tensor x = leaf({3, 4}), shift = leaf({4});
  const auto same = [](nn::Sequential net, int64_t regions, const auto& call, const auto&... args) {
    const Parameters parameters = parameters_of(*net);
    const Outcome expected = run(parameters, call, args...);
    const auto applied =
        apply_checkpointing(*net, {.where = [](const std::string& path, nn::Module&) {
          return !path.empty() && path.find('.') == path.npos;
        }});
    CHECK(static_cast<int64_t>(applied.regions.size()) == regions);
    CHECK(applied.refused.empty());
    const Counted done;
    remat::testing::detail::require_same_outcome(run(parameters, call, args...), expected);
    CHECK(done.now().frames_created == regions);
    CHECK(done.now().recomputes == regions);
  };
  SECTION("default arguments, left out and given, and numbers") {
    nn::Sequential net{std::make_shared<ScaledImpl>()};
    same(net, 1, [&](const Tensor& t) { return net->forward(t); }, x);
    remove_checkpointing(*net);
    same(net, 1, [&](const Tensor& t) { return net->forward(t, 3.0); }, x);
    remove_checkpointing(*net);
    same(
        net, 1,
        [&](const Tensor& t, const Tensor& s) {
          return net->forward(t, 3.0, std::optional<Tensor>(s));
        },
        x, shift);
  }
  SECTION("an LSTM: a tuple of a tensor and a tuple") {
    nn::Sequential net(nn::LSTM(nn::LSTMOptions(4, 4)), std::make_shared<LastStateImpl>());
    same(net, 2, [&](const Tensor& t) { return net->forward(t); }, leaf({5, 2, 4}));
  }
  SECTION("a vector in, a tuple between") {
    nn::Sequential net(std::make_shared<ToTupleImpl>(), std::make_shared<FromTupleImpl>());
    same(
        net, 2,
        [&](const Tensor& a, const Tensor& b) { return net->forward(std::vector<Tensor>{a, b}); },
        x, leaf({3, 4}));
  }
  SECTION("a struct of the program's own, of which nobody knows the tensors") {
    nn::Sequential net(std::make_shared<SplitImpl>(), std::make_shared<JoinImpl>());
    same(net, 2, [&](const Tensor& t) { return net->forward(t); }, x);
  }
  SECTION("a function as an element") {
    nn::Sequential net(nn::Linear(4, 4), nn::Functional([](Tensor t) { return t.sin().sin(); }));
    same(net, 2, [&](const Tensor& t) { return net->forward(t); }, x);
  }
  SECTION("sixteen arguments, and one too many") {
    nn::Sequential most{std::make_shared<MostImpl>()};
    const auto with = [&x](nn::Sequential& net, auto... more) {
      return net->forward(x, 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.,
                          more...);
    };
    require_checkpointing(*most, {.name = "0"});
    CHECK(bit_equal(with(most), x.sin() * 120));
    nn::Sequential many{std::make_shared<ManyImpl>()};
    require_checkpointing(*many, {.name = "0"});
    CHECK_THAT(text_of(error_of<c10::ValueError>([&] { with(many, 16.); })),
               contains("was called with 17 arguments"));
    remove_checkpointing(*many);
    CHECK(bit_equal(with(many, 16.), x.sin() * 136));
  }
  SECTION("arguments that do not fit are LibTorch's error, with the module's name") {
    nn::Sequential net{std::make_shared<JoinImpl>()};
    require_checkpointing(*net, {.name = "0"});
    CHECK_THAT(text_of(error_of<c10::Error>([&] { net->forward(x); })),
               contains("Expected argument #0 to be of type"));
  }
}

TEST_CASE("clones of a switched Sequential have regions of their own", "[apply]") {
  const Seed seed;
  const Tensor x = leaf({2, 1, 6, 6});
  ResNet net;
  require_checkpointing(*net, {.type = "Residual", .every = 2});
  CHECK(frames_of([&] { return net->forward(x); }) == 3);
  const auto copy = std::dynamic_pointer_cast<ResNetImpl>(net->clone());
  REQUIRE(copy != nullptr);
  require_bit_equal(copy->parameters(), net->parameters());
  CHECK_FALSE(copy->parameters()[3].is_alias_of(net->parameters()[3]));
  CHECK(names_of(*copy) == names_of(*net));
  CHECK(copy->layer1->ptr(0)->as<Residual>()->num_calls > 0);  // copied along

  net->layer1->ptr(0)->as<Residual>()->num_calls = copy->layer1->ptr(0)->as<Residual>()->num_calls =
      0;
  const Counted done;
  copy->forward(x).sum().backward();
  CHECK(done.now().recomputes == 3);
  CHECK(net->layer1->ptr(0)->as<Residual>()->num_calls == 0);
  CHECK(copy->layer1->ptr(0)->as<Residual>()->num_calls == 2);
  CHECK_FALSE(net->layer1->ptr(0)->as<Residual>()->conv1->weight.grad().defined());
  CHECK(copy->layer1->ptr(0)->as<Residual>()->conv1->weight.grad().defined());

  remat::set_checkpointing(*net, false);
  const auto plain = std::dynamic_pointer_cast<ResNetImpl>(net->clone());
  CHECK(frames_of([&] { return plain->forward(x); }) == 0);
  remat::set_checkpointing(*net, true);

  CHECK(remove_checkpointing(*net).size() == 3);
  CHECK(frames_of([&] { return copy->forward(x); }) == 3);
  CHECK(paths_of(remove_checkpointing(*copy)) == Paths{"layer1.0", "layer2.0", "layer2.2"});
  CHECK(frames_of([&] { return copy->forward(x); }) == 0);

  nn::Sequential sequential(Residual(1));
  require_checkpointing(*sequential, {.name = "*"});
  sequential->ptr(0)->eval();
  const nn::Sequential alone(std::dynamic_pointer_cast<nn::SequentialImpl>(sequential->clone()));
  alone->ptr(0)->train();
  CHECK(frames_of([&] { return nn::Sequential(alone)->forward(x); }) == 1);
  CHECK_FALSE(sequential->ptr(0)->is_training());

  nn::Sequential unclonable(Sines(4));
  require_checkpointing(*unclonable, {.name = "*"});
  CHECK_THAT(text_of(error_of<c10::Error>([&] { unclonable->clone(); })),
             contains("clone() has not been implemented for"));
}

TEST_CASE(
    "switching on again changes the options and no more; switching off what is not on is nothing",
    "[apply]") {
  const Seed seed;
  const Tensor x = leaf({2, 4});
  nn::Sequential net(Sines(4), Sines(4));
  CHECK(remove_checkpointing(*net).empty());
  CHECK(remove_checkpointing(*net, {.name = "*"}).empty());
  require_checkpointing(*net, {.name = "0"});
  require_checkpointing(*net, {.name = "*"});
  CHECK(frames_of([&] { return net->forward(x); }) == 2);
  net->eval();
  CHECK(frames_of([&] { return net->forward(x); }) == 0);
  Calls contexts;
  const auto note = [&] {
    contexts();
    return remat::ContextPair{};
  };
  const ModuleOptions options{.checkpoint = {.context_fn = note}, .training_only = false};
  require_checkpointing(*net, {.name = "1"}, options);
  CHECK(frames_of([&] { return net->forward(x); }) == 1);
  require_checkpointing(*net, {.name = "1"});  // keeps them
  CHECK(frames_of([&] { return net->forward(x); }) == 1);
  CHECK(contexts.count() == 2);
  CHECK(paths_of(remove_checkpointing(*net, {.name = "0"})) == Paths{"0"});
  CHECK(paths_of(remove_checkpointing(*net)) == Paths{"1"});
  CHECK(remove_checkpointing(*net).empty());
  CHECK(&(*net->begin()).get<SinesImpl>() == net->ptr(0).get());

  CHECK_THAT(text_of(error_of<c10::ValueError>([&] {
               require_checkpointing(*net, {.name = "*"}, ModuleOptions{.enabled = false});
             })),
             contains("ModuleOptions::enabled was false"));
  CHECK_THAT(text_of(error_of<c10::ValueError>(
                 [&] { require_checkpointing(*net, {.name = "*"}, ModuleOptions{.level = -1}); })),
             contains("remat::require_checkpointing: ModuleOptions::level was -1"));
}

TEST_CASE("regions from outside are named by their paths", "[apply]") {
  const Seed seed;
  ResNet net;
  require_checkpointing(*net, {.name = "layer1.*"});
  require_checkpointing(*net, {.name = "layer2.*"}, {.checkpoint = {.name = "late"}});
  const remat::Recorder recorder;
  net->forward(leaf({2, 1, 6, 6})).sum().backward();
  std::vector<std::string> names;
  for (const remat::RegionReport& region : recorder.report().regions) names.push_back(region.name);
  std::sort(names.begin(), names.end());
  CHECK(names == Paths{"late layer2.0", "late layer2.1", "late layer2.2", "layer1.0", "layer1.1"});
}

TEST_CASE("a Checkpointed is switched where it is, with its own options unless others are given",
          "[apply]") {
  const Seed seed;
  const Tensor x = leaf({2, 4});
  Checkpointed<SinesImpl> region(ModuleOptions{.training_only = false, .enabled = false}, 4);
  SECTION("as an element: one region, and no second around it") {
    nn::Sequential net(region, Sines(4));
    CHECK(paths_of(require_checkpointing(*net, {.type = "Sines"})) == Paths{"0", "1"});
    CHECK(frames_of([&] { return net->forward(x); }) == 2);
    CHECK(net->ptr(0)->as<Checkpointed<SinesImpl>>()->checkpointing());
    net->eval();
    CHECK(frames_of([&] { return net->forward(x); }) == 1);  // its own options
    require_checkpointing(*net, remat::choose<SinesImpl>(), ModuleOptions{});
    CHECK(frames_of([&] { return net->forward(x); }) == 0);
    net->train();
    CHECK(frames_of([&] { return net->forward(x); }) == 2);
    CHECK(paths_of(remove_checkpointing(*net)) == Paths{"0", "1"});
    CHECK_FALSE(region->checkpointing());
  }
  SECTION("as a member, an element of a ModuleList, and the root") {
    struct NetImpl : nn::Module {
      explicit NetImpl(Checkpointed<SinesImpl>& region) : list(region) {
        register_module("member", region);
        register_module("list", list);
      }
      nn::ModuleList list;
    } net(region);
    const auto applied = apply_checkpointing(net, remat::choose<SinesImpl>());
    CHECK(paths_of(applied.regions) == Paths{"member", "list.0"});
    CHECK(applied.regions[0].type == "remat::Checkpointed<SinesImpl>");
    CHECK(applied.refused.empty());
    CHECK(region->checkpointing());
    CHECK(paths_of(remove_checkpointing(net)) == Paths{"member"});  // it is one module
    CHECK(paths_of(require_checkpointing(*region, {.type = "Sines"})) == Paths{""});
    CHECK(frames_of([&] { return region(x); }) == 1);
  }
  SECTION("pushed as what it wraps, it is called past its own forward") {
    nn::Sequential net;
    net->push_back(std::static_pointer_cast<SinesImpl>(region.ptr()));
    region->set_checkpointing(true);
    CHECK(frames_of([&] { return net->forward(x); }) == 0);
    require_checkpointing(*net, {.name = "0"});
    CHECK(frames_of([&] { return net->forward(x); }) == 1);
    CHECK(paths_of(remove_checkpointing(*net)) == Paths{"0"});
    CHECK(frames_of([&] { return net->forward(x); }) == 0);
  }
}

TEST_CASE("Sequentials in Sequentials, and one module twice", "[apply]") {
  const Seed seed;
  const Tensor x = leaf({2, 4});
  SECTION("regions in a region") {
    nn::Sequential net(Sines(4), Stack(Sines(4), Sines(4)));
    const auto call = [&](const Tensor& t) { return net->forward(t); };
    const Parameters parameters = parameters_of(*net);
    const Outcome expected = run(parameters, call, x);
    CHECK(paths_of(require_checkpointing(*net, {.name = "*|1.*"})) ==
          Paths{"0", "1", "1.0", "1.1"});
    const Counted done;
    remat::testing::detail::require_same_outcome(run(parameters, call, x), expected);
    CHECK(done.now().frames_created == 4 + 2);  // and two when the stack is computed again
    CHECK(paths_of(remove_checkpointing(*net, {.name = "1"})) == Paths{"1"});
    CHECK(frames_of([&] { return net->forward(x); }) == 3);
  }
  SECTION("each place of a module has its own switch") {
    Sines shared(4);
    nn::Sequential net(shared, Sines(4), shared);
    require_checkpointing(*net, {.name = "2"});
    CHECK(frames_of([&] { return net->forward(x); }) == 1);
    CHECK((*net->begin()).type_info() == typeid(SinesImpl));
    CHECK((*(net->begin() + 2)).type_info() != typeid(SinesImpl));
    require_checkpointing(*net, {.type = "Sines"});
    CHECK(frames_of([&] { return net->forward(x); }) == 3);
    CHECK(paths_of(remove_checkpointing(*net, {.name = "0"})) == Paths{"0"});
    CHECK(frames_of([&] { return net->forward(x); }) == 2);
  }
}

TEST_CASE("set_checkpointing and levels switch regions from outside, too", "[apply]") {
  const Seed seed;
  const Tensor x = leaf({2, 4});
  nn::Sequential net(Sines(4), Sines(4));
  require_checkpointing(*net, {.name = "0"}, {.level = 1});
  require_checkpointing(*net, {.name = "1"}, {.level = 3});
  const auto frames = [&] { return frames_of([&] { return net->forward(x); }); };
  CHECK(frames() == 2);
  remat::set_checkpointing(*net, false);
  CHECK(frames() == 0);
  remat::set_checkpoint_level(*net, 2);
  CHECK(frames() == 1);
  remat::set_checkpoint_level(*net, 3);
  CHECK(frames() == 2);
  const remat::DisableCheckpointGuard off;
  CHECK(frames() == 0);
}

TEST_CASE("a graph made before regions are switched off recomputes, and keeps its module alive",
          "[apply]") {
  const Seed seed;
  const Tensor x = leaf({2, 1, 6, 6});
  std::weak_ptr<nn::Module> module;
  Tensor y;
  const Counted done;
  {
    nn::Sequential net(Residual(1));
    module = net->ptr(0);
    require_checkpointing(*net, {.name = "0"});
    y = net->forward(x);
    remove_checkpointing(*net);
    net->eval();  // the recompute sees the flags of forward
  }
  CHECK_FALSE(module.expired());
  y.sum().backward();
  CHECK(done.now().recomputes == 1);
  y.reset();
  CHECK(module.expired());
}

TEST_CASE(
    "buffers and flags of a switched element are those of forward, also inside larger regions",
    "[apply]") {
  const auto buffers_after = [](int mode, bool inside) {
    at::manual_seed(3);
    nn::Sequential net(Residual(2), Residual(2));
    // 0: as it is. 1: regions. 2: they are switched off, but still there
    if (mode > 0) require_checkpointing(*net, {.type = "Residual"});
    if (mode == 2) remat::set_checkpointing(*net, false);
    const Tensor x = leaf({2, 2, 6, 6});
    for (int step = 0; step < 3; ++step) {
      const Tensor y = inside
                           ? remat::checkpoint([&](const Tensor& t) { return net->forward(t); }, x)
                           : net->forward(x);
      y.sum().backward();
    }
    Tensors all = net->buffers();
    all.push_back(x.grad());
    return all;
  };
  const Seed seed;
  const Tensors expected = buffers_after(0, false);
  require_bit_equal(buffers_after(1, false), expected);
  require_bit_equal(buffers_after(2, false), expected);
  require_bit_equal(buffers_after(1, true), expected);
  require_bit_equal(buffers_after(2, true), expected);

  Warnings warnings;
  nn::Sequential net(Residual(2));
  require_checkpointing(*net, {.name = "0"}, {.buffers = remat::BufferPolicy::SkipBatchNorm});
  CHECK(frames_of([&] { return net->forward(leaf({2, 2, 6, 6})); }) == 0);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("skipped for a subblock containing BatchNorm"));
}

TEST_CASE("threads run a switched Sequential side by side", "[apply]") {
  const Seed seed;
  nn::Sequential net(Sines(4), Sines(4));
  const Tensor x = leaf({8, 4});
  const Tensor expected = grad_of(net->forward(x), {x})[0];
  require_checkpointing(*net, {.type = "Sines"});
  std::atomic<int> num_wrong{0};
  const auto work = [&] {
    for (int i = 0; i < 20; ++i)
      if (!bit_equal(grad_of(net->forward(x), {x})[0], expected)) ++num_wrong;
  };
  std::thread other(work);
  work();
  other.join();
  CHECK(num_wrong == 0);
}
