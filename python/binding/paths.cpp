// The paths of Python modules for policies: which module runs, and where it is in its tree.

#include "remat/paths.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "module_tree.h"
#include "region.h"

namespace remat::python {

namespace {

// Note [The running module]
// torch calls a module through `Module._call_impl`, whose frames are on the interpreter's stack
// while the module's forward runs. So a question walks the stack, and modules that no policy asks
// about pay nothing. A recompute begins below the frame that began it: frames further up belong to
// the caller of backward. A module that is a region by its class (`Checkpointed`, `apply`) runs its
// forward there without `_call_impl`, and its region knows it.

struct FrameReference {
  explicit FrameReference(PyFrameObject* frame) : frame(frame) {}
  ~FrameReference() { Py_XDECREF(frame); }
  FrameReference(const FrameReference&) = delete;
  FrameReference& operator=(const FrameReference&) = delete;
  PyFrameObject* frame;
};

/// Returns the code of `Module._call_impl`.
PyCodeObject* code_of_calls() {
  static PyObject* const code = [] {
    const py::object module = py::module_::import("torch.nn.modules.module").attr("Module");
    return py::object(module.attr("_call_impl").attr("__code__")).release().ptr();
  }();
  return reinterpret_cast<PyCodeObject*>(code);
}

/// Visits the modules that run on this thread, innermost first, until the visitor returns false.
template <class Visitor>
void visit_running(Visitor&& visitor) {
  const PyFrameObject* const end = Rerun::caller();
  PyFrameObject* const top = PyEval_GetFrame();
  Py_XINCREF(top);
  FrameReference here(top);
  while (here.frame != nullptr && here.frame != end) {
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(here.frame)));
    if (reinterpret_cast<PyCodeObject*>(code.ptr()) == code_of_calls()) {
      // Its locals are the arguments of the call, which live as long as the frame.
      const py::object locals =
          py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(here.frame))
              .attr("f_locals");
      if (!visitor(py::object(locals["self"]))) return;
    }
    PyFrameObject* const back = PyFrame_GetBack(here.frame);
    Py_DECREF(std::exchange(here.frame, back));
  }
  const auto* const body = dynamic_cast<const Body*>(Rerun::innermost_body());
  if (body != nullptr && body->module() != nullptr)
    visitor(py::reinterpret_borrow<py::object>(body->module()));
}

/// The modules and parameters of known trees. Interpreter's lock; leaked.
class PythonPaths final : public detail::PathSource {
 public:
  const std::string* module_path() override {
    const Locked locked(Locked::AtEnd::Wait);
    const ErrorAside aside;
    const std::string* found = nullptr;
    py::object outermost;
    bool is_any = false;
    visit_running([&](const py::object& module) {
      is_any = true;
      found = path_of(module.ptr());
      outermost = module;
      return found == nullptr;
    });
    if (found != nullptr || !is_any) return found;
    add(outermost.ptr(), "", 0);
    visit_running([&](const py::object& module) {
      found = path_of(module.ptr());
      return found == nullptr;
    });
    return found;
  }

  const std::string* parameter_path(const at::Tensor& parameter) override {
    if (const std::string* const path = path_of(parameter)) return path;
    module_path();  // knows the tree afterwards
    return path_of(parameter);
  }

  void visit_paths(c10::function_ref<void(const std::string&)> visitor) override {
    const Locked locked(Locked::AtEnd::Wait);
    for (const auto& [address, each] : modules_)
      if (PyWeakref_GetObject(each.module) != Py_None) visitor(*each.path);
  }

  bool knows(PyObject* module) const { return path_of(module) != nullptr; }
  void add(PyObject* module, const std::string& path, int depth) {
    constexpr int deepest = 200;  // a tree with a cycle ends somewhere
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    PyObject* const weak = attributes ? PyWeakref_NewRef(module, nullptr) : nullptr;
    if (weak == nullptr || depth > deepest) return PyErr_Clear();
    if (depth == 0) prune();
    Module& known = modules_[module];
    Py_XDECREF(std::exchange(known.module, weak));
    known.path = &detail::path_of_text(path);
    const std::string prefix = path.empty() ? "" : path + ".";
    visit_entries(entry(attributes.ptr(), "_parameters"), [&](PyObject* name, PyObject* value) {
      const at::Tensor* const tensor = tensor_in(value);
      if (tensor == nullptr) return;
      parameters_.insert_or_assign(
          tensor->unsafeGetTensorImpl(),
          Parameter{WeakTensor(tensor->getIntrusivePtr()),
                    &detail::path_of_text(prefix + py::str(name).cast<std::string>())});
    });
    visit_entries(entry(attributes.ptr(), "_modules"), [&](PyObject* name, PyObject* value) {
      if (is_module(value)) add(value, prefix + py::str(name).cast<std::string>(), depth + 1);
    });
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Module {
    PyObject* module = nullptr;  // a weak reference
    const std::string* path = nullptr;
  };
  struct Parameter {
    WeakTensor tensor;
    const std::string* path;
  };

  const std::string* path_of(PyObject* module) const {
    const auto found = modules_.find(module);
    return found == modules_.end() || PyWeakref_GetObject(found->second.module) != module
               ? nullptr
               : found->second.path;
  }
  const std::string* path_of(const at::Tensor& parameter) const {
    const Locked locked(Locked::AtEnd::Wait);
    const auto found = parameters_.find(parameter.unsafeGetTensorImpl());
    return found == parameters_.end() || found->second.tensor.expired() ? nullptr
                                                                        : found->second.path;
  }
  void prune() {
    std::erase_if(parameters_, [](const auto& each) { return each.second.tensor.expired(); });
    std::erase_if(modules_, [](const auto& each) {
      if (PyWeakref_GetObject(each.second.module) != Py_None) return false;
      Py_DECREF(each.second.module);
      return true;
    });
  }

  std::unordered_map<PyObject*, Module> modules_;
  std::unordered_map<const c10::TensorImpl*, Parameter> parameters_;
};

}  // namespace

void add_paths(py::module_& module) {
  static auto* const paths = new PythonPaths;
  detail::set_path_source(*paths);
  module.def("_register_tree", [](const py::object& root) { paths->add(root.ptr(), "", 0); });
  module.def("_is_in_tree", [](const py::object& module) { return paths->knows(module.ptr()); });
}

}  // namespace remat::python
