"""remat.budget: any program within a byte budget, bit by bit the plain one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import math
import re
import resource
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

import remat
from common import Case, gradient, leaf, run_python, run_script

Step = Callable[[], list[Any]]


def state_of(net: nn.Module) -> list[Any]:
    """All that a step leaves in a net."""
    gradients = [each.grad for each in net.parameters()]
    return [*net.parameters(), *net.buffers(), *gradients]


# ---- programs: each makes a net and returns a step, whose results must equal plain torch's ----


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)) / math.sqrt(w // 4)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = F.dropout(weights.masked_fill(hidden, -math.inf).softmax(-1), 0.1)
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, t, w)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Gpt(nn.Module):
    def __init__(self, blocks: int = 4, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50)
        self.call: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def gpt(call: Optional[Callable[..., Any]] = None) -> Step:
    net, ids = Gpt(), torch.randint(0, 50, (8, 33))
    if call is not None:
        net.call = call

    def step() -> list[Any]:
        loss = net.loss(ids)
        loss.backward()
        return [loss, *state_of(net)]

    return step


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.two(self.relu(self.norm(self.one(x)))))
        y += x
        return self.relu(y)


def resnet() -> Step:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Residual(8) for _ in range(4)),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))

    def step() -> list[Any]:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return [loss, *state_of(net)]

    return step


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4 << i, 8 << i, 3, padding=1) for i in range(3))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(16 << i if i else 8, 4 << i, 2, stride=2) for i in range(3)
        )
        self.mix = nn.ModuleList(
            nn.Conv2d(8 << i, 8 << i if i else 4, 3, padding=1) for i in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for conv in self.down:
            kept.append(x)
            x = F.max_pool2d(F.silu(conv(x)), 2)
        for i in (2, 1, 0):
            up = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = F.silu(self.mix[i](torch.cat([up[:, : 4 << i], kept[i]], 1)))
        return x


def unet() -> Step:
    net, x = UNet(), torch.randn(2, 4, 32, 32)

    def step() -> list[Any]:
        out = net(x)
        out.square().mean().backward()
        return [
            out,
            *state_of(net)[: len(list(net.parameters()))],
            *[p.grad for p in net.parameters()],
        ]

    return step


def lstm() -> Step:
    cell, x = nn.Linear(48, 128), torch.randn(24, 16, 16)

    def step() -> list[Any]:
        h = c = torch.zeros(16, 32)
        for each in x:
            i, f, g, o = cell(torch.cat([each, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        h.sum().backward()
        return [h, c, *state_of(cell)]

    return step


def recursion() -> Step:
    net = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    x = torch.randn(64, 32)

    def visit(x: torch.Tensor, depth: int) -> torch.Tensor:
        x = net[depth % 3](x).tanh()
        if depth == 5 or len(x) < 4:
            return x.sum(0)
        middle = x.mean(1).median().item()
        chosen = x.mean(1) > middle
        left = visit(x[chosen], depth + 1)
        return left * visit(x[~chosen], depth + 1) if left.sum().item() > 0 else left - x.mean(0)

    def step() -> list[Any]:
        out = visit(x, 0)
        out.sum().backward()
        return [out, *state_of(net)]

    return step


def written() -> Step:
    w, x = leaf(64, 64), torch.randn(64, 64)

    def step() -> list[Any]:
        y = x @ w
        y[:, ::2] *= 0.5
        y[3:9].add_(1.0)
        y.relu_()
        z = y.t().contiguous().sigmoid()
        table = torch.zeros(64, 64)
        table[:32] = z[32:].detach()
        with torch.no_grad():
            torch.mul(table, 2.0, out=table)
        z = z * table
        z = z.index_put((torch.tensor([0, 5]),), torch.ones(64)).view(32, 128)
        z.unsqueeze_(0).squeeze_(0)
        out = (z.exp_() * z[0].clone()).masked_fill_(z > 2, 0.0)
        out.sum().backward()
        return [out, table, w.grad]

    return step


def penalty() -> Step:
    net = nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1)
    )
    x = leaf(64, 32)

    def step() -> list[Any]:
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return [loss, slope, *state_of(net)]

    return step


def three_losses() -> Step:
    net, x = Gpt(2), torch.randint(0, 50, (4, 32))

    def step() -> list[Any]:
        out = net(x).log_softmax(-1)
        losses = [out[..., 0].mean(), out.exp().square().sum(), out.logsumexp(0).max()]
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i < 2)
        return [*losses, *state_of(net)]

    return step


def autocast(inside: bool) -> Step:
    net, x = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU()))
    ), torch.randn(64, 64)

    def step() -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = (net(x) + net(x + 1)).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [loss, *state_of(net)]

    return step


def training(make: Callable[[Any], torch.optim.Optimizer]) -> Step:
    net, ids = Gpt(2), torch.randint(0, 50, (4, 33))
    optimizer = make(net.parameters())

    def step() -> list[Any]:
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = net.loss(ids)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        state = [each for of_one in optimizer.state.values() for each in of_one.values()]
        return [losses, *state, *state_of(net)]

    return step


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, square = ctx.saved_tensors
        return gradient * (2 * square + x * x)


def custom_function() -> Step:
    w = leaf(64, 64)

    def step() -> list[Any]:
        x = w
        for _ in range(6):
            x = Cube.apply(x.sin()).exp()
        x.sum().backward()
        return [x, w.grad]

    return step


def sparse() -> Step:
    net = nn.Sequential(
        nn.Embedding(100, 32, sparse=True), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    ids = torch.randint(0, 100, (512,))

    def step() -> list[Any]:
        out = net(ids)
        out.square().sum().backward()
        state = state_of(net)
        return [out, *(each.to_dense() if each.is_sparse else each for each in state)]

    return step


def upstreams(block: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def compiled() -> Step:
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())
    x = torch.randn(64, 64)
    run = torch.compile(net, backend="eager")

    def step() -> list[Any]:
        out = run(x) * run(x + 1)
        out.sum().backward()
        return [out, *state_of(net)]

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "gpt": gpt,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
    "recursion": recursion,
    "written": written,
    "penalty": penalty,
    "three losses": three_losses,
    "autocast, backward outside": lambda: autocast(False),
    "autocast, backward inside": lambda: autocast(True),
    "sgd": lambda: training(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adam": lambda: training(lambda p: torch.optim.Adam(p, 0.01, foreach=True)),
    "custom function": custom_function,
    "sparse": sparse,
    "torch.utils.checkpoint inside": lambda: gpt(upstreams),
    "remat.checkpoint inside": lambda: gpt(lambda block, x: remat.checkpoint(block, x)),
    "compiled": compiled,
}


def run(make: Callable[[], Step], budget: Optional[remat.Budget] = None) -> tuple[list[Any], int]:
    """What a step leaves, with the generator's state, and the most bytes that were alive in it."""
    torch.manual_seed(7)
    step = make()
    meter = remat.MemoryMeter()
    before = meter.live_bytes
    if budget is None:
        results = step()
    else:
        with budget:
            results = step()
    return [*results, torch.get_rng_state()], meter.peak_bytes - before


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


# ---- the guard ------------------------------------------------------------------------------------


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
                self.assertRaisesRegex(ValueError, "nothing says how much is free"),
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
            TypeError, "bytes must be a whole number of bytes or a str such as '8 GiB', and is None"
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
            ValueError, "over must be 'continue' or 'throw', and is 'stop'"
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
        with self.assertRaisesRegex(ValueError, "moving names no directory"):
            remat.budget(1, moving=remat.MoveOptions()).__enter__()
        with self.assertRaisesRegex(ValueError, "no file could be made in the directory"):
            remat.budget(1, moving=remat.MoveOptions(Path("/nowhere"))).__enter__()
        with self.assertRaisesRegex(TypeError, "moving must be a remat.MoveOptions"):
            remat.budget(1, moving="/tmp")  # type: ignore[arg-type]
        with remat.budget(1 << 70) as budget:
            self.assertEqual(budget.report().budget_bytes, sys.maxsize)

    def test_moving(self) -> None:
        """Results of memory that is not torch's cannot be made again, but they can move."""
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


class WhatChanges(Case):
    """Writes that autograd refuses, and writes that nobody sees."""

    def both(self, program: Callable[[], Any], bytes: int = 30_000) -> tuple[Any, Any]:
        def outcome() -> Any:
            try:
                return program()
            except RuntimeError as error:
                # The name of the node is nobody's to know where a hook packs the tensor.
                return re.sub(r", which is output \d+ of \w+,", "", str(error))

        plain = outcome()
        with remat.budget(bytes, min_bytes=0):
            return outcome(), plain

    def test_a_saved_tensor_changed_in_place(self) -> None:
        w = leaf(64, 64)

        def result() -> Any:
            y = w.sin()
            out = y.exp().tanh().sum() + (y * y).sum()
            y.add_(1)
            return torch.autograd.grad(out, w)

        def parameter() -> Any:
            x = leaf(64, 64, seed=1).detach()
            w = leaf(64, 64)
            y = (x @ w).tanh().exp().sum()
            with torch.no_grad():
                w.mul_(2)
            return torch.autograd.grad(y, w)

        def leaf_changed() -> Any:
            w = leaf(64, 64)
            y = (w.sin() * w).exp().sum()
            with torch.no_grad():
                w.mul_(2)
            return torch.autograd.grad(y, w)

        for program in (result, parameter, leaf_changed):
            for bytes in (30_000, sys.maxsize):
                found, plain = self.both(program, bytes)
                self.check_equal(found, plain, program.__name__)
                if program is not parameter:
                    self.assertIn("modified by an inplace operation", found)

    def test_a_result_changed_after_the_scope(self) -> None:
        w = leaf(64, 64)

        def forward(a: torch.Tensor) -> torch.Tensor:
            return ((a + 0).sin() * w).exp().sum() + ((a + 0).cos() * w).tanh().sum()

        for make in (lambda: torch.full((64, 64), 0.5), lambda: torch.full((64, 64), 0.25) * 2):
            expected = gradient(forward(make()), w)
            for bytes in (30_000, sys.maxsize):
                with remat.budget(bytes, min_bytes=0):
                    a = make()
                    out = forward(a)
                a.add_(1)
                self.check_equal(gradient(out, w), expected)
        a = make()
        with remat.budget(30_000, min_bytes=0):
            out = forward(a)
        a.add_(1)
        with self.assertRaisesRegex(
            RuntimeError, r"^remat\.budget: a tensor that a dropped value is made of has changed"
        ):
            gradient(out, w)

    def test_a_batch_that_is_refilled(self) -> None:
        w = leaf(64, 64)

        def program() -> Any:
            batch = bytearray(64 * 64 * 4)  # as an array of NumPy's
            x = torch.frombuffer(batch, dtype=torch.float32)[: 64 * 64].view(64, 64)
            y = ((x + 2).sin() @ w).exp().mean() + (x @ w).tanh().sum()
            batch[:] = b"?" * len(batch)
            return [y, *torch.autograd.grad(y, w)]

        for bytes in (20_000, 60_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes))

    def test_empty_memory_that_others_fill(self) -> None:
        w = leaf(64, 64)

        def fill(x: torch.Tensor, value: float) -> torch.Tensor:
            other = torch.full((64, 64), value)
            ctypes.memmove(x.data_ptr(), other.data_ptr(), x.nbytes)  # as x.numpy()[...] = value
            return x

        def program() -> Any:
            x = fill(torch.empty(64, 64), 0.5)
            y = ((x * 2) @ w).exp().mean() + (x @ w).tanh().sum()
            z = fill(torch.empty_like(x), 0.25).add_(1)
            y = (
                y
                + (z @ w).sigmoid().sum()
                + (torch.empty(64, 64).fill_(2.0).mul_(0.5) @ w).sin().sum()
            )
            del x, z
            return [y, *torch.autograd.grad(y, w)]

        for bytes in (20_000, 60_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes))

    def test_statistics_of_a_norm(self) -> None:
        # A norm in training writes to its statistics, and its schema does not say so.
        norm, w = nn.BatchNorm1d(64), leaf(64, 64)

        def program() -> Any:
            norm.reset_running_stats()
            y = norm.eval()(w.sin()).exp()  # reads them
            y2 = norm.train()(w * 3 + 1).exp()
            out = (y.sin() * y2).tanh()
            del y, y2
            for _ in range(6):
                out = out.sin().exp()
            return [out, *gradient(out, w), *(each.clone() for each in norm.buffers())]

        for bytes in (20_000, 40_000, 60_000, 120_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes), f"at {bytes}")

    def test_a_write_past_the_version(self) -> None:
        # Backward sees what `.data` has written, as it sees the storage.
        w = leaf(64, 64)

        def program() -> Any:
            y = w.sin()
            z = (w.cos() * 2).detach()
            out = y.cos() * z * w
            y.data.mul_(2)
            z.data[3:9].fill_(0.5)
            out = out + y.exp() * z
            del y, z
            for _ in range(4):
                out = out.sin().tanh()
            return [out, *gradient(out, w)]

        for bytes in (20_000, 40_000, 60_000, 120_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes), f"at {bytes}")

    def test_an_operator_that_hides_its_writes(self) -> None:
        library = torch.library.Library("remat_test_budget", "DEF")
        library.define("halve(Tensor x) -> ()")

        def halve(x: torch.Tensor) -> None:
            half = x.detach() * 0.5
            ctypes.memmove(x.data_ptr(), half.data_ptr(), x.nbytes)

        library.impl("halve", halve, "CPU")
        w = leaf(64, 64)

        def program() -> Any:
            y, z = w.sin(), (w.detach() * 2 + 1)
            out = y.cos() * z * w
            with torch.no_grad():
                torch.ops.remat_test_budget.halve(y)
                torch.ops.remat_test_budget.halve(z)
            out = out + y.exp() * z
            del y, z
            for _ in range(4):
                out = out.sin().tanh()
            return [out, *gradient(out, w)]

        for bytes in (20_000, 40_000, 60_000, 120_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes), f"at {bytes}")

    def test_a_backward_that_writes_to_a_saved_tensor(self) -> None:
        class Doubles(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                x.mul_(2)
                return gradient * x

        w = leaf(64, 64)
        for bytes in (20_000, 60_000, sys.maxsize):
            for is_outside in (False, True):
                found = []
                for guard in (
                    contextlib.nullcontext(),
                    remat.budget(bytes, min_bytes=0),
                ):
                    with guard:
                        y = w.sin()
                        z = y.exp() + y.cos()  # before in backward: it reads what was doubled
                        out = Doubles.apply(y) * 2 + z * 3
                        del y, z
                        for _ in range(3):
                            out = out.tanh()
                        if not is_outside:
                            found.append(self.outcome_of(out, w))
                    if is_outside:
                        found.append(self.outcome_of(out, w))
                self.check_equal(found[1], found[0], f"at {bytes}, outside: {is_outside}")

    def outcome_of(self, out: torch.Tensor, w: torch.Tensor) -> Any:
        try:
            return gradient(out, w)
        except RuntimeError as error:
            return str(error).split("which is output")[0].split("is at version")[0].strip(" ,")

    def test_settings_that_change_before_backward(self) -> None:
        w = leaf(64, 64)

        def forward() -> torch.Tensor:
            counts = torch.ones(64, 64, dtype=torch.int64) * 3
            return ((counts / 7) * w).sin().cos().exp().tanh()

        for begin, end, name in (
            (torch.float64, torch.float32, "the default dtype"),
            (torch.float32, torch.float64, "the default dtype"),
        ):
            try:
                torch.set_default_dtype(begin)
                with remat.budget(20_000, min_bytes=0):
                    out = forward()
                    torch.set_default_dtype(end)
                    with self.assertRaisesRegex(RuntimeError, name + " has changed"):
                        gradient(out, w, retain_graph=True)
                    torch.set_default_dtype(begin)
                    found = gradient(out, w)
                self.check_equal(found, gradient(forward(), w))
            finally:
                torch.set_default_dtype(torch.float32)

    def test_a_source_whose_storage_is_emptied(self) -> None:
        # fully_shard does the same: the parameter's memory is freed, and filled again for backward.
        w = leaf(64, 64)

        def program() -> Any:
            with torch.no_grad():  # nothing is saved yet: not recorded, as a parameter
                full, kept = w.clone().requires_grad_(), w.clone()
            y = (full * 2).sin()
            out = y.exp() * y.cos() * full
            for _ in range(2):
                out = out.tanh()
            storage = full.untyped_storage()
            size = storage.size()
            storage.resize_(0)
            del y
            for _ in range(3):
                out = out.sin()
            storage.resize_(size)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((full,)):
                full.copy_(kept)
            return [out, *gradient(out, full)]

        for bytes in (20_000, 40_000, 80_000, 120_000, 200_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes), f"at {bytes}")

    def test_a_new_tensor_that_is_written_to_unseen(self) -> None:
        # Another thread or compiled code writes: only its version counter tells.
        w = leaf(64, 64)

        def program() -> Any:
            start = w.exp()
            x, y = torch.zeros(64, 64), torch.full((64, 64), 2.0)
            for each in (x, y):
                thread = threading.Thread(target=each.add_, args=(0.5,))
                thread.start()
                thread.join()
            out = (x * w).sin() * start + (y * 2).cos() * w
            del x, y, each, thread
            for _ in range(4):
                out = out.tanh()
            return [out, *gradient(out, w)]

        for bytes in (20_000, 60_000, 120_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes), f"at {bytes}")

    def test_memory_that_is_filled_in_part(self) -> None:
        w = leaf(64, 64)

        def program() -> Any:
            start = w.exp()  # something is saved
            x = torch.empty(64, 64)
            x[:8].fill_(0.5)
            ctypes.memmove(x[8:].data_ptr(), torch.full((56, 64), 0.25).data_ptr(), 56 * 256)
            out = (x * w).sin() * start
            del x
            for _ in range(4):
                out = out.tanh()
            return [out, *gradient(out, w)]

        for bytes in (20_000, 60_000, sys.maxsize):
            self.check_equal(*self.both(program, bytes), f"at {bytes}")


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
