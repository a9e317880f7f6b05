// Makes uses of arguments and captures besides computing.

#include <utility>

#include "tests/fuzz/generator.h"

namespace fuzz {

void Generator::draw_features_of_arguments() {
  features_.writes = dice_.percent(40);
  features_.looks = dice_.percent(40);
  features_.registers = dice_.percent(40);
  features_.replaces = dice_.percent(40);
  if (topics_.waits) {
    features_.writes = dice_.percent(80);
    features_.inner_grad = true;
    features_.looks = features_.registers = features_.replaces = false;
  }
  features_.hooks = features_.hooks || (features_.writes && dice_.percent(60));
  features_.offloads = features_.hooks && dice_.percent(50);
  // LibTorch may crash if a tensor that retains its gradient is changed in place.
  features_.retains = !features_.writes && !features_.inplace;
  // No capture of a region may be written to: see Interpreter::writable.
  if (features_.writes) features_.captures = false;
}

int Generator::pick_argument(const std::vector<int>& visible) {
  if (favourite_ >= 0 && given_.empty() && dice_.percent(40)) return favourite_;
  if ((features_.looks || features_.registers) && dice_.percent(30)) return pick_leaf();
  const int id = pick(visible);
  const bool is_leaf = id < static_cast<int>(program_.leaves.size());
  return is_leaf && features_.writes && dice_.percent(50) ? visible.back() : id;
}

void Generator::add_regions_about_arguments(std::vector<int>& visible) {
  const auto add = [&visible](Block& block, Statement s) {
    add_outs(s, visible);
    block.push_back(std::move(s));
  };
  if (features_.writes && features_.hooks) {
    program_.block.push_back(make_hooks([&] {
      Block block;
      add(block, make_copy(visible));
      add(block, make_region(visible, 0, false));
      return block;
    }));
  }
  if (features_.replaces) add(program_.block, make_region(visible, 0, false));
  if (!features_.looks) return;
  static const std::vector<int> with_outputs =
      weighted([](const Operator& op) { return op.outs > 1 && !op.inplace && !op.random; });
  add(program_.block, applied(pick_one(with_outputs), visible));
  favourite_ = program_.block.back().out + 1;
  if (features_.retains && dice_.percent(50))
    program_.block.push_back(make_register(favourite_, Hook::RetainGrad));
  add(program_.block, make_region(visible, 0, false));
}

Statement Generator::make_hooks(const std::function<Block()>& make) {
  Statement s;
  s.kind =
      features_.offloads && dice_.percent(topics_.moves ? 70 : 30) ? Kind::Offload : Kind::Hooks;
  s.salt = dice_.bits();
  if (features_.writes && dice_.percent(50)) s.salt = s.salt / 4 * 4 + 1;  // which copy
  ++nested_wraps_;
  ++nested_hooks_;
  s.block = make();
  --nested_hooks_;
  --nested_wraps_;
  return s;
}

int Generator::pick_given(const std::vector<int>& visible) {
  return dice_.percent(80) ? pick(given_) : pick(visible);
}

std::optional<Statement> Generator::make_about_arguments(const std::vector<int>& visible) {
  const bool is_inside = !given_.empty();
  if (topics_.waits && is_inside) {
    if (std::exchange(has_waited_, false) && features_.writes && dice_.percent(60))
      return make_write(visible);
    has_waited_ = dice_.percent(25);
    if (has_waited_) return make_wait(visible);
  }
  if (features_.writes && dice_.percent(12)) return make_copy(visible);
  // Without a copy of a region's arguments, its recompute can only raise.
  if (features_.writes && is_inside && dice_.percent(nested_hooks_ > 0 ? 35 : 4))
    return make_write(visible);
  if (features_.looks && is_inside && dice_.percent(20)) return make_look(visible);
  if (features_.registers && dice_.percent(is_inside ? 12 : 5)) {
    const int id = !is_inside          ? pick(visible)
                   : dice_.percent(50) ? pick_leaf()
                                       : pick_given(visible);
    // A recompute that skips save_region does not repeat that a tensor retains its gradient.
    const int64_t first = features_.retains && nested_stretches_ == 0 ? 0 : 1,
                  last = static_cast<int64_t>(Hook::Count);
    return make_register(id, static_cast<Hook>(first + dice_.below(last - first)));
  }
  // Hooks return another object for a leaf, which no Toggle of the leaf reaches.
  if (features_.registers && !features_.hooks && is_inside && dice_.percent(10))
    return make_toggle(visible);
  return std::nullopt;
}

Statement Generator::make_copy(const std::vector<int>& visible) {
  Statement s;
  s.kind = Kind::Copy;
  s.args = {pick(visible)};
  take_outs(s, 1);
  return s;
}

Statement Generator::make_write(const std::vector<int>& visible) {
  static const std::vector<int> all =
      weighted([](const Operator& op) { return op.inplace && !op.random && !op.asks_if_view; });
  Statement s = applied(pick_one(all), visible);
  s.kind = Kind::Write;
  s.args[0] = pick_given(visible);
  return s;
}

Statement Generator::make_wait(const std::vector<int>& visible) {
  Statement s;
  s.kind = dice_.percent(50) ? Kind::Read : Kind::InnerGrad;
  s.args = {pick(visible)};
  if (s.kind == Kind::InnerGrad) s.args = {visible.back(), pick(visible)};
  take_outs(s, s.kind == Kind::Read ? 2 : 1);
  return s;
}

Statement Generator::make_look(const std::vector<int>& visible) {
  Statement s;
  s.kind = Kind::Look;
  s.args = {pick_given(visible), pick(visible)};
  take_outs(s, 1);
  // A value from hooks, or one that a recompute does not compute, is another object.
  while (look_of(s) == Look::SameAsLeaf && (features_.hooks || features_.stretches))
    s.salt = dice_.bits();
  return s;
}

Statement Generator::make_register(int id, Hook hook) {
  Statement s;
  s.kind = Kind::Register;
  s.args = {id};
  do {
    s.salt = dice_.bits();
  } while (hook_of(s) != hook);
  return s;
}

Statement Generator::make_toggle(const std::vector<int>& visible) {
  Statement s;
  s.kind = Kind::Toggle;
  s.args = {pick_leaf()};
  s.salt = dice_.bits();
  s.block = {make_operator(visible)};
  s.block[0].args.back() = s.args[0];
  return s;
}

}  // namespace fuzz
