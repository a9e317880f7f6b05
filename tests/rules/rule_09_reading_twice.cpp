// Rule 9: a tensor read twice in one backward is the same tensor; with strict_unpack it is an
// error.

#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t times_to_read = 2;

/// x * y * z, with a saved intermediate and the output; reads what it saved several times.
struct Repeats : torch::autograd::Function<Repeats> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& y, const Tensor& z) {
    const Tensor w = x * y * z;
    const Tensor out = w * 1;
    ctx->save_for_backward({x, y, z, w, out});
    return out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list saved = ctx->get_saved_variables();
    for (int64_t i = 1; i < times_to_read; ++i) {
      const variable_list again = ctx->get_saved_variables();
      for (size_t k = 0; k < saved.size(); ++k) {
        if (!at::equal(saved[k], again[k])) throw std::logic_error("two reads differ");
        if (saved[k].requires_grad() != again[k].requires_grad()) {
          throw std::logic_error("two reads differ in requires_grad");
        }
      }
      saved = again;
    }
    const Tensor& g = grads[0];
    return {g * saved[1] * saved[2], g * saved[0] * saved[2], g * saved[0] * saved[1]};
  }
};

Tensor foo(Tensor x, Tensor y, Tensor z) {
  x = x * y * z;
  y = y * y * z;
  z = z * z;
  return Repeats::apply(x, y, z);
}

TEST_CASE("a Function that reads its saved tensors twice reads the same values", "[rule-9]") {
  times_to_read = GENERATE(1, 2, 5);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(times_to_read, early_stop);
  const Tensor x = leaf_of(1), y = leaf_of(2), z = leaf_of(3);
  const Tensors plain = grad_of(foo(x, y, z), {x, y, z});
  Calls calls;
  Counted done;
  const Tensor out = remat::checkpoint({.early_stop = early_stop}, counted(calls, foo), x, y, z);
  for (int i = 1; i <= 2; ++i) {
    require_bit_equal(grad_of(out, {x, y, z}, {.retain_graph = true}), plain);
    CHECK(calls.count() <= 1 + i * times_to_read);
    CHECK(calls.count() == 1 + done.now().recomputes);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
  }
  if (times_to_read == 1) CHECK(calls.count() == 3);
}

TEST_CASE("with strict_unpack a second read in one backward is an error", "[rule-9]") {
  times_to_read = 2;
  const Tensor x = leaf_of(1), y = leaf_of(2), z = leaf_of(3);
  Calls calls;
  const Tensor out = remat::checkpoint({.name = "strict one", .strict_unpack = true},
                                       counted(calls, foo), x, y, z);
  const auto error =
      error_of<remat::CheckpointError>([&] { grad_of(out, {x, y, z}, {.retain_graph = true}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::DoubleUnpack);
  CHECK(error.region() == "strict one");
  CHECK_THAT(error.what(),
             contains("Unpack is being triggered for a tensor that was already unpacked once"));
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  CHECK(calls.count() == 2);

  times_to_read = 1;  // two backward calls are not two reads in one
  const Tensors plain = grad_of(foo(x, y, z), {x, y, z});
  for (int i = 0; i < 2; ++i) {
    require_bit_equal(grad_of(out, {x, y, z}, {.retain_graph = true}), plain);
  }
  times_to_read = 2;
  CHECK_THROWS_AS(grad_of(out, {x, y, z}), remat::CheckpointError);
}

TEST_CASE("a tensor saved twice is two tensors, which strict_unpack lets be read once each",
          "[rule-9]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return (t * t) * t.sin() * t.sin(); });
  const Tensors plain = grad_of(f(x), {x});
  calls.reset();
  const Tensor y = remat::checkpoint({.strict_unpack = true}, f, x);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(calls.count() == 3);
}

TEST_CASE("reads of random values in one backward are the same values", "[rule-9][rule-11]") {
  times_to_read = 3;
  const Tensor x = leaf({50}), y = leaf({50}), z = leaf({50});
  auto f = [](const Tensor& a, const Tensor& b, const Tensor& d) {
    const Tensor noise = at::rand({50});
    return Repeats::apply(at::dropout(a, 0.5, true), b * noise, d + noise);
  };
  require_same_grads(
      f,
      [&](const Tensor& a, const Tensor& b, const Tensor& d) {
        return remat::checkpoint(f, a, b, d);
      },
      x, y, z);
}

TEST_CASE("a second read of a nested region's tensor recomputes its parents as often as needed",
          "[rule-9][rule-2]") {
  times_to_read = 3;
  const Tensor x = leaf_of(1), y = leaf_of(2), z = leaf_of(3);
  const Tensors plain = grad_of(foo(x, y, z).sin(), {x, y, z});
  auto inner = [](const Tensor& a, const Tensor& b, const Tensor& d) {
    return remat::checkpoint(foo, a, b, d);
  };
  const Tensor out =
      remat::checkpoint([&](const Tensor& a, const Tensor& b,
                            const Tensor& d) { return remat::checkpoint(inner, a, b, d).sin(); },
                        x, y, z);
  for (int i = 0; i < 2; ++i) {
    require_bit_equal(grad_of(out, {x, y, z}, {.retain_graph = true}), plain);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
  }
}

}  // namespace
