// Saved-tensor hooks for plain C++ programs: alone, per tensor, nested, misused, around regions.

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tests/support/active_hooks.h"
#include "tests/support/saved_tensors.h"

using remat::checkpoint;
using remat::DisableSavedTensorHooksGuard;
using remat::SavedTensorHooksGuard;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::SavedVariable;

namespace {

Tensor identity(const Tensor& t) { return t; }
Tensor doubled(const Tensor& t) { return t * 2; }
Tensor halved(const Tensor& t) { return t / 2; }

// LibTorch's own hooks for one saved tensor.
class PerTensor : public torch::autograd::SavedVariableHooks {
 public:
  using Fn = std::function<Tensor(const Tensor&)>;
  PerTensor(Fn pack, Fn unpack) : pack_(std::move(pack)), unpack_(std::move(unpack)) {}
  void call_pack_hook(const Tensor& tensor) override { packed_ = pack_(tensor).detach(); }
  Tensor call_unpack_hook() override { return unpack_(packed_); }

 private:
  Fn pack_, unpack_;
  Tensor packed_;
};

void register_hooks(SavedVariable& saved, PerTensor::Fn pack, PerTensor::Fn unpack) {
  saved.register_hooks(std::make_unique<PerTensor>(std::move(pack), std::move(unpack)));
}

constexpr auto in_place_message = "A saved tensor pack hook is modifying its input in place.";
constexpr auto freed_message = "after they have already been freed";

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

// ---- saved tensors without hooks, and of Functions -------------------------------------------

TEST_CASE("without hooks a saved tensor is the object itself until backward frees it", "[hooks]") {
  const Tensor a = leaf({5});
  const Tensor y = a.sin(), z = a.exp();
  CHECK(read_saved(y, &nodes::SinBackward0::self_).is_same(a));
  CHECK(at::equal(read_saved_output(z, &nodes::ExpBackward0::result_), z));
  (y + z).sum().backward();
  CHECK_THROWS_WITH(read_saved(y, &nodes::SinBackward0::self_), contains(freed_message));
}

TEST_CASE("an unpacked result shares its version counter", "[hooks]") {
  const Tensor a = leaf({5});
  const Tensor y = a.exp();
  const Tensor saved = read_saved_output(y, &nodes::ExpBackward0::result_);
  const auto before = saved._version();
  {
    at::NoGradGuard no_grad;
    y.mul_(2);
  }
  CHECK(saved._version() == before + 1);
  CHECK(y._version() == saved._version());
}

TEST_CASE("detaching a saved tensor in place is an error, plainly and in a region", "[hooks]") {
  const Tensor start = leaf({5});
  constexpr auto message = "Trying to use a saved tensor that has been detached";
  SECTION("plainly") {
    Tensor a = start.clone();
    const Tensor b = a.sin();
    a.detach_();
    CHECK_THROWS_WITH(b.sum().backward(), contains(message));
    Tensor c = start.clone();
    const Tensor d = c.exp();
    c.detach_();
    CHECK_NOTHROW(d.sum().backward());
  }
  SECTION("in a region: an error or the plain gradient, never another one") {
    const auto program = [](const Tensor& x) {
      Tensor a = x.clone();
      Tensor b = a.exp().sin();
      a.detach_();
      return b;
    };
    const Tensor expected = grad_of(program(start), {start})[0];
    CHECK(at::equal(grad_of(checkpoint(program, start), {start})[0], expected));

    const auto refused = [](const Tensor& x) {
      Tensor a = x.clone();
      Tensor b = a.sin();
      a.detach_();
      return b;
    };
    try {
      const Tensor grad = grad_of(checkpoint(refused, start), {start})[0];
      CHECK(at::equal(grad, start.detach().cos()));
    } catch (const c10::Error& error) {
      CHECK_THAT(text_of(error), contains(message));
    }
  }
}

namespace {

Tensors read_back;
NodePtr last_node;

struct SaveList : Function<SaveList> {
  static Tensor forward(AutogradContext* context, const Tensor& x, std::string pattern) {
    Tensors saved;
    for (const char c : pattern) saved.push_back(c == 'x' ? x : Tensor());
    context->save_for_backward(saved);
    return x * 2;
  }
  static Tensors backward(AutogradContext* context, Tensors grads) {
    read_back = context->get_saved_variables();
    return {grads[0] * 2, Tensor()};
  }
};

}  // namespace

TEST_CASE("undefined tensors are saved and read back as undefined", "[hooks]") {
  const Tensor x = leaf({3});
  const bool in_region = GENERATE(false, true);
  const auto apply = [&](const std::string& pattern) {
    const auto fn = [pattern](const Tensor& t) { return SaveList::apply(t, pattern); };
    return in_region ? checkpoint(fn, x) : fn(x);
  };
  const std::string pattern = GENERATE("x_", "_x_", "");
  Calls packs;
  const Counted done;
  Tensor y = apply(pattern);
  const int64_t defined = std::count(pattern.begin(), pattern.end(), 'x');
  CHECK(done.now().tensors_dropped == (in_region ? defined : 0));  // undefined ones are no slots
  y.sum().backward();
  REQUIRE(read_back.size() == pattern.size());
  for (size_t i = 0; i < pattern.size(); ++i) {
    CHECK(read_back[i].defined() == (pattern[i] == 'x'));
    if (pattern[i] == 'x') CHECK(at::equal(read_back[i], x));
  }
  if (!pattern.empty()) CHECK_THROWS_WITH(y.sum().backward(), contains(freed_message));
  read_back.clear();
}

TEST_CASE("undefined tensors are not packed", "[hooks]") {
  const Tensor x = leaf({3});
  Calls packs;
  const SavedTensorHooksGuard guard(counted(packs, identity), identity);
  SaveList::apply(x, std::string("_x_")).sum().backward();
  CHECK(packs.count() == 1);
  read_back.clear();
}

TEST_CASE("hooks cannot be registered on an undefined or freed saved tensor", "[hooks]") {
  SavedVariable undefined{Tensor(), false};
  CHECK_THROWS_WITH(register_hooks(undefined, identity, identity), contains("None is forbidden"));
  const Tensor a = leaf({3});
  const Tensor y = a.sin();
  y.sum().backward();
  CHECK_THROWS_WITH(register_hooks(saved_of(y, &nodes::SinBackward0::self_), identity, identity),
                    contains("after it has been freed"));
}

TEST_CASE("a SavedVariable made under a guard packs once and unpacks at every read", "[hooks]") {
  const Tensor a = leaf({3});
  Calls packs, unpacks;
  std::optional<SavedVariable> saved;
  {
    const SavedTensorHooksGuard guard(counted(packs, identity), counted(unpacks, identity));
    saved.emplace(a, false);
  }
  CHECK(packs.count() == 1);
  CHECK(at::equal(saved->unpack(), a));
  CHECK(unpacks.count() == 1);
  CHECK(at::equal(saved->unpack(), a));
  CHECK(unpacks.count() == 2);
}

TEST_CASE("a saved tensor with a hook of ours refuses to be traced", "[hooks]") {
  // What compiled autograd asks of each.
  const auto trace = [](const auto& saved) {
    if constexpr (requires { saved.retrieve_unpack_hook_data(); })
      saved.retrieve_unpack_hook_data();
    return requires { saved.retrieve_unpack_hook_data(); };
  };
  const Tensor a = leaf({3});
  const SavedVariable plain(a, false);
  std::optional<SavedVariable> packed, dropped;
  {
    const SavedTensorHooksGuard guard(identity, identity);
    packed.emplace(a, false);
  }
  checkpoint(
      [&](const Tensor& t) {
        dropped.emplace(t.sin(), false);
        return t;
      },
      a);
  if (!trace(plain)) return;
  CHECK_THROWS_WITH(trace(*packed), contains("compiled autograd supports Python's hooks only"));
  CHECK_THROWS_WITH(trace(*dropped), contains("compiled autograd cannot trace a region"));
}

TEST_CASE("what a function saves by hand around a backward is what it saves again",
          "[hooks][rule-6]") {
  // Nothing of the region is built between the two, in forward and in a recompute.
  const Tensor x = leaf({3}), w = leaf({3});
  const Tensor outside = w.sin();
  std::optional<SavedVariable> first, second;
  const Tensor y = checkpoint(
      [&](const Tensor& t) {
        const Tensor a = t.cos(), b = t.exp();
        SavedVariable before(a, false);
        grad_of(outside, {w}, {.retain_graph = true});
        SavedVariable after(b, false);
        if (!remat::is_recomputing()) {
          first.emplace(std::move(before));
          second.emplace(std::move(after));
        }
        return (a * b).sin();
      },
      x);
  CHECK(bit_equal(first->unpack(), x.cos()));
  CHECK(bit_equal(second->unpack(), x.exp()));
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of((x.cos() * x.exp()).sin(), {x})[0]));
}

TEST_CASE("task ids are -1 outside backward and grow by one per backward", "[hooks]") {
  using torch::autograd::get_current_graph_task_id;
  std::vector<int> ids;
  const Tensor a = leaf({3});
  const auto run = [&](bool region) {
    const auto fn = [](const Tensor& t) { return t.sin().exp(); };
    Tensor y = region ? checkpoint(fn, a) : fn(a);
    y.register_hook([&](const Tensor&) { ids.push_back(get_current_graph_task_id()); });
    y.sum().backward();
    CHECK(get_current_graph_task_id() == -1);
  };
  CHECK(get_current_graph_task_id() == -1);
  run(false);
  run(true);
  run(true);
  REQUIRE(ids.size() == 3);
  CHECK(ids[1] == ids[0] + 1);
  CHECK(ids[2] == ids[0] + 2);
}

// ---- hooks and regions -----------------------------------------------------------------------

namespace {

std::atomic<int> applications{0};

struct CountedExp : Function<CountedExp> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    ++applications;
    const Tensor y = x.exp();
    context->save_for_backward({y});
    return y;
  }
  static Tensors backward(AutogradContext* context, Tensors grads) {
    return {grads[0] * context->get_saved_variables()[0]};
  }
};

struct CountedSin : Function<CountedSin> {
  static Tensor forward(AutogradContext* context, const Tensor& x) {
    ++applications;
    context->save_for_backward({x});
    return x.sin();
  }
  static Tensors backward(AutogradContext* context, Tensors grads) {
    return {grads[0] * context->get_saved_variables()[0].cos()};
  }
};

}  // namespace

TEST_CASE("a recompute builds a fresh graph of custom Functions", "[hooks][rule-3]") {
  const Tensor x = leaf({3});
  const auto fn = [](const Tensor& t) { return CountedSin::apply(CountedExp::apply(t)); };
  applications = 0;
  const Tensor y = checkpoint(fn, x);
  CHECK(applications == 2);
  y.sum().backward();
  CHECK(applications == 4);
  require_bit_equal({x.grad()}, grad_of(x.exp().sin(), {x}));
}

TEST_CASE("a saved output of a multi-output node keeps its number after a recompute", "[hooks]") {
  const Tensor x = leaf({2, 3});
  const Tensor y = checkpoint([](const Tensor& t) { return t.unbind()[1].sin(); }, x);
  const Tensor saved = read_saved(y, &nodes::SinBackward0::self_);
  CHECK(saved.output_nr() == 1);
  CHECK(saved.grad_fn()->name() == "UnbindBackward0");
  CHECK(at::equal(saved, x[1]));
}

TEST_CASE("an inference tensor is refused as an argument", "[hooks]") {
  Tensor x;
  {
    const c10::InferenceMode inference;
    x = at::randn({3});
  }
  const Tensor weight = leaf({3});
  Calls calls;
  const auto fn = counted(calls, [&](const Tensor& t) { return t * weight; });
  CHECK_THROWS_WITH(checkpoint(fn, x), contains("Inference tensors cannot be saved for backward"));
  CHECK(remat::counters().frames_alive == 0);
  CHECK_FALSE(hooks_are_active());
}

TEST_CASE("hooks around a region see its input and nothing from inside", "[hooks][rule-16]") {
  const Tensor x = leaf({4, 6});
  std::vector<std::vector<int64_t>> packed;
  Calls unpacks;
  const auto fn = [](const Tensor& t) { return t.t().mm(t).relu().sum(); };
  Tensor y;
  {
    const SavedTensorHooksGuard guard(
        [&](const Tensor& t) {
          packed.push_back(t.sizes().vec());
          return t;
        },
        counted(unpacks, identity));
    y = checkpoint(fn, x);
  }
  CHECK(packed == std::vector<std::vector<int64_t>>{{4, 6}});
  y.backward();
  CHECK(packed.size() == 1);
  CHECK(unpacks.count() == 1);
  CHECK(at::equal(x.grad(), grad_of(fn(x), {x})[0]));
}

TEST_CASE("an exception of a hook that sees a region's input keeps its type",
          "[hooks][rule-12][rule-16]") {
  struct UserError : std::exception {};
  const Tensor x = leaf({5});
  Calls calls, unpacks;
  const auto fn = counted(calls, [](const Tensor& t) { return t.sin().exp(); });
  {
    const SavedTensorHooksGuard guard([](const Tensor&) -> Tensor { throw UserError(); }, identity);
    CHECK_THROWS_AS(checkpoint(fn, x), UserError);
    CHECK(calls.count() == 0);
  }
  CHECK(remat::counters().frames_alive == 0);
  Tensor y;
  {
    const SavedTensorHooksGuard guard(identity, [&](const Tensor& t) {
      unpacks();
      if (unpacks.count() == 1) throw UserError();
      return t;
    });
    y = checkpoint(fn, x);
  }
  CHECK_THROWS_AS(y.sum().backward({}, true), UserError);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
  CHECK(calls.count() == 2);
}

TEST_CASE("a write to an argument that hooks part from its view is refused", "[hooks][rule-2]") {
  const Tensor x = leaf({4}), a = at::rand({4});
  const auto copy = [](const Tensor& t) { return t.clone(); };
  const bool is_first = GENERATE(true, false);
  const auto f = [](Tensor written, const Tensor& view, const Tensor& x) {
    written.mul_(2);
    return (x * view * written).exp();
  };
  Tensor y;
  {
    const SavedTensorHooksGuard guard(copy, copy);
    if (is_first)
      y = checkpoint(f, a, a.view({4}), x);
    else
      y = checkpoint([f](const Tensor& x, Tensor a, const Tensor& view) { return f(a, view, x); },
                     x, a, a.view({4}));
  }
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
  CHECK_THAT(error.what(), contains("gave the two back apart"));
}

TEST_CASE("an argument that was changed is refused although hooks gave back a copy once",
          "[hooks][rule-2]") {
  const Tensor x = leaf({4}), plain = grad_of((x * 1).sin().exp(), {x})[0];
  const Tensor a = x * 1;
  int unpacks = 0;
  Tensor y;
  {
    const SavedTensorHooksGuard guard([](const Tensor& t) { return std::pair(t, t.clone()); },
                                      [&](const std::pair<Tensor, Tensor>& both) {
                                        return ++unpacks == 1 ? both.second : both.first;
                                      });
    y = checkpoint([](const Tensor& t) { return t.sin().exp(); }, a);
  }
  {
    const at::NoGradGuard no_grad;
    a.add_(1);
  }
  CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], plain));
  for (int i = 0; i < 2; ++i)
    CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), remat::CheckpointError);
}

TEST_CASE("hooks inside a region hide the region's own, in both passes", "[hooks][rule-16]") {
  const Tensor x = leaf({5});
  Calls packs, unpacks;
  const auto fn = [&](const Tensor& t) {
    const Tensor a = t.sin();
    Tensor b;
    {
      const SavedTensorHooksGuard guard(counted(packs, doubled), counted(unpacks, halved));
      b = a.exp();
    }
    return b.cos();
  };
  const Counted done;
  const Tensor y = checkpoint(fn, x);
  CHECK(packs.count() == 1);
  CHECK(done.now().tensors_dropped == 2);
  const Tensor grad = grad_of(y, {x})[0];
  CHECK(unpacks.count() == 1);
  CHECK(packs.count() == 2);  // the recompute ran the same guard
  CHECK(at::equal(grad, grad_of(x.sin().exp().cos(), {x})[0]));
  CHECK(done.now().recomputes == 1);
}

TEST_CASE("hooks active only around backward change nothing of a region", "[hooks][rule-3]") {
  const Tensor x = leaf({5});
  const auto fn = [](const Tensor& t) { return t.sin().exp().cos(); };
  const Tensor y = checkpoint(fn, x);
  Calls packs;
  {
    const SavedTensorHooksGuard guard(counted(packs, identity), identity);
    y.sum().backward();
  }
  CHECK(packs.count() == 0);
  require_bit_equal({x.grad()}, grad_of(fn(x), {x}));
}
