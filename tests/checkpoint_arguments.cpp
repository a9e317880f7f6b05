// checkpoint(): arguments and results of every kind, alone and in containers.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <array>
#include <string>
#include <unordered_map>

#include "tests/support/functions.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::EarlyStopGuard;

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
