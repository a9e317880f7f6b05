#pragma once
// The library's guards as context managers.

#include <optional>
#include <tuple>
#include <utility>

#include "python.h"

namespace remat::python {

/// Makes a guard on entry and destroys it on exit. One thread; it can be entered again after that.
template <class Guard, class... Arguments>
class Managed {
 public:
  explicit Managed(Arguments... arguments) : arguments_(std::move(arguments)...) {}
  void enter() {
    if (guard_) throw py::value_error("remat: this guard is entered already");
    std::apply([this](const Arguments&... arguments) { guard_.emplace(arguments...); }, arguments_);
  }
  void exit() { guard_.reset(); }

 private:
  std::tuple<Arguments...> arguments_;
  std::optional<Guard> guard_;
};

/// Adds the class; the returned object takes further definitions.
template <class Guard, class... Arguments>
auto add_guard(py::module_& module, const char* name) {
  using Type = Managed<Guard, Arguments...>;
  return py::class_<Type>(module, name)
      .def(py::init<Arguments...>())
      .def("__enter__", torch::wrap_pybind_function([](py::object self) {
             self.cast<Type&>().enter();
             return self;
           }))
      .def("__exit__", [](Type& self, const py::args&) { self.exit(); });
}

}  // namespace remat::python
