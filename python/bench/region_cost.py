#!/usr/bin/env python3
"""The cost of a region in Python: remat beside torch.utils.checkpoint, interleaved in one process.

    python/bench/region_cost.py [--samples N] [--sample-ms MS] [--clock wall|thread] [--smoke]

Overhead of a region is what forward and backward take with it, less forward and backward without,
less one more
forward: differences of minima. Gradients are compared first. "drop-in": a stop where upstream
stops; "own": `remat.checkpoint`, a stop where it pays. bench/METHOD.md says what the numbers leave
out.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from measure import Side, parse, print_line, rounds, say

theirs = functools.partial(checkpoint, use_reentrant=False)


def chain(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = x.sin()
        return x

    return f


def products(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = torch.mv(MATRIX, x).sin()
    return x


def in_four(call: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    five = chain(5)

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = call(five, x)
        return x

    return f


REGIONS = 20  # a step is a chain of so many
MATRIX = torch.eye(4)
OPS = [torch.ops.aten.mv.default]
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, OPS)
POLICY = remat.save_ops(OPS)

# Name: (plain function, with upstream's interface, with remat's own, wanted ratios of the drop-in
# and of the own)
Step = Callable[[torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[Step, Step, Step, float, float]] = {
    f"{n} operator{'s' if n > 1 else ''}": (
        chain(n),
        functools.partial(theirs, chain(n)),
        functools.partial(remat.checkpoint, chain(n)),
        wanted,
        wanted_own,
    )
    for n, wanted, wanted_own in ((1, 5, 20), (10, 7, 15), (100, 10, 0))
}
CASES["20, ten of them kept"] = (
    products,
    lambda x: theirs(products, x, context_fn=SELECTIVE),
    lambda x: remat.checkpoint(products, x, policy=POLICY),
    9,
    0,
)
CASES["four of five in one"] = (
    chain(20),
    lambda x: theirs(in_four(theirs), x),
    lambda x: remat.checkpoint(in_four(remat.checkpoint), x),
    8,
    0,
)


def sides_of(case: str) -> list[Side]:
    plain, upstream, own, _, _ = CASES[case]
    x, gradient = torch.linspace(0, 1, 4).requires_grad_(), torch.ones(4)

    def chained(f: Step) -> torch.Tensor:
        y = x
        for _ in range(REGIONS):
            y = f(y)
        return y

    def step(f: Step) -> None:
        chained(f).backward(gradient)

    def of(f: Step) -> torch.Tensor:
        return torch.autograd.grad(chained(f), x, gradient)[0]

    before = remat.counters()["frames_created"]
    assert torch.equal(of(own), of(plain)), case
    assert remat.counters()["frames_created"] - before >= REGIONS, case
    before = remat.counters()["frames_created"]
    with remat.installed():
        assert torch.equal(of(upstream), of(plain)), case
    assert remat.counters()["frames_created"] - before >= REGIONS, case
    return [
        Side("forward", lambda: chained(plain)),
        Side("plain", lambda: step(plain)),
        Side("upstream", lambda: step(upstream)),
        Side("drop-in", lambda: step(upstream), remat.installed),
        Side("own", lambda: step(own)),
    ]


def main() -> None:
    options = parse(__doc__ or "")
    say(
        f"{'overhead per region [ns]':24} {'upstream':>9} {'drop-in':>9} {'upstream /':>11} "
        f"{'wanted':>7} {'own':>9} {'upstream /':>11} {'wanted':>7}"
    )
    for case in CASES:
        sides = sides_of(case)
        if options.smoke:
            say(f"{case:24} gradients are the plain ones")
            continue
        taken = rounds(sides, options)
        base_ns = min(taken["forward"]) + min(taken["plain"])
        least: dict[str, float] = {}
        for side in ("upstream", "drop-in", "own"):
            least[side] = (min(taken[side]) - base_ns) / REGIONS
            differences = [
                (ns - forward - plain) / REGIONS
                for ns, forward, plain in zip(taken[side], taken["forward"], taken["plain"])
            ]
            print_line(
                "python_region_cost", {"case": case, "side": side}, options, least[side],
                differences
            )
        wanted, wanted_own = CASES[case][3:]
        say(
            f"{case:24} {least['upstream']:9.0f} {least['drop-in']:9.0f} "
            f"{least['upstream'] / least['drop-in']:11.1f} {wanted:7.0f} {least['own']:9.0f} "
            f"{least['upstream'] / least['own']:11.1f} {wanted_own or '-':>7}"
        )


if __name__ == "__main__":
    main()
