// checkpoint(): values and gradients equal plain execution, and how the function is called.

#include <functional>
#include <string>

#include "tests/support/functions.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::checkpointed;

namespace {

// A callable that can only be moved.
struct MoveOnly {
  std::unique_ptr<double> factor = std::make_unique<double>(3.0);
  Tensor operator()(const Tensor& x) const { return (x * *factor).sin(); }
};

struct Net {
  Tensor weight = leaf({3, 3});
  Tensor forward(const Tensor& x) { return x.mm(weight).tanh(); }
  Tensor twice(Tensor x) const { return x.mm(weight).tanh().mm(weight); }
};

}  // namespace

// ---- values and gradients ----------------------------------------------

TEST_CASE("backward and autograd::grad through a region equal the plain gradient", "[checkpoint]") {
  const Seed seed;
  const Tensor a = leaf({2, 2});
  Calls calls;
  const auto region = [&] {
    return checkpoint(counted(calls, [](const Tensor& x) { return x.exp(); }), a);
  };
  const Tensor expected = grad_of(a.exp(), {a})[0];

  region().sum().backward();
  CHECK(calls.count() == 2);
  CHECK(at::equal(a.grad(), expected));

  CHECK(at::equal(grad_of(region(), {a})[0], expected));
  CHECK(calls.count() == 4);
}

TEST_CASE("after forward a region holds its input and its output and nothing else",
          "[checkpoint][rule-1][rule-2]") {
  constexpr int64_t n = 1 << 16;
  const auto fn = [](const Tensor& x) { return x.sin().cos().exp().sin() * 2; };
  const Tensor a = leaf({n});
  LiveBytes bytes;
  Tensor y = checkpoint(fn, a);
  CHECK(bytes.held() == n * 4);  // y; `a` lives anyway
  y = Tensor();
  CHECK(bytes.held() == 0);
  y = fn(a);
  CHECK(bytes.held() == 3 * n * 4);  // plain also keeps sin's and exp's results
}

TEST_CASE("a region may save nothing and return an output that is then changed in place",
          "[checkpoint]") {
  const Seed seed;
  const Tensor first = leaf({2, 2}), second = leaf({2, 2}), a = leaf({2, 2});
  const auto fn = [&](const Tensor& x) {
    at::NoGradGuard no_grad;
    return x.mm(first).mm(second);
  };
  for (int repeat = 1; repeat <= 3; ++repeat) {
    Tensor out = checkpoint(fn, a);
    CHECK_FALSE(out.requires_grad());
    out += a;
    out.sum().backward();
    CHECK(at::equal(a.grad(), at::full({2, 2}, static_cast<double>(repeat))));
  }
  CHECK_FALSE(first.grad().defined());
}

namespace {

const c10::TensorImpl* unpacked_second = nullptr;

struct SaveSecond : torch::autograd::Function<SaveSecond> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& y) {
    context->save_for_backward({y});
    return x;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors grads) {
    unpacked_second = context->get_saved_variables()[0].unsafeGetTensorImpl();
    return {grads[0], Tensor()};
  }
};

}  // namespace

TEST_CASE("a saved argument that does not require grad comes back as the same object",
          "[checkpoint][rule-2]") {
  const Tensor a = leaf_of(1.0), b = at::scalar_tensor(1.0);
  Calls calls;
  const auto fn =
      counted(calls, [](const Tensor& x, const Tensor& y) { return SaveSecond::apply(x, y); });
  fn(a, b).backward();
  CHECK(unpacked_second == b.unsafeGetTensorImpl());
  unpacked_second = nullptr;
  checkpoint(fn, a, b).backward();
  CHECK(unpacked_second == b.unsafeGetTensorImpl());
  CHECK(calls.count() == 3);
}

TEST_CASE("an output that does not require grad stays so beside one that does", "[checkpoint]") {
  const Tensor t1 = leaf({3}), t2 = at::randn({3});
  auto [out1, out2] = checkpoint([](Tensor x, Tensor y) { return std::make_tuple(x, y); }, t1, t2);
  CHECK(out1.requires_grad());
  CHECK_FALSE(out2.requires_grad());
  out1.sum().backward();
  CHECK(at::equal(t1.grad(), at::ones({3})));
}

TEST_CASE("the next region works after a failed autograd::grad", "[checkpoint]") {
  const Tensor a = leaf({3}), unrelated = leaf({3});
  Calls calls;
  const auto fn = counted(calls, [](const Tensor& x) { return x.sin().exp(); });
  CHECK_THROWS_AS(grad_of(checkpoint(fn, a), {unrelated}), c10::Error);
  calls.reset();
  CHECK(at::equal(grad_of(checkpoint(fn, a), {a})[0], grad_of(a.sin().exp(), {a})[0]));
  CHECK(calls.count() == 2);
}

TEST_CASE("side effects of the function happen again in the recompute", "[checkpoint]") {
  const Tensor a = leaf({2});
  int counter = 0;
  const Tensor y = checkpoint(
      [&counter](const Tensor& x) {
        ++counter;
        return x.sin();
      },
      a);
  CHECK(counter == 1);
  y.sum().backward();
  CHECK(counter == 2);
}

namespace {

std::vector<std::string> log_of_steps;

struct LoggedSquare : torch::autograd::Function<LoggedSquare> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const std::string& name) {
    log_of_steps.push_back("forward " + name);
    context->saved_data["name"] = name;
    context->save_for_backward({x});
    return x * x;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors grads) {
    const Tensor x = context->get_saved_variables()[0];
    log_of_steps.push_back("backward " + context->saved_data["name"].toStringRef());
    return {grads[0] * 2 * x, Tensor()};
  }
};

}  // namespace

TEST_CASE("each recompute happens just before its own backward", "[checkpoint]") {
  const Tensor a = leaf({2}), b = leaf({2});
  const auto square = [](const Tensor& x, const std::string& name) {
    return LoggedSquare::apply(x, name);
  };
  const Tensor left = checkpoint(square, a, std::string("a"));
  const Tensor right = checkpoint(square, b, std::string("b"));
  const Tensor joined = at::cat({left, right});
  log_of_steps.clear();
  joined.sum().backward();
  CHECK(log_of_steps ==
        std::vector<std::string>{"forward b", "backward b", "forward a", "backward a"});
  CHECK(at::equal(a.grad(), 2 * a.detach()));
  CHECK(at::equal(b.grad(), 2 * b.detach()));
}

TEST_CASE("a captured parameter gets its gradient when no argument requires grad", "[checkpoint]") {
  const Tensor a = leaf({3}), x = at::randn({3});
  Calls calls;
  checkpoint(counted(calls, [&](const Tensor& t) { return t * a; }), x).sum().backward();
  CHECK(at::equal(a.grad(), x));
  CHECK(calls.count() == 2);

  const Tensor plain = checkpoint([](const Tensor& t) { return t.sin(); }, x);
  CHECK_FALSE(plain.requires_grad());
}

TEST_CASE("a second output made from nothing does not disturb the first", "[checkpoint]") {
  const Tensor x = leaf({3});
  auto [y, noise] =
      checkpoint([](const Tensor& t) { return std::make_pair(t * 2, at::rand({1})); }, x);
  CHECK_FALSE(noise.requires_grad());
  y.sum().backward();
  CHECK(at::equal(x.grad(), at::full({3}, 2.0)));
}

TEST_CASE("outputs, grads and random numbers of many functions equal plain", "[checkpoint]") {
  const Seed seed;
  const Tensor x = leaf({4, 4}), y = leaf({4, 4});
  const auto same = [&](auto fn) {
    const Counted done;
    Calls calls;
    require_same_grads(
        fn, [&](const Tensor& a, const Tensor& b) { return checkpoint(counted(calls, fn), a, b); },
        x, y);
    CHECK(calls.count() == 2);
    CHECK(done.now().frames_created == 1);
    CHECK(done.now().recomputes == 1);
  };
  SECTION("sigmoid of a matmul") {
    same([](const Tensor& a, const Tensor& b) { return a.matmul(b).sigmoid(); });
  }
  SECTION("a chain of matmuls") {
    same([](const Tensor& a, const Tensor& b) { return a.mm(b).mm(a).mm(b).mm(b); });
  }
  SECTION("selu, then relu") {
    same([](const Tensor& a, const Tensor& b) { return at::selu(a * b).relu(); });
  }
  SECTION("sin of a concatenation") {
    same([](const Tensor& a, const Tensor& b) { return at::cat({a, b}).sin(); });
  }
  SECTION("dropout") {
    same([](const Tensor& a, const Tensor& b) { return at::dropout(a.mm(b), 0.5, true).sin(); });
  }
}

TEST_CASE("a region on a concatenation runs it once in forward and once in backward",
          "[checkpoint]") {
  const Tensor x = leaf({3}), y = leaf({3});
  const auto fn = [](const Tensor& a, const Tensor& b) { return at::cat({a, b}).sin(); };
  const Tensors expected = grad_of(fn(x, y), {x, y});
  KernelCounter kernels;
  const Tensor out = checkpoint(fn, x, y);
  CHECK(kernels.count("cat") == 1);
  require_bit_equal(grad_of(out, {x, y}), expected);
  CHECK(kernels.count("cat") == 2);
}

// ---- how fn and its arguments are called -----------------------------------------------------

TEST_CASE("anything that std::invoke can call is a function of a region", "[checkpoint]") {
  const Tensor x = leaf({3, 3});
  auto net = std::make_shared<Net>();
  const auto same = [&](auto plain, auto region) {
    const Counted done;
    require_same_grads(Parameters{{net->weight}}, plain, region, x);
    CHECK(done.now().frames_created == 1);
    CHECK(done.now().recomputes == 1);
  };
  const auto times_three = [](const Tensor& t) { return (t * 3.0).sin(); };
  SECTION("a function pointer") {
    same(sine, [](const Tensor& t) { return checkpoint(sine, t); });
    same(sine, [](const Tensor& t) { return checkpoint(&sine, t); });
  }
  SECTION("a std::function") {
    const std::function<Tensor(Tensor)> fn = sine;
    same(sine, [&](const Tensor& t) { return checkpoint(fn, t); });
  }
  SECTION("a callable that can only be moved") {
    same(times_three, [](const Tensor& t) { return checkpoint(MoveOnly(), t); });
  }
  SECTION("a mutable lambda") {
    same(times_three, [](const Tensor& t) {
      return checkpoint([factor = 3.0](const Tensor& u) mutable { return (u * factor).sin(); }, t);
    });
  }
  SECTION("a member pointer with a pointer to the object") {
    same([&](const Tensor& t) { return net->twice(t); },
         [&](const Tensor& t) { return checkpoint(&Net::twice, net, t); });
    same([&](const Tensor& t) { return net->twice(t); },
         [&](const Tensor& t) { return checkpoint(&Net::twice, net.get(), t); });
  }
  SECTION("a shared pointer to something with forward") {
    same([&](const Tensor& t) { return net->forward(t); },
         [&](const Tensor& t) { return checkpoint(net, t); });
  }
  SECTION("checkpointed() makes a callable") {
    auto region = checkpointed(MoveOnly(), {.name = "three"});
    same(times_three, [&](const Tensor& t) { return region(t); });
  }
}

TEST_CASE("a call that the function does not accept is no overload", "[checkpoint]") {
  const auto can_call = []<class F, class... A>(F&&, A&&...) {
    return requires(F fn, A... args) { checkpoint(fn, args...); };
  };
  const auto can_call_with_options = []<class F, class... A>(F&&, A&&...) {
    return requires(F fn, A... args, remat::CheckpointOptions o) { checkpoint(o, fn, args...); };
  };
  const auto one_tensor = [](Tensor x) { return x; };
  CHECK(can_call(one_tensor, Tensor()));
  CHECK_FALSE(can_call(one_tensor, Tensor(), Tensor()));
  CHECK_FALSE(can_call(one_tensor, std::string()));
  CHECK(can_call_with_options(one_tensor, Tensor()));
  CHECK_FALSE(can_call_with_options(one_tensor, std::string()));
}

TEST_CASE("each run gets fresh rvalue copies of the arguments", "[checkpoint]") {
  const Tensor x = leaf({2});
  std::vector<int> numbers{1, 2, 3};
  SECTION("a function may take them by &&, and take them apart") {
    Calls calls;
    const Tensor y = checkpoint(
        [&](Tensor&& t, std::vector<int>&& v) {
          calls();
          CHECK(v.size() == 3);
          const std::vector<int> taken = std::move(v);
          Tensor own = std::move(t);
          return own.sin() * static_cast<double>(taken.size());
        },
        x, numbers);
    CHECK(numbers.size() == 3);
    y.sum().backward();
    CHECK(calls.count() == 2);
    CHECK(at::equal(x.grad(), x.detach().cos() * 3));
  }
  SECTION("what the function changes in its copy is not seen by the next run") {
    const Tensor y = checkpoint(
        [](Tensor t, std::vector<int> v) {
          v.push_back(4);
          return t.sin() * static_cast<double>(v.size());
        },
        x, numbers);
    y.sum().backward();
    CHECK(at::equal(x.grad(), x.detach().cos() * 4));
  }
  SECTION("the caller's later changes are not seen") {
    const Tensor y = checkpoint(
        [](const Tensor& t, const std::vector<int>& v) {
          return t.sin() * static_cast<double>(v.size());
        },
        x, numbers);
    numbers.clear();
    y.sum().backward();
    CHECK(at::equal(x.grad(), x.detach().cos() * 3));
  }
  SECTION("std::ref passes the object itself") {
    const Tensor y = checkpoint(
        [](const Tensor& t, std::vector<int>& v) {
          v.push_back(0);
          return t.sin();
        },
        x, std::ref(numbers));
    CHECK(numbers.size() == 4);
    y.sum().backward();
    CHECK(numbers.size() == 5);
  }
}

TEST_CASE("results of any kind come back untouched", "[checkpoint]") {
  const Tensor x = leaf({2});
  SECTION("void") {
    Tensor out;
    static_assert(std::is_void_v<decltype(checkpoint([&](const Tensor&) {}, x))>);
    checkpoint([&](const Tensor& t) { out = t.sin(); }, x);
    out.sum().backward();
    CHECK(at::equal(x.grad(), x.detach().cos()));
    out = Tensor();
  }
  SECTION("a reference decays to a value") {
    static int number = 7;
    static_assert(std::same_as<decltype(checkpoint([]() -> int& { return number; })), int>);
    CHECK(checkpoint([]() -> int& { return number; }) == 7);
  }
  SECTION("a result that can only be moved") {
    auto out = checkpoint([](const Tensor& t) { return std::make_unique<Tensor>(t.sin()); }, x);
    out->sum().backward();
    CHECK(at::equal(x.grad(), x.detach().cos()));
  }
  SECTION("the tensor that the function returned is the tensor that arrives") {
    const c10::TensorImpl* inside = nullptr;
    const Tensor y = checkpoint(
        [&](const Tensor& t) {
          Tensor out = t.sin();
          if (inside == nullptr) inside = out.unsafeGetTensorImpl();
          return out;
        },
        x);
    CHECK(y.unsafeGetTensorImpl() == inside);
  }
}

TEST_CASE("the function and the arguments live as long as the graph", "[checkpoint][rule-13]") {
  const Alive alive;
  const Tensor x = leaf({2});
  {
    Tensor y = checkpoint(
        [probe = alive.probe()](const Tensor& t, const Alive::Probe&) { return t.sin(); }, x,
        alive.probe());
    CHECK(alive.count() == 2);
    y.sum().backward();
    CHECK(alive.count() == 0);  // backward without retain_graph freed the slots
  }
  {
    const Tensor y = checkpoint([probe = alive.probe()](const Tensor& t) { return t.sin(); }, x);
    CHECK(alive.count() == 1);
  }
  CHECK(alive.count() == 0);
  {
    // Nothing was saved: nothing needs the function any more.
    const Tensor y = checkpoint([probe = alive.probe()](const Tensor& t) { return t + t; }, x);
    CHECK(alive.count() == 0);
    CHECK(remat::counters().frames_alive == 0);
  }
}

TEST_CASE("checkpointed() holds its function once for all calls", "[checkpoint]") {
  const Alive alive;
  const Tensor x = leaf({2});
  Tensor first, second;
  {
    auto region = checkpointed([probe = alive.probe(), own = std::make_unique<int>(2)](
                                   const Tensor& t) { return t.sin() * *own; });
    first = region(x);
    second = region(first);
    CHECK(alive.count() == 1);
  }
  CHECK(alive.count() == 1);  // the graphs share it
  second.sum().backward();
  CHECK(alive.count() == 0);
  require_bit_equal({x.grad()}, grad_of((x.sin() * 2).sin() * 2, {x}));
}

TEST_CASE("with grad mode off the function runs plainly and no option is looked at",
          "[checkpoint]") {
  const Tensor x = leaf({2});
  const Counted done;
  Calls entered;
  const remat::CheckpointOptions impossible{.debug = true, .context_fn = [&] {
                                              entered();
                                              return remat::ContextPair{};
                                            }};
  {
    at::NoGradGuard no_grad;
    const Tensor y = checkpoint(impossible, sine, x);
    CHECK_FALSE(y.requires_grad());
    CHECK(at::equal(y, x.sin()));
    // Also if the function turns grad mode on inside: what it saves is kept plainly.
    Calls calls;
    const Tensor inside = checkpoint(counted(calls,
                                             [](const Tensor& t) {
                                               at::AutoGradMode grad_mode(true);
                                               return t.sin();
                                             }),
                                     x);
    at::AutoGradMode grad_mode(true);
    inside.sum().backward();
    CHECK(calls.count() == 1);
    CHECK(at::equal(x.grad(), x.detach().cos()));
  }
  CHECK(entered.count() == 0);
  CHECK(done.now().frames_created == 0);
}
