// Variables around a Python function, as forward found them, for its recomputes.

#include "closures.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "containers.h"

namespace remat::python {

namespace {

PyObject* or_none(PyObject* object) { return object == nullptr ? Py_None : object; }

PyTypeObject* partial_type() {
  static auto* const type = reinterpret_cast<PyTypeObject*>(imported("functools", "partial"));
  return type;
}

/// The parts of a functools.partial: its function, arguments and keywords.
struct PartialParts {
  explicit PartialParts(py::handle partial)
      : function(partial.attr("func")),
        arguments(partial.attr("args")),
        keywords(partial.attr("keywords")) {}
  const py::object function;
  const py::tuple arguments;
  const py::dict keywords;
};

bool is_partial(PyObject* object) { return Py_TYPE(object) == partial_type(); }

bool may_reach(PyObject* object) {
  return PyFunction_Check(object) != 0 || PyMethod_Check(object) != 0 || is_partial(object);
}

bool has_history(PyObject* content) {
  bool found = false;
  visit_tensors(content, [&](at::Tensor& tensor) { found = found || !tensor.is_leaf(); });
  return found;
}

/// An object of a class of the program's, which may refer to anything.
bool is_of_own_class(PyObject* content) {
  const PyTypeObject* const type = Py_TYPE(content);
  return PyType_HasFeature(Py_TYPE(content), Py_TPFLAGS_HEAPTYPE) != 0 &&
         type->tp_weaklistoffset != 0 && tensor_in(content) == nullptr;
}

}  // namespace

Closures::Closures(PyObject* function) : function_(function) {
  visit(function, 0);
  visited_ = {};
}

Closures::~Closures() {
  c10::SmallVector<PyObject*, 8> all;
  for (const Cell& each : cells_) all.append({each.cell, each.content});
  if (!all.empty()) drop(all.data(), all.size());
}

// See Note [Closures].
void Closures::visit(PyObject* object, int depth) {
  constexpr int deepest = 64;
  if (!may_reach(object) || depth == deepest) return;
  if (PyMethod_Check(object) != 0) return visit(PyMethod_GET_FUNCTION(object), depth);
  if (std::find(visited_.begin(), visited_.end(), object) != visited_.end()) return;
  visited_.push_back(object);
  if (is_partial(object)) {
    const PartialParts parts(object);
    visit(parts.function.ptr(), depth);
    for (const py::handle each : parts.arguments) visit(each.ptr(), depth + 1);
    for (const auto& [name, each] : parts.keywords) visit(each.ptr(), depth + 1);
    return;
  }
  if (PyObject* const closure = PyFunction_GET_CLOSURE(object))
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i)
      note(PyTuple_GET_ITEM(closure, i), depth == 0, depth);
  if (PyObject* const defaults = PyFunction_GET_DEFAULTS(object))
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(defaults); ++i)
      visit(PyTuple_GET_ITEM(defaults, i), depth + 1);
  visit_entries(PyFunction_GET_KW_DEFAULTS(object),
                [&](PyObject*, PyObject* value) { visit(value, depth + 1); });
}

void Closures::note(PyObject* cell, bool is_own, int depth) {
  PyObject* const content = PyCell_GET(cell);
  if (content == nullptr) return;
  for (const Cell& each : cells_)
    if (each.cell == cell) return;
  const bool is_function = may_reach(content);
  Cell noted{cell, content, false};
  if (!is_own && !is_function) {
    if (is_of_own_class(content) || (tensor_in(content) != nullptr && has_history(content)))
      noted = {cell, PyWeakref_NewRef(content, nullptr), true};
    else if (has_history(content))
      noted = {cell, nullptr, true};
    if (noted.is_weak && noted.content == nullptr && PyErr_Occurred() != nullptr)
      throw python_error();
  }
  if (!noted.is_weak) Py_INCREF(content);
  Py_INCREF(cell);
  cells_.push_back(noted);
  if (is_function) visit(content, depth + 1);
}

PyObject* Closures::Cell::then() const {
  if (!is_weak || content == nullptr) return new_reference(content);
  PyObject* const object = PyWeakref_GetObject(content);
  return object == Py_None ? nullptr : new_reference(object);
}

void Closures::end_forward() {
  const auto is_written = [](const Cell& each) {
    if (each.is_weak && each.content == nullptr) return false;  // not known
    const auto then = py::reinterpret_steal<py::object>(each.then());
    return PyCell_GET(each.cell) != then.ptr();
  };
  c10::SmallVector<PyObject*, 4> written;
  auto* end = cells_.begin();
  for (const Cell& each : cells_) {
    if (is_written(each))
      written.append({each.cell, each.content});
    else
      *end++ = each;
  }
  cells_.erase(end, cells_.end());
  if (!written.empty()) drop(written.data(), written.size());
}

/// Copies of functions, and of the cells by which they reach one another.
class Closures::Copies {
 public:
  explicit Copies(const Closures& closures) : closures_(closures) {}
  ~Copies() {
    for (const auto& [original, copy] : made_) Py_DECREF(copy);
  }

  /// A copy, or the object itself where it reaches no cell. Throws python_error.
  py::object of(PyObject* object) {
    py::object result = copied(object);
    while (!unfilled_.empty()) {
      const auto [cell, noted] = unfilled_.back();
      unfilled_.pop_back();
      const auto then = py::reinterpret_steal<py::object>(noted->then());
      if (then && PyCell_Set(cell, copied(then.ptr()).ptr()) != 0) throw python_error();
    }
    return result;
  }

 private:
  static py::object owned(PyObject* made) {
    if (made == nullptr) throw python_error();
    return py::reinterpret_steal<py::object>(made);
  }

  py::object copied(PyObject* object) {
    if (!may_reach(object)) return py::reinterpret_borrow<py::object>(object);
    if (const auto found = made_.find(object); found != made_.end())
      return py::reinterpret_borrow<py::object>(found->second);
    if (PyMethod_Check(object) != 0)
      return owned(
          PyMethod_New(copied(PyMethod_GET_FUNCTION(object)).ptr(), PyMethod_GET_SELF(object)));
    return is_partial(object) ? copied_partial(object) : copied_function(object);
  }

  py::tuple copied_items(const py::tuple& items) {
    py::tuple all(items.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = copied(py::handle(items[i]).ptr());
    return all;
  }
  py::dict copied_values(const py::dict& values) {
    py::dict all;
    for (const auto& [name, value] : values) all[name] = copied(value.ptr());
    return all;
  }

  py::object copied_partial(PyObject* partial) {
    const PartialParts parts(partial);
    const py::tuple function = py::make_tuple(copied(parts.function.ptr()));
    return owned(PyObject_Call(reinterpret_cast<PyObject*>(partial_type()),
                               (function + copied_items(parts.arguments)).ptr(),
                               copied_values(parts.keywords).ptr()));
  }

  py::object copied_function(PyObject* function) {
    auto copy = owned(
        PyFunction_NewWithQualName(PyFunction_GET_CODE(function), PyFunction_GET_GLOBALS(function),
                                   reinterpret_cast<PyFunctionObject*>(function)->func_qualname));
    made_.emplace(function, new_reference(copy.ptr()));
    auto* const to = reinterpret_cast<PyFunctionObject*>(copy.ptr());
    // Attributes are the program's state: both have the same.
    Py_XSETREF(to->func_dict,
               new_reference(reinterpret_cast<PyFunctionObject*>(function)->func_dict));
    if (PyObject* const closure = PyFunction_GET_CLOSURE(function)) {
      const py::object cells = owned(PyTuple_New(PyTuple_GET_SIZE(closure)));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i)
        PyTuple_SET_ITEM(cells.ptr(), i, copied_cell(PyTuple_GET_ITEM(closure, i)).release().ptr());
      if (PyFunction_SetClosure(copy.ptr(), cells.ptr()) != 0) throw python_error();
    }
    py::object defaults, named;
    if (PyObject* const each = PyFunction_GET_DEFAULTS(function))
      defaults = copied_items(py::reinterpret_borrow<py::tuple>(each));
    if (PyObject* const each = PyFunction_GET_KW_DEFAULTS(function))
      named = copied_values(py::reinterpret_borrow<py::dict>(each));
    if (PyFunction_SetDefaults(copy.ptr(), or_none(defaults.ptr())) != 0 ||
        PyFunction_SetKwDefaults(copy.ptr(), or_none(named.ptr())) != 0)
      throw python_error();
    return copy;
  }

  /// A cell that forward wrote to is the program's.
  py::object copied_cell(PyObject* cell) {
    const auto* const noted = std::find_if(closures_.cells_.begin(), closures_.cells_.end(),
                                           [&](const Cell& each) { return each.cell == cell; });
    if (noted == closures_.cells_.end()) return py::reinterpret_borrow<py::object>(cell);
    PyObject*& made = made_[cell];
    if (made == nullptr) {
      made = owned(PyCell_New(nullptr)).release().ptr();
      unfilled_.emplace_back(made, noted);
    }
    return py::reinterpret_borrow<py::object>(made);
  }

  const Closures& closures_;
  std::unordered_map<PyObject*, PyObject*> made_;
  std::vector<std::pair<PyObject*, const Cell*>> unfilled_;
};

PyObject* Closures::function_again() const {
  const bool differs = std::any_of(cells_.begin(), cells_.end(), [](const Cell& each) {
    const auto then = py::reinterpret_steal<py::object>(each.then());
    return PyCell_GET(each.cell) != then.ptr();
  });
  if (!differs) return new_reference(function_);
  return returned([&] { return Copies(*this).of(function_).release().ptr(); });
}

}  // namespace remat::python
