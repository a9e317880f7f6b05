#pragma once
// Decides the contents of a random program.

#include <functional>
#include <optional>
#include <vector>

#include "tests/fuzz/operators.h"
#include "tests/fuzz/program.h"

namespace fuzz {

/// The permitted contents of this program. They are drawn once, so that combinations of few things
/// are frequent.
struct Features {
  bool inplace, random, hooks, catches, inner_grad, fuses, autocast, captures, reads_twice, strict,
      changes, guards, scopes,  // a context_fn excludes debug
      policies, stretches;
  bool writes = false, looks = false, registers = false, retains = false, replaces = false,
       offloads = false;  // see Topics::arguments
};

/// Returns the wanted operators, each as often as its weight.
std::vector<int> weighted(bool (*is_wanted)(const Operator&));

class Generator {
 public:
  Generator(uint64_t seed, Topics topics) : topics_(topics), dice_(seed) { program_.seed = seed; }
  Program generate();

 private:
  void draw_features();
  void draw_features_of_arguments();
  void make_modules();
  Statement make_call(const std::vector<int>& visible);
  std::vector<int> make_leaves();
  int pick(const std::vector<int>& visible);
  int pick_one(const std::vector<int>& of) {
    return of[dice_.below(static_cast<int64_t>(of.size()))];
  }
  int pick_leaf() {
    return static_cast<int>(dice_.below(static_cast<int64_t>(program_.leaves.size())));
  }
  /// Picks an argument of a region, with a preference for values that programs use for more than
  /// computing.
  int pick_argument(const std::vector<int>& visible);
  /// Picks an argument or a capture of the region in the making, most of the time.
  int pick_given(const std::vector<int>& visible);
  static void add_outs(const Statement& s, std::vector<int>& visible) {
    for (int i = 0; i < s.outs; ++i) visible.push_back(s.out + i);
    for (const auto& [inside, outside] : s.region.results) visible.push_back(outside);
  }
  Statement make_operator(const std::vector<int>& visible);
  Statement applied(int op, const std::vector<int>& visible);
  void take_outs(Statement& s, int outs);
  Block make_block(std::vector<int>& visible, int64_t count, int depth, bool in_catch);
  Statement make_statement(std::vector<int>& visible, int depth, bool in_catch);
  /// Adds regions at the end, where most steps begin: in hooks that copy, with an argument that a
  /// step replaces, and with one that has many properties besides its values.
  void add_regions_about_arguments(std::vector<int>& visible);
  /// Makes a SavedTensorHooksGuard, or one that offloads, around the block that `make` makes.
  Statement make_hooks(const std::function<Block()>& make);
  /// Makes a use of an argument or a capture besides computing.
  std::optional<Statement> make_about_arguments(const std::vector<int>& visible);
  Statement make_copy(const std::vector<int>& visible);
  Statement make_write(const std::vector<int>& visible);
  /// Makes a statement that needs a recompute before forward continues.
  Statement make_wait(const std::vector<int>& visible);
  Statement make_look(const std::vector<int>& visible);
  Statement make_register(int id, Hook hook);
  Statement make_toggle(const std::vector<int>& visible);
  Statement make_wrap(std::vector<int>& visible, int depth, bool in_catch);
  Statement make_state_guard(std::vector<int>& visible, int depth, bool in_catch);
  /// Makes a pin or a save_region.
  Statement make_stretch(const std::vector<int>& visible, int depth, bool in_catch);
  PolicySpec make_policy();
  /// Draws the options of a region.
  void draw_options(Statement& s);
  Statement make_region(const std::vector<int>& visible, int depth, bool in_catch);
  Step make_step(bool last);

  const Topics topics_;
  Dice dice_;
  Program program_;
  Features features_{};
  std::vector<int> top_level_;
  std::vector<int> given_;  // arguments and captures of the region in the making
  int favourite_ = -1;      // the most likely argument of regions
  int spared_ = -1;         // a leaf that regions get as an argument only
  int next_ = 0;
  int nested_wraps_ = 0, nested_hooks_ = 0;
  int nested_stretches_ = 0;
  bool has_waited_ = false;  // in the last statement
  int state_guards_ = 0;     // around the statement in the making
};

}  // namespace fuzz
