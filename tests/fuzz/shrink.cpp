// Lists the programs that are one step smaller than a given one.

#include <functional>
#include <utility>

#include "tests/fuzz/program.h"

namespace fuzz {

namespace {

using Edit = std::function<bool(Program&)>;  // returns false if it has no effect here

/// Returns the block reached by `path`: the index of a statement with a block, level by level.
Block& at_path(Program& program, const std::vector<size_t>& path) {
  Block* block = &program.block;
  for (const size_t i : path) block = &(*block)[i].block;
  return *block;
}

template <class Set>
void simplify_options(const std::vector<size_t>& path, size_t i, Set&& add) {
  auto option = [&](auto change) {
    add([path, i, change](Program& p) { return change(at_path(p, path)[i].region); });
  };
  auto set = [](auto& field, auto value) { return field != value && ((field = value), true); };
  option([=](RegionSpec& r) { return set(r.inlined, true); });
  option([=](RegionSpec& r) { return set(r.packing, Packing::Vector); });
  option([=](RegionSpec& r) { return set(r.checkpointed_form, false); });
  option([=](RegionSpec& r) { return set(r.named, false); });
  option([=](RegionSpec& r) { return set(r.preserve_rng, true); });
  option([=](RegionSpec& r) { return set(r.early_stop, true); });
  option([=](RegionSpec& r) { return set(r.debug, false); });
  option([=](RegionSpec& r) { return set(r.scopes, false); });
  option([=](RegionSpec& r) { return set(r.strict, false); });
  option([=](RegionSpec& r) { return set(r.fingerprint, false); });
  option([=](RegionSpec& r) { return set(r.copies, false); });
  option([=](RegionSpec& r) { return set(r.moves_inputs, false); });
  option([=](RegionSpec& r) { return set(r.determinism, 1); });
  option([=](RegionSpec& r) { return set(r.policy.kind, PolicySpec::Kind::None); });
  option([=](RegionSpec& r) {
    return r.policy.kind != PolicySpec::Kind::None &&
           set(r.policy.kind, PolicySpec::Kind::Everything);
  });
  option([=](RegionSpec& r) { return set(r.policy.allows_mutation, false); });
  option([=](RegionSpec& r) { return set(r.policy.through_hooks, false); });
  option([=](RegionSpec& r) { return set(r.policy.asks_again, false); });
  option([](RegionSpec& r) { return r.captures.empty() ? false : (r.captures.pop_back(), true); });
  option([](RegionSpec& r) { return r.args.size() < 2 ? false : (r.args.pop_back(), true); });
  option([](RegionSpec& r) {
    return r.args.size() < 2 ? false : (r.args.erase(r.args.begin()), true);
  });
  option([](RegionSpec& r) { return r.results.size() < 2 ? false : (r.results.pop_back(), true); });
  option([](RegionSpec& r) {
    return r.results.size() < 2 ? false : (r.results.erase(r.results.begin()), true);
  });
}

template <class Add>
void edit_block(const Block& block, std::vector<size_t>& path, Add&& add) {
  for (size_t count = block.size(); count > 0; count /= 2) {
    for (size_t first = 0; first + count <= block.size(); first += count) {
      add([path, first, count](Program& p) {
        Block& b = at_path(p, path);
        b.erase(b.begin() + first, b.begin() + first + count);
        return true;
      });
    }
  }
  for (size_t i = 0; i < block.size(); ++i) {
    const bool has_arguments = block[i].kind == Kind::Region || block[i].kind == Kind::Stretch;
    if (has_arguments || block[i].kind == Kind::Call) simplify_options(path, i, add);
    if (!has_arguments && !block[i].block.empty()) {
      add([path, i](Program& p) {  // removes the wrap and keeps its contents
        Block& b = at_path(p, path);
        const Block inner = std::move(b[i].block);
        b.erase(b.begin() + i);
        b.insert(b.begin() + i, inner.begin(), inner.end());
        return true;
      });
    }
    path.push_back(i);
    edit_block(block[i].block, path, add);
    path.pop_back();
  }
}

template <class Add>
void edit_steps(const Program& program, Add&& add) {
  for (size_t i = 0; i < program.steps.size(); ++i) {
    add([i](Program& p) { return p.steps.erase(p.steps.begin() + i), true; });
    auto change = [&](auto f) { add([i, f](Program& p) { return f(p.steps[i]); }); };
    auto set = [](auto& field, auto value) { return field != value && ((field = value), true); };
    change([=](Step& s) { return s.order > 1 && set(s.order, s.order - 1); });
    change([=](Step& s) { return set(s.in_no_grad, false); });
    change([=](Step& s) { return set(s.in_thread, false); });
    change([=](Step& s) { return set(s.hooks, false); });
    change([=](Step& s) { return set(s.kind, Step::Kind::Grad) && s.outputs.size() > 0; });
    change([=](Step& s) { return s.fuse >= 0 && set(s.fuse, int64_t{-1}); });
    change([=](Step& s) { return s.out_of_memory >= 0 && set(s.out_of_memory, int64_t{-1}); });
    change([](Step& s) { return s.outputs.size() < 2 ? false : (s.outputs.pop_back(), true); });
    change([](Step& s) {
      return s.outputs.size() < 2 ? false : (s.outputs.erase(s.outputs.begin()), true);
    });
    change([](Step& s) { return s.inputs.empty() ? false : (s.inputs.pop_back(), true); });
  }
}

}  // namespace

std::vector<Program> smaller(const Program& program) {
  std::vector<Program> found;
  auto add = [&](const Edit& edit) {
    Program candidate = program;
    if (edit(candidate)) found.push_back(std::move(candidate));
  };
  std::vector<size_t> path;
  edit_steps(program, add);
  edit_block(program.block, path, add);
  for (size_t i = 0; i < program.modules.size(); ++i) {
    const auto change = [&](auto f) { add([i, f](Program& p) { return f(p.modules[i]); }); };
    for (size_t j = 0; j < program.modules[i].states.size(); ++j)
      change([j](ModuleSpec& m) { return m.states.erase(m.states.begin() + j), true; });
    change([](ModuleSpec& m) { return std::exchange(m.inner, -1) != -1; });
    change([](ModuleSpec& m) {
      return std::exchange(m.form, ModuleSpec::Form::Plain) != ModuleSpec::Form::Plain;
    });
  }
  add([](Program& p) { return p.drop_values && !(p.drop_values = false); });
  add([](Program& p) { return p.sharing != Sharing::None && ((p.sharing = Sharing::None), true); });
  for (size_t i = 0; i < program.leaves.size(); ++i) {
    add([i](Program& p) { return std::exchange(p.leaves[i].has_grad, false); });
    add([i](Program& p) {
      std::vector<int64_t>& sizes = p.leaves[i].sizes;
      if (sizes == std::vector<int64_t>{2}) return false;
      sizes = {2};
      return true;
    });
  }
  return found;
}

}  // namespace fuzz
