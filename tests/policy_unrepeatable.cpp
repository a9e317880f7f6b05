// Policies for operators that must not run twice: collectives, random ones, effects; and their
// union.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <algorithm>

#include "remat/policy.h"
#include "remat/report.h"
#include "tests/support/local_group.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::CheckpointOptions;
using Kind = remat::CheckpointError::Kind;

namespace {

const LocalGroup& ranks() {
  static const auto* const group = new LocalGroup;
  return *group;
}

/// Returns the same leaf for the same number.
Tensor matrix(uint64_t seed) {
  return at::randn({4, 4}, at::detail::createCPUGenerator(seed)).requires_grad_();
}

/// Tokens go to the other rank; their gradients come back.
struct Exchange : torch::autograd::Function<Exchange> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) {
    return ranks().exchanged(x);
  }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors grads) {
    return {ranks().exchanged(grads[0])};
  }
};

/// A sum over ranks in place, as a row-parallel layer has it.
struct Reduce : torch::autograd::Function<Reduce> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    ranks().reduce(x);
    context->mark_dirty({x});
    return x;
  }
  static Tensors backward(torch::autograd::AutogradContext*, Tensors grads) { return grads; }
};

/// A layer of experts on two ranks.
Tensor experts(const Tensor& x, const Tensor& up, const Tensor& down) {
  const Tensor sent = Exchange::apply(x.mm(up).sigmoid());
  const Tensor computed = sent.tanh() * sent;
  return x + Exchange::apply(computed.exp()).mm(down).sin();
}

struct Run {
  Tensors grads;
  int64_t collectives = 0;
};

/// Runs a function of x, w, v plainly or as a region, with a second backward.
template <class F>
Run run_of(F f, const CheckpointOptions* options) {
  const Tensor x = matrix(1), w = matrix(2), v = matrix(3);
  const int64_t before = ranks().backend->count;
  const Tensor y = options == nullptr ? f(x, w, v) : checkpoint(*options, f, x, w, v);
  Run run{grad_of(y.sin(), {x, w, v}, {.retain_graph = true})};
  run.collectives = ranks().backend->count - before;
  require_bit_equal(grad_of(y.sin(), {x, w, v}), run.grads);
  return run;
}

template <class F>
void require_once(const F& f, const remat::Policy& policy) {
  const Run plain = run_of(f, nullptr);
  const CheckpointOptions options{.determinism_check = remat::DeterminismCheck::Values,
                                  .policy = policy};
  const Run region = run_of(f, &options);
  require_bit_equal(region.grads, plain.grads);
  CHECK(region.collectives == plain.collectives);
}

}  // namespace

TEST_CASE("collectives of c10d run once under save_collectives", "[policy][collectives]") {
  require_once(experts, remat::save_collectives());
  require_once(experts, remat::save_unrepeatable());
  require_once(experts, remat::save_collectives() | remat::save_matmuls());
  require_once(experts, remat::save_ops({"c10d::alltoall_base_"}));
  const CheckpointOptions without;
  const Run plain = run_of(experts, nullptr), region = run_of(experts, &without);
  require_bit_equal(region.grads, plain.grads);
  CHECK(region.collectives == plain.collectives + 2);
}

TEST_CASE("a collective that writes to its own input runs once", "[policy][collectives]") {
  const auto f = [](const Tensor& x, const Tensor& w, const Tensor& v) {
    return Reduce::apply(x.mm(w)).sigmoid().mm(v).exp();
  };
  require_once(f, remat::save_collectives());
  // The product was changed in place after it was kept: a policy that prefers recomputes it.
  require_once(f, remat::save_collectives() | remat::save_matmuls());
  const CheckpointOptions insists{.policy = remat::save_ops({"aten::mm"})};
  const Tensor x = matrix(1), w = matrix(2), v = matrix(3);
  const Tensor y = checkpoint(insists, f, x, w, v);
  const auto error = error_of<remat::CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == Kind::SelectiveMutation);
}

TEST_CASE("products before a collective in place are right under save_matmuls",
          "[policy][collectives]") {
  const auto f = [](const Tensor& x, const Tensor& w, const Tensor& v) {
    const Tensor y = x.mm(w);
    const Tensor before = y.exp();  // reads the product before the sum over ranks
    return (Reduce::apply(y.clone()) * before + Reduce::apply(y)).sin().mm(v).exp();
  };
  const CheckpointOptions options{.policy = remat::save_matmuls()};
  require_bit_equal(run_of(f, &options).grads, run_of(f, nullptr).grads);
}

TEST_CASE("lists of outputs, and communication between two stages, run once",
          "[policy][collectives]") {
  require_once(
      [](const Tensor& x, const Tensor& w, const Tensor& v) {
        std::vector<Tensors> parts{{at::empty_like(x), at::empty_like(x)}};
        Tensors own{(x.detach() * 2).contiguous()};
        ranks().group->allgather(parts, own)->wait();
        return (x * parts[0][0].sin() + w * parts[0][1]).exp().mm(v).sin();
      },
      remat::save_collectives());
  const auto stage = [](const Tensor& x, const Tensor& w, const Tensor& v) {
    Tensors received{at::empty_like(x)};
    ranks().group->recv(received, 1, 0)->wait();
    const Tensor y = (received[0] * x).mm(w).sigmoid();
    Tensors sent{y.detach()};
    ranks().group->send(sent, 1, 0)->wait();
    return (y * v).exp() * received[0];
  };
  // The received value depends on the number of the call: a second call would differ.
  const CheckpointOptions options{.determinism_check = remat::DeterminismCheck::Values,
                                  .policy = remat::save_unrepeatable()};
  ranks().backend->count = 0;
  const Run plain = run_of(stage, nullptr);
  ranks().backend->count = 0;
  const Run region = run_of(stage, &options);
  require_bit_equal(region.grads, plain.grads);
  CHECK(region.collectives == 2);
  CHECK(plain.collectives == 2);
}

TEST_CASE("an output that a later collective overwrites is an error", "[policy][collectives]") {
  const Tensor x = leaf({4, 4});
  const CheckpointOptions options{.policy = remat::save_collectives()};
  Tensor escaped;
  const auto f = [&](const Tensor& t) {
    const Tensor buffer = ranks().exchanged(t.detach());
    escaped = buffer;
    return (buffer * t).exp() * (buffer + 1).sin();
  };
  const Tensor inside = checkpoint(
      options,
      [&](const Tensor& t) {
        const Tensor y = f(t);
        ranks().reduce(escaped);
        return (y * t).sin();
      },
      x);
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(inside, {x}); }).kind() ==
        Kind::SelectiveMutation);
  const Tensor after = checkpoint(options, f, x);
  ranks().reduce(escaped);
  CHECK(error_of<remat::CheckpointError>([&] { grad_of(after, {x}); }).kind() ==
        Kind::SelectiveMutation);
}

TEST_CASE("a recompute that runs a collective again is warned of once for each region name",
          "[policy][collectives]") {
  const auto texts_of = [](const CheckpointOptions& options) {
    const Warnings warnings;
    run_of(experts, &options);
    run_of(experts, &options);
    return warnings.texts;
  };
  const auto texts = texts_of({.name = "experts of the test"});
  REQUIRE(texts.size() == 1);
  CHECK_THAT(texts[0], contains("region \"experts of the test\" ran c10d::alltoall_base_ again"));
  const auto other_policy = texts_of({.name = "other", .policy = remat::save_matmuls()});
  CHECK(other_policy.size() == 1);
  CHECK(texts_of({.name = "kept", .policy = remat::save_collectives()}).empty());
}

TEST_CASE("save_random and save_nondeterministic keep the operators of their kind", "[policy]") {
  const auto f = [](const Tensor& x) {
    const Tensor mask = at::bernoulli(x.detach().sigmoid());
    const Tensor chosen = std::get<0>((x * mask).sin().topk(2));
    return (chosen.exp() * at::rand({4, 2})).cos();
  };
  const Tensor x = leaf({4, 4});
  const auto kept = [&](const remat::Policy& policy, Tensors& grads) {
    const Seed seed(7);
    remat::Recorder recorder({.memory = false});
    const Tensor y = checkpoint({.policy = policy}, f, x);
    grads = grad_of(y, {x});
    std::vector<std::string> ops;
    const remat::Report report = recorder.report();
    for (const auto& each : report.regions.at(0).decisions)
      if (each.outcome == "kept") ops.push_back(each.op);
    std::sort(ops.begin(), ops.end());
    return ops;
  };
  Tensors plain, random, undetermined, all;
  {
    const Seed seed(7);
    plain = grad_of(f(x), {x});
  }
  using Ops = std::vector<std::string>;
  CHECK(kept(remat::save_random(), random) == Ops{"aten::bernoulli.default", "aten::rand.default"});
  CHECK(kept(remat::save_nondeterministic(), undetermined) == Ops{"aten::topk.default"});
  CHECK(kept(remat::save_unrepeatable(), all) ==
        Ops{"aten::bernoulli.default", "aten::rand.default", "aten::topk.default"});
  for (const Tensors& each : {random, undetermined, all}) require_bit_equal(each, plain);
}

namespace {

int64_t num_effects = 0;
Tensor drawn(const Tensor& x) { return x + static_cast<double>(++num_effects); }

TORCH_LIBRARY(remat_tests_effects, library) {
  library.def("drawn(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, &drawn));
}

template <class Result>
Result call_effect(const char* name, const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Result(const Tensor&)>()
      .call(x);
}

}  // namespace

TEST_CASE("registered effects happen once under save_effects", "[policy]") {
  const auto f = [](const Tensor& x) {
    const Tensor y = x.sin();
    const Tensor z = call_effect<Tensor>("remat_tests_effects::drawn", y.detach());
    return (y * z).exp();
  };
  const Tensor x = leaf({3});
  CHECK_THROWS_WITH(remat::register_effect("remat_tests_effects::none"), contains("no operator"));
  remat::register_effect("remat_tests_effects::drawn");
  for (const remat::Policy& policy : {remat::save_effects(), remat::save_unrepeatable()}) {
    num_effects = 0;
    const Tensor plain = grad_of(f(x), {x})[0];
    num_effects = 0;
    const Tensor y = checkpoint({.policy = policy}, f, x);
    CHECK(bit_equal(grad_of(y, {x})[0], plain));
    CHECK(num_effects == 1);
  }
}

TEST_CASE("operators in an UnseenGuard are not counted, compared or kept", "[scope][policy]") {
  const Tensor x = leaf({4, 4});
  int64_t num_logged = 0;
  const auto f = [&](const Tensor& t) {
    const Tensor y = t.mm(t).sin();
    if (!remat::is_recomputing()) {
      const remat::UnseenGuard unseen;
      CHECK_FALSE(remat::is_checkpointing());
      num_logged += y.mm(t).exp().sum().item<float>() > 0 ? 1 : 0;  // saves tensors, too
    }
    return y.mm(t).exp().mm(t).cos();
  };
  const Tensor plain = grad_of(f(x), {x})[0];
  for (const bool debug : {false, true}) {
    const Tensor y = checkpoint({.determinism_check = remat::DeterminismCheck::Values,
                                 .debug = debug,
                                 .policy = remat::save_ops({"aten::mm"})},
                                f, x);
    CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], plain));
    CHECK(bit_equal(grad_of(y, {x})[0], plain));
  }
  CHECK(num_logged == 3);
}

TEST_CASE("gradients flow through an UnseenGuard, in nested regions too", "[scope][policy]") {
  const Tensor x = matrix(1), w = matrix(2);
  const auto f = [&](const Tensor& t) {
    Tensor y = t.mm(w).sin();
    {
      const remat::UnseenGuard unseen;
      y = y.exp().mm(w);
    }
    return (y * t).cos().mm(y);
  };
  const auto twice = [&](const Tensor& t) { return checkpoint(f, t).sin(); };
  const auto second = [&](const Tensor& y) {
    const Tensors first = grad_of(y, {x, w}, {.create_graph = true});
    return grad_of(first[0].sin() + first[1].sin(), {x, w});
  };
  const Tensors plain = second(f(x)), nested = second(f(x).sin());
  require_bit_equal(second(checkpoint(f, x)), plain);
  require_bit_equal(second(checkpoint({.policy = remat::save_matmuls()}, f, x)), plain);
  require_bit_equal(second(checkpoint(twice, x)), nested);
  const remat::UnseenGuard outside;  // without a region it does nothing
  require_bit_equal(second(checkpoint(f, x)), plain);
}
