"""What of a region is kept instead of recomputed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Union

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ._extension import _remat

Policy = _remat.Policy
PolicyContext = _remat.PolicyContext
save_matmuls = _remat.save_matmuls
checkpoint_name = _remat.checkpoint_name
pin = _remat.pin

__all__ = [
    "CheckpointPolicy",
    "Operator",
    "Policy",
    "PolicyContext",
    "checkpoint_name",
    "name_of",
    "offload_names",
    "offload_ops",
    "pin",
    "save_all_but_names",
    "save_matmuls",
    "save_names",
    "save_ops",
]

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


def save_ops(
    ops: Iterable[Operator],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the results of these operators: `save_ops(["aten::mm"])`, `save_ops([torch.ops.aten.mm.default])`.

    Memory: what is kept lives as long as the region's graph. Raises ValueError for a name that no loaded
    library has registered.
    """
    return _remat._save_ops(
        [name_of(op) for op in ops], allow_cache_entry_mutation, save_through_hooks, ask_again
    )


def offload_ops(
    ops: Iterable[Operator],
    *,
    allow_cache_entry_mutation: bool = False,
    save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """The same; the results wait on the CPU."""
    return _remat._offload_ops(
        [name_of(op) for op in ops], allow_cache_entry_mutation, save_through_hooks, ask_again
    )


def save_names(names: Iterable[str]) -> Policy:
    """Keeps the values that `checkpoint_name` gave one of these names."""
    return _remat._save_names(list(names))


def save_all_but_names(names: Iterable[str]) -> Policy:
    """Keeps every value with a name but these."""
    return _remat._save_all_but_names(list(names))


def offload_names(names: Iterable[str]) -> Policy:
    """The values with these names wait on the CPU."""
    return _remat._offload_names(list(names))
