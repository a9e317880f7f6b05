// Script modules in regions: as their function, called inside it, and what is said when LibTorch
// changes its plan.

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include "tests/support/nn.h"
#include "tests/support/warnings.h"

namespace jit = torch::jit;
using remat::checkpoint;
using remat::CheckpointError;

namespace {

jit::Module made() {
  const Seed seed;
  jit::Module module("m");
  module.register_parameter("w", leaf({8, 8}), false);
  module.register_parameter("b", leaf({8}), false);
  module.register_buffer("mean", at::zeros({8}));
  module.register_buffer("var", at::ones({8}));
  module.register_attribute("training", c10::BoolType::get(), true);
  module.define(R"(
def forward(self, x):
  h = torch.batch_norm(torch.addmm(self.b, x, self.w), self.b, self.b, self.mean, self.var,
                       self.training, 0.1, 1e-5, True)
  h = torch.dropout(torch.tanh(h), 0.2, self.training)
  return h * torch.sigmoid(h.matmul(self.w)) * x
def other(self, x):
  return (x * self.b).sin().sin()
)");
  return module;
}

struct Trained {
  Tensors losses, grads, buffers;
  Tensor next_random;
};

/// Five steps of `run(module, x)` by gradient descent.
template <class Run>
Trained trained(Run&& run) {
  jit::Module module = made();
  const Seed seed(5);
  Trained all;
  for (int step = 0; step < 5; ++step) {
    const Tensor x = leaf({4, 8});
    for (const Tensor& each : module.parameters()) each.mutable_grad() = Tensor();
    const Tensor loss = run(module, x).square().sum();
    loss.backward();
    all.losses.push_back(loss.detach());
    all.grads.push_back(x.grad());
    const at::NoGradGuard no_grad;
    for (const Tensor& each : module.parameters()) {
      all.grads.push_back(each.grad());
      each.sub_(each.grad() * 0.01);
    }
  }
  for (const Tensor& each : module.buffers()) all.buffers.push_back(each.clone());
  all.next_random = at::rand({4});
  return all;
}

void require_alike(const Trained& with, const Trained& plain) {
  require_bit_equal(with.losses, plain.losses);
  require_bit_equal(with.grads, plain.grads);
  require_bit_equal(with.buffers, plain.buffers);
  require_bit_equal({with.next_random}, {plain.next_random});
}

Tensor plainly(jit::Module& module, const Tensor& x) { return module.forward({x}).toTensor(); }
Tensor as_function(jit::Module& module, const Tensor& x) {
  return checkpoint(module, x).toTensor();
}
Tensor in_lambda(jit::Module& module, const Tensor& x) {
  return checkpoint([module](const Tensor& in) mutable { return module.forward({in}).toTensor(); },
                    x);
}
Tensor simple(const Tensor& x, jit::Module& module) {
  return (x * module.attr("b").toTensor()).sin().sin();
}

/// LibTorch's executor settles on a plan, with fresh tensors of that kind.
void settle(jit::Module& module, bool requires_grad) {
  for (int i = 0; i < 4; ++i) {
    const Tensor y =
        module.get_method("other")({at::ones({4, 8}).requires_grad_(requires_grad)}).toTensor();
    if (y.requires_grad()) y.sum().backward();
  }
  for (const Tensor& each : module.parameters()) each.mutable_grad() = Tensor();
}

/// The first script that a program's regions meet inside a function is saved plainly.
void meet_first_script() {
  jit::Module module("first");
  module.define("def forward(self, x):\n  return (x * x).sin()\n");
  in_lambda(module, leaf({2})).sum().backward();
}

}  // namespace

TEST_CASE("the first script that a region meets inside its function has the plain gradient",
          "[script][modules]") {
  jit::Module module("first");
  module.define("def forward(self, x):\n  return (x * x).sin()\n");
  const bool early_stop = GENERATE(true, false);
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(
      {.early_stop = early_stop},
      [module](const Tensor& in) mutable {
        return module.forward({in.sin().sin()}).toTensor().sin();
      },
      x);
  const Tensor h = x.sin().sin();
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of((h * h).sin().sin(), {x})[0]));
}

TEST_CASE("a script module as the function trains as without regions from the first step on",
          "[script][modules]") {
  const Counted done;
  const Trained plain = trained(plainly);
  const Trained with = trained(as_function);
  CHECK(done.now().recomputes == 5);
  require_alike(with, plain);
}

TEST_CASE("a plan that settles between forward and backward does no harm to a script function",
          "[script][modules]") {
  const auto disturbed = [](auto run) {
    return [run](jit::Module& module, const Tensor& x) {
      const Tensor y = run(module, x);
      const at::NoGradGuard no_grad;
      module.setattr("training", false);
      for (int i = 0; i < 3; ++i) module.forward({at::ones({4, 8})});
      module.setattr("training", true);
      return y;
    };
  };
  require_alike(trained(disturbed(as_function)), trained(disturbed(plainly)));
}

TEST_CASE("a method of a script module is the function of a region", "[script][modules]") {
  jit::Module module = made();
  const Tensor x = leaf({4, 8});
  for (int i = 0; i < 3; ++i) {
    const Counted done;
    checkpoint(module.get_method("other"), x).toTensor().sum().backward();
    CHECK(done.now().recomputes == 1);
    CHECK(bit_equal(std::exchange(x.mutable_grad(), Tensor()), grad_of(simple(x, module), {x})[0]));
  }
}

TEST_CASE("a script function is called with fewer arguments than it has", "[script][modules]") {
  jit::Module module("defaults");
  module.define(
      "def forward(self, x, factor: float = 3.0, times: int = 2):\n"
      "  for i in range(times):\n    x = (x * factor).sin()\n  return x\n");
  const Tensor x = leaf({4});
  const Tensor plain = grad_of(plainly(module, x), {x})[0];
  for (int i = 0; i < 3; ++i) CHECK(bit_equal(grad_of(as_function(module, x), {x})[0], plain));
  const Tensor other = grad_of(module.forward({x, 0.5}).toTensor(), {x})[0];
  CHECK(bit_equal(grad_of(checkpoint(module, x, 0.5).toTensor(), {x})[0], other));
}

TEST_CASE("a script module inside a lambda equals it run without the optimiser",
          "[script][modules]") {
  meet_first_script();
  const auto unoptimized = [](jit::Module& module, const Tensor& x) {
    const jit::GraphOptimizerEnabledGuard off(false);
    return plainly(module, x);
  };
  // Its buffers are not known: named neither to the region nor to a provider.
  const auto in_eval = [](auto run) {
    return [run](jit::Module& module, const Tensor& x) {
      module.setattr("training", false);
      return run(module, x);
    };
  };
  require_alike(trained(in_eval(in_lambda)), trained(in_eval(unoptimized)));
  CHECK(jit::getGraphExecutorOptimize());
}

TEST_CASE("a script's plan that changed between forward and recompute is an error that says so",
          "[script][modules][rule-10]") {
  meet_first_script();
  jit::Module module = made();
  const Tensor x = leaf({4, 8});
  const Tensor y = checkpoint(
      [module](const Tensor& in) { return module.get_method("other")({in}).toTensor(); }, x);
  settle(module, /*requires_grad=*/true);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.kind() == CheckpointError::Kind::RecomputeFailed);
  CHECK_THAT(error.what(),
             contains("this region runs a TorchScript function whose executor changed its plan "
                      "between forward and recompute"));
  CHECK_THAT(error.what(), contains("make the script module itself the region's function"));
}

TEST_CASE("a settled script called past its module recomputes, an unsettled one says so",
          "[script][modules][rule-10]") {
  meet_first_script();
  const auto unit = std::make_shared<jit::CompilationUnit>();
  unit->define(std::nullopt, "def f(x, w):\n  return (x * w).sin().sin()\n", jit::nativeResolver(),
               nullptr);
  const Tensor w = leaf({4});
  const auto run = [unit, w](const Tensor& x) {
    return unit->get_function("f")({x, w}).toTensor();
  };
  const Tensor x = leaf({4});
  const Tensor y = checkpoint(run, x);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK_THAT(error.what(), contains("changed its plan"));
  for (int i = 0; i < 3; ++i) run(x).sum().backward();
  x.mutable_grad() = Tensor();
  const Counted done;
  checkpoint(run, x).sum().backward();
  CHECK(done.now().recomputes == 1);
  CHECK(bit_equal(x.grad(), grad_of((x * w).sin().sin(), {x})[0]));
}

TEST_CASE("what a settled plan falls back on is the same in the recompute", "[script][modules]") {
  meet_first_script();
  for (const bool is_function : {true, false}) {
    jit::Module module = made();
    settle(module, /*requires_grad=*/false);  // the plan fits arguments without grad
    const Tensor x = leaf({4, 8});
    for (int i = 0; i < 4; ++i) {
      const auto method = module.get_method("other");
      const Tensor y =
          is_function
              ? checkpoint(method, x).toTensor()
              : checkpoint([method](const Tensor& in) { return method({in}).toTensor(); }, x);
      y.sum().backward();
      CHECK(
          bit_equal(std::exchange(x.mutable_grad(), Tensor()), grad_of(simple(x, module), {x})[0]));
    }
  }
}

TEST_CASE("the training flag of a script module is forward's in a recompute", "[script][modules]") {
  jit::Module module = made();
  const Tensor x = leaf({4, 8});
  const Tensor y = checkpoint(module, x).toTensor();
  const Tensors after = module.attr("mean").toTensor().unbind();
  module.setattr("training", false);
  y.sum().backward();
  CHECK_FALSE(module.attr("training").toBool());
  CHECK(bit_equal(at::stack(after), module.attr("mean").toTensor()));
}

TEST_CASE("SkipBatchNorm runs a script module with a batch norm plainly, and says so once",
          "[script][modules]") {
  Warnings warnings;
  const remat::CheckpointOptions skip{.buffers = remat::BufferPolicy::SkipBatchNorm};
  const Counted done;
  const auto run = [&](jit::Module& module, const Tensor& x) {
    return checkpoint(skip, module, x).toTensor();
  };
  require_alike(trained(run), trained(plainly));
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0],
             contains("skipped for a subblock containing BatchNorm (__torch__.m"));
  jit::Module outer("outer");
  outer.register_module("inner", made());
  outer.define("def forward(self, x):\n  return self.inner.forward(x)\n");
  checkpoint(skip, outer, leaf({4, 8})).toTensor().sum().backward();
  remat::checkpointed(outer, skip)(leaf({4, 8})).toTensor().sum().backward();
  checkpoint(skip, outer.get_method("forward"), leaf({4, 8})).toTensor().sum().backward();
  CHECK(done.now().recomputes == 0);
  jit::Module without("without");
  without.define("def forward(self, x):\n  return (x * x).sin()\n");
  checkpoint(skip, without, leaf({4, 8})).toTensor().sum().backward();
  CHECK(done.now().recomputes == 1);
}
