"""Variables around a function and its callees: a recompute finds their values of forward."""

from __future__ import annotations

import functools
import gc
import unittest
import weakref
from typing import Any, Callable

import torch

import remat
from common import Case, gradient, leaf

Function = Callable[[torch.Tensor], torch.Tensor]
Program = Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]


def plainly(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return function(*args)


def by_helper(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    def helper(t: torch.Tensor) -> torch.Tensor:
        return t * scale

    for scale in (2.0, 3.0):
        y = region(lambda t: helper(t).sin(), y)
    return y


def by_two_helpers(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        return t * scale

    def outer(t: torch.Tensor) -> torch.Tensor:
        return inner(t).sin() * inner(t)

    for scale in (2.0, 3.0):
        y = region(lambda t: outer(t).cos(), y)
    return y


def by_wrapper(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(t: torch.Tensor) -> torch.Tensor:
            return function(t).sin()

        return wrapper

    @decorated
    def block(t: torch.Tensor) -> torch.Tensor:
        return t * scale

    for scale in (2.0, 3.0):
        y = region(block, y)
    return y


def by_partial(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    def block(t: torch.Tensor, factor: float, *, then: Function) -> torch.Tensor:
        return then(t * scale * factor)

    def then(t: torch.Tensor) -> torch.Tensor:
        return (t * scale).sin()

    bound = functools.partial(block, factor=0.5, then=then)
    for scale in (2.0, 3.0):
        y = region(bound, y)
        y = region(lambda t: bound(t).cos(), y)
    return y


def by_default(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    def helper(t: torch.Tensor) -> torch.Tensor:
        return t * scale

    def block(
        t: torch.Tensor, first: Function = helper, *, second: Function = helper
    ) -> torch.Tensor:
        return first(second(t).sin()).cos()

    for scale in (2.0, 3.0):
        y = region(block, y)
    return y


def by_method(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    class Block:
        def run(self, t: torch.Tensor) -> torch.Tensor:
            return (t * scale).sin()

    run = Block().run
    for scale in (2.0, 3.0):
        y = region(run, y)
        y = region(lambda t: run(t).cos(), y)
    return y


def by_recursion(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    def repeated(t: torch.Tensor, times: int) -> torch.Tensor:
        return t if times == 0 else repeated((t * scale).sin(), times - 1)

    def even(t: torch.Tensor, times: int) -> torch.Tensor:
        return t if times == 0 else odd((t * scale).cos(), times - 1)

    def odd(t: torch.Tensor, times: int) -> torch.Tensor:
        return even((t * scale).sin(), times - 1)

    for scale in (2.0, 3.0):
        y = region(repeated, y, 2)
        y = region(lambda t: even(t, 4), y)
    return y


def by_another_helper(region: Callable[..., torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    def made(scale: float) -> Function:
        return lambda t: (t * scale).sin()

    def block(t: torch.Tensor) -> torch.Tensor:
        return helper(t).cos()

    for helper in (made(2.0), made(3.0)):
        y = region(block, y)
        y = region(lambda t: block(t) * block(t), y)
    return y


PROGRAMS: list[Program] = [
    by_helper, by_two_helpers, by_wrapper, by_partial, by_default, by_method, by_recursion,
    by_another_helper,
]  # fmt: skip


class Closures(Case):
    def test_recomputes_find_what_forward_found(self) -> None:
        for program in PROGRAMS:
            with self.subTest(program=program.__name__):
                x = leaf()
                self.check_equal(
                    gradient(program(remat.checkpoint, x), x), gradient(program(plainly, x), x)
                )

    def test_what_forward_wrote_to_is_the_programs(self) -> None:
        seen: list[int] = []
        count = 0

        def helper(t: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            seen.append(count)
            return (t * scale).sin()

        x = leaf()
        for scale in (2.0, 3.0):
            y = remat.checkpoint(lambda t: helper(t).cos(), x)
        gradient(y, x)
        scale = 5.0
        self.assertEqual((seen, count), ([1, 2, 3], 3))

    def test_attributes_of_a_function_are_the_programs(self) -> None:
        def helper(t: torch.Tensor) -> torch.Tensor:
            helper.runs += 1  # type: ignore[attr-defined]
            return (t * scale).sin()

        helper.runs = 0  # type: ignore[attr-defined]
        x = leaf()
        scale = 2.0
        y = remat.checkpoint(lambda t: helper(t).cos(), x)
        scale = 3.0
        self.check_equal(gradient(y, x), gradient((x * 2.0).sin().cos(), x))
        self.assertEqual(helper.runs, 2)  # type: ignore[attr-defined]

    def test_what_a_helper_refers_to_is_not_kept_alive(self) -> None:
        class State:
            pass

        def log() -> str:
            return f"{loss} {state} {losses}"

        def helper(t: torch.Tensor) -> torch.Tensor:
            if log is None:
                log()
            return t.sin().exp()

        x = leaf()
        loss: Any = (x * 2).sum()
        state: Any = State()
        losses: Any = [loss]
        dead = [weakref.ref(each) for each in (loss, state)]
        y = remat.checkpoint(lambda t: helper(t).cos(), x)
        loss = state = losses = None
        gc.collect()
        self.assertEqual([each() for each in dead], [None, None])
        self.check_equal(gradient(y, x), gradient(x.sin().exp().cos(), x))

    def test_what_is_gone_is_an_error(self) -> None:
        def helper(t: torch.Tensor) -> torch.Tensor:
            return t.sin() * other

        x = leaf()
        other = x * 2
        y = remat.checkpoint(lambda t: helper(t).cos(), x)
        other = x * 3
        with self.assertRaisesRegex(NameError, "other"):
            gradient(y, x)
        del y, other, helper
        gc.collect()


if __name__ == "__main__":
    unittest.main()
