// Normalisations in regions: running statistics and gradients, also under autocast, in half and
// bfloat16.

#include <ATen/autocast_mode.h>

#include "tests/support/autocast.h"
#include "tests/support/nn.h"
#include "tests/support/warnings.h"

using remat::BufferPolicy;
using remat::checkpoint;
using remat::Checkpointed;
using remat::ModuleOptions;
namespace nn = torch::nn;

namespace {

/// A convolution, which autocast casts, a normalisation over (N, 4, L), and something that saves
/// its result.
template <class Norm>
struct NormalisedImpl : nn::Cloneable<NormalisedImpl<Norm>> {
  using Make = std::function<Norm()>;
  explicit NormalisedImpl(Make made_by) : make(std::move(made_by)) { reset(); }
  void reset() override {
    conv = this->register_module("conv", nn::Conv1d(nn::Conv1dOptions(4, 4, 3).padding(1)));
    norm = this->register_module("norm", make());
  }
  Tensor forward(const Tensor& x) { return norm(conv(x)).sigmoid(); }
  Make make;
  nn::Conv1d conv = nullptr;
  Norm norm = nullptr;
};

enum class Precision { Float, AutocastBFloat16, AutocastHalf, BFloat16, Half };

constexpr Precision all_precisions[] = {Precision::Float, Precision::AutocastBFloat16,
                                        Precision::AutocastHalf, Precision::BFloat16,
                                        Precision::Half};

at::ScalarType dtype_of(Precision precision) {
  return precision == Precision::BFloat16 ? at::kBFloat16
         : precision == Precision::Half   ? at::kHalf
                                          : at::kFloat;
}

AutocastOptions autocast_of(Precision precision) {
  return {
      .enabled = precision == Precision::AutocastBFloat16 || precision == Precision::AutocastHalf,
      .dtype = precision == Precision::AutocastHalf ? at::kHalf : at::kBFloat16};
}

/// The results of two steps: gradients, parameters' gradients, buffers.
template <class Module, class Call>
Tensors two_steps(Module& module, Precision precision, Call&& call) {
  Tensors all;
  for (int step = 0; step < 2; ++step) {
    const Seed seed(11 + static_cast<uint64_t>(step));
    const Tensor x = at::randn({3, 4, 5}).to(dtype_of(precision)).requires_grad_();
    module->zero_grad();
    Tensor y;
    {
      const Autocast autocast(autocast_of(precision));
      y = call(x);
    }
    (y.to(at::kFloat) * at::arange(60).reshape({3, 4, 5})).sum().backward();
    all.push_back(y.detach());
    all.push_back(x.grad());
    for (const Tensor& each : module->parameters()) all.push_back(each.grad().clone());
    for (const Tensor& each : module->buffers()) all.push_back(each.clone());
  }
  return all;
}

template <class Norm>
void require_as_plain(std::function<Norm()> make) {
  using Impl = NormalisedImpl<Norm>;
  for (const Precision precision : all_precisions) {
    CAPTURE(static_cast<int>(precision));
    const Seed seed(3);
    const auto plain = std::make_shared<Impl>(make);
    const auto copy = [&](const auto& from) {
      auto to = std::dynamic_pointer_cast<Impl>(from->clone());
      to->to(dtype_of(precision));
      return to;
    };
    const auto first = copy(plain), second = copy(plain), third = copy(plain);
    Checkpointed<Impl> fourth(ModuleOptions{}, make);
    {
      const at::NoGradGuard no_grad;
      const auto from = plain->parameters();
      for (std::size_t i = 0; i < from.size(); ++i) fourth->parameters()[i].copy_(from[i]);
    }
    fourth->to(dtype_of(precision));
    const Tensors expected =
        two_steps(first, precision, [&](const Tensor& x) { return first->forward(x); });
    const Counted since;
    require_bit_equal(
        two_steps(second, precision, [&](const Tensor& x) { return checkpoint(second, x); }),
        expected);
    require_bit_equal(two_steps(third, precision,
                                [&](const Tensor& x) {
                                  // Two levels, of which the outer one knows the module.
                                  return checkpoint(
                                      {.modules = {third}},
                                      [&](const Tensor& t) {
                                        return checkpoint(
                                            [&](const Tensor& u) { return third->forward(u); }, t);
                                      },
                                      x);
                                }),
                      expected);
    require_bit_equal(two_steps(fourth, precision, [&](const Tensor& x) { return fourth(x); }),
                      expected);
    CHECK(since.now().recomputes == 2 + 4 + 2);
  }
}

}  // namespace

TEST_CASE("batch norms in regions have plain's statistics and gradients in every precision",
          "[module][precision]") {
  require_as_plain<nn::BatchNorm1d>([] { return nn::BatchNorm1d(4); });
  require_as_plain<nn::BatchNorm1d>(
      [] { return nn::BatchNorm1d(nn::BatchNorm1dOptions(4).momentum(std::nullopt)); });
  require_as_plain<nn::BatchNorm1d>(
      [] { return nn::BatchNorm1d(nn::BatchNorm1dOptions(4).track_running_stats(false)); });
}

TEST_CASE("instance norms in regions have plain's statistics and gradients in every precision",
          "[module][precision]") {
  const auto options = nn::InstanceNorm1dOptions(4).track_running_stats(true);
  require_as_plain<nn::InstanceNorm1d>([=] { return nn::InstanceNorm1d(options); });
  require_as_plain<nn::InstanceNorm1d>(
      [=] { return nn::InstanceNorm1d(nn::InstanceNorm1dOptions(options).affine(true)); });
  require_as_plain<nn::InstanceNorm1d>([] { return nn::InstanceNorm1d(4); });
}

TEST_CASE("group and layer norms in regions have plain's gradients in every precision",
          "[module][precision]") {
  require_as_plain<nn::GroupNorm>([] { return nn::GroupNorm(2, 4); });
  require_as_plain<nn::LayerNorm>([] { return nn::LayerNorm(nn::LayerNormOptions({5})); });
}

TEST_CASE("SkipBatchNorm leaves an instance norm a region, whose statistics move once",
          "[module][precision]") {
  const auto options = nn::InstanceNorm1dOptions(4).track_running_stats(true);
  const Seed seed(5);
  const Tensor x = leaf({3, 4, 5});
  nn::InstanceNorm1d plain(options), named(options);
  Checkpointed<nn::InstanceNorm1dImpl> module(ModuleOptions{.buffers = BufferPolicy::SkipBatchNorm},
                                              options);
  const Tensor expected = grad_of(plain(x).sin(), {x})[0];
  const Counted since;
  CHECK(bit_equal(grad_of(module(x).sin(), {x})[0], expected));
  CHECK(since.now().recomputes == 1);
  const Tensor y = checkpoint(
      {.buffers = BufferPolicy::SkipBatchNorm, .modules = {named.ptr()}},
      [&](const Tensor& t) { return named(t).sin(); }, x);
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(since.now().recomputes == 2);
  for (const auto* each : {&module->running_mean, &named->running_mean})
    CHECK(bit_equal(*each, plain->running_mean));
  for (const auto* each : {&module->running_var, &named->running_var})
    CHECK(bit_equal(*each, plain->running_var));
  CHECK_FALSE(bit_equal(plain->running_mean, at::zeros({4})));
}

TEST_CASE("an instance norm that the region does not know is warned of, if it has statistics",
          "[module][precision]") {
  const auto tracking = nn::InstanceNorm2dOptions(4).track_running_stats(true).affine(true);
  const auto texts_of = [](const std::string& name, auto norm, auto&&... modules) {
    Warnings warnings;
    const Tensor y = checkpoint(
        {.name = name, .modules = {modules...}},
        [norm](const Tensor& t) mutable { return norm(t).sin(); }, leaf({3, 4, 5, 6}));
    y.sum().backward();
    return warnings.texts;
  };
  nn::InstanceNorm2d norm(tracking);
  const auto texts = texts_of("unknown", norm);
  REQUIRE(texts.size() == 1);
  CHECK_THAT(texts[0],
             contains("remat::checkpoint: an instance norm in training mode ran in region "
                      "\"unknown\", whose recompute will update its running statistics"));
  CHECK(texts_of("known", norm, norm.ptr()).empty());
  CHECK(texts_of("without", nn::InstanceNorm2d(nn::InstanceNorm2dOptions(4).affine(true))).empty());
  nn::InstanceNorm2d frozen(nn::InstanceNorm2dOptions(4).affine(true));
  frozen->weight.requires_grad_(false);
  CHECK(texts_of("frozen", frozen).empty());
  norm->eval();
  CHECK(texts_of("eval", norm).empty());
  norm->weight.requires_grad_(false);
  CHECK(texts_of("frozen eval", norm).empty());
}
