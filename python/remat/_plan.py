"""Where to checkpoint a chain of stages: plans, what they cost, the fastest one under a byte budget."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union, cast

import torch

from ._arguments import (
    Bytes,
    Kind,
    add_kind,
    check,
    check_fields,
    checked,
    checked_by,
    of_class,
    refuse,
)
from ._errors import in_python_words, translated
from ._extension import _remat
from ._guards import Path

Plan = _remat.Plan
Stage = Callable[[torch.Tensor], torch.Tensor]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=Any)


def _native(name: str, function: F, **annotations: str) -> F:
    return checked_by(f"remat.{name}", annotations, cast(F, translated(function)))


_remat.Plan.__init__ = _native(  # type: ignore[method-assign]
    "Plan", _remat.Plan.__init__, self="", stages="int", regions="", moved=""
)
_remat.Plan.parse = staticmethod(_native("Plan.parse", _remat.Plan.parse, text="str"))  # type: ignore[method-assign]
revolve_plan = _native("revolve_plan", _remat.revolve_plan, stages="int", snapshots="int")
mixed_plan = _native("mixed_plan", _remat.mixed_plan, stages="int", units="int")
balanced_plan = _native("balanced_plan", _remat.balanced_plan, stages="int", segments="int")
torch_sequential_plan = _native("torch_sequential_plan", _remat.torch_sequential_plan, stages="int", segments="int")
halving_plan = _native("halving_plan", _remat.halving_plan, stages="int")
_solve, _simulate = translated(_remat._solve), translated(_remat._simulate)
_measure, _run = translated(_remat._measure), translated(_remat._run)
_free_budget = translated(_remat._free_budget)


class InfeasibleBudget(ValueError):
    """No plan fits into the budget."""

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(in_python_words(message))
        self.minimum_bytes = minimum_bytes
        """The smallest budget for which there is a plan [bytes]."""

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.minimum_bytes)


class PlanRegion(NamedTuple):
    """Stages `first` to `last`, which run as one region."""

    first: int
    """From 1."""
    last: int
    """Inclusive."""


def _whole(cost: T) -> T:
    """A cost whose numbers of bytes are ints."""
    found = {
        name: value
        for name, value in cost._asdict().items()
        if name.endswith("_bytes") and type(value) is not int
    }
    if not found:
        return cost
    user = f"remat.{type(cost).__name__}"
    read = {name: check(user, name, "Bytes", value) for name, value in found.items()}
    whole: T = cost._replace(**read)
    return whole


class StageCost(NamedTuple):
    """What one stage of a chain costs; each storage once. Parameters and their gradients are in no budget."""

    forward_s: float = 0.0
    """[seconds] of a forward in grad mode."""
    backward_s: float = 0.0
    """[seconds] of its backward."""
    forward_to_last_save_s: float = -1.0
    """[seconds] of a forward that ends at the stage's last save. Negative: `forward_s`."""
    output_bytes: int = 0
    """[bytes] that the stage returns."""
    saved_bytes: int = 0
    """[bytes] that autograd keeps and that are neither input nor output nor parameters."""
    forward_tmp_bytes: int = 0
    """[bytes] at the peak of a forward that saves, beyond all that is named here."""
    backward_tmp_bytes: int = 0
    """The same of a backward."""
    grad_bytes: int = 0
    """[bytes] of the output's gradient."""
    saves_output: bool = True
    """Whether the output is among what autograd keeps of the stage."""
    unsaved_tmp_bytes: int = -1
    """Instead of `forward_tmp_bytes` where nothing is saved. Negative: the same."""
    movable_bytes: int = 0
    """[bytes] of `saved_bytes` that go away when what the stage saves is moved."""
    has_movable_output: bool = False
    """Whether `output_bytes` go away when the stage behind, or a region that begins with it, moves its input."""
    first_read_tmp_bytes: int = 0
    """[bytes] that a backward has made, beyond `grad_bytes`, when it first reads what autograd keeps: a region that ends
    with the stage is computed again beside it."""
    stopped_tmp_bytes: int = -1
    """Instead of `forward_tmp_bytes` in a recompute that early stop ends in the stage: beyond `saved_bytes`, and the
    output if autograd keeps it. Negative: the same."""
    saves_input: bool = True
    """Whether the input is among what autograd keeps of the stage. If not, it goes away when the stage has run forward,
    unless others hold it: the stage before it, which saves its output, the caller, or a region that begins with the stage
    and is in no other one."""
    backward_bytes: int = -1
    """[bytes] of all that there is of the stage at the peak of its backward, but for the input, which others hold. Negative:
    the sum of what is named here."""
    region_backward_bytes: int = -1
    """The same with the input, which a region holds that begins with the stage. Negative: both together."""
    lone_backward_bytes: int = -1
    """The same with the input, if autograd keeps it, when nobody else holds it. Negative: both together."""

    @classmethod
    def _of(cls, numbers: _remat._StageTuple) -> StageCost:
        return cls(*numbers)


class MoveCost(NamedTuple):
    """What it costs to copy saved tensors to where they wait, and back."""

    store_s_per_byte: float = 0.0
    """[seconds per byte] of copies there, with nothing beside them."""
    load_s_per_byte: float = 0.0
    """[seconds per byte] of copies back."""
    held_up_share: float = 0.0
    """By which share of these seconds the program takes longer beside which they run; above 1 where preparing copies takes
    longer than copying."""


class ChainCost(NamedTuple):
    """A chain of stages, each fed with the output of the one before; the last is the loss."""

    input_bytes: int = 0
    """[bytes], for the record: budgets do not count the input."""
    input_grad_bytes: int = 0
    """[bytes] of the gradient of the input; 0 if it takes none."""
    stages: tuple[StageCost, ...] = ()
    rounding: float = 0.0
    """What the allocator takes beyond what is asked for, as a share of it. Budgets do not count it; `free_budget` takes
    it off."""
    moving: Optional[MoveCost] = None
    """None: nothing moves."""
    cached_cast_bytes: int = 0
    """[bytes] of casts of weights that autocast's cache keeps beyond their stages, where it is around all of them. They
    count in every peak, from beginning to end, and are in no stage's bytes."""
    held_to_end_bytes: int = 0
    """[bytes] that the caller of `backward()` has of the last stage until it returns: the result and its gradient. They
    count in the peaks of all stages before that one, when they run backward."""

    @classmethod
    def _of(cls, numbers: _remat._CostTuple) -> ChainCost:
        input_bytes, input_grad_bytes, stages, rounding, moving, *held = numbers
        move_cost = None if moving is None else MoveCost(*moving)
        return cls(input_bytes, input_grad_bytes, tuple(map(StageCost._of, stages)), rounding, move_cost, *held)

    def _tuple(self) -> _remat._CostTuple:
        stages = tuple(map(_whole, self.stages))
        cost = _whole(self)
        return (
            cost.input_bytes, cost.input_grad_bytes, stages, cost.rounding, cost.moving,
            cost.cached_cast_bytes, cost.held_to_end_bytes,
        )  # fmt: skip


@dataclass(frozen=True)
class MoveOptions:
    """Where waits what a plan moves: `measure(..., moving=MoveOptions(directory="/nvme"))`, of `fit` and `run`, too."""

    directory: Optional[Path] = None
    """Of a file without a name (as with `save_on_disk`); it must exist. None: an accelerator's tensors wait on the CPU, and
    the CPU's own do not move."""
    min_bytes: Bytes = 1 << 16
    """[bytes]; smaller tensors stay."""
    pin_memory: bool = True
    """Copies between accelerator and CPU use page-locked memory, if there is some."""

    def __post_init__(self) -> None:
        check_fields(self)

    def _tuple(self) -> _remat._MoveTuple:
        return (
            "" if self.directory is None else os.fspath(self.directory),
            int(self.min_bytes),
            self.pin_memory,
        )


add_kind("Plan", of_class(Plan, "a remat.Plan"))
add_kind("ChainCost", of_class(ChainCost, "a remat.ChainCost"))
add_kind("MoveOptions", of_class(MoveOptions, "a remat.MoveOptions"))
add_kind(
    "Iterable[Stage]", Kind(lambda value: hasattr(value, "__iter__"), "a list of functions, or a torch.nn.Sequential")
)


class FrontierPoint(NamedTuple):
    """One point of a frontier: a peak, and the least time that it takes."""

    bytes: int
    """[bytes] of the peak beyond the input."""
    extra_s: float
    """[seconds] beyond one forward and one backward."""


class Simulation(NamedTuple):
    """What `simulate` says of a plan."""

    peak_bytes: int
    """[bytes] beyond the input."""
    extra_s: float
    """[seconds] beyond one forward and one backward."""
    calls: list[int]
    """How often forward calls each stage."""
    frames: int
    """Regions."""
    depth: int
    """The deepest nesting."""


class Frontier:
    """What `solve` found: for every budget the least time. Any thread."""

    def __init__(self, native: _remat.Frontier) -> None:
        self._native = native
        self.points = [FrontierPoint(*each) for each in native._points]
        """Bytes rise and seconds fall from point to point; the last one recomputes nothing."""

    @checked
    def plan(self, budget_bytes: Bytes) -> Plan:
        """The fastest plan whose peak is at most `budget_bytes` [bytes] beyond the input; of the equally fast ones
        one of the smallest peak. Raises InfeasibleBudget below the first point."""
        return self._native.plan(budget_bytes)


@checked
def solve(
    cost: ChainCost, *, max_depth: int = 0, early_stop: bool = True, frame_cost_s: float = 0.0, eps: float = 0.0
) -> Frontier:
    """The exact frontier of time and memory over all plans, for every budget at once. With a cost that has `moving`, what
    stages and regions outside of other regions save may wait elsewhere.

    max_depth: of nesting; 0: any. early_stop: as the plan will run. frame_cost_s: [seconds], paid once a region.
    eps: in [0, 1); points that are faster than the one before by less than this share are dropped.
    Cubic in the number of different stages times the number of points; chains of equal stages are much cheaper.
    Raises ValueError for costs or options out of range.
    """
    return Frontier(_solve(cost._tuple(), max_depth, early_stop, frame_cost_s, eps))


@checked
def simulate(cost: ChainCost, plan: Plan, *, early_stop: bool = True, frame_cost_s: float = 0.0) -> Simulation:
    """What a plan costs, event by event, without the solver's recurrence."""
    return Simulation(*_simulate(cost._tuple(), plan, early_stop, frame_cost_s))


def stages_of(user: str, stages: Iterable[Stage]) -> list[Stage]:
    """A Sequential is the list of its children. Raises TypeError for what is no function."""
    functions = list(stages)
    for number, stage in enumerate(functions, 1):
        if not callable(stage):
            raise refuse(user, f"stage {number}", "a function or a module", stage)
    return functions


# ---- measuring ----------------------------------------------------------------------------------------------


class _Progress:
    """A bar, if tqdm is installed and measuring takes more than a second."""

    def __init__(self, num_stages: int, is_wanted: bool) -> None:
        self._bar: Any = None
        self.stage = -1
        if not is_wanted:
            return
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return
        self._bar = tqdm(total=num_stages, desc="remat.measure", unit="stage", delay=1.0, leave=False)

    @property
    def is_there(self) -> bool:
        return self._bar is not None

    def begins(self, stage: int) -> None:
        self.stage = stage
        self._bar.update(stage - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@checked
def measure(
    stages: Iterable[Stage],
    sample: torch.Tensor,
    *,
    warmup: int = 1,
    repeats: int = 5,
    device: Union[torch.device, str, int, None] = None,
    early_stop: bool = True,
    moving: Optional[MoveOptions] = None,
    progress: bool = True,
) -> ChainCost:
    """Runs each stage forward and backward on what the one before made of `sample`, and says what it cost.

    stages: functions from one tensor to one tensor, modules, or a Sequential; the last one is the loss.
    warmup: runs that are not timed. repeats: timed runs, the least of which is kept.
    device: whose bytes and time count, what is elsewhere counts nothing; None: the sample's.
    early_stop: of the regions in which a stage is measured.
    moving: what stages save, and their outputs, are tried to move so; None: plans will not move anything.
    progress: a bar where it takes more than a second and tqdm is installed.

    Bytes are those of storages; temporaries are what the device's allocator gives out. Times on the CPU are those of
    the calling thread; on an accelerator those between events on the current stream, each run alone and waited for.
    Parameters have gradients throughout, as in training that sets them to
    zero: a program that drops them (`zero_grad(set_to_none=True)`) needs their bytes on top.
    Hooks of parameters do not run: no optimizer steps. In a region the stages run as if it were not
    there. Afterwards parameters have the `.grad` and the hooks they had, modules their attributes
    and buffers, the generators of the CPU, of the device and of modules their states. The modules
    are those that a stage is, or that it uses by a closure or a global name; other objects keep
    what stages do to them, and so does a parameter that a stage writes to. While stages run,
    buffers and other tensors of modules are copies, which takes as much memory again.
    Raises what a stage raises; TypeError for a stage that does not return a tensor; ValueError for no stages, and for a
    `moving` that has no place for the device's tensors; CheckpointError (UNSUPPORTED) for a device whose allocator does not tell its bytes.
    """
    functions = stages_of("remat.measure", stages)
    moves = None if moving is None else moving._tuple()
    bar = _Progress(len(functions), progress)

    def shown(number: int, stage: Stage) -> Stage:
        def run(x: torch.Tensor) -> torch.Tensor:
            if bar.stage != number:  # its first call, which is not timed
                bar.begins(number)
            return stage(x)

        return run

    try:
        from ._state import state_kept  # not when the package is imported: few programs measure

        with state_kept(functions):
            counted = [shown(*each) for each in enumerate(functions)] if bar.is_there else functions
            cost = ChainCost._of(_measure(counted, sample, warmup, repeats, device, early_stop, moves))
    finally:
        bar.close()
    return cost


def random_states_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The generators of the CPU and of the device have afterwards the states they had."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "get_rng_state"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


@checked
def free_budget(
    cost: ChainCost, device: Union[torch.device, str, int, None] = None, *, margin: float = 0.05
) -> int:
    """The budget [bytes] for a plan of `cost` in what `device` has free now: `free_bytes`, less a share of it for pieces
    that fit nothing, and less the rounding that was measured.

        cost = remat.measure(stages, x)
        plan = remat.solve(cost).plan(remat.free_budget(cost, x.device))

    What the chain's input, parameters and gradients take is to be there already. margin: the share, in [0, 1).
    Raises as `free_bytes`; ValueError for a margin out of range.
    """
    return _free_budget(cost._tuple(), device, margin)


# ---- running ------------------------------------------------------------------------------------------------


@checked
def run(
    plan: Plan,
    stages: Iterable[Stage],
    input: torch.Tensor,
    *,
    moving: Optional[MoveOptions] = None,
    **options: Any,
) -> torch.Tensor:
    """Runs the stages on `input` with nested regions as the plan says, all with the options of `checkpoint`.

    moving: where waits what the plan moves; None: `MoveOptions()`. What cannot be written stays in memory, with a warning.
    The stages that a region runs are added to its name. Stages that are modules have their buffers and training
    flags restored in recomputes. Memory: at most what `simulate` says for measured costs, with the loss and its gradient,
    which the caller of `backward()` holds to its end.
    Raises ValueError if plan and stages have different numbers, and for a plan that moves
    if `moving` has no directory and the input is on the CPU, or no file can be made there; else as `checkpoint`.
    """
    moves = (moving or MoveOptions())._tuple()
    return _run(plan, stages_of("remat.run", stages), input, _remat._Options(options), moves)


@checked
def checkpoint_sequential(
    stages: Iterable[Stage],
    segments: int,
    input: torch.Tensor,
    *,
    split: str = "torch",
    checkpoint_last: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Runs the stages one after the other in so many segments, each but the last as one region.

    split: "torch": equal segments, the last takes the rest; "balanced": lengths that differ by at most one.
    checkpoint_last: the last segment is a region, too.
    input_mode is "copy_on_write" unless it is said, so that a segment may begin with an in-place activation.
    """
    functions = stages_of("remat.checkpoint_sequential", stages)
    plans = {"torch": torch_sequential_plan, "balanced": balanced_plan}
    if split not in plans:
        raise ValueError(f"remat.checkpoint_sequential: split must be 'torch' or 'balanced', and is {split!r}")
    plan = plans[split](len(functions), segments)
    if checkpoint_last:
        first = plan.regions[-1].last + 1 if plan.regions else 1
        plan = Plan(plan.stages, [*plan.regions, (first, plan.stages)])
    return run(plan, functions, input, **{"input_mode": "copy_on_write", **options})
