// Functions whose arguments come with a history, with hooks, or in an unusual form.

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>

#include "tests/table/table.h"

namespace table {

namespace {

using Kind = Exception::Kind;

/// Adds a function of the tensors that `prepare` makes of leaves.
template <class Prepare, class F>
Function& add_prepared(std::vector<Function>& t, std::string name, Sizes sizes, Prepare prepare,
                       F f, at::ScalarType dtype = at::kFloat) {
  return add(t, std::move(name), [sizes = std::move(sizes), prepare, f, dtype] {
    Made made{{}, body_of(f)};
    for (const auto& each : sizes) made.args.push_back(leaf(each, dtype));
    made.prepare = body_of(prepare);
    return made;
  });
}

Tensor exp_sin(const Tensors& a) { return a[0].exp().sin() * a[0]; }

void add_forms(std::vector<Function>& t) {
  add_prepared(
      t, "conjugate_argument", {{3, 3}}, [](const Tensors& a) { return a[0].conj(); },
      [](const Tensors& a) { return a[0].mm(a[0]).sin() * (a[0].is_conj() ? 2 : 3); },
      at::kComplexFloat);
  add_prepared(
      t, "negated_argument", {{3, 3}}, [](const Tensors& a) { return at::imag(a[0].conj()); },
      [](const Tensors& a) { return (a[0].exp() * (a[0].is_neg() ? 2 : 3)).sin(); },
      at::kComplexFloat);
  add_prepared(
      t, "channels_last_argument", {{1, 2, 4, 4}, {2, 2, 3, 3}},
      [](const Tensors& a) {
        return Tensors{a[0].contiguous(at::MemoryFormat::ChannelsLast), a[1]};
      },
      [](const Tensors& a) { return at::conv2d(a[0].exp(), a[1]).sin(); });
  add_prepared(
      t, "overlapping_argument", {{8}},
      [](const Tensors& a) { return a[0].exp().as_strided({3, 4}, {2, 1}); }, exp_sin);
  add_prepared(
      t, "rows_as_arguments", {{3, 4}}, [](const Tensors& a) { return a[0].exp().unbind(0); },
      [](const Tensors& a) { return a[0].sin() * a[1] + a[2].exp(); });
  add_prepared(
      t, "expanded_scalar_argument", {{}}, [](const Tensors& a) { return a[0].expand({3, 4}); },
      exp_sin);
  add_prepared(
      t, "detached_argument", {{3, 4}},
      [](const Tensors& a) { return Tensors{a[0], a[0].detach(), a[0].exp().detach()}; },
      [](const Tensors& a) { return a[0].exp() * a[1].sin() * a[2]; });
  add_prepared(
      t, "argument_made_without_grad", {{3, 4}},
      [](const Tensors& a) {
        at::NoGradGuard no_grad;
        return Tensors{a[0].t(), a[0].view({4, 3})};
      },
      [](const Tensors& a) { return a[0].exp() * a[1].sin(); });
  add_prepared(
      t, "thawed_argument", {{3, 4}},
      [](const Tensors& a) { return Tensors{a[0], a[0].detach().exp().requires_grad_()}; },
      [](const Tensors& a) { return a[0].exp() * a[1].sin() * a[1]; });
  add_prepared(
      t, "wrapped_number", {{}, {3}},
      [](const Tensors& a) {
        const Tensor number = a[0] * 1;
        number.unsafeGetTensorImpl()->set_wrapped_number(true);
        return Tensors{number, a[1]};
      },
      [](const Tensors& a) { return (a[0] * at::arange(3)).exp() * a[1].exp(); }, at::kDouble)
      .with(is_wide);
  add(t, "wrapped_number_without_grad", [] {
    return Made{{leaf({3}), at::native::wrapped_scalar_tensor(2.5)}, body_of([](const Tensors& a) {
                  return (a[1] * at::arange(3) * 0.1).exp() * a[0].exp();
                })};
  });
  add(t, "sparse_leaf", [] {
    Tensor sparse = constant({4, 4}).relu().to_sparse().requires_grad_();
    return Made{{sparse, leaf({4, 3})},
                body_of([](const Tensors& a) { return at::mm(a[0], a[1].exp()).sin(); })};
  });
  add_prepared(
      t, "sparse_result_argument", {{4, 4}, {4, 3}},
      [](const Tensors& a) { return Tensors{a[0].relu().to_sparse(), a[1]}; },
      [](const Tensors& a) { return at::mm(a[0], a[1].exp()).sin(); });
  add(t, "csr_argument", [] {
    return Made{{leaf({4, 3}), at::eye(4).mul(2).to_sparse_csr()},
                body_of([](const Tensors& a) { return at::mm(a[1], a[0].exp()).sin(); })};
  });
  add(t, "nested_tensor", [] {
    return Made{{leaf({2, 3}), leaf({4, 3})}, body_of([](const Tensors& a) {
                  const Tensor nested =
                      at::_nested_tensor_from_tensor_list({a[0].exp(), a[1].exp()});
                  return nested.mul(2).to_padded_tensor(0.0).sin();
                })};
  });
}

Tensor times_two(const Tensor& g) { return g * 2; }

/// Adds functions with hooks on arguments, from before or from inside.
void add_prepared_hooks(std::vector<Function>& t) {
  const auto copy = [](const Tensors& a) { return a[0] * 2; };
  add_prepared(
      t, "hooked_result_argument", {{3, 4}},
      [](const Tensors& a) {
        const Tensor x = a[0] * 2;
        x.register_hook(times_two);
        return x;
      },
      exp_sin);
  add_prepared(
      t, "hooked_leaf_argument", {{3, 4}},
      [](const Tensors& a) {
        a[0].register_hook(times_two);
        return a[0];
      },
      exp_sin);
  add_prepared(t, "hook_on_result_argument", {{3, 4}}, copy, [](const Tensors& a) {
    if (a[0].requires_grad()) a[0].register_hook(times_two);
    return a[0].exp().sin();
  });
  add_prepared(t, "retain_grad_of_argument", {{3, 4}}, copy, [](const Tensors& a) {
    if (a[0].requires_grad()) a[0].retain_grad();
    return a[0].exp().sin();
  });
  add(t, "node_hook", {{3, 4}}, [](const Tensors& a) {
    struct Double : torch::autograd::FunctionPostHook {
      torch::autograd::variable_list operator()(const torch::autograd::variable_list& inputs,
                                                const torch::autograd::variable_list&) override {
        torch::autograd::variable_list doubles = inputs;
        for (Tensor& each : doubles)
          if (each.defined()) each = each * 2;
        return doubles;
      }
    };
    const Tensor y = a[0].exp();
    if (y.grad_fn()) y.grad_fn()->add_post_hook(std::make_unique<Double>());
    return y.sin();
  });
  add(t, "thaws_frozen_argument",
      [] {
        return Made{{leaf({3, 4}), constant({3, 4})}, body_of([](const Tensors& a) {
                      a[1].requires_grad_();
                      return a[0].exp() * a[1].sin() * a[1];
                    })};
      })
      .except(Kind::Skipped, "@(captured|half_captured)/backward_inside",
              "it changes what it captures, and what surrounds it there asks for that");
  add(t, "detaches_intermediate", {{3, 4}}, [](const Tensors& a) {
    Tensor y = a[0].exp();
    y = y.sin().detach_();
    return a[0].exp() * y;
  });
}

/// Adds functions that write to an argument through its relatives, and functions that change state
/// for a time.
void add_relatives(std::vector<Function>& t) {
  add_prepared(
      t, "writes_view_of_argument", {{3, 4}}, [](const Tensors& a) { return a[0] * 2; },
      [](const Tensors& a) {
        a[0].select(0, 1).mul_(3);
        return a[0].exp().sin();
      })
      .with(writes_args | writes_kept);
  add_prepared(
      t, "writes_base_of_argument", {{3, 4}},
      [](const Tensors& a) {
        const Tensor base = a[0] * 2;
        return Tensors{base, base.select(0, 1)};
      },
      [](const Tensors& a) {
        a[0].mul_(3);
        return a[0].exp() * a[1].sin();
      })
      .with(writes_args | writes_kept);
  add_prepared(
      t, "writes_row_of_unbound", {{3, 4}}, [](const Tensors& a) { return (a[0] * 2).unbind(0); },
      [](const Tensors& a) {
        a[0].mul_(2);
        return a[0].exp() * a[1];
      })
      .with(writes_args | writes_kept);
  add(t, "inference_mode_inside", {{3, 4}}, [](const Tensors& a) {
    double scale = 0;
    {
      const c10::InferenceMode inference;
      scale = a[0].abs().sum().item<double>();
    }
    return (a[0] * scale).exp().sin();
  });
  add(t, "inference_tensor_inside", {{3, 4}}, [](const Tensors& a) {
    Tensor scale;
    {
      const c10::InferenceMode inference;
      scale = a[0].abs();
    }
    return (a[0].exp() * scale).sin();
  });
  add(t, "resizes_and_sets", {{3, 4}}, [](const Tensors& a) {
    Tensor y = at::empty({0});
    y.resize_({3, 4}).fill_(2);
    Tensor z = at::empty({0});
    z.set_(y.storage(), 0, {3, 4}, {4, 1});
    return a[0].exp() * z.mul_(2) * a[0];
  });
  add(t, "out_variants", {{3, 4}}, [](const Tensors& a) {
    Tensor buffer = at::empty({3, 4});
    at::sin_out(buffer, a[0].detach());
    const Tensor y = a[0].exp() * buffer;
    return y.sin() * at::cos(buffer);
  });
  add(t, "catches_and_goes_on", {{3, 4}}, [](const Tensors& a) {
    Tensor y = a[0].exp();
    try {
      y = y.mm(a[0]);
    } catch (const std::exception&) {
      y = y.sin();
    }
    return y.exp() * a[0];
  });
  add(t, "grad_mode_off_and_on", {{3, 4}}, [](const Tensors& a) {
    const at::NoGradGuard no_grad;
    const Tensor scale = a[0].exp();
    const at::AutoGradMode grad_mode(true);
    return (a[0].sin() * scale).exp();
  });
}

/// Tensors that are zero and have no elements.
void add_zerotensors(std::vector<Function>& t) {
  const auto packs_zeros = [](Function& function) {
    function.except(
        Exception::Kind::MayRaise, "policy_hooks/backward_inside",
        "what a pack function runs to copy the zeros counts among the region's operators",
        "the recompute did not repeat forward");
  };
  packs_zeros(add(t, "zerotensor_argument", [] {
    return Made{{leaf({3, 4}), at::_efficientzerotensor({3, 4}, at::kFloat)},
                body_of([](const Tensors& a) { return a[0].exp() * a[1] + a[0].sin(); })};
  }));
  packs_zeros(add(t, "zerotensor_inside", {{3, 4}}, [](const Tensors& a) {
    return a[0].exp() * at::_efficientzerotensor({3, 4}, at::kFloat) + a[0].sin();
  }));
  add(t, "zerotensor_scaled", {{3, 4}},
      [](const Tensors& a) {
        const Tensor zero = at::_efficientzerotensor({3, 4}, at::kFloat);
        return (a[0].sin() + zero).exp() * (zero * 2);
      })
      .except(Exception::Kind::Skipped, "@(policy_hooks|hooks_inside|budget*)/*",
              "a copy of a tensor of zeros without data has data, and its products give -0 for 0");
  packs_zeros(add_prepared(
      t, "zerotensor_with_history", {{3, 4}},
      [](const Tensors& a) {
        return Tensors{a[0], a[0] * at::_efficientzerotensor({3, 4}, at::kFloat)};
      },
      [](const Tensors& a) { return a[0].exp() * a[1] + a[0].sin(); }));
}

}  // namespace

void add_prepared(std::vector<Function>& table) {
  add_forms(table);
  add_prepared_hooks(table);
  add_relatives(table);
  add_zerotensors(table);
}

}  // namespace table
