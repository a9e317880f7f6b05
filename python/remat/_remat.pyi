"""The public part of the extension module, for type checkers. Texts for `help` are in
python/binding. Names that begin with an underscore are for this package alone, without types."""

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, Union, overload

import torch

from ._plan_region import PlanRegion

_R = TypeVar("_R")

def __getattr__(name: str) -> Any: ...

class _Policy:
    def __init__(
        self, function: str, given: tuple[Any, ...], options: dict[str, Any], /
    ) -> None: ...

def checkpoint(function: Callable[..., Any] = ..., /, *args: Any, **kwargs: Any) -> Any: ...

class PolicyContext:
    op_name: Final[str]
    name: Final[str]
    is_recompute: Final[bool]
    args: Final[tuple[Any, ...]]
    results: Final[tuple[Any, ...]]
    module_path: Final[str]
    parameter_path: Final[str]
    op: Final[torch._ops.OpOverload]
    def _call_of(self) -> tuple[tuple[Any, ...], dict[str, Any]]: ...

def checkpoint_name(x: torch.Tensor, name: str, /) -> torch.Tensor:
    """Returns `x` with a name for policies. Outside of regions, returns just `x`."""

def pin(x: torch.Tensor, /) -> torch.Tensor:
    """Keeps the value of `x` inside a region for its recomputes. For discrete decisions."""

@overload
def save_region(function: Callable[..., _R], /, *args: Any, **kwargs: Any) -> _R:
    """Keeps, inside a region, the results of the call and the tensors that autograd saves in it."""

@overload
def save_region(name: str, function: Callable[..., _R], /, *args: Any, **kwargs: Any) -> _R:
    """Keeps the same if the region's policy keeps the name."""

def counters() -> dict[str, int]:
    """Returns exact counts since the process started; those with `alive` are current."""

def is_checkpointing_disabled() -> bool:
    """Returns True under `disable_checkpoint()`: calls of `checkpoint` run plainly."""

def set_default_options(text: str, /) -> None:
    """Sets the process's defaults of options, as REMAT_OPTIONS does when the first region begins.

        remat.set_default_options("early_stop=false, determinism_check=values")

    They replace earlier ones; "" ends them. A default applies to regions that begin later, wherever
    their option has its built-in value; guards have priority. Regions of the drop-in are included.
    Options: preserve_rng_state, early_stop, debug, offload_inputs, strict_unpack,
    determinism_check, capture_check, input_mode, offload_prefetch_depth.
    Raises ValueError for another name or value, in every region if it is REMAT_OPTIONS's.
    """

def default_options() -> str:
    """Returns the text of the defaults in force, "" without any."""

def is_checkpointing() -> bool:
    """Returns True inside a region's first run that no recompute encloses."""

def is_recomputing() -> bool:
    """Returns True inside a recompute of any enclosing region."""

class PhaseInfo:
    phase: Final[str]
    frame_id: Final[int]
    depth: Final[int]
    name: Final[str]

def current_phase() -> PhaseInfo:
    """Returns the phase of the innermost region on this thread, also in a backward."""

class DecisionReport:
    op: Final[str]
    outcome: Final[str]
    reason: Final[str]
    calls: Final[int]
    bytes: Final[int]

class RegionReport:
    name: Final[str]
    calls: Final[int]
    recomputes: Final[int]
    early_stops: Final[int]
    bytes_dropped: Final[int]
    bytes_inputs: Final[int]
    bytes_saved: Final[int]
    bytes_recompute_peak: Final[int]
    offloaded: Final[int]
    offload_fallbacks: Final[int]
    bytes_offloaded: Final[int]
    bytes_inputs_offloaded: Final[int]
    offload_loads: Final[int]
    offload_loads_ahead: Final[int]
    bytes_loaded: Final[int]
    offload_wait_s: Final[float]
    forward_s: Final[float]
    recompute_s: Final[float]
    device_forward_s: Final[float]
    device_recompute_s: Final[float]
    decisions: Final[list[DecisionReport]]

class DeviceReport:
    device: Final[torch.device]
    is_exact: Final[bool]
    peak_bytes: Final[int]
    bytes_out: Final[int]
    bytes_in: Final[int]
    copies_out_s: Final[float]
    copies_in_s: Final[float]
    waited_s: Final[float]

class FileReport:
    bytes_written: Final[int]
    bytes_read: Final[int]
    write_s: Final[float]
    read_s: Final[float]
    waits: Final[int]
    waited_s: Final[float]

class MoveReport:
    name: Final[str]
    moves: Final[int]
    bytes_moved: Final[int]
    loads: Final[int]
    loads_ahead: Final[int]
    bytes_loaded: Final[int]
    wait_s: Final[float]

class EvictionReport:
    op: Final[str]
    evictions: Final[int]
    bytes_evicted: Final[int]
    reruns: Final[int]
    bytes_rerun: Final[int]
    rerun_s: Final[float]
    moves: Final[int]
    bytes_moved: Final[int]

class HeldBytes:
    region: Final[str]
    regions: Final[int]
    inputs_bytes: Final[int]
    saved_bytes: Final[int]
    recomputed_bytes: Final[int]

class FailedAllocation:
    device: Final[torch.device]
    asked_bytes: Final[int]
    live_bytes: Final[int]
    parameters_bytes: Final[int]
    held: Final[list[HeldBytes]]

class Report:
    regions: Final[list[RegionReport]]
    dropped_events: Final[int]
    devices: Final[list[DeviceReport]]
    failed_allocations: Final[list[FailedAllocation]]
    files: Final[FileReport]
    moves: Final[list[MoveReport]]
    evictions: Final[list[EvictionReport]]
    def _repr_html_(self) -> str: ...
    def to_json(self) -> str: ...

class RegionHandle:
    def __init__(self) -> None: ...
    @property
    def name(self) -> str: ...
    def prepare(self) -> bool: ...
    def release(self) -> None: ...

class MemoryMeter:
    def __init__(self, device: Union[torch.device, str, int, None] = None) -> None: ...
    device: Final[torch.device]
    is_exact: Final[bool]
    @property
    def live_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...

class Plan:
    def __init__(
        self,
        stages: int,
        regions: Iterable[
            Union[tuple[int, int], tuple[int, int, int], tuple[int, int, int, bool]]
        ] = ...,
        moved: Iterable[int] = ...,
    ) -> None: ...
    @staticmethod
    def parse(text: str, /) -> Plan: ...
    stages: Final[int]
    depth: Final[int]
    frames: Final[int]
    regions: Final[list[PlanRegion]]
    moved: Final[list[int]]
    def calls(self) -> list[int]: ...

def _plan_by(rule: str, stages: int, number: int, /) -> Plan: ...

class BudgetReport:
    budget_bytes: Final[int]
    peak_bytes: Final[int]
    floor_bytes: Final[int]
    source_bytes: Final[int]
    over_bytes: Final[int]
    over_count: Final[int]
    evictions: Final[int]
    reruns: Final[int]
    moves: Final[int]
    operators: Final[int]
    rerun_s: Final[float]
    search_s: Final[float]
