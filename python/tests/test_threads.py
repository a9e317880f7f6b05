"""Threads, forks and the end of the process."""

from __future__ import annotations

import json
import os
import threading
import unittest
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import remat
from common import SLOWNESS, Case, gradient, leaf, run_python, run_script, whole


def operators(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().cos().matmul(x)


class Reading(torch.autograd.Function):
    """Reads its saved tensors with the interpreter's lock held."""

    @staticmethod
    def forward(ctx, t):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        (t,) = ctx.saved_tensors
        return g * 2 * t


class Threads(Case):
    def in_threads(self, work: Any, count: int = 6) -> None:
        faults: list[str] = []

        def run(number: int) -> None:
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001
                faults.append(repr(error))

        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
            self.assertFalse(each.is_alive(), "a thread hangs")
        self.assertEqual(faults, [])

    def test_each_its_own_regions(self) -> None:
        def work(number: int) -> None:
            x = leaf(seed=number)
            plain = gradient(operators(operators(x)), x)
            for step in range(30):
                f = (
                    remat.checkpoint
                    if step % 2
                    else lambda g, t: checkpoint(g, t, use_reentrant=False)
                )
                inner = lambda t: f(operators, t)  # noqa: B023, E731
                found = gradient(f(lambda t: inner(inner(t)), x), x)
                assert torch.equal(found[0], plain[0])

        with remat.installed():
            self.in_threads(work)

    def test_backwards_of_one_graph(self) -> None:
        x, w = leaf(seed=1), leaf(seed=2)
        f = lambda t: Reading.apply((t @ w).sin()) @ w  # noqa: E731
        plain = gradient(f(x), x, w)
        for _ in range(20):
            y = remat.checkpoint(f, x)

            def work(number: int) -> None:
                found = gradient(y, x, w, retain_graph=True)  # noqa: B023
                assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])

            self.in_threads(work, 4)

    def test_random_numbers_of_several_threads(self) -> None:
        def work(number: int) -> None:
            x = leaf(16, 16, seed=number)
            for _ in range(20):
                masks = []

                def f(t: torch.Tensor) -> torch.Tensor:
                    mask = torch.rand_like(t)
                    masks.append(mask.detach().clone())  # noqa: B023
                    return (t * mask).sin().exp()

                gradient(remat.checkpoint(f, x, early_stop=False), x)
                assert all(torch.equal(masks[0], each) for each in masks[1:])

        self.in_threads(work, 3)

    def test_graphs_that_die_elsewhere(self) -> None:
        import queue

        graphs: queue.Queue[Any] = queue.Queue()

        def work(number: int) -> None:
            for _ in range(200):
                if number % 2:
                    graphs.put(
                        remat.checkpoint(lambda t, anything: t.sin().exp(), leaf(), [object()])
                    )
                else:
                    graphs.get()

        self.in_threads(work, 4)
        self.assertTrue(graphs.empty())

    def test_workers_of_a_data_loader(self) -> None:
        class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> torch.Tensor:
                x = leaf(4, seed=index)
                return gradient(remat.checkpoint(lambda t: t.sin().exp(), x), x)[0]

        y = remat.checkpoint(operators, leaf())
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for i, batch in enumerate(loader):
            for j in range(4):
                x = leaf(4, seed=4 * i + j)
                self.check_equal(batch[j], gradient(x.sin().exp(), x)[0])
        del y

    def test_forks_beside_a_thread_whose_memory_waits_in_a_file(self) -> None:
        # The written memory is Python's own, and is freed with the interpreter's lock. The thread
        # that forks waits for the write, and must not keep the lock meanwhile.
        done = run_script("""
import os, tempfile, threading, time, torch, remat
def work():
    weight = torch.ones(256, 1024, requires_grad=True)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(60):
            with remat.save_in_tiers(directory=folder, host_bytes=0, min_bytes=0):
                x = torch.frombuffer(bytearray(1 << 20), dtype=torch.float32).view(256, 1024)
                loss = (weight * x).sum()
                del x
            loss.backward()
thread = threading.Thread(target=work)
thread.start()
forks = 0
while thread.is_alive():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    forks += 1
print("forks" if forks > 1 else f"only {forks}")
""", timeout=60)
        self.assertEqual((done.returncode, done.stdout.split()[-1:]), (0, ["forks"]), done.stdout)


EXITS = {
    "live graphs": """
x = torch.randn(8, 8, requires_grad=True)
kept = [remat.checkpoint(f, x, [object()]) for _ in range(20)]
kept[0].sum().backward(retain_graph=True)
""",
    # A daemon thread that runs operators at the end aborts the process with plain torch, too; this
    # one sleeps.
    "graphs in a daemon thread": """
x = torch.randn(8, 8, requires_grad=True)
def work():
    kept = [remat.checkpoint(f, x, [object()]) for _ in range(20)]
    while True:
        time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
""",
    "graphs that threads of C++ let go of": """
slow = torch.jit.CompilationUnit(
    "def slow(x, n: int):\\n  for i in range(n):\\n    x = (x @ x).tanh()\\n  return x\\n").slow
x = torch.randn(8, 8, requires_grad=True)
for n in range(40, 400, 40):
    torch.jit.fork(slow, remat.checkpoint(f, x, [object()]), n)
""",
    "a backward at the end": """
x = torch.randn(8, 8, requires_grad=True)
kept = remat.checkpoint(f, x, [object()])
import atexit
atexit.register(lambda: print(torch.autograd.grad(remat.checkpoint(f, x, 1).sum(), x)[0].shape))
sys.exit(0)
""",
}
HEAD = """
import sys, threading, time, torch, remat
torch.set_num_threads(1)
def f(x, anything): return (x @ x).sin().exp().cos()
"""


class Exits(Case):
    RUNS = 1  # each takes the seconds that torch takes to be imported

    def test_a_process_ends_with_live_graphs(self) -> None:
        for name, text in EXITS.items():
            for _ in range(self.RUNS):
                done = run_script(HEAD + text)
                self.assertEqual(done.returncode, 0, f"{name}: {done.stdout}")

    @whole
    def test_a_daemon_thread_inside_a_region_does_not_abort_the_end(self) -> None:
        program = os.path.join(os.path.dirname(__file__), "exits.py")
        for side, case in (
            ("own", "a daemon thread that sleeps in a function"),
            ("own", "a daemon thread that sleeps in a recompute"),
            ("drop-in", "a daemon thread that sleeps in a recompute"),
            ("own", "daemon threads that sleep in what regions call"),
            ("own", "a daemon thread whose state provider is asked"),
        ):
            with self.subTest(side, case=case):
                done = run_python("-W", "ignore", program, "--runs", "2", "--side", side, case)
                self.assertEqual(json.loads(done.stdout.splitlines()[-1]), {"0": 2}, done.stdout)

    @unittest.skipIf(SLOWNESS > 1, "takes longer under a sanitizer")
    def test_import_takes_little_time(self) -> None:
        text = (
            "import time, torch, torch.utils.checkpoint; t = time.process_time(); import remat; "
            "print(time.process_time() - t)"
        )
        seconds = (float(run_script(text).stdout.split()[-1]) for _ in range(10))
        self.assertTrue(
            any(each < 0.05 for each in seconds), "takes 50 ms of the processor's time each time"
        )

    def test_another_torch_is_refused_in_words(self) -> None:
        done = run_script("import torch; torch.__version__ = '1.0.0'; import remat")
        self.assertIn("ImportError: remat was built against torch", done.stdout)


if __name__ == "__main__":
    unittest.main()
