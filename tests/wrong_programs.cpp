// Programs that misuse a region, each with the text that its user reads.

#include <algorithm>
#include <optional>
#include <string>

#include "tests/support/nn.h"
#include "tests/support/warnings.h"

namespace nn = torch::nn;
using remat::checkpoint;
using remat::CheckpointError;
using remat::DeterminismCheck;
using Kind = CheckpointError::Kind;

namespace {

/// Its flag is a buffer, so that a recompute initialises again, as forward did.
struct ActNormImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    if (!done.item<bool>()) {
      const at::NoGradGuard no_grad;
      scale.copy_(1 / (x.std(0) + 1e-6));
      done.fill_(true);
    }
    return x * scale;
  }
  Tensor scale = register_parameter("scale", at::ones({4}));
  Tensor done = register_buffer("done", at::zeros({}, at::kBool));
};
TORCH_MODULE(ActNorm);

/// Makes its layer when it sees the first batch, and draws its weights.
struct LazyImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    if (layer.is_empty()) {
      layer = register_module("layer", nn::Linear(x.size(1), 3));
      return layer->forward(x).sin().cos();  // another way the first time
    }
    return layer->forward(x).sin();
  }
  nn::Linear layer = nullptr;
};
TORCH_MODULE(Lazy);

/// A struct of tensors that does not show them.
struct Pair {
  Tensor first, second;
};

}  // namespace

TEST_CASE("what the first forward initialises is named as the cause", "[errors][rule-10]") {
  const Seed seed;
  ActNorm norm;
  const Tensor x = leaf({8, 4});
  const Tensor y = checkpoint(norm, x);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.kind() == Kind::CaptureChanged);
  CHECK_THAT(error.what(),
             contains("Seen: the function itself writes to a captured tensor. If only its first "
                      "forward does this (activation normalization"));
  CHECK_THAT(error.what(), contains("run one forward outside regions before training"));
}

TEST_CASE("parameters that the first forward makes are named as the cause", "[errors][rule-10]") {
  const Seed seed;
  Lazy lazy;
  const Tensor x = leaf({8, 4});
  const Tensor y = checkpoint(lazy, x);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK_THAT(
      error.what(),
      contains("the function's module has other parameters or modules than when forward began"));
}

TEST_CASE("a list outside that a recompute appends to is warned of", "[errors]") {
  Warnings warnings;
  std::vector<Tensor> losses;
  const auto block = [&losses](const Tensor& x) {
    const Tensor h = x.sin();
    losses.push_back(h.square().mean());
    return h.cos().sin();
  };
  const Tensor x = leaf({4});
  checkpoint({.name = "auxiliary losses"}, block, x).sum().backward();
  REQUIRE(losses.size() == 2);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0],
             contains("a tensor that a recompute of region \"auxiliary losses\" computed is "
                      "still alive after the recompute"));
  CHECK_THAT(warnings.texts[0], contains("return the tensor from the function"));
  losses.clear();
  checkpoint({.name = "auxiliary losses"}, block, x).sum().backward();
  CHECK(warnings.texts.size() == 1);
}

TEST_CASE("a function that keeps nothing outside is not warned of", "[errors]") {
  Warnings warnings;
  nn::Linear layer(4, 4);
  const Tensor x = leaf({4, 4});
  for (const bool early_stop : {true, false}) {
    const Tensor y = checkpoint(
        {.name = "keeps nothing", .early_stop = early_stop},
        [layer](const Tensor& in) mutable {
          const Tensor h = layer->forward(in).relu();
          return checkpoint([](const Tensor& inner) { return inner.sin().relu_(); }, h) * h;
        },
        x);
    y.sum().backward();
  }
  const auto writes = [](Tensor t) { return (t.relu_().sin() * t).exp(); };
  for (const auto* const op : {"aten::relu_", "aten::sin", "aten::exp"})
    checkpoint({.name = "keeps what a policy says",
                .policy = remat::save_ops({op}),
                .inputs = remat::InputMode::CopyOnWrite},
               writes, x * 2)
        .sum()
        .backward();
  const auto is_of_survivors = [](const std::string& text) {
    return text.find("is still alive after the recompute") != std::string::npos;
  };
  CHECK(std::none_of(warnings.texts.begin(), warnings.texts.end(), is_of_survivors));
}

TEST_CASE("a Function that keeps its own output is warned of", "[errors][leaves-bytes]") {
  // The cycle is LibTorch's own: node, saved_data, output, node. Backward frees it where it runs.
  struct KeepsOutput : torch::autograd::Function<KeepsOutput> {
    static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
      return (ctx->saved_data["y"] = x.exp()).toTensor();
    }
    static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& g) {
      const Tensor y = ctx->saved_data["y"].toTensor();
      ctx->saved_data.clear();
      return {g[0] * y};
    }
  };
  Warnings warnings;
  const Tensor x = leaf({4});
  for (int i = 0; i < 2; ++i)
    checkpoint(
        {.name = "keeps an output"},
        [](const Tensor& t) { return KeepsOutput::apply(t.sin().cos()).tanh(); }, x)
        .sum()
        .backward();
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("a custom Function keeps its own output in its context"));
}

TEST_CASE("a struct without visit_tensors in a nested region is warned of", "[errors]") {
  Warnings warnings;
  const auto outer = [](const Tensor& x) {
    const Pair pair{x.sin(), x.cos()};
    return checkpoint(
        {.name = "of a pair"}, [](const Pair& each) { return (each.first * each.second).sin(); },
        pair);
  };
  const Tensor x = leaf({4});
  checkpoint(outer, x).sum().backward();
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0],
             contains("argument 0 of region \"of a pair\", counted from 0, is a "));
  CHECK_THAT(warnings.texts[0], contains("void visit_tensors("));
}

TEST_CASE("a struct without visit_tensors is not warned of where its tensors stay anyway",
          "[errors]") {
  Warnings warnings;
  const Tensor x = leaf({4}), w = leaf({4});
  const auto inner = [](const Pair& each, const Tensor& t) {
    return (each.first * each.second * t).sin();
  };
  const Tensor made_before = w.exp();
  const Pair given{at::arange(4) * 0.5, made_before};  // no graph; a graph of outside both regions
  checkpoint(
      [=](const Tensor& t) {
        const Tensor h = t.sin();
        return checkpoint(inner, given, h) + checkpoint(inner, Pair{given.first, w}, h);
      },
      x)
      .sum()
      .backward();
  checkpoint(inner, Pair{w.exp(), x.cos()}, x).sum().backward();  // in no other region
  CHECK(warnings.texts.empty());
}

TEST_CASE("a counter that changes values only is named among the causes", "[errors][rule-10]") {
  int step = 0;
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(
      {.determinism_check = DeterminismCheck::Values},
      [&step](const Tensor& in) { return (in * (1.0 / ++step)).sin(); }, x);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.kind() == Kind::ValueMismatch);
  CHECK_THAT(error.what(), contains("a counter that it reads: a step number, annealing, warm-up"));
  CHECK_THAT(error.what(), contains("pass such a counter as an argument"));
}

namespace {

/// Restores as a program would that knows nothing of versions.
struct Copies final : remat::StateProvider {
  explicit Copies(Tensor of) : tensor(std::move(of)) {}
  std::any capture() override { return tensor.clone(); }
  void restore(const std::any& state) override { tensor.copy_(std::any_cast<Tensor>(state)); }
  const Tensor tensor;
};

}  // namespace

TEST_CASE("a provider that restores with copy_ is no changed capture", "[state][rule-10]") {
  const Tensor buffer = at::full({4}, 2.0), x = leaf({4});
  const bool updates = GENERATE(false, true);
  const auto f = [buffer, updates](const Tensor& in) {
    if (updates) buffer.add_(1);  // before it is saved
    return (in * buffer).sin().sin();
  };
  Tensor y, z;
  {
    const remat::StateProviderGuard guard(std::make_shared<Copies>(buffer));
    y = checkpoint(f, x);
    z = checkpoint(f, x);
  }
  const Tensor kept = buffer.clone();
  const uint32_t version = buffer._version();
  const Tensor at_y = updates ? at::full({4}, 3.0) : kept, at_z = kept;
  CHECK(bit_equal(grad_of(z, {x})[0], grad_of((x * at_z).sin().sin(), {x})[0]));
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of((x * at_y).sin().sin(), {x})[0]));
  CHECK(bit_equal(buffer, kept));
  CHECK(buffer._version() == version);
}

TEST_CASE("a null pointer to a module is refused before it is called", "[errors][modules]") {
  const Tensor x = leaf({4, 4});
  nn::ModuleList list(nn::Linear(4, 4));
  const auto says = [](auto call) {
    CHECK_THAT(error_of<c10::ValueError>(call).what(),
               contains("the module to call was a null pointer. Cause: as<T>(), ptr<T>()"));
  };
  says([&] { checkpoint(list[0]->as<nn::Conv2dImpl>(), x); });
  says([&] { checkpoint(list->ptr<nn::Conv2dImpl>(0), x); });
  says([&] { remat::checkpointed(list->ptr<nn::Conv2dImpl>(0))(x); });
  says([&] {
    checkpoint({.name = "b"}, &nn::Conv2dImpl::forward, list[0]->as<nn::Conv2dImpl>(), x);
  });
  says([&] { checkpoint(nn::Linear(nullptr), x); });
  const at::NoGradGuard no_grad;
  says([&] { checkpoint(list[0]->as<nn::Conv2dImpl>(), x); });
}
