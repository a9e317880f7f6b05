#pragma once
// A random program as data, which the fuzzer generates, prints, shrinks and runs.
//
// Values have numbers, and an operand names a number. If no such value exists (its statement was
// removed, or a region does not see it), the operand means the nearest lower one that exists. So
// every program is valid, and stays valid when statements are removed.

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace fuzz {

/// A source of decisions that are the same on every platform and in every run.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  uint64_t bits() { return engine_(); }
  /// Returns a number in [0, n).
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool percent(int64_t p) { return below(100) < p; }

 private:
  std::mt19937_64 engine_;
};

enum class LeafKind { Input, Parameter, Buffer };

/// A tensor made before the program starts; every region sees it as a captured variable.
struct Leaf {
  LeafKind kind = LeafKind::Input;
  std::vector<int64_t> sizes;
  bool is_double = false;
  bool has_grad = false;  ///< from before the program starts
};

enum class Kind {
  Operator,  ///< one entry of the operator table
  Region,    ///< remat::checkpoint of `block`
  NoGrad,    ///< the wraps: `block` runs in a scope
  WithGrad,
  EarlyStop,
  NoEarlyStop,
  Debug,
  Hooks,  ///< a SavedTensorHooksGuard; `salt` chooses its functions
  Autocast,
  Provider,   ///< a StateProviderGuard; the lowest bit of `salt` chooses the state
  Generator,  ///< a GeneratorGuard, likewise
  Observer,   ///< a RecomputeObserverGuard
  Catch,      ///< try { block } catch (...) {}
  InnerGrad,  ///< autograd::grad of operand 0 with respect to operand 1, here
  Read,       ///< reads the saved tensor of operand 0's node here; see saved_of
  Name,       ///< checkpoint_name of operand 0; `salt` chooses the name
  Pin,        ///< pin of operand 0
  Stretch,    ///< save_region of `block`, which also sees all values around it
  Offload,    ///< a wrap: a guard that moves saved tensors; `salt` chooses it
  Toggle,     ///< a wrap: operand 0, a leaf, does not require grad inside
  Copy,       ///< operand 0 in a storage of its own; with an odd `salt` without its history
  Write,      ///< an operator that changes operand 0, here an argument of the region
  Look,       ///< operand 1, changed by properties of operand 0 besides its values; see look_of
  Register,   ///< retain_grad of operand 0, or a hook on it; see hook_of
  Call,       ///< module `op` of operand 0, as a region unless it is inlined; `salt` chooses how
  Throw,
  Fuse  ///< throws in a recompute when a step has armed it
};

/// A module with state, made before the program starts.
struct ModuleSpec {
  enum class Form {
    Plain,         ///< the module itself
    Checkpointed,  ///< remat::Checkpointed
    Applied,       ///< the element of a Sequential, chosen by apply_checkpointing
    Count
  };
  Form form = Form::Plain;
  std::vector<int> states;  ///< remat::testing::State
  uint64_t salt = 0;        ///< decides their details, and how `inner` is called
  int weight = 0;           ///< the leaf that is its parameter
  int inner = -1;           ///< an earlier module that it calls
};

/// The form of a region's arguments and results.
enum class Packing {
  Vector,
  Separate,
  Map,
  UnorderedMap,
  OptionalAndTuple,
  Struct,
  List,
  Variant,
  VectorWithUndefined,
  Count
};

/// The treatment of a region's operators.
struct PolicySpec {
  enum class Kind {
    None,
    Everything,
    Operators,         ///< save_ops of some operators
    OffloadOperators,  ///< offload_ops
    Function,          ///< of the operator's name and the sizes of its arguments
    Names,             ///< save_names
    AllButNames,
    OffloadNames,
    Union,  ///< of operators and names
    Count   ///< of the operators that the seed draws
  };
  Kind kind = Kind::None;
  uint64_t salt = 0;
  bool allows_mutation = false, through_hooks = false, asks_again = false;
};
constexpr int num_names = 4;

/// The property that a Look reads.
enum class Look { Grad, IsLeaf, RequiresGrad, RetainsGrad, OutputNr, SameAsLeaf, Count };
/// The hook that a Register registers.
enum class Hook { RetainGrad, Double, AddOne, Count };

struct RegionSpec {
  std::vector<std::pair<int, int>> args;     ///< outer value, inner value
  std::vector<int> captures;                 ///< outer values that the function captures
  std::vector<std::pair<int, int>> results;  ///< inner value, outer value
  Packing packing = Packing::Vector;
  bool checkpointed_form = false;  ///< remat::checkpointed(fn)(args...)
  bool inlined = false;            ///< shrunk: called without a checkpoint
  bool named = false;
  bool preserve_rng = true;
  bool early_stop = true;
  bool debug = false;
  bool scopes = false;  ///< with a context_fn
  bool strict = false;  ///< strict_unpack
  bool fingerprint = false;
  bool copies = false;  ///< InputMode::CopyOnWrite
  bool moves_inputs = false;
  int determinism = 1;  ///< remat::DeterminismCheck
  PolicySpec policy{};
};

struct Statement {
  Kind kind = Kind::Operator;
  int op = 0;             ///< index in operators()
  std::vector<int> args;  ///< operands
  int out = 0;            ///< the first of `outs` value numbers
  int outs = 0;
  uint64_t salt = 0;  ///< decides an operator's details (dimensions, constants)
  RegionSpec region;
  std::vector<Statement> block;
};
using Block = std::vector<Statement>;

inline Look look_of(const Statement& s) {
  return static_cast<Look>(s.salt % static_cast<uint64_t>(Look::Count));
}
inline Hook hook_of(const Statement& s) {
  return static_cast<Hook>(s.salt % static_cast<uint64_t>(Hook::Count));
}

/// One use of the outputs, or a change between two uses.
struct Step {
  enum class Kind {
    Backward,
    Grad,
    Mutate,   ///< a value is changed in place
    Replace,  ///< a leaf gets another storage, or a larger one
    Again     ///< the whole block runs once more; its values take the place of the old ones
  };
  /// The way in which a Replace replaces.
  enum class Means { SetData, SetDataTransposed, Set, Resize, Count };
  Kind kind = Kind::Grad;
  std::vector<int> outputs;  ///< values of the outermost block
  std::vector<int> inputs;   ///< leaves; empty: all that require grad
  bool retain = true;
  int order = 1;  ///< above 1: create_graph, and the gradient of the gradients
  bool in_no_grad = false;
  bool in_thread = false;
  bool hooks = false;          ///< user hooks around the call
  int64_t fuse = -1;           ///< the checkpointed run throws at this fuse of its recomputes
  int64_t out_of_memory = -1;  ///< the checkpointed run may allocate this many bytes more
  int target = 0;              ///< Mutate: the value; Replace: the leaf
  uint64_t salt = 0;
};

inline Step::Means means_of(const Step& step) {
  return static_cast<Step::Means>(step.salt % static_cast<uint64_t>(Step::Means::Count));
}

/// The scope in which the steps share their recomputes.
enum class Sharing { None, Group, Cache, SmallCache };

struct Program {
  uint64_t seed = 0;
  std::vector<Leaf> leaves;
  std::vector<ModuleSpec> modules;
  Block block;
  std::vector<Step> steps;
  bool all_values = false;   ///< every region compares values
  bool large = false;        ///< tensors of some thousand elements, so that stops really happen
  bool drop_values = false;  ///< only outputs are alive at the steps
  Sharing sharing = Sharing::None;
};

/// The contents of a block and its inner blocks.
struct Contents {
  bool random = false, inplace = false, reads_twice = false, inner_grad = false, hooks = false,
       no_grad = false, catches = false, backward_in_hook = false, writes_late = false,
       captures = false, writes_inside = false, writes_arguments = false, looks = false,
       keeping_hooks = false,   ///< hooks that keep the tensor itself: see Interpreter::hooks
      policies = false,         ///< in which operators are seen
      keeps_unchanged = false,  ///< values that must not change: by a policy, pin or save_region
      stretches = false;
  int regions = 0, statements = 0, depth = 0;
};
Contents contents(const Block& block);

/// Contents of programs beside the usual ones.
struct Topics {
  bool selective = false;  ///< policies, names, pin and save_region
  /// Functions use their arguments for more than computing: they write to them, look at properties
  /// besides the values, and register hooks on them. Arguments get other storages between steps.
  bool arguments = false;
  /// Regions keep copies of their arguments.
  bool copies = false;
  /// Functions wait for recomputes in forward (they take gradients, and read saved tensors of
  /// nodes), and then write to their arguments.
  bool waits = false;
  bool moves = false;  ///< most hooks are guards that move saved tensors; regions move their inputs
  bool modules = false;  ///< modules whose forward writes to buffers
};
Program generate(uint64_t seed, Topics topics);
std::string to_text(const Program& program);
/// Returns every program that is one step smaller, largest steps first.
std::vector<Program> smaller(const Program& program);

}  // namespace fuzz
