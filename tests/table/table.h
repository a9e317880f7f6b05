#pragma once
// The parts of the table: functions, configurations, modes, and the exceptions to their agreement.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace table {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Body = std::function<Tensors(const Tensors&)>;

/// A function's tensors and bodies for one run, made anew for each run after seeding the default
/// generator.
struct Made {
  Tensors args;                                 ///< leaves, and tensors without grad
  Body body;                                    ///< runs plainly, or in a region
  Tensors params{};                             ///< leaves that the body captures
  Tensors buffers{};                            ///< other captured tensors, which it may write
  Body prepare{};                               ///< makes the body's arguments from `args`
  std::function<void(const Tensors&)> after{};  ///< between forward and backward, on the arguments;
                                                ///< not plainly with `replaces_data`: see there
};

/// Properties of functions that exceptions of configurations and modes ask for.
enum Trait : unsigned {
  draws = 1,               ///< random numbers
  reads_twice = 2,         ///< its node reads a saved tensor twice in one backward
  writes_args = 4,         ///< in place, to its arguments
  writes_kept = 8,         ///< in place, to the result of an operator, perhaps inside a composite
  is_wide = 32,            ///< computes with numbers that do not fit float
  replaces_data = 64,      ///< gives an argument other data, after forward
  has_two_formulas = 128,  ///< LibTorch's gradient is another formula under a dispatch mode
  raises_changed = 16,     ///< plainly in backward, since a saved tensor was changed in place
};

/// A reason why a cell of the table need not agree.
struct Exception {
  enum class Kind {
    Skipped,    ///< the cell is not run
    MayRaise,   ///< the checkpointed run may raise `error`, in words of its first line or below
    NotRaised,  ///< where plain raises in backward, the values at the save may be used instead
    Versions,   ///< versions of captured tensors may differ
  };
  Kind kind;
  std::string where;  ///< pattern of fnmatch(3), with FNM_EXTMATCH: "configuration/mode"
  std::string reason;
  std::string error{};
  unsigned traits = 0;         ///< only for functions with one of these, if any
  mutable int64_t cells = 0;   ///< in this run, to which it applied
  mutable int64_t needed = 0;  ///< of these, that would have disagreed without it
};

struct Function {
  std::string name;
  std::function<Made()> make;
  unsigned traits = 0;
  std::vector<Exception> exceptions{};

  Function& with(unsigned more) {
    traits |= more;
    return *this;
  }
  Function& except(Exception::Kind kind, std::string where, std::string reason,
                   std::string error = {}) {
    exceptions.push_back({kind, std::move(where), std::move(reason), std::move(error)});
    return *this;
  }
};

/// Runs a body on arguments in some way.
using Runner = std::function<Tensors(const Body&, const Tensors&)>;

/// Runs a body in a region without options.
Tensors plain_region(const Body& body, const Tensors& args);
/// Applies `f` to each dense tensor of real or complex numbers, and returns the others unchanged.
Tensors each_float(Tensors tensors, const std::function<Tensor(const Tensor&)>& f);

struct Configuration {
  std::string name;
  Runner checkpointed;
  /// The reference run by LibTorch alone; empty: the body itself. `plain_name` distinguishes its
  /// kinds.
  Runner plain{};
  std::string plain_name{};
  /// Makes an object that lives from before forward until after the last backward.
  std::function<std::shared_ptr<void>(uint64_t seed)> during{};
  bool opens_frames = true;
  bool leaves_frames = false;  ///< the body may open regions of its own
};

class Run;

struct Mode {
  std::string name;
  std::function<void(Run&)> drive;   ///< the steps after forward
  std::function<Body(Body)> wrap{};  ///< makes the region's function from the body
};

std::vector<Function>& functions();
const std::vector<Configuration>& configurations();
/// Returns configurations that are wrong on purpose: the comparison must detect each.
const std::vector<Configuration>& broken_configurations();
const std::vector<Mode>& modes();
/// Returns exceptions that belong to configurations and modes.
std::vector<Exception>& shared_exceptions();

void add_arguments(std::vector<Function>& table);
void add_custom(std::vector<Function>& table);
void add_views(std::vector<Function>& table);
void add_layers(std::vector<Function>& table);
void add_algebra(std::vector<Function>& table);
void add_prepared(std::vector<Function>& table);
void add_modules(std::vector<Function>& table);

struct Cell {
  const Function& function;
  const Configuration& configuration;
  const Mode& mode;
  uint64_t seed;
  std::string name() const { return function.name + "/" + configuration.name + "/" + mode.name; }
};

/// Returns the exceptions that apply to a cell.
std::vector<const Exception*> exceptions_of(const Cell& cell);
bool is_skipped(const Cell& cell);
/// Runs a cell both ways. Returns the differences as readable text; empty: the runs agree.
std::string disagreement(const Cell& cell);

/// Reports a fault besides wrong numbers; any thread.
void report_fault(std::string what);

// ---- the language of functions

/// Returns a leaf of standard normal numbers that requires grad.
Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);
/// Returns a tensor of standard normal numbers without grad.
Tensor constant(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);
/// Returns whole numbers in [0, n).
Tensor whole(at::IntArrayRef sizes, int64_t n);

inline Tensors listed(Tensor value) { return {std::move(value)}; }
inline Tensors listed(Tensors values) { return values; }

/// Returns the body of a function that returns one tensor or several.
template <class F>
Body body_of(F f) {
  return [f](const Tensors& args) { return listed(f(args)); };
}

using Sizes = std::vector<std::vector<int64_t>>;

/// Adds a function of leaves of these sizes, which captures nothing.
template <class F>
Function& add(std::vector<Function>& table, std::string name, Sizes sizes, F f,
              at::ScalarType dtype = at::kFloat) {
  table.push_back({std::move(name), [sizes = std::move(sizes), f, dtype] {
                     Made made{{}, body_of(f)};
                     for (const auto& each : sizes) made.args.push_back(leaf(each, dtype));
                     return made;
                   }});
  return table.back();
}

/// Adds a function that makes its tensors itself.
template <std::invocable Make>
Function& add(std::vector<Function>& table, std::string name, Make make) {
  table.push_back({std::move(name), make});
  return table.back();
}

/// Adds a module, made by its holder: `call(module, args)`.
template <class MakeModule, class F>
Function& add_module(std::vector<Function>& table, std::string name, Sizes sizes,
                     MakeModule make_module, F call) {
  return add(table, std::move(name), [sizes = std::move(sizes), make_module, call] {
    const auto module = make_module().ptr();
    Made made{{}, body_of([module, call](const Tensors& args) { return call(*module, args); })};
    for (const auto& each : sizes) made.args.push_back(leaf(each));
    made.params = module->parameters();
    made.buffers = module->buffers();
    return made;
  });
}
template <class MakeModule>
Function& add_module(std::vector<Function>& table, std::string name, Sizes sizes,
                     MakeModule make_module) {
  return add_module(table, std::move(name), std::move(sizes), make_module,
                    [](auto& module, const Tensors& args) { return module.forward(args[0]); });
}

}  // namespace table
