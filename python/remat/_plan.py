"""Plans for a chain of stages: their costs, and the fastest one under a byte budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, NamedTuple, Optional, Union

import torch

from ._arguments import Bytes, Kind, add_kind, checked, of_class, refuse
from ._costs import ChainCost, MoveOptions
from ._errors import in_python_words
from ._extension import _remat
from ._plan_region import PlanRegion as PlanRegion
from ._remat import Plan

Stage = Callable[[torch.Tensor], torch.Tensor]


class InfeasibleBudget(ValueError):
    """No plan fits into the budget."""

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(in_python_words(message))
        self.minimum_bytes = minimum_bytes
        """The smallest budget for which there is a plan [bytes]."""

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.minimum_bytes)


add_kind("Plan", of_class(Plan, "a remat.Plan"))
add_kind(
    "Iterable[Stage]",
    Kind(lambda value: hasattr(value, "__iter__"), "a list of functions, or a torch.nn.Sequential"),
)


class FrontierPoint(NamedTuple):
    """One point of a frontier: a peak, and the least time that it takes."""

    bytes: int
    """[bytes] of the peak beyond the input."""
    extra_s: float
    """[seconds] beyond one forward and one backward."""


class Simulation(NamedTuple):
    """The simulated costs of a plan."""

    peak_bytes: int
    """[bytes] beyond the input."""
    extra_s: float
    """[seconds] beyond one forward and one backward."""
    calls: list[int]
    """The number of forward calls of each stage."""
    frames: int
    """The number of regions."""
    depth: int
    """The deepest nesting."""


class Frontier:
    """The result of `solve`: for every budget the least time. Any thread."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.points = [FrontierPoint(*each) for each in native._points]
        """Bytes rise and seconds fall from point to point; the last one recomputes nothing."""

    @checked
    def plan(self, budget_bytes: Bytes) -> Plan:
        """Returns the fastest plan whose peak is at most `budget_bytes` [bytes] beyond the input,
        the smallest of equals. Raises InfeasibleBudget below the first point."""
        plan: Plan = self._native.plan(budget_bytes)
        return plan


@checked
def solve(
    cost: ChainCost, *, max_depth: int = 0, early_stop: bool = True, frame_cost_s: float = 0.0,
    eps: float = 0.0
) -> Frontier:
    """Computes the exact frontier of time and memory over all plans, for every budget at once. With
    a cost that has `moving`, saved tensors of stages and of outermost regions may wait elsewhere.

    max_depth: the deepest allowed nesting; 0: any. early_stop: the setting with which the plan will
    run. frame_cost_s: [seconds], paid once for each region.
    eps: in [0, 1); points that are faster than the one before by less than this share are dropped.
    The time is cubic in the number of different stages times the number of points; chains of equal
    stages are much cheaper. Raises ValueError for costs or options out of range.
    """
    return Frontier(_remat._solve(cost._read(), max_depth, early_stop, frame_cost_s, eps))


@checked
def simulate(
    cost: ChainCost, plan: Plan, *, early_stop: bool = True, frame_cost_s: float = 0.0
) -> Simulation:
    """Computes the costs of a plan event by event, without the solver's recurrence."""
    return Simulation(*_remat._simulate(cost._read(), plan, early_stop, frame_cost_s))


def stages_of(user: str, stages: Iterable[Stage]) -> list[Stage]:
    """Returns a list of the stages. Raises TypeError for a stage that cannot be called."""
    functions = list(stages)
    for number, stage in enumerate(functions, 1):
        if not callable(stage):
            raise refuse(user, f"stage {number}", "a function or a module", stage)
    return functions


# ---- plans by rule -------------------------------------------------------------------------------


@checked
def revolve_plan(stages: int, snapshots: int) -> Plan:
    """Makes the plan with the least stage calls for equal stages and `snapshots` stored states."""
    return _remat._plan_by("revolve", stages, snapshots)


@checked
def mixed_plan(stages: int, units: int) -> Plan:
    """Makes the plan of the least stage calls; each of `units` holds a state or one stage's
    saves."""
    return _remat._plan_by("mixed", stages, units)


@checked
def balanced_plan(stages: int, segments: int) -> Plan:
    """Makes segments whose lengths differ by at most one, longer first; all but the last are
    regions."""
    return _remat._plan_by("balanced", stages, segments)


@checked
def torch_sequential_plan(stages: int, segments: int) -> Plan:
    """Makes torch's `checkpoint_sequential`: the last segment is the longest, and no region."""
    return _remat._plan_by("torch_sequential", stages, segments)


@checked
def halving_plan(stages: int) -> Plan:
    """Makes the left half a region and the right half none, and so on in both halves."""
    return _remat._plan_by("halving", stages, 0)


# ---- measuring -----------------------------------------------------------------------------------


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
        self._bar = tqdm(
            total=num_stages, desc="remat.measure", unit="stage", delay=1.0, leave=False
        )

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
    """Measures the cost of each stage: runs it forward and backward on the result that the previous
    stages compute from `sample`.

    stages: functions from one tensor to one tensor, modules, or a Sequential; the last one is the
    loss.
    warmup: runs that are not timed. repeats: timed runs, the least of which is kept.
    device: the device whose bytes and time are measured; None: the sample's.
    early_stop: the setting of the regions in which a stage is measured.
    moving: the options with which moves of saved tensors and outputs are tried; None: plans will
        not move any tensor.
    progress: show a bar if measuring takes more than a second and tqdm is installed.

    Bytes are those of storages; temporaries are the bytes that the device's allocator hands out.
    Times on the CPU are those of the calling thread; on an accelerator they are those between
    events on the current stream, each run alone and waited for. Parameters have gradients
    throughout, as in training that sets them to zero: a program that drops them
    (`zero_grad(set_to_none=True)`) needs their bytes on top. Hooks of parameters do not run: no
    optimizer steps. Regions around the call have no effect on the stages. Afterwards parameters
    have the `.grad` and the hooks they had, modules their attributes and buffers, the generators of
    the CPU, of the device and of modules their states. The modules are those that a stage is, or
    that it uses by a closure or a global name; other objects keep the changes that stages make, and
    so does a parameter that a stage writes to. While stages run, buffers and other tensors of
    modules are copies, which takes as much memory again. Raises the errors of the stages; TypeError
    for a stage that does not return a tensor; ValueError for no stages, and for a `moving` that has
    no place for the device's tensors; CheckpointError (UNSUPPORTED) for a device whose allocator
    does not report its bytes.
    """
    functions = stages_of("remat.measure", stages)
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
            cost = ChainCost._of(
                _remat._measure(counted, sample, warmup, repeats, device, early_stop, moving)
            )
    finally:
        bar.close()
    return cost


@checked
def free_budget(
    cost: ChainCost, device: Union[torch.device, str, int, None] = None, *, margin: float = 0.05
) -> int:
    """Returns the budget [bytes] for a plan of `cost` in the memory that `device` has free now:
    `free_bytes`, less a share of it for pieces that fit nothing, and less the measured rounding.

        cost = remat.measure(stages, x)
        plan = remat.solve(cost).plan(remat.free_budget(cost, x.device))

    The chain's input, parameters and gradients must be allocated already. margin: the share, in
    [0, 1). Raises as `free_bytes`; ValueError for a margin out of range.
    """
    return int(_remat._free_budget(cost._read(), device, margin))


# ---- running -------------------------------------------------------------------------------------


@checked
def run(
    plan: Plan,
    stages: Iterable[Stage],
    input: torch.Tensor,
    *,
    moving: Optional[MoveOptions] = None,
    **options: Any,
) -> torch.Tensor:
    """Runs the stages on `input` with nested regions as the plan says, all with the options of
    `checkpoint`.

    moving: the place where the plan's moved tensors wait; None: `MoveOptions()`. A tensor that
        cannot be written stays in memory, with a warning.
    The stages that a region runs are added to its name. Stages that are modules have their buffers
    and training flags restored in recomputes. Memory: at most the peak of `simulate` for measured
    costs, with the loss and its gradient, which the caller of `backward()` holds to its end. Raises
    ValueError if plan and stages have different numbers, and for a plan that moves if `moving` has
    no directory and the input is on the CPU, or no file can be made there; otherwise as
    `checkpoint`.
    """
    result: torch.Tensor = _remat._run(
        plan, stages_of("remat.run", stages), input, _remat._Options(options),
        moving or MoveOptions()
    )
    return result


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
    """Runs the stages one after the other in `segments` segments, each but the last as one region.

    split: "torch": equal segments, the last takes the rest; "balanced": lengths that differ by at
        most one.
    checkpoint_last: the last segment is a region, too.
    options: options of all regions. `input_mode` is "copy_on_write" by default, so that a segment
        may begin with an in-place activation.
    """
    functions = stages_of("remat.checkpoint_sequential", stages)
    plans = {"torch": torch_sequential_plan, "balanced": balanced_plan}
    if split not in plans:
        raise ValueError(
            f"remat.checkpoint_sequential: split must be 'torch' or 'balanced', got {split!r}"
        )
    plan = plans[split](len(functions), segments)
    if checkpoint_last:
        first = plan.regions[-1].last + 1 if plan.regions else 1
        plan = Plan(plan.stages, [*plan.regions, (first, plan.stages)])
    return run(plan, functions, input, **{"input_mode": "copy_on_write", **options})
