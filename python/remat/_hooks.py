"""Frees objects that hooks over several tensors, registered by a recompute, would keep forever."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.graph as graph


def _nodes_of(hook: Any) -> Any:
    """Returns the list that a hook of `register_multi_grad_hook` holds, the nodes of all its
    tensors; None for other hooks."""
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    return hook.__closure__[names.index("grad_fns")].cell_contents if "grad_fns" in names else None


def note_hooks_of(remat: Any) -> None:
    """Notes hooks that recomputes register. See Note [Hooks over several tensors]."""
    init = graph._MultiHandle.__init__

    def __init__(self: Any, handles: tuple[Any, ...]) -> None:
        init(self, handles)
        if remat.is_recomputing():
            remat._note_hooks(handles)

    def free(noted: list[tuple[Any, ...]]) -> None:
        lists: dict[int, list[Any]] = {}
        for handles in noted:
            for handle in handles:
                hooks = handle.hooks_dict_ref()
                nodes = None if hooks is None else _nodes_of(hooks.get(handle.id))
                if nodes is not None:
                    lists[id(nodes)] = nodes  # shared by all hooks of one call
        hooks = nodes = None  # these variables must not keep the nodes
        remat._let_go(list(lists.values()))
        for nodes in lists.values():
            for position, node in enumerate(nodes):
                if node is None:
                    # A node that no backward reaches.
                    nodes[position] = torch._C._functions.UndefinedGrad()

    graph._MultiHandle.__init__ = __init__  # type: ignore[method-assign]
    remat._set_names(free_hooks=free)
