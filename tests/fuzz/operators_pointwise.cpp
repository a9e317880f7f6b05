// The operators that work element by element: pure, in place, and with random numbers.

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>

#include "tests/fuzz/operators.h"

namespace fuzz {

namespace {

using Unary = Tensor (*)(const Tensor&);
using Binary = Tensor (*)(const Tensor&, const Tensor&);

auto unary(Unary f) {
  return
      [f](const Tensors& a, Dice&, const Surroundings&) -> Tensors { return {f(floating(a[0]))}; };
}

auto binary(Binary f) {
  return [f](const Tensors& a, Dice&, const Surroundings&) -> Tensors {
    const Tensor x = floating(a[0]);
    return {f(x, like(floating(a[1]), x))};
  };
}

/// Returns `b` in a form that expands to the shape of `a`.
Tensor into(const Tensor& b, const Tensor& a) {
  const Tensor x = like(b, a);
  if (x.dim() <= a.dim() && at::infer_size(a.sizes(), x.sizes()) == a.sizes()) return x;
  return x.mean();
}

/// Returns a part of `a`, to be changed in place.
Tensor part(const Tensor& a, Dice& dice) {
  if (a.dim() == 0 || a.numel() == 0) return a;
  const int64_t dim = dice.below(a.dim()), size = a.size(dim);
  switch (dice.below(6)) {
    case 0:
      return a.select(dim, dice.below(size));
    case 1:
      return a.narrow(dim, 0, 1 + dice.below(size));
    case 2:
      return a.transpose(0, dim);
    case 3:
      return a.slice(dim, dice.below(size), size, 2);
    case 4:
      return a.view_as(a);
    default:
      return a;
  }
}

using Inplace = void (*)(Tensor&, const Tensor&, Dice&);

auto inplace(Inplace f) {
  return [f](const Tensors& a, Dice& dice, const Surroundings&) -> Tensors {
    Tensor whole = floating(a[0]);
    Tensor x = part(whole, dice);
    f(x, a.size() > 1 ? into(floating(a[1]), x) : Tensor(), dice);
    return {whole, x};
  };
}

void add_unary(std::vector<Operator>& t) {
  t.push_back({"sin", 1, 1, unary([](const Tensor& a) { return a.sin(); })});
  t.push_back({"cos", 1, 1, unary([](const Tensor& a) { return a.cos(); })});
  t.push_back({"exp", 1, 1, unary([](const Tensor& a) { return a.clamp(-5, 5).exp(); })});
  t.push_back({"tanh", 1, 1, unary([](const Tensor& a) { return a.tanh(); })});
  t.push_back({"sigmoid", 1, 1, unary([](const Tensor& a) { return a.sigmoid(); })});
  t.push_back({"relu", 1, 1, unary([](const Tensor& a) { return a.relu(); })});
  t.push_back({"gelu", 1, 1, unary([](const Tensor& a) { return at::gelu(a); })});
  t.push_back({"silu", 1, 1, unary([](const Tensor& a) { return at::silu(a); })});
  t.push_back({"log", 1, 1, unary([](const Tensor& a) { return a.abs().add(0.1).log(); })});
  t.push_back({"sqrt", 1, 1, unary([](const Tensor& a) { return a.sqrt(); })});
  t.push_back({"pow", 1, 1, unary([](const Tensor& a) { return a.pow(2.5); })});
  t.push_back({"square", 1, 1, unary([](const Tensor& a) { return a * a; })});
  t.push_back({"neg", 1, 1, unary([](const Tensor& a) { return a.neg(); })});
  t.push_back({"reciprocal", 1, 1, unary([](const Tensor& a) { return a.reciprocal(); })});
  t.push_back({"clamp", 1, 1, unary([](const Tensor& a) { return a.clamp(-0.5, 0.7); })});
  t.push_back({"softplus", 1, 1, unary([](const Tensor& a) { return at::softplus(a); })});
  t.push_back({"leaky_relu", 1, 1, unary([](const Tensor& a) { return at::leaky_relu(a); })});
  t.push_back({"clone", 1, 1, unary([](const Tensor& a) { return a.clone(); })});
  t.push_back({"detach", 1, 1, unary([](const Tensor& a) { return a.detach(); })});
  t.push_back({"local_leaf", 1, 1,
               unary([](const Tensor& a) { return a.detach().clone().requires_grad_(); })});
  t.push_back({"to_double", 1, 1, unary([](const Tensor& a) { return a.to(at::kDouble); })});
  t.push_back({"to_float", 1, 1, unary([](const Tensor& a) { return a.to(at::kFloat); })});
  t.push_back({"complex", 1, 1, unary([](const Tensor& a) {
                 const Tensor x = a.scalar_type() == at::kDouble ? a : a.to(at::kFloat);
                 const Tensor z = at::complex(x, x.sin());
                 return at::real(z.conj() * z.conj().exp());
               })});
}

void add_binary(std::vector<Operator>& t) {
  t.push_back({"add", 2, 1, binary([](const Tensor& a, const Tensor& b) { return a + b; })});
  t.push_back({"sub", 2, 1, binary([](const Tensor& a, const Tensor& b) { return a - b; })});
  t.push_back({"mul", 2, 1, binary([](const Tensor& a, const Tensor& b) { return a * b; })});
  t.back().weight = 5;
  t.push_back({"div", 2, 1, binary([](const Tensor& a, const Tensor& b) { return a / (b + 2); })});
  t.push_back({"maximum", 2, 1,
               binary([](const Tensor& a, const Tensor& b) { return at::maximum(a, b); })});
  t.push_back({"atan2", 2, 1, binary([](const Tensor& a, const Tensor& b) { return a.atan2(b); })});
  t.push_back({"lerp", 2, 1, binary([](const Tensor& a, const Tensor& b) {
                 return a.lerp(b.expand_as(a + b), 0.3).addcmul(a, b);
               })});
  t.push_back({"where", 2, 1, binary([](const Tensor& a, const Tensor& b) {
                 return at::where(a.detach() > b.detach(), a, b);
               })});
  t.push_back({"greater", 2, 1, binary([](const Tensor& a, const Tensor& b) { return a > b; })});
  t.push_back({"mse_loss", 2, 1, binary([](const Tensor& a, const Tensor& b) {
                 return at::mse_loss(a, b.expand_as(a + b).mean().expand_as(a));
               })});
  t.push_back({"masked_fill", 2, 1, binary([](const Tensor& a, const Tensor& b) {
                 return a.masked_fill(into(b, a).detach() > 0.2, -1.5);
               })});
  t.push_back({"prelu", 2, 1, binary([](const Tensor& a, const Tensor& b) {
                 return a.dim() < 1 ? a : at::prelu(a, b.mean().to(a.scalar_type()).reshape({1}));
               })});
}

void add_inplace(std::vector<Operator>& t) {
  const size_t first = t.size();
  t.push_back({"mul_", 2, 2, inplace([](Tensor& x, const Tensor& b, Dice&) { x.mul_(b); })});
  t.push_back({"add_", 2, 2, inplace([](Tensor& x, const Tensor& b, Dice&) { x.add_(b); })});
  t.push_back({"copy_", 2, 2, inplace([](Tensor& x, const Tensor& b, Dice&) { x.copy_(b); })});
  t.push_back({"sin_", 1, 2, inplace([](Tensor& x, const Tensor&, Dice&) { x.sin_(); })});
  t.push_back(
      {"exp_", 1, 2, inplace([](Tensor& x, const Tensor&, Dice&) { x.clamp_(-4, 4).exp_(); })});
  t.push_back({"relu_", 1, 2, inplace([](Tensor& x, const Tensor&, Dice&) { x.relu_(); })});
  t.push_back({"scale_", 1, 2, inplace([](Tensor& x, const Tensor&, Dice&) { x.mul_(0.5); })});
  t.push_back({"zero_", 1, 2, inplace([](Tensor& x, const Tensor&, Dice&) { x.zero_(); })});
  t.push_back({"masked_fill_", 2, 2, inplace([](Tensor& x, const Tensor& b, Dice&) {
                 x.masked_fill_(b.detach() > 0, 0.25);
               })});
  t.push_back({"no_grad_add_", 1, 2, inplace([](Tensor& x, const Tensor&, Dice&) {
                 at::NoGradGuard no_grad;
                 x.add_(0.125);
               })});
  t.push_back({"dropout_", 1, 2,
               inplace([](Tensor& x, const Tensor&, Dice&) { at::dropout_(x, 0.3, true); })});
  t.back().random = true;
  t.push_back({"rrelu_", 1, 2,
               inplace([](Tensor& x, const Tensor&, Dice&) { at::rrelu_(x, 0.1, 0.3, true); })});
  t.back().random = t.back().writes_late = true;
  t.push_back({"normal_", 1, 2, inplace([](Tensor& x, const Tensor&, Dice&) { x.normal_(); })});
  t.back().random = true;
  for (size_t i = first; i < t.size(); ++i) {
    t[i].inplace = true;
    t[i].weight = 1;
  }
}

void add_random(std::vector<Operator>& t) {
  const size_t first = t.size();
  t.push_back({"dropout", 1, 1, unary([](const Tensor& a) { return at::dropout(a, 0.4, true); })});
  t.back().writes_inside = true;
  t.push_back({"native_dropout", 1, 2, [](const Tensors& a, Dice&, const Surroundings&) {
                 auto [y, mask] = at::native_dropout(floating(a[0]), 0.4, true);
                 return Tensors{y, mask};
               }});
  t.push_back({"rrelu", 1, 1, unary([](const Tensor& a) { return at::rrelu(a, 0.1, 0.4, true); })});
  t.back().writes_late = true;
  t.push_back({"alpha_dropout", 1, 1,
               unary([](const Tensor& a) { return at::alpha_dropout(a, 0.4, true); })});
  t.back().writes_inside = true;
  t.push_back({"noise", 1, 1, unary([](const Tensor& a) { return a * at::randn_like(a); })});
  t.push_back({"bernoulli", 1, 1, unary([](const Tensor& a) {
                 return a * at::bernoulli(a.detach().nan_to_num(0, 0, 0).sigmoid());
               })});
  t.push_back({"shuffle", 1, 1, [](const Tensors& a, Dice&, const Surroundings&) {
                 const Tensor x = line(floating(a[0]));
                 return Tensors{
                     x.index_select(0, at::randperm(x.size(0), x.options().dtype(at::kLong)))};
               }});
  for (size_t i = first; i < t.size(); ++i) {
    t[i].random = true;
    t[i].weight = 1;
  }
}

}  // namespace

Tensor floating(const Tensor& a) { return a.is_floating_point() ? a : a.to(at::kFloat); }

Tensor like(const Tensor& b, const Tensor& a) {
  Tensor x = b.scalar_type() == a.scalar_type() ? b : b.to(a.scalar_type());
  if (at::are_expandable(x.sizes(), a.sizes())) return x;
  if (x.numel() >= a.numel()) return x.reshape(-1).narrow(0, 0, a.numel()).reshape(a.sizes());
  return x.mean();
}

Tensor matrix(const Tensor& a) {
  if (a.dim() == 0) return a.view({1, 1});
  if (a.dim() == 1) return a.unsqueeze(0);
  return a.dim() == 2 ? a : a.flatten(0, -2);
}

Tensor cube(const Tensor& a) {
  if (a.dim() < 3) return matrix(a).unsqueeze(1);
  return a.dim() == 3 ? a : a.flatten(0, -3);
}

Tensor line(const Tensor& a) { return a.dim() == 1 ? a : a.reshape(-1); }

Tensor whole_numbers(const Tensor& a, int64_t n) {
  const Tensor x = a.detach().to(at::kDouble).nan_to_num(0, 0, 0).mul(7.3).abs().floor();
  return x.remainder(static_cast<double>(n)).to(at::kLong).clamp(0, n - 1);
}

Tensor sized(const Tensor& m, int64_t rows, int64_t columns) {
  Tensor x = m;
  while (x.size(0) < rows) x = at::cat({x, x}, 0);
  while (x.size(1) < columns) x = at::cat({x, x}, 1);
  return x.narrow(0, 0, rows).narrow(1, 0, columns);
}

void add_pointwise(std::vector<Operator>& table) {
  add_unary(table);
  add_binary(table);
  add_inplace(table);
  add_random(table);
}

}  // namespace fuzz
