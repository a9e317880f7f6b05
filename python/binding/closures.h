#pragma once
// Variables around a Python function, as forward found them, for its recomputes.

#include <c10/util/SmallVector.h>

#include <memory>
#include <vector>

#include "python.h"

namespace remat::python {

// Note [Closures]
// A variable that a function reads from around it may be another one by the time of the recompute:
// that of a loop, above all (`for s in scales: y = checkpoint(lambda t: (t * s).sin(), y)`). So a
// recompute of a Python function finds in its cells what forward found there. What forward itself
// wrote to is the program's state, and is what it has become; so is what the variable refers to. If
// no cell differs, which is the rule, the function itself is called again. The same holds for each
// function that it reaches: by what is in a cell, a default of an argument, a method, or a
// functools.partial. If a cell of any of them differs, the recompute calls copies of all, with
// cells of their own. A helper may be reached that refers to the program's whole state, such as the
// loss of the step before, and with it the graph of that. So what is in a helper's cell is not kept
// alive if it is a tensor with a history or an object of a class of the program's: if it is gone by
// then, the copy's cell is empty, and a function that reads it raises NameError.

/// Interpreter's lock, but where it dies.
class Closures {
 public:
  /// Notes what the cells hold that `function` reaches. Throws python_error.
  explicit Closures(PyObject* function);
  ~Closures();
  Closures(const Closures&) = delete;
  Closures& operator=(const Closures&) = delete;

  bool is_empty() const { return cells_.empty(); }
  /// Forward has run: what it wrote to is no more put back.
  void end_forward();
  /// The function, or a copy that finds what forward found: a new reference; null with a Python
  /// error set.
  PyObject* function_again() const;

 private:
  class Copies;
  struct Cell {
    PyObject* cell;
    PyObject* content;  // or a weak reference to it; null where neither can be had
    bool is_weak;
    /// Returns the cell's old content as a new reference; null if it is gone.
    PyObject* then() const;
  };
  void visit(PyObject* object, int depth);
  void note(PyObject* cell, bool is_own, int depth);

  PyObject* const function_;
  c10::SmallVector<Cell, 4> cells_;
  std::vector<PyObject*> visited_;  // while the constructor runs
};

}  // namespace remat::python
