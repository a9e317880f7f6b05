// A Python function as a region: its arguments, its recomputes, its stop, its errors.

#include "region.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "hook_cycles.h"
#include "remat/state.h"
#include "tensor_class.h"

namespace remat::python {

namespace {

/// The interpreter's frame evaluation hook, in torch's hands.
PyObject* set_eval_frame() {
  static PyObject* const function = imported("torch._C._dynamo.eval_frame", "set_eval_frame");
  return function;
}

bool may_be_container(PyObject* object) {
  return tensor_in(object) == nullptr && PyUnicode_CheckExact(object) == 0 && object != Py_None;
}

}  // namespace

WithoutCompiler::WithoutCompiler() {
  before_ = PyObject_CallOneArg(set_eval_frame(), Py_None);
  if (before_ == nullptr) throw python_error();
  if (before_ == Py_None) Py_CLEAR(before_);
}

WithoutCompiler::~WithoutCompiler() {
  if (before_ == nullptr) return;
  const ErrorAside aside;
  Py_XDECREF(PyObject_CallOneArg(set_eval_frame(), before_));
  Py_DECREF(before_);
}

// ---- the body

Body::Body(const Call& call, InputArguments inputs)
    : names_(new_reference(call.names)),
      num_positional_(static_cast<uint32_t>(call.num_positional)),
      num_arguments_(static_cast<uint32_t>(call.size())) {
  // A tuple of names alone: the collector would find out the same.
  if (names_ != nullptr && PyObject_GC_IsTracked(names_) != 0) PyObject_GC_UnTrack(names_);
  const auto size = static_cast<std::size_t>(call.size());
  const auto num_inputs =
      static_cast<std::size_t>(inputs == InputArguments::All ? call.size() : call.num_positional);
  ContainerCopies copies;
  kept_.reserve(size + 1);
  kept_.push_back(new_reference(call.function));
  for (std::size_t i = 0; i < size; ++i) {
    PyObject* const argument = call.arguments[i];
    const at::Tensor* const tensor = i < num_inputs ? tensor_in(argument) : nullptr;
    if (tensor == nullptr) {
      const bool is_copied = inputs == InputArguments::All && may_be_container(argument);
      kept_.push_back(is_copied ? copies.of(argument) : new_reference(argument));
      if (kept_.back() != argument) rare().containers.push_back(kept_.size() - 1);
      continue;
    }
    inputs_.push_back(*tensor);
    kept_.push_back(nullptr);
    note_kind(argument, i);
  }
  if (at::impl::PythonTorchFunctionTLS::stack_len() == 0) return;
  PyObject* const is_own = inputs == InputArguments::All ? Py_True : Py_False;
  PyObject* const device_context =
      in_python([&] { return PyObject_CallOneArg(names().device_context, is_own); });
  if (device_context == nullptr) throw python_error();
  if (device_context == Py_None)
    Py_DECREF(device_context);
  else
    rare().device_context = device_context;
}

Body::~Body() {
  if (names_ != nullptr) kept_.push_back(names_);
  if (rare_ != nullptr) {
    for (PyObject* each : {rare_->recompute_context, rare_->on_error, rare_->device_context})
      kept_.push_back(each);
    for (const Kind& each : rare_->kinds) {
      kept_.push_back(each.type);
      kept_.push_back(each.attributes);
    }
  }
  drop(kept_.data(), kept_.size());
}

void Body::note_kind(PyObject* object, std::size_t argument) {
  const bool is_plain = Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
  PyObject** const attributes = _PyObject_GetDictPtr(object);
  const bool has_attributes =
      attributes != nullptr && *attributes != nullptr && PyDict_GET_SIZE(*attributes) > 0;
  if (is_plain && !has_attributes) return;
  PyObject* const copy = has_attributes ? PyDict_Copy(*attributes) : nullptr;
  if (has_attributes && copy == nullptr) throw python_error();
  rare().kinds.push_back(
      {argument, new_reference(reinterpret_cast<PyObject*>(Py_TYPE(object))), copy});
}

void Body::visit_inputs(TensorVisitor visitor) {
  for (at::Tensor& each : inputs_) visitor(each);
}

void Body::set_contexts(PyObject* recompute_context, PyObject* on_error) {
  if (recompute_context == nullptr && on_error == nullptr) return;
  rare().recompute_context = new_reference(recompute_context);
  rare().on_error = new_reference(on_error);
}

void Body::keep(std::unique_ptr<Closures> closures) {
  closures->end_forward();
  if (!closures->is_empty()) closures_ = std::move(closures);
}

namespace {

/// Sets `requires_grad` for the tensors inside an alias of a wrapper (a jagged tensor's values) as
/// forward had it. The alias was made below autograd, where its parts lost it.
void set_grad_of_parts(PyObject* alias, PyObject* original) {
  visit_entries(original, [&](PyObject* name, PyObject* value) {
    const at::Tensor* const part = tensor_in(value);
    if (part == nullptr || !part->requires_grad()) return;
    PyObject* const other = PyDict_GetItem(alias, name);
    const at::Tensor* const copy = other == nullptr || other == value ? nullptr : tensor_in(other);
    if (copy != nullptr && !copy->requires_grad() && copy->is_leaf()) copy->set_requires_grad(true);
  });
}

}  // namespace

// See Note [The function's objects].
PyObject* Body::wrap(at::Tensor tensor, std::size_t argument) {
  const Kind* kind = nullptr;
  if (rare_ != nullptr)
    for (const Kind& each : rare_->kinds)
      if (each.argument == argument) kind = &each;
  if (kind == nullptr) return THPVariable_Wrap(std::move(tensor));
  const bool had_object = has_object(*tensor.unsafeGetTensorImpl()->pyobj_slot());
  PyObject* const object =
      had_object ? THPVariable_Wrap(std::move(tensor)) : object_of_class(tensor, kind->type);
  if (object == nullptr || kind->attributes == nullptr) return object;
  PyObject** const attributes = _PyObject_GetDictPtr(object);
  if (had_object) {
    if (attributes != nullptr && *attributes != nullptr)
      set_grad_of_parts(*attributes, kind->attributes);
    return object;
  }
  if (attributes == nullptr) return object;
  if (*attributes == nullptr) *attributes = PyDict_New();
  if (*attributes == nullptr || PyDict_Update(*attributes, kind->attributes) != 0) {
    Py_DECREF(object);
    return nullptr;
  }
  return object;
}

PyObject* Body::call_again(PyObject** arguments) {
  const std::size_t flag = PY_VECTORCALL_ARGUMENTS_OFFSET;
  const auto function = py::reinterpret_steal<py::object>(
      closures_ == nullptr ? new_reference(kept_.front()) : closures_->function_again());
  if (!function) return nullptr;
  std::optional<ModuleState::Hold> hold;
  if (modules_ != nullptr) hold.emplace(*modules_);
  if (rare_ == nullptr || (rare_->recompute_context == nullptr && rare_->device_context == nullptr))
    return in_python([&] {
      return PyObject_Vectorcall(function.ptr(), arguments, num_positional_ | flag, names_);
    });
  const auto or_none = [](PyObject* object) { return object == nullptr ? Py_None : object; };
  c10::SmallVector<PyObject*, 16> all{nullptr, or_none(rare_->recompute_context),
                                      or_none(rare_->device_context), function.ptr()};
  all.append(arguments, arguments + num_arguments_);
  return in_python([&] {
    return PyObject_Vectorcall(names().run_in, all.data() + 1, (num_positional_ + 3) | flag,
                               names_);
  });
}

void Body::run_again(std::vector<at::Tensor>& inputs) {
  const Locked locked(Locked::AtEnd::Wait);
  const HookCycles cycles;  // ends last, when the function's objects are gone
  // The references that this run takes die with it, whatever happens.
  struct Arguments {
    c10::SmallVector<PyObject*, 16> all{nullptr};  // room for a method's object
    c10::SmallVector<PyObject*, 8> own;
    HeldTensors held;  // see Note [Tensors held twice]
    ~Arguments() {
      held.clear();
      if (own.empty()) return;
      const ErrorAside aside;
      in_python([&] {
        for (PyObject* each : own) Py_DECREF(each);
      });
    }
  } arguments;
  std::size_t next = 0, next_container = 0;
  ContainerCopies copies;
  for (std::size_t i = 1; i <= num_arguments_; ++i) {
    PyObject* argument = kept_[i];
    if (rare_ != nullptr && next_container < rare_->containers.size() &&
        rare_->containers[next_container] == i) {
      ++next_container;
      try {
        argument = copies.of(argument);
      } catch (const python_error&) {
        throw_persisted();
      }
      arguments.own.push_back(argument);
    }
    if (argument == nullptr) {
      arguments.held.push_back(std::move(inputs[next++]));
      argument = wrap(arguments.held.back(), i - 1);
      if (argument == nullptr) throw_persisted();
      arguments.own.push_back(argument);
    }
    arguments.all.push_back(argument);
  }
  const WithoutCompiler uncompiled;
  Rerun rerun(this);
  if (PyObject* const result = returned([&] { return call_again(arguments.all.data() + 1); }))
    Py_DECREF(result);
  else if (!rerun.take_stop())
    throw_arriving(rerun.may_have_all());
}

void Body::raise(CheckpointError error) {
  const Locked locked(Locked::AtEnd::Wait);
  // All needed tensors are there, and the function has caught the stop.
  if (Rerun::has_stopped(this)) Rerun::stop();
  PyObject* const on_error = rare_ == nullptr ? nullptr : rare_->on_error;
  if (on_error == nullptr) {
    set_error(error);
  } else if (PyObject* const made = make_error(error)) {
    PyObject* const result = in_python([&] { return PyObject_CallOneArg(on_error, made); });
    Py_XDECREF(result);
    if (result != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made)), made);
    Py_DECREF(made);
  }
  throw_persisted();
}

// ---- the call

namespace {

/// Keeps the numbers of a generator that is an argument the same as in forward. Any region keeps
/// the default one.
class GeneratorsKept {
 public:
  explicit GeneratorsKept(const Call& call) {
    for (Py_ssize_t i = 0; i < call.size(); ++i) {
      PyObject* const argument = call.arguments[i];
      if (PyObject_TypeCheck(argument, reinterpret_cast<PyTypeObject*>(THPGeneratorClass)) == 0)
        continue;
      const at::Generator& generator = reinterpret_cast<THPGenerator*>(argument)->cdata;
      if (generator != at::detail::getDefaultCPUGenerator())
        guards_.push_back(std::make_unique<GeneratorGuard>(generator));
    }
  }

 private:
  std::vector<std::unique_ptr<GeneratorGuard>> guards_;
};

/// Warns of a generator or a coroutine, which runs when the region is over, and drops nothing.
/// Returns whether the program continues.
bool warn_of_late_function(PyObject* result) {
  const bool is_coroutine = PyCoro_CheckExact(result) != 0;
  if (!is_coroutine && PyGen_CheckExact(result) == 0 && PyAsyncGen_CheckExact(result) == 0)
    return true;
  return PyErr_WarnFormat(
             PyExc_UserWarning, 1,
             "remat.checkpoint: the function returned a %s, whose code runs after the end of the "
             "region, so the region drops none of its tensors. Hint: make the functions that it "
             "calls regions.",
             is_coroutine ? "coroutine" : "generator") == 0;
}

}  // namespace

PyObject* run_region(const CheckpointOptions& options, const Call& call,
                     const std::vector<PyObject*>& modules) {
  if (!opens_region(options) || (options.level && is_in_eval(module_in(call.function))))
    return returned([&] {
      const ModulesWatched watched(modules);  // a region around it sees to the modules
      return call.run();
    });
  return guarded([&]() -> PyObject* {
    std::unique_ptr<Closures> closures;
    std::unique_ptr<ModuleState> state;
    std::optional<CheckpointOptions> with_state;
    if (modules.empty()) {
      closures = std::make_unique<Closures>(call.function);
    } else {
      state = std::make_unique<ModuleState>(modules);
      state->note_members();
      with_state = with_modules(options, *state);
    }
    std::optional<GeneratorsKept> generators;
    if (options.preserve_rng_state) generators.emplace(call);
    auto body = std::make_unique<Body>(call, InputArguments::All);
    Body& kept = *body;  // alive as long as the run
    ModuleState* const noted = state.get();
    if (state != nullptr) kept.keep(std::move(state));
    const HeldTensors held = kept.inputs();
    ForwardRun region(with_state ? *with_state : options, std::move(body),
                      FunctionFacts{.sees_end = true});
    if (region.has_ended()) return nullptr;
    py::object result;
    {
      const WithoutCompiler uncompiled;
      result = py::reinterpret_steal<py::object>(call.run());
      if (result && noted != nullptr) noted->settle();
    }
    if (!result) return nullptr;
    if (closures != nullptr && !closures->is_empty()) kept.keep(std::move(closures));
    region.finish([&](TensorVisitor visitor) { visit_tensors(result.ptr(), visitor); });
    return warn_of_late_function(result.ptr()) ? result.release().ptr() : nullptr;
  });
}

}  // namespace remat::python
