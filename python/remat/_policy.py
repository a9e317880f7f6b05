"""What of a region is kept instead of recomputed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Callable, Union

import torch
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from ._arguments import Bytes, add_kind, checked, checked_by, of_class
from ._errors import translated
from ._extension import _remat

Policy = _remat.Policy
PolicyContext = _remat.PolicyContext
add_kind("Policy", of_class(Policy, "a remat.Policy"))
checkpoint_name = _remat.checkpoint_name
pin = _remat.pin


Operator = Union[str, torch._ops.OpOverload, torch._ops.OpOverloadPacket]


def name_of(operator: Operator) -> str:
    """The library's name of an operator: "aten::mm" means every overload, "aten::mm.default" the unnamed one."""
    if isinstance(operator, str):
        return operator
    if isinstance(operator, torch._ops.OpOverload):
        return f"{operator._schema.name}.{operator._overloadname}"
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return operator._qualified_op_name
    raise TypeError(f"remat: an operator must be a name, or of torch.ops, and is {operator!r}")


# ---- copies and pickles -----------------------------------------------------------------------------------

# How each policy was made: (function, arguments, keywords). The library's policies cannot be asked.
_recipes: weakref.WeakKeyDictionary[Policy, tuple[Callable[..., Policy], tuple[Any, ...], dict[str, Any]]]
_recipes = weakref.WeakKeyDictionary()


def _noted(policy: Policy, make: Callable[..., Policy], *args: Any, **keywords: Any) -> Policy:
    _recipes[policy] = (make, args, keywords)
    return policy


def _make_again(make: Callable[..., Policy], args: tuple[Any, ...], keywords: dict[str, Any]) -> Policy:
    return make(*args, **keywords)


def _either(one: Policy, other: Policy) -> Policy:
    return one | other


_native_init, _native_or = Policy.__init__, Policy.__or__


_MIN_OFFLOAD_BYTES, _PREFETCH_DEPTH, _MAX_BYTES_IN_FLIGHT = 1 << 16, 2, 64 << 20
# Of a policy that offloads nothing.
_DEFAULTS = {
    "allow_cache_entry_mutation": False,
    "save_through_hooks": False,
    "ask_again": False,
    "min_offload_bytes": _MIN_OFFLOAD_BYTES,
    "prefetch_depth": _PREFETCH_DEPTH,
    "max_bytes_in_flight": _MAX_BYTES_IN_FLIGHT,
    "keep_last": 0,
}


def _with(native: Callable[..., Any], *arguments: Any, options: dict[str, Any]) -> Any:
    """Calls the library with options, some of them left out."""
    return translated(native)(*arguments, tuple((_DEFAULTS | options).values()))


def _init(
    self: Policy,
    function: Callable[[PolicyContext], Any],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
    min_offload_bytes: Bytes = _MIN_OFFLOAD_BYTES,
    prefetch_depth: int = _PREFETCH_DEPTH,
    max_bytes_in_flight: Bytes = _MAX_BYTES_IN_FLIGHT,
    keep_last: int = 0,
) -> None:
    """A policy that asks `function`, which is called with a PolicyContext and returns a CheckpointPolicy or a bool.

    The options are those of `save_ops` and, for what it wants on the CPU, of `offload_ops`.
    """
    options = {
        "allow_cache_entry_mutation": allow_cache_entry_mutation,
        "save_through_hooks": save_through_hooks,
        "ask_again": ask_again,
        "min_offload_bytes": min_offload_bytes,
        "prefetch_depth": prefetch_depth,
        "max_bytes_in_flight": max_bytes_in_flight,
        "keep_last": keep_last,
    }
    _with(lambda *given: _native_init(self, *given), function, options=options)
    _noted(self, Policy, function, **options)


def _or(self: Policy, other: Policy) -> Policy:
    if not isinstance(other, Policy):
        return NotImplemented
    return _noted(_native_or(self, other), _either, self, other)


def _repr(self: Any) -> str:
    make, args, keywords = _recipes[self]
    if make is _either:
        return " | ".join(map(repr, args))
    said = [
        *map(repr, args), *(f"{name}={value!r}" for name, value in keywords.items() if value != _DEFAULTS.get(name))
    ]  # fmt: skip
    return f"remat.{make.__name__}({', '.join(said)})"


def _reduce(self: Any) -> tuple[Any, ...]:
    return _make_again, _recipes[self]


Policy.__init__ = checked_by("remat.Policy", dict(_init.__annotations__), _init)  # type: ignore[method-assign]
Policy.__or__ = _or  # type: ignore[method-assign]
Policy.__repr__ = _repr  # type: ignore[method-assign]
Policy.__reduce__ = _reduce  # type: ignore[method-assign]
Policy.__copy__ = lambda self: self  # type: ignore[attr-defined]
Policy.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]

def _of(native: Callable[..., Any], make: Callable[..., Policy], options: dict[str, Any], *listed: list[str]) -> Policy:
    return _noted(_with(native, *listed, options=options), make, *listed, **options)


# ---- ready-made ----------------------------------------------------------------------------------------------


@checked
def save_matmuls(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False, ask_again: bool = False
) -> Policy:
    """Keeps the results of matrix products, convolutions and scaled dot product attention; options as of `save_ops`.

    A convolution whose activation writes to its result (`ReLU(inplace=True)` with no norm between) needs
    `allow_cache_entry_mutation`: it runs again then.
    """
    return _of(_remat._save_matmuls, save_matmuls,
               {"allow_cache_entry_mutation": allow_cache_entry_mutation, "save_through_hooks": save_through_hooks,
                "ask_again": ask_again})  # fmt: skip


@checked
def save_ops(
    ops: Iterable[Operator],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the results of these operators: `save_ops(["aten::mm"])`, `save_ops([torch.ops.aten.mm.default])`.

    allow_cache_entry_mutation: a kept result may be changed in place later; its operator then runs again. Otherwise
    backward raises a CheckpointError.
    save_through_hooks: kept results pass the saved-tensor hooks around the region, as its inputs do.
    ask_again: the recompute asks, too.
    Memory: what is kept lives as long as the region's graph. Raises ValueError for a name that no loaded
    library has registered.
    """
    return _of(_remat._save_ops, save_ops,
               {"allow_cache_entry_mutation": allow_cache_entry_mutation, "save_through_hooks": save_through_hooks,
                "ask_again": ask_again}, [name_of(op) for op in ops])  # fmt: skip


@checked
def offload_ops(
    ops: Iterable[Operator],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
    min_offload_bytes: Bytes = _MIN_OFFLOAD_BYTES,
    prefetch_depth: int = _PREFETCH_DEPTH,
    max_bytes_in_flight: Bytes = _MAX_BYTES_IN_FLIGHT,
    keep_last: int = 0,
) -> Policy:
    """The same; the results wait on the CPU, copied there beside the device's work, and back ahead of it.

    min_offload_bytes: smaller results stay where they are [bytes].
    prefetch_depth: how many copies back are begun ahead of the one that a recompute reads.
    max_bytes_in_flight: of originals whose copies are not done [bytes]; beyond that the program waits.
    keep_last: so many of the results that backward asks for first, over all regions, stay on the device. Others move when
    they are not among these any more, and the program does not hold them.
    Raises ValueError for a negative number, too.
    """
    return _of(_remat._offload_ops, offload_ops,
               {"allow_cache_entry_mutation": allow_cache_entry_mutation, "save_through_hooks": save_through_hooks,
                "ask_again": ask_again, "min_offload_bytes": min_offload_bytes, "prefetch_depth": prefetch_depth,
                "max_bytes_in_flight": max_bytes_in_flight, "keep_last": keep_last}, [name_of(op) for op in ops])  # fmt: skip


@checked
def save_names(
    names: Iterable[str],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the values that `checkpoint_name` gave one of these names; options as of `save_ops`."""
    return _of(_remat._save_names, save_names,
               {"allow_cache_entry_mutation": allow_cache_entry_mutation, "save_through_hooks": save_through_hooks,
                "ask_again": ask_again}, list(names))  # fmt: skip


@checked
def save_all_but_names(
    names: Iterable[str],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps every value with a name but these; options as of `save_ops`."""
    return _of(_remat._save_all_but_names, save_all_but_names,
               {"allow_cache_entry_mutation": allow_cache_entry_mutation, "save_through_hooks": save_through_hooks,
                "ask_again": ask_again}, list(names))  # fmt: skip


@checked
def offload_names(
    names: Iterable[str],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
    min_offload_bytes: Bytes = _MIN_OFFLOAD_BYTES,
    prefetch_depth: int = _PREFETCH_DEPTH,
    max_bytes_in_flight: Bytes = _MAX_BYTES_IN_FLIGHT,
    keep_last: int = 0,
) -> Policy:
    """The values with these names wait on the CPU; options as of `offload_ops`."""
    return _of(_remat._offload_names, offload_names,
               {"allow_cache_entry_mutation": allow_cache_entry_mutation, "save_through_hooks": save_through_hooks,
                "ask_again": ask_again, "min_offload_bytes": min_offload_bytes, "prefetch_depth": prefetch_depth,
                "max_bytes_in_flight": max_bytes_in_flight, "keep_last": keep_last}, list(names))  # fmt: skip
