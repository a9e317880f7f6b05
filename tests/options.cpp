// CheckpointOptions: what each option changes, and what it leaves alone.

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <stdexcept>

#include "tests/support/autocast.h"
#include "tests/support/support.h"

using remat::CaptureCheck;
using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::DeterminismCheck;
using Kind = remat::CheckpointError::Kind;

namespace {

template <class First, class Later>
CheckpointError mismatch(const CheckpointOptions& options, First first, Later later,
                         const Tensor& x) {
  Calls calls;
  const Tensor y = checkpoint(options, first_then(calls, first, later), x);
  return error_of<CheckpointError>([&] { y.sum().backward(); });
}

template <class First, class Later>
void accepted(const CheckpointOptions& options, First first, Later later, const Tensor& x) {
  Calls calls;
  const Tensor y = checkpoint(options, first_then(calls, first, later), x);
  CHECK_NOTHROW(grad_of(y, {x}));
  CHECK(calls.count() == 2);
}

}  // namespace

TEST_CASE("every option has a default, and names may be given in order", "[options]") {
  constexpr auto is_aggregate = std::is_aggregate_v<CheckpointOptions>;
  static_assert(is_aggregate);
  const CheckpointOptions defaults;
  CHECK(defaults.name.empty());
  CHECK(defaults.preserve_rng_state);
  CHECK(defaults.early_stop);
  CHECK(defaults.determinism_check == DeterminismCheck::Metadata);
  CHECK_FALSE(defaults.fingerprint);
  CHECK(defaults.capture_check == CaptureCheck::Raise);
  CHECK_FALSE(defaults.debug);
  CHECK_FALSE(defaults.context_fn);
  CHECK_FALSE(defaults.policy);
  CHECK_FALSE(defaults.offload_inputs);
  CHECK_FALSE(defaults.strict_unpack);
  CHECK(defaults.buffers == remat::BufferPolicy::Restore);
  CHECK(defaults.modules.empty());
  const Tensor x = leaf({2});
  checkpoint(
      {.name = "block 3", .early_stop = false}, [](const Tensor& t) { return t.sin(); }, x)
      .sum()
      .backward();
  CHECK(at::equal(x.grad(), x.detach().cos()));
}

TEST_CASE("the region keeps its own copy of the options", "[options]") {
  const Tensor x = leaf({100'000});
  Calls tail;
  CheckpointOptions options{.name = "kept", .early_stop = false};
  std::vector<std::string> names;
  const Tensor y = checkpoint(
      options,
      [&](const Tensor& t) {
        names.push_back(remat::current_phase().name);
        const Tensor out = t.sin().exp();
        tail();
        return out.clone();
      },
      x);
  options = {.name = "changed"};
  y.sum().backward();
  CHECK(names == std::vector<std::string>{"kept", "kept"});
  CHECK(tail.count() == 2);
}

TEST_CASE("without preserve_rng_state the recompute draws new numbers", "[options][rule-11]") {
  const Seed seed(1);
  const bool preserve = GENERATE(true, false);
  const Tensor x = leaf({64});
  Tensors masks;
  const Tensor y = checkpoint(
      {.preserve_rng_state = preserve},
      [&](const Tensor& t) {
        const Tensor mask = at::rand({64});
        masks.push_back(mask.clone());  // the mask itself would be a capture
        return (t * mask).sin();
      },
      x);
  const Tensor after_forward = generator_state();
  CHECK_NOTHROW(y.sum().backward());
  REQUIRE(masks.size() == 2);
  CHECK(at::equal(masks[0], masks[1]) == preserve);
  CHECK(at::equal(generator_state(), after_forward) == preserve);

  const Tensor two = leaf({2});
  checkpoint(
      {.preserve_rng_state = false}, [](const Tensor& t) { return at::dropout(t, 0.5, true); }, two)
      .sum()
      .backward();
  CHECK(two.grad().defined());
}

TEST_CASE("a determinism check sees what its level names and nothing finer", "[options][rule-10]") {
  const Tensor x = leaf({2, 3});
  const auto as_is = [](const Tensor& t) { return (t * 2).sin().exp(); };
  // Same shape, other strides: a transposed intermediate is saved by sin.
  const auto other_strides = [](const Tensor& t) {
    return (t * 2).t().contiguous().t().sin().exp();
  };
  const auto other_values = [](const Tensor& t) { return (t * 2.5).sin().exp(); };
  const auto other_shape = [](const Tensor& t) { return (t * 2).sum(0).sin().exp(); };
  const auto fewer = [](const Tensor& t) { return (t * 2).exp(); };
  using enum DeterminismCheck;

  SECTION("None") {
    accepted({.determinism_check = None}, as_is, other_strides, x);
    accepted({.determinism_check = None}, as_is, other_values, x);
    CHECK(mismatch({.determinism_check = None}, as_is, fewer, x).kind() == Kind::FewerTensors);
    // Another shape is not reported as such; plain autograd may refuse the wrong values.
    Calls calls;
    const Tensor y =
        checkpoint({.determinism_check = None}, first_then(calls, as_is, other_shape), x);
    try {
      y.sum().backward();
    } catch (const CheckpointError& error) {
      FAIL("None checked more than the count: " << error.what());
    } catch (const c10::Error&) {
    }
    CHECK(calls.count() == 2);
  }
  SECTION("Metadata") {
    accepted({}, as_is, other_strides, x);
    accepted({}, as_is, other_values, x);
    CHECK(mismatch({}, as_is, other_shape, x).kind() == Kind::MetadataMismatch);
  }
  SECTION("Layout") {
    accepted({.determinism_check = Layout}, as_is, other_values, x);
    const CheckpointError error = mismatch({.determinism_check = Layout}, as_is, other_strides, x);
    CHECK(error.kind() == Kind::MetadataMismatch);
    REQUIRE_FALSE(error.mismatches().empty());
    CHECK(error.mismatches()[0].position == 0);
    CHECK(error.mismatches()[0].forward != error.mismatches()[0].recompute);
  }
  SECTION("Values") {
    accepted({.determinism_check = Values}, as_is, as_is, x);
    const CheckpointError error = mismatch({.determinism_check = Values}, as_is, other_values, x);
    CHECK(error.kind() == Kind::ValueMismatch);
    REQUIRE_FALSE(error.mismatches().empty());
    CHECK(error.mismatches()[0].position == 0);
    CHECK(mismatch({.determinism_check = Values}, as_is, other_strides, x).kind() ==
          Kind::MetadataMismatch);
  }
}

TEST_CASE("Values compares bits: equal NaNs are equal, layouts in logical order, sparse by parts",
          "[options][rule-10]") {
  const CheckpointOptions values{.determinism_check = DeterminismCheck::Values};
  const Tensor x = at::tensor({-1.0F, 0.0F, 1.0F}).requires_grad_();
  accepted(
      values, [](const Tensor& t) { return t.log().sin(); },
      [](const Tensor& t) { return t.log().sin(); }, x);
  const auto sparse = [](double factor) {
    return [factor](const Tensor& t) {
      const Tensor s =
          at::sparse_coo_tensor(at::arange(0, 4, 2).unsqueeze(0), at::arange(1.0F, 3.0F), {3});
      return s.mul(factor).to_dense() * t.sin();
    };
  };
  accepted(values, sparse(2), sparse(2), x);
  CHECK(mismatch(values, sparse(2), sparse(3), x).kind() == Kind::ValueMismatch);
}

TEST_CASE("Values compares the parts of a nested tensor", "[options][rule-10]") {
  const CheckpointOptions values{.determinism_check = DeterminismCheck::Values};
  const Tensor x = at::arange(1.0F, 7.0F).requires_grad_();
  // Parts of `first` and of 6 - `first` elements; one element of the second has a factor.
  const auto nested = [](int64_t first, float factor) {
    return [=](const Tensor& t) {
      Tensor factors = at::ones({6});
      factors[5] = factor;
      const Tensor scaled = t * factors;
      return at::_nested_tensor_from_tensor_list(
                 {scaled.narrow(0, 0, first), scaled.narrow(0, first, 6 - first)})
          .sin()
          .to_padded_tensor(0);
    };
  };
  accepted(values, nested(2, 2), nested(2, 2), x);
  CHECK(mismatch(values, nested(2, 2), nested(2, 3), x).kind() == Kind::ValueMismatch);
  CHECK(mismatch(values, nested(2, 1), nested(4, 1), x).kind() != Kind::RecomputeFailed);
}

TEST_CASE("Values compares a tensor after the operator that saved it has filled it",
          "[options][rule-5][rule-10]") {
  const Seed seed;
  const Tensor x = leaf({64});
  const auto fn = [](const Tensor& t) { return at::rrelu(t, 0.1, 0.3, true); };
  require_same_grads(
      fn,
      [&](const Tensor& t) {
        return checkpoint({.determinism_check = DeterminismCheck::Values}, fn, t);
      },
      x);
}

TEST_CASE("a fingerprint is compared instead of the determinism check", "[options][rule-10]") {
  const Tensor x = leaf({2, 3});
  const auto as_is = [](const Tensor& t) { return (t * 2).sin().exp(); };
  const auto other_values = [](const Tensor& t) { return (t * 2.5).sin().exp(); };
  Calls prints;
  bool grad_mode = false;
  CheckpointOptions options;
  options.fingerprint = [&](const Tensor& t) {
    prints();
    grad_mode = grad_mode || at::GradMode::is_enabled();
    return "sum " + std::to_string(t.sum().item<float>());
  };
  accepted(options, as_is, as_is, x);
  CHECK(prints.count() == 4);  // two tensors, two passes
  CHECK_FALSE(grad_mode);

  const CheckpointError error = mismatch(options, as_is, other_values, x);
  REQUIRE_FALSE(error.mismatches().empty());
  CHECK(error.mismatches()[0].position == 0);
  CHECK_THAT(error.mismatches()[0].forward, contains("sum "));
  CHECK_THAT(error.mismatches()[0].recompute, contains("sum "));

  // Instead: what the fingerprint does not look at is not checked.
  options.fingerprint = [](const Tensor&) { return "same"; };
  options.determinism_check = DeterminismCheck::Values;
  accepted(options, as_is, other_values, x);
}

TEST_CASE("what a fingerprint computes belongs to no region", "[options]") {
  const Tensor x = leaf({3});
  remat::CheckpointOptions options;
  options.fingerprint = [](const Tensor& t) {
    const at::AutoGradMode grad_mode(true);
    CHECK_FALSE(remat::is_checkpointing());
    CHECK_FALSE(remat::is_recomputing());
    const Tensor mine = t.detach().requires_grad_();
    return std::to_string(
        checkpoint([](const Tensor& a) { return a.sin().sum(); }, mine).item<double>());
  };
  const auto fn = [](const Tensor& t) { return t.sin().exp().cos(); };
  require_bit_equal(grad_of(checkpoint(options, fn, x), {x}), grad_of(fn(x), {x}));
}

TEST_CASE("an exception of fingerprint or context_fn keeps its type and leaves nothing",
          "[options][rule-12]") {
  struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const Tensor x = leaf({3});
  const auto fn = [](const Tensor& t) { return t.sin().exp(); };
  Calls calls;
  CheckpointOptions options;
  const auto throws_at = [&](int64_t call) {
    return [&calls, call] {
      calls();
      if (calls.count() == call) throw UserError("foo");
    };
  };
  SECTION("fingerprint in forward") {
    options.fingerprint = [&](const Tensor&) { return throws_at(2)(), ""; };
    CHECK_THROWS_AS(checkpoint(options, fn, x), UserError);
  }
  SECTION("fingerprint in the recompute") {
    options.fingerprint = [&](const Tensor&) { return throws_at(3)(), ""; };
    const Tensor y = checkpoint(options, fn, x);
    CHECK_THROWS_AS(y.sum().backward({}, true), UserError);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
    require_bit_equal(grad_of(y, {x}), grad_of(fn(x), {x}));
  }
  SECTION("context_fn itself") {
    options.context_fn = [&] { return throws_at(1)(), remat::ContextPair{}; };
    CHECK_THROWS_AS(checkpoint(options, fn, x), UserError);
  }
  SECTION("the forward scope") {
    options.context_fn = [&] {
      return remat::ContextPair{.forward = [&] { return throws_at(1)(), remat::Scope(); }};
    };
    CHECK_THROWS_AS(checkpoint(options, fn, x), UserError);
  }
  SECTION("the recompute scope") {
    options.context_fn = [&] {
      return remat::ContextPair{.recompute = [&] { return throws_at(1)(), remat::Scope(); }};
    };
    const Tensor y = checkpoint(options, fn, x);
    CHECK_THROWS_AS(y.sum().backward({}, true), UserError);
    require_bit_equal(grad_of(y, {x}), grad_of(fn(x), {x}));
  }
}

TEST_CASE("capture_check decides whether a changed parameter is an error", "[options][rule-10]") {
  const Tensor x = leaf({3}), weight = leaf({3});
  const Tensor old_weight = weight.detach().clone();
  const auto fn = [&](const Tensor& t) { return (t * weight).sin(); };
  const auto region = [&](CaptureCheck check) {
    const Tensor y = checkpoint({.name = "layer", .capture_check = check}, fn, x);
    at::NoGradGuard no_grad;
    weight.add_(1);
    return y;
  };
  const Tensor y = region(CaptureCheck::Raise);
  const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == Kind::CaptureChanged);
  CHECK(error.region() == "layer");

  const Tensor ignored = region(CaptureCheck::Ignore);
  const Tensor now = grad_of(fn(x), {x})[0];  // the weight as it is now
  CHECK(at::equal(grad_of(ignored, {x})[0], now));
}

TEST_CASE("context_fn is called once per region, and each pass enters its scope once",
          "[options]") {
  const Tensor x = leaf({3});
  Calls made;
  std::vector<std::string> log;
  const auto scope = [&](const std::string& name) -> remat::Scope {
    log.push_back("enter " + name);
    return {nullptr, [&log, name](void*) { log.push_back("leave " + name); }};
  };
  CheckpointOptions options;
  options.context_fn = [&] {
    made();
    return remat::ContextPair{.forward = [&] { return scope("forward"); },
                              .recompute = [&] { return scope("recompute"); }};
  };
  const auto fn = [&](const Tensor& t) {
    log.push_back("run");
    return t.sin().exp();
  };
  const Tensor y = checkpoint(options, fn, x);
  CHECK(log == std::vector<std::string>{"enter forward", "run", "leave forward"});
  log.clear();
  y.sum().backward({}, true);
  CHECK(log == std::vector<std::string>{"enter recompute", "run", "leave recompute"});
  log.clear();
  y.sum().backward();
  CHECK(log == std::vector<std::string>{"enter recompute", "run", "leave recompute"});
  CHECK(made.count() == 1);

  // Either may be empty.
  options.context_fn = [] { return remat::ContextPair{}; };
  checkpoint(options, fn, x).sum().backward();
}

TEST_CASE("an autocast that a context_fn sets holds in both passes", "[options][autocast]") {
  const Tensor x = leaf({4, 4});
  const auto scope = [] { return std::make_shared<Autocast>(); };
  const CheckpointOptions options{
      .determinism_check = remat::DeterminismCheck::Values,
      .context_fn = [&] { return remat::ContextPair{.forward = scope, .recompute = scope}; }};
  std::vector<at::ScalarType> seen;
  const auto fn = [&](const Tensor& t) {
    const Tensor y = t.mm(t);
    seen.push_back(y.scalar_type());
    return y.sin().mm(t);
  };
  Tensor plain;
  {
    const Autocast around;
    plain = grad_of(fn(x), {x})[0];
  }
  const Tensor y = checkpoint(options, fn, x);
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(bit_equal(grad_of(y, {x})[0], plain));
  CHECK(seen == std::vector<at::ScalarType>(3, at::kBFloat16));
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST_CASE("defaults of the process apply where an option has its built-in value", "[options]") {
  struct Restored {
    ~Restored() { remat::set_default_options(""); }
  } const restored;
  const Tensor x = leaf({3});
  const auto recompute_stops = [&](const CheckpointOptions& options) {
    const Counted done;
    grad_of(checkpoint(options, [](const Tensor& t) { return t.sin().exp() + 1; }, x), {x});
    return done.now().early_stops == 1;
  };
  CHECK(remat::default_options().empty());
  CHECK(recompute_stops({}));
  remat::set_default_options(" early_stop = false,debug=true ");
  CHECK(remat::default_options() == "early_stop = false,debug=true");
  CHECK_FALSE(recompute_stops({}));
  CHECK_FALSE(recompute_stops({.name = "named"}));
  {
    const remat::EarlyStopGuard guard(true);
    CHECK(recompute_stops({}));
  }
  remat::set_default_options("determinism_check=values");
  Calls calls;
  const auto changes = [&](const Tensor& t) {
    calls();
    return (t * calls.count()).exp();
  };
  const Tensor y = checkpoint(changes, x);
  CHECK_THROWS_AS(grad_of(y, {x}), CheckpointError);
  calls.reset();
  const Tensor unchecked =
      checkpoint({.determinism_check = remat::DeterminismCheck::None}, changes, x);
  CHECK_NOTHROW(grad_of(unchecked, {x}));
  remat::set_default_options("");
  CHECK(recompute_stops({}));
}

TEST_CASE("defaults of the process that are not valid are refused by name", "[options]") {
  const auto refused = [](const char* text, const char* words) {
    CAPTURE(text);
    CHECK_THROWS_WITH(remat::set_default_options(text), contains(words));
    CHECK_THROWS_AS(remat::set_default_options(text), c10::ValueError);
    CHECK(remat::default_options().empty());
  };
  refused("early_stopp=false", "there was no option \"early_stopp\" among preserve_rng_state");
  refused("early_stop", "was not of the form name=value");
  refused("early_stop=no", "the value \"no\" was not one of true, false");
  refused("determinism_check=all", "not one of none, metadata, layout, values");
  refused("offload_prefetch_depth=-1", "not a number of 0 or more");
  refused("early_stop=false, debug=maybe", "\"maybe\"");
}

TEST_CASE("REMAT_OPTIONS sets the defaults, and an invalid one makes regions throw", "[options]") {
  // The program reads the environment once, so the cases run in processes of their own.
  const auto run = [](const char* text) {
    const std::string command = "REMAT_OPTIONS='" + std::string(text) + "' '" +
                                std::filesystem::read_symlink("/proc/self/exe").string() +
                                "' '[.default_options]' > /dev/null 2>&1";
    return std::system(command.c_str()) == 0;
  };
  CHECK(run("early_stop=false"));
  CHECK_FALSE(run(""));
  CHECK_FALSE(run("early_stop=never"));
}

TEST_CASE("a region of a process with REMAT_OPTIONS=early_stop=false", "[.default_options]") {
  const Tensor x = leaf({3});
  const Counted done;
  grad_of(checkpoint([](const Tensor& t) { return t.sin().exp() + 1; }, x), {x});
  CHECK(done.now().recomputes == 1);
  CHECK(done.now().early_stops == 0);
}

TEST_CASE("strict_unpack makes a second read in one backward an error", "[options][rule-9]") {
  struct ReadTwice : torch::autograd::Function<ReadTwice> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
      context->save_for_backward({x});
      return x * x;
    }
    static Tensors backward(torch::autograd::AutogradContext* context, Tensors grads) {
      const Tensor first = context->get_saved_variables()[0];
      const Tensor second = context->get_saved_variables()[0];
      CHECK(at::equal(first, second));
      return {grads[0] * 2 * second};
    }
  };
  const Tensor x = leaf({3});
  const auto fn = [](const Tensor& t) { return ReadTwice::apply(t.exp()); };
  require_same_grads(fn, [&](const Tensor& t) { return checkpoint(fn, t); }, x);

  const Tensor y = checkpoint({.strict_unpack = true}, fn, x);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.kind() == Kind::DoubleUnpack);
  CHECK_THAT(text_of(error), contains("Unpack is being triggered for a tensor that was already "
                                      "unpacked once."));
}

TEST_CASE("debug costs the same in the last iteration as in the first", "[options][debug]") {
  const Tensor x = leaf({8});
  const auto fn = [](const Tensor& t) { return t.sin().exp().cos(); };
  const auto thousand = [&] {
    const std::clock_t start = std::clock();  // CPU time: other programs may be running
    for (int i = 0; i < 1000; ++i) grad_of(checkpoint({.debug = true}, fn, x), {x});
    return static_cast<double>(std::clock() - start);
  };
  thousand();
  LiveBytes bytes;
  const double early = std::min({thousand(), thousand(), thousand()});
  CHECK(bytes.held() == 0);
  thousand();
  thousand();
  thousand();
  const double late = std::min({thousand(), thousand(), thousand()});
  CHECK(bytes.held() == 0);
  CHECK(late < 3 * early);
}
