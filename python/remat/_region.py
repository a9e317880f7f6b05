"""`checkpoint`: one call as a region."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, Literal, Optional, TypeVar, Union, overload

from ._extension import _remat

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    import torch.nn as nn

    from ._policy import CheckpointPolicy, Policy, PolicyContext

    AnyPolicy = Union[Policy, Callable[[PolicyContext], Union[CheckpointPolicy, bool]], None]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class Checkpointing:
    """A decorator: each call of what it is put on is a region with these options."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, function: F) -> F:
        return checkpointed(function, **self.options)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"remat.checkpoint({options})"


def checkpointed(function: F, **options: Any) -> F:
    """A function each call of which is a region of `function`, with the options of `checkpoint`."""

    @functools.wraps(function)
    def region(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **options, **kwargs)

    return region  # type: ignore[return-value]


_remat._set_decorator(Checkpointing)

if TYPE_CHECKING:

    @overload
    def checkpoint(
        function: Callable[..., R],
        /,
        *args: Any,
        name: str = "",
        policy: AnyPolicy = None,
        early_stop: bool = True,
        determinism_check: Literal["none", "metadata", "layout", "values"] = "metadata",
        fingerprint: Optional[Callable[[torch.Tensor], object]] = None,
        capture_check: Literal["raise", "ignore"] = "raise",
        offload_inputs: bool = False,
        preserve_rng_state: bool = True,
        input_mode: Literal["shared", "copy_on_write"] = "shared",
        buffers: Literal["restore", "ignore"] = "restore",
        modules: Iterable[nn.Module] = (),
        strict_unpack: bool = False,
        debug: bool = False,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def checkpoint(**options: Any) -> Checkpointing: ...
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        """See the text that the extension has."""

else:
    checkpoint = _remat.checkpoint
