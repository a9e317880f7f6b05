// Rule 11: LibTorch's default dtype, which all threads share: a recompute that finds another one is
// refused.

#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include "tests/support/support.h"

using remat::checkpoint;
using Kind = remat::CheckpointError::Kind;

namespace {

struct DefaultDtype {
  explicit DefaultDtype(at::ScalarType dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  }
  ~DefaultDtype() { c10::set_default_dtype(before); }
  DefaultDtype& operator=(DefaultDtype&&) = delete;
  const caffe2::TypeMeta before = c10::get_default_dtype();
};

/// Its values depend on the default dtype, what it saves does not.
Tensor thirds(const Tensor& x) {
  const at::NoGradGuard no_grad;
  const Tensor third = at::ones({3}).div(3).to(at::kDouble);
  at::AutoGradMode grad(true);
  return x * third;
}

}  // namespace

TEST_CASE("a recompute under another default dtype is refused, and can be tried again",
          "[rule-11][rule-12]") {
  const Tensor x = leaf({3}, at::kDouble);
  const Tensor expected = grad_of(thirds(x).sin(), {x})[0];
  Calls calls;
  const Tensor y = checkpoint(counted(calls, [](const Tensor& t) { return thirds(t).sin(); }), x);
  {
    const DefaultDtype other(at::kDouble);
    const auto error =
        error_of<remat::CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
    CHECK(error.kind() == Kind::RecomputeFailed);
    CHECK_THAT(text_of(error),
               contains("the default dtype was Float when the region began and is Double now") &&
                   contains("Hint: restore it before backward"));
  }
  CHECK(calls.count() == 1);
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(calls.count() == 2);
}

TEST_CASE("a region that sets the default dtype itself and puts it back is recomputed",
          "[rule-11]") {
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& t) {
    const DefaultDtype wide(at::kDouble);
    return (t * at::ones({3}).div(3)).sin();
  };
  CHECK(bit_equal(grad_of(checkpoint(f, x), {x})[0], grad_of(f(x), {x})[0]));
  const DefaultDtype wide(at::kDouble);
  CHECK(bit_equal(grad_of(checkpoint(f, x), {x})[0], grad_of(f(x), {x})[0]));
}

TEST_CASE("a provider may restore the default dtype", "[rule-11][state]") {
  struct Provider final : remat::StateProvider {
    std::any capture() override { return c10::get_default_dtype_as_scalartype(); }
    void restore(const std::any& state) override {
      c10::set_default_dtype(c10::scalarTypeToTypeMeta(std::any_cast<at::ScalarType>(state)));
    }
  };
  const Tensor x = leaf({3}, at::kDouble);
  const Tensor expected = grad_of(thirds(x).sin(), {x})[0];
  const remat::StateProviderGuard guard(std::make_shared<Provider>());
  const Tensor y = checkpoint([](const Tensor& t) { return thirds(t).sin(); }, x);
  const DefaultDtype other(at::kDouble);
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(c10::get_default_dtype_as_scalartype() == at::kDouble);
}
