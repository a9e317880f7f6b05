"""`custom_function`: a function with a gradient rule of its own."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Optional, Union

import torch
import torch.autograd.forward_ad as forward_ad

from ._arguments import checked
from ._errors import CheckpointError, ErrorKind

Outputs = Union[torch.Tensor, "tuple[torch.Tensor, ...]"]
Gradients = Union[Optional[torch.Tensor], "tuple[Optional[torch.Tensor], ...]"]


class _Autocast:
    """The autocast state of each kind of device that a rule may run on."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        kinds = dict.fromkeys(
            ["cpu", *(each.device.type for each in inputs if isinstance(each, torch.Tensor))]
        )
        self.states = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self.has_cache = torch.is_autocast_cache_enabled()

    def again(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for kind, dtype, enabled in self.states:
            stack.enter_context(torch.autocast(kind, dtype, enabled, self.has_cache))
        return stack


def _unsupported(fact: str, cause: str, hint: str) -> CheckpointError:
    error = CheckpointError(f"remat.custom_function: {fact}.\nCause: {cause}.\nHint: {hint}.")
    error.kind = ErrorKind.UNSUPPORTED
    return error


def _is_same_again(small: Any, again: Any) -> bool:
    """Compares two results with a tolerance, since kernels may round differently."""
    if not isinstance(small, torch.Tensor) or not isinstance(again, torch.Tensor):
        return type(small) is type(again)
    if small.shape != again.shape or small.dtype != again.dtype:
        return False
    if not small.is_floating_point() and not small.is_complex():
        return torch.equal(small, again)
    return torch.allclose(again, small, rtol=1e-2, atol=1e-3, equal_nan=True)


def _check_again(small: tuple[Any, ...], again: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
    with torch.no_grad():
        if len(small) != len(again) or not all(map(_is_same_again, small, again)):
            raise _unsupported(
                "forward gave other small tensors when it ran again",
                "a backward with create_graph runs it again, and it drew random numbers or read "
                "something that has changed",
                "draw the numbers outside, and pass them as an input",
            )
    if not any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
        return
    for each in again:
        if (
            isinstance(each, torch.Tensor)
            and (each.is_floating_point() or each.is_complex())
            and not each.requires_grad
        ):
            raise _unsupported(
                "forward gave a small tensor without a gradient",
                "a backward with create_graph differentiates its operators, and one of them has no "
                "derivative or ran under no_grad",
                "use differentiable operators while grad mode is on",
            )


class _Saved:
    """Values of a node: it saves the tensors as autograd does, and keeps the others."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.others = [None if isinstance(each, torch.Tensor) else (each,) for each in values]

    def filled(self, tensors: Any) -> tuple[Any, ...]:
        return tuple(next(tensors) if other is None else other[0] for other in self.others)


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: CustomFunction, *inputs: Any) -> Any:
        outputs, small = rule.forward(*inputs)
        small = tuple(small)
        ctx.rule, ctx.autocast = rule, _Autocast(inputs)
        ctx.inputs, ctx.small = _Saved(inputs), _Saved(small)
        ctx.save_for_backward(
            *(each for each in (*inputs, *small) if isinstance(each, torch.Tensor))
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rule = ctx.rule
        saved = iter(ctx.saved_tensors)
        inputs = ctx.inputs.filled(saved)
        small = ctx.small.filled(saved)
        with ctx.autocast.again():
            if torch.is_grad_enabled():
                again = tuple(rule.forward(*inputs)[1])
                _check_again(small, again, inputs)
                small = again
            rebuilt = rule.rematerialize(small, inputs)
        found = rule.backward(rebuilt, gradients)
        if not isinstance(found, tuple):
            found = (found,) if found is None or isinstance(found, torch.Tensor) else tuple(found)
        if len(found) != len(inputs):
            raise ValueError(
                f"remat.custom_function: backward returned {len(found)} gradients for "
                f"{len(inputs)} inputs. Hint: return one for each input, None where there is none."
            )
        return None, *found


class CustomFunction:
    """A function with a gradient rule of its own: see `custom_function`."""

    def __init__(self, forward: Any, rematerialize: Any, backward: Any) -> None:
        self.forward, self.rematerialize, self.backward = forward, rematerialize, backward
        functools.update_wrapper(self, forward, updated=())

    def __call__(self, *inputs: Any) -> Any:
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        is_dual = forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(each).tangent is not None for each in tensors
        )
        is_transformed = is_dual or torch._C._are_functorch_transforms_active()
        if (
            is_transformed
            or not torch.is_grad_enabled()
            or not any(each.requires_grad for each in tensors)
        ):
            return self.forward(*inputs)[0]
        return _Rule.apply(self, *inputs)


@checked
def custom_function(
    forward: Callable[..., tuple[Outputs, tuple[Any, ...]]],
    rematerialize: Callable[[tuple[Any, ...], tuple[Any, ...]], Any],
    backward: Callable[[Any, tuple[torch.Tensor, ...]], Gradients],
) -> CustomFunction:
    """Makes a function that rebuilds in backward the tensors that it needs, by a rule of its own.

    `forward(*inputs)` returns (outputs, small); `rematerialize(small, inputs)` rebuilds from these
    the values that backward needs; and `backward(saved, gradients)` is the usual formula over it,
    which returns a gradient for each input. An attention keeps the log-sum-exp of its scores in
    this way instead of its probabilities.

    The three run with grad mode off, except in a backward with `create_graph`: that runs all three
    with grad mode on, `forward` included, and autograd differentiates their operators. So `forward`
    may use a kernel without a derivative only while grad mode is off. `rematerialize` must not draw
    random numbers; it sees forward's autocast state, as `forward` does.

    Memory: the graph keeps the inputs and the small tensors, as autograd saves tensors: in a region
    they are computed again, and hooks may move them.
    Only `forward` runs, in the caller's grad mode, if grad mode is off, if no input requires grad,
    inside torch.func's transforms and with forward-mode tangents.
    Raises, in backward: ValueError for another number of gradients than inputs; with `create_graph`
    CheckpointError (UNSUPPORTED) if `forward`, run again, gives other small tensors (it drew random
    numbers), or one without a gradient.
    Threads: any; the three run on the thread of the backward that reads.
    """
    return CustomFunction(forward, rematerialize, backward)
