"""`fit`: measures a chain, finds the fastest regions for a byte budget, and applies them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, Optional, Union

import torch
import torch.nn as nn

from ._arguments import Bytes, checked, refuse
from ._choice import class_name
from ._extension import _remat
from ._region_class import Region, plain_class, switch_off, switch_on
from ._observe import as_table
from ._costs import ChainCost, MoveCost, MoveOptions
from ._plan import (
    Frontier, InfeasibleBudget, Simulation, Stage, measure, run, simulate, solve, stages_of
)
from ._remat import Plan

_FRAME_COST_S = 15e-6  # of one region, in Python


class PlannedChain:
    """The plan and options that a Sequential runs with; its children are looked up at each call."""

    moving: Optional[MoveOptions] = None  # of chains that were pickled before there was one

    def __init__(self, plan: Plan, moving: Optional[MoveOptions], options: dict[str, Any]) -> None:
        self.plan = plan
        self.moving = moving
        self.options = options

    def run(self, module: nn.Module, input: torch.Tensor) -> torch.Tensor:
        return run(self.plan, _children(module), input, moving=self.moving, **self.options)


def _children(sequential: nn.Module) -> list[Stage]:
    # A stage that is registered twice runs twice.
    return list(sequential._modules.values())  # type: ignore[arg-type]


def _way_of(plan: Plan, number: int) -> str:
    """Returns in words how a plan treats a stage's saved tensors."""
    for region in plan.regions:
        if not region.first <= number <= region.last:
            continue
        return "input moved, recomputed" if region.first in plan.moved else "recomputed"
    return "moved" if number in plan.moved else "kept"


def _text_of_copies(moving: MoveCost) -> str:
    there, back = (
        f"{1e9 * each:.3f} ms" for each in (moving.store_s_per_byte, moving.load_s_per_byte)
    )
    return (
        f"{'copies of 1,000,000 bytes':<28} {there:>16} there, {back} back; "
        f"what runs beside takes {moving.held_up_share:.0%} of that longer"
    )


class Fitted:
    """The choice of `fit`. `fitted(x)` runs the chain as planned. `str` makes tables of it."""

    def __init__(
        self,
        stages: Union[nn.Sequential, list[Stage]],
        budget_bytes: int,
        cost: ChainCost,
        frontier: Frontier,
        plan: Plan,
        early_stop: bool,
        frame_cost_s: float,
        options: dict[str, Any],
        measured_bytes: Optional[int],
        moving: Optional[MoveOptions] = None,
    ) -> None:
        self.stages = stages
        self.budget_bytes = budget_bytes
        """The requested budget [bytes]."""
        self.cost = cost
        """The measured costs."""
        self.frontier = frontier
        """The frontier: the least time for every budget."""
        self.plan = plan
        """The chosen plan."""
        self.measured_bytes = measured_bytes
        """[bytes] at the peak of a step on the sample's device; None without `verify`."""
        self.moving = moving
        """The place where the plan's moved tensors wait."""
        self._settings: dict[str, Any] = {"early_stop": early_stop, "frame_cost_s": frame_cost_s}
        self._options = options

    @property
    def simulation(self) -> Simulation:
        """The expected costs of the plan."""
        return simulate(self.cost, self.plan, **self._settings)

    @property
    def peak_bytes(self) -> int:
        """[bytes] expected at the peak, beyond the input, parameters and their gradients."""
        return self.simulation.peak_bytes

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if isinstance(self.stages, nn.Sequential):
            result: torch.Tensor = self.stages(input)
            return result
        return run(self.plan, self.stages, input, moving=self.moving, **self._options)

    def remove(self) -> None:
        """Ends the plan of a Sequential: it runs plainly again."""
        if isinstance(self.stages, nn.Sequential):
            switch_off(self.stages)

    def __repr__(self) -> str:
        peak = f"{self.peak_bytes:,} bytes at the peak"
        return f"<remat.Fitted for {self.budget_bytes:,} bytes: {self.plan}, {peak}>"

    def _repr_html_(self) -> str:
        return as_table(self)

    def __str__(self) -> str:
        step_s = sum(each.forward_s + each.backward_s for each in self.cost.stages)
        num_stages = len(self.cost.stages)
        plain = simulate(self.cost, Plan(num_stages), **self._settings)

        def row(name: str, simulation: Simulation) -> str:
            share = simulation.peak_bytes / max(1, plain.peak_bytes)
            time = 1 + simulation.extra_s / step_s if step_s > 0 else 1.0
            return (
                f"{name:<28} {simulation.peak_bytes:>16,} {share:>7.1%} {time:>9.2f} x "
                f"{simulation.frames:>8} {simulation.depth:>6}"
            )

        each = Plan(num_stages, [(i, i) for i in range(1, num_stages)])
        least = self.frontier.plan(self.frontier.points[0].bytes)
        lines = [
            f"{'regions':<28} {'peak bytes':>16} {'':>7} {'step time':>11} {'regions':>8} "
            f"{'depth':>6}",
            row("none", plain),
            row("each stage but the last", simulate(self.cost, each, **self._settings)),
            row("the least memory", simulate(self.cost, least, **self._settings)),
            row(f"chosen for {self.budget_bytes:,}", self.simulation),
            *(
                []
                if self.measured_bytes is None
                else [f"{'... as one step has shown':<28} {self.measured_bytes:>16,}"]
            ),
            *([] if self.cost.moving is None else [_text_of_copies(self.cost.moving)]),
            f"plan: {self.plan}",
            "",
            f"{'stage':>5} {'forward ms':>11} {'backward ms':>12} {'output bytes':>13} "
            f"{'saved bytes':>13} {'calls':>6}   what becomes of them",
        ]
        for i, (stage, calls) in enumerate(zip(self.cost.stages, self.plan.calls())):
            lines.append(
                f"{i + 1:>5} {stage.forward_s * 1e3:>11.3f} {stage.backward_s * 1e3:>12.3f} "
                f"{stage.output_bytes:>13,} {stage.saved_bytes:>13,} {calls:>6}   "
                f"{_way_of(self.plan, i + 1)}"
            )
        return "\n".join(lines)


def _verified(
    plan: Plan, frontier: Frontier, budget_bytes: Bytes, functions: list[Stage],
    sample: torch.Tensor,
    expected: Callable[[Plan], int], run: Callable[[Plan, torch.Tensor], torch.Tensor],
) -> tuple[Plan, int]:  # fmt: skip
    """Returns the plan, or a smaller one, whose step fits the budget, and its measured peak."""
    from ._state import state_kept  # not when the package is imported: few programs measure

    beyond = 0  # [bytes] that the stages' costs do not include
    while True:
        with state_kept(functions):
            peak: int = _remat._measure_peak(lambda x: run(plan, x), sample)
        if peak <= budget_bytes:
            return plan, peak
        beyond = max(beyond + 1, peak - expected(plan))  # the next plan is a smaller one
        try:
            plan = frontier.plan(max(0, budget_bytes - beyond))
        except InfeasibleBudget as error:
            raise InfeasibleBudget(error.args[0], error.minimum_bytes + beyond) from None


@checked
def fit(
    model_or_stages: Union[nn.Sequential, Iterable[Stage]],
    sample: torch.Tensor,
    budget_bytes: Bytes,
    *,
    cost: Optional[ChainCost] = None,
    warmup: int = 1,
    repeats: int = 5,
    max_depth: int = 0,
    frame_cost_s: float = _FRAME_COST_S,
    moving: Optional[MoveOptions] = None,
    verify: bool = True,
    progress: bool = True,
    **options: Any,
) -> Fitted:
    """Measures the stages on `sample`, finds the fastest plan under the budget, and applies it.

        fitted = remat.fit(model, x, budget_bytes=64_000_000)    # model: an nn.Sequential
        print(fitted)                                            # what was measured and chosen
        model(x).sum().backward()                                # as planned

    A Sequential runs as planned from now on, in training mode (as a `Checkpointed` does), until
    `remat.remove(model)`. For a list of functions, the result runs as planned: `fitted(x)`. Stages
    are functions from one tensor to one tensor, the last one as a rule the loss.

    cost: an earlier result of `measure` for the same stages, from this process or another one (a
        ChainCost can be pickled): nothing is measured then. Costs of copies belong to `moving`.
    budget_bytes: the highest allowed peak of a step [bytes], beyond the input, parameters and their
        gradients. Tensors that the program holds beside the chain come on top.
    warmup, repeats, progress: as of `measure`. max_depth: the deepest allowed nesting; 0: any.
    frame_cost_s: [seconds] of one region.
    moving: the place where saved tensors of stages and regions may wait instead,
        `MoveOptions(directory=...)`; None: no tensor moves.
    verify: run a step as planned and measure its peak. It may be higher than the stages' costs say
        if stages share parameters, or have buffers that are restored. Above the budget, a smaller
        plan is taken.
    options: options of all regions, as of `checkpoint`.

    Bytes and time are those of the sample's device.
    Hooks of parameters do not run, and afterwards all is as it was: see `measure`.
    Raises InfeasibleBudget, which has the least possible budget; otherwise as `measure`.
    """
    if isinstance(model_or_stages, nn.Module) and not (
        isinstance(model_or_stages, nn.Sequential)
        and plain_class(model_or_stages).forward is nn.Sequential.forward
    ):
        raise ValueError(
            f"remat.fit: a {class_name(model_or_stages)} has no list of stages. Hint: pass the "
            "stages as a list of functions from one tensor to one tensor, such as [embed, "
            "*blocks, head_and_loss], and call the result instead of the model."
        )
    if not isinstance(model_or_stages, nn.Module) and not hasattr(model_or_stages, "__iter__"):
        raise refuse(
            "remat.fit", "the stages", "a list of functions, or a torch.nn.Sequential",
            model_or_stages
        )
    stages: Union[nn.Sequential, list[Stage]]
    if isinstance(model_or_stages, nn.Sequential):
        stages = model_or_stages
        functions = _children(stages)
    else:
        functions = stages = stages_of("remat.fit", model_or_stages)
    _remat._Options(options)  # refuses wrong ones before the measuring
    early_stop = bool(options.get("early_stop", True))
    if cost is None:
        settings: dict[str, Any] = {
            "warmup": warmup, "repeats": repeats, "early_stop": early_stop, "progress": progress
        }
        cost = measure(functions, sample, moving=moving, **settings)
    elif len(cost.stages) != len(functions):
        raise ValueError(
            f"remat.fit: the cost has {len(cost.stages)} stages, but {len(functions)} were passed."
        )
    if moving is None and cost.moving is not None:
        cost = cost._replace(moving=None)
    frontier = solve(cost, max_depth=max_depth, early_stop=early_stop, frame_cost_s=frame_cost_s)
    plan = frontier.plan(budget_bytes)
    peak: Optional[int] = None
    if verify:
        plan, peak = _verified(
            plan, frontier, budget_bytes, functions, sample,
            expected=lambda plan: simulate(cost, plan, early_stop=early_stop).peak_bytes,
            run=lambda plan, x: run(plan, functions, x, moving=moving, **options),
        )  # fmt: skip
    if isinstance(stages, nn.Sequential):
        region = Region(options, training_only=True, level=1, buffers="restore", enabled=True)
        region.plan = PlannedChain(plan, moving, options)
        switch_on(stages, region)
    budget = int(budget_bytes)
    return Fitted(
        stages, budget, cost, frontier, plan, early_stop, frame_cost_s, options, peak, moving
    )
