"""Seeing what happens: recorders of what regions do, cost and hold; what a graph saved; bytes of
tensors."""

from __future__ import annotations

import html
import os
from typing import Any, NamedTuple, Optional, Union

import torch

from ._arguments import checked
from ._errors import in_python_words
from ._extension import _remat
from ._remat import MemoryMeter, RegionHandle, Report

Path = Union[str, "os.PathLike[str]"]


def as_table(text: Any) -> str:
    """Text in columns, as a notebook shows it."""
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
    """Records what regions and budgets do on every thread of the process.

    It records from its making to `stop` or the end of a `with`.

        with remat.Recorder() as recorder:
            model(x).sum().backward()
        print(recorder.report())      # a table: calls, recomputes, bytes, times by region
        recorder.write_html("step.html")

    In a notebook it shows its page: live bytes over time, regions, the table.

    memory: sample the live bytes of CPU tensors at every event and every allocation, those of an
        accelerator's devices in use at every event and after every operator.
    operators: also record the operators that run, 1 to 3 us each.
    What allocates on an accelerator between operators is recorded under `record_allocations`.
    max_events: beyond it the oldest events go, and the report says so; sums stay exact. About 100
    bytes each.
    device_time: time regions and the copies of offload on an accelerator, by events on the streams
        that run them. Nothing waits for a device meanwhile; `report` and what draws or writes do.
    Several may record at a time. Threads: any.
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
        """Records no more; what was recorded stays."""
        self._recorder.stop()

    def report(self) -> Report:
        """The sums so far; `str` makes a table of it, `to_json` text."""
        report: Report = self._recorder.report()
        return report

    def event_log(self) -> str:
        """One line an event, without times: what happened in which order. Regions are numbered from
        1."""
        return str(self._recorder.event_log())

    def page(self) -> Page:
        """One HTML page without scripts or other files: live bytes over time, the regions, the
        table."""
        return Page(in_python_words(self._recorder.page()))

    @checked
    def write_html(self, path: Path) -> None:
        """Writes `page()`."""
        self._recorder.write_html(os.fspath(path))

    @checked
    def write_memory_svg(self, path: Path) -> None:
        """Live bytes over time, stacked by kind, with the regions below. Budgets are drawn as a
        line, and the operators that run again as bars."""
        self._recorder.write_memory_svg(os.fspath(path))

    @checked
    def write_chrome_trace(self, path: Path) -> None:
        """For Perfetto and chrome://tracing: regions, recomputes and operators as slices of their
        threads."""
        self._recorder.write_chrome_trace(os.fspath(path))

    def _repr_html_(self) -> str:
        return self.page()._repr_html_()


@checked
def free_bytes(device: Union[torch.device, str, int, None] = None) -> int:
    """[bytes] that tensors on `device` could take now: what the device has free once its allocator
    has given back what it caches (which waits for the device); on the CPU what the smallest
    `memory_limit` leaves.

    Raises CheckpointError (UNSUPPORTED) if the device does not say, and on the CPU without a limit:
    its memory is every program's. Threads: any.
    """
    return int(_remat._free_bytes(device))


class SavedTensor(NamedTuple):
    """One tensor that a graph saved, or that a region would compute again for it."""

    node: str
    """The node's name: "SinBackward0"."""
    region: str
    """Of what was dropped: the region's name."""
    shape: torch.Size
    dtype: Optional[torch.dtype]
    """None for a tensor that hooks of the program packed, and for a node that cannot say what it
    saved."""
    bytes: int
    """[bytes] of its storage, or of the tensor that was dropped."""
    shares_storage: bool
    """With one before it in the list: these bytes are not to be added."""
    dropped: bool
    """It is not there: a recompute will bring it."""


@checked
def saved_tensors(root: torch.Tensor) -> list[SavedTensor]:
    """What the graph below `root` saved, in the order in which backward would read it.

    Computes nothing. A tensor that one node saved twice is listed once. Not beside a backward over
    the same graph.
    """
    return [SavedTensor(*each) for each in _remat._saved_tensors(root)]


@checked
def regions_of(root: torch.Tensor) -> list[RegionHandle]:
    """The regions in the graph behind `root`, in the order in which backward reads them. Computes nothing. A region is
    missing if only nodes that do not say what they saved belong to it. Threads: any."""
    return list(_remat._regions_of(root))
