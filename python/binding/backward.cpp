// Backwards that Python begins: a region that is open must see them.
//
// Note [Python's engine]
// `Tensor.backward` and `torch.autograd.grad` call Python's engine object itself, past the default
// engine in front of which the library stands. A region would not notice that its function runs a
// backward, and its recompute would accumulate into `.grad` once more. So the method `run_backward`
// of the object behind `torch.autograd.Variable._execution_engine` is put in front of: `_engine.py`
// does that.

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <vector>

#include "python.h"
#include "region.h"
#include "remat/binding.h"
#include "remat/scope.h"

namespace remat::python {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;

/// The node of a Python Function: its object owns it, or, before 2.13, knows it.
template <class Held>
auto node_in(Held& held) {
  if constexpr (requires { held.lock(); })
    return held.lock();
  else
    return held;
}

/// Returns the edge along which the gradient of a tensor or of a `GradientEdge` flows; an empty
/// edge if there is none.
Edge edge_of(PyObject* object) {
  if (const at::Tensor* const tensor = tensor_in(object)) {
    if (const auto& node = tensor->grad_fn())
      return {node, static_cast<uint32_t>(tensor->output_nr())};
    return {torch::autograd::impl::try_get_grad_accumulator(*tensor), 0};
  }
  if (PyTuple_Check(object) == 0 || PyTuple_GET_SIZE(object) < 2) return {};
  PyObject* const node = PyTuple_GET_ITEM(object, 0);
  const auto number = static_cast<uint32_t>(PyLong_AsLong(PyTuple_GET_ITEM(object, 1)));
  if (THPFunction_Check(node)) {
    return {node_in(reinterpret_cast<THPFunction*>(node)->cdata), number};
  }
  if (torch::autograd::THPCppFunction_Check(node))
    return {reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata, number};
  return {};
}

template <class Visitor>
void visit_items(PyObject* sequence, Visitor&& visitor) {
  if (sequence == nullptr || sequence == Py_None) return;
  if (PyTuple_Check(sequence) != 0)
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); ++i)
      visitor(PyTuple_GET_ITEM(sequence, i));
  else if (PyList_Check(sequence) != 0)
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sequence); ++i)
      visitor(PyList_GET_ITEM(sequence, i));
}

std::vector<at::Tensor> tensors_of(PyObject* sequence) {
  std::vector<at::Tensor> all;
  visit_items(sequence, [&](PyObject* item) {
    if (const at::Tensor* const tensor = tensor_in(item)) all.push_back(*tensor);
  });
  return all;
}

/// run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs=, allow_unreachable=,
/// accumulate_grad=)
PyObject* run_backward(PyObject*, PyObject* const* arguments, Py_ssize_t count,
                       PyObject* keywords) {
  const Call call{names().engine_run_backward, arguments, count, keywords};
  if (!is_checkpointing() && !is_recomputing()) return call.run();
  constexpr Py_ssize_t at_inputs = 4, at_accumulate = 6, num_arguments = 7;
  PyObject* all[num_arguments] = {};
  for (Py_ssize_t i = 0; i < std::min(count, num_arguments); ++i) all[i] = arguments[i];
  for (Py_ssize_t i = 0; keywords != nullptr && i < PyTuple_GET_SIZE(keywords); ++i) {
    PyObject* const name = PyTuple_GET_ITEM(keywords, i);
    const char* const known[num_arguments] = {"tensors",        "grad_tensors", "keep_graph",
                                              "create_graph",   "inputs",       "allow_unreachable",
                                              "accumulate_grad"};
    for (Py_ssize_t j = 0; j < num_arguments; ++j)
      if (PyUnicode_CompareWithASCIIString(name, known[j]) == 0) all[j] = arguments[count + i];
  }
  return returned([&]() -> PyObject* {
    edge_list roots, targets;
    visit_items(all[0], [&](PyObject* item) {
      const at::Tensor* const tensor = tensor_in(item);
      roots.push_back(tensor != nullptr && tensor->requires_grad()
                          ? torch::autograd::impl::gradient_edge(*tensor)
                          : edge_of(item));
    });
    visit_items(all[at_inputs], [&](PyObject* item) { targets.push_back(edge_of(item)); });
    const bool accumulates =
        all[at_accumulate] != nullptr && PyObject_IsTrue(all[at_accumulate]) == 1;
    BackwardMark mark(roots, targets, accumulates);
    auto result = py::reinterpret_steal<py::object>(call.run());
    if (!result) return nullptr;
    mark.finish(tensors_of(result.ptr()), tensors_of(all[1]));
    return result.release().ptr();
  });
}

}  // namespace

void add_backward(py::module_& module) {
  add_function(module, "_run_backward", run_backward,
               "See torch.autograd.backward; regions that are open notice it.");
}

}  // namespace remat::python
