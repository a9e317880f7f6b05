// Functions that are autograd Functions of their own, register hooks on tensors, or are compiled
// from a script.

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/ir_emitter.h>
#include <torch/jit.h>
#include <torch/script.h>

#include "tests/support/saving_functions.h"
#include "tests/table/table.h"

namespace table {

namespace {

using remat::testing::ChangesInput;
using remat::testing::KeepsMask;
using remat::testing::ReadsTwice;
using remat::testing::SavesInput;
using remat::testing::SavesOutput;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Kind = Exception::Kind;

struct SavesIntermediate : torch::autograd::Function<SavesIntermediate> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor inner = x.cos();
    ctx->save_for_backward({inner});
    return x.sin();
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    return {g[0] * ctx->get_saved_variables()[0]};
  }
};

struct SavesAll : torch::autograd::Function<SavesAll> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, double power) {
    const Tensor inner = x.sigmoid();
    Tensor y = inner * x;
    ctx->saved_data["power"] = power;
    ctx->save_for_backward({inner, Tensor(), x, y, x});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const variable_list saved = ctx->get_saved_variables();
    TORCH_CHECK(!saved[1].defined(), "what was undefined came back");
    const double power = ctx->saved_data["power"].toDouble();
    return {g[0] * power * (saved[0] + saved[3] * (1 - saved[0])) + saved[2] - saved[4], {}};
  }
};

struct SavesNothing : torch::autograd::Function<SavesNothing> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    ctx->saved_data["numel"] = x.numel();
    return x * 3;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    return {g[0] * 3.0 * static_cast<double>(ctx->saved_data["numel"].toInt())};
  }
};

struct TwoOutputs : torch::autograd::Function<TwoOutputs> {
  static variable_list forward(AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    const Tensor order = a > b;
    Tensor product = a * b, exponential = (a - b).exp();
    ctx->mark_non_differentiable({order});
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({a, b, exponential});
    return {product, exponential, order};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    const variable_list saved = ctx->get_saved_variables();
    Tensor left = at::zeros_like(saved[0]), right = at::zeros_like(saved[1]);
    if (g[0].defined()) {
      left = left + g[0] * saved[1];
      right = right + g[0] * saved[0];
    }
    if (g[1].defined()) {
      left = left + g[1] * saved[2];
      right = right - g[1] * saved[2];
    }
    return {left, right};
  }
};

/// Returns its input, and a view of it.
struct ReturnsInput : torch::autograd::Function<ReturnsInput> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x) {
    ctx->save_for_backward({x});
    return {x, x.exp()};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& g) {
    return {g[0] + g[1] * ctx->get_saved_variables()[0].exp()};
  }
};

template <class F>
void add_function(std::vector<Function>& t, std::string name, unsigned traits = 0) {
  add(t, std::move(name), {{3, 4}}, [](const Tensors& a) {
    return F::apply(a[0].exp() * 0.5) * a[0];
  }).with(traits);
}

Tensor doubled(const Tensor& g) { return g * 2; }

void add_hooks(std::vector<Function>& t) {
  add(t, "hook_on_intermediate", {{3, 4}}, [](const Tensors& a) {
    const Tensor y = a[0].exp();
    if (y.requires_grad()) y.register_hook(doubled);
    return y.sin();
  });
  add(t, "retains_grad_of_intermediate", {{3, 4}}, [](const Tensors& a) {
    const Tensor y = a[0].exp();
    if (y.requires_grad()) y.retain_grad();
    return y.sin() * (y.grad_fn() ? 2 : 3);
  });
  add(t, "hook_on_leaf_argument", {{3, 4}}, [](const Tensors& a) {
    if (a[0].requires_grad()) a[0].register_hook(doubled);
    return a[0].exp().sin();
  });
  add(t, "hook_on_captured_leaf", [] {
    Made made{{leaf({3, 4})}, {}};
    made.params = {leaf({4})};
    made.body = body_of([w = made.params[0]](const Tensors& a) {
      w.register_hook(doubled);
      return (a[0] * w).exp().sin();
    });
    return made;
  });
}

void add_scripts(std::vector<Function>& t) {
  static const auto unit = torch::jit::compile(R"(
    def gated(x, w):
        y = torch.mm(x, w)
        return torch.sigmoid(y) * torch.tanh(y) + y.relu()

    def looped(x, w):
        for i in range(3):
            x = torch.tanh(torch.mm(x, w)) + x
            if i == 1:
                x = x * 0.5
        return x
  )");
  for (const char* const name : {"gated", "looped"})
    add(t, std::string("script_") + name, {{3, 4}, {4, 4}},
        [name](const Tensors& a) { return unit->run_method(name, a[0], a[1]).toTensor().exp(); });
}

}  // namespace

void add_custom(std::vector<Function>& table) {
  add_function<SavesInput>(table, "custom_saves_input");
  add_function<SavesOutput>(table, "custom_saves_output");
  add_function<SavesIntermediate>(table, "custom_saves_intermediate");
  add_function<SavesNothing>(table, "custom_saves_nothing");
  add_function<KeepsMask>(table, "custom_keeps_mask");
  add_function<ReadsTwice>(table, "custom_reads_twice", reads_twice);
  add_function<ChangesInput>(table, "custom_changes_input", writes_kept);
  add(table, "custom_saves_all", {{3, 4}},
      [](const Tensors& a) { return SavesAll::apply(a[0].exp(), 2.0).sin(); });
  add(table, "custom_two_outputs", {{3, 4}, {3, 4}},
      [](const Tensors& a) { return TwoOutputs::apply(a[0].sin(), a[1]); });
  add(table, "custom_returns_input", {{3, 4}},
      [](const Tensors& a) { return ReturnsInput::apply(a[0].sin()); });
  add_hooks(table);
  add_scripts(table);
}

}  // namespace table
