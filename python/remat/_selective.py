"""Selective contexts of torch.utils.checkpoint as native policies of the same effect."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import threading
import types
import warnings
from typing import Any, Callable, Optional

import torch
import torch.utils.checkpoint as upstream

from ._policy import CheckpointPolicy, Policy, save_ops
from ._remat import PolicyContext

_create_contexts = upstream.create_selective_checkpoint_contexts
counts: dict[str, int] = {}
"""Counts of regions with a selective context: under "" those with a native policy, otherwise by the
reason for running upstream's modes."""


def _count(reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1


asks_functions = threading.Event()
"""A switch; if set, policy functions that do not look at results run as native policies."""

# The policy function that upstream makes of a list is known by its code; the list is in its
# closure.
_code_of_lists = next(
    constant
    for constant in _create_contexts.__code__.co_consts
    if getattr(constant, "co_name", "") == "policy_fn"
)
_policies: dict[tuple[Any, ...], Optional[Policy]] = {}

# Operators that upstream's modes ignore. A program may add some: those run again in recomputes, and
# no policy is asked. Policies are never asked here about upstream's own; if a program removes one
# of these, upstream's modes run.
_ignored_at_first = frozenset(getattr(upstream, "SAC_IGNORED_OPS", ()))
_own_ignored = {torch.ops.aten.detach.default, torch.ops.prim.device.default}
_functional: Any = torch._subclasses.functional_tensor.FunctionalTensor
_own_ignored.update(getattr(_functional, "metadata_fns", ()))


def _added_ignored() -> Any:
    return upstream.SAC_IGNORED_OPS - _own_ignored if hasattr(upstream, "SAC_IGNORED_OPS") else ()


def _policy_of(ops: Any, allow_mutation: bool) -> Optional[Policy]:
    """Returns the native policy that keeps these operators; None if upstream's modes would
    differ."""
    if type(ops) is not list:
        return None
    added = _added_ignored()
    if added:
        ops = [op for op in ops if op not in added]
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


# Note [Policy functions] Upstream calls a policy function when the operator has run, and shows it
# the result (`op_output`); the library calls it before, so that dropped results need not be held. A
# function that could look at the result therefore runs in upstream's modes. The function's code
# decides: it must be a Python function that uses the context for nothing but `is_recompute`, and
# never passes it on. All its other arguments are the same: the operator, and its arguments in the
# form that torch passes to a dispatch mode. The library does not call it for operators that only
# pass a value on (`alias`, `lift_fresh`, beside `detach`). It does not call it for casts of leaves
# that autocast caches, as those are made once a scope, or for operators of inner regions, which
# have their own policies. These differences concern only the kept results, and no gradient. The
# library does not call it for operators of higher order either, whose results upstream's modes may
# keep. Of those a program runs `flex_attention` without a compiler around it. So functions run in
# upstream's modes once that was imported.

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FRAMES = frozenset(("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"))


@functools.lru_cache(maxsize=1000)
def _looks_at_results(code: types.CodeType, position: int) -> bool:
    """Returns whether a function may use its argument at `position`, a context of upstream, for
    more than `is_recompute`."""
    if position >= code.co_argcount or code.co_flags & _SUSPENDS:
        return True
    name = code.co_varnames[position]
    if name in code.co_cellvars or not _FRAMES.isdisjoint(code.co_names):
        return True
    instructions = [
        each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG")
    ]
    for this, following in zip(instructions, instructions[1:]):
        names = this.argval if isinstance(this.argval, tuple) else (this.argval,)
        if name not in names or "FAST" not in this.opname:
            continue
        is_attribute = following.opname == "LOAD_ATTR" and following.argval == "is_recompute"
        if len(names) > 1 or not this.opname.startswith("LOAD_FAST") or not is_attribute:
            return True
    return False


def _may_be_asked_before(function: Any) -> bool:
    """Returns whether the function may be called first. See Note [Policy functions]."""
    if not asks_functions.is_set() or "torch.nn.attention.flex_attention" in sys.modules:
        return False
    position = 0
    while True:
        if type(function) is functools.partial:
            position += len(function.args)
            function = function.func
        elif type(function) is types.MethodType:
            position += 1
            function = function.__func__
        else:
            break
    return type(function) is types.FunctionType and not _looks_at_results(
        function.__code__, position
    )


class _Asking:
    """A policy function of upstream in the form that the library calls, and the context around
    forward. The context's end releases the function: a graph must not keep it, since it may keep
    tensors of the graph."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Optional[Callable[..., Any]] = function

    def __call__(self, question: PolicyContext) -> Any:
        if question.name or self.function is None:  # names are remat's own
            return CheckpointPolicy.PREFER_RECOMPUTE
        if question.op in _added_ignored():
            return CheckpointPolicy.PREFER_RECOMPUTE
        args, kwargs = question._call_of()
        context = upstream.SelectiveCheckpointContext(is_recompute=False)
        answer = self.function(context, question.op, *args, **kwargs)
        return (
            answer
            if isinstance(answer, (bool, CheckpointPolicy))
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *error: object) -> None:
        self.function = None


def _native(function_or_ops: Any, allow_mutation: bool) -> Any:
    """Returns (policy, forward context, recompute context) with the effect of upstream's modes; or
    the reason why there are none."""
    if not _ignored_at_first <= getattr(upstream, "SAC_IGNORED_OPS", _ignored_at_first):
        return "SAC_IGNORED_OPS lacks an operator"
    if callable(function_or_ops):
        if not _may_be_asked_before(function_or_ops):
            return "its function may look at results"
        asking = _Asking(function_or_ops)
        return Policy(asking, allow_cache_entry_mutation=allow_mutation), asking, None
    policy = _policy_of(function_or_ops, allow_mutation)
    return "it is no list of operators" if policy is None else (policy, None, None)


def _source_of(forward: Any, recompute: Any) -> Any:
    """Returns the list or the function from which upstream's two modes were made, or None."""
    if (
        type(forward) is not upstream._CachingTorchDispatchMode
        or type(recompute) is not upstream._CachedTorchDispatchMode
        or forward.storage is not recompute.storage
        or forward.storage
    ):
        return None
    function = forward.policy_fn
    if getattr(function, "__code__", None) is not _code_of_lists:
        return function
    return function.__closure__[
        function.__code__.co_freevars.index("policy_fn_or_list")
    ].cell_contents


# From torch 2.14 on, upstream's mode warns if it keeps a tensor past the user's hooks around,
# unless the call chooses one behavior. A native policy warns as the region begins, with the mode's
# text.
_HOOKS_TEXT = next(
    (
        constant
        for constant in upstream._CachingTorchDispatchMode.__torch_dispatch__.__code__.co_consts
        if isinstance(constant, str) and "respect_saved_tensors_hooks" in constant
    ),
    None,
)


class PastHooks:
    """A context_fn whose call had `respect_saved_tensors_hooks=False`."""

    def __init__(self, context_fn: Callable[[], Any]) -> None:
        self.context_fn = context_fn

    def __call__(self) -> Any:
        contexts = self.context_fn()
        if isinstance(contexts[0], upstream._CachingTorchDispatchMode):
            contexts[0].respect_saved_tensors_hooks = False
        return contexts


def _warn_of_hooks(context_fn: Any) -> None:
    if _HOOKS_TEXT is None or isinstance(context_fn, PastHooks):
        return
    if upstream._current_user_saved_tensors_hooks() is not None:
        warnings.warn(_HOOKS_TEXT, FutureWarning, stacklevel=3)


def contexts_of(context_fn: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Returns (policy, forward context, recompute context) of a region, None for an absent one."""
    found: Any = None
    if type(context_fn) is functools.partial and context_fn.func is _create_contexts:
        found = _native_of_partial(context_fn)
    if type(found) is tuple:
        _warn_of_hooks(context_fn)
        _count("")
        return found
    forward, recompute = context_fn()
    source = _source_of(forward, recompute)
    if source is not None:
        found = _native(source, bool(recompute.allow_cache_entry_mutation))
        if type(found) is tuple:
            _warn_of_hooks(context_fn)
            _count("")
            return found
        _count(found)
    elif isinstance(forward, upstream._CachingTorchDispatchMode):
        _count("its modes are of a class of the program's")
    if type(forward) is contextlib.nullcontext:
        forward = None
    if type(recompute) is contextlib.nullcontext:
        recompute = None
    return None, forward, recompute


def _native_of_partial(context_fn: functools.partial[Any]) -> Any:
    args, keywords = context_fn.args, context_fn.keywords
    if len(args) == 1 and list(keywords) in ([], ["allow_cache_entry_mutation"]):
        return _native(args[0], bool(keywords.get("allow_cache_entry_mutation")))
    if len(args) == 2 and not keywords:
        return _native(args[0], bool(args[1]))
    return None
