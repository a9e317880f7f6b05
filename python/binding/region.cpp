// A Python function as a region: its arguments, its recomputes, its stop, its errors; `checkpoint`
// itself.

#include "region.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hook_cycles.h"
#include "modules.h"
#include "policy.h"
#include "remat/options.h"
#include "remat/state.h"
#include "tensor_class.h"

namespace remat::python {

const at::Tensor* tensor_in(PyObject* object) {
  if (!THPVariable_CheckTypeExact(Py_TYPE(object)) &&
      PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) == 0)
    return nullptr;
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.defined() ? &tensor : nullptr;
}

namespace {

PyObject* new_reference(PyObject* object) {
  Py_XINCREF(object);
  return object;
}

/// The interpreter's frame evaluation hook, in torch's hands.
PyObject* set_eval_frame() {
  static PyObject* const function =
      py::object(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame"))
          .release()
          .ptr();
  return function;
}

}  // namespace

void visit_tensors(PyObject* result, TensorVisitor visitor, int depth) {
  if (const at::Tensor* const tensor = tensor_in(result)) {
    visitor(const_cast<at::Tensor&>(*tensor));  // who looks at results changes none
    return;
  }
  if (result == Py_None || depth == 16) return;
  if (PyTuple_Check(result)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result); ++i)
      visit_tensors(PyTuple_GET_ITEM(result, i), visitor, depth + 1);
  } else if (PyList_Check(result)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(result); ++i)
      visit_tensors(PyList_GET_ITEM(result, i), visitor, depth + 1);
  } else if (PyDict_Check(result)) {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(result, &position, &key, &value) != 0)
      visit_tensors(value, visitor, depth + 1);
  } else {  // past the interpreter: nothing of the program's runs
    static PyObject* const fields = PyUnicode_InternFromString("__dataclass_fields__");
    if (_PyType_Lookup(Py_TYPE(result), fields) == nullptr) return;
    PyObject** const attributes = _PyObject_GetDictPtr(result);  // null: one with slots
    if (attributes != nullptr && *attributes != nullptr)
      visit_tensors(*attributes, visitor, depth + 1);
  }
}

WithoutCompiler::WithoutCompiler() {
  before_ = PyObject_CallOneArg(set_eval_frame(), Py_None);
  if (before_ == nullptr) throw python_error();
  if (before_ == Py_None) Py_CLEAR(before_);
}

WithoutCompiler::~WithoutCompiler() {
  if (before_ == nullptr) return;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  Py_XDECREF(PyObject_CallOneArg(set_eval_frame(), before_));
  PyErr_Restore(type, value, traceback);
  Py_DECREF(before_);
}

// ---- containers among the arguments

namespace {

PyTypeObject* type_of_collections(const char* name) {
  return reinterpret_cast<PyTypeObject*>(
      py::object(py::module_::import("collections").attr(name)).release().ptr());
}

/// Copies built-in containers in depth, and shares everything else. One that is there twice is
/// copied once.
class ContainerCopies {
 public:
  /// A new reference to the copy, or to the object itself if there is no container in it that can
  /// change.
  /// Throws python_error.
  PyObject* of(PyObject* object) {
    PyObject* const copy = copied(object, 0);
    if (copy == nullptr) throw python_error();
    return copy;
  }

 private:
  /// `num_known`: references that containers have which are copied, or copies.
  PyObject* copied(PyObject* object, Py_ssize_t num_known) {
    if (tensor_in(object) != nullptr) return new_reference(object);
    static PyTypeObject* const ordered = type_of_collections("OrderedDict");
    static PyTypeObject* const with_default = type_of_collections("defaultdict");
    static PyTypeObject* const deque = type_of_collections("deque");
    const PyTypeObject* const type = Py_TYPE(object);
    const bool is_tuple = type == &PyTuple_Type, is_list = type == &PyList_Type,
               is_set = type == &PySet_Type, is_plain_dictionary = type == &PyDict_Type;
    if (!is_tuple && !is_list && !is_set && !is_plain_dictionary && type != ordered &&
        type != with_default && type != deque)
      return new_reference(object);
    const bool is_shared = Py_REFCNT(object) > num_known;  // else this is the only way to it
    if (is_shared)
      if (const auto found = all_.find(object); found != all_.end())
        return new_reference(found->second);
    const auto noted = [&](PyObject* copy) {
      if (is_shared && copy != nullptr) all_.emplace(object, copy);
      return copy;
    };
    if (is_tuple) return noted(copied_tuple(object));
    if (is_list) return with_items(noted(PyList_GetSlice(object, 0, PyList_GET_SIZE(object))));
    if (is_set) return noted(PySet_New(object));
    if (is_plain_dictionary) return with_values(noted(PyDict_Copy(object)));
    PyObject* const copy = in_python([&] { return PyObject_CallMethod(object, "copy", nullptr); });
    return type == deque ? noted(copy) : with_values(noted(copy));
  }

  PyObject* copied_tuple(PyObject* tuple) {
    PyObject* copy = nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      PyObject* const item = PyTuple_GET_ITEM(tuple, i);
      PyObject* const item_copy = copied(item, copy == nullptr ? 1 : 2);
      if (item_copy == item) {
        Py_DECREF(item_copy);
        continue;
      }
      if (item_copy != nullptr && copy == nullptr) {
        copy = PyTuple_New(PyTuple_GET_SIZE(tuple));
        for (Py_ssize_t j = 0; copy != nullptr && j < PyTuple_GET_SIZE(tuple); ++j)
          PyTuple_SET_ITEM(copy, j, new_reference(PyTuple_GET_ITEM(tuple, j)));
      }
      if (item_copy == nullptr || copy == nullptr) {
        Py_XDECREF(item_copy);
        Py_XDECREF(copy);
        return nullptr;
      }
      Py_DECREF(item);  // which the tuple that is copied still has
      PyTuple_SET_ITEM(copy, i, item_copy);
    }
    return copy == nullptr ? new_reference(tuple) : copy;
  }

  /// Both: null with a Python error set, also if that is what they are given.
  PyObject* with_items(PyObject* copy) {
    for (Py_ssize_t i = 0; copy != nullptr && i < PyList_GET_SIZE(copy); ++i) {
      PyObject* const item_copy = copied(PyList_GET_ITEM(copy, i), 2);
      if (item_copy == nullptr) return forget(copy);
      PyList_SetItem(copy, i, item_copy);
    }
    return copy;
  }
  PyObject* with_values(PyObject* copy) {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (copy != nullptr && PyDict_Next(copy, &position, &key, &value) != 0) {
      PyObject* const value_copy = copied(value, 2);
      if (value_copy == nullptr) return forget(copy);
      // The key is there: the dictionary keeps its size and order.
      const int failed = value_copy == value ? 0 : PyDict_SetItem(copy, key, value_copy);
      Py_DECREF(value_copy);
      if (failed != 0) return forget(copy);
    }
    return copy;
  }

  PyObject* forget(PyObject* copy) {
    all_.clear();
    Py_DECREF(copy);
    return nullptr;
  }

  std::unordered_map<PyObject*, PyObject*> all_;
};

bool may_be_container(PyObject* object) {
  return tensor_in(object) == nullptr && PyUnicode_CheckExact(object) == 0 && object != Py_None;
}

}  // namespace

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
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(original, &position, &name, &value) != 0) {
    const at::Tensor* const part = tensor_in(value);
    if (part == nullptr || !part->requires_grad()) continue;
    PyObject* const other = PyDict_GetItem(alias, name);
    const at::Tensor* const copy = other == nullptr || other == value ? nullptr : tensor_in(other);
    if (copy != nullptr && !copy->requires_grad() && copy->is_leaf()) copy->set_requires_grad(true);
  }
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
      PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
      PyErr_Fetch(&type, &value, &traceback);
      in_python([&] {
        for (PyObject* each : own) Py_DECREF(each);
      });
      PyErr_Restore(type, value, traceback);
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
  if (PyObject* const result = call_again(arguments.all.data() + 1))
    Py_DECREF(result);
  else if (!rerun.take_stop())
    throw_arriving(rerun.may_have_all());
}

const TensorNames* Body::tensor_names() const { return tensor_names_of(kept_.front()); }

void Body::raise(CheckpointError error) {
  const Locked locked(Locked::AtEnd::Wait);
  // All that is needed is there, and the function has caught the stop.
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

// ---- checkpoint

namespace {

/// A generator that is an argument is drawn from as in forward. The default one is in any region.
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

/// A generator or a coroutine runs when the region is over, and drops nothing. Whether the program
/// goes on.
bool warn_of_late_function(PyObject* result) {
  const bool is_coroutine = PyCoro_CheckExact(result) != 0;
  if (!is_coroutine && PyGen_CheckExact(result) == 0 && PyAsyncGen_CheckExact(result) == 0)
    return true;
  return PyErr_WarnFormat(
             PyExc_UserWarning, 1,
             "remat.checkpoint: the function returned a %s, whose code runs when the region is over: nothing that it "
             "computes is dropped. Hint: make regions of the functions that it calls.",
             is_coroutine ? "coroutine" : "generator") == 0;
}

}  // namespace

PyObject* run_region(const CheckpointOptions& options, const Call& call) {
  const auto run = [&] {
    return in_python([&] {
      return PyObject_Vectorcall(call.function, call.arguments,
                                 static_cast<std::size_t>(call.num_positional), call.names);
    });
  };
  if (!opens_region(options)) return run();
  try {
    torch::PyWarningHandler warnings;
    try {
      std::optional<GeneratorsKept> generators;
      if (options.preserve_rng_state) generators.emplace(call);
      auto closures = std::make_unique<Closures>(call.function);
      auto body = std::make_unique<Body>(call, InputArguments::All);
      Body& kept = *body;  // alive as long as the run
      const HeldTensors held = kept.inputs();
      ForwardRun region(options, std::move(body), FunctionFacts{.sees_end = true});
      if (region.has_ended()) {
        warnings.set_in_exception();
        return nullptr;
      }
      py::object result;
      {
        const WithoutCompiler uncompiled;
        result = py::reinterpret_steal<py::object>(run());
      }
      if (!result) {
        warnings.set_in_exception();
        return nullptr;
      }
      if (!closures->is_empty()) kept.keep(std::move(closures));
      region.finish([&](TensorVisitor visitor) { visit_tensors(result.ptr(), visitor); });
      if (!warn_of_late_function(result.ptr())) return nullptr;
      return result.release().ptr();
    } catch (...) {
      warnings.set_in_exception();
      set_error_in_flight();
      return nullptr;
    }
  } catch (...) {
    set_error_in_flight();
    return nullptr;
  }
}

namespace {

/// Options of `checkpoint` by the names of its keyword arguments.
class OptionsReader {
 public:
  /// Whether `name` is an option's; takes its value then. Throws python_error for a wrong value.
  bool take(PyObject* name, PyObject* value) {
    const std::optional<std::string_view> text = view(name);
    if (!text) throw python_error();
    if (*text == "name") return options.name = text_of(value, "name"), true;
    if (*text == "policy") return options.policy = policy_in(value), true;
    if (*text == "early_stop") return options.early_stop = flag_in(value, "early_stop"), true;
    if (*text == "offload_inputs")
      return options.offload_inputs = flag_in(value, "offload_inputs"), true;
    if (*text == "offload_prefetch_depth")
      return options.offload_prefetch_depth = count_in(value, "offload_prefetch_depth"), true;
    if (*text == "preserve_rng_state")
      return options.preserve_rng_state = flag_in(value, "preserve_rng_state"), true;
    if (*text == "strict_unpack")
      return options.strict_unpack = flag_in(value, "strict_unpack"), true;
    if (*text == "debug") return options.debug = flag_in(value, "debug"), true;
    if (*text == "determinism_check")
      return options.determinism_check =
                 choice<DeterminismCheck>(value, "determinism_check",
                                          {{"metadata", DeterminismCheck::Metadata},
                                           {"default", DeterminismCheck::Metadata},
                                           {"none", DeterminismCheck::None},
                                           {"layout", DeterminismCheck::Layout},
                                           {"values", DeterminismCheck::Values}}),
             true;
    if (*text == "value_comparison") return set_value_comparison(value), true;
    if (*text == "level") return options.level = level_in(value), true;
    if (*text == "fingerprint") return set_fingerprint(value), true;
    if (*text == "capture_check")
      return options.capture_check = choice<CaptureCheck>(
                 value, "capture_check",
                 {{"raise", CaptureCheck::Raise}, {"ignore", CaptureCheck::Ignore}}),
             true;
    if (*text == "buffers")
      return options.buffers = choice<BufferPolicy>(
                 value, "buffers",
                 {{"restore", BufferPolicy::Restore}, {"ignore", BufferPolicy::Ignore}}),
             true;
    if (*text == "modules") {
      static PyObject* const type =
          py::object(py::module_::import("torch.nn").attr("Module")).release().ptr();
      const auto all = py::reinterpret_steal<py::object>(PyObject_GetIter(value));
      if (!all) refuse("modules", "a list of modules", value);
      for (const py::handle each : all) {
        if (PyObject_IsInstance(each.ptr(), type) != 1) {
          PyErr_Format(PyExc_TypeError, "remat.checkpoint: modules must be modules, and one is %R",
                       each.ptr());
          throw python_error();
        }
        modules.push_back(each.ptr());
      }
      return true;
    }
    if (*text == "input_mode")
      return options.inputs = choice<InputMode>(
                 value, "input_mode",
                 {{"shared", InputMode::Shared}, {"copy_on_write", InputMode::CopyOnWrite}}),
             true;
    return false;
  }
  CheckpointOptions options;
  std::vector<PyObject*> modules;  // borrowed from the argument

 private:
  void set_fingerprint(PyObject* function) {
    if (function == Py_None) return;
    if (PyCallable_Check(function) == 0) {
      PyErr_Format(PyExc_TypeError, "remat.checkpoint: fingerprint must be a function, and is %R",
                   function);
      throw python_error();
    }
    Py_INCREF(function);
    const std::shared_ptr<PyObject> kept(function, [](PyObject* last) { drop(&last, 1); });
    options.fingerprint = [kept](const at::Tensor& tensor) {
      const Locked locked(Locked::AtEnd::Wait);
      try {
        return std::string(py::str(call_python(kept.get(), tensor)));
      } catch (py::error_already_set& error) {
        error.restore();
      }
      throw_persisted();
    };
  }
  void set_value_comparison(PyObject* rule) {
    if (rule == Py_None) return;
    static PyObject* const type =
        py::object(py::module_::import("remat._region").attr("ValueComparison")).release().ptr();
    if (PyObject_IsInstance(rule, type) != 1) {
      PyErr_Format(PyExc_TypeError,
                   "remat.checkpoint: value_comparison must be a remat.ValueComparison, and is %R",
                   rule);
      throw python_error();
    }
    const auto fact = [&](const char* name) { return py::handle(rule).attr(name); };
    options.values = {.absolute_tolerance = py::float_(fact("absolute_tolerance")),
                      .relative_tolerance = py::float_(fact("relative_tolerance")),
                      .max_elements = py::int_(fact("max_elements")),
                      .nan = choice<ValueComparison::Nan>(py::object(fact("nan")).ptr(), "nan",
                                                          {{"bits", ValueComparison::Nan::Bits},
                                                           {"any", ValueComparison::Nan::Any}})};
  }
  static std::optional<int64_t> level_in(PyObject* value) {
    if (value == Py_None) return std::nullopt;
    if (PyLong_Check(value) == 0 || PyBool_Check(value) != 0)
      refuse("level", "an int or None", value);
    const long long level = PyLong_AsLongLong(value);
    if (level == -1 && PyErr_Occurred() != nullptr) throw python_error();
    return level;
  }
  static int64_t count_in(PyObject* value, const char* option) {
    if (PyIndex_Check(value) == 0 || PyBool_Check(value) != 0) refuse(option, "an int", value);
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value));
    if (!index) throw python_error();
    const long long count = PyLong_AsLongLong(index.ptr());
    if (count == -1 && PyErr_Occurred() != nullptr) throw python_error();
    if (count < 0) {
      PyErr_Format(PyExc_ValueError, "remat.checkpoint: %s must be 0 or more, and is %R", option,
                   value);
      throw python_error();
    }
    return count;
  }
  static std::optional<std::string_view> view(PyObject* text) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) return std::nullopt;
    return std::string_view(data, static_cast<std::size_t>(size));
  }
  static std::string text_of(PyObject* value, const char* option) {
    if (PyUnicode_Check(value) == 0) refuse(option, "a str", value);
    const auto text = view(value);
    if (!text) throw python_error();
    return std::string(*text);
  }
  /// What is no flag would be one all the same: "no" is true in Python.
  static bool flag_in(PyObject* value, const char* option) {
    if (PyBool_Check(value) != 0) return value == Py_True;
    const std::string_view type = Py_TYPE(value)->tp_name;
    if (type != "numpy.bool" && type != "numpy.bool_") refuse(option, "True or False", value);
    const int is = PyObject_IsTrue(value);
    if (is < 0) throw python_error();
    return is != 0;
  }
  [[noreturn]] static void refuse(const char* option, const char* wanted, PyObject* value) {
    PyErr_Format(PyExc_TypeError, "remat.checkpoint: %s must be %s, and is %R", option, wanted,
                 value);
    throw python_error();
  }
  template <class T>
  static T choice(PyObject* value, const char* option,
                  std::initializer_list<std::pair<std::string_view, T>> choices) {
    const std::string text = text_of(value, option);
    std::string known;
    for (const auto& [name, meaning] : choices) {
      if (name == text) return meaning;
      known += (known.empty() ? "'" : ", '") + std::string(name) + "'";
    }
    PyErr_Format(PyExc_ValueError, "remat.checkpoint: %s must be one of %s, and is '%s'", option,
                 known.c_str(), text.c_str());
    throw python_error();
  }
};

}  // namespace

CheckpointOptions options_in(const py::dict& named, bool has_modules) {
  OptionsReader reader;
  for (const auto& [name, value] : named) {
    if (reader.take(name.ptr(), value.ptr()) && (has_modules || reader.modules.empty())) continue;
    PyErr_Format(
        PyExc_TypeError,
        "remat: there is no option %R here. Hint: give options of remat.checkpoint, which its "
        "help() lists%s",
        name.ptr(), has_modules ? "" : ", but for modules");
    throw python_error();
  }
  return reader.options;
}

namespace {

/// A new exception for a call without arguments, or the one that is set.
void explain_missing_arguments(PyObject* function) {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* const better = in_python(
      [&] { return PyObject_CallFunctionObjArgs(names().unbound, function, value, nullptr); });
  if (better == value) {
    PyErr_Restore(type, value, traceback);
  } else {  // null: a signal's exception is set
    if (better != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(better)), better);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
  }
  Py_XDECREF(better);
}

/// checkpoint(function, *args, **options_and_kwargs)
PyObject* checkpoint(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  if (count == 0) return PyObject_Vectorcall(names().decorator, arguments, 0, keywords);
  static const CheckpointOptions defaults;
  Call call{arguments[0], arguments + 1, count - 1, keywords};
  try {
    if (PyType_Check(call.function) != 0 || PyCallable_Check(call.function) == 0)
      call_python(names().refuse_function, "remat.checkpoint", py::handle(call.function));
    PyObject* const module = module_in(call.function);
    if (keywords == nullptr) {
      PyObject* const result = module == nullptr ? run_region(defaults, call)
                                                 : run_region_of_modules(defaults, call, {module});
      if (result == nullptr && count == 1 && PyErr_ExceptionMatches(PyExc_TypeError) != 0)
        explain_missing_arguments(call.function);
      return result;
    }
    OptionsReader reader;
    if (module != nullptr) reader.modules.push_back(module);
    c10::SmallVector<PyObject*, 16> own(call.arguments, call.arguments + call.num_positional);
    py::list names;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keywords); ++i) {
      PyObject* const name = PyTuple_GET_ITEM(keywords, i);
      PyObject* const value = call.arguments[call.num_positional + i];
      if (reader.take(name, value)) continue;
      own.push_back(value);
      names.append(py::handle(name));
    }
    const py::object kept_names = names.empty() ? py::object() : py::object(py::tuple(names));
    call.names = kept_names.ptr();
    call.arguments = own.data();
    return reader.modules.empty() ? run_region(reader.options, call)
                                  : run_region_of_modules(reader.options, call, reader.modules);
  } catch (...) {
    set_error_in_flight();
    return nullptr;
  }
}

constexpr char checkpoint_text[] =
    R"(checkpoint(function, /, *args, name="", policy=None, early_stop=True, determinism_check="metadata",
           fingerprint=None, capture_check="raise", offload_inputs=False, offload_prefetch_depth=2,
           preserve_rng_state=True, input_mode="shared", buffers="restore", modules=(), strict_unpack=False, debug=False,
           level=None, value_comparison=None, **kwargs)
checkpoint(**options) -> a decorator, `@checkpoint()` without options
--

Runs `function(*args, **kwargs)` now and returns its result. Nothing that autograd saves inside is kept: it is
computed again, by running `function` again with the same arguments, when backward first asks for it.

Memory: tensors among the arguments stay until the graph that refers to the region is gone; under an enclosing
region not even they do. What a container or another object holds stays as it is, with its history.
Arguments: a tensor arrives in a recompute with the same data and without its history; a leaf, and what needs no
gradient, as the same object.

name: shown in errors, reports and traces.
policy: what is kept instead of recomputed: `save_ops([...])`, `save_matmuls()`, `a | b`, or a function of a
    PolicyContext that returns a CheckpointPolicy or a bool.
early_stop: a recompute ends with the last tensor that backward needs.
determinism_check: how recomputed tensors are compared with those of forward: "none" (their number), "metadata"
    (shape, dtype, device), "layout" (strides too), "values" (bitwise).
fingerprint: a function of a tensor, whose results' texts are compared instead.
capture_check: "raise" if a parameter or captured tensor changed before the recompute, or "ignore".
offload_inputs: inputs on an accelerator wait on the CPU.
offload_prefetch_depth: with `offload_inputs`, how many copies back are begun ahead of the one that is read, in the
    reverse order of the regions, of inputs of regions with the same number; 0: none.
preserve_rng_state: a recompute draws the random numbers that forward drew: from the default generators, from any other
    of the CPU, and from one that is an argument itself. `preserve_generator` is for others.
input_mode: "copy_on_write" for functions that write to their arguments.
buffers: "restore": a recompute sees the buffers of the function's modules (running statistics) as forward saw
    them, and puts them back; "ignore": it writes them once more. The function is a module, its bound method, a
    functools.partial of one, or names in `modules` those that it calls. Their training flags are forward's, too.
strict_unpack: a second read of a saved tensor in one backward is an error instead of one more recompute.
debug: records the operators of both passes for the error report.
level: under `checkpoint_level(n)` the call is a region if n >= level, else it runs plainly; 0: never. None: always.
value_comparison: a ValueComparison, which says how determinism_check="values" compares elements.

Grad mode off: the function runs plainly.
Threads: any; a recompute runs on the thread of the backward that asks.
Raises: what `function` raises, with its traceback; CheckpointError; ValueError for options that are wrong, TypeError
for those of a wrong type.)";

PyMethodDef checkpoint_method{
    "checkpoint", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(checkpoint)),
    METH_FASTCALL | METH_KEYWORDS, checkpoint_text};

}  // namespace

void add_region(py::module_& module) {
  module.def("_check_options", torch::wrap_pybind_function([](const py::dict& options) {
               options_in(options, /*has_modules=*/true);
             }));
  module.attr("checkpoint") =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&checkpoint_method, nullptr, nullptr));
}

}  // namespace remat::python
