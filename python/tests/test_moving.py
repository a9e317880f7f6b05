"""Plans that move saved tensors of stages and regions: measured, solved, run and fitted."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import pickle
import tempfile
import threading
import traceback
import tracemalloc
import unittest
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Optional

import torch
import torch.nn as nn

import remat
from common import Case, gradient, leaf, run_script

torch.set_num_threads(1)

ELEMENTS = 50_000
BYTES = 4 * ELEMENTS
Stages = list[Callable[[torch.Tensor], torch.Tensor]]


def various_stages() -> Stages:
    """Returns stages that save different things; the last one is the loss."""
    return [
        lambda x: x.sin().cos(),  # its input, and a value
        lambda x: (x * x.exp()).tanh(),  # ... and its output
        lambda x: torch.cat([x, x.sin()]),  # twice as wide from here on
        lambda x: x.cos().neg().cos(),  # two values
        lambda x: x.sin().square().mean(),
    ]


def region_lists(first: int, last: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the regions of all plans of these stages whose levels end with a plain stage."""
    if first > last:
        yield []
        return
    yield from region_lists(first + 1, last)
    for end in range(first, last):
        for inside, rest in itertools.product(
            region_lists(first, end), region_lists(end + 1, last)
        ):
            yield [(first, end), *inside, *rest]


def plans_that_move(num_stages: int) -> Iterator[remat.Plan]:
    for regions in region_lists(1, num_stages):
        items, end = [], 0
        for stage in range(1, num_stages + 1):
            if stage > end:
                end = max([stage, *(b for a, b in regions if a == stage)])
                items.append(stage)
        for number in range(len(items)):
            for moved in itertools.combinations(items[:-1], number):
                yield remat.Plan(num_stages, regions, moved)


class Block(nn.Module):
    """Draws numbers, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.dropout = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.norm(self.up(x)).sin())


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def blocks(number: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(number)), Loss())


def step(
    net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> list[torch.Tensor]:
    """Returns loss, gradients and buffers."""
    torch.manual_seed(5)
    for each in net.parameters():
        each.grad = torch.zeros_like(each)
    loss = run(x)
    loss.backward()
    return [
        loss.detach(),
        *(each.grad for each in net.parameters()),  # type: ignore[misc]
        *(b.clone() for b in net.buffers()),
    ]


class Moving(Case):
    def setUp(self) -> None:
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.directory = Path(folder.name)
        self.moving = remat.MoveOptions(directory=self.directory, min_bytes=0)
        self.stages = various_stages()
        self.x = leaf(ELEMENTS)

    def run_plan(
        self, text: str, x: Optional[torch.Tensor] = None, stages: Optional[Stages] = None
    ) -> torch.Tensor:
        plan = remat.Plan.parse(text)
        return remat.run(
            plan, self.stages if stages is None else stages, self.x if x is None else x,
            moving=self.moving
        )

    def test_text_and_values(self) -> None:
        plan = remat.Plan.parse("[mv[1] mv[ck[2]] 3]")
        self.assertEqual((str(plan), plan.moved), ("[mv[1] mv[ck[2]] 3]", [1, 2]))
        self.assertEqual(plan, remat.Plan(3, [(2, 2)], [1, 2]))
        self.assertNotEqual(plan, remat.Plan(3, [(2, 2)], [1]))
        for copied in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
            self.assertEqual((copied, copied.moved), (plan, [1, 2]))
        for text in ("[1 mv[2]]", "[ck[mv[1]] 2]", "[mv[1 2] 3]"):
            with self.assertRaisesRegex(ValueError, r"remat\.Plan"):
                remat.Plan.parse(text)
        with self.assertRaisesRegex(ValueError, "inside of a region"):
            remat.Plan(3, [(1, 2)], [2])

    def test_measure_says_what_moves_and_what_copies_take(self) -> None:
        stages: Stages = [
            lambda t: t.sin().cos(),
            lambda t: t.tanh(),  # saves its output only
            lambda t: t.view(2, -1).sum(1).cos(),  # two elements
            lambda t: t.square().sum(),
        ]
        self.assertIsNone(remat.measure(stages, self.x, repeats=1).moving)
        cost = remat.measure(
            stages, self.x, repeats=2, moving=remat.MoveOptions(directory=str(self.directory))
        )
        assert cost.moving is not None
        self.assertGreater(min(cost.moving), 0)
        self.assertEqual([each.movable_bytes for each in cost.stages], [BYTES, 0, 0, 0])
        self.assertEqual(
            [each.has_movable_output for each in cost.stages], [True, True, False, False]
        )
        for other in (
            copy.deepcopy(cost), pickle.loads(pickle.dumps(cost)), remat.ChainCost(*cost)
        ):
            self.assertEqual(other, cost)
            self.assertEqual(remat.solve(other).points, remat.solve(cost).points)

    def test_every_plan_has_plain_gradients_and_no_higher_peak_than_the_simulated_one(self) -> None:
        cost = remat.measure(self.stages, self.x, warmup=0, repeats=1, moving=self.moving)
        meter = remat.MemoryMeter()
        (expected,) = torch.autograd.grad(remat.run(remat.Plan(5), self.stages, self.x), self.x)
        num_lower = 0
        for plan in plans_that_move(5):
            self.x.grad = None
            before = meter.live_bytes
            meter.reset_peak()
            remat.run(plan, self.stages, self.x, moving=self.moving).backward()
            simulated = remat.simulate(cost, plan).peak_bytes
            self.assertLessEqual(meter.peak_bytes - before, simulated, str(plan))
            self.assertTrue(torch.equal(self.x.grad, expected), str(plan))  # type: ignore[arg-type]
            num_lower += simulated < remat.simulate(cost, remat.Plan(5, plan.regions)).peak_bytes
        self.assertGreater(num_lower, 50)

    def test_modules_with_random_numbers_and_running_statistics(self) -> None:
        plain, net, x = blocks(4), blocks(4), torch.randn(256, 64)
        for text in (
            "[mv[1] mv[2] mv[3] mv[4] 5]", "[mv[ck[1]] mv[ck[ck[2] 3]] 4 5]",
            "[mv[ck[1]] 2 mv[ck[3]] ck[4] 5]"
        ):
            plan = remat.Plan.parse(text)
            found = step(net, lambda x: remat.run(plan, net, x, moving=self.moving), x)
            self.check_equal(found, step(plain, plain, x), text)

    def test_backward_several_times_in_part_and_with_its_graph(self) -> None:
        def results(text: str) -> list[torch.Tensor]:
            x = leaf(ELEMENTS)
            y = x * x
            loss = self.run_plan(text, y)
            loss.backward(retain_graph=True)
            (first,) = torch.autograd.grad(loss, y, create_graph=True)
            first.square().sum().backward(retain_graph=True)
            twice = x.grad.clone()  # type: ignore[union-attr]
            loss.backward()
            return [first.detach(), twice, x.grad]  # type: ignore[list-item]

        self.check_equal(results("[mv[1] mv[ck[2]] mv[ck[3]] 4 5]"), results("[1 2 3 4 5]"))

    def test_reports_say_what_each_item_moved(self) -> None:
        with remat.Recorder() as recorder:
            remat.run(remat.Plan(5), self.stages, self.x, moving=self.moving).backward()
        self.assertEqual(recorder.report().moves, [])
        with remat.Recorder() as recorder:
            for _ in range(2):
                plan = remat.Plan.parse("[mv[1] mv[2] mv[ck[3]] 4 5]")
                stages = [
                    self.stages[0], lambda t: t.sin().cos(), lambda t: t.exp().sin(),
                    *self.stages[3:]
                ]
                remat.run(plan, stages, self.x, moving=self.moving).backward()
        moves = recorder.report().moves
        self.assertEqual([each.name for each in moves], ["stage 1", "stage 2", "stage 3"])
        for each, values in zip(moves, (1, 2, 1)):  # stage 2: its input, and a value
            self.assertEqual(
                (each.moves, each.bytes_moved), (2 * values, 2 * values * BYTES), each.name
            )
            self.assertEqual(each.bytes_loaded, each.loads * BYTES, each.name)
            self.assertGreaterEqual(each.loads, each.loads_ahead)
            self.assertGreater(each.wait_s, 0)
        first = json.loads(recorder.report().to_json())["moves"][0]
        self.assertEqual((first["name"], first["moves"]), ("stage 1", 2))

    def test_inside_of_a_region_and_under_guards(self) -> None:
        text = "[mv[1] mv[ck[2]] mv[ck[3]] 4 5]"
        expected = gradient(self.run_plan("[1 2 3 4 5]"), self.x)
        self.check_equal(
            gradient(remat.checkpoint(lambda t: self.run_plan(text, t), self.x), self.x), expected
        )
        with remat.save_on_disk(self.directory, min_bytes=0):
            self.check_equal(gradient(self.run_plan(text), self.x), expected)
        packed: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (packed.append(t), t)[1], lambda t: t
        ):
            y = self.run_plan(text)
        self.assertGreater(len(packed), 0)
        self.check_equal(gradient(y, self.x), expected)
        with torch.no_grad():
            self.assertFalse(self.run_plan(text).requires_grad)
        # Stages that return what they are given: no hook stays on the caller's tensor.
        stages = [lambda t: t, lambda t: t, *self.stages]
        for _ in range(3):
            self.check_equal(
                gradient(self.run_plan("[mv[1] mv[2] mv[3] 4 5 6 7]", stages=stages), self.x),
                expected,
            )
        self.assertFalse(self.x._backward_hooks)

    def test_what_moves_and_is_changed_in_place_raises_in_backward(self) -> None:
        kept: list[torch.Tensor] = []

        def keeps(t: torch.Tensor) -> torch.Tensor:
            kept.append(t)
            return t.cos()

        stages: Stages = [torch.sin, keeps, torch.sum]
        for text in ("[1 2 3]", "[mv[1] mv[2] 3]", "[1 mv[ck[2]] 3]"):
            loss = self.run_plan(text, stages=stages)
            with torch.no_grad():
                kept[-1].mul_(2)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()

    def test_what_stages_raise(self) -> None:
        def raises(t: torch.Tensor) -> torch.Tensor:
            raise KeyError("stage")

        for stages in ([torch.sin, raises, torch.sum], [raises, torch.sin, torch.sum]):
            for text in ("[mv[1] mv[2] 3]", "[mv[ck[1]] mv[ck[2]] 3]"):
                try:
                    self.run_plan(text, stages=stages)  # type: ignore[arg-type]
                except KeyError as error:
                    self.assertEqual(error.args, ("stage",))
                    self.assertEqual(traceback.extract_tb(error.__traceback__)[-1].name, "raises")
                else:
                    self.fail("nothing was raised")
        with self.assertRaisesRegex(TypeError, "stage 2 must return one tensor"):
            self.run_plan("[mv[1] mv[2] 3]", stages=[
                torch.sin, lambda t: 3, torch.sum])  # type: ignore[list-item,return-value]
        runs: list[int] = []

        def raises_later(t: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            if len(runs) == 2:
                raise ZeroDivisionError("again")
            return t.sin().exp()

        loss = self.run_plan("[mv[1] mv[ck[2]] 3]", stages=[torch.exp, raises_later, torch.sum])
        with self.assertRaisesRegex(ZeroDivisionError, "again"):
            loss.backward(retain_graph=True)
        loss.backward()
        self.check_equal(self.x.grad, gradient(self.x.exp().sin().exp().sum(), self.x)[0])

    def test_what_it_refuses(self) -> None:
        plan = remat.Plan.parse("[mv[1] 2 3 4 5]")
        cpu = "the plan moves tensors of the CPU, but MoveOptions has no directory"
        run = lambda moving: remat.run(plan, self.stages, self.x, moving=moving)  # noqa: E731
        for moving in (None, remat.MoveOptions()):
            with self.assertRaisesRegex(ValueError, f"remat.run: {cpu}"):
                run(moving)
        with self.assertRaisesRegex(ValueError, f"remat.measure: {cpu}"):
            remat.measure(self.stages, self.x, moving=remat.MoveOptions())
        with self.assertRaisesRegex(ValueError, "no file could be made in the directory"):
            run(remat.MoveOptions(directory=self.directory / "missing"))
        with self.assertRaisesRegex(ValueError, r"remat.run: min_bytes is -1"):
            run(remat.MoveOptions(directory=self.directory, min_bytes=-1))
        for call in (run, lambda each: remat.measure(self.stages, self.x, moving=each)):
            with self.assertRaisesRegex(TypeError, r"moving must be a remat\.MoveOptions or None, "
                                                   "got '/"):
                call("/tmp")
        cost = remat.measure(self.stages, self.x, repeats=1)
        with self.assertRaisesRegex(ValueError, "remat.simulate: the plan moves items, but the "
                                                r"chain has no ChainCost\.moving"):
            remat.simulate(cost, plan)
        for moves, text in (
            (remat.MoveCost(held_up_share=-1.5), "held_up_share"),
            (remat.MoveCost(-1), "store_s_per_byte"),
        ):
            with self.assertRaisesRegex(
                ValueError, rf"remat.solve: MoveCost\.{text} must be finite and at least 0, got -1"
            ):
                remat.solve(cost._replace(moving=moves))
        stages = (
            cost.stages[0]._replace(movable_bytes=cost.stages[0].saved_bytes + 1), *cost.stages[1:]
        )
        with self.assertRaisesRegex(
            ValueError, "movable_bytes of stage 1 must be at least 0 and at most its saved_bytes"
        ):
            remat.solve(cost._replace(stages=stages, moving=remat.MoveCost()))

    def test_fit_moves_where_that_takes_less_time_than_recomputing_more_often(self) -> None:
        chain: Stages = [*([lambda t: t.sin().cos().sin().cos()] * 6), lambda t: t.square().mean()]
        settings = {"repeats": 1, "moving": self.moving}
        without = remat.solve(remat.measure(chain, self.x, repeats=1))
        budget = without.points[0].bytes + BYTES
        measured = remat.fit(chain, self.x, budget, **settings)  # type: ignore[arg-type]
        self.assertLessEqual(measured.measured_bytes, budget)
        self.assertIn("copies of 1,000,000 bytes", str(measured))
        # The time of copies here depends on the other load of the machine: say that they take next
        # to nothing.
        cost = measured.cost._replace(moving=remat.MoveCost(1e-15, 1e-15, 0.1))
        fitted = remat.fit(chain, self.x, budget, cost=cost, **settings)  # type: ignore[arg-type]
        self.assertNotEqual(fitted.plan.moved, [])
        self.assertLess(fitted.plan.depth, without.plan(budget).depth)
        self.assertLessEqual(fitted.measured_bytes, budget)
        self.assertRegex(str(fitted), "input moved, recomputed|  moved\n")
        self.assertIs(fitted.moving, self.moving)
        self.check_equal(
            gradient(fitted(self.x), self.x),
            gradient(remat.run(remat.Plan(7), chain, self.x), self.x),
        )
        staying = remat.fit(chain, self.x, budget, cost=cost)
        self.assertEqual((staying.plan.moved, staying.cost.moving), ([], None))

    def test_fit_of_a_sequential_with_its_copies(self) -> None:
        plain, net, x = blocks(4), blocks(4), torch.randn(256, 64)
        for each in net.parameters():
            each.grad = torch.zeros_like(each)
        cost = remat.measure(net, x, repeats=1, moving=self.moving)._replace(
            moving=remat.MoveCost(1e-15, 1e-15, 0.1)
        )
        budget = (
            remat.simulate(cost, remat.Plan.parse("[mv[1] mv[2] mv[3] mv[4] 5]")).peak_bytes + BYTES
        )
        fitted = remat.fit(net, x, budget, cost=cost, moving=self.moving)
        self.assertNotEqual(fitted.plan.moved, [])
        wanted = step(plain, plain, x)
        for other in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            owner = other if isinstance(other, nn.Module) else net
            for mine, theirs in zip(owner.buffers(), blocks(4).buffers()):
                mine.copy_(theirs)
            self.check_equal(step(owner, owner, x), wanted)

    def test_what_a_run_kept_dies_with_its_graph(self) -> None:
        class Stage:
            def __call__(self, t: torch.Tensor) -> torch.Tensor:
                return t.sin().cos()

        meter = remat.MemoryMeter()
        stages: Stages = [Stage(), Stage(), Stage(), torch.sum]
        known = [weakref.ref(each) for each in stages[:3]]
        text = "[mv[1] mv[ck[2]] mv[ck[3]] 4]"
        gc.disable()
        self.addCleanup(gc.enable)
        live = meter.live_bytes
        loss = self.run_plan(text, stages=stages)
        stages = [Stage(), Stage(), Stage(), torch.sum]
        self.assertNotIn(None, [each() for each in known])
        del loss
        self.assertEqual([each() for each in known], [None, None, None])
        self.assertEqual(meter.live_bytes, live)
        handles = len(os.listdir("/proc/self/fd"))
        gc.enable()

        def run() -> None:
            torch.autograd.grad(self.run_plan(text, stages=stages), self.x)

        for _ in range(20):
            run()
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        run()
        gc.collect()  # torch.autograd leaves a cycle
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100):
            run()
        gc.collect()
        self.assertLess(tracemalloc.get_traced_memory()[0] - before, 10_000)
        self.assertEqual((meter.live_bytes, len(os.listdir("/proc/self/fd"))), (live, handles))

    def test_threads_run_plans_that_move(self) -> None:
        text = "[mv[1] mv[ck[2]] mv[ck[3]] 4 5]"
        expected = gradient(self.run_plan("[1 2 3 4 5]"), self.x)
        found: list[bool] = []

        def work() -> None:
            for _ in range(10):
                found.append(torch.equal(gradient(self.run_plan(text), self.x)[0], expected[0]))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertEqual(found, [True] * 40)

    def test_memory_that_python_frees(self) -> None:
        # It is freed where it was written to the file, by a thread that needs the interpreter's
        # lock for that.
        ended = run_script(
            """
import array, sys, tempfile, threading, torch, remat
N = 1 << 20
def scaled(t):
    return t * torch.frombuffer(array.array("f", [2.0]) * N, dtype=torch.float32)
x = torch.ones(N, requires_grad=True)
with tempfile.TemporaryDirectory() as folder:
    for _ in range(10):
        plan = remat.Plan.parse("[mv[1] mv[2] 3 4]")
        loss = remat.run(plan, [scaled, scaled, torch.sin, torch.sum], x,
                         moving=remat.MoveOptions(folder))
        (found,) = torch.autograd.grad(loss, x)
assert torch.equal(found, torch.cos(torch.full((N,), 4.0)) * 4)
print("over")
""",
            timeout=60,
        )
        self.assertEqual((ended.returncode, ended.stdout.split()[-1:]), (0, ["over"]), ended.stdout)


if __name__ == "__main__":
    unittest.main()
