"""Types of arguments: a wrong one is refused at the call, by its name, with a hint."""

from __future__ import annotations

import functools
import operator
import os
import types
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union, cast

import torch
import torch.nn as nn

F = TypeVar("F", bound=Callable[..., Any])
Bytes = Union[int, float]
"""A whole number of bytes; 8e9 is valid."""


class Kind(NamedTuple):
    """The rule for arguments with one annotation."""

    fits: Callable[[Any], bool]
    words: str
    read: Optional[Callable[[Any], Any]] = None
    """The conversion of an argument before the function gets it; None: no conversion."""


def _is_flag(value: Any) -> bool:
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _is_int(value: Any) -> bool:
    if _is_flag(value):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_real(value: Any) -> bool:
    return _is_int(value) or (hasattr(type(value), "__float__") and not _is_flag(value))


def _is_whole(value: Any) -> bool:
    is_integer = getattr(value, "is_integer", None)
    return _is_int(value) or (_is_real(value) and is_integer is not None and is_integer())


def _is_path(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
    )


def _is_listed(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes))


def _are_names(value: Any) -> bool:
    return _is_listed(value) and not (
        isinstance(value, (list, tuple)) and not all(isinstance(i, str) for i in value)
    )


def _is_type(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, type) and issubclass(value, nn.Module))


def _are_types(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_type, value))
    return _is_type(value) or (_is_listed(value) and not isinstance(value, type))


def _is_device(value: Any) -> bool:
    return value is None or isinstance(value, (str, torch.device)) or _is_int(value)


def of_class(kind: type, words: str) -> Kind:
    return Kind(lambda value: isinstance(value, kind), words)


# The rules by the text of the annotation. Other annotations are not checked:
# tests/test_arguments.py lists their arguments.
_KINDS = {
    "bool": Kind(_is_flag, "True or False"),
    "int": Kind(_is_int, "an int"),
    "float": Kind(_is_real, "a float"),
    "Bytes": Kind(_is_whole, "a whole number of bytes", int),
    "str": of_class(str, "a str"),
    "Path": Kind(_is_path, "a str or an os.PathLike of one"),
    "Union[torch.device, str, int, None]": Kind(
        _is_device, "a torch.device, a str, an int or None"
    ),
    "Sequence[Any]": Kind(_is_listed, "a list of policies"),
    "Iterable[str]": Kind(_are_names, "a list of names"),
    "Iterable[Operator]": Kind(_is_listed, "a list of operators"),
    "Union[str, Iterable[str]]": Kind(
        lambda value: isinstance(value, str) or _are_names(value), "a str or a list of names"
    ),
    "Types": Kind(_are_types, "a class of modules, its name, or a list of these"),
    "Iterable[nn.Module]": Kind(_is_listed, "a list of modules"),
    "nn.Module": of_class(nn.Module, "a torch.nn.Module"),
    "torch.Tensor": of_class(torch.Tensor, "a torch.Tensor"),
    "torch.dtype": of_class(torch.dtype, "a torch.dtype, as torch.bfloat16"),
    "torch.Generator": of_class(torch.Generator, "a torch.Generator"),
}
_KINDS["M"] = _KINDS["nn.Module"]


def add_kind(annotation: str, kind: Kind) -> None:
    """Adds the rule for an annotation that names a class of the package."""
    _KINDS[annotation] = kind
    kind_of.cache_clear()


@functools.cache
def kind_of(annotation: str) -> Optional[Kind]:
    """Returns the rule for an annotation, or None if such arguments are not checked."""
    if annotation.startswith("Callable["):
        return Kind(callable, "a function")
    inner = annotation.removeprefix("Optional[")
    if inner == annotation:
        return _KINDS.get(annotation)
    kind = kind_of(inner.removesuffix("]"))
    if kind is None:
        return None
    fits, words, read = kind
    if words == "True or False":
        words = "True, False or None"
    elif "None" not in words:
        words += ", or None" if " or " in words else " or None"
    return Kind(
        lambda value: value is None or fits(value),
        words,
        read and (lambda value: None if value is None else read(value)),
    )


def said(value: Any) -> str:
    """Returns the text for a value in a message: its class if the value is long."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def refuse(user: str, name: str, words: str, value: Any) -> TypeError:
    """Returns the error for a wrong argument. `user`: the function, as its callers write it."""
    text = f"{user}: {name} must be {words}, got {said(value)}"
    if isinstance(value, str) and words.startswith("a list"):
        text += f". Hint: pass [{value!r}]."
    elif isinstance(value, type) and words == "a torch.nn.Module" and issubclass(value, nn.Module):
        text += f". Hint: pass a module, {value.__name__}(...), or call this for each existing one."
    elif (
        isinstance(value, types.FunctionType) and user == "remat.Checkpointed" and name == "module"
    ):
        text += (
            ". Hint: call remat.checkpoint(function, ...), or decorate the function with "
            "@remat.checkpoint()."
        )
    elif isinstance(value, types.FunctionType) and "function" not in words:
        text += f". Hint: a decorator needs its arguments in parentheses: @{user}(...)."
    return TypeError(text)


def check(user: str, name: str, annotation: str, value: Any) -> Any:
    """Returns the converted value. Raises TypeError if it does not fit the annotation."""
    kind = kind_of(annotation)
    if kind is None:
        return value
    if not kind.fits(value):
        raise refuse(user, name, kind.words, value)
    return value if kind.read is None else kind.read(value)


def check_fields(object: Any) -> None:
    """Checks and converts all fields of a dataclass."""
    for name, annotation in type(object).__annotations__.items():
        read = check(f"remat.{type(object).__name__}", name, annotation, getattr(object, name))
        object.__dict__[name] = read  # it may be frozen


def checked(function: F) -> F:
    """Wraps `function` so that its arguments are first checked by its own annotations."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    user = f"remat.{function.__qualname__.removesuffix('.__init__')}"
    found = {name: kind_of(function.__annotations__.get(name, "")) for name in names}
    kinds = {name: kind for name, kind in found.items() if kind is not None}
    reads = {name: kind.read for name, kind in kinds.items() if kind.read is not None}

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        for given in (zip(names, args), kwargs.items()):
            for name, value in given:
                kind = kinds.get(name)
                if kind is not None and not kind.fits(value):
                    raise refuse(user, name, kind.words, value)
        if reads:
            args = (
                *(reads[name](each) if name in reads else each for name, each in zip(names, args)),
                *args[len(names) :],
            )
            kwargs = {
                name: reads[name](each) if name in reads else each for name, each in kwargs.items()
            }
        return function(*args, **kwargs)

    return cast(F, checking)
