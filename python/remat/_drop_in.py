"""The drop-in: remat under torch.utils.checkpoint, for existing programs."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.utils.checkpoint as upstream

from ._arguments import checked
from ._budget import Budget, Budgeted
from ._budget import budget as make_budget
from ._extension import _remat
from ._selective import PastHooks, asks_functions, contexts_of
from ._selective import counts as _selective_counts

# Taken before anything is replaced. From 2.14 on the function that makes a region has its arguments
# apart from its options, under another name; the old form is one for others, and calls the new one.
_IS_NEWER = hasattr(upstream, "_checkpoint_without_reentrant_generator_impl")
_NAME = "_checkpoint_without_reentrant_generator" + ("_impl" if _IS_NEWER else "")
_replaced = getattr(upstream, _NAME)
_Group: Any = getattr(upstream, "GraphExecGroup", None)  # older torch has none
_enter_group: Any = getattr(_Group, "__enter__", None)
_exit_group: Any = getattr(_Group, "__exit__", None)

_lock = threading.Lock()
_num_installed = 0
_with_hooks = [0]  # calls with respect_saved_tensors_hooks and a context_fn


# ---- the function that makes a region ------------------------------------------------------------

# The settings of a region, before the function's arguments, in the extension's order.
_SETTINGS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_noop, _default = upstream.noop_context_fn, upstream._DEFAULT_DETERMINISM_MODE

# `_generator` is upstream's in the form that the extension calls, `_region` the extension's in the
# form that upstream calls.
# fmt: off
if _IS_NEWER:
    def _generator(fn: Any, *given: Any, **kwargs: Any) -> Any:
        return _replaced(fn, given[len(_SETTINGS) :], kwargs, **dict(zip(_SETTINGS, given)))

    def _region(
        fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, preserve_rng_state: bool = True,
        context_fn: Any = _noop, determinism_check: Any = _default, debug: Any = False,
        early_stop: bool = True,
        respect_saved_tensors_hooks: Optional[bool] = None,
    ) -> Any:
        if respect_saved_tensors_hooks is False and context_fn is not _noop:
            context_fn = PastHooks(context_fn)
        settings = preserve_rng_state, context_fn, determinism_check, debug, early_stop
        if respect_saved_tensors_hooks and context_fn is not _noop:
            _with_hooks[0] += is_installed()
            return _replaced(
                fn, args, kwargs, respect_saved_tensors_hooks=True,
                **dict(zip(_SETTINGS, settings)),
            )
        return _remat._region(fn, *settings, *args, **kwargs)

elif "early_stop" in inspect.signature(_replaced).parameters:
    _generator, _region = _replaced, _remat._region

else:  # before 2.8 only a switch of the process decides about the early stop
    def _generator(fn: Any, *given: Any, **kwargs: Any) -> Any:
        num_settings = len(_SETTINGS) - 1
        return _replaced(fn, *given[:num_settings], *given[num_settings + 1 :], **kwargs)

    def _region(  # type: ignore[misc]
        fn: Any, preserve_rng_state: bool = True, context_fn: Any = _noop,
        determinism_check: Any = _default,
        debug: Any = False, *args: Any, **kwargs: Any,
    ) -> Any:
        return _remat._region(fn, preserve_rng_state, context_fn, determinism_check, debug, True,
                              *args, **kwargs)
# fmt: on


def _is_called_by_upstream(name: str) -> bool:
    """Returns whether `torch.utils.checkpoint.checkpoint` calls the function of that name."""
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


# ---- the call itself -----------------------------------------------------------------------------

# `checkpoint` is a wrapper that asks the function behind it for an attribute: how to call that
# without torch.compile. The extension stands there, see its Note [The call itself], if all of it is
# as it knows it.
_DISABLED = "__dynamo_disable"
_function: Any = getattr(upstream.checkpoint, "__wrapped__", None)
_takes_calls = (
    not _IS_NEWER
    and _DISABLED in getattr(getattr(upstream.checkpoint, "__code__", None), "co_consts", ())
    and getattr(_function, "__kwdefaults__", None)
    == dict(
        use_reentrant=None, context_fn=_noop, determinism_check="default", debug=False,
        early_stop=True
    )
)
_in_upstreams_way: Any = None


def _pass_on(*args: Any, **kwargs: Any) -> Any:
    """Runs a call of `checkpoint` in upstream's own way."""
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


# ---- calls of upstream by the extension ---------------------------------------------------------


def _is_tracing() -> bool:
    """Returns whether torch.compile or make_fx traces here. Called only inside a dispatch mode."""
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
    generator=_generator, globals=upstream.__dict__, noop_context_fn=_noop,
    default_metadata=upstream._allowed_determinism_checks_to_fns[_default],
    no_metadata=upstream._allowed_determinism_checks_to_fns["none"], is_tracing=_is_tracing,
    contexts=contexts_of, debug_contexts=_debug_contexts, fingerprint=_fingerprint, leave=_leave,
    pass_on=_pass_on, replaced_name=sys.intern(_NAME), replacement=_region,
    throws="throw" in getattr(getattr(_function, "__code__", None), "co_names", ())
)

# ---- groups --------------------------------------------------------------------------------------


def _enter_both(self: Any) -> Any:
    result = _enter_group(self)
    try:
        group = _remat._open("graph_exec_group", {})
    except BaseException:
        _exit_group(self)
        raise
    self._remat_group = group
    return result


def _exit_both(self: Any, *args: Any) -> None:
    group = self.__dict__.pop("_remat_group", None)
    if group is not None:
        group.end()
    _exit_group(self, *args)


# ---- installing -------------------------------------------------------------------------------


def _replace(old: Any, new: Any) -> None:
    """Replaces the function in torch.utils.checkpoint, and in all modules that imported it."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get(_NAME) is old:
            names[_NAME] = new


_budgets: list[Optional[Budget]] = []  # one for each `install`


def _close_budgets() -> None:
    """Closes the open budgets when the interpreter ends."""
    while _budgets:
        budget = _budgets.pop()
        if budget is not None:
            budget.__exit__()


# ---- counts of calls ------------------------------------------------------------------------

_ways = (
    "regions", "re-entrant", "compiled autograd", "functorch or forward-mode AD",
    "torch.compile or make_fx",
)  # fmt: skip


class Served(NamedTuple):
    """Counts of the drop-in: how calls of `torch.utils.checkpoint` ran since the process began.

    `str` is one line."""

    regions: int
    """Calls that ran on remat. They include calls without grad mode, which are not regions."""
    passed_on: dict[str, int]
    """Calls that ran on torch's own code, by the reason. Re-entrant ones are counted before torch
    2.14 only; calls that torch.compile traces itself never get here."""
    policies: int
    """Regions whose selective context runs as a native policy."""
    modes: dict[str, int]
    """Regions that run in upstream's modes instead, by the reason."""

    def __str__(self) -> str:
        def told(number: int, reasons: dict[str, int]) -> str:
            each = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
            return f"{number} ({each})" if each else str(number)

        text = f"remat: {self.regions} calls of torch.utils.checkpoint served"
        text += f", {told(sum(self.passed_on.values()), self.passed_on)} passed on"
        if self.policies or self.modes:
            modes = told(sum(self.modes.values()), self.modes)
            text += f"; {self.policies} selective contexts as native policies, "
            text += f"{modes} in upstream's modes"
        return text


def served() -> Served:
    """Returns how the program's calls ran under `install`, and why."""
    regions, *others = _remat._calls_by_way()
    passed_on = {way: count for way, count in zip(_ways[1:], others) if count}
    if _with_hooks[0]:
        passed_on["respect_saved_tensors_hooks with a context_fn"] = _with_hooks[0]
    modes = dict(_selective_counts)
    policies = modes.pop("", 0)
    return Served(regions, passed_on, policies, modes)


def _report() -> None:
    print(served(), file=sys.stderr)


@checked
def install(
    *, native_policy_functions: bool = True, budget: Optional[Budgeted] = None, report: bool = False
) -> None:
    """Runs regions of `torch.utils.checkpoint` (use_reentrant=False) on remat from now on, in the
    whole process.

    It covers all code that imported the function before or imports it later: transformers,
    Lightning, torchtune, the wrappers of FSDP, the composable `checkpoint`,
    `checkpoint_sequential`. Re-entrant calls, calls that torch.compile traces and compiled autograd
    stay with upstream's code. Existing regions do not change. Each call needs one matching
    `uninstall`. Threads: any.

    native_policy_functions: policy functions of selective contexts that do not read operators'
        results run as native policies. False, until the last `uninstall`: all run in upstream's
        modes.
    budget: open `remat.budget(budget)` on this thread until the matching `uninstall`, which must be
        called on the same thread [bytes, or text].
    report: when the process ends, write `remat.served()` to stderr, one line.
    Raises as `remat.budget`.
    """
    global _num_installed
    if report:
        atexit.unregister(_report)
        atexit.register(_report)
    if not _reaches_upstream:
        raise RuntimeError(
            "remat.install: this version of remat does not know the torch.utils.checkpoint of "
            f"torch {torch.__version__}, so its regions would continue to run on torch's own "
            "code. Hint: call remat.checkpoint, or install a newer remat or an older torch"
        )
    opened = None if budget is None else make_budget(budget).__enter__()
    if opened is not None:
        atexit.register(_close_budgets)
    with _lock:
        _budgets.append(opened)
        _num_installed += 1
        if not native_policy_functions:
            asks_functions.clear()
        elif _num_installed == 1:
            asks_functions.set()
        if _num_installed > 1:
            return
        if _Group is not None:
            _Group.__enter__, _Group.__exit__ = _enter_both, _exit_both
        _replace(_replaced, _region)
        if _takes_calls:
            _take_calls()
        _remat._turn_drop_in(True)


def uninstall() -> None:
    """Reverts one `install`. Does nothing without one."""
    global _num_installed
    with _lock:
        if _num_installed == 0:
            return
        if _budgets and _budgets[-1] is not None:
            _budgets[-1].__exit__()
        del _budgets[-1:]
        _num_installed -= 1
        if _num_installed > 0:
            return
        asks_functions.clear()
        # code that has imported the name meanwhile gets upstream's function through it
        _remat._turn_drop_in(False)
        _replace(_region, _replaced)
        if _takes_calls:
            _leave_calls()
        if _Group is not None:
            _Group.__enter__, _Group.__exit__ = _enter_group, _exit_group


class _Inherited:
    """The object that processes started by multiprocessing inherit: unpickling it installs."""

    def __init__(self, budget: Optional[Budgeted]) -> None:
        self.budget = budget

    def __reduce__(self) -> Any:
        return _install_as, (is_installed(), self.budget)


def _install_as(is_on: bool, budget: Optional[Budgeted] = None) -> _Inherited:
    if is_on and not is_installed():
        install(budget=budget)
    return _Inherited(budget)


def install_in_children(budget: Optional[Budgeted] = None) -> None:
    """Installs in all processes that `multiprocessing` starts from now on, and in those that they
    start.

    A forked process inherits the state of this one. A process that is spawned, or forked by a
    server, receives its process object once it has imported the program. That object carries the
    configuration that processes inherit from their parent.
    """
    from multiprocessing import process

    process.current_process()._config["remat"] = _Inherited(budget)  # type: ignore[attr-defined]


def is_installed() -> bool:
    """Returns whether `torch.utils.checkpoint` runs on remat now."""
    return _num_installed > 0


@contextlib.contextmanager
@checked
def installed(
    *, native_policy_functions: bool = True, budget: Optional[Budgeted] = None
) -> Iterator[None]:
    """Calls `install` for the time of a `with`, in the whole process."""
    install(native_policy_functions=native_policy_functions, budget=budget)
    try:
        yield
    finally:
        uninstall()
