// Ten optimizer steps of real models, with and without regions: losses, weights and buffers, bit by
// bit. (The U-Net is examples/unet.cpp, which compares the same and is run as a test.)

#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "tests/support/nn.h"

using remat::checkpoint;
using remat::Checkpointed;
using remat::ModuleOptions;
namespace nn = torch::nn;

namespace {

/// The results of a training, to be compared.
struct Trained {
  std::vector<double> losses;
  Tensors parameters, buffers;
  int64_t num_recomputes = 0;
};

/// Ten steps of a model that `make` makes, the same from the same seed. `loss` maps it to a scalar.
template <class Make, class Loss>
Trained train(Make&& make, Loss&& loss, bool checkpointing, bool sgd = false) {
  at::manual_seed(1);
  auto model = make();
  remat::set_checkpointing(*model, checkpointing);
  const Tensors parameters = model->parameters();
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (sgd)
    optimizer = std::make_unique<torch::optim::SGD>(parameters,
                                                    torch::optim::SGDOptions(0.05).momentum(0.9));
  else
    optimizer = std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-2));
  Trained done;
  const Counted counted;
  for (int step = 0; step < 10; ++step) {
    optimizer->zero_grad();
    const Tensor value = loss(model);
    value.backward();
    optimizer->step();
    done.losses.push_back(value.template item<double>());
  }
  done.num_recomputes = counted.now().recomputes;
  done.parameters = parameters;
  done.buffers = model->buffers();
  return done;
}

template <class Make, class Loss>
void require_same_training(int64_t recomputes_per_step, Make&& make, Loss&& loss) {
  for (const bool sgd : {false, true}) {
    CAPTURE(sgd);
    const Trained plain = train(make, loss, false, sgd);
    CHECK(plain.num_recomputes == 0);
    CHECK(plain.losses.back() < plain.losses.front());
    const Trained regions = train(make, loss, true, sgd);
    CHECK(regions.num_recomputes == 10 * recomputes_per_step);
    CHECK(regions.losses == plain.losses);
    require_bit_equal(regions.parameters, plain.parameters);
    require_bit_equal(regions.buffers, plain.buffers);
  }
}

// ---- models ----------------------------------------------------------------------------------

struct LstmLayerImpl : nn::Module {
  explicit LstmLayerImpl(int64_t width) : lstm(nn::LSTMOptions(width, width).batch_first(true)) {
    register_module("lstm", lstm);
  }
  Tensor forward(const Tensor& x) {
    return at::dropout(x + std::get<0>(lstm(x)), 0.1, is_training());
  }
  nn::LSTM lstm;
};

/// A language model: (B, T) numbers of tokens to (B, T, tokens) scores of the next ones.
struct LanguageModelImpl : nn::Module {
  LanguageModelImpl() {
    register_module("embedding", embedding);
    for (int i = 0; i < 2; ++i) layers->push_back(Checkpointed<LstmLayerImpl>(ModuleOptions{}, 16));
    register_module("layers", layers);
    register_module("head", head);
  }
  Tensor forward(const Tensor& tokens) { return head(layers->forward(embedding(tokens))); }
  nn::Embedding embedding{11, 16};
  nn::Sequential layers;
  nn::Linear head{16, 11};
};
TORCH_MODULE(LanguageModel);

struct ConvBlockImpl : nn::Module {
  ConvBlockImpl(int64_t from, int64_t to)
      : conv(nn::Conv2dOptions(from, to, 3).padding(1)), norm(to) {
    register_module("conv", conv);
    register_module("norm", norm);
  }
  Tensor forward(const Tensor& x) { return at::max_pool2d(at::relu(norm(conv(x))), 2); }
  nn::Conv2d conv;
  nn::BatchNorm2d norm;
};

struct ClassifierImpl : nn::Module {
  ClassifierImpl() {
    for (const auto& [from, to] : {std::pair(1, 4), std::pair(4, 8), std::pair(8, 8)})
      blocks->push_back(Checkpointed<ConvBlockImpl>(from, to));
    register_module("blocks", blocks);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) { return head(blocks->forward(x).mean({2, 3})); }
  nn::Sequential blocks;
  nn::Linear head{8, 3};
};
TORCH_MODULE(Classifier);

struct TransformerBlockImpl : nn::Module {
  TransformerBlockImpl() {
    register_module("attention", attention);
    register_module("layer", layer);
  }
  Tensor forward(const Tensor& x) { return layer(x) + std::get<0>(attention(x, x, x)); }
  nn::MultiheadAttention attention{nn::MultiheadAttentionOptions(16, 2).dropout(0.1)};
  nn::TransformerEncoderLayer layer{
      nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(32).dropout(0.1)};
};

struct EncoderImpl : nn::Module {
  EncoderImpl() {
    for (int i = 0; i < 3; ++i) blocks->push_back(Checkpointed<TransformerBlockImpl>());
    register_module("blocks", blocks);
  }
  Tensor forward(const Tensor& x) { return blocks->forward(x); }
  nn::Sequential blocks;
};
TORCH_MODULE(Encoder);

/// Each token goes to the two experts that score highest; experts run over the tokens they get.
struct MixtureImpl : nn::Module {
  MixtureImpl() {
    register_module("router", router);
    register_module("experts", experts);
    for (int i = 0; i < 4; ++i)
      experts->push_back(nn::Sequential(nn::Linear(8, 16), nn::GELU(), nn::Linear(16, 8)));
  }
  Tensor forward(const Tensor& x) {
    const auto [weights, choice] = router(x).softmax(-1).topk(2, -1);
    Tensor y = x.clone();
    int64_t number = 0;
    for (const auto& expert : *experts) {
      const Tensors at_place = (choice == number++).nonzero().unbind(1);
      if (at_place[0].numel() == 0) continue;
      const Tensor out = expert->as<nn::Sequential>()->forward(x.index({at_place[0]}));
      y = y.index_add(0, at_place[0], out * weights.index({at_place[0], at_place[1]}).unsqueeze(1));
    }
    return y;
  }
  nn::Linear router{8, 4};
  nn::ModuleList experts;
};

struct MixturesImpl : nn::Module {
  MixturesImpl() {
    for (int i = 0; i < 2; ++i) layers->push_back(Checkpointed<MixtureImpl>());
    register_module("layers", layers);
  }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
  nn::Sequential layers;
};
TORCH_MODULE(Mixtures);

}  // namespace

TEST_CASE("ten steps of an LSTM language model equal plain", "[module][training]") {
  const Seed seed(1);
  const Tensor text = at::arange(4 * 13).remainder(11).reshape({4, 13});
  require_same_training(
      2, [] { return LanguageModel(); },
      [&](LanguageModel& model) {
        const Tensor scores = model(text.slice(1, 0, 12));
        return at::cross_entropy_loss(scores.reshape({-1, 11}), text.slice(1, 1, 13).reshape({-1}));
      });
}

TEST_CASE("ten steps of a convolutional classifier with BatchNorm equal plain",
          "[module][training]") {
  const Seed seed(2);
  const Tensor x = at::randn({6, 1, 16, 16}), target = at::arange(6).remainder(3);
  require_same_training(
      3, [] { return Classifier(); },
      [&](Classifier& model) { return at::cross_entropy_loss(model(x), target); });
}

TEST_CASE("ten steps of a transformer encoder with dropout equal plain", "[module][training]") {
  const Seed seed(3);
  const Tensor x = at::randn({5, 3, 16}), target = at::randn({5, 3, 16});
  require_same_training(
      3, [] { return Encoder(); }, [&](Encoder& model) { return at::mse_loss(model(x), target); });
}

TEST_CASE("ten steps of layers with a mixture of experts equal plain", "[module][training]") {
  const Seed seed(5);
  const Tensor x = at::randn({24, 8}), target = at::randn({24, 8});
  require_same_training(
      2, [] { return Mixtures(); },
      [&](Mixtures& model) { return at::mse_loss(model(x), target); });
}
