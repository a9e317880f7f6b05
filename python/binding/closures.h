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
// recompute of a Python function finds forward's values in its cells. Variables that forward itself
// wrote to are the program's state and keep their present values, and so do the objects to which
// variables refer. If no cell differs, which is the rule, the function itself is called again. The
// same holds for each function that it reaches: by the content of a cell, a default of an argument,
// a method, or a functools.partial. If a cell of any of them differs, the recompute calls copies of
// all, with cells of their own. A helper may be reached that refers to the program's whole state,
// such as the loss of the step before, and with it the graph of that. So a helper's cell does not
// keep its content alive if that is a tensor with a history or an object of a class of the program.
// If the content is gone by then, the copy's cell is empty, and a function that reads it raises
// NameError.

/// The interpreter's lock is held, except in the destructor.
class Closures {
 public:
  /// Notes the contents of the cells that `function` reaches. Throws python_error.
  explicit Closures(PyObject* function);
  ~Closures();
  Closures(const Closures&) = delete;
  Closures& operator=(const Closures&) = delete;

  bool is_empty() const { return cells_.empty(); }
  /// Marks the end of forward: variables that it wrote to are no longer put back.
  void end_forward();
  /// Returns the function, or a copy that sees the variables of forward, as a new reference; null
  /// with a Python error set.
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
