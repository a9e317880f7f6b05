#!/usr/bin/env python3
"""The Python peer of bench/region_cost.cpp, which starts it: the same work with
torch.utils.checkpoint.

It reads one question a line and answers with one:
    version                                      -> torch's version and the folder of its libraries
    gradient KIND REGIONS OPS RNG                -> the gradient of the chain's input, as a
    hexadecimal float
    sample KIND REGIONS OPS RNG CLOCK REPEATS    -> the nanoseconds that so many runs took together,
                                                    and until they were queued on the device
Its argument names the device. KIND: sin, forward, plain, checkpointed. RNG: 1 or 0,
preserve_rng_state. CLOCK: wall or thread.
"""

import gc
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # not needed here
import torch
from torch.utils.checkpoint import checkpoint

CLOCKS = {"wall": time.perf_counter_ns, "thread": time.thread_time_ns}


def region(ops):
    def run(x):
        for _ in range(ops):
            x = torch.sin(x)
        return x

    return run


def step(kind, regions, ops, preserve_rng_state, x):
    """A function that runs the work once."""
    run = region(ops)

    def sin():
        torch.sin(x)

    def forward():
        y = x
        for _ in range(regions):
            y = run(y)

    def plain():
        x.grad = None
        y = x
        for _ in range(regions):
            y = run(y)
        y.backward()

    def checkpointed():
        x.grad = None
        y = x
        for _ in range(regions):
            y = checkpoint(run, y, use_reentrant=False)
        y.backward()

    def checkpointed_without_rng():
        x.grad = None
        y = x
        for _ in range(regions):
            y = checkpoint(run, y, use_reentrant=False, preserve_rng_state=False)
        y.backward()

    if kind == "checkpointed" and not preserve_rng_state:
        return checkpointed_without_rng
    return {"sin": sin, "forward": forward, "plain": plain, "checkpointed": checkpointed}[kind]


DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")


def leaf():
    return torch.full((1,), 0.5, device=DEVICE, requires_grad=True)


def wait():
    if DEVICE.type != "cpu":
        torch.accelerator.current_stream(DEVICE).synchronize()


def gradient(kind, regions, ops, preserve_rng_state):
    x = leaf()
    step(kind, regions, ops, preserve_rng_state, x)()
    return x.grad.item().hex()


def sample(kind, regions, ops, preserve_rng_state, clock, repeats):
    run, now = step(kind, regions, ops, preserve_rng_state, leaf()), CLOCKS[clock]
    run()
    gc.collect()
    gc.disable()  # as timeit does
    wait()
    begin = now()
    for _ in range(repeats):
        run()
    queued = now() - begin
    wait()
    taken = now() - begin
    gc.enable()
    return taken, queued


def answer(line):
    question, *words = line.split()
    if question == "version":
        libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
        return f"{torch.__version__} {os.path.realpath(libraries)}"
    kind, regions, ops, preserve_rng_state, *rest = words
    work = (kind, int(regions), int(ops), preserve_rng_state == "1")
    if question == "gradient":
        return gradient(*work)
    clock, repeats = rest
    return "{} {}".format(*sample(*work, clock, int(repeats)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for asked in sys.stdin:
        print(answer(asked), flush=True)
