"""The extension module: what the sources in python/binding define."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, TypeVar, Union

import torch

from ._plan import PlanRegion

R = TypeVar("R")
T = TypeVar("T")

_KeepingTuple = tuple[int, float, int, int, int, int, bool, int]
_StageTuple = tuple[
    float, float, float, int, int, int, int, int, bool, int, Sequence[_KeepingTuple], int, bool, int, int,
    bool, int, int, int,
]
_MoveCostTuple = tuple[float, float, float]
_CostTuple = tuple[int, int, Sequence[_StageTuple], float, Optional[_MoveCostTuple], int, int]
_MoveTuple = tuple[str, int, bool]
_Device = Union[torch.device, str, int, None]
_Bytes = Union[int, float]

# process.cpp
def _interpreter_ends() -> None: ...
def _set_names(make_error: Any, run_in: Any, device_context: Any, /) -> None: ...
def _set_dispatch_mode(mode: Any, /) -> None: ...
def _set_words(words: list[tuple[str, str]], /) -> None: ...
def _set_decorator(make: Any, refuse_function: Any, unbound: Any, /) -> None: ...

# region.cpp
def checkpoint(function: Callable[..., Any] = ..., /, *args: Any, **kwargs: Any) -> Any: ...
def _check_options(options: dict[str, Any], /) -> None: ...

# stop.cpp
def _set_stop(stop: type[BaseException], trials: tuple[Callable[[Callable[..., None]], Any], ...], /) -> None: ...

# hook_cycles.cpp
def _set_free_hooks(free: Any, /) -> None: ...
def _note_hooks(handles: tuple[Any, ...], /) -> None: ...
def _let_go(lists: list[list[Any]], /) -> None: ...

# backward.cpp
def _set_engine_run_backward(run_backward: Any, /) -> None: ...
def _run_backward(*args: Any, **kwargs: Any) -> Any: ...

# drop_in.cpp, drop_in_generator.cpp, drop_in_call.cpp
def _checkpoint(*args: Any, **kwargs: Any) -> Any: ...
def _region(*args: Any, **kwargs: Any) -> Any: ...
def _set_upstream(all: dict[str, Any], /) -> None: ...
def _turn_drop_in(on: bool, /) -> None: ...

# policy.cpp
class PolicyContext:
    """One question to a policy function; valid during the call only."""

    @property
    def op_name(self) -> str:
        """The operator: 'aten::mm.default'; 'remat::checkpoint_name' for a value with a name."""
    @property
    def name(self) -> str:
        """The name that `checkpoint_name` gave the value; '' for operators."""
    @property
    def is_recompute(self) -> bool:
        """Whether a recompute asks; only with `ask_again`."""
    @property
    def args(self) -> tuple[Any, ...]:
        """The operator's arguments, in the order of its schema."""
    @property
    def op(self) -> torch._ops.OpOverload:
        """The operator as torch.ops has it: torch.ops.aten.mm.default."""
    def _call_of(self) -> tuple[tuple[Any, ...], dict[str, Any]]: ...

class Policy:
    """What of a region is kept instead of recomputed. Immutable; any thread."""

    def __init__(
        self,
        function: Callable[[PolicyContext], Any],
        *,
        allow_cache_entry_mutation: bool = False,
        save_through_hooks: bool = False,
        ask_again: bool = False,
        min_offload_bytes: _Bytes = 1 << 16,
        prefetch_depth: int = 2,
        max_bytes_in_flight: _Bytes = 64 << 20,
        keep_last: int = 0,
    ) -> None: ...
    def __or__(self, other: Policy) -> Policy: ...

_SelectiveTuple = tuple[bool, bool, bool, int, int, int, int]

def _save_ops(ops: list[str], options: _SelectiveTuple, /) -> Policy: ...
def _offload_ops(ops: list[str], options: _SelectiveTuple, /) -> Policy: ...
def _save_names(names: list[str], options: _SelectiveTuple, /) -> Policy: ...
def _save_all_but_names(names: list[str], options: _SelectiveTuple, /) -> Policy: ...
def _offload_names(names: list[str], options: _SelectiveTuple, /) -> Policy: ...
def _save_matmuls(options: _SelectiveTuple, /) -> Policy: ...
def _save_best(
    bytes: _Bytes,
    profile_runs: int,
    profiles: str,
    seconds_of: Optional[Callable[[PolicyContext], float]],
    offload: bool,
    /,
) -> Policy: ...
def _best_choices(
    policy: Policy, /
) -> list[tuple[str, list[tuple[str, float, int, int, bool]], int, float, float]]: ...
def checkpoint_name(x: torch.Tensor, name: str, /) -> torch.Tensor:
    """`x`, with a name for policies. Outside of regions nothing but `x`."""

def pin(x: torch.Tensor, /) -> torch.Tensor:
    """Inside a region: keeps the value of `x`, and recomputes go on with it. For discrete decisions."""

# save_region.cpp
def save_region(function: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """Inside a region: keeps what autograd saves in `function(*args, **kwargs)` and what it returns."""

# module.cpp
def counters() -> dict[str, int]:
    """Exact counts since the process started; those with `alive` are of now."""

def is_checkpointing() -> bool:
    """True inside a region's first run that no recompute encloses."""

def is_recomputing() -> bool:
    """True inside a recompute of any enclosing region."""

class GraphExecGroup:
    def __enter__(self) -> GraphExecGroup: ...
    def __exit__(self, *error: object) -> None: ...

# modules.cpp
class _Options:
    def __init__(self, options: dict[str, Any], /) -> None: ...

def _run_watched(forward: Callable[..., R], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> R: ...
def _run_module(
    options: _Options, forward: Callable[..., Any], module: torch.nn.Module, /, *args: Any, **kwargs: Any
) -> Any: ...

# guards.cpp
class OpenGuard:
    """A guard of the library, open until `end`."""

    def end(self) -> None: ...

def _open_save_on_cpu(
    pin_memory: bool,
    min_bytes: _Bytes,
    skip_parameters: bool,
    prefetch_depth: int,
    max_bytes_in_flight: Optional[_Bytes],
    keep_last: int,
    /,
) -> tuple[OpenGuard, MoveCounters]: ...
def _open_save_on_disk(
    directory: str, min_bytes: _Bytes, prefetch_depth: int, /
) -> tuple[OpenGuard, MoveCounters]: ...

class MoveCounters:
    """The counts of one scope that moves saved tensors, also after it."""

    def now(self) -> tuple[int, int, int, int, int, float]: ...

def _open_save_in_tiers(
    device_bytes: _Bytes,
    host_bytes: Optional[_Bytes],
    directory: str,
    min_bytes: _Bytes,
    pin_memory: bool,
    max_bytes_in_flight: _Bytes,
    keep_last: int,
    /,
) -> tuple[OpenGuard, TierCounters]: ...

class TierCounters:
    """The counts of one scope of tiers, also after it."""

    def now(self) -> tuple[int, int, int, int, int, int, int, float, int]: ...

def _open_save_elsewhere(
    place: Any,
    facts: list[bool],
    min_bytes: _Bytes,
    skip_parameters: bool,
    prefetch_depth: int,
    max_bytes_in_flight: _Bytes,
    /,
) -> OpenGuard: ...
def _open_save_as(dtype: torch.dtype, min_bytes: _Bytes, /) -> OpenGuard: ...
def _open_disable_saved_tensors_hooks(message: str, /) -> OpenGuard: ...
def _open_early_stop(enabled: bool, /) -> OpenGuard: ...
def _open_debug(enabled: Optional[bool], /) -> OpenGuard: ...
def _open_checkpoint_level(training_level: int, /) -> OpenGuard: ...
def _open_disable_checkpoint() -> OpenGuard: ...
def _open_graph_exec_group() -> OpenGuard: ...
def _open_recompute_cache(max_bytes: Optional[_Bytes], /) -> OpenGuard: ...
def _open_state_provider(provider: Any, /) -> OpenGuard: ...
def _open_generator(generator: torch.Generator, /) -> OpenGuard: ...
def _open_observe_recomputes(begin: Any, end: Any, /) -> OpenGuard: ...
def _open_memory_limit(bytes: _Bytes, device: _Device, /) -> OpenGuard: ...
def _open_record_allocations() -> OpenGuard: ...

class PhaseInfo:
    """The region whose function runs, and which of its runs it is."""

    @property
    def phase(self) -> str:
        """'forward', 'recompute', or 'none' outside of regions."""
    @property
    def frame_id(self) -> int:
        """The same in forward and recompute: a key for state of one region. -1 outside."""
    @property
    def depth(self) -> int:
        """Enclosing regions, this one included."""
    @property
    def name(self) -> str:
        """The region's name, '' if it has none."""

def current_phase() -> PhaseInfo:
    """The phase of the innermost region on this thread, also on the threads of a backward."""

# observe.cpp
class DecisionReport:
    """What became of calls of one operator in regions with a policy: those with the same outcome, for the same reason."""

    @property
    def op(self) -> str: ...
    @property
    def outcome(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def calls(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class RegionReport:
    """Sums over all regions of one name that began while the recorder recorded."""

    @property
    def name(self) -> str: ...
    @property
    def calls(self) -> int: ...
    @property
    def recomputes(self) -> int: ...
    @property
    def early_stops(self) -> int: ...
    @property
    def bytes_dropped(self) -> int: ...
    @property
    def bytes_inputs(self) -> int: ...
    @property
    def bytes_saved(self) -> int: ...
    @property
    def bytes_recompute_peak(self) -> int: ...
    @property
    def offloaded(self) -> int: ...
    @property
    def offload_fallbacks(self) -> int: ...
    @property
    def bytes_offloaded(self) -> int: ...
    @property
    def bytes_inputs_offloaded(self) -> int: ...
    @property
    def offload_loads(self) -> int: ...
    @property
    def offload_loads_ahead(self) -> int: ...
    @property
    def bytes_loaded(self) -> int: ...
    @property
    def offload_wait_s(self) -> float: ...
    @property
    def forward_s(self) -> float: ...
    @property
    def recompute_s(self) -> float: ...
    @property
    def device_forward_s(self) -> float: ...
    @property
    def device_recompute_s(self) -> float: ...
    @property
    def decisions(self) -> list[DecisionReport]: ...

class DeviceReport:
    """What a recorder saw of one device of an accelerator."""

    @property
    def device(self) -> torch.device: ...
    @property
    def is_exact(self) -> bool: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def bytes_out(self) -> int: ...
    @property
    def bytes_in(self) -> int: ...
    @property
    def copies_out_s(self) -> float: ...
    @property
    def copies_in_s(self) -> float: ...
    @property
    def waited_s(self) -> float: ...

class FileReport:
    """What a recorder saw of the files of offload and tiers."""

    @property
    def bytes_written(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def write_s(self) -> float: ...
    @property
    def read_s(self) -> float: ...
    @property
    def waits(self) -> int: ...
    @property
    def waited_s(self) -> float: ...

class MoveReport:
    """What items of plans that have one name moved: stages, or regions with their name."""

    @property
    def name(self) -> str: ...
    @property
    def moves(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def loads(self) -> int: ...
    @property
    def loads_ahead(self) -> int: ...
    @property
    def bytes_loaded(self) -> int: ...
    @property
    def wait_s(self) -> float: ...

class HeldBytes:
    """What regions of one name held when an allocation did not fit."""

    @property
    def region(self) -> str: ...
    @property
    def regions(self) -> int: ...
    @property
    def inputs_bytes(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def recomputed_bytes(self) -> int: ...

class FailedAllocation:
    """What was alive when an allocation did not fit: on an accelerator, or under `memory_limit`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def asked_bytes(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...
    @property
    def parameters_bytes(self) -> int: ...
    @property
    def held(self) -> list[HeldBytes]: ...

class Report:
    """What a recorder counted, by region name; `str` makes a table of it."""

    @property
    def regions(self) -> list[RegionReport]: ...
    @property
    def dropped_events(self) -> int: ...
    @property
    def devices(self) -> list[DeviceReport]: ...
    @property
    def failed_allocations(self) -> list[FailedAllocation]: ...
    @property
    def files(self) -> FileReport: ...
    @property
    def moves(self) -> list[MoveReport]: ...
    def _repr_html_(self) -> str: ...
    def to_json(self) -> str: ...

class _Recorder:
    def __init__(self, memory: bool, operators: bool, max_events: int, device_time: bool, /) -> None: ...
    def stop(self) -> None: ...
    def report(self) -> Report: ...
    def event_log(self) -> str: ...
    def page(self) -> str: ...
    def write_chrome_trace(self, path: str, /) -> None: ...
    def write_memory_svg(self, path: str, /) -> None: ...
    def write_html(self, path: str, /) -> None: ...

def _saved_tensors(
    root: torch.Tensor, /
) -> list[tuple[str, str, torch.Size, Optional[torch.dtype], int, bool, bool]]: ...

def _free_bytes(device: _Device, /) -> int: ...

class MemoryMeter:
    """Counts the bytes that torch's allocator of the CPU, or of another device, has given out and not got back."""

    def __init__(self, device: _Device = None) -> None: ...
    @property
    def device(self) -> torch.device:
        """What is counted."""
    @property
    def is_exact(self) -> bool:
        """Whether bytes are those asked for, not as the allocator rounds them."""
    @property
    def live_bytes(self) -> int:
        """[bytes] alive now in the whole process: the same for every meter."""
    @property
    def peak_bytes(self) -> int:
        """[bytes], the most at one moment since the meter was made or `reset_peak`."""
    def reset_peak(self) -> None:
        """Starts a new peak at the present live bytes."""

# plan.cpp
class Plan:
    """Which stages of a chain are regions, and what moves. As text: '[ck[ck[1] 2] ck2[3] mv[4] mk2[5] 6]'. Immutable."""

    def __init__(
        self,
        stages: int,
        regions: Iterable[Union[tuple[int, int], tuple[int, int, int], tuple[int, int, int, bool]]] = ...,
        moved: Iterable[int] = ...,
    ) -> None: ...
    @staticmethod
    def parse(text: str, /) -> Plan: ...
    @property
    def stages(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def regions(self) -> list[PlanRegion]: ...
    @property
    def policies(self) -> int: ...
    @property
    def moved(self) -> list[int]: ...
    def calls(self) -> list[int]: ...

class Frontier:
    @property
    def _points(self) -> list[tuple[int, float]]: ...
    def plan(self, budget_bytes: _Bytes) -> Plan: ...

def _solve(
    cost: _CostTuple, max_depth: int, early_stop: bool, frame_cost_s: float, eps: float, /
) -> Frontier: ...
def _simulate(
    cost: _CostTuple, plan: Plan, early_stop: bool, frame_cost_s: float, /
) -> tuple[int, float, list[int], int, int]: ...
def _measure(
    stages: list[Callable[[torch.Tensor], torch.Tensor]],
    sample: torch.Tensor,
    warmup: int,
    repeats: int,
    device: _Device,
    policies: list[Any],
    early_stop: bool,
    moving: Optional[_MoveTuple],
    /,
) -> _CostTuple: ...
def _measure_peak(
    chain: Callable[[torch.Tensor], torch.Tensor], sample: torch.Tensor, /
) -> int: ...
def policies_to_try() -> list[Policy]: ...
def _free_budget(cost: _CostTuple, device: _Device, margin: float, /) -> int: ...
def _run(
    plan: Plan,
    stages: list[Callable[[torch.Tensor], torch.Tensor]],
    input: torch.Tensor,
    options: _Options,
    policies: list[Any],
    moving: _MoveTuple,
    /,
) -> torch.Tensor: ...
def revolve_plan(stages: int, snapshots: int, /) -> Plan:
    """The least stage calls for equal stages with `snapshots` states stored, the input among them."""

def mixed_plan(stages: int, units: int, /) -> Plan:
    """The least stage calls where each of `units` holds a state or all that one stage saves."""

def balanced_plan(stages: int, segments: int, /) -> Plan:
    """Segments whose lengths differ by at most one, longer ones first; all but the last are regions."""

def torch_sequential_plan(stages: int, segments: int, /) -> Plan:
    """As torch's `checkpoint_sequential`: the last segment is the longest, and no region."""

def halving_plan(stages: int, /) -> Plan:
    """The left half is a region, the right half is not, and both again."""
