#pragma once
// Python modules behind a region's function: their training flags and buffers, for its recomputes.

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "members.h"
#include "remat/binding.h"
#include "remat/options.h"

namespace torch::nn {
class Module;
}

namespace remat::python {

/// The module that a function is, or belongs to: itself, the object of a bound method, what a
/// functools.partial calls. Borrowed; null for other functions.
PyObject* module_in(PyObject* function);
/// Returns whether it is a module in eval mode; null is none. Throws python_error.
bool is_in_eval(PyObject* module);

// Note [State of Python modules]
// The library restores the buffers of a C++ module: of a stand-in here, which shares the buffers'
// tensors with the Python module. What it cannot know is where Python keeps flags, names and
// members: which tensor a name means (a forward may assign another one), whether the module trains,
// and the numbers and words by which a module remembers what it has done. These are noted when the
// region begins, and put in place around each recompute: names where forward changed them, members
// always. A name may stand for None before its first tensor, and is there all the same.

/// The flags, names of buffers and members of modules and of all below them as they are now.
/// Interpreter's lock.
class ModuleState final : public TensorNames {
 public:
  explicit ModuleState(const std::vector<PyObject*>& roots);
  ~ModuleState() override;
  ModuleState(const ModuleState&) = delete;
  ModuleState& operator=(const ModuleState&) = delete;

  PyObject* root() const { return roots_.front(); }
  /// Notes the members, too, to be put back.
  void note_members();
  /// The function has returned: keeps the names that it changed, and tells the stand-in.
  void settle();
  /// Shares the buffers, and says what errors call the modules' tensors. Null if there are no
  /// buffers.
  const std::shared_ptr<torch::nn::Module>& stand_in() const { return stand_in_; }
  /// Without the interpreter's lock.
  void visit_tensors(Visitor visitor) const override;

  /// While alive, flags, names and members are as they were noted. Throws python_error where other
  /// threads hold them otherwise for ten seconds.
  class Hold {
   public:
    explicit Hold(const ModuleState& state);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    void compare_names() const;
    const ModuleState& state_;
    std::vector<PyObject*> buffers_before_;  // null: the name was not there
    std::shared_ptr<const Members> members_before_;
    std::vector<Members::Change> members_changed_;
    std::vector<Members::Change> histories_before_;  // tensors with a history
    bool has_taken_flags_ = false, has_taken_members_ = false;
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
    PyObject* begin;           // None, or null: the name was not there
    PyObject* left = nullptr;  // the same, when the function had returned
    std::string path{};        // what errors call it
  };
  static void drop(const std::vector<Buffer>& buffers);

  const std::vector<PyObject*> roots_;
  std::vector<Flag> flags_;
  std::vector<Buffer> buffers_;  // once the function has returned, those whose names it changed
  std::shared_ptr<const Members> members_, members_left_;
  std::shared_ptr<torch::nn::Module> stand_in_;
};

/// `options` with what the region needs to know of the modules.
CheckpointOptions with_modules(CheckpointOptions options, const ModuleState& state);

/// While alive, regions that are open around this point restore the modules' buffers in their
/// recomputes, as they are now. Does nothing where there are no such regions.
class ModulesWatched {
 public:
  explicit ModulesWatched(const std::vector<PyObject*>& modules);
  ~ModulesWatched();
  ModulesWatched(const ModulesWatched&) = delete;
  ModulesWatched& operator=(const ModulesWatched&) = delete;

 private:
  std::shared_ptr<void> guard_;
};

}  // namespace remat::python
