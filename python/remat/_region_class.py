"""The class that a module gets when it becomes a region: derived from its own, with the same name,
whose `forward` is a region."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import threading
import types as python_types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

from ._arguments import checked
from ._choice import class_name
from ._extension import _remat

_KEY = "_remat_region"  # in a module's attributes
_BUFFERS = ("restore", "ignore", "skip_batch_norm")


class Region:
    """The options, switch and plan of a region. Immutable but for switch and plan."""

    def __init__(
        self, options: dict[str, Any], *, training_only: bool, level: int, buffers: str,
        enabled: bool
    ) -> None:
        if buffers not in _BUFFERS:
            known = ", ".join(map(repr, _BUFFERS))
            raise ValueError(f"remat.Checkpointed: buffers must be one of {known}, got {buffers!r}")
        if not isinstance(level, int) or level < 0:
            raise ValueError(
                f"remat.Checkpointed: level was {level!r}. Hint: set 0 for never, or the "
                "checkpoint level from which the module is a region (1 or more)."
            )
        self.options = options
        self.training_only = training_only
        self.level = level
        self.buffers = buffers
        self.enabled = enabled
        self.plan: Any = None  # the plan of a Sequential: see _fit.py
        self.was_called = False  # with grad mode on; read by unused_regions
        self.native = _remat._Options(
            {**options, "buffers": "ignore" if buffers == "ignore" else "restore"}
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copy = Region.__new__(Region)
        copy.__dict__.update(self.__dict__)
        copy.was_called = False
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("native", "was_called")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        plan = state.pop("plan")
        self.__init__(**state)  # type: ignore[misc]
        self.plan = plan


def region_of(module: nn.Module) -> Optional[Region]:
    return module.__dict__.get(_KEY) if hasattr(type(module), "_remat_plain_class") else None


def regions_below(model: nn.Module) -> list[Region]:
    return [region for each in model.modules() if (region := region_of(each)) is not None]


_classes: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_warned: set[str] = set()
_warned_in_eval: set[str] = set()


@checked
def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module without regions, for tests such as `type(module) is Block`."""
    found: type[nn.Module] = getattr(type(module), "_remat_plain_class", type(module))
    return found


def is_on(module: nn.Module, region: Region) -> bool:
    return region.enabled and (module.training or not region.training_only)


def _runs_plainly(module: nn.Module, region: Region) -> bool:
    if not is_on(module, region):
        return True
    if not region.was_called and torch.is_grad_enabled():
        region.was_called = True
    return region.buffers == "skip_batch_norm" and _skips(module)


def _skips(module: nn.Module) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    if not any(isinstance(each, _BatchNorm) for each in module.modules()):
        return False
    name = class_name(module)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            "remat: activation checkpointing is skipped for a module that contains batch norm "
            f'({name}), as buffers="skip_batch_norm" asks. buffers="restore" checkpoints it and '
            "keeps its running statistics right.",
            stacklevel=4,
        )
    return True


def _watch_result(module: nn.Module, result: Any) -> None:
    """Warns, once for each class, when a backward reaches a module that was off in eval mode."""
    name = class_name(module)
    if name in _warned_in_eval or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if _remat.is_checkpointing_disabled() or _remat.is_checkpointing() or _remat.is_recomputing():
        return

    def warn(gradients: Any) -> None:
        if name not in _warned_in_eval:
            _warned_in_eval.add(name)
            warnings.warn(
                f"remat: a backward went through a {name} in eval mode, which ran without a "
                "region: everything that autograd saved in it was kept. Hint: training_only=False, "
                "if its gradients are wanted in eval mode (forces, for example).",
                stacklevel=2,
            )

    for each in torch.utils._pytree.tree_leaves(result):
        if isinstance(each, torch.Tensor) and each.grad_fn is not None:
            each.grad_fn.register_prehook(warn)


def _class_of_regions(plain: type[nn.Module]) -> type[nn.Module]:
    with _lock:
        known = _classes.get(plain)
        found: Optional[type[nn.Module]] = known() if known is not None else None
        if found is None:
            found = _make_class(plain)
            _classes[plain] = weakref.ref(found)
        return found


@contextlib.contextmanager
def _unnoticed(plain: Any) -> Iterator[None]:
    """Suspends the class's `__init_subclass__` on this thread: a registry of subclasses does not
    see the new one, and no keywords are required of it."""
    if not hasattr(plain.__init_subclass__, "__func__"):  # object's own
        yield
        return
    own, owner = vars(plain).get("__init_subclass__"), threading.get_ident()

    def heard(cls: Any, /, **keywords: Any) -> None:
        if threading.get_ident() != owner:
            (super(plain, cls).__init_subclass__ if own is None else own.__get__(None, cls))(
                **keywords
            )

    type.__setattr__(plain, "__init_subclass__", classmethod(heard))
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(plain, "__init_subclass__")
        else:
            type.__setattr__(plain, "__init_subclass__", own)


def _make_class(plain: Any) -> Any:
    own = inspect.getattr_static(plain, "forward")
    takes_self = hasattr(type(own), "__get__") and not isinstance(own, (staticmethod, classmethod))

    @functools.wraps(plain.forward)
    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain_forward: Callable[..., Any] = plain.forward  # at each call: programs may replace it
        if not takes_self:
            plain_forward = functools.partial(_without_self, plain_forward)
        region: Optional[Region] = self.__dict__.get(_KEY)
        if region is None:
            return plain_forward(self, *args, **kwargs)
        if _runs_plainly(self, region):
            result = _remat._run_watched(plain_forward, self, *args, **kwargs)
            if region.enabled and not is_on(self, region):
                _watch_result(self, result)
            return result
        if region.plan is not None:
            return region.plan.run(self, *args, **kwargs)
        return _remat._run_module(region.native, plain_forward, self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _reduced(plain, super(found, self).__reduce_ex__(protocol))

    body = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__reduce_ex__": __reduce_ex__,
        "_remat_plain_class": plain,
        "forward": forward,
    }
    # past the metaclass's own code, too
    maker = abc.ABCMeta if issubclass(type(plain), abc.ABCMeta) else type
    with _unnoticed(plain):
        found: Any = maker.__new__(type(plain), plain.__name__, (plain,), body)
    return found


def _without_self(function: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _reduced(plain: type[nn.Module], reduced: Any) -> Any:
    """Returns the reduction for `pickle` and `copy`, which names the plain class."""
    if isinstance(reduced, str):
        return reduced
    function, args, *rest = reduced
    args = tuple(
        plain if getattr(each, "_remat_plain_class", None) is plain else each for each in args
    )
    return (_rebuilt, (function, args), *rest)


def _rebuilt(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = function(*args)
    if isinstance(made, nn.Module):
        object.__setattr__(made, "__class__", _class_of_regions(plain_class(made)))
    return made


def reason_against(module: nn.Module) -> Optional[tuple[str, str]]:
    """Returns (reason, cure) if the module cannot be a region, otherwise None."""
    from torch.nn.modules.lazy import LazyModuleMixin

    if isinstance(module, torch.jit.ScriptModule):
        return (
            "it is a script module, whose class cannot change", "call remat.checkpoint(module, ...)"
        )
    if plain_class(module).forward is nn.Module.forward:
        return "it has no forward, so it cannot be a region", "choose its children: name=PATH.*"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return (
            "it is a lazy module, which changes its class in its first call", "call it once before"
        )
    if "forward" in module.__dict__:
        return (
            "the object has its own forward, which replaces that of its class",
            "make it a region before that forward is assigned, or call remat.checkpoint(module, "
            "...)",
        )
    return None


def _has_class_of_parametrize(module: nn.Module) -> bool:
    """Returns whether parametrize made the module's class, with a property for each tensor."""
    own = vars(type(module))
    return is_parametrized(module) and any(
        isinstance(own.get(name), property)
        for name in module.parametrizations  # type: ignore[union-attr]
    )


def _derived_anew(derived: type[Any], base: type[Any]) -> type[Any]:
    """Returns a class like `derived`, from another base."""
    body = {
        name: value
        for name, value in vars(derived).items()
        if name not in ("__dict__", "__weakref__")
    }
    made: type[Any] = python_types.new_class(
        derived.__name__, (base,), {}, lambda namespace: namespace.update(body)
    )
    return made


def switch_on(module: nn.Module, region: Region) -> None:
    if not hasattr(type(module), "_remat_plain_class"):
        plain = type(module)
        try:
            # parametrize changes this class, and removes it through its first base
            if _has_class_of_parametrize(module):
                found = _derived_anew(plain, _class_of_regions(plain.__bases__[0]))
            else:
                found = _class_of_regions(plain)
            object.__setattr__(module, "__class__", found)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"remat: a {class_name(module)} cannot be a region from outside: {error}"
            ) from error
    module.__dict__[_KEY] = region


def switch_off(module: nn.Module) -> bool:
    region = region_of(module)
    # otherwise another class was derived from ours, as by FSDP2
    if "_remat_plain_class" in vars(type(module)):
        object.__setattr__(module, "__class__", plain_class(module))
    elif _has_class_of_parametrize(module) and "_remat_plain_class" in vars(
        type(module).__bases__[0]
    ):
        object.__setattr__(module, "__class__", _derived_anew(type(module), plain_class(module)))
    module.__dict__.pop(_KEY, None)
    return region is not None and region.enabled
