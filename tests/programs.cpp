// Programs in the style of those that others wrote: trained ten steps, plain and with regions.

#include <torch/csrc/jit/api/module.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "remat/memory.h"
#include "tests/support/nn.h"

namespace nn = torch::nn;
namespace optim = torch::optim;
using remat::checkpoint;
using remat::InputMode;

namespace {

constexpr int num_steps = 10;

struct Training {
  Tensors losses, state;
  Tensor next_random;
  int64_t peak_bytes = 0;  ///< beyond what stood before the first step
};

/// `program` is made with the number of segments or whether it uses regions; `step()` returns its
/// losses, `state()` parameters, buffers and what else it carries.
template <class Make>
Training train(Make&& make) {
  at::manual_seed(3);
  Training result;
  auto program = make();
  program.step();  // gradients and the optimizer's state are there
  const remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  for (int i = 1; i < num_steps; ++i) result.losses.push_back(program.step());
  result.peak_bytes = meter.peak_bytes() - before;
  for (const Tensor& each : program.state()) result.state.push_back(each.detach().clone());
  result.next_random = at::rand({4});
  return result;
}

void require_same(const Training& with, const Training& plain) {
  require_bit_equal(with.losses, plain.losses);
  require_bit_equal(with.state, plain.state);
  require_bit_equal({with.next_random}, {plain.next_random});
}

Tensors state_of(const nn::Module& module) {
  Tensors all = module.parameters();
  for (const Tensor& each : module.buffers()) all.push_back(each);
  return all;
}

/// A step of any model with one loss.
template <class Optimizer, class Loss>
Tensor stepped(Optimizer& optimizer, Loss&& loss_of) {
  optimizer.zero_grad();
  const Tensor loss = loss_of();
  loss.backward();
  optimizer.step();
  return loss.detach();
}

/// Pre-activation: writes to its input.
nn::Sequential unet_block(int64_t in, int64_t out) {
  return nn::Sequential(nn::ReLU(nn::ReLUOptions(true)),
                        nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(false)),
                        nn::BatchNorm2d(out), nn::ReLU(nn::ReLUOptions(true)),
                        nn::Conv2d(nn::Conv2dOptions(out, out, 3).padding(1)), nn::Dropout(0.2));
}

class UNet {
 public:
  explicit UNet(bool regions) : regions_(regions) { model_->train(); }
  Tensor step() {
    const Tensor image = at::randn({2, 4, 32, 32}), truth = at::rand({2, 4, 32, 32});
    return stepped(optimizer_, [&] {
      const Tensor a = run(down_, first_->forward(image));
      const Tensor b = run(deep_, at::max_pool2d(a, 2));
      const Tensor c = run(up_, at::cat({at::upsample_nearest2d(b, {32, 32}), a}, 1));
      return at::mse_loss(last_->forward(c), truth);
    });
  }
  Tensors state() const { return state_of(*model_); }

 private:
  Tensor run(const nn::Sequential& block, const Tensor& x) const {
    if (!regions_) return nn::Sequential(block)->forward(x);
    return checkpoint({.inputs = InputMode::CopyOnWrite}, block, x);
  }
  const bool regions_;
  nn::Conv2d first_{nn::Conv2dOptions(4, 8, 3).padding(1)}, last_{nn::Conv2dOptions(8, 4, 1)};
  nn::Sequential down_ = unet_block(8, 8), deep_ = unet_block(8, 16), up_ = unet_block(24, 8);
  nn::ModuleList model_{first_, down_, deep_, up_, last_};
  optim::Adam optimizer_{model_->parameters(), optim::AdamOptions(1e-3)};
};

class Dcgan {
 public:
  explicit Dcgan(bool regions) : regions_(regions) {}
  Tensor step() {
    const Tensor real = at::randn({4, 1, 16, 16}), noise = at::randn({4, 8, 1, 1});
    judge_optimizer_.zero_grad();
    const Tensor judged = run(judge_, real);
    Tensor loss = at::binary_cross_entropy(judged, at::full_like(judged, 0.9));
    loss.backward();
    const Tensor made = run(maker_, noise);
    const Tensor of_made = run(judge_, made.detach());
    const Tensor other = at::binary_cross_entropy(of_made, at::zeros_like(of_made));
    other.backward();
    judge_optimizer_.step();
    maker_optimizer_.zero_grad();
    const Tensor again = run(judge_, made);
    const Tensor fooled = at::binary_cross_entropy(again, at::ones_like(again));
    fooled.backward();
    maker_optimizer_.step();
    return at::stack({loss, other, fooled}).detach();
  }
  Tensors state() const {
    Tensors all = state_of(*maker_);
    for (const Tensor& each : state_of(*judge_)) all.push_back(each);
    return all;
  }

 private:
  Tensor run(const nn::Sequential& net, const Tensor& x) const {
    if (!regions_) return nn::Sequential(net)->forward(x);
    return remat::checkpoint_sequential(net, 3, x, {.checkpoint_last = true});
  }
  static nn::ConvTranspose2d wider(int64_t in, int64_t out, int64_t stride, int64_t padding) {
    return nn::ConvTranspose2d(
        nn::ConvTranspose2dOptions(in, out, 4).stride(stride).padding(padding).bias(false));
  }
  static nn::Conv2d narrower(int64_t in, int64_t out) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 4).stride(2).padding(1).bias(false));
  }
  static nn::LeakyReLU leaky() {
    return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2).inplace(true));
  }
  const bool regions_;
  nn::Sequential maker_{wider(8, 16, 1, 0), nn::BatchNorm2d(16), nn::ReLU(nn::ReLUOptions(true)),
                        wider(16, 8, 2, 1), nn::BatchNorm2d(8),  nn::ReLU(nn::ReLUOptions(true)),
                        wider(8, 1, 2, 1),  nn::Tanh()};
  nn::Sequential judge_{narrower(1, 8), leaky(),       narrower(8, 16),    nn::BatchNorm2d(16),
                        leaky(),        nn::Flatten(), nn::Linear(256, 1), nn::Sigmoid()};
  optim::Adam maker_optimizer_{maker_->parameters(), optim::AdamOptions(2e-4).betas({0.5, 0.999})};
  optim::Adam judge_optimizer_{judge_->parameters(), optim::AdamOptions(2e-4).betas({0.5, 0.999})};
};

class Vgg {
 public:
  explicit Vgg(int64_t segments) : segments_(segments) {}
  static constexpr int64_t num_layers = 13;
  Tensor step() {
    const Tensor image = at::randn({2, 3, 16, 16}), truth = at::randint(0, 5, {2});
    return stepped(optimizer_, [&] {
      const Tensor features = segments_ == 0
                                  ? features_->forward(image)
                                  : remat::checkpoint_sequential(features_, segments_, image,
                                                                 {.checkpoint_last = true});
      return at::cross_entropy_loss(last_->forward(features.flatten(1)), truth);
    });
  }
  Tensors state() const { return state_of(*model_); }

 private:
  static nn::Conv2d conv(int64_t in, int64_t out) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1));
  }
  static nn::ReLU relu() { return nn::ReLU(nn::ReLUOptions(true)); }
  static nn::MaxPool2d pool() { return nn::MaxPool2d(2); }
  const int64_t segments_;
  nn::Sequential features_{conv(3, 8),   relu(), conv(8, 8),   relu(), pool(),
                           conv(8, 16),  relu(), conv(16, 16), relu(), pool(),
                           conv(16, 16), relu(), pool()};
  nn::Linear last_{64, 5};
  nn::ModuleList model_{features_, last_};
  optim::SGD optimizer_{model_->parameters(), optim::SGDOptions(0.05).momentum(0.9)};
};

/// Initialises itself with the first batch, as activation normalisation of flows does.
struct ActNormImpl : nn::Module {
  explicit ActNormImpl(int64_t size) {
    shift = register_parameter("shift", at::zeros({size}));
    scale = register_parameter("scale", at::ones({size}));
    is_initialized = register_buffer("is_initialized", at::zeros({}, at::kBool));
  }
  Tensor forward(const Tensor& x) {
    if (!is_initialized.item<bool>()) {
      const at::NoGradGuard no_grad;
      shift.copy_(-x.mean(0));
      scale.copy_(1 / (x.std(0) + 1e-6));
      is_initialized.fill_(true);
    }
    return (x + shift) * scale;
  }
  Tensor shift, scale, is_initialized;
};
TORCH_MODULE(ActNorm);

struct CouplingImpl : nn::Module {
  explicit CouplingImpl(int64_t size) {
    norm = register_module("norm", ActNorm(size));
    net = register_module(
        "net", nn::Sequential(nn::Linear(size / 2, 32), nn::Tanh(), nn::Linear(32, 32), nn::Tanh(),
                              nn::Linear(32, size)));
  }
  std::tuple<Tensor, Tensor> forward(const Tensor& x) {
    const Tensor y = norm->forward(x);
    const Tensors half = y.chunk(2, 1), moves = net->forward(half[0]).chunk(2, 1);
    const Tensor log_scale = moves[0].tanh();
    const Tensor log_slope = log_scale.sum(1) + norm->scale.abs().log().sum();
    return {at::cat({half[1] * log_scale.exp() + moves[1], half[0]}, 1), log_slope};
  }
  ActNorm norm = nullptr;
  nn::Sequential net = nullptr;
};
TORCH_MODULE(Coupling);

class Flow {
 public:
  explicit Flow(bool regions) : regions_(regions) {
    for (int i = 0; i < 6; ++i) couplings_->push_back(Coupling(8));
    // The recipe: what the first forward initialises, it initialises outside regions.
    const remat::DisableCheckpointGuard plain;
    const at::NoGradGuard no_grad;
    loss_of(at::randn({64, 8}));
  }
  Tensor step() {
    const Tensor points = at::randn({64, 8}) * 2 + 1;
    return stepped(optimizer(), [&] { return loss_of(points); });
  }
  Tensors state() const { return state_of(*couplings_); }

 private:
  optim::Adam& optimizer() {
    if (!optimizer_) optimizer_.emplace(couplings_->parameters(), optim::AdamOptions(1e-3));
    return *optimizer_;
  }
  Tensor loss_of(Tensor x) const {
    Tensor log_slopes = at::zeros({x.size(0)});
    for (std::size_t i = 0; i < couplings_->size(); ++i) {
      const Coupling coupling(couplings_->ptr<CouplingImpl>(i));
      const auto [y, log_slope] =
          regions_ ? checkpoint(coupling, x) : Coupling(coupling)->forward(x);
      x = y;
      log_slopes = log_slopes + log_slope;
    }
    return (x.square().sum(1) / 2 - log_slopes).mean();
  }
  const bool regions_;
  nn::ModuleList couplings_;
  std::optional<optim::Adam> optimizer_;
};

class LanguageModel {
 public:
  explicit LanguageModel(bool regions) : regions_(regions) {}
  Tensor step() {
    const Tensor text = at::randint(0, 20, {65, 4});
    return stepped(optimizer_, [&] {
      Tensor hidden = at::zeros({2, 4, 32}), cell = at::zeros({2, 4, 32}), loss = at::zeros({});
      for (int64_t at = 0; at < 64; at += 16) {  // cut in time: a region reads 16 characters
        const Tensor from = text.narrow(0, at, 16), to = text.narrow(0, at + 1, 16);
        std::tie(loss, hidden, cell) =
            regions_ ? checkpoint({.modules = {model_.ptr()}}, read_, loss, from, to, hidden, cell)
                     : read_(loss, from, to, hidden, cell);
      }
      return loss / 64;
    });
  }
  Tensors state() const { return state_of(*model_); }

 private:
  const bool regions_;
  nn::Embedding letters_{20, 16};
  nn::LSTM lstm_{nn::LSTMOptions(16, 32).num_layers(2).dropout(0.1)};
  nn::Linear last_{32, 20};
  nn::ModuleList model_{letters_, lstm_, last_};
  std::function<std::tuple<Tensor, Tensor, Tensor>(Tensor, Tensor, Tensor, Tensor, Tensor)> read_ =
      [letters = letters_, lstm = lstm_, last = last_](const Tensor& loss, const Tensor& from,
                                                       const Tensor& to, const Tensor& hidden,
                                                       const Tensor& cell) mutable {
        const auto [y, state] = lstm->forward(letters->forward(from), std::tuple(hidden, cell));
        const Tensor chances = last->forward(y);
        return std::tuple(loss + at::cross_entropy_loss(chances.flatten(0, 1), to.flatten(), {},
                                                        at::Reduction::Sum),
                          std::get<0>(state), std::get<1>(state));
      };
  optim::Adam optimizer_{model_->parameters(), optim::AdamOptions(1e-2)};
};

/// A script module that somebody exported, under a head of one's own.
class FineTuned {
 public:
  explicit FineTuned(bool regions) : regions_(regions) {
    for (int i = 0; i < num_blocks; ++i) blocks_.push_back(block());
    std::vector<Tensor> all = head_->parameters();
    for (const auto& each : blocks_)
      for (const Tensor& parameter : each.parameters()) all.push_back(parameter);
    optimizer_.emplace(all, optim::AdamOptions(1e-3));
  }
  Tensor step() {
    const Tensor points = at::randn({64, 16}), truth = at::randint(0, 5, {64});
    return stepped(*optimizer_, [&] {
      Tensor x = points;
      for (auto& each : blocks_)
        x = regions_ ? checkpoint(each, x).toTensor() : each.forward({x}).toTensor();
      return at::cross_entropy_loss(head_->forward(x), truth);
    });
  }
  Tensors state() const {
    Tensors all = state_of(*head_);
    for (const auto& each : blocks_) {
      for (const Tensor& parameter : each.parameters()) all.push_back(parameter);
      for (const Tensor& buffer : each.buffers()) all.push_back(buffer);
    }
    return all;
  }

 private:
  static torch::jit::Module block() {
    torch::jit::Module module("block");
    module.register_parameter("wide", at::randn({16, 64}).mul_(0.2).requires_grad_(), false);
    module.register_parameter("narrow", at::randn({64, 16}).mul_(0.1).requires_grad_(), false);
    module.register_parameter("scale", at::ones({64}).requires_grad_(), false);
    module.register_parameter("shift", at::zeros({64}).requires_grad_(), false);
    module.register_buffer("mean", at::zeros({64}));
    module.register_buffer("var", at::ones({64}));
    module.register_attribute("training", c10::BoolType::get(), true);
    module.define(R"(
def forward(self, x):
  h = torch.batch_norm(x.matmul(self.wide), self.scale, self.shift, self.mean, self.var,
                       self.training, 0.1, 1e-5, True)
  h = torch.dropout(torch.sigmoid(h) * h, 0.1, self.training)
  return x + h.matmul(self.narrow)
)");
    return module;
  }
  static constexpr int num_blocks = 4;
  const bool regions_;
  std::vector<torch::jit::Module> blocks_;
  nn::Linear head_{16, 5};
  std::optional<optim::Adam> optimizer_;
};

template <class Program>
void require_trained_alike(double at_most) {
  const Training plain = train([] { return Program(false); });
  const Training with = train([] { return Program(true); });
  require_same(with, plain);
  CAPTURE(with.peak_bytes, plain.peak_bytes);
  CHECK(static_cast<double>(with.peak_bytes) <= at_most * static_cast<double>(plain.peak_bytes));
}

}  // namespace

TEST_CASE("a U-Net of blocks that write to their input trains as without regions",
          "[programs][rule-10]") {
  require_trained_alike<UNet>(0.95);
}

TEST_CASE("a DCGAN loop trains as without regions", "[programs]") {
  require_trained_alike<Dcgan>(1);
}

TEST_CASE("a VGG trains as without regions at every number of segments", "[programs][rule-10]") {
  const Training plain = train([] { return Vgg(0); });
  for (int64_t segments = 1; segments <= Vgg::num_layers; ++segments) {
    CAPTURE(segments);
    require_same(train([&] { return Vgg(segments); }), plain);
  }
}

TEST_CASE("a flow that its first batch initialises trains as without regions", "[programs]") {
  require_trained_alike<Flow>(0.6);
}

TEST_CASE("an LSTM that regions cut in time trains as without them", "[programs]") {
  require_trained_alike<LanguageModel>(0.7);
}

TEST_CASE("a script module is fine-tuned as without regions", "[programs][script]") {
  require_trained_alike<FineTuned>(0.6);
}
