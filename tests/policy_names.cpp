// Names, pin and save_region of policy.h: values that are kept themselves.

#include <string>

#include "tests/support/policies.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using remat::SelectiveOptions;

TEST_CASE("a name keeps the call that made the value", "[policy]") {
  KernelCounter kernels;
  const Tensor x = leaf({2, 3, 4}), w = leaf({5, 4}), b = leaf({5});
  const auto f = [](const Tensor& x, const Tensor& w, const Tensor& b) {
    // The linear of a 3-d input is view, addmm, view: the named value is a view of what addmm made.
    const Tensor hidden = remat::checkpoint_name(at::linear(x.sin(), w, b), "hidden");
    return remat::checkpoint_name(hidden.sigmoid(), "active").exp();
  };
  const auto runs = [&](const Policy& policy) {
    require_same_grads(
        f,
        [&](const Tensor& x, const Tensor& w, const Tensor& b) {
          return checkpoint(with(policy), f, x, w, b);
        },
        x, w, b);
    const Tensor y = checkpoint(with(policy), f, x, w, b);
    kernels.reset();
    grad_of(y, {x, w, b});
    return std::pair(kernels.count("addmm"), kernels.count("sigmoid"));
  };
  CHECK(runs(Policy()) == std::pair<int64_t, int64_t>(1, 1));
  CHECK(runs(remat::save_names({"hidden"})) == std::pair<int64_t, int64_t>(0, 1));
  CHECK(runs(remat::offload_names({"hidden"})) == std::pair<int64_t, int64_t>(0, 1));
  CHECK(runs(remat::save_names({"hidden", "active"})) == std::pair<int64_t, int64_t>(0, 0));
  CHECK(runs(remat::save_all_but_names({"hidden"})) == std::pair<int64_t, int64_t>(1, 0));
  CHECK(runs(remat::save_all_but_names({"active"})) == std::pair<int64_t, int64_t>(0, 1));
  CHECK(runs(remat::save_names({"hidden"}) | remat::save_ops({"aten::sigmoid"})) ==
        std::pair<int64_t, int64_t>(0, 0));
  CHECK(runs(remat::save_ops({"aten::addmm"})) == std::pair<int64_t, int64_t>(0, 1));
}

TEST_CASE("a policy function is asked about names too", "[policy]") {
  std::vector<std::string> log;
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& x) { return remat::checkpoint_name(x.sin(), "s").exp(); };
  const Policy policy = [&log](const PolicyContext& question) {
    log.emplace_back(question.op_name);
    return question.name == "s" ? CheckpointPolicy::MustSave : CheckpointPolicy::PreferRecompute;
  };
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
  CHECK(log == std::vector<std::string>{"aten::sin.default", "remat::checkpoint_name",
                                        "aten::exp.default"});
}

TEST_CASE("a value that no operator of the region made is kept itself", "[policy]") {
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& x) {
    const Tensor named = remat::checkpoint_name(x, "input");
    Tensor changed = named.sin();
    changed.mul_(2);
    return (remat::checkpoint_name(changed, "changed") * named).exp();
  };
  const Policy policy = remat::save_names({"input", "changed"});
  const remat::Recorder recorder;
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
  CHECK(recorder.report().regions.at(0).bytes_saved == 2 * 12);
}

TEST_CASE("the named result of an operator with several results is kept with all of them",
          "[policy]") {
  const Tensor x = leaf({4, 8}), w = leaf({8}), b = leaf({8});
  const auto f = [](const Tensor& x, const Tensor& w, const Tensor& b) {
    return remat::checkpoint_name(at::layer_norm(x.sin(), {8}, w, b), "norm").sigmoid();
  };
  const Policy policy = remat::save_names({"norm"});
  require_same_grads(
      {.kept = {"native_layer_norm"}, .again = {"sigmoid"}}, f,
      [&](const Tensor& x, const Tensor& w, const Tensor& b) {
        return checkpoint(with(policy), f, x, w, b);
      },
      x, w, b);
}

TEST_CASE("a name may be given again after a hook threw while its value was saved",
          "[policy][rule-12]") {
  const Tensor x = leaf({4, 8}), w = leaf({8}), b = leaf({8});
  bool throws = false;
  const Policy policy(
      [](const PolicyContext& question) {
        return question.name == "norm" ? CheckpointPolicy::MustSave
                                       : CheckpointPolicy::PreferRecompute;
      },
      remat::SelectiveOptions{.save_through_hooks = true});
  int num_caught = 0, num_runs = 0;
  const auto f = [&](const Tensor& x, const Tensor& w, const Tensor& b) {
    const Tensor norm = at::layer_norm(x.sin(), {8}, w, b);
    throws = ++num_runs == 1;
    try {
      return remat::checkpoint_name(norm, "norm").sigmoid();
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()) != "disk full") throw;
      ++num_caught;
    }
    return remat::checkpoint_name(norm, "norm").sigmoid();
  };
  Tensor y;
  {
    const remat::SavedTensorHooksGuard around(
        [&throws](const Tensor& t) {
          if (throws && t.size(-1) == 1) {  // the mean, the second of three results
            throws = false;
            throw std::runtime_error("disk full");
          }
          return t;
        },
        [](const Tensor& t) { return t; });
    y = checkpoint(with(policy), f, x, w, b);
  }
  CHECK(num_caught == 1);
  KernelCounter kernels({"native_layer_norm"});
  const auto grads = grad_of(y, {x, w, b});
  CHECK(kernels.count("native_layer_norm") == 0);
  CHECK(num_runs == 2);
  require_bit_equal(grads, grad_of(f(x, w, b), {x, w, b}));
}

TEST_CASE("a listed name that no value has is warned about once", "[policy]") {
  Warnings warnings;
  const Tensor x = leaf({3});
  const Policy policy = remat::save_names({"present", "absent"});
  for (int i = 0; i < 3; ++i)
    grad_of(
        checkpoint(
            with(policy),
            [](const Tensor& x) { return remat::checkpoint_name(x.sin(), "present").exp(); }, x),
        {x});
  REQUIRE(warnings.texts.size() == 1);
  CHECK(warnings.texts[0].find("\"absent\"") != std::string::npos);
  CHECK(warnings.texts[0].find("\"present\"") == std::string::npos);
}

TEST_CASE("a pinned decision does not flip", "[policy]") {
  const Tensor x = leaf({6}), noise = at::zeros({6});
  Calls calls;
  const auto f = [&](const Tensor& x, bool pinned) {
    calls();
    // The recompute sees other noise, as a nondeterministic kernel would make.
    const Tensor scores = x.detach() + (calls.count() > 1 ? -2 * x.detach() : noise);
    const Tensor mask = scores > 0;
    const Tensor indices = (pinned ? remat::pin(mask) : mask).nonzero().squeeze(1);
    return x.index_select(0, indices).exp().sum();
  };
  const Tensor expected = grad_of(f(x, false), {x})[0];
  calls.reset();
  const Tensor y = checkpoint(f, x, true);
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(calls.count() == 2);
}

TEST_CASE("pin and save_region are nothing outside of a region", "[policy]") {
  const Tensor x = leaf({3});
  CHECK(remat::pin(x).is_same(x));
  CHECK(remat::checkpoint_name(x, "x").is_same(x));
  CHECK(remat::save_region([](int a, int b) { return a + b; }, 1, 2) == 3);
  const remat::DisableCheckpointGuard disabled;
  CHECK(checkpoint([](const Tensor& x) { return remat::pin(x); }, x).is_same(x));
}

TEST_CASE("the function of save_region runs once", "[policy]") {
  const Tensor x = leaf({3, 3});
  Calls calls;
  const auto f = [&](const Tensor& x) {
    const auto [a, b] = remat::save_region(
        [&](const Tensor& x) {
          calls();
          return std::pair(x.exp().sin(), x.sum());
        },
        x.cos());
    return (a * b).sigmoid().sum();
  };
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(f, x); }, x);
  calls.reset();
  const Tensor y = checkpoint(f, x);
  const Tensor first = grad_of(y, {x}, {.retain_graph = true})[0];
  const Tensor second = grad_of(y, {x}, {.retain_graph = true})[0];
  CHECK(bit_equal(first, second));
  CHECK(calls.count() == 1);
}

TEST_CASE("save_region takes any result", "[policy]") {
  const Tensor x = leaf({3});
  Calls calls;
  const auto f = [&](const Tensor& x) {
    remat::save_region([&] { calls(); });
    const auto parts = remat::save_region(
        [&](const Tensor& x) {
          calls();
          return std::map<std::string, Tensor>{{"a", x.sin()}, {"b", x.exp()}};
        },
        x);
    const int factor = remat::save_region([&] { return static_cast<int>(calls.count()) * 0 + 3; });
    return (parts.at("a") * parts.at("b") * factor).cos();
  };
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(f, x); }, x);
  calls.reset();
  grad_of(checkpoint(f, x), {x});
  CHECK(calls.count() == 2);
}

TEST_CASE("save_region of a region inside a region runs again with the outer one", "[policy]") {
  const Tensor x = leaf({3});
  Calls calls;
  const auto inner = [&](const Tensor& x) {
    return remat::save_region(
               [&](const Tensor& x) {
                 calls();
                 return x.exp().sin();
               },
               x.cos())
        .exp();
  };
  const auto f = [&](const Tensor& x) { return checkpoint(inner, x.sin()).cos(); };
  require_same_grads([&](const Tensor& x) { return inner(x.sin()).cos(); },
                     [&](const Tensor& x) { return checkpoint(f, x); }, x);
  calls.reset();
  const LiveBytes bytes;
  const Tensor y = checkpoint(f, x);
  CHECK(bytes.held() == static_cast<int64_t>(y.storage().nbytes()));
  grad_of(y, {x});
  CHECK(calls.count() == 2);
}

TEST_CASE("save_region draws its numbers once, and what follows draws its own", "[policy]") {
  const Tensor x = leaf({64});
  const auto f = [](const Tensor& x) {
    const Tensor a =
        remat::save_region([](const Tensor& x) { return at::dropout(x, 0.5, true); }, x.sin());
    return at::dropout(a.exp(), 0.5, true).sin();
  };
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(f, x); }, x);
}

TEST_CASE("no gradient is taken through a kept value inside a recompute", "[policy]") {
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& x, bool pins) {
    const Tensor kept =
        pins ? remat::pin(x.sin()) : remat::save_region([](const Tensor& x) { return x.sin(); }, x);
    const Tensor slope =
        torch::autograd::grad({kept.exp().sum()}, {x}, {}, /*retain_graph=*/true, false,
                              /*allow_unused=*/true)[0];
    return (slope * x).exp();
  };
  for (const bool pins : {false, true}) {
    const Tensor y = checkpoint({.early_stop = false}, f, x, pins);
    const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
    CHECK(error.kind() == CheckpointError::Kind::Unsupported);
  }
}

TEST_CASE("a kept value that is changed in place is an error", "[policy]") {
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& x) {
    Tensor kept = remat::pin(x.detach() * 2);
    const Tensor y = (x * kept).exp();
    kept.zero_();
    return y.sin();
  };
  const Tensor y = checkpoint(f, x);
  const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == CheckpointError::Kind::SelectiveMutation);
}
