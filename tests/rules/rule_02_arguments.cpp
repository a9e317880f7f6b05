// Rule 2: what arguments bring along beside their values, and functions that write to them.

#include <ATen/ops/_make_dual.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <filesystem>
#include <map>

#include "tests/support/support.h"
#include "tests/support/warnings.h"

using namespace remat::testing;
using Kind = remat::CheckpointError::Kind;

namespace {

/// Hooks that keep a copy and give back the same object each time.
remat::SavedTensorHooksGuard keeping_a_copy() {
  return {[](const Tensor& t) { return t.detach().clone(); },
          [](const Tensor& kept) { return kept; }};
}

Tensor writes_to_its_argument(const Tensor& x, Tensor s) {
  const Tensor y = (x * (s + 1)).sin();
  s.add_(1);
  return (y * s).sin() * x;
}

/// The gradient of `x` by plain autograd, on copies.
Tensor plain_grad(const std::function<Tensor(const Tensor&, Tensor)>& f, const Tensor& x,
                  const Tensor& s) {
  const auto hooks = keeping_a_copy();
  const Tensor leaf = copy_of(x);
  return grad_of(f(leaf, s.clone()), {leaf})[0];
}

void require_thrice(const Tensor& y, const Tensor& x, const Tensor& expected) {
  for (int i = 0; i < 3; ++i)
    CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
}

}  // namespace

TEST_CASE("a region with a forward-mode tangent runs plainly, or is refused", "[rule-2]") {
  struct Level {
    const uint64_t index = torch::autograd::ForwardADLevel::get_next_idx();
    ~Level() { torch::autograd::ForwardADLevel::release_idx(index); }
  } level;
  const Tensor x = leaf({3});
  Calls calls;
  const auto f = counted(calls, [](const Tensor& t) { return t.sin().exp(); });
  {
    const Tensor dual = at::_make_dual(x, at::ones({3}), static_cast<int64_t>(level.index));
    const auto error = error_of<remat::CheckpointError>(
        [&] { remat::checkpoint({.transforms = remat::Transforms::Refuse}, f, dual); });
    CHECK(error.kind() == Kind::Unsupported);
    CHECK(std::string(error.what_without_backtrace()) ==
          "remat::checkpoint: an argument carries a forward-mode tangent.\n"
          "Cause: forward-mode AD cannot follow a recompute.\n"
          "Hint: call the function without remat::checkpoint there, or leave "
          "CheckpointOptions::transforms at RunPlainly.");
    CHECK(calls.count() == 0);
    const auto tangent_of = [&](const Tensor& t) {
      return t._fw_grad(static_cast<int64_t>(level.index));
    };
    // Forward over reverse: the gradient's tangent is a product with the Hessian.
    const auto all_of = [&](const Tensor& y) {
      const Tensor grad = grad_of(y, {x}, {.create_graph = true})[0];
      return Tensors{tangent_of(y), grad.detach(), tangent_of(grad)};
    };
    for (int i = 0; i < 2; ++i) {
      const Warnings warnings;
      const auto product = [&](const Tensor& a, const Tensor& b) { return f(a * b); };
      require_bit_equal(all_of(remat::checkpoint(product, at::ones({3}), dual)), all_of(f(dual)));
      CHECK(warnings.texts.size() == (i == 0 ? 1 : 0));
    }
    CHECK(calls.count() == 4);
  }
  require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), grad_of(f(x), {x}));
}

TEST_CASE(
    "a function may write to an argument of which hooks keep a copy, as often as it is recomputed",
    "[checkpoint][rule-2]") {
  const Tensor x = leaf({3}), s = at::rand({3});
  const Tensor expected = plain_grad(writes_to_its_argument, x, s);
  Calls calls;
  Tensor y, twice;
  {
    const auto hooks = keeping_a_copy();
    y = remat::checkpoint(counted(calls, writes_to_its_argument), x, s);
    twice = y * 2;
  }
  require_thrice(y, x, expected);
  CHECK(calls.count() == 4);
  CHECK(bit_equal(grad_of(twice, {x})[0], 2 * expected));
}

TEST_CASE("a function may write to an argument that waits on the disk", "[checkpoint][rule-2]") {
  const Tensor x = leaf({3}), s = at::rand({3});
  const Tensor expected = plain_grad(writes_to_its_argument, x, s);
  Tensor y;
  {
    const remat::SaveOnDiskGuard disk({std::filesystem::temp_directory_path(), 0});
    y = remat::checkpoint(writes_to_its_argument, x, s);
  }
  require_thrice(y, x, expected);
}

TEST_CASE("a write through a view of an argument reaches no other recompute",
          "[checkpoint][rule-2]") {
  const auto f = [](const Tensor& x, Tensor s) {
    const Tensor y = (x * (s + 1)).sin();
    s.t().select(0, 1).mul_(2);
    return (y * s.clone()).sin() * x;
  };
  const Tensor x = leaf({2, 3}), s = at::rand({3, 2}).t();
  const Tensor expected = plain_grad(f, x, s.clone());
  Tensor y;
  {
    const auto hooks = keeping_a_copy();
    y = remat::checkpoint({.determinism_check = remat::DeterminismCheck::Values}, f, x, s);
  }
  require_thrice(y, x, expected);
}

TEST_CASE("two arguments that share memory stay together when hooks keep them together",
          "[checkpoint][rule-2]") {
  const auto f = [](const Tensor& x, Tensor s, const Tensor& view) {
    const Tensor y = (x * view.clone()).sin();
    s.add_(1);
    return (y * (view.clone() * x)).sin();
  };
  const Tensor x = leaf({4, 4}), s = at::rand({4, 4}), plain = s.clone();
  const Tensor copy = copy_of(x);
  const Tensor expected = grad_of(f(copy, plain, plain.view({4, 4})), {copy})[0];
  Tensor y;
  {
    const remat::SaveOnDiskGuard disk({std::filesystem::temp_directory_path(), 0});
    y = remat::checkpoint(f, x, s, s.view({4, 4}));
  }
  require_thrice(y, x, expected);
}

TEST_CASE("two arguments that share memory and that hooks part are an error if one is written to",
          "[checkpoint][rule-2]") {
  const Tensor x = leaf({3}), s = at::rand({3});
  const auto region = [&](const auto& f) {
    const auto hooks = keeping_a_copy();
    return remat::checkpoint({.name = "pair"}, f, x, s, s.view({3}));
  };
  const Tensor written = region([](const Tensor& x, Tensor s, const Tensor& view) {
    const Tensor y = (x * view).sin();
    s.add_(1);
    return (y * (view * x)).sin();
  });
  const auto error =
      error_of<remat::CheckpointError>([&] { grad_of(written, {x}, {.retain_graph = true}); });
  CHECK(error.kind() == Kind::Unsupported);
  CHECK(error.region() == "pair");
  REQUIRE(error.mismatches().size() == 1);
  CHECK(error.mismatches()[0].position == 1);
  CHECK_THAT(error.what(), contains("shares its memory with another argument"));
  const Tensor read = region(
      [](const Tensor& x, const Tensor& s, const Tensor& view) { return (x * s * view).sin(); });
  CHECK(grad_of(read, {x})[0].defined());
}

TEST_CASE("a captured alias of an argument that the function writes to is a changed capture",
          "[checkpoint][rule-2][rule-10]") {
  const Tensor x = leaf({3}), s = at::rand({3});
  Tensor y;
  {
    const auto hooks = keeping_a_copy();
    y = remat::checkpoint(
        [s](const Tensor& x, Tensor argument) {
          const Tensor y = (x * s).sin();
          argument.add_(1);
          return (y * x).sin();
        },
        x, s);
  }
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() == Kind::CaptureChanged);
}

TEST_CASE(
    "a function that writes to an argument which hooks keep as it is gets an error that says so",
    "[checkpoint][rule-2]") {
  const Tensor x = leaf({3}), s = at::rand({3});
  Tensor y;
  {
    const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t.detach(); },
                                             [](const Tensor& kept) { return kept; });
    y = remat::checkpoint({.name = "writer"}, writes_to_its_argument, x, s);
  }
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == Kind::InputChanged);
  CHECK_THAT(error.what(), contains("modified by an inplace operation"));
  CHECK_THAT(error.what(), contains("tensor 1 of the arguments of region \"writer\""));
  CHECK_THAT(error.what(), contains("the region's function writes to its own argument"));
}

TEST_CASE("a recompute that writes to an argument which forward left alone is an error each time",
          "[checkpoint][rule-2][rule-10]") {
  const Tensor x = leaf({3}), s = at::rand({3});
  Tensor y;
  {
    const auto hooks = keeping_a_copy();
    y = remat::checkpoint(
        {.early_stop = false},
        [](const Tensor& x, Tensor s) {
          const Tensor y = (x * s).sin();
          if (remat::is_recomputing()) s.add_(1);
          return y * 2;
        },
        x, s);
  }
  for (int i = 0; i < 2; ++i) {
    const auto error =
        error_of<remat::CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
    CHECK(error.kind() == Kind::InputChanged);
    CHECK_THAT(error.what(), contains("a recompute wrote to tensor 1"));
  }
}

TEST_CASE("an argument that is given other data after the call is an error that names it",
          "[checkpoint][rule-2][rule-10]") {
  const Tensor x = leaf({3});
  const auto region = [&](const Tensor& s, remat::CaptureCheck check) {
    return remat::checkpoint(
        {.name = "scale", .capture_check = check},
        [](const Tensor& x, const Tensor& s) { return (x * s).sin(); }, x, s);
  };
  const auto change = [](const std::string& how, Tensor& s) {
    if (how == "set_data") s.set_data(at::full({3}, 100.0));
    if (how == "set_data, of a view of it") s.set_data(s.as_strided({3}, {1}, 1));
    if (how == "storage") s.unsafeGetTensorImpl()->set_storage_keep_dtype(at::ones({3}).storage());
  };
  for (const std::string how : {"set_data", "set_data, of a view of it", "storage"}) {
    INFO(how);
    Tensor s = at::rand({4}).narrow(0, 0, 3);
    const Tensor y = region(s, remat::CaptureCheck::Raise);
    change(how, s);
    const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
    CHECK(error.kind() == Kind::InputChanged);
    CHECK_THAT(error.what(), contains("tensor 1 of the arguments of region \"scale\""));
    CHECK_THAT(error.what(), contains("given other data"));
  }
  Tensor s = at::rand({3});
  const Tensor ignored = region(s, remat::CaptureCheck::Ignore);
  s.set_data(at::full({3}, 2.0));
  CHECK(bit_equal(grad_of(ignored, {x})[0], 2 * (x * 2).cos().detach()));
}

TEST_CASE("an emptied argument is an error, or the function may fill it before it reads",
          "[checkpoint][rule-2][rule-10]") {
  const Tensor x = leaf({3});
  for (const auto check : {remat::CaptureCheck::Raise, remat::CaptureCheck::Ignore}) {
    Tensor h = x * 2;
    const Tensor values = copy_of(h);
    const Tensor y = remat::checkpoint(
        {.capture_check = check},
        [&](const Tensor& t) {
          if (t.storage().nbytes() == 0) {
            const std::size_t num_bytes = values.storage().nbytes();
            t.storage().set_data_ptr(t.storage().allocator()->allocate(num_bytes));
            t.storage().set_nbytes(num_bytes);
            t.data().copy_(values);
          }
          return t.sin().exp();
        },
        h);
    h.storage().set_data_ptr({});
    h.storage().set_nbytes(0);
    if (check == remat::CaptureCheck::Raise) {
      const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
      CHECK(error.kind() == Kind::InputChanged);
      CHECK_THAT(error.what(), contains("CaptureCheck::Ignore"));
    } else {
      require_bit_equal(grad_of(y, {x}), grad_of((x * 2).sin().exp(), {x}));
    }
  }
}

TEST_CASE("an argument that is given its own data is unchanged", "[checkpoint][rule-2]") {
  const Tensor x = leaf({3});
  Tensor s = at::rand({3});
  const Tensor y =
      remat::checkpoint([](const Tensor& x, const Tensor& s) { return (x * s).sin(); }, x, s);
  s.set_data(s.detach());
  CHECK(bit_equal(grad_of(y, {x})[0], (s * (x * s).cos()).detach()));
}

TEST_CASE("a leaf that is given other data after the call counts as it was",
          "[checkpoint][rule-2]") {
  Tensor x = leaf({3});
  const Tensor copy = copy_of(x);
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
  x.set_data(at::ones({3}));
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of(copy.sin().exp(), {copy})[0]));
}

TEST_CASE("an argument that hooks keep as the object that it is, given other data, is an error",
          "[checkpoint][rule-2][rule-10]") {
  const Tensor x = leaf({3});
  Tensor s = at::rand({3}), y;
  {
    const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t; },
                                             [](const Tensor& kept) { return kept; });
    y = remat::checkpoint([](const Tensor& x, const Tensor& s) { return (x * s).sin(); }, x, s);
  }
  s.set_data(at::ones({3}));
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {x}); }).kind() == Kind::InputChanged);
}

TEST_CASE("a leaf comes back as the object that it is", "[checkpoint][rule-2]") {
  const bool has_hooks = GENERATE(false, true);
  Tensor x = leaf({3});
  x.mutable_grad() = at::rand({3});
  std::map<const void*, int> seen;
  std::vector<bool> answers;
  const auto f = [&seen, &answers, x](const Tensor& argument) {
    ++seen[argument.unsafeGetTensorImpl()];
    answers.push_back(argument.is_same(x) && argument.is_leaf() && argument.grad().defined());
    return (argument * argument.grad()).sin().exp();
  };
  const Tensor expected = grad_of(f(x), {x})[0];
  Tensor y;
  if (has_hooks) {
    const auto hooks = keeping_a_copy();
    y = remat::checkpoint(f, x);
  } else {
    y = remat::checkpoint(f, x);
  }
  require_thrice(y, x, expected);
  CHECK(answers == std::vector<bool>(5, true));
  CHECK(seen.size() == 1);
}

TEST_CASE("hooks that change a leaf's values give the recompute what they gave",
          "[checkpoint][rule-2]") {
  const Tensor x = leaf({3});
  Tensor y;
  {
    const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t.detach() * 2; },
                                             [](const Tensor& kept) { return kept; });
    y = remat::checkpoint([](const Tensor& t) { return t.sin(); }, x);
  }
  CHECK(bit_equal(grad_of(y, {x})[0], (x.detach() * 2).cos()));
}

TEST_CASE("a leaf as it is gets the gradients of the function's own backward once",
          "[checkpoint][rule-2][rule-14]") {
  const auto f = [](const Tensor& t) {
    const Tensor y = (t * 2).sin();
    y.sum().backward({}, /*retain_graph=*/true);
    return (y.exp() * t).sin();
  };
  const Tensor x = leaf({3}), plain = copy_of(x);
  f(plain).sum().backward();
  remat::checkpoint(f, x).sum().backward();
  CHECK(bit_equal(x.grad(), plain.grad()));
}

TEST_CASE("a result comes back with its output number and with the grad that it retains",
          "[checkpoint][rule-2]") {
  const auto f = [](const Tensor& t) {
    const double factor =
        static_cast<double>(t.output_nr() + (t.retains_grad() ? 10 : 0) + (t.is_leaf() ? 100 : 0));
    return (t * factor * torch::autograd::impl::get_autograd_meta(t)->grad_).sin().exp();
  };
  const auto column_of = [](const Tensor& x) {
    const Tensor column = x.mul(1).unbind(1)[2];
    column.retain_grad();
    column.sum().backward({}, /*retain_graph=*/true);
    return column;
  };
  const Tensor x = leaf({2, 3}), copy = copy_of(x);
  const Tensor expected = grad_of(f(column_of(copy)), {copy})[0];
  require_thrice(remat::checkpoint(f, column_of(x)), x, expected);
}

TEST_CASE("a leaf that was frozen after the call counts as it was", "[checkpoint][rule-2]") {
  Tensor x = leaf({3});
  const Tensor w = leaf({3}), copy = copy_of(w);
  const auto f = [](const Tensor& x, const Tensor& w) {
    return ((x.requires_grad() ? x * 2 : x * 3) * w).sin().exp();
  };
  const Tensor expected = grad_of(f(x, copy), {copy})[0];
  const Tensor y = remat::checkpoint(f, x, w);
  x.set_requires_grad(false);
  CHECK(bit_equal(grad_of(y, {w})[0], expected));
  CHECK_FALSE(x.requires_grad());
}

TEST_CASE("an argument that is a view comes back as one, another one does not",
          "[checkpoint][rule-2]") {
  const auto f = [](const Tensor& t) { return (t.is_view() ? t * 2 : t * 3).sin().exp(); };
  const Tensor x = leaf({4}), copy = copy_of(x);
  const Tensor expected = grad_of(f(copy.mul(1).slice(0, 0, 3)), {copy})[0];
  require_thrice(remat::checkpoint(f, x.mul(1).slice(0, 0, 3)), x, expected);
  require_thrice(remat::checkpoint(f, x.mul(1)), x, grad_of(f(copy.mul(1)), {copy})[0]);
}

TEST_CASE("an argument that is a view may be written to, and a gradient taken of it",
          "[checkpoint][rule-2][rule-6]") {
  const auto writes = [](Tensor t) {
    t.mul_(2);
    return t.sin().exp();
  };
  const auto takes_gradient = [](const Tensor& t) {
    const Tensor g = torch::autograd::grad({t.sin().sum()}, {t})[0];
    return (g * t).sin().exp();
  };
  const remat::CheckpointOptions copies{.inputs = remat::InputMode::CopyOnWrite};
  const Tensor x = leaf({4}), copy = copy_of(x);
  const auto view_of = [](const Tensor& t) { return t.mul(1).slice(0, 0, 3); };
  require_thrice(remat::checkpoint(copies, writes, view_of(x)), x,
                 grad_of(writes(view_of(copy)), {copy})[0]);
  require_thrice(remat::checkpoint(takes_gradient, view_of(x)), x,
                 grad_of(takes_gradient(view_of(copy)), {copy})[0]);
}

TEST_CASE("a sparse argument that hooks keep as it is and the function writes to is an error",
          "[checkpoint][rule-2]") {
  const Tensor w = leaf({3}), s = at::rand({3}).to_sparse();
  Tensor y;
  {
    const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t; },
                                             [](const Tensor& kept) { return kept; });
    y = remat::checkpoint(
        [](Tensor s, const Tensor& w) {
          s.mul_(2);
          return s.to_dense() * w * w;
        },
        s, w);
  }
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(y, {w}); }).kind() == Kind::InputChanged);
}

TEST_CASE(
    "an argument that the function sets to another one's storage and writes to spoils neither",
    "[checkpoint][rule-2]") {
  const auto f = [](Tensor s, const Tensor& other, const Tensor& w) {
    s.set_(other);
    s.mul_(2);
    return s * w * w;
  };
  const Tensor w = leaf({3}), s = at::rand({3}), other = at::rand({3}), copy = copy_of(w);
  const Tensor expected = grad_of(f(s.clone(), other.clone(), copy), {copy})[0];
  Tensor y;
  {
    const auto hooks = keeping_a_copy();
    y = remat::checkpoint(f, s, other, w);
  }
  require_thrice(y, w, expected);
}

TEST_CASE("a leaf is itself in a function that takes gradients of it",
          "[checkpoint][rule-2][rule-6]") {
  const auto f = [](const Tensor& t, const Tensor& same) {
    const Tensor inner =
        torch::autograd::grad({(t * t).sin().sum()}, {t}, {}, true, /*create_graph=*/true)[0];
    return (t.is_same(same) ? inner * t : inner).sin().exp() * t.grad();
  };
  Tensor x = leaf({3});
  x.mutable_grad() = at::rand({3});
  const Tensor expected = grad_of(f(x, x), {x})[0];
  const Tensor y = remat::checkpoint([f, x](const Tensor& t) { return f(t, x); }, x);
  require_thrice(y, x, expected);
}

TEST_CASE("a hook that a leaf got after the call is none of the function's own gradients'",
          "[checkpoint][rule-2][rule-6]") {
  const auto f = [](const Tensor& t) {
    const Tensor inner = torch::autograd::grad({(t * t).sin().sum()}, {t}, {}, true)[0];
    return (inner.detach() * t).sin().exp();
  };
  const Tensor x = leaf({3}), copy = copy_of(x);
  const Tensor expected = grad_of(f(copy), {copy})[0];
  const Tensor y = remat::checkpoint(f, x);
  x.register_hook([](const Tensor& gradient) { return gradient * 2; });
  CHECK(bit_equal(grad_of(y, {x})[0], 2 * expected));
}

TEST_CASE(
    "a function that writes to its own argument gets an error that names it, and leaks nothing",
    "[checkpoint][rule-2][rule-13]") {
  const Tensor w = leaf({3});
  const int64_t frames = remat::counters().frames_alive;
  {
    const Tensor out = at::zeros({2, 3});
    const Tensor y = remat::checkpoint(
        {.name = "writer"},
        [](Tensor out, const Tensor& w) {
          out.select(0, 0).copy_(w * w);
          return (out * w).sin();
        },
        out, w);
    const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {w}); });
    CHECK(error.kind() == Kind::InputChanged);
    CHECK_THAT(error.what(),
               contains("modified by an inplace operation: tensor 0 of the arguments"));
    CHECK_THAT(error.what(), contains("region \"writer\""));
  }
  grad_of(w.sin(), {w});  // the engine lets go of a failed backward when the next one begins
  CHECK(remat::counters().frames_alive == frames);
}
