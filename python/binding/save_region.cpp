// `save_region`: a call whose results are kept, although policies see nothing of it.

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "region.h"
#include "remat/policy.h"

namespace remat::python {

namespace {

/// A function's result without its tensors, which the library keeps.
struct Emptied {
  std::vector<PyObject*> leaves;  // null where a tensor was
  PyObject* structure = nullptr;  // of torch's trees
  std::vector<at::Tensor> tensors;

  Emptied() = default;
  ~Emptied() {
    leaves.push_back(structure);
    drop(leaves.data(), leaves.size());
  }
  Emptied(const Emptied&) = delete;
  Emptied& operator=(const Emptied&) = delete;
};

std::shared_ptr<Emptied> emptied_of(py::handle result) {
  static PyObject* const flatten = imported("torch.utils._pytree", "tree_flatten");
  auto emptied = std::make_shared<Emptied>();
  const py::tuple flat = py::handle(flatten)(result);
  emptied->structure = py::object(flat[1]).release().ptr();
  for (const py::handle leaf : py::list(flat[0])) {
    const at::Tensor* const tensor = tensor_in(leaf.ptr());
    if (tensor != nullptr) emptied->tensors.push_back(*tensor);
    emptied->leaves.push_back(tensor != nullptr ? nullptr : leaf.inc_ref().ptr());
  }
  return emptied;
}

py::object filled(const Emptied& emptied, std::vector<at::Tensor> tensors) {
  static PyObject* const unflatten = imported("torch.utils._pytree", "tree_unflatten");
  py::list leaves;
  std::size_t next = 0;
  for (PyObject* leaf : emptied.leaves)
    leaves.append(leaf != nullptr ? py::reinterpret_borrow<py::object>(leaf)
                                  : py::reinterpret_steal<py::object>(
                                        THPVariable_Wrap(std::move(tensors[next++]))));
  return py::handle(unflatten)(leaves, py::handle(emptied.structure));
}

/// save_region([name,] function, /, *args, **kwargs)
PyObject* save_region(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  std::string name;
  if (count > 0 && PyUnicode_Check(arguments[0]) != 0) {
    const char* const text = PyUnicode_AsUTF8(arguments[0]);
    if (text == nullptr) return nullptr;
    name = text;
    ++arguments;
    --count;
  }
  if (count == 0) {
    PyErr_SetString(PyExc_TypeError, "remat.save_region: the function is missing");
    return nullptr;
  }
  if (PyCallable_Check(arguments[0]) == 0) {
    PyErr_Format(PyExc_TypeError, "remat.save_region: the function must be a function, got %R",
                 arguments[0]);
    return nullptr;
  }
  const Call call{arguments[0], arguments + 1, count - 1, keywords};
  return guarded([&]() -> PyObject* {
    detail::SavedRegion region(name, typeid(Emptied), [&](TensorVisitor visitor) {
      for (Py_ssize_t i = 0; i < call.size(); ++i) visit_tensors(call.arguments[i], visitor);
    });
    if (region.is_kept())
      return filled(*static_cast<const Emptied*>(region.emptied()), region.tensors())
          .release()
          .ptr();
    py::object result = py::reinterpret_steal<py::object>(call.run());
    if (!result) return nullptr;
    const std::shared_ptr<Emptied> emptied = emptied_of(result);
    region.keep(emptied, [&](TensorVisitor visitor) {
      for (at::Tensor& each : emptied->tensors) visitor(each);
    });
    emptied->tensors.clear();
    return result.release().ptr();
  });
}

constexpr char text[] =
    R"(save_region(function_or_name, /, *args, **kwargs)
--

Inside a region: keeps the tensors that autograd saves in `function(*args, **kwargs)` and its
results, so that it is not run again. It serves kernels that no operator policy sees: custom
Functions, calls past the dispatcher, communication. Outside of regions, calls the function.

`save_region("attention.qkv", function, ...)`: a region's policy that knows names decides whether it
is kept; otherwise `function` is an ordinary part of the region.

Arguments that `function` saves or returns are not kept: the recompute has them. Results are
released if no tensor is saved in the region after the call.

It belongs to the innermost region; when the recompute of an enclosing one runs that region's
forward again, `function` runs again. The result: a tensor, or tensors in tuples, lists and
dictionaries, beside objects that come back as they are.)";

}  // namespace

void add_save_region(py::module_& module) {
  add_function(module, "save_region", save_region, text);
}

}  // namespace remat::python
