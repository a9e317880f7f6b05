// Hooks over several tensors that a recompute registers, and that would keep its graph for ever.

#include "hook_cycles.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include <memory>
#include <vector>

#include "stop.h"

namespace remat::python {

namespace {

namespace autograd = torch::autograd;

thread_local HookCycles* innermost = nullptr;

/// LibTorch counts the owners of nodes in one of two ways, by its version.
template <class Node>
std::weak_ptr<Node> weak_of(const std::shared_ptr<Node>& node) {
  return node;
}
template <class Node>
c10::weak_intrusive_ptr<Node> weak_of(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}

/// True if the context of a Python Function owns its node; otherwise the node owns the context.
template <class Context>
constexpr bool owns_node = !requires(Context& context) { context.cdata.lock(); };

/// Node objects of Python's that a list has lent.
class Lent {
  using Pointer = decltype(autograd::THPCppFunction::cdata);

 public:
  /// Takes the objects out of the list.
  explicit Lent(py::list nodes) : nodes_(std::move(nodes)) {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      PyObject* const node = py::handle(nodes_[i]).ptr();
      if (autograd::THPCppFunction_Check(node))
        take(i, reinterpret_cast<autograd::THPCppFunction*>(node)->cdata);
      else
        take_context<THPFunction>(i, node);
    }
  }
  /// Puts the living objects back, and None for others.
  void give_back() {
    for (const auto& [i, weak] : taken_)
      if (const Pointer node = weak.lock())
        nodes_[i] = py::reinterpret_steal<py::object>(autograd::functionToPyObject(node));
  }

 private:
  void take(std::size_t i, const Pointer& node) {
    taken_.emplace_back(i, weak_of(node));
    nodes_[i] = py::none();
  }
  template <class Context>
  void take_context(std::size_t i, PyObject* node) {
    if constexpr (owns_node<Context>)
      if (THPFunction_Check(node)) take(i, reinterpret_cast<Context*>(node)->cdata);
  }

  const py::list nodes_;
  std::vector<std::pair<std::size_t, decltype(weak_of(std::declval<const Pointer&>()))>> taken_;
};

/// Makes the lists release their nodes, all of them at once, and puts back the nodes with other
/// owners.
void let_go(const std::vector<py::list>& lists) {
  std::vector<Lent> all(lists.begin(), lists.end());
  for (Lent& each : all) each.give_back();
}

}  // namespace

HookCycles::HookCycles() : around_(std::exchange(innermost, this)) {}

HookCycles::~HookCycles() {
  innermost = around_;
  if (handles_.empty()) return;
  const ErrorAside aside;
  try {
    const py::list noted = py::cast(std::exchange(handles_, {}));
    call_python(names().free_hooks, noted);
  } catch (py::error_already_set& error) {
    error.restore();
    raise_later();
  }
}

void add_hook_cycles(py::module_& module) {
  module.def("_note_hooks", [](py::object handles) {
    if (innermost != nullptr) innermost->note(std::move(handles));
  });
  module.def("_let_go", let_go);
}

}  // namespace remat::python
