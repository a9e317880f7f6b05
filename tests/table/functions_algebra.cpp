// Functions of linear algebra, Fourier transforms and reductions.

#include <ATen/ATen.h>

#include "tests/table/table.h"

namespace table {

namespace {

/// Returns a matrix that is far from singular.
Tensor regular(const Tensor& a) { return a + 3 * at::eye(a.size(0), a.options()); }
/// Returns a symmetric, positive matrix.
Tensor definite(const Tensor& a) { return regular(a.mm(a.t())); }

void add_matrices(std::vector<Function>& t) {
  const Sizes square{{3, 3}}, pair{{3, 3}, {3, 2}};
  add(t, "solve", pair,
      [](const Tensors& a) { return at::linalg_solve(regular(a[0]), a[1].exp()).sin(); });
  add(t, "inverse", square, [](const Tensors& a) { return at::linalg_inv(regular(a[0])).exp(); });
  add(t, "cholesky", pair, [](const Tensors& a) {
    const Tensor factor = at::linalg_cholesky(definite(a[0]));
    return at::cholesky_solve(a[1], factor).sin() * factor.sum();
  });
  add(t, "qr", {{4, 3}}, [](const Tensors& a) {
    const auto [q, r] = at::linalg_qr(a[0].exp());
    return Tensors{q.sin(), r};
  });
  add(t, "eigh", square, [](const Tensors& a) {
    const auto [values, vectors] = at::linalg_eigh(definite(a[0]));
    return Tensors{values.log(), vectors.abs()};
  });
  add(t, "svd", {{4, 3}}, [](const Tensors& a) {
    const auto [u, s, v] = at::linalg_svd(a[0], /*full_matrices=*/false);
    return Tensors{u.abs(), s.exp(), v.abs()};
  });
  add(t, "determinants", square, [](const Tensors& a) {
    const auto [sign, logarithm] = at::linalg_slogdet(regular(a[0]));
    return at::det(a[0]).sin() + logarithm * sign;
  }).with(has_two_formulas);
  add(t, "matrix_exp", square, [](const Tensors& a) { return at::matrix_exp(a[0].sin()).sin(); });
  add(t, "lstsq", {{4, 3}, {4, 2}}, [](const Tensors& a) {
    return std::get<0>(at::linalg_lstsq(a[0], a[1].exp(), {}, "gels")).sin();
  });
  add(t, "triangular_and_lu", pair, [](const Tensors& a) {
    const Tensor lower = regular(a[0]).tril();
    const auto [factors, pivots] = at::linalg_lu_factor(regular(a[0]));
    return at::linalg_solve_triangular(lower, a[1], /*upper=*/false).sin() *
           at::linalg_lu_solve(factors, pivots, a[1]);
  });
  add(t, "pinv_and_norms", {{4, 3}}, [](const Tensors& a) {
    return at::linalg_pinv(a[0]).sin() * at::linalg_norm(a[0], "nuc") +
           at::linalg_matrix_norm(a[0]);
  });
  add(
      t, "doubles", pair,
      [](const Tensors& a) { return at::linalg_solve(regular(a[0]).exp(), a[1]).sin(); },
      at::kDouble)
      .with(is_wide);
}

void add_products(std::vector<Function>& t) {
  add(t, "matmuls", {{2, 3, 4}, {2, 4, 3}, {3}}, [](const Tensors& a) {
    return at::addmv(a[2], a[0].bmm(a[1].exp()).sum(0), a[2]).sin() *
           at::baddbmm(a[0].bmm(a[1]), a[0], a[1]).sum();
  });
  add(t, "einsum", {{2, 3}, {3, 4}, {4}}, [](const Tensors& a) {
    return at::einsum("ij,jk,k->ik", {a[0].exp(), a[1].sin(), a[2]}).tanh();
  });
  add(t, "outer_cross_kron", {{3}, {3}}, [](const Tensors& a) {
    return at::outer(a[0].exp(), a[1]).sin() * at::linalg_cross(a[0], a[1]).sum() +
           at::kron(a[0], a[1]).sum() + a[0].dot(a[1]);
  });
  add(t, "cdist", {{3, 4}, {2, 4}}, [](const Tensors& a) {
    return at::cdist(a[0].exp(), a[1]).sin() + at::cdist(a[0], a[1], 1.0) * at::pdist(a[0]).sum();
  });
  add(t, "fft", {{3, 8}}, [](const Tensors& a) {
    const Tensor spectrum = at::fft_rfft(a[0].exp());
    return at::fft_irfft(spectrum * spectrum.conj(), 8).sin() + at::fft_fft2(a[0]).abs();
  });
  add(t, "stft", {{16}}, [](const Tensors& a) {
    return at::real(at::stft(a[0].exp(), 4, 2, 4, at::hann_window(4), false, true, true)).sin();
  }).with(writes_kept);
}

void add_reductions(std::vector<Function>& t) {
  add(t, "norms", {{3, 4}}, [](const Tensors& a) {
    return a[0].norm(2, {1}).exp() * a[0].norm(3) + a[0].exp().renorm(2, 0, 1.0).sum(1);
  });
  add(t, "std_and_var", {{3, 4}}, [](const Tensors& a) {
    const auto [variance, mean] = at::var_mean(a[0].exp(), at::IntArrayRef{1});
    return a[0].std({1}, true).sin() * variance + mean * a[0].var();
  });
  add(t, "logsumexp_and_mean", {{3, 4}}, [](const Tensors& a) {
    return at::logsumexp(a[0].sin(), {1}) * a[0].exp().mean() + a[0].nansum(at::IntArrayRef{1});
  });
  add(t, "powers", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    return a[0].exp().pow(a[1]).sin() + a[0].pow(3) + at::atan2(a[0], a[1]) +
           at::hypot(a[0], a[1]) + at::logaddexp(a[0], a[1]) + a[0].abs().xlogy(a[1].exp());
  });
  add(t, "special", {{3, 4}}, [](const Tensors& a) {
    const Tensor x = a[0].exp() + 0.5;
    return at::lgamma(x) + at::digamma(x).sin() + at::erf(a[0]) + at::erfinv(a[0].tanh() * 0.9) +
           at::special_i0e(x) + at::sinc(a[0]) + at::logit(a[0].sigmoid());
  });
  add(t, "divisions", {{3, 4}, {3, 4}}, [](const Tensors& a) {
    const Tensor y = a[1].exp() + 1;
    return a[0] / y + at::fmod(a[0], y) + at::remainder(a[0], y) + at::addcdiv(a[0], a[0], y) +
           at::addcmul(y, a[0], y, 2) + at::lerp(a[0], y, 0.3) + at::floor(a[0]) * y;
  });
  add(t, "broadcast_and_trapezoid", {{3, 1}, {1, 4}}, [](const Tensors& a) {
    return at::trapezoid(a[0].exp() * a[1].sin()) +
           (a[0] - a[1]).expand({3, 4}).exp().diff().sum(1);
  });
  add(t, "nan_and_infinity", {{3, 4}}, [](const Tensors& a) {
    const Tensor y = (a[0] / (a[0] * 0)).exp() + a[0].log();
    return Tensors{y, y.nan_to_num(0.5).sin()};
  });
}

}  // namespace

void add_algebra(std::vector<Function>& table) {
  add_matrices(table);
  add_products(table);
  add_reductions(table);
}

}  // namespace table
