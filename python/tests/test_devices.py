"""Bytes, times and plans of an accelerator's device, on the stand-in that the tests of C++ have:
REMAT_STAND_IN names it."""

from __future__ import annotations

import ctypes
import os
import types
import unittest

import torch

STAND_IN = os.environ.get("REMAT_STAND_IN", "")
if STAND_IN:
    module = types.ModuleType("torch.far")
    vars(module).update(is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 0)
    torch.ops.load_library(STAND_IN)
    torch._register_device_module("far", module)

import remat  # noqa: E402
from common import FOREIGN, Case  # noqa: E402

BYTES = 4000


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().cos()


class Unknown(Case):
    def test_devices_whose_bytes_nobody_knows(self) -> None:
        for call in (
            lambda: remat.MemoryMeter("meta"), lambda: remat.free_bytes("cpu"), remat.free_bytes
        ):
            with self.assertRaises(remat.CheckpointError) as caught:
                call()
            self.assertEqual(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)
            self.assertIsNone(FOREIGN.search(str(caught.exception)), str(caught.exception))
        for wrong in ("no such device", 1.5):
            with self.assertRaises((RuntimeError, TypeError)):
                remat.MemoryMeter(wrong)  # type: ignore[arg-type]

    def test_the_cpu_is_a_device(self) -> None:
        meter = remat.MemoryMeter("cpu")
        self.assertEqual((meter.device, meter.is_exact), (torch.device("cpu"), True))
        self.assertEqual(meter.live_bytes, remat.MemoryMeter().live_bytes)
        with remat.memory_limit(meter.live_bytes + 1000, "cpu"):
            self.assertEqual(remat.free_bytes(), 1000)
            cost = remat.ChainCost(stages=(remat.StageCost(),), rounding=0.25)
            self.assertEqual(remat.free_budget(cost, margin=0.5), 400)

    def test_allocations_that_fail_are_in_the_report(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        meter = remat.MemoryMeter()
        with remat.Recorder() as recorder:
            y = remat.checkpoint(function, x * 2, name="block")
            with remat.memory_limit(meter.live_bytes + 100):
                with self.assertRaises(torch.OutOfMemoryError):
                    torch.empty(1 << 12)
        (failed,) = recorder.report().failed_allocations
        self.assertEqual((failed.device, failed.asked_bytes), (torch.device("cpu"), 1 << 14))
        self.assertGreaterEqual(failed.live_bytes, 2 * BYTES)
        (held,) = failed.held
        self.assertEqual((held.region, held.regions, held.inputs_bytes), ("block", 1, BYTES))
        self.assertEqual((held.saved_bytes, held.recomputed_bytes), (0, 0))
        if not STAND_IN:
            self.assertEqual(recorder.report().devices, [])
        del y


@unittest.skipUnless(STAND_IN, "REMAT_STAND_IN names no stand-in for a device")
class Device(Case):
    def setUp(self) -> None:
        super().setUp()
        self.device = torch.device("far:0")
        self.x = torch.linspace(0, 1, 1000).to(self.device).requires_grad_()

    def test_meters_and_limits(self) -> None:
        meter = remat.MemoryMeter("far")
        self.assertEqual((meter.device, meter.is_exact), (self.device, True))
        before = meter.live_bytes
        y = self.x.sin()
        self.assertEqual(meter.live_bytes - before, BYTES)
        del y
        self.assertEqual(meter.live_bytes, before)
        self.assertEqual(meter.peak_bytes - before, BYTES)
        self.assertGreater(remat.free_bytes(self.device), 0)
        # The limit takes all that is left.
        set_total_bytes = ctypes.CDLL(STAND_IN)["_ZN8stand_in15set_total_bytesEl"]
        set_total_bytes(ctypes.c_long(1 << 20))
        try:
            with remat.memory_limit(before + 10 * BYTES, self.device) as guard:
                self.assertEqual(repr(guard), f"remat.memory_limit({before + 10 * BYTES}, 'far:0')")
                torch.empty(1000).to(self.device)
                with self.assertRaises(torch.OutOfMemoryError):
                    torch.empty(20_000).to(self.device)
            torch.empty(20_000).to(self.device)
        finally:
            set_total_bytes(ctypes.c_long(1 << 40))

    def test_reports(self) -> None:
        with remat.Recorder() as recorder:
            remat.checkpoint(function, self.x, name="block").sum().backward()
        report = recorder.report()
        (device,) = report.devices
        self.assertEqual(
            (device.device, device.is_exact, device.bytes_out, device.bytes_in),
            (self.device, True, 0, 0),
        )
        self.assertGreater(device.peak_bytes, 2 * BYTES)
        (region,) = report.regions
        self.assertGreater(region.device_forward_s, 0)
        self.assertGreater(region.device_recompute_s, 0)
        with remat.Recorder(device_time=False) as recorder:
            remat.checkpoint(function, self.x, name="block").sum().backward()
        self.assertEqual(recorder.report().regions[0].device_forward_s, 0)

    def test_offload_is_in_reports(self) -> None:
        with remat.Recorder() as recorder, remat.save_on_cpu(pin_memory=True):
            y = function(self.x * 2)
            y.sum().backward()
        (device,) = recorder.report().devices
        # one is read by two nodes
        self.assertEqual((device.bytes_out, device.bytes_in), (2 * BYTES, 3 * BYTES))

    def test_what_moves_to_the_cpu_is_counted(self) -> None:
        with remat.save_on_cpu(min_bytes=1) as moved:
            y = function(self.x * 2)
        self.assertEqual(moved.counts[:5], (2, 2 * BYTES, 0, 0, 0))
        y.sum().backward()
        # one is read by two nodes
        self.assertEqual((moved.counts.loads, moved.counts.bytes_loaded), (3, 3 * BYTES))

    def test_the_last_saves_stay(self) -> None:
        expected = torch.autograd.grad(function(function(self.x * 2)).sum(), self.x)[0].cpu()
        for keep_last, moves in ((0, 4), (1, 3), (3, 1), (100, 0)):
            for pin_memory in (False, True):
                with remat.save_on_cpu(
                    min_bytes=1, pin_memory=pin_memory, keep_last=keep_last
                ) as moved:
                    y = function(function(self.x * 2))
                self.assertEqual(moved.counts.moves, moves)
                self.assertTrue(
                    torch.equal(torch.autograd.grad(y.sum(), self.x)[0].cpu(), expected)
                )
        with remat.save_in_tiers(min_bytes=0, keep_last=2) as tiers:
            y = function(function(self.x * 2))
        self.assertEqual(tiers.counts.bytes_to_host, 2 * BYTES)
        self.assertTrue(torch.equal(torch.autograd.grad(y.sum(), self.x)[0].cpu(), expected))
        for guard in (remat.save_on_cpu, remat.save_in_tiers):
            with self.assertRaisesRegex(ValueError, rf"remat\.{guard.__name__}: keep_last is -1"):
                with guard(keep_last=-1):
                    pass

    def test_the_last_results_of_policies_stay(self) -> None:
        def f(t: torch.Tensor) -> torch.Tensor:
            return t.exp().sin().exp().sin()

        expected = torch.autograd.grad(f(self.x * 2).sum(), self.x)[0].cpu()
        exps = ["aten::exp"]
        for policy, moved in ((remat.offload_ops(exps, min_offload_bytes=1), 2),
                              (remat.offload_ops(exps, min_offload_bytes=1, keep_last=1), 1),
                              (remat.offload_ops(exps, min_offload_bytes=1, keep_last=2), 0)):
            with remat.Recorder() as recorder:
                y = remat.checkpoint(f, self.x * 2, policy=policy, name="f")
            self.assertEqual(recorder.report().regions[0].bytes_offloaded, moved * BYTES, policy)
            self.assertTrue(torch.equal(torch.autograd.grad(y.sum(), self.x)[0].cpu(), expected))

    def test_inputs_of_regions_come_back_as_far_ahead_as_asked(self) -> None:
        x = torch.linspace(0, 1, 50_000).to(self.device).requires_grad_()
        loaded = []
        for depth in (0, 1, 3):
            y = x * 2
            with remat.Recorder() as recorder:
                for _ in range(6):
                    y = remat.checkpoint(
                        torch.sin, y, offload_inputs=True, offload_prefetch_depth=depth
                    )
                middle = y
                for _ in range(2):
                    y = remat.checkpoint(
                        torch.sin, y, offload_inputs=True, offload_prefetch_depth=depth
                    )
                torch.autograd.grad(y.sum(), middle)
            loaded.append(recorder.report().devices[0].bytes_in // (4 * 50_000))
        self.assertEqual(loaded, [2, 3, 5])
        with self.assertRaisesRegex(ValueError, "remat.checkpoint: offload_prefetch_depth must "
                                                "be 0 or more, got -1"):
            remat.checkpoint(torch.sin, x, offload_prefetch_depth=-1)

    def test_every_allocation(self) -> None:
        with remat.Recorder() as recorder:
            with remat.record_allocations():
                y = remat.checkpoint(function, self.x, name="block")
            lines = [line for line in recorder.event_log().splitlines() if "allocates" in line]
            # 4,000 bytes take 4,096; three results, two of which die in the region.
            self.assertEqual(
                sum("region 1 allocates 4096 bytes on far:0" in line for line in lines), 3, lines
            )
            self.assertIn("region 1 frees 4096 bytes on far:0", recorder.event_log())
            y.sum().backward()  # after the scope
            self.assertEqual(recorder.event_log().count("allocates"), len(lines))
            with remat.record_allocations():
                # on an engine's thread
                remat.checkpoint(function, self.x, name="block").sum().backward()
            self.assertGreater(recorder.event_log().count("allocates"), 2 * len(lines))

    def test_fit(self) -> None:
        stages = [
            torch.sin, torch.exp, torch.sin, torch.exp, torch.sin, torch.exp,
            lambda t: t.sin().sum()
        ]
        cost = remat.measure(stages, self.x)
        self.assertEqual(cost.stages[1].output_bytes, BYTES)
        self.assertEqual(cost, remat.ChainCost(*cost))
        on_cpu = remat.measure(stages, self.x, device="cpu")
        self.assertEqual(on_cpu.stages[1].output_bytes, 0)
        least = remat.solve(cost).points[0].bytes
        self.assertLess(least, remat.simulate(cost, remat.Plan(7)).peak_bytes)
        fitted = remat.fit(stages, self.x, least, cost=cost)
        self.assertIs(fitted.cost, cost)
        self.assertIsNotNone(fitted.measured_bytes)
        self.assertLessEqual(fitted.measured_bytes, least)  # type: ignore[arg-type]
        self.assertGreater(fitted.plan.frames, 0)
        (found,) = torch.autograd.grad(fitted(self.x), self.x)
        y = self.x
        for stage in stages:
            y = stage(y)
        self.assertTrue(torch.equal(found.cpu(), torch.autograd.grad(y, self.x)[0].cpu()))
        self.assertGreater(remat.free_budget(cost, self.device), 0)
        with self.assertRaisesRegex(ValueError, "the cost has 7 stages, but 6 were passed"):
            remat.fit(stages[1:], self.x, least, cost=cost)

    def test_plans_that_move_to_the_cpu(self) -> None:
        def wide(t: torch.Tensor) -> torch.Tensor:
            return t.sin().exp().sin().exp()

        stages = [wide, wide, wide, wide, lambda t: t.sin().sum()]
        moving = remat.MoveOptions(min_bytes=0)
        cost = remat.measure(stages, self.x, repeats=1, moving=moving)
        assert cost.moving is not None
        self.assertGreater(cost.stages[1].movable_bytes, 0)
        plain = self.x
        for stage in stages:
            plain = stage(plain)
        expected = torch.autograd.grad(plain, self.x)[0].cpu()
        del plain
        meter = remat.MemoryMeter(self.device)
        for text in (
            "[mv[1] mv[2] mv[3] mv[4] 5]", "[mv[ck[1]] mv[ck[2]] mv[ck[ck[3] 4]] 5]",
            "[mv[1] ck[2] mv[3] 4 5]"
        ):
            plan = remat.Plan.parse(text)
            for options in (moving, None, remat.MoveOptions(min_bytes=0, pin_memory=False)):
                before = meter.live_bytes
                meter.reset_peak()
                with remat.Recorder() as recorder:
                    (found,) = torch.autograd.grad(
                        remat.run(plan, stages, self.x, moving=options), self.x
                    )
                self.assertTrue(torch.equal(found.cpu(), expected), text)
                (device,) = recorder.report().devices
                if options is moving:
                    self.assertGreater(device.bytes_out, 0)
                    # some are read by two nodes
                    self.assertGreaterEqual(device.bytes_in, device.bytes_out)
                    self.assertLessEqual(
                        meter.peak_bytes - before, remat.simulate(cost, plan).peak_bytes, text
                    )
                elif options is None:
                    # 4,000 bytes are less than what moves by default
                    self.assertEqual(device.bytes_out, 0)
                del found
        budget = (
            remat.simulate(cost, remat.Plan.parse("[mv[1] mv[2] mv[3] mv[4] 5]")).peak_bytes + BYTES
        )
        cheap = cost._replace(moving=remat.MoveCost(1e-15, 1e-15, 0.1))
        fitted = remat.fit(stages, self.x, budget, cost=cheap, moving=moving)
        self.assertNotEqual(fitted.plan.moved, [])
        self.assertLessEqual(fitted.measured_bytes, budget)  # type: ignore[arg-type]
        self.assertTrue(torch.equal(torch.autograd.grad(fitted(self.x), self.x)[0].cpu(), expected))

    def test_a_place_gets_the_device_s_tensors(self) -> None:
        seen = []

        class OnTheCpu:
            def store(self, flat: torch.Tensor) -> torch.Tensor:
                seen.append(flat.device)
                return flat.cpu()

            def load(self, contents: torch.Tensor) -> torch.Tensor:
                return contents.to("far:0")

        with remat.save_elsewhere(OnTheCpu()):
            y = function(self.x * 2)
        (found,) = torch.autograd.grad(y.sum(), self.x)
        self.assertEqual(seen, [self.device] * 2)
        self.assertTrue(
            torch.equal(
                found.cpu(), torch.autograd.grad(function(self.x * 2).sum(), self.x)[0].cpu()
            )
        )


if __name__ == "__main__":
    unittest.main()
