// Rule 15 where the kernel of an operator opens regions of its own, or runs a backward.

#include <torch/library.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;

namespace {

std::function<Tensor(const Tensor&)> body_of_kernel;

const auto& handle() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("remat_kernels::custom", "")
                             .typed<Tensor(const Tensor&)>();
  return op;
}

/// Its gradient is said to be the same as that of 3 x.
struct Threefold : torch::autograd::Function<Threefold> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return handle().call(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {3 * gradients[0]};
  }
};

/// An operator whose kernel does what a test wants.
Tensor custom(const Tensor& x) {
  static torch::Library* const library = [] {
    auto* const made = new torch::Library(torch::Library::FRAGMENT, "remat_kernels", std::nullopt,
                                          __FILE__, __LINE__);
    made->def("custom(Tensor x) -> Tensor");
    made->impl("custom", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                                         [](const Tensor& each) { return body_of_kernel(each); }));
    made->impl("custom", torch::dispatch(c10::DispatchKey::Autograd, [](const Tensor& each) {
                 return Threefold::apply(each);
               }));
    return made;
  }();
  (void)library;
  return handle().call(x);
}

using Names = std::vector<std::string>;
Policy noting(Names& names, CheckpointPolicy answer) {
  return Policy([&names, answer](const PolicyContext& context) {
    names.emplace_back(context.op_name);
    return answer;
  });
}

}  // namespace

TEST_CASE("a region in a kernel has its own policy, and the one around sees the kernel only",
          "[rule-15]") {
  for (const CheckpointPolicy answer :
       {CheckpointPolicy::MustSave, CheckpointPolicy::PreferRecompute}) {
    Names outer, inner;
    int kernels = 0;
    body_of_kernel = [&](const Tensor& x) {
      ++kernels;
      const at::AutoGradMode grad(true);  // else the region is a plain call
      const Tensor before = x.cos();
      const Tensor y = checkpoint(
          {.policy = noting(inner, CheckpointPolicy::MustSave)},
          [](const Tensor& t) { return t.sin().exp(); }, before);
      return y.tan();
    };
    const auto f = [](const Tensor& x) { return (custom(x.sigmoid()) * x).sin(); };
    const Tensor x = leaf({4}), same = x.detach().clone().requires_grad_();
    const Tensor y = checkpoint({.policy = noting(outer, answer)}, f, x);
    const int in_forward = kernels;
    CHECK(in_forward == 1);
    CHECK(inner == Names{"aten::sin.default", "aten::exp.default"});
    CHECK(outer == Names{"aten::sigmoid.default", "remat_kernels::custom.default",
                         "aten::mul.Tensor", "aten::sin.default"});
    y.sum().backward();
    CHECK(kernels == in_forward + 1);  // what its region holds is filled by running it
    f(same).sum().backward();
    CHECK(equal(x.grad(), same.grad()));
  }
}

TEST_CASE("a kernel runs a backward through a region", "[rule-15]") {
  const auto f = [](const Tensor& x) { return x.sin().exp().sin(); };
  const Tensor x = leaf({4}), same = x.detach().clone().requires_grad_();
  f(same).sum().backward();
  Names names;
  const Tensor y = checkpoint({.policy = noting(names, CheckpointPolicy::PreferRecompute)}, f, x);
  const Tensor root = y.sum();
  body_of_kernel = [&](const Tensor& each) {
    root.backward();
    return each.clone();
  };
  Names outer;
  checkpoint(
      {.policy = noting(outer, CheckpointPolicy::PreferRecompute)},
      [](const Tensor& t) { return custom(t.cos()); }, x);
  CHECK(equal(x.grad(), same.grad()));
}
