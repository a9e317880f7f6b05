#pragma once
// For runtimes of other languages: what they need to run their own functions as regions.
//
// A binding derives from RegionBody, runs the function itself the first time between the
// construction of a ForwardRun and its `finish`, and answers what remat asks of it. `checkpoint()`
// is such a binding for C++ functions. Example: tests/binding.cpp.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "remat/error.h"
#include "remat/export.h"
#include "remat/options.h"

namespace at {
struct RecordFunction;
}
namespace torch::autograd {
struct Edge;
}

namespace c10::impl {
struct PyInterpreter;
}
struct _object;

namespace remat {

struct ChainCost;
class Frame;
struct MeasureOptions;
struct MoveOptions;
class OpLogScope;
class Plan;
class TensorNames;
namespace detail {
class Scope;
class ScriptCall;
}  // namespace detail

/// Changes with everything in this header on which a compiled binding depends. The library calls a
/// body through its vtable, so a binding that was compiled against another number must not be used
/// with it.
inline constexpr int binding_abi = 4;
/// The number of the library that is loaded: compare it with `binding_abi` before anything else.
REMAT_API int loaded_binding_abi() noexcept;

/// Ends a recompute that has all it needs. Not a std::exception on purpose: the TorchScript
/// interpreter would catch it.
struct REMAT_API StopSignal{};

/// The function of a region with its arguments, as the graph keeps them: the tensors in the
/// arguments are taken out (they are saved as autograd saves a tensor) and put into a copy for each
/// run.
/// Lifetime: dies with the last saved tensor of the region, on any thread, or when ForwardRun's
/// constructor throws. Threads: several may call it at once, if several backwards recompute the
/// region.
class REMAT_API RegionBody {
 public:
  virtual ~RegionBody();
  /// Visits the tensors of the kept arguments, always in the same order, undefined ones too.
  virtual void visit_inputs(TensorVisitor visitor) = 0;
  /// Runs the function with `inputs`, which it may take, in the place of the tensors; drops the
  /// result. What it throws reaches the caller of backward, unless `stop` was called before. Only
  /// what derives from std::exception can pass the engine.
  virtual void run_again(std::vector<at::Tensor>& inputs) = 0;
  /// Returns whether anything may unwind the function before its end. If not, `stop` is not called
  /// while it runs again, and nothing that `raise` throws reaches it: it runs to its end each time,
  /// and what was found reaches backward after that. (An operator or a backward that the function
  /// calls may fail, as ever.)
  virtual bool can_be_stopped() const = 0;
  /// Ends the recompute in the way of the function's language; called where an operator saves a
  /// tensor, or where the function begins a backward, on the thread that called `run_again`. Must
  /// not return. Default: throws a StopSignal.
  virtual void stop();
  /// Asks for the same, in place of `stop`, where an operator saves a tensor and has next to
  /// nothing left to do: it may run to its end first, with what the function's language runs until
  /// then. Returns whether the function will end when the operator has returned; if not, `stop` is
  /// called. Default: false.
  virtual bool stop_soon();
  /// Asks for the same, in place of `stop`, where a region begins inside of the function whose
  /// maker looks at `ForwardRun::has_ended`: an exception costs as much as several regions. Returns
  /// whether that maker will end the function; if not, `stop` is called. Default: false.
  virtual bool stop_at_region();
  /// Raises an error about the region in the form of the function's language, inside the function
  /// or in backward. Must not return; on an engine's thread only what derives from std::exception
  /// passes. Default: throws `error` itself.
  virtual void raise(CheckpointError error);
  /// Returns the names that errors use for the tensors of the function's modules in another
  /// language; they live as long as the body. Default: null, no names.
  virtual const TensorNames* tensor_names() const;
};

/// Gets to know an argument: its number, from 0, where it lies, its size [bytes] and its type.
using OpaqueVisitor = c10::function_ref<void(int64_t number, const void* object,
                                             std::size_t num_bytes, const std::type_info& type)>;

/// Facts about a function that are not needed to run it. A binding may leave all of them out.
struct FunctionFacts {
  /// The module that the function is, or null: its training flags and buffers are in recomputes as
  /// in forward, and errors name its parameters and buffers.
  torch::nn::Module* module = nullptr;
  /// Address of the function object: with `debug`, a region looks there for addresses of the
  /// thread's stack.
  const void* object = nullptr;
  std::size_t num_bytes = 0;  ///< of the object
  /// Type after which the region is named where the options give no name, or the module's type: as
  /// written, without namespace and `Impl`. It is read when the name is asked for.
  const std::type_info* type = nullptr;
  /// The script module that the function is, or whose method: as `module`.
  const detail::ScriptCall* script = nullptr;
  /// Visits the kept arguments that are copied as they are, since no tensors are looked for in
  /// them: the number of each, where it lies, its size and type. Null if there are none.
  void (*visit_opaque)(const RegionBody& body, OpaqueVisitor visitor) = nullptr;
  /// A recompute ends with the last tensor needed even where a stop costs more than all that it
  /// skips.
  bool always_stops = false;
  bool sees_end = false;  ///< who makes the ForwardRun looks at its `has_ended`
};

/// Names that errors use for the tensors of modules of another language. A body may have such
/// names, and so may a `torch::nn::Module` that stands for such modules: then its names hold
/// instead of the paths of its own tensors.
class REMAT_API TensorNames {
 public:
  /// Gets to know a tensor and its name: "parameter 'conv1.weight' of UNetBlock".
  using Visitor = c10::function_ref<void(const std::string& name, const at::Tensor& tensor)>;
  virtual ~TensorNames();
  /// Visits the parameters and buffers, when an error looks for a name. Any thread. Throws nothing.
  virtual void visit_tensors(Visitor visitor) const = 0;
};

/// A `torch::nn::Module` that stands for modules of another language may be this, too. When the
/// function of a region has returned, the stand-in has the buffers that the modules have then.
class REMAT_API StandInMembers {
 public:
  virtual ~StandInMembers();
  /// Returns whether the function gave a buffer's name to another tensor, added a name or removed
  /// one. Its recomputes are then not stopped early, and the binding calls `compare_member` for
  /// each such name. Any thread. Throws nothing.
  virtual bool has_replaced_buffers() const = 0;
};

/// Returns whether the recompute that runs on this thread begins with what its forward left in
/// buffers and members of its modules; if not, with what they held when forward began. The binding
/// puts names and members in place to match.
REMAT_API bool recompute_starts_from_end() noexcept;
/// Compares what a recompute leaves under the name of a buffer with what forward left there;
/// undefined: nothing. The function of the recompute on this thread has ended. If they differ, the
/// recompute is tried once more from the other start, and refused in the end: `name` is what the
/// error calls it, such as "buffer 'table' of Rope". Throws nothing.
REMAT_API void compare_member(const std::string& name, const at::Tensor& in_forward,
                              const at::Tensor& now) noexcept;

/// The first run of a region: from saving its inputs to taking note of its result. One thread.
class REMAT_API ForwardRun {
 public:
  /// Saves the inputs of `body` and begins the region: what autograd saves from now on, on this
  /// thread, belongs to it. Throws `c10::ValueError` for options that exclude each other,
  /// CheckpointError for what cannot be a region, and what hooks around the region throw.
  ForwardRun(const CheckpointOptions& options, std::unique_ptr<RegionBody> body,
             const FunctionFacts& facts = {});
  /// Without `finish` the function has thrown: nothing stays behind (docs/concepts.md).
  ~ForwardRun();
  ForwardRun(const ForwardRun&) = delete;
  ForwardRun& operator=(const ForwardRun&) = delete;
  /// Only with `FunctionFacts::sees_end`: a recompute around has all it needs, and the body of its
  /// function has answered `stop_at_region`. Nothing has begun; the caller neither runs its
  /// function nor calls `finish`, but ends what is around it.
  bool has_ended() const { return frame_ == nullptr; }
  /// The function has returned; `visit_result` visits the tensors in its result. Call it once.
  void finish(c10::function_ref<void(TensorVisitor)> visit_result);

 private:
  void close();
  c10::intrusive_ptr<Frame> frame_;
  std::shared_ptr<detail::Scope> scope_;
  std::shared_ptr<void> user_scope_;
  std::shared_ptr<void> dispatch_mode_;  // operators come to the policy
  std::unique_ptr<OpLogScope> logging_;
  void (*visit_opaque_)(const RegionBody& body, OpaqueVisitor visitor);
  std::unique_ptr<at::RecordFunction> profiled_;  // if LibTorch's profiler looks
};

/// Returns whether a region may begin here: grad mode is on, and no DisableCheckpointGuard is open.
/// Otherwise the binding runs the function plainly.
REMAT_API bool opens_region();
/// And whether the level in the options, if they have one, asks for it.
REMAT_API bool opens_region(const CheckpointOptions& options);

/// Functions that are called around a wait for another thread, since that thread may need a lock
/// which this one holds (Python's, for one).
class REMAT_API WaitCallbacks {
 public:
  virtual ~WaitCallbacks();
  /// This thread is about to wait. Lets go of what others may need; throws nothing. Returns what
  /// takes it back when it dies, on the same thread.
  virtual std::shared_ptr<void> let_go() noexcept = 0;
};

/// Sets them for the process, null for none. Call it when no region is alive. They must outlive all
/// waits.
REMAT_API void set_wait_callbacks(WaitCallbacks* callbacks);

/// For a binding of Python: what other code of Python sees on the stack of dispatch modes while a
/// region with a policy runs. Operators come to the library all the same, natively, but Python's
/// modes, tensor classes that answer for their sizes, and operators of higher order meet `object`,
/// an instance of a TorchDispatchMode that runs what it is given. Without it they meet what is no
/// object of Python's, and may end the process. `object`: a reference, which is kept until the
/// process ends. `interpreter`: LibTorch's of Python, whose table of functions the library replaces
/// by one that forwards to it. Call it once, when no region is alive.
REMAT_API void set_dispatch_mode(_object* object, c10::impl::PyInterpreter* interpreter);

/// How many hooks a binding has in a table that LibTorch knows as one hook (Python's have one for
/// each tensor).
struct HookTable {
  const void* table;  ///< its address: which one it is
  int64_t size;       ///< the number of hooks in it
};

/// Hooks of a binding's language, so that a recompute does not register again what forward
/// registered.
class REMAT_API HookTables {
 public:
  virtual ~HookTables();
  /// The tables of a tensor and of its node, of which one at least has a hook. Throws nothing.
  virtual std::vector<HookTable> of(const at::Tensor& tensor) noexcept = 0;
  /// Takes off what came last, until they are no larger than they were; what is in tables that came
  /// since, all.
  /// Throws nothing.
  virtual void cut(const at::Tensor& tensor, const std::vector<HookTable>& then) noexcept = 0;
};

/// Sets them for the process, null for none. Call it when no region is alive. They must outlive all
/// recomputes.
REMAT_API void set_hook_tables(HookTables* tables);

/// Marks a backward that does not come through LibTorch's default engine object: the engine of
/// another language that the binding calls itself. Regions that are open on this thread see
/// backwards that come through the default engine by themselves; of others they must be told. One
/// thread.
class REMAT_API BackwardMark {
 public:
  /// The backward begins: from `roots` to `targets` (none: to all leaves). `accumulates`: into
  /// leaves, instead of returning gradients. Throws CheckpointError where a recompute could not
  /// repeat it, and what `stop` throws where a recompute has all it needs.
  BackwardMark(const std::vector<torch::autograd::Edge>& roots,
               const std::vector<torch::autograd::Edge>& targets, bool accumulates);
  /// Without `finish` it has thrown.
  ~BackwardMark();
  BackwardMark(const BackwardMark&) = delete;
  BackwardMark& operator=(const BackwardMark&) = delete;
  /// Notes that the backward has returned `gradients`; `given`: the gradients of its roots. Throws
  /// what `stop` throws where a recompute has all it needs and forward still waits in this
  /// backward. Call it once.
  void finish(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& given);

 private:
  bool has_ended_ = false;
};

/// Runs a stage as a region with these options, with a body of the binding. `stage`: its number,
/// from 0.
using StageRegion = std::function<at::Tensor(std::size_t stage, const CheckpointOptions& options,
                                             at::Tensor input)>;
/// Does what `measure` does, with stages that are functions of the binding's language: where one is
/// measured under a policy, `run_region` runs it. (`checkpoint()` would end its recompute by an
/// exception of C++.)
REMAT_API ChainCost measure_stages(const std::vector<Stage>& stages, const at::Tensor& sample,
                                   const MeasureOptions& options, const StageRegion& run_region);

/// Runs an item of a plan that is in no region: a stage, or a region with all that it runs. `item`:
/// its number, from 0.
using ItemRun = std::function<at::Tensor(std::size_t item, at::Tensor input)>;
/// Does what `run` does around all regions, with items that the binding runs: each on what the one
/// before returned, and what the plan moves of what they save waits where `moving` says. Keeps
/// nothing of `run_item`.
/// Throws what an item throws; `c10::ValueError` as `run`, if the plan moves and there is no place
/// for that.
REMAT_API at::Tensor run_items(const Plan& plan, at::Tensor input, const MoveOptions& moving,
                               const ItemRun& run_item);

}  // namespace remat
