// Runs a program plainly and checkpointed, and checks that the two agree by the Rules.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "tests/fuzz/budgets.h"
#include "tests/support/stateful_module.h"

namespace fuzz {

namespace {

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

/// Returns the start of an error, without the numbers, which differ between programs.
std::string start_of(const std::string& error) {
  std::string start;
  for (const char letter : error.substr(0, 120))
    if (letter < '0' || letter > '9') start += letter;
  if (const auto name = start.find("\"named\" "); name != std::string::npos) start.erase(name, 8);
  return start.substr(0, 60);
}

/// Returns the first word of a label: the same finding in a smaller program has other numbers.
std::string sort_of(const std::string& label) {
  return label.substr(0, label.find_first_of(" 0123456789"));
}

std::string numbers(const Entry& entry) {
  std::ostringstream text;
  text << entry.meta << " :";
  const bool is_double = contains(entry.meta, "Double");
  const size_t size = is_double ? 8 : 4;
  for (size_t i = 0; i + size <= entry.bytes.size() && i < 8 * size; i += size) {
    double d = 0;
    float f = 0;
    std::memcpy(is_double ? static_cast<void*>(&d) : &f, entry.bytes.data() + i, size);
    text << " " << (is_double ? d : f);
  }
  return text.str();
}

/// Returns an entry without the properties that differ with a formula that LibTorch chooses under a
/// dispatch mode. The gradient of prod, for example, then does not depend on its argument.
Entry without_role(Entry entry) {
  for (const char* const role : {" requires grad", " leaf", " version"})
    entry.meta = entry.meta.substr(0, entry.meta.find(role));
  return entry;
}

/// Returns whether entries are equal but for the rounding of another order or another formula.
template <class T>
bool is_close(const Entry& p, const Entry& c) {
  std::vector<T> a(p.bytes.size() / sizeof(T)), b(a.size());
  std::memcpy(a.data(), p.bytes.data(), p.bytes.size());
  std::memcpy(b.data(), c.bytes.data(), c.bytes.size());
  T largest = 0;
  for (const T each : a) largest = std::max(largest, std::isfinite(each) ? std::abs(each) : T(0));
  // Below float's smallest normal number, a double may come from a float.
  const T allowed = std::max(1000 * std::numeric_limits<T>::epsilon() * largest,
                             T(std::numeric_limits<float>::min()));
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!(std::abs(a[i] - b[i]) <= allowed) && a[i] != b[i] &&
        !(std::isnan(a[i]) && std::isnan(b[i])))
      return false;
  return true;
}

bool are_close(const Entry& p, const Entry& c) {
  return p.label == c.label && p.meta == c.meta && p.bytes.size() == c.bytes.size() &&
         (contains(p.meta, "Double") ? is_close<double>(p, c)
                                     : contains(p.meta, "Float") && is_close<float>(p, c));
}

// Note [Early calls of grad_fn]
// A view that was changed in place gets its grad_fn anew on the first call of `grad_fn()`, and from
// elsewhere once its object is gone. A region makes this call for its arguments, unused ones
// included, and holds the nodes for its recompute. Sums of gradients follow the numbers of nodes,
// so an early call changes their rounding without regions, too.

/// Returns whether an entry is a gradient. See Note [Early calls of grad_fn].
bool is_gradient(const Entry& entry) { return entry.label.rfind("order ", 0) == 0; }

std::optional<Finding> difference(const Stage& plain, const Stage& checkpointed,
                                  bool has_other_formulas, bool has_changed_views) {
  for (size_t i = 0; i < plain.entries.size() || i < checkpointed.entries.size(); ++i) {
    if (i >= plain.entries.size() || i >= checkpointed.entries.size())
      return Finding{"length", plain.label + ": one of the runs has more entries"};
    const Entry &p = plain.entries[i], &c = checkpointed.entries[i];
    if (p == c) continue;
    if (has_other_formulas && are_close(without_role(p), without_role(c))) continue;
    if (has_changed_views && is_gradient(p) && are_close(p, c)) continue;
    return Finding{"difference in " + sort_of(plain.label) + " " + sort_of(p.label) +
                       (p.meta == c.meta ? " values" : " metadata"),
                   plain.label + ", " + p.label + ":\n  plain        " + numbers(p) +
                       "\n  checkpointed " + numbers(c)};
  }
  return std::nullopt;
}

/// Returns whether a kept value was changed in place, without an error in plain autograd.
bool is_about_kept(const Stage& stage) { return contains(stage.error_type, "CheckpointError 7"); }

bool is_about_changes(const Stage& stage) {
  return contains(stage.error, "modified by an inplace operation") ||
         contains(stage.error, "changed") || contains(stage.error_type, "CheckpointError 3") ||
         contains(stage.error_type, "CheckpointError 4") ||
         contains(stage.error_type, "CheckpointError 6") ||
         contains(stage.error_type, "CheckpointError 11") || is_about_kept(stage);
}

bool is_kind(const Stage& stage, remat::CheckpointError::Kind kind) {
  return stage.error_type == "CheckpointError " + std::to_string(static_cast<int>(kind));
}

/// Returns whether an error of a region is right for the program's changes of arguments and
/// captures, although plain autograd may have none. Each kind of change permits only its own
/// errors, since others would hide faults.
bool is_about_arguments(const Changes& made, const Stage& stage) {
  using Kind = remat::CheckpointError::Kind;
  // A region keeps its arguments, but plain autograd keeps values made of them.
  const bool is_changed = contains(stage.error, "modified by an inplace operation") ||
                          is_kind(stage, Kind::CaptureChanged) ||
                          is_kind(stage, Kind::InputChanged);
  const bool is_unsupported = is_kind(stage, Kind::Unsupported);
  // A change of an unsaved capture shows in the values computed from it.
  const bool is_mismatch = is_kind(stage, Kind::ValueMismatch) ||
                           is_kind(stage, Kind::MetadataMismatch) ||
                           is_kind(stage, Kind::FewerTensors) || is_kind(stage, Kind::MoreTensors);
  return (made.written && (is_changed || is_unsupported)) || (made.registered && is_unsupported) ||
         (made.replaced_argument && is_changed) ||
         (made.replaced_capture && (is_changed || is_mismatch));
}

/// Returns whether a gradient goes through a kept value, which no recompute computes.
bool is_through_kept(const Stage& stage) {
  return contains(stage.error_type, "CheckpointError 9") && contains(stage.error, "gradient");
}

/// Returns whether reads overlap: a group allows each saved tensor one read.
bool is_overlap(const Stage& stage) { return contains(stage.error, "in a GraphExecGroup"); }

/// Returns whether saving such an argument is a forbidden use of it.
bool is_about_no_grad_views(const Stage& stage) {
  return contains(stage.error, "A view was created in no_grad mode") ||
         contains(stage.error, "is a view and its base");
}

bool has_state(const Program& program, bool (*is_wanted)(remat::testing::State)) {
  return std::any_of(program.modules.begin(), program.modules.end(), [&](const ModuleSpec& module) {
    return std::any_of(module.states.begin(), module.states.end(), [&](int state) {
      return is_wanted(static_cast<remat::testing::State>(state));
    });
  });
}

/// Returns whether a region may raise about its modules. After a table that is filled once, a
/// recompute must start from the state at the end of forward. After a buffer that each call writes,
/// it must start from the state at the begin. Statistics of a batch norm without grad mode are such
/// a buffer. A policy does not see again an operator that only the first call runs.
bool is_about_modules(const Program& program, const Contents& has, const Stage& stage) {
  using remat::testing::State;
  const bool has_table = has_state(program, [](State s) { return s == State::Table; });
  const bool has_norm = has_state(program, [](State s) { return s == State::Norm; });
  const bool has_once = has_table || has_state(program, [](State s) { return s == State::Added; });
  const bool may_be_refused = has_table && ((has_norm && has.no_grad) ||
                                            has_state(program, remat::testing::writes_each_time));
  return (may_be_refused && contains(stage.error, "The recompute left")) ||
         (has_once && has.policies &&
          is_kind(stage, remat::CheckpointError::Kind::SelectiveMismatch));
}

/// Returns whether the step asked for the failure.
bool is_planned(const Step* step, const Stage& stage) {
  return step != nullptr && ((step->fuse >= 0 && stage.error_type == "fuse") ||
                             (step->out_of_memory >= 0 && stage.error_type == "out of memory"));
}

/// The program in another mode, run when it is first needed.
class Reference {
 public:
  Reference(const Program& program, Mode mode) : program_(program), mode_(mode) {}
  /// Returns its stage `i`; null if the run ended before.
  const Stage* stage(size_t i) {
    if (!record_) record_ = run(program_, mode_);
    return i < record_->stages.size() ? &record_->stages[i] : nullptr;
  }

 private:
  const Program& program_;
  const Mode mode_;
  std::optional<Record> record_;
};

std::optional<Finding> compare(const Program& program, const Record& plain,
                               const Record& checkpointed) {
  const Contents has = contents(program.block);
  bool has_changes = has.inplace;
  bool has_replaced = false;
  for (const Step& step : program.steps) {
    has_changes |= step.kind == Step::Kind::Mutate;
    has_replaced |= step.kind == Step::Kind::Replace;
  }
  const bool has_changed_views = has.inplace || has.writes_arguments;
  // A backward inside a region with a policy runs under a dispatch mode, like PyTorch's own.
  // Kernels of an accelerator may add in any order.
  const bool has_other_formulas = (has.policies && has.inner_grad) || !device().is_cpu();
  const bool may_be_undone = has_changes || has.writes_arguments || has_replaced;
  Reference undone(program, Mode::Undone), undone_inside(program, Mode::UndoneInside);
  auto agrees = [&](Reference& reference, size_t i) {
    const Stage* const stage = reference.stage(i);
    return stage != nullptr && !stage->raised &&
           !difference(*stage, checkpointed.stages[i], has_other_formulas, has_changed_views);
  };
  auto undone_agrees = [&](size_t i) {
    return (may_be_undone && agrees(undone, i)) || (has_replaced && agrees(undone_inside, i));
  };
  auto undone_is = [&](const Stage& stage, size_t i) {
    const Stage* const reference = undone.stage(i);
    return reference != nullptr && !reference->raised &&
           !difference(*reference, stage, has_other_formulas, has_changed_views);
  };
  auto undone_raises = [&](size_t i) {
    const Stage* const stage = may_be_undone ? undone.stage(i) : nullptr;
    return stage != nullptr && stage->error == checkpointed.stages[i].error;
  };
  auto raises_unchanged = [&](size_t i) {
    const Record unchanged = run(program, Mode::Unchanged);
    return i < unchanged.stages.size() && unchanged.stages[i].error == plain.stages[i].error;
  };
  // The program catches its errors, and saving an argument may raise, too.
  if (has.catches && (may_be_undone || (has.keeps_unchanged && has.writes_inside)))
    return std::nullopt;
  for (size_t i = 0; i < plain.stages.size() && i < checkpointed.stages.size(); ++i) {
    const Stage &p = plain.stages[i], &c = checkpointed.stages[i];
    const Step* step = i == 0 ? nullptr : &program.steps[i - 1];
    if (c.raised && is_planned(step, c)) continue;
    const bool may_overlap =
        program.sharing == Sharing::Group && (i > 1 || (i == 1 && step->order > 1));
    if (c.raised && may_overlap && is_overlap(c)) return std::nullopt;
    if (c.raised && is_about_modules(program, has, c)) return std::nullopt;
    // Hooks do not change kept values, nor does a backward inside. Composites of LibTorch do
    // (alpha_dropout, as documented).
    const bool may_change_kept = has.keeps_unchanged && (may_be_undone || has.writes_inside);
    if (c.raised && may_change_kept && is_about_kept(c)) return std::nullopt;
    if (c.raised && has.stretches && has.inner_grad && is_through_kept(c)) return std::nullopt;
    const bool may_raise = p.changes.may_raise || (has_changes && has.hooks);
    if (p.raised && c.raised) {
      const bool is_allowed = may_raise && is_about_changes(c);
      if (p.error == c.error || is_allowed || is_about_arguments(p.changes, c) ||
          is_about_changes(c) == is_about_changes(p) || is_about_no_grad_views(c) ||
          undone_raises(i))
        return std::nullopt;
      return Finding{"other error", p.label + ": plain raised\n  " + p.error +
                                        "\ncheckpointed raised " + c.error_type + "\n  " + c.error};
    }
    if (c.raised) {
      if (may_raise && is_about_changes(c)) return std::nullopt;
      if (is_about_arguments(p.changes, c)) return std::nullopt;
      if (is_about_no_grad_views(c)) return std::nullopt;
      return Finding{"raises " + c.error_type + start_of(c.error),
                     c.label + ": only checkpointed raised " + c.error_type + "\n  " + c.error};
    }
    const bool is_unchecked = i > 0 && p.changes.unchecked;
    if (is_unchecked && p.changes.inside) return std::nullopt;
    if (p.raised) {
      // A copy from the save is not a reference for later writes. Nor is a tensor that the
      // program's hooks keep, whose version is not checked.
      if ((has.writes_late || has.keeping_hooks) && is_about_changes(p)) return std::nullopt;
      if (undone_agrees(i)) return std::nullopt;
      // A recompute makes the tensor anew about which plain autograd raises. The change was of
      // another tensor, which no node saved.
      if (is_unchecked && raises_unchanged(i)) continue;
      return Finding{"does not raise", c.label + ": only plain raised\n  " + p.error};
    }
    if (is_unchecked) continue;
    if (auto found = difference(p, c, has_other_formulas, has_changed_views)) {
      // A recompute repeats its function's changes of captured tensors.
      const bool is_repeated = p.changes.inside && contains(found->kind, "leaf metadata");
      // The program's hooks keep the tensor itself, so plain autograd computes with later writes to
      // it.
      if (has.keeping_hooks && may_be_undone && !undone_is(p, i)) return std::nullopt;
      if (!is_repeated && !undone_agrees(i)) return found;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Finding> check(const Program& program) {
  const Record plain = run(program, Mode::Plain);
  const Record checkpointed = run(program, Mode::Checkpointed);
  if (auto found = compare(program, plain, checkpointed)) return found;
  constexpr int64_t most = remat::testing::StatefulImpl::constant_bytes / 2;
  if (!program.large && checkpointed.held_bytes - plain.held_bytes > most &&
      has_state(program,
                [](remat::testing::State s) { return s == remat::testing::State::Constants; }))
    return Finding{"copied constants", "forward left " + std::to_string(checkpointed.held_bytes) +
                                           " bytes, plain " + std::to_string(plain.held_bytes)};
  // Programs that leak without regions (a node that refers to itself) prove nothing about regions.
  if (!checkpointed.faults.empty() && plain.leaked_bytes <= 0) {
    const std::string& text = checkpointed.faults.front();
    return Finding{text.substr(text.find(':')), text};
  }
  // Kernels may keep buffers after their first use: only bytes lost every time are a leak.
  if (checkpointed.leaked_bytes > 0 && plain.leaked_bytes <= 0) {
    bool again = true;
    for (int i = 0; i < 3 && again; ++i)
      again = run(program, Mode::Plain).leaked_bytes <= 0 &&
              run(program, Mode::Checkpointed).leaked_bytes > 0;
    if (again)
      return Finding{"leak", std::to_string(checkpointed.leaked_bytes) + " bytes are never freed"};
  }
  return std::nullopt;
}

// The reference is a run that drops nothing, not plain autograd: LibTorch chooses other formulas
// under a dispatch mode.
std::optional<Finding> check_budgets(const Program& program) {
  budget_bytes() = std::numeric_limits<int64_t>::max();
  const Record plain = run(program, Mode::Plain);
  budget_bytes() = 0;
  int64_t number = 0;
  for (const int64_t bytes : {1, 200, 800, 3'000, 12'000, 1'000'000}) {
    budget_bytes() = bytes;
    budget_moves() = (program.seed + static_cast<uint64_t>(number++)) % 2 == 0;
    const std::string under = "under a budget of " + std::to_string(bytes) + " bytes" +
                              (budget_moves() ? ", with moves: " : ": ");
    const Record budgeted = run(program, Mode::Plain);
    budget_bytes() = 0;
    budget_moves() = false;
    for (size_t i = 0; i < plain.stages.size() || i < budgeted.stages.size(); ++i) {
      if (i >= plain.stages.size() || i >= budgeted.stages.size())
        return Finding{"budget length", under + "one of the runs has more stages"};
      const Stage &p = plain.stages[i], &b = budgeted.stages[i];
      const auto is_refusal = [](const Stage& stage) {
        return contains(stage.error, "modified by an inplace operation");
      };
      if (start_of(p.error) != start_of(b.error) && !(is_refusal(p) && is_refusal(b)))
        return Finding{"budget error " + start_of(b.error),
                       under + p.label + ":\n  plain    " + p.error + "\n  budgeted " + b.error};
      if (auto found = difference(p, b, /*has_other_formulas=*/false, false)) {
        found->kind = "budget " + found->kind;
        found->text = under + found->text;
        return found;
      }
    }
    if (budgeted.leaked_bytes > 0 && plain.leaked_bytes <= 0)
      return Finding{"budget leak",
                     under + std::to_string(budgeted.leaked_bytes) + " bytes are never freed"};
  }
  return std::nullopt;
}

}  // namespace fuzz
