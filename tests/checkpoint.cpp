// checkpoint(): what goes in, what comes out, and that values and gradients equal plain execution.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <array>
#include <functional>
#include <string>
#include <unordered_map>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::checkpointed;
using remat::EarlyStopGuard;

namespace {

Tensor sine(Tensor x) { return x.sin(); }

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

// ---- arguments and results ------------------------------------------------------

TEST_CASE("numbers, tensors and callables are arguments, a mixed tuple is the result",
          "[checkpoint]") {
  const Seed seed;
  const bool early_stop = GENERATE(true, false);
  const EarlyStopGuard guard(early_stop);
  const Tensor a = leaf_of(2.0), b = leaf_of(3.0);
  const auto fn = [](int k, const Tensor& x, const Tensor& y, const auto& callable) {
    return std::make_tuple(callable(k * x * y.exp()), 1, std::string("abcd"));
  };
  auto [expected, one, text] = fn(3, a, b, sine);
  const Tensors grads = grad_of(expected, {a, b});

  Calls calls;
  auto [y, number, word] = checkpoint(counted(calls, fn), 3, a, b, sine);
  static_assert(std::same_as<decltype(number), int> && std::same_as<decltype(word), std::string>);
  CHECK(number == 1);
  CHECK(word == "abcd");
  CHECK(at::equal(y, expected));
  require_bit_equal(grad_of(y, {a, b}), grads);
  CHECK(calls.count() == 2);
}

TEST_CASE("every tensor argument is an input, wherever it stands", "[checkpoint][rule-2]") {
  const bool early_stop = GENERATE(true, false);
  const EarlyStopGuard guard(early_stop);
  const Tensor a = leaf({3}), b = leaf({3});
  const auto fn = [](const Tensor& x, int, const Tensor& y) {
    return (x.sin().exp() * y).sin().exp();
  };
  Calls calls;
  require_same_grads(
      [&](const Tensor& x, const Tensor& y) { return fn(x, 0, y); },
      [&](const Tensor& x, const Tensor& y) { return checkpoint(counted(calls, fn), x, 0, y); }, a,
      b);
  CHECK(calls.count() == 2);

  // An input that changes is noticed, in every position.
  for (const bool first : {true, false}) {
    Tensor x = a.detach().clone().requires_grad_() * 1, y = b.detach().clone().requires_grad_() * 1;
    const Tensor out = checkpoint(fn, x, 0, y);
    (first ? x : y).add_(1);
    CHECK_THROWS_WITH(out.sum().backward(), contains("modified by an inplace operation"));
  }
}

TEST_CASE("an absent optional argument passes through", "[checkpoint]") {
  const Tensor t = leaf({2});
  const Tensor out = checkpoint([](Tensor x, std::nullopt_t) { return x; }, t, std::nullopt);
  CHECK(at::equal(out, t));
  const Tensor unchanged =
      checkpoint([](Tensor x, std::optional<Tensor> mask) { return mask ? x * *mask : x.sin(); }, t,
                 std::optional<Tensor>());
  unchanged.sum().backward();
  CHECK(at::equal(t.grad(), t.detach().cos()));
}

TEST_CASE("a function of plain numbers passes through", "[checkpoint]") {
  CHECK(checkpoint([](int a, double b) { return a * b; }, 3, 0.5) == 1.5);
  CHECK(checkpoint([] { return std::string("text"); }) == "text");
}

TEST_CASE("a function without arguments uses a captured leaf", "[checkpoint]") {
  const Tensor a = leaf({});
  Calls calls;
  const Tensor y = checkpoint(counted(calls, [&] { return a.sin().exp(); }));
  const Tensor plain = a.sin().exp();
  CHECK(at::equal(y, plain));
  const Tensor expected = grad_of(plain, {a})[0];
  CHECK(at::equal(grad_of(y, {a}, {.retain_graph = true})[0], expected));
  CHECK(at::equal(grad_of(y, {a})[0], expected));
  CHECK(calls.count() == 3);
}

namespace {

struct Opaque {
  std::vector<std::string> words{"two"};
  Tensor hidden;  // copied with the struct, no input
};

struct Pair {
  Tensor first;
  std::vector<Tensor> rest;
  int number = 0;
};
template <class Visitor>
void visit_tensors(Pair& pair, Visitor&& visit) {
  visit(pair.first);
  for (Tensor& tensor : pair.rest) visit(tensor);
}

struct Halves {
  Tensor left, right;
};

}  // namespace

TEST_CASE("an argument of an opaque type is copied", "[checkpoint]") {
  const Tensor x = leaf({3});
  Opaque opaque;
  const Tensor y = checkpoint(
      [](const Tensor& t, Opaque o) {
        CHECK(o.words == std::vector<std::string>{"two"});
        return t.sin() * static_cast<double>(2 * o.words.size());
      },
      x, opaque);
  opaque.words.clear();  // the region has its own copy
  y.sum().backward();
  CHECK(at::equal(x.grad(), x.detach().cos() * 2));
}

TEST_CASE("tensors in a user struct are inputs of the region", "[checkpoint][rule-2]") {
  const Seed seed;
  const Tensor a = leaf({3}), b = leaf({3}), c = at::randn({3});
  const auto fn = [](const Pair& p) {
    return Halves{p.first.sin() * p.rest[0], p.rest[1] * p.first * p.number};
  };
  const Halves plain = fn({a, {b, c}, 5});
  Calls calls;
  Halves out = checkpoint(counted(calls, fn), Pair{a, {b, c}, 5});
  CHECK(at::equal(out.left, plain.left));
  CHECK(at::equal(out.right, plain.right));
  require_bit_equal(torch::autograd::grad({out.left.sum() + out.right.sum()}, {a, b}),
                    torch::autograd::grad({plain.left.sum() + plain.right.sum()}, {a, b}));
  CHECK(calls.count() == 2);

  // Inputs, not captures: a change is noticed at their unpack.
  out = checkpoint(fn, Pair{a, {b, c}, 5});
  c.add_(1);
  CHECK_THROWS_WITH(out.left.sum().backward(), contains("modified by an inplace operation"));
}

TEST_CASE("a chain of matmuls has the plain value and three plain grads", "[checkpoint]") {
  const auto fn = [](const Tensor& x, const Tensor& y, const Tensor& z) {
    return at::matmul(at::matmul(x, y), z);
  };
  Calls calls;
  require_same_grads(
      fn,
      [&](const Tensor& x, const Tensor& y, const Tensor& z) {
        return checkpoint(counted(calls, fn), x, y, z);
      },
      leaf({3, 4}), leaf({4, 5}), leaf({5, 2}));
  CHECK(calls.count() == 2);
}

TEST_CASE("an extra argument and an extra result of any type change nothing", "[checkpoint]") {
  const Seed seed;
  const bool requires_grad = GENERATE(true, false);
  const Tensor x = at::randn({20}).requires_grad_(requires_grad), weight = leaf({20});
  const auto with = [&](auto extra) {
    Calls calls;
    const auto fn = [&](const Tensor& t, decltype(extra) e) {
      calls();
      return std::make_tuple((t * weight).sin(), e);
    };
    require_same_grads(
        Parameters{{weight}}, [&](const Tensor& t) { return fn(t, extra); },
        [&](const Tensor& t) {
          auto result = checkpoint(fn, t, extra);
          static_assert(std::same_as<std::tuple_element_t<1, decltype(result)>, decltype(extra)>);
          return result;
        },
        x);
    CHECK(calls.count() == 3);
  };
  with(std::nullopt);
  with(2);
  with(true);
  with(std::make_tuple(std::nullopt, 2.5));
  with(std::make_tuple(std::nullopt, true, at::randn({20})));
}

TEST_CASE("mixed results keep their order and types", "[checkpoint]") {
  const Tensor x = leaf({2});
  auto result = checkpoint(
      [](const Tensor& t) { return std::make_tuple(1, t.sin(), std::string("s"), t.cos(), 2.5); },
      x);
  static_assert(
      std::same_as<decltype(result), std::tuple<int, Tensor, std::string, Tensor, double>>);
  CHECK(std::get<0>(result) == 1);
  CHECK(std::get<2>(result) == "s");
  CHECK(std::get<4>(result) == 2.5);
  (std::get<1>(result) * std::get<3>(result)).sum().backward();
  CHECK(at::allclose(x.grad(), (2 * x.detach()).cos()));
}

TEST_CASE("a tensor scale and a number offset are arguments alike", "[checkpoint]") {
  const auto fn = [](const Tensor& value, const Tensor& scale, double offset) {
    return value * scale + offset;
  };
  Calls calls;
  require_same_grads(
      [&](const Tensor& v, const Tensor& s) { return fn(v, s, 0.25); },
      [&](const Tensor& v, const Tensor& s) { return checkpoint(counted(calls, fn), v, s, 0.25); },
      leaf({3}), leaf({}));
  CHECK(calls.count() == 2);
}

TEST_CASE("meta tensors touch no generator and no device", "[checkpoint]") {
  const Tensor before = generator_state();
  const Tensor x = at::empty({2, 3}, at::TensorOptions().device(at::kMeta)).requires_grad_();
  Calls calls;
  const Tensor y = checkpoint(counted(calls, [](const Tensor& t) { return t.sin().exp(); }), x);
  CHECK(y.is_meta());
  y.sum().backward();
  CHECK(x.grad().is_meta());
  CHECK(x.grad().sizes() == x.sizes());
  CHECK(calls.count() == 2);
  CHECK(at::equal(generator_state(), before));
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

// ---- tensors inside containers (Rule 2) ------------------------------------------------------

namespace {

// Passes x, y inside `make(x, y)`; the function gets them back by `first` and `second`.
template <class Make, class First, class Second>
void check_container(Make make, First first, Second second) {
  const Seed seed;
  const Tensor x = leaf({3}), y = leaf({3});
  const auto fn = [&](auto& value) { return first(value).sin() * second(value) * first(value); };
  Calls calls;
  const auto region = [&](const auto& value) {
    return checkpoint(
        [&](auto own) {
          calls();
          return fn(own);
        },
        value);
  };
  require_same_grads([](const Tensor& a, const Tensor& b) { return a.sin() * b * a; },
                     [&](const Tensor& a, const Tensor& b) { return region(make(a, b)); }, x, y);
  CHECK(calls.count() == 2);

  // They are inputs: saved with their version, and kept by nothing else.
  for (const bool change_first : {true, false}) {
    Tensor a = x.detach().clone(), b = (y * 1).detach().requires_grad_() * 1;
    const Tensor out = region(make(a, b));
    (change_first ? a : b).add_(1);
    CHECK_THROWS_WITH(out.sum().backward(), contains("modified by an inplace operation"));
  }
}

}  // namespace

TEST_CASE("tensors in containers are inputs of the region", "[checkpoint][rule-2]") {
  using std::get;
  const auto at_0 = [](auto& v) -> Tensor { return v[0]; };
  const auto at_1 = [](auto& v) -> Tensor { return v[1]; };
  SECTION("vector") {
    check_container([](Tensor a, Tensor b) { return Tensors{a, b}; }, at_0, at_1);
  }
  SECTION("array") {
    check_container([](Tensor a, Tensor b) { return std::array{a, b}; }, at_0, at_1);
  }
  SECTION("pair") {
    check_container([](Tensor a, Tensor b) { return std::pair(a, b); },
                    [](auto& p) { return p.first; }, [](auto& p) { return p.second; });
  }
  SECTION("tuple with other things") {
    check_container([](Tensor a, Tensor b) { return std::tuple(1, a, std::string("x"), b); },
                    [](auto& t) { return get<1>(t); }, [](auto& t) { return get<3>(t); });
  }
  SECTION("vector of optionals") {
    check_container(
        [](Tensor a, Tensor b) { return std::vector<std::optional<Tensor>>{a, std::nullopt, b}; },
        [](auto& v) { return *v[0]; }, [](auto& v) { return *v[2]; });
  }
  SECTION("map") {
    check_container(
        [](Tensor a, Tensor b) { return std::map<std::string, Tensor>{{"a", a}, {"b", b}}; },
        [](auto& m) { return m.at("a"); }, [](auto& m) { return m.at("b"); });
  }
  SECTION("unordered_map") {
    check_container(
        [](Tensor a, Tensor b) {
          std::unordered_map<std::string, Tensor> m;
          for (int i = 0; i < 20; ++i) m["filler " + std::to_string(i)] = at::zeros({1});
          m["a"] = a;
          m["b"] = b;
          return m;
        },
        [](auto& m) { return m.at("a"); }, [](auto& m) { return m.at("b"); });
  }
  SECTION("c10::List") {
    check_container([](Tensor a, Tensor b) { return c10::List<Tensor>({a, b}); },
                    [](auto& l) -> Tensor { return l.get(0); },
                    [](auto& l) -> Tensor { return l.get(1); });
  }
  SECTION("c10::Dict") {
    check_container(
        [](Tensor a, Tensor b) {
          c10::Dict<std::string, Tensor> d;
          d.insert("a", a);
          d.insert("b", b);
          return d;
        },
        [](auto& d) { return d.at("a"); }, [](auto& d) { return d.at("b"); });
  }
  SECTION("containers in containers") {
    check_container(
        [](Tensor a, Tensor b) {
          std::map<int, std::vector<std::pair<int, std::optional<Tensor>>>> m;
          m[1] = {{0, a}, {1, std::nullopt}};
          m[2] = {{2, b}};
          return std::make_tuple(m, 5);
        },
        [](auto& t) { return *get<0>(t).at(1)[0].second; },
        [](auto& t) { return *get<0>(t).at(2)[0].second; });
  }
  SECTION("a user struct in a vector") {
    check_container([](Tensor a, Tensor b) { return std::vector<Pair>{{a, {}, 1}, {b, {a}, 2}}; },
                    [](auto& v) { return v[0].first; }, [](auto& v) { return v[1].first; });
  }
}

TEST_CASE("an undefined tensor among the arguments stays undefined", "[checkpoint][rule-2]") {
  const Tensor x = leaf({2});
  const Tensor y = checkpoint(
      [](const Tensor& t, const Tensor& nothing, const Tensors& list) {
        CHECK_FALSE(nothing.defined());
        CHECK(list.size() == 2);
        CHECK_FALSE(list[0].defined());
        return t.sin() * list[1];
      },
      x, Tensor(), Tensors{Tensor(), x});
  y.sum().backward();
  require_bit_equal({x.grad()}, grad_of(x.sin() * x, {x}));
}

TEST_CASE("a handle's contents are copied: later changes by its owner are not seen",
          "[checkpoint][rule-2]") {
  const Tensor x = leaf({2}), other = at::ones({2});
  c10::List<Tensor> list({x});
  c10::Dict<std::string, Tensor> dict;
  dict.insert("x", x);
  Calls calls;
  const Tensor y = checkpoint(
      [&](c10::List<Tensor> l, c10::Dict<std::string, Tensor> d) {
        calls();
        CHECK(l.size() == 1);
        return l.get(0).sin() * d.at("x");
      },
      list, dict);
  list.set(0, other);
  list.push_back(other);
  dict.insert_or_assign("x", other);
  y.sum().backward();
  CHECK(calls.count() == 2);
  require_bit_equal({x.grad()}, grad_of(x.sin() * x, {x}));
  CHECK(list.size() == 2);
  CHECK(list.get(0).is_same(other));
}

TEST_CASE("a tensor argument keeps requires_grad and leaf-ness in the recompute",
          "[checkpoint][rule-2]") {
  const Tensor leaf_input = leaf({2}), frozen = at::randn({2}), inner = leaf({2}) * 2;
  std::vector<std::vector<bool>> seen;
  const Tensor y = checkpoint(
      [&](const Tensor& a, const Tensor& b, const Tensor& c) {
        seen.push_back({a.requires_grad(), a.is_leaf(), b.requires_grad(), b.is_leaf(),
                        c.requires_grad(), c.is_leaf()});
        return a.sin() * b * c;
      },
      leaf_input, frozen, inner);
  y.sum().backward();
  REQUIRE(seen.size() == 2);
  CHECK(seen[0] == std::vector<bool>{true, true, false, true, true, false});
  CHECK(seen[1] == seen[0]);
}
