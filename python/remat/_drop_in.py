"""remat under torch.utils.checkpoint, for programs that are written already."""

from __future__ import annotations

import atexit
import contextlib
import dis
import functools
import inspect
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
import torch.utils.checkpoint as upstream

from ._arguments import checked
from ._budget import Budget, Budgeted
from ._budget import budget as make_budget
from ._extension import _remat
from ._policy import CheckpointPolicy, Policy, PolicyContext, save_ops

# Taken before anything is replaced. From 2.14 on the function that makes a region has its arguments apart from its
# options, under another name; the old form is one for others, and calls the new one.
_IS_NEWER = hasattr(upstream, "_checkpoint_without_reentrant_generator_impl")
_NAME = "_checkpoint_without_reentrant_generator" + ("_impl" if _IS_NEWER else "")
_replaced = getattr(upstream, _NAME)
_create_contexts = upstream.create_selective_checkpoint_contexts
_Group: Any = getattr(upstream, "GraphExecGroup", None)  # older torch has none
_enter_group: Any = getattr(_Group, "__enter__", None)
_exit_group: Any = getattr(_Group, "__exit__", None)

_lock = threading.Lock()
_num_installed = 0
_native_functions = False


# ---- the function that makes a region ---------------------------------------------------------------------

if _IS_NEWER:

    def _generator(
        fn: Any,
        preserve_rng_state: bool,
        context_fn: Any,
        determinism_check: Any,
        debug: Any,
        early_stop: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Upstream's, in the form that the extension calls."""
        return _replaced(
            fn,
            args,
            kwargs,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
        )

    def _region(
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_rng_state: bool = True,
        context_fn: Any = upstream.noop_context_fn,
        determinism_check: Any = upstream._DEFAULT_DETERMINISM_MODE,
        debug: Any = False,
        early_stop: bool = True,
        respect_saved_tensors_hooks: Optional[bool] = None,
    ) -> Any:
        """The extension's, in the form that upstream calls."""
        if respect_saved_tensors_hooks and context_fn is not upstream.noop_context_fn:
            return _replaced(
                fn,
                args,
                kwargs,
                preserve_rng_state=preserve_rng_state,
                context_fn=context_fn,
                determinism_check=determinism_check,
                debug=debug,
                early_stop=early_stop,
                respect_saved_tensors_hooks=True,
            )
        return _remat._region(
            fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args, **kwargs
        )

elif "early_stop" in inspect.signature(_replaced).parameters:
    _generator = _replaced
    _region = _remat._region

else:  # before 2.8 only a switch of the process decides about the early stop

    def _generator(
        fn: Any,
        preserve_rng_state: bool,
        context_fn: Any,
        determinism_check: Any,
        debug: Any,
        early_stop: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Upstream's, in the form that the extension calls."""
        return _replaced(fn, preserve_rng_state, context_fn, determinism_check, debug, *args, **kwargs)

    def _region(  # type: ignore[misc]
        fn: Any,
        preserve_rng_state: bool = True,
        context_fn: Any = upstream.noop_context_fn,
        determinism_check: Any = upstream._DEFAULT_DETERMINISM_MODE,
        debug: Any = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The extension's, in the form that upstream calls."""
        return _remat._region(fn, preserve_rng_state, context_fn, determinism_check, debug, True, *args, **kwargs)


def _is_called_by_upstream(name: str) -> bool:
    """Whether what `torch.utils.checkpoint.checkpoint` runs calls the function of that name."""
    seen: set[str] = set()
    left = ["checkpoint"]
    while left:
        function = upstream.__dict__.get(left.pop())
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        names = code.co_names if code is not None else ()
        if name in names:
            return True
        left += [each for each in names if each not in seen]
        seen.update(names)
    return False


_reaches_upstream = _is_called_by_upstream(_NAME)


# ---- the call itself -------------------------------------------------------------------------------------

# `checkpoint` is a wrapper that asks the function behind it for an attribute: how to call that without torch.compile. The
# extension stands there, see its Note [The call itself], if all of it is as it knows it.
_DISABLED = "__dynamo_disable"
_function: Any = getattr(upstream.checkpoint, "__wrapped__", None)
_takes_calls = (
    not _IS_NEWER
    and _DISABLED in getattr(getattr(upstream.checkpoint, "__code__", None), "co_consts", ())
    and getattr(_function, "__kwdefaults__", None)
    == {
        "use_reentrant": None,
        "context_fn": upstream.noop_context_fn,
        "determinism_check": "default",
        "debug": False,
        "early_stop": True,
    }
)
_in_upstreams_way: Any = None


def _pass_on(*args: Any, **kwargs: Any) -> Any:
    """Upstream's own way with a call of `checkpoint`."""
    global _in_upstreams_way
    if _in_upstreams_way is None:
        import torch._dynamo

        disable: Any = torch._dynamo.disable
        has_option = "wrapping" in inspect.signature(disable).parameters
        _in_upstreams_way = disable(_function, wrapping=False) if has_option else disable(_function)
    return _in_upstreams_way(*args, **kwargs)


def _take_calls() -> None:
    global _in_upstreams_way
    standing = _function.__dict__.get(_DISABLED)
    if standing is not _remat._checkpoint:
        _in_upstreams_way = standing or _in_upstreams_way
        _function.__dict__[_DISABLED] = _remat._checkpoint


def _leave_calls() -> None:
    if _function.__dict__.get(_DISABLED) is not _remat._checkpoint:  # somebody else stands there
        return
    if _in_upstreams_way is None:
        del _function.__dict__[_DISABLED]
    else:
        _function.__dict__[_DISABLED] = _in_upstreams_way


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


# Note [Policy functions]
# Upstream asks a policy function when the operator has run, and shows it what came out (`op_output`); the library
# asks before, so that what is let go of need not be held. A function that could look at the result therefore runs in
# upstream's modes. Which can is read off its code: one of Python's, in which the context is used for nothing but
# `is_recompute`, and never handed on. All else that it is given is the same: the operator, and its arguments as
# torch hands them to a dispatch mode. What it is not asked about are operators that only pass a value on (`alias`,
# `lift_fresh`, beside `detach`), casts of leaves that autocast caches, as those are made once a scope, and operators
# of regions inside, which have policies of their own. All that decides what is kept, and no gradient.
# Nor is it asked about operators of higher order, which upstream's modes may keep the results of. Of those a program
# runs `flex_attention` without a compiler around it, so where that was imported functions run in upstream's modes.

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FRAMES = frozenset(("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"))


@functools.lru_cache(maxsize=1000)
def _looks_at_results(code: types.CodeType, position: int) -> bool:
    """Whether a function may use its argument at `position`, a context of upstream's, for more than `is_recompute`."""
    if position >= code.co_argcount or code.co_flags & _SUSPENDS:
        return True
    name = code.co_varnames[position]
    if name in code.co_cellvars or not _FRAMES.isdisjoint(code.co_names):
        return True
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG")]
    for this, following in zip(instructions, instructions[1:]):
        names = this.argval if isinstance(this.argval, tuple) else (this.argval,)
        if name not in names or "FAST" not in this.opname:
            continue
        is_attribute = following.opname == "LOAD_ATTR" and following.argval == "is_recompute"
        if len(names) > 1 or not this.opname.startswith("LOAD_FAST") or not is_attribute:
            return True
    return False


def _may_be_asked_before(function: Any) -> bool:
    """See Note [Policy functions]."""
    if not _native_functions or "torch.nn.attention.flex_attention" in sys.modules:
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
    return type(function) is types.FunctionType and not _looks_at_results(function.__code__, position)


class _Asking:
    """A policy function of upstream's as the library asks it; and the context around forward, after which nobody asks
    any more: a graph shall not keep the function, which may keep tensors of the graph."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function: Optional[Callable[..., Any]] = function

    def __call__(self, question: PolicyContext) -> Any:
        if question.name or self.function is None:  # names are remat's own
            return CheckpointPolicy.PREFER_RECOMPUTE
        args, kwargs = question._call_of()
        context = upstream.SelectiveCheckpointContext(is_recompute=False)
        answer = self.function(context, question.op, *args, **kwargs)
        return answer if isinstance(answer, (bool, CheckpointPolicy)) else CheckpointPolicy.PREFER_RECOMPUTE

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *error: object) -> None:
        self.function = None


def _native(function_or_ops: Any, allow_mutation: bool) -> Optional[tuple[Any, Any, Any]]:
    """(policy, forward context, recompute context) that do the same as upstream's modes; None if there are none."""
    if callable(function_or_ops):
        if not _may_be_asked_before(function_or_ops):
            return None
        asking = _Asking(function_or_ops)
        return Policy(asking, allow_cache_entry_mutation=allow_mutation), asking, None
    policy = _policy_of(function_or_ops, allow_mutation)
    return None if policy is None else (policy, None, None)


def _source_of(forward: Any, recompute: Any) -> Any:
    """The list or the function that upstream's two modes were made of, or None."""
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
    return function.__closure__[function.__code__.co_freevars.index("policy_fn_or_list")].cell_contents


def _contexts(context_fn: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """(policy, forward context, recompute context) of a region; None for what it does not have."""
    if type(context_fn) is functools.partial and context_fn.func is _create_contexts:
        found = _native_of_partial(context_fn)
        if found is not None:
            return found
    forward, recompute = context_fn()
    source = _source_of(forward, recompute)
    if source is not None:
        found = _native(source, bool(recompute.allow_cache_entry_mutation))
        if found is not None:
            return found
    if type(forward) is contextlib.nullcontext:
        forward = None
    if type(recompute) is contextlib.nullcontext:
        recompute = None
    return None, forward, recompute


def _native_of_partial(context_fn: functools.partial[Any]) -> Optional[tuple[Any, Any, Any]]:
    args, keywords = context_fn.args, context_fn.keywords
    if len(args) == 1 and not keywords:
        return _native(args[0], False)
    if len(args) == 2 and not keywords:
        return _native(args[0], bool(args[1]))
    if len(args) == 1 and list(keywords) == ["allow_cache_entry_mutation"]:
        return _native(args[0], bool(keywords["allow_cache_entry_mutation"]))
    return None


# ---- what the extension asks of upstream ------------------------------------------------------------------


def _is_tracing() -> bool:
    """Whether torch.compile or make_fx traces here: asked only while a dispatch mode is on."""
    is_non_strict = getattr(torch.compiler, "_is_non_strict_tracing", None)  # LibTorch 2.12
    if is_non_strict is not None and is_non_strict():
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
        "pass_on": _pass_on,
        "replaced_name": sys.intern(_NAME),
        "replacement": _region,
        "throws": "throw" in getattr(getattr(_function, "__code__", None), "co_names", ()),
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


_budgets: list[Optional[Budget]] = []  # one for each `install`


def _close_budgets() -> None:
    """Closes what is open when the interpreter ends."""
    while _budgets:
        budget = _budgets.pop()
        if budget is not None:
            budget.__exit__()


@checked
def install(*, native_policy_functions: bool = True, budget: Optional[Budgeted] = None) -> None:
    """From now on, regions of `torch.utils.checkpoint` (use_reentrant=False) run on remat, in the whole process.

    That holds for whoever imported it before or imports it later: transformers, Lightning, torchtune, the wrappers
    of FSDP, the composable `checkpoint`, `checkpoint_sequential`. Re-entrant calls, calls that torch.compile traces
    and compiled autograd stay with upstream's code. Regions that are alive stay what they are. Each call asks for
    one `uninstall`. Threads: any.

    native_policy_functions: policy functions of selective contexts that do not look at operators' results run as
        native policies. False, until the last `uninstall`: all run in upstream's modes.
    budget: open `remat.budget(budget)` on this thread until the matching `uninstall`, which must be
        called on the same thread [bytes, or text].
    Raises as `remat.budget`.
    """
    global _num_installed, _native_functions
    if not _reaches_upstream:
        raise RuntimeError(
            f"remat.install: torch {torch.__version__} makes the regions of torch.utils.checkpoint in a way that this "
            f"remat does not know, so that they would go on to run on torch's own code. Hint: call remat.checkpoint, or "
            f"take a newer remat or an older torch"
        )
    opened = None if budget is None else make_budget(budget).__enter__()
    if opened is not None:
        atexit.register(_close_budgets)
    with _lock:
        _budgets.append(opened)
        _num_installed += 1
        _native_functions = native_policy_functions and (_native_functions or _num_installed == 1)
        if _num_installed > 1:
            return
        if _Group is not None:
            _Group.__enter__, _Group.__exit__ = _enter_both, _exit_both
        _replace(_replaced, _region)
        if _takes_calls:
            _take_calls()
        _remat._turn_drop_in(True)


def uninstall() -> None:
    """Takes one `install` back. Does nothing where there is none."""
    global _num_installed, _native_functions
    with _lock:
        if _num_installed == 0:
            return
        if _budgets and _budgets[-1] is not None:
            _budgets[-1].__exit__()
        del _budgets[-1:]
        _num_installed -= 1
        if _num_installed > 0:
            return
        _native_functions = False
        _remat._turn_drop_in(False)  # who has imported the name meanwhile gets upstream's code through it
        _replace(_region, _replaced)
        if _takes_calls:
            _leave_calls()
        if _Group is not None:
            _Group.__enter__, _Group.__exit__ = _enter_group, _exit_group


class _Inherited:
    """What the processes that this one starts by multiprocessing inherit: made again there, it installs."""

    def __init__(self, budget: Optional[Budgeted]) -> None:
        self.budget = budget

    def __reduce__(self) -> Any:
        return _install_as, (is_installed(), self.budget)


def _install_as(is_on: bool, budget: Optional[Budgeted] = None) -> _Inherited:
    if is_on and not is_installed():
        install(budget=budget)
    return _Inherited(budget)


def install_in_children(budget: Optional[Budgeted] = None) -> None:
    """Installs in all processes that `multiprocessing` starts from now on, and in those that they start.

    A forked one has what this one has. To one that is spawned, or forked by a server, its process object is sent, once it
    has imported the program; with what is in the configuration that processes inherit from the one that makes them.
    """
    from multiprocessing import process

    process.current_process()._config["remat"] = _Inherited(budget)  # type: ignore[attr-defined]


def is_installed() -> bool:
    """Whether `torch.utils.checkpoint` runs on remat now."""
    return _num_installed > 0


@contextlib.contextmanager
@checked
def installed(
    *, native_policy_functions: bool = True, budget: Optional[Budgeted] = None
) -> Iterator[None]:
    """`install` for the time of a `with`, in the whole process."""
    install(native_policy_functions=native_policy_functions, budget=budget)
    try:
        yield
    finally:
        uninstall()
