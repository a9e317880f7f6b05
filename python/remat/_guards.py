"""Guards: context managers that say what happens to regions and saved tensors in a scope.

Each may be entered again and nested, and is a decorator, too. It belongs to the thread that entered it, and holds
for the threads on which a backward called there runs. Innermost wins.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import Any, Callable, NamedTuple, Optional, Protocol, TypeVar, Union

import torch

from ._arguments import Bytes, checked, refuse
from ._errors import translated
from ._extension import _remat

F = TypeVar("F", bound=Callable[..., Any])
Contents = TypeVar("Contents")
Path = Union[str, "os.PathLike[str]"]


class Guard(contextlib.AbstractContextManager["Guard", None]):
    """A scope of the library: `with guard: ...`, or `@guard` on a function."""

    def __init__(self, text: str, open: Callable[[], _remat.OpenGuard]) -> None:
        self._text = text
        self._open = translated(open)
        self._entered: list[tuple[int, _remat.OpenGuard]] = []

    def __enter__(self) -> Guard:
        self._entered.append((threading.get_ident(), self._open()))
        return self

    def __exit__(self, *error: object) -> None:
        this_thread = threading.get_ident()
        for i in reversed(range(len(self._entered))):
            if self._entered[i][0] == this_thread:
                self._entered.pop(i)[1].end()
                return
        raise RuntimeError(f"{self._text} was left on a thread that has not entered it")

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    def __repr__(self) -> str:
        return self._text


# ---- where saved tensors wait ----------------------------------------------------------------------------


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


class _Counting(Guard):
    """A guard that counts, by counters that outlive it."""

    def __init__(self, text: str, open: Callable[[], tuple[_remat.OpenGuard, Any]]) -> None:
        self._counters: Any = None

        def begin() -> _remat.OpenGuard:
            guard, self._counters = open()
            return guard

        super().__init__(text, begin)

    def _now(self) -> Optional[tuple[Any, ...]]:
        now: Optional[tuple[Any, ...]] = None if self._counters is None else self._counters.now()
        return now


class Moves(_Counting):
    """What `save_on_cpu` and `save_on_disk` return: a guard that counts."""

    def __enter__(self) -> Moves:
        super().__enter__()
        return self

    @property
    def counts(self) -> MoveCounts:
        """Of the scope that was entered last, also after it. Any thread."""
        return MoveCounts(*self._now() or (0, 0, 0, 0, 0, 0.0))


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
    """Tensors of an accelerator that autograd saves wait on the CPU. Those on the CPU stay as they are.

        with remat.save_on_cpu(pin_memory=True) as moved:
            loss = model(batch)
        loss.backward()
        print(moved.counts)

    Backward gets them with their dtype, device, sizes and strides. A storage is moved once for all views of it.
    Parameters, their views, and what is not a plain strided tensor stay.

    pin_memory: page-locked memory (up to a quarter of the machine's), for copies beside the work.
    min_bytes: smaller tensors stay [bytes].
    skip_parameters: if not, parameters move, too.
    prefetch_depth: how many copies back are begun ahead of the one that backward reads.
    max_bytes_in_flight: with `pin_memory`, of originals whose copies are not done [bytes]; beyond that the program waits.
    None: no limit.
    keep_last: so many of the tensors that were saved last stay on the device, since backward asks for them first. A storage
    counts once, and what the program itself holds counts nothing. With any, tensors move when others have been saved after
    them, and not what the program still holds then, or at the scope's end.
    Raises ValueError for a negative number.
    """
    return Moves(
        "remat.save_on_cpu",
        lambda: _remat._open_save_on_cpu(
            pin_memory, min_bytes, skip_parameters, prefetch_depth, max_bytes_in_flight, keep_last
        ),
    )


@checked
def save_on_disk(directory: Path, *, min_bytes: Bytes = 1 << 16, prefetch_depth: int = 1) -> Moves:
    """Tensors that autograd saves wait in a file in `directory`, which must exist.

    The file has no name; nothing is left of it, however the process ends. It takes as many bytes as waited at the
    same time, until the scope and all that waits are gone. min_bytes: smaller tensors stay [bytes].
    prefetch_depth: how many reads are begun ahead of the one that backward waits for. `counts` of what `with` gives has
    what moved.
    Raises ValueError if no file can be made there; a full disk is an error of the operator that saves.
    """
    path = os.fspath(directory)
    return Moves("remat.save_on_disk", lambda: _remat._open_save_on_disk(path, min_bytes, prefetch_depth))


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


class Tiers(_Counting):
    """What `save_in_tiers` returns: a guard that counts."""

    def __enter__(self) -> Tiers:
        super().__enter__()
        return self

    @property
    def counts(self) -> TierCounts:
        """Of the scope that was entered last, also after it. Any thread."""
        return TierCounts(*self._now() or (0, 0, 0, 0, 0, 0, 0, 0.0, 0))


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
    """What autograd saves stays where it is up to a budget; beyond it what was saved first, which backward needs last,
    waits on the CPU, and beyond that in a file. What is needed next comes back ahead of backward.

        with remat.save_in_tiers(device_bytes=8 << 30, host_bytes=32 << 30, directory="/nvme") as tiers:
            loss = model(batch)
        loss.backward()
        print(tiers.counts)

    device_bytes: may stay on each accelerator. host_bytes: may be in the CPU's memory, copies of accelerators' tensors and
        saved tensors of the CPU's own; None: no limit. Both are of what is held for backward alone.
    directory: of the file for the rest; it must exist. Without one, host_bytes must not be given.
    min_bytes: smaller tensors stay and count nowhere. pin_memory: copies use page-locked memory.
    max_bytes_in_flight: beyond the budgets, of what is on its way to the file.
    keep_last: so many of the tensors that were saved last stay where they are, also beyond the budget of that device. A
        storage counts once.

    A saved tensor that is changed in place raises in backward, wherever it is. What cannot be written (a full disk) stays
    in memory, with a warning. Raises ValueError for numbers below 0, and if no file can be made.
    """
    path = "" if directory is None else os.fspath(directory)
    return Tiers(
        "remat.save_in_tiers",
        lambda: _remat._open_save_in_tiers(
            device_bytes, host_bytes, path, min_bytes, pin_memory, max_bytes_in_flight, keep_last
        ),
    )


class Place(Protocol[Contents]):
    """Where saved tensors can wait: an object with these two methods, and more if it likes.

    `store` gets a flat tensor (one dimension, dense, no gradient; to be read only) and returns what `load` will be
    called with, as often as backward reads it; None: this one stays where it is. `load` returns a tensor as the one that
    was stored: one dimension, as many elements, the same dtype and device. What `store` returned is let go of with the
    last saved tensor that needs it.

    What is called if it is there:
        takes(tensor) -> bool: whether a saved tensor may be moved here, by its device, dtype and size; cheap.
        stores_bytes: an attribute. True, the default: `store` gets bytes (torch.uint8), and `load` must give back the
            same. False: it gets elements in the tensor's dtype, and may give back others, if it is lossy.
        begin_load(contents): begins the copy back, and returns soon: it will probably be read next. What it raises is
            dropped, and counts as not begun.
        cancel_load(contents): nobody has asked for what `begin_load` began. What it raises is a warning.
        finish_store(contents): says that `store` may have returned before it had copied everything; returns when the
            tensor that was stored is not needed any more. A saved tensor that is changed in place after its save then
            raises when it is read, as in plain autograd.

    Methods may be called on several threads at once, those for one `contents` never. What they compute is not recorded:
    no autograd, no hooks, guards or modes of the thread that calls.
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
    """What autograd saves waits in a place of the program's own: compressed, on another machine, in a file of its own.

        class Compressed:
            def store(self, flat):
                packed = zlib.compress(flat.cpu().numpy())
                return packed if len(packed) < flat.numel() else None

            def load(self, packed):
                return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)

        with remat.save_elsewhere(Compressed(), min_bytes=1 << 14):
            loss = model(x).sum()

    Backward gets saved tensors back with their dtype, device, sizes and strides; those that share a storage are stored
    once. The place lives until the scope and all that waits are gone.

    min_bytes: smaller tensors stay [bytes]. skip_parameters: if not, parameters and their views move, too.
    prefetch_depth: how many loads are begun ahead of the one that is read, in the reverse order of saving.
    max_bytes_in_flight: [bytes] of originals that unfinished stores hold at the most (see `finish_store`).
    What a method raises reaches the operator that saves, or the backward, with its type; the same backward on a retained
    graph asks anew. At the scope's end it is a warning, and the tensor stays.
    Raises TypeError for what is no place; ValueError for a negative option.
    """
    for method in ("store", "load"):
        if not callable(getattr(place, method, None)):
            raise TypeError(f"remat.save_elsewhere: a place must have a method `{method}`, and {place!r} has none")
    facts = [bool(getattr(place, "stores_bytes", True))]
    facts += [hasattr(place, each) for each in ("takes", "finish_store", "begin_load", "cancel_load")]
    return Guard(
        "remat.save_elsewhere",
        lambda: _remat._open_save_elsewhere(
            place, facts, min_bytes, skip_parameters, prefetch_depth, max_bytes_in_flight
        ),
    )


@checked
def save_as(dtype: torch.dtype, *, min_bytes: Bytes = 0) -> Guard:
    """Floating-point tensors that autograd saves are rounded to `dtype`. LOSSY: gradients come from the rounded numbers.

    Only to a dtype with fewer bytes; integers stay, and so does a tensor with a finite number that `dtype` cannot
    hold. Raises ValueError for a dtype that numbers cannot be rounded to.
    """
    return Guard("remat.save_as", lambda: _remat._open_save_as(dtype, min_bytes))


@checked
def disable_saved_tensors_hooks(message: str) -> Guard:
    """Opening saved-tensor hooks or a region raises RuntimeError with this message; torch's own switch."""
    return Guard(
        "remat.disable_saved_tensors_hooks", lambda: _remat._open_disable_saved_tensors_hooks(message)
    )


# ---- what regions do ----------------------------------------------------------------------------------------


@checked
def early_stop(enabled: bool) -> Guard:
    """Turns early stop on or off for regions that run forward in the scope, over the option of `checkpoint`."""
    return Guard(f"remat.early_stop({enabled})", lambda: _remat._open_early_stop(enabled))


@checked
def checkpoint_level(training_level: int) -> Guard:
    """Decides by level which calls are regions: of those with a `level` (`checkpoint(..., level=2)`) the ones with
    `0 < level <= training_level`; the others run plainly. Calls without a level are regions as ever.

    Recomputes see the level that forward saw. The levels of modules (`set_checkpoint_level`) are their own.
    """
    return Guard(
        f"remat.checkpoint_level({training_level})", lambda: _remat._open_checkpoint_level(training_level)
    )


@checked
def debug(enabled: Optional[bool] = True) -> Guard:
    """Turns the recording of operators, for error reports, on or off; None leaves it to the option of `checkpoint`."""
    return Guard(f"remat.debug({enabled})", lambda: _remat._open_debug(enabled))


def disable_checkpoint() -> Guard:
    """Regions that would begin in the scope run plainly: nothing is dropped."""
    return Guard("remat.disable_checkpoint()", _remat._open_disable_checkpoint)


@checked
def recompute_cache(max_bytes: Optional[Bytes] = None) -> Guard:
    """Backwards in the scope keep what regions recomputed for the next ones: many overlapping `torch.autograd.grad`
    calls on a retained graph cost one recompute a region.

    max_bytes: of all recomputed tensors that are kept; beyond it the regions used least recently go [bytes].
    What is held at the end of the scope is freed.
    """
    return Guard("remat.recompute_cache", lambda: _remat._open_recompute_cache(max_bytes))


def graph_exec_group() -> Guard:
    """Several backwards in the scope share one recompute of each region, as those of a split backward do.

    Each saved tensor is released when a backward has read it; a second one that reads it raises CheckpointError
    (GROUP_OVERLAP).
    """
    return Guard("remat.graph_exec_group()", _remat._open_graph_exec_group)


@checked
def memory_limit(bytes: Bytes, device: Union[torch.device, str, int, None] = None) -> Guard:
    """An allocation that would take `MemoryMeter(device).live_bytes` above `bytes` raises torch.OutOfMemoryError.

    The whole process, all threads: the way to see on any machine what a small one would do. What a meter does not count
    is not limited. On an accelerator the guard takes the rest of the device's free memory, so that the error is the
    device's own, and the limit as fine as its allocator's pieces. device: None: the CPU.
    Raises ValueError if `bytes` is negative; CheckpointError (UNSUPPORTED) as `MemoryMeter`, and if the device does not
    say what it has free.
    """
    where = "" if device is None else f", {str(device)!r}"
    return Guard(f"remat.memory_limit({bytes}{where})", lambda: _remat._open_memory_limit(bytes, device))


MemoryLimit = memory_limit


def record_allocations() -> Guard:
    """Recorders that are alive and record memory get each allocation and each release on an accelerator, as its allocator
    tells them, with the region that the thread runs.

        with remat.Recorder() as recorder, remat.record_allocations():
            model(batch).sum().backward()

    They stand in `Recorder.event_log`, in the trace, and in each device's picture as a line: what the allocator has given
    out. (A recorder alone samples statistics after each operator.) A `FailedAllocation` has its `asked_bytes` then.
    Those of the thread that entered it, and of the threads on which a backward called there runs; what another thread
    allocates is in the sum of the next one. It takes the place of torch's profiler on its thread: one that is started
    meanwhile says that it is already enabled.
    Costs an event an allocation, of 100 bytes and about a microsecond; without a recorder a call.
    Raises CheckpointError (UNSUPPORTED) if torch's profiler runs on this thread.
    """
    return Guard("remat.record_allocations()", _remat._open_record_allocations)


# ---- what recomputes see --------------------------------------------------------------------------------


class StateProvider(Protocol):
    """State of the program's own that a region's function reads, such as the state of a random generator.

    `capture` is called when a region begins, and around its recomputes; `restore` before each recompute, and after
    it with what was there before. Recomputes of several threads that use one provider take turns.
    """

    def capture(self) -> Any: ...
    def restore(self, state: Any, /) -> None: ...


def state_provider(provider: StateProvider) -> Guard:
    """Regions that begin in the scope keep what `provider` captured, and restore it around their recomputes.

    Raises TypeError for what has no `capture` and `restore`.
    """
    if isinstance(provider, type) or not all(callable(getattr(provider, each, None)) for each in ("capture", "restore")):
        raise refuse("remat.state_provider", "provider", "an object with `capture` and `restore`", provider)
    return Guard("remat.state_provider", lambda: _remat._open_state_provider(provider))


@checked
def preserve_generator(generator: torch.Generator) -> Guard:
    """Regions in the scope preserve this generator as they do the default ones (`preserve_rng_state`), and those of the CPU
    that their functions draw from: one of a device, say."""
    return Guard("remat.preserve_generator", lambda: _remat._open_generator(generator))


@checked
def observe_recomputes(
    begin: Optional[Callable[[_remat.PhaseInfo], object]] = None,
    end: Optional[Callable[[_remat.PhaseInfo], object]] = None,
) -> Guard:
    """Recomputes of regions that begin in the scope call these before and after, on their threads, in pairs.

    What `begin` raises fails the recompute; what `end` raises is a warning.
    """
    return Guard("remat.observe_recomputes", lambda: _remat._open_observe_recomputes(begin, end))


PhaseInfo = _remat.PhaseInfo
current_phase = _remat.current_phase
