"""A byte budget for any program: saved tensors are dropped and made again by operators."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Optional, Union

import torch

from ._arguments import Bytes, Kind, add_kind, checked
from ._arguments import _is_whole as is_whole
from ._errors import CheckpointError, ErrorKind
from ._extension import _remat
from ._guards import Guard
from ._observe import as_table, free_bytes
from ._costs import MoveOptions
from ._remat import BudgetReport

Budgeted = Union[Bytes, str]
"""A number of bytes, or a text such as "8 GiB" or "free - 5 %"."""

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*({'|'.join(_UNITS)})\s*")
_FREE = re.compile(rf"\s*free\s*(?:-\s*{_NUMBER}\s*%\s*)?")
_MOST = (1 << 63) - 1  # sys.maxsize: no limit

add_kind(
    "Budgeted",
    Kind(
        lambda value: isinstance(value, str) or is_whole(value),
        "a whole number of bytes or a str such as '8 GiB'",
        lambda value: value if isinstance(value, str) else max(-_MOST, min(int(value), _MOST)),
    ),
)


def _read_text(text: str) -> tuple[Optional[int], Fraction]:
    """Returns the bytes of a text; or None, and the share of the free memory.

    Raises ValueError for other texts.
    """
    size = _SIZE.fullmatch(text)
    if size is not None:
        return min(int(Fraction(size[1]) * _UNITS[size[2]]), _MOST), Fraction(0)
    free = _FREE.fullmatch(text)
    share = 1 - Fraction(free[1] or 0) / 100 if free is not None else Fraction(0)
    if share <= 0:
        raise ValueError(
            f"remat.budget: the budget {text!r} is neither a size nor a share of the free memory. "
            f"Hint: write a number and a unit ({', '.join(_UNITS)}), such as '8 GiB'; or write "
            "'free' or 'free - 5 %'."
        )
    return None, share


def _free(text: str, share: Fraction, device: Union[torch.device, str, int, None]) -> int:
    try:
        return int(free_bytes(device) * share)
    except CheckpointError as error:
        if error.kind is not ErrorKind.UNSUPPORTED:
            raise
        raise ValueError(
            f"remat.budget: the budget {text!r} depends on the free memory, which is not known.\n"
            f"Cause: {error}\n"
            "Hint: write the budget as a size, such as '8 GiB'."
        ) from None


class Budget(Guard):
    """The return value of `budget`: a guard with a report."""

    def _latest(self, asked: str) -> Any:
        if self._last is None:
            raise RuntimeError(
                f"{self._text}: {asked} was called before the scope was entered. Hint: call it "
                "inside the `with` block, or after it."
            )
        return self._last

    def report(self) -> BudgetReport:
        """Returns the counts of the scope that was entered last, also after it: backwards of graphs
        that were made in the scope go on counting. `str` makes a table. Any thread.

        Raises RuntimeError before the scope was entered.
        """
        report: BudgetReport = self._latest("report").now()
        return report

    def reset(self) -> None:
        """Resets peak and counts of that scope; the budget stays. Any thread."""
        self._latest("reset").reset()

    def _repr_html_(self) -> str:
        return as_table(self._text if self._last is None else self.report())


@checked
def budget(
    bytes: Budgeted,
    *,
    device: Union[torch.device, str, int, None] = None,
    over: str = "continue",
    min_bytes: Optional[Bytes] = None,
    check_values: bool = False,
    moving: Optional[MoveOptions] = None,
) -> Budget:
    """Keeps tensors saved by autograd within a byte budget in a scope.

        with remat.budget("8 GiB") as budget:
            for batch in loader:
                train_step(model, batch)      # unchanged
        print(budget.report())

    When an allocation would exceed the budget, saved tensors are dropped. When backward reads one
    of them, the operators that made it run again; functions never run again. Outputs, gradients,
    buffers and random numbers equal those of the plain program bit by bit. Recommended: one scope
    around a training loop. A graph made in the scope can run backward after it, within the same
    budget. Nested scopes: the smallest budget applies. Regions inside are recomputed as regions.

    bytes: memory that may be alive in addition to the memory alive on entry [bytes]. A text is a
        number and B, kB, MB, GB (powers of 1000), KiB, MiB, GiB (of 1024); or "free", "free - 5 %":
        a share of `free_bytes`, read on entry. `sys.maxsize`: no limit, only the report.
    device: the device whose memory is bounded; None: the CPU. Each device needs a scope of its own.
    over: "continue" counts an allocation that does not fit; "throw" raises BudgetExceeded.
    min_bytes: smaller tensors are never dropped [bytes]; None: a thousandth of the budget, at most
        64 KiB.
    check_values: for debugging: contents are hashed when dropped and compared when made again.
    moving: the place to which values may be copied instead of being dropped,
        `MoveOptions(directory=...)`. It gets values whose copy takes less time than making them
        again, and values that cannot be made again. An accelerator's values wait on the CPU without
        a directory. None: nothing moves.
    Threads: the scope belongs to the thread that entered it and to the threads of its backwards.
    Raises ValueError for a budget of 0 or less, an invalid text, and "free" if the free memory is
    unknown; on entry for `moving` of the CPU without a directory, or one in which no file can be
    made. Raises CheckpointError (UNSUPPORTED) for a device of unknown memory, and inside a region.
    """
    if over not in ("continue", "throw"):
        raise ValueError(f"remat.budget: over must be 'continue' or 'throw', got {over!r}")
    if min_bytes is not None and min_bytes < 0:
        raise ValueError(
            f"remat.budget: min_bytes must be 0 or more, or None, got {min_bytes!r}"
        )
    size, share = _read_text(bytes) if isinstance(bytes, str) else (int(bytes), Fraction(0))

    def open() -> Any:
        asked = _free(str(bytes), share, device) if size is None else size
        least = -1 if min_bytes is None else int(min_bytes)
        return _remat._open_budget(asked, device, over == "throw", least, check_values, moving)

    return Budget(f"remat.budget({bytes!r})", open)
