"""remat.budget: any program within a byte budget, bit by bit the plain one."""

from __future__ import annotations

import contextlib
import gc
import io
import resource
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

import remat
from budget_programs import PROGRAMS, Gpt, gpt, run
from common import Case, leaf, run_python, run_script


class SameAsPlain(Case):
    """Outputs, gradients, buffers, generator: bit by bit, at any budget."""

    def check(self, name: str) -> None:
        make = PROGRAMS[name]
        expected, span = run(make)
        for share in (None, 0.6, 0.3, 0.15):
            with self.subTest(name, share=share):
                bytes = sys.maxsize if share is None else int(span * share)
                budget = remat.budget(bytes, min_bytes=0, check_values=share == 0.3)
                found, peak = run(make, budget)
                self.check_equal(found, expected, f"{name} at {share}")
                report = budget.report()
                self.assertGreater(report.operators, 0)
                if share is None:
                    self.assertEqual(report.evictions, 0)
                elif report.over_count == 0:
                    self.assertLessEqual(peak, bytes)
                    self.assertLessEqual(report.peak_bytes, bytes)
                else:
                    self.assertGreater(report.floor_bytes, bytes)


def _add(name: str) -> None:
    words = "".join(letter if letter.isalnum() else "_" for letter in name)
    setattr(SameAsPlain, f"test_{words}", lambda self: self.check(name))


for _name in PROGRAMS:
    _add(_name)


# ---- the guard -----------------------------------------------------------------------------------


class TheGuard(Case):
    def test_the_first_step_is_within_the_budget(self) -> None:
        expected, span = run(gpt)
        for share in (0.7, 0.5):
            budget = remat.budget(int(span * share))
            found, peak = run(gpt, budget)
            self.check_equal(found, expected)
            report = budget.report()
            self.assertEqual(report.over_count, 0)
            self.assertLessEqual(peak, int(span * share))
            self.assertGreater(report.evictions, 0)
            self.assertGreater(report.reruns, 0)

    def test_backward_after_the_scope(self) -> None:
        x = leaf(64, 64)

        def forward() -> torch.Tensor:
            return x.sin().cos().exp().tanh().sum()

        (expected,) = torch.autograd.grad(forward(), x)
        with remat.budget(40_000, min_bytes=0) as budget:
            out = forward()
        inside = budget.report()
        self.check_equal(torch.autograd.grad(out, x)[0], expected)
        after = budget.report()
        self.assertGreater(inside.evictions, 0)
        self.assertGreater(after.reruns, inside.reruns)
        del out
        self.assertEqual(budget.report().source_bytes, 0)

    def test_decorator(self) -> None:
        x = leaf(64, 64)
        budget = remat.budget("40 kB", min_bytes=0)

        @budget
        def step() -> torch.Tensor:
            """Says what it does."""
            return torch.autograd.grad(x.sin().cos().exp().tanh().sum(), x)[0]

        self.check_equal(step(), torch.autograd.grad(x.sin().cos().exp().tanh().sum(), x)[0])
        self.assertEqual(step.__doc__, "Says what it does.")
        self.assertGreater(budget.report().evictions, 0)
        step()
        self.assertEqual(repr(budget), "remat.budget('40 kB')")

    def test_report_and_reset(self) -> None:
        budget = remat.budget(1 << 20)
        with self.assertRaisesRegex(RuntimeError, "report was called before the scope"):
            budget.report()
        with budget:
            x = leaf(64, 64).sin().cos()
            inside = budget.report()
            self.assertEqual(inside.budget_bytes, 1 << 20)
            self.assertGreaterEqual(inside.peak_bytes, 2 * 64 * 64 * 4)
            self.assertGreater(inside.operators, 0)
        self.assertEqual(budget.report().peak_bytes, inside.peak_bytes)
        budget.reset()
        self.assertEqual(budget.report().peak_bytes, 0)
        self.assertEqual(budget.report().budget_bytes, 1 << 20)
        self.assertIn("budget", str(budget.report()))
        self.assertIn("budget", budget._repr_html_())
        del x

    def test_a_budget_that_is_over_bounds_nothing(self) -> None:
        with remat.budget(1_000, over="throw") as budget:
            pass
        kept = torch.ones(100_000)
        self.assertEqual(budget.report().over_count, 0)
        del kept

    def test_texts(self) -> None:
        read_text = remat._budget._read_text  # type: ignore[attr-defined]
        for text, bytes in {
            "1B": 1, "2 kB": 2_000, "1.5MB": 1_500_000, " 3 GB ": 3_000_000_000,
            "1KiB": 1024, ".5 MiB": 1 << 19, "2GiB": 2 << 30,
        }.items():  # fmt: skip
            self.assertEqual(read_text(text)[0], bytes)
        for text in ("", "8", "8 gb", "GB", "free - 100 %", "free + 1 %", "-1 GB", "free 5%"):
            with self.assertRaisesRegex(ValueError, "neither a size nor a share"):
                remat.budget(text)
        for text in ("free", "free - 5 %"):
            with (
                self.assertRaisesRegex(ValueError, "depends on the free memory, which is not "
                                                   "known"),
                remat.budget(text),
            ):
                pass
        with remat.memory_limit(remat.MemoryMeter().live_bytes + 1_000_000):
            with remat.budget("free - 25 %") as budget:
                self.assertEqual(budget.report().budget_bytes, 750_000)
            with remat.budget("free") as budget:
                self.assertEqual(budget.report().budget_bytes, 1_000_000)

    def test_bad_arguments(self) -> None:
        with self.assertRaisesRegex(
            TypeError, "bytes must be a whole number of bytes or a str such as '8 GiB', got None"
        ):
            remat.budget(None)  # type: ignore[arg-type]
        for bytes in (0, -1, -(1 << 70)):
            with (
                self.assertRaisesRegex(
                    ValueError, r"^remat\.budget: bytes was -?\d+.*sys\.maxsize"
                ),
                remat.budget(bytes),
            ):
                pass
        with self.assertRaisesRegex(
            ValueError, "over must be 'continue' or 'throw', got 'stop'"
        ):
            remat.budget(1, over="stop")
        with self.assertRaisesRegex(ValueError, "min_bytes must be 0 or more"):
            remat.budget(1, min_bytes=-1)
        for make in (
            lambda: remat.budget(1, device="meta").__enter__(),
            lambda: remat.checkpoint(lambda x: remat.budget(1).__enter__(), leaf()),
        ):
            with self.assertRaises(remat.CheckpointError) as caught:
                make()
            self.assertEqual(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)
        with self.assertRaisesRegex(ValueError, "moving has no directory"):
            remat.budget(1, moving=remat.MoveOptions()).__enter__()
        with self.assertRaisesRegex(ValueError, "no file could be made in the directory"):
            remat.budget(1, moving=remat.MoveOptions(Path("/nowhere"))).__enter__()
        with self.assertRaisesRegex(TypeError, "moving must be a remat.MoveOptions"):
            remat.budget(1, moving="/tmp")  # type: ignore[arg-type]
        with remat.budget(1 << 70) as budget:
            self.assertEqual(budget.report().budget_bytes, sys.maxsize)

    def test_moving(self) -> None:
        """Results of memory that torch does not own cannot be made again, but they can move."""
        weight = leaf(64, 64)  # 16 KiB
        foreign = torch.frombuffer(bytearray(weight.nbytes), dtype=torch.float32).view(64, 64)

        def step() -> list[Any]:
            x = foreign + 1
            for _ in range(16):
                x = x * weight + foreign
            return [torch.autograd.grad(x.sum(), weight)[0]]

        plain = step()
        floors = []
        with tempfile.TemporaryDirectory() as folder:
            for moving in (None, remat.MoveOptions(Path(folder), min_bytes=0)):
                with remat.budget(1, min_bytes=0, moving=moving) as budget:
                    self.check_equal(step(), plain)
                report = budget.report()
                floors.append(report.floor_bytes)
                self.assertEqual(report.moves > 0, moving is not None)
                self.assertEqual("moves " in str(report), moving is not None)
        self.assertLess(floors[1], floors[0] // 2)

    def test_throw(self) -> None:
        x = leaf(64, 64)  # 16 KiB
        with remat.budget(40_000, over="throw", min_bytes=0) as budget:
            with self.assertRaisesRegex(
                remat.BudgetExceeded, r'(?s)^remat\.budget: .*did not fit.*over="continue"'
            ) as caught:
                torch.zeros(100, 1000)
            self.assertEqual(caught.exception.needed_bytes, 400_000)
            self.assertGreater(caught.exception.floor_bytes, 0)
            self.assertIsInstance(caught.exception, torch.OutOfMemoryError)
            with self.assertRaises(remat.BudgetExceeded):  # in backward
                torch.autograd.grad(
                    (x.sin() * x).exp().expand(8, 64, 64).sum(),
                    x,
                    torch.ones(()),
                    create_graph=True,
                )
                torch.autograd.grad(torch.cat([x.sin()] * 2).exp().sum(), x)
            self.assertGreater(budget.report().over_count, 0)
        self.check_equal(torch.autograd.grad(x.sin().sum(), x)[0], x.detach().cos())

    def test_backward_is_tried_again(self) -> None:
        x = leaf(64, 64)
        plain = torch.autograd.grad(x.sin().exp().sum(), x)
        out = x.sin().exp().sum()
        with remat.budget(20_000, over="throw"), self.assertRaises(remat.BudgetExceeded):
            torch.autograd.grad(out, x, retain_graph=True)
        self.check_equal(torch.autograd.grad(out, x), plain)

    def test_an_exception_leaves_nothing(self) -> None:
        meter = remat.MemoryMeter()
        x = leaf(64, 64)
        gc.collect()
        before = meter.live_bytes
        for _ in range(3):
            try:
                with remat.budget(40_000, min_bytes=0) as budget:
                    x.sin().cos().exp().tanh().sum()
                    raise KeyError("the program's own")
            except KeyError:
                pass
        gc.collect()
        self.assertEqual(meter.live_bytes, before)
        self.assertEqual(budget.report().source_bytes, 0)

    def test_the_page(self) -> None:
        model, loader = torch.nn.Linear(4, 4), [torch.ones(2, 4)] * 2

        def train_step(net: torch.nn.Module, rows: torch.Tensor) -> None:
            net(rows).sin().sum().backward()

        with contextlib.redirect_stdout(io.StringIO()) as out:
            with remat.budget("8 GiB") as budget:
                for batch in loader:
                    train_step(model, batch)
            print(budget.report())
        self.assertIn("budget        8589.93 MB", out.getvalue())

        def train(net: torch.nn.Module, batches: list[torch.Tensor]) -> None:
            for rows in batches:
                train_step(net, rows)

        with remat.budget("8 GiB"):
            train(model, loader)

    def test_nested(self) -> None:
        expected, span = run(gpt)
        with remat.budget(span) as outer:
            found, peak = run(gpt, remat.budget(int(span * 0.6)))
        self.check_equal(found, expected)
        self.assertLessEqual(peak, int(span * 0.6))
        self.assertGreater(outer.report().evictions, 0)  # done in its scope
        self.assertEqual(outer.report().over_count, 0)


class Transforms(Case):
    def test_batched_gradients_through_a_dropout(self) -> None:
        w = leaf(32, 32)

        def program() -> Any:
            torch.manual_seed(3)
            y = F.dropout((w @ w).tanh(), 0.3)
            for _ in range(3):
                y = y.sin().exp()
            (each,) = torch.autograd.grad(y.sum(0), w, torch.eye(32), is_grads_batched=True)
            return [y, each, torch.get_rng_state()]

        expected = program()
        for bytes in (20_000, 60_000, 150_000):
            with remat.budget(bytes, min_bytes=0) as budget:
                self.check_equal(program(), expected, f"at {bytes}")
            self.assertGreater(budget.report().reruns, 0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


class ForLong(Case):
    def test_300_steps_do_not_grow(self) -> None:
        net, ids = Gpt(1, 16, 8), torch.randint(0, 50, (4, 9))
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        meter = remat.MemoryMeter()
        live, resident = [], []
        with remat.budget(300_000) as budget:
            averages = [each.detach().clone() for each in net.parameters()]
            total, losses = torch.zeros(()), []
            for i in range(300):
                optimizer.zero_grad()
                loss = net.loss(ids)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                losses.append(loss.detach())
                with torch.no_grad():
                    for average, now in zip(averages, net.parameters()):
                        average.mul_(0.9).add_(now, alpha=0.1)
                if i % 100 == 99:
                    live.append(meter.live_bytes)
                    resident.append(_resident_bytes())
            self.assertLess(live[2] - live[0], 200 * 4 + 1)  # the losses
            self.assertLess(resident[2] - resident[1], 2_000_000)
            self.assertEqual(budget.report().source_bytes, 0)

    def test_loops_without_a_backward_do_not_grow(self) -> None:
        net = nn.Linear(64, 64)
        meter = remat.MemoryMeter()
        with remat.budget(1 << 20) as budget, torch.no_grad():
            total, state = torch.zeros(()), torch.zeros(4, 64)
            for i in range(4_000):
                x = torch.rand(4, 64)
                total += net(x).square().sum()
                state = (net(state) + x).tanh()
                if i == 2_000:
                    live = meter.live_bytes
            self.assertLess(meter.live_bytes - live, 1 << 20)
            self.assertLess(budget.report().over_count, 1)

    def test_parameters_are_not_copied(self) -> None:
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        x, optimizer = torch.randn(4, 256), torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)

        def peak() -> int:
            meter = remat.MemoryMeter()
            before = meter.live_bytes
            for _ in range(3):
                optimizer.zero_grad()
                loss = net(x).relu().square().mean()
                loss.backward()
                optimizer.step()
            return meter.peak_bytes - before

        plain = peak()
        optimizer.zero_grad()
        optimizer.state.clear()
        with remat.budget(sys.maxsize):
            self.assertLess(peak(), plain + 100_000)

    def test_two_threads(self) -> None:
        expected, span = run(gpt)
        results: list[Any] = [None, None]
        steps = []
        for _ in range(2):
            torch.manual_seed(7)
            net, ids = Gpt(), torch.randint(0, 50, (8, 33))
            net.eval()
            steps.append((net, ids))

        def gradients(net: Gpt, ids: torch.Tensor) -> list[torch.Tensor]:
            x = net.tokens(ids[:, :-1])
            for _ in range(2):
                x = (x @ x.transpose(1, 2)).softmax(-1) @ x
            return list(
                torch.autograd.grad(net.head(x).exp().sum(), [net.tokens.weight, net.head.weight])
            )

        plain = gradients(*steps[0])

        def work(i: int) -> None:
            with remat.budget(span // 8, min_bytes=0):
                results[i] = [gradients(*steps[i]) for _ in range(10)]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for found in results:
            for each in found:
                self.check_equal(each, plain)


SCRIPT = """
import multiprocessing, sys, torch, remat
def work():
    x = torch.randn(64, 64, requires_grad=True)
    torch.autograd.grad(x.sin().cos().exp().tanh().sum(), x)
    [budget] = remat._drop_in._budgets
    print(budget.report().budget_bytes, budget.report().evictions > 0, sys.argv[1:], flush=True)
if __name__ == "__main__":
    work()
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
"""


class Installed(Case):
    def test_install(self) -> None:
        x = leaf(64, 64)
        remat.install(budget="40 kB")
        try:
            torch.autograd.grad(x.sin().cos().exp().tanh().sum(), x)
            [budget] = remat._drop_in._budgets  # type: ignore[attr-defined]
            self.assertGreater(budget.report().evictions, 0)
        finally:
            remat.uninstall()
        counted = budget.report().operators
        x.sin()
        self.assertEqual(budget.report().operators, counted)
        with remat.installed(budget=1 << 20):
            x.sin()
        with self.assertRaisesRegex(ValueError, "neither a size"):
            remat.install(budget="8")

    def test_main(self) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(SCRIPT)
            script.flush()
            for arguments in (["--budget", "40kB"], ["--budget=40 kB"]):
                done = run_python("-W", "ignore", "-m", "remat", *arguments, script.name, "--flag")
                self.assertEqual(done.returncode, 0, done.stdout)
                self.assertEqual(done.stdout.splitlines(), ["40000 True ['--flag']"] * 2)
            done = run_python("-m", "remat", "--budget", "8", script.name)
            self.assertEqual(done.returncode, 1)
            self.assertIn("python -m remat: remat.budget: the budget '8'", done.stdout)

    def test_a_process_that_ends_in_the_scope(self) -> None:
        done = run_script(
            "import torch, remat\n"
            "budget = remat.budget(40_000, min_bytes=0)\n"
            "budget.__enter__()\n"
            "x = torch.randn(64, 64, requires_grad=True)\n"
            "out = x.sin().cos().exp().tanh().sum()\n"
            "print('done')\n"
        )
        self.assertEqual((done.returncode, done.stdout[-5:]), (0, "done\n"), done.stdout)


if __name__ == "__main__":
    unittest.main()
