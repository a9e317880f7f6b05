#!/usr/bin/env python3
"""Ends processes that still have regions alive or at work, many times, and counts how they end.

    python/tests/exits.py [--runs N] [CASE...]

Each case runs plainly, with torch's checkpoint, with that under the drop-in, and with remat's own,
all four at a time: a process that has imported everything forks N times, and each fork runs the
case and ends as a program ends. Where plain torch ends well, remat must. Prints a table of exit
codes other than 0; the exit status says whether remat has some in a case where plain torch has
none.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

SIDES = ("plain", "upstream", "drop-in", "own")

CASES = {
    "live graphs": """
        x = torch.randn(8, 8, requires_grad=True)
        kept = [region(x) for _ in range(20)]
        kept[0].sum().backward(retain_graph=True)
    """,
    "graphs in a daemon thread that sleeps": """
        def work():
            x = torch.randn(8, 8, requires_grad=True)
            kept = [region(x) for _ in range(20)]
            ready.set()
            while True:
                time.sleep(0.001)
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "a daemon thread that makes graphs": """
        def work():
            x = torch.randn(8, 8, requires_grad=True)
            while True:
                kept = [region(x) for _ in range(4)]
                ready.set()
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "a daemon thread that trains": """
        def work():
            x = torch.randn(8, 8, requires_grad=True)
            while True:
                region(x).sum().backward()
                ready.set()
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "a daemon thread that recomputes for long": """
        def work():
            x = torch.randn(8, 8, requires_grad=True)
            def slow(t):
                for _ in range(200):
                    t = t.sin()
                    time.sleep(0)
                return t
            while True:
                y = call(slow, x).sum()
                ready.set()
                y.backward()
                again(slow, x)
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "a daemon thread that computes for long": """
        def work():
            x = torch.randn(8, 8, requires_grad=True)
            def slow(t):
                ready.set()
                for _ in range(200):
                    t = t.sin()
                    time.sleep(0)
                return t
            while True:
                call(slow, x)
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    # No operator of torch runs when these end, so that torch aborts nothing.
    "a daemon thread that sleeps in a function": """
        def work():
            def asleep(t):
                y = t.sin()
                while True:
                    ready.set()
                    time.sleep(0.001)
            call(asleep, torch.randn(8, 8, requires_grad=True))
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "a daemon thread that sleeps in a recompute": """
        def work():
            def asleep(t):
                y = t.sin().exp()
                while runs:
                    ready.set()
                    time.sleep(0.001)
                runs.append(1)
                return y.cos()
            runs = []
            y = call(asleep, torch.randn(8, 8, requires_grad=True)).sum()
            again(asleep, torch.randn(8, 8, requires_grad=True))
            y.backward()
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "daemon threads that sleep in what regions call": """
        import os
        def sleeper():
            entered = threading.Event()
            all_entered.append(entered)
            def asleep(*args):
                entered.set()
                while True:
                    time.sleep(0.001)
            return asleep
        class Asleep(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.sleeps = sleeper()
            def forward(self, t):
                self.sleeps()
        class Provider:
            def capture(self):
                self.sleeps()
            def restore(self, state):
                pass
        all_entered = []
        x = torch.randn(8, 8, requires_grad=True)
        module = Asleep()
        works = [lambda: call(module, x)]
        if own:
            import remat
            provider = Provider()
            provider.sleeps, asleep, chooses, saved = sleeper(), sleeper(), sleeper(), sleeper()
            prints, stage = sleeper(), sleeper()
            place = type("Place", (),
                         {"store": lambda self, flat: asleep(), "load": lambda self, all: all})()
            def with_provider():
                with remat.state_provider(provider):
                    call(f, x, 1)
            def elsewhere():
                with remat.save_elsewhere(place):
                    x.exp()
            works += [
                with_provider,
                elsewhere,
                lambda: call(lambda t: t.sin(), x, policy=chooses),
                lambda: call(lambda t: t.sin(), x, fingerprint=prints).sum().backward(),
                lambda: call(lambda t: remat.save_region(saved, t), x),
                lambda: remat.run(remat.Plan(2, [(1, 2)]), [torch.sin, stage], x),
            ]
        for work in works:
            threading.Thread(target=work, daemon=True).start()
        if not all(each.wait(20) for each in all_entered):
            print([each.is_set() for each in all_entered], file=sys.stderr, flush=True)
            os._exit(3)
    """,
    "a daemon thread whose state provider is asked": """
        import contextlib
        class Provider:
            def capture(self):
                ready.set()
            def restore(self, state):
                pass
        if own:
            import remat
        def work():
            x = torch.randn(8, 8, requires_grad=True)
            with remat.state_provider(Provider()) if own else contextlib.nullcontext():
                while True:
                    call(lambda t: sum(range(1000)), x)
                    ready.set()
        threading.Thread(target=work, daemon=True).start()
        ready.wait()
    """,
    "threads of the engine's pool": """
        class Deep(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t, depth):
                ctx.depth = depth
                ctx.save_for_backward(t)
                return t.clone()
            @staticmethod
            def backward(ctx, g):
                (t,) = ctx.saved_tensors
                if ctx.depth == 0:
                    return g, None
                with torch.enable_grad():
                    own = t.detach().requires_grad_()
                    y = call(lambda t: Deep.apply(t.sin(), ctx.depth - 1).cos(), own)
                    return torch.autograd.grad(y.sum(), own)[0] * g, None
        x = torch.randn(4, requires_grad=True)
        kept = call(lambda t: Deep.apply(t.sin(), 80), x)
        kept.sum().backward(retain_graph=True)
        assert x.grad is not None
    """,
    "graphs that threads of C++ let go of": """
        x = torch.randn(8, 8, requires_grad=True)
        for n in range(40, 400, 40):
            torch.jit.fork(SLOW, region(x), n)
    """,
    "a backward at the end": """
        import atexit
        x = torch.randn(8, 8, requires_grad=True)
        kept = region(x)
        atexit.register(lambda: torch.autograd.grad(region(x).sum(), x))
        sys.exit(0)
    """,
    "an exception ends it": """
        x = torch.randn(8, 8, requires_grad=True)
        def failing(t):
            y = t.sin().exp()
            calls.append(y)
            if len(calls) == 2:
                raise SystemExit(0)
            return y.cos()
        calls = []
        call(failing, x).sum().backward()
        sys.exit(0)
    """,
}

HEAD = """
import sys, threading, time, torch
ready = threading.Event()
def f(x, anything):
    return (x @ x).sin().exp().cos()
def region(x):
    return call(f, x, [object()])
"""


def calls(side: str) -> Any:
    """Returns the function that runs a function on this side."""
    import torch  # noqa: F401
    from torch.utils.checkpoint import checkpoint

    if side == "plain":
        return lambda function, *args: function(*args)
    if side == "own":
        import remat

        return remat.checkpoint
    if side == "drop-in":
        import remat

        remat.install()
    return lambda function, *args: checkpoint(function, *args, use_reentrant=False)


def fork_many(case: str, side: str, runs: int) -> str:
    """Returns the case's program in each fork; the parent counts the ends, prints them and exits
    here."""
    import torch

    torch.set_num_threads(1)
    text = HEAD + textwrap.dedent(CASES[case])
    call = calls(side)
    # Plain torch does as much work on such a thread when it runs the function twice.
    again = call if side == "plain" else lambda function, *args: None
    names = {"call": call, "again": again, "own": side == "own", "__name__": "__main__"}
    if "SLOW" in text:
        source = "def slow(x, n: int):\n  for i in range(n):\n    x = (x @ x).tanh()\n  return x\n"
        names["SLOW"] = torch.jit.CompilationUnit(source).slow
    ends: collections.Counter[int] = collections.Counter()
    gc.collect()
    # what was imported is no affair of a fork's last collection, which takes most of its time
    gc.freeze()
    for _ in range(runs):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # one that does not end is counted as -14
            sys.modules["__main__"].__dict__.update(names)
            return text
        ends[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])] += 1
    print(json.dumps(ends))
    sys.exit(0)


def compare(cases: list[str], runs: int) -> int:
    """Prints the table, and returns the number of cases in which remat alone ends badly."""
    print(f"{'exit codes but 0, of ' + str(runs):46} " + " ".join(f"{side:>16}" for side in SIDES))
    worse = 0
    for case in cases:
        command = [sys.executable, "-W", "ignore", __file__, "--runs", str(runs), case, "--side"]
        # At one time: how busy the machine is decides where a thread is met.
        running = {
            side: subprocess.Popen(
                [*command, side], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for side in SIDES
        }
        bad = {}
        for side, process in running.items():
            output, errors = process.communicate()
            lines = output.strip().splitlines()
            if not lines:
                sys.exit(f"{case}, {side}: {errors[-2000:]}")
            bad[side] = {
                code: count for code, count in json.loads(lines[-1]).items() if code != "0"
            }
            for line in sorted(set(errors.splitlines())) if bad[side] else ():
                print(f"  {side}: {line[:150]}", file=sys.stderr)
        said = [
            " ".join(f"{code}: {count}" for code, count in bad[side].items()) or "-"
            for side in SIDES
        ]
        print(f"{case:46} " + " ".join(f"{each:>16}" for each in said), flush=True)
        worse += bool((bad["drop-in"] or bad["own"]) and not bad["plain"])
    return worse


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
parser.add_argument("--runs", type=int, default=300)
parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
parser.add_argument(
    "cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}; all if none is named"
)
options = parser.parse_args()
if set(options.cases) - set(CASES):
    parser.error(f"unknown: {', '.join(set(options.cases) - set(CASES))}")
if options.side is None:
    sys.exit(1 if compare(options.cases or list(CASES), options.runs) else 0)
exec(compile(fork_many(options.cases[0], options.side, options.runs), options.cases[0], "exec"))
