"""Modules that run as regions: `Checkpointed`, and `apply` for a tree of modules.

A module becomes a region by getting a class derived from its own, with the same name, whose
`forward` is a region. Everything else stays: the object, its place in the tree, its names,
parameters, hooks and printed text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union

import torch
import torch.nn as nn

from ._arguments import Kind, add_kind, checked
from ._choice import ModuleChoice, Types, class_name
from ._extension import _remat
from ._region_class import (
    Region, _rebuilt as _rebuilt, is_on, reason_against, region_of, regions_below, switch_off,
    switch_on,
)  # fmt: skip

M = TypeVar("M", bound=nn.Module)

# ---- one module ----------------------------------------------------------------------------------


@checked
def Checkpointed(  # noqa: N802 - it stands where the name of a class does
    module: M,
    *,
    training_only: bool = True,
    level: int = 1,
    buffers: str = "restore",
    **options: Any,
) -> M:
    """Makes each call of `module` a region, and returns it: the same object.

        self.block = remat.Checkpointed(Block(512), name="block", policy=remat.save_matmuls())

    Names, parameters, buffers, `state_dict`, hooks and printed text stay; copies and pickles are
    regions, too. The module's class becomes one that is derived from its own: `isinstance` holds,
    `type(module) is Block` does not (`remat.plain_class(module)`). Hooks of the module itself run
    outside of the region; those of modules in it run again in recomputes.

    training_only: in eval mode it runs plainly. A warning says so once if a backward reaches it.
    level: for `set_checkpoint_level`; 0: never a region, unless `set_checkpointing` asks for it.
    buffers: "restore": a recompute sees the module's buffers as forward saw them, and puts them
        back: running statistics move once a step. "skip_batch_norm": a module that contains one
        runs plainly. "ignore": they move again.
    options: as of `checkpoint`.

    A recompute sees the training flags of the module and of all below it as forward saw them.
    Memory: as `checkpoint`. The graph keeps the module alive. Threads: make it a region while no
    forward of it runs; then any. Recomputes in several threads that restore the same buffers take
    turns. Raises ValueError for wrong options and for a module that cannot be a region.
    """
    refused = reason_against(module)
    if refused is not None:
        raise ValueError(
            f"remat.Checkpointed: a {class_name(module)} cannot be a region: {refused[0]}. Hint: "
            f"{refused[1]}."
        )
    region = Region(
        options, training_only=training_only, level=level, buffers=buffers, enabled=level > 0
    )
    switch_on(module, region)
    return module


@checked
def is_checkpointed(module: nn.Module) -> bool:
    """Returns whether calls of the module itself are regions now, as far as its switch decides."""
    region = region_of(module)
    return region is not None and region.enabled


# ---- a tree --------------------------------------------------------------------------------------


class ChosenModule(NamedTuple):
    """A module that a choice selected from a tree."""

    path: str
    type: str


class RefusedModule(NamedTuple):
    """A module that cannot be made a region from outside."""

    path: str
    type: str
    reason: str
    cure: str


class Applied(NamedTuple):
    """The result of `apply`; `str` makes a line for each module."""

    regions: list[ChosenModule]
    refused: list[RefusedModule]

    def __str__(self) -> str:
        lines = [f"region: {path or 'the root'} ({type})" for path, type in self.regions]
        for path, type, reason, cure in self.refused:
            lines.append(f"no region: {path or 'the root'} ({type}): {reason}. Hint: {cure}.")
        return "\n".join(lines)


Choice = Union[ModuleChoice, str, None]
add_kind(
    "Choice",
    Kind(
        lambda value: value is None or isinstance(value, (ModuleChoice, str)),
        "a ModuleChoice, a str or None",
    ),
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
            raise ValueError(
                f"{verb}: a choice was passed together with types, names, predicate or every. "
                "Hint: pass either the choice or the others."
            )
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
    """Makes the chosen modules of a tree regions, as `Checkpointed` does, without changing the
    source.

        remat.apply(model, types=Block, every=2)
        remat.apply(model, names="layers.*", policy=remat.save_matmuls())
        remat.apply(model, "every=2,name=layers.*,type=Block")   # from a configuration

    A region is named by its module's path; a `name` gets the path behind it. Another call changes
    the options only. A module that cannot be a region (a ModuleList, a script module) is in
    `refused`, with a hint. Raises ValueError for a choice without a condition, one that fits
    nothing, or one that is wrong. Threads: no forward of the tree may run meanwhile.
    """
    verb = "remat.apply"
    which = _choice(verb, choice, types, names, predicate, every)
    chosen = which.chosen(model, verb)
    if which.policy is not None:
        if options.get("policy") is not None:
            raise ValueError(
                f"{verb}: the choice had a policy, and the options had one. Hint: leave one out."
            )
        options["policy"] = which.policy
    applied = Applied([], [])
    name = options.pop("name", "")
    ways: dict[nn.Module, Region] = {}
    for path, module in chosen:
        if module in ways:
            continue  # it has several paths, of which the first names it
        why_not = reason_against(module)
        if why_not is not None:
            reason, cure = why_not
            cure = cure.replace("PATH.*", f"{path}.*" if path else "*")
            applied.refused.append(RefusedModule(path, class_name(module), reason, cure))
            continue
        own = {**options, "name": " ".join(filter(None, (name, path)))}
        ways[module] = Region(
            own, training_only=training_only, level=level, buffers=buffers, enabled=True
        )
    paths = {module: path for path, module in reversed(chosen)}
    for module, region in ways.items():
        path, type = paths[module], class_name(module)
        try:
            switch_on(module, region)
        except TypeError as error:
            reason = f"its class cannot change: {error.__cause__}"
            cure = "call remat.checkpoint(module, ...)"
            applied.refused.append(RefusedModule(path, type, reason, cure))
        else:
            applied.regions.append(ChosenModule(path, type))
    if not _remat._is_in_tree(model):
        _remat._register_tree(model)
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
    """Makes the chosen modules, or all of the tree, plain modules again, with their own class.

    Returns the modules that were regions. Existing graphs still recompute.
    """
    if choice is None and not types and not names and predicate is None and every == 1:
        chosen = list(model.named_modules(remove_duplicate=False))
    else:
        verb = "remat.remove"
        chosen = _choice(verb, choice, types, names, predicate, every).chosen(model, verb)
    return [ChosenModule(path, class_name(module)) for path, module in chosen if switch_off(module)]


@checked
def set_checkpointing(model: nn.Module, enabled: bool) -> None:
    """Switches every region in a tree of modules, the root among them."""
    for region in regions_below(model):
        region.enabled = enabled


@checked
def set_checkpoint_level(model: nn.Module, training_level: int) -> None:
    """Switches the regions of a tree by level: on if `training_level >= level` and `level > 0`.

    Common levels: 0 none, 1 layers, 2 residual, attention and MLP blocks, 3 transformer layers, 4
    stages, 5 encoders.
    """
    for region in regions_below(model):
        region.enabled = 0 < region.level <= training_level


# ---- modules that are called past their regions --------------------------------------------------


class UnusedRegion(NamedTuple):
    """A module that should be a region, and is called past it."""

    path: str
    """The path in the tree; '' is the root."""
    type: str
    reason: str
    """The observed fact."""
    cure: str
    """The change of the program that makes it a region."""


def _leaves_below(root: torch.Tensor) -> list[torch.Tensor]:
    """Returns the leaves that would get gradients from a backward of `root`."""
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
    """Finds modules that should be regions and never were. They are modules below `model` that are
    switched on as regions, some of whose parameters are in the graph of `result`, and whose own
    call was never reached. The results are right, but all memory is held. The cause is a parent
    that calls a module's parts instead of the module, or `Block.forward(block, x)`. Call this
    function once, after a forward:

        for unused in remat.unused_regions(model, loss):
            print(unused.path, unused.cure)

    "Never" counts from when the module became a region, or from `reset_unused_regions`: a module
    that is called both ways is not found. Modules that are switched off now, or in eval mode with
    `training_only`, are left out. A call under `disable_checkpoint`, or one that "skip_batch_norm"
    runs plainly, counts as reached; one without grad mode does not. A module without parameters
    that require grad is never found. A module whose parameters others use, too, may be found
    although no code called it. The function walks the graph once, before a backward or after it.
    Threads: no forward of `model` may run meanwhile. Raises ValueError for a `result` without a
    graph.
    """
    if result.grad_fn is None:
        raise ValueError(
            "remat.unused_regions: the result had no graph. Cause: it does not require grad, or "
            "was computed without grad mode. Hint: pass the tensor on which backward is called."
        )
    used = {id(leaf) for leaf in _leaves_below(result)}
    found = []
    for path, module in model.named_modules():
        region = region_of(module)
        if region is None or not is_on(module, region) or region.was_called:
            continue
        if any(id(parameter) in used for parameter in module.parameters()):
            found.append(
                UnusedRegion(
                    path,
                    class_name(module),
                    "its parameters are in the graph, but the module itself was never called",
                    f"call the module itself ({path or 'the root'}) instead of its parts or its "
                    "class's forward, or make those parts regions",
                )
            )
    return found


@checked
def reset_unused_regions(model: nn.Module) -> None:
    """Resets the record of reached calls for all modules below `model`."""
    for region in regions_below(model):
        region.was_called = False
