// Rule 10: a recompute that differs from its forward throws; it is never silently used.

#include "tests/support/saved_tensors.h"

namespace {

using Kind = remat::CheckpointError::Kind;
using remat::CheckpointError;
using remat::DeterminismCheck;

/// After an error LibTorch's queue still holds the nodes that were ready; the next backward on the
/// thread drops them.
void drop_ready_nodes() {
  const Tensor one = at::ones({1}).requires_grad_();
  grad_of(one * 2, {one});
}

CheckpointError mismatch_of(const Tensor& y, const Tensor& x) {
  auto error = error_of<CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
  drop_ready_nodes();
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  return error;
}

/// Calls `first` once and `later` from then on.
template <class F, class G>
auto first_then(Calls& calls, F first, G later) {
  return [&calls, first, later](const Tensor& t) -> Tensor {
    calls();
    return calls.count() == 1 ? first(t) : later(t);
  };
}

Tensor saves_two(const Tensor& t) { return t.sin().exp(); }
Tensor saves_three(const Tensor& t) { return t.sin().exp().sin(); }

/// True gradient, or LibTorch's error about in-place changes; anything else fails.
template <class F>
void require_error_or_gradient(F&& gradient, const Tensors& expected) {
  Tensors grads;
  try {
    grads = gradient();
  } catch (const c10::Error& e) {
    CHECK_THAT(text_of(e), contains("modified by an inplace operation"));
    return;
  }
  require_bit_equal(grads, expected);
}

// ---- the number of tensors ------------------------------------------------------------------------

TEST_CASE("a recompute that saves fewer tensors is an error in every order of slots",
          "[rule-10][DET-01]") {
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

TEST_CASE("more tensors are seen with early stop off, and harmless where it stopped",
          "[rule-10][DET-02]") {
  const Tensor x = leaf({1});
  Calls calls;
  SECTION("off") {
    const Tensor y = remat::checkpoint({.early_stop = false},
                                       first_then(calls, saves_two, saves_three), x);
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
          "[rule-10][DET-04][GUA-36]") {
  const Tensor x = leaf({2});
  Calls calls;
  struct Change {
    const char* what;
    std::function<Tensor(const Tensor&)> later;
    const char *forward, *recompute;
  };
  const std::vector<Change> changes{
      {"shape", [](const Tensor& t) { return (t.sin() * at::ones({3, 1})).exp().sum(0); }, "[2]",
       "[3, 2]"},
      {"dtype", [](const Tensor& t) { return t.sin().to(at::kDouble).exp().to(at::kFloat); },
       "Float", "Double"},
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
    if (error.kind() == Kind::MetadataMismatch) {
      CHECK_THAT(text, contains("have different metadata"));
      REQUIRE_FALSE(error.mismatches().empty());
    } else {
      CHECK(error.kind() == Kind::FewerTensors);
    }
  }
}

TEST_CASE("a mismatch names its position and both shapes", "[rule-10][DET-04]") {
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

TEST_CASE("metadata is compared when the recompute saves, not when backward reads",
          "[rule-10][GUA-03]") {
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

// ---- layout, values, fingerprint -------------------------------------------------------------------

TEST_CASE("other strides are an error only when the layout is checked", "[rule-10][GUA-17]") {
  const DeterminismCheck check =
      GENERATE(DeterminismCheck::None, DeterminismCheck::Metadata, DeterminismCheck::Layout,
               DeterminismCheck::Values);
  const Tensor x = leaf({3, 3});
  Calls calls;
  const Tensor y = remat::checkpoint(
      {.determinism_check = check},
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

TEST_CASE("other values are an error only when values are checked", "[rule-10][GUA-17]") {
  const DeterminismCheck check =
      GENERATE(DeterminismCheck::None, DeterminismCheck::Metadata, DeterminismCheck::Layout,
               DeterminismCheck::Values);
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({4});
  Calls calls;
  const Tensor y = remat::checkpoint(
      {.name = "drifting", .early_stop = early_stop, .determinism_check = check},
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

TEST_CASE("two saves of one shape swapped by the recompute are seen by their values",
          "[rule-10][GUA-17]") {
  const Tensor x = leaf({4});
  Calls calls;
  const Tensor y = remat::checkpoint(
      {.determinism_check = DeterminismCheck::Values},
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

TEST_CASE("values are compared bit by bit, in logical order, and NaN equals NaN",
          "[rule-10][GUA-17]") {
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
          "[rule-10][GUA-17][NEW-09]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::CheckpointOptions values{.early_stop = early_stop,
                                        .determinism_check = DeterminismCheck::Values};
  const Tensor w = leaf({6, 6});
  const Tensor sparse = (at::eye(6) * 3).to_sparse();
  const Tensor buffer = at::randn({6, 6});
  const Parameters parameters{{w}};
  auto check = [&](auto f) {
    require_same_grads(parameters, f,
                       [&](const Tensor& t) { return remat::checkpoint(values, f, t); },
                       leaf({6, 6}));
  };
  check([&](const Tensor& t) { return t.mm(w).sin() * buffer; });
  check([&](const Tensor& t) { return at::rrelu(t * 2, 0.1, 0.9, true); });
  check([&](const Tensor& t) { return at::dropout(t.mm(w.t()), 0.5, true).exp(); });
  check([&](const Tensor& t) { return std::get<0>(at::max(at::softmax(t, 1), 1)); });
  check([&](const Tensor& t) { return at::layer_norm(t, {6}) * t; });
  check([&](const Tensor& t) { return at::mm(sparse, t).tanh(); });
  check([&](const Tensor& t) {
    return at::view_as_real(at::exp(at::complex(t, t * 2))).sum(-1);
  });
  check([&](const Tensor& t) { return t.index_select(0, at::arange(5)).cumprod(1); });
  check([&](const Tensor& t) { return t.clone().sin_().mul_(2).tanh_(); });
  check([&](const Tensor& t) { return t.expand({3, 6, 6}).exp().sum(0); });
}

TEST_CASE("a fingerprint is compared instead of the level of the check", "[rule-10][GUA-17]") {
  const Tensor x = leaf({4});
  Calls calls, prints;
  auto run = [&](std::function<std::string(const Tensor&)> fingerprint, double factor) {
    calls.reset();
    prints.reset();
    return remat::checkpoint(
        {.determinism_check = DeterminismCheck::Values,
         .fingerprint =
             [&prints, fingerprint](const Tensor& t) {
               prints();
               if (at::GradMode::is_enabled()) throw std::logic_error("grad mode is on");
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

  auto sign_of_sum = [](const Tensor& t) {
    return std::to_string(t.sum().item<float>() > 1000);
  };
  grad_of(run(sign_of_sum, 2.5), {x});
  auto exact = [](const Tensor& t) { return std::to_string(t.sum().item<float>()); };
  grad_of(run(exact, 2), {x});
  const Tensor seen = run(exact, 3);
  const CheckpointError error = mismatch_of(seen, x);
  REQUIRE(error.mismatches().size() == 1);
  CHECK(error.mismatches()[0].position == 1);
}

TEST_CASE("with the check off only the number of tensors counts", "[rule-10][GUA-17]") {
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

// ---- captures -----------------------------------------------------------------------------------

/// A captured tensor, what is done with it between the passes, and how the region uses it.
struct Capture {
  const char* what;
  std::function<Tensor()> make;
  std::function<void(Tensor&)> change;
};

TEST_CASE("a captured parameter or buffer that changed between the passes raises",
          "[rule-10][GUA-01][GUA-02]") {
  auto parameter = [] { return leaf({3, 3}); };
  auto buffer = [] { return at::randn({3, 3}); };
  auto view_of_buffer = [] { return at::randn({6, 3}).narrow(0, 2, 3); };
  auto in_place = [](Tensor& t) {
    at::NoGradGuard no_grad;
    t.add_(1);
  };
  auto adam = [](Tensor& t) {
    at::NoGradGuard no_grad;
    t.addcdiv_(at::ones({3, 3}), at::full({3, 3}, 2.0), -0.1);
  };
  auto through_a_view = [](Tensor& t) {
    at::NoGradGuard no_grad;
    t.view(-1).narrow(0, 0, 1).zero_();
  };
  auto through_a_row = [](Tensor& t) {
    at::NoGradGuard no_grad;
    t.select(0, 1).copy_(at::ones({3}));
  };
  auto set_data = [](Tensor& t) { t.set_data(at::randn({3, 3})); };
  auto set = [](Tensor& t) {
    at::NoGradGuard no_grad;
    t.set_(at::randn({3, 3}));
  };
  auto assign = [](Tensor& t) { t = at::randn({3, 3}); };
  const std::vector<Capture> captures{
      {"parameter, in place", parameter, in_place},
      {"parameter, by Adam", parameter, adam},
      {"parameter, through a view", parameter, through_a_view},
      {"parameter, through a row", parameter, through_a_row},
      {"parameter, set_data", parameter, set_data},
      {"parameter, set_", parameter, set},
      {"buffer, in place", buffer, in_place},
      {"buffer, through a view", buffer, through_a_view},
      {"buffer, set_data", buffer, set_data},
      {"buffer, set_", buffer, set},
      {"buffer, variable assigned", buffer, assign},
      {"view of a buffer, in place", view_of_buffer, in_place},
      {"view of a buffer, through a row", view_of_buffer, through_a_row},
  };
  using Use = std::function<Tensor(const Tensor& t, const Tensor& w)>;
  const std::vector<std::pair<const char*, Use>> uses{
      {"as it is", [](const Tensor& t, const Tensor& w) { return t.mm(w).sin(); }},
      {"transposed", [](const Tensor& t, const Tensor& w) { return t.mm(w.t()).sin(); }},
      {"a row of it", [](const Tensor& t, const Tensor& w) { return (t * w[1]).sin(); }},
      {"reshaped",
       [](const Tensor& t, const Tensor& w) { return (t.reshape(-1) * w.view(-1)).sin(); }},
      {"in a nested region",
       [](const Tensor& t, const Tensor& w) {
         return remat::checkpoint({.name = "layer 7"},
                                  [&](const Tensor& u) { return u.mm(w).sin(); }, t * 2);
       }},
  };
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  for (const Capture& capture : captures) {
    for (const auto& [how, use] : uses) {
      CAPTURE(capture.what, how);
      const Tensor x = leaf({3, 3});
      Tensor w = capture.make();
      const Tensor used_before = w;
      Calls calls;
      auto region = [&](remat::CaptureCheck check) {
        return remat::checkpoint(
            {.name = "layer 7", .early_stop = early_stop, .capture_check = check},
            counted(calls, [&](const Tensor& t) { return use(t, w); }), x);
      };
      {
        // An unchanged capture raises nothing.
        const Tensor fine = region(remat::CaptureCheck::Raise);
        require_bit_equal(grad_of(fine, {x}), grad_of(use(x, w), {x}));
      }
      calls.reset();
      const Tensor y = region(remat::CaptureCheck::Raise);
      capture.change(w);
      const CheckpointError error = mismatch_of(y, x);
      CHECK(error.kind() == Kind::CaptureChanged);
      CHECK(error.region() == "layer 7");
      CHECK_THAT(text_of(error), contains("layer 7"));
      CHECK_THAT(text_of(error), contains("Float["));
      CHECK_FALSE(error.mismatches().empty());
      CHECK(calls.count() == 2);
    }
  }
}

TEST_CASE("with the capture check off a recompute uses the new value", "[rule-10][GUA-01]") {
  const Tensor x = leaf({3});
  Tensor w = leaf({3});
  Calls calls;
  const Tensor y = remat::checkpoint(
      {.capture_check = remat::CaptureCheck::Ignore},
      counted(calls, [&](const Tensor& t) { return (t * w).sin() * w; }), x);
  {
    at::NoGradGuard no_grad;
    w.add_(1);
  }
  require_bit_equal(grad_of(y, {x}), grad_of((x * w).sin() * w, {x}));
  CHECK(calls.count() == 2);
}

TEST_CASE("an update that leaves the version alone is seen by its values only",
          "[rule-10][GUA-01]") {
  const bool values = GENERATE(true, false);
  const Tensor x = leaf({3});
  const Tensor w = leaf({3});
  const Tensor y = remat::checkpoint(
      {.determinism_check = values ? DeterminismCheck::Values : DeterminismCheck::Metadata},
      [&](const Tensor& t) { return (t * w).sin(); }, x);
  w.data().add_(1);  // as C++ SGD does
  if (values) {
    CHECK(mismatch_of(y, x).kind() == Kind::ValueMismatch);
  } else {
    require_bit_equal(grad_of(y, {x}), grad_of((x * w).sin(), {x}));
  }
}

TEST_CASE("a capture that the gradient does not need may change", "[rule-10]") {
  // Plain autograd saves neither addend, so it raises nothing either.
  const Tensor x = leaf({3});
  Tensor w = leaf({3});
  const Tensors plain = grad_of(x.sin(), {x});
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return t.sin() + w; }, x);
  {
    at::NoGradGuard no_grad;
    w.add_(1);
  }
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("a capture changed and then changed again inside a later region still raises",
          "[rule-10][GUA-02]") {
  const Tensor x = leaf({3});
  Tensor buffer = at::ones({3});
  auto f = [&](const Tensor& t) { return t * buffer; };
  const Tensor first = remat::checkpoint(f, x);
  const Tensor second = remat::checkpoint(
      [&](const Tensor& t) {
        buffer.mul_(2);
        return t * buffer;
      },
      x);
  CHECK(mismatch_of(first, x).kind() == Kind::CaptureChanged);
}

// ---- no false alarms -------------------------------------------------------------------------------

TEST_CASE("what a region made itself may be kept and changed outside", "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  Tensors features;
  Calls calls;
  auto f = [](const Tensor& t, Tensors* keep) {
    const Tensor h = t.sin();
    const Tensor g = h.exp();
    if (keep != nullptr) keep->insert(keep->end(), {h, g});
    return g.tanh();
  };
  const Tensors plain = grad_of(f(x, nullptr), {x});
  SECTION("kept in a list of features") {
    const Tensor y = remat::checkpoint(
        {.early_stop = early_stop},
        counted(calls, [&](const Tensor& t) { return f(t, &features); }), x);
    for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK(features.size() >= 4);
    CHECK(calls.count() == 3);
  }
  SECTION("kept in forward only, and changed there before backward") {
    const Tensor y = remat::checkpoint(
        {.early_stop = early_stop},
        counted(calls,
                [&](const Tensor& t) { return f(t, remat::is_recomputing() ? nullptr : &features); }),
        x);
    {
      at::NoGradGuard no_grad;
      for (Tensor& feature : features) feature.zero_();
    }
    require_error_or_gradient([&] { return grad_of(y, {x}); }, plain);
  }
  features.clear();
}

TEST_CASE("a tensor without grad that a parent makes may be shared with its nested regions",
          "[rule-10]") {
  const bool as_input = GENERATE(true, false);
  CAPTURE(as_input);
  const Tensor x = leaf({4}), w = leaf({4});
  auto f = [&](const Tensor& t, bool nest) {
    const Tensor mask = at::arange(4, at::kFloat) * 0.5;
    auto first = [mask, &w](const Tensor& u) { return (u * w * mask).sin(); };
    auto second = [](const Tensor& u, const Tensor& m) { return (u * m).sin(); };
    if (!nest) return second(first(t), mask);
    const Tensor h = remat::checkpoint(first, t);
    return as_input ? remat::checkpoint(second, h, mask) : second(h, mask);
  };
  const Tensors plain = grad_of(f(x, false), {x, w});
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return f(t, true); }, x);
  for (int i = 0; i < 2; ++i) {
    require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), plain);
  }
}

TEST_CASE("a result changed in place after the region gives the region's gradient", "[rule-10]") {
  const Tensor x = leaf({3});
  const Tensors plain = grad_of(x.sin().exp() * 2, {x});
  Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
  y.mul_(2);
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("buffers that the function itself updates raise no alarm", "[rule-10][BN-04]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor w = leaf({4}), bias = leaf({4});
  Tensor mean = at::zeros({4}), variance = at::ones({4});
  const Parameters parameters{{w, bias}};
  auto f = [&](const Tensor& t) {
    return at::batch_norm(t * 2, w, bias, mean, variance, true, 0.1, 1e-5, false);
  };
  auto two_steps = [&](bool drop) {
    return [&, drop](const Tensor& t) {
      mean.zero_();
      variance.fill_(1);
      const Tensor first = drop ? remat::checkpoint({.early_stop = early_stop}, f, t) : f(t);
      const Tensor second =
          drop ? remat::checkpoint({.early_stop = early_stop}, f, first) : f(first);
      return std::pair(first, second);
    };
  };
  require_same_grads(parameters, two_steps(false), two_steps(true), leaf({8, 4, 3}));
}

TEST_CASE("tensors that die with the region never stand in for others", "[rule-10]") {
  // Freed storages and objects come back at the same address: only their identity may count.
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  auto f = [](const Tensor& t) {
    Tensor h = t;
    for (int i = 0; i < 6; ++i) {
      const Tensor mask = (at::arange(t.numel()) % (i + 2) == 0).to(at::kFloat).view(t.sizes());
      h = at::where(mask > 0, h * mask, h.sin() * at::full_like(h, 0.5 + i));
      h = at::rrelu(h, 0.1, 0.9, true);
    }
    return h;
  };
  for (int repeat = 0; repeat < 30; ++repeat) {
    require_same_grads(
        f, [&](const Tensor& t) { return remat::checkpoint({.early_stop = early_stop}, f, t); },
        leaf({7 + repeat % 3, 11}));
  }
}

// ---- changed in place inside the region ------------------------------------------------------------

TEST_CASE("a tensor saved and then changed in place in the same region is never misread",
          "[rule-10][GUA-45]") {
  const bool early_stop = GENERATE(true, false);
  const int64_t size = GENERATE(as<int64_t>{}, 3, 100000);
  CAPTURE(early_stop, size);
  const Tensor x = leaf({size});
  auto region = [&](auto f) { return remat::checkpoint({.early_stop = early_stop}, f, x); };
  // The gradient that an unchanged copy in the place of the saved tensor gives.
  SECTION("a result") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        const Tensor saved = t.exp();
        Tensor y = copy ? saved.clone() : saved;
        y.mul_(2);
        return y.sin();
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("an operand") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        Tensor h = t * 2;
        const Tensor s = (copy ? h.clone() : h).sin();
        h.add_(1);
        return s * 3 + h;
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("through a view") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        Tensor h = t * 2;
        const Tensor s = (copy ? h.clone() : h).cos();
        h.narrow(0, 0, 2).zero_();
        return s + h;
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("a factor that does not require grad") {
    auto f = [](bool copy) {
      return [copy](const Tensor& t) {
        Tensor mask = at::ones_like(t).detach();
        const Tensor s = t * (copy ? mask.clone() : mask);
        mask.zero_();
        return s.sin();
      };
    };
    CHECK_THROWS_WITH(grad_of(f(false)(x), {x}), contains("modified by an inplace operation"));
    require_error_or_gradient([&] { return grad_of(region(f(false)), {x}); },
                              grad_of(f(true)(x), {x}));
  }
  SECTION("a captured buffer that the region uses and then updates") {
    auto f = [](bool copy, Tensor buffer) {
      return [copy, buffer](const Tensor& t) mutable {
        const Tensor s = t * (copy ? buffer.clone() : buffer);
        buffer.add_(1);
        return s.sin();
      };
    };
    const Tensor buffer = at::ones({size});
    CHECK_THROWS_WITH(grad_of(f(false, buffer.clone())(x), {x}),
                      contains("modified by an inplace operation"));
    Tensors grads;
    try {
      grads = grad_of(region(f(false, buffer.clone())), {x});
    } catch (const CheckpointError& e) {
      CHECK(e.kind() == Kind::CaptureChanged);
    } catch (const c10::Error& e) {
      CHECK_THAT(text_of(e), contains("modified by an inplace operation"));
    }
    if (!grads.empty()) require_bit_equal(grads, grad_of(f(true, buffer.clone())(x), {x}));
  }
}

TEST_CASE("a tensor changed in place whose old value no gradient needs raises nothing",
          "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  auto f = [](const Tensor& t) {
    Tensor changed = t.exp();
    const Tensor other = t.sin();
    {
      at::NoGradGuard no_grad;
      changed.zero_();
    }
    return std::pair(changed, other);
  };
  const auto [plain_changed, plain] = f(x);
  const auto [changed, other] = remat::checkpoint({.early_stop = early_stop}, f, x);
  require_bit_equal(grad_of(other, {x}), grad_of(plain, {x}));
}

TEST_CASE("in-place operators on views of intermediates give plain gradients",
          "[rule-10][GUA-04]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  std::vector<std::function<Tensor(const Tensor&)>> programs{
      [](const Tensor& t) {
        Tensor h = t.sin();
        h.narrow(0, 0, 2).mul_(t.narrow(0, 1, 2));
        return h;
      },
      [](const Tensor& t) {
        Tensor h = t * 2;
        h.select(1, 1).sin_();
        h.t().narrow(0, 2, 1).add_(t[0].sum());
        return h.cos();
      },
      [](const Tensor& t) {
        Tensor h = at::zeros({3, 4}, t.options());
        h.copy_(t);
        h.diagonal().mul_(3).sin_();
        h.view(-1).slice(0, 0, 12, 5).fill_(0);
        return h.tanh();
      },
      [](const Tensor& t) {
        Tensor h = t.clone();
        const Tensor row = h[1];
        row.mul_(h[2].exp());
        Tensor part = h.index_select(0, at::arange(2));
        part.narrow(1, 1, 2).mul_(t.select(1, 0).narrow(0, 0, 2).unsqueeze(1));
        return h * part.sum(0);
      },
      [](const Tensor& t) {
        Tensor h = t.unsqueeze(0).clone();
        h.index_put_({at::zeros({2}, at::kLong), at::arange(2)}, t.narrow(0, 1, 2).exp());
        h.masked_fill_(h > 0.5, 0.25);
        return h.sin().squeeze(0);
      },
  };
  for (size_t i = 0; i < programs.size(); ++i) {
    CAPTURE(i);
    const auto& f = programs[i];
    auto region = [&](const Tensor& t) {
      return remat::checkpoint({.early_stop = early_stop}, f, t);
    };
    const Tensor x = leaf({3, 4}, at::kDouble);
    bool plain_raises = false;
    try {
      grad_of(f(x), {x});
    } catch (const c10::Error&) {
      plain_raises = true;
    }
    REQUIRE_FALSE(plain_raises);
    require_same_grads(f, region, x);
    require_same_grads(
        [&](const Tensor& t) { return f(f(t.sin()).expand({3, 4})); },
        [&](const Tensor& t) {
          return remat::checkpoint(
              [&](const Tensor& u) { return region(region(u.sin()).expand({3, 4})); }, t);
        },
        x);
    // A numerical check along a direction.
    const Tensor weights = at::randn_like(f(x)).detach(), direction = at::randn_like(x).detach();
    const double analytic =
        (torch::autograd::grad({(region(x) * weights).sum()}, {x})[0] * direction)
            .sum()
            .item<double>();
    at::NoGradGuard no_grad;
    const double h = 1e-6;
    const double numeric =
        (((f(x + direction * h) - f(x - direction * h)) * weights).sum() / (2 * h)).item<double>();
    CHECK(std::abs(numeric - analytic) < 1e-6 * (1 + std::abs(analytic)));
  }
}

TEST_CASE("saved tensors of every kind come back as they were", "[rule-10][NEW-09]") {
  struct Keeps : torch::autograd::Function<Keeps> {
    static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
      ctx->save_for_backward({Tensor(), x, at::arange(3), Tensor(), at::ones({2}, at::kBool)});
      return x * 2;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   torch::autograd::variable_list grads) {
      const auto saved = ctx->get_saved_variables();
      if (saved.size() != 5 || saved[0].defined() || saved[3].defined() ||
          saved[2].scalar_type() != at::kLong || saved[4].scalar_type() != at::kBool) {
        throw std::logic_error("saved tensors came back changed");
      }
      return {grads[0] * 2 + saved[1] * 0};
    }
  };
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor sparse = (at::eye(4) * 3).to_sparse();
  auto check = [&](auto f, const Tensor& x) {
    Calls calls;
    require_same_grads(
        f,
        [&](const Tensor& t) {
          return remat::checkpoint({.early_stop = early_stop}, counted(calls, f), t);
        },
        x);
    CHECK(calls.count() == 2);
  };
  check([](const Tensor& t) { return Keeps::apply(t.sin()); }, leaf({3}));
  check([](const Tensor& t) { return at::exp(t * t); }, leaf({3}, at::kComplexFloat));
  check([&](const Tensor& t) { return at::mm(sparse, t).sin(); }, leaf({4, 2}));
  check([](const Tensor& t) { return at::gather(t.exp(), 0, at::arange(3).flip(0)); }, leaf({3}));
  check([](const Tensor& t) { return t.to(at::kHalf).sin().to(at::kFloat); }, leaf({3}));
  check([](const Tensor& t) { return t.to(at::kBFloat16).exp().to(at::kDouble); }, leaf({3}));
  check([](const Tensor& t) { return (t.narrow(0, 0, 0) * 2).exp().sum() + t.sin(); }, leaf({3}));
}

}  // namespace
