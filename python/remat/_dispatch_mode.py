"""The library's dispatch mode as Python code sees it, while a region with a policy runs."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class SeesOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that operators never reach: the library handles them before, natively. It gets calls
    that torch sends to the topmost mode without the dispatcher: operators of higher order, and
    methods of tensor classes. Such a call runs unchanged, with the mode off, in forward and in
    recomputes alike: no result of it is kept."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:
        return "<the dispatch mode of remat's policies>"
