"""Guards: context managers that set the treatment of regions and saved tensors in a scope.

Each may be entered again and nested, and is a decorator, too. It belongs to the thread that entered
it, and applies to the threads on which a backward called there runs. The innermost has priority.
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
        self._last: Any = None  # the counter of the scope entered last, also after it
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
    """Returns the library's guard with the name of `make`, whose arguments are `given`."""
    name = make.__name__
    return kind(text or f"remat.{name}", lambda: _remat._open(name, given))


@checked
def disable_saved_tensors_hooks(message: str) -> Guard:
    """Makes an opening of saved-tensor hooks or of a region raise RuntimeError with this message;
    it is torch's own switch."""
    return guard_of(disable_saved_tensors_hooks, locals(), Guard)


# ---- regions ------------------------------------------------------------------------------------


@checked
def early_stop(enabled: bool) -> Guard:
    """Turns early stop on or off for regions that run forward in the scope, over the option of
    `checkpoint`."""
    return guard_of(early_stop, locals(), Guard, f"remat.early_stop({enabled})")


@checked
def checkpoint_level(training_level: int) -> Guard:
    """Selects regions by level: a call with a `level` (`checkpoint(..., level=2)`) is a region if
    `0 < level <= training_level`, and otherwise runs plainly. Calls without a level remain regions.

    Recomputes see the level that forward saw. The levels of modules (`set_checkpoint_level`) are
    separate.
    """
    return guard_of(checkpoint_level, locals(), Guard, f"remat.checkpoint_level({training_level})")


@checked
def debug(enabled: Optional[bool] = True) -> Guard:
    """Turns the recording of operators, for error reports, on or off; None leaves it to the option
    of `checkpoint`."""
    return guard_of(debug, locals(), Guard, f"remat.debug({enabled})")


def disable_checkpoint() -> Guard:
    """Makes regions that would begin in the scope run plainly: nothing is dropped."""
    return guard_of(disable_checkpoint, {}, Guard, "remat.disable_checkpoint()")


def unseen() -> Guard:
    """Hides the operators in the scope from the regions around it, in forward and in recomputes.

    No policy is asked about them, no debug report lists them, and nothing counts, compares or drops
    their saved tensors: those stay until backward, as outside of regions. Use it for code that only
    one of the passes runs, such as logging under `if not remat.is_recomputing()`. Random numbers
    are drawn from the generators themselves, anew in each recompute.
    """
    return guard_of(unseen, {}, Guard, "remat.unseen()")


@checked
def recompute_cache(max_bytes: Optional[Bytes] = None) -> Guard:
    """Lets backwards in the scope keep recomputed tensors for later backwards: many overlapping
    `torch.autograd.grad` calls on a retained graph cost one recompute for each region.

    max_bytes: limit of all recomputed tensors that are kept [bytes]; beyond it the regions used
    least recently are freed. All of them are freed at the end of the scope.
    """
    return guard_of(recompute_cache, locals(), Guard)


def graph_exec_group() -> Guard:
    """Lets backwards in the scope share one recompute of each region, as in a split backward.

    Each saved tensor is released when a backward has read it; a second backward that reads it
    raises CheckpointError (GROUP_OVERLAP).
    """
    return guard_of(graph_exec_group, {}, Guard, "remat.graph_exec_group()")


@checked
def memory_limit(bytes: Bytes, device: Union[torch.device, str, int, None] = None) -> Guard:
    """Makes an allocation raise torch.OutOfMemoryError if it would take
    `MemoryMeter(device).live_bytes` above `bytes`.

    The limit covers the whole process, all threads: it shows on any machine how a small one would
    behave. Memory that a meter does not count is not limited. On an accelerator the guard takes the
    rest of the device's free memory, so that the error is the device's own, and the limit is as
    fine as the pieces of its allocator. device: None: the CPU. Raises ValueError if `bytes` is
    negative; CheckpointError (UNSUPPORTED) as `MemoryMeter`, and if the device does not report its
    free memory.
    """
    where = "" if device is None else f", {str(device)!r}"
    return guard_of(memory_limit, locals(), Guard, f"remat.memory_limit({bytes}{where})")


MemoryLimit = memory_limit


def record_allocations() -> Guard:
    """Records each allocation and each release on an accelerator, as its allocator reports them, in
    all live recorders that record memory, with the region that the thread runs.

        with remat.Recorder() as recorder, remat.record_allocations():
            model(batch).sum().backward()

    The events appear in `Recorder.event_log`, in the trace, and in each device's picture as a line:
    the bytes that the allocator has handed out. (A recorder alone samples statistics after each
    operator.) A `FailedAllocation` then has its `asked_bytes`. The guard records the thread that
    entered it, and the threads on which a backward called there runs; allocations of another thread
    are in the sum of the next event. It takes the place of torch's profiler on its thread: a
    profiler that is started meanwhile reports that it is already enabled. Each allocation costs an
    event, of 100 bytes and about a microsecond; without a recorder it costs a call. Raises
    CheckpointError (UNSUPPORTED) if torch's profiler runs on this thread.
    """
    return guard_of(record_allocations, {}, Guard, "remat.record_allocations()")


# ---- state that recomputes see -------------------------------------------------------------------


class StateProvider(Protocol):
    """State of the program that a region's function reads, such as the state of a random generator.

    `capture` is called when a region begins, and around its recomputes. `restore` is called before
    each recompute, and after it with the state from before. Recomputes of several threads that use
    one provider take turns.
    """

    def capture(self) -> Any: ...
    def restore(self, state: Any, /) -> None: ...


def state_provider(provider: StateProvider) -> Guard:
    """Makes regions that begin in the scope keep `provider`'s state, and restore it in recomputes.

    Raises TypeError for an object without `capture` and `restore`.
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
    """Makes regions in the scope preserve this generator, such as one of a device, as they do the
    default ones (`preserve_rng_state`) and the CPU's generators that their functions draw from."""
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
        """Makes the device's default generator continue the named one in the scope. Names nest.

        Entering raises ValueError for an unknown name, or one that is forked already.
        """
        given = {"tracker": self._tracker, "name": name}
        return Guard(f"remat.GeneratorTracker.fork({name!r})", lambda: _remat._open("fork", given))

    def states(self) -> dict[str, torch.Tensor]:
        """Returns copies of all states, by name: for a checkpoint file of the program."""
        states: dict[str, torch.Tensor] = self._tracker.states()
        return states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Sets the states, and with them the names, to a result of `states`.

        Raises RuntimeError within a fork.
        """
        self._tracker.set_states(states)


@checked
def observe_recomputes(
    begin: Optional[Callable[[_remat.PhaseInfo], object]] = None,
    end: Optional[Callable[[_remat.PhaseInfo], object]] = None,
) -> Guard:
    """Calls `begin` before and `end` after each recompute of regions that begin in the scope, on
    the recompute's thread, in pairs.

    An exception of `begin` fails the recompute; an exception of `end` becomes a warning.
    """
    return guard_of(observe_recomputes, locals(), Guard)
