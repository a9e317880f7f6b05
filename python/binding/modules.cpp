// State of Python modules in regions.

#include "modules.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "module_tree.h"
#include "remat/binding.h"
#include "remat/module.h"
#include "remat/options.h"
#include "remat/scope.h"

namespace remat::python {

namespace {

/// Returns "Block" of "package.Block".
std::string class_of(PyObject* module) {
  const std::string name = Py_TYPE(module)->tp_name;
  return name.substr(name.rfind('.') + 1);
}

/// Returns a tensor's name in errors: "parameter 'conv.weight' of Block".
std::string name_of(const char* kind, const ModulePath* path, PyObject* name, PyObject* root) {
  const ModulePath whole{path, name};
  std::string full = text_of(&whole);
  full.pop_back();
  return std::string(kind) + " '" + full + "' of " + class_of(root);
}

/// Visits parameters and buffers of modules and of all below them, with their names, from any
/// thread. Throws nothing.
void visit_named(const std::vector<PyObject*>& roots, TensorNames::Visitor visitor) {
  const Locked locked(Locked::AtEnd::Wait);
  const ErrorAside aside;
  for (PyObject* root : roots)
    visit_modules(root, [&](PyObject* attributes, const ModulePath* path) {
      for (const auto& [of, kind] :
           {std::pair("_parameters", "parameter"), std::pair("_buffers", "buffer")})
        visit_entries(entry(attributes, of), [&](PyObject* name, PyObject* value) {
          if (const at::Tensor* const tensor = tensor_in(value))
            visitor(name_of(kind, path, name, root), *tensor);
        });
      return true;
    });
}

std::vector<PyObject*> new_references(const std::vector<PyObject*>& objects) {
  for (PyObject* each : objects) Py_INCREF(each);
  return objects;
}

/// Returns whether a graph made the tensor. `grad_fn()` would count as a read by the regions
/// around.
bool has_history(const at::Tensor& tensor) {
  const torch::autograd::AutogradMeta* const meta =
      torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->grad_fn_ != nullptr;
}

/// Returns an alias that shares the storage and the version counter. No operator runs.
at::Tensor without_history(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(),
                                                 /*allow_tensor_metadata_change=*/true));
}

/// Stands for Python modules: has their buffers, and knows what users call their tensors. It has
/// those modules as they have been given, since it may outlive whoever made it.
class StandIn final : public torch::nn::Module, public TensorNames, public StandInMembers {
 public:
  explicit StandIn(const std::vector<PyObject*>& roots) : roots_(new_references(roots)) {}
  ~StandIn() override { drop(roots_.data(), roots_.size()); }
  StandIn(const StandIn&) = delete;
  StandIn& operator=(const StandIn&) = delete;

  /// Keeps an alias of a tensor with a history, whose graph may hold the region.
  void add(const at::Tensor& buffer) {
    register_buffer(std::to_string(num_buffers_++),
                    has_history(buffer) ? without_history(buffer) : buffer);
  }
  void visit_tensors(Visitor visitor) const override { visit_named(roots_, visitor); }
  bool has_replaced_buffers() const override { return has_replaced_; }
  void set_replaced() { has_replaced_ = true; }

 private:
  const std::vector<PyObject*> roots_;
  int64_t num_buffers_ = 0;
  bool has_replaced_ = false;
};

/// Returns whether the library can copy and write the tensor: it has no class of its own, and has
/// contents.
bool can_be_restored(PyObject* buffer, const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_meta()) return false;
  // A lazy module's, which has no shape yet.
  return PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(buffer)), "materialize") == 0;
}

}  // namespace

bool is_in_eval(PyObject* module) {
  if (module == nullptr) return false;
  const auto flag = py::reinterpret_steal<py::object>(PyObject_GetAttrString(module, "training"));
  if (!flag) throw python_error();
  return flag.ptr() == Py_False;
}

PyObject* module_in(PyObject* function) {
  if (PyFunction_Check(function)) return nullptr;
  if (PyMethod_Check(function)) {
    PyObject* const self = PyMethod_GET_SELF(function);
    return is_module(self) ? self : nullptr;
  }
  if (is_module(function)) return function;
  static PyObject* const partial = imported("functools", "partial");
  if (reinterpret_cast<PyObject*>(Py_TYPE(function)) != partial) return nullptr;
  return module_in(py::object(py::handle(function).attr("func")).ptr());  // the partial has it
}

// ---- flags

/// The flags that recomputes hold, for the whole process, under the interpreter's lock. Two that
/// want a flag the same way share it, and one that finds it right takes part too: otherwise another
/// one's end would change it under its feet.
class HeldFlags {
 public:
  using Flag = ModuleState::Flag;

  void take(const std::vector<Flag>& flags) {
    wait_until([&] { return are_free(flags); },
               "remat: a recompute waited ten seconds for a recompute on another thread, which "
               "needs the other training flag of the same module.\n"
               "Hint: run backward through that module on one thread at a time.");
    for (const Flag& flag : flags) {
      const bool now = entry(flag.attributes, "training") == Py_True;
      held_[flag.attributes].push_back({std::this_thread::get_id(), flag.is_training, now});
      set(flag.attributes, now, flag.is_training);
    }
  }

  void give_back(const std::vector<Flag>& flags) {
    const auto self = std::this_thread::get_id();
    for (const Flag& flag : flags) {
      const auto found = held_.find(flag.attributes);
      auto& holds = found->second;
      auto mine = holds.end();
      while (mine != holds.begin())
        if ((--mine)->owner == self) break;
      // The last holder restores the value that the first one found.
      const bool before = mine->before;
      const auto next = holds.erase(mine);
      if (next != holds.end())
        next->before = before;
      else
        set(flag.attributes, entry(flag.attributes, "training") == Py_True, before);
      if (holds.empty()) held_.erase(found);
    }
  }

 private:
  struct Hold {
    std::thread::id owner;
    bool flag, before;
  };
  bool are_free(const std::vector<Flag>& flags) const {
    for (const Flag& flag : flags) {
      const auto found = held_.find(flag.attributes);
      if (found == held_.end()) continue;
      for (const Hold& hold : found->second)
        if (hold.flag != flag.is_training && hold.owner != std::this_thread::get_id()) return false;
    }
    return true;
  }
  static void set(PyObject* attributes, bool now, bool wanted) {
    if (now != wanted) PyDict_SetItemString(attributes, "training", wanted ? Py_True : Py_False);
  }
  std::unordered_map<PyObject*, std::vector<Hold>> held_;
};

namespace {

HeldFlags& held_flags() {
  static auto* const all = new HeldFlags;  // leaked: recomputes may run late
  return *all;
}

}  // namespace

// ---- the state

namespace {

/// Visits the buffers of one module that the library can restore, and names without a tensor: their
/// dictionary, name, object and tensor, which is null for None.
template <class Visitor>
void visit_buffers(PyObject* attributes, Visitor&& visitor) {
  PyObject* const buffers = entry(attributes, "_buffers");
  visit_entries(buffers, [&](PyObject* name, PyObject* value) {
    const at::Tensor* const tensor = tensor_in(value);
    if (value == Py_None || (tensor != nullptr && can_be_restored(value, *tensor)))
      visitor(buffers, name, value, tensor);
  });
}

}  // namespace

ModuleState::ModuleState(const std::vector<PyObject*>& roots) : roots_(new_references(roots)) {
  const auto add = [this](PyObject* attributes, const ModulePath*) {
    // A script module has these in C++.
    if (PyObject* const training = entry(attributes, "training"); training != nullptr)
      flags_.push_back({new_reference(attributes), training == Py_True});
    visit_buffers(attributes, [this](PyObject* buffers, PyObject* name, PyObject* value,
                                     const at::Tensor* tensor) {
      buffers_.push_back({new_reference(buffers), new_reference(name), new_reference(value)});
      if (tensor == nullptr) return;
      if (stand_in_ == nullptr) stand_in_ = std::make_shared<StandIn>(roots_);
      static_cast<StandIn&>(*stand_in_).add(*tensor);
    });
    return true;
  };
  for (PyObject* root : roots_) visit_modules(root, add);
}

void ModuleState::visit_tensors(Visitor visitor) const { visit_named(roots_, visitor); }

void ModuleState::note_members() { members_ = Members::of(roots_); }

void ModuleState::settle() {
  members_left_ = Members::of(roots_);
  members_ = Members::without_histories(members_);
  std::vector<Buffer> changed;
  std::size_t next = 0;  // where the next name is expected, if nothing has changed
  std::vector<bool> is_there(buffers_.size(), false);
  const auto compare = [&](PyObject* dictionary, PyObject* name, PyObject* value,
                           const at::Tensor* tensor, const ModulePath* path) {
    const auto is_this = [&](const Buffer& each) {
      return each.dictionary == dictionary && each.name == name;
    };
    std::size_t i = next;
    if (i >= buffers_.size() || !is_this(buffers_[i]))
      i = static_cast<std::size_t>(std::find_if(buffers_.begin(), buffers_.end(), is_this) -
                                   buffers_.begin());
    PyObject* const begin = i < buffers_.size() ? buffers_[i].begin : nullptr;
    if (i < buffers_.size()) {
      is_there[i] = true;
      next = i + 1;
    }
    if (begin == value) return;
    PyObject* const left =  // without a history, whose graph may hold the region
        tensor != nullptr && has_history(*tensor) ? THPVariable_Wrap(without_history(*tensor))
                                                  : new_reference(value);
    if (left == nullptr) throw python_error();
    changed.push_back({new_reference(dictionary), new_reference(name), new_reference(begin), left,
                       name_of("buffer", path, name, roots_.front())});
    if (stand_in_ != nullptr && tensor != nullptr)
      static_cast<StandIn&>(*stand_in_).add(*tensor_in(left));
  };
  for (PyObject* root : roots_)
    visit_modules(root, [&](PyObject* attributes, const ModulePath* path) {
      visit_buffers(attributes, [&](PyObject* dictionary, PyObject* name, PyObject* value,
                                    const at::Tensor* tensor) {
        compare(dictionary, name, value, tensor, path);
      });
      return true;
    });
  for (std::size_t i = 0; i < buffers_.size(); ++i)
    if (!is_there[i])
      changed.push_back({new_reference(buffers_[i].dictionary), new_reference(buffers_[i].name),
                         new_reference(buffers_[i].begin), nullptr,
                         name_of("buffer", nullptr, buffers_[i].name, roots_.front())});
  if (!changed.empty() && stand_in_ != nullptr) static_cast<StandIn&>(*stand_in_).set_replaced();
  buffers_.swap(changed);
  drop(changed);
}

void ModuleState::drop(const std::vector<Buffer>& buffers) {
  std::vector<PyObject*> all;
  for (const Buffer& each : buffers)
    for (PyObject* object : {each.dictionary, each.name, each.begin, each.left})
      if (object != nullptr) all.push_back(object);
  python::drop(all.data(), all.size());
}

ModuleState::~ModuleState() {
  std::vector<PyObject*> all = roots_;
  for (const Flag& each : flags_) all.push_back(each.attributes);
  python::drop(all.data(), all.size());
  drop(buffers_);
}

namespace {

void set_entry(PyObject* dictionary, PyObject* name, PyObject* value) {
  PyObject* const now = PyDict_GetItem(dictionary, name);
  if (now == value) return;
  if (value == nullptr)
    PyDict_DelItem(dictionary, name);
  else
    PyDict_SetItem(dictionary, name, value);
}

}  // namespace

ModuleState::Hold::Hold(const ModuleState& state) : state_(state) {
  held_flags().take(state.flags_);
  has_taken_flags_ = true;
  const bool from_end = recompute_starts_from_end() && state.members_left_ != nullptr;
  const Members& wanted = from_end ? *state.members_left_ : *state.members_;
  members_before_ = Members::of(state.roots_);
  if (state.members_ != state.members_left_ || members_before_.get() != &wanted) {
    try {
      HeldMembers::take(state.roots_.front());
    } catch (...) {
      held_flags().give_back(state.flags_);
      throw;
    }
    has_taken_members_ = true;
    members_before_ = Members::of(state.roots_);
    wanted.put_in_place(*members_before_, members_changed_);
  }
  histories_before_ = Members::tensors_with_history(state.roots_);
  for (const Buffer& each : state.buffers_) {
    buffers_before_.push_back(new_reference(PyDict_GetItem(each.dictionary, each.name)));
    set_entry(each.dictionary, each.name, from_end ? each.left : each.begin);
  }
}

/// Compares the tensors under the names that forward changed.
void ModuleState::Hold::compare_names() const {
  // Without a stand-in the run may have stopped earlier; and forward may not have reached this yet.
  if (state_.stand_in_ == nullptr || state_.members_left_ == nullptr) return;
  const auto tensor_of = [](PyObject* object) {
    const at::Tensor* const tensor = object == nullptr ? nullptr : tensor_in(object);
    return tensor == nullptr ? at::Tensor() : *tensor;
  };
  for (const Buffer& each : state_.buffers_)
    compare_member(each.path, tensor_of(each.left),
                   tensor_of(PyDict_GetItem(each.dictionary, each.name)));
}

ModuleState::Hold::~Hold() {
  if (!has_taken_flags_) return;
  const ErrorAside aside;
  compare_names();
  for (std::size_t i = buffers_before_.size(); i-- > 0;) {
    const Buffer& each = state_.buffers_[i];
    set_entry(each.dictionary, each.name, buffers_before_[i]);
    Py_XDECREF(buffers_before_[i]);
  }
  if (has_taken_members_) {
    std::vector<Members::Change> undone;
    members_before_->put_in_place(*Members::of(state_.roots_), undone);
    // This was no member before: a number that forward turned into a tensor.
    for (std::size_t i = members_changed_.size(); i-- > 0;)
      if (const auto& each = members_changed_[i];
          each.before != nullptr && !is_member_value(each.before))
        set_entry(each.dictionary, each.name, each.before);
    for (const auto* changes : {&undone, &members_changed_})
      for (const Members::Change& each : *changes) {
        Py_DECREF(each.dictionary);
        Py_DECREF(each.name);
        Py_XDECREF(each.before);
      }
    HeldMembers::give_back(state_.roots_.front());
  }
  // After the members: forward may have turned one into a tensor with a history.
  for (const Members::Change& each : histories_before_) {
    set_entry(each.dictionary, each.name, each.before);
    Py_DECREF(each.dictionary);
    Py_DECREF(each.name);
    Py_DECREF(each.before);
  }
  held_flags().give_back(state_.flags_);
  PyErr_Clear();
}

ModulesWatched::ModulesWatched(const std::vector<PyObject*>& modules) {
  if (modules.empty() || (!is_checkpointing() && !is_recomputing())) return;
  struct Guard {
    explicit Guard(const std::shared_ptr<torch::nn::Module>& stand_in)
        : kept(stand_in), region(*kept, typeid(StandIn), {}), guard(region) {}
    const std::shared_ptr<torch::nn::Module> kept;
    const detail::ModuleRegion region;
    const detail::ModuleStateGuard guard;
  };
  const ModuleState state(modules);
  if (state.stand_in() != nullptr) guard_ = std::make_shared<Guard>(state.stand_in());
}

ModulesWatched::~ModulesWatched() = default;

CheckpointOptions with_modules(CheckpointOptions options, const ModuleState& state) {
  if (state.stand_in() != nullptr) options.modules.push_back(state.stand_in());
  return options;
}

}  // namespace remat::python
