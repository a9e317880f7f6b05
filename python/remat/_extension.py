"""Loads the extension, if it matches the installed torch, and gives it its objects of Python."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

from . import _build

_major, _minor = map(int, _build.torch_version.split(".")[:2])
_wanted = f"pip install 'torch>={_major}.{_minor},<{_major}.{_minor + 1}'"
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        f"remat was built against torch {_build.torch_version}, and no torch is installed. Hint: "
        f"{_wanted}."
    ) from None

# One binary serves one minor version of LibTorch: the layouts of classes differ between them.
if torch.__version__.split(".")[:2] != [str(_major), str(_minor)]:
    raise ImportError(
        f"remat was built against torch {_build.torch_version}, and torch {torch.__version__} is "
        f"installed. Hint: {_wanted}, or build remat against this one: pip install "
        f"--no-build-isolation remat-{_build.version}.tar.gz"
    )

try:
    from . import _remat as _remat
except ImportError as error:
    if not (
        "undefined symbol" in str(error) or "libremat" in str(error)
    ) or "binding number" in str(error):
        raise
    raise ImportError(
        f"remat: the extension module and libremat.so do not match, or one is missing ({error}). "
        "Hint: install the package again, so that both come from one build."
    ) from error

from ._arguments import check  # noqa: E402
from ._dispatch_mode import SeesOperators  # noqa: E402
from ._engine import put_in_front  # noqa: E402
from ._errors import (  # noqa: E402
    WORDS_OF_WARNINGS,
    CheckpointError,
    ErrorKind,
    StopRecompute,
    make_budget_error,
    make_error,
    said_in_python,
)
from ._hooks import note_hooks_of  # noqa: E402


def _run_in(
    recompute_context: Any, device_context: Any, function: Any, /, *args: Any, **kwargs: Any
) -> None:
    """Runs a recompute inside the contexts of its region, in torch.utils.checkpoint's order."""
    none = contextlib.nullcontext()
    with (
        none if recompute_context is None else recompute_context,
        none if device_context is None else device_context,
    ):
        function(*args, **kwargs)


class _FunctionModes:
    """The function modes around a region, for its recomputes: `device`, if not None, is entered
    again; the others must be active."""

    __slots__ = ("device", "others")

    def __init__(self, device: Any, others: list[Any]) -> None:
        self.device = device
        # Weak references: a mode that keeps the tensors it sees would keep the graph, and the graph
        # this.
        self.others = [(weakref.ref(mode), type(mode).__name__) for mode in others]

    def __enter__(self) -> None:
        if _function_modes()[1] != [mode() for mode, _ in self.others]:
            names = ", ".join(name for _, name in self.others)
            error = CheckpointError(
                f"remat.checkpoint: the function mode {names} was active around the call of the "
                "region, but not around its recompute, so the gradient would be wrong.\n"
                "Cause: torch turns function modes off in a backward, even inside their `with` "
                "block.\n"
                "Hint: open the mode inside the region's function."
            )
            error.kind = ErrorKind.UNSUPPORTED
            raise error
        if self.device is not None:
            self.device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.device is not None:
            self.device.__exit__(*error)


def _function_modes() -> tuple[Any, list[Any]]:
    """Returns the innermost `torch.device` context or default device, and the other function
    modes."""
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    device, others = None, []
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            device = mode
        else:
            others.append(mode)
    return device, others


def _device_context(is_own: bool = False) -> Any:
    """Returns the context of recomputes; for `remat.checkpoint` with the other function modes."""
    device, others = _function_modes()
    return _FunctionModes(device, others) if others and is_own else device


class _Calling:
    """An object that calls `ask` as a method."""

    def __init__(self, ask: Any) -> None:
        self.ask = ask


# The ways in which programs call operators; each continues if the call has not raised.
_STOP_TRIALS = (
    lambda ask: (ask(), 1),
    lambda ask: (ask(1), 1),
    lambda ask: (ask(number=1), 1),
    lambda ask: (ask(*(1, 2)), 1),
    lambda ask: (ask(**{"number": 1}), 1),
    lambda ask: (_Calling(ask).ask(1), 1),
    lambda ask: (_Calling(ask).ask(1, number=1), 1),
)

_remat._set_names(
    make_error=make_error,
    make_budget_error=make_budget_error,
    said_in_python=said_in_python,
    check=check,
    run_in=_run_in,
    device_context=_device_context,
    stop=StopRecompute,
    stop_trials=_STOP_TRIALS,
    dispatch_mode=SeesOperators(),  # type: ignore[no-untyped-call]
)
_remat._set_words(WORDS_OF_WARNINGS)
put_in_front(_remat)
note_hooks_of(_remat)
atexit.register(_remat._interpreter_ends)
