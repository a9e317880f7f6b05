"""Exceptions of a signal's handler, at any time of a step: none may be lost. As a program, the long
check:

    PYTHONPATH=build/python:python/tests python python/tests/signals.py 10000
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from typing import Any, Callable

import torch
from torch.utils.checkpoint import checkpoint

import remat
from common import leaf


class Timeout(Exception):
    pass


def operators(t: torch.Tensor) -> torch.Tensor:
    try:
        return torch.sin(torch.exp(torch.cos(t)))
    finally:
        len([each for each in range(3)])


def with_rest(t: torch.Tensor) -> torch.Tensor:
    (y,) = [torch.sin(each) for each in map(torch.cos, [t])]
    return y + 1


def with_hooks(t: torch.Tensor) -> torch.Tensor:
    # There is no `with`: an exception between the code of `__enter__` and the body leaves the
    # context open, without regions, too.
    y = t.sin()
    y.register_hook(lambda gradient: gradient * len([1]))
    z = y.cos()
    z.grad_fn.register_hook(lambda inputs, outputs: None)  # type: ignore[union-attr]
    z.grad_fn.register_prehook(lambda outputs: None)  # type: ignore[union-attr]
    return z.exp() + y


def upstreams(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    return checkpoint(function, *args, use_reentrant=False)


def nested(region: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: region(operators, region(with_rest, t.sin())).cos()


def keeps(context: remat.PolicyContext) -> bool:
    return len([context.op_name]) == 1 and "exp" in context.op_name


# Policies are kept: a policy that dies runs a callback of `weakref`, and the interpreter lets no
# exception out of it.
POLICY = remat.Policy(keeps, ask_again=True)
Region = Callable[[torch.Tensor], torch.Tensor]
WAYS: dict[str, Region] = {
    "own": lambda x: remat.checkpoint(operators, x),
    "own, with a rest": lambda x: remat.checkpoint(with_rest, x),
    "own, nested": lambda x: remat.checkpoint(nested(remat.checkpoint), x),
    "own, hooks": lambda x: remat.checkpoint(with_hooks, x),
    "own, a policy": lambda x: remat.checkpoint(operators, x, policy=POLICY),
    "drop-in": lambda x: upstreams(operators, x),
    "drop-in, with a rest": lambda x: upstreams(with_rest, x),
    "drop-in, nested": lambda x: upstreams(nested(upstreams), x),
    "drop-in, hooks": lambda x: upstreams(with_hooks, x),
}


def count(way: str, num_exceptions: int, seconds: float) -> tuple[int, int]:
    """Returns the number of exceptions that the handler has raised inside of steps, at most for
    that time; and the number of them that came out."""
    region = WAYS[way]
    x = leaf(3)
    raised = caught = 0

    def step() -> None:
        region(x).sum().backward()

    def handle(number: int, frame: Any) -> None:
        nonlocal raised
        while frame is not None and frame.f_code is not step.__code__:
            frame = frame.f_back
        if frame is not None:
            raised += 1
            raise Timeout

    lengths = []
    with contextlib.ExitStack() as stack:
        if way.startswith("drop-in"):
            remat.install()
            stack.callback(remat.uninstall)
        stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handle))
        for _ in range(20):
            begin = time.perf_counter()
            step()
            lengths.append(time.perf_counter() - begin)
        length = sorted(lengths)[10]
        begin = time.monotonic()
        while raised < num_exceptions and time.monotonic() - begin < seconds:
            delay = random.uniform(1e-6, 1.2 * length)
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                step()
            except Timeout:
                caught += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    return raised, caught


if __name__ == "__main__":
    failed = False
    for each in WAYS:
        num_raised, num_caught = count(each, int(sys.argv[1]), seconds=3600)
        print(f"{each}: {num_raised} raised, {num_raised - num_caught} lost", flush=True)
        failed = failed or num_raised != num_caught
    sys.exit(failed)
