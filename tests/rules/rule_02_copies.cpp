// Rule 2: arguments that are changed in place, and regions that keep copies of theirs.

#include <array>
#include <thread>

#include "tests/support/lazy_copies.h"
#include "tests/support/support.h"

using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::InputMode;
using Kind = remat::CheckpointError::Kind;

namespace {

/// As a block that begins with ReLU(inplace = true).
Tensor relu_block(Tensor t) {
  t.relu_();
  return (t.sin() * t).exp();
}

std::string inplace =
    "one of the variables needed for gradient computation has been modified by an "
    "inplace operation: ";

}  // namespace

// ---- the error --------------------------------------------------------------------------------

TEST_CASE("a function that writes to its argument is told so in backward, with the cure",
          "[rule-2][error]") {
  const Tensor x = leaf({3});
  const Tensor h = x * 2;
  const Tensor y = remat::checkpoint(
      {.name = "block 3", .location = {"train.cpp", 42}},
      [](const Tensor& w, Tensor t) { return relu_block(t) * w; }, leaf({3}), h);
  for (int i = 0; i < 2; ++i) {
    const CheckpointError error = mismatch_of(y, x);
    CHECK(error.kind() == Kind::InputChanged);
    CHECK(error.region() == "block 3");
    REQUIRE(error.mismatches().size() == 1);
    CHECK(error.mismatches()[0].position == 1);
    const std::string frame = std::to_string(error.frame_id());
    CHECK(text_of(error) ==
          "remat::checkpoint: " + inplace +
              "tensor 1 of the arguments of region \"block 3\" (frame " + frame +
              ", options at train.cpp:42), counted from 0, is at version 1; expected version 0 "
              "instead.\n"
              "Cause: the region's function writes to its own argument, as an in-place activation "
              "at its beginning does, and a recompute would start from the changed values.\n"
              "Hint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, so that the "
              "region keeps its own copy; or pass a clone (`x.clone()`), or let the function use "
              "the out-of-place operator.");
  }
}

TEST_CASE("an argument that is changed after the call is an error that says so",
          "[rule-2][error]") {
  const Tensor x = leaf({3});
  Tensor h = x * 2;
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin(); }, h);
  h.mul_(2);
  h.mul_(2);
  const CheckpointError error = mismatch_of(y, x);
  CHECK(error.kind() == Kind::InputChanged);
  CHECK_THAT(text_of(error), contains(inplace + "tensor 0 of the arguments of region (frame "));
  CHECK_THAT(text_of(error), contains("is at version 2; expected version 0 instead"));
  CHECK_THAT(text_of(error), contains("Cause: it was changed in place after the call"));
  CHECK_THAT(text_of(error), contains("InputMode::CopyOnWrite"));
  CHECK_THAT(text_of(error), contains("or call backward before the change."));
}

TEST_CASE("a write to another argument with the same memory is an error that says so",
          "[rule-2][error]") {
  const Tensor w = leaf({3});
  const Tensor a = at::rand({3});
  Tensor b = at::empty({0});
  b.set_data(a);  // another version counter
  const Tensor y = remat::checkpoint(
      [](const Tensor& a, Tensor b, const Tensor& w) {
        const Tensor first = (a * w).sin();
        b.add_(1);
        return first * w;
      },
      a, b, w);
  const CheckpointError error = mismatch_of(y, w);
  CHECK(error.kind() == Kind::InputChanged);
  CHECK_THAT(text_of(error), contains("tensor 0 of the arguments"));
  CHECK_THAT(text_of(error), contains("was written to through another tensor that shares its "
                                      "memory"));
}

TEST_CASE("a region whose function writes to its argument runs forward as without a region",
          "[rule-2]") {
  const Tensor x = leaf({3});
  const Tensor plain = relu_block(x * 2);
  CHECK(bit_equal(remat::checkpoint(relu_block, x * 2), plain));
  CHECK(bit_equal(remat::checkpoint(copies, relu_block, x * 2), plain));
}

// ---- copies: what runs --------------------------------------------------------------------------

TEST_CASE("with copies a function may write to its argument", "[rule-2][copies]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  Calls calls;
  const Tensor x = leaf({4, 5});
  const auto region = [&](const Tensor& t) {
    return remat::checkpoint(copies, counted(calls, relu_block), t * 2);
  };
  require_same_grads([](const Tensor& t) { return relu_block(t * 2); }, region, x);
  CHECK(calls.count() == 2);
  // Again and again, and to a higher order.
  const Tensor y = region(x), plain = relu_block(x * 2);
  for (int i = 0; i < 3; ++i)
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}),
                      grad_of(plain, {x}, {.retain_graph = true}));
  const auto second = [&](const Tensor& of) {
    const Tensor first = grad_of(of, {x}, {.create_graph = true})[0];
    return grad_of(first, {x})[0];
  };
  CHECK(bit_equal(second(region(x)), second(relu_block(x * 2))));
  drop_ready_nodes();
}

TEST_CASE("with copies an argument may be changed after the call, however it is",
          "[rule-2][copies]") {
  const Tensor w = leaf({3});
  const auto f = [](const Tensor& t, const Tensor& w) { return (t * w).sin() * w; };
  struct Change {
    const char* what;
    std::function<void(Tensor&)> change;
  };
  const std::vector<Change> changes{
      {"add_", [](Tensor& t) { t.add_(1); }},
      {"through .data", [](Tensor& t) { t.data().add_(1); }},
      {"through a view", [](Tensor& t) { t.view({3, 1}).select(0, 1).fill_(7); }},
      {"copy_", [](Tensor& t) { t.copy_(at::ones({3})); }},
      {"zero_", [](Tensor& t) { t.zero_(); }},
      {"out=", [](Tensor& t) { at::add_out(t, at::ones({3}), at::ones({3})); }},
      {"a pointer", [](Tensor& t) { t.data_ptr<float>()[0] = 5; }},
      {"an accessor", [](Tensor& t) { t.accessor<float, 1>()[1] = 5; }},
      {"other data", [](Tensor& t) { t.set_data(at::ones({3})); }},
      {"a larger storage", [](Tensor& t) { t.resize_({1000}).fill_(3); }},
      {"no storage", [](Tensor& t) { t.storage().unsafeGetStorageImpl()->reset(); }},
  };
  for (const auto& [what, change] : changes) {
    CAPTURE(what);
    Tensor s = at::rand({3});
    const Tensors plain = grad_of(f(s.clone(), w), {w});
    const Tensor y = remat::checkpoint(copies, f, s, w);
    const void* const address = s.const_data_ptr();
    change(s);
    if (std::string(what) == "add_") CHECK(s.const_data_ptr() == address);
    for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {w}, {.retain_graph = true}), plain);
  }
}

TEST_CASE("with copies a leaf may be stepped between forward and backward", "[rule-2][copies]") {
  const bool past_version = GENERATE(true, false);
  CAPTURE(past_version);
  const Tensor x = leaf({3});
  Tensor w = leaf({3});
  const auto f = [](const Tensor& t, const Tensor& w) { return (t * w).sin() * w; };
  const Tensors plain = grad_of(f(x, w), {x, w});
  const Tensor y = remat::checkpoint(copies, f, x, w);
  if (past_version) {
    w.data().add_(1);
  } else {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  require_bit_equal(grad_of(y, {x, w}), plain);
}

TEST_CASE("with copies a leaf that is as it was is itself in the recompute", "[rule-2][copies]") {
  const Tensor w = leaf({3});
  std::vector<bool> seen;
  const Tensor y = remat::checkpoint(
      copies,
      [&](const Tensor& t) {
        seen.push_back(t.is_same(w));
        return t.sin();
      },
      w);
  grad_of(y, {w});
  CHECK(seen == std::vector<bool>{true, true});
}

TEST_CASE("with copies an in-place operator on a leaf is refused as without a region",
          "[rule-2][copies]") {
  const Tensor w = leaf({3});
  const auto text = [](auto&& f) { return text_of(error_of<c10::Error>(f)); };
  CHECK(text([&] { remat::checkpoint(copies, relu_block, w); }) == text([&] { relu_block(w); }));
}

TEST_CASE("with copies roles, sizes and strides are those of the arguments", "[rule-2][copies]") {
  const Tensor base = leaf({4, 6});
  const Tensor h = base * 2;
  const Tensor complex = at::complex(at::rand({2, 3}), at::rand({2, 3}));
  const std::vector<Tensor> arguments{base,
                                      h,
                                      h.t(),
                                      h.narrow(0, 1, 2),
                                      h.narrow(1, 2, 1).expand({4, 6}),
                                      h.detach(),
                                      at::rand(3),
                                      base.t(),
                                      at::rand({0, 3}),
                                      at::arange(5),
                                      h.slice(1, 1, 6, 2),
                                      complex.conj(),
                                      at::rand({100}).narrow(0, 70, 5),
                                      at::empty({2}, at::kMeta)};
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    CAPTURE(i);
    std::vector<std::string> seen;
    const auto f = [&](const Tensor& w, const Tensor& t) {
      std::ostringstream text;
      text << t.sizes() << t.strides() << t.dtype() << t.requires_grad() << t.is_leaf()
           << t.is_conj() << t.unsafeGetTensorImpl()->is_wrapped_number();
      seen.push_back(text.str());
      return w.sin();
    };
    const Tensor w = leaf({3});
    grad_of(remat::checkpoint({.early_stop = false, .inputs = InputMode::CopyOnWrite}, f, w,
                              arguments[i]),
            {w});
    REQUIRE(seen.size() == 2);
    CHECK(seen[1] == seen[0]);
  }
}

TEST_CASE("with copies a function that looks at versions sees those of the call",
          "[rule-2][copies]") {
  const Tensor x = leaf({3});
  Tensor h = x * 2;
  h.add_(1);
  std::vector<int64_t> seen;
  const Tensor y = remat::checkpoint(
      copies,
      [&](Tensor t) {
        seen.push_back(t._version());
        t.relu_();
        seen.push_back(t._version());
        return t.sin();
      },
      h);
  h.add_(1);
  grad_of(y, {x});
  CHECK(seen == std::vector<int64_t>{1, 2, 1, 2});
}

TEST_CASE("with copies arguments that share memory go on sharing it", "[rule-2][copies]") {
  // The write to one is seen through the other, in the recompute as in forward.
  const bool early_stop = GENERATE(true, false);
  const bool is_part = GENERATE(true, false);  // of a larger storage: copied at once
  CAPTURE(early_stop, is_part);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor w = leaf({3});
  // Nothing saves an argument, so plain autograd runs it.
  const auto f = [](Tensor a, const Tensor& b, const Tensor& w) {
    const Tensor before = b + 1;
    a.mul_(3);
    return (before * w).sin() * (b + 2) * w;
  };
  const auto pair = [&] {
    const Tensor all = at::arange(is_part ? 100. : 6.).to(at::kFloat);
    return std::pair(all.narrow(0, 0, 4), all.narrow(0, 2, 3));
  };
  const auto [a, b] = pair();
  const Tensors plain = grad_of(f(a, b, w), {w});
  const auto [c, d] = pair();
  const Tensor y = remat::checkpoint(copies, f, c, d, w);
  c.fill_(100);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {w}, {.retain_graph = true}), plain);
}

TEST_CASE("with copies one tensor passed twice is one tensor", "[rule-2][copies]") {
  const auto f = [](Tensor a, const Tensor& b) {
    a.relu_();
    return a * b.sin();
  };
  const Tensor x = leaf({4});
  require_same_grads(
      [&](const Tensor& t) {
        const Tensor h = t * 2;
        return f(h, h);
      },
      [&](const Tensor& t) {
        const Tensor h = t * 2;
        return remat::checkpoint(copies, f, h, h);
      },
      x);
}

TEST_CASE("with copies a view of a result may be written to", "[rule-2][copies]") {
  const Tensor x = leaf({2, 3, 4});
  const auto flat = [](const Tensor& t) { return (t * 2).flatten(1); };
  require_same_grads(
      [&](const Tensor& t) { return relu_block(flat(t)); },
      [&](const Tensor& t) { return remat::checkpoint(copies, relu_block, flat(t)); }, x);
}

TEST_CASE("with copies operators that change the shape in place do no harm", "[rule-2][copies]") {
  const auto f = [](Tensor t) {
    t.unsqueeze_(0);
    return t.sin() * t.exp();
  };
  const Tensor x = leaf({4});
  require_same_grads([&](const Tensor& t) { return f(t * 2); },
                     [&](const Tensor& t) { return remat::checkpoint(copies, f, t * 2); }, x);
  Tensor h = x * 2;
  const Tensor y = remat::checkpoint(copies, f, h);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x * 2), {x}));
}

TEST_CASE("with copies a write past LibTorch's mutable pointers is an error", "[rule-2][copies]") {
  if (!has_lazy_copies) return;
  const Tensor w = leaf({3});
  Tensor s = at::rand({3});
  const Tensor y = remat::checkpoint(
      {.name = "scale", .inputs = InputMode::CopyOnWrite},
      [](const Tensor& s, const Tensor& w) { return (s * w).sin(); }, s, w);
  static_cast<float*>(s.storage().data_ptr().get())[0] = 5;  // constness of the pointer only
  s.unsafeGetTensorImpl()->bump_version();
  const CheckpointError error = mismatch_of(y, w);
  CHECK(error.kind() == Kind::InputChanged);
  CHECK_THAT(text_of(error), contains("tensor 0 of the arguments of region \"scale\""));
  CHECK_THAT(text_of(error), contains("past LibTorch's mutable pointers"));
}

TEST_CASE("with copies an argument may be given other data", "[rule-2][copies]") {
  const bool has_history = GENERATE(true, false);
  CAPTURE(has_history);
  const Tensor w = leaf({3}), p = leaf({3});
  const auto f = [](const Tensor& s, const Tensor& w) { return (s * w).sin(); };
  Tensor s = has_history ? p * 2 : at::rand({3});
  const Tensors plain = grad_of(f(s, w), {w}, {.retain_graph = true});
  const Tensor y = remat::checkpoint(copies, f, s, w);
  {
    const at::NoGradGuard no_grad;
    SECTION("set_data") {
      s.set_data(at::zeros({3}));
      s.fill_(3);
    }
    SECTION("set_") { s.set_(at::zeros({3})); }
  }
  require_bit_equal(grad_of(y, {w}), plain);
}

TEST_CASE("with copies memory from outside is copied at once", "[rule-2][copies]") {
  std::array<float, 3> outside{1, 2, 3};
  const Tensor w = leaf({3});
  const Tensor s = at::from_blob(outside.data(), {3});
  const auto f = [](const Tensor& s, const Tensor& w) { return (s * w).sin(); };
  const Tensors plain = grad_of(f(s, w), {w});
  const Tensor y = remat::checkpoint(copies, f, s, w);
  outside = {7, 8, 9};
  require_bit_equal(grad_of(y, {w}), plain);
}

TEST_CASE("with copies a sparse argument may be written to", "[rule-2][copies]") {
  const Tensor w = leaf({3}), s = at::rand({3}).to_sparse();
  const auto f = [](Tensor s, const Tensor& w) {
    s.mul_(2);
    return s.to_dense() * w * w;
  };
  const Tensors plain = grad_of(f(s.clone(), w), {w});
  const Tensor y = remat::checkpoint(copies, f, s, w);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {w}, {.retain_graph = true}), plain);
}

TEST_CASE("the guide: a function that writes to its argument", "[rule-2][copies][readme]") {
  const Tensor x = leaf({3});
  const auto block = [](at::Tensor t) { return t.relu_().exp(); };  // overwrites its argument
  const at::Tensor y = remat::checkpoint({.inputs = remat::InputMode::CopyOnWrite}, block, x * 2);
  require_bit_equal(grad_of(y, {x}), grad_of(block(x * 2), {x}));
}

// ---- copies: with others

TEST_CASE("with copies regions nest, whichever of them keeps copies", "[rule-2][copies]") {
  const bool early_stop = GENERATE(true, false);
  const bool outer_copies = GENERATE(true, false);
  CAPTURE(early_stop, outer_copies);
  const remat::EarlyStopGuard guard(early_stop);
  const auto f = [&](Tensor t, bool in_regions) {
    if (outer_copies) t.relu_();
    const Tensor h = t * 2;
    const Tensor s = in_regions ? remat::checkpoint(copies, relu_block, h) : relu_block(h);
    return (s * t).sin();
  };
  CheckpointOptions outer;
  if (outer_copies) outer.inputs = InputMode::CopyOnWrite;
  const Tensor x = leaf({4});
  require_same_grads([&](const Tensor& t) { return f(t * 3, false); },
                     [&](const Tensor& t) {
                       return remat::checkpoint(
                           outer, [&](Tensor u) { return f(std::move(u), true); }, t * 3);
                     },
                     x);
}

TEST_CASE("with copies a parent may change an argument of a region in it later",
          "[rule-2][copies]") {
  const auto f = [](const Tensor& t, bool in_region) {
    Tensor h = t * 2;
    const auto inner = [](const Tensor& u) { return u.sigmoid(); };  // saves no argument
    const Tensor s = in_region ? remat::checkpoint(copies, inner, h) : inner(h);
    h.mul_(7);
    return s * h;
  };
  const Tensor x = leaf({3});
  require_same_grads([&](const Tensor& t) { return f(t, false); },
                     [&](const Tensor& t) {
                       return remat::checkpoint([&](const Tensor& u) { return f(u, true); }, t);
                     },
                     x);
}

TEST_CASE("with copies hooks around a region are given the copies", "[rule-2][copies][hooks]") {
  const auto f = [](Tensor t, const Tensor& w) { return relu_block(std::move(t)) * w; };
  const Tensor x = leaf({4}), w = leaf({4});
  const Tensors plain = grad_of(f(x * 2, w), {x, w});
  for (const bool is_copied : {true, false}) {
    CAPTURE(is_copied);
    Tensor y;
    {
      const remat::SavedTensorHooksGuard hooks(
          [=](const Tensor& t) { return is_copied ? t.clone() : t; },
          [](const Tensor& kept) { return kept; });
      y = remat::checkpoint(copies, f, x * 2, w);
    }
    for (int i = 0; i < 2; ++i)
      require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), plain);
  }
  for (int kind = 0; kind < 2; ++kind) {
    Tensor y;
    {
      std::optional<remat::SaveOnCpuGuard> on_cpu;
      std::optional<remat::SaveOnDiskGuard> on_disk;
      if (kind == 0) on_cpu.emplace();
      if (kind == 1) on_disk.emplace(remat::SaveOnDiskOptions{.directory = "/tmp", .min_bytes = 0});
      y = remat::checkpoint(copies, f, x * 2, w);
    }
    for (int i = 0; i < 2; ++i)
      require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), plain);
  }
  const Tensor y =
      remat::checkpoint({.offload_inputs = true, .inputs = InputMode::CopyOnWrite}, f, x * 2, w);
  require_bit_equal(grad_of(y, {x, w}), plain);
}

TEST_CASE("with copies policies keep what they choose", "[rule-2][copies][policy]") {
  const std::string op = GENERATE("aten::sin", "aten::relu_", "aten::mul", "aten::exp");
  CAPTURE(op);
  const Tensor x = leaf({4});
  const Tensors plain = grad_of(relu_block(x * 2), {x});
  const Tensor y = remat::checkpoint(
      {.policy = remat::save_ops({op}), .inputs = InputMode::CopyOnWrite}, relu_block, x * 2);
  for (int i = 0; i < 2; ++i) {
    Tensors grads;
    try {
      grads = grad_of(y, {x}, {.retain_graph = true});
    } catch (const CheckpointError& error) {
      CHECK(error.kind() == Kind::SelectiveMutation);
      continue;
    }
    require_bit_equal(grads, plain);
  }
  drop_ready_nodes();
}

TEST_CASE("with copies checks of layout and values find nothing", "[rule-2][copies]") {
  const auto check = GENERATE(remat::DeterminismCheck::Layout, remat::DeterminismCheck::Values);
  const Tensor base = leaf({6, 4});
  const auto f = [](Tensor t) {
    t.relu_();
    return t.sin() * t;
  };
  for (const bool is_part : {true, false}) {
    const auto view = [&](const Tensor& b) {
      const Tensor h = b * 2;
      return is_part ? h.t().narrow(1, 4, 2) : h.t();
    };
    const Tensor y = remat::checkpoint(
        {.determinism_check = check, .inputs = InputMode::CopyOnWrite}, f, view(base));
    require_bit_equal(grad_of(y, {base}), grad_of(f(view(base)), {base}));
  }
}

TEST_CASE("with copies several threads may pass one tensor", "[rule-2][copies][threads]") {
  Tensor s = at::rand({1000});
  const auto f = [](const Tensor& s, const Tensor& w) { return (s * w).sin() * w; };
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int k = 0; k < 4; ++k)
    threads.emplace_back([&, k] {
      const Tensor w = at::full({1000}, 0.1 * k).requires_grad_();
      const Tensor plain = grad_of(f(s, w), {w})[0];
      for (int i = 0; i < 50; ++i) {
        const Tensor y = remat::checkpoint(copies, f, s, w);
        right += at::equal(grad_of(y, {w})[0], plain) ? 1 : 0;
      }
    });
  for (std::thread& each : threads) each.join();
  CHECK(right == 200);
}

// ---- copies: what they cost ---------------------------------------------------------------------

TEST_CASE("copies take no memory until somebody writes, then one storage a region",
          "[rule-2][copies][memory]") {
  if (!has_lazy_copies) return;
  const LiveBytes bytes;
  const Tensor w = leaf({1000});
  Tensor s = at::rand({1000});
  const auto f = [](const Tensor& s, const Tensor& w) { return (s * w).sum(); };
  const int64_t before = bytes.held();
  std::vector<Tensor> results;
  for (int i = 0; i < 2; ++i) results.push_back(remat::checkpoint(copies, f, s, w));
  CHECK(bytes.held() - before == 2 * 4);  // the results
  const void* const address = s.const_data_ptr();
  s.add_(1);
  CHECK(bytes.held() - before == 2 * 4 + 2 * 4000);
  s.add_(1);
  CHECK(bytes.held() - before == 2 * 4 + 2 * 4000);
  CHECK(s.const_data_ptr() == address);
  results.pop_back();
  CHECK(bytes.held() - before == 4 + 4000);
  results.clear();
  CHECK(bytes.held() == before);
  // A view of more than half of its memory is not copied yet, either.
  const Tensor most = s.narrow(0, 100, 900);
  results.push_back(
      remat::checkpoint(copies, f, most, w.detach().narrow(0, 0, 900).requires_grad_()));
  CHECK(bytes.held() - before == 4);
  results.clear();
  // A region that ended leaves nothing to be paid for.
  results.push_back(remat::checkpoint(copies, f, s, w));
  results.clear();
  s.add_(1);
  CHECK(bytes.held() == before);
}

TEST_CASE("a recompute copies an argument only if its function writes to it, or if it cannot wait",
          "[rule-2][copies][memory]") {
  constexpr int64_t size = 100'000;
  LiveBytes bytes;
  const Tensor w = leaf({size});
  const Tensor h = w * 2;
  const auto peak_of = [&](InputMode mode, bool writes) {
    const Tensor y = remat::checkpoint(
        {.inputs = mode},
        [=](Tensor t) {
          if (writes) t.add_(1);
          return t.sin();
        },
        writes ? h.clone() : h);
    const int64_t before = bytes.held();
    bytes.reset_peak();
    grad_of(y, {w});
    return (bytes.peak() - before) / (4 * size);
  };
  const int64_t shared = peak_of(InputMode::Shared, false);
  CHECK(peak_of(InputMode::CopyOnWrite, false) == shared + (has_lazy_copies ? 0 : 1));
  CHECK(peak_of(InputMode::CopyOnWrite, true) == shared + 1);
}

TEST_CASE("copies: the memory goes with the last who needs it", "[rule-2][copies][memory]") {
  if (!has_lazy_copies) return;
  const LiveBytes bytes;
  const Tensor w = leaf({1000});
  const int64_t before = bytes.held();
  {
    Tensor y;
    {
      Tensor s = at::rand({1000});
      y = remat::checkpoint(
          copies, [](const Tensor& s, const Tensor& w) { return (s * w).sum(); }, s, w);
    }
    CHECK(bytes.held() - before == 4000 + 4);  // the region's alone now
    grad_of(y, {w}, {.retain_graph = true});
    CHECK(bytes.held() - before == 4000 + 4);
  }
  CHECK(bytes.held() == before);
}
