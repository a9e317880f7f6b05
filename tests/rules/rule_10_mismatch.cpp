// Rule 10: a recompute that differs from its forward throws; it is never silently used.

#include "tests/support/support.h"

namespace {

using Kind = remat::CheckpointError::Kind;
using remat::CheckpointError;
using remat::DeterminismCheck;

Tensor saves_two(const Tensor& t) { return t.sin().exp(); }
Tensor saves_three(const Tensor& t) { return t.sin().exp().sin(); }

// ---- the number of tensors

TEST_CASE("a recompute that saves fewer tensors is an error in every order of slots", "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({1});
  Calls calls;
  const Tensor y = remat::checkpoint({.name = "fewer", .early_stop = early_stop},
                                     first_then(calls, saves_three, saves_two), x);
  const CheckpointError error = mismatch_of(y, x);
  CHECK(error.kind() == Kind::FewerTensors);
  CHECK(error.forward_count() == 3);
  CHECK(error.recompute_count() == 2);
  CHECK(error.region() == "fewer");
  CHECK_THAT(error.what(), contains("A different number of tensors was saved during the original "
                                    "forward and recomputation."));
  CHECK(calls.count() == 2);
}

TEST_CASE("more tensors are seen with early stop off, and harmless where it stopped", "[rule-10]") {
  const Tensor x = leaf({1});
  Calls calls;
  SECTION("off") {
    const Tensor y =
        remat::checkpoint({.early_stop = false}, first_then(calls, saves_two, saves_three), x);
    const CheckpointError error = mismatch_of(y, x);
    CHECK(error.kind() == Kind::MoreTensors);
    CHECK(error.forward_count() == 2);
    CHECK(error.recompute_count() == 3);
    CHECK_THAT(error.what(), contains("trying to save more tensors during recomputation"));
  }
  SECTION("on, with a tail worth skipping") {
    const Tensor large = leaf({100000});
    const Tensor y = remat::checkpoint(
        first_then(calls, saves_two, [](const Tensor& t) { return saves_two(t).sin().sin(); }),
        large);
    require_bit_equal(grad_of(y, {large}), grad_of(saves_two(large), {large}));
  }
}

TEST_CASE("more tensors than needed are no mismatch under early stop, stopped or not",
          "[rule-10][rule-5]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  Calls calls;
  const auto f = [&](const Tensor& t, bool is_caught) {
    calls();
    const Tensor y = saves_two(t);
    if (calls.count() == 1) return y;
    if (!is_caught) return saves_two(y).exp();
    try {
      return saves_two(y);
    } catch (...) {
      return y.exp().sin();
    }
  };
  const auto expect = [&](const Tensor& y) {
    if (early_stop) {
      require_bit_equal(grad_of(y, {x}), grad_of(saves_two(x), {x}));
    } else {
      CHECK(mismatch_of(y, x).kind() == Kind::MoreTensors);
    }
    CHECK(calls.count() == 2);
  };
  const remat::CheckpointOptions options{.early_stop = early_stop};
  SECTION("in a function that cannot be stopped") {
    expect(remat::checkpoint(options, [&](const Tensor& t) noexcept { return f(t, false); }, x));
  }
  SECTION("in one that catches the stop") {
    expect(remat::checkpoint(options, [&](const Tensor& t) { return f(t, true); }, x));
  }
  SECTION("in one that can be stopped") {
    expect(remat::checkpoint(options, [&](const Tensor& t) { return f(t, false); }, x));
  }
  SECTION("before what is needed has come they are") {
    const Tensor y = remat::checkpoint(
        options,
        [&](const Tensor& t) {
          calls();
          return saves_two(calls.count() == 1 ? t : at::cat({t, t}).exp());
        },
        x);
    CHECK(mismatch_of(y, x).kind() == (early_stop ? Kind::MetadataMismatch : Kind::MoreTensors));
  }
}

TEST_CASE("with slots that died the count is still that of all saves", "[rule-10][rule-1]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = [&](const Tensor& t) {
    calls();
    Tensor h = t.sin();
    if (calls.count() == 1) h.exp();  // its node is gone at once, but it took a position
    return h.cos();
  };
  const Tensor y = remat::checkpoint(f, x);
  const CheckpointError error = mismatch_of(y, x);
  CHECK(error.kind() == Kind::FewerTensors);
  CHECK(error.forward_count() == 3);
  CHECK(error.recompute_count() == 2);
}

// ---- metadata -----------------------------------------------------------------------------------

TEST_CASE("another shape, dtype or device is an error that names region and position",
          "[rule-10]") {
  const Tensor x = leaf({2});
  Calls calls;
  struct Change {
    const char* what;
    std::function<Tensor(const Tensor&)> later;
    std::vector<const char*> forward, recompute;  // of positions 1 and 2
  };
  const std::vector<Change> changes{
      {"shape",
       [](const Tensor& t) { return (t.sin() * at::ones({3, 1})).exp().sum(0); },
       {"Float[2] on cpu", "Float[2] on cpu"},
       {"Float[3, 1] on cpu", "Float[3, 2] on cpu"}},
      {"dtype",
       [](const Tensor& t) { return (t.sin() * at::ones({2}, at::kDouble)).exp().to(at::kFloat); },
       {"Float[2] on cpu", "Float[2] on cpu"},
       {"Double[2] on cpu", "Double[2] on cpu"}},
      {"device",
       [](const Tensor& t) {
         return (t.sin().to(at::kMeta) * at::ones({2}, at::Device(at::kMeta))).exp();
       },
       {"Float[2] on cpu", "Float[2] on cpu"},
       {"Float[2] on meta", "Float[2] on meta"}},
  };
  for (const Change& change : changes) {
    CAPTURE(change.what);
    calls.reset();
    const Tensor y = remat::checkpoint(
        {.name = "changing", .early_stop = false},
        [&](const Tensor& t) {
          calls();
          return calls.count() == 1 ? (t.sin() * at::ones({2})).exp() : change.later(t);
        },
        x);
    const CheckpointError error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
    CHECK(error.region() == "changing");
    const std::string text = text_of(error);
    CHECK_THAT(text, contains("changing"));
    CHECK_THAT(text, contains("have different metadata"));
    CHECK(error.kind() == Kind::MetadataMismatch);
    REQUIRE(error.mismatches().size() == 2);
    for (size_t i = 0; i < 2; ++i) {
      CHECK(error.mismatches()[i].position == static_cast<int64_t>(i) + 1);
      CHECK(error.mismatches()[i].forward == change.forward[i]);
      CHECK(error.mismatches()[i].recompute == change.recompute[i]);
      CHECK_THAT(text, contains(change.recompute[i]));
    }
  }
}

TEST_CASE("a mismatch names its position and both shapes", "[rule-10]") {
  const Tensor x = leaf({1});
  Calls calls;
  const Tensor y = remat::checkpoint(
      first_then(calls, saves_two,
                 [](const Tensor& t) { return t.sin() * at::scalar_tensor(1).expand({2}); }),
      x);
  const CheckpointError error = mismatch_of(y, x);
  CHECK(error.kind() == Kind::MetadataMismatch);
  REQUIRE(error.mismatches().size() == 1);
  CHECK(error.mismatches()[0].position == 1);
  CHECK_THAT(error.mismatches()[0].forward, contains("[1]"));
  CHECK_THAT(error.mismatches()[0].recompute, contains("[2]"));
  CHECK(calls.count() == 2);
}

TEST_CASE("a mismatch in a nested region is the nested region's", "[rule-10][rule-2]") {
  const Tensor x = leaf({1});
  Calls calls;
  auto inner = [&](const Tensor& t) {
    calls();
    return calls.count() == 3 ? t.sin() * at::ones({2}) : t.sin().exp();
  };
  const Tensor y = remat::checkpoint(
      {.name = "outer"},
      [&](const Tensor& t) { return remat::checkpoint({.name = "inner"}, inner, t.cos()).sin(); },
      x);
  const CheckpointError error = mismatch_of(y, x);
  CHECK(calls.count() == 3);  // forward, in the outer recompute, in its own
  CHECK(error.region() == "inner");
  require_bit_equal(grad_of(y, {x}), grad_of(x.cos().sin().exp().sin(), {x}));
}

TEST_CASE("metadata is compared when the recompute saves, not when backward reads", "[rule-10]") {
  // A frozen parameter whose storage is freed by its owner right after the recompute.
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  Tensor frozen = at::randn({3});
  const Tensor values = frozen.clone();
  Calls swaps;
  bool armed = false;
  const Tensor y = remat::checkpoint(
      {.early_stop = early_stop},
      [&](const Tensor& t) {
        const Tensor h = t * frozen;
        h.register_hook([&](const Tensor&) {
          if (!armed) return;
          swaps();
          frozen.set_data(at::zeros({0}));
        });
        return h.sin();
      },
      x);
  armed = true;
  require_bit_equal(grad_of(y, {x}), grad_of((x * values).sin(), {x}));
  CHECK(swaps.count() == 1);
  CHECK(frozen.numel() == 0);
}

// ---- layout, values, fingerprint

TEST_CASE("other strides are an error only when the layout is checked", "[rule-10]") {
  const DeterminismCheck check = GENERATE(DeterminismCheck::None, DeterminismCheck::Metadata,
                                          DeterminismCheck::Layout, DeterminismCheck::Values);
  const Tensor x = leaf({3, 3});
  Calls calls;
  const Tensor y =
      remat::checkpoint({.determinism_check = check},
                        first_then(
                            calls, [](const Tensor& t) { return (t * 2).sin(); },
                            [](const Tensor& t) { return (t.t().contiguous() * 2).t().sin(); }),
                        x);
  if (check >= DeterminismCheck::Layout) {
    const CheckpointError error = mismatch_of(y, x);
    CHECK(error.kind() == Kind::MetadataMismatch);
    REQUIRE(error.mismatches().size() == 1);
    CHECK(error.mismatches()[0].position == 0);
  } else {
    require_bit_equal(grad_of(y, {x}), grad_of((x * 2).sin(), {x}));
  }
  CHECK(calls.count() == 2);
}

TEST_CASE("other values are an error only when values are checked", "[rule-10]") {
  const DeterminismCheck check = GENERATE(DeterminismCheck::None, DeterminismCheck::Metadata,
                                          DeterminismCheck::Layout, DeterminismCheck::Values);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({4});
  Calls calls;
  const Tensor y =
      remat::checkpoint({.name = "drifting", .early_stop = early_stop, .determinism_check = check},
                        first_then(
                            calls, [](const Tensor& t) { return (t.sin() * 2).exp(); },
                            [](const Tensor& t) { return (t.sin() * 3).exp(); }),
                        x);
  if (check == DeterminismCheck::Values) {
    const CheckpointError error = mismatch_of(y, x);
    CHECK(error.kind() == Kind::ValueMismatch);
    CHECK(error.region() == "drifting");
    REQUIRE(error.mismatches().size() == 1);
    CHECK(error.mismatches()[0].position == 1);
    CHECK(error.mismatches()[0].forward != error.mismatches()[0].recompute);
  } else {
    grad_of(y, {x});
  }
  CHECK(calls.count() == 2);
}

TEST_CASE("two saves of one shape swapped by the recompute are seen by their values", "[rule-10]") {
  const Tensor x = leaf({4});
  Calls calls;
  const Tensor y = remat::checkpoint({.determinism_check = DeterminismCheck::Values},
                                     first_then(
                                         calls,
                                         [](const Tensor& t) {
                                           const Tensor a = t.exp();
                                           return a + (t * 2).exp();
                                         },
                                         [](const Tensor& t) {
                                           const Tensor a = (t * 2).exp();
                                           return a + t.exp();
                                         }),
                                     x);
  const CheckpointError error = mismatch_of(y, x);
  CHECK(error.kind() == Kind::ValueMismatch);
  REQUIRE(error.mismatches().size() == 2);
  CHECK(error.mismatches()[0].position == 0);
  CHECK(error.mismatches()[1].position == 1);
}

TEST_CASE("values are compared bit by bit, in logical order, and NaN equals NaN", "[rule-10]") {
  const remat::CheckpointOptions values{.determinism_check = DeterminismCheck::Values};
  Calls calls;
  auto passes = [&](auto first, auto later) {
    calls.reset();
    const Tensor x = leaf({2, 2});
    const Tensor y = remat::checkpoint(values, first_then(calls, first, later), x);
    try {
      grad_of(y, {x});
    } catch (const CheckpointError& e) {
      CHECK(e.kind() == Kind::ValueMismatch);
      return false;
    }
    return true;
  };
  auto times = [](Tensor factor) {
    return [factor](const Tensor& t) { return t * factor.clone(); };
  };
  const Tensor nan = at::full({2, 2}, std::nan(""));
  CHECK(passes(times(nan), times(nan)));
  CHECK_FALSE(passes(times(nan), times(at::ones({2, 2}))));
  CHECK_FALSE(passes(times(at::full({2, 2}, 0.0)), times(at::full({2, 2}, -0.0))));
  const Tensor wide = at::randn({2, 4});
  auto left_half = [&](double fill) {
    return [&wide, fill](const Tensor& t) {
      Tensor copy = wide.clone();
      copy.narrow(1, 2, 2).fill_(fill);
      return t * copy.narrow(1, 0, 2);  // what lies between the rows does not count
    };
  };
  CHECK(passes(left_half(1), left_half(2)));
  CHECK_FALSE(passes(times(wide.narrow(1, 0, 2)), times(wide.narrow(1, 0, 2) + 1e-3)));
}

TEST_CASE("values of every kind of tensor and operator can be checked without an alarm",
          "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::CheckpointOptions values{.early_stop = early_stop,
                                        .determinism_check = DeterminismCheck::Values};
  const Tensor w = leaf({6, 6});
  const Tensor sparse = (at::eye(6) * 3).to_sparse();
  const Tensor buffer = at::randn({6, 6});
  const Parameters parameters{{w}};
  auto check = [&](auto f) {
    require_same_grads(
        parameters, f, [&](const Tensor& t) { return remat::checkpoint(values, f, t); },
        leaf({6, 6}));
  };
  check([&](const Tensor& t) { return t.mm(w).sin() * buffer; });
  check([&](const Tensor& t) { return at::rrelu(t * 2, 0.1, 0.9, true); });
  check([&](const Tensor& t) { return at::dropout(t.mm(w.t()), 0.5, true).exp(); });
  check([&](const Tensor& t) { return std::get<0>(at::max(at::softmax(t, 1), 1)); });
  check([&](const Tensor& t) { return at::layer_norm(t, {6}) * t; });
  check([&](const Tensor& t) { return at::mm(sparse, t).tanh(); });
  check([&](const Tensor& t) { return at::view_as_real(at::exp(at::complex(t, t * 2))).sum(-1); });
  check([&](const Tensor& t) { return t.index_select(0, at::arange(5)).cumprod(1); });
  check([&](const Tensor& t) { return t.clone().sin_().mul_(2).tanh_(); });
  check([&](const Tensor& t) { return t.expand({3, 6, 6}).exp().sum(0); });
}

TEST_CASE("a fingerprint is compared instead of the level of the check", "[rule-10]") {
  const Tensor x = leaf({4});
  Calls calls, prints;
  auto run = [&](std::function<std::string(const Tensor&)> fingerprint, double factor) {
    calls.reset();
    prints.reset();
    return remat::checkpoint({.determinism_check = DeterminismCheck::Values,
                              .fingerprint =
                                  [&prints, fingerprint](const Tensor& t) {
                                    prints();
                                    if (at::GradMode::is_enabled())
                                      throw std::logic_error("grad mode is on");
                                    return fingerprint(t);
                                  }},
                             first_then(
                                 calls, [](const Tensor& t) { return (t.sin() * 2).exp(); },
                                 [factor](const Tensor& t) { return (t.sin() * factor).exp(); }),
                             x);
  };
  const Tensor blind = run([](const Tensor&) { return "same"; }, 3);
  CHECK(prints.count() == 2);
  grad_of(blind, {x});
  CHECK(prints.count() == 4);

  auto sign_of_sum = [](const Tensor& t) { return std::to_string(t.sum().item<float>() > 1000); };
  grad_of(run(sign_of_sum, 2.5), {x});
  auto exact = [](const Tensor& t) { return std::to_string(t.sum().item<float>()); };
  grad_of(run(exact, 2), {x});
  const Tensor seen = run(exact, 3);
  const CheckpointError error = mismatch_of(seen, x);
  REQUIRE(error.mismatches().size() == 1);
  CHECK(error.mismatches()[0].position == 1);
}

TEST_CASE("with the check off only the number of tensors counts", "[rule-10]") {
  const Tensor x = leaf({1});
  Calls calls;
  auto alternative = [](const Tensor& t) { return t.sin() * at::ones({2}); };
  const Tensor y = remat::checkpoint({.determinism_check = DeterminismCheck::None},
                                     first_then(calls, saves_two, alternative), x);
  grad_of(y, {x});
  calls.reset();
  const Tensor z = remat::checkpoint({.determinism_check = DeterminismCheck::None},
                                     first_then(calls, saves_three, alternative), x);
  CHECK(mismatch_of(z, x).kind() == Kind::FewerTensors);
}

}  // namespace
