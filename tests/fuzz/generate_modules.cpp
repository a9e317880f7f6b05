// Makes modules with state, and calls of them.

#include "tests/fuzz/generator.h"
#include "tests/support/stateful_module.h"

namespace fuzz {

void Generator::make_modules() {
  using remat::testing::State;
  // No start of a recompute is right both for a table that is filled once and for a counter, so few
  // programs have both: see is_about_modules.
  const int64_t die = dice_.below(100);
  // A recompute before the end of forward is not compared (a documented limit).
  const bool has_tables = die < 40 && !features_.inner_grad, has_writes = die < 15 || !has_tables;
  const auto is_wanted = [&](State state) {
    return remat::testing::writes_each_time(state) ? has_writes
                                                   : state != State::Table || has_tables;
  };
  for (int64_t i = 0, n = 1 + dice_.below(3); i < n; ++i) {
    ModuleSpec module;
    module.form =
        static_cast<ModuleSpec::Form>(dice_.below(static_cast<int64_t>(ModuleSpec::Form::Count)));
    for (int64_t j = 0, m = 1 + dice_.below(3); j < m; ++j) {
      State state{};
      do {
        state = static_cast<State>(dice_.below(static_cast<int64_t>(State::Count)));
      } while (!is_wanted(state));
      module.states.push_back(static_cast<int>(state));
    }
    module.salt = dice_.bits();
    do {
      module.weight = pick_leaf();
    } while (program_.leaves[module.weight].kind == LeafKind::Buffer);
    if (i > 0 && dice_.percent(40)) module.inner = static_cast<int>(dice_.below(i));
    program_.modules.push_back(std::move(module));
  }
}

Statement Generator::make_call(const std::vector<int>& visible) {
  Statement s;
  s.kind = Kind::Call;
  s.op = static_cast<int>(dice_.below(static_cast<int64_t>(program_.modules.size())));
  s.args = {pick_argument(visible)};
  take_outs(s, 1);
  draw_options(s);
  s.region.inlined = dice_.percent(30);
  return s;
}

}  // namespace fuzz
