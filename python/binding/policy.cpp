// Policies, ready-made and of Python functions.

#include "policy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "containers.h"
#include "fields.h"

namespace remat::python {

namespace {

/// A question to a Python policy; empty when the question is over.
class Question {
 public:
  explicit Question(const PolicyContext& context) : context_(&context) {}
  void end() { context_ = nullptr; }
  const PolicyContext& context() const {
    if (context_ == nullptr)
      throw py::value_error("remat: a policy's context is valid during the call only");
    return *context_;
  }

 private:
  const PolicyContext* context_;
};

/// Converts an argument to the form that torch gives a dispatch mode, where numbers are dtypes if
/// the schema says so.
py::object argument_in(const c10::Argument& argument, const c10::IValue& value) {
  const c10::Type* type = argument.real_type().get();
  if (const auto* const optional = type->castRaw<c10::OptionalType>())
    type = optional->getElementType().get();
  if (!value.isInt()) return torch::jit::toPyObject(value);
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType:
      return py::cast(static_cast<at::ScalarType>(value.toInt()));
    case c10::TypeKind::LayoutType:
      // LibTorch before 2.12 has no cast for it.
      return py::reinterpret_borrow<py::object>(
          reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(value.toInt()))));
    case c10::TypeKind::MemoryFormatType:
      return py::cast(static_cast<at::MemoryFormat>(value.toInt()));
    default:
      return torch::jit::toPyObject(value);
  }
}

py::tuple values_of(c10::ArrayRef<c10::IValue> values) {
  py::tuple all(values.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = torch::jit::toPyObject(values[i]);
  return all;
}

/// Returns (args, kwargs) of a call in the form that torch gives a dispatch mode: without defaults
/// at the end.
py::tuple call_of(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> values) {
  const auto& arguments = schema.arguments();
  const auto is_default = [&](std::size_t i) {
    return arguments[i].default_value().has_value() && *arguments[i].default_value() == values[i];
  };
  std::size_t first_keyword = 0;
  while (first_keyword < values.size() && !arguments[first_keyword].kwarg_only()) ++first_keyword;
  std::size_t num_positional = first_keyword;
  while (num_positional > 0 && is_default(num_positional - 1)) --num_positional;
  py::tuple args(num_positional);
  for (std::size_t i = 0; i < num_positional; ++i) args[i] = argument_in(arguments[i], values[i]);
  py::dict kwargs;
  for (std::size_t i = first_keyword; i < values.size(); ++i)
    if (!is_default(i)) kwargs[arguments[i].name().c_str()] = argument_in(arguments[i], values[i]);
  return py::make_tuple(args, kwargs);
}

CheckpointPolicy answer_in(const py::object& answer, py::handle function,
                           const PolicyContext& context) {
  if (PyBool_Check(answer.ptr()))
    return answer.ptr() == Py_True ? CheckpointPolicy::MustSave : CheckpointPolicy::PreferRecompute;
  static PyObject* const type = imported("torch.utils.checkpoint", "CheckpointPolicy");
  if (reinterpret_cast<PyObject*>(Py_TYPE(answer.ptr())) == type)
    return static_cast<CheckpointPolicy>(py::int_(answer.attr("value")).cast<int>());
  const std::string asked(context.op_name);
  // No TypeError: `x @ y` would make one of its own of it.
  PyErr_Format(
      PyExc_ValueError,
      "remat: the policy %R returned %R for %s.%s\n"
      "Hint: return a CheckpointPolicy, such as CheckpointPolicy.MUST_SAVE, or a bool: True to "
      "keep the result, False to compute it again.",
      function.ptr(), answer.ptr(), asked.c_str(),
      answer.is_none() ? "\n"
                         "Cause: a function that ends without `return` returns None."
                       : "");
  throw py::error_already_set();
}

/// Asks a function of the program about a call.
PolicyFn asks(py::handle function) {
  return [kept = shared(function)](const PolicyContext& context) {
    return call_locked([&] {
      const py::object question = py::cast(Question(context));
      struct Ended {
        ~Ended() { question.cast<Question&>().end(); }
        const py::object& question;
      } const ended{question};
      return answer_in(call_python(kept.get(), question), kept.get(), context);
    });
  };
}

SelectiveOptions selective_in(const py::dict& options) {
  using Options = SelectiveOptions;
  static const std::vector<Option<Options>> all{REMAT_MEMBER(Options, allow_cache_entry_mutation),
                                                REMAT_MEMBER(Options, save_through_hooks),
                                                REMAT_MEMBER(Options, ask_again),
                                                REMAT_MEMBER(Options, ask_after),
                                                REMAT_MEMBER(Options, min_offload_bytes),
                                                REMAT_MEMBER(Options, prefetch_depth),
                                                REMAT_MEMBER(Options, max_bytes_in_flight),
                                                REMAT_MEMBER(Options, keep_last)};
  return options_of(options, all);
}

/// The lines of a dictionary from patterns to answers.
std::vector<PolicyLine> lines_of(const py::dict& table) {
  std::vector<PolicyLine> lines;
  for (const auto& [pattern, answer] : table)
    lines.push_back({pattern.cast<std::string>(),
                     static_cast<CheckpointPolicy>(answer.attr("value").cast<int>())});
  return lines;
}

/// The policy that a function of remat/_policy.py makes.
Policy policy_of(const std::string& function, const py::tuple& given, const py::dict& options) {
  if (function == "_either") return given[0].cast<Policy>() | given[1].cast<Policy>();
  const SelectiveOptions all = selective_in(options);
  if (function == "Policy") return Policy(asks(given[0]), all);
  static const std::map<std::string, Policy (*)(SelectiveOptions)> ready{
      {"save_matmuls", save_matmuls},
      {"save_collectives", save_collectives},
      {"save_random", save_random},
      {"save_nondeterministic", save_nondeterministic},
      {"save_host_copies", save_host_copies},
      {"save_effects", save_effects},
      {"save_unrepeatable", save_unrepeatable}};
  if (const auto found = ready.find(function); found != ready.end()) return found->second(all);
  if (function == "parse") return Policy::parse(given[0].cast<std::string>(), all);
  if (function == "policy_table") return policy_table(lines_of(given[0]), all);
  using Names = std::vector<std::string>;
  static const std::map<std::string, Policy (*)(Names, SelectiveOptions)> listed{
      {"save_ops", save_ops},
      {"offload_ops", offload_ops},
      {"save_names", save_names},
      {"save_all_but_names", save_all_but_names},
      {"offload_names", offload_names}};
  return listed.at(function)(value_in<Names>(given[0], "names"), all);
}

/// The tensor that a function of the package was given. Throws py::error_already_set.
const at::Tensor& named_tensor(const py::object& x, const char* function) {
  if (const at::Tensor* const tensor = tensor_in(x.ptr())) return *tensor;
  PyErr_Format(PyExc_TypeError, "remat.%s: x must be a torch.Tensor, got %R", function, x.ptr());
  throw py::error_already_set();
}

}  // namespace

Policy policy_in(PyObject* object) {
  if (object == Py_None) return {};
  if (py::isinstance<Policy>(object)) return py::handle(object).cast<Policy>();
  if (PyCallable_Check(object) != 0) return Policy(asks(object));
  if (PyUnicode_Check(object) != 0 || PyDict_Check(object) != 0) {
    static PyObject* const of_table = imported("remat._policy", "_of_table");
    return call_python(of_table, py::handle(object)).cast<Policy>();
  }
  PyErr_Format(
      PyExc_TypeError,
      "remat: a policy must be a remat.Policy, a table (dict or text), a function or None, got %R",
      object);
  throw py::error_already_set();
}

void add_policy(py::module_& module) {
  py::class_<Question>(module, "PolicyContext",
                       "One question to a policy function; valid during the call only.")
      .def_property_readonly(
          "op_name", [](const Question& self) { return std::string(self.context().op_name); },
          "The operator: 'aten::mm.default'; 'remat::checkpoint_name' for a value with a name.")
      .def_property_readonly(
          "name", [](const Question& self) { return self.context().name; },
          "The name that `checkpoint_name` gave the value; '' for operators.")
      .def_property_readonly(
          "is_recompute", [](const Question& self) { return self.context().is_recompute; },
          "True in a recompute, which needs `ask_again`.")
      .def_property_readonly(
          "args", [](const Question& self) { return values_of(self.context().args); },
          "The operator's arguments, in the order of its schema.")
      .def_property_readonly(
          "op",
          [](const Question& self) {
            return py::reinterpret_borrow<py::object>(
                torch::detail::getTorchApiFunction(self.context().op));
          },
          "The operator as torch.ops has it: torch.ops.aten.mm.default.")
      .def_property_readonly(
          "module_path", [](const Question& self) { return self.context().module_path(); },
          "The path of the innermost module whose call is under way: 'layers.0.attention'; ''\n"
          "for a root or none.")
      .def_property_readonly(
          "parameter_path", [](const Question& self) { return self.context().parameter_path(); },
          "The path of the first parameter that the operator reads; '' if it reads none.")
      .def_property_readonly(
          "results", [](const Question& self) { return values_of(self.context().results); },
          "The operator's results, in the order of its schema; () unless asked with `ask_after`.")
      .def("_call_of", [](const Question& self) {
        return call_of(self.context().op.schema(), self.context().args);
      });
  py::class_<Policy>(module, "_Policy").def(py::init(wrapped(policy_of)));
  module.def("checkpoint_name", wrapped([](const py::object& x, const py::object& name) {
               const at::Tensor& tensor = named_tensor(x, "checkpoint_name");
               if (PyUnicode_Check(name.ptr()) == 0) {
                 PyErr_Format(PyExc_TypeError, "remat.checkpoint_name: name must be a str, got %R",
                              name.ptr());
                 throw py::error_already_set();
               }
               return checkpoint_name(tensor, name.cast<std::string>());
             }));
  module.def("_register_effect", wrapped([](const std::string& op) { register_effect(op); }));
  module.def("pin", wrapped([](const py::object& x) { return pin(named_tensor(x, "pin")); }));
}

}  // namespace remat::python
