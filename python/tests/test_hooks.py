"""Hooks over several tensors that a region's function registers: their objects go with the
recompute."""

from __future__ import annotations

import functools
import gc
import unittest
import warnings
from typing import Any, Callable

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import remat
from common import Case, gradient

Function = Callable[[torch.Tensor], torch.Tensor]
Call = Callable[[Function, torch.Tensor], torch.Tensor]


def drop_in(function: Function, x: torch.Tensor) -> torch.Tensor:
    with remat.installed():
        result: torch.Tensor = checkpoint(function, x, use_reentrant=False)
        return result


def nested(function: Function, x: torch.Tensor) -> torch.Tensor:
    return remat.checkpoint(lambda t: remat.checkpoint(function, t).sin(), x)


CALLS: tuple[Call, ...] = (
    remat.checkpoint, drop_in, nested,
    functools.partial(remat.checkpoint, determinism_check="values"),
    functools.partial(remat.checkpoint, policy=remat.save_matmuls()),
)  # fmt: skip


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 + 0 * ctx.saved_tensors[0]


class MultiGradHooks(Case):
    def setUp(self) -> None:
        super().setUp()
        self.calls = 0
        self.kept: list[torch.Tensor] = []

    def hook(self, gradients: Any) -> None:
        self.calls += 1

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.cos()
        register_multi_grad_hook([a, b], self.hook)
        return b.exp().sin()

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.cos()
        register_multi_grad_hook([a, b], self.hook)
        register_multi_grad_hook([b], self.hook)
        return b.exp().sin()

    def functions(self, x: torch.Tensor) -> torch.Tensor:
        a = Doubled.apply(x.sin())  # type: ignore[no-untyped-call]
        b = Doubled.apply(a.cos())  # type: ignore[no-untyped-call]
        register_multi_grad_hook([a, b], self.hook)
        return b.exp().sin()  # type: ignore[no-any-return]

    def backward_inside(self, x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.cos()
        register_multi_grad_hook([a, b], self.hook)
        (gradient,) = torch.autograd.grad(b.sum(), a, create_graph=True)
        return gradient * b

    def steps(self, function: Function, call: Call) -> tuple[int, torch.Tensor]:
        """Returns the hook's calls in four steps, and the gradient; nothing may stay, without the
        collector."""
        self.calls = 0
        gc.collect()
        gc.disable()
        try:
            x = torch.linspace(0, 1, 1000).requires_grad_()
            meter = remat.MemoryMeter()
            after = []
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for _ in range(4):
                    x.grad = None
                    call(function, x).sum().backward()
                    after.append(meter.live_bytes)
            self.assertEqual(after[1], after[3], "a step keeps something")
            self.assertEqual(
                [str(each.message) for each in seen if "still there" in str(each.message)], []
            )
            self.assertEqual(remat.counters()["frames_alive"], 0)
            assert x.grad is not None
            return self.calls, x.grad
        finally:
            gc.enable()

    def test_they_keep_nothing_of_a_recompute(self) -> None:
        for function in (self.pair, self.twice, self.functions):
            expected_calls, expected = self.steps(function, lambda function, x: function(x))
            self.assertEqual(expected_calls, 8 if function == self.twice else 4)
            for call in CALLS:
                with self.subTest(function=function, call=call):
                    calls, found = self.steps(function, call)
                    self.assertEqual(calls, expected_calls)
                    if call is not nested:
                        self.check_equal(found, expected)

    def test_a_backward_inside_calls_them_in_each_run(self) -> None:
        plain, expected = self.steps(self.backward_inside, lambda function, x: function(x))
        self.assertEqual(plain, 2 * 4)
        for call in (remat.checkpoint, drop_in):
            calls, found = self.steps(self.backward_inside, call)
            # The hook runs as with upstream's regions: forward, recompute, the backward itself.
            self.assertEqual(calls, 3 * 4)
            self.check_equal(found, expected)

    def test_a_graph_that_is_put_outside_keeps_them(self) -> None:
        seen: list[list[bool]] = []

        def function(x: torch.Tensor) -> torch.Tensor:
            a = x.sin()
            b = a.cos()
            c = x.exp()
            register_multi_grad_hook(
                [a, b, c], lambda gradients: seen.append([each is not None for each in gradients])
            )
            self.kept.append(b)
            return (b * c).exp().sin()

        for call in (remat.checkpoint, drop_in):
            self.kept.clear()
            seen.clear()
            x = torch.linspace(0, 1, 1000).requires_grad_()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(function, x).sum().backward()
            self.assertEqual(seen, [[True, True, True]])
            # The backward goes through the recompute's graph, of which c's node is gone.
            self.kept[1].sum().backward()
            self.assertEqual(seen[1:], [[True, True, False]])
        self.kept.clear()

    def test_leaves_from_outside(self) -> None:
        w = torch.ones(1000, requires_grad=True)

        def function(x: torch.Tensor) -> torch.Tensor:
            a = (x * w).sin()
            register_multi_grad_hook([w, x, a], self.hook).remove()
            register_multi_grad_hook([a, w], self.hook)
            return a.cos()

        x = torch.linspace(0, 1, 1000).requires_grad_()
        meter = remat.MemoryMeter()
        remat.checkpoint(function, x).sum().backward()
        before = meter.live_bytes
        calls = self.calls
        for _ in range(3):
            remat.checkpoint(function, x).sum().backward()
        self.assertEqual(meter.live_bytes, before)
        # All hooks of a leaf stay, as in plain autograd.
        self.assertEqual((calls, self.calls), (1, 1 + 2 + 3 + 4))


class HooksThatKeepTheTensor(Case):
    """A pack function that returns its argument makes a cycle where an operator saves its
    result."""

    def setUp(self) -> None:
        super().setUp()
        self.packed: list[tuple[bool, ...]] = []

    def identity(self) -> Any:
        def pack(t: torch.Tensor) -> torch.Tensor:
            self.packed.append((t.requires_grad, t.is_leaf, t.grad_fn is None, t is self.w))
            return t

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)

    def gradient_inside(self, t: torch.Tensor) -> torch.Tensor:
        y = t.sin().exp().tanh()
        (slope,) = torch.autograd.grad(y.sum(), t, create_graph=True)
        return y * slope

    def test_they_keep_nothing_of_a_recompute(self) -> None:
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        self.w = torch.linspace(0, 1, 1000).requires_grad_()
        for hooks in (self.identity, torch.autograd.graph.save_on_cpu):

            def function(x: torch.Tensor) -> torch.Tensor:
                with hooks():
                    y = (x * self.w).exp().tanh()
                return y.sin()

            (expected,) = gradient(function(self.w), self.w)
            for call in CALLS:
                with self.subTest(hooks=hooks, call=call):
                    meter = remat.MemoryMeter()
                    for step in range(4):
                        self.packed.clear()
                        (found,) = gradient(call(function, self.w), self.w)
                        if step == 1:
                            before = meter.live_bytes
                        if call is not nested:
                            self.check_equal(found, expected)
                    self.assertEqual(meter.live_bytes, before, "a step keeps something")
                    half = len(self.packed) // 2
                    if call is remat.checkpoint:  # the hooks are given the same in the recompute
                        self.assertEqual(self.packed[:half], self.packed[half:])

    def test_gradients_inside_go_through_them(self) -> None:
        self.w = torch.linspace(0, 1, 10).requires_grad_()

        def function(x: torch.Tensor) -> torch.Tensor:
            with self.identity():
                return self.gradient_inside(x * self.w)

        (expected,) = gradient(function(self.w), self.w)
        for call in (remat.checkpoint, drop_in):
            (found,) = gradient(call(function, self.w), self.w)
            self.check_equal(found, expected)


if __name__ == "__main__":
    unittest.main()
