// Rule 2: with copies each recompute begins with the data of the call, however the function writes.

#include <thread>

#include "remat/sequential.h"
#include "tests/support/lazy_copies.h"
#include "tests/support/support.h"

using remat::CheckpointOptions;
using remat::InputMode;

namespace {

struct Writer {
  const char* name;
  std::function<void(Tensor&)> double_it;
};

/// Ways to double a vector of floats in place. Only the first is seen in its version.
const std::vector<Writer> writers{
    {"an in-place operator", [](Tensor& t) { t.mul_(2); }},
    {".data()", [](Tensor& t) { t.data().mul_(2); }},
    {"a view of .data()", [](Tensor& t) { t.data().view({3, 1}).mul_(2); }},
    {"data_ptr",
     [](Tensor& t) {
       float* const data = t.data_ptr<float>();
       for (int64_t i = 0; i < t.numel(); ++i) data[i] *= 2;
     }},
    {"an accessor",
     [](Tensor& t) {
       auto all = t.accessor<float, 1>();
       for (int64_t i = 0; i < t.numel(); ++i) all[i] *= 2;
     }},
    {"a pointer for reading, then one for writing",
     [](Tensor& t) {
       const float* const before = t.const_data_ptr<float>();
       float* const data = t.mutable_data_ptr<float>();
       data[0] *= 2;
       for (int64_t i = 1; i < t.numel(); ++i) data[i] *= before[0] / (data[0] / 2);
     }},
};

/// Tensors of which copies are made lazily, or at once.
struct Kind {
  const char* name;
  std::function<Tensor()> make;
};
const std::vector<Kind> kinds{
    {"a whole storage", [] { return at::arange(1, 4).to(at::kFloat) / 4; }},
    {"a small part", [] { return (at::arange(100).to(at::kFloat) / 100).narrow(0, 60, 3); }},
    {"memory from outside",
     [] {
       static float outside[3];
       std::fill(outside, outside + 3, 0.5F);
       return at::from_blob(outside, {3});
     }},
};

/// Calls `test` with a function that writes to its second argument, and that argument.
void for_each_way(
    const std::function<void(const std::function<Tensor(Tensor, Tensor)>&, const Kind&)>& test) {
  for (const Writer& writer : writers)
    for (const Kind& kind : kinds) {
      CAPTURE(writer.name, kind.name);
      test(
          [&writer](const Tensor& x, Tensor m) {
            writer.double_it(m);
            return (x * m).exp();
          },
          kind);
    }
}

}  // namespace

TEST_CASE("with copies each backward begins with the data of the call, however the function writes",
          "[rule-2][copies]") {
  for_each_way([](const auto& f, const Kind& kind) {
    const Tensor x = leaf({3});
    const Tensor plain = f(x, kind.make());
    const Tensor expected = grad_of(plain, {x}, {.retain_graph = true})[0];
    const Tensor y = remat::checkpoint(copies, f, x, kind.make());
    for (int i = 0; i < 4; ++i)
      CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
    // An argument with a history.
    const auto made = [&] { return x * kind.make(); };
    const Tensor with_history = grad_of(f(x, made()), {x})[0];
    const Tensor z = remat::checkpoint(copies, f, x, made());
    for (int i = 0; i < 3; ++i)
      CHECK(bit_equal(grad_of(z, {x}, {.retain_graph = true})[0], with_history));
  });
}

TEST_CASE("with copies gradients of higher order begin with the data of the call, too",
          "[rule-2][copies]") {
  for_each_way([](const auto& f, const Kind& kind) {
    const Tensor x = leaf({3});
    const auto gradients = [&](const Tensor& y) {
      const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
      const Tensor second = grad_of(first, {x}, {.create_graph = true})[0];
      return Tensors{first.detach(), second.detach(),
                     grad_of(second, {x}, {.retain_graph = true})[0],
                     grad_of(first, {x}, {.retain_graph = true})[0],
                     grad_of(y, {x}, {.retain_graph = true})[0]};
    };
    const Tensors plain = gradients(f(x, kind.make()));
    require_bit_equal(gradients(remat::checkpoint(copies, f, x, kind.make())), plain);
    drop_ready_nodes();
  });
}

TEST_CASE("with copies nested regions begin with the data of the call, however they write",
          "[rule-2][copies]") {
  const bool early_stop = GENERATE(true, false);
  const bool outer_copies = GENERATE(true, false);
  const bool writes_outside = outer_copies && GENERATE(true, false);
  CAPTURE(early_stop, outer_copies, writes_outside);
  const remat::EarlyStopGuard guard(early_stop);
  CheckpointOptions outer;
  if (outer_copies) outer.inputs = InputMode::CopyOnWrite;
  for_each_way([&](const auto& f, const Kind& kind) {
    const auto program = [&](const Tensor& x, const Tensor& m, bool in_regions) {
      const Tensor first = writes_outside ? f(x, m) : x.sin();
      const Tensor own = m + 1;  // made in the outer region
      const Tensor second = in_regions ? remat::checkpoint(copies, f, first, own) : f(first, own);
      return (second * first).sin();
    };
    const Tensor x = leaf({3});
    const Tensor plain = program(x, kind.make(), false);
    const Tensors expected = grad_of(plain, {x}, {.retain_graph = true});
    const Tensor y = remat::checkpoint(
        outer, [&](const Tensor& x, const Tensor& m) { return program(x, m, true); }, x,
        kind.make());
    for (int i = 0; i < 3; ++i)
      require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), expected);
  });
}

TEST_CASE("with copies hooks that keep the tensor itself hold the data of the call",
          "[rule-2][copies][hooks]") {
  for_each_way([](const auto& f, const Kind& kind) {
    const Tensor x = leaf({3});
    const Tensors expected = grad_of(f(x, kind.make()), {x});
    Tensor y;
    {
      const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t; },
                                               [](const Tensor& kept) { return kept; });
      y = remat::checkpoint(copies, f, x, kind.make());
    }
    for (int i = 0; i < 3; ++i)
      require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), expected);
  });
}

TEST_CASE("with copies backwards of two threads begin with the data of the call",
          "[rule-2][copies][threads]") {
  for_each_way([](const auto& f, const Kind& kind) {
    const Tensor x = leaf({3});
    const Tensor expected = grad_of(f(x, kind.make()), {x})[0];
    const Tensor y = remat::checkpoint(copies, f, x, kind.make());
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (int k = 0; k < 2; ++k)
      threads.emplace_back([&] {
        for (int i = 0; i < 10; ++i)
          right += at::equal(grad_of(y, {x}, {.retain_graph = true})[0], expected) ? 1 : 0;
      });
    for (std::thread& each : threads) each.join();
    CHECK(right == 20);
  });
}

TEST_CASE("with copies a sparse argument is the call's in each recompute", "[rule-2][copies]") {
  const Tensor w = leaf({3}), s = at::rand({3}).to_sparse();
  const auto f = [](const Tensor& s, const Tensor& w) {
    s.values().data().mul_(2);
    return s.to_dense() * w * w;
  };
  const Tensors plain = grad_of(f(s.clone(), w), {w});
  const Tensor y = remat::checkpoint(copies, f, s, w);
  for (int i = 0; i < 3; ++i) require_bit_equal(grad_of(y, {w}, {.retain_graph = true}), plain);
}

TEST_CASE("with copies a recompute that alone writes to an argument spoils nothing",
          "[rule-2][copies]") {
  const Tensor x = leaf({3}), s = at::rand({3});
  const Tensor y = remat::checkpoint(
      {.early_stop = false, .inputs = InputMode::CopyOnWrite},
      [](const Tensor& x, Tensor s) {
        const Tensor y = (x * (s + 0)).sin();
        if (remat::is_recomputing()) s.data().add_(1);
        return y * 2;
      },
      x, s);
  const Tensors plain = grad_of((x * s).sin() * 2, {x});
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
}

TEST_CASE("a segment of a chain begins with the data of the call in each recompute",
          "[rule-2][copies][sequential]") {
  for (const Writer& writer : writers) {
    CAPTURE(writer.name);
    const std::vector<remat::Stage> stages(4, [&](Tensor t) {
      writer.double_it(t);
      return (t + 1).sin();
    });
    const auto program = [&](const Tensor& x, bool in_regions) {
      Tensor y = x * 1;
      if (in_regions) return remat::checkpoint_sequential(stages, 2, y);
      for (const auto& each : stages) y = each(y);
      return y;
    };
    const Tensor x = leaf({3});
    const Tensors plain = grad_of(program(x, false), {x});
    const Tensor y = program(x, true);
    for (int i = 0; i < 3; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  }
}
