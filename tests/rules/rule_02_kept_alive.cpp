// Rule 2: what a region keeps alive of its inputs, and what it keeps of them under another region.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <torch/ordered_dict.h>

#include <array>
#include <map>
#include <unordered_map>
#include <variant>

#include "tests/support/sizes.h"
#include "tests/support/support.h"

namespace {

// ---- what an input keeps alive ----------------------------------------------------------------

TEST_CASE("a region keeps its input's bytes but not the graph above it", "[rule-2]") {
  const Tensor x = leaf({tensor_side, tensor_side}), w = leaf({tensor_side, tensor_side});
  LiveBytes bytes;
  Tensor h = x.exp();
  const WeakGraph above(Tensors{h});
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return (t.detach() * w).sin(); }, h);
  const Tensor expected = h.detach();
  h = Tensor();
  CHECK(above.alive() == 0);
  CHECK(bytes.held() == 2 * tensor_bytes);  // the input and the output
  require_bit_equal(grad_of(y, {w}), grad_of((expected * w).sin(), {w}));
}

TEST_CASE("a long chain of regions that use their input detached keeps no graph and dies flat",
          "[rule-2][rule-13]") {
  constexpr int length = 50000;
  const Tensor w = leaf_of(1.0);
  Tensor t = leaf_of(1.0);
  Counted done;
  for (int i = 0; i < length; ++i) {
    t = remat::checkpoint([&](const Tensor& u) { return u.detach() * w; }, t);
  }
  CHECK(done.now().frames_created == length);
  CHECK(remat::counters().frames_alive == 1);
  require_bit_equal(grad_of(t * 2, {w}), {at::scalar_tensor(2.0)});
  t = Tensor();
  CHECK(remat::counters().frames_alive == 0);
}

// ---- nested regions keep nothing of their inputs

struct Pair {
  Tensor first, second;
  int tag = 0;
};
template <class Visitor>
void visit_tensors(Pair& pair, Visitor&& visit) {
  visit(pair.first);
  visit(pair.second);
}

struct Opaque {
  Tensor hidden;
};

/// [bytes] held after forward by four regions in one, each fed through `wrap`; checks the grads.
template <class Wrap, class Unwrap>
int64_t held_by_nested(Wrap wrap, Unwrap unwrap, int64_t expected_calls = 2) {
  const Tensor x = leaf({tensor_side, tensor_side});
  Calls outer_calls;
  auto chain = [&](Tensor t, bool nest) {
    for (int i = 0; i < 4; ++i) {
      auto inner = [unwrap](auto value) { return unwrap(value).sin(); };
      t = nest ? remat::checkpoint(inner, wrap(t)) : inner(wrap(t));
    }
    return t;
  };
  const Tensors plain = grad_of(chain(x, false), {x});
  LiveBytes bytes;
  const Tensor y =
      remat::checkpoint(counted(outer_calls, [&](const Tensor& t) { return chain(t, true); }), x);
  const int64_t held = bytes.held();
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(outer_calls.count() == expected_calls);
  return held - tensor_bytes;  // without the output
}

TEST_CASE("nested regions keep none of the tensors in their arguments", "[rule-2]") {
  using Key = std::string;
  CHECK(held_by_nested([](Tensor t) { return t; }, [](Tensor t) { return t; }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::vector<Tensor>{t, t}; },
                       [](const auto& v) { return v[0] + v[1]; }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::optional<Tensor>(t); },
                       [](const auto& v) { return *v; }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::array<Tensor, 2>{t, t}; },
                       [](const auto& v) { return v[0] * v[1]; }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::tuple(1, t, std::pair(t, 2.0)); },
                       [](const auto& v) {
                         return std::get<1>(v) + std::get<2>(v).first * std::get<2>(v).second;
                       }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::map<Key, Tensor>{{"a", t}, {"b", t}}; },
                       [](const auto& v) { return v.at("a") + v.at("b"); }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::unordered_map<Key, Tensor>{{"a", t}, {"b", t}}; },
                       [](const auto& v) { return v.at("a") * v.at("b"); }) == 0);
  CHECK(held_by_nested(
            [](Tensor t) {
              return std::map<int, std::vector<std::optional<Tensor>>>{{1, {t, std::nullopt}}};
            },
            [](const auto& v) { return *v.at(1)[0]; }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::variant<int, Tensor>(t); },
                       [](const auto& v) { return std::get<Tensor>(v); }) == 0);
  CHECK(held_by_nested([](Tensor t) { return Pair{t, t, 3}; },
                       [](const Pair& v) { return v.first + v.second * v.tag; }) == 0);
  CHECK(held_by_nested([](Tensor t) { return std::vector<Pair>{{t, t, 3}}; },
                       [](const auto& v) { return v[0].first + v[0].second * v[0].tag; }) == 0);
}

TEST_CASE("nested regions keep none of the tensors in LibTorch's handles", "[rule-2]") {
  using Key = std::string;
  CHECK(held_by_nested([](Tensor t) { return c10::List<Tensor>({t, t}); },
                       [](const auto& v) { return v.get(0) + v.get(1); }) == 0);
  CHECK(held_by_nested(
            [](Tensor t) {
              c10::Dict<Key, Tensor> dict;
              dict.insert("a", t);
              dict.insert("b", t);
              return dict;
            },
            [](const auto& v) { return v.at("a") * v.at("b"); }) == 0);
  CHECK(held_by_nested(
            [](Tensor t) {
              torch::OrderedDict<Key, Tensor> dict;
              dict.insert("a", t);
              return dict;
            },
            [](const auto& v) { return v["a"]; }) == 0);
}

TEST_CASE("a tensor hidden in an opaque argument is copied, works, and stays alive", "[rule-2]") {
  // The outer region saves nothing then, so it is not recomputed at all.
  CHECK(held_by_nested([](Tensor t) { return Opaque{t}; }, [](const Opaque& v) { return v.hidden; },
                       /*expected_calls=*/1) > 0);
}

TEST_CASE("parents recompute first, outermost first, each once", "[rule-2]") {
  std::vector<std::string> log;
  auto note = [&](const std::string& name) {
    if (remat::current_phase().phase == remat::Phase::Recompute) log.push_back(name);
  };
  const Tensor x = leaf({3});
  Counted done;
  const Tensor y = remat::checkpoint(
      {.name = "outer"},
      [&](const Tensor& a) {
        note("outer");
        return remat::checkpoint(
            {.name = "middle"},
            [&](const Tensor& b) {
              note("middle");
              return remat::checkpoint(
                  {.name = "inner"},
                  [&](const Tensor& c) {
                    note("inner");
                    return c.sin();
                  },
                  b * 3);
            },
            a * 2);
      },
      x);
  require_bit_equal(grad_of(y, {x}), grad_of(((x * 2) * 3).sin(), {x}));
  CHECK(log == std::vector<std::string>{"outer", "middle", "inner"});
  CHECK(done.now().recomputes == 3);
}

}  // namespace
