// The library's guards: offloading, narrower types, caches, switches, state, observers; and the
// phase of a region.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Generator.h>
#include <torch/csrc/Generator.h>

#include <any>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "containers.h"
#include "device.h"
#include "fields.h"
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

/// A guard of any kind, open from its making to `end`, with the counts of one that counts. One
/// thread.
class OpenGuard {
 public:
  explicit OpenGuard(std::shared_ptr<void> guard, std::function<py::tuple()> counts = {})
      : guard_(std::move(guard)), counts_(std::move(counts)) {}
  void end() {
    const Unlocked unlocked;  // what has to be written is written now
    guard_.reset();
  }
  py::tuple counts() const { return counts_(); }

 private:
  std::shared_ptr<void> guard_;
  std::function<py::tuple()> counts_;
};

template <class Guard, class... Arguments>
OpenGuard open(Arguments&&... arguments) {
  return OpenGuard(std::make_shared<Guard>(std::forward<Arguments>(arguments)...));
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

/// The optional abilities of a place beyond `store` and `load`.
struct PlaceFacts {
  explicit PlaceFacts(py::handle place)
      : stores_bytes(py::bool_(py::getattr(place, "stores_bytes", py::bool_(true)))),
        takes(py::hasattr(place, "takes")),
        finishes_stores(py::hasattr(place, "finish_store")),
        begins_loads(py::hasattr(place, "begin_load")),
        cancels_loads(py::hasattr(place, "cancel_load")) {}
  bool stores_bytes, takes, finishes_stores, begins_loads, cancels_loads;
};

/// Calls a place's method with the lock held and without effect on scopes around. The library has
/// turned off the scopes of C++; a function mode (`with torch.device(...)`) and torch.compile's
/// hook are Python's own.
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

/// The result of `store` of an object, for one range of a storage.
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
          "remat.save_elsewhere: `load` of %R returned a value that does not match the tensor "
          "passed to `store`: %lld elements of %S on %S, in one dimension. It returned: %R.\n"
          "Hint: return a tensor like that. The stored contents are intact; the same backward "
          "can be tried again on a retained graph.",
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
  explicit ObjectPlace(py::handle object) : object_(shared(object)), facts_(object) {}

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

/// Adds generators with names.
void add_generator_tracker(py::module_& module) {
  using Tracker = GeneratorTracker;
  using States = std::map<std::string, at::Tensor>;
  py::class_<Tracker, std::shared_ptr<Tracker>>(module, "_GeneratorTracker")
      .def(py::init(wrapped(
          [](const py::object& device) { return std::make_shared<Tracker>(device_in(device)); })))
      .def("add", wrapped([](Tracker& self, const std::string& name, uint64_t seed) {
             self.add(name, seed);
           }))
      .def("states", [](const Tracker& self) { return self.states(); })
      .def("set_states",
           wrapped([](Tracker& self, const States& states) { self.set_states(states); }));
}

// ---- by name

using Opener = std::function<OpenGuard(const py::dict& given)>;

/// Opens a guard of these arguments, which have these types and names.
template <class Guard, class... Values, class... Names>
Opener opens(Names... names) {
  return [names...]([[maybe_unused]] const py::dict& given) {
    return open<Guard>(value_in<Values>(given[names], names)...);
  };
}
/// Opens a guard of options.
template <class Guard, class Options>
Opener opens_with(std::vector<Option<Options>> options) {
  return [options = std::move(options)](const py::dict& given) {
    return open<Guard>(options_of(given, options));
  };
}
py::tuple tuple_of_counts(const MoveCounts& now) {
  return py::make_tuple(now.moves, now.bytes_moved, now.loads, now.loads_ahead, now.bytes_loaded,
                        now.seconds_waited);
}
py::tuple tuple_of_counts(const TierCounts& now) {
  return py::make_tuple(now.bytes_on_host, now.bytes_on_disk, now.bytes_to_host, now.bytes_to_disk,
                        now.bytes_loaded, now.loads, now.waits, now.seconds_waited,
                        now.failed_writes);
}
/// Opens a guard that counts, in the order of MoveCounts and TierCounts of remat/_guards.py.
template <class Guard, class Options>
Opener counts_with(std::vector<Option<Options>> options) {
  return [options = std::move(options)](const py::dict& given) {
    auto guard = std::make_shared<Guard>(options_of(given, options));
    auto counts = [counters = guard->counters()] { return tuple_of_counts(counters.now()); };
    return OpenGuard(std::move(guard), std::move(counts));
  };
}

OpenGuard open_place(const py::dict& given) {
  using Options = SaveElsewhereOptions;
  static const std::vector<Option<Options>> options{
      REMAT_MEMBER(Options, min_bytes), REMAT_MEMBER(Options, skip_parameters),
      REMAT_MEMBER(Options, prefetch_depth), REMAT_MEMBER(Options, max_bytes_in_flight)};
  return open<SaveElsewhereGuard>(std::make_unique<ObjectPlace>(given["place"]),
                                  options_of(given, options));
}

OpenGuard open_memory_limit(const py::dict& given) {
  const auto bytes = value_in<int64_t>(given["bytes"], "bytes");
  const c10::Device limited = device_in(given["device"]);
  return limited.is_cpu() ? open<MemoryLimitGuard>(bytes) : open<MemoryLimitGuard>(bytes, limited);
}

OpenGuard open_fork(const py::dict& given) {
  return open<GeneratorForkGuard>(given["tracker"].cast<std::shared_ptr<GeneratorTracker>>(),
                                  given["name"].cast<std::string>());
}

OpenGuard open_observer(const py::dict& given) {
  return open<RecomputeObserverGuard>(
      RecomputeObserver{.begin = tells(given["begin"]), .end = tells(given["end"])});
}

OpenGuard open_state_provider(const py::dict& given) {
  return open<StateProviderGuard>(object_providers().of(given["provider"]));
}

/// The openers, by the names of the functions of remat/_guards.py that are their callers.
const std::map<std::string, Opener>& openers() {
  using Cpu = SaveOnCpuOptions;
  using Disk = SaveOnDiskOptions;
  using Tiers = SaveInTiersOptions;
  static const auto* const all = new std::map<std::string, Opener>{
      {"save_on_cpu", counts_with<SaveOnCpuGuard, Cpu>(
                          {REMAT_MEMBER(Cpu, pin_memory), REMAT_MEMBER(Cpu, min_bytes),
                           REMAT_MEMBER(Cpu, skip_parameters), REMAT_MEMBER(Cpu, prefetch_depth),
                           REMAT_MEMBER(Cpu, max_bytes_in_flight), REMAT_MEMBER(Cpu, keep_last)})},
      {"save_on_disk", counts_with<SaveOnDiskGuard, Disk>({REMAT_MEMBER(Disk, directory),
                                                           REMAT_MEMBER(Disk, min_bytes),
                                                           REMAT_MEMBER(Disk, prefetch_depth)})},
      {"save_in_tiers",
       counts_with<SaveInTiersGuard, Tiers>(
           {REMAT_MEMBER(Tiers, device_bytes), REMAT_MEMBER(Tiers, host_bytes),
            REMAT_MEMBER(Tiers, directory), REMAT_MEMBER(Tiers, min_bytes),
            REMAT_MEMBER(Tiers, pin_memory), REMAT_MEMBER(Tiers, max_bytes_in_flight),
            REMAT_MEMBER(Tiers, keep_last)})},
      {"save_elsewhere", open_place},
      {"save_as", opens<SaveAsGuard, at::ScalarType, int64_t>("dtype", "min_bytes")},
      {"disable_saved_tensors_hooks", opens<DisableSavedTensorHooksGuard, std::string>("message")},
      {"early_stop", opens<EarlyStopGuard, bool>("enabled")},
      {"debug", opens<DebugGuard, std::optional<bool>>("enabled")},
      {"checkpoint_level", opens<CheckpointLevelGuard, int64_t>("training_level")},
      {"disable_checkpoint", opens<DisableCheckpointGuard>()},
      {"unseen", opens<UnseenGuard>()},
      {"graph_exec_group", opens<GraphExecGroup>()},
      {"recompute_cache", opens_with<RecomputeCacheGuard, RecomputeCacheOptions>(
                              {REMAT_MEMBER(RecomputeCacheOptions, max_bytes)})},
      {"state_provider", open_state_provider},
      {"preserve_generator",
       [](const py::dict&
              given) { return open<GeneratorGuard>(generator_in(given["generator"])); }},
      {"fork", open_fork},
      {"observe_recomputes", open_observer},
      {"memory_limit", open_memory_limit},
      {"record_allocations", opens<RecordAllocationsGuard>()}};
  return *all;
}

const char* name_of(Phase phase) {
  return phase == Phase::Forward ? "forward" : phase == Phase::Recompute ? "recompute" : "none";
}

}  // namespace

void add_guards(py::module_& module) {
  add_generator_tracker(module);
  py::class_<OpenGuard>(module, "_OpenGuard", "A guard of the library, open until `end`.")
      .def("end", wrapped([](OpenGuard& self) { self.end(); }))
      .def("counts", wrapped([](const OpenGuard& self) { return self.counts(); }));
  module.def("_open", wrapped([](const std::string& name, const py::dict& given) {
               return openers().at(name)(given);
             }));
  py::class_<PhaseInfo>(module, "PhaseInfo",
                        "The region whose function runs, and the kind of this run.")
      .def_property_readonly(
          "phase", [](const PhaseInfo& self) { return name_of(self.phase); },
          "'forward', 'recompute', or 'none' outside of regions.")
      .def_readonly("frame_id", &PhaseInfo::frame_id,
                    "A number of forward and its recomputes, as a key; -1 outside.")
      .def_readonly("depth", &PhaseInfo::depth, "Number of enclosing regions, with this one.")
      .def_readonly("name", &PhaseInfo::name, "The region's name, '' without one.")
      .def("__repr__", [](const PhaseInfo& self) {
        return py::str("PhaseInfo(phase={!r}, frame_id={}, depth={}, name={!r})")
            .format(name_of(self.phase), self.frame_id, self.depth, self.name);
      });
  module.def(
      "current_phase", [] { return current_phase(); },
      "Returns the phase of the innermost region on this thread, also in a backward.");
}

}  // namespace remat::python
