"""Recorders of regions, the tensors that a graph saved, and bytes of tensors."""

from __future__ import annotations

import contextlib
import functools
import html
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NamedTuple, Optional, Union

import torch
import torch.nn as nn

from ._arguments import checked
from ._errors import in_python_words
from ._extension import _remat
from ._remat import MemoryMeter, RegionHandle, Report

Path = Union[str, "os.PathLike[str]"]


def as_table(text: Any) -> str:
    """Returns a text in columns for a notebook."""
    return f'<pre style="white-space: pre">{html.escape(str(text))}</pre>'


def _meter_text(self: MemoryMeter) -> str:
    rounded = "" if self.is_exact else ", as the allocator rounds them"
    live, peak = f"{self.live_bytes:,} bytes live", f"{self.peak_bytes:,} at the peak"
    return f"<remat.MemoryMeter of {self.device}: {live}, {peak}{rounded}>"


def _report_text(self: Report) -> str:
    calls, recomputes = (
        sum(getattr(each, name) for each in self.regions) for name in ("calls", "recomputes")
    )
    numbers = f"{calls:,} calls, {recomputes:,} recomputes"
    return f"<remat.Report: regions of {len(self.regions)} names, {numbers}>"


Report.__repr__ = _report_text  # type: ignore[assignment, method-assign]
MemoryMeter.__repr__ = _meter_text  # type: ignore[assignment, method-assign]
Report._repr_html_ = lambda self: as_table(self)  # type: ignore[method-assign]


class Page(str):
    """An HTML page: text, which a notebook shows as a page of its own."""

    def _repr_html_(self) -> str:
        page = html.escape(self, quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="640" style="border: 0"></iframe>'


class Recorder:
    """Records the events of regions and budgets on every thread of the process.

    It records from its construction to `stop` or the end of a `with`.

        with remat.Recorder() as recorder:
            model(x).sum().backward()
        print(recorder.report())      # a table: calls, recomputes, bytes, times by region
        recorder.write_html("step.html")

    In a notebook it shows its page: live bytes over time, regions, the table.

    memory: sample the live bytes of CPU tensors at every event and every allocation, those of an
        accelerator's devices in use at every event and after every operator. Allocations between
        operators on an accelerator are recorded under `record_allocations`.
    operators: also record the operators that run, 1 to 3 us each.
    max_events: the most events that are kept, about 100 bytes each. Beyond it the oldest events are
        dropped, and the report says so; sums stay exact.
    device_time: time regions and the copies of offload on an accelerator, by events on the streams
        that run them. No call waits for a device meanwhile; `report` and the functions that draw or
        write do.
    Several recorders may record at a time. Threads: any.
    """

    @checked
    def __init__(
        self, *, memory: bool = True, operators: bool = False, max_events: int = 1 << 20,
        device_time: bool = True
    ) -> None:
        self._recorder = _remat._Recorder(memory, operators, max_events, device_time)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the recording; recorded events stay."""
        self._recorder.stop()

    def report(self) -> Report:
        """Returns the sums so far; `str` makes a table of them, `to_json` a text."""
        report: Report = self._recorder.report()
        return report

    def event_log(self) -> str:
        """Returns one line for each event in order, without times. Regions are numbered from 1."""
        return str(self._recorder.event_log())

    def page(self) -> Page:
        """Returns one HTML page without other files: live bytes over time, the regions, the
        table."""
        return Page(in_python_words(self._recorder.page()))

    @checked
    def write_html(self, path: Path) -> None:
        """Writes `page()`."""
        self._recorder.write_html(os.fspath(path))

    @checked
    def write_memory_svg(self, path: Path) -> None:
        """Writes a picture of live bytes over time, stacked by kind, with the regions below.
        Budgets are drawn as a line, and the operators that run again as bars."""
        self._recorder.write_memory_svg(os.fspath(path))

    @checked
    def write_chrome_trace(self, path: Path) -> None:
        """Writes a trace for Perfetto and chrome://tracing: regions, recomputes, operators by
        thread."""
        self._recorder.write_chrome_trace(os.fspath(path))

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()


@checked
def free_bytes(device: Union[torch.device, str, int, None] = None) -> int:
    """Returns the bytes that tensors on `device` could take now. On an accelerator, they are free
    once its allocator has returned its cache (which waits for the device). On the CPU, they are the
    bytes that the smallest `memory_limit` leaves.

    Raises CheckpointError (UNSUPPORTED) if the device does not report it, and on the CPU without a
    limit, since all programs share its memory. Threads: any.
    """
    return int(_remat._free_bytes(device))


class SavedTensor(NamedTuple):
    """One tensor that a graph saved, or that a region would compute again for it."""

    node: str
    """The node's name: "SinBackward0"."""
    region: str
    """The name of the region that dropped the tensor, if one did."""
    shape: torch.Size
    dtype: Optional[torch.dtype]
    """The dtype; None for a tensor that hooks of the program packed, and for a node that cannot
    report its saved tensors."""
    bytes: int
    """[bytes] of its storage, or of the tensor that was dropped."""
    shares_storage: bool
    """True if an earlier tensor in the list has the same storage: these bytes must not be added."""
    dropped: bool
    """True if the tensor is not in memory: a recompute will produce it."""
    module: str = ""
    """The path of the module that saved it, under `track_origins`."""
    op: str = ""
    """Its operator, "aten::mm", under `track_origins(..., lines=True)`."""
    place: str = ""
    """The line of the program that called the operator, "model.py:42", under the same condition."""


@checked
def saved_tensors(root: torch.Tensor) -> list[SavedTensor]:
    """Returns the tensors that the graph below `root` saved, in the order of their reads in
    backward.

    Computes nothing. A tensor that one node saved twice is listed once. No backward over the
    same graph may run meanwhile.
    """
    return [SavedTensor(*each) for each in _remat._saved_tensors(root)]


@checked
def regions_of(root: torch.Tensor) -> list[RegionHandle]:
    """Returns the regions in the graph behind `root`, in the order in which backward reads them.
    Computes nothing. A region is missing if all its nodes do not report their saved tensors.
    Threads: any."""
    return list(_remat._regions_of(root))


# ---- origins of bytes -------------------------------------------------------------------------

_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def _place() -> str:
    """Returns the line of the innermost frame that is neither torch's nor the package's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@contextlib.contextmanager
def _tracked(model: nn.Module, lines: bool) -> Iterator[None]:
    origins = _remat._Origins(_place if lines else None)
    thread = threading.get_ident()
    handles = []

    def hook_to(act: Callable[[], None]) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            if threading.get_ident() == thread and not _remat.is_recomputing():
                act()

        return hook

    try:
        for path, module in model.named_modules():
            enter = hook_to(functools.partial(origins.enter, path))
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(hook_to(origins.leave), always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        del origins, handles


@checked
def track_origins(model: nn.Module, lines: bool = False) -> contextlib.AbstractContextManager[None]:
    """Notes in the scope, for `saved_tensors`, the module of `model` that makes each node.

        with remat.track_origins(model, lines=True):
            loss = model(x).sum()
            for each in remat.saved_tensors(loss):
                print(each.module, each.op, each.place, each.bytes)

    Nodes inside regions are noted as well; regions themselves pay nothing.
    lines: note each operator with its line of the program, at the cost of a few microseconds.
    Memory: some bytes for each call of a module, about 150 for each noted operator, until the end
        of the scope.
    Threads: notes the thread that entered it.
    """
    return _tracked(model, lines)


class ModuleBytes(NamedTuple):
    """Sums of one module, without the modules below it [bytes]."""

    module: str
    """The module's path; "" for the root, and for nodes outside of all modules."""
    saved_bytes: int = 0
    """[bytes] that the graph holds; each storage counts once."""
    dropped_bytes: int = 0
    """[bytes] that recomputes will make."""
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    """[bytes] of the optimizer's state for its parameters."""


def _storage_bytes(tensor: Any) -> int:
    return tensor.untyped_storage().nbytes() if isinstance(tensor, torch.Tensor) else 0


def bytes_by_module(
    saved: Iterable[SavedTensor],
    model: Optional[nn.Module] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> list[ModuleBytes]:
    """Returns the sums of saved tensors by module, the largest first.

    They include the parameters and gradients of `model`, and the state that `optimizer` keeps for
    them. A parameter of several modules counts for the first one.
    """
    sums: dict[str, list[int]] = {}
    for each in saved:
        of_module = sums.setdefault(each.module, [0] * 5)
        if each.dropped:
            of_module[1] += each.bytes
        elif not each.shares_storage:
            of_module[0] += each.bytes
    state: Any = optimizer.state if optimizer is not None else {}
    counted: set[int] = set()
    for path, module in model.named_modules() if model is not None else ():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in counted:
                continue
            counted.add(id(parameter))
            of_module = sums.setdefault(path, [0] * 5)
            of_module[2] += _storage_bytes(parameter)
            of_module[3] += _storage_bytes(parameter.grad)
            of_module[4] += sum(map(_storage_bytes, state.get(parameter, {}).values()))
    found = [ModuleBytes(path, *each) for path, each in sums.items() if any(each)]
    return sorted(found, key=lambda each: -sum(each[1:]))
