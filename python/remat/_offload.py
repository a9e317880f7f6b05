"""Guards that choose the place where saved tensors wait: the CPU, a file, tiers, an object of the
program, or a narrower dtype."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Optional, Protocol, TypeVar, Union

import torch

from ._arguments import Bytes, checked
from ._guards import Guard, guard_of

Contents = TypeVar("Contents")
Path = Union[str, "os.PathLike[str]"]


class MoveCounts(NamedTuple):
    """Counts of the moves of one scope since it began."""

    moves: int
    """The number of copies out."""
    bytes_moved: int
    """[bytes] of the copies out."""
    loads: int
    """The number of copies back that were requested."""
    loads_ahead: int
    """The number of `loads` that were begun before the request."""
    bytes_loaded: int
    """[bytes] of `loads`."""
    seconds_waited: float
    """[seconds] that threads of the program spent on copies: queueing, copying or waiting."""


class Moves(Guard):
    """The return value of `save_on_cpu` and `save_on_disk`: a guard with counts."""

    @property
    def counts(self) -> MoveCounts:
        """The counts of the scope that was entered last, also after it. Any thread."""
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
    """Moves tensors of an accelerator that autograd saves to the CPU, where they wait for backward.
    Tensors on the CPU stay as they are.

        with remat.save_on_cpu(pin_memory=True) as moved:
            loss = model(batch)
        loss.backward()
        print(moved.counts)

    Backward gets them with their dtype, device, sizes and strides. A storage is moved once for all
    views of it. Parameters, their views, and tensors that are not plain strided ones stay.

    pin_memory: page-locked memory (up to a quarter of the machine's), for copies beside the work.
    min_bytes: smaller tensors stay [bytes].
    skip_parameters: False: parameters move, too.
    prefetch_depth: number of copies back that are begun ahead of the one that backward reads.
    max_bytes_in_flight: with `pin_memory`, limit of originals whose copies are not done [bytes];
        beyond it the program waits. None: no limit.
    keep_last: number of most recently saved tensors that stay on the device, since backward reads
        them first. A storage counts once, and tensors that the program itself holds do not count.
        With any, a tensor moves when others have been saved after it, or at the scope's end, unless
        the program still holds it then.
    Raises ValueError for a negative number.
    """
    return guard_of(save_on_cpu, locals(), Moves)


@checked
def save_on_disk(directory: Path, *, min_bytes: Bytes = 1 << 16, prefetch_depth: int = 1) -> Moves:
    """Moves tensors that autograd saves to a file in `directory`, which must exist, until backward.

    The file has no name; nothing is left of it, however the process ends. It takes as many bytes as
    waited at the same time, until the scope and all waiting tensors are gone.

    min_bytes: smaller tensors stay [bytes].
    prefetch_depth: number of reads that are begun ahead of the one that backward waits for.
    The `counts` of the guard have the moves. Raises ValueError if no file can be made there; a full
    disk is an error of the operator that saves.
    """
    return guard_of(save_on_disk, locals(), Moves)


class TierCounts(NamedTuple):
    """Counts of the bytes that the tiers of one scope hold, or have moved."""

    bytes_on_host: int
    """[bytes] of copies of accelerators' tensors on the CPU now."""
    bytes_on_disk: int
    """[bytes] in the file now."""
    bytes_to_host: int
    """[bytes] moved to the CPU so far."""
    bytes_to_disk: int
    """[bytes] written so far."""
    bytes_loaded: int
    """[bytes] brought back so far."""
    loads: int
    waits: int
    """The number of reads that backward waited for, and of writes that forward waited for."""
    seconds_waited: float
    """[seconds] of waiting in all threads."""
    failed_writes: int
    """The number of failed writes; their tensors stay in memory."""


class Tiers(Guard):
    """The return value of `save_in_tiers`: a guard with counts."""

    @property
    def counts(self) -> TierCounts:
        """The counts of the scope that was entered last, also after it. Any thread."""
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
    """Keeps saved tensors where they are up to a budget; beyond it they wait on the CPU, and beyond
    another budget in a file. Tensors that were saved first move first, since backward needs them
    last. Tensors that are needed next come back ahead of backward.

        tiers = remat.save_in_tiers(device_bytes=8 << 30, host_bytes=32 << 30, directory="/nvme")
        with tiers:
            loss = model(batch)
        loss.backward()
        print(tiers.counts)

    device_bytes: limit of saved tensors that stay on each accelerator. host_bytes: limit in the
        CPU's memory, for copies of accelerators' tensors and saved tensors of the CPU's own; None:
        no limit. Both count tensors that are held for backward alone.
    directory: the folder of the file for the rest; it must exist. Without it, omit host_bytes.
    min_bytes: smaller tensors stay and are not counted. pin_memory: copies use page-locked memory.
    max_bytes_in_flight: limit, beyond the budgets, of bytes on their way to the file.
    keep_last: number of most recently saved tensors that stay where they are, also beyond the
        budget of that device. A storage counts once.

    A saved tensor that is changed in place raises in backward, wherever it is. A tensor that cannot
    be written (a full disk) stays in memory, with a warning. Raises ValueError for numbers below 0,
    and if no file can be made.
    """
    return guard_of(save_in_tiers, locals(), Tiers)


class Place(Protocol[Contents]):
    """A place where saved tensors can wait: an object with these two methods, and optionally more.

    `store` gets a flat tensor (one dimension, dense, no gradient; to be read only). Its result is
    passed to `load`, as often as backward reads the tensor; None: the tensor stays where it is.
    `load` returns a tensor like the stored one: one dimension, as many elements, the same dtype and
    device. The result of `store` is released with the last saved tensor that needs it.

    Optional members:
        takes(tensor) -> bool: returns whether a saved tensor may be moved here, by its device,
            dtype and size; cheap.
        stores_bytes: an attribute. True, the default: `store` gets bytes (torch.uint8), and `load`
            must give back the same. False: it gets elements in the tensor's dtype, and may give
            back others, if it is lossy.
        begin_load(contents): begins the copy back, and returns soon: it will probably be read next.
            An exception is dropped, and counts as not begun.
        cancel_load(contents): ends a copy back that `begin_load` began and that was not requested.
            An exception becomes a warning.
        finish_store(contents): says that `store` may have returned before it had copied everything;
            returns when the stored tensor is not needed any more. A saved tensor that is changed in
            place after its save then raises when it is read, as in plain autograd.

    Methods may be called on several threads at once, those for one `contents` never. Their
    computations are not recorded: the calling thread's autograd, hooks, guards and modes are off.
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
    """Moves saved tensors to a place of the program: compressed, on another machine, in a file.

        class Compressed:
            def store(self, flat):
                packed = zlib.compress(flat.cpu().numpy())
                return packed if len(packed) < flat.numel() else None

            def load(self, packed):
                return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)

        with remat.save_elsewhere(Compressed(), min_bytes=1 << 14):
            loss = model(x).sum()

    Backward gets saved tensors back with their dtype, device, sizes and strides; those that share a
    storage are stored once. The place lives until the scope and all waiting tensors are gone.

    min_bytes: smaller tensors stay [bytes]. skip_parameters: False: parameters move, too.
    prefetch_depth: number of loads begun ahead of the one that is read, the last saved first.
    max_bytes_in_flight: limit of originals in unfinished stores [bytes]: see `finish_store`.
    An exception of a method reaches the operator that saves, or the backward, with its type; the
    same backward on a retained graph calls the method again. At the scope's end it is a warning,
    and the tensor stays. Raises TypeError for an object that is no place; ValueError for a negative
    option.
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
    """Rounds saved floating-point tensors to `dtype`. LOSSY: gradients come from the rounded
    numbers.

    A tensor is rounded only to a dtype with fewer bytes. Integers stay, and so does a tensor with a
    finite number that `dtype` cannot hold. Raises ValueError for a dtype that cannot hold rounded
    numbers.
    """
    return guard_of(save_as, locals(), Guard)
