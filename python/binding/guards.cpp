// The library's guards: offloading, narrower types, caches, switches, state, observers; and the
// phase of a region.

#include <ATen/PythonTorchFunctionTLS.h>
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
#include <vector>

#include "device.h"
#include "python.h"
#include "region.h"
#include "remat/allocations.h"
#include "remat/hooks.h"
#include "remat/memory.h"
#include "remat/place.h"
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
    const Unlocked unlocked;  // what has to be written is written now
    const_cast<std::shared_ptr<void>&>(ended).reset();
  }

 private:
  std::shared_ptr<void> guard_;
};

template <class Guard, class... Arguments>
OpenGuard open(Arguments&&... arguments) {
  return OpenGuard(std::make_shared<Guard>(std::forward<Arguments>(arguments)...));
}

/// With the counters of a guard that has some.
template <class Guard, class Options>
auto open_counted(const Options& options) {
  auto guard = std::make_shared<Guard>(options);
  auto counters = guard->counters();
  return std::pair(OpenGuard(std::move(guard)), std::move(counters));
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

// ---- state

/// An object with `capture()` and `restore(state)`.
class ObjectProvider final : public StateProvider {
 public:
  explicit ObjectProvider(py::handle object) : object_(shared(object)) {}
  ~ObjectProvider() override;
  std::any capture() override {
    return call_locked([&] { return std::any(shared(call_python(object().attr("capture")))); });
  }
  void restore(const std::any& state) override {
    call_locked([&] {
      call_python(object().attr("restore"),
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

// ---- places

/// What an object that is a place can do beyond `store` and `load`.
struct PlaceFacts {
  bool stores_bytes, takes, finishes_stores, begins_loads, cancels_loads;
};

/// Calls a place's method: with the lock, and seen by nobody. The library has turned off what C++
/// can meet; a function mode (`with torch.device(...)`) and torch.compile's hook are Python's own.
template <class Action>
auto call_place(Action&& action) {
  return call_locked([&] {
    const WithoutCompiler uncompiled;
    using Modes = at::impl::PythonTorchFunctionTLS;
    struct WithoutModes {
      at::impl::TorchFunctionDisabledState before = Modes::get_disabled_state();
      WithoutModes() { Modes::set_disabled_state(at::impl::ALL_DISABLED); }
      ~WithoutModes() { Modes::set_disabled_state(before); }
    } const unseen;
    return action();
  });
}

/// What `store` of an object returned, for one range of a storage.
class ObjectContents final : public StoredContents {
 public:
  ObjectContents(std::shared_ptr<PyObject> place, const PlaceFacts& facts, py::handle contents,
                 const at::Tensor& flat)
      : place_(std::move(place)),
        facts_(facts),
        contents_(shared(contents)),
        size_(flat.numel()),
        dtype_(flat.scalar_type()),
        device_(flat.device()) {}

  bool is_stored_late() const override { return facts_.finishes_stores; }
  void finish_store() override { tell("finish_store"); }
  void begin_load() override {
    if (facts_.begins_loads) tell("begin_load");
  }
  void cancel_load() override {
    if (facts_.cancels_loads) tell("cancel_load");
  }
  at::Tensor finish_load() override {
    return call_place([&] {
      const py::object loaded = call_python(place().attr("load"), py::handle(contents_.get()));
      const at::Tensor* const tensor = tensor_in(loaded.ptr());
      const bool is_alike = tensor != nullptr && tensor->layout() == c10::kStrided &&
                            tensor->dim() == 1 && tensor->numel() == size_ &&
                            tensor->scalar_type() == dtype_ && tensor->device() == device_;
      if (is_alike) return *tensor;
      PyErr_Format(
          tensor == nullptr ? PyExc_TypeError : PyExc_ValueError,
          "remat.save_elsewhere: `load` of %R returned something that is not like what `store` was "
          "given: %lld elements of %S on %S, in one dimension. It was: %R.\nHint: return a tensor like "
          "that. What is in the place is untouched; the same backward can be tried again on a "
          "retained graph.",
          place_.get(), static_cast<long long>(size_), py::cast(dtype_).ptr(),
          py::cast(device_).ptr(),
          tensor == nullptr ? loaded.ptr() : description_of(*tensor).ptr());
      throw py::error_already_set();
    });
  }

 private:
  py::handle place() const { return place_.get(); }
  void tell(const char* method) {
    call_place([&] { call_python(place().attr(method), py::handle(contents_.get())); });
  }
  static py::object description_of(const at::Tensor& tensor) {
    return py::str("{} of {} on {}")
        .format(std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end()),
                tensor.scalar_type(), tensor.device());
  }

  const std::shared_ptr<PyObject> place_;
  const PlaceFacts facts_;
  const std::shared_ptr<PyObject> contents_;
  const int64_t size_;
  const at::ScalarType dtype_;
  const c10::Device device_;
};

/// An object with `store(flat)` and `load(contents)`.
class ObjectPlace final : public Place {
 public:
  ObjectPlace(py::handle object, const PlaceFacts& facts)
      : object_(shared(object)), facts_(facts) {}

  bool takes(const at::Tensor& tensor) const override {
    if (!facts_.takes) return true;
    return call_place(
        [&] { return py::bool_(call_python(object().attr("takes"), tensor)).cast<bool>(); });
  }
  bool stores_bytes() const override { return facts_.stores_bytes; }
  std::shared_ptr<StoredContents> begin_store(const at::Tensor& flat) override {
    return call_place([&]() -> std::shared_ptr<StoredContents> {
      const py::object contents = call_python(object().attr("store"), flat);
      if (contents.is_none()) return nullptr;
      return std::make_shared<ObjectContents>(object_, facts_, contents, flat);
    });
  }

 private:
  py::handle object() const { return object_.get(); }
  const std::shared_ptr<PyObject> object_;
  const PlaceFacts facts_;
};

std::function<void(const PhaseInfo&)> tells(const py::object& function) {
  if (function.is_none()) return {};
  return [kept = shared(function)](const PhaseInfo& phase) {
    call_locked([&] { call_python(kept.get(), phase); });
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
  define("_open_save_on_cpu",
         [](bool pin_memory, int64_t min_bytes, bool skip_parameters, int64_t prefetch_depth,
            std::optional<int64_t> max_bytes_in_flight, int64_t keep_last) {
           SaveOnCpuOptions options{.pin_memory = pin_memory,
                                    .min_bytes = min_bytes,
                                    .skip_parameters = skip_parameters,
                                    .prefetch_depth = prefetch_depth,
                                    .keep_last = keep_last};
           if (max_bytes_in_flight) options.max_bytes_in_flight = *max_bytes_in_flight;
           return open_counted<SaveOnCpuGuard>(options);
         });
  define("_open_save_on_disk",
         [](const std::string& directory, int64_t min_bytes, int64_t prefetch_depth) {
           return open_counted<SaveOnDiskGuard>(
               SaveOnDiskOptions{.directory = std::filesystem::path(directory),
                                 .min_bytes = min_bytes,
                                 .prefetch_depth = prefetch_depth});
         });
  py::class_<MoveCounters>(module, "MoveCounters",
                           "The counts of one scope that moves saved tensors, also after it.")
      .def("now", [](const MoveCounters& self) {
        const MoveCounts now = self.now();
        return py::make_tuple(now.moves, now.bytes_moved, now.loads, now.loads_ahead,
                              now.bytes_loaded, now.seconds_waited);
      });
  define("_open_save_in_tiers",
         [](int64_t device_bytes, std::optional<int64_t> host_bytes, const std::string& directory,
            int64_t min_bytes, bool pin_memory, int64_t max_bytes_in_flight, int64_t keep_last) {
           SaveInTiersOptions options{.device_bytes = device_bytes,
                                      .directory = std::filesystem::path(directory),
                                      .min_bytes = min_bytes,
                                      .pin_memory = pin_memory,
                                      .max_bytes_in_flight = max_bytes_in_flight,
                                      .keep_last = keep_last};
           if (host_bytes) options.host_bytes = *host_bytes;
           return open_counted<SaveInTiersGuard>(options);
         });
  py::class_<TierCounters>(module, "TierCounters",
                           "The counts of one scope of tiers, also after it.")
      .def("now", [](const TierCounters& self) {
        const TierCounts now = self.now();
        return py::make_tuple(now.bytes_on_host, now.bytes_on_disk, now.bytes_to_host,
                              now.bytes_to_disk, now.bytes_loaded, now.loads, now.waits,
                              now.seconds_waited, now.failed_writes);
      });
  define("_open_save_elsewhere", [](const py::object& place, const std::vector<bool>& facts,
                                    int64_t min_bytes, bool skip_parameters, int64_t prefetch_depth,
                                    int64_t max_bytes_in_flight) {
    return open<SaveElsewhereGuard>(
        std::make_unique<ObjectPlace>(
            place, PlaceFacts{facts.at(0), facts.at(1), facts.at(2), facts.at(3), facts.at(4)}),
        SaveElsewhereOptions{.min_bytes = min_bytes,
                             .skip_parameters = skip_parameters,
                             .prefetch_depth = prefetch_depth,
                             .max_bytes_in_flight = max_bytes_in_flight});
  });
  define("_open_save_as", [](at::ScalarType dtype, int64_t min_bytes) {
    return open<SaveAsGuard>(dtype, min_bytes);
  });
  define("_open_disable_saved_tensors_hooks", [](std::string message) {
    return open<DisableSavedTensorHooksGuard>(std::move(message));
  });
  define("_open_early_stop", [](bool enabled) { return open<EarlyStopGuard>(enabled); });
  define("_open_debug", [](std::optional<bool> enabled) { return open<DebugGuard>(enabled); });
  define("_open_checkpoint_level",
         [](int64_t training_level) { return open<CheckpointLevelGuard>(training_level); });
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
  define("_open_memory_limit", [](int64_t bytes, const py::object& device) {
    const c10::Device limited = device_in(device);
    return with_package_errors([&] {
      return limited.is_cpu() ? open<MemoryLimitGuard>(bytes)
                              : open<MemoryLimitGuard>(bytes, limited);
    });
  });

  define("_open_record_allocations",
         [] { return with_package_errors([] { return open<RecordAllocationsGuard>(); }); });

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
