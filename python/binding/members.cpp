#include "members.h"

#include <algorithm>
#include <string>
#include <thread>
#include <unordered_map>

#include "module_tree.h"

namespace remat::python {

bool is_module(PyObject* object) {
  static PyObject* const type = imported("torch.nn", "Module");
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(type)) != 0;
}

std::string text_of(const ModulePath* path) {
  if (path == nullptr) return "";
  const bool is_text = PyUnicode_Check(path->name) != 0;
  return text_of(path->above) + (is_text ? std::string(py::str(path->name)) : "?") + ".";
}

bool is_member_value(PyObject* value, int depth) {
  if (value == Py_None || PyBool_Check(value) != 0 || PyFloat_CheckExact(value) != 0 ||
      PyLong_CheckExact(value) != 0 || PyUnicode_CheckExact(value) != 0)
    return true;
  if (const at::Tensor* const tensor = depth == 0 ? tensor_in(value) : nullptr)
    return !tensor->requires_grad();
  if (PyTuple_CheckExact(value) == 0 || depth > 4) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
    if (!is_member_value(PyTuple_GET_ITEM(value, i), depth + 1)) return false;
  return true;
}

namespace {

/// Visits the attributes of a module and of all below it: their dictionary, then each name with its
/// value, or null for one that is no member. The training flag has its own rule, and dictionaries
/// and sets hold others. False: the visitor had enough.
template <class ModuleVisitor, class EntryVisitor>
bool visit_members(PyObject* root, ModuleVisitor&& begin_module, EntryVisitor&& visit_entry) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  return visit_modules(root, [&](PyObject* attributes, const ModulePath*) {
    bool goes_on = begin_module(attributes);
    visit_entries(attributes, [&](PyObject* name, PyObject* value) {
      if (!goes_on || name == training || PyDict_Check(value) != 0 || PyAnySet_Check(value) != 0)
        return;
      goes_on = visit_entry(name, is_member_value(value) ? value : nullptr);
    });
    return goes_on;
  });
}

/// Returns the members that the last region of some modules noted, if they are still kept.
/// Interpreter's lock.
std::weak_ptr<const Members>& last_members_of(PyObject* root) {
  static auto* const all = new std::unordered_map<PyObject*, std::weak_ptr<const Members>>;
  constexpr std::size_t max_known = 10'000;
  if (all->size() > max_known)
    std::erase_if(*all, [](const auto& each) { return each.second.expired(); });
  return (*all)[root];
}

}  // namespace

std::shared_ptr<const Members> Members::of(const std::vector<PyObject*>& roots) {
  if (roots.empty()) return std::make_shared<const Members>();
  std::weak_ptr<const Members>& last = last_members_of(roots.front());
  if (auto known = last.lock(); known != nullptr && known->is_now(roots)) return known;
  auto made = std::make_shared<Members>();
  for (PyObject* root : roots)
    visit_members(
        root,
        [&](PyObject* attributes) {
          made->modules_.push_back({new_reference(attributes), made->entries_.size()});
          return true;
        },
        [&](PyObject* name, PyObject* value) {
          made->entries_.push_back({new_reference(name), new_reference(value)});
          made->modules_.back().end = made->entries_.size();
          return true;
        });
  last = made;
  return made;
}

std::shared_ptr<const Members> Members::without_histories(std::shared_ptr<const Members> members) {
  const auto is_member = [](const Entry& entry) {
    return entry.value == nullptr || is_member_value(entry.value);
  };
  if (std::all_of(members->entries_.begin(), members->entries_.end(), is_member)) return members;
  auto made = std::make_shared<Members>();
  for (const Module& each : members->modules_)
    made->modules_.push_back({new_reference(each.attributes), each.end});
  for (const Entry& each : members->entries_)
    made->entries_.push_back(
        {new_reference(each.name), is_member(each) ? new_reference(each.value) : nullptr});
  return made;
}

bool Members::is_now(const std::vector<PyObject*>& roots) const {
  std::size_t module = 0, next = 0;
  for (PyObject* root : roots) {
    const bool is_same = visit_members(
        root,
        [&](PyObject* attributes) {
          if (module > 0 && modules_[module - 1].end != next) return false;
          return module < modules_.size() && modules_[module++].attributes == attributes;
        },
        [&](PyObject* name, PyObject* value) {
          if (next == entries_.size() || next >= modules_[module - 1].end) return false;
          const Entry& then = entries_[next++];
          return then.name == name && then.value == value;
        });
    if (!is_same) return false;
  }
  return module == modules_.size() && next == entries_.size();
}

std::vector<Members::Change> Members::tensors_with_history(const std::vector<PyObject*>& roots) {
  std::vector<Change> found;
  PyObject* attributes = nullptr;
  for (PyObject* root : roots)
    visit_members(
        root,
        [&](PyObject* of_module) {
          attributes = of_module;
          return true;
        },
        [&](PyObject* name, PyObject* value) {
          if (value != nullptr) return true;
          value = PyDict_GetItem(attributes, name);
          if (tensor_in(value) != nullptr)
            found.push_back({new_reference(attributes), new_reference(name), new_reference(value)});
          return true;
        });
  return found;
}

Members::~Members() {
  std::vector<PyObject*> all;
  all.reserve(modules_.size() + 2 * entries_.size());
  for (const Module& each : modules_) all.push_back(each.attributes);
  for (const Entry& each : entries_) {
    all.push_back(each.name);
    if (each.value != nullptr) all.push_back(each.value);
  }
  drop(all.data(), all.size());
}

void Members::put_in_place(const Members& now, std::vector<Change>& changes) const {
  if (this == &now) return;
  const auto change = [&](PyObject* dictionary, PyObject* name, PyObject* value) {
    PyObject* const before = PyDict_GetItem(dictionary, name);
    changes.push_back({new_reference(dictionary), new_reference(name), new_reference(before)});
    if (value != nullptr)
      PyDict_SetItem(dictionary, name, value);
    else if (before != nullptr)
      PyDict_DelItem(dictionary, name);
  };
  std::size_t next = 0, next_now = 0, module_now = 0;
  for (const Module& module : modules_) {
    const std::size_t begin = next;
    for (; next < module.end; ++next) {
      const auto& [name, value] = entries_[next];
      if (value != nullptr && PyDict_GetItem(module.attributes, name) != value)
        change(module.attributes, name, value);
    }
    // Trees are alike but for what forward added.
    if (module_now == now.modules_.size() ||
        now.modules_[module_now].attributes != module.attributes)
      continue;
    for (; next_now < now.modules_[module_now].end; ++next_now) {
      const auto& [name, value] = now.entries_[next_now];
      if (value == nullptr) continue;
      bool was_there = false;
      for (std::size_t i = begin; i < module.end && !was_there; ++i)
        was_there = entries_[i].name == name;
      if (!was_there) change(module.attributes, name, nullptr);
    }
    ++module_now;
  }
}

namespace {

struct Holder {
  std::thread::id thread;
  int depth = 0;
};

std::unordered_map<PyObject*, Holder>& holders() {
  static auto* const all = new std::unordered_map<PyObject*, Holder>;  // leaked: used until late
  return *all;
}

}  // namespace

void HeldMembers::take(PyObject* root) {
  const auto self = std::this_thread::get_id();
  wait_until(
      [&] {
        const auto found = holders().find(root);
        return found == holders().end() || found->second.thread == self;
      },
      "remat: a recompute waited ten seconds for a recompute on another thread, which holds the "
      "members of the same module.\n"
      "Hint: run backward through that module on one thread at a time.");
  Holder& holder = holders()[root];
  holder.thread = self;
  ++holder.depth;
}

void HeldMembers::give_back(PyObject* root) {
  const auto found = holders().find(root);
  if (--found->second.depth == 0) holders().erase(found);
}

}  // namespace remat::python
