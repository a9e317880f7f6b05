#pragma once
// Regions of torch.utils.checkpoint: facts about it, and a region from its arguments to its end.

#include <memory>
#include <optional>
#include <utility>

#include "python.h"
#include "region.h"
#include "remat/binding.h"

namespace remat::python {

/// The objects of torch.utils.checkpoint that the drop-in needs; never freed.
struct Upstream {
  PyObject* generator = nullptr;  ///< the function that is replaced
  PyObject* globals = nullptr;    ///< its module's dictionary, read at each call as it does
  PyObject* noop_context_fn = nullptr;
  PyObject* default_metadata = nullptr;  ///< its own function for determinism_check="default"
  PyObject* no_metadata = nullptr;       ///< ... for "none"
  PyObject* is_tracing =
      nullptr;  ///< returns whether torch.compile makes the call; used under a dispatch mode
  PyObject* contexts = nullptr;  ///< (policy, forward context, recompute context) of a context_fn
  PyObject* debug_contexts = nullptr;  ///< (forward context, recompute context, on_error)
  PyObject* fingerprint = nullptr;     ///< the text that a metadata function gives of a tensor
  PyObject* leave = nullptr;    ///< leaves a context; returns whether it suppressed the exception
  PyObject* pass_on = nullptr;  ///< makes a call of `checkpoint` in upstream's way
  PyObject *replaced_name = nullptr, *replacement = nullptr;  ///< of `generator` in `globals`
  bool throws = false;  ///< `checkpoint` throws what its function raises into the generator
  bool is_on = false;
};
Upstream& upstream();

/// The ways in which a call of torch.utils.checkpoint runs; the order is that of `_ways` in
/// _drop_in.py.
enum class Way { Region, Reentrant, CompiledAutograd, Transform, Tracing };
inline constexpr std::size_t num_ways = 5;

/// Counts a call. Interpreter's lock.
void count_call(Way way);
/// Returns how a call runs if the drop-in is on. Throws Python's errors.
Way way_of_call();
/// Returns whether a call is upstream's own affair, and counts it. Throws Python's errors.
bool is_for_upstream();

/// A region of upstream, from its arguments to its end. One thread.
struct DropInRun {
  enum class State { New, Open, Plain, Over };
  /// See Note [Tensors held twice].
  struct Forward {
    Forward(const CheckpointOptions& options, std::unique_ptr<Body> body,
            const FunctionFacts& facts)
        : held(body->inputs()), run(options, std::move(body), facts) {}
    const HeldTensors held;
    ForwardRun run;
  };
  State state = State::New;
  CheckpointOptions options;
  std::unique_ptr<Body> body;      // until the region opens
  py::object forward_context;      // null for none
  std::optional<Forward> forward;  // while it is open

  /// Reads upstream's settings of a region before its call. Throws py::error_already_set and
  /// python_error.
  void prepare(PyObject* const* settings, const Call& call);
  /// Opens the region. False: a recompute around it ends here, with the Python error that is set.
  bool open();
  void finish();
  /// Leaves the forward context. Returns whether it has suppressed the exception; null: it ended
  /// normally.
  bool leave_context(py::handle error);
  /// Does the same and ends the region, whose function has not returned.
  bool abandon(py::handle error);
};

/// Upstream's settings of a region, before its function's arguments: function, preserve_rng_state,
/// context_fn, determinism_check, debug, early_stop.
inline constexpr Py_ssize_t num_settings = 6;

inline PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

/// Adds the substitutes of the generator, and of `checkpoint` itself, to the module.
void add_generator(py::module_& module);        // drop_in_generator.cpp
void add_checkpoint_call(py::module_& module);  // drop_in_call.cpp

}  // namespace remat::python
