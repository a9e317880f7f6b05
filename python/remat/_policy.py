"""Policies: the results of a region that are kept instead of recomputed."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Union

import torch
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy

from ._arguments import Bytes, Kind, add_kind, check, checked, of_class
from ._extension import _remat
from ._remat import PolicyContext

Operator = Union[str, torch._ops.OpOverload, torch._ops.OpOverloadPacket]


def name_of(operator: Operator) -> str:
    """Returns the library's name of an operator: "aten::mm" means every overload,
    "aten::mm.default" the unnamed one."""
    if isinstance(operator, str):
        return operator
    if isinstance(operator, torch._ops.OpOverload):
        return f"{operator._schema.name}.{operator._overloadname}"
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return operator._qualified_op_name
    raise TypeError(
        f"remat: an operator must be a name or an operator of torch.ops, got {operator!r}"
    )


# fmt: off
_MIN_OFFLOAD_BYTES, _PREFETCH_DEPTH, _MAX_BYTES_IN_FLIGHT = 1 << 16, 2, 64 << 20


class Policy(_remat._Policy):
    """The choice of a region's results that are kept. Immutable; any thread."""

    # The call that made it, for copies and pickles: the library's policies do not have it.
    _recipe: tuple[Callable[..., Policy], tuple[Any, ...], dict[str, Any]]

    @checked
    def __init__(
        self,
        function: Callable[[PolicyContext], Any],
        *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
        ask_again: bool = False, ask_after: bool = False,
        min_offload_bytes: Bytes = _MIN_OFFLOAD_BYTES,
        prefetch_depth: int = _PREFETCH_DEPTH,
        max_bytes_in_flight: Bytes = _MAX_BYTES_IN_FLIGHT, keep_last: int = 0,
    ) -> None:
        """Makes a policy of `function`: it maps a PolicyContext to a CheckpointPolicy or a bool.

        ask_after: call it when the operator has run, so that it sees `results`. It excludes
        `ask_again`.
        The other options are those of `save_ops` and, if it moves results to the CPU, of
        `offload_ops`.
        """
        self._set(Policy, locals(), function)

    @staticmethod
    def parse(text: str) -> Policy:
        """Makes a table (`policy_table`) from text: lines of `PATTERN = ANSWER` with `;` or line
        breaks between; a `#` begins a comment.

            remat.Policy.parse("layers.*.attention.**: aten::mm = save; * = recompute")

        Raises ValueError for a wrong line, with a hint.
        """
        check("remat.Policy.parse", "text", "str", text)
        return _of(Policy.parse, {}, text)

    def _set(self, make: Callable[..., Policy], given: dict[str, Any], *args: Any) -> None:
        options = {name: value for name, value in given.items() if name in _DEFAULTS}
        _remat._Policy.__init__(self, make.__name__, args, options)
        self._recipe = make, args, options

    def __or__(self, other: Policy) -> Policy:
        return _of(_either, {}, self, other) if isinstance(other, Policy) else NotImplemented

    def __repr__(self) -> str:
        make, args, keywords = self._recipe
        if make is _either:
            return " | ".join(map(repr, args))
        said = [*map(repr, args)]
        said += [f"{name}={each!r}" for name, each in keywords.items() if each != _DEFAULTS[name]]
        return f"remat.{make.__qualname__}({', '.join(said)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_again, self._recipe

    def __copy__(self) -> Policy:
        return self

    def __deepcopy__(self, memo: Any) -> Policy:
        return self


_DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in inspect.signature(Policy.__init__).parameters.values()
    if each.default is not each.empty
}
add_kind(
    "Operator",
    Kind(
        lambda value: isinstance(value, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)),
        "the name of an operator, or one of torch.ops",
    ),
)
add_kind("Policy", of_class(Policy, "a remat.Policy"))


def _make_again(make: Callable[..., Policy], args: tuple[Any, ...],
                keywords: dict[str, Any]) -> Policy:
    return make(*args, **keywords)


def _either(one: Policy, other: Policy) -> Policy:
    return one | other


def _of(make: Callable[..., Policy], given: dict[str, Any], *args: Any) -> Policy:
    """Returns the library's policy of the name of `make`, from `args` and the options in
    `given`."""
    policy = Policy.__new__(Policy)
    policy._set(make, given, *args)
    return policy


# ---- tables --------------------------------------------------------------------------------------

Answer = Union[str, bool, CheckpointPolicy]
add_kind(
    "Mapping[str, Answer]",
    Kind(lambda value: isinstance(value, Mapping), "a dict from patterns to answers"),
)
_ANSWERS: dict[str, CheckpointPolicy] = {
    "save": CheckpointPolicy.PREFER_SAVE,
    "recompute": CheckpointPolicy.PREFER_RECOMPUTE,
    **{each.name.lower(): each for each in CheckpointPolicy},
}
if "prefer_cpu_offload" in _ANSWERS:
    _ANSWERS["offload"] = _ANSWERS["prefer_cpu_offload"]


def _answer(pattern: str, answer: Answer) -> CheckpointPolicy:
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    if isinstance(answer, CheckpointPolicy):
        return answer
    if answer not in _ANSWERS:
        raise ValueError(
            f"remat.policy_table: the answer of {pattern!r} was {answer!r}. Hint: give one of "
            f"{', '.join(_ANSWERS)}, a CheckpointPolicy, or a bool."
        )
    return _ANSWERS[answer]


@checked
def policy_table(
    table: Mapping[str, Answer],
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
    min_offload_bytes: Bytes = _MIN_OFFLOAD_BYTES, prefetch_depth: int = _PREFETCH_DEPTH,
    max_bytes_in_flight: Bytes = _MAX_BYTES_IN_FLIGHT, keep_last: int = 0,
) -> Policy:
    """Makes a policy from a table: the first line whose pattern matches answers; without one the
    result is recomputed.

        remat.policy_table({
            "layers.*.attention.**: aten::mm|aten::bmm": "save",
            "name=router.*": "must_save",
            "*": "recompute",
        })

    A pattern is `PATHS: OPERATORS`, one of the two, or `*` for everything. PATHS are patterns for
    the path of the module that runs, as in `ModuleChoice`. OPERATORS are names as in `save_ops`
    with `|` between, or `name=PATTERNS` for values and calls of `save_region` with such a name.
    Answers: "save", "offload", "recompute" (the PREFER_ ones), the names of CheckpointPolicy in
    small letters, a CheckpointPolicy, or a bool. Each `policy` argument also takes such a dict
    or its text (`Policy.parse`).

    Warns once about paths that match no module. Raises ValueError for an empty table, a wrong
    pattern, an unknown operator or answer, and lines after one that matches everything.
    """
    lines = {str(pattern): _answer(pattern, answer) for pattern, answer in table.items()}
    return _of(policy_table, locals(), lines)


def _of_table(table: Any) -> Policy:
    """Returns the policy for a dict or a text, made once."""
    return _of_text(table) if isinstance(table, str) else _of_items(tuple(table.items()))


@functools.lru_cache(maxsize=256)
def _of_text(text: str) -> Policy:
    return Policy.parse(text)


@functools.lru_cache(maxsize=256)
def _of_items(items: tuple[tuple[str, Answer], ...]) -> Policy:
    return policy_table(dict(items))


# ---- ready-made: each is one of the library's, by its name ---------------------------------------

@checked
def save_matmuls(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False
) -> Policy:
    """Keeps the results of matrix products, convolutions and scaled dot product attention; options
    as of `save_ops`.

    A convolution whose activation writes to its result (`ReLU(inplace=True)` with no norm between)
    needs `allow_cache_entry_mutation`: it runs again then.
    """
    return _of(save_matmuls, locals())


# ---- operators that must not run twice

@checked
def save_collectives(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the results of communication: of the functional operators, and of those of `c10d`.

    Operators of `c10d` write to their first argument; a recompute copies the kept contents into its
    own buffer. A later write to such an output is an error in the recompute, by a collective as
    well. Options as of `save_ops`.
    Memory: the outputs, in place.
    """
    return _of(save_collectives, locals())


@checked
def save_random(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the results of operators that draw random numbers.

    Without it recomputes draw the same numbers again.
    """
    return _of(save_random, locals())


@checked
def save_nondeterministic(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the results of operators that may give another result for the same arguments.

    These are sums in any order on an accelerator (`scatter_add`), and choices among equal elements
    (`topk`, `sort`).
    """
    return _of(save_nondeterministic, locals())


@checked
def save_host_copies(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps copies from a device to the host, `item()` among them, for which the program waits."""
    return _of(save_host_copies, locals())


@checked
def register_effect(operator: Operator) -> None:
    """Registers an operator with a side effect for policies of `save_effects` that are made later.

    Raises as `save_ops`.
    """
    _remat._register_effect(name_of(operator))


def _take_torchs_effects() -> None:
    """Registers the operators that torch.library knows to have effects."""
    registered = getattr(getattr(torch, "_library", None), "simple_registry", None)
    for name, entry in getattr(getattr(registered, "singleton", None), "_data", {}).items():
        has_effect = getattr(getattr(entry, "effect", None), "effect", None) is not None
        if has_effect and not name.startswith("higher_order::"):  # those never reach a policy
            with contextlib.suppress(ValueError):  # it is gone
                _remat._register_effect(name)


@checked
def save_effects(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the results of operators with effects: they run once, with or without results.

    These are the operators of `register_effect`, and those that torch.library knows.
    """
    _take_torchs_effects()
    return _of(save_effects, locals())


@checked
def save_unrepeatable(
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Makes the union of the policies above, for expert and pipeline parallel training."""
    _take_torchs_effects()
    return _of(save_unrepeatable, locals())


@checked
def save_ops(
    ops: Iterable[Operator],
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the results of these operators: `save_ops(["aten::mm"])`,
    `save_ops([torch.ops.aten.mm.default])`.

    allow_cache_entry_mutation: a kept result may be changed in place later; its operator then runs
    again. Otherwise backward raises a CheckpointError.
    save_through_hooks: kept results pass the saved-tensor hooks around the region, as its inputs
    do.
    ask_again: recomputes call the policy, too.
    Memory: kept results live as long as the region's graph.
    Raises ValueError for a name that no loaded library has registered.
    """
    return _of(save_ops, locals(), list(map(name_of, ops)))


@checked
def offload_ops(
    ops: Iterable[Operator],
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
    min_offload_bytes: Bytes = _MIN_OFFLOAD_BYTES, prefetch_depth: int = _PREFETCH_DEPTH,
    max_bytes_in_flight: Bytes = _MAX_BYTES_IN_FLIGHT, keep_last: int = 0,
) -> Policy:
    """Moves the results of these operators to the CPU, beside the device's work, and back ahead of
    their use. The other options are those of `save_ops`.

    min_offload_bytes: smaller results stay where they are [bytes].
    prefetch_depth: number of copies back that are begun ahead of the one that a recompute reads.
    max_bytes_in_flight: limit of originals whose copies are not done [bytes]; beyond it the program
    waits.
    keep_last: number of results, over all regions, that stay on the device since backward reads
    them first. Others move when they are not among these any more, and the program does not hold
    them. Raises ValueError for a negative number, too.
    """
    return _of(offload_ops, locals(), list(map(name_of, ops)))


@checked
def save_names(
    names: Iterable[str],
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps the values that `checkpoint_name` gave one of these names; options as of `save_ops`."""
    return _of(save_names, locals(), list(names))


@checked
def save_all_but_names(
    names: Iterable[str],
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
) -> Policy:
    """Keeps every named value except these; options as of `save_ops`."""
    return _of(save_all_but_names, locals(), list(names))


@checked
def offload_names(
    names: Iterable[str],
    *, allow_cache_entry_mutation: bool = False, save_through_hooks: bool = False,
    ask_again: bool = False,
    min_offload_bytes: Bytes = _MIN_OFFLOAD_BYTES, prefetch_depth: int = _PREFETCH_DEPTH,
    max_bytes_in_flight: Bytes = _MAX_BYTES_IN_FLIGHT, keep_last: int = 0,
) -> Policy:
    """Moves the values with these names to the CPU; options as of `offload_ops`."""
    return _of(offload_names, locals(), list(names))
