"""Errors about regions, and the exception that ends a recompute."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import torch
import torch.utils.checkpoint as upstream


class StopRecompute(upstream._StopRecomputationError):
    """Ends a recompute that has all it needs. Raised by an operator inside a region's function, in
    backward.

    Code that catches it and continues does no harm.
    """


class ErrorKind(enum.Enum):
    """Kinds of a CheckpointError."""

    FEWER_TENSORS = 0
    """The recompute saved fewer tensors than forward."""
    MORE_TENSORS = 1
    """The recompute tried to save more tensors; detected only with early stop off."""
    METADATA_MISMATCH = 2
    """A recomputed tensor has another shape, dtype, device, or strides ("layout")."""
    VALUE_MISMATCH = 3
    """A recomputed tensor has other elements ("values"), or was changed in place after the save."""
    CAPTURE_CHANGED = 4
    """A parameter, buffer or captured tensor differs from the one that forward used."""
    DOUBLE_UNPACK = 5
    """A saved tensor was read twice in one backward, with `strict_unpack`."""
    SELECTIVE_MISMATCH = 6
    """A recompute asks for a result that forward did not keep."""
    SELECTIVE_MUTATION = 7
    """A kept result was changed in place."""
    GROUP_OVERLAP = 8
    """Two backward calls of a group use the same saved tensors."""
    UNSUPPORTED = 9
    """Something that torch or this version cannot do."""
    RECOMPUTE_FAILED = 10
    """The recompute could not be completed."""
    INPUT_CHANGED = 11
    """An argument of the region has changed since the call."""


class Mismatch(NamedTuple):
    """One saved tensor that differs. The operators are known with `debug`. Without it, `forward_op`
    is the node of some tensors, such as "ConvolutionBackward0"; otherwise both are ''."""

    position: int
    """The position of the saved tensor in its region, from 0; -1: the region does not save it."""
    forward: str
    recompute: str
    forward_op: str
    recompute_op: str
    forward_tensor: str = ""
    """The parameter or buffer that forward saved, such as "parameter 'conv1.weight' of Block"; ''
    if it does not belong to a module that the region knows."""
    recompute_tensor: str = ""
    """The parameter or buffer that the recompute saved, in the same form."""


class CheckpointError(upstream.CheckpointError):
    """A recompute and its forward differ, or a region cannot go on.

    Raised by `checkpoint` and by backward. Exceptions of the region's function itself pass
    unchanged.
    """

    kind: ErrorKind = ErrorKind.RECOMPUTE_FAILED
    region: str = ""
    """The region's name, '' without one."""
    frame_id: int = -1
    forward_count: int = -1
    """Tensors that forward saved, -1 if it has no meaning."""
    recompute_count: int = -1
    """Tensors that the recompute saved, -1 if it has no meaning."""
    mismatches: tuple[Mismatch, ...] = ()


class BudgetExceeded(torch.OutOfMemoryError):
    """An allocation did not fit under `remat.budget(..., over="throw")`.

    Raised by the operator that allocates. The graph stays valid: the same backward can run again
    under a larger budget.
    """

    needed_bytes: int = -1
    """The budget that would have been enough for this allocation [bytes]."""
    floor_bytes: int = -1
    """The `floor_bytes` of the report [bytes]."""


# Texts of the library for C++ programs, in Python's words: phrases first, then single names.
_PHRASES = (
    # Phrases of warnings.
    ("an exception from a RecomputeObserver's end was ignored",
     "an exception from the `end` of observe_recomputes was ignored"),
    ("remat: a StateProvider could", "remat.state_provider: a provider could"),
    ("remat: the state of a guard could not be restored",
     "remat: the state of a guard inside a region could not be restored"),
    ("(in a tuple, a vector, a struct with visit_tensors)",
     "(in a tuple, a list, a dictionary, a dataclass)"),
    ("a member that holds an attention map", "an attribute that holds an attention map"),
    ("only if !remat::is_recomputing()", "only if not remat.is_recomputing()"),
    # Phrases of errors, and of both.
    ("remat::checkpoint: ", "torch.utils.checkpoint: "),
    ("inputs = remat::InputMode::CopyOnWrite in CheckpointOptions", 'input_mode="copy_on_write"'),
    ("cannot be stopped (a noexcept function)", "cannot be stopped"),
    ("(InputMode::CopyOnWrite)", '(input_mode="copy_on_write")'),
    ("capture_check = CaptureCheck::Ignore", 'capture_check="ignore"'),
    ("pass `debug = true` in CheckpointOptions, or open a remat::DebugGuard(true) around the "
     "forward",
     "pass `debug=True` to checkpoint, or run the forward under remat.debug()"),
    ("because CheckpointOptions had `debug = true` (or a remat::DebugGuard was open)",
     "because you passed `debug=True` to checkpoint (or ran the forward under remat.debug())"),
    ("under a remat::DisableCheckpointGuard", "under remat.disable_checkpoint()"),
    ("under torch::jit::GraphOptimizerEnabledGuard(false)",
     "under torch.jit.optimized_execution(False)"),
    ("name it in CheckpointOptions::modules", "name it in `modules`"),
    ("use a RecomputeCacheGuard", "use remat.recompute_cache()"),
    ("BufferPolicy::Ignore", 'buffers="ignore"'),
    ("leave CheckpointOptions::transforms at RunPlainly", 'leave transforms="plain"'),
    ("set CheckpointOptions::transforms = remat::Transforms::Refuse", 'pass transforms="refuse"'),
    ("SelectiveOptions::allow_cache_entry_mutation", "allow_cache_entry_mutation=True"),
    ("`mutable_data_ptr()`", "an operator"),
    ("INT64_MAX for a report without a limit", "sys.maxsize for a report without a limit"),
    ("let OverBudget::Continue exceed the budget", 'pass over="continue" to exceed the budget'),
    ("(BudgetOptions::check_values)", "(check_values=True)"),
    ("is not a c10::DeviceAllocator, so it has no statistics", "keeps no statistics"),
)  # fmt: skip
_GUARDS = {
    "MemoryLimitGuard": "memory_limit", "RecomputeCacheGuard": "recompute_cache",
    "SaveAsGuard": "save_as",
    "SaveOnCpuGuard": "save_on_cpu", "SaveElsewhereGuard": "save_elsewhere",
    "SaveInTiersGuard": "save_in_tiers",
    "SaveOnDiskGuard": "save_on_disk", "StateProviderGuard": "state_provider",
    "RecordAllocationsGuard": "record_allocations",
    "DisableCheckpointGuard": "disable_checkpoint", "DebugGuard": "debug",
    "GeneratorGuard": "preserve_generator",
    "BudgetGuard": "budget", "UnseenGuard": "unseen",
    "GeneratorForkGuard": "GeneratorTracker.fork",
}  # fmt: skip
_NAMES = (
    (re.compile(rf"\b({'|'.join(_GUARDS)})\b"), lambda found: _GUARDS[found[1]]),
    (re.compile(r"\b([A-Z][A-Za-z]*Cost)::"), lambda found: f"{found[1]}."),
    # an option of whatever it is: by its name alone
    (re.compile(r"\b[A-Z][A-Za-z]*Options::"), ""),
    (re.compile(r"\b(preserve_rng_state|early_stop|debug|strict_unpack) = (true|false)\b"),
     lambda found: f"{found[1]}={found[2].capitalize()}"),
    (re.compile(r"\bat::k([A-Z][A-Za-z0-9]*)"), lambda found: f"torch.{found[1].lower()}"),
    (re.compile(r"\bremat::plan: "), "remat.solve: "),
    (re.compile(r"\bremat::([a-zA-Z_]+)(?:::([a-z_]+))?"),
     lambda found: f"remat.{found[1]}.{found[2]}" if found[2] else f"remat.{found[1]}"),
)  # fmt: skip

# Warnings come from any thread, where no Python can run: the extension puts these texts in, one
# after the other.
WORDS_OF_WARNINGS = [
    ("remat::checkpoint: ", "remat.checkpoint: "), *_PHRASES, *_GUARDS.items(),
    ("remat::", "remat."),
]  # fmt: skip


def in_python_words(text: str) -> str:
    """Translates a text of the library into the names of the Python package."""
    for theirs, ours in _PHRASES:
        text = text.replace(theirs, ours)
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


def said_in_python(error: Exception) -> Exception:
    """Returns an error of the extension, translated. Errors of the program are unchanged."""
    if type(error) not in (ValueError, RuntimeError) or not str(error).startswith("remat::"):
        return error
    return type(error)(in_python_words(str(error)))


# Numbers in the text as in that of torch.utils.checkpoint: programs look for them.
_COUNTS = (
    "Number of tensors saved during forward: {}\n"
    "Number of tensors saved during recomputation: {}.\n"
)


def make_error(
    kind: int,
    text: str,
    region: str,
    frame_id: int,
    forward_count: int,
    recompute_count: int,
    mismatches: list[tuple[int, str, str, str, str, str, str]],
) -> CheckpointError:
    """Returns the exception for an error of the library. Its first line is that of
    torch.utils.checkpoint, if that has one."""
    text = in_python_words(text)
    if kind == ErrorKind.FEWER_TENSORS.value:
        fact, _, rest = text.partition("\n")
        text = fact + "\n" + _COUNTS.format(forward_count, recompute_count) + rest
    if kind == ErrorKind.SELECTIVE_MUTATION.value:
        text = "Tensor cached during selective activation checkpoint has been mutated\n" + text
    error = CheckpointError(text)
    error.kind, error.region, error.frame_id = ErrorKind(kind), region, frame_id
    error.forward_count, error.recompute_count = forward_count, recompute_count
    error.mismatches = tuple(Mismatch(*each) for each in mismatches)
    return error


def make_budget_error(text: str, needed_bytes: int, floor_bytes: int) -> Exception:
    """Returns the exception for an error of a budget. Negative bytes: it is of no allocation."""
    text = in_python_words(text)
    if needed_bytes < 0:
        return RuntimeError(text)
    error = BudgetExceeded(text)
    error.needed_bytes, error.floor_bytes = needed_bytes, floor_bytes
    return error
