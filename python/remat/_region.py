"""`checkpoint`: one call as a region."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any, Callable, Literal, Optional, TypeVar, Union, overload

from ._arguments import add_kind, check_fields, of_class, refuse, said
from ._extension import _remat
from ._remat import RegionHandle

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    import torch.nn as nn

    from ._policy import CheckpointPolicy, Policy
    from ._remat import PolicyContext

    Answer = Union[CheckpointPolicy, bool]
    Table = dict[str, Union[Answer, str]]
    AnyPolicy = Union[Policy, Callable[[PolicyContext], Answer], Table, str, None]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class ValueComparison:
    """The comparison of elements by `determinism_check="values"`:
    `checkpoint(..., value_comparison=ValueComparison(...))`.

    By default all bits must be equal, by a 64-bit hash kept of each tensor. A NaN equals one
    of the same bits, and 0 does not equal -0. Elements of floating point are equal, too, if
    |recomputed - forward| <= absolute_tolerance + relative_tolerance * |forward|; an infinity
    equals itself only. With a tolerance the elements that are compared are kept instead of a hash.
    Raises ValueError for negative numbers and NaN, TypeError for other types.
    """

    absolute_tolerance: float = 0.0
    relative_tolerance: float = 0.0
    max_elements: int = 0
    """The most elements of each tensor that are compared, spread evenly over it; 0: all.
    Differences in other elements are not found."""
    nan: Literal["bits", "any"] = "bits"
    """The NaN that are equal: those of the same bits, or all."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("absolute_tolerance", "relative_tolerance", "max_elements"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"remat.ValueComparison: {name} must be 0 or more, got {value!r}")
        if self.nan not in ("bits", "any"):
            raise ValueError(
                f"remat.ValueComparison: nan must be 'bits' or 'any', got {self.nan!r}"
            )


add_kind("ValueComparison", of_class(ValueComparison, "a remat.ValueComparison"))
add_kind("RegionHandle", of_class(RegionHandle, "a remat.RegionHandle"))


class Checkpointing:
    """A decorator: each call of the decorated function is a region with these options."""

    def __init__(self, **options: Any) -> None:
        if "modules" in options and hasattr(options["modules"], "__iter__"):
            options["modules"] = tuple(options["modules"])  # each call reads them
        _remat._check_options(options)
        self.options = options

    def __call__(self, function: F) -> F:
        return checkpointed(function, **self.options)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"remat.checkpoint({options})"


def refuse_function(user: str, function: Any) -> None:
    """Raises TypeError for an object that a region cannot run."""
    if isinstance(function, type) and hasattr(function, "_call_impl"):  # of modules
        raise TypeError(
            f"{user}: the function must be a function or a module, got {said(function)}. Hint: "
            f"pass remat.Checkpointed({function.__name__}(...)), or decorate its forward with "
            "@remat.checkpoint()."
        )
    if not callable(function):
        raise refuse(user, "the function", "a function or a module", function)


def unbound(function: Any, error: TypeError) -> TypeError:
    """Returns the error for a call without arguments, made perhaps by `@remat.checkpoint`."""
    try:
        inspect.signature(function).bind()
        return error  # it came from inside
    except TypeError as missing:
        name = getattr(function, "__name__", type(function).__name__)
        return TypeError(
            f"remat.checkpoint: {name} was called without arguments: {missing}. Cause: "
            "remat.checkpoint(function, ...) calls the function; a decorator needs parentheses. "
            "Hint: write @remat.checkpoint() above the function, or call "
            "remat.checkpoint(function, *arguments)."
        )
    except ValueError:  # a function without a signature
        return error


_INSTEAD_OF_UPSTREAMS = {
    "use_reentrant": "leave it out: regions of remat.checkpoint are never re-entrant",
    "context_fn": "policy=remat.save_ops([...]) for a selective context; for others a `with` in "
    "the function, which both passes run, or remat.state_provider",
    "respect_saved_tensors_hooks": "policy=remat.save_ops([...], save_through_hooks=True)",
}


def not_taken(given: tuple[Any, list[str]], error: TypeError) -> TypeError:
    """Returns the error for a function that was given options of upstream that it does not take."""
    function, names = given
    upstreams = [name for name in names if name in _INSTEAD_OF_UPSTREAMS]
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function without a signature
        return error
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return error
    for name in upstreams:
        if name not in taken:
            return TypeError(
                f"remat.checkpoint: {name} was given, an option of torch.utils.checkpoint. Cause: "
                f"remat.checkpoint has no such option, and the function takes no such argument. "
                f"Hint: {_INSTEAD_OF_UPSTREAMS[name]}."
            )
    return error


def checkpointed(function: F, **options: Any) -> F:
    """Wraps `function`: each call of the result is a region, with the options of `checkpoint`."""
    refuse_function("remat.checkpointed", function)

    @functools.wraps(function)
    def region(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **options, **kwargs)

    return region  # type: ignore[return-value]


_remat._set_names(
    decorator=Checkpointing, refuse_function=refuse_function, unbound=unbound, not_taken=not_taken
)

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
        offload_prefetch_depth: int = 2,
        preserve_rng_state: bool = True,
        input_mode: Literal["shared", "copy_on_write"] = "shared",
        buffers: Literal["restore", "ignore"] = "restore",
        modules: Iterable[nn.Module] = (),
        strict_unpack: bool = False,
        debug: bool = False,
        level: Optional[int] = None,
        value_comparison: Optional[ValueComparison] = None,
        handle: Optional[RegionHandle] = None,
        prepare_ahead: int = 0,
        transforms: Literal["plain", "refuse"] = "plain",
        **kwargs: Any,
    ) -> R: ...
    @overload
    def checkpoint(**options: Any) -> Checkpointing: ...
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        """See the docstring in the extension."""

else:
    checkpoint = _remat.checkpoint
