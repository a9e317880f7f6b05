// Rule 10: a captured tensor that a region computes with and that nothing saves raises if it
// changed and was reached.

#include "tests/support/support.h"

namespace {

using Kind = remat::CheckpointError::Kind;
using remat::CheckpointError;

void add_one(const Tensor& t) {
  at::NoGradGuard no_grad;
  t.add_(1);
}

/// Returns what a backward through a region of `f` threw after `change`.
template <class F, class Change>
CheckpointError error_after(F f, const Tensor& x, Change change,
                            remat::CheckpointOptions options = {}) {
  const Tensor y = remat::checkpoint(options, f, x);
  change();
  return mismatch_of(y, x);
}

TEST_CASE("a captured tensor that nothing saves and that changed raises where it was used",
          "[rule-10]") {
  using Use = std::function<Tensor(const Tensor& x, const Tensor& b)>;
  const std::vector<std::pair<const char*, Use>> uses{
      {"added", [](const Tensor& x, const Tensor& b) { return (x + b).sin(); }},
      {"added in place", [](const Tensor& x, const Tensor& b) { return x.clone().add_(b).sin(); }},
      {"subtracted, then far away",
       [](const Tensor& x, const Tensor& b) { return (x - b).view(-1).clone().neg().exp(); }},
      {"a view of it", [](const Tensor& x, const Tensor& b) { return (x + b[1]).sin(); }},
      {"in a sum with what is saved",
       [](const Tensor& x, const Tensor& b) { return x.sin() * (x + b).relu(); }},
      {"saved is the result", [](const Tensor& x, const Tensor& b) { return (x + b).sigmoid(); }},
      {"in the list of an operator",
       [](const Tensor& x, const Tensor& b) { return at::cat({x, b}).sin(); }},
      {"in a region inside",
       [](const Tensor& x, const Tensor& b) {
         return remat::checkpoint([&b](const Tensor& t) { return (t + b).sin(); }, x + 1);
       }},
      {"before a region inside",
       [](const Tensor& x, const Tensor& b) {
         return remat::checkpoint([](const Tensor& t) { return t.sin().sin(); }, x + b);
       }},
      {"in a Function",
       [](const Tensor& x, const Tensor& b) {
         struct Sum : torch::autograd::Function<Sum> {
           static Tensor forward(torch::autograd::AutogradContext*, const Tensor& u,
                                 const Tensor& v) {
             return u + v;
           }
           static Tensors backward(torch::autograd::AutogradContext*, const Tensors& g) {
             return {g[0], g[0]};
           }
         };
         return Sum::apply(x, b).sin();
       }},
  };
  using Make = std::function<Tensor()>;
  const std::vector<std::pair<const char*, Make>> kinds{
      {"parameter", [] { return leaf({3, 3}); }},
      {"without grad", [] { return at::randn({3, 3}); }},
      {"with a history", [] { return leaf({3, 3}) * 2; }},
      {"a view", [] { return at::randn({6, 3}).narrow(0, 2, 3); }},
  };
  using Change = std::function<void(Tensor&)>;
  const std::vector<std::pair<const char*, Change>> changes{
      {"in place", [](Tensor& b) { add_one(b); }},
      {"through a view",
       [](Tensor& b) {
         at::NoGradGuard no_grad;
         b.select(0, 1).zero_();
       }},
  };
  const bool early_stop = GENERATE(true, false);
  for (const auto& [how, use] : uses)
    for (const auto& [kind, make] : kinds)
      for (const auto& [what, change] : changes) {
        CAPTURE(how, kind, what, early_stop);
        const Tensor x = leaf({3, 3});
        Tensor b = make();
        const auto f = [&](const Tensor& t) { return use(t, b); };
        require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), grad_of(f(x), {x}));
        Calls calls;
        const CheckpointError error = error_after(counted(calls, f), x, [&] { change(b); },
                                                  {.name = "head", .early_stop = early_stop});
        CHECK(error.kind() == Kind::CaptureChanged);
        CHECK_THAT(text_of(error), contains("captured tensor"));
        CHECK_THAT(text_of(error), contains(", version "));
        CHECK(error.mismatches().size() == 1);
        CHECK(calls.count() == 2);
      }
}

TEST_CASE("an operator that saves its own result of a changed capture alone raises", "[rule-10]") {
  const Tensor x = leaf({3});
  const Tensor gate = leaf({3}), mix = leaf({3});
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return t + gate.sigmoid(); }, x);
  const Tensor z = remat::checkpoint([&](const Tensor& t) { return t.sin() + mix.softmax(0); }, x);
  add_one(gate);
  add_one(mix);
  CHECK(mismatch_of(y, gate).kind() == Kind::CaptureChanged);
  CHECK(mismatch_of(z, mix).kind() == Kind::CaptureChanged);
}

TEST_CASE("a captured parameter that nothing saves and that is given other data raises",
          "[rule-10]") {
  const Tensor x = leaf({3});
  Tensor bias = leaf({3});
  const auto f = [&](const Tensor& t) { return (t + bias).sin(); };
  const CheckpointError error = error_after(f, x, [&] { bias.set_data(at::randn({3})); });
  CHECK(error.kind() == Kind::CaptureChanged);
  CHECK(error.mismatches().at(0).position == -1);
  CHECK_THAT(text_of(error), contains("captured tensor that the region does not save"));
  CHECK_THAT(text_of(error), contains("other storage"));
  CHECK(error_after(f, x, [&] { bias.set_data(bias.data().clone()); }).kind() ==
        Kind::CaptureChanged);
}

TEST_CASE(
    "an argument that is captured, too, raises where the region has a copy of it and reads the "
    "other",
    "[rule-10][rule-2]") {
  remat::CheckpointOptions copies;
  copies.inputs = remat::InputMode::CopyOnWrite;
  struct Around {
    bool has_hooks;
    remat::CheckpointOptions options;
  };
  for (const Around& around : {Around{false, copies}, Around{true, {}}}) {
    const Tensor x = leaf({3});
    const auto run = [&](bool reads_capture, const auto& change) {
      Tensor z = x * 1;
      const auto f = [z, reads_capture](const Tensor& t) {
        return ((reads_capture ? z : t) + 1).sin() * t;
      };
      const Tensor plain = grad_of(f(z), {x})[0];
      Tensor y;
      {
        std::optional<remat::SavedTensorHooksGuard> hooks;
        if (around.has_hooks)
          hooks.emplace([](const Tensor& t) { return t.clone(); },
                        [](const Tensor& t) { return t; });
        y = remat::checkpoint(around.options, f, z);
      }
      change(z);
      return std::pair(y, plain);
    };
    const auto write = [](Tensor& z) { add_one(z); };
    const auto give_data = [](Tensor& z) { z.set_data(at::randn({3})); };
    CHECK(mismatch_of(run(true, write).first, x).kind() == Kind::CaptureChanged);
    CHECK(mismatch_of(run(true, give_data).first, x).kind() == Kind::CaptureChanged);
    // The copy has the values of forward.
    const auto [of_copy, plain] = run(false, write);
    require_bit_equal(grad_of(of_copy, {x}), {plain});
  }
}

TEST_CASE("a leaf that was written to and has its contents again is the argument that it was",
          "[rule-10][rule-2]") {
  const Tensor x = leaf({3});
  Calls calls;
  remat::CheckpointOptions copies;
  copies.inputs = remat::InputMode::CopyOnWrite;
  const Tensor y =
      remat::checkpoint(copies, counted(calls, [](const Tensor& t) { return (t + 1).sin(); }), x);
  {
    const at::NoGradGuard no_grad;
    x.neg_().neg_();
  }
  require_bit_equal(grad_of(y, {x}), {(x + 1).cos().detach()});
  CHECK(calls.count() == 2);
}

TEST_CASE("the first layer's weight that changed raises though only its argument was saved",
          "[rule-10]") {
  // The argument needs no gradient, so `mm` saves it alone; what follows depends on the weight.
  const Tensor x = at::randn({2, 3});
  const Tensor w = leaf({3, 4}), v = leaf({4, 2});
  const auto f = [&](const Tensor& t) { return t.mm(w).relu().mm(v); };
  const Tensor y = remat::checkpoint(f, x);
  add_one(w);
  CHECK(mismatch_of(y, w).kind() == Kind::CaptureChanged);
}

TEST_CASE("a changed capture on which nothing that is saved depends raises nothing", "[rule-10]") {
  const Tensor x = at::randn({2, 3});
  const Tensor w = leaf({3, 4}), v = leaf({3, 4}), z = leaf({2, 4});
  Calls calls;
  const auto check = [&](auto f, const Tensors& of, const Tensor& changed) {
    calls.reset();
    const Tensors plain = grad_of(f(x), of);
    calls.reset();
    const Tensor y = remat::checkpoint(counted(calls, f), x);
    add_one(changed);
    require_bit_equal(grad_of(y, of), plain);
    CHECK(calls.count() == 2);
  };
  // Plain autograd saves the argument only, once for each.
  check([&](const Tensor& t) { return at::cat({t.mm(w), t.mm(v)}); }, {w, v}, w);
  // A branch that comes later, of another tensor.
  check([&](const Tensor& t) { return t.mm(w) + z.sin(); }, {w, z}, w);
  check([&](const Tensor& t) { return t.mm(w).add_(z).neg() + z.exp(); }, {w, z}, w);
  check([&](const Tensor& t) { return t.mm(w) + z; }, {w, z}, z);
}

TEST_CASE("a capture that the function writes itself before it computes with it raises nothing",
          "[rule-10]") {
  const Tensor x = leaf({3});
  Tensor scratch = at::zeros({3});
  const auto f = [&](const Tensor& t) {
    scratch.copy_(t.detach() * 2);
    return (t + scratch).sin();
  };
  const Tensors plain = grad_of(f(x), {x});
  const Tensor y = remat::checkpoint(f, x);
  scratch.zero_();
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("a capture that the function updates after it computed with it raises", "[rule-10]") {
  // Else the recompute would compute with another state than forward.
  const Tensor x = leaf({3});
  Tensor mean = at::zeros({3});
  const auto f = [&](const Tensor& t) {
    Tensor y = (t - mean).sin();
    at::NoGradGuard no_grad;
    mean.lerp_(t, 0.1);
    return y;
  };
  CHECK(mismatch_of(remat::checkpoint(f, x), x).kind() == Kind::CaptureChanged);
}

TEST_CASE("results that a policy kept do not depend on what changed since", "[rule-10][rule-15]") {
  const Tensor x = leaf({3});
  const Tensor bias = leaf({3});
  const auto f = [&](const Tensor& t) { return (t + bias).sin(); };
  const Tensors plain = grad_of(f(x), {x});
  const Tensor y = remat::checkpoint({.policy = remat::save_ops({"aten::add.Tensor"})}, f, x);
  const Tensor pinned =
      remat::checkpoint([&](const Tensor& t) { return remat::pin(t + bias).sin(); }, x);
  const Tensor region = remat::checkpoint(
      [&](const Tensor& t) {
        return remat::save_region([&](const Tensor& u) { return u + bias; }, t).sin();
      },
      x);
  const Tensor other = remat::checkpoint({.policy = remat::save_ops({"aten::mm"})}, f, x);
  add_one(bias);
  require_bit_equal(grad_of(y, {x}), plain);
  require_bit_equal(grad_of(pinned, {x}), plain);
  require_bit_equal(grad_of(region, {x}), plain);
  CHECK(mismatch_of(other, x).kind() == Kind::CaptureChanged);
}

TEST_CASE("with the capture check off a recompute computes with what nothing saved as it is now",
          "[rule-10]") {
  const Tensor x = leaf({3});
  const Tensor bias = leaf({3});
  const auto f = [&](const Tensor& t) { return (t + bias).sin(); };
  const Tensor y = remat::checkpoint({.capture_check = remat::CaptureCheck::Ignore}, f, x);
  add_one(bias);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
}

TEST_CASE("tensors that a region makes without grad are no captures, whatever becomes of them",
          "[rule-10]") {
  const Tensor x = leaf({64});
  Tensors left;
  const auto f = [&](const Tensor& t) {
    Tensor y = t;
    for (int i = 0; i < 20; ++i) {
      const Tensor noise = at::full({64}, 0.1 * i);
      if (!remat::is_recomputing()) left.push_back(noise);
      y = (y + noise).sin();
    }
    return y;
  };
  const Tensors plain = grad_of(f(x), {x});
  const Tensor y = remat::checkpoint(f, x);
  for (const Tensor& each : left) each.zero_();
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  left.clear();
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("a sparse tensor that a region makes is no capture, and goes with the forward",
          "[rule-10][rule-13]") {
  const bool is_compressed = GENERATE(true, false);
  CAPTURE(is_compressed);
  const Tensor x = leaf({64, 3});
  const Tensor adjacency = is_compressed ? at::eye(64).to_sparse_csr() : at::eye(64).to_sparse();
  const auto f = [&](const Tensor& t) {
    const Tensor made = at::eye(64).mul_(2);
    const Tensor matrix = is_compressed ? made.to_sparse_csr() : made.to_sparse();
    return at::mm(adjacency, at::mm(matrix, t.exp()).sin());
  };
  const Tensors plain = grad_of(f(x), {x});
  const LiveBytes bytes;
  const Tensor y = remat::checkpoint(f, x);
  CHECK(bytes.held() == 64 * 3 * 4);  // the result
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("one changed capture among many is found, and a region forgets them with its graph",
          "[rule-10][rule-13]") {
  const Tensor x = leaf({4});
  Tensors biases;
  for (int i = 0; i < 100; ++i) biases.push_back(leaf({4}));
  const auto f = [&](const Tensor& t) {
    Tensor y = t;
    for (int round = 0; round < 2; ++round)
      for (const Tensor& each : biases) y = (y + each).sin();
    return y;
  };
  const LiveBytes bytes;
  Tensor y = remat::checkpoint(f, x);
  CHECK(bytes.held() == 4 * 4);
  add_one(biases[70]);
  const CheckpointError error = mismatch_of(y, x);
  CHECK(error.kind() == Kind::CaptureChanged);
  CHECK(error.mismatches().size() == 1);
  y = Tensor();
  CHECK(bytes.held() == 0);
}

// See Note [Nested watches]. The region inside saves nothing, so only the one around it can notice.
TEST_CASE("a region notes what regions inside compute with, however often it is asked for",
          "[rule-10]") {
  const auto add_inside = [](const Tensor& t, const Tensor& b) {
    return remat::checkpoint([&b](const Tensor& u) { return u + b; }, t);
  };
  const auto add_deep = [&](const Tensor& t, const Tensor& b) {
    return remat::checkpoint([&](const Tensor& u) { return add_inside(u, b); }, t);
  };
  Tensors others;
  for (int i = 0; i < 40; ++i) others.push_back(leaf({3}));
  const Tensor older = leaf({3}).sin();
  using Use = std::function<Tensor(const Tensor& x, const Tensor& b)>;
  const std::vector<std::pair<const char*, Use>> uses{
      {"one inside", add_inside},
      {"two deep", add_deep},
      {"several times",
       [&](const Tensor& x, const Tensor& b) {
         return remat::checkpoint([&](const Tensor& t) { return add_inside(t + b, b) + b; }, x);
       }},
      {"first an alias that a region around has made",
       [&](const Tensor& x, const Tensor& b) {
         return remat::checkpoint(
             [&](const Tensor& t) {
               const Tensor alias = b.view({3});
               return add_inside(add_inside(t, alias), b);
             },
             x);
       }},
      {"first as an argument",
       [&](const Tensor& x, const Tensor& b) {
         return add_deep(
             remat::checkpoint([](const Tensor& t, const Tensor& u) { return t + u; }, x, b), b);
       }},
      {"among many",
       [&](const Tensor& x, const Tensor& b) {
         Tensor y = add_deep(x, b);
         for (const Tensor& each : others) y = add_deep(y, each);
         return add_deep(y, b);
       }},
      {"after an older result",
       [&](const Tensor& x, const Tensor& b) { return add_deep(add_deep(x, older), b); }},
  };
  for (const auto& [name, use] : uses) {
    INFO(name);
    const Tensor x = leaf({3}), bias = leaf({3});
    const auto f = [&, &used = use](const Tensor& t) { return used(t, bias).sin(); };
    require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), grad_of(f(x), {x}));
    CHECK(error_after(f, x, [&] { add_one(bias); }).kind() == Kind::CaptureChanged);
  }
}

TEST_CASE("a change between two backwards of a retained graph raises in the second", "[rule-10]") {
  const Tensor x = leaf({3});
  const Tensor bias = leaf({3});
  const auto f = [&](const Tensor& t) { return (t + bias).sin(); };
  const Tensors plain = grad_of(f(x), {x});
  const Tensor y = remat::checkpoint(f, x);
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  add_one(bias);
  CHECK(mismatch_of(y, x).kind() == Kind::CaptureChanged);
}

TEST_CASE("a region that throws watches no more", "[rule-10][rule-12]") {
  const Tensor x = leaf({3});
  const Tensor bias = leaf({3});
  const auto thrower = [&](const Tensor& t) -> Tensor {
    const Tensor y = t + bias;
    throw std::runtime_error("no");
    return y;
  };
  const remat::Counters before = remat::counters();
  CHECK_THROWS_AS(remat::checkpoint(thrower, x), std::runtime_error);
  CHECK(remat::counters().frames_alive == before.frames_alive);
  const Tensors plain = grad_of((x + bias).sin(), {x});
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return (t + bias).sin(); }, x);
  require_bit_equal(grad_of(y, {x}), plain);
}

}  // namespace
