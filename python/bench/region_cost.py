#!/usr/bin/env python3
"""What a region costs in Python: remat beside torch.utils.checkpoint, interleaved in one process.

    python/bench/region_cost.py [--rounds N] [--json]

Overhead of a region is what forward and backward take with it, less forward and backward without, less one more
forward. Of each, the least of all rounds counts; gradients are compared first. "drop-in": a stop where upstream
stops; "own": `remat.checkpoint`, a stop where it pays. On a machine with other work the ratios fall, too: what a
cold cache adds is in all columns. METHOD.md in bench/ says how the C++ figures are made.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from typing import Any, Callable

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat

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

# Name: (plain function, with upstream's interface, with remat's own, wanted ratios of the drop-in and of the own)
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


def least(step: Callable[[], Any], before: float) -> float:
    """[us] of one step; the least of a few samples of about 10 ms, and of `before`."""
    start = time.perf_counter()
    step()
    count = max(1, int(0.01 / max(time.perf_counter() - start, 1e-6)))
    start = time.perf_counter()
    for _ in range(count):
        step()
    return min(before, (time.perf_counter() - start) / count * 1e6 / REGIONS)


def measure(case: str, rounds: int) -> dict[str, Any]:
    plain, upstream, own, wanted, wanted_own = CASES[case]
    x, gradient = torch.linspace(0, 1, 4).requires_grad_(), torch.ones(4)

    def chained(f: Step) -> torch.Tensor:
        y = x
        for _ in range(REGIONS):
            y = f(y)
        return y

    def step(f: Step) -> None:
        chained(f).backward(gradient)

    def of(f: Step) -> torch.Tensor:
        return torch.autograd.grad(f(x), x, gradient)[0]

    assert torch.equal(of(own), of(plain))
    with remat.installed():
        assert torch.equal(of(upstream), of(plain))
    times = dict.fromkeys(("forward", "plain", "upstream", "drop-in", "own"), float("inf"))
    for _ in range(rounds):
        times["forward"] = least(lambda: chained(plain), times["forward"])
        times["plain"] = least(lambda: step(plain), times["plain"])
        times["upstream"] = least(lambda: step(upstream), times["upstream"])
        with remat.installed():
            times["drop-in"] = least(lambda: step(upstream), times["drop-in"])
        times["own"] = least(lambda: step(own), times["own"])
    base = times["forward"] + times["plain"]
    over = {name: times[name] - base for name in ("upstream", "drop-in", "own")}
    return {
        "bench": "python_region_cost", "case": case, "plain_us": times["plain"],
        **{f"{name}_us": value for name, value in over.items()},
        "ratio": over["upstream"] / over["drop-in"], "wanted": wanted,
        "ratio_own": over["upstream"] / over["own"], "wanted_own": wanted_own,
        "torch": torch.__version__, "python": sys.version.split()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="a line for each case, instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.json:
        print(f"{'overhead per region [us]':24} {'upstream':>9} {'drop-in':>8} {'ratio':>6} {'own':>8} {'ratio':>6}")
    for case in CASES:
        row = measure(case, options.rounds)
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        print(
            f"{case:24} {row['upstream_us']:9.1f} {row['drop-in_us']:8.1f} {row['ratio']:6.1f} "
            f"{row['own_us']:8.1f} {row['ratio_own']:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
