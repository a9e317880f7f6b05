#pragma once
// A Python function with its arguments, as the body of a region.

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "closures.h"
#include "containers.h"
#include "modules.h"
#include "python.h"
#include "remat/binding.h"
#include "remat/options.h"
#include "stop.h"

namespace remat::python {

/// A call in CPython's form: `names` is a tuple of the names of the last arguments, or null.
struct Call {
  PyObject* function;
  PyObject* const* arguments;
  Py_ssize_t num_positional;
  PyObject* names;
  Py_ssize_t num_named() const { return names == nullptr ? 0 : PyTuple_GET_SIZE(names); }
  Py_ssize_t size() const { return num_positional + num_named(); }
  /// Calls it, and returns the result as a new reference; null with a Python error set.
  PyObject* run() const {
    return in_python([&] {
      return PyObject_Vectorcall(function, arguments, static_cast<std::size_t>(num_positional),
                                 names);
    });
  }
};

/// The choice of arguments that are inputs of a region. Other tensors are kept as they are, with
/// their history.
enum class InputArguments { Positional, All };

// Note [The function's objects]
// The graph owns the body, and Python's cyclic collector does not see through the graph. So a body
// keeps the arguments of its call in an array of its own: no tuple, no dictionary, no closure that
// the collector would go through in every step. A tensor argument is taken out of the array while
// the region waits, and its object made again for a recompute: it is the same object if the library
// gives back the same tensor, as it does for leaves and for tensors that need no gradient. The
// class and the attributes of such an object are kept beside. With InputArguments::All, a list,
// dictionary or set among the arguments is kept as a copy of its first contents, and each recompute
// gets a copy of that: programs continue with theirs (a list of features to which each block's
// result is appended), and so may the function. Upstream passes the object on in its later state.

// Note [Tensors held twice]
// LibTorch takes the interpreter's lock each time a tensor that has an object in Python gets its
// second reference from C++, and each time it loses that. An operator, a saved variable and its
// hooks each do so, several times, with the lock let go before. The lock costs as much there as the
// rest of what a region does with the tensor. So while a function runs, here or again, its tensor
// arguments are held once more, from where the lock is held anyway. They live no longer for that:
// the call that gave them holds their objects.

/// Tensor arguments of a function that runs. The interpreter's lock is held where this is made and
/// where it dies.
using HeldTensors = c10::SmallVector<at::Tensor, 2>;

class Body final : public RegionBody {
 public:
  Body(const Call& call, InputArguments inputs);
  ~Body() override;

  void visit_inputs(TensorVisitor visitor) override;
  /// See Note [Tensors held twice]. None, once the library has taken them.
  const HeldTensors& inputs() const { return inputs_; }
  void run_again(std::vector<at::Tensor>& inputs) override;
  bool can_be_stopped() const override { return true; }
  [[noreturn]] void stop() override { Rerun::stop(); }
  bool stop_soon() override { return Rerun::stop_soon(this); }
  bool stop_at_region() override { return Rerun::set_stop(), true; }
  [[noreturn]] void raise(CheckpointError error) override;
  const TensorNames* tensor_names() const override { return modules_.get(); }

  /// Sets the context manager of recomputes, and the function that is called with an error about
  /// the region to raise a better one. Null for none.
  void set_contexts(PyObject* recompute_context, PyObject* on_error);
  /// Keeps forward's variables for recomputes, after forward: they find the earlier contents of
  /// cells. See Note [Closures].
  void keep(std::unique_ptr<Closures> closures);
  /// Returns the module whose forward is the function, borrowed; null for other functions.
  PyObject* module() const { return modules_ == nullptr ? nullptr : modules_->root(); }
  /// Keeps the state of the modules for recomputes.
  void keep(std::unique_ptr<ModuleState> modules) { modules_ = std::move(modules); }

 private:
  /// The class and the attributes of an argument that is no plain tensor.
  struct Kind {
    std::size_t argument;
    PyObject* type;
    PyObject* attributes;  // null for none
  };
  struct Rare {
    PyObject* recompute_context = nullptr;
    PyObject* on_error = nullptr;
    PyObject* device_context = nullptr;
    std::vector<Kind> kinds;
    std::vector<std::size_t> containers;  // places in `kept_` of the objects that each run copies
  };
  Rare& rare() {
    if (rare_ == nullptr) rare_ = std::make_unique<Rare>();
    return *rare_;
  }
  void note_kind(PyObject* object, std::size_t argument);
  PyObject* wrap(at::Tensor tensor, std::size_t argument);
  PyObject* call_again(PyObject** arguments);

  // The function; its arguments, null for an input.
  c10::SmallVector<PyObject*, 6> kept_;
  PyObject* names_;
  uint32_t num_positional_;
  uint32_t num_arguments_;
  HeldTensors inputs_;  // until the library takes them
  std::unique_ptr<Rare> rare_;
  std::unique_ptr<Closures> closures_;    // null for none
  std::unique_ptr<ModuleState> modules_;  // null for none
};

/// Runs a call as a region, and returns its result as a new reference; null with a Python error
/// set. Recomputes find the state of `modules`, if there are some, as forward found it.
PyObject* run_region(const CheckpointOptions& options, const Call& call,
                     const std::vector<PyObject*>& modules = {});

/// Makes torch.compile leave the frames of this thread alone while alive: forward and recompute
/// must do the same.
class WithoutCompiler {
 public:
  WithoutCompiler();
  ~WithoutCompiler();
  WithoutCompiler(const WithoutCompiler&) = delete;
  WithoutCompiler& operator=(const WithoutCompiler&) = delete;

 private:
  PyObject* before_;  // null: there was nothing to be put back
};

}  // namespace remat::python
