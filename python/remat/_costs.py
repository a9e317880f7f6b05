"""What stages and chains cost, and where what a plan moves waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, TypeVar

from ._arguments import Bytes, add_kind, check, check_fields, of_class
from ._offload import Path

T = TypeVar("T", bound=Any)


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
    """What one stage of a chain costs; each storage once. Parameters and their gradients are in no
    budget."""

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
    """Whether `output_bytes` go away when the stage behind, or a region that begins with it, moves
    its input."""
    first_read_tmp_bytes: int = 0
    """[bytes] that a backward has made, beyond `grad_bytes`, when it first reads what autograd
    keeps: a region that ends with the stage is computed again beside it."""
    stopped_tmp_bytes: int = -1
    """Instead of `forward_tmp_bytes` in a recompute that early stop ends in the stage: beyond
    `saved_bytes`, and the output if autograd keeps it. Negative: the same."""
    saves_input: bool = True
    """Whether the input is among what autograd keeps of the stage. If not, it goes away when the
    stage has run forward, unless others hold it: the stage before it, which saves its output, the
    caller, or a region that begins with the stage and is in no other one."""
    backward_bytes: int = -1
    """[bytes] of all that there is of the stage at the peak of its backward, but for the input,
    which others hold. Negative: the sum of what is named here."""
    region_backward_bytes: int = -1
    """The same with the input, which a region holds that begins with the stage. Negative: both
    together."""
    lone_backward_bytes: int = -1
    """The same with the input, if autograd keeps it, when nobody else holds it. Negative: both
    together."""


class MoveCost(NamedTuple):
    """What it costs to copy saved tensors to where they wait, and back."""

    store_s_per_byte: float = 0.0
    """[seconds per byte] of copies there, with nothing beside them."""
    load_s_per_byte: float = 0.0
    """[seconds per byte] of copies back."""
    held_up_share: float = 0.0
    """By which share of these seconds the program takes longer beside which they run; above 1 where
    preparing copies takes longer than copying."""


class ChainCost(NamedTuple):
    """A chain of stages, each fed with the output of the one before; the last is the loss."""

    input_bytes: int = 0
    """[bytes], for the record: budgets do not count the input."""
    input_grad_bytes: int = 0
    """[bytes] of the gradient of the input; 0 if it takes none."""
    stages: tuple[StageCost, ...] = ()
    rounding: float = 0.0
    """What the allocator takes beyond what is asked for, as a share of it. Budgets do not count it;
    `free_budget` takes it off."""
    moving: Optional[MoveCost] = None
    """None: nothing moves."""
    cached_cast_bytes: int = 0
    """[bytes] of casts of weights that autocast's cache keeps beyond their stages, where it is
    around all of them. They count in every peak, from beginning to end, and are in no stage's
    bytes."""
    held_to_end_bytes: int = 0
    """[bytes] that the caller of `backward()` has of the last stage until it returns: the result
    and its gradient. They count in the peaks of all stages before that one, when they run
    backward."""

    @classmethod
    def _of(cls, numbers: Any) -> ChainCost:
        cost = cls(*numbers)
        moving = None if cost.moving is None else MoveCost(*cost.moving)
        return cost._replace(stages=tuple(StageCost(*each) for each in cost.stages), moving=moving)

    def _read(self) -> ChainCost:
        """The same with whole numbers of bytes. Raises TypeError for others."""
        return _whole(self)._replace(stages=tuple(map(_whole, self.stages)))


@dataclass(frozen=True)
class MoveOptions:
    """Where waits what a plan moves: `measure(..., moving=MoveOptions(directory="/nvme"))`, of
    `fit` and `run`, too."""

    directory: Optional[Path] = None
    """Of a file without a name (as with `save_on_disk`); it must exist. None: an accelerator's
    tensors wait on the CPU, and the CPU's own do not move."""
    min_bytes: Bytes = 1 << 16
    """[bytes]; smaller tensors stay."""
    pin_memory: bool = True
    """Copies between accelerator and CPU use page-locked memory, if there is some."""

    def __post_init__(self) -> None:
        check_fields(self)


add_kind("ChainCost", of_class(ChainCost, "a remat.ChainCost"))
add_kind("MoveOptions", of_class(MoveOptions, "a remat.MoveOptions"))
