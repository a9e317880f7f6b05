#pragma once
// Members of Python modules, which recomputes put back: plain values, and tensors without history.
//
// Note [Tensors as members]
// A tensor without history is a member like a number: a recompute finds the tensor that the name
// had when forward began. What forward writes to the tensor itself is not put back. A tensor with a
// history must not be kept, since its graph may hold the region. So a recompute finds the newest
// one, which the check of captures refuses, and only afterwards the name is put back.

#include <cstddef>
#include <memory>
#include <vector>

#include "python.h"

namespace remat::python {

/// Returns whether the value is a number, a boolean, a string, None, a tuple of those, or a tensor
/// that requires no gradient.
bool is_member_value(PyObject* value, int depth = 0);

/// Values of those kinds among the attributes of modules and of all below them. Interpreter's lock,
/// but where it dies.
class Members {
 public:
  /// Returns the members as they are now; the same object as the last time if nothing has changed
  /// since.
  static std::shared_ptr<const Members> of(const std::vector<PyObject*>& roots);
  /// Returns the same members but for tensors that have got a history since: the same object if
  /// there are none.
  static std::shared_ptr<const Members> without_histories(std::shared_ptr<const Members> members);
  Members() = default;
  ~Members();
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  struct Change {
    PyObject* dictionary;
    PyObject* name;
    PyObject* before;  // null: the name was not there
  };
  /// Returns the attributes that are tensors with a history, as they are now; owns the objects.
  static std::vector<Change> tensors_with_history(const std::vector<PyObject*>& roots);
  /// Puts these in place of `now`. Appends what that changed to `changes`, which owns the objects.
  void put_in_place(const Members& now, std::vector<Change>& changes) const;

 private:
  struct Entry {
    PyObject* name;
    PyObject* value;  // null for what is no such value
  };
  struct Module {
    PyObject* attributes;
    std::size_t end;  // of its entries
  };
  bool is_now(const std::vector<PyObject*>& roots) const;
  std::vector<Module> modules_;
  std::vector<Entry> entries_;
};

/// Recomputes that change members of a module take turns over threads. Interpreter's lock.
class HeldMembers {
 public:
  /// Throws python_error where another thread holds them for ten seconds.
  static void take(PyObject* root);
  static void give_back(PyObject* root);
};

}  // namespace remat::python
