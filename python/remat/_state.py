"""State of modules around a measurement: stages that are measured leave no changes behind.

While they run, each tensor that a module holds and does not learn is a copy. Afterwards
attributes of modules, and the lists, dictionaries and sets in them, have their old contents.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, Callable, Optional

import torch
import torch.nn as nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ._region_class import Region

_DICTIONARIES = (dict, collections.OrderedDict, collections.defaultdict)
_FUNCTIONS = (functools.partial, types.MethodType, types.FunctionType)
_LISTS = (list, set, collections.deque)


@contextlib.contextmanager
def state_kept(stages: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Restores the stages' modules, and the generators that these hold, at the end."""
    state = _State()
    try:
        for stage in stages:
            state.add_stage(stage)
        state.copy_tensors()
        yield
    finally:
        state.put_back()


def _values_of(function: Any) -> list[Any]:
    """Returns the objects that a function uses: its object, arguments, closure, named globals."""
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, types.MethodType):
        return [function.__self__, function.__func__]
    if not isinstance(function, types.FunctionType):
        return []
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty as yet
            values.append(cell.cell_contents)
    known = function.__globals__
    for name in function.__code__.co_names:
        value = known.get(name)
        # Functions of other files are not looked into.
        if not isinstance(value, types.FunctionType) or value.__globals__ is known:
            values.append(value)
    return values


class _State:
    def __init__(self) -> None:
        self._noted: dict[int, tuple[Any, Any]] = {}  # containers by address, with their contents
        self._seen: dict[int, Any] = {}  # modules, functions, generators; alive, as containers are
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._script_buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._learned: set[Any] = set()  # storages of parameters
        self._storages: dict[Any, Any] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add_stage(self, stage: Any) -> None:
        if not isinstance(stage, (nn.Module, type, *_FUNCTIONS)):
            self._add([getattr(stage, "__dict__", None)])
        self._add_used(stage, True)

    def _add_used(self, value: Any, is_stage: bool) -> None:
        """Adds the modules and generators that a value is, holds or calls."""
        if isinstance(value, (nn.Module, torch.Generator)):
            self._add([value])
        elif isinstance(value, (list, tuple)):
            self._add([each for each in value if isinstance(each, nn.Module)])
        elif is_stage or isinstance(value, _FUNCTIONS):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                for each in _values_of(value):
                    self._add_used(each, False)

    def _add(self, waiting: list[Any]) -> None:
        while waiting:
            value = waiting.pop()
            if id(value) in self._noted or id(value) in self._seen:
                continue
            if isinstance(value, nn.Module):
                self._seen[id(value)] = value
                if isinstance(value, torch.jit.ScriptModule):
                    self._add_script(value)
                elif not (isinstance(value, LazyModuleMixin) and value.has_uninitialized_params()):
                    waiting.append(value.__dict__)  # a lazy one becomes another module, permanently
            elif isinstance(value, Region):
                waiting.append(value.__dict__)
            elif isinstance(value, torch.Generator):
                self._seen[id(value)] = value
                self._generators.append((value, value.get_state()))
            elif isinstance(value, torch.Tensor):
                if isinstance(value, nn.Parameter) or value.requires_grad:
                    self._learned.add(_storage_of(value))
            elif isinstance(value, tuple):
                waiting.extend(value)
            elif type(value) in _DICTIONARIES:
                if not _has_shards(value):
                    self._noted[id(value)] = value, dict(value)
                waiting.extend(value.values())
            elif type(value) in _LISTS:
                self._noted[id(value)] = value, list(value)
                waiting.extend(value)

    def _add_script(self, module: nn.Module) -> None:
        # The buffers are C++ objects: each remains the same, and gets its contents back.
        self._script_buffers.extend((each, each.detach().clone()) for each in module.buffers())
        self._learned.update(map(_storage_of, module.parameters()))

    def copy_tensors(self) -> None:
        with torch.no_grad():
            for container, contents in self._noted.values():
                places = contents.items() if isinstance(contents, dict) else enumerate(contents)
                for place, value in places:
                    instead = self._stand_in(value)
                    if instead is not value and not isinstance(container, set):
                        container[place] = instead

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy(value)
        if not isinstance(value, tuple):
            return value
        items = [self._stand_in(each) for each in value]
        if all(a is b for a, b in zip(items, value)):
            return value
        if type(value) is tuple:
            return tuple(items)
        return value._make(items) if hasattr(value, "_make") else value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if (
            isinstance(tensor, nn.Parameter)
            or tensor.requires_grad
            or is_lazy(tensor)
            or tensor.is_inference()
        ):
            return tensor
        if id(tensor) not in self._copies:
            copy = self._made_copy(tensor)
            if copy is not tensor:
                copy.__dict__.update(tensor.__dict__)
            self._copies[id(tensor)] = tensor, copy
        return self._copies[id(tensor)][1]

    def _made_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage_of(tensor)
        if storage is not None and storage in self._learned:
            return tensor
        try:
            if storage is None or not _is_plain(tensor):
                return tensor.clone()
            # The copy has the same strides; copies share memory if their originals do.
            if storage not in self._storages:
                memory: Any = tensor.untyped_storage()
                self._storages[storage] = memory.clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return copy.set_(
                self._storages[storage], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        except (RuntimeError, NotImplementedError, TypeError):
            return tensor  # its class cannot be copied: it is rarely written to

    def put_back(self) -> None:
        for container, contents in self._noted.values():
            _refill(container, contents)
        for generator, before in self._generators:
            generator.set_state(before)
        with torch.no_grad():
            for buffer, value in self._script_buffers:
                if buffer.shape != value.shape:
                    buffer.data = value
                elif not torch.equal(buffer, value):
                    buffer.data.copy_(value)


def _has_shards(value: Any) -> bool:
    """Returns whether other code changes a dictionary's parameters in a forward, as FSDP2 does."""
    return any(
        isinstance(each, nn.Parameter) and type(each) is not nn.Parameter for each in value.values()
    )


def _storage_of(tensor: torch.Tensor) -> Optional[int]:
    """Returns the identity of a tensor's storage; None for a tensor without one."""
    try:
        storage: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return storage


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, getattr(nn, "Buffer", torch.Tensor))
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _refill(container: Any, contents: Any) -> None:
    if isinstance(contents, dict):
        now = list(container)
        if len(now) == len(contents) and all(a is b for a, b in zip(now, contents)):
            for key, value in contents.items():
                if container[key] is not value:
                    container[key] = value
            return
    elif len(container) == len(contents) and all(a is b for a, b in zip(container, contents)):
        return
    container.clear()
    if isinstance(contents, dict) or isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)
