"""Functions with gradient rules of their own: `custom_function`."""

from __future__ import annotations

import math
import unittest
from typing import Any, Callable

import torch

import remat
from common import Case, gradient, leaf

Tensors = tuple[torch.Tensor, ...]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def formula(saved: Tensors, gradients: Tensors) -> Tensors:
    q, k, v, p = saved
    (g,) = gradients
    dp = g @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, p.mT @ g


class Attention:
    """Keeps the log-sum-exp of its scores."""

    def __init__(self) -> None:
        self.forwards = self.rebuilds = 0
        self.function = remat.custom_function(self.forward, self.rematerialize, formula)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, Tensors]:
        self.forwards += 1
        sums = scores(q, k).logsumexp(-1, keepdim=True)
        return (scores(q, k) - sums).exp() @ v, (sums,)

    def rematerialize(self, small: Tensors, inputs: Tensors) -> Tensors:
        self.rebuilds += 1
        return *inputs, (scores(inputs[0], inputs[1]) - small[0]).exp()


class Keeping(torch.autograd.Function):
    """The same formula over probabilities that autograd keeps."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = (scores(q, k) - scores(q, k).logsumexp(-1, keepdim=True)).exp()
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tensors:
        return formula(ctx.saved_tensors, gradients)


def inputs(dtype: torch.dtype = torch.float32) -> Tensors:
    return tuple(leaf(32, 8, seed=i).detach().to(dtype).requires_grad_() for i in range(3))


def sine(small: Callable[[torch.Tensor], Any]) -> remat.CustomFunction:
    return remat.custom_function(
        lambda x: (x.sin(), small(x)),
        lambda small, inputs: inputs[0].cos(),
        lambda saved, gradients: saved * gradients[0],
    )


class Rules(Case):
    def test_backward_rebuilds(self) -> None:
        given = inputs()
        attention = Attention()
        y = attention.function(*given)
        expected = gradient(Keeping.apply(*given), *given)
        for rebuilds in (1, 2):
            self.check_equal(gradient(y, *given, retain_graph=True), expected)
            self.assertEqual((attention.forwards, attention.rebuilds), (1, rebuilds))
        saved = {each.shape for each in remat.saved_tensors(y)}
        self.assertEqual(saved, {torch.Size([32, 8]), torch.Size([32, 1])})

    def test_any_order(self) -> None:
        given = inputs(torch.float64)
        attention = Attention()
        self.assertTrue(torch.autograd.gradcheck(attention.function, given))
        self.assertTrue(torch.autograd.gradgradcheck(attention.function, given))

        def third(y: torch.Tensor) -> Tensors:
            first = gradient(y.sin(), *given, create_graph=True)
            second = gradient((first[0] * first[1]).exp() + first[2], *given, create_graph=True)
            return gradient(second[0] + second[1] * second[2], *given)

        expected = third(scores(*given[:2]).softmax(-1) @ given[2])
        for found, right in zip(third(attention.function(*given)), expected):
            torch.testing.assert_close(found, right)

    def test_in_regions_and_under_hooks(self) -> None:
        given = inputs()
        attention = Attention()

        def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = attention.function(q.sin(), k.cos(), v).tanh()
            return result

        expected = gradient(f(*given), *given)
        self.check_equal(gradient(remat.checkpoint(f, *given), *given), expected)
        self.check_equal(
            gradient(remat.checkpoint(lambda *t: remat.checkpoint(f, *t) * 1, *given), *given),
            expected,
        )
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = f(*given)
        self.check_equal(gradient(y, *given), expected)

        def twice(y: torch.Tensor) -> Tensors:
            return gradient(gradient(y, *given, create_graph=True)[0], *given)

        self.check_equal(twice(remat.checkpoint(f, *given)), twice(f(*given)))

    def test_autocast(self) -> None:
        given = inputs()
        seen = []

        def rematerialize(small: Tensors, given: Tensors) -> Tensors:
            seen.append((given[0] @ given[1].mT).dtype)
            return *given, (scores(*given[:2]).float() - small[0]).exp()

        def backward(saved: Tensors, gradients: Tensors) -> Tensors:
            seen.append((saved[0] @ saved[1].mT).dtype)
            return formula(saved, (gradients[0].float(),))

        function = remat.custom_function(Attention().forward, rematerialize, backward)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(*given)
        gradient(y, *given)
        self.assertEqual(seen, [torch.bfloat16, torch.float32])

    def test_small_tensors_that_are_not_given_again(self) -> None:
        x = leaf(32)

        def second(function: remat.CustomFunction) -> Tensors:
            return gradient(gradient(function(x), x, create_graph=True)[0], x)

        for small in (lambda t: (torch.rand_like(t) * t,), lambda t: (torch.rand_like(t) > 0.5,)):
            with self.assertRaisesRegex(
                remat.CheckpointError, "other small tensors when it ran again"
            ) as caught:
                second(sine(small))
            self.assertEqual(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)
        with self.assertRaisesRegex(remat.CheckpointError, "a small tensor without a gradient"):
            second(sine(lambda t: (t.detach().exp(),)))
        self.check_equal(gradient(sine(lambda t: (t.detach().exp(),))(x), x), (x.cos(),))
        for right in (sine(lambda t: ()), sine(lambda t: (t > 0, 3))):
            self.check_equal(second(right), (-x.sin(),))

    def test_other_arguments_and_outputs(self) -> None:
        x, factor = leaf(4), torch.ones(4)
        received: list[Any] = []

        def backward(saved: Any, gradients: Tensors) -> Any:
            received.extend(gradients)
            t, power, other = saved
            return gradients[0] * power * t ** (power - 1) * other, None, None

        function = remat.custom_function(
            lambda t, power, other: ((t**power * other, t.exp()), ()),
            lambda small, given: given,
            backward,
        )
        self.check_equal(gradient(function(x, 3, factor)[0], x), (3 * x**2,))
        self.check_equal(received, (torch.ones(4), torch.zeros(4)))
        wrong = remat.custom_function(
            lambda t: (t.sin(), ()), lambda small, given: given, lambda saved, g: (g[0], None)
        )
        with self.assertRaisesRegex(ValueError, "returned 2 gradients for 1 inputs"):
            gradient(wrong(x), x)

    def test_only_forward_runs(self) -> None:
        x = leaf(4)
        function = sine(lambda t: ())
        with torch.no_grad():
            self.assertFalse(function(x).requires_grad)
        self.assertFalse(function(x.detach()).requires_grad)
        self.check_equal(torch.func.grad(lambda t: function(t).sum())(x.detach()), x.cos())
        self.check_equal(torch.func.jvp(function, (x.detach(),), (torch.ones(4),))[1], x.cos())
        self.check_equal(torch.vmap(function)(x.detach()), x.sin())

    def test_inputs_changed_in_place(self) -> None:
        x = leaf(4)
        y = x * 2
        z = sine(lambda t: ())(y)
        y.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            gradient(z, x)


class Transforms(Case):
    """Regions inside transforms, and with tangents."""

    def test_regions_run_plainly(self) -> None:
        w = leaf()

        def f(x: torch.Tensor) -> torch.Tensor:
            return remat.checkpoint(lambda t: (t @ w).sin(), x).sum()

        def plain(x: torch.Tensor) -> torch.Tensor:
            return (x @ w).sin().sum()

        x, v = torch.randn(4, 4), torch.randn(4, 4)
        with self.assertWarnsRegex(
            UserWarning, "runs plainly: autograd keeps every tensor"
        ) as caught:
            self.check_equal(torch.func.grad(f)(x), torch.func.grad(plain)(x))
        self.assertEqual(len(caught.warnings), 1)
        self.assertIn('pass transforms="refuse"', str(caught.warning))
        self.check_equal(torch.vmap(f)(x), torch.vmap(plain)(x))
        self.check_equal(torch.vmap(torch.func.grad(f))(x), torch.vmap(torch.func.grad(plain))(x))
        self.check_equal(torch.func.hessian(f)(x), torch.func.hessian(plain)(x))
        self.check_equal(
            torch.func.jvp(torch.func.grad(f), (x,), (v,))[1],
            torch.func.jvp(torch.func.grad(plain), (x,), (v,))[1],
        )

    def test_forward_mode(self) -> None:
        forward_ad = torch.autograd.forward_ad

        def products(f: Callable[[torch.Tensor], torch.Tensor]) -> Any:
            with forward_ad.dual_level():
                x = leaf()
                y = f(forward_ad.make_dual(x, torch.ones(4, 4)))
                (first,) = gradient(y, x, create_graph=True)
                return forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(first).tangent

        self.check_equal(products(lambda t: remat.checkpoint(torch.sin, t)), products(torch.sin))

    def test_they_can_be_refused(self) -> None:
        with self.assertRaisesRegex(
            remat.CheckpointError, "inside a functorch transform"
        ) as caught:
            torch.func.grad(
                lambda t: remat.checkpoint(torch.sin, t, transforms="refuse").sum()
            )(torch.ones(3))
        self.assertIn('leave transforms="plain"', str(caught.exception))
        self.assertEqual(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)

    def test_modules_write_their_buffers_once(self) -> None:
        norm = torch.nn.BatchNorm1d(4)
        x = leaf()

        def f(t: torch.Tensor) -> torch.Tensor:
            forward_ad = torch.autograd.forward_ad
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(t, torch.ones_like(t))
                return forward_ad.unpack_dual(remat.checkpoint(norm, dual)).primal.sin()

        expected = torch.nn.BatchNorm1d(4)
        gradient(expected(x).sin(), x)
        gradient(remat.checkpoint(f, x), x)
        self.check_equal(norm.running_mean, expected.running_mean)


if __name__ == "__main__":
    unittest.main()
