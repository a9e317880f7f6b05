"""Guards that say where saved tensors wait: on the CPU, in a file, in tiers, in a place of the
program's, narrower."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Optional, Protocol, TypeVar, Union

import torch

from ._arguments import Bytes, checked
from ._guards import Guard, guard_of

Contents = TypeVar("Contents")
Path = Union[str, "os.PathLike[str]"]


class MoveCounts(NamedTuple):
    """What one scope has moved since it began."""

    moves: int
    """Copies out."""
    bytes_moved: int
    """[bytes] of these."""
    loads: int
    """Copies back that somebody asked for."""
    loads_ahead: int
    """Of these, those that were begun before that."""
    bytes_loaded: int
    """[bytes] of `loads`."""
    seconds_waited: float
    """That threads of the program spent on both: queueing copies, copying or waiting."""


class Moves(Guard):
    """What `save_on_cpu` and `save_on_disk` return: a guard that counts."""

    @property
    def counts(self) -> MoveCounts:
        """Of the scope that was entered last, also after it. Any thread."""
        return MoveCounts(*(0, 0, 0, 0, 0, 0.0) if self._last is None else self._last.counts())


@checked
def save_on_cpu(
    *,
    pin_memory: bool = False,
    min_bytes: Bytes = 0,
    skip_parameters: bool = True,
    prefetch_depth: int = 2,
    max_bytes_in_flight: Optional[Bytes] = None,
    keep_last: int = 0,
) -> Moves:
    """Tensors of an accelerator that autograd saves wait on the CPU. Those on the CPU stay as they
    are.

        with remat.save_on_cpu(pin_memory=True) as moved:
            loss = model(batch)
        loss.backward()
        print(moved.counts)

    Backward gets them with their dtype, device, sizes and strides. A storage is moved once for all
    views of it. Parameters, their views, and what is not a plain strided tensor stay.

    pin_memory: page-locked memory (up to a quarter of the machine's), for copies beside the work.
    min_bytes: smaller tensors stay [bytes].
    skip_parameters: if not, parameters move, too.
    prefetch_depth: how many copies back are begun ahead of the one that backward reads.
    max_bytes_in_flight: with `pin_memory`, of originals whose copies are not done [bytes]; beyond
    that the program waits. None: no limit.
    keep_last: so many of the tensors that were saved last stay on the device, since backward asks
    for them first. A storage counts once, and what the program itself holds counts nothing. With
    any, tensors move when others have been saved after them, and not what the program still holds
    then, or at the scope's end. Raises ValueError for a negative number.
    """
    return guard_of(save_on_cpu, locals(), Moves)


@checked
def save_on_disk(directory: Path, *, min_bytes: Bytes = 1 << 16, prefetch_depth: int = 1) -> Moves:
    """Tensors that autograd saves wait in a file in `directory`, which must exist.

    The file has no name; nothing is left of it, however the process ends. It takes as many bytes as
    waited at the same time, until the scope and all that waits are gone. min_bytes: smaller tensors
    stay [bytes].
    prefetch_depth: how many reads are begun ahead of the one that backward waits for. `counts` of
    what `with` gives has what moved. Raises ValueError if no file can be made there; a full disk is
    an error of the operator that saves.
    """
    return guard_of(save_on_disk, locals(), Moves)


class TierCounts(NamedTuple):
    """What the tiers of one scope hold, or have moved."""

    bytes_on_host: int
    """Copies of accelerators' tensors that are on the CPU now."""
    bytes_on_disk: int
    """What is in the file now."""
    bytes_to_host: int
    """Moved to the CPU so far."""
    bytes_to_disk: int
    """Written so far."""
    bytes_loaded: int
    """Brought back so far."""
    loads: int
    waits: int
    """For the file: reads that had not ended when backward came, writes that forward waited for."""
    seconds_waited: float
    """In all threads."""
    failed_writes: int
    """What they were to move stays in memory."""


class Tiers(Guard):
    """What `save_in_tiers` returns: a guard that counts."""

    @property
    def counts(self) -> TierCounts:
        """Of the scope that was entered last, also after it. Any thread."""
        return TierCounts(
            *(0, 0, 0, 0, 0, 0, 0, 0.0, 0) if self._last is None else self._last.counts()
        )


@checked
def save_in_tiers(
    *,
    device_bytes: Bytes = 0,
    host_bytes: Optional[Bytes] = None,
    directory: Optional[Path] = None,
    min_bytes: Bytes = 1 << 16,
    pin_memory: bool = True,
    max_bytes_in_flight: Bytes = 64 << 20,
    keep_last: int = 0,
) -> Tiers:
    """What autograd saves stays where it is up to a budget; beyond it what was saved first, which
    backward needs last, waits on the CPU, and beyond that in a file. What is needed next comes back
    ahead of backward.

        with remat.save_in_tiers(device_bytes=8 << 30, host_bytes=32 << 30, directory="/nvme") as
            tiers: loss = model(batch)
        loss.backward()
        print(tiers.counts)

    device_bytes: may stay on each accelerator. host_bytes: may be in the CPU's memory, copies of
        accelerators' tensors and saved tensors of the CPU's own; None: no limit. Both are of what
        is held for backward alone.
    directory: of the file for the rest; it must exist. Without one, host_bytes must not be given.
    min_bytes: smaller tensors stay and count nowhere. pin_memory: copies use page-locked memory.
    max_bytes_in_flight: beyond the budgets, of what is on its way to the file.
    keep_last: so many of the tensors that were saved last stay where they are, also beyond the
        budget of that device. A storage counts once.

    A saved tensor that is changed in place raises in backward, wherever it is. What cannot be
    written (a full disk) stays in memory, with a warning. Raises ValueError for numbers below 0,
    and if no file can be made.
    """
    return guard_of(save_in_tiers, locals(), Tiers)


class Place(Protocol[Contents]):
    """Where saved tensors can wait: an object with these two methods, and more if it likes.

    `store` gets a flat tensor (one dimension, dense, no gradient; to be read only) and returns what
    `load` will be called with, as often as backward reads it; None: this one stays where it is.
    `load` returns a tensor as the one that was stored: one dimension, as many elements, the same
    dtype and device. What `store` returned is let go of with the last saved tensor that needs it.

    What is called if it is there: takes(tensor) -> bool: whether a saved tensor may be moved here,
        by its device, dtype and size; cheap.
        stores_bytes: an attribute. True, the default: `store` gets bytes (torch.uint8), and `load`
            must give back the same. False: it gets elements in the tensor's dtype, and may give
            back others, if it is lossy.
        begin_load(contents): begins the copy back, and returns soon: it will probably be read next.
            What it raises is dropped, and counts as not begun.
        cancel_load(contents): nobody has asked for what `begin_load` began. What it raises is a
        warning. finish_store(contents): says that `store` may have returned before it had copied
        everything; returns when the
            tensor that was stored is not needed any more. A saved tensor that is changed in place
            after its save then raises when it is read, as in plain autograd.

    Methods may be called on several threads at once, those for one `contents` never. What they
    compute is not recorded: no autograd, no hooks, guards or modes of the thread that calls.
    """

    def store(self, flat: torch.Tensor, /) -> Optional[Contents]: ...
    def load(self, contents: Contents, /) -> torch.Tensor: ...


@checked
def save_elsewhere(
    place: Place[Any],
    *,
    min_bytes: Bytes = 0,
    skip_parameters: bool = True,
    prefetch_depth: int = 1,
    max_bytes_in_flight: Bytes = 64 << 20,
) -> Guard:
    """What autograd saves waits in a place of the program's own: compressed, on another machine, in
    a file of its own.

        class Compressed:
            def store(self, flat):
                packed = zlib.compress(flat.cpu().numpy())
                return packed if len(packed) < flat.numel() else None

            def load(self, packed):
                return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)

        with remat.save_elsewhere(Compressed(), min_bytes=1 << 14):
            loss = model(x).sum()

    Backward gets saved tensors back with their dtype, device, sizes and strides; those that share a
    storage are stored once. The place lives until the scope and all that waits are gone.

    min_bytes: smaller tensors stay [bytes]. skip_parameters: if not, parameters and their views
    move, too.
    prefetch_depth: how many loads are begun ahead of the one that is read, in the reverse order of
    saving.
    max_bytes_in_flight: [bytes] of originals that unfinished stores hold at the most (see
    `finish_store`). What a method raises reaches the operator that saves, or the backward, with its
    type; the same backward on a retained graph asks anew. At the scope's end it is a warning, and
    the tensor stays. Raises TypeError for what is no place; ValueError for a negative option.
    """
    for method in ("store", "load"):
        if not callable(getattr(place, method, None)):
            raise TypeError(
                f"remat.save_elsewhere: a place must have a method `{method}`, but {place!r} has "
                "none"
            )
    return guard_of(save_elsewhere, {**locals(), "method": None}, Guard)


@checked
def save_as(dtype: torch.dtype, *, min_bytes: Bytes = 0) -> Guard:
    """Floating-point tensors that autograd saves are rounded to `dtype`. LOSSY: gradients come from
    the rounded numbers.

    Only to a dtype with fewer bytes; integers stay, and so does a tensor with a finite number that
    `dtype` cannot hold. Raises ValueError for a dtype that numbers cannot be rounded to.
    """
    return guard_of(save_as, locals(), Guard)
