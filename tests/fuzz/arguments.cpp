// Interprets uses of arguments and captures besides computing.

#include <ATen/ATen.h>

#include "tests/fuzz/run.h"

namespace fuzz {

namespace {

/// Returns whether the tensor has a gradient edge of its own. A view of a leaf made under no-grad
/// only claims so.
bool has_gradient(const Tensor& t) {
  return t.requires_grad() && t.is_floating_point() && !(t.is_leaf() && t.is_view());
}

/// Returns `a` changed by a number, through a product or the choice of an operator.
Tensor marked(const Tensor& a, int64_t number, bool is_branch) {
  if (!is_branch) return a * (1 + 0.25 * static_cast<double>(number));
  return number % 2 == 0 ? a.sin() : a.sigmoid();
}

/// Makes a leaf require grad again, in whatever way the block ends.
struct Thaw {
  explicit Thaw(const Tensor& t) : leaf(t) {}
  ~Thaw() { leaf.set_requires_grad(true); }
  Thaw(const Thaw&) = delete;
  Thaw& operator=(const Thaw&) = delete;
  const Tensor leaf;
};

}  // namespace

Value Interpreter::writable(const Value& value, Dice& dice) {
  const Tensor& t = value.tensor;
  const Origin& origin = *value.origin;
  record_.changes.written = true;
  // A region need not save its captures, so a change of one may stay undetected (a documented
  // limit).
  const bool is_argument = origin.foreign && !origin.leaf && !origin.captured;
  if (!is_argument || contents_.captures || overlaps_itself(t) || !t.is_floating_point())
    return changeable(value, dice);
  return value;
}

void Interpreter::run_copy(const Statement& s, Environment& values) {
  const Tensor& t = see(values, s.args[0]).tensor;
  values[s.out] = {s.salt % 2 == 0 ? t.clone() : t.detach().clone(), std::make_shared<Origin>()};
}

void Interpreter::run_look(const Statement& s, Environment& values) {
  const Tensor& t = see(values, s.args[0]).tensor;
  const Tensor a = floating(see(values, s.args[1]).tensor);
  const bool is_branch = s.salt / 16 % 2 == 0, is_leaf = is_leaf_with_grad(t);
  const auto look = [&]() -> Tensor {
    switch (look_of(s)) {
      case Look::IsLeaf:
        return marked(a, t.is_leaf(), is_branch);
      case Look::RequiresGrad:
        return marked(a, t.requires_grad(), is_branch);
      case Look::RetainsGrad:
        return marked(a, t.retains_grad(), is_branch);
      case Look::OutputNr:
        return marked(a, t.output_nr(), is_branch);
      case Look::SameAsLeaf: {
        int64_t number = 0;  // a recompute cannot identify tensors with a history
        for (size_t i = 0; i < leaves_.size() && is_leaf; ++i)
          if (t.is_same(leaves_[i].tensor)) number = static_cast<int64_t>(i) + 1;
        return marked(a, number, is_branch);
      }
      default: {
        // A tensor with a history may retain a gradient, which differs after each step.
        const Tensor grad = is_leaf ? t.grad() : Tensor();
        if (!grad.defined() || is_branch) return marked(a, grad.defined(), is_branch);
        return a * like(grad, a);
      }
    }
  };
  values[s.out] = {look(), std::make_shared<Origin>()};
}

void Interpreter::run_register(const Statement& s, Environment& values) {
  const Tensor& t = see(values, s.args[0]).tensor;
  if (!has_gradient(t)) return;
  if (regions_around_ > 0) record_.changes.registered = true;
  const Hook hook = hook_of(s);
  t.register_hook(
      [calls = &hook_calls_, hook, zeros = at::zeros_like(t.detach())](const Tensor& g) {
        if (!g.defined()) return zeros;  // the hook of retain_grad() would crash
        if (hook == Hook::RetainGrad) return g;
        ++*calls;
        return hook == Hook::Double ? g * 2 : g + 1;
      });
  if (hook == Hook::RetainGrad) t.retain_grad();
}

void Interpreter::run_toggle(const Statement& s, Environment& values) {
  const Tensor t = see(values, s.args[0]).tensor;
  if (!t.is_leaf() || !has_gradient(t)) return run_block(s.block, values);
  if (regions_around_ > 0) record_.changes.registered = true;
  // An early stop ends the block like an exception, for which only some functions have a guard.
  // Functions without one call requires_grad_(): regions do not put set_requires_grad() back on
  // unsaved tensors (docs/limits.md).
  std::optional<Thaw> guard;
  if (s.salt % 2 == 0) {
    t.set_requires_grad(false);
    guard.emplace(t);
    return run_block(s.block, values);
  }
  t.requires_grad_(false);
  run_block(s.block, values);
  t.requires_grad_(true);
}

void Interpreter::replace(const Step& step) {
  const Value& leaf = leaves_[static_cast<size_t>(step.target) % leaves_.size()];
  const Origin& origin = *leaf.origin;
  const bool is_seen = origin.as_argument || origin.as_capture;
  if (is_seen && mode_ == Mode::Unchanged) return;
  Changes& changes = record_.changes;
  changes.replaced_argument |= origin.as_argument;
  changes.replaced_capture |= origin.as_capture;
  // A region that captures the tensor need not save it.
  if (origin.as_capture && !program_.all_values) changes.unchecked = true;
  const at::NoGradGuard no_grad;
  Tensor t = leaf.tensor;
  const Tensor other = t.detach() * 1.25 + 0.5;
  switch (means_of(step)) {
    case Step::Means::SetDataTransposed:
      return t.set_data(t.dim() < 2 ? other : other.transpose(0, 1).contiguous().transpose(0, 1));
    case Step::Means::Set:
      t.set_(other);
      return;
    case Step::Means::Resize:
      if (!t.requires_grad() && t.dim() > 0) {  // LibTorch refuses the others
        std::vector<int64_t> sizes = t.sizes().vec();
        sizes[0] += 2;
        const int64_t filled = t.numel();
        t.resize_(sizes);
        // New memory has arbitrary contents, which must not be compared. The write bypasses the
        // version, since it changes no earlier element.
        t.data().view(-1).narrow(0, filled, t.numel() - filled).fill_(2);
        return;
      }
      [[fallthrough]];
    default:
      return t.set_data(other);
  }
}

}  // namespace fuzz
