// Saved tensors of plain C++ programs: without hooks, in Functions, undefined, and their task ids.

#include <torch/csrc/autograd/graph_task.h>

#include "tests/support/saved_hooks.h"
#include "tests/support/saved_tensors.h"

using remat::checkpoint;
using remat::SavedTensorHooksGuard;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::SavedVariable;

namespace {

constexpr auto freed_message = "after they have already been freed";

}  // namespace

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
  // The questions that compiled autograd asks of each.
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
