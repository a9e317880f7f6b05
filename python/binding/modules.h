#pragma once
// Python modules behind a region's function: their training flags and buffers, for its recomputes.

#include <memory>
#include <vector>

#include "region.h"

namespace torch::nn {
class Module;
}

namespace remat::python {

/// The module that a function is, or belongs to: itself, the object of a bound method, what a
/// functools.partial calls. Borrowed; null for other functions.
PyObject* module_in(PyObject* function);

// Note [State of Python modules]
// The library restores the buffers of a C++ module: of a stand-in here, which shares the buffers' tensors
// with the Python module. What it cannot know is where Python keeps flags and names: which tensor a name
// means (a forward may assign another one), and whether the module trains. These are noted when the region
// begins, and put in place around each recompute.

/// The flags and buffers of modules and of all below them as they are now. Interpreter's lock.
class ModuleState final : public TensorNames {
 public:
  explicit ModuleState(const std::vector<PyObject*>& roots);
  ~ModuleState() override;
  ModuleState(const ModuleState&) = delete;
  ModuleState& operator=(const ModuleState&) = delete;

  /// Shares the buffers, and says what errors call the modules' tensors. Null if there are no buffers.
  const std::shared_ptr<torch::nn::Module>& stand_in() const { return stand_in_; }
  /// Without the interpreter's lock.
  void visit_tensors(Visitor visitor) const override;

  /// While alive, flags and buffers are as they were noted. Throws python_error where other threads hold
  /// them otherwise for ten seconds.
  class Hold {
   public:
    explicit Hold(const ModuleState& state);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    const ModuleState& state_;
    std::vector<PyObject*> buffers_before_;  // null: the name was not there
    bool is_taken_ = false;
  };

 private:
  friend class HeldFlags;
  struct Flag {
    PyObject* attributes;  // the module's dictionary
    bool is_training;
  };
  struct Buffer {
    PyObject* dictionary;
    PyObject* name;
    PyObject* tensor;
  };
  void add(PyObject* module, int depth);

  const std::vector<PyObject*> roots_;
  std::vector<Flag> flags_;
  std::vector<Buffer> buffers_;
  std::shared_ptr<torch::nn::Module> stand_in_;
};

/// `options` with what the region needs to know of the modules.
CheckpointOptions with_modules(CheckpointOptions options, const ModuleState& state);

/// While alive, regions that are open around this point restore the modules' buffers in their recomputes, as
/// they are now. Does nothing where there are no such regions.
class ModulesWatched {
 public:
  explicit ModulesWatched(const std::vector<PyObject*>& modules);
  ~ModulesWatched();
  ModulesWatched(const ModulesWatched&) = delete;
  ModulesWatched& operator=(const ModulesWatched&) = delete;

 private:
  std::shared_ptr<void> guard_;
};

/// What errors call the tensors of the modules of a function that `run_region_of_modules` made; null for others. Without the
/// interpreter's lock.
const TensorNames* tensor_names_of(PyObject* function);

/// As run_region, with the state of these modules: a new reference, or null with a Python error set.
PyObject* run_region_of_modules(const CheckpointOptions& options, const Call& call,
                                const std::vector<PyObject*>& modules);

}  // namespace remat::python
