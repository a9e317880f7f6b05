"""Costs of stages and chains, and options of moving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, TypeVar

from ._arguments import Bytes, add_kind, check, check_fields, of_class
from ._offload import Path

T = TypeVar("T", bound=Any)


def _whole(cost: T) -> T:
    """Returns the cost with numbers of bytes as ints."""
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
    """Costs of one stage of a chain, each storage once. Parameters and their gradients do not
    count."""

    forward_s: float = 0.0
    """[seconds] of a forward in grad mode."""
    backward_s: float = 0.0
    """[seconds] of its backward."""
    forward_to_last_save_s: float = -1.0
    """[seconds] of a forward that ends at the stage's last save. Negative: `forward_s`."""
    output_bytes: int = 0
    """[bytes] of the stage's result."""
    saved_bytes: int = 0
    """[bytes] that autograd keeps and that are neither input nor output nor parameters."""
    forward_tmp_bytes: int = 0
    """[bytes] at the peak of a forward that saves, beyond all that is named here."""
    backward_tmp_bytes: int = 0
    """[bytes] at the peak of a backward, beyond all that is named here."""
    grad_bytes: int = 0
    """[bytes] of the output's gradient."""
    saves_output: bool = True
    """True if autograd keeps the output among the stage's saved tensors."""
    unsaved_tmp_bytes: int = -1
    """[bytes] that replace `forward_tmp_bytes` if nothing is saved. Negative: the same."""
    movable_bytes: int = 0
    """[bytes] of `saved_bytes` that are freed when the stage's saved tensors are moved."""
    has_movable_output: bool = False
    """True if `output_bytes` are freed when the next stage, or a region that begins with it, moves
    its input."""
    first_read_tmp_bytes: int = 0
    """[bytes] that a backward has made, beyond `grad_bytes`, when it first reads a saved tensor. A
    region that ends with the stage is recomputed while they are alive."""
    stopped_tmp_bytes: int = -1
    """[bytes] that replace `forward_tmp_bytes` in a recompute that early stop ends in the stage:
    beyond `saved_bytes`, and the output if autograd keeps it. Negative: the same."""
    saves_input: bool = True
    """True if autograd keeps the input among the stage's saved tensors. Otherwise it is freed when
    the stage has run forward, unless it has another owner: the stage before it, which saves its
    output, the caller, or an outermost region that begins with the stage."""
    backward_bytes: int = -1
    """[bytes] of the whole stage at the peak of its backward, without the input, which has other
    owners. Negative: the sum of the bytes named here."""
    region_backward_bytes: int = -1
    """[bytes] as `backward_bytes`, with the input, which is held by a region that begins with the
    stage. Negative: both together."""
    lone_backward_bytes: int = -1
    """[bytes] as `backward_bytes`, with the input, if autograd keeps it and is its only owner.
    Negative: both together."""


class MoveCost(NamedTuple):
    """Costs of copies of saved tensors to their place, and back."""

    store_s_per_byte: float = 0.0
    """[seconds per byte] of copies there, without concurrent work."""
    load_s_per_byte: float = 0.0
    """[seconds per byte] of copies back."""
    held_up_share: float = 0.0
    """The share of these seconds by which copies delay the concurrent program; above 1 if preparing
    copies takes longer than copying."""


class ChainCost(NamedTuple):
    """A chain of stages, each fed with the output of the one before; the last is the loss."""

    input_bytes: int = 0
    """[bytes], for the record: budgets do not count the input."""
    input_grad_bytes: int = 0
    """[bytes] of the gradient of the input; 0 if it has no gradient."""
    stages: tuple[StageCost, ...] = ()
    rounding: float = 0.0
    """The share that the allocator adds to requests. `free_budget` subtracts it, budgets do not
    count it."""
    moving: Optional[MoveCost] = None
    """The cost of moving; None: no tensor moves."""
    cached_cast_bytes: int = 0
    """[bytes] of casts of weights that autocast's cache keeps beyond their stages, if autocast
    encloses all stages. They count in every peak, from beginning to end, and not in the bytes of
    stages."""
    held_to_end_bytes: int = 0
    """[bytes] of the last stage that the caller of `backward()` holds until it returns: the result
    and its gradient. They count in the backward peaks of all earlier stages."""

    @classmethod
    def _of(cls, numbers: Any) -> ChainCost:
        cost = cls(*numbers)
        moving = None if cost.moving is None else MoveCost(*cost.moving)
        return cost._replace(stages=tuple(StageCost(*each) for each in cost.stages), moving=moving)

    def _read(self) -> ChainCost:
        """Returns the cost with whole numbers of bytes. Raises TypeError for others."""
        return _whole(self)._replace(stages=tuple(map(_whole, self.stages)))


@dataclass(frozen=True)
class MoveOptions:
    """Options of the place where a plan's moved tensors wait, for `measure`, `fit` and `run`:
    `measure(..., moving=MoveOptions(directory="/nvme"))`."""

    directory: Optional[Path] = None
    """The folder of a file without a name (as with `save_on_disk`); it must exist. None: an
    accelerator's tensors wait on the CPU, and the CPU's own do not move."""
    min_bytes: Bytes = 1 << 16
    """[bytes]; smaller tensors stay."""
    pin_memory: bool = True
    """True: copies between accelerator and CPU use page-locked memory, if it is available."""

    def __post_init__(self) -> None:
        check_fields(self)


add_kind("ChainCost", of_class(ChainCost, "a remat.ChainCost"))
add_kind("MoveOptions", of_class(MoveOptions, "a remat.MoveOptions"))
