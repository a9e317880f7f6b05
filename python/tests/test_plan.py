"""Plans: text, costs, budgets that hold to the byte, and `fit`."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import sys
import unittest
import warnings
from unittest import mock

import torch
import torch.nn as nn

import remat
from common import Case

torch.set_num_threads(1)  # small tensors, maybe on a busy machine


class Block(nn.Module):
    def __init__(self, width: int = 64, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def chain(blocks: int = 8, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(norm=norm) for _ in range(blocks)), Loss())


def sample() -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(256, 64)


def zeroed(net: nn.Module) -> None:
    for each in net.parameters():
        each.grad = torch.zeros_like(each)


def step(net: nn.Module, run: object, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns loss, gradients and buffers."""
    torch.manual_seed(5)
    for each in net.parameters():
        if each.grad is not None:
            each.grad.zero_()
    loss = run(x)  # type: ignore[operator]
    loss.backward()
    return [
        loss.detach(), *(each.grad.clone() for each in net.parameters()),
        *(b.clone() for b in net.buffers())
    ]


class Plans(Case):
    def assert_same(self, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        self.assertEqual(len(found), len(wanted))
        for a, b in zip(found, wanted):
            self.assertTrue(torch.equal(a, b))

    def test_text_and_values(self) -> None:
        text = "[ck[ck[1] 2] ck[3] 4 5]"
        plan = remat.Plan.parse(text)
        self.assertEqual(str(plan), text)
        self.assertEqual(plan, remat.Plan(5, [(1, 2), (1, 1), (3, 3)]))
        self.assertEqual((plan.stages, plan.depth, plan.frames), (5, 2, 3))
        self.assertEqual(plan.regions, [(1, 2), (1, 1), (3, 3)])
        self.assertEqual(plan.calls(), [3, 2, 2, 1, 1])
        self.assertEqual(pickle.loads(pickle.dumps(plan)), plan)
        self.assertEqual(len({plan, remat.Plan.parse(text)}), 1)
        self.assertNotEqual(plan, text)
        with self.assertRaises(ValueError):
            remat.Plan.parse("[1 3]")
        with self.assertRaises(ValueError):
            remat.Plan(0)
        self.assertEqual(remat.balanced_plan(9, 5).frames, 4)
        self.assertEqual(str(remat.torch_sequential_plan(5, 2)), "[ck[1 2] 3 4 5]")
        self.assertEqual(remat.halving_plan(8).stages, 8)
        self.assertEqual(remat.revolve_plan(8, 3).stages, 8)
        self.assertEqual(remat.mixed_plan(8, 3).stages, 8)

    def test_solve_and_simulate(self) -> None:
        stage = remat.StageCost(
            forward_s=1.0, backward_s=2.0, output_bytes=10, saved_bytes=30, grad_bytes=10
        )
        cost = remat.ChainCost(stages=(stage,) * 6)
        frontier = remat.solve(cost)
        self.assertEqual(frontier.points[-1].extra_s, 0)
        for point in frontier.points:
            found = remat.simulate(cost, frontier.plan(point.bytes))
            self.assertLessEqual(found.peak_bytes, point.bytes)
            self.assertAlmostEqual(found.extra_s, point.extra_s)
        with self.assertRaises(remat.InfeasibleBudget) as raised:
            frontier.plan(1)
        self.assertEqual(raised.exception.minimum_bytes, frontier.points[0].bytes)
        self.assertIsInstance(raised.exception, ValueError)
        self.assertEqual(
            pickle.loads(pickle.dumps(raised.exception)).minimum_bytes, frontier.points[0].bytes
        )
        with self.assertRaises(ValueError):
            remat.solve(remat.ChainCost())

    def test_every_budget_holds_and_gradients_are_the_plain_runs(self) -> None:
        net, x = chain(), sample()
        meter = remat.MemoryMeter()
        wanted = step(net, net, x)
        cost = remat.measure(net, x, repeats=1)
        frontier = remat.solve(cost)
        points = frontier.points
        self.assertGreater(len(points), 4)
        for point in (
            points[0], points[len(points) // 3], points[2 * len(points) // 3], points[-1]
        ):
            plan = frontier.plan(point.bytes)
            self.assert_same(step(net, lambda x: remat.run(plan, net, x), x), wanted)
            torch.manual_seed(5)
            before = meter.live_bytes
            meter.reset_peak()
            remat.run(plan, net, x).backward()
            self.assertLessEqual(meter.peak_bytes - before, point.bytes, str(plan))

    def test_a_run_frees_what_its_plan_counts_as_gone(self) -> None:
        # Inner inputs of an outer region must be gone when its forward is over.
        net, x = chain(4), sample()
        plan = remat.Plan.parse("[ck[ck[1] ck[2] 3] 4 5]")
        meter = remat.MemoryMeter()
        step(net, net, x)
        before = meter.live_bytes
        loss = remat.run(plan, list(net), x)
        held = remat.run(remat.Plan(5, [(1, 3)]), list(net), x)
        two = meter.live_bytes - before
        del held
        self.assertEqual(two, 2 * (meter.live_bytes - before))
        del loss
        self.assertEqual(meter.live_bytes, before)

    def test_stages_that_raise_or_return_something_else(self) -> None:
        x = torch.ones(3, requires_grad=True)

        def broken(x: torch.Tensor) -> torch.Tensor:
            raise KeyError("stage")

        plan = remat.Plan(2, [(1, 1)])
        for call in (
            lambda stages: remat.run(plan, stages, x), lambda stages: remat.measure(stages, x)
        ):
            with self.assertRaisesRegex(KeyError, "stage"):
                call([torch.sin, broken])  # type: ignore[list-item]
            with self.assertRaisesRegex(TypeError, "stage 1 must return one tensor"):
                call([lambda x: 3, torch.sin])  # type: ignore[list-item,return-value]
        with self.assertRaisesRegex(ValueError, "the plan has 2 stages, but 1"):
            remat.run(plan, [torch.sin], x)
        with self.assertRaises(TypeError):
            remat.run(plan, [torch.sin, 3], x)  # type: ignore[list-item]
        with self.assertRaises(ValueError):
            remat.measure([], x)

        calls = []

        def fails_later(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > 1:
                raise ZeroDivisionError("again")
            return x.sin()

        loss = remat.run(plan, [fails_later, torch.sum], x)
        with self.assertRaisesRegex(ZeroDivisionError, "again"):
            loss.backward()

    def test_buffers_and_flags_of_stages(self) -> None:
        plain, planned, x = chain(4, norm=True), chain(4, norm=True), sample()
        plan = remat.Plan.parse("[ck[ck[1] 2] ck[3] 4 5]")
        for _ in range(2):
            wanted = step(plain, plain, x)
            self.assert_same(step(planned, lambda x: remat.run(plan, planned, x), x), wanted)

    def test_a_plan_in_a_region_restores_the_buffers_of_all_stages(self) -> None:
        plain, planned, x = chain(4, norm=True), chain(4, norm=True), sample()
        plan = remat.Plan.parse("[ck[ck[1] 2] ck[3] 4 5]")
        wanted = step(plain, plain, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assert_same(
                step(
                    planned, lambda x: remat.checkpoint(lambda y: remat.run(plan, planned, y), x), x
                ),
                wanted,
            )

    def test_measuring_leaves_gradients_buffers_and_random_numbers(self) -> None:
        net, x = chain(2, norm=True), sample()
        net[0].up.weight.grad = torch.ones_like(net[0].up.weight)
        before = [*(b.clone() for b in net.buffers()), torch.get_rng_state()]
        remat.measure(net, x, repeats=1)
        self.assert_same([*net.buffers(), torch.get_rng_state()], before)
        self.assertTrue(torch.equal(net[0].up.weight.grad, torch.ones_like(net[0].up.weight)))
        self.assertIsNone(net[0].down.weight.grad)

    def test_fit_of_a_sequential(self) -> None:
        plain, net, x = chain(), chain(), sample()
        zeroed(plain)
        zeroed(net)
        meter = remat.MemoryMeter()

        def peak(run: object) -> int:
            torch.manual_seed(5)
            before = meter.live_bytes
            meter.reset_peak()
            run(x).backward()  # type: ignore[operator]
            return meter.peak_bytes - before

        whole = peak(plain)
        budget = whole // 3
        fitted = remat.fit(net, x, budget, repeats=1)
        self.assertLessEqual(fitted.peak_bytes, budget)
        self.assertLessEqual(peak(net), budget)
        self.assertLessEqual(peak(fitted), budget)
        self.assertGreater(remat.counters()["recomputes"], 0)
        self.assert_same(step(net, net, x), step(plain, plain, x))
        text = str(fitted)
        self.assertIn(f"plan: {fitted.plan}", text)
        self.assertIn(f"chosen for {budget:,}", text)
        self.assertEqual(list(net.state_dict()), list(plain.state_dict()))
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            zeroed(other)
            self.assertLessEqual(peak(other), budget)
        net.eval()
        frames = remat.counters()["frames_created"]
        net(x)
        self.assertEqual(remat.counters()["frames_created"], frames)
        net.train()
        fitted.remove()
        self.assertIs(type(net), nn.Sequential)
        self.assertEqual(peak(net), whole)

    def test_fit_of_functions(self) -> None:
        net, x = chain(), sample()
        zeroed(net)
        stages = [lambda x: net[0](x), *net[1:]]
        wanted = step(net, net, x)
        fitted = remat.fit(stages, x, 3_000_000, repeats=1, name="chain")
        self.assert_same(step(net, fitted, x), wanted)
        with remat.Recorder() as recorder:
            fitted(x).backward()
        self.assertTrue(
            all(each.name.startswith("chain, stage") for each in recorder.report().regions)
        )

    def test_fit_of_stages_that_share_parameters(self) -> None:
        # The gradient of a shared parameter waits for its second part: no stage's cost shows it.
        torch.manual_seed(1)
        block, x = Block(norm=True), sample()
        head = nn.Linear(64, 64)
        zeroed(head)
        head.weight.grad.fill_(3)
        net = nn.Sequential(head, *(Block() for _ in range(6)), head, block, Loss())
        before = [
            *(b.clone() for b in net.buffers()), torch.get_rng_state(), head.weight.grad.clone()
        ]
        least = remat.solve(remat.measure(net, x, repeats=1)).points[0].bytes
        with self.assertRaises(remat.InfeasibleBudget) as raised:
            remat.fit(net, x, least, repeats=1)
        self.assertGreaterEqual(raised.exception.minimum_bytes, least + head.weight.nbytes)
        budget = raised.exception.minimum_bytes
        fitted = remat.fit(net, x, budget, repeats=1)
        self.assertLessEqual(fitted.measured_bytes, budget)
        self.assert_same([*net.buffers(), torch.get_rng_state(), head.weight.grad], before)
        self.assertIn("as one step has shown", str(fitted))
        zeroed(net)
        meter = remat.MemoryMeter()
        live = meter.live_bytes
        fitted(x).backward()
        self.assertLessEqual(meter.peak_bytes - live, budget)

    def test_the_step_that_fit_looks_at_counts_nothing_of_its_own(self) -> None:
        stages = [*([lambda t: t.sin().cos().sin().cos()] * 4), lambda t: t.square().mean()]
        x = torch.ones(50_000, requires_grad=True)
        cost = remat.measure(stages, x, repeats=1)
        self.assertEqual(cost.held_to_end_bytes, 8)  # the loss and its gradient: 4 bytes each
        points = remat.solve(cost).points
        for point in points:  # each of which is taken, to the byte
            fitted = remat.fit(
                stages, x, point.bytes, cost=cost, frame_cost_s=0.0
            )
            self.assertEqual(
                (fitted.peak_bytes, fitted.plan), (point.bytes, remat.solve(cost).plan(point.bytes))
            )
            self.assertLessEqual(fitted.measured_bytes, point.bytes)
        self.assertEqual(
            remat.fit(stages, x, points[0].bytes, cost=cost).measured_bytes, points[0].bytes
        )
        self.assertEqual(
            remat.solve(cost._replace(held_to_end_bytes=0)).points[0].bytes, points[0].bytes - 8
        )

    def test_fit_refuses(self) -> None:
        with self.assertRaises(remat.InfeasibleBudget) as raised:
            remat.fit(chain(), sample(), 1000, repeats=1)
        self.assertGreater(raised.exception.minimum_bytes, 1000)
        with self.assertRaisesRegex(ValueError, "has no list of stages"):
            remat.fit(Block(), sample(), 1000)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "no option"):
            remat.fit(chain(), sample(), 10**9, erly_stop=False)

    def test_a_fitted_sequential_that_changes_is_an_error(self) -> None:
        net, x = chain(), sample()
        remat.fit(net, x, 10**9, repeats=1)
        net.append(nn.Identity())
        with self.assertRaisesRegex(ValueError, "the plan has 9 stages, but 10"):
            net(x)

    def test_progress_is_shown_where_tqdm_is_and_not_where_it_is_not(self) -> None:
        class Bar:
            made: list[Bar] = []

            def __init__(self, **settings: object) -> None:
                self.n, self.total = 0, settings["total"]
                Bar.made.append(self)

            def update(self, n: int) -> None:
                self.n += n

            def close(self) -> None:
                pass

        net, x = chain(3), sample()
        with mock.patch.dict(sys.modules, {"tqdm": mock.Mock(), "tqdm.auto": mock.Mock(tqdm=Bar)}):
            remat.measure(net, x, repeats=1)
            remat.measure(net, x, repeats=1, progress=False)
        self.assertEqual([(each.n, each.total) for each in Bar.made], [(3, 4)])
        with mock.patch.dict(sys.modules, {"tqdm": None, "tqdm.auto": None}):
            with contextlib.redirect_stderr(io.StringIO()) as shown:
                remat.measure(net, x, repeats=1)
        self.assertEqual(shown.getvalue(), "")

    def test_checkpoint_sequential(self) -> None:
        net, x = (
            nn.Sequential(
                *(nn.Sequential(nn.ReLU(inplace=True), Block()) for _ in range(5)), Loss()
            ),
            sample(),
        )
        x.requires_grad_()
        wanted = step(net, lambda x: net(x * 1), x)
        for settings in ({}, {"split": "balanced"}, {"checkpoint_last": True}):
            found = step(net, lambda x: remat.checkpoint_sequential(net, 3, x * 1, **settings), x)
            self.assert_same(found, wanted)
        frames = remat.counters()["frames_created"]
        remat.checkpoint_sequential(net, 3, x * 1)
        self.assertEqual(remat.counters()["frames_created"] - frames, 2)
        with self.assertRaises(ValueError):
            remat.checkpoint_sequential(net, 7, x)
        with self.assertRaises(ValueError):
            remat.checkpoint_sequential(net, 2, x, split="other")


if __name__ == "__main__":
    unittest.main()
