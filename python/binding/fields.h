#pragma once
// Structs of the library in Python: options that are read by name, reports that are shown, costs as
// tuples.

#include <pybind11/stl/filesystem.h>

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <string>
#include <tuple>
#include <vector>

#include "python.h"

namespace remat::python {

/// Converts a value to a member's type. Throws TypeError for one that does not fit, such as a
/// number out of range.
template <class Value>
Value value_in(py::handle value, const char* name) {
  try {
    return value.cast<Value>();
  } catch (const py::cast_error&) {
    throw py::type_error("remat: " + std::string(name) +
                         " cannot be: " + std::string(py::repr(value)));
  }
}

/// A member of a struct of options, by its name in Python.
template <class T>
struct Option {
  template <class Value>
  Option(const char* name, Value T::* member)
      : name(name), read([name, member](T& to, py::handle value) {
          to.*member = value_in<Value>(value, name);
        }) {}
  const char* name;
  std::function<void(T&, py::handle)> read;
};

/// Reads options by their names. None, or one that is not given, leaves the default.
template <class T>
T options_of(const py::dict& given, const std::vector<Option<T>>& options) {
  T all{};
  for (const Option<T>& each : options)
    if (given.contains(each.name) && !given[each.name].is_none()) each.read(all, given[each.name]);
  return all;
}

/// A member of a report, with its text for `help`.
template <class T>
struct Fact {
  template <class Value>
  Fact(const char* name, Value T::* member, const char* text)
      : add([=](py::class_<T>& type) { type.def_readonly(name, member, text); }) {}
  std::function<void(py::class_<T>&)> add;
};

/// A member of the report R.
#define REMAT_FACT(member, text) {#member, &R::member, text}

/// Adds a class of reports, whose members can be read.
template <class T>
py::class_<T> add_report(py::module_& module, const char* name, const char* text,
                         std::initializer_list<Fact<T>> facts) {
  py::class_<T> type(module, name, text);
  for (const Fact<T>& each : facts) each.add(type);
  return type;
}

/// Puts a tuple into the members of a struct, in this order.
template <class T, class... Values>
void read_members(T& to, const py::tuple& from, Values T::*... members) {
  std::size_t next = 0;
  ((to.*members = value_in<Values>(from[next++], "a number of a cost")), ...);
}

/// The members of a struct as a tuple, in this order.
template <class T, class... Values>
py::tuple tuple_of(const T& from, Values T::*... members) {
  return py::make_tuple(from.*members...);
}

}  // namespace remat::python
