"""Guards: context managers that say what happens to regions and saved tensors in a scope.

Each may be entered again and nested, and is a decorator, too. It belongs to the thread that entered
it, and holds for the threads on which a backward called there runs. Innermost wins.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any, Callable, Optional, Protocol, TypeVar, Union

import torch

from ._arguments import Bytes, checked, refuse
from ._extension import _remat

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G", bound="Guard")


class Guard(contextlib.AbstractContextManager["Guard", None]):
    """A scope of the library: `with guard: ...`, or `@guard` on a function."""

    def __init__(self, text: str, open: Callable[[], Any]) -> None:
        self._text = text
        self._open = open
        self._last: Any = None  # what counts in the scope that was entered last, also after it
        self._entered: list[tuple[int, Any]] = []

    def __enter__(self: G) -> G:
        self._last = opened = self._open()
        self._entered.append((threading.get_ident(), opened))
        return self

    def __exit__(self, *error: object) -> None:
        this_thread = threading.get_ident()
        for i in reversed(range(len(self._entered))):
            if self._entered[i][0] == this_thread:
                self._entered.pop(i)[1].end()
                return
        raise RuntimeError(
            f"{self._text} was left on a thread that had not entered it. Hint: leave a guard on "
            "the thread that entered it."
        )

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    def __repr__(self) -> str:
        return self._text


def guard_of(
    make: Callable[..., G], given: dict[str, Any], kind: Callable[..., G], text: str = ""
) -> G:
    """The guard that the library has under the name of `make`, whose arguments these are."""
    name = make.__name__
    return kind(text or f"remat.{name}", lambda: _remat._open(name, given))


@checked
def disable_saved_tensors_hooks(message: str) -> Guard:
    """Opening saved-tensor hooks or a region raises RuntimeError with this message; torch's own
    switch."""
    return guard_of(disable_saved_tensors_hooks, locals(), Guard)


# ---- what regions do -----------------------------------------------------------------------------


@checked
def early_stop(enabled: bool) -> Guard:
    """Turns early stop on or off for regions that run forward in the scope, over the option of
    `checkpoint`."""
    return guard_of(early_stop, locals(), Guard, f"remat.early_stop({enabled})")


@checked
def checkpoint_level(training_level: int) -> Guard:
    """Decides by level which calls are regions: of those with a `level`
    (`checkpoint(..., level=2)`) the ones with `0 < level <= training_level`; the others run
    plainly. Calls without a level are regions as ever.

    Recomputes see the level that forward saw. The levels of modules (`set_checkpoint_level`) are
    their own.
    """
    return guard_of(checkpoint_level, locals(), Guard, f"remat.checkpoint_level({training_level})")


@checked
def debug(enabled: Optional[bool] = True) -> Guard:
    """Turns the recording of operators, for error reports, on or off; None leaves it to the option
    of `checkpoint`."""
    return guard_of(debug, locals(), Guard, f"remat.debug({enabled})")


def disable_checkpoint() -> Guard:
    """Regions that would begin in the scope run plainly: nothing is dropped."""
    return guard_of(disable_checkpoint, {}, Guard, "remat.disable_checkpoint()")


def unseen() -> Guard:
    """Hides the operators in the scope from the regions around it, in forward and in recomputes.

    No policy is asked about them, no debug report lists them, and nothing counts, compares or drops
    their saved tensors: those stay until backward, as outside of regions. For code that only one of
    the passes runs, such as logging under `if not remat.is_recomputing()`. Random numbers are drawn
    from the generators themselves, anew in each recompute.
    """
    return guard_of(unseen, {}, Guard, "remat.unseen()")


@checked
def recompute_cache(max_bytes: Optional[Bytes] = None) -> Guard:
    """Backwards in the scope keep what regions recomputed for the next ones: many overlapping
    `torch.autograd.grad` calls on a retained graph cost one recompute a region.

    max_bytes: of all recomputed tensors that are kept; beyond it the regions used least recently go
    [bytes]. What is held at the end of the scope is freed.
    """
    return guard_of(recompute_cache, locals(), Guard)


def graph_exec_group() -> Guard:
    """Several backwards in the scope share one recompute of each region, as those of a split
    backward do.

    Each saved tensor is released when a backward has read it; a second one that reads it raises
    CheckpointError (GROUP_OVERLAP).
    """
    return guard_of(graph_exec_group, {}, Guard, "remat.graph_exec_group()")


@checked
def memory_limit(bytes: Bytes, device: Union[torch.device, str, int, None] = None) -> Guard:
    """An allocation that would take `MemoryMeter(device).live_bytes` above `bytes` raises
    torch.OutOfMemoryError.

    The whole process, all threads: the way to see on any machine what a small one would do. What a
    meter does not count is not limited. On an accelerator the guard takes the rest of the device's
    free memory, so that the error is the device's own, and the limit as fine as its allocator's
    pieces. device: None: the CPU. Raises ValueError if `bytes` is negative; CheckpointError
    (UNSUPPORTED) as `MemoryMeter`, and if the device does not say what it has free.
    """
    where = "" if device is None else f", {str(device)!r}"
    return guard_of(memory_limit, locals(), Guard, f"remat.memory_limit({bytes}{where})")


MemoryLimit = memory_limit


def record_allocations() -> Guard:
    """Recorders that are alive and record memory get each allocation and each release on an
    accelerator, as its allocator tells them, with the region that the thread runs.

        with remat.Recorder() as recorder, remat.record_allocations():
            model(batch).sum().backward()

    They stand in `Recorder.event_log`, in the trace, and in each device's picture as a line: what
    the allocator has given out. (A recorder alone samples statistics after each operator.) A
    `FailedAllocation` has its `asked_bytes` then. Those of the thread that entered it, and of the
    threads on which a backward called there runs; what another thread allocates is in the sum of
    the next one. It takes the place of torch's profiler on its thread: one that is started
    meanwhile says that it is already enabled. Costs an event an allocation, of 100 bytes and about
    a microsecond; without a recorder a call. Raises CheckpointError (UNSUPPORTED) if torch's
    profiler runs on this thread.
    """
    return guard_of(record_allocations, {}, Guard, "remat.record_allocations()")


# ---- what recomputes see -------------------------------------------------------------------------


class StateProvider(Protocol):
    """State of the program's own that a region's function reads, such as the state of a random
    generator.

    `capture` is called when a region begins, and around its recomputes; `restore` before each
    recompute, and after it with what was there before. Recomputes of several threads that use one
    provider take turns.
    """

    def capture(self) -> Any: ...
    def restore(self, state: Any, /) -> None: ...


def state_provider(provider: StateProvider) -> Guard:
    """Regions that begin in the scope keep what `provider` captured, and restore it around their
    recomputes.

    Raises TypeError for what has no `capture` and `restore`.
    """
    if isinstance(provider, type) or not all(
        callable(getattr(provider, each, None)) for each in ("capture", "restore")
    ):
        raise refuse(
            "remat.state_provider", "provider", "an object with `capture` and `restore`", provider
        )
    return guard_of(state_provider, locals(), Guard)


@checked
def preserve_generator(generator: torch.Generator) -> Guard:
    """Regions in the scope preserve this generator as they do the default ones
    (`preserve_rng_state`), and those of the CPU that their functions draw from: one of a device,
    say."""
    return guard_of(preserve_generator, locals(), Guard)


class GeneratorTracker:
    """Random generators with names, such as one for each form of parallelism (Megatron-LM).

        tracker = remat.GeneratorTracker()
        tracker.add("model parallel", 1234 + rank)
        with tracker.fork("model parallel"):
            x = torch.dropout(x, 0.1, True)

    Recomputes of a region that forks see the states from the region's first fork, and restore the
    present ones afterwards, with `preserve_rng_state=False` as well. Such a region on the CPU is
    not stopped early, and keeps one copy of all states.
    device: the device whose default generator forks replace; None: the CPU.
    Threads: any; those that draw from one default generator at once disturb each other.
    """

    @checked
    def __init__(self, device: Union[torch.device, str, int, None] = None) -> None:
        self._tracker = _remat._GeneratorTracker(device)

    @checked
    def add(self, name: str, seed: int) -> None:
        """Adds a generator. Raises ValueError if there is one with that name."""
        self._tracker.add(name, seed)

    @checked
    def fork(self, name: str) -> Guard:
        """In the scope the device's default generator continues the named one. Names nest.

        Entering raises ValueError for an unknown name, or one that is forked already.
        """
        given = {"tracker": self._tracker, "name": name}
        return Guard(f"remat.GeneratorTracker.fork({name!r})", lambda: _remat._open("fork", given))

    def states(self) -> dict[str, torch.Tensor]:
        """Returns copies of all states, by name: for a checkpoint file of the program."""
        states: dict[str, torch.Tensor] = self._tracker.states()
        return states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Sets the states, and with them the names, to what `states` returned.

        Raises RuntimeError within a fork.
        """
        self._tracker.set_states(states)


@checked
def observe_recomputes(
    begin: Optional[Callable[[_remat.PhaseInfo], object]] = None,
    end: Optional[Callable[[_remat.PhaseInfo], object]] = None,
) -> Guard:
    """Recomputes of regions that begin in the scope call these before and after, on their threads,
    in pairs.

    What `begin` raises fails the recompute; what `end` raises is a warning.
    """
    return guard_of(observe_recomputes, locals(), Guard)
