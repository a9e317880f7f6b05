"""Choices of modules in a tree: by path, by class, by a function, every n-th."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple, Union

import torch.nn as nn

from ._arguments import check, checked
from ._policy import Policy

Types = Union[str, type[nn.Module], Iterable[Union[str, type[nn.Module]]]]

_CONDITIONS = (
    'Hint: write conditions as key=value, separated by commas. The keys are name (a pattern of '
    'paths: `*` matches anything except a dot, `**` matches anything, `|` separates '
    'alternatives), type (a pattern of class names, in the same syntax), every (a number of at '
    'least 1) and policy (text for Policy.parse); for example '
    '"every=2,name=layers.*,type=Bottleneck".'
)


class ModuleChoice(NamedTuple):
    """Modules of a tree that fit every condition that is set.

        ModuleChoice(name="layers.*")                       # the children of `layers`
        ModuleChoice(types=Bottleneck, every=2)             # the first of these, the third, ...
        ModuleChoice.parse("every=2,name=layers.*,type=Bottleneck")

    Paths are those of `named_modules()`: "layers.0.conv". The root's is "".
    """

    name: str = ""
    """A pattern over the path: `*` is anything but a dot, `**` anything, `?` one character but a
    dot; with `|` between several. It never means the root."""
    types: Types = ()
    """Classes with their subclasses, and names of classes, also patterns; with `|` between
    several."""
    predicate: Union[Callable[[str, nn.Module], bool], None] = None
    """A function of the path and the module, called after the other conditions."""
    every: int = 1
    """The step among the modules that fit the rest, in the order of the tree: the first and every
    n-th after it are chosen."""
    policy: Any = None
    """The policy of the chosen modules' regions, in the form that `checkpoint` takes."""

    @staticmethod
    @checked
    def parse(text: str) -> ModuleChoice:
        """Makes a choice from `key=value` with commas between; the keys are name, type, every and
        policy (text for `Policy.parse`, without commas). Raises ValueError."""
        if not text.strip():
            raise ValueError(f"remat.ModuleChoice.parse: the text was empty. {_CONDITIONS}")
        found: dict[str, str] = {}
        every = 1
        for part in text.split(","):

            def refuse(cause: str, part: str = part.strip()) -> ValueError:
                return ValueError(
                    f'remat.ModuleChoice.parse: "{part}" in "{text}" was not a condition. Cause: '
                    f'{cause}. {_CONDITIONS}'
                )

            key, equals, value = (each.strip() for each in part.partition("="))
            if not equals:
                raise refuse("it has no `=`")
            if key in found:
                raise refuse(f"the key {key} appears twice")
            if key not in ("name", "type", "every", "policy"):
                raise refuse(f'there is no key "{key}"')
            if not value:
                raise refuse("its value is empty")
            found[key] = value
            if key == "every":
                if not re.fullmatch("[0-9]{1,18}", value) or int(value) < 1:
                    raise refuse(f'"{value}" is not a number of at least 1')
                every = int(value)
            elif key == "policy":
                Policy.parse(value)
            elif not all(pattern.strip() for pattern in value.split("|")):
                raise refuse("a pattern beside `|` is empty")
        name, types, policy = found.get("name", ""), found.get("type", ()), found.get("policy")
        return ModuleChoice(name=name, types=types, every=every, policy=policy)

    def __str__(self) -> str:
        parts = [f"name={self.name}"] if self.name else []
        types = [
            each if isinstance(each, str) else each.__qualname__ for each in _listed(self.types)
        ]
        if types:
            parts.append("type=" + "|".join(types))
        if self.predicate is not None:
            parts.append("a function")
        if self.every != 1:
            parts.append(f"every={self.every}")
        return ",".join(parts)

    def chosen(self, root: nn.Module, verb: str) -> list[tuple[str, nn.Module]]:
        """Returns (path, module) of each chosen module. Raises ValueError if the choice is wrong or
        fits no module; `verb` is the calling function."""
        for field, annotation in (("name", "str"), ("types", "Types"), ("every", "int")):
            check(verb, field, annotation, getattr(self, field))
        types = _listed(self.types)
        if self.every < 1:
            raise ValueError(
                f"{verb}: every was {self.every!r}. Hint: set 1 for each match, 2 for every "
                "second match, and so on."
            )
        if not self.name and not types and self.predicate is None:
            raise ValueError(
                f'{verb}: the choice had no condition. Cause: every module would become a region '
                'inside the region of its parent. Hint: choose by name, types or a predicate: '
                'types=Bottleneck, every=2; or "every=2,type=Bottleneck".'
            )
        for patterns in (self.name, *(each for each in types if isinstance(each, str))):
            if patterns and not all(pattern.strip() for pattern in patterns.split("|")):
                raise ValueError(
                    f'{verb}: a pattern in "{patterns}" was empty. Hint: write a pattern before '
                    'and after each `|`.'
                )
        tree = list(root.named_modules(remove_duplicate=False))
        fitting = [(path, module) for path, module in tree if self._fits(path, module, types)]
        if not fitting:
            there = [f"{path or 'the root'} ({class_name(module)})" for path, module in tree]
            more = [f"and {len(there) - 12} more"] if len(there) > 12 else []
            raise ValueError(
                f'{verb}: no module of the tree matches "{self}". Cause: the tree has '
                f'{", ".join(there[:12] + more)}. Hint: choose some of these. In paths, `*` '
                'matches anything except a dot: `layers.*` are the children of layers, '
                '`layers.**` all modules below it.'
            )
        return fitting[:: self.every]

    def _fits(self, path: str, module: nn.Module, types: list[Union[str, type[nn.Module]]]) -> bool:
        if self.name and (not path or not _pattern(self.name, ".").fullmatch(path)):
            return False
        if types and not any(_is_of(module, each) for each in types):
            return False
        return self.predicate is None or bool(self.predicate(path, module))


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class, without regions."""
    return type(module).__name__


def _listed(types: Types) -> list[Union[str, type[nn.Module]]]:
    if isinstance(types, (str, type)):
        return [types] if types else []
    return list(types)


def _is_of(module: nn.Module, wanted: Union[str, type[nn.Module]]) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    pattern = _pattern(wanted, "")
    parts = f"{type(module).__module__}.{type(module).__qualname__}".split(".")
    return any(pattern.fullmatch(".".join(parts[i:])) for i in range(len(parts)))


@functools.lru_cache(maxsize=256)
def _pattern(patterns: str, separator: str) -> re.Pattern[str]:
    """Compiles patterns. `*` does not match the separator, `**` does; without one both do."""
    inside = f"[^{re.escape(separator)}]" if separator else "."
    found = []
    for pattern in patterns.split("|"):
        pieces = re.split(r"(\*\*|\*|\?)", pattern.strip())
        meaning = {"**": ".*", "*": inside + "*", "?": inside}
        found.append("".join(meaning.get(piece, re.escape(piece)) for piece in pieces))
    return re.compile("|".join(f"(?:{each})" for each in found), re.DOTALL)
