// Rule 2: running statistics of a batch norm that are arguments of a region.

#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::BufferPolicy;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::InputMode;

namespace {

Tensor norm(const Tensor& x, const Tensor& mean, const Tensor& variance, bool training = true) {
  return at::batch_norm(x, {}, {}, mean, variance, training, 0.1, 1e-5, false);
}

struct Statistics {
  Tensor mean = at::zeros({2}), variance = at::ones({2});
};

}  // namespace

TEST_CASE("running statistics that are arguments are an error in backward, with the cure",
          "[rule-2][error]") {
  const Seed seed;
  const Tensor x = leaf({6, 2});
  const Statistics own, plain;
  const auto f = [](const Tensor& x, const Tensor& mean, const Tensor& variance) {
    const Tensor centred = x - mean;  // reads what the norm moves
    return norm(x, mean, variance).sin() * centred;
  };
  const CheckpointOptions shared{.name = "block 3", .location = {"train.cpp", 42}};
  const Warnings warnings;
  const Tensor y = remat::checkpoint(shared, f, x, own.mean, own.variance);
  const Tensors expected = grad_of(f(x, plain.mean, plain.variance), {x});
  for (int i = 0; i < 2; ++i) {
    const CheckpointError error = mismatch_of(y, x);
    CHECK(error.kind() == CheckpointError::Kind::InputChanged);
    CHECK(text_of(error) ==
          "remat::checkpoint: one of the variables needed for gradient computation has been "
          "modified by an inplace operation: a batch norm in training mode updated its running "
          "statistics: tensor 1 of the arguments of region \"block 3\" (frame " +
              std::to_string(error.frame_id()) +
              ", options at train.cpp:42), counted from 0.\n"
              "Cause: a recompute would start from the updated statistics, and would update them "
              "once more.\n"
              "Hint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, so that a "
              "recompute updates a copy; or set buffers = BufferPolicy::Ignore if a second update "
              "is right.");
  }
  CHECK(warnings.texts.empty());
  CHECK(bit_equal(own.mean, plain.mean));  // nothing was moved by a recompute

  const Statistics copied;
  const Tensor right =
      remat::checkpoint({.inputs = InputMode::CopyOnWrite}, f, x, copied.mean, copied.variance);
  for (int i = 0; i < 2; ++i)
    require_bit_equal(grad_of(right, {x}, {.retain_graph = true}), expected);
  CHECK(bit_equal(copied.mean, plain.mean));
  CHECK(bit_equal(copied.variance, plain.variance));
}

TEST_CASE("running statistics that are arguments are moved twice if the region ignores buffers",
          "[rule-2]") {
  const Seed seed;
  const Tensor x = leaf({6, 2});
  const Statistics own, plain;
  const auto f = [](const Tensor& x, const Tensor& mean, const Tensor& variance) {
    return norm(x, mean, variance).sin();
  };
  const Tensor y =
      remat::checkpoint({.buffers = BufferPolicy::Ignore}, f, x, own.mean, own.variance);
  grad_of(y, {x});
  for (int i = 0; i < 2; ++i) f(x, plain.mean, plain.variance);
  CHECK(bit_equal(own.mean, plain.mean));
}

TEST_CASE("running statistics that are arguments and only read are no error", "[rule-2]") {
  const Tensor x = leaf({6, 2});
  const Statistics own;
  const auto f = [](const Tensor& x, const Tensor& mean, const Tensor& variance) {
    return norm(x, mean, variance, /*training=*/false).sin();
  };
  const Tensor y = remat::checkpoint(f, x, own.mean, own.variance);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x, own.mean, own.variance), {x}));
}

TEST_CASE("a batch norm whose weight is frozen moves its running statistics, too",
          "[rule-2][error]") {
  const Seed seed;
  const Tensor x = leaf({6, 2}), weight = at::rand({2}), bias = at::rand({2});
  const Statistics own;
  const auto f = [](const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean,
                    const Tensor& variance) {
    return at::batch_norm(x, weight, bias, mean, variance, true, 0.1, 1e-5, false).sin();
  };
  const CheckpointError error =
      mismatch_of(remat::checkpoint(f, x, weight, bias, own.mean, own.variance), x);
  CHECK(error.kind() == CheckpointError::Kind::InputChanged);
  CHECK_THAT(error.what(), contains("running statistics: tensor 3"));
  const Warnings warnings;
  const Tensor y = remat::checkpoint(
      {.name = "frozen"},
      [&](const Tensor& t) { return f(t, weight, bias, own.mean, own.variance); }, x);
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("a batch norm in training mode ran in region \"frozen\""));
}

TEST_CASE("running statistics that a region inside moves are an error of the region around",
          "[rule-2][error]") {
  const Seed seed;
  const Tensor x = leaf({6, 2});
  const Statistics plain;
  const auto f = [](const Tensor& x, const Tensor& mean, const Tensor& variance) {
    return norm(x, mean, variance).sin();
  };
  f(x, plain.mean, plain.variance);
  for (const auto outer : {InputMode::Shared, InputMode::CopyOnWrite})
    for (const auto inner : {InputMode::Shared, InputMode::CopyOnWrite}) {
      CAPTURE(static_cast<int>(outer), static_cast<int>(inner));
      const Statistics own;
      const Tensor y = remat::checkpoint(
          {.name = "outer", .inputs = outer},
          [&](const Tensor& x, const Tensor& mean, const Tensor& variance) {
            return remat::checkpoint({.name = "inner", .inputs = inner}, f, x.sin(), mean, variance)
                .exp();
          },
          x, own.mean, own.variance);
      const Tensor mean = copy_of(own.mean);
      if (outer == InputMode::CopyOnWrite && inner == InputMode::CopyOnWrite) {
        const Statistics other;
        require_bit_equal(grad_of(y, {x}),
                          grad_of(f(x.sin(), other.mean, other.variance).exp(), {x}));
      } else {
        const CheckpointError error = mismatch_of(y, x);
        CHECK(error.kind() == CheckpointError::Kind::InputChanged);
        CHECK(error.region() == (outer == InputMode::Shared ? "outer" : "inner"));
      }
      CHECK(bit_equal(own.mean, mean));
    }
}

TEST_CASE("running statistics that hooks hold are an error, too", "[rule-2][error][hooks]") {
  const Seed seed;
  const Tensor x = leaf({6, 2});
  const Statistics own;
  Tensor y;
  {
    const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t; },
                                             [](const Tensor& kept) { return kept; });
    y = remat::checkpoint([](const Tensor& x, const Tensor& mean,
                             const Tensor& variance) { return norm(x, mean, variance).sin(); },
                          x, own.mean, own.variance);
  }
  CHECK(mismatch_of(y, x).kind() == CheckpointError::Kind::InputChanged);
}
