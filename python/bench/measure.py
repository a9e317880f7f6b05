"""The shared parts of the package's benches: the words of the command line, rounds, the JSON line.
bench/measure.h does so in C++."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch

import remat


class Side(NamedTuple):
    """One of several ways to do the same work, of which each round takes a sample."""

    name: str
    work: Callable[[], object]
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def parse(
    text: str, more: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> argparse.Namespace:
    """The words that every bench knows, and those that `more` adds; one thread from here on."""
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument(
        "--samples", type=int, default=15, help="of everything that is compared, in turns"
    )
    parser.add_argument(
        "--sample-ms", type=float, default=50, help="a sample takes so long at the least"
    )
    parser.add_argument("--clock", choices=("wall", "thread"), default="wall")
    parser.add_argument("--smoke", action="store_true", help="only check what would be timed")
    more(parser)
    torch.set_num_threads(1)
    return parser.parse_args()


def sample(side: Side, repeats: int, clock: Callable[[], int]) -> int:
    with side.around():
        side.work()
        start = clock()
        for _ in range(repeats):
            side.work()
        return clock() - start


def rounds(sides: Iterable[Side], options: argparse.Namespace) -> dict[str, list[float]]:
    """[ns] of one run of each side's work, sample by sample."""
    clock = time.perf_counter_ns if options.clock == "wall" else time.thread_time_ns
    repeats = dict.fromkeys(sides, 1)
    for side in repeats:
        while sample(side, repeats[side], clock) < options.sample_ms * 1e6:
            repeats[side] *= 2
    taken: dict[str, list[float]] = {side.name: [] for side in repeats}
    for _ in range(options.samples):
        for side, count in repeats.items():
            taken[side.name].append(sample(side, count, clock) / count)
    return taken


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return done.stdout.strip()


def print_line(
    bench: str, params: dict[str, Any], options: argparse.Namespace, least_ns: float,
    all_ns: list[float]
) -> None:
    """One JSON line on stdout; `least_ns` may be a difference of minima, which no sample shows."""
    median = statistics.median(all_ns)
    line = {
        "bench": bench, "params": params | {"clock": options.clock}, "min_ns": least_ns,
        "median_ns": median,
        "mad_ns": statistics.median(abs(each - median) for each in all_ns), "samples": len(all_ns),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": sys.version.split()[0],
        "remat": remat.__version__, "commit": commit(),
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def say(text: str) -> None:
    """A line of the table, which is for people: on stderr."""
    print(text, file=sys.stderr, flush=True)
