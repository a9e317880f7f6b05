// Python's hooks: of a tensor, of its node and after accumulation, each kind in a dictionary that
// LibTorch knows as one hook.

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>
#include <vector>

#include "python.h"
#include "remat/binding.h"
#include "stop.h"

namespace remat::python {

namespace {

namespace autograd = torch::autograd;

/// The dictionary of a hook, if it is of that type. LibTorch keeps the type's description to
/// itself, so that its name must tell; a sanitizer that wants to see it would not link.
template <class Python, class Hook>
__attribute__((no_sanitize("vptr"))) void add(const Hook* hook, const char* type,
                                              std::vector<PyObject*>& found) {
  if (hook == nullptr || std::string_view(typeid(*hook).name()) != type) return;
  PyObject* const dictionary = static_cast<const Python*>(hook)->dict;
  if (dictionary != nullptr && PyDict_Check(dictionary)) found.push_back(dictionary);
}

template <class Python, class Hooks>
void collect(const Hooks& hooks, const char* type, std::vector<PyObject*>& found) {
  for (const auto& each : hooks) add<Python>(each.get(), type, found);
}

/// Returns a borrowed reference; the lock is held.
std::vector<PyObject*> dictionaries_of(const at::Tensor& tensor) {
  constexpr const char* of_tensor = "N5torch8autograd23PyFunctionTensorPreHookE";
  std::vector<PyObject*> found;
  collect<autograd::PyFunctionTensorPreHook>(autograd::impl::hooks(tensor), of_tensor, found);
  add<autograd::PyFunctionTensorPostAccGradHooks>(
      autograd::impl::post_acc_grad_hooks(tensor).get(),
      "N5torch8autograd32PyFunctionTensorPostAccGradHooksE", found);
  // This reads the field directly: `grad_fn()` of a view would make a node.
  const auto* const meta = autograd::impl::get_autograd_meta(tensor);
  const auto node = meta == nullptr             ? nullptr
                    : meta->grad_fn_ != nullptr ? meta->grad_fn_
                                                : autograd::impl::try_get_grad_accumulator(tensor);
  if (node != nullptr) {
    collect<autograd::PyFunctionTensorPreHook>(node->tensor_pre_hooks(), of_tensor, found);
    collect<autograd::PyFunctionPreHook>(node->pre_hooks(), "N5torch8autograd17PyFunctionPreHookE",
                                         found);
    collect<autograd::PyFunctionPostHook>(node->post_hooks(),
                                          "N5torch8autograd18PyFunctionPostHookE", found);
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

/// Hooks are in the order in which they came.
void shorten(PyObject* dictionary, Py_ssize_t size) {
  if (PyDict_Size(dictionary) <= size) return;
  const auto keys = py::reinterpret_steal<py::list>(PyDict_Keys(dictionary));
  for (Py_ssize_t i = PyList_Size(keys.ptr()); i-- > size;)
    if (PyObject_DelItem(dictionary, PyList_GetItem(keys.ptr(), i)) != 0) drop_error();
}

class PythonHookTables final : public HookTables {
 public:
  std::vector<HookTable> of(const at::Tensor& tensor) noexcept override {
    std::vector<HookTable> all;
    const Locked locked(Locked::AtEnd::GiveUp);
    if (!locked) return all;
    for (PyObject* const each : dictionaries_of(tensor)) all.push_back({each, PyDict_Size(each)});
    return all;
  }
  void cut(const at::Tensor& tensor, const std::vector<HookTable>& then) noexcept override {
    const Locked locked(Locked::AtEnd::GiveUp);
    if (!locked) return;
    for (PyObject* const each : dictionaries_of(tensor)) {
      const auto found = std::find_if(then.begin(), then.end(),
                                      [&](const HookTable& one) { return one.table == each; });
      shorten(each, found == then.end() ? 0 : static_cast<Py_ssize_t>(found->size));
    }
    // A tensor that had no hooks keeps its empty dictionary: LibTorch is about to drop the hook
    // that reads it.
    if (then.empty() && !autograd::impl::hooks(tensor).empty()) forget_dictionary(tensor);
  }

 private:
  static void forget_dictionary(const at::Tensor& tensor) {
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    if (!object || PyObject_SetAttrString(object.ptr(), "_backward_hooks", Py_None) != 0)
      drop_error();
  }
};

}  // namespace

void add_hook_tables() {
  static PythonHookTables tables;
  set_hook_tables(&tables);
}

}  // namespace remat::python
