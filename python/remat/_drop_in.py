"""remat under torch.utils.checkpoint, for programs that are written already."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
import torch.utils.checkpoint as upstream

from ._extension import _remat
from ._policy import Policy, save_ops

# Taken before anything is replaced.
_generator = upstream._checkpoint_without_reentrant_generator
_create_contexts = upstream.create_selective_checkpoint_contexts
_enter_group = upstream.GraphExecGroup.__enter__
_exit_group = upstream.GraphExecGroup.__exit__

_NAME = "_checkpoint_without_reentrant_generator"
_lock = threading.Lock()
_num_installed = 0


# ---- selective contexts ---------------------------------------------------------------------------------

# The policy function that upstream makes of a list is known by its code; the list is in its closure.
_code_of_lists = next(
    constant
    for constant in _create_contexts.__code__.co_consts
    if getattr(constant, "co_name", "") == "policy_fn"
)
_policies: dict[tuple[Any, ...], Optional[Policy]] = {}


def _policy_of(ops: Any, allow_mutation: bool) -> Optional[Policy]:
    """The native policy that keeps these operators; None where it would not do the same as upstream's modes."""
    if type(ops) is not list:
        return None
    key = (bool(allow_mutation), *ops)
    if key in _policies:
        return _policies[key]
    policy = None
    if all(type(op) is torch._ops.OpOverload for op in ops):
        policy = save_ops(ops, allow_cache_entry_mutation=bool(allow_mutation))
    if len(_policies) > 1000:
        _policies.clear()
    _policies[key] = policy
    return policy


def _list_of(forward: Any, recompute: Any) -> Any:
    """The list that upstream's two modes were made of, or None."""
    if (
        type(forward) is not upstream._CachingTorchDispatchMode
        or type(recompute) is not upstream._CachedTorchDispatchMode
        or forward.storage is not recompute.storage
    ):
        return None
    function = forward.policy_fn
    if getattr(function, "__code__", None) is not _code_of_lists:
        return None
    return function.__closure__[function.__code__.co_freevars.index("policy_fn_or_list")].cell_contents


def _contexts(context_fn: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """(policy, forward context, recompute context) of a region; None for what it does not have."""
    if type(context_fn) is functools.partial and context_fn.func is _create_contexts:
        policy = _policy_of_partial(context_fn)
        if policy is not None:
            return policy, None, None
    forward, recompute = context_fn()
    ops = _list_of(forward, recompute)
    if ops is not None:
        policy = _policy_of(ops, recompute.allow_cache_entry_mutation)
        if policy is not None:
            return policy, None, None
    if type(forward) is contextlib.nullcontext:
        forward = None
    if type(recompute) is contextlib.nullcontext:
        recompute = None
    return None, forward, recompute


def _policy_of_partial(context_fn: functools.partial[Any]) -> Optional[Policy]:
    args, keywords = context_fn.args, context_fn.keywords
    if len(args) == 1 and not keywords:
        return _policy_of(args[0], False)
    if len(args) == 2 and not keywords:
        return _policy_of(args[0], args[1])
    if len(args) == 1 and list(keywords) == ["allow_cache_entry_mutation"]:
        return _policy_of(args[0], keywords["allow_cache_entry_mutation"])
    return None


# ---- what the extension asks of upstream ------------------------------------------------------------------


def _is_tracing() -> bool:
    """Whether torch.compile or make_fx traces here: asked only while a dispatch mode is on."""
    if torch.compiler._is_non_strict_tracing():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _debug_contexts() -> tuple[Any, Any, Any]:
    context_fn, on_error = upstream._get_debug_context_and_cb()
    forward, recompute = context_fn()
    return forward, recompute, on_error


def _fingerprint(metadata_fn: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> str:
    return repr(metadata_fn(tensor))


def _leave(context: Any, error: Optional[BaseException]) -> bool:
    if error is None:
        type(context).__exit__(context, None, None, None)
        return False
    return bool(type(context).__exit__(context, type(error), error, error.__traceback__))


_remat._set_upstream(
    {
        "generator": _generator,
        "globals": upstream.__dict__,
        "noop_context_fn": upstream.noop_context_fn,
        "default_metadata": upstream._allowed_determinism_checks_to_fns[upstream._DEFAULT_DETERMINISM_MODE],
        "no_metadata": upstream._allowed_determinism_checks_to_fns["none"],
        "is_tracing": _is_tracing,
        "contexts": _contexts,
        "debug_contexts": _debug_contexts,
        "fingerprint": _fingerprint,
        "leave": _leave,
    }
)

# ---- groups ------------------------------------------------------------------------------------------------


def _enter_both(self: Any) -> Any:
    result = _enter_group(self)
    group = _remat.GraphExecGroup()
    try:
        group.__enter__()
    except BaseException:
        _exit_group(self)
        raise
    self._remat_group = group
    return result


def _exit_both(self: Any, *args: Any) -> None:
    group = self.__dict__.pop("_remat_group", None)
    if group is not None:
        group.__exit__(*args)
    _exit_group(self, *args)


# ---- putting it in -------------------------------------------------------------------------------------------


def _replace(old: Any, new: Any) -> None:
    """In torch.utils.checkpoint, and wherever the name was imported from it."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get(_NAME) is old:
            names[_NAME] = new


def install() -> None:
    """From now on, regions of `torch.utils.checkpoint` (use_reentrant=False) run on remat, in the whole process.

    That holds for whoever imported it before or imports it later: transformers, Lightning, torchtune, the wrappers
    of FSDP, the composable `checkpoint`, `checkpoint_sequential`. Re-entrant calls, calls that torch.compile traces
    and compiled autograd stay with upstream's code. Regions that are alive stay what they are. Each call asks for
    one `uninstall`. Threads: any.
    """
    global _num_installed
    with _lock:
        _num_installed += 1
        if _num_installed > 1:
            return
        upstream.GraphExecGroup.__enter__ = _enter_both  # type: ignore[method-assign]
        upstream.GraphExecGroup.__exit__ = _exit_both  # type: ignore[method-assign]
        _replace(_generator, _remat._region)
        _remat._turn_drop_in(True)


def uninstall() -> None:
    """Takes one `install` back. Does nothing where there is none."""
    global _num_installed
    with _lock:
        if _num_installed == 0:
            return
        _num_installed -= 1
        if _num_installed > 0:
            return
        _remat._turn_drop_in(False)  # who has imported the name meanwhile gets upstream's code through it
        _replace(_remat._region, _generator)
        upstream.GraphExecGroup.__enter__ = _enter_group  # type: ignore[method-assign]
        upstream.GraphExecGroup.__exit__ = _exit_group  # type: ignore[method-assign]


def is_installed() -> bool:
    """Whether `torch.utils.checkpoint` runs on remat now."""
    return _num_installed > 0


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for the time of a `with`, in the whole process."""
    install()
    try:
        yield
    finally:
        uninstall()
