// Policies of policy.h: the ready-made ones, their options, and what they are asked.

#include <torch/library.h>

#include <string>

#include "tests/support/policies.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;
using remat::SelectiveOptions;

namespace {

/// Keeps what `names` lists by full name, and writes down every question.
Policy asking(std::vector<std::string>& log, std::vector<std::string> names = {},
              SelectiveOptions options = {}) {
  return Policy(
      [&log, names](const PolicyContext& question) {
        log.emplace_back(std::string(question.op_name) + (question.is_recompute ? " again" : "") +
                         (question.name.empty() ? "" : " " + question.name));
        return std::find(names.begin(), names.end(), question.op_name) != names.end()
                   ? CheckpointPolicy::MustSave
                   : CheckpointPolicy::PreferRecompute;
      },
      options);
}

Tensor sum_sin_mm_cos(const Tensor& x, const Tensor& y) { return x.cos().mm(y).sin().sum(); }

}  // namespace

TEST_CASE("a saved matmul runs once and is all that is held", "[policy][rule-15]") {
  const Tensor x = leaf({512, 512}), y = leaf({512, 512});
  const auto mm_in_backward = [&](const Tensor& loss, KernelCounter& kernels) {
    kernels.reset();
    grad_of(loss, {x, y});
    return kernels.count("mm");
  };
  const Policy by_function = [](const PolicyContext& question) {
    return question.op_name == "aten::mm.default" ? CheckpointPolicy::MustSave
                                                  : CheckpointPolicy::PreferRecompute;
  };
  KernelCounter kernels;
  CHECK(mm_in_backward(sum_sin_mm_cos(x, y), kernels) == 2);
  CHECK(mm_in_backward(checkpoint(sum_sin_mm_cos, x, y), kernels) == 3);
  for (const Policy& policy : {remat::save_ops({"aten::mm"}), by_function, remat::save_matmuls()}) {
    const LiveBytes bytes;
    const Tensor loss = checkpoint(with(policy), sum_sin_mm_cos, x, y);
    CHECK(bytes.held() - static_cast<int64_t>(loss.storage().nbytes()) == 512 * 512 * 4);
    CHECK(mm_in_backward(loss, kernels) == 2);
  }
  const LiveBytes bytes;
  const Tensor loss = checkpoint(sum_sin_mm_cos, x, y);
  CHECK(bytes.held() == static_cast<int64_t>(loss.storage().nbytes()));
}

TEST_CASE("detach and metadata operators are never asked about", "[policy]") {
  std::vector<std::string> log;
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& x) {
    Tensor y = x.sin();
    y = y * static_cast<double>(y.detach().size(0) + y.stride(0) + y.numel());
    return y.cos();
  };
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(asking(log)), f, x); }, x);
  CHECK(log ==
        std::vector<std::string>{"aten::sin.default", "aten::mul.Scalar", "aten::cos.default"});
}

TEST_CASE("an unknown operator is refused when the policy is made", "[policy]") {
  CHECK_THROWS_AS(remat::save_ops({"aten::no_such_op"}), c10::ValueError);
  CHECK_THROWS_WITH(remat::save_ops({"aten::no_such_op"}), contains("aten::no_such_op"));
  CHECK_THROWS_AS(remat::save_ops({"aten::add.NoSuch"}), c10::ValueError);
  CHECK_THROWS_WITH(remat::offload_ops({"mm"}), contains(" Registered operators: aten::mm.d"));
  CHECK_THROWS_WITH(remat::save_ops({"aten::no_such_op"}), !contains("Registered operators"));
  CHECK_THROWS_AS(remat::save_ops({""}), c10::ValueError);
  CHECK(static_cast<bool>(remat::save_ops({})));
  CHECK_FALSE(static_cast<bool>(Policy()));
}

TEST_CASE("operators come and go with their libraries", "[policy]") {
  const auto is_known = [] {
    try {
      return static_cast<bool>(remat::save_ops({"remat_policy::comes_and_goes"}));
    } catch (const c10::ValueError&) {
      return false;
    }
  };
  for (int i = 0; i < 2; ++i) {
    CHECK_FALSE(is_known());
    torch::Library library(torch::Library::FRAGMENT, "remat_policy", std::nullopt, __FILE__,
                           __LINE__);
    library.def("comes_and_goes(Tensor x) -> Tensor");
    CHECK(is_known());
  }
  CHECK_FALSE(is_known());
}

TEST_CASE("an operator that comes where another one was is not taken for it", "[policy]") {
  // A handle is an address, which what is registered next often has again.
  const auto defined = [](const char* name, const std::function<Tensor(const Tensor&)>& kernel) {
    torch::Library library(torch::Library::FRAGMENT, "remat_policy", std::nullopt, __FILE__,
                           __LINE__);
    library.def((std::string(name) + "(Tensor x) -> Tensor").c_str());
    library.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel));
    return library;
  };
  const Tensor x = leaf({3});
  std::vector<std::string> asked;
  const Policy noting([&asked](const PolicyContext& question) {
    if (!question.is_recompute) asked.push_back(std::string(question.op_name));
    return CheckpointPolicy::PreferRecompute;
  });
  int kernels = 0;
  const auto kernel = [&kernels](const Tensor& t) { return ++kernels, t * 2; };
  const auto run = [&](const char* name, const Policy& policy) {
    const auto f = [name](const Tensor& t) {
      const std::string full = std::string("remat_policy::") + name;
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "");
      torch::jit::Stack stack{t.detach()};
      op.callBoxed(stack);
      return t * stack[0].toTensor();
    };
    grad_of(checkpoint(with(policy), f, x), {x});
    return std::exchange(kernels, 0);
  };
  std::optional<Policy> keeps_first;
  for (int i = 0; i < 4; ++i) {
    std::optional<torch::Library> first = defined("first", kernel);
    if (!keeps_first) keeps_first = remat::save_ops({"remat_policy::first"});
    asked.clear();
    CHECK(run("first", noting) == 2);
    CHECK(std::count(asked.begin(), asked.end(), "remat_policy::first.default") == 1);
    CHECK(run("first", *keeps_first) == 1);  // also when it comes back
    first.reset();
    const auto second = defined("second", kernel);
    asked.clear();
    CHECK(run("second", noting) == 2);
    CHECK(std::count(asked.begin(), asked.end(), "remat_policy::second.default") == 1);
    CHECK(run("second", *keeps_first) == 2);
  }
}

TEST_CASE("a name without overload means every overload", "[policy]") {
  const Tensor x = leaf({3});
  KernelCounter kernels;
  const auto runs = [&](const char* op) {
    const Tensor y =
        checkpoint(with(remat::save_ops({op})), [](const Tensor& x) { return x.sin().exp(); }, x);
    kernels.reset();
    grad_of(y, {x});
    return kernels.count("sin");
  };
  CHECK(runs("aten::sin") == 0);
  CHECK(runs("aten::sin.default") == 0);
  CHECK(runs("aten::sin.out") == 1);  // another overload than the one that is called
}

TEST_CASE("an operator that consists of others is warned about", "[policy]") {
  Warnings warnings;
  remat::save_ops({"aten::linear"});
  REQUIRE(warnings.texts.size() == 1);
  CHECK(warnings.texts[0].find("aten::linear") != std::string::npos);
  remat::save_matmuls();
  CHECK(warnings.texts.size() == 1);
}

TEST_CASE("a policy is asked in forward only", "[policy]") {
  struct Count {
    int forward = 0, recompute = 0;
    std::vector<int> log;
  };
  const auto log_of = [](bool ask_again) {
    Count count;
    const Policy policy(
        [&count](const PolicyContext& question) {
          count.log.push_back(question.is_recompute ? ++count.recompute : ++count.forward);
          return CheckpointPolicy::PreferRecompute;
        },
        {.ask_again = ask_again});
    const Tensor x = leaf({3});
    const auto f = [](const Tensor& x) { return x.sin().sin().sin(); };
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
    return count.log;
  };
  CHECK(log_of(false) == std::vector<int>{1, 2, 3});
  CHECK(log_of(true) == std::vector<int>{1, 2, 3, 1, 2});  // early stop skips the third
}

TEST_CASE("results of several tensors are kept one by one", "[policy]") {
  std::vector<std::string> log;
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& x) {
    const auto [a, b] = at::var_mean(x, /*dim=*/c10::OptionalArrayRef<int64_t>());
    return a * b;
  };
  const auto times_asked = [&](bool ask_again) {
    log.clear();
    const Policy policy = asking(log, {"aten::var_mean.correction"}, {.ask_again = ask_again});
    require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
    return std::count_if(log.begin(), log.end(), [](const std::string& each) {
      return each.find("var_mean") != std::string::npos;
    });
  };
  CHECK(times_asked(false) == 1);
  CHECK(times_asked(true) == 2);
}

TEST_CASE("kept integer results are replayed", "[policy]") {
  KernelCounter kernels;
  const Tensor values = leaf({6, 2}), lengths = at::tensor({2, 1, 3}, at::kLong);
  const auto f = [&lengths](const Tensor& values) {
    const Tensor offsets = lengths.cumsum(0) - lengths;
    return values.index_select(0, offsets).exp().sum();
  };
  const auto g = [&](const Tensor& values) {
    return checkpoint(with(remat::save_ops({"aten::cumsum"})), f, values);
  };
  require_same_grads(f, g, values);
  kernels.reset();
  const Tensor y = g(values);
  CHECK(kernels.count("cumsum") == 1);
  grad_of(y, {values});
  CHECK(kernels.count("cumsum") == 1);
}

TEST_CASE("both results of a kept topk are replayed", "[policy]") {
  const Tensor x = leaf({5, 7});
  const auto f = [](const Tensor& x) {
    const auto [values, indices] = x.sin().topk(2);
    return (values * x.gather(1, indices)).exp();
  };
  require_same_grads(
      {.kept = {"topk"}, .again = {"exp"}}, f,
      [&](const Tensor& x) { return checkpoint(with(remat::save_ops({"aten::topk"})), f, x); }, x);
}

TEST_CASE("matmuls saved in a chain run twice less", "[policy]") {
  const Tensor x = leaf({4, 4}), y = leaf({4, 4});
  const auto f = [](const Tensor& x, const Tensor& y) { return x.mm(y).mm(y).sigmoid() * y; };
  KernelCounter kernels;
  const auto runs = [&](const CheckpointOptions& options) {
    kernels.reset();
    const Tensor z = checkpoint(options, f, x, y);
    CHECK(kernels.count("mm") == 2);
    kernels.reset();
    grad_of(z, {x, y});
    return kernels.count("mm");
  };
  CHECK(runs({}) == 6);
  CHECK(runs(with(remat::save_ops({"aten::mm"}))) == 4);
  const std::vector<std::string> held_in_a_variable{"aten::mm"};
  CHECK(runs(with(remat::save_ops(held_in_a_variable))) == 4);
  require_same_grads(
      f,
      [&](const Tensor& x, const Tensor& y) {
        return checkpoint(with(remat::save_ops(held_in_a_variable)), f, x, y);
      },
      x, y);
}

TEST_CASE("save_matmuls keeps the device's attention", "[policy]") {
  const Tensor q = leaf({1, 2, 8, 4}), k = leaf({1, 2, 8, 4}), v = leaf({1, 2, 8, 4});
  const auto f = [](const Tensor& q, const Tensor& k, const Tensor& v) {
    return at::scaled_dot_product_attention(q, k, v).sin();
  };
  require_same_grads(
      {.kept = {"_scaled_dot_product_flash_attention_for_cpu"}}, f,
      [&](const Tensor& q, const Tensor& k, const Tensor& v) {
        return checkpoint(with(remat::save_matmuls()), f, q, k, v);
      },
      q, k, v);
}

TEST_CASE("a detach between two kept operators is neither asked about nor kept", "[policy]") {
  std::vector<std::string> log;
  const Tensor x = leaf({4});
  const auto f = [](const Tensor& x) { return x.sin().detach().cos() * x; };
  const Policy policy = asking(log, {"aten::sin.default", "aten::cos.default"});
  require_same_grads(f, [&](const Tensor& x) { return checkpoint(with(policy), f, x); }, x);
  CHECK(log ==
        std::vector<std::string>{"aten::sin.default", "aten::cos.default", "aten::mul.Tensor"});
}

TEST_CASE("a weight computed in a region of its own keeps all but two operators", "[policy]") {
  const Tensor x = leaf({3, 4}), w = leaf({4, 4});
  const Policy policy = [](const PolicyContext& question) {
    return question.op_name == "aten::mul.Tensor" || question.op_name == "aten::sigmoid.default"
               ? CheckpointPolicy::MustRecompute
               : CheckpointPolicy::MustSave;
  };
  const auto weight = [](const Tensor& w) { return (w * w).sigmoid().mm(w).exp(); };
  require_same_grads(
      {.kept = {"mm", "exp"}, .again = {"mul.Tensor", "sigmoid"}},
      [&](const Tensor& x, const Tensor& w) { return x.mm(weight(w)); },
      [&](const Tensor& x, const Tensor& w) { return x.mm(checkpoint(with(policy), weight, w)); },
      x, w);
}

TEST_CASE("prefer acts as must in eager execution", "[policy]") {
  const auto measure = [](CheckpointPolicy answer) {
    const Tensor x = leaf({64, 64});
    const Policy policy = [answer](const PolicyContext& question) {
      return question.op_name == "aten::mm.default" ? answer : CheckpointPolicy::PreferRecompute;
    };
    KernelCounter kernels;
    const LiveBytes bytes;
    const Tensor y =
        checkpoint(with(policy), [](const Tensor& x) { return x.mm(x).relu().mm(x).sum(); }, x);
    const int64_t held = bytes.held();
    grad_of(y, {x});
    return std::pair(held, kernels.names());
  };
  CHECK(measure(CheckpointPolicy::MustSave) == measure(CheckpointPolicy::PreferSave));
  CHECK(measure(CheckpointPolicy::MustRecompute) == measure(CheckpointPolicy::PreferRecompute));
  CHECK(measure(CheckpointPolicy::MustSave).first > measure(CheckpointPolicy::MustRecompute).first);
}

TEST_CASE("on the CPU offloaded results are simply kept", "[policy]") {
  for (const CheckpointPolicy answer :
       {CheckpointPolicy::MustCpuOffload, CheckpointPolicy::PreferCpuOffload}) {
    const Tensor x = leaf({4, 4});
    const Policy policy = [answer](const PolicyContext& question) {
      return question.op_name == "aten::mm.default" ? answer : CheckpointPolicy::PreferRecompute;
    };
    const auto f = [](const Tensor& x) { return x.mm(x).sigmoid().mm(x).relu(); };
    const auto g = [&](const Tensor& x) { return checkpoint(with(policy), f, x); };
    require_same_grads(f, g, x);
    KernelCounter kernels;
    const Tensor y = g(x);
    kernels.reset();
    grad_of(y, {x});
    CHECK(kernels.count("mm") == 4);
  }
}

TEST_CASE("what cannot be moved to the CPU is refused, or kept if that is preferred", "[policy]") {
  const Tensor x = at::empty({2, 2}, at::kMeta).requires_grad_();
  const auto f = [](const Tensor& x) { return x.mm(x).sin().mm(x).sin(); };
  const auto answering = [](CheckpointPolicy answer) {
    return Policy([answer](const PolicyContext& question) {
      return question.op_name == "aten::mm.default" ? answer : CheckpointPolicy::PreferRecompute;
    });
  };
  const auto error = error_of<CheckpointError>(
      [&] { checkpoint(with(answering(CheckpointPolicy::MustCpuOffload)), f, x); });
  CHECK(error.kind() == CheckpointError::Kind::Unsupported);
  CHECK_THAT(error.what(), contains("PreferCpuOffload"));
  const remat::Recorder recorder;
  const Tensor y = checkpoint(with(answering(CheckpointPolicy::PreferCpuOffload)), f, x);
  CHECK(grad_of(y, {x})[0].sizes() == x.sizes());
  CHECK(recorder.report().regions.at(0).offload_fallbacks == 2);
}

TEST_CASE("numbers of a policy's options that are negative are refused", "[policy]") {
  const auto none = [](const PolicyContext&) { return CheckpointPolicy::PreferRecompute; };
  for (const remat::SelectiveOptions& options :
       {remat::SelectiveOptions{.min_offload_bytes = -1},
        remat::SelectiveOptions{.prefetch_depth = -1},
        remat::SelectiveOptions{.max_bytes_in_flight = -1}}) {
    CHECK_THROWS_AS(remat::offload_ops({"aten::mm"}, options), c10::ValueError);
    CHECK_THROWS_AS(remat::offload_names({"a"}, options), c10::ValueError);
    CHECK_THROWS_WITH(Policy(none, options), contains("was -1. Hint: give 0 or more."));
  }
}

TEST_CASE("a union keeps what either keeps, and the stronger wish wins", "[policy]") {
  KernelCounter kernels;
  const Tensor x = leaf({4});
  const auto runs = [&](const Policy& policy) {
    const Tensor y =
        checkpoint(with(policy), [](const Tensor& x) { return x.sin().cos().exp().sum(); }, x);
    kernels.reset();
    grad_of(y, {x});
    return std::pair(kernels.count("sin"), kernels.count("cos"));
  };
  const Policy sin = remat::save_ops({"aten::sin"}), cos = remat::save_ops({"aten::cos"});
  // The gradient of sin is a cosine and the reverse: one of each runs whatever is kept.
  const auto plain = runs(Policy()), both = runs(sin | cos);
  CHECK(both.first == plain.first - 1);
  CHECK(both.second == plain.second - 1);
  CHECK(runs(sin | Policy()) == runs(sin));
  CHECK(runs(Policy() | cos) == runs(cos));
  CHECK_FALSE(static_cast<bool>(Policy() | Policy()));
  const Policy never = [](const PolicyContext&) { return CheckpointPolicy::MustRecompute; };
  CHECK(runs(never | sin | cos) == both);
  CHECK(runs((sin | cos) | never) == both);
  CHECK_THROWS_AS(remat::save_names({"a"}) | remat::offload_names({"b", "a"}), c10::ValueError);
  CHECK_THROWS_WITH(remat::save_names({"a"}) | remat::offload_names({"a"}), contains("\"a\""));
}

TEST_CASE("a policy may answer yes or no", "[policy]") {
  const Tensor x = leaf({8, 8}), y = leaf({8, 8});
  const auto is_product = [](const PolicyContext& question) {
    return question.op_name == "aten::mm.default";
  };
  static_assert(std::is_same_v<decltype(is_product(std::declval<PolicyContext>())), bool>);
  const Policy policy = GENERATE_COPY(Policy(is_product), Policy(is_product, {.ask_again = true}));
  KernelCounter kernels;
  const Tensor loss = checkpoint(with(policy), sum_sin_mm_cos, x, y);
  kernels.reset();
  require_bit_equal(grad_of(loss, {x, y}), grad_of(sum_sin_mm_cos(x, y), {x, y}));
  // Two of backward's own each, and plain's one of forward.
  CHECK(kernels.count("mm") == 5);
}

TEST_CASE("the ready-made policies take the options of others", "[policy]") {
  const auto changes_what_is_kept = [](const Policy& policy) {
    const Tensor x = leaf({8, 8}), y = leaf({8, 8});
    const auto f = [](const Tensor& a, const Tensor& b) {
      const Tensor product = remat::checkpoint_name(a.mm(b), "product");
      const Tensor loss = product.exp().sum();
      product.detach().mul_(2);
      return loss;
    };
    return [=] {
      require_bit_equal(grad_of(checkpoint(with(policy), f, x, y), {x, y}),
                        grad_of(f(x, y), {x, y}));
    };
  };
  const SelectiveOptions allowed{.allow_cache_entry_mutation = true};
  CHECK_THROWS_AS(changes_what_is_kept(remat::save_ops({"aten::mm"}))(), CheckpointError);
  CHECK_NOTHROW(changes_what_is_kept(remat::save_ops({"aten::mm"}, allowed))());
  CHECK_NOTHROW(changes_what_is_kept(remat::save_matmuls())());  // it only prefers
  CHECK_THROWS_AS(changes_what_is_kept(remat::save_names({"product"}))(), CheckpointError);
  CHECK_NOTHROW(changes_what_is_kept(remat::save_names({"product"}, allowed))());
  CHECK_NOTHROW(changes_what_is_kept(remat::save_all_but_names({"other"}, allowed))());
  CHECK_NOTHROW(changes_what_is_kept(remat::offload_names({"product"}, allowed))());
}

TEST_CASE("a noexcept function under a policy that keeps everything", "[policy]") {
  const Tensor x = leaf({4});
  const auto f = [](const Tensor& x) noexcept {
    const Tensor y = x.sin().cos();
    return (y.exp() * static_cast<double>(y.data_ptr<float>()[0])).sin();
  };
  const Policy everything = [](const PolicyContext&) { return CheckpointPolicy::MustSave; };
  require_same_grads(
      {.kept = {"sin", "cos", "exp"}}, f,
      [&](const Tensor& x) { return checkpoint(with(everything), f, x); }, x);
}

TEST_CASE("debug and a policy go together", "[policy]") {
  const Tensor x = leaf({3, 3});
  const auto f = [](const Tensor& x) { return x.mm(x).sin().mm(x).exp(); };
  const CheckpointOptions options{.debug = true, .policy = remat::save_ops({"aten::mm"})};
  require_same_grads(
      {.kept = {"mm"}, .again = {"exp"}}, f,
      [&](const Tensor& x) { return checkpoint(options, f, x); }, x);
}

TEST_CASE("a debug report under a policy lists each operator once, the kept ones too",
          "[policy][debug]") {
  const Tensor x = leaf({3, 3});
  Calls calls;
  const auto f = [&](const Tensor& t) {
    calls();
    const Tensor y = t.mm(t).sin();
    return calls.count() == 1 ? y.exp().mm(t) : y.to(at::kDouble).exp().to(at::kFloat).mm(t);
  };
  const CheckpointOptions options{.debug = true, .policy = remat::save_ops({"aten::mm"})};
  const Tensor y = checkpoint(options, f, x);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  const std::string text = error.what();
  CAPTURE(text);
  const std::size_t recompute_at = text.find("Operators of the recompute");
  REQUIRE(recompute_at != text.npos);
  const auto times = [](std::string_view list, std::string_view name) {
    int64_t count = 0;
    for (std::size_t at = list.find(name); at != list.npos; at = list.find(name, at + 1)) ++count;
    return count;
  };
  const std::string_view forward = std::string_view(text).substr(0, recompute_at);
  const std::string_view recompute = std::string_view(text).substr(recompute_at);
  CHECK(times(forward.substr(forward.find("Operators of the forward")), "aten::mm(") == 2);
  CHECK(times(recompute, "aten::mm(") == 2);
  CHECK(times(recompute, "aten::sin(") == 1);
  CHECK_THAT(text, !contains("PythonDispatchMode"));
  CHECK_THAT(text, contains("saved by aten::exp([3, 3])"));
}
