// Functions of views, in-place operators, complex and sparse numbers, indices and sorting.

#include <torch/torch.h>

#include "tests/table/table.h"

namespace table {

namespace {

using Kind = Exception::Kind;
namespace F = torch::nn::functional;

void add_in_place(std::vector<Function>& t) {
  add(t, "view_chain", {{4, 6}}, [](const Tensors& a) {
    return a[0].exp().view({2, 12}).t().reshape({3, 8}).permute({1, 0}).contiguous().sin();
  });
  add(t, "in_place_on_intermediate", {{3, 4}}, [](const Tensors& a) {
    return (a[0] * 2).add_(1).mul_(a[0]).sin_().neg_();
  }).with(writes_kept);
  add(t, "in_place_on_view", {{4, 4}}, [](const Tensors& a) {
    Tensor y = a[0].exp();
    y = y * 2;
    y.select(0, 1).mul_(3);
    y.slice(1, 0, 2).add_(a[0].slice(1, 2, 4));
    return y.sin();
  }).with(writes_kept);
  add(t, "in_place_on_saved", {{3, 4}}, [](const Tensors& a) {
    const Tensor y = a[0].exp();
    const Tensor z = y.sin();
    y.mul_(2);
    return z + y;
  }).with(writes_kept | raises_changed);
  add(t, "in_place_relu_after_conv", {{1, 2, 6}, {3, 2, 3}}, [](const Tensors& a) {
    return at::conv1d(a[0], a[1]).relu_().sin();
  }).with(writes_kept);
  add(t, "copy_and_fill", {{3, 4}, {4}}, [](const Tensors& a) {
    const Tensor y = a[0] * 2;
    y.select(0, 0).copy_(a[1].exp());
    y.select(0, 1).fill_(0.5);
    y.select(0, 2).zero_();
    return y.sin() * a[0];
  }).with(writes_kept);
  add(t, "unbind", {{3, 4}}, [](const Tensors& a) {
    const Tensors rows = a[0].exp().unbind(0);
    return rows[0] * rows[1].sin() + rows[2].cos();
  });
  add(t, "chunk_and_split", {{4, 6}}, [](const Tensors& a) {
    const Tensors halves = a[0].sin().chunk(2, 1), parts = a[0].exp().split({1, 3}, 0);
    return Tensors{halves[0] * halves[1].exp(), parts[1].cos(), parts[0] * 2};
  });
  add(t, "unbind_in_place", {{3, 4}}, [](const Tensors& a) {
    Tensors rows = (a[0] * 2).unbind(0);
    rows[0].mul_(2);
    return rows[0].sin();
  });
  add(t, "returns_two_views", {{4, 4}}, [](const Tensors& a) {
    const Tensor y = a[0].exp();
    return Tensors{y.slice(0, 0, 2), y.slice(0, 2, 4).t(), y};
  });
  add(t, "diagonal_and_unfold", {{5, 5}}, [](const Tensors& a) {
    return a[0].exp().diagonal().sin().sum() * a[0].unfold(0, 2, 1).sin().sum({2});
  });
  add(t, "as_strided", {{4, 4}},
      [](const Tensors& a) { return a[0].exp().as_strided({3, 3}, {4, 1}, 1).sin(); });
  add(t, "detach_and_no_grad", {{3, 4}}, [](const Tensors& a) {
    Tensor scale;
    {
      at::NoGradGuard no_grad;
      scale = a[0].exp().sum();
    }
    return a[0].sin().exp() * a[0].detach().cos() / scale;
  });
  add(t, "where_and_clamp", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    return at::where(a[0] > a[1], a[0].clamp(-0.5, 0.5).exp(), a[1].abs().sqrt());
  });
  add(t, "foreach", {{3, 4}, {2}}, [](const Tensors& a) {
    const Tensors y = at::_foreach_exp(a);
    return at::_foreach_mul(at::_foreach_add(y, a), 2);
  });
  add(t, "foreach_in_place", {{3, 4}, {2}}, [](const Tensors& a) {
    const Tensors y = at::_foreach_mul(a, 2);
    at::_foreach_add_(y, 1);
    at::_foreach_sin_(y);
    return y;
  }).with(writes_kept);
}

void add_complex(std::vector<Function>& t) {
  add(t, "complex", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    const Tensor z = at::complex(a[0], a[1]);
    return Tensors{(z * z.exp()).abs(), z.angle()};
  });
  add(
      t, "complex_leaf", {{3, 4}},
      [](const Tensors& a) { return (a[0].exp() * a[0].conj()).sin(); }, at::kComplexFloat);
  add(
      t, "conjugate_views", {{3, 3}},
      [](const Tensors& a) {
        const Tensor z = a[0].conj();
        return Tensors{z.mm(a[0]), at::imag(z) * at::real(z).exp(), z};
      },
      at::kComplexFloat);
  add(
      t, "neg_view", {{3, 4}},
      [](const Tensors& a) {
        const Tensor y = at::imag(a[0].conj());
        return y.exp() * y;
      },
      at::kComplexFloat);
  add(t, "sparse_mm", {{3, 4}}, [](const Tensors& a) {
    const Tensor indices = at::tensor({0, 1, 1, 2, 0, 2}, at::kLong).view({2, 3});
    const Tensor sparse =
        at::sparse_coo_tensor(indices, a[0].select(0, 0).slice(0, 0, 3).exp(), {3, 3});
    return at::_sparse_mm(sparse, a[0]).sin();
  });
  add(t, "sparse_gradient", {{6, 3}}, [](const Tensors& a) {
    const Tensor rows = at::tensor({0, 2, 2, 5}, at::kLong);
    return at::embedding(a[0], rows, -1, false, /*sparse=*/true).sin();
  });
  add(t, "to_sparse_and_back", {{3, 4}},
      [](const Tensors& a) { return a[0].relu().to_sparse().to_dense().exp() * a[0]; });
  add(t, "sparse_csr_mm", [] {
    return Made{{leaf({4, 3})}, body_of([](const Tensors& a) {
                  const Tensor matrix = at::eye(4).mul_(2).to_sparse_csr();
                  return at::mm(matrix, a[0].exp()).sin();
                })};
  });
}

void add_indices(std::vector<Function>& t) {
  add(t, "index", {{5, 4}}, [](const Tensors& a) {
    const Tensor rows = at::tensor({0, 3, 3, 1}, at::kLong);
    return a[0].exp().index({rows}).sin() * a[0].index({a[0].detach() > 0}).sum();
  });
  add(t, "index_put", {{5, 4}, {3, 4}}, [](const Tensors& a) {
    const Tensor rows = at::tensor({0, 3, 3}, at::kLong);
    return a[0].exp().index_put({rows}, a[1].sin(), /*accumulate=*/true).cos();
  });
  add(t, "index_put_in_place", {{5, 4}, {2, 4}}, [](const Tensors& a) {
    Tensor y = a[0] * 2;
    y.index_put_({at::tensor({0, 3}, at::kLong)}, a[1].sin());
    return y.exp();
  }).with(writes_kept);
  add(t, "gather_and_scatter", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    const Tensor order = a[0].detach().argsort(1, false);
    return a[0].exp().gather(1, order).sin() + a[1].scatter_add(1, order, a[0].cos()).exp();
  });
  add(t, "masked", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    const Tensor mask = a[0].detach() > 0.1;
    return Tensors{a[0].exp().masked_select(mask).sin(), a[1].exp().masked_fill(mask, 0.5).sin()};
  });
  add(t, "take_along_dim", {{3, 4}}, [](const Tensors& a) {
    return a[0].exp().take_along_dim(a[0].detach().argsort(0, false), 0).sin() * a[0];
  });
  add(t, "sort", {{3, 5}}, [](const Tensors& a) {
    const auto [values, order] = a[0].sin().sort(1);
    return Tensors{values.exp(), order};
  });
  add(t, "topk", {{3, 5}}, [](const Tensors& a) {
    const auto [values, order] = a[0].sin().topk(2, 1);
    return values.exp() * order;
  });
  add(t, "kthvalue_and_median", {{3, 5}}, [](const Tensors& a) {
    const auto [value, where] = a[0].exp().kthvalue(2, 1);
    return Tensors{value.sin(), std::get<0>(a[0].median(1)).exp(), a[0].exp().median()};
  });
  add(t, "cummax_and_mode", {{3, 5}}, [](const Tensors& a) {
    return Tensors{std::get<0>(a[0].exp().cummax(1)).sin(), std::get<0>(a[0].sin().mode(1)).exp()};
  });
  add(t, "max_min_amax", {{3, 5}}, [](const Tensors& a) {
    return std::get<0>(a[0].exp().max(1)) * a[0].sin().amax({0}).sum() + a[0].min().exp();
  });
  add(t, "cumulative", {{3, 5}}, [](const Tensors& a) {
    return a[0].exp().cumsum(1).sin() + a[0].sin().cumprod(1) + a[0].logcumsumexp(0);
  }).with(has_two_formulas);
  add(t, "prod_with_zeros", {{3, 4}}, [](const Tensors& a) {
    const Tensor y = a[0].relu();
    return y.prod(1).sin() + a[0].sin().prod();
  }).with(has_two_formulas);
  add(t, "roll_flip_pad", {{3, 4}}, [](const Tensors& a) {
    return at::constant_pad_nd(a[0].exp().roll({1}, {1}).flip({0}), {1, 1}, 0.5).sin().tril();
  });
  add(t, "cat_stack_repeat", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    return at::cat({at::stack({a[0].exp(), a[1]}).sum(0), a[0].repeat({2, 1}).sin()}, 0).exp();
  });
  add(t, "sum_of_many_uses", {{3, 4}}, [](const Tensors& a) {
    Tensor y = a[0].sin();
    for (int i = 0; i < 6; ++i) y = (y * a[0]).tanh() + y;
    return y;
  });
}

}  // namespace

void add_views(std::vector<Function>& table) {
  add_in_place(table);
  add_complex(table);
  add_indices(table);
}

}  // namespace table
