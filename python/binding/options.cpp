// The options of `checkpoint` as Python programs give them. Values of the common types are read
// here; all others go to the package's validator, which reads or refuses them.

#include "options.h"

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "containers.h"
#include "module_tree.h"
#include "policy.h"
#include "remat/region_handle.h"

namespace remat::python {

namespace {

constexpr char user[] = "remat.checkpoint";

std::string_view view(PyObject* text) {
  Py_ssize_t size = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(text, &size);
  if (data == nullptr) throw python_error();
  return std::string_view(data, static_cast<std::size_t>(size));
}

std::string text_of(PyObject* value, const char* option) {
  if (PyUnicode_Check(value) == 0) checked(user, option, "str", value);
  return std::string(view(value));
}

bool flag_in(PyObject* value, const char* option) {
  if (PyBool_Check(value) != 0) return value == Py_True;
  return py::bool_(checked(user, option, "bool", value));
}

int64_t int_in(PyObject* value, const char* option, const char* annotation) {
  if (PyLong_CheckExact(value) == 0) checked(user, option, annotation, value);
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value));
  if (!index) throw python_error();
  const long long number = PyLong_AsLongLong(index.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw python_error();
  return number;
}

template <class T>
using Choices = std::vector<std::pair<std::string_view, T>>;
template <class T>
const Choices<T> choices;
template <>
const Choices<DeterminismCheck> choices<DeterminismCheck>{{"metadata", DeterminismCheck::Metadata},
                                                          {"default", DeterminismCheck::Metadata},
                                                          {"none", DeterminismCheck::None},
                                                          {"layout", DeterminismCheck::Layout},
                                                          {"values", DeterminismCheck::Values}};
template <>
const Choices<CaptureCheck> choices<CaptureCheck>{{"raise", CaptureCheck::Raise},
                                                  {"ignore", CaptureCheck::Ignore}};
template <>
const Choices<BufferPolicy> choices<BufferPolicy>{{"restore", BufferPolicy::Restore},
                                                  {"ignore", BufferPolicy::Ignore}};
template <>
const Choices<InputMode> choices<InputMode>{{"shared", InputMode::Shared},
                                            {"copy_on_write", InputMode::CopyOnWrite}};
template <>
const Choices<Transforms> choices<Transforms>{{"plain", Transforms::RunPlainly},
                                              {"refuse", Transforms::Refuse}};
template <>
const Choices<ValueComparison::Nan> choices<ValueComparison::Nan>{
    {"bits", ValueComparison::Nan::Bits}, {"any", ValueComparison::Nan::Any}};

template <class T>
T choice_in(PyObject* value, const char* option) {
  const std::string text = text_of(value, option);
  std::string known;
  for (const auto& [name, meaning] : choices<T>) {
    if (name == text) return meaning;
    known += (known.empty() ? "'" : ", '") + std::string(name) + "'";
  }
  PyErr_Format(PyExc_ValueError, "%s: %s must be one of %s, got '%s'", user, option, known.c_str(),
               text.c_str());
  throw python_error();
}

int64_t depth_in(PyObject* value, const char* option) {
  const int64_t depth = int_in(value, option, "int");
  if (depth >= 0) return depth;
  PyErr_Format(PyExc_ValueError, "%s: %s must be 0 or more, got %R", user, option, value);
  throw python_error();
}

std::function<std::string(const at::Tensor&)> fingerprint_in(PyObject* function,
                                                             const char* option) {
  if (function == Py_None) return {};
  checked(user, option, "Callable[[torch.Tensor], object]", function);
  return [kept = shared(function)](const at::Tensor& tensor) {
    return call_locked([&] { return std::string(py::str(call_python(kept.get(), tensor))); });
  };
}

ValueComparison comparison_in(PyObject* rule, const char* option) {
  if (rule == Py_None) return {};
  checked(user, option, "ValueComparison", rule);
  const auto fact = [&](const char* name) { return py::object(py::handle(rule).attr(name)); };
  return {.absolute_tolerance = py::float_(fact("absolute_tolerance")),
          .relative_tolerance = py::float_(fact("relative_tolerance")),
          .max_elements = py::int_(fact("max_elements")),
          .nan = choice_in<ValueComparison::Nan>(fact("nan").ptr(), "nan")};
}

std::optional<int64_t> level_in(PyObject* value, const char* option) {
  if (value == Py_None) return std::nullopt;
  const int64_t level = int_in(value, option, "Optional[int]");
  if (level >= 0) return level;
  PyErr_Format(PyExc_ValueError,
               "%s: %s must be 0 or more, and is %R. Hint: 0 for never, 1 and up for the "
               "level that turns the region on.",
               user, option, value);
  throw python_error();
}

std::shared_ptr<RegionHandle> handle_in(PyObject* value, const char* option) {
  if (value == Py_None) return nullptr;
  return checked(user, option, "Optional[RegionHandle]", value)
      .cast<std::shared_ptr<RegionHandle>>();
}

Policy policy_of(PyObject* value, const char*) { return policy_in(value); }

void add_modules(std::vector<PyObject*>& modules, PyObject* value) {
  const auto all = py::reinterpret_steal<py::object>(PyObject_GetIter(value));
  if (!all) {
    PyErr_Clear();
    checked(user, "modules", "Iterable[nn.Module]", value);
    throw py::type_error("remat.checkpoint: modules must be a list of modules");
  }
  for (const py::handle each : all) {
    if (!is_module(each.ptr())) {
      PyErr_Format(PyExc_TypeError, "%s: modules must be a list of modules, got %R in it", user,
                   each.ptr());
      throw python_error();
    }
    modules.push_back(each.ptr());
  }
}

using Reader = void (*)(GivenOptions& given, const char* option, PyObject* value);

template <auto member, auto read>
void put(GivenOptions& given, const char* option, PyObject* value) {
  given.options.*member = read(value, option);
}

using O = CheckpointOptions;
constexpr std::pair<const char*, Reader> readers[] = {
    {"name", put<&O::name, text_of>},
    {"policy", put<&O::policy, policy_of>},
    {"early_stop", put<&O::early_stop, flag_in>},
    {"offload_inputs", put<&O::offload_inputs, flag_in>},
    {"offload_prefetch_depth", put<&O::offload_prefetch_depth, depth_in>},
    {"preserve_rng_state", put<&O::preserve_rng_state, flag_in>},
    {"strict_unpack", put<&O::strict_unpack, flag_in>},
    {"debug", put<&O::debug, flag_in>},
    {"determinism_check", put<&O::determinism_check, choice_in<DeterminismCheck>>},
    {"value_comparison", put<&O::values, comparison_in>},
    {"level", put<&O::level, level_in>},
    {"fingerprint", put<&O::fingerprint, fingerprint_in>},
    {"capture_check", put<&O::capture_check, choice_in<CaptureCheck>>},
    {"buffers", put<&O::buffers, choice_in<BufferPolicy>>},
    {"modules",
     [](GivenOptions& to, const char*, PyObject* value) { add_modules(to.modules, value); }},
    {"input_mode", put<&O::inputs, choice_in<InputMode>>},
    {"handle", put<&O::handle, handle_in>},
    {"prepare_ahead", put<&O::prepare_ahead, depth_in>},
    {"transforms", put<&O::transforms, choice_in<Transforms>>},
};

}  // namespace

bool GivenOptions::take(PyObject* name, PyObject* value) {
  const std::string_view text = view(name);
  for (const auto& [option, read] : readers)
    if (text == option) return read(*this, option, value), true;
  return false;
}

CheckpointOptions options_in(const py::dict& named, bool has_modules) {
  GivenOptions given;
  for (const auto& [name, value] : named) {
    if (given.take(name.ptr(), value.ptr()) && (has_modules || given.modules.empty())) continue;
    PyErr_Format(
        PyExc_TypeError,
        "remat: there is no option %R. Hint: use the options that help(remat.checkpoint) lists%s",
        name.ptr(), has_modules ? "" : ", except modules");
    throw python_error();
  }
  return given.options;
}

}  // namespace remat::python
