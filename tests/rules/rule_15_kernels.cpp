// Rule 15 where the kernel of an operator does more than compute: opens regions, runs a backward,
// returns what it keeps, uses lazy views.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// Operators whose kernels do what a test wants. Their gradients are said to be those of 3 x.
std::function<Tensor(const Tensor&)> body_of_one;
std::function<std::tuple<Tensor, Tensor>(const Tensor&)> body_of_two;
std::function<void(Tensor&)> body_of_write;

template <class Signature>
auto handle_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

struct One : torch::autograd::Function<One> {
  static Tensor forward(AutogradContext*, const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return handle_of<Tensor(const Tensor&)>("remat_kernels::one").call(x);
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {3 * gradients[0]};
  }
};
struct Two : torch::autograd::Function<Two> {
  static variable_list forward(AutogradContext*, const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [first, second] =
        handle_of<std::tuple<Tensor, Tensor>(const Tensor&)>("remat_kernels::two").call(x);
    return {first, second.alias()};
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    return {3 * gradients[0]};
  }
};

void define_operators() {
  [[maybe_unused]] static torch::Library* const library = [] {
    constexpr auto kernel = c10::DispatchKey::CompositeExplicitAutograd;
    constexpr auto autograd = c10::DispatchKey::Autograd;
    auto* const made = new torch::Library(torch::Library::FRAGMENT, "remat_kernels", std::nullopt,
                                          __FILE__, __LINE__);
    made->def("one(Tensor x) -> Tensor");
    made->impl("one", torch::dispatch(kernel, [](const Tensor& x) { return body_of_one(x); }));
    made->impl("one", torch::dispatch(autograd, [](const Tensor& x) { return One::apply(x); }));
    made->def("two(Tensor x) -> (Tensor, Tensor)");
    made->impl("two", torch::dispatch(kernel, [](const Tensor& x) { return body_of_two(x); }));
    made->impl("two", torch::dispatch(autograd, [](const Tensor& x) {
                 const variable_list both = Two::apply(x);
                 return std::tuple(both[0], both[1]);
               }));
    made->def("write_(Tensor(a!) x) -> Tensor(a!)");
    made->impl("write_", torch::dispatch(kernel, [](Tensor& x) -> Tensor& {
                 body_of_write(x);
                 return x;
               }));
    made->def("add_to_(Tensor(a!) x, Tensor y) -> Tensor(a!)");
    made->impl("add_to_", torch::dispatch(kernel, [](Tensor& x, const Tensor& y) -> Tensor& {
                 const at::AutoDispatchBelowADInplaceOrView below;
                 return x.add_(y);
               }));
    return made;
  }();
}
Tensor one(const Tensor& x) {
  define_operators();
  return handle_of<Tensor(const Tensor&)>("remat_kernels::one").call(x);
}
std::tuple<Tensor, Tensor> two(const Tensor& x) {
  define_operators();
  return handle_of<std::tuple<Tensor, Tensor>(const Tensor&)>("remat_kernels::two").call(x);
}
void write(Tensor x) {
  define_operators();
  handle_of<Tensor&(Tensor&)>("remat_kernels::write_").call(x);
}

using Names = std::vector<std::string>;
Policy noting(Names& names, CheckpointPolicy answer) {
  return Policy([&names, answer](const PolicyContext& context) {
    names.emplace_back(context.op_name);
    return answer;
  });
}
CheckpointOptions always(CheckpointPolicy answer) {
  return {.policy = Policy([answer](const PolicyContext&) { return answer; })};
}
CheckpointOptions keeping(std::string op) {
  return {.policy = Policy([op = std::move(op)](const PolicyContext& context) {
            return context.op_name == op ? CheckpointPolicy::MustSave
                                         : CheckpointPolicy::PreferRecompute;
          })};
}

template <class Function>
void check_gradient(const CheckpointOptions& options, const Function& f) {
  const Tensor x = leaf({4}), plain = x.detach().clone().requires_grad_();
  f(plain).sum().backward();
  checkpoint(options, f, x).sum().backward();
  require_bit_equal({x.grad()}, {plain.grad()});
}

}  // namespace

TEST_CASE("a region in a kernel has its own policy, and the one around sees the kernel only",
          "[rule-15]") {
  for (const CheckpointPolicy answer :
       {CheckpointPolicy::MustSave, CheckpointPolicy::PreferRecompute}) {
    Names outer, inner;
    int kernels = 0;
    body_of_one = [&](const Tensor& x) {
      ++kernels;
      const at::AutoGradMode grad(true);  // else the region is a plain call
      const Tensor before = x.cos();
      const Tensor y = checkpoint(
          {.policy = noting(inner, CheckpointPolicy::MustSave)},
          [](const Tensor& t) { return t.sin().exp(); }, before);
      return y.tan();
    };
    const auto f = [](const Tensor& x) { return (one(x.sigmoid()) * x).sin(); };
    const Tensor x = leaf({4}), same = x.detach().clone().requires_grad_();
    const Tensor y = checkpoint({.policy = noting(outer, answer)}, f, x);
    CHECK(kernels == 1);
    CHECK(inner == Names{"aten::sin.default", "aten::exp.default"});
    CHECK(outer == Names{"aten::sigmoid.default", "remat_kernels::one.default", "aten::mul.Tensor",
                         "aten::sin.default"});
    y.sum().backward();
    CHECK(kernels == 2);  // what its region holds is filled by running it
    f(same).sum().backward();
    CHECK(equal(x.grad(), same.grad()));
  }
}

TEST_CASE("an operator that changes the sizes or strides of a kept result runs again",
          "[rule-15]") {
  // matmul of three dimensions: mm, whose result _unsafe_view gives another version counter.
  const Tensor x = leaf({4, 4, 4}), w = leaf({4, 4});
  using Function = std::function<Tensor(const Tensor&)>;
  const std::vector<Function> functions{
      [w](const Tensor& t) { return t.matmul(w).transpose_(1, 2).sin(); },
      [w](const Tensor& t) { return t.slice(0, 0, 1).matmul(w).squeeze_(0).sin(); },
      [w](const Tensor& t) { return t.matmul(w).unsqueeze_(0).exp().sin(); },
      [w](const Tensor& t) { return t.matmul(w).mul_(2).transpose_(1, 2).sin(); },
      [](const Tensor& t) { return t.matmul(t).as_strided_({4, 4}, {1, 4}).sin(); }};
  const Function& f = functions[GENERATE(0u, 1u, 2u, 3u, 4u)];
  const auto policy = GENERATE(remat::save_matmuls(), remat::save_ops({"aten::mm", "aten::bmm"}));
  const Tensor y = remat::checkpoint({.policy = policy}, f, x);
  for (int i = 0; i < 2; ++i)
    CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], grad_of(f(x), {x})[0]));
}

TEST_CASE("a boxed write to a kept result leaves nothing but its result on the stack",
          "[rule-15]") {
  // As interpreters call an operator that has no generated code, which would not look at the stack.
  define_operators();
  const Tensor w = at::randn({4, 4}), bias = at::randn({4});
  const auto f = [&](const Tensor& x) {
    torch::jit::Stack stack{at::_unsafe_view(x.detach().mm(w), {4, 4}), bias};
    c10::Dispatcher::singleton().findSchemaOrThrow("remat_kernels::add_to_", "").callBoxed(stack);
    REQUIRE(stack.size() == 1);
    return (stack[0].toTensor() * x).exp().sin();
  };
  require_same_grads(
      Kernels{.kept = {"mm"}}, f,
      [&](const Tensor& x) { return remat::checkpoint({.policy = remat::save_matmuls()}, f, x); },
      leaf({4, 4}));
}

TEST_CASE("an operator that writes to a kept result, and opens a region, runs again", "[rule-15]") {
  body_of_one = [](const Tensor& x) { return x * 2; };
  body_of_write = [](Tensor& x) {
    const at::AutoGradMode grad(true);
    x.add_(checkpoint([](const Tensor& t) { return t.sin(); }, x.clone()));
  };
  check_gradient(keeping("remat_kernels::one.default"), [](const Tensor& x) {
    const Tensor y = one(x);
    write(y.variable_data());
    return y.sin().exp();
  });
}

TEST_CASE("an operator whose kernel pins a value runs again under a policy that keeps it",
          "[rule-15]") {
  // Passed over, it would not count up the pins, and the next one would get its value.
  int kernels = 0;
  body_of_one = [&](const Tensor& x) {
    ++kernels;
    return remat::pin(x.mul(3));
  };
  const auto f = [](const Tensor& x) {
    const Tensor y = one(x);
    return (y * remat::pin(x.sin())).exp();
  };
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(keeping("remat_kernels::one.default"), f, x);
  const Tensor gradient = grad_of(y, {x})[0];
  CHECK(kernels == 2);
  CHECK(bit_equal(gradient, grad_of(f(x), {x})[0]));
}

TEST_CASE("of what it made a region under a policy remembers no more than it needs", "[rule-15]") {
  const Tensor x = leaf({4});
  const auto f = [](const Tensor& x) { return x.exp().sin().add(1); };
  const auto num_weak = [](const Tensor& t) {
    return t.storage().getWeakStorageImpl().weak_use_count();
  };
  CHECK(num_weak(checkpoint(keeping("aten::exp.default"), f, x)) == num_weak(f(x)));
}

TEST_CASE("a kernel that pins a value runs again while forward waits for a backward",
          "[rule-6][rule-15]") {
  int kernels = 0;
  body_of_one = [&](const Tensor& x) {
    ++kernels;
    return remat::pin(x.mul(3));
  };
  const auto f = [](const Tensor& x) {
    const Tensor y = one(x.cos()).sin();
    return (grad_of(y, {x}, {.retain_graph = true})[0] * y).exp();
  };
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(keeping("aten::exp.default"), f, x);
  CHECK(kernels == 2);
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of(f(x), {x})[0]));
}

TEST_CASE("a kernel runs a backward through a region", "[rule-15]") {
  // With a lazy conjugation in it: the way to a kernel excludes more keys than autograd's.
  const auto f = [](const Tensor& x) {
    const Tensor z = at::complex(x, x.sin());
    return at::imag(z.conj()).mul(3).exp() * at::real(z * z.conj());
  };
  const bool in_region = GENERATE(true, false);
  CAPTURE(in_region);
  const Tensor x = leaf({4}), same = x.detach().clone().requires_grad_();
  f(same).sum().backward();
  Names inner, outer;
  const Tensor root =
      checkpoint({.policy = noting(inner, CheckpointPolicy::PreferRecompute)}, f, x).sum();
  body_of_one = [&](const Tensor& each) {
    root.backward();
    return each.clone();
  };
  const auto around = [](const Tensor& t) { return one(t.cos()); };
  const Tensor y = leaf({4});
  if (in_region)
    checkpoint({.policy = noting(outer, CheckpointPolicy::PreferRecompute)}, around, y);
  else
    around(y);
  CHECK(equal(x.grad(), same.grad()));
  if (in_region) CHECK(outer == Names{"aten::cos.default", "remat_kernels::one.default"});
}

TEST_CASE("a kept operator whose kernel runs a backward does not shift those of the region",
          "[rule-6][rule-15]") {
  const auto options =
      GENERATE(always(CheckpointPolicy::PreferRecompute), keeping("remat_kernels::one.default"));
  body_of_one = [](const Tensor& x) {
    const at::AutoGradMode grad(true);
    const Tensor other = at::ones({2}).requires_grad_();
    struct Identity : torch::autograd::Function<Identity> {
      static Tensor forward(AutogradContext*, const Tensor& t) { return t * 1; }
      static variable_list backward(AutogradContext*, const variable_list& g) { return g; }
    };
    Identity::apply(other).backward(at::ones({2}));
    return x * 2;
  };
  // Which is refused, since a recompute has the argument without its hook.
  const auto f = [](const Tensor& x) {
    const Tensor y = x.detach() * 2;
    const Tensor kept = y.numel() == 4 ? one(y) : y;
    const Tensor slope = torch::autograd::grad({(x.sin() * kept).sum()}, {x})[0];
    return (x * slope.detach()).exp();
  };
  const Tensor x = leaf({4});
  x.register_hook([](const Tensor& gradient) { return 5 * gradient; });
  const Tensor y = checkpoint(options, f, x);
  CHECK_THROWS_WITH(y.sum().backward(), contains("with respect to an argument that has hooks"));
}

TEST_CASE("an operator may return a tensor that it keeps, again and again", "[rule-15]") {
  Tensor constant = at::full({4}, 3.);
  int kernels = 0;
  body_of_one = [&](const Tensor&) {
    ++kernels;
    return constant;
  };
  check_gradient(keeping("remat_kernels::one.default"), [](const Tensor& x) {
    const Tensor first = one(x.detach());
    one(x.detach());
    return (x.sin() * first).exp();
  });
  CHECK(kernels == 4);  // two in each forward

  body_of_two = [&](const Tensor& x) { return std::tuple(2 * x, constant); };
  const auto twice = [](const Tensor& x, auto&& between) {
    Tensor a = std::get<0>(two(x));
    const Tensor b = std::get<0>(two(x.cos()));
    return between(a) * b;
  };
  // The first call is let go of, by a write and by its name; the constant is the second's, too.
  check_gradient(keeping("remat_kernels::two.default"), [&](const Tensor& x) {
    return twice(x, [](Tensor& a) {
      const Tensor read = a.sin();
      a.variable_data().add_(1.);
      return read.exp() + a;
    });
  });
  const Policy by_name([](const PolicyContext& context) {
    if (context.op_name == "remat::checkpoint_name") return CheckpointPolicy::MustRecompute;
    return context.op_name == "remat_kernels::two.default" ? CheckpointPolicy::PreferSave
                                                           : CheckpointPolicy::PreferRecompute;
  });
  check_gradient({.policy = by_name}, [&](const Tensor& x) {
    return twice(x, [](Tensor& a) { return remat::checkpoint_name(a, "a").sin().exp(); });
  });
}

TEST_CASE("kernels that use lazy conjugation and negation compute the same under a policy",
          "[rule-15]") {
  const auto answer = GENERATE(CheckpointPolicy::PreferRecompute, CheckpointPolicy::MustSave);
  const Seed seed(5);
  const Tensor values = at::randn({4, 2}, at::kComplexDouble);
  const auto f = [](const Tensor& x) { return at::view_as_real(at::linalg_pinv(x)); };
  const Tensor x = values.clone().requires_grad_(), plain = values.clone().requires_grad_();
  const Tensor y = checkpoint(always(answer), f, x);
  require_bit_equal({y.detach()}, {f(plain).detach()});
  y.sum().backward();
  f(plain).sum().backward();
  require_bit_equal({at::view_as_real(x.grad().resolve_conj())},
                    {at::view_as_real(plain.grad().resolve_conj())});
  body_of_one = [](const Tensor& t) { return at::imag(at::complex(t, t).conj()) * 3; };
  check_gradient(always(answer), [](const Tensor& t) { return one(t).sin(); });
}

TEST_CASE("thousands of kept calls in one region", "[rule-15]") {
  constexpr int num_calls = 3000;
  const remat::testing::KernelCounter kernels;
  check_gradient(keeping("aten::sigmoid.default"), [](const Tensor& x) {
    Tensor y = x;
    for (int i = 0; i < num_calls; ++i) y = y.sigmoid();
    return y;
  });
  CHECK(kernels.count("sigmoid") == 2 * num_calls);  // plain, and the region's forward
}

TEST_CASE("writes to lists of tensors count up versions under a policy, too", "[rule-15]") {
  const auto options = GENERATE(CheckpointOptions{}, always(CheckpointPolicy::PreferRecompute),
                                always(CheckpointPolicy::MustSave), keeping("aten::tanh.default"));
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(
      options,
      [](const Tensor& t) {
        const Tensor saved = t.tanh();  // and changed afterwards
        at::_foreach_add_({saved}, 1.);
        CHECK(saved._version() == 1);
        return saved.exp();
      },
      x);
  CHECK_THROWS(y.sum().backward());
}

TEST_CASE("operators that autocast does not know call others that it casts", "[rule-15]") {
  const Seed seed(7);
  const Tensor a = at::randn({4, 8}), b = at::randn({4, 8}), w = at::randn({8, 8, 8});
  const auto f = [&](const Tensor& t) { return at::bilinear(t, b, w, {}).sin(); };
  const Tensor x = a.clone().requires_grad_(), plain = a.clone().requires_grad_();
  Tensor y, expected;
  {
    struct Autocast {
      Autocast() { at::autocast::set_autocast_enabled(at::kCPU, true); }
      ~Autocast() {
        at::autocast::clear_cache();
        at::autocast::set_autocast_enabled(at::kCPU, false);
      }
    } autocast;
    expected = f(plain);
    y = checkpoint(always(CheckpointPolicy::PreferRecompute), f, x);
  }
  require_bit_equal({y.detach()}, {expected.detach()});
  y.sum().backward();
  expected.sum().backward();
  require_bit_equal({x.grad()}, {plain.grad()});
}

TEST_CASE("a batch norm that writes its statistics runs in every recompute", "[rule-15]") {
  const auto policy =
      GENERATE(keeping("aten::native_batch_norm.default"), always(CheckpointPolicy::MustSave));
  const bool early_stop = GENERATE(true, false);
  CheckpointOptions options = policy;
  options.early_stop = early_stop;
  const auto f = [](const Tensor& x) {
    const Tensor mean = at::zeros({3}), variance = at::ones({3});
    const Tensor y = at::batch_norm(x, {}, {}, mean, variance, /*training=*/true, 0.5, 1e-5, false);
    return y.sin() + x * mean;
  };
  const Tensor x = leaf({5, 3}), plain = x.detach().clone().requires_grad_();
  f(plain).sum().backward();
  checkpoint(options, f, x).sum().backward();
  require_bit_equal({x.grad()}, {plain.grad()});
}

TEST_CASE("a blank tensor that is filled past all operators is made again", "[rule-15]") {
  const auto f = [](const Tensor& x) {
    const Tensor t = at::zeros({4});
    for (int i = 0; i < 4; ++i) t.mutable_data_ptr<float>()[i] += static_cast<float>(i);
    return x * t;
  };
  const Tensor x = leaf({4}), plain = x.detach().clone().requires_grad_();
  f(plain).sum().backward();
  const Tensor y = checkpoint(always(CheckpointPolicy::MustSave), f, x);
  for (int i = 0; i < 2; ++i) {
    x.mutable_grad() = Tensor();
    y.sum().backward({}, /*retain_graph=*/true);
    require_bit_equal({x.grad()}, {plain.grad()});
  }
}

TEST_CASE("the sizes of nested tensors are no operator of the region's", "[rule-15]") {
  // LibTorch asks for them where nothing may be thrown.
  const auto f = [](const Tensor& x) {
    const Tensor nested = at::_nested_tensor_from_tensor_list({x.slice(0, 0, 2), x.slice(0, 1, 4)});
    return (nested * nested).to_padded_tensor(0.).sin();
  };
  Names names;
  const Tensor x = leaf({4, 3}), plain = x.detach().clone().requires_grad_();
  f(plain).sum().backward();
  const auto inner = [&](const Tensor& t) {
    return checkpoint({.policy = noting(names, CheckpointPolicy::MustSave)}, f, t);
  };
  checkpoint(inner, x).sum().backward();
  require_bit_equal({x.grad()}, {plain.grad()});
  for (const std::string& each : names)
    CHECK(each.find("_nested_tensor_size") == std::string::npos);
}

TEST_CASE("a nested tensor with a name is kept as it is", "[rule-15]") {
  // Its storage, sizes and keys alone would not be enough to make one.
  const auto f = [](const Tensor& x) {
    const Tensor nested = at::_nested_tensor_from_tensor_list({x.slice(0, 0, 2), x.slice(0, 1, 4)});
    const Tensor named = remat::checkpoint_name(nested * nested, "square");
    return (named * nested).to_padded_tensor(0.).sin();
  };
  const Tensor x = leaf({4, 3}), plain = x.detach().clone().requires_grad_();
  f(plain).sum().backward();
  for (const Policy& policy :
       {remat::save_names({"square"}), remat::save_all_but_names({"other"})}) {
    x.mutable_grad() = Tensor();
    checkpoint({.policy = policy}, f, x).sum().backward();
    require_bit_equal({x.grad()}, {plain.grad()});
  }
}
