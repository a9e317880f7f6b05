// remat_python: what the Python test needs of remat, as an extension module.

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linspace.h>
#include <remat/checkpoint.h>
#include <remat/hooks.h>
#include <remat/policy.h>
#include <remat/report.h>
#include <remat/scope.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

// ---- regions of Python code

/// A Python function from tensors to a tensor. Any thread may call it, copy it and drop it: the
/// interpreter's lock is taken here, and nowhere is it held while remat works.
class PythonFunction {
 public:
  explicit PythonFunction(py::handle function)
      : function_(function.inc_ref().ptr(), [](PyObject* last) {
          if (Py_IsInitialized() == 0) return;
          py::gil_scoped_acquire locked;
          Py_DECREF(last);
        }) {}

  at::Tensor operator()(const std::vector<at::Tensor>& inputs) const {
    py::gil_scoped_acquire locked;
    try {
      py::tuple arguments(inputs.size());
      for (std::size_t i = 0; i < inputs.size(); ++i) arguments[i] = py::cast(inputs[i]);
      return py::handle(function_.get())(*arguments).cast<at::Tensor>();
    } catch (py::error_already_set& error) {
      // LibTorch's own carrier of Python exceptions: the engine hands it over whole.
      error.restore();
      python_error carried;
      carried.persist();
      throw carried;
    }
  }

 private:
  std::shared_ptr<PyObject> function_;
};

/// See Note [No early stop in Python code].
at::Tensor checkpoint(const py::function& function, const py::args& tensors,
                      const py::kwargs& options) {
  std::vector<at::Tensor> inputs;
  for (const py::handle tensor : tensors) inputs.push_back(tensor.cast<at::Tensor>());
  remat::CheckpointOptions chosen;
  chosen.early_stop = false;
  for (const auto& [key, value] : options) {
    const auto name = key.cast<std::string>();
    if (name == "name")
      chosen.name = value.cast<std::string>();
    else if (name == "preserve_rng_state")
      chosen.preserve_rng_state = value.cast<bool>();
    else if (name == "debug")
      chosen.debug = value.cast<bool>();
    else if (name == "save_ops")
      chosen.policy = remat::save_ops(value.cast<std::vector<std::string>>());
    else
      throw py::type_error("unknown option " + name);
  }
  PythonFunction region(function);
  py::gil_scoped_release unlocked;
  return remat::checkpoint(chosen, std::move(region), std::move(inputs));
}

// Note [No early stop in Python code]
// The stop of a recompute is a C++ exception that nothing may catch on its way. The interpreter is
// C code: unwound, it would be left with frames that no longer exist. Regions of Python functions
// therefore run to their end, and no EarlyStopGuard(true) may be around them.

// ---- regions of C++ code

std::atomic<int64_t> num_native_runs{0};

at::Tensor native_plain(const at::Tensor& x) { return x.sin().exp().sin().matmul(x); }

at::Tensor native_region(const at::Tensor& x) {
  const auto region = [](const at::Tensor& y) {
    ++num_native_runs;
    return native_plain(y);
  };
  return remat::checkpoint(region, x);
}

/// The same, keeping the result of its product.
at::Tensor native_selective_region(const at::Tensor& x) {
  return remat::checkpoint({.policy = remat::save_matmuls()}, native_plain, x);
}

void native_backward(const at::Tensor& root) { root.backward(); }

/// All in C++: whether a region under hooks gives the gradient of plain autograd.
bool native_gradient_is_right() {
  const auto leaf = [] { return at::linspace(0, 1, 16).view({4, 4}).requires_grad_(); };
  at::Tensor plain = leaf(), checkpointed = leaf();
  native_plain(plain).sum().backward();
  int64_t packs = 0;
  {
    const auto pack = [&packs](const at::Tensor& x) { return ++packs, x; };
    remat::SavedTensorHooksGuard guard(pack, [](const at::Tensor& x) { return x; });
    native_region(checkpointed).sum().backward();
  }
  return packs > 0 && at::equal(plain.grad(), checkpointed.grad());
}

// ---- guards as context managers

/// Makes a guard on entry and destroys it on exit.
template <class Guard, class... Arguments>
class Managed {
 public:
  explicit Managed(Arguments... arguments) : arguments_(std::move(arguments)...) {}
  void enter() {
    std::apply([this](const Arguments&... arguments) { guard_.emplace(arguments...); }, arguments_);
  }
  void exit() { guard_.reset(); }

 private:
  std::tuple<Arguments...> arguments_;
  std::optional<Guard> guard_;
};

template <class Guard, class... Arguments>
void add_guard(py::module_& module, const char* name) {
  using Type = Managed<Guard, Arguments...>;
  py::class_<Type>(module, name)
      .def(py::init<Arguments...>())
      .def("__enter__", torch::wrap_pybind_function([](Type& self) { self.enter(); }))
      .def("__exit__", [](Type& self, const py::args&) { self.exit(); });
}

/// SavedTensorHooksGuard with functions that count.
class CountingHooks {
 public:
  void enter() {
    guard_.emplace([counts = counts_](const at::Tensor& x) { return ++counts->packs, x; },
                   [counts = counts_](const at::Tensor& x) { return ++counts->unpacks, x; });
  }
  void exit() { guard_.reset(); }
  int64_t packs() const { return counts_->packs; }
  int64_t unpacks() const { return counts_->unpacks; }

 private:
  struct Counts {
    std::atomic<int64_t> packs{0}, unpacks{0};
  };
  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  std::optional<remat::SavedTensorHooksGuard> guard_;
};

py::dict counters() {
  const remat::Counters now = remat::counters();
  py::dict result;
  result["frames_created"] = now.frames_created;
  result["frames_alive"] = now.frames_alive;
  result["recomputes"] = now.recomputes;
  result["early_stops"] = now.early_stops;
  result["recomputed_bytes_alive"] = now.recomputed_bytes_alive;
  return result;
}

}  // namespace

PYBIND11_MODULE(remat_python, module) {
  module.def("checkpoint", torch::wrap_pybind_function(checkpoint));
  module.def("native_plain", torch::wrap_pybind_function_no_gil(native_plain));
  module.def("native_region", torch::wrap_pybind_function_no_gil(native_region));
  module.def("native_selective_region",
             torch::wrap_pybind_function_no_gil(native_selective_region));
  module.def("native_backward", torch::wrap_pybind_function_no_gil(native_backward));
  module.def("native_gradient_is_right",
             torch::wrap_pybind_function_no_gil(native_gradient_is_right));
  module.def("num_native_runs", [] { return num_native_runs.load(); });
  module.def("counters", counters);
  module.def("is_checkpointing", remat::is_checkpointing);
  module.def("is_recomputing", remat::is_recomputing);
  py::class_<CountingHooks>(module, "CountingHooks")
      .def(py::init<>())
      .def("__enter__", torch::wrap_pybind_function([](const py::object& self) {
             self.cast<CountingHooks&>().enter();
             return self;
           }))
      .def("__exit__", [](CountingHooks& self, const py::args&) { self.exit(); })
      .def_property_readonly("packs", &CountingHooks::packs)
      .def_property_readonly("unpacks", &CountingHooks::unpacks);
  add_guard<remat::DisableSavedTensorHooksGuard, std::string>(module, "DisableHooks");
  add_guard<remat::EarlyStopGuard, bool>(module, "EarlyStop");
  add_guard<remat::DisableCheckpointGuard>(module, "DisableCheckpoint");
}
