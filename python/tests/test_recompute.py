"""Recomputes: their ends, forwards that wait for them, and backwards inside them."""

from __future__ import annotations

import contextlib
import unittest
from typing import Any, Callable

import torch
import torch.utils.checkpoint as upstream

import remat
from common import Case, CountedFunction, gradient, leaf, operators


class Stops(Case):
    def test_a_recompute_ends_with_the_last_tensor_needed(self) -> None:
        x = leaf(128, 128)
        f = CountedFunction(lambda t: (t.sin().exp().cos() + 1) * 2)
        gradient(remat.checkpoint(f, x), x)
        self.assertEqual((f.runs, f.ends), (2, 1))
        f = CountedFunction(f.function)
        gradient(remat.checkpoint(f, x, early_stop=False), x)
        self.assertEqual((f.runs, f.ends), (2, 2))

    def test_contexts_are_left(self) -> None:
        x = leaf(128, 128)
        events = []

        @contextlib.contextmanager
        def context() -> object:  # type: ignore[misc]
            events.append("in")
            try:
                yield
            finally:
                events.append("out")

        def f(t: torch.Tensor) -> torch.Tensor:
            with context():
                return t.sin().exp().cos() + 1

        gradient(remat.checkpoint(f, x), x)
        self.assertEqual(events, ["in", "out"] * 2)

    def test_a_function_may_catch_everything(self) -> None:
        x = leaf(128, 128)

        def f(t: torch.Tensor) -> torch.Tensor:
            try:
                return t.sin().exp().cos()
            except BaseException:
                return t.tanh().sigmoid()

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(x.sin().exp().cos(), x))

    def test_a_function_may_turn_it_into_another_exception(self) -> None:
        x = leaf(128, 128)

        def f(t: torch.Tensor) -> torch.Tensor:
            try:
                return t.sin().exp().cos()
            except Exception as error:
                raise ValueError("mine") from error

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(x.sin().exp().cos(), x))

    def test_custom_functions_are_stopped(self) -> None:
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):  # type: ignore[no-untyped-def]
                ctx.save_for_backward(t)
                return t * t

            @staticmethod
            def backward(ctx, g):  # type: ignore[no-untyped-def]
                (t,) = ctx.saved_tensors
                return g * 2 * t

        x = leaf(128, 128)
        f = lambda t: Square.apply(Square.apply(t.sin())) + 1  # noqa: E731
        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

    def test_a_generator_and_a_comprehension_are_ended(self) -> None:
        x = leaf(128, 128)

        def parts(t: torch.Tensor) -> object:
            for _ in range(3):
                t = t.sin().exp()
                yield t

        f = lambda t: sum(each for each in parts(t)) + 1  # type: ignore[attr-defined]  # noqa: E731
        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))


class Waiting(Case):
    """Forward can wait for a recompute: that runs nothing that forward has not run yet."""

    def check(self, before: Callable[[torch.Tensor], Any]) -> None:
        def run(call: Callable[..., Any]) -> tuple[list[float], int, list[float]]:
            runs: list[int] = []

            def function(t: torch.Tensor) -> torch.Tensor:
                before(w)
                runs.append(1)
                return t.mul_(3)

            w, x = leaf(2), leaf(2, seed=1)
            argument = x * 1
            (gradient,) = torch.autograd.grad(call(function, argument).sum(), x)
            return argument.tolist(), len(runs), gradient.tolist()

        expected = run(lambda function, x: function(x))
        self.assertEqual(run(remat.checkpoint), expected)
        with remat.installed():
            self.assertEqual(
                run(lambda function, x: upstream.checkpoint(function, x, use_reentrant=False)),
                expected,
            )

    def test_saved_tensors_that_a_function_reads(self) -> None:
        self.check(lambda w: w.exp().grad_fn._saved_result.clone())  # type: ignore[union-attr]
        self.check(lambda w: w.sin().grad_fn._saved_self.clone())  # type: ignore[union-attr]

    def test_a_backward_with_a_region_in_a_hook(self) -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                own = gradient.detach().requires_grad_()
                return (
                    gradient
                    * torch.autograd.grad(
                        remat.checkpoint(lambda t: t.sin().exp(), own).sum(), own
                    )[0]
                )

        def before(w: torch.Tensor) -> None:
            y = w * 2
            y.register_hook(hook)
            torch.autograd.grad(y, y, torch.ones_like(y), retain_graph=True)

        self.check(before)


class BackwardInside(Case):
    def test_gradients_accumulate_once(self) -> None:
        w = leaf(seed=2)

        def f(t: torch.Tensor) -> torch.Tensor:
            own = t.detach().requires_grad_()
            (own * w).sin().sum().backward()
            return (t * own.grad).sin()

        for call in (torch.autograd.backward, torch.Tensor.backward):
            x = leaf(seed=1)
            plain = f(x)
            call(plain.sum())
            expected = (x.grad.clone(), w.grad.clone())
            x.grad = w.grad = None
            for early_stop in (True, False):
                call(remat.checkpoint(f, x, early_stop=early_stop).sum())
                self.check_equal((x.grad, w.grad), expected)
                x.grad = w.grad = None

    def test_gradients_of_the_region_itself(self) -> None:
        x = leaf()

        def f(t: torch.Tensor) -> torch.Tensor:
            y = t.sin().exp()
            (slope,) = torch.autograd.grad(y.sum(), t, create_graph=True)
            return y * slope

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

    def test_edges_of_the_graph_are_roots_and_targets(self) -> None:
        x = leaf()

        def f(t: torch.Tensor) -> torch.Tensor:
            own = t.detach().requires_grad_()
            y = own.sin().exp()
            edge = torch.autograd.graph.get_gradient_edge(y)
            target = torch.autograd.graph.get_gradient_edge(own)
            (slope,) = torch.autograd.grad([edge], [target], [torch.ones_like(y)])
            return (t * slope).cos()

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

    def test_a_backward_beyond_the_region_is_refused(self) -> None:
        x = leaf()
        above = x.exp()

        def f(t: torch.Tensor) -> torch.Tensor:
            y = t.sin()
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return y.cos() * slope

        with self.assertRaises(remat.CheckpointError) as caught:
            gradient(remat.checkpoint(f, above), x)
        self.assertIs(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)

    def test_backward_from_inside_backward(self) -> None:
        x = leaf()

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):  # type: ignore[no-untyped-def]
                ctx.save_for_backward(t)
                return t.clone()

            @staticmethod
            def backward(ctx, g):  # type: ignore[no-untyped-def]
                (t,) = ctx.saved_tensors
                with torch.enable_grad():
                    own = t.detach().requires_grad_()
                    return g * gradient(remat.checkpoint(operators, own), own)[0]

        f = lambda t: Inner.apply(t.sin()).exp()  # noqa: E731
        found = gradient(remat.checkpoint(f, x), x)
        expected = gradient(f(x), x)
        self.check_equal(found, expected)


if __name__ == "__main__":
    unittest.main()
