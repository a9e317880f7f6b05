"""Changes in place around a region: under torch's allow_mutation_on_saved_tensors, and in regions
inside."""

from __future__ import annotations

import functools
import unittest
from typing import Any, Callable

import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from common import Case

Function = Callable[..., torch.Tensor]
Call = Callable[..., torch.Tensor]
MM = [torch.ops.aten.mm.default]


def plain(function: Function, *args: Any) -> torch.Tensor:
    return function(*args)


def drop_in(function: Function, *args: Any, **options: Any) -> torch.Tensor:
    with remat.installed():
        result: torch.Tensor = checkpoint(function, *args, use_reentrant=False, **options)
        return result


selective_drop_in = functools.partial(
    drop_in, context_fn=functools.partial(create_selective_checkpoint_contexts, MM)
)
copying = functools.partial(remat.checkpoint, input_mode="copy_on_write")
selective = functools.partial(remat.checkpoint, policy=remat.save_ops(MM))


def weights() -> torch.Tensor:
    return torch.linspace(0.1, 1.0, 16).reshape(4, 4).requires_grad_()


# ---- programs, which plain autograd runs under allow_mutation_on_saved_tensors -------------------


def argument_after_the_call(call: Call, w: torch.Tensor) -> torch.Tensor:
    a = w.clone()
    y = call(lambda t: t.sin().exp(), a)
    a.mul_(2)
    return y.sum()


def inside(call: Call, w: torch.Tensor) -> torch.Tensor:
    def function(t: torch.Tensor) -> torch.Tensor:
        b = t.clone()
        squares = (b**2).sum()
        b.sin_()
        return squares + b.sum()

    return call(function, w)


def argument_inside(call: Call, w: torch.Tensor) -> torch.Tensor:
    def function(t: torch.Tensor) -> torch.Tensor:
        squares = (t**2).sum()
        t.sin_()
        return squares + t.sum()

    return call(function, w.clone())


def result_after_the_call(call: Call, w: torch.Tensor) -> torch.Tensor:
    y = call(torch.exp, w)
    squares = (y * y).sum()
    y.sin_()
    return squares + y.sum()


def argument_of_the_next_region(call: Call, w: torch.Tensor) -> torch.Tensor:
    y = call(torch.exp, w)
    z = call(torch.cos, y)
    y.mul_(2)
    return y.sum() + z.sum()


def capture(call: Call, w: torch.Tensor) -> torch.Tensor:
    c = w.clone()
    y = call(lambda t: (t * c).sin(), w)
    c.mul_(2)
    return y.sum()


def view_of_an_argument(call: Call, w: torch.Tensor) -> torch.Tensor:
    a = w.clone()
    y = call(lambda t: t.sin().exp(), a[:2])
    a[1].mul_(3)
    a.mul_(2)
    return y.sum()


def gradient_inside(call: Call, w: torch.Tensor) -> torch.Tensor:
    def function(t: torch.Tensor) -> torch.Tensor:
        b = t.clone()
        squares = (b**2).sum()
        b.sin_()
        (gradient,) = torch.autograd.grad(squares, t, create_graph=True)
        return (gradient * b).sum()

    return call(function, w)


def nested(call: Call, w: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        squares = (t**2).sum()
        t.sin_()
        return squares + t

    def outer(t: torch.Tensor) -> torch.Tensor:
        u = t.exp()
        return call(inner, u).sin() + u

    return call(outer, w.clone()).sum()


class Failing(Case):
    def tearDown(self) -> None:
        # till then the engine holds a backward that has failed
        torch.ones((), requires_grad=True).sin().backward()
        super().tearDown()


class AllowMutation(Failing):
    def gradients(
        self, program: Callable[[Call, torch.Tensor], torch.Tensor], call: Call
    ) -> list[torch.Tensor]:
        w = weights()
        with allow_mutation_on_saved_tensors():
            loss = program(call, w)
            first = torch.autograd.grad(loss, w, retain_graph=True)
            return [*first, *torch.autograd.grad(loss, w)]

    def test_what_is_the_same_as_without_a_region(self) -> None:
        for program in (
            argument_after_the_call, inside, argument_inside, result_after_the_call,
            argument_of_the_next_region
        ):  # fmt: skip
            expected = self.gradients(program, plain)
            for call in (remat.checkpoint, copying, selective, drop_in):
                with self.subTest(program=program.__name__, call=call):
                    self.check_equal(self.gradients(program, call), expected)

    def test_what_would_be_another_gradient_is_an_error(self) -> None:
        # In each of these upstream's gradients are silently wrong.
        for program, kind in (
            (capture, remat.ErrorKind.CAPTURE_CHANGED),
            (view_of_an_argument, remat.ErrorKind.INPUT_CHANGED),
            (gradient_inside, remat.ErrorKind.VALUE_MISMATCH),
            (nested, remat.ErrorKind.VALUE_MISMATCH),
        ):
            for call in (remat.checkpoint, selective, *(() if program is capture else (drop_in,))):
                with self.subTest(program=program.__name__, call=call):
                    with self.assertRaises(remat.CheckpointError) as caught:
                        self.gradients(program, call)
                    self.assertEqual(caught.exception.kind, kind)

    def test_a_region_that_copies_is_right_where_torch_is_not(self) -> None:
        # The scope looks for tensors that share memory by their first addresses, and misses a[1].
        w = weights()
        right = torch.autograd.grad(w[:2].sin().exp().sum(), w)
        self.check_equal(self.gradients(view_of_an_argument, copying), [*right, *right])
        self.assertFalse(torch.equal(self.gradients(view_of_an_argument, plain)[0], right[0]))

    def test_a_backward_after_the_scope_is_torch_s_error(self) -> None:
        for call in (plain, remat.checkpoint, drop_in):
            with allow_mutation_on_saved_tensors():
                loss = argument_after_the_call(call, weights())
            with self.assertRaisesRegex(
                AssertionError, "outside of the 'allow_mutation_on_saved_tensors'"
            ):
                loss.backward()

    def test_a_scope_of_the_function_s_own(self) -> None:
        def function(t: torch.Tensor) -> torch.Tensor:
            with allow_mutation_on_saved_tensors():
                b = t.clone()
                squares = (b**2).sum()
                b.sin_()
                (gradient,) = torch.autograd.grad(squares, t)
            return (gradient * t.sin()).sum()

        def of(call: Call) -> tuple[torch.Tensor, ...]:
            w = weights()
            return torch.autograd.grad(call(function, w), w)

        for call in (remat.checkpoint, copying, selective, drop_in):
            self.check_equal(of(call), of(plain))


# ---- functions of regions inside that write to their argument ------------------------------------


class RegionsInside(Failing):
    """Plain autograd runs these. Upstream's recompute of the inner region begins with what it has
    written."""

    FUNCTIONS = (
        lambda t: (t.mul_(2) @ t.cos()).sin(), lambda t: t.add_(1).sin(),
        lambda t: t.sigmoid_() @ t.detach(),
    )  # fmt: skip

    def gradient(
        self, outer: Call, inner: Call, function: Function, before: Function
    ) -> torch.Tensor:
        w = weights()
        outer(lambda x: inner(function, before(x)).sin(), w).sum().backward()
        assert w.grad is not None
        return w.grad

    def test_a_copy_makes_them_right(self) -> None:
        for function in self.FUNCTIONS:
            for before in (torch.clone, torch.sin, lambda x: x @ x):
                expected = self.gradient(plain, plain, function, before)
                for outer in (plain, remat.checkpoint, copying, drop_in):
                    for inner in (copying, functools.partial(copying, policy=remat.save_ops(MM))):
                        self.check_equal(self.gradient(outer, inner, function, before), expected)

    def test_without_one_the_error_says_how(self) -> None:
        for function in self.FUNCTIONS:
            for outer, inner in (
                (remat.checkpoint, remat.checkpoint), (remat.checkpoint, selective),
                (drop_in, selective_drop_in),
                (selective, remat.checkpoint),
            ):  # fmt: skip
                with self.subTest(outer=outer, inner=inner):
                    with self.assertRaises(remat.CheckpointError) as caught:
                        self.gradient(outer, inner, function, torch.sin)
                    self.assertEqual(caught.exception.kind, remat.ErrorKind.VALUE_MISMATCH)
                    text = str(caught.exception)
                    self.assertIn(
                        "as an argument of an inner region, is at version 1; expected version 0",
                        text,
                    )
                    self.assertIn(
                        "the function of the inner region writes to its own argument", text
                    )
                    self.assertIn('Hint: set input_mode="copy_on_write" of the inner region', text)
                    self.assertNotIn("plain autograd refuses", text)


class Neuron(torch.nn.Module):
    """Keeps its potential, with a history, from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.v = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = []
        for t in x:
            self.v = self.v + (t - self.v) / 2
            out.append(torch.sigmoid(self.v))
        return torch.stack(out)


class StateWithHistory(Case):
    """A member that each call assigns anew is put back where it had no history, and found changed
    where it had; the drop-in recomputes with it, as upstream does."""

    def gradient(self, call: Call, times: int = 1) -> torch.Tensor:
        neuron, x = Neuron(), torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        for _ in range(times):
            out = call(neuron, x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        return gradient

    def test_without_a_history_it_is_put_back(self) -> None:
        plain = self.gradient(lambda neuron, x: neuron(x))
        self.assertTrue(torch.equal(self.gradient(remat.checkpoint), plain))

    def test_with_one_it_is_an_error(self) -> None:
        with self.assertRaises(remat.CheckpointError) as caught:
            self.gradient(remat.checkpoint, times=2)
        self.assertEqual(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
        self.assertIn("made by AddBackward0 after forward began", str(caught.exception))
        # LibTorch's queue lets go of the one that threw
        torch.ones(1, requires_grad=True).sum().backward()

    def test_the_drop_in_does_as_upstream(self) -> None:
        upstream = self.gradient(functools.partial(checkpoint, use_reentrant=False))
        self.assertTrue(torch.equal(self.gradient(drop_in), upstream))

    def test_a_function_of_pythons_that_is_given_state(self) -> None:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
                return t * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient * 2

        state = [torch.zeros(3)]
        x = torch.ones(3, requires_grad=True)

        def function(t: torch.Tensor) -> torch.Tensor:
            state[0] = state[0] * 0.5 + t
            twice: torch.Tensor = Twice.apply(state[0])
            before = Twice.apply(Twice.apply(state[0] + 1))
            state[0] = t * 3
            return twice.sin() + before.sin()

        def first(t: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = Twice.apply(state[0]).sin()
            state[0] = t * 3
            return y + t

        for each in (function, first):
            remat.checkpoint(each, x)
            y = remat.checkpoint(each, x)
            with self.assertRaises(remat.CheckpointError):
                y.sum().backward()


class Preferred(Case):
    """Results that a policy only prefers to keep may be changed in place."""

    def test_convolutions_whose_results_are_overwritten(self) -> None:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.SiLU(inplace=True),
            torch.nn.Conv2d(4, 4, 3), torch.nn.SiLU(inplace=True), torch.nn.Conv2d(4, 2, 3),
        )  # fmt: skip
        x = torch.randn(2, 3, 8, 8, requires_grad=True)

        def gradients(call: Call, **options: Any) -> list[torch.Tensor]:
            return list(
                torch.autograd.grad(call(net, x, **options).square().sum(), [x, *net.parameters()])
            )

        expected = gradients(plain)
        for a, b in zip(gradients(remat.checkpoint, policy=remat.save_matmuls()), expected):
            self.assertTrue(torch.equal(a, b))
        with self.assertRaises(remat.CheckpointError) as caught:
            gradients(remat.checkpoint, policy=remat.save_ops(["aten::convolution"]))
        self.assertEqual(caught.exception.kind, remat.ErrorKind.SELECTIVE_MUTATION)


if __name__ == "__main__":
    unittest.main()
