// Functions of unusual arguments, and functions that look at more than their arguments' numbers.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/table/table.h"

namespace table {

namespace {

using Kind = Exception::Kind;

/// Returns a factor that tells a function's observations of its arguments apart.
double factor(std::initializer_list<bool> facts) {
  double sum = 1;
  for (const bool fact : facts) sum = 2 * sum + (fact ? 1 : 0);
  return sum;
}

Made with_prepared(Tensors args, Body prepare, Body body) {
  Made made{std::move(args), std::move(body)};
  made.prepare = std::move(prepare);
  return made;
}

/// Adds functions with arguments without grad, integers and views among them.
void add_kinds(std::vector<Function>& t) {
  add(t, "mixed_dtypes", [] {
    return Made{{leaf({2, 3}), leaf({2, 3}, at::kDouble)}, body_of([](const Tensors& a) {
                  return (a[0].exp() * a[1].sin()).to(at::kFloat).tanh() + a[0].to(at::kDouble);
                })};
  }).with(is_wide);
  add(
      t, "half_precision", {{2, 3}}, [](const Tensors& a) { return a[0].exp().sin() * a[0]; },
      at::kBFloat16);
  add(t, "integer_beside_float", [] {
    return Made{{leaf({5, 3}), whole({4}, 5)}, body_of([](const Tensors& a) {
                  return a[0].index_select(0, a[1]).exp() * a[1].unsqueeze(1);
                })};
  });
  add(t, "bool_beside_float", [] {
    return Made{{leaf({4, 3}), constant({4, 3}) > 0}, body_of([](const Tensors& a) {
                  return at::where(a[1], a[0].exp(), a[0].sin()) * a[0];
                })};
  });
  add(t, "zero_size", {{0, 3}, {3, 2}},
      [](const Tensors& a) { return Tensors{a[0].mm(a[1]).exp(), a[0].sin().sum() * a[1].exp()}; });
  add(t, "scalar", {{}, {3}}, [](const Tensors& a) { return (a[0].exp() * a[1].sin()).cos(); });
  add(t, "undefined_argument", [] {
    return Made{{leaf({3}), Tensor()}, body_of([](const Tensors& a) {
                  return a[1].defined() ? a[0].sin() : a[0].exp().sin();
                })};
  });
  add(t, "no_grad_arguments", [] {
    Made made{{constant({3, 4})}, {}};
    made.params = {leaf({4, 4})};
    made.body = body_of([w = made.params[0]](const Tensors& a) { return a[0].mm(w).tanh(); });
    return made;
  });
  add(t, "no_grad_at_all", [] {
    return Made{{constant({3, 4})}, body_of([](const Tensors& a) { return a[0].exp().sin(); })};
  });
  add(t, "non_contiguous", [] {
    return with_prepared({leaf({4, 6})},
                         body_of([](const Tensors& a) { return a[0].t().slice(0, 1, 6, 2); }),
                         body_of([](const Tensors& a) { return a[0].exp().mm(a[0].t()); }));
  });
  add(t, "expanded", [] {
    return with_prepared({leaf({1, 4})},
                         body_of([](const Tensors& a) { return a[0].expand({3, 4}); }),
                         body_of([](const Tensors& a) { return a[0].exp() * a[0]; }));
  });
  add(t, "same_twice", [] {
    return with_prepared(
        {leaf({3, 4})}, [](const Tensors& a) { return Tensors{a[0], a[0]}; },
        body_of([](const Tensors& a) { return a[0].exp() * a[1].sin(); }));
  });
  add(t, "same_result_twice", [] {
    return with_prepared(
        {leaf({3, 4})},
        [](const Tensors& a) {
          const Tensor x = a[0].sin();
          return Tensors{x, x};
        },
        body_of([](const Tensors& a) { return a[0].exp() * a[1].sin(); }));
  });
  add(t, "shared_storage", [] {
    return with_prepared(
        {leaf({4, 4})},
        [](const Tensors& a) {
          const Tensor x = a[0].exp();
          return Tensors{x.slice(0, 0, 3), x.slice(0, 1, 4)};
        },
        body_of([](const Tensors& a) { return a[0].sin() * a[1].cos(); }));
  });
  add(t, "returns_argument", {{3, 4}, {3, 4}},
      [](const Tensors& a) { return Tensors{a[0], a[0].exp() * a[1], a[1]}; });
  add(t, "returns_view_of_argument", {{3, 4}},
      [](const Tensors& a) { return Tensors{a[0].t(), a[0].select(0, 1).exp()}; });
  add(t, "unused_argument", {{3, 4}, {3, 4}}, [](const Tensors& a) { return a[0].exp().sin(); });
  add(t, "frozen_argument", [] {
    return Made{{leaf({3, 4}), constant({3, 4})},
                body_of([](const Tensors& a) { return (a[0] * a[1]).exp() * a[1].sin(); })};
  });
  add(t, "sparse_argument", [] {
    return Made{{leaf({4, 4}), constant({4, 4}).relu().to_sparse()},
                body_of([](const Tensors& a) { return at::mm(a[1], a[0].exp()).sin(); })};
  });
}

/// Adds a function that reads a property of an argument besides its values.
Function& add_look(std::vector<Function>& t, std::string name, Body prepare,
                   double (*look)(const Tensor&)) {
  return add(t, std::move(name), [prepare, look] {
    return with_prepared({leaf({4, 6})}, prepare, body_of([look](const Tensors& a) {
                           return (a[0].exp() * look(a[0])).sin();
                         }));
  });
}

/// Adds functions that branch on properties of arguments.
void add_looks(std::vector<Function>& t) {
  add(t, "looks_at_sizes", {{3, 4}, {4}}, [](const Tensors& a) {
    const bool is_tall = a[0].size(0) > a[0].size(1);
    return is_tall ? a[0].sin() : a[0].exp() * a[1].dim() * a[0].numel();
  });
  const Body part = body_of([](const Tensors& a) { return a[0].t().slice(0, 1, 5); });
  const Body row = [](const Tensors& a) { return Tensors{a[0].exp().chunk(2)[1]}; };
  const Body itself = [](const Tensors& a) { return a; };
  add_look(t, "looks_at_strides", part, [](const Tensor& x) {
    return static_cast<double>(x.stride(0) + 10 * x.stride(1) + 100 * x.storage_offset()) +
           (x.is_contiguous() ? 0.5 : 0);
  });
  add_look(t, "looks_at_view", part, [](const Tensor& x) { return x.is_view() ? 2.0 : 3.0; });
  add_look(t, "looks_at_view_of_leaf", itself,
           [](const Tensor& x) { return x.is_view() ? 2.0 : 3.0; });
  add_look(t, "looks_at_is_leaf", itself, [](const Tensor& x) { return x.is_leaf() ? 2.0 : 3.0; });
  add_look(t, "looks_at_is_leaf_of_result", row,
           [](const Tensor& x) { return x.is_leaf() ? 2.0 : 3.0; });
  add_look(t, "looks_at_requires_grad_of_result", row,
           [](const Tensor& x) { return x.requires_grad() ? 2.0 : 3.0; });
  add_look(t, "looks_at_output_nr", row,
           [](const Tensor& x) { return 2.0 + static_cast<double>(x.output_nr()); });
  add_look(
      t, "looks_at_retains_grad",
      [](const Tensors& a) {
        Tensors x{a[0].exp()};
        x[0].retain_grad();
        return x;
      },
      [](const Tensor& x) { return x.retains_grad() ? 2.0 : 3.0; });
  add_look(t, "looks_at_grad_fn", row, [](const Tensor& x) { return x.grad_fn() ? 2.0 : 3.0; });
  add_look(t, "looks_at_storage_size", part,
           [](const Tensor& x) { return static_cast<double>(x.storage().nbytes()); });
  add_look(
      t, "looks_at_version", [](const Tensors& a) { return Tensors{(a[0] * 2).mul_(3)}; },
      [](const Tensor& x) { return 1.0 + static_cast<double>(x._version()); })
      .except(Kind::Skipped, "@(hooks_clone|hooks_bytes|policy_hooks|save_on_disk)/*",
              "what such hooks give back is another tensor, with a version of its own");
  add(t, "looks_at_dtype", {{3, 4}}, [](const Tensors& a) {
    const int f = (a[0].scalar_type() == at::kFloat ? 2 : 3) * (a[0].is_cpu() ? 5 : 7);
    return (a[0].exp() * f).sin();
  });
  add(t, "looks_at_requires_grad", [] {
    return Made{{leaf({3, 4}), constant({3, 4})}, body_of([](const Tensors& a) {
                  const double f = factor(
                      {a[0].requires_grad(), a[1].requires_grad(), a[0].is_leaf(), a[1].is_leaf()});
                  return (a[0].exp() * a[1].cos() * f).sin();
                })};
  });
  add(t, "looks_at_grad_of_leaf", [] {
    Made made{
        {leaf({3, 4})}, body_of([](const Tensors& a) {
          const Tensor grad = a[0].is_leaf() ? a[0].grad() : Tensor();
          return (a[0].exp() * (grad.defined() ? grad.detach().clone() + 2 : at::ones({}))).sin();
        })};
    made.args[0].mutable_grad() = at::full({3, 4}, 3.0F);
    return made;
  });
  add(t, "looks_at_grad_of_captured", [] {
    Made made{{constant({3, 4})}, {}};
    made.params = {leaf({4})};
    made.params[0].mutable_grad() = at::full({4}, 3.0F);
    made.body = body_of([w = made.params[0]](const Tensors& a) {
      return ((a[0] * w).exp() * (w.grad().defined() ? 2.0 : 3.0)).sin();
    });
    return made;
  });
  add(t, "is_same_as_captured", [] {
    Made made{{leaf({3, 4})}, {}};
    made.body = body_of([x = made.args[0]](const Tensors& a) {
      return (a[0].exp() * (a[0].is_same(x) ? 2 : 3)).sin();
    });
    return made;
  });
}

/// Adds functions that write to arguments, inside and afterwards.
void add_writes(std::vector<Function>& t) {
  const Body copies = [](const Tensors& a) {
    Tensors made;
    for (const Tensor& each : a) made.push_back(each * 1);
    return made;
  };
  add(t, "writes_argument", [copies] {
    return with_prepared({leaf({3, 4}), leaf({3, 4})}, copies, body_of([](const Tensors& a) {
                           a[0].mul_(2).add_(a[1]);
                           return a[0].exp().sin();
                         }));
  }).with(writes_args | writes_kept);
  add(t, "writes_argument_only", [copies] {
    return with_prepared({leaf({3, 4})}, copies,
                         body_of([](const Tensors& a) { return a[0].mul_(2).add_(1); }));
  }).with(writes_args | writes_kept);
  add(t, "writes_argument_after_use", [copies] {
    return with_prepared({leaf({3, 4})}, copies, body_of([](const Tensors& a) {
                           const Tensor y = (a[0] * 3).sin();
                           a[0].mul_(2);
                           return y.exp();
                         }));
  }).with(writes_args | writes_kept);
  add(t, "writes_frozen_argument", [] {
    return Made{{leaf({3, 4}), constant({3, 4})}, body_of([](const Tensors& a) {
                  a[1].add_(1);
                  return a[0].exp() * a[1].sin();
                })};
  }).with(writes_args | writes_kept);
  add(t, "writes_leaf", {{3, 4}}, [](const Tensors& a) {
    return a[0].mul_(2).exp();
  }).with(writes_args | writes_kept);
  add(t, "writes_scratch_of_its_own", {{3, 4}}, [](const Tensors& a) {
    const Tensor scratch = at::zeros({3, 4});
    scratch.copy_(a[0].detach()).mul_(0.5);
    return a[0].exp() * scratch + at::empty({3, 4}).fill_(0.25) * a[0];
  });
  add(t, "argument_written_after",
      [copies] {
        Made made =
            with_prepared({leaf({3, 4})}, copies,
                          body_of([](const Tensors& a) { return a[0].exp().sin() * a[0]; }));
        made.after = [](const Tensors& a) { a[0].mul_(2); };
        return made;
      })
      .with(raises_changed)
      .except(Kind::MayRaise, "*/backward_inside", "saving an argument is a use of it",
              "modified by an inplace operation")
      .except(Kind::Skipped, "captured/backward_inside",
              "autograd saves nothing of what was captured and changed: a known limit");
  add(t, "frozen_argument_written_after", [] {
    Made made{{leaf({3, 4}), constant({3, 4})},
              body_of([](const Tensors& a) { return a[0].exp() * a[1]; })};
    made.after = [](const Tensors& a) { a[1].mul_(2); };
    return made;
  }).with(raises_changed);
  add(t, "set_data_after",
      [] {
        Made made{{leaf({3, 4})},
                  body_of([](const Tensors& a) { return a[0].exp().sin() * a[0]; })};
        made.after = [](const Tensors& a) { a[0].set_data(at::full({3, 4}, 0.5F)); };
        return made;
      })
      .with(replaces_data)
      .except(Exception::Kind::Skipped, "captured/backward_inside",
              "autograd saves nothing of what was captured and replaced: a known limit");
  add(t, "set_data_of_frozen_after", [] {
    Made made{{leaf({3, 4}), constant({3, 4})},
              body_of([](const Tensors& a) { return (a[0] * a[1]).exp() * a[1]; })};
    made.after = [](const Tensors& a) { a[1].set_data(at::full({3, 4}, 0.5F)); };
    return made;
  }).with(replaces_data);
  add(t, "raises_in_forward", {{3, 4}, {3, 4}},
      [](const Tensors& a) { return a[0].exp().mm(a[1]).sin(); });
  add(t, "raises_in_backward", {{3, 4}}, [](const Tensors& a) {
    const Tensor y = a[0].exp();
    y.register_hook([](const Tensor& g) {
      TORCH_CHECK(!g.defined(), "a hook that refuses");
      return g;
    });
    return y.sin();
  });
}

}  // namespace

void add_arguments(std::vector<Function>& table) {
  add_kinds(table);
  add_looks(table);
  add_writes(table);
}

}  // namespace table
