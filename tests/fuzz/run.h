#pragma once
// Runs one program, plainly or checkpointed, and records its visible results.

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "remat/remat.h"
#include "tests/fuzz/operators.h"
#include "tests/fuzz/program.h"

namespace fuzz {

enum class Mode {
  Plain,  ///< inside DisableCheckpointGuard
  Checkpointed,
  Undone,        ///< plain, and every saved tensor is copied when it is saved: the gradients with
                 ///< later changes in place undone
  UndoneInside,  ///< likewise for tensors saved in regions; the rest of the program is plain
  Unchanged      ///< plain, without changes of the regions' tensors between forward and backward
};

/// One visible result: its metadata as text, and its bytes.
struct Entry {
  std::string label, meta, bytes;
  bool operator==(const Entry&) const = default;
};

/// Changes up to here, in place unless said otherwise.
struct Changes {
  bool may_raise = false;          ///< of something that a region depends on
  bool unchecked = false;          ///< the same, if only DeterminismCheck::Values detects it
  bool inside = false;             ///< by a region: of its arguments
  bool written = false;            ///< by a Write: of an argument, or of a value made of it
  bool registered = false;         ///< by a region: of hooks or requires_grad of its arguments
  bool replaced_argument = false;  ///< of the storage of a leaf that regions got as an argument
  bool replaced_capture = false;   ///< of the storage of a leaf that regions captured
};

/// The forward, or one step.
struct Stage {
  std::string label;
  bool raised = false;
  std::string error{}, error_type{};
  std::vector<Entry> entries{};
  Changes changes{};
};

struct Record {
  std::vector<Stage> stages;
  int64_t held_bytes = 0;  ///< after forward
  Changes changes;
  std::vector<std::string> faults;  ///< leftovers
  int64_t leaked_bytes = 0;
};

Record run(const Program& program, Mode mode);

struct Finding {
  std::string kind;  ///< equal for the same fault in a smaller program
  std::string text;
};
std::optional<Finding> check(const Program& program);

/// Thrown by a fuse.
struct FuseBlown : std::runtime_error {
  FuseBlown() : std::runtime_error("the fuse has blown") {}
};
/// Thrown by a Throw statement.
struct UserError : std::runtime_error {
  UserError() : std::runtime_error("thrown by the program") {}
};

// ---- inside a run ------------------------------------------------------------------------------

/// The origin of a storage, as far as changes in place depend on it; shared by all its aliases.
struct Origin {
  bool foreign = false;      ///< an argument or captured variable of the region that runs
  bool leaf = false;         ///< never changed in place by the program
  bool captured = false;     ///< of an argument: regions may see it as a capture, too
  bool as_argument = false;  ///< given to a region that was run
  bool as_capture = false;
};
struct Value {
  Tensor tensor;
  std::shared_ptr<Origin> origin;
};
using Environment = std::map<int, Value>;

/// The number of state guards around a statement; a region's recomputes have those of its forward.
struct GuardsAround {
  std::array<int, 2> numbers{}, generators{};
  int observers = 0;
};

/// A module of a program; defined in modules.cpp.
class Stateful;

/// Sets a value for its lifetime.
template <class T>
class Instead {
 public:
  Instead(T& place, T value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~Instead() { place_ = std::move(before_); }
  Instead(const Instead&) = delete;
  Instead& operator=(const Instead&) = delete;

 private:
  T& place_;
  T before_;
};

class Interpreter {
 public:
  Interpreter(const Program& program, Mode mode, Record& record);
  ~Interpreter();

  void run_forward();
  void run_steps();

 private:
  void run_step(const Step& step);
  void run_all(Stage& stage);
  Tensors make_leaves();
  /// Returns the value that an operand names. Notes a leaf that a region captures in this way.
  const Value& see(const Environment& values, int id);
  void run_block(const Block& block, Environment& values);
  void run_operator(const Statement& s, Environment& values);
  void run_region(const Statement& s, Environment& values);
  void run_wrap(const Statement& s, Environment& values);
  void run_offload(const Statement& s, Environment& values);
  void run_toggle(const Statement& s, Environment& values);
  void run_look(const Statement& s, Environment& values);
  void run_register(const Statement& s, Environment& values);
  void run_copy(const Statement& s, Environment& values);
  void make_modules();
  void run_call(const Statement& s, Environment& values);
  /// Collects the modules that the function of a region calls without regions of their own.
  void collect_modules(const Block& block,
                       std::vector<std::shared_ptr<torch::nn::Module>>& found) const;
  void record_modules(Stage& stage);
  void run_state_guard(const Statement& s, Environment& values);
  remat::RecomputeObserver observer();
  void run_stretch(const Statement& s, Environment& values);
  void run_read(const Statement& s, Environment& values);
  void run_inner_grad(const Statement& s, Environment& values);
  /// Returns operand 0 of an operator that changes it in place: itself, or a copy if it may not
  /// change.
  Value changeable(const Value& value, Dice& dice);
  /// Returns operand 0 of a Write: itself if it is an argument that may change.
  Value writable(const Value& value, Dice& dice);
  /// Runs the body of a region. `uses` gets the uses of its results in inner regions.
  Tensors run_body(const Statement& s, const Environment& captured, const Tensors& args,
                   const std::vector<Origin>& origins, std::vector<Origin>& uses);
  remat::CheckpointOptions options(const RegionSpec& spec);
  std::unique_ptr<remat::SavedTensorHooksGuard> hooks(uint64_t salt);
  /// Returns hooks that copy saved tensors, if the mode is `mode`.
  std::unique_ptr<remat::SavedTensorHooksGuard> copies_in(Mode mode);
  void differentiate(const Step& step, Stage& stage);
  void change(const Step& step);
  void replace(const Step& step);
  void record_tensor(Stage& stage, const std::string& label, const Tensor& tensor);
  void drop_retained_gradients();
  void record_gradient(Stage& stage, const std::string& label, const Tensor& gradient);
  void record_state(Stage& stage);

  const Program& program_;
  const Contents contents_;
  const Mode mode_;
  Record& record_;
  Environment values_;  // the outermost block's
  std::vector<Value> leaves_;
  std::vector<std::shared_ptr<Stateful>> modules_;
  int64_t hook_calls_ = 0, scopes_alive_ = 0;
  int regions_around_ = 0;  // the statement that runs
  int64_t fuse_ = -1, fuses_passed_ = 0;
  std::array<std::shared_ptr<Numbers>, 2> numbers_;
  std::array<at::Generator, 2> generators_;
  GuardsAround guards_;
  int64_t observed_now_ = 0;        // recomputes that observers were told of
  int64_t bytes_before_steps_ = 0;  // of recomputed tensors alive
};

/// Runs remat::checkpoint(...) of `body`, with the arguments and the result in the form of
/// `packing`. `body` must be copyable: std::function<Tensors(Tensors)>.
using Body = std::function<Tensors(Tensors)>;
Tensors call_region(Packing packing, bool checkpointed_form,
                    const remat::CheckpointOptions& options, const Body& body, const Tensors& args);

remat::Policy policy_of(const PolicySpec& spec);
/// Returns the prefetch depth of moved values: none, one, two or all.
int64_t prefetch_depth_of(uint64_t salt);

/// Runs `body` and notes its error in `stage`.
void record_errors(Stage& stage, const std::function<void()>& body);

/// Reads the floating-point tensor that the node of `a` saved. Undefined if the node is not one of
/// the known ones.
Tensor saved_of(const Tensor& a);

const Value& look_up(const Environment& values, int id);

bool overlaps_itself(const Tensor& a);

/// Returns whether the tensor is a leaf that requires grad. A view of a tensor changed in place is
/// no leaf, but reports so only after a first call for its node, which makes the node. A region
/// makes that call for its arguments; plain code need not.
bool is_leaf_with_grad(const Tensor& a);

}  // namespace fuzz
