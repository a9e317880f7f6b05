// Saved-tensor hooks for plain C++ programs: on one tensor, in a scope, nested, disabled, misused.

#include <filesystem>
#include <fstream>

#include "tests/support/saved_hooks.h"
#include "tests/support/saved_tensors.h"

using remat::checkpoint;
using remat::DisableSavedTensorHooksGuard;
using remat::SavedTensorHooksGuard;
using torch::autograd::AutogradContext;
using torch::autograd::Function;

namespace {

constexpr auto in_place_message = "A saved tensor pack hook is modifying its input in place.";

}  // namespace

// ---- per tensor: LibTorch's own hooks keep working -------------------------------------------

TEST_CASE("hooks registered on one saved tensor work beside the runtime", "[hooks]") {
  const Tensor start = leaf({5});
  const bool is_leaf = GENERATE(true, false);
  const Tensor a = is_leaf ? start : 1 + start;
  const auto grad = [&](const Tensor& y) { return grad_of(y, {start}, {.retain_graph = true})[0]; };
  using Mul = nodes::MulBackward0;
  SECTION("pack x2, unpack /2 on both operands") {
    const Tensor y = a * a;
    register_hooks(saved_of(y, &Mul::self_), doubled, halved);
    register_hooks(saved_of(y, &Mul::other_), doubled, halved);
    const Tensor self = read_saved(y, &Mul::self_);
    CHECK(at::equal(self, a));
    CHECK((self.grad_fn() == a.grad_fn()));
    CHECK(at::equal(read_saved(y, &Mul::other_), a));
    CHECK(at::equal(grad(y), 2 * a));
  }
  SECTION("pack x2, unpack as it is, on one operand") {
    const Tensor y = a * a;
    register_hooks(saved_of(y, &Mul::self_), doubled, identity);
    CHECK(at::equal(read_saved(y, &Mul::self_), 2 * a));
    CHECK(at::equal(read_saved(y, &Mul::other_), a));
    CHECK(at::equal(grad(y), 3 * a));
  }
  SECTION("identity hooks and a second-order gradient") {
    const Tensor y = a.pow(3);
    register_hooks(saved_of(y, &nodes::PowBackward0::self_), identity, identity);
    const Tensor first = grad_of(y, {start}, {.create_graph = true})[0];
    CHECK(at::allclose(grad_of(first, {start})[0], 6 * a));
  }
  SECTION("a pack that changes its input") {
    const Tensor y = a * a;
    CHECK_THROWS_WITH(register_hooks(
                          saved_of(y, &Mul::self_), [](Tensor t) { return t.mul_(2); }, identity),
                      contains(in_place_message));
  }
}

TEST_CASE("hooks registered on a saved result give it back with its node", "[hooks]") {
  const Tensor a = leaf({5});
  const Tensor y = a.exp();
  register_hooks(saved_of(y, &nodes::ExpBackward0::result_), identity, identity);
  const Tensor saved = read_saved_output(y, &nodes::ExpBackward0::result_);
  CHECK(at::equal(saved, y));
  CHECK((saved.grad_fn() == y.grad_fn()));
  y.sum().backward();
  CHECK(at::equal(a.grad(), y));
}

// ---- the guard -------------------------------------------------------------------------------

TEST_CASE("a hooks guard sees every tensor that is saved in its scope", "[hooks]") {
  const Tensor a = leaf({5});
  using Mul = nodes::MulBackward0;
  Calls packs, unpacks;
  const auto square_under = [&](auto pack, auto unpack) {
    packs.reset();
    unpacks.reset();
    const SavedTensorHooksGuard guard(counted(packs, pack), counted(unpacks, unpack));
    Tensor y = a * a;
    CHECK(packs.count() == 2);
    CHECK(unpacks.count() == 0);
    return y;
  };
  Tensor y = square_under(identity, identity);
  CHECK(at::equal(grad_of(y, {a})[0], 2 * a));
  CHECK(unpacks.count() == 2);

  y = square_under(doubled, halved);
  CHECK(at::equal(read_saved(y, &Mul::self_), a));
  CHECK(at::equal(grad_of(y, {a})[0], 2 * a));

  y = square_under(doubled, identity);
  CHECK(at::equal(read_saved(y, &Mul::self_), 2 * a));
  CHECK(at::equal(read_saved(y, &Mul::other_), 2 * a));
  CHECK(at::equal(grad_of(y, {a})[0], 4 * a));

  packs.reset();
  CHECK_FALSE(hooks_are_active());
  y = a * a;
  CHECK(packs.count() == 0);
  CHECK(at::equal(grad_of(y, {a})[0], 2 * a));
}

TEST_CASE("a saved result goes through the hooks and keeps its node", "[hooks]") {
  const Tensor a = leaf({5});
  Tensor y;
  {
    const SavedTensorHooksGuard guard(identity, identity);
    y = a.exp();
  }
  const Tensor saved = read_saved_output(y, &nodes::ExpBackward0::result_);
  CHECK(at::equal(saved, y));
  CHECK((saved.grad_fn() == y.grad_fn()));
  y.sum().backward();
  CHECK(at::equal(a.grad(), y));
}

TEST_CASE("identity hooks on a saved result make no cycle", "[hooks][rule-13]") {
  CHECK(graph_dies([](const Tensor& a) {
    const SavedTensorHooksGuard guard(identity, identity);
    return a.exp().sin().exp();
  }));
}

TEST_CASE("in nested guards the innermost pair is called", "[hooks]") {
  const Tensor a = leaf({5});
  Calls outer, inner;
  const SavedTensorHooksGuard outer_guard(counted(outer, identity), identity);
  Tensor y;
  {
    const SavedTensorHooksGuard inner_guard(counted(inner, identity), identity);
    y = a.sin();
    CHECK(inner.count() == 1);
    CHECK(outer.count() == 0);
  }
  y = y.sin();
  CHECK(inner.count() == 1);
  CHECK(outer.count() == 1);
  CHECK(at::equal(grad_of(y, {a})[0], grad_of(a.sin().sin(), {a})[0]));
}

TEST_CASE("pack may return any type, also one that can only be moved", "[hooks]") {
  const Tensor a = leaf({5});
  struct Box {
    std::unique_ptr<std::vector<float>> values;
    std::vector<int64_t> sizes;
  };
  Tensor y;
  {
    const SavedTensorHooksGuard guard(
        [](const Tensor& t) {
          const Tensor flat = t.contiguous();
          return Box{std::make_unique<std::vector<float>>(
                         flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()),
                     t.sizes().vec()};
        },
        [](const Box& box) {
          return at::from_blob(box.values->data(), box.sizes, at::TensorOptions()).clone();
        });
    y = a * a;
  }
  CHECK(at::equal(grad_of(y, {a})[0], 2 * a));
}

TEST_CASE("the functions live until the guard and the last packed tensor are gone", "[hooks]") {
  const Alive alive;
  const Tensor a = leaf({5});
  Tensor y;
  {
    const SavedTensorHooksGuard guard([probe = alive.probe()](const Tensor& t) { return t; },
                                      [probe = alive.probe()](const Tensor& t) { return t; });
    CHECK(alive.count() == 2);
    y = a.sin();
  }
  CHECK(alive.count() >= 1);  // unpack is still needed
  y = Tensor();
  CHECK(alive.count() == 0);
}

TEST_CASE("an exception of a hook keeps its type", "[hooks][rule-12]") {
  struct UserError : std::exception {
    const char* what() const noexcept override { return "user"; }
  };
  const Tensor a = leaf({5});
  {
    const SavedTensorHooksGuard guard([](const Tensor&) -> Tensor { throw UserError(); }, identity);
    CHECK_THROWS_AS(a.sin(), UserError);
    CHECK(hooks_are_active());
  }
  CHECK_FALSE(hooks_are_active());
  Tensor y;
  {
    const SavedTensorHooksGuard guard(identity, [](const Tensor&) -> Tensor { throw UserError(); });
    y = a.sin();
  }
  CHECK_THROWS_AS(y.sum().backward(), UserError);
  a.sin().sum().backward();
  CHECK(at::equal(a.grad(), a.detach().cos()));
}

TEST_CASE("a tensor is packed once at save and unpacked once in backward", "[hooks]") {
  const Tensor x = leaf({4}), y = at::randn({4});
  Calls packs, unpacks;
  Tensor z;
  {
    const SavedTensorHooksGuard guard(counted(packs, identity), counted(unpacks, identity));
    z = x * y;
    CHECK(packs.count() == 1);
    CHECK(unpacks.count() == 0);
  }
  z.sum().backward();
  CHECK(packs.count() == 1);
  CHECK(unpacks.count() == 1);
  CHECK(at::equal(x.grad(), y));
}

TEST_CASE("a pack function that changes its input is an error", "[hooks]") {
  const Tensor a = 1 + leaf({5});
  const SavedTensorHooksGuard guard([](Tensor t) { return t.mul_(2); }, identity);
  CHECK_THROWS_WITH(a.sin(), contains(in_place_message));
}

TEST_CASE("tensors may wait in files", "[hooks]") {
  const Tensor a = leaf({5});
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() /
      ("remat-hooks-test-" + std::to_string(reinterpret_cast<uintptr_t>(&a)));
  std::filesystem::create_directory(folder);
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator(folder),
                         std::filesystem::directory_iterator());
  };
  // A packed tensor is a file that goes with its owner.
  using File = std::shared_ptr<std::filesystem::path>;
  int number = 0;
  Tensor y;
  {
    const SavedTensorHooksGuard guard(
        [&](const Tensor& t) {
          File file(new std::filesystem::path(folder / std::to_string(number++)),
                    [](std::filesystem::path* path) {
                      std::filesystem::remove(*path);
                      delete path;
                    });
          const Tensor flat = t.contiguous();
          std::ofstream(*file, std::ios::binary)
              .write(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
          return file;
        },
        [](const File& file) {
          Tensor t = at::empty({5});
          std::ifstream(*file, std::ios::binary)
              .read(static_cast<char*>(t.mutable_data_ptr()), t.nbytes());
          return t;
        });
    y = a * a;
  }
  CHECK(files() == 2);
  CHECK(at::equal(read_saved(y, &nodes::MulBackward0::self_), a));
  CHECK(at::equal(grad_of(y, {a}, {.retain_graph = true})[0], 2 * a));
  CHECK(files() == 2);
  y = Tensor();
  CHECK(files() == 0);
  std::filesystem::remove(folder);
}

TEST_CASE("double backward works with hooks active in one of the passes", "[hooks]") {
  const Tensor a = leaf({5}, at::kDouble);
  const Tensor expected =
      grad_of(grad_of((a.sin() * a).exp(), {a}, {.create_graph = true})[0], {a})[0];
  const auto second_order = [&](bool in_forward, bool in_backward) {
    Calls packs;
    Tensor y, first;
    {
      std::optional<SavedTensorHooksGuard> guard;
      if (in_forward) guard.emplace(counted(packs, identity), identity);
      y = (a.sin() * a).exp();
    }
    {
      std::optional<SavedTensorHooksGuard> guard;
      if (in_backward) guard.emplace(counted(packs, identity), identity);
      first = grad_of(y, {a}, {.create_graph = true})[0];
    }
    CHECK((packs.count() > 0) == (in_forward || in_backward));
    return grad_of(first, {a})[0];
  };
  CHECK(at::equal(second_order(false, false), expected));
  CHECK(at::equal(second_order(true, false), expected));
  CHECK(at::equal(second_order(false, true), expected));
  CHECK(at::equal(second_order(true, true), expected));
}

namespace {

// In its backward calls autograd again, until `depth` is used up, and saves a tensor at the bottom.
struct Descend : Function<Descend> {
  static Tensor forward(AutogradContext* context, const Tensor& x, int64_t depth) {
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static Tensors backward(AutogradContext* context, Tensors grads) {
    const int64_t depth = context->saved_data["depth"].toInt();
    const at::AutoGradMode grad_mode(true);
    const Tensor x = grads[0].detach().requires_grad_();
    const Tensor y = depth == 0 ? x.sin() : Descend::apply(x, depth - 1);
    return {grad_of(y, {x})[0], Tensor()};
  }
};

}  // namespace

TEST_CASE("hooks around backward are seen in backward inside backward, however deep", "[hooks]") {
  const int64_t depth = GENERATE(3, 80);  // the engine changes threads at 60
  const Tensor a = leaf({2});
  const Tensor y = Descend::apply(a, depth);
  Calls packs, unpacks;
  {
    const SavedTensorHooksGuard guard(counted(packs, identity), counted(unpacks, identity));
    y.backward(at::ones({2}));
  }
  CHECK(packs.count() == 1);
  CHECK(unpacks.count() == 1);
  CHECK(at::equal(a.grad(), at::ones({2}).cos()));
}

// ---- disabling -------------------------------------------------------------------------------

TEST_CASE("inside a disable guard hooks and regions throw its message", "[hooks]") {
  const std::string message = "no hooks here, please";
  const Tensor a = leaf({5});
  const auto open_guard = [] { const SavedTensorHooksGuard guard(identity, identity); };
  const auto open_region = [&] { checkpoint([](const Tensor& t) { return t.sin(); }, a); };
  {
    const DisableSavedTensorHooksGuard disabled(message);
    CHECK_THROWS_AS(open_guard(), c10::Error);
    CHECK_THROWS_WITH(open_guard(), contains(message));
    CHECK_THROWS_AS(open_region(), c10::Error);
    CHECK_THROWS_WITH(open_region(), contains(message));
    CHECK(remat::counters().frames_alive == 0);
    a.sin().sum().backward();  // saving plainly is allowed
  }
  CHECK_NOTHROW(open_guard());
  CHECK_NOTHROW(open_region());

  Calls packs;
  const SavedTensorHooksGuard guard(counted(packs, identity), identity);
  CHECK_THROWS_WITH(DisableSavedTensorHooksGuard(message), contains(message));
  a.sin();
  CHECK(packs.count() == 1);
}

TEST_CASE("of nested disable guards the innermost message is thrown", "[hooks]") {
  const auto message = [] {
    try {
      const SavedTensorHooksGuard guard(identity, identity);
    } catch (const c10::Error& error) {
      return text_of(error);
    }
    return std::string("allowed");
  };
  {
    const DisableSavedTensorHooksGuard outer("outer message");
    {
      const DisableSavedTensorHooksGuard inner("inner message");
      CHECK_THAT(message(), contains("inner message"));
    }
    CHECK_THAT(message(), contains("outer message"));
  }
  CHECK(message() == "allowed");
  // The outer one ends first.
  std::optional<DisableSavedTensorHooksGuard> outer(std::in_place, "outer message"),
      inner(std::in_place, "inner message");
  outer.reset();
  CHECK_THAT(message(), contains("inner message"));
  inner.reset();
  CHECK(message() == "allowed");
}

// ---- misuse ----------------------------------------------------------------------------------

TEST_CASE("a guard that an unpack opens and leaves open keeps nothing of the first pair alive",
          "[hooks][rule-12]") {
  const Alive first, stray_alive;
  std::unique_ptr<SavedTensorHooksGuard> stray;
  const Tensor a = leaf({5});
  {
    Tensor y;
    {
      const SavedTensorHooksGuard guard(identity, [&, probe = first.probe()](const Tensor& t) {
        stray = std::make_unique<SavedTensorHooksGuard>(
            [probe = stray_alive.probe()](const Tensor& u) { return u; }, identity);
        return t;
      });
      y = a.sin();
    }
    y.sum().backward();
  }
  CHECK(first.count() == 0);
  CHECK(stray_alive.count() == 1);
  CHECK(at::equal(a.grad(), a.detach().cos()));
  stray.reset();
  CHECK(stray_alive.count() == 0);
  CHECK_FALSE(hooks_are_active());
}

TEST_CASE("an unpack that destroys the caller's guard does not crash", "[hooks][rule-12]") {
  const Tensor a = leaf({5});
  for (int repeat = 0; repeat < 10; ++repeat) {
    Calls packs;
    std::unique_ptr<SavedTensorHooksGuard> guard;
    guard = std::make_unique<SavedTensorHooksGuard>(counted(packs, identity), [&](const Tensor& t) {
      guard.reset();
      return t;
    });
    const Tensor y = a.sin();
    CHECK(packs.count() == 1);
    y.sum().backward();
    CHECK(guard == nullptr);
    CHECK_FALSE(hooks_are_active());
    a.sin();
    CHECK(packs.count() == 1);
  }
}
