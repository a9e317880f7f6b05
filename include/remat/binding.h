#pragma once
// The interface with which runtimes of other languages run their own functions as regions.
//
// A binding derives from RegionBody, runs the function itself the first time between the
// construction of a ForwardRun and its `finish`, and implements the functions that remat calls.
// `checkpoint()` is such a binding for C++ functions. Example: tests/binding.cpp.

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
inline constexpr int binding_abi = 5;
/// Returns the number of the loaded library; compare it with `binding_abi` before any other call.
REMAT_API int loaded_binding_abi() noexcept;

/// Ends a recompute that has produced every tensor it needs. Deliberately no std::exception: the
/// TorchScript interpreter would catch that.
struct REMAT_API StopSignal{};

/// The function of a region with its arguments, as the graph keeps them. The tensors in the
/// arguments are taken out and saved as autograd saves a tensor; each run gets a copy of the
/// arguments with the tensors put back.
/// Lifetime: dies with the last saved tensor of the region, on any thread, or when ForwardRun's
/// constructor throws. Threads: several threads may call it at once, if several backwards recompute
/// the region.
class REMAT_API RegionBody {
 public:
  virtual ~RegionBody();
  /// Visits the tensors of the kept arguments, undefined ones included, always in the same order.
  virtual void visit_inputs(TensorVisitor visitor) = 0;
  /// Runs the function with `inputs` in the places of the tensors and drops the result. It may move
  /// from `inputs`. Exceptions reach the caller of backward, unless `stop` was called before. Only
  /// exceptions derived from std::exception can pass the engine.
  virtual void run_again(std::vector<at::Tensor>& inputs) = 0;
  /// Returns whether an exception may unwind the function before its end. If not, `stop` is not
  /// called while the function runs again, and no exception of `raise` reaches it. It then runs to
  /// its end each time, and backward gets the error afterwards. (An operator or a backward that the
  /// function calls may fail, as ever.)
  virtual bool can_be_stopped() const = 0;
  /// Ends the recompute in the way of the function's language. Called on the thread of `run_again`,
  /// where an operator saves a tensor or where the function begins a backward. Must not return.
  /// Default: throws a StopSignal.
  virtual void stop();
  /// Called instead of `stop` where an operator saves a tensor and has almost no work left. The
  /// operator may run to its end first, together with code that the function's language runs until
  /// then. Returns whether the function will end when the operator has returned; if not, `stop` is
  /// called. Default: false.
  virtual bool stop_soon();
  /// Called instead of `stop` where a region begins inside the function and the caller that makes
  /// it checks `ForwardRun::has_ended`: an exception costs as much as several regions. Returns
  /// whether that caller will end the function; if not, `stop` is called. Default: false.
  virtual bool stop_at_region();
  /// Raises an error about the region in the form of the function's language, inside the function
  /// or in backward. Must not return. On an engine's thread only exceptions derived from
  /// std::exception can pass. Default: throws `error` itself.
  virtual void raise(CheckpointError error);
  /// Returns the names that errors use for the tensors of the function's modules in another
  /// language; they live as long as the body. Default: null, no names.
  virtual const TensorNames* tensor_names() const;
};

/// Receives an argument: its number (from 0), address, size [bytes] and type.
using OpaqueVisitor = c10::function_ref<void(int64_t number, const void* object,
                                             std::size_t num_bytes, const std::type_info& type)>;

/// Facts about a function that are not needed to run it. A binding may leave all of them out.
struct FunctionFacts {
  /// The function itself, if it is a module; otherwise null. Recomputes see its training flags and
  /// buffers as forward did, and errors name its parameters and buffers.
  torch::nn::Module* module = nullptr;
  /// Address of the function object; with `debug`, a region searches it for addresses of the
  /// thread's stack.
  const void* object = nullptr;
  std::size_t num_bytes = 0;  ///< of the object
  /// Type that names the region if neither the options nor a module does: as written, without
  /// namespace and `Impl`. It is read when the name is needed.
  const std::type_info* type = nullptr;
  /// The script module, if the function is one or is a method of one; treated as `module`.
  const detail::ScriptCall* script = nullptr;
  /// Visits the kept arguments that are copied as they are, because remat does not search them for
  /// tensors. Passes number, address, size [bytes] and type of each. Null if there are no such
  /// arguments.
  void (*visit_opaque)(const RegionBody& body, OpaqueVisitor visitor) = nullptr;
  /// True if a recompute ends with the last needed tensor even where a stop costs more time than it
  /// saves.
  bool always_stops = false;
  bool sees_end = false;  ///< the caller that makes the ForwardRun checks `has_ended`
};

/// Names that errors use for the tensors of modules of another language. A body may have such
/// names. A `torch::nn::Module` that stands for such modules may have them too; they then replace
/// the paths of its own tensors.
class REMAT_API TensorNames {
 public:
  /// Receives a tensor and its name: "parameter 'conv1.weight' of UNetBlock".
  using Visitor = c10::function_ref<void(const std::string& name, const at::Tensor& tensor)>;
  virtual ~TensorNames();
  /// Visits the parameters and buffers when an error needs a name. Any thread. Throws nothing.
  virtual void visit_tensors(Visitor visitor) const = 0;
};

/// An optional base of a `torch::nn::Module` that stands for modules of another language. When the
/// function of a region has returned, the stand-in has the buffers that the modules have then.
class REMAT_API StandInMembers {
 public:
  virtual ~StandInMembers();
  /// Returns whether the function gave a buffer's name to another tensor, added a name or removed
  /// one. Its recomputes are then not stopped early, and the binding calls `compare_member` for
  /// each such name. Any thread. Throws nothing.
  virtual bool has_replaced_buffers() const = 0;
};

/// Returns whether the recompute on this thread begins with the buffers and members that forward
/// left in its modules; if not, it begins with those from the start of forward. The binding puts
/// names and members in place to match.
REMAT_API bool recompute_starts_from_end() noexcept;
/// Compares the tensor that a recompute leaves under a buffer's name with the one that forward left
/// there. An undefined tensor means that there is no buffer. Call it when the function of the
/// recompute on this thread has ended. If the tensors differ, the recompute is tried once more from
/// the other start, and then refused. Errors use `name`, such as "buffer 'table' of Rope". Throws
/// nothing.
REMAT_API void compare_member(const std::string& name, const at::Tensor& in_forward,
                              const at::Tensor& now) noexcept;

/// The first run of a region: from the save of its inputs to the record of its result. One thread.
class REMAT_API ForwardRun {
 public:
  /// Saves the inputs of `body` and begins the region: later autograd saves on this thread belong
  /// to it. Inside a functorch transform, or if an argument carries a tangent, the run is plain: it
  /// only keeps `body`, and `finish` records nothing. Throws `c10::ValueError` for options that
  /// exclude each other and CheckpointError for calls that cannot be a region. Exceptions of hooks
  /// around the region pass through.
  ForwardRun(const CheckpointOptions& options, std::unique_ptr<RegionBody> body,
             const FunctionFacts& facts = {});
  /// Closes the region. Without a call of `finish` the function has thrown: nothing stays behind
  /// (docs/concepts.md).
  ~ForwardRun();
  ForwardRun(const ForwardRun&) = delete;
  ForwardRun& operator=(const ForwardRun&) = delete;
  /// Returns whether an enclosing recompute has every tensor it needs, and the body of its function
  /// has accepted `stop_at_region`. Only with `FunctionFacts::sees_end`. The region has then not
  /// begun: the caller neither runs its function nor calls `finish`, but ends the enclosing
  /// function.
  bool has_ended() const { return frame_ == nullptr && plain_ == nullptr; }
  /// Ends the run when the function has returned; `visit_result` visits the tensors in its result.
  /// Call it once.
  void finish(c10::function_ref<void(TensorVisitor)> visit_result);

 private:
  void close();
  c10::intrusive_ptr<Frame> frame_;
  std::unique_ptr<RegionBody> plain_;  // of a run that opens no region
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
/// Does the same, and also checks the level in the options, if there is one.
REMAT_API bool opens_region(const CheckpointOptions& options);

/// Functions that are called around a wait for another thread, which may need a lock that this
/// thread holds (such as Python's).
class REMAT_API WaitCallbacks {
 public:
  virtual ~WaitCallbacks();
  /// Releases the locks that other threads may need; called before a wait. Returns an object whose
  /// destructor takes the locks back, on the same thread. Throws nothing.
  virtual std::shared_ptr<void> let_go() noexcept = 0;
};

/// Sets the callbacks of the process; null removes them. Call it when no region is alive. They must
/// outlive all waits.
REMAT_API void set_wait_callbacks(WaitCallbacks* callbacks);

/// Sets the object that Python code sees on the stack of dispatch modes while a region with a
/// policy runs; for a binding of Python. The library intercepts operators natively in any case.
/// Python's modes, tensor classes that report their own sizes, and operators of higher order see
/// `object`, an instance of a TorchDispatchMode that runs every operator unchanged. Without
/// `object` they would see an entry that is no Python object, which may end the process. `object`:
/// a reference that is kept until the process ends. `interpreter`: LibTorch's interpreter of
/// Python; the library replaces its table of functions by one that forwards to it. Call the
/// function once, when no region is alive.
REMAT_API void set_dispatch_mode(_object* object, c10::impl::PyInterpreter* interpreter);

/// The size of a binding's table of hooks, which LibTorch treats as one hook (Python has one table
/// for each tensor).
struct HookTable {
  const void* table;  ///< the table's address, which identifies it
  int64_t size;       ///< the number of hooks in it
};

/// Hooks of a binding's language, so that a recompute does not register again what forward
/// registered.
class REMAT_API HookTables {
 public:
  virtual ~HookTables();
  /// Returns the tables of a tensor and of its node; at least one of them has a hook. Throws
  /// nothing.
  virtual std::vector<HookTable> of(const at::Tensor& tensor) noexcept = 0;
  /// Removes the newest hooks until each table has its old size, and all hooks of tables that are
  /// not in `then`.
  /// Throws nothing.
  virtual void cut(const at::Tensor& tensor, const std::vector<HookTable>& then) noexcept = 0;
};

/// Sets the tables of the process; null removes them. Call it when no region is alive. They must
/// outlive all recomputes.
REMAT_API void set_hook_tables(HookTables* tables);

/// Marks a backward that does not come through LibTorch's default engine object: the engine of
/// another language that the binding calls itself. Regions that are open on this thread notice
/// backwards of the default engine by themselves; every other backward needs a mark. One thread.
class REMAT_API BackwardMark {
 public:
  /// Begins the backward from `roots` to `targets` (empty: to all leaves). `accumulates`: gradients
  /// are added to leaves instead of being returned. Throws CheckpointError if no recompute could
  /// repeat the backward, and the exception of `stop` if a recompute has every tensor it needs.
  BackwardMark(const std::vector<torch::autograd::Edge>& roots,
               const std::vector<torch::autograd::Edge>& targets, bool accumulates);
  /// Ends the mark; without a call of `finish` the backward has thrown.
  ~BackwardMark();
  BackwardMark(const BackwardMark&) = delete;
  BackwardMark& operator=(const BackwardMark&) = delete;
  /// Records that the backward has returned `gradients`; `given`: the gradients of its roots.
  /// Throws the exception of `stop` if a recompute has every tensor it needs and forward is still
  /// inside this backward. Call it once.
  void finish(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& given);

 private:
  bool has_ended_ = false;
};

/// Runs a stage as a region with these options and a body of the binding. `stage`: number of the
/// stage, from 0.
using StageRegion = std::function<at::Tensor(std::size_t stage, const CheckpointOptions& options,
                                             at::Tensor input)>;
/// Does what `measure` does, for stages in the binding's language: `run_region` runs a stage that
/// is measured under a policy. (`checkpoint()` would end its recompute by a C++ exception.)
REMAT_API ChainCost measure_stages(const std::vector<Stage>& stages, const at::Tensor& sample,
                                   const MeasureOptions& options, const StageRegion& run_region);

/// Runs an item of a plan: a stage outside of regions, or an outermost region with all its stages.
/// `item`: number of the item, from 0.
using ItemRun = std::function<at::Tensor(std::size_t item, at::Tensor input)>;
/// Does the work of `run` outside of all regions, for items that the binding runs. Each item gets
/// the result of the one before. Saved tensors that the plan moves wait at the place that `moving`
/// names. Keeps no reference to `run_item`.
/// Throws the exceptions of items; `c10::ValueError` as `run`, if the plan moves tensors and there
/// is no place for them.
REMAT_API at::Tensor run_items(const Plan& plan, at::Tensor input, const MoveOptions& moving,
                               const ItemRun& run_item);

}  // namespace remat
