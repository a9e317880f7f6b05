// checkpoint_sequential: splits, results, gradients, misuse.

#include "tests/support/lazy_copies.h"
#include "tests/support/nn.h"

using remat::checkpoint_sequential;
using remat::SequentialOptions;
using remat::Split;
using remat::Stage;
namespace nn = torch::nn;

namespace {

/// Stages that count their runs: x * 2, with a tensor so that something is saved.
struct CountedStages {
  explicit CountedStages(int64_t size) : counts(static_cast<std::size_t>(size)) {
    for (int64_t& count : counts)
      stages.emplace_back([&count](Tensor x) {
        ++count;
        return x * at::full({}, 2.0);
      });
  }
  std::vector<int64_t> counts;
  std::vector<Stage> stages;
};

nn::Sequential layers() {
  return nn::Sequential(nn::Linear(100, 50), nn::ReLU(), nn::Linear(50, 20), nn::ReLU(),
                        nn::Linear(20, 5), nn::ReLU());
}

/// Runs of each stage after one backward, as text: "2221".
std::string runs(int64_t stages, int64_t segments, const SequentialOptions& options = {}) {
  CountedStages chain(stages);
  const Tensor x = leaf({3, 4});
  const Tensor y = checkpoint_sequential(chain.stages, segments, x, options);
  for (const int64_t count : chain.counts) CHECK(count == 1);
  y.sum().backward();
  std::string text;
  for (const int64_t count : chain.counts) text += std::to_string(count);
  CHECK(at::equal(x.grad(), at::full({3, 4}, std::pow(2.0, stages))));
  return text;
}

/// The lengths of the segments, by which stages begin one.
std::string lengths(int64_t stages, int64_t segments, Split split) {
  std::string text;
  std::vector<std::string> names;
  std::vector<Stage> chain;
  for (int64_t i = 0; i < stages; ++i)
    chain.emplace_back([&](Tensor x) {
      names.push_back(remat::current_phase().name);
      return x.sin();
    });
  SequentialOptions options{.split = split, .checkpoint_last = true};
  options.checkpoint.name = "part";
  checkpoint_sequential(chain, segments, leaf({2}), options);
  for (int64_t i = 0; i < segments; ++i)
    text += std::to_string(std::count(names.begin(), names.end(), "part " + std::to_string(i)));
  return text;
}

}  // namespace

TEST_CASE("every segment but the last is recomputed, or the last too when asked", "[sequential]") {
  CHECK(runs(10, 2) == "2222211111");
  CHECK(runs(10, 2, {.checkpoint_last = true}) == "2222222222");
  CHECK(runs(3, 1) == "111");
  CHECK(runs(3, 1, {.checkpoint_last = true}) == "222");
}

TEST_CASE("a chain is split as upstream does, or in balance", "[sequential]") {
  CHECK(lengths(9, 5, Split::Torch) == "11115");
  CHECK(lengths(9, 5, Split::Balanced) == "22221");
  CHECK(lengths(7, 3, Split::Torch) == "223");
  CHECK(lengths(7, 3, Split::Balanced) == "322");
  CHECK(lengths(4, 4, Split::Torch) == "1111");
  CHECK(lengths(4, 1, Split::Balanced) == "4");
}

TEST_CASE("a chain in segments has the plain output and grads", "[sequential]") {
  const Seed seed;
  nn::Sequential net = layers();
  const auto plain = [&](const Tensor& x) { return net->forward(x); };
  const Parameters parameters = parameters_of(*net);
  const Tensor x = leaf({1, 100});
  for (const int64_t segments : {1, 2, 3, 6})
    for (const Split split : {Split::Torch, Split::Balanced}) {
      CAPTURE(segments);
      require_same_grads(
          parameters, plain,
          [&](const Tensor& t) {
            return checkpoint_sequential(net, segments, t, {.split = split});
          },
          x);
    }
  std::vector<Stage> stages;
  for (nn::AnyModule& module : *net)
    stages.emplace_back(
        [module](Tensor t) mutable { return module.forward<Tensor>(std::move(t)); });
  require_same_grads(
      parameters, plain, [&](const Tensor& t) { return checkpoint_sequential(stages, 2, t); }, x);

  const Tensor expected = grad_of(plain(x), {x}, {.create_graph = true})[0];
  const Tensor gradient = grad_of(checkpoint_sequential(net, 2, x), {x}, {.create_graph = true})[0];
  CHECK(bit_equal(gradient, expected));
}

TEST_CASE("layers of a ModuleList may be the stages", "[sequential]") {
  const Seed seed;
  nn::ModuleList list(nn::Linear(100, 50), nn::ReLU(), nn::Linear(50, 20), nn::ReLU(),
                      nn::Linear(20, 5), nn::ReLU());
  const auto call = [](const std::shared_ptr<nn::Module>& layer, const Tensor& x) {
    if (auto* linear = layer->as<nn::Linear>()) return linear->forward(x);
    return layer->as<nn::ReLU>()->forward(x);
  };
  std::vector<Stage> stages;
  for (const auto& layer : *list)
    stages.emplace_back([=](const Tensor& x) { return call(layer, x); });
  require_same_grads(
      parameters_of(*list),
      [&](Tensor x) {
        for (const auto& layer : *list) x = call(layer, x);
        return x;
      },
      [&](const Tensor& x) { return checkpoint_sequential(stages, 2, x); }, leaf({1, 100}));
}

TEST_CASE("a chain in segments holds the segments' inputs and the last segment's saves",
          "[sequential]") {
  std::vector<Stage> stages(6, [](Tensor x) { return x.sin().exp(); });
  const Tensor x = leaf({1000});
  const LiveBytes bytes;
  const Tensor y = checkpoint_sequential(stages, 3, x);
  // One boundary between the first and second, one before the last; there sin keeps its input, exp
  // its result, twice: the boundary, exp, sin's input (that exp), exp = y. Where copies are made at
  // once, one of x.
  CHECK(bytes.held() == 4000 * (2 + 2 + (has_lazy_copies ? 0 : 1)));
  const Counted done;
  y.sum().backward();
  CHECK(done.now().recomputes == 2);
}

TEST_CASE("impossible segments and stages are refused by name", "[sequential]") {
  const auto text = [](const std::function<void()>& f) {
    return text_of(error_of<c10::ValueError>(f));
  };
  const Tensor x = leaf({1, 100});
  CHECK_THAT(text([&] { checkpoint_sequential(layers(), 7, x); }),
             contains("6 stages cannot be cut into 7 segments"));
  CHECK_THAT(text([&] { checkpoint_sequential(layers(), 0, x); }),
             contains("6 stages cannot be cut into 0 segments"));
  CHECK_THAT(text([&] { checkpoint_sequential(layers(), -1, x); }), contains("-1 segments"));
  CHECK_THAT(text([&] { checkpoint_sequential(std::vector<Stage>{}, 1, x); }),
             contains("0 stages cannot be cut into 1 segments"));
  const std::vector<Stage> holed{[](Tensor t) { return t; }, Stage()};
  CHECK_THAT(text([&] { checkpoint_sequential(holed, 1, x); }), contains("stage 1"));

  struct PairImpl : nn::Module {
    std::tuple<Tensor, Tensor> forward(Tensor t) { return {t, t}; }
  };
  const nn::Sequential pair(nn::ReLU(), std::make_shared<PairImpl>());
  const std::string wrong = text([&] { checkpoint_sequential(pair, 1, x); });
  CHECK_THAT(wrong, contains("stage 1"));
  CHECK_THAT(wrong, contains("instead of a tensor"));
}

namespace {

/// Layers in the style of VGG: activations in place, views between, dropout.
nn::Sequential vgg() {
  const auto relu = [] { return nn::ReLU(nn::ReLUOptions().inplace(true)); };
  const auto conv = [](int64_t in, int64_t out) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1));
  };
  return nn::Sequential(conv(3, 4), relu(), conv(4, 4), relu(),
                        nn::MaxPool2d(nn::MaxPool2dOptions(2)), conv(4, 6),
                        nn::Flatten(nn::FlattenOptions().start_dim(1)), relu(),
                        nn::Linear(6 * 16, 8), nn::Dropout(nn::DropoutOptions(0.5).inplace(true)),
                        nn::Linear(8, 8), relu(), nn::Linear(8, 5));
}

}  // namespace

TEST_CASE("a chain with activations in place works at every number of segments",
          "[sequential][copies]") {
  const Seed seed;
  nn::Sequential net = vgg();
  const auto length = static_cast<int64_t>(net->size());
  const Parameters parameters = parameters_of(*net);
  const Tensor x = leaf({2, 3, 8, 8});
  const bool is_named = GENERATE(false, true);  // options that say nothing of inputs
  for (const Split split : {Split::Torch, Split::Balanced})
    for (const bool last : {false, true})
      for (int64_t segments = 1; segments <= length; ++segments) {
        CAPTURE(segments, last, is_named);
        SequentialOptions options{.split = split, .checkpoint_last = last};
        if (is_named) options.checkpoint = {.name = "vgg"};
        require_same_grads(
            parameters, [&](const Tensor& t) { return net->forward(t); },
            [&](const Tensor& t) { return checkpoint_sequential(net, segments, t, options); }, x);
      }
}

TEST_CASE("a chain that is told to share its inputs names the segment that writes to its own",
          "[sequential][error]") {
  nn::Sequential net = vgg();
  SequentialOptions options{.checkpoint_last = true};
  options.checkpoint = {.name = "vgg", .inputs = remat::InputMode::Shared};
  const Tensor x = leaf({2, 3, 8, 8});
  const Tensor y = checkpoint_sequential(net, static_cast<int64_t>(net->size()), x, options);
  const auto error = error_of<remat::CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.kind() == remat::CheckpointError::Kind::InputChanged);
  CHECK_THAT(text_of(error), contains("tensor 0 of the arguments of region \"vgg 11\" (frame"));
  drop_ready_nodes();
}
