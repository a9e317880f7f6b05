// The operators that look at more than one element: views, products, reductions, indices, pools.

#include <ATen/ATen.h>

#include "tests/fuzz/operators.h"

namespace fuzz {

namespace {

using One = Tensor (*)(const Tensor&, Dice&);
using Two = Tensor (*)(const Tensor&, const Tensor&, Dice&);

auto one(One f) {
  return [f](const Tensors& a, Dice& dice, const Surroundings&) -> Tensors {
    return {f(floating(a[0]), dice)};
  };
}

auto two(Two f) {
  return [f](const Tensors& a, Dice& dice, const Surroundings&) -> Tensors {
    const Tensor x = floating(a[0]);
    return {f(x, floating(a[1]).to(x.scalar_type()), dice)};
  };
}

int64_t dimension(const Tensor& a, Dice& dice) { return a.dim() == 0 ? 0 : dice.below(a.dim()); }

void add_views(std::vector<Operator>& t) {
  t.push_back({"view", 1, 1, one([](const Tensor& a, Dice& dice) {
                 return dice.percent(50) ? a.reshape(-1) : a.flatten();
               })});
  t.push_back({"transpose", 1, 1, one([](const Tensor& a, Dice& dice) {
                 return a.transpose(0, dimension(a, dice));
               })});
  t.push_back({"select", 1, 1, one([](const Tensor& a, Dice& dice) {
                 if (a.dim() == 0) return a.view_as(a);
                 const int64_t dim = dimension(a, dice);
                 return a.select(dim, dice.below(a.size(dim)));
               })});
  t.push_back({"slice", 1, 1, one([](const Tensor& a, Dice& dice) {
                 if (a.dim() == 0) return a.alias();
                 const int64_t dim = dimension(a, dice);
                 return a.slice(dim, dice.below(a.size(dim)), {}, 1 + dice.below(2));
               })});
  t.push_back({"expand", 1, 1, one([](const Tensor& a, Dice& dice) {
                 if (a.numel() > 64) return a.unsqueeze(0);
                 std::vector<int64_t> sizes = a.sizes().vec();
                 sizes.insert(sizes.begin(), 1 + dice.below(3));
                 return a.expand(sizes);
               })});
  t.push_back({"unsqueeze", 1, 1, one([](const Tensor& a, Dice& dice) {
                 return a.dim() > 3 ? a.squeeze() : a.unsqueeze(dice.below(a.dim() + 1));
               })});
  t.push_back({"diagonal", 1, 1, one([](const Tensor& a, Dice&) { return matrix(a).diagonal(); })});
  t.push_back({"split", 1, 3, [](const Tensors& a, Dice& dice, const Surroundings&) {
                 const Tensor x = a[0].dim() == 0 ? a[0].unsqueeze(0) : a[0];
                 const int64_t dim = dimension(x, dice), size = x.size(dim);
                 return at::split(x, (size + 1) / 2, dim);
               }});
  t.push_back({"unbind", 1, 3, [](const Tensors& a, Dice& dice, const Surroundings&) {
                 return a[0].dim() == 0 ? a : at::unbind(a[0], dimension(a[0], dice));
               }});
  t.push_back({"cat", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = matrix(a), y = matrix(b);
                 return at::cat({x, sized(y, y.size(0), x.size(1))}, 0);
               })});
  t.push_back({"stack", 2, 1, two([](const Tensor& a, const Tensor& b, Dice& dice) {
                 return at::stack({a, a * like(b, a).mean()}, dice.below(a.dim() + 1));
               })});
}

void add_products(std::vector<Operator>& t) {
  t.push_back({"matmul", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = matrix(a), y = matrix(b);
                 return x.matmul(sized(y, x.size(1), y.size(1)));
               })});
  t.push_back({"matmul_with_itself", 1, 1, one([](const Tensor& a, Dice&) {
                 const Tensor x = matrix(a);
                 return x.mm(x.t());
               })});
  t.push_back({"bmm", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = cube(a), y = matrix(b);
                 return x.bmm(
                     sized(y, x.size(2), y.size(1)).unsqueeze(0).expand({x.size(0), -1, -1}));
               })});
  t.push_back({"linear", 3, 1, [](const Tensors& a, Dice& dice, const Surroundings&) {
                 const Tensor x = matrix(floating(a[0]));
                 const Tensor w = matrix(floating(a[1]).to(x.scalar_type()));
                 const Tensor bias = line(floating(a[2]).to(x.scalar_type()));
                 const Tensor weight = sized(w, w.size(0), x.size(1));
                 const bool fits = bias.size(0) >= w.size(0) && dice.percent(70);
                 return Tensors{
                     at::linear(x, weight, fits ? bias.narrow(0, 0, w.size(0)) : Tensor())};
               }});
  t.back().weight = 4;
  t.push_back({"addmm", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = matrix(a), y = matrix(b);
                 return at::addmm(x.mean(), x, sized(y, x.size(1), 3), 0.5, 2);
               })});
  t.push_back({"conv1d", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = cube(a), w = matrix(b);
                 return at::conv1d(x, sized(w, 2, x.size(1)).unsqueeze(-1).expand({-1, -1, 2}), {},
                                   1, 1);
               })});
  t.push_back({"attention", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor q = matrix(a).unsqueeze(0).unsqueeze(0);
                 const Tensor k = sized(matrix(b), 3, q.size(3)).unsqueeze(0).unsqueeze(0);
                 return at::scaled_dot_product_attention(q, k, k * 2);
               })});
}

void add_reductions(std::vector<Operator>& t) {
  t.push_back({"sum", 1, 1, one([](const Tensor& a, Dice& dice) {
                 return dice.percent(30) ? a.sum() : a.sum(dimension(a, dice), dice.percent(50));
               })});
  t.push_back({"mean", 1, 1,
               one([](const Tensor& a, Dice& dice) { return a.mean(dimension(a, dice), true); })});
  t.push_back({"var", 1, 1, one([](const Tensor& a, Dice&) { return line(a).var(0, false); })});
  t.push_back({"norm", 1, 1, one([](const Tensor& a, Dice&) { return a.norm(); })});
  t.push_back(
      {"prod", 1, 1, one([](const Tensor& a, Dice& dice) { return a.prod(dimension(a, dice)); })});
  t.push_back({"logsumexp", 1, 1,
               one([](const Tensor& a, Dice& dice) { return a.logsumexp(dimension(a, dice)); })});
  t.push_back({"cumsum", 1, 1,
               one([](const Tensor& a, Dice& dice) { return a.cumsum(dimension(a, dice)); })});
  t.push_back({"cumprod", 1, 1,
               one([](const Tensor& a, Dice& dice) { return a.cumprod(dimension(a, dice)); })});
  t.push_back({"softmax", 1, 1,
               one([](const Tensor& a, Dice& dice) { return a.softmax(dimension(a, dice)); })});
  t.push_back({"log_softmax", 1, 1,
               one([](const Tensor& a, Dice& dice) { return a.log_softmax(dimension(a, dice)); })});
  t.push_back({"layer_norm", 2, 1, two([](const Tensor& a, const Tensor& b, Dice& dice) {
                 const Tensor x = a.dim() == 0 ? a.unsqueeze(0) : a;
                 const int64_t n = x.size(-1);
                 const bool affine = b.numel() >= n && dice.percent(60);
                 const Tensor w = affine ? line(b).narrow(0, 0, n) : Tensor();
                 return at::layer_norm(x, {n}, w, w);
               })});
  t.push_back({"batch_norm", 1, 1, one([](const Tensor& a, Dice&) {
                 const Tensor x = matrix(a);
                 return at::batch_norm(at::cat({x, x * 2}), {}, {}, {}, {}, true, 0.1, 1e-5, false);
               })});
  t.push_back({"max", 1, 2, [](const Tensors& a, Dice& dice, const Surroundings&) {
                 const Tensor x = floating(a[0]);
                 auto [values, indices] = x.max(dimension(x, dice));
                 return Tensors{values, indices};
               }});
  t.push_back({"sort", 1, 2, [](const Tensors& a, Dice& dice, const Surroundings&) {
                 const Tensor x = floating(a[0]);
                 auto [values, indices] = x.sort(dimension(x, dice), dice.percent(50));
                 return Tensors{values, indices};
               }});
  t.push_back({"topk", 1, 2, [](const Tensors& a, Dice& dice, const Surroundings&) {
                 const Tensor x = line(floating(a[0]));
                 auto [values, indices] = x.topk(1 + dice.below(x.size(0)));
                 return Tensors{values, indices};
               }});
  t.push_back({"max_pool1d", 1, 1, one([](const Tensor& a, Dice&) {
                 const Tensor x = cube(a);
                 // The result may or may not be a view, by the way that LibTorch takes (under a
                 // dispatch mode).
                 return at::max_pool1d(x, {x.size(2) > 1 ? 2 : 1}, {1}).clone();
               })});
  t.push_back({"avg_pool1d", 1, 1, one([](const Tensor& a, Dice&) {
                 const Tensor x = cube(a);
                 return at::avg_pool1d(x, {x.size(2) > 1 ? 2 : 1}, {1});
               })});
}

void add_indices(std::vector<Operator>& t) {
  t.push_back({"gather", 2, 1, two([](const Tensor& a, const Tensor& b, Dice& dice) {
                 const Tensor x = a.dim() == 0 ? a.unsqueeze(0) : a;
                 const int64_t dim = dimension(x, dice);
                 return x.gather(dim, whole_numbers(x + like(b, x).mean(), x.size(dim)));
               })});
  t.push_back({"index_select", 2, 1, two([](const Tensor& a, const Tensor& b, Dice& dice) {
                 const Tensor x = a.dim() == 0 ? a.unsqueeze(0) : a;
                 const int64_t dim = dimension(x, dice);
                 const Tensor n = whole_numbers(line(b), x.size(dim));
                 return x.index_select(dim, n.narrow(0, 0, std::min<int64_t>(3, n.size(0))));
               })});
  t.push_back({"index", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = matrix(a);
                 return at::index(x, {whole_numbers(line(b).slice(0, 0, 4), x.size(0))});
               })});
  t.push_back({"scatter_add", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = line(a), y = line(b);
                 return x.scatter_add(0, whole_numbers(y, x.size(0)), y);
               })});
  t.push_back({"embedding", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor w = matrix(a);
                 return at::embedding(w, whole_numbers(line(b).slice(0, 0, 5), w.size(0)));
               })});
  t.push_back({"masked_select", 2, 1, two([](const Tensor& a, const Tensor& b, Dice&) {
                 const Tensor x = line(a);  // never empty: the first element is always taken
                 Tensor mask = at::ones({x.size(0)}, x.options().dtype(at::kBool));
                 const Tensor y = line(b).detach().slice(0, 0, x.size(0)) > 0;
                 mask.narrow(0, 0, y.size(0)).copy_(y);
                 mask.select(0, 0).fill_(true);
                 return x.masked_select(mask);
               })});
}

}  // namespace

void add_shapes(std::vector<Operator>& table) {
  add_views(table);
  add_products(table);
  add_reductions(table);
  add_indices(table);
}

at::Device& device() {
  static at::Device where(at::kCPU);
  return where;
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> table = [] {
    std::vector<Operator> all;
    add_pointwise(all);
    add_shapes(all);
    add_functions(all);
    add_guarded(all);
    return all;
  }();
  return table;
}

}  // namespace fuzz
