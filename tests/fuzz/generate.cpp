// Makes a random program from a seed.

#include <algorithm>

#include "tests/fuzz/generator.h"

namespace fuzz {

std::vector<int> weighted(bool (*is_wanted)(const Operator&)) {
  const std::vector<Operator>& table = operators();
  std::vector<int> all;
  for (int i = 0; i < static_cast<int>(table.size()); ++i)
    if (is_wanted(table[i])) all.insert(all.end(), table[i].weight, i);
  return all;
}

Program Generator::generate() {
  draw_features();
  program_.large = dice_.percent(topics_.modules ? 25 : 5);
  program_.all_values = dice_.percent(features_.replaces ? 50 : 30);
  program_.drop_values = dice_.percent(40);
  const int64_t die = dice_.below(100);
  program_.sharing = die < 6    ? Sharing::Group
                     : die < 18 ? Sharing::Cache
                     : die < 24 ? Sharing::SmallCache
                                : Sharing::None;
  std::vector<int> visible = make_leaves();
  if (topics_.modules) make_modules();
  program_.block = make_block(visible, 3 + dice_.below(topics_.arguments ? 3 : 8), 0, false);
  while (contents(program_.block).regions == 0) {
    program_.block.push_back(make_region(visible, 0, false));
    add_outs(program_.block.back(), visible);
  }
  add_regions_about_arguments(visible);
  top_level_ = visible;
  const int64_t steps = (topics_.arguments ? 2 : 1) + dice_.below(4);
  for (int64_t i = 0; i < steps; ++i) program_.steps.push_back(make_step(i + 1 == steps));
  return std::move(program_);
}

void Generator::draw_features() {
  const bool plain = dice_.percent(15);  // operators and regions only
  auto draw = [&](int64_t p) { return dice_.percent(p) && !plain; };
  features_ = {.inplace = draw(50),
               .random = draw(50),
               .hooks = draw(30),
               .catches = draw(20),
               .inner_grad = draw(25),
               .fuses = draw(25),
               .autocast = draw(20),
               .captures = draw(40),
               .reads_twice = draw(40),
               .strict = false,
               .changes = draw(25),
               .guards = draw(30),
               .scopes = draw(40),
               .policies = draw(60),
               .stretches = draw(40)};
  // CopySlices, the node of a change of a view, reads twice in a double backward.
  features_.policies = features_.policies && topics_.selective;
  features_.stretches = features_.stretches && topics_.selective;
  if (topics_.arguments) draw_features_of_arguments();
  if (topics_.moves) features_.hooks = features_.offloads = true;
  const bool may_read_twice =
      features_.reads_twice || features_.inplace || features_.writes || topics_.waits;
  features_.strict = !may_read_twice && !plain && dice_.percent(20);
}

std::vector<int> Generator::make_leaves() {
  std::vector<int> visible;
  const bool is_double = dice_.percent(40), mixed = dice_.percent(10);
  auto add = [&](LeafKind kind) {
    Leaf leaf{.kind = kind, .sizes = {}, .is_double = mixed ? dice_.percent(50) : is_double};
    const int64_t rank = dice_.percent(60) ? 2 : dice_.below(4);
    for (int64_t i = 0; i < rank; ++i) leaf.sizes.push_back(1 + dice_.below(4));
    if (program_.large && dice_.percent(60)) leaf.sizes = {60 + dice_.below(20), 70};
    leaf.has_grad = features_.looks && kind != LeafKind::Buffer && dice_.percent(50);
    program_.leaves.push_back(leaf);
    visible.push_back(next_++);
  };
  for (int64_t i = 0, n = 1 + dice_.below(3); i < n; ++i) add(LeafKind::Input);
  for (int64_t i = 0, n = 1 + dice_.below(3); i < n; ++i) add(LeafKind::Parameter);
  for (int64_t i = 0, n = dice_.below(3); i < n; ++i) add(LeafKind::Buffer);
  if (!features_.replaces) return visible;
  add(LeafKind::Buffer);
  favourite_ = spared_ = dice_.percent(75) ? visible.back() : pick_leaf();
  return visible;
}

int Generator::pick(const std::vector<int>& visible) {
  const auto size = static_cast<int64_t>(visible.size());
  if (dice_.percent(60)) return visible[size - 1 - dice_.below(std::min<int64_t>(4, size))];
  return visible[dice_.below(size)];
}

Statement Generator::make_operator(const std::vector<int>& visible) {
  const std::vector<Operator>& table = operators();
  // Operators that save_region does not run again do not advance a provider's numbers either.
  static const std::vector<int> all = weighted([](const Operator& op) { return !op.guarded; }),
                                all_random = weighted(
                                    [](const Operator& op) { return op.random && !op.guarded; }),
                                all_guarded =
                                    weighted([](const Operator& op) { return op.guarded; }),
                                all_generators = weighted(
                                    [](const Operator& op) { return op.random && op.guarded; });
  const bool uses_guards = state_guards_ > 0 && dice_.percent(30);
  const std::vector<int>& chosen = uses_guards && nested_stretches_ > 0    ? all_generators
                                   : uses_guards                           ? all_guarded
                                   : features_.random && dice_.percent(15) ? all_random
                                                                           : all;
  int op = 0;
  do {
    op = pick_one(chosen);
  } while ((table[op].inplace && !features_.inplace) ||
           (table[op].random && !features_.random && !uses_guards) ||
           // Hooks that copy would copy unwritten memory; those of Mode::UndoneInside, too.
           (table[op].writes_late && (features_.hooks || features_.replaces)) ||
           (table[op].reads_twice && !features_.reads_twice));
  return applied(op, visible);
}

Statement Generator::applied(int op, const std::vector<int>& visible) {
  Statement s;
  s.op = op;
  for (int i = 0; i < operators()[op].arity; ++i) s.args.push_back(pick(visible));
  take_outs(s, operators()[op].outs);
  return s;
}

void Generator::take_outs(Statement& s, int outs) {
  s.salt = dice_.bits();
  s.out = next_;
  s.outs = outs;
  next_ += outs;
}

Block Generator::make_block(std::vector<int>& visible, int64_t count, int depth, bool in_catch) {
  Block block;
  for (int64_t i = 0; i < count; ++i) {
    block.push_back(make_statement(visible, depth, in_catch));
    add_outs(block.back(), visible);
  }
  return block;
}

Statement Generator::make_statement(std::vector<int>& visible, int depth, bool in_catch) {
  const int64_t die = dice_.below(100);
  // Uses of arguments are more visible with little other computation.
  const int deepest = topics_.arguments ? 2 : 4;
  if (die < (depth == 0 ? 30 : 20) && depth < deepest) return make_region(visible, depth, in_catch);
  if (die >= 35 && die < 45 && nested_wraps_ < 3) return make_wrap(visible, depth, in_catch);
  if (features_.guards && nested_wraps_ < 3 && dice_.percent(depth == 0 ? 20 : 8))
    return make_state_guard(visible, depth, in_catch);
  if (features_.stretches && dice_.percent(12)) return make_stretch(visible, depth, in_catch);
  // save_region does not repeat its writes to buffers (a documented limit).
  if (topics_.modules && nested_stretches_ == 0 && dice_.percent(35)) return make_call(visible);
  if (auto s = make_about_arguments(visible)) return *s;
  Statement s;
  if ((features_.policies && dice_.percent(10)) || (features_.stretches && dice_.percent(4))) {
    s.kind = Kind::Name;
    s.args = {pick(visible)};
    take_outs(s, 1);
    return s;
  }
  if (die >= 45 && die < 52 && features_.inner_grad) {
    s.kind = Kind::InnerGrad;
    s.args = {visible.back(), pick(visible)};
    take_outs(s, 1);
    return s;
  }
  if (die >= 52 && die < 60 && features_.fuses) {
    s.kind = Kind::Fuse;
    return s;
  }
  if (die >= 60 && die < 66 && in_catch) {
    s.kind = Kind::Throw;
    return s;
  }
  return make_operator(visible);
}

Statement Generator::make_wrap(std::vector<int>& visible, int depth, bool in_catch) {
  static constexpr Kind kinds[] = {
      Kind::NoGrad, Kind::WithGrad, Kind::EarlyStop, Kind::NoEarlyStop, Kind::Debug,
      Kind::Hooks,  Kind::Hooks,    Kind::Hooks,     Kind::Autocast,    Kind::Autocast,
      Kind::Catch,  Kind::Catch,    Kind::Catch};
  Statement s;
  do {
    s.kind = kinds[dice_.below(std::size(kinds))];
  } while ((s.kind == Kind::Hooks && !features_.hooks) ||
           (s.kind == Kind::Catch && !features_.catches) ||
           (s.kind == Kind::Debug && features_.scopes) ||
           (s.kind == Kind::Autocast && !features_.autocast));
  const auto make = [&] {
    return make_block(visible, 1 + dice_.below(4), depth, in_catch || s.kind == Kind::Catch);
  };
  if (s.kind == Kind::Hooks) return make_hooks(make);
  s.salt = dice_.bits();
  ++nested_wraps_;
  s.block = make();
  --nested_wraps_;
  return s;
}

Statement Generator::make_state_guard(std::vector<int>& visible, int depth, bool in_catch) {
  static constexpr Kind kinds[] = {Kind::Provider, Kind::Provider, Kind::Generator, Kind::Generator,
                                   Kind::Observer};
  Statement s;
  s.kind = kinds[dice_.below(std::size(kinds))];
  s.salt = dice_.bits();
  const int guards = s.kind == Kind::Observer ? 0 : 1;
  ++nested_wraps_;
  state_guards_ += guards;
  s.block = make_block(visible, 2 + dice_.below(5), depth, in_catch);
  state_guards_ -= guards;
  --nested_wraps_;
  return s;
}

Statement Generator::make_stretch(const std::vector<int>& visible, int depth, bool in_catch) {
  Statement s;
  s.salt = dice_.bits();
  if (dice_.percent(50) || nested_wraps_ >= 3) {
    s.kind = Kind::Pin;
    s.args = {pick(visible)};
    take_outs(s, 1);
    return s;
  }
  s.kind = Kind::Stretch;
  std::vector<int> inside = visible;
  for (int64_t i = 0, n = dice_.below(3); i < n; ++i) {
    s.region.args.emplace_back(pick(visible), next_);
    inside.push_back(next_++);
  }
  ++nested_wraps_;
  ++nested_stretches_;
  s.block = make_block(inside, 1 + dice_.below(4), depth, in_catch);
  --nested_stretches_;
  --nested_wraps_;
  for (int64_t i = 0, n = 1 + dice_.below(3); i < n; ++i)
    s.region.results.emplace_back(pick(inside), next_++);
  return s;
}

PolicySpec Generator::make_policy() {
  PolicySpec policy;
  policy.kind = static_cast<PolicySpec::Kind>(
      1 + dice_.below(static_cast<int64_t>(PolicySpec::Kind::Count) - 1));
  policy.salt = dice_.bits();
  policy.allows_mutation = dice_.percent(features_.inplace ? 70 : 20);
  policy.through_hooks = dice_.percent(25);
  policy.asks_again = dice_.percent(15);
  return policy;
}

Statement Generator::make_region(const std::vector<int>& visible, int depth, bool in_catch) {
  Statement s;
  s.kind = Kind::Region;
  s.salt = dice_.bits();
  RegionSpec& region = s.region;
  std::vector<int> inside;
  for (int i = 0; i < static_cast<int>(program_.leaves.size()); ++i)
    if (i != spared_) inside.push_back(i);
  if (features_.captures && dice_.percent(40)) {
    const int id = pick(visible);
    if (id >= static_cast<int>(program_.leaves.size())) {
      region.captures.push_back(id);
      inside.push_back(id);
    }
  }
  std::vector<int> given = region.captures;
  for (int64_t i = 0, n = 1 + dice_.below(4); i < n; ++i) {
    region.args.emplace_back(pick_argument(visible), next_);
    given.push_back(next_);
    inside.push_back(next_++);
  }
  given.swap(given_);
  s.block = make_block(inside, 1 + dice_.below(6), depth + 1, in_catch);
  given.swap(given_);
  for (int64_t i = 0, n = 1 + dice_.below(3); i < n; ++i) {
    const auto size = static_cast<int64_t>(inside.size());
    const int id = dice_.percent(50) ? inside[size - 1 - dice_.below(std::min<int64_t>(2, size))]
                                     : pick(inside);
    region.results.emplace_back(id, next_++);
  }
  draw_options(s);
  return s;
}

void Generator::draw_options(Statement& s) {
  RegionSpec& region = s.region;
  region.packing = static_cast<Packing>(dice_.below(static_cast<int64_t>(Packing::Count)));
  region.checkpointed_form = dice_.percent(15);
  region.named = dice_.percent(20);
  region.preserve_rng = contents(s.block).random || dice_.percent(60);
  region.early_stop = dice_.percent(70);
  region.debug = !features_.scopes && dice_.percent(12);
  region.scopes = features_.scopes && dice_.percent(25);
  region.strict = features_.strict && dice_.percent(50);
  region.fingerprint = !program_.all_values && dice_.percent(4);
  if (features_.policies && dice_.percent(60)) region.policy = make_policy();
  region.copies = topics_.copies && dice_.percent(80);
  region.moves_inputs = topics_.moves && dice_.percent(40);
  region.determinism = program_.all_values ? 3 : static_cast<int>(dice_.below(4));
}

Step Generator::make_step(bool last) {
  Step step;
  step.salt = dice_.bits();
  if (!last && dice_.percent(features_.changes ? 35 : 6)) {
    step.kind = Step::Kind::Mutate;
    step.target = dice_.percent(50) ? pick_leaf() : pick(top_level_);
    return step;
  }
  if (!last && features_.replaces && dice_.percent(35)) {
    step.kind = Step::Kind::Replace;
    step.target = dice_.percent(85) ? spared_ : pick_leaf();
    return step;
  }
  if (!last && topics_.modules && dice_.percent(25)) {
    step.kind = Step::Kind::Again;
    return step;
  }
  step.kind = dice_.percent(60) ? Step::Kind::Grad : Step::Kind::Backward;
  // After a backward(), a recompute sees another grad() than forward.
  if (features_.looks) step.kind = Step::Kind::Grad;
  for (int64_t i = 0, n = 1 + dice_.below(3); i < n; ++i) step.outputs.push_back(pick(top_level_));
  if (dice_.percent(40)) {
    for (int i = 0; i < static_cast<int>(program_.leaves.size()); ++i)
      if (program_.leaves[i].kind != LeafKind::Buffer && dice_.percent(50))
        step.inputs.push_back(i);
  }
  const int64_t order = dice_.below(100);
  step.order = order < 65 ? 1 : order < 92 ? 2 : 3;
  step.retain = last ? dice_.percent(50) : dice_.percent(92);
  step.in_no_grad = dice_.percent(10);
  // Nodes are numbered by thread, and the engine follows the numbers. If a step in a thread makes
  // nodes (create_graph), the nodes of a recompute there change the order of outer sums.
  step.in_thread = step.order == 1 && dice_.percent(8);
  step.hooks = features_.hooks && dice_.percent(15);
  if (step.kind == Step::Kind::Grad && !last && step.retain) {
    if (features_.fuses && dice_.percent(50))
      step.fuse = dice_.below(6);
    else if (!features_.registers && dice_.percent(10))  // a Toggle would be left halfway
      step.out_of_memory = dice_.below(program_.large ? 200000 : 4000);
  }
  return step;
}

Program generate(uint64_t seed, Topics topics) { return Generator(seed, topics).generate(); }

}  // namespace fuzz
