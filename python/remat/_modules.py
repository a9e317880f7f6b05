"""Modules that run as regions: `Checkpointed`, and `apply` to a tree of modules that somebody else wrote.

A module becomes a region by getting a class derived from its own, with the same name, whose `forward` is a region.
Everything else stays: the object, its place in the tree, its names, parameters, hooks and printed text.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import threading
import types as python_types
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union

import torch
import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

from ._arguments import Kind, add_kind, checked
from ._choice import ModuleChoice, Types, class_name
from ._extension import _remat

M = TypeVar("M", bound=nn.Module)

_KEY = "_remat_region"  # in a module's attributes
_BUFFERS = ("restore", "ignore", "skip_batch_norm")


class Region:
    """What a module that is a region has beyond what it is. Immutable but for the switch."""

    def __init__(
        self, options: dict[str, Any], *, training_only: bool, level: int, buffers: str, enabled: bool
    ) -> None:
        if buffers not in _BUFFERS:
            known = ", ".join(map(repr, _BUFFERS))
            raise ValueError(f"remat.Checkpointed: buffers must be one of {known}, and is {buffers!r}")
        if not isinstance(level, int) or level < 0:
            raise ValueError(
                f"remat.Checkpointed: level was {level!r}. Hint: 0 for never, 1 and up for the level that turns it on."
            )
        self.options = options
        self.training_only = training_only
        self.level = level
        self.buffers = buffers
        self.enabled = enabled
        self.plan: Any = None  # of a Sequential: see _fit.py
        self.was_called = False  # with grad mode on; what unused_regions asks
        self.native = _remat._Options({**options, "buffers": "ignore" if buffers == "ignore" else "restore"})

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copy = Region.__new__(Region)
        copy.__dict__.update(self.__dict__)
        copy.was_called = False
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("native", "was_called")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        plan = state.pop("plan")
        self.__init__(**state)  # type: ignore[misc]
        self.plan = plan


def _region_of(module: nn.Module) -> Optional[Region]:
    return module.__dict__.get(_KEY) if hasattr(type(module), "_remat_plain_class") else None


# ---- the class ----------------------------------------------------------------------------------------

_classes: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_warned: set[str] = set()


@checked
def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without regions: what `type(module) is` should be asked of."""
    found: type[nn.Module] = getattr(type(module), "_remat_plain_class", type(module))
    return found


def _is_on(module: nn.Module, region: Region) -> bool:
    return region.enabled and (module.training or not region.training_only)


def _runs_plainly(module: nn.Module, region: Region) -> bool:
    if not _is_on(module, region):
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
            f"remat: activation checkpointing is skipped for a module that contains batch norm ({name}), as "
            'buffers="skip_batch_norm" asks. buffers="restore" checkpoints it and keeps its running statistics right.',
            stacklevel=4,
        )
    return True


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
        plain_forward: Callable[..., Any] = plain.forward  # at each call: programs put others in
        if not takes_self:
            plain_forward = functools.partial(_without_self, plain_forward)
        region: Optional[Region] = self.__dict__.get(_KEY)
        if region is None:
            return plain_forward(self, *args, **kwargs)
        if _runs_plainly(self, region):
            return _remat._run_watched(plain_forward, self, *args, **kwargs)
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
    maker = (
        abc.ABCMeta if issubclass(type(plain), abc.ABCMeta) else type
    )  # past the metaclass's own code, too
    with _unnoticed(plain):
        found: Any = maker.__new__(type(plain), plain.__name__, (plain,), body)
    return found


def _without_self(function: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _reduced(plain: type[nn.Module], reduced: Any) -> Any:
    """What `pickle` and `copy` make the module of: by the plain class, which has the name that is written."""
    if isinstance(reduced, str):
        return reduced
    function, args, *rest = reduced
    args = tuple(plain if getattr(each, "_remat_plain_class", None) is plain else each for each in args)
    return (_rebuilt, (function, args), *rest)


def _rebuilt(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = function(*args)
    if isinstance(made, nn.Module):
        object.__setattr__(made, "__class__", _class_of_regions(plain_class(made)))
    return made


def _why_not(module: nn.Module) -> Optional[tuple[str, str]]:
    """(reason, cure) if the module cannot be a region."""
    from torch.nn.modules.lazy import LazyModuleMixin

    if isinstance(module, torch.jit.ScriptModule):
        return "it is a script module, whose class cannot change", "remat.checkpoint(module, ...) where it is called"
    if plain_class(module).forward is nn.Module.forward:
        return "it has no forward, so no call of it could be a region", "choose its children: name=PATH.*"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "it is a lazy module, which takes another class when it is first called", "call it once before"
    if "forward" in module.__dict__:
        return (
            "its object has a forward of its own, which goes past that of its class",
            "make it a region before that forward is put in, or remat.checkpoint(module, ...) where it is called",
        )
    return None


def _has_class_of_parametrize(module: nn.Module) -> bool:
    """Whether its class is one that torch.nn.utils.parametrize made for it: with a property for each tensor."""
    own = vars(type(module))
    return is_parametrized(module) and any(
        isinstance(own.get(name), property) for name in module.parametrizations  # type: ignore[union-attr]
    )


def _derived_anew(derived: type[Any], base: type[Any]) -> type[Any]:
    """A class like `derived`, from another base."""
    body = {name: value for name, value in vars(derived).items() if name not in ("__dict__", "__weakref__")}
    made: type[Any] = python_types.new_class(derived.__name__, (base,), {}, lambda namespace: namespace.update(body))
    return made


def _switch_on(module: nn.Module, region: Region) -> None:
    if not hasattr(type(module), "_remat_plain_class"):
        plain = type(module)
        try:
            if _has_class_of_parametrize(module):  # which parametrize changes, and takes away by its first base
                found = _derived_anew(plain, _class_of_regions(plain.__bases__[0]))
            else:
                found = _class_of_regions(plain)
            object.__setattr__(module, "__class__", found)
        except (TypeError, AttributeError) as error:
            raise TypeError(f"remat: a {class_name(module)} cannot be a region from outside: {error}") from error
    module.__dict__[_KEY] = region


def _switch_off(module: nn.Module) -> bool:
    region = _region_of(module)
    if "_remat_plain_class" in vars(type(module)):  # else another class was derived from ours: FSDP2 does
        object.__setattr__(module, "__class__", plain_class(module))
    elif _has_class_of_parametrize(module) and "_remat_plain_class" in vars(type(module).__bases__[0]):
        object.__setattr__(module, "__class__", _derived_anew(type(module), plain_class(module)))
    module.__dict__.pop(_KEY, None)
    return region is not None and region.enabled


# ---- one module ------------------------------------------------------------------------------------------


@checked
def Checkpointed(  # noqa: N802 - it stands where the name of a class does
    module: M, *, training_only: bool = True, level: int = 1, buffers: str = "restore", **options: Any
) -> M:
    """Makes each call of `module` a region, and returns it: the same object.

        self.block = remat.Checkpointed(Block(512), name="block", policy=remat.save_matmuls())

    Names, parameters, buffers, `state_dict`, hooks and printed text stay; copies and pickles are regions, too. The
    module's class becomes one that is derived from its own: `isinstance` holds, `type(module) is Block` does not
    (`remat.plain_class(module)`). Hooks of the module itself run outside of the region; those of modules in it run
    again in recomputes.

    training_only: in eval mode it runs plainly.
    level: for `set_checkpoint_level`; 0: never a region, unless `set_checkpointing` asks for it.
    buffers: "restore": a recompute sees the module's buffers as forward saw them, and puts them back: running
        statistics move once a step. "skip_batch_norm": a module that contains one runs plainly. "ignore": they
        move again.
    options: as of `checkpoint`.

    A recompute sees the training flags of the module and of all below it as forward saw them.
    Memory: as `checkpoint`. The graph keeps the module alive.
    Threads: make it a region while no forward of it runs; then any. Recomputes in several threads that restore the
    same buffers take turns.
    Raises ValueError for wrong options and what cannot be a region.
    """
    refused = _why_not(module)
    if refused is not None:
        raise ValueError(f"remat.Checkpointed: a {class_name(module)} cannot be a region: {refused[0]}. Hint: {refused[1]}.")
    region = Region(options, training_only=training_only, level=level, buffers=buffers, enabled=level > 0)
    _switch_on(module, region)
    return module


@checked
def is_checkpointed(module: nn.Module) -> bool:
    """Whether calls of the module itself are regions now, as far as its switch says."""
    region = _region_of(module)
    return region is not None and region.enabled


# ---- a tree ------------------------------------------------------------------------------------------------


class ChosenModule(NamedTuple):
    """A module of a tree that a choice meant."""

    path: str
    type: str


class RefusedModule(NamedTuple):
    """A module that cannot be made a region from outside."""

    path: str
    type: str
    reason: str
    cure: str


class Applied(NamedTuple):
    """What `apply` came to; `str` makes a line for each."""

    regions: list[ChosenModule]
    refused: list[RefusedModule]

    def __str__(self) -> str:
        lines = [f"region: {path or 'the root'} ({type})" for path, type in self.regions]
        for path, type, reason, cure in self.refused:
            lines.append(f"no region: {path or 'the root'} ({type}): {reason}. Hint: {cure}.")
        return "\n".join(lines)


Choice = Union[ModuleChoice, str, None]
add_kind(
    "Choice", Kind(lambda value: value is None or isinstance(value, (ModuleChoice, str)), "a ModuleChoice, a str or None")
)


def _choice(
    verb: str,
    choice: Choice,
    types: Types,
    names: Union[str, Iterable[str]],
    predicate: Optional[Callable[[str, nn.Module], bool]],
    every: int,
) -> ModuleChoice:
    if choice is not None:
        if types or names or predicate is not None or every != 1:
            raise ValueError(f"{verb}: either a choice or types, names, predicate and every, not both")
        return ModuleChoice.parse(choice) if isinstance(choice, str) else choice
    name = names if isinstance(names, str) else "|".join(names)
    return ModuleChoice(name=name, types=types, predicate=predicate, every=every)


@checked
def apply(
    model: nn.Module,
    choice: Choice = None,
    *,
    types: Types = (),
    names: Union[str, Iterable[str]] = (),
    predicate: Optional[Callable[[str, nn.Module], bool]] = None,
    every: int = 1,
    training_only: bool = True,
    level: int = 1,
    buffers: str = "restore",
    **options: Any,
) -> Applied:
    """Makes the chosen modules of a tree regions, as `Checkpointed` does, without a change of the model's source.

        remat.apply(model, types=Block, every=2)
        remat.apply(model, names="layers.*", policy=remat.save_matmuls())
        remat.apply(model, "every=2,name=layers.*,type=Block")   # from a configuration

    A region is named by its module's path; a `name` gets the path behind it. Doing so again changes the options, and
    no more. What cannot be a region (a ModuleList, a script module) is in `refused`, with what to do instead.
    Raises ValueError for a choice without a condition, one that fits nothing, or one that is wrong.
    Threads: no forward of the tree may run meanwhile.
    """
    verb = "remat.apply"
    chosen = _choice(verb, choice, types, names, predicate, every).chosen(model, verb)
    applied = Applied([], [])
    name = options.pop("name", "")
    ways: dict[nn.Module, Region] = {}
    for path, module in chosen:
        if module in ways:
            continue  # it has several paths, of which the first names it
        why_not = _why_not(module)
        if why_not is not None:
            reason, cure = why_not
            cure = cure.replace("PATH.*", f"{path}.*" if path else "*")
            applied.refused.append(RefusedModule(path, class_name(module), reason, cure))
            continue
        own = {**options, "name": " ".join(filter(None, (name, path)))}
        ways[module] = Region(own, training_only=training_only, level=level, buffers=buffers, enabled=True)
    paths = {module: path for path, module in reversed(chosen)}
    for module, region in ways.items():
        path, type = paths[module], class_name(module)
        try:
            _switch_on(module, region)
        except TypeError as error:
            reason = f"its class cannot change: {error.__cause__}"
            applied.refused.append(
                RefusedModule(
                    path, type, reason, "remat.checkpoint(module, ...) where it is called"
                )
            )
        else:
            applied.regions.append(ChosenModule(path, type))
    return applied


@checked
def remove(
    model: nn.Module,
    choice: Choice = None,
    *,
    types: Types = (),
    names: Union[str, Iterable[str]] = (),
    predicate: Optional[Callable[[str, nn.Module], bool]] = None,
    every: int = 1,
) -> list[ChosenModule]:
    """Ends that for the chosen modules, or for all of the tree: they have their own class again.

    Returns those that were regions. Graphs that exist still recompute.
    """
    if choice is None and not types and not names and predicate is None and every == 1:
        chosen = list(model.named_modules(remove_duplicate=False))
    else:
        verb = "remat.remove"
        chosen = _choice(verb, choice, types, names, predicate, every).chosen(model, verb)
    return [ChosenModule(path, class_name(module)) for path, module in chosen if _switch_off(module)]


@checked
def set_checkpointing(model: nn.Module, enabled: bool) -> None:
    """Switches every region in a tree of modules, the root among them."""
    for module in model.modules():
        region = _region_of(module)
        if region is not None:
            region.enabled = enabled


@checked
def set_checkpoint_level(model: nn.Module, training_level: int) -> None:
    """The same by level: on if `training_level >= level` and `level > 0`.

    Common levels: 0 none, 1 layers, 2 residual, attention and MLP blocks, 3 transformer layers, 4 stages, 5 encoders.
    """
    for module in model.modules():
        region = _region_of(module)
        if region is not None:
            region.enabled = 0 < region.level <= training_level


# ---- what is called past its region --------------------------------------------------------------------------


class UnusedRegion(NamedTuple):
    """A module that should be a region, and is called past it."""

    path: str
    """In the tree; '' is the root."""
    type: str
    reason: str
    """What was seen."""
    cure: str
    """What to write instead."""


def _leaves_below(root: torch.Tensor) -> list[torch.Tensor]:
    """Those that a backward of `root` would give gradients."""
    found: list[torch.Tensor] = []
    waiting: list[Any] = [root.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting.extend(each for each, _ in node.next_functions)
    return found


@checked
def unused_regions(model: nn.Module, result: torch.Tensor) -> list[UnusedRegion]:
    """Finds what should be a region and never was: modules below `model` that are switched on as regions, some of whose
    parameters are in the graph of `result`, and whose own call was never reached. The results are right then, and all
    memory is held. That is how a parent ends that calls a module's parts instead of the module, or
    `Block.forward(block, x)`. Ask it once, after a forward:

        for unused in remat.unused_regions(model, loss):
            print(unused.path, unused.cure)

    "Never" is since the module became a region, or since `reset_unused_regions`: a module that is called both ways is
    not found. What is switched off, or in eval mode with `training_only`, when this asks is left out. A call under
    `disable_checkpoint`, or one that "skip_batch_norm" runs plainly, counts as reached; one without grad mode does not.
    A module without parameters that require grad is never found, and one whose parameters others use, too, may be found
    though nobody called it.
    It walks the graph once, before a backward or after it. Threads: no forward of `model` may run meanwhile.
    Raises ValueError for a `result` without a graph.
    """
    if result.grad_fn is None:
        raise ValueError(
            "remat.unused_regions: the result had no graph. Cause: it does not require grad, or was computed without grad "
            "mode. Hint: pass what backward is called on."
        )
    used = {id(leaf) for leaf in _leaves_below(result)}
    found = []
    for path, module in model.named_modules():
        region = _region_of(module)
        if region is None or not _is_on(module, region) or region.was_called:
            continue
        if any(id(parameter) in used for parameter in module.parameters()):
            found.append(
                UnusedRegion(
                    path,
                    class_name(module),
                    "its parameters are in the graph, and its own call was never reached",
                    f"call the module itself ({path or 'the root'}) where its parts or its class's forward are called, or "
                    "make what is called there a region",
                )
            )
    return found


@checked
def reset_unused_regions(model: nn.Module) -> None:
    """Forgets which calls were reached, for all below `model`."""
    for module in model.modules():
        region = _region_of(module)
        if region is not None:
            region.was_called = False
