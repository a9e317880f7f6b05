// Interprets a program's statements.

#include "tests/fuzz/run.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "tests/support/saving_functions.h"

namespace fuzz {

namespace {

bool same_storage(const Tensor& a, const Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

at::Generator generator_from(uint64_t seed) {
  if (device().is_cpu()) return at::detail::createCPUGenerator(seed);
  at::Generator generator = at::globalContext().defaultGenerator(device()).clone();
  generator.set_current_seed(seed);
  return generator;
}

/// Returns the origin of a tensor made from `sources`: a source's origin if the tensor is its view.
std::shared_ptr<Origin> origin_of(const Tensor& made, const std::vector<Value>& sources) {
  for (const Value& source : sources)
    if (same_storage(made, source.tensor)) return source.origin;
  return std::make_shared<Origin>();
}

/// The results of save_region, with their relations, which a recompute that does not run it cannot
/// know.
struct StretchResult {
  Tensors tensors;
  std::vector<int> same_as;   ///< the outer value of which the result is a view
  std::vector<size_t> first;  ///< the first result that it shares its storage with
  std::map<int, Origin> uses;
};

template <class Visitor>
void visit_tensors(StretchResult& result, Visitor&& visit) {
  for (Tensor& tensor : result.tensors) visit(tensor);
}

}  // namespace

bool overlaps_itself(const Tensor& a) {
  for (int64_t i = 0; i < a.dim(); ++i)
    if (a.stride(i) == 0 && a.size(i) > 1) return true;
  return false;
}

bool is_leaf_with_grad(const Tensor& a) {
  try {
    a.grad_fn();
  } catch (const c10::Error&) {  // for some views it raises
  }
  return a.is_leaf() && a.requires_grad();
}

const Value& look_up(const Environment& values, int id) {
  auto next = values.upper_bound(id);
  return next == values.begin() ? next->second : std::prev(next)->second;
}

const Value& Interpreter::see(const Environment& values, int id) {
  const Value& value = look_up(values, id);
  const auto is_same = [&value](const Value& leaf) { return leaf.origin == value.origin; };
  if (regions_around_ > 0 && std::any_of(leaves_.begin(), leaves_.end(), is_same))
    value.origin->as_capture = true;
  return value;
}

Interpreter::Interpreter(const Program& program, Mode mode, Record& record)
    : program_(program), contents_(contents(program.block)), mode_(mode), record_(record) {
  at::manual_seed(program.seed);
  for (uint32_t i = 0; i < 2; ++i) {
    numbers_[i] = std::make_shared<Numbers>(static_cast<uint32_t>(program.seed) + i);
    generators_[i] = generator_from(program.seed + 7 + i);
  }
  const Tensors tensors = make_leaves();
  for (size_t i = 0; i < tensors.size(); ++i) {
    leaves_.push_back(
        {tensors[i], std::make_shared<Origin>(Origin{.foreign = true, .leaf = true})});
  }
  make_modules();
}

Interpreter::~Interpreter() {
  for (Value& leaf : leaves_) leaf.tensor.mutable_grad() = Tensor();  // no cycle of graph and grad
  drop_retained_gradients();
}

void Interpreter::drop_retained_gradients() {
  for (auto& [id, value] : values_)
    if (value.tensor.defined() && value.tensor.retains_grad())
      value.tensor.mutable_grad() = Tensor();
}

Tensors Interpreter::make_leaves() {
  Tensors made;
  for (const Leaf& leaf : program_.leaves) {
    made.push_back(at::randn(leaf.sizes, leaf.is_double ? at::kDouble : at::kFloat).to(device()));
    if (leaf.kind != LeafKind::Buffer) made.back().requires_grad_();
    if (leaf.has_grad) made.back().mutable_grad() = at::randn_like(made.back());
  }
  return made;
}

void Interpreter::run_forward() {
  Stage stage{.label = "forward"};
  run_all(stage);
  record_state(stage);
  record_.stages.push_back(std::move(stage));
}

void Interpreter::run_all(Stage& stage) {
  Environment values;
  for (size_t i = 0; i < leaves_.size(); ++i) values[static_cast<int>(i)] = leaves_[i];
  std::optional<remat::DisableCheckpointGuard> plain;
  if (mode_ != Mode::Checkpointed) plain.emplace();
  const auto copies = copies_in(Mode::Undone);
  record_errors(stage, [&] { run_block(program_.block, values); });
  values_ = std::move(values);
  if (!stage.raised) {
    for (const auto& [id, value] : values_)
      record_tensor(stage, "v" + std::to_string(id), value.tensor);
  }
  if (program_.drop_values) {
    Environment kept;
    for (const Step& step : program_.steps) {
      for (const int id : step.outputs) kept[id] = look_up(values_, id);
      if (step.kind == Step::Kind::Mutate) kept[step.target] = look_up(values_, step.target);
    }
    values_ = std::move(kept);
  }
}

void Interpreter::run_block(const Block& block, Environment& values) {
  for (const Statement& s : block) {
    switch (s.kind) {
      case Kind::Operator:
      case Kind::Write:
        run_operator(s, values);
        break;
      case Kind::Region:
        run_region(s, values);
        break;
      case Kind::InnerGrad:
        run_inner_grad(s, values);
        break;
      case Kind::Read:
        run_read(s, values);
        break;
      case Kind::Name: {
        const Value& value = see(values, s.args[0]);
        values[s.out] = {
            remat::checkpoint_name(value.tensor, "n" + std::to_string(s.salt % num_names)),
            value.origin};
        break;
      }
      case Kind::Pin: {
        const Value& value = see(values, s.args[0]);
        values[s.out] = {remat::pin(value.tensor), value.origin};
        break;
      }
      case Kind::Stretch:
        run_stretch(s, values);
        break;
      case Kind::Copy:
        run_copy(s, values);
        break;
      case Kind::Look:
        run_look(s, values);
        break;
      case Kind::Register:
        run_register(s, values);
        break;
      case Kind::Call:
        run_call(s, values);
        break;
      case Kind::Throw:
        throw UserError();
      case Kind::Fuse:
        if (fuse_ >= 0 && remat::is_recomputing() && fuses_passed_++ == fuse_) throw FuseBlown();
        break;
      default:
        run_wrap(s, values);
    }
  }
}

Value Interpreter::changeable(const Value& value, Dice& dice) {
  const Tensor& t = value.tensor;
  const Origin& origin = *value.origin;
  const bool is_risky = origin.foreign || origin.as_argument || origin.as_capture;
  const bool is_bold = dice.percent(origin.foreign ? 5 : 15);
  // A tensor without grad that a frame keeps must not get a history: if the history leads back to
  // the frame, a cycle keeps both alive, as for a saved tensor of a LibTorch node. The same holds
  // for a tensor that the graph of a captured tensor may have saved.
  const bool makes_cycle = (is_risky && !t.requires_grad()) || contents_.captures;
  if (overlaps_itself(t) || origin.leaf || makes_cycle || is_leaf_with_grad(t) ||
      (is_risky && !is_bold))
    return {t.clone(), std::make_shared<Origin>()};
  if (is_risky) record_.changes.may_raise = true;
  if (origin.foreign) record_.changes.inside = true;
  if (origin.foreign && !program_.all_values) record_.changes.unchecked = true;
  return value;
}

void Interpreter::run_operator(const Statement& s, Environment& values) {
  const Operator& op = operators()[s.op];
  Dice dice(s.salt);
  std::vector<Value> operands;
  for (const int id : s.args) operands.push_back(see(values, id));
  const bool is_write = s.kind == Kind::Write;
  if (op.inplace)
    operands[0] = is_write ? writable(operands[0], dice) : changeable(operands[0], dice);
  // A tensor without grad that a frame keeps must not get a history: see changeable.
  const bool has_history = !is_write || operands[0].tensor.requires_grad();
  const at::AutoGradMode mode(at::GradMode::is_enabled() && has_history);
  Tensors tensors;
  for (const Value& value : operands) tensors.push_back(value.tensor);
  Surroundings around{.hook_calls = &hook_calls_, .max_numel = program_.large ? 6000 : 256};
  for (size_t i = 0; i < 2; ++i) {
    if (guards_.numbers[i] > 0) around.numbers[i] = numbers_[i].get();
    if (guards_.generators[i] > 0) around.generators[i] = &generators_[i];
  }
  Tensors outs = op.run(tensors, dice, around);
  for (size_t i = 0; i < outs.size() && i < static_cast<size_t>(s.outs); ++i) {
    Tensor& out = outs[i];
    if (out.numel() > around.max_numel) out = out.reshape(-1).narrow(0, 0, around.max_numel);
    operands.push_back({out, origin_of(out, operands)});
    values[s.out + static_cast<int>(i)] = operands.back();
  }
}

void Interpreter::run_stretch(const Statement& s, Environment& values) {
  const RegionSpec& spec = s.region;
  Tensors args;
  for (const auto& [outside, inside] : spec.args) args.push_back(see(values, outside).tensor);
  const auto body = [this, &s, &values, &spec](const Tensors& given) {
    Environment inner;
    // No outer value changes inside, since a recompute would not repeat the change.
    const auto fixed = [](const Tensor& tensor) {
      return Value{tensor, std::make_shared<Origin>(Origin{.foreign = true, .leaf = true})};
    };
    for (const auto& [id, value] : values) inner[id] = fixed(value.tensor);
    for (size_t i = 0; i < given.size(); ++i) inner[spec.args[i].second] = fixed(given[i]);
    run_block(s.block, inner);
    StretchResult result;
    for (const auto& [inside, outside] : spec.results) {
      const Value& value = see(inner, inside);
      result.tensors.push_back(value.tensor);
      result.first.push_back(0);
      while (!same_storage(value.tensor, result.tensors[result.first.back()]) &&
             result.first.back() + 1 < result.tensors.size())
        ++result.first.back();
      result.same_as.push_back(-1);
      for (const auto& [id, around] : values)
        if (same_storage(value.tensor, around.tensor)) result.same_as.back() = id;
      result.uses[outside] = *value.origin;
    }
    for (const auto& [id, value] : values) result.uses[id] = *inner[id].origin;
    for (const auto& [outside, inside] : spec.args) {
      const auto next = values.upper_bound(outside);
      Origin& use = result.uses[next == values.begin() ? next->first : std::prev(next)->first];
      use.as_argument |= inner[inside].origin->as_argument;
      use.as_capture |= inner[inside].origin->as_capture;
    }
    return result;
  };
  const StretchResult result = spec.inlined ? body(args) : remat::save_region(body, args);
  for (const auto& [id, use] : result.uses) {
    const auto found = values.find(id);
    if (found == values.end()) continue;
    found->second.origin->as_argument |= use.as_argument;
    found->second.origin->as_capture |= use.as_capture;
  }
  for (size_t i = 0; i < result.tensors.size(); ++i) {
    const int id = spec.results[i].second;
    const Origin& use = result.uses.at(id);
    auto origin = result.same_as[i] >= 0 ? values.at(result.same_as[i]).origin
                  : result.first[i] < i
                      ? values.at(spec.results[result.first[i]].second).origin
                      : std::make_shared<Origin>(
                            Origin{.as_argument = use.as_argument, .as_capture = use.as_capture});
    values[id] = {result.tensors[i], std::move(origin)};
  }
}

void Interpreter::run_read(const Statement& s, Environment& values) {
  const Value of = see(values, s.args[0]);
  // An argument of the region has another node in a recompute, or none (Rule 2), and so has a kept
  // value.
  const bool has_own_node = !of.origin->foreign && !contents_.stretches;
  Value made = of;
  Tensor saved = has_own_node ? saved_of(of.tensor) : Tensor();
  if (!saved.defined()) {
    const Tensor a = floating(of.tensor);
    made = {s.salt / 2 % 2 == 0 ? remat::testing::SavesInput::apply(a)
                                : remat::testing::SavesOutput::apply(a),
            std::make_shared<Origin>()};
    saved = saved_of(made.tensor);
  }
  if (!saved.defined()) saved = made.tensor.detach();  // without a graph
  values[s.out] = {s.salt % 2 == 0 ? saved * 1.5 : saved.detach().clone(),
                   std::make_shared<Origin>()};
  values[s.out + 1] = made;
}

void Interpreter::run_inner_grad(const Statement& s, Environment& values) {
  const Value of = see(values, s.args[0]), with = see(values, s.args[1]);
  // A recompute has no graph through the region's arguments (Rule 2), so only inner tensors take
  // part.
  if (!of.tensor.requires_grad() || !with.tensor.requires_grad() || with.origin->foreign ||
      of.origin->foreign)
    return;
  Tensor grad = torch::autograd::grad({of.tensor}, {with.tensor}, {at::ones_like(of.tensor)},
                                      s.salt % 10 != 0, s.salt % 4 < 2, true)[0];
  if (!grad.defined()) grad = at::zeros_like(with.tensor);
  values[s.out] = {grad, origin_of(grad, {of, with})};
}

remat::CheckpointOptions Interpreter::options(const RegionSpec& spec) {
  remat::CheckpointOptions chosen;
  if (spec.named) chosen.name = "named";
  chosen.preserve_rng_state = spec.preserve_rng;
  chosen.early_stop = spec.early_stop;
  chosen.debug = spec.debug;
  chosen.strict_unpack = spec.strict;
  if (spec.copies) chosen.inputs = remat::InputMode::CopyOnWrite;
  chosen.offload_inputs = spec.moves_inputs;
  chosen.determinism_check = static_cast<remat::DeterminismCheck>(spec.determinism);
  if (spec.fingerprint)
    chosen.fingerprint = [](const Tensor& t) { return std::to_string(t.numel()); };
  chosen.policy = policy_of(spec.policy);
  if (spec.scopes) {
    auto enter = [this]() -> remat::Scope {
      ++scopes_alive_;
      return remat::Scope(this, [](Interpreter* run) { --run->scopes_alive_; });
    };
    chosen.context_fn = [enter] { return remat::ContextPair{enter, enter}; };
  }
  return chosen;
}

Tensors Interpreter::run_body(const Statement& s, const Environment& captured, const Tensors& args,
                              const std::vector<Origin>& origins, std::vector<Origin>& uses) {
  Environment inner = captured;
  for (size_t i = 0; i < leaves_.size(); ++i) inner[static_cast<int>(i)] = leaves_[i];
  for (size_t i = 0; i < args.size() && i < s.region.args.size(); ++i) {
    // A function that keeps a tensor and gives it a history with the region in it makes a cycle.
    const bool is_fixed = is_leaf_with_grad(args[i]) || contents_.captures || origins[i].leaf;
    const Origin inside{.foreign = true, .leaf = is_fixed, .captured = origins[i].captured};
    inner[s.region.args[i].second] = {args[i], std::make_shared<Origin>(inside)};
  }
  run_block(s.block, inner);
  Tensors results;
  uses.clear();
  for (const auto& [inside, outside] : s.region.results) {
    const Value& result = see(inner, inside);
    results.push_back(result.tensor);
    uses.push_back(
        {.as_argument = result.origin->as_argument, .as_capture = result.origin->as_capture});
  }
  return results;
}

void Interpreter::run_region(const Statement& s, Environment& values) {
  const RegionSpec& spec = s.region;
  std::vector<Value> seen = leaves_;
  Tensors args;
  for (const auto& [outside, inside] : spec.args) {
    seen.push_back(see(values, outside));
    seen.back().origin->as_argument = true;
    args.push_back(seen.back().tensor);
  }
  Environment captured;
  for (const int id : spec.captures) {
    seen.push_back(see(values, id));
    seen.back().origin->as_capture = true;
    const Origin inside{.foreign = true, .leaf = true};  // never changed inside
    captured[id] = {seen.back().tensor, std::make_shared<Origin>(inside)};
  }
  std::vector<Origin> origins;  // of the arguments, inside
  for (const auto& [outside, inside] : spec.args) {
    const Origin& origin = *see(values, outside).origin;
    // If a region around captured it and passes it on, each recompute would write to it once more
    // (a documented limit).
    origins.push_back({.leaf = origin.leaf && regions_around_ > 0,
                       .captured = origin.leaf || origin.captured || origin.as_capture});
  }
  const auto uses = std::make_shared<std::vector<Origin>>();  // of the results, by inner regions
  const auto runs = std::make_shared<int64_t>(0);
  const Body body = [this, &s, captured, origins, uses, runs, with = guards_,
                     around = regions_around_](const Tensors& tensors) {
    const Instead guards(guards_, with);
    const Instead regions(regions_around_, around + 1);
    const auto copies = copies_in(Mode::UndoneInside);
    if (++*runs > 1 && observed_now_ < with.observers)
      record_.faults.push_back("in a recompute: an observer does not know of it");
    return run_body(s, captured, tensors, origins, *uses);
  };
  remat::CheckpointOptions chosen = options(spec);
  collect_modules(s.block, chosen.modules);
  const Tensors results =
      spec.inlined ? body(args)
                   : call_region(spec.packing, spec.checkpointed_form, chosen, body, args);
  for (size_t i = 0; i < results.size() && i < spec.results.size(); ++i) {
    seen.push_back({results[i], origin_of(results[i], seen)});
    seen.back().origin->as_argument |= uses->at(i).as_argument;
    seen.back().origin->as_capture |= uses->at(i).as_capture;
    values[spec.results[i].second] = seen.back();
  }
}

}  // namespace fuzz
