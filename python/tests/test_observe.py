"""Recorders, saved tensors of graphs, and meters: their figures."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch

import remat
from common import Case


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().cos()


class Observe(Case):
    def test_report_figures(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with remat.Recorder() as recorder:
            for _ in range(3):
                remat.checkpoint(function, x, name="block").sum().backward()
        remat.checkpoint(function, x, name="later").sum().backward()
        report = recorder.report()
        (region,) = report.regions
        self.assertEqual(region.name, "block")
        self.assertEqual((region.calls, region.recomputes), (3, 3))
        # Two results of 4000 bytes each: the saved part of x is there anyway.
        self.assertEqual(region.bytes_dropped, 3 * 2 * 4000)
        self.assertEqual(region.bytes_inputs, 3 * 4000)
        self.assertGreater(region.recompute_s, 0)
        self.assertEqual(json.loads(report.to_json())["regions"][0]["calls"], 3)
        self.assertIn("block", str(report))
        self.assertNotIn("later", str(report))

    def test_a_notebook_shows_pages_tables_and_numbers(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        with remat.Recorder() as recorder:
            remat.checkpoint(function, x, name="a<b").sum().backward()
        page = recorder.page()
        self.assertIsInstance(page, str)
        self.assertTrue(page._repr_html_().startswith("<iframe"))
        self.assertEqual(page._repr_html_(), recorder._repr_html_())
        table = recorder.report()._repr_html_()
        self.assertIn("<pre", table)
        self.assertIn("a&lt;b", table)
        self.assertEqual(
            repr(recorder.report()), "<remat.Report: regions of 1 names, 1 calls, 1 recomputes>"
        )
        meter = remat.MemoryMeter()
        held = torch.ones(1 << 20)
        live, peak = meter.live_bytes, meter.peak_bytes
        self.assertEqual(
            repr(meter), f"<remat.MemoryMeter of cpu: {live:,} bytes live, {peak:,} at the peak>"
        )
        self.assertIn(",", f"{live:,}")
        del held
        fitted = remat.fit([torch.sin, lambda t: t.sum()], x, 10**6, repeats=1)
        self.assertRegex(
            repr(fitted),
            r"^<remat\.Fitted for 1,000,000 bytes: \[1 2\], [\d,]+ bytes at the peak>$",
        )
        self.assertIn("chosen for 1,000,000", fitted._repr_html_())

    def test_event_log_and_files(self) -> None:
        x = torch.ones(1000, requires_grad=True)
        recorder = remat.Recorder(operators=True)
        remat.checkpoint(function, x, name="block").sum().backward()
        recorder.stop()
        recorder.stop()
        log = recorder.event_log()
        self.assertIn("block", log)
        self.assertIn("<iframe", recorder._repr_html_())
        self.assertIn("block", recorder.page())
        with tempfile.TemporaryDirectory() as folder:
            recorder.write_html(Path(folder) / "page.html")
            recorder.write_memory_svg(Path(folder) / "memory.svg")
            recorder.write_chrome_trace(Path(folder) / "trace.json")
            self.assertEqual((Path(folder) / "page.html").read_text(), recorder.page())
            self.assertTrue((Path(folder) / "memory.svg").read_text().startswith("<svg"))
            trace = json.loads((Path(folder) / "trace.json").read_text())
            self.assertTrue(any("sin" in str(each.get("name")) for each in trace["traceEvents"]))
        for write in (recorder.write_html, recorder.write_memory_svg, recorder.write_chrome_trace):
            with self.assertRaisesRegex(
                RuntimeError, r"^remat\.Recorder: /no/such/folder/file could not be written"
            ):
                write("/no/such/folder/file")

    def test_decisions_of_policies(self) -> None:
        x = torch.ones(4, 4, requires_grad=True)
        with remat.Recorder() as recorder:
            remat.checkpoint(
                lambda t: (t @ t).sin().exp(), x, name="block", policy=remat.save_matmuls()
            )
        (region,) = recorder.report().regions
        (kept,) = [each for each in region.decisions if each.outcome == "kept"]
        self.assertEqual((kept.op, kept.calls, kept.bytes), ("aten::mm.default", 1, 64))
        self.assertIn(
            "aten::sin.default",
            {each.op for each in region.decisions if each.outcome == "recomputed"},
        )

    def test_wrong_options(self) -> None:
        with self.assertRaises(ValueError):
            remat.Recorder(max_events=0)

    def test_evictions_and_reruns_of_a_budget(self) -> None:
        x = torch.ones(100, 100, requires_grad=True)
        with remat.Recorder() as recorder, remat.budget(200_000, min_bytes=0) as budget:
            y = x
            for _ in range(10):
                y = y.tanh()  # saves its result
            y.sum().backward()
        done = budget.report()
        self.assertGreater(done.reruns, 0)
        (tanh,) = recorder.report().evictions
        self.assertEqual(tanh.op, "aten::tanh.default")
        self.assertEqual((tanh.evictions, tanh.reruns), (done.evictions, done.reruns))
        self.assertEqual(tanh.bytes_evicted, done.evictions * 40_000)
        self.assertEqual(tanh.bytes_rerun, done.reruns * 40_000)
        self.assertGreater(tanh.rerun_s, 0)
        lines = recorder.event_log().splitlines()
        self.assertRegex(lines[0], r"^budget of \d+ bytes alive on cpu$")
        for begin, count in (
            ("budget drops the result of aten::tanh.default, 40000 bytes, ", done.evictions),
            ("budget runs aten::tanh.default again, 40000 bytes, ", done.reruns),
        ):
            self.assertEqual(sum(line.startswith(begin) for line in lines), count)
        self.assertIn("aten::tanh.default", str(recorder.report()))
        (as_json,) = json.loads(recorder.report().to_json())["evictions"]
        self.assertEqual(as_json["reruns"], done.reruns)
        page = recorder.page()
        self.assertIn("Operators under a byte budget", page)
        self.assertIn(">budget: ", page)

    def test_saved_tensors_of_a_node_written_in_python(self) -> None:
        class Sine(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x, x.exp())
                return x.sin()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                return gradients[0]

        saved = remat.saved_tensors(Sine.apply(torch.ones(3, requires_grad=True)))
        self.assertEqual([(each.node, each.bytes) for each in saved], [("SineBackward", 12)] * 2)

    def test_saved_tensors(self) -> None:
        x = torch.ones(10, requires_grad=True)
        plain = remat.saved_tensors(function(x))
        self.assertEqual(
            [each.node for each in plain], ["CosBackward0", "ExpBackward0", "SinBackward0"]
        )
        self.assertEqual([each.bytes for each in plain], [40, 40, 40])
        self.assertEqual(plain[0].shape, torch.Size([10]))
        self.assertEqual(plain[0].dtype, torch.float32)
        self.assertTrue(plain[1].shares_storage)  # cos saves its argument, exp its result
        dropped = remat.saved_tensors(remat.checkpoint(function, x, name="block"))
        self.assertTrue(all(each.dropped and each.region == "block" for each in dropped))

    def test_origins_of_saved_tensors(self) -> None:
        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x).sin()

        model = torch.nn.Sequential(Block(), Block())
        for applies in (False, True):
            if applies:
                remat.apply(model, types=Block)
            x = torch.ones(4, 8, requires_grad=True)
            with remat.track_origins(model, lines=True):
                y = model(x)
                y.sum().backward(retain_graph=True)  # recomputes change no note
                y = model(x).exp()
                found = remat.saved_tensors(y)
                without = remat.saved_tensors(y)
            self.assertEqual(found, without)
            by_module: dict[str, list[remat.SavedTensor]] = {}
            for each in found:
                by_module.setdefault(each.module, []).append(each)
            self.assertEqual(set(by_module), {"", "0", "0.linear", "1", "1.linear"})
            for path in ("0", "1"):
                (sine,) = by_module[path]
                self.assertEqual((sine.node, sine.op), ("SinBackward0", "aten::sin"))
                self.assertRegex(sine.place, r"^test_observe\.py:\d+$")
                self.assertEqual(sine.dropped, applies)
                self.assertEqual({each.op for each in by_module[f"{path}.linear"]}, {"aten::addmm"})
            self.assertEqual([each.op for each in by_module[""]], ["aten::exp"])
            self.assertTrue(all(not each.module for each in remat.saved_tensors(y)))

    def test_bytes_by_module(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.ones(16, 4)
        model(x).sum().backward()
        optimizer.step()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            with remat.track_origins(model, lines=True):
                loss = model(x).sum()
                for each in remat.saved_tensors(loss):
                    print(each.module, each.op, each.place, each.bytes, each.dropped)
                sums = remat.bytes_by_module(remat.saved_tensors(loss), model, optimizer)
        self.assertRegex(printed.getvalue(), r"1 aten::tanh test_observe\.py:\d+ 512 False\n")
        self.assertEqual(sums, sorted(sums, key=lambda each: -sum(each[1:])))
        by_path = {each.module: each for each in sums}
        weights = (4 * 8 + 8) * 4
        self.assertEqual(by_path["0"].parameters_bytes, weights)
        self.assertEqual(by_path["0"].gradients_bytes, weights)
        # Two moments, and the numbers of steps.
        self.assertEqual(by_path["0"].optimizer_bytes, 2 * weights + 2 * 4)
        # The product's input, which is the result of the tanh, and the transposed weight.
        self.assertEqual(by_path["2"].saved_bytes, 16 * 8 * 4 + 8 * 2 * 4)
        self.assertEqual(sum(each.dropped_bytes for each in sums), 0)

    def test_a_failed_allocation_lists_regions(self) -> None:
        meter = remat.MemoryMeter()
        x = torch.ones(1000, requires_grad=True)
        with remat.memory_limit(meter.live_bytes + 1_000_000):
            y = remat.checkpoint(function, x * 2, name="block 7")
            with self.assertRaisesRegex(torch.OutOfMemoryError, r"block 7 \(1 of them\): inputs"):
                torch.empty(1_000_000)
        y.sum().backward()

    def test_meter(self) -> None:
        meter = remat.MemoryMeter()
        before = meter.live_bytes
        x = torch.empty(1000)
        self.assertEqual(meter.live_bytes - before, 4000)
        del x
        self.assertEqual(meter.live_bytes, before)
        self.assertEqual(meter.peak_bytes - before, 4000)
        meter.reset_peak()
        self.assertEqual(meter.peak_bytes, before)


if __name__ == "__main__":
    unittest.main()
