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

/// Returns the module that a function is, or belongs to: itself, the object of a bound method, the
/// function of a functools.partial. Borrowed; null for other functions.
PyObject* module_in(PyObject* function);
/// Returns whether it is a module in eval mode; false for null. Throws python_error.
bool is_in_eval(PyObject* module);

// Note [State of Python modules]
// The library restores the buffers of a C++ module: here of a stand-in, which shares the buffers'
// tensors with the Python module. It cannot know where Python keeps flags, names and members: which
// tensor a name means (a forward may assign another one), whether the module trains, and the
// numbers and words in which a module remembers its past. These are noted when the region begins,
// and put in place around each recompute: names if forward changed them, members always. A name may
// stand for None before its first tensor, and counts as a name all the same.

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
  /// Keeps the names that the function changed, after its return, and tells the stand-in.
  void settle();
  /// Returns the stand-in, which shares the buffers and has the names of tensors for errors. Null
  /// if there are no buffers.
  const std::shared_ptr<torch::nn::Module>& stand_in() const { return stand_in_; }
  /// Called without the interpreter's lock.
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
    std::string path{};        // its name in errors
  };
  static void drop(const std::vector<Buffer>& buffers);

  const std::vector<PyObject*> roots_;
  std::vector<Flag> flags_;
  std::vector<Buffer> buffers_;  // once the function has returned, those whose names it changed
  std::shared_ptr<const Members> members_, members_left_;
  std::shared_ptr<torch::nn::Module> stand_in_;
};

/// Returns `options` with the region's facts about the modules.
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
