// Rule 2: a region's tensor arguments are saved before its own hook is active, as its parent's
// saves.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <map>
#include <unordered_map>

#include "tests/support/support.h"

namespace {

// ---- what a recompute gets -------------------------------------------------------------------

TEST_CASE("an input that does not require grad comes back as the same object", "[rule-2]") {
  const Tensor x = leaf({3});
  const Tensor constant = at::randn({3});
  std::vector<const c10::TensorImpl*> seen;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& a, const Tensor& b) {
        seen.push_back(b.unsafeGetTensorImpl());
        return (a * b).sin();
      },
      x, constant);
  require_bit_equal(grad_of(y, {x}), grad_of((x * constant).sin(), {x}));
  REQUIRE(seen.size() == 2);
  CHECK(seen[0] == constant.unsafeGetTensorImpl());
  CHECK(seen[1] == constant.unsafeGetTensorImpl());
}

TEST_CASE("an input that requires grad comes back as an alias without its history", "[rule-2]") {
  const bool is_leaf = GENERATE(true, false);
  CAPTURE(is_leaf);
  const Tensor base = leaf({3, 4});
  const Tensor x = is_leaf ? base : (base * 2).t();
  struct Seen {
    bool requires_grad, is_leaf, has_history;
    const void* data;
    int64_t version;
    std::vector<int64_t> strides;
  };
  std::vector<Seen> seen;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const NodePtr history = is_leaf ? nullptr : base.sum().grad_fn();
        bool reaches_base = false;
        for (const NodePtr& node : nodes_below(t)) {
          reaches_base = reaches_base || node->name().find("MulBackward") != std::string::npos;
        }
        seen.push_back({t.requires_grad(), t.is_leaf(), reaches_base, t.const_data_ptr(),
                        t._version(), t.strides().vec()});
        return t.sin();
      },
      x);
  require_bit_equal(grad_of(y, {base}), grad_of(x.sin(), {base}));
  REQUIRE(seen.size() == 2);
  for (const Seen& s : seen) {
    CHECK(s.requires_grad);
    CHECK(s.is_leaf == is_leaf);
    CHECK(s.data == x.const_data_ptr());
    CHECK(s.version == x._version());
    CHECK(s.strides == x.strides().vec());
  }
  CHECK(seen[0].has_history == !is_leaf);
  CHECK_FALSE(seen[1].has_history);
}

TEST_CASE("an alias shares the version counter of the input it stands for", "[rule-2]") {
  const Tensor x = leaf({3});
  std::vector<int64_t> seen;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const int64_t before = t._version();
        seen.push_back(before - x._version());
        return t.sin();
      },
      x);
  Tensor bumped = x.detach();
  bumped.add_(0);
  CHECK_THROWS_WITH(grad_of(y, {x}), contains("modified by an inplace operation"));
  CHECK(seen == std::vector<int64_t>{0});
}

TEST_CASE("an input that is a non-contiguous, expanded or offset view comes back as it was",
          "[rule-2]") {
  const Tensor base = leaf({4, 6});
  const std::vector<Tensor> views{base.t(), base.slice(1, 1, 6, 2),
                                  base.narrow(1, 2, 1).expand({4, 6}), base.narrow(0, 2, 2),
                                  base.select(1, 3)};
  for (size_t i = 0; i < views.size(); ++i) {
    CAPTURE(i);
    std::vector<std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>> seen;
    auto f = [&](const Tensor& t) {
      seen.emplace_back(t.sizes().vec(), t.strides().vec(), t.storage_offset());
      return t.sin().exp();
    };
    const Tensors plain = grad_of(f(views[i]), {base}, {.retain_graph = true});
    require_bit_equal(grad_of(remat::checkpoint(f, views[i]), {base}, {.retain_graph = true}),
                      plain);
    REQUIRE(seen.size() == 3);
    CHECK(seen[1] == seen[0]);
    CHECK(seen[2] == seen[0]);
  }
}

TEST_CASE("every run gets fresh arguments, whatever the function does to them", "[rule-2]") {
  const Tensor x = leaf({3}), z = leaf({3});
  Calls calls;
  auto f = [&](std::vector<Tensor>&& list, std::map<std::string, Tensor> named, std::string text) {
    calls();
    REQUIRE(list.size() == 2);
    REQUIRE(named.size() == 1);
    REQUIRE(text == "as given");
    const std::vector<Tensor> taken = std::move(list);
    const Tensor product = taken[0].sin() * taken[1].exp() * named.at("w");
    list.clear();
    named.clear();
    text += ", and changed";
    return product;
  };
  const std::map<std::string, Tensor> named{{"w", at::randn({3})}};
  const Tensors plain = grad_of(f({x, z}, named, "as given"), {x, z});
  calls.reset();
  const Tensor y = remat::checkpoint(f, std::vector<Tensor>{x, z}, named, std::string("as given"));
  for (int i = 0; i < 3; ++i) {
    require_bit_equal(grad_of(y, {x, z}, {.retain_graph = true}), plain);
  }
  CHECK(calls.count() == 4);
}

TEST_CASE("one tensor passed twice, and an output fed to a region again, are inputs like others",
          "[rule-2]") {
  const Tensor x = leaf({3, 3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& a, const Tensor& b) { return a.mm(b).sin(); });
  require_same_grads([&](const Tensor& t) { return f(t, t); },
                     [&](const Tensor& t) { return remat::checkpoint(f, t, t); }, x);
  require_same_grads([&](const Tensor& t) { return f(f(t, t), t); },
                     [&](const Tensor& t) {
                       const Tensor once = remat::checkpoint(f, t, t);
                       return remat::checkpoint(f, once, t);
                     },
                     x);
  CHECK(calls.count() == 1 + 2 + 2 + 4);
}

TEST_CASE("two arguments that are one tensor are one tensor in the recompute too",
          "[rule-2][rule-6]") {
  // A gradient taken inside with respect to the first sees the uses of the second.
  const bool is_leaf = GENERATE(true, false);
  const bool nested = GENERATE(true, false);
  CAPTURE(is_leaf, nested);
  const Tensor base = leaf({3});
  const Tensor x = is_leaf ? base : base * 2;
  auto f = [](const Tensor& a, const std::vector<Tensor>& list) {
    const Tensor y = a * list[0] * list[1].sin();
    return a * grad_of(y, {a}, {.create_graph = true})[0];
  };
  auto f_of = [&](const Tensor& t) { return f(t, {t, t}); };
  auto region = [&](const Tensor& t) { return remat::checkpoint(f, t, std::vector<Tensor>{t, t}); };
  const Tensors plain = grad_of(nested ? f_of(x).exp() : f_of(x), {base}, {.retain_graph = true});
  Tensor y = region(x);
  if (nested) y = remat::checkpoint([&](const Tensor& t) { return region(t).exp(); }, x);
  require_bit_equal({grad_of(y, {base}, {.retain_graph = true})[0]}, plain);
}

/// A handle: its copies share their tensor.
struct Handle {
  std::shared_ptr<Tensor> shared;
};
template <class Visitor>
void visit_tensors(Handle& handle, Visitor&& visit) {
  visit(*handle.shared);
}

TEST_CASE("an argument whose copies share its tensors keeps them, used or refused", "[rule-2]") {
  const Tensor x = leaf({3});
  const Handle handle{std::make_shared<Tensor>(x)};
  try {
    const Tensor y =
        remat::checkpoint([](const Handle& h) { return h.shared->sin().exp(); }, handle);
    for (int i = 0; i < 2; ++i) {
      require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), grad_of(x.sin().exp(), {x}));
    }
  } catch (const remat::CheckpointError& e) {
    CHECK(e.kind() == remat::CheckpointError::Kind::Unsupported);
  }
  REQUIRE(handle.shared->defined());
  CHECK(handle.shared->is_same(x));
}

// ---- versions --------------------------------------------------------------------------------

TEST_CASE("an argument changed in place between forward and backward raises", "[rule-2]") {
  const bool requires_grad = GENERATE(true, false);
  CAPTURE(requires_grad);
  const Tensor w = leaf({3});
  Tensor x = at::randn({3}).requires_grad_(requires_grad);
  Calls calls;
  const Tensor y =
      remat::checkpoint(counted(calls, [&](const Tensor& t) { return (t * w).sin(); }), x);
  {
    at::NoGradGuard no_grad;
    x.add_(1);
  }
  CHECK_THROWS_WITH(grad_of(y, {w}, {.retain_graph = true}),
                    contains("modified by an inplace operation"));
  CHECK(calls.count() == 1);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("an argument of a nested region that its parent recomputes may change between the passes",
          "[rule-2]") {
  const Tensor x = leaf({3});
  Calls outer_calls, inner_calls;
  Tensor kept;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        outer_calls();
        const Tensor h = t * 2;
        if (!remat::is_recomputing()) kept = h;
        return remat::checkpoint(counted(inner_calls, [](const Tensor& u) { return u.sin(); }), h);
      },
      x);
  {
    at::NoGradGuard no_grad;
    kept.add_(5);
  }
  require_bit_equal(grad_of(y, {x}), grad_of((x * 2).sin(), {x}));
  CHECK(outer_calls.count() == 2);
  CHECK(inner_calls.count() >= 2);
}

TEST_CASE("a view without grad mode of an argument that is a view claims what it does in forward",
          "[rule-2][rule-10]") {
  // fuzz_selective_116552. LibTorch: such a view requires grad if what it views does, and has no
  // node.
  const Tensor x = leaf({2}), w = leaf({1, 1});
  std::vector<bool> claims;
  const auto f = [&](const Tensor& t) {
    Tensor view;
    {
      const at::NoGradGuard no_grad;
      view = t.view({1, 1});
    }
    claims.push_back(view.requires_grad());
    return at::linear(view, w, t.view({1})).exp();
  };
  const auto on_view = [&](auto call) {
    return [call](const Tensor& t) { return call((t * 2).unbind()[0]); };
  };
  require_same_grads(on_view(f), on_view([&](const Tensor& t) { return remat::checkpoint(f, t); }),
                     x);
  CHECK(claims.size() >= 3);
  CHECK(std::count(claims.begin(), claims.end(), true) == static_cast<int64_t>(claims.size()));
}

TEST_CASE("a region that changes its input in place raises or gives the true gradient",
          "[rule-2][rule-10]") {
  // The recompute would change it a second time.
  const bool early_stop = GENERATE(true, false);
  const bool nested = GENERATE(true, false);
  CAPTURE(early_stop, nested);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({3});
  auto inner = [](Tensor t) {
    t.mul_(3);
    return t.sin();
  };
  const Tensors plain = grad_of(inner(x * 2), {x});
  auto outer = [&](const Tensor& t) { return remat::checkpoint(inner, t * 2).exp(); };
  const Tensors plain_nested = grad_of(inner(x * 2).exp(), {x});
  const Tensor y = nested ? remat::checkpoint(outer, x) : remat::checkpoint(inner, x * 2);
  Tensors grads;
  try {
    grads = grad_of(y, {x});
  } catch (const c10::Error& e) {
    CHECK_THAT(text_of(e), contains("modified by an inplace operation"));
  }
  if (!grads.empty()) require_bit_equal(grads, nested ? plain_nested : plain);
}

TEST_CASE("a view of a leaf made under no-grad keeps its role in a nested region", "[rule-2]") {
  // It claims to require grad, as its base does, but no gradient reaches the base through it.
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor w = leaf({4});
  Calls calls;
  auto f = [&](const Tensor& t, bool nest) {
    Tensor view;
    {
      at::NoGradGuard no_grad;
      view = w.view({2, 2});
    }
    auto inner = [](const Tensor& u, const Tensor& v) { return (u * v).sin() * v; };
    const Tensor h = t.cos().view({2, 2});
    return nest ? remat::checkpoint(counted(calls, inner), h, view) : inner(h, view);
  };
  const Tensor x = leaf({4});
  const Tensors plain = grad_of(f(x, false) * w.view({2, 2}), {x, w});
  const Tensor y =
      remat::checkpoint([&](const Tensor& t) { return f(t, true) * w.view({2, 2}); }, x);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), plain);
  CHECK(calls.count() >= 3);
}

TEST_CASE("a view of a leaf made under no-grad keeps its strides in a nested region", "[rule-2]") {
  // The same holds for a dimension of one element, whose stride means nothing: Layout compares it.
  const remat::CheckpointOptions options{.determinism_check = remat::DeterminismCheck::Layout};
  const Tensor w = leaf({3, 1, 3});
  Tensor view;
  {
    at::NoGradGuard no_grad;
    view = w.transpose(0, 1);
  }
  REQUIRE(view.strides() == at::IntArrayRef({3, 3, 1}));
  std::vector<std::vector<int64_t>> seen;
  const auto inner = [&](const Tensor& t, const Tensor& v) {
    seen.push_back(v.strides().vec());
    return (t * v.sin()).cos();
  };
  const auto outer = [&](const Tensor& t, const Tensor& v) {
    return remat::checkpoint(options, inner, t, v);
  };
  const Tensor x = leaf({1, 3, 3});
  const Tensors plain = grad_of((x * view.sin()).cos(), {x});
  require_bit_equal(grad_of(remat::checkpoint(options, outer, x, view), {x}), plain);
  CHECK(seen.size() >= 2);
  for (const auto& strides : seen) CHECK(strides == std::vector<int64_t>{3, 3, 1});
}

TEST_CASE("an input of a nested region that its parent changes in place later is never misread",
          "[rule-2][rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({3});
  const Tensor y = remat::checkpoint(
      [](const Tensor& t) {
        Tensor h = t * 2;
        const Tensor s = remat::checkpoint([](const Tensor& u) { return u.sin(); }, h);
        h.mul_(7);
        return s + h.exp();
      },
      x);
  Tensors grads;
  try {
    grads = grad_of(y, {x});
  } catch (const c10::Error& e) {
    CHECK_THAT(text_of(e), contains("modified by an inplace operation"));
  }
  if (!grads.empty()) {
    const Tensor h = x * 2;
    require_bit_equal(grads, grad_of(h.sin() + (h * 7).exp(), {x}));
  }
}

// ---- order of tensors in containers -------------------------------------------------------------

TEST_CASE("the tensors of a hash map come back under their own keys", "[rule-2]") {
  constexpr int count = 60;
  std::unordered_map<std::string, Tensor> named;
  c10::Dict<std::string, Tensor> dict;
  Tensors leaves;
  for (int i = 0; i < count; ++i) {
    const std::string key = "tensor " + std::to_string(i * 7919 % 1000);
    leaves.push_back(leaf({i % 5 + 1}));
    named.insert({key, leaves.back()});
    dict.insert(key, leaves.back());
  }
  named.rehash(512);
  // The factor of each tensor depends on its key: a permutation of equal shapes would show.
  auto f = [](const std::unordered_map<std::string, Tensor>& map,
              const c10::Dict<std::string, Tensor>& handle) {
    Tensor sum = at::zeros({});
    for (int i = 0; i < count; ++i) {
      const std::string key = "tensor " + std::to_string(i * 7919 % 1000);
      sum = sum + (map.at(key).sin() * (i + 1) + handle.at(key).exp() * at::scalar_tensor(i)).sum();
    }
    return sum;
  };
  Calls calls;
  const Tensors plain = grad_of(f(named, dict), leaves);
  const Tensor y = remat::checkpoint(counted(calls, f), named, dict);
  named.clear();
  dict.clear();
  for (int i = 0; i < 2; ++i) {
    require_bit_equal(grad_of(y, leaves, {.retain_graph = true}), plain);
  }
  CHECK(calls.count() == 3);
}

TEST_CASE("a handle argument changed by its owner after forward does not change the recompute",
          "[rule-2]") {
  const Tensor x = leaf({3}), other = leaf({3});
  c10::List<Tensor> list({x, x});
  const Tensor y =
      remat::checkpoint([](const c10::List<Tensor>& v) { return v.get(0).sin() * v.get(1); }, list);
  list.set(0, other);
  list.push_back(other);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin() * x, {x}));
}

TEST_CASE("undefined and absent tensors among the arguments stay what they are", "[rule-2]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t, const Tensor& none, const std::optional<Tensor>& gone,
                             const std::vector<Tensor>& list) {
    REQUIRE(t.defined());
    REQUIRE_FALSE(none.defined());
    REQUIRE_FALSE(gone.has_value());
    REQUIRE(list.size() == 3);
    REQUIRE_FALSE(list[0].defined());
    REQUIRE_FALSE(list[2].defined());
    return t.sin() * list[1];
  });
  const Tensor y = remat::checkpoint(f, x, Tensor(), std::optional<Tensor>(),
                                     std::vector<Tensor>{Tensor(), x, Tensor()});
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin() * x, {x}));
  CHECK(calls.count() == 2);
}

TEST_CASE("a tensor passed by std::ref is the caller's own, not an input", "[rule-2]") {
  Tensor x = leaf({3});
  std::vector<const Tensor*> seen;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        seen.push_back(&t);
        return t.sin();
      },
      std::ref(x));
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin(), {x}));
  CHECK(seen == std::vector<const Tensor*>{&x, &x});
}

TEST_CASE("sizes, tensor lists and text that only refer to their elements are kept as copies",
          "[rule-2]") {
  const Tensor x = leaf({2, 3});
  Tensor y;
  {
    const Tensor shape = at::ones({3, 2});
    const std::vector<Tensor> list{x, x.sin()};
    const std::string text = "a text that is longer than what a string keeps inside itself";
    auto f = [](at::TensorList tensors, at::IntArrayRef sizes, std::string_view view) {
      return (tensors[0] * tensors[1]).view(sizes).sin() * static_cast<double>(view.size());
    };
    y = remat::checkpoint(f, at::TensorList(list), shape.sizes(), std::string_view(text));
    const remat::DisableCheckpointGuard plain;
    require_bit_equal(
        {y}, {remat::checkpoint(f, at::TensorList(list), shape.sizes(), std::string_view(text))});
  }
  const auto reused = std::make_unique<std::array<int64_t, 2>>();  // memory that went free
  const Tensor expected = (x * x.sin()).view({3, 2}).sin() * 60.0;
  require_bit_equal({y}, {expected});
  require_bit_equal(grad_of(y, {x}), grad_of(expected, {x}));
}

}  // namespace
