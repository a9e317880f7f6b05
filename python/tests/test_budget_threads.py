"""remat.budget among threads, processes and exceptions, and in long runs.

Each program has a time limit: a deadlock fails its test.

    REMAT_TEST_LONG=20000 python -m unittest test_budget_threads.ForLong
"""

from __future__ import annotations

import gc
import os
import resource
import threading
import unittest
from typing import Any, Callable, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

import remat
from common import SLOWNESS, Case, leaf, run_script, whole

LONGEST = 60 * SLOWNESS  # [seconds] of a test's threads


class Block(nn.Module):
    """Layers whose dropped values need random numbers, views and writes in place."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)
        y = self.down(y).mul_(0.5)
        return x + F.dropout(y.tanh(), 0.1, self.training)


def net(seed: int = 0, depth: int = 4) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(Block() for _ in range(depth)))


def span_of(step: Callable[[], Any]) -> int:
    """Returns the peak of a step [bytes], by the report of an unlimited budget."""
    with torch.random.fork_rng(), remat.budget(1 << 60) as budget:
        step()
    return budget.report().peak_bytes


def backward(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters())]


def in_threads(*programs: Callable[[], None]) -> None:
    """Runs programs at the same time, within the time limit, and raises their first error."""
    errors: list[BaseException] = []

    def run(program: Callable[[], None]) -> None:
        try:
            program()
        except BaseException as error:  # noqa: B036
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in programs]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LONGEST)
    if any(each.is_alive() for each in threads):
        raise AssertionError("a thread did not end within the time limit")
    if errors:
        raise errors[0]


class Threads(Case):
    def test_draws_of_another_thread(self) -> None:
        # The numbers of a dropout are those of its forward, whatever other threads draw meanwhile.
        is_over = threading.Event()
        def draw() -> None:
            while not is_over.is_set():
                torch.rand(3)

        def check() -> None:
            try:
                for _ in range(300):
                    self.check_mask()
            finally:
                is_over.set()

        in_threads(check, draw)

    def check_mask(self) -> None:
        x = leaf(256, 64)
        with remat.budget(300_000, min_bytes=0) as budget:
            y = F.dropout(x, 0.5)
            mask = y.detach() != 0
            z = y.sin()
            del y
            for _ in range(6):
                z = z.exp().sin()
            (slope,) = torch.autograd.grad(z.sum(), x)
        # The gradient of a dropped element is 0, and no other is.
        self.check_equal(slope != 0, mask)
        self.assertGreater(budget.report().reruns, 0)

    def test_two_guarded_threads(self) -> None:
        plain, models = [], []
        inputs = torch.randn(64, 32)
        for seed in range(2):
            models.append(net(seed).eval())
            plain.append(backward(models[seed], inputs))
        bytes = span_of(lambda: backward(models[0], inputs)) // 2

        def train(i: int) -> None:
            for _ in range(20):
                with remat.budget(bytes, min_bytes=0):
                    self.check_equal(backward(models[i], inputs), plain[i])

        in_threads(lambda: train(0), lambda: train(1))

    def test_backward_on_another_thread(self) -> None:
        model, x = net().eval(), torch.randn(64, 32)
        expected = backward(model, x)
        bytes = span_of(lambda: backward(model, x)) // 3
        with remat.budget(bytes, min_bytes=0) as budget:
            for _ in range(10):
                model.zero_grad()
                loss = model(x).square().mean()
                ahead = model(x + 1).square().mean()  # alive while the other thread works
                in_threads(lambda: loss.backward())  # noqa: B023
                del ahead
                found = [loss.detach(), *(each.grad.clone() for each in model.parameters())]
                self.check_equal(found, expected)
        self.assertGreater(budget.report().reruns, 0)

    def test_allocations_of_an_unguarded_thread(self) -> None:
        # Any allocation can drop values of the guarded thread, also in the middle of its reruns.
        model, x = net().eval(), torch.randn(64, 32)
        expected = backward(model, x)
        span = span_of(lambda: backward(model, x))
        is_over = threading.Event()

        def allocate() -> None:
            while not is_over.is_set():
                del_me = [torch.empty(span // 64) for _ in range(4)]
                del del_me

        def train() -> None:
            try:
                for share in (0.8, 0.5, 0.25):
                    with remat.budget(int(span * share), min_bytes=0):
                        for _ in range(10):
                            self.check_equal(backward(model, x), expected)
            finally:
                is_over.set()

        in_threads(train, allocate, allocate)

    def test_guards_on_many_threads_in_turn(self) -> None:
        model, x = net(depth=2).eval(), torch.randn(64, 32)
        expected = backward(model, x)
        bytes = span_of(lambda: backward(model, x)) // 3
        graphs: list[torch.Tensor] = []

        def forward() -> None:
            with remat.budget(bytes, min_bytes=0):
                graphs.append(model(x).square().mean())

        for _ in range(10):
            in_threads(forward)  # the thread, its guard and its scope end before backward
            model.zero_grad()
            loss = graphs.pop()
            loss.backward()
            self.check_equal(
                [loss.detach(), *(each.grad.clone() for each in model.parameters())], expected
            )
            del loss


# ---- processes ----------------------------------------------------------------------------------

LOADER = """
import torch, remat
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        made = torch.Generator().manual_seed(i)
        return torch.stack([torch.rand(64, generator=made).sin() for _ in range(8)]).mean(0)

def train(open):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) if i % 2 == 0 else torch.nn.Dropout(0.1)
                                for i in range(12)))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    with open():
        for workers in (0, 2):
            for batch in DataLoader(Rows(), batch_size=16, num_workers=workers,
                                    multiprocessing_context="fork" if workers else None):
                optimizer.zero_grad()
                net(batch).sin().square().mean().backward()
                optimizer.step()
    return [each.detach() for each in net.parameters()] + [torch.get_rng_state()]

if __name__ == "__main__":
    torch.set_num_threads(1)
    import contextlib
    plain = train(contextlib.nullcontext)
    for bytes in (1 << 60, 300_000, 150_000):
        found = train(lambda: remat.budget(bytes, min_bytes=0))
        assert all(map(torch.equal, found, plain)), bytes
    print("same")
"""

FORK = """
import os, threading, torch, remat
torch.set_num_threads(1)
x = torch.randn(64, 64, requires_grad=True)
def out(): return x.sin().cos().exp().tanh().sin().cos().sum()
(plain,) = torch.autograd.grad(out(), x)
is_over = False
def allocate():
    while not is_over:
        for _ in range(50): torch.empty(1000)
threads = [threading.Thread(target=allocate) for _ in range(2)]
for each in threads: each.start()
with remat.budget(50_000, min_bytes=0):
    for _ in range(150):
        loss = out()
        child = os.fork()
        if child == 0:  # other threads are gone; a lock that one of them held would stay locked
            (found,) = torch.autograd.grad(loss, x)
            ok = torch.equal(found, plain) and torch.equal(torch.autograd.grad(out(), x)[0], plain)
            os._exit(0 if ok else 3)
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, plain)
        assert os.waitpid(child, 0)[1] == 0
is_over = True
for each in threads: each.join()
print("same")
"""

EXIT = """
import sys, threading, time, torch, remat
x = torch.randn(64, 64, requires_grad=True)
def out(): return x.sin().cos().exp().tanh().sin().cos().sum()
budget = remat.budget(50_000, min_bytes=0)
budget.__enter__()
alive = [out() for _ in range(4)]
torch.autograd.grad(alive[0], x, retain_graph=True)
def work():
    with remat.budget(40_000, min_bytes=0):
        loss = out()
        torch.autograd.grad(loss, x, retain_graph=True)
        begun.set()
        time.sleep(1000)  # torch itself aborts where a thread that works is alive at exit
begun = threading.Event()
if "thread" in sys.argv:
    threading.Thread(target=work, daemon=True).start()
    begun.wait()
if "left" in sys.argv: budget.__exit__(None, None, None)
if "error" in sys.argv: raise SystemExit(5)
print("done", flush=True)
"""


class Processes(Case):
    def check_script(self, text: str, *arguments: str, code: int = 0, says: str = "same") -> None:
        done = run_script(text, *arguments, timeout=120)
        self.assertEqual(done.returncode, code, done.stdout)
        self.assertIn(says, done.stdout)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_a_loader_with_workers(self) -> None:
        self.check_script(LOADER)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_fork_in_the_scope(self) -> None:
        self.check_script(FORK)

    @whole
    def test_exit_with_live_graphs(self) -> None:
        for arguments in ((), ("left",), ("thread",), ("thread", "left")):
            self.check_script(EXIT, *arguments, says="done")
        self.check_script(EXIT, "error", code=5, says="")


# ---- exceptions and guards ----------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Throws in forward or backward, while it is told to."""

    where = ""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        y = x.sin()
        if Fails.where == "forward":
            raise KeyError("the program's own")
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if Fails.where == "backward":
            raise KeyError("the program's own")
        return gradient * x.cos()


class Exceptions(Case):
    def tearDown(self) -> None:
        Fails.where = ""
        super().tearDown()

    def step(self, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        half = len(model) // 2  # type: ignore[arg-type]
        y = Fails.apply(model[:half](x))  # type: ignore[index]
        loss = model[half:](y).square().mean()  # type: ignore[index]
        loss.backward()
        return [loss.detach(), *(each.grad.clone() for each in model.parameters())]

    def test_a_function_that_fails(self) -> None:
        model, x = net().eval(), torch.randn(64, 32)
        expected = self.step(model, x)
        span = span_of(lambda: self.step(model, x))
        meter = remat.MemoryMeter()
        model.zero_grad()
        gc.collect()
        before = meter.live_bytes
        with remat.budget(int(span * 0.4), min_bytes=0) as budget:
            for _ in range(3):
                for Fails.where in ("forward", "backward"):
                    with self.assertRaisesRegex(KeyError, "the program's own"):
                        self.step(model, x)
                Fails.where = ""
                self.check_equal(self.step(model, x), expected)
        model.zero_grad()
        gc.collect()
        self.assertEqual(meter.live_bytes, before)
        self.assertEqual(budget.report().source_bytes, 0)

    def test_an_operator_that_fails(self) -> None:
        model, x = net().eval(), torch.randn(64, 32)
        expected = backward(model, x)
        bytes = span_of(lambda: backward(model, x)) // 3
        with remat.budget(bytes, min_bytes=0):
            for _ in range(3):
                y = model(x)
                with self.assertRaises(RuntimeError):
                    y @ torch.ones(3, 3)
                with self.assertRaises(RuntimeError):
                    y.square().mean().backward(torch.ones(7))
                self.check_equal(backward(model, x), expected)

    def test_a_limit_of_memory_within_a_rerun(self) -> None:
        # LibTorch's own out-of-memory error, in the middle of what runs again.
        model, x = net().eval(), torch.randn(64, 32)
        expected = backward(model, x)
        span = span_of(lambda: backward(model, x))
        meter = remat.MemoryMeter()
        num_failed = 0
        for spare in range(0, span // 3, span // 60):
            model.zero_grad()
            with remat.budget(span // 3, min_bytes=0):
                loss = model(x).square().mean()
                try:
                    with remat.memory_limit(meter.live_bytes + spare):
                        loss.backward(retain_graph=True)
                except torch.OutOfMemoryError:
                    num_failed += 1
                model.zero_grad()
                loss.backward()
                found = [loss.detach(), *(each.grad.clone() for each in model.parameters())]
            self.check_equal(found, expected)
            del loss
        self.assertGreater(num_failed, 3)

    def test_a_write_that_stops_halfway(self) -> None:
        # The first tensor has been written to when the second one fails.
        w = leaf(64, 64)

        def program() -> Any:
            y = w.sin()
            out = y.exp() * w
            first = (w * 2).detach()
            z = (first * 3).sin() * w
            try:
                torch._foreach_add_([first, torch.ones(3)], [torch.ones(64, 64), torch.ones(5)])
            except RuntimeError:
                pass
            z = z + first * w
            del first
            for _ in range(4):
                z = z.sin().exp()
            return torch.autograd.grad((out + z).sum(), w)

        expected = program()
        for bytes in (20_000, 60_000, 120_000, 1 << 60):
            with remat.budget(bytes, min_bytes=0):
                self.check_equal(program(), expected)


class Guards(Case):
    def train(self, around: Optional[remat.Budget], inside: Callable[[int], Any]) -> list[Any]:
        torch.manual_seed(3)
        model = net(1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses = []

        def steps() -> None:
            for i in range(6):
                optimizer.zero_grad()
                guard = inside(i)
                if guard is None:
                    loss = model(torch.randn(64, 32)).square().mean()
                    loss.backward()
                elif i % 2 == 0:
                    with guard:
                        loss = model(torch.randn(64, 32)).square().mean()
                        loss.backward()
                else:  # left before backward
                    with guard:
                        loss = model(torch.randn(64, 32)).square().mean()
                    loss.backward()
                optimizer.step()
                losses.append(loss.detach())

        if around is None:
            steps()
        else:
            with around:
                steps()
        return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    def test_a_guard_per_step_around_the_loop_and_both(self) -> None:
        expected = self.train(None, lambda i: None)
        model, x = net(), torch.randn(64, 32)
        span = span_of(lambda: backward(model, x))

        def of(share: float) -> remat.Budget:
            return remat.budget(int(span * share), min_bytes=0)

        for share in (0.7, 0.4, 0.2):
            for around, inside in (
                (None, lambda i: of(share)),  # noqa: B023
                (of(share), lambda i: None),
                (of(share), lambda i: of(share / 2)),  # noqa: B023
                (of(share / 2), lambda i: of(share)),  # noqa: B023
                (of(share), lambda i: of(share) if i % 3 else None),  # noqa: B023
            ):
                self.check_equal(self.train(around, inside), expected, f"at {share}")


# ---- long runs ----------------------------------------------------------------------------------


class ForLong(Case):
    STEPS = int(os.environ.get("REMAT_TEST_LONG", "400"))

    def test_steps_do_not_grow(self) -> None:
        model, x = net(depth=2), torch.randn(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        span = span_of(lambda: backward(model, x))
        meter = remat.MemoryMeter()
        live, resident = set(), []
        with remat.budget(span // 2, min_bytes=0) as budget:
            for i in range(self.STEPS):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                report = budget.report()
                self.assertEqual(report.source_bytes, 0)
                if i > 1:
                    live.add(meter.live_bytes)
                if i % max(self.STEPS // 10, 1) == 0:
                    with open("/proc/self/statm") as numbers:
                        resident.append(int(numbers.read().split()[1]) * resource.getpagesize())
        self.assertGreater(report.reruns, self.STEPS)
        self.assertEqual(len(live), 1, live)  # not a byte
        if os.environ.get("REMAT_TEST_LONG"):
            print(f"\nresident bytes: {resident}\nlive: {live}\n{report}")
        self.assertLess(resident[-1] - resident[len(resident) // 2], 4 << 20)


if __name__ == "__main__":
    unittest.main()
