// Rule 10: a parameter, buffer or captured tensor that changed between the passes raises; nothing
// else.

#include <chrono>
#include <thread>

#include "tests/support/support.h"

namespace {

using Kind = remat::CheckpointError::Kind;
using remat::CheckpointError;
using remat::DeterminismCheck;

// ---- captures -----------------------------------------------------------------------------------

/// A captured tensor, what is done with it between the passes, and how the region uses it.
struct Capture {
  const char* what;
  std::function<Tensor()> make;
  std::function<void(Tensor&)> change;
};

TEST_CASE("a captured parameter or buffer that changed between the passes raises", "[rule-10]") {
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
         return remat::checkpoint(
             {.name = "layer 7"}, [&](const Tensor& u) { return u.mm(w).sin(); }, t * 2);
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

TEST_CASE("with the capture check off a recompute uses the new value", "[rule-10]") {
  const Tensor x = leaf({3});
  Tensor w = leaf({3});
  Calls calls;
  const Tensor y =
      remat::checkpoint({.capture_check = remat::CaptureCheck::Ignore},
                        counted(calls, [&](const Tensor& t) { return (t * w).sin() * w; }), x);
  {
    at::NoGradGuard no_grad;
    w.add_(1);
  }
  require_bit_equal(grad_of(y, {x}), grad_of((x * w).sin() * w, {x}));
  CHECK(calls.count() == 2);
}

TEST_CASE("an update that leaves the version alone is seen by its values only", "[rule-10]") {
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
          "[rule-10]") {
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

TEST_CASE("a captured sparse tensor that changed between the passes raises", "[rule-10]") {
  const bool compressed = GENERATE(true, false);
  CAPTURE(compressed);
  const Tensor x = leaf({4, 2});
  const auto sparse = [&](double value) {
    const Tensor dense = at::eye(4) * value;
    return compressed ? dense.to_sparse_csr() : dense.to_sparse();
  };
  Tensor adjacency = sparse(3);
  const auto f = [&](const Tensor& t) { return at::mm(adjacency, t).sin(); };
  require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), grad_of(f(x), {x}));
  const Tensor y = remat::checkpoint(f, x);
  Tensor before = adjacency;
  SECTION("in place") { adjacency.mul_(2); }
  SECTION("its values in place") {
    (compressed ? adjacency.values() : adjacency._values()).mul_(2);
  }
  SECTION("variable assigned") { adjacency = sparse(4); }
  SECTION("variable assigned, and the first one gone") {
    before.reset();
    adjacency = sparse(4);
  }
  CHECK(mismatch_of(y, x).kind() == Kind::CaptureChanged);
}

TEST_CASE("a captured variable with a history that the function assigns anew raises", "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3, 3}), w = leaf({3, 3});
  Tensor state = w * 2;
  const Tensor y = remat::checkpoint(
      {.early_stop = early_stop},
      [&](const Tensor& t) {
        state = (t + state.mm(w)).tanh();
        return state * 2;
      },
      x);
  CHECK(mismatch_of(y, w).kind() == Kind::CaptureChanged);
}

TEST_CASE("a captured tensor that the function returns counts as captured", "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3}), w = leaf({3});
  const auto make = [&] { return w * 2; };
  Tensor scale = make();
  const auto region = [&] {
    return remat::checkpoint(
        {.early_stop = early_stop},
        [&](const Tensor& t) { return std::make_pair((t * scale).sin(), scale); }, x);
  };
  require_bit_equal(grad_of(region().first, {x}), grad_of((x * scale).sin(), {x}));
  const auto [y, before] = region();
  scale = make();
  CHECK(mismatch_of(y, x).kind() == Kind::CaptureChanged);
}

// ---- no false alarms

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
    const Tensor y =
        remat::checkpoint({.early_stop = early_stop},
                          counted(calls, [&](const Tensor& t) { return f(t, &features); }), x);
    for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
    CHECK(features.size() >= 4);
    CHECK(calls.count() == 3);
  }
  SECTION("kept in forward only, and changed there before backward") {
    const Tensor y = remat::checkpoint(
        {.early_stop = early_stop},
        counted(
            calls,
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

TEST_CASE("what the function makes without grad may be returned, saved often and viewed",
          "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({64, 80});
  const auto f = [](const Tensor& t) {
    const Tensor mask = (t > 0).to(at::kFloat), order = t.detach().argsort(int64_t{1});
    const Tensor halves = mask.view({-1}).narrow(0, 0, 80);
    Tensor h = (t * mask).gather(1, order) * halves;
    for (int i = 0; i < 3; ++i) h = (h * mask.t().t()).sin() * halves.conj() * mask;
    return std::make_tuple(h.mm(mask.t()).sin(), mask, order, halves);
  };
  const auto y = remat::checkpoint({.early_stop = early_stop}, f, x);
  for (int i = 0; i < 2; ++i)
    require_bit_equal(grad_of(std::get<0>(y), {x}, {.retain_graph = true}),
                      grad_of(std::get<0>(f(x)), {x}));
}

TEST_CASE("a thread that lets go of what the function made a little late is no holder",
          "[rule-10]") {
  const Tensor x = leaf({64, 80});
  std::vector<std::thread> threads;
  const auto f = [&](const Tensor& t) {
    Tensor mask = (t > 0).to(at::kFloat);
    if (remat::is_recomputing())
      threads.emplace_back([mask] { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
    return (t * mask).sin() * 2;
  };
  const Tensor y = remat::checkpoint(f, x);
  const Tensors gradient = grad_of(y, {x});
  for (std::thread& each : threads) each.join();
  require_bit_equal(gradient, grad_of(f(x), {x}));
}

TEST_CASE("a sparse tensor that a parent makes may be shared with its nested regions",
          "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  const bool as_input = GENERATE(true, false);
  CAPTURE(early_stop, as_input);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({4, 2});
  const auto f = [&](const Tensor& t, bool nest) {
    const Tensor adjacency = (at::eye(4) * 3).to_sparse();
    const auto first = [adjacency](const Tensor& u) { return at::mm(adjacency, u).sin(); };
    const auto second = [](const Tensor& u, const Tensor& a) { return at::mm(a, u.exp()).tanh(); };
    if (!nest) return second(first(t), adjacency);
    const Tensor h = remat::checkpoint(first, t);
    return as_input ? remat::checkpoint(second, h, adjacency) : second(h, adjacency);
  };
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return f(t, true); }, x);
  for (int i = 0; i < 2; ++i)
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), grad_of(f(x, false), {x}));
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

TEST_CASE("a view that a parent makes without grad may be captured by its nested regions",
          "[rule-10]") {
  const Tensor x = leaf({4});
  auto f = [](const Tensor& t, bool nest) {
    const Tensor mask = at::arange(8, at::kFloat).narrow(0, 2, 4);  // its base is kept by it alone
    auto inner = [mask](const Tensor& u, const Tensor&) { return (u * mask).sin(); };
    return nest ? remat::checkpoint(inner, t, mask) : inner(t, mask);
  };
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return f(t, true); }, x);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x, false), {x}));
}

/// Saves both; reads the second one only.
struct ReadsSecond : torch::autograd::Function<ReadsSecond> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& t, const Tensor& w) {
    ctx->save_for_backward({w, t, w});
    return t * at::real(w);
  }
  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& g) {
    const Tensors saved = ctx->get_saved_variables();
    return {g[0] * at::real(saved[0] + saved[2]) / 2, Tensor()};
  }
};

TEST_CASE("a complex view that a parent makes without grad may be captured by its nested regions",
          "[rule-10]") {
  // Such a view refers to its base in ways that cannot be counted.
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({4}), w = at::rand({4}).requires_grad_(false);
  std::function<Tensor()> make;
  SECTION("a complex tensor") {
    make = [&] { return at::complex(w, w * 2); };
  }
  SECTION("a conjugate") {
    make = [&] { return at::complex(w, w * 2).conj(); };
  }
  SECTION("a view of a conjugate") {
    make = [&] { return at::complex(w, w * 2).conj().view({2, 2}).view({4}); };
  }
  auto f = [&](const Tensor& t, bool nest) {
    const Tensor made = make();
    const Tensor h = (t * at::real(made)).sin();
    auto inner = [made](const Tensor& u, const Tensor& v) {
      return (ReadsSecond::apply(u, v).cos() * at::imag(made)).sin() * at::real(v);
    };
    return nest ? remat::checkpoint(inner, h, made) : inner(h, made);
  };
  Calls calls;
  const Tensors plain = grad_of(f(x, false), {x});
  const Tensor y =
      remat::checkpoint(counted(calls, [&](const Tensor& t) { return f(t, true); }), x);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(calls.count() == 3);
}

TEST_CASE("a complex view that was replaced or that an outside variable holds counts as captured",
          "[rule-10]") {
  const bool replaced = GENERATE(true, false);
  CAPTURE(replaced);
  const Tensor x = leaf({4});
  auto make = [] { return at::complex(at::ones({4}), at::ones({4})).conj(); };
  Tensor w = make();
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        if (!replaced) w = make();
        return ReadsSecond::apply(t, w).sin();
      },
      x);
  if (replaced) w = make();
  CHECK(mismatch_of(y, x).kind() == Kind::CaptureChanged);
}

TEST_CASE("a result changed in place after the region gives the region's gradient", "[rule-10]") {
  const Tensor x = leaf({3});
  const Tensors plain = grad_of(x.sin().exp() * 2, {x});
  Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
  y.mul_(2);
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("an argument that hooks keep as it is, and that is changed in place, raises",
          "[rule-10][rule-2]") {
  // fuzz_selective_500752. LibTorch does not look at the version of what comes from hooks.
  const bool copies = GENERATE(true, false);
  const bool nested = GENERATE(true, false);
  CAPTURE(copies, nested);
  const Tensor x = leaf({3});
  const auto f = [](const Tensor& t) { return t.sin().exp(); };
  const auto g = [&](const Tensor& t) {
    return nested ? remat::checkpoint([&](const Tensor& t) { return remat::checkpoint(f, t); }, t)
                  : remat::checkpoint(f, t);
  };
  const Tensor argument = x * 2;
  const Tensors plain = grad_of(f(argument), {x}, {.retain_graph = true});
  Tensor y;
  {
    const remat::SavedTensorHooksGuard guard(
        [&](const Tensor& t) { return copies ? t.clone() : t; }, [](const Tensor& t) { return t; });
    y = g(argument);
  }
  argument.detach().zero_();
  if (copies) return require_bit_equal(grad_of(y, {x}), plain);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == Kind::InputChanged);
  CHECK_THAT(std::string(error.what()), contains("tensor 0 of the arguments"));
}

TEST_CASE("hooks that restore an argument in its own storage raise no alarm", "[rule-10][rule-2]") {
  const Tensor x = leaf({3}), argument = x * 2;
  const auto f = [](const Tensor& t) { return t.sin().exp(); };
  const Tensors plain = grad_of(f(argument), {x}, {.retain_graph = true});
  struct Copied {
    Tensor original, copy;
  };
  const remat::SavedTensorHooksGuard guard(
      [](const Tensor& t) { return Copied{t.detach(), t.detach().clone()}; },
      [](const Copied& saved) { return saved.original.copy_(saved.copy); });
  const Tensor y = remat::checkpoint(f, argument);
  for (int i = 0; i < 3; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
}

TEST_CASE("a tensor that requires grad otherwise than in forward does not shift what is saved",
          "[rule-10][rule-2]") {
  const bool freezes = GENERATE(true, false);
  const bool early_stop = GENERATE(true, false);
  const bool is_captured = GENERATE(true, false);
  CAPTURE(freezes, early_stop, is_captured);
  using Pair = std::function<Tensor(const Tensor&, const Tensor&)>;
  const std::vector<Pair> all{
      [](const Tensor& a, const Tensor& b) { return (a * b).sin() + 1; },
      [](const Tensor& a, const Tensor& b) { return (a.sin() * b).exp() + 1; },
      [](const Tensor& a, const Tensor& b) { return (a.sin() * (b + 1)).sin() + 1; },
      [](const Tensor& a, const Tensor& b) {
        return (a.sin() * b.view({2, -1}).view(-1)).sin() + 1;
      },
  };
  // Large enough for a stop before the last operator.
  const Tensor x = leaf({9000});
  for (const Pair& f : all) {
    const Tensor w = at::randn({9000}).set_requires_grad(freezes);
    const Tensors plain = grad_of(f(x, w), {x});
    const Tensor y = remat::checkpoint(
        {.early_stop = early_stop},
        [&](const Tensor& a, const Tensor& b) { return f(a, is_captured ? w : b); }, x,
        is_captured ? at::Tensor() : w);
    w.set_requires_grad(!freezes);
    if (!is_captured) {  // an argument comes back as it was
      require_bit_equal(grad_of(y, {x}), plain);
      continue;
    }
    const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
    CHECK((error.kind() == Kind::MetadataMismatch || error.kind() == Kind::CaptureChanged ||
           error.kind() == Kind::FewerTensors || error.kind() == Kind::MoreTensors));
  }
}

/// Its forward runs a backward, and saves when that is over.
struct SavesAfterBackward : torch::autograd::Function<SavesAfterBackward> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                        const Tensor& target) {
    const at::AutoGradMode grad_mode(true);
    const Tensor d = x.detach().requires_grad_();
    const Tensor loss = at::mse_loss(d, target);
    const Tensor g = torch::autograd::grad({loss}, {d})[0];
    ctx->save_for_backward({x});
    return remat::pin(g.detach() * 2);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    return {g[0] * ctx->get_saved_variables()[0], Tensor()};
  }
};

TEST_CASE("a Function that saves after a backward or a kept value is no mismatch", "[rule-10]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3}), target = at::randn({3});
  const auto f = [&](const Tensor& t) {
    return SavesAfterBackward::apply(t.sin(), target).exp().sin();
  };
  require_bit_equal(grad_of(remat::checkpoint({.early_stop = early_stop}, f, x), {x}),
                    grad_of(f(x), {x}));
}

TEST_CASE("a weight that is frozen after forward does no harm where it is saved all the same",
          "[rule-10]") {
  const bool casts = GENERATE(true, false);
  CAPTURE(casts);
  const Tensor x = leaf({1, 2, 5, 5}), w = leaf({2, 2, 3, 3});
  const auto f = [&](const Tensor& t) {
    const auto type = casts ? at::kBFloat16 : at::kFloat;
    return at::conv2d(t.to(type), w.to(type)).to(at::kFloat);
  };
  const Tensors plain = grad_of(f(x), {x});
  const Tensor y = remat::checkpoint(f, x);
  w.set_requires_grad(false);
  require_bit_equal(grad_of(y, {x}), plain);
}

TEST_CASE("a view without grad of an argument that is itself a leaf view is no mismatch",
          "[rule-10][rule-2]") {
  const Tensor base = at::randn({4, 4});
  const Tensor x = base[0].requires_grad_();
  const auto f = [](const Tensor& t) {
    Tensor view;
    {
      const at::NoGradGuard no_grad;
      view = t.view(-1);
    }
    return (t * view).sin() * 2;
  };
  require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), grad_of(f(x), {x}));
}

TEST_CASE("buffers that the function itself updates raise no alarm", "[rule-10]") {
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

}  // namespace

TEST_CASE("a captured leaf that is moved to another part of its storage is a changed capture",
          "[checkpoint][rule-10]") {
  const Tensor x = leaf({2}), flat = at::rand({4});
  Tensor w = flat.narrow(0, 0, 2).requires_grad_();
  const bool has_grad = GENERATE(true, false);
  w.set_requires_grad(has_grad);
  const Tensor y = remat::checkpoint([w](const Tensor& t) { return (t * w).sin(); }, x);
  w.set_data(flat.narrow(0, 2, 2));
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() == Kind::CaptureChanged);
}

TEST_CASE("a captured view of a leaf that is given other data is a changed capture",
          "[checkpoint][rule-10]") {
  const Tensor w = leaf({2, 3}), x = leaf({3});
  Tensor row = w[1];
  const Tensor y = remat::checkpoint([row](const Tensor& t) { return row * t * t; }, x);
  row.set_data(at::rand({3}));
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() == Kind::CaptureChanged);
}

TEST_CASE("a captured leaf whose variable is assigned a later result is a changed capture",
          "[rule-10]") {
  // As in meta learning, where each inner step makes fast weights of those before it.
  const Tensor x = leaf({2, 3});
  const Tensor first = leaf({3, 3});
  Tensor w = first;
  const auto f = [&](const Tensor& t) { return t.mm(w).sin(); };
  const Tensor inner = remat::checkpoint({.name = "inner"}, f, x).sum();
  const Tensor gradient = grad_of(inner, {first}, {.create_graph = true})[0];
  w = w - gradient * 0.1;
  const Tensor outer = remat::checkpoint(f, x);
  const CheckpointError error = mismatch_of(outer, first);
  CHECK(error.kind() == Kind::CaptureChanged);
  CHECK(error.region() == "inner");
  // A capture by value belongs to each region alone.
  Tensor v = first;
  const auto step = [&x](const Tensor& weight) {
    return remat::checkpoint([weight](const Tensor& t) { return t.mm(weight).sin(); }, x).sum();
  };
  const auto plain_step = [&x](const Tensor& weight) { return x.mm(weight).sin().sum(); };
  const auto after_two = [&](const auto& run) {
    const Tensor loss = run(v);
    return run(v - grad_of(loss, {v}, {.create_graph = true})[0] * 0.1);
  };
  require_bit_equal(grad_of(after_two(step), {first}), grad_of(after_two(plain_step), {first}));
}

TEST_CASE("a captured variable that was an argument too and is assigned another tensor is a change",
          "[checkpoint][rule-10]") {
  const Tensor s = at::rand({3}), x = leaf({3});
  Tensor alias = s;
  const Tensor y = remat::checkpoint(
      [&alias](const Tensor& s, const Tensor& t) { return ((s * t).sin() * alias * t).sin(); }, s,
      x);
  alias = at::rand({3});
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() == Kind::CaptureChanged);
}

TEST_CASE(
    "a captured leaf whose variable is assigned another leaf is a change unless they are equal",
    "[checkpoint][rule-10]") {
  const Tensor x = leaf({3}), first = leaf({3});
  Tensor w = first;
  const Tensor y = remat::checkpoint([&w](const Tensor& t) { return (t * w).sin(); }, x);
  const Tensor plain = grad_of((x * first).sin(), {x})[0];
  w = first.detach().clone().requires_grad_();
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], plain));
  w = (first.detach() + 1).requires_grad_();
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() == Kind::CaptureChanged);
}

TEST_CASE("a captured alias of an argument with a version of its own is looked at",
          "[checkpoint][rule-10]") {
  const Tensor s = at::rand({3}), x = leaf({3}), alias = s.data();
  const Tensor y = remat::checkpoint(
      [alias](const Tensor& s, const Tensor& t) { return ((s * t).sin() * alias * t).sin(); }, s,
      x);
  alias.mul_(2);
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() == Kind::CaptureChanged);
}

TEST_CASE("what a function makes once, keeps and returns may not be changed before backward",
          "[rule-10]") {
  // It looks made inside, and the recompute takes what is there.
  const Tensor x = leaf({4});
  Tensor mask;
  const auto f = [&mask](const Tensor& t) {
    if (!mask.defined()) mask = at::rand({4});
    return std::pair((t * mask).sin(), mask);
  };
  const Tensor y = remat::checkpoint(f, x).first;
  const Tensor plain = grad_of((x * mask).sin(), {x})[0];
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], plain));
  mask.mul_(2);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::CaptureChanged);
}
