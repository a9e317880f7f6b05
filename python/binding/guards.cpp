// The library's guards: offloading, narrower types, caches, switches, state, observers; and the phase of a region.

#include <ATen/core/Generator.h>
#include <torch/csrc/Generator.h>

#include <any>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "python.h"
#include "remat/hooks.h"
#include "remat/memory.h"
#include "remat/scope.h"
#include "remat/state.h"
#include "remat/tiers.h"

namespace remat::python {

namespace {

/// A guard of any kind, open from its making to `end`. One thread.
class OpenGuard {
 public:
  explicit OpenGuard(std::shared_ptr<void> guard) : guard_(std::move(guard)) {}
  void end() {
    const std::shared_ptr<void> ended = std::move(guard_);
    const py::gil_scoped_release unlocked;  // what has to be written is written now
    const_cast<std::shared_ptr<void>&>(ended).reset();
  }

 private:
  std::shared_ptr<void> guard_;
};

template <class Guard, class... Arguments>
OpenGuard open(Arguments&&... arguments) {
  return OpenGuard(std::make_shared<Guard>(std::forward<Arguments>(arguments)...));
}

/// A reference that dies on any thread.
std::shared_ptr<PyObject> shared(py::handle object) {
  Py_INCREF(object.ptr());
  return std::shared_ptr<PyObject>(object.ptr(), [](PyObject* last) { drop(&last, 1); });
}

/// Calls with the lock; a Python error crosses threads.
template <class Action>
auto call_locked(Action&& action) {
  const Locked locked(Locked::AtEnd::Wait);
  try {
    return action();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception& error) {
    error.set_error();
  }
  throw_persisted();
}

// ---- state --------------------------------------------------------------------------------------------

/// An object with `capture()` and `restore(state)`.
class ObjectProvider final : public StateProvider {
 public:
  explicit ObjectProvider(py::handle object) : object_(shared(object)) {}
  ~ObjectProvider() override;
  std::any capture() override {
    return call_locked([&] { return std::any(shared(py::object(object().attr("capture")()))); });
  }
  void restore(const std::any& state) override {
    call_locked([&] {
      object().attr("restore")(
          py::handle(std::any_cast<const std::shared_ptr<PyObject>&>(state).get()));
    });
  }

 private:
  py::handle object() const { return object_.get(); }
  const std::shared_ptr<PyObject> object_;
};

/// One provider an object, while any region keeps it: recomputes that use one provider take turns.
class ObjectProviders {
 public:
  std::shared_ptr<StateProvider> of(py::handle object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::weak_ptr<StateProvider>& known = all_[object.ptr()];
    if (auto provider = known.lock()) return provider;
    auto provider = std::make_shared<ObjectProvider>(object);
    known = provider;
    return provider;
  }
  void forget(PyObject* object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(object);
    if (found != all_.end() && found->second.expired()) all_.erase(found);
  }

 private:
  std::mutex mutex_;  // nothing of Python runs under it
  std::map<PyObject*, std::weak_ptr<StateProvider>> all_;
};

ObjectProviders& object_providers() {
  static auto* const all = new ObjectProviders;  // leaked: graphs may die last
  return *all;
}

ObjectProvider::~ObjectProvider() { object_providers().forget(object_.get()); }

std::function<void(const PhaseInfo&)> tells(const py::object& function) {
  if (function.is_none()) return {};
  return [kept = shared(function)](const PhaseInfo& phase) {
    call_locked([&] { py::handle(kept.get())(phase); });
  };
}

at::Generator generator_in(const py::object& object) {
  if (!THPGenerator_Check(object.ptr()))
    throw py::type_error("remat.preserve_generator: the argument must be a torch.Generator");
  return reinterpret_cast<THPGenerator*>(object.ptr())->cdata;
}

}  // namespace

void add_guards(py::module_& module) {
  py::class_<OpenGuard>(module, "OpenGuard", "A guard of the library, open until `end`.")
      .def("end", torch::wrap_pybind_function([](OpenGuard& self) { self.end(); }));

  const auto define = [&](const char* name, auto function) {
    module.def(name, torch::wrap_pybind_function(std::move(function)));
  };
  define("_open_save_on_cpu", [](bool pin_memory, int64_t min_bytes, bool skip_parameters) {
    return open<SaveOnCpuGuard>(SaveOnCpuOptions{
        .pin_memory = pin_memory, .min_bytes = min_bytes, .skip_parameters = skip_parameters});
  });
  define("_open_save_on_disk", [](const std::string& directory, int64_t min_bytes) {
    return open<SaveOnDiskGuard>(
        SaveOnDiskOptions{.directory = std::filesystem::path(directory), .min_bytes = min_bytes});
  });
  define("_open_save_in_tiers",
         [](int64_t device_bytes, std::optional<int64_t> host_bytes, const std::string& directory,
            int64_t min_bytes, bool pin_memory, int64_t max_bytes_in_flight) {
           SaveInTiersOptions options{.device_bytes = device_bytes,
                                      .directory = std::filesystem::path(directory),
                                      .min_bytes = min_bytes,
                                      .pin_memory = pin_memory,
                                      .max_bytes_in_flight = max_bytes_in_flight};
           if (host_bytes) options.host_bytes = *host_bytes;
           auto guard = std::make_shared<SaveInTiersGuard>(options);
           TierCounters counters = guard->counters();
           return std::pair(OpenGuard(std::move(guard)), std::move(counters));
         });
  py::class_<TierCounters>(module, "TierCounters",
                           "The counts of one scope of tiers, also after it.")
      .def("now", [](const TierCounters& self) {
        const TierCounts now = self.now();
        return py::make_tuple(now.bytes_on_host, now.bytes_on_disk, now.bytes_to_host,
                              now.bytes_to_disk, now.bytes_loaded, now.loads, now.waits,
                              now.seconds_waited, now.failed_writes);
      });
  define("_open_save_as", [](at::ScalarType dtype, int64_t min_bytes) {
    return open<SaveAsGuard>(dtype, min_bytes);
  });
  define("_open_disable_saved_tensors_hooks", [](std::string message) {
    return open<DisableSavedTensorHooksGuard>(std::move(message));
  });
  define("_open_early_stop", [](bool enabled) { return open<EarlyStopGuard>(enabled); });
  define("_open_debug", [](std::optional<bool> enabled) { return open<DebugGuard>(enabled); });
  define("_open_disable_checkpoint", [] { return open<DisableCheckpointGuard>(); });
  define("_open_graph_exec_group", [] { return open<GraphExecGroup>(); });
  define("_open_recompute_cache", [](std::optional<int64_t> max_bytes) {
    RecomputeCacheOptions options;
    if (max_bytes) options.max_bytes = *max_bytes;
    return open<RecomputeCacheGuard>(options);
  });
  define("_open_state_provider", [](const py::object& provider) {
    return open<StateProviderGuard>(object_providers().of(provider));
  });
  define("_open_generator",
         [](const py::object& generator) { return open<GeneratorGuard>(generator_in(generator)); });
  define("_open_observe_recomputes", [](const py::object& begin, const py::object& end) {
    return open<RecomputeObserverGuard>(
        RecomputeObserver{.begin = tells(begin), .end = tells(end)});
  });
  define("_open_memory_limit", [](int64_t bytes) { return open<MemoryLimitGuard>(bytes); });

  py::class_<PhaseInfo>(module, "PhaseInfo",
                        "The region whose function runs, and which of its runs it is.")
      .def_property_readonly(
          "phase",
          [](const PhaseInfo& self) {
            switch (self.phase) {
              case Phase::Forward:
                return "forward";
              case Phase::Recompute:
                return "recompute";
              case Phase::None:
                break;
            }
            return "none";
          },
          "'forward', 'recompute', or 'none' outside of regions.")
      .def_readonly("frame_id", &PhaseInfo::frame_id,
                    "The same in forward and recompute: a key for state of one region. -1 outside.")
      .def_readonly("depth", &PhaseInfo::depth, "Enclosing regions, this one included.")
      .def_readonly("name", &PhaseInfo::name, "The region's name, '' if it has none.")
      .def("__repr__", [](const PhaseInfo& self) {
        const char* const phase = self.phase == Phase::Forward     ? "forward"
                                  : self.phase == Phase::Recompute ? "recompute"
                                                                   : "none";
        return py::str("PhaseInfo(phase={!r}, frame_id={}, depth={}, name={!r})")
            .format(phase, self.frame_id, self.depth, self.name);
      });
  module.def(
      "current_phase", [] { return current_phase(); },
      "The phase of the innermost region on this thread, also on the threads of a backward.");
}

}  // namespace remat::python
