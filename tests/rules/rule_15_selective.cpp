// Rule 15: kept results are replayed to the call they came from, survive a second backward, and
// never stand for another call's.

#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>

#include <string>

#include "tests/support/policies.h"
#include "tests/support/saving_functions.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using remat::SelectiveOptions;

namespace {

/// Counts what passes, and doubles it on the way.
struct Doubling {
  int packs = 0, unpacks = 0;
  std::vector<std::vector<int64_t>> sizes;
  remat::SavedTensorHooksGuard guard{[this](const Tensor& t) {
                                       ++packs;
                                       sizes.push_back(t.sizes().vec());
                                       return t * 2;
                                     },
                                     [this](const Tensor& t) {
                                       ++unpacks;
                                       return t * 0.5;
                                     }};
};

}  // namespace

TEST_CASE("two backward calls on a retained graph replay the same result", "[rule-15]") {
  const Tensor x = leaf({3});
  KernelCounter kernels;
  const auto f = [](const Tensor& x) { return x.sin().cos().exp(); };
  const Tensor y = checkpoint(saving({"aten::sin"}), f, x);
  y.sum().backward({}, /*retain_graph=*/true);
  const Tensor once = x.grad().clone();
  y.sum().backward();
  CHECK(bit_equal(x.grad(), once + once));
  const auto calls_of_sin = kernels.count("sin");
  kernels.reset();
  x.mutable_grad() = Tensor();
  f(x).sum().backward({}, true);
  // Once in forward, and once for each gradient of cos.
  CHECK(calls_of_sin == 1 + 2 * (kernels.count("sin") - 1));
}

TEST_CASE("a recompute that saves more is an error also under a policy", "[rule-15]") {
  const Tensor x = leaf({3});
  Calls calls;
  const auto f = [&](const Tensor& x) {
    calls();
    return calls.count() == 1 ? x.sin() : x.sin().exp();
  };
  const Policy never = [](const PolicyContext&) { return CheckpointPolicy::MustRecompute; };
  const Tensor y = checkpoint(with(never, /*early_stop=*/false), f, x);
  CHECK_THROWS_WITH(grad_of(y, {x}), contains("trying to save more tensors during recomputation"));
}

TEST_CASE("a call that has no kept result is named", "[rule-15]") {
  const Tensor x = leaf({3});
  Calls calls;
  const auto f = [&](const Tensor& x) {
    calls();
    return calls.count() == 1 ? x.sin().cos() : x.sin().sin().cos();
  };
  const Tensor y = checkpoint(saving({"aten::sin"}, {}, /*early_stop=*/false), f, x);
  const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == CheckpointError::Kind::SelectiveMismatch);
  CHECK_THAT(error.what(), contains("aten::sin.default, call 1"));
  CHECK_THAT(error.what(), contains("Operators (2 in forward, 2 so far in the recompute)"));
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("a replay in another order is refused", "[rule-15]") {
  const Tensor a = leaf({4, 4}), b = leaf({4, 4});
  int trial = GENERATE(range(0, 8));
  CAPTURE(trial);
  Calls calls;
  const auto f = [&, trial](const Tensor& x) {
    calls();
    const bool again = calls.count() > 1;
    const auto both = [&](auto first, auto second) {
      Tensor p, q;
      if (again) {
        q = second();
        p = first();
      } else {
        p = first();
        q = second();
      }
      return (p - 2 * q).exp();
    };
    switch (trial) {
      case 0:  // captured operands
        return both([&] { return x.mm(a); }, [&] { return x.mm(b); });
      case 1: {  // results of other calls
        const Tensor s = x.relu(), t = x.sigmoid();
        return both([&] { return s.mm(a); }, [&] { return t.mm(a); });
      }
      case 2: {  // results of two calls of one operator
        const Tensor s = a.relu(), t = b.relu();
        return both([&] { return x.mm(s); }, [&] { return x.mm(t); });
      }
      case 3:  // numbers
        return both([&] { return x.mul(2.0); }, [&] { return x.mul(3.0); });
      case 4:  // numbers in tensors
        return both([&] { return x.mul(at::scalar_tensor(2.0)); },
                    [&] { return x.mul(at::scalar_tensor(3.0)); });
      case 5:  // arguments that are no tensors
        return both([&] { return x.sum({0}, true).expand({4, 4}).sin(); },
                    [&] { return x.sum({1}, true).t().expand({4, 4}).sin(); });
      case 6:  // shapes
        return both([&] { return x.mm(a); },
                    [&] { return x.narrow(0, 0, 2).mm(b).repeat({2, 1}); });
      default: {  // before and after a change in place
        Tensor s = x.relu();
        return both([&] { return s.mm(a); }, [&] { return s.mul_(2).mm(a); });
      }
    }
  };
  const Tensor x = leaf({4, 4});
  const Tensor y = checkpoint(with(remat::save_ops({"aten::mm", "aten::mul", "aten::sum"})), f, x);
  const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == CheckpointError::Kind::SelectiveMismatch);
  CHECK_THAT(error.what(), contains("call "));
}

TEST_CASE("a kept result of one output of a call is not that of its other output", "[rule-15]") {
  Calls calls;
  const auto f = counted(calls, [&calls](const Tensor& x) {
    const auto [variance, mean] = at::var_mean(x, at::IntArrayRef{1});
    return (calls.count() == 1 ? variance : mean).mul(3).sin();
  });
  const Tensor x = leaf({4, 4});
  const Tensor y = checkpoint(with(remat::save_ops({"aten::mul"})), f, x);
  CHECK(kind_of(y, {x}) == CheckpointError::Kind::SelectiveMismatch);
}

TEST_CASE("memory of the program's own is compared, and read as any other", "[rule-15]") {
  // Beside what is kept without data, which LibTorch's storages of such memory resemble.
  const int64_t count = GENERATE(4, 0);
  CAPTURE(count);
  std::vector<float> numbers{1, 2, 3, 4};
  Calls calls;
  const auto f = counted(calls, [&](const Tensor& x) {
    return x.mul(at::from_blob(count > 0 ? numbers.data() : nullptr, {count})).sin();
  });
  const Tensor x = leaf({count});
  const Tensor y = checkpoint(saving({"aten::mul"}), f, x);
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0],
                  grad_of(x.mul(at::tensor(numbers).narrow(0, 0, count)).sin(), {x})[0]));
  CHECK(calls.count() == 2);
  if (count == 0) return;
  numbers[0] = 5;
  CHECK(kind_of(y, {x}) == CheckpointError::Kind::SelectiveMismatch);
}

TEST_CASE("a kept call of a list of tensors knows each of them", "[rule-15]") {
  Calls calls;
  const auto f = counted(calls, [&calls](const Tensor& x) {
    const Tensor a = x.relu(), b = x.sigmoid();
    return at::cat(calls.count() == 1 ? Tensors{a, b} : Tensors{b, a}).sin();
  });
  const Tensor x = leaf({4, 4});
  const Tensor y = checkpoint(saving({"aten::cat"}), f, x);
  CHECK(kind_of(y, {x}) == CheckpointError::Kind::SelectiveMismatch);
}

TEST_CASE("a kept value of pin is not given to a save_region in its place", "[rule-15]") {
  Calls calls;
  const auto f = counted(calls, [&calls](const Tensor& x) {
    const auto both = [&x] { return std::pair(x.sin(), x.cos()); };
    return (calls.count() == 1 ? remat::pin(x.sin()) : remat::save_region(both).first).exp();
  });
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(f, x);
  const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == CheckpointError::Kind::SelectiveMismatch);
  CHECK_THAT(error.what(), contains("differs from the one in forward"));
}

TEST_CASE("asked again, a policy must not want more than forward kept", "[rule-15]") {
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& x) { return x.sin().cos().exp(); };
  const auto answering = [](CheckpointPolicy forward, CheckpointPolicy recompute, bool ask_again) {
    return Policy(
        [=](const PolicyContext& question) {
          if (question.op_name != "aten::sin.default") return CheckpointPolicy::PreferRecompute;
          return question.is_recompute ? recompute : forward;
        },
        {.ask_again = ask_again});
  };
  const auto save = CheckpointPolicy::MustSave, recompute = CheckpointPolicy::MustRecompute;
  const auto same = [&](const Policy& policy) {
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
  };
  same(answering(recompute, save, false));
  same(answering(save, recompute, false));
  CHECK(kind_of(checkpoint(with(answering(recompute, save, true)), f, x), {x}) ==
        CheckpointError::Kind::SelectiveMismatch);
  same(answering(save, recompute, true));
  KernelCounter kernels;
  const Tensor y = checkpoint(with(answering(save, recompute, true)), f, x);
  const Tensor z = checkpoint(with(answering(save, save, true)), f, x);
  kernels.reset();
  grad_of(y, {x});
  const int64_t runs = kernels.count("sin");
  kernels.reset();
  grad_of(z, {x});
  CHECK(runs == kernels.count("sin") + 1);
}

TEST_CASE("hooks around a region see its input, and kept results on request", "[rule-15]") {
  const Tensor x = leaf({3, 3});
  const auto f = [](const Tensor& x) { return x.mm(x).relu().sum(); };
  const Tensor expected = grad_of(f(x), {x})[0];
  for (const bool through : {false, true}) {
    Doubling hooks;
    const Tensor y = checkpoint(saving({"aten::mm"}, {.save_through_hooks = through}), f, x);
    CHECK(hooks.packs == (through ? 2 : 1));
    CHECK(bit_equal(grad_of(y, {x})[0], expected));
    CHECK(hooks.unpacks == hooks.packs);
  }
  const Tensor y = checkpoint(saving({"aten::mm"}), f, x);
  Doubling hooks;
  CHECK(bit_equal(grad_of(y, {x})[0], expected));
  CHECK(hooks.packs == 0);
}

TEST_CASE("the kept product of a transposed input is hidden from hooks unless they are to see it",
          "[rule-15]") {
  const Tensor x = leaf({4, 6});
  const auto f = [](const Tensor& x) { return x.t().mm(x).relu().sum(); };
  const Tensor expected = grad_of(f(x), {x})[0];
  const std::vector<int64_t> product{6, 6};
  for (const auto& [options, is_seen] :
       {std::pair(SelectiveOptions{}, false),
        std::pair(SelectiveOptions{.save_through_hooks = false}, false),
        std::pair(SelectiveOptions{.save_through_hooks = true}, true)}) {
    Doubling hooks;
    const Tensor y = checkpoint(saving({"aten::mm"}, options), f, x);
    CHECK((std::find(hooks.sizes.begin(), hooks.sizes.end(), product) != hooks.sizes.end()) ==
          is_seen);
    CHECK(bit_equal(grad_of(y, {x})[0], expected));
  }
}

TEST_CASE("keeping everything keeps what plain autograd does not save, but not the last results",
          "[rule-15]") {
  const Tensor x = leaf({64, 64});
  KernelCounter kernels;
  const auto f = [](const Tensor& x) { return x.sin().cos().exp().mm(x).relu().sum(); };
  const auto held = [&](auto&& run) {
    const LiveBytes bytes;
    const Tensor y = run();
    return std::pair(bytes.held(), y);
  };
  const auto [plain, y] = held([&] { return f(x); });
  const auto [kept, z] = held([&] { return checkpoint(with(everything()), f, x); });
  constexpr int64_t matrix = 64 * 64 * 4;
  CHECK(kept <= plain + 2 * matrix);  // the cosine and the product, which no formula reads
  kernels.reset();
  grad_of(y, {x});
  const auto names = kernels.names();
  kernels.reset();
  grad_of(z, {x});
  CHECK(kernels.names() == names);  // nothing of the region ran again
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
}

TEST_CASE("kept data that only code past the dispatcher reads are there", "[rule-15]") {
  const Tensor x = leaf({4});
  Calls calls;
  const auto f = [&](const Tensor& x) {
    calls();
    const Tensor y = x.sin().cos();
    const double first = static_cast<double>(y.data_ptr<float>()[0]);
    return (y.exp() * first).sin();  // exp saves its own result: nothing saves y
  };
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
  const Tensor y = checkpoint(with(everything()), f, x);
  calls.reset();
  grad_of(y, {x});
  CHECK(calls.count() == 1);
}

TEST_CASE("any subset of random operators is kept, and all draw what forward drew", "[rule-15]") {
  const Tensor x = leaf({32});
  const auto f = [](const Tensor& x) {
    const Tensor a = std::get<0>(at::native_dropout(x.sin(), 0.5, true));
    const Tensor b = a * at::rand_like(a);
    const Tensor c = at::dropout(b.exp(), 0.3, true);
    const Tensor d = at::rrelu(c - at::bernoulli(c.detach(), 0.5), 0.1, 0.4, true);
    return (d + at::randn_like(d)).sin();
  };
  const std::vector<std::string> random{
      "aten::native_dropout", "aten::rand_like", "aten::bernoulli.p",
      "aten::randn_like",     "aten::sin",       "aten::exp"};
  for (unsigned kept = 0; kept < 64; ++kept) {
    std::vector<std::string> ops;
    for (unsigned i = 0; i < random.size(); ++i)
      if (kept & (1u << i)) ops.push_back(random[i]);
    CAPTURE(kept);
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(saving(ops), f, x); }, x);
  }
}

TEST_CASE("a kept sigmoid around a dropout", "[rule-15]") {
  const Tensor x = leaf({16});
  KernelCounter kernels;
  const auto f = [](const Tensor& x) {
    return std::get<0>(at::native_dropout(x.sigmoid(), 0.5, true)).sigmoid();
  };
  require_same_grads(
      f, [&](const Tensor& x) { return checkpoint(saving({"aten::sigmoid"}), f, x); }, x);
  const Tensor y = checkpoint(saving({"aten::sigmoid"}), f, x);
  kernels.reset();
  grad_of(y, {x});
  CHECK(kernels.count("sigmoid") == 0);
  CHECK(kernels.count("native_dropout") == 1);
}

TEST_CASE("kept casts of autocast are replayed", "[rule-15]") {
  const Tensor x = leaf({4, 4}), w = leaf({4, 4});
  // Casts: of w, which autocast keeps in its cache and no policy is asked about, and of x.sin().
  const auto f = [](const Tensor& x, const Tensor& w) { return x.sin().mm(w).sin().mm(w).exp(); };
  const auto cast = [](auto&& run) {
    const bool before = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
    auto result = run();
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, before);
    return result;
  };
  // Counts of products and casts, in forward and in backward.
  const auto runs = [&](const std::vector<std::string>& ops) {
    const auto regions = [&](const Tensor& x, const Tensor& w) {
      return cast([&] { return checkpoint(saving(ops), f, checkpoint(saving(ops), f, x, w), w); });
    };
    require_same_grads(
        [&](const Tensor& x, const Tensor& w) { return cast([&] { return f(f(x, w), w); }); },
        regions, x, w);
    const KernelCounter kernels({"_to_copy"});
    run({}, regions, x, w);
    return std::pair(kernels.count("mm"), kernels.count("_to_copy"));
  };
  const auto none = runs({}), products = runs({"aten::mm"}), casts = runs({"aten::_to_copy"}),
             both = runs({"aten::mm", "aten::_to_copy"});
  CHECK(products.first < none.first);
  CHECK(casts.first == none.first);
  CHECK(casts.second < none.second);
  CHECK(both == std::pair(products.first, casts.second));
}

TEST_CASE("lists and views of kept results", "[rule-15]") {
  const Tensor x = leaf({4, 6});
  const auto f = [](const Tensor& x) {
    const auto parts = x.sin().split(2, 1);
    const auto gathered = at::unbind(at::stack({parts[0].exp(), parts[2].cos()}));
    Tensor y = gathered[0].view({2, 4}).t() * gathered[1].reshape({4, 2}).sum();
    return y.as_strided({2, 2}, {1, 2}).contiguous().exp();
  };
  require_same_grads(
      {.kept = {"sin", "exp", "cos"}}, f,
      [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
  require_same_grads(
      {.kept = {"stack"}, .again = {"exp"}}, f,
      [&](const Tensor& x) { return checkpoint(saving({"aten::split", "aten::stack"}), f, x); }, x);
}

TEST_CASE("a plain number is kept", "[rule-15]") {
  const Tensor x = leaf({4});
  const auto f = [](const Tensor& x) {
    const double scale = x.detach().abs().sum().item<float>();
    return x.exp() * scale;
  };
  require_same_grads(
      {.kept = {"_local_scalar_dense", "exp"}}, f,
      [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
}

TEST_CASE("a stateful policy keeps every second product", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  KernelCounter kernels;
  const auto count = std::make_shared<int>(0);
  const Policy policy = [count](const PolicyContext& question) {
    if (question.op_name != "aten::mm.default") return CheckpointPolicy::PreferRecompute;
    return ++*count % 2 == 0 ? CheckpointPolicy::MustSave : CheckpointPolicy::MustRecompute;
  };
  const auto f = [](const Tensor& x) { return x.mm(x).sin().mm(x).sin().mm(x).sin().mm(x).sin(); };
  require_same_grads(
      [&](const Tensor& x) { return f(f(x)); },
      [&](const Tensor& x) { return checkpoint(with(policy), f, checkpoint(with(policy), f, x)); },
      x);
  *count = 0;
  const Tensor y = checkpoint(with(policy), f, x), z = f(x);
  kernels.reset();
  grad_of(z, {x});
  const int64_t plain = kernels.count("mm");
  kernels.reset();
  grad_of(y, {x});
  CHECK(kernels.count("mm") == plain + 2);
}

TEST_CASE("an exception in forward or in a replay leaves nothing behind", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  for (int throws_at = 1; throws_at <= 2; ++throws_at) {
    Calls calls;
    const auto f = [&](const Tensor& x) {
      calls();
      const Tensor y = x.mm(x).sin();
      if (calls.count() == throws_at) throw std::runtime_error("mine");
      return y.mm(x);
    };
    if (throws_at == 1) {
      CHECK_THROWS_AS(checkpoint(saving({"aten::mm"}), f, x), std::runtime_error);
      continue;
    }
    const Tensor y = checkpoint(saving({"aten::mm"}), f, x);
    CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::runtime_error);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
    const Tensor expected = grad_of(x.mm(x).sin().mm(x), {x})[0];
    CHECK(bit_equal(grad_of(y, {x})[0], expected));
  }
}

TEST_CASE("a mismatch that the function catches is an error all the same", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  Calls calls;
  const auto f = [&](const Tensor& x) {
    calls();
    Tensor y = x.sin();
    try {
      y = calls.count() == 1 ? y.mm(x) : y.narrow(0, 0, 2).mm(x);
    } catch (const std::exception&) {
      y = x;
    }
    return y.exp();
  };
  CHECK(kind_of(checkpoint(saving({"aten::mm"}), f, x), {x}) ==
        CheckpointError::Kind::SelectiveMismatch);
}

TEST_CASE("what the library computes for a check is not the region's", "[rule-15]") {
  const Tensor x = leaf({2, 3});
  const auto f = [](const Tensor& x) {
    // The saved tensor is not dense, so that it is copied to be looked at.
    const Tensor wide = x.sin().expand({4, 2, 3});
    return (wide * wide).clone().sum() * x.clone();
  };
  const Policy asked_again([](const PolicyContext&) { return CheckpointPolicy::MustSave; },
                           SelectiveOptions{.ask_again = true});
  for (const Policy& policy : {everything(), asked_again}) {
    CheckpointOptions options = with(policy);
    options.determinism_check = remat::DeterminismCheck::Values;
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(options, f, x); }, x);
    options.fingerprint = [](const Tensor& t) { return std::to_string(t.clone().numel()); };
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(options, f, x); }, x);
  }
}

TEST_CASE("kept calls may read what pin, a name or save_region kept", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  const auto inner = [](const Tensor& x) { return x.sin().mm(x); };
  for (const int kind : {0, 1, 2}) {
    const auto f = [&](const Tensor& x) {
      const Tensor value = kind == 2 ? remat::save_region(inner, x) : checkpoint(inner, x);
      const Tensor kept = kind == 0   ? remat::pin(value)
                          : kind == 1 ? remat::checkpoint_name(value, "value")
                                      : value;
      return kept.mm(x).cos().mm(kept).exp() * value;
    };
    require_same_grads(
        [&](const Tensor& x) {
          const Tensor value = inner(x);
          return value.mm(x).cos().mm(value).exp() * value;
        },
        [&](const Tensor& x) { return checkpoint(with(everything()), f, x); }, x);
    // In a region around, what the inner one kept is another tensor.
    require_same_grads(
        [&](const Tensor& x) {
          const Tensor y = x.cos(), value = inner(y);
          return (value.mm(y).cos().mm(value).exp() * value).sin();
        },
        [&](const Tensor& x) {
          return checkpoint(
              [&](const Tensor& x) { return checkpoint(with(everything()), f, x.cos()).sin(); }, x);
        },
        x);
  }
}

TEST_CASE("what a hook changes on the way has the same origin", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  const auto f = [](const Tensor& x) { return x.mm(x).mm(x).sin().mm(x); };
  const Policy policy = remat::save_ops({"aten::mm"}, {.save_through_hooks = true});
  const auto g = [&](const Tensor& x) {
    const remat::SavedTensorHooksGuard around([](const Tensor& t) { return t * 2; },
                                              [](const Tensor& t) { return t.clone().mul_(0.5); });
    return checkpoint(with(policy), f, x);
  };
  require_same_grads({.kept = {"mm"}, .again = {"sin"}}, f, g, x);
}

TEST_CASE("a kept alias of an argument may come back out of hooks as a copy",
          "[rule-15][rule-10]") {
  // fuzz_selective_1795424679036395.
  const Tensor x = leaf({2});
  const auto f = [](const Tensor& x) {
    return remat::testing::KeepsMask::apply(remat::checkpoint_name(x, "mask"));
  };
  const Policy policy([](const PolicyContext&) { return CheckpointPolicy::MustSave; },
                      SelectiveOptions{.save_through_hooks = true});
  Tensor alias;
  const auto g = [&](const Tensor& x) {
    const remat::SavedTensorHooksGuard around(
        [](const Tensor& t) { return t.is_floating_point() ? t * 2 : t; },
        [](const Tensor& t) { return t.is_floating_point() ? t.clone().mul_(0.5) : t; });
    return checkpoint(with(policy), [&](const Tensor& x) { return f(x) * alias; }, x);
  };
  const auto in_both = [&](auto make) {
    return [&alias, make](const Tensor& x) {
      const Tensor y = x.cos();
      alias = y.detach();
      return make(y);
    };
  };
  require_same_grads(in_both([&](const Tensor& y) { return f(y) * alias; }), in_both(g), x);
  // A captured alias that was replaced is no copy of the kept one.
  const Tensor y = in_both(g)(x);
  alias.set_data(at::ones({2}, x.options()));
  CHECK(kind_of(y, {x}) == CheckpointError::Kind::CaptureChanged);
}

TEST_CASE("a batched product and its _unsafe_view are one origin", "[rule-15]") {
  const Tensor x = leaf({2, 4, 4});
  const auto f = [](const Tensor& x) {
    // matmul of batches is bmm and _unsafe_view, which returns its argument without saying so.
    return ((x.matmul(x.transpose(1, 2)) / 2) + 1).exp().matmul(x).sin();
  };
  for (const bool asks_again : {false, true}) {
    const Policy policy([](const PolicyContext&) { return CheckpointPolicy::MustSave; },
                        SelectiveOptions{.ask_again = asks_again});
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
  }
}

TEST_CASE("a policy that is asked again does not want back what a name let go", "[rule-15]") {
  const Tensor x = leaf({4});
  const auto f = [](const Tensor& x) { return remat::checkpoint_name(x.sin(), "s").exp().cos(); };
  const Policy policy(
      [](const PolicyContext& question) {
        return question.name == "s" ? CheckpointPolicy::MustRecompute : CheckpointPolicy::MustSave;
      },
      SelectiveOptions{.ask_again = true});
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
}

TEST_CASE("what a call computed from a number is kept, by the number's value", "[rule-15]") {
  // As bindings pass numbers: a tensor of no operator, which the graph holds.
  double number = 2;
  const auto f = [&](const Tensor& x) {
    return (x * at::native::wrapped_scalar_tensor(number)).sin();
  };
  const Tensor x = leaf({4, 4});
  const auto region = [&](const Tensor& t) { return checkpoint(saving({"aten::mul"}), f, t); };
  require_same_grads(f, region, x);
  const Tensor y = region(x);
  number = 3;
  CHECK(kind_of(y, {x}) == CheckpointError::Kind::SelectiveMismatch);
}

TEST_CASE("sparse and inference tensors go through a region with a policy", "[rule-15]") {
  const Tensor x = leaf({4, 4});
  Tensor constant;
  {
    const c10::InferenceMode inference;
    constant = at::rand({4, 4});
  }
  const auto f = [&](const Tensor& x) {
    Tensor made;
    {
      const c10::InferenceMode inference;
      made = at::ones({4, 4}).sin() * 2;
    }
    const Tensor sparse = x.sin().to_sparse();
    return (at::_sparse_mm(sparse, x) * constant.clone() * made.clone()).exp();
  };
  for (const Policy& policy : {everything(), remat::save_ops({"aten::sin"})})
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
}
