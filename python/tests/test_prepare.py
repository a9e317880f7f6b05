"""Recomputing ahead: handles of regions, and `prepare_ahead`."""

from __future__ import annotations

import threading
import unittest
from typing import Any

import torch

import remat
from common import Case, CountedFunction, gradient, leaf, operators


def wave(t: torch.Tensor) -> torch.Tensor:
    return t.sin().exp().cos()


def bytes_prepared() -> int:
    return remat.counters()["recomputed_bytes_alive"]


class Handles(Case):
    def test_the_next_backward_takes_what_was_prepared(self) -> None:
        x = leaf()
        f = CountedFunction(operators)
        handle = remat.RegionHandle()
        self.assertFalse(handle.prepare())
        y = remat.checkpoint(f, x, name="block", handle=handle)
        self.assertEqual(handle.name, "block")
        expected = gradient(operators(x), x)
        for runs in (2, 3):
            self.assertTrue(handle.prepare())
            self.assertTrue(handle.prepare())
            self.assertEqual(f.runs, runs)
            self.assertGreater(bytes_prepared(), 0)
            self.check_equal(gradient(y, x, retain_graph=True), expected)
            self.assertEqual((f.runs, bytes_prepared()), (runs, 0))
        handle.prepare()
        handle.release()
        self.assertEqual(bytes_prepared(), 0)
        self.check_equal(gradient(y, x), expected)
        self.assertEqual(f.runs, 5)
        del y
        self.assertFalse(handle.prepare())
        self.assertEqual(handle.name, "")

    def test_regions_of(self) -> None:
        x = leaf()
        inner = CountedFunction(wave)
        y = remat.checkpoint(
            lambda t: remat.checkpoint(inner, t.sin(), name="inner").tanh(), x, name="outer"
        )
        y = remat.checkpoint(wave, y, name="last")
        regions = remat.regions_of(y)
        self.assertEqual([each.name for each in regions], ["last", "outer", "inner"])
        before = remat.counters()["recomputes"]
        regions[2].prepare()
        self.assertEqual(remat.counters()["recomputes"], before + 2)
        runs = inner.runs
        self.check_equal(gradient(y, x), gradient(wave(wave(x.sin()).tanh()), x))
        self.assertEqual((inner.runs, remat.counters()["recomputes"]), (runs, before + 3))
        self.assertEqual(remat.regions_of(x), [])

    def test_a_group_takes_what_was_prepared(self) -> None:
        x, w = leaf(), leaf(seed=1)
        f = CountedFunction(lambda a, b: (a.sin(), b.exp()))
        handle = remat.RegionHandle()
        y = remat.checkpoint(f, x, w, handle=handle)
        handle.prepare()
        with remat.graph_exec_group():
            self.check_equal(gradient(y[0], x, retain_graph=True), gradient(x.sin(), x))
            self.check_equal(gradient(y[1], w, retain_graph=True), gradient(w.exp(), w))
        self.assertEqual(f.runs, 2)

    def test_errors_of_the_function_arrive(self) -> None:
        x = leaf()
        fails: list[bool] = []

        def f(t: torch.Tensor) -> torch.Tensor:
            if fails:
                raise KeyError("no")
            return wave(t)

        handle = remat.RegionHandle()
        y = remat.checkpoint(f, x, handle=handle)
        fails.append(True)
        with self.assertRaisesRegex(KeyError, "no"):
            handle.prepare()
        fails.clear()
        self.check_equal(gradient(y, x), gradient(wave(x), x))

    def test_another_thread_prepares(self) -> None:
        x = leaf(64, 64)
        f = CountedFunction(operators)
        handle = remat.RegionHandle()
        y = remat.checkpoint(f, x, handle=handle)
        thread = threading.Thread(target=handle.prepare)
        thread.start()
        found = gradient(y, x)
        thread.join()
        self.check_equal(found, gradient(operators(x), x))
        self.assertEqual(f.runs, 2)

    def test_double_backward_and_dropout(self) -> None:
        x = leaf()

        def run(prepares: bool) -> Any:
            torch.manual_seed(3)
            handle = remat.RegionHandle()
            y = remat.checkpoint(
                lambda t: torch.dropout(t.sin() * t, 0.5, True).exp(), x, handle=handle
            )
            if prepares:
                handle.prepare()
            (first,) = gradient(y, x, create_graph=True)
            return first.detach(), *gradient(first.exp(), x), torch.rand(2)

        self.check_equal(run(True), run(False))

    def test_wrong_options(self) -> None:
        with self.assertRaisesRegex(TypeError, "handle must be a remat.RegionHandle or None"):
            remat.checkpoint(wave, leaf(), handle=1)  # type: ignore[call-overload]
        with self.assertRaisesRegex(ValueError, "prepare_ahead must be 0 or more"):
            remat.checkpoint(wave, leaf(), prepare_ahead=-1)


class Ahead(Case):
    def test_regions_are_recomputed_ahead(self) -> None:
        x = leaf()
        order = ""

        def chain(t: torch.Tensor, ahead: int) -> torch.Tensor:
            for name in "abcd":

                def f(value: torch.Tensor, name: str = name) -> torch.Tensor:
                    nonlocal order
                    order += name
                    return wave(value)

                def hook(grad: torch.Tensor, name: str = name) -> None:
                    nonlocal order
                    order += name.upper()

                t = remat.checkpoint(f, t, prepare_ahead=ahead)
                t.register_hook(hook)
            return t

        for ahead, expected in ((0, "DdCcBbAa"), (1, "DdcCbBaA"), (3, "DdcbaCBA")):
            y = chain(x, ahead)
            order = ""
            found = gradient(y, x)
            self.assertEqual(order, expected)
            self.check_equal(found, gradient(wave(wave(wave(wave(x)))), x))


if __name__ == "__main__":
    unittest.main()
