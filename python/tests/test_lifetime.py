"""Lifetimes: objects of a region die with its graph, and many steps do not grow."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import unittest
import weakref
from collections.abc import Iterator
from typing import Callable

import torch
import torch.utils.checkpoint as upstream

import remat
from common import SLOWNESS, Case, gradient, leaf, operators

STEPS = int(os.environ.get("REMAT_TEST_STEPS", "2000"))  # of what must not grow; 20000 take minutes


class Lifetime(Case):
    def test_a_region_makes_nothing_for_the_cyclic_collector(self) -> None:
        x = leaf()
        scale = 2.0

        def f(t: torch.Tensor, factor: float, *, bias: float) -> torch.Tensor:
            return (t * factor + bias).sin().exp().cos()

        kept = []
        gc.collect()
        gc.disable()
        try:
            for count in (0, 50):
                kept = [None] * count  # type: ignore[list-item]
                before = len(gc.get_objects())
                for i in range(count):
                    kept[i] = remat.checkpoint(f, x, scale, bias=1.0)
                if count:
                    # The result and its node may be known to the collector; the region is not.
                    plain: list[object] = [None] * count
                    with_regions = len(gc.get_objects()) - before
                    before = len(gc.get_objects())
                    for i in range(count):
                        plain[i] = f(x, scale, bias=1.0)
                    self.assertLessEqual(with_regions, len(gc.get_objects()) - before)
        finally:
            gc.enable()

    def test_what_a_call_was_given_dies_with_the_graph(self) -> None:
        class Anything:
            pass

        x = leaf()
        thing, function = Anything(), lambda t, thing: t.sin().exp()
        known = [weakref.ref(thing), weakref.ref(function)]
        y = remat.checkpoint(function, x, thing)
        del thing, function
        self.assertTrue(all(each() is not None for each in known))
        del y
        self.assertTrue(all(each() is None for each in known))

    def test_a_backward_ends_it(self) -> None:
        class Anything:
            pass

        x = leaf()
        thing = Anything()
        known = weakref.ref(thing)
        y = remat.checkpoint(lambda t, thing: t.sin().exp(), x, thing)
        del thing
        y.sum().backward()
        self.assertIsNone(known())
        self.assertEqual(remat.counters()["frames_alive"], 0)

    def steps(self) -> Iterator[Callable[[], object]]:
        """Steps of each kind that a region can go through."""
        x, w = leaf(seed=1), leaf(seed=2)
        calls: list[int] = []

        def failing(t: torch.Tensor) -> torch.Tensor:
            y = t.sin().exp()
            if remat.is_recomputing():
                raise LookupError("mine")
            return y.cos()

        def failed(f: Callable[[torch.Tensor], torch.Tensor], kind: type[BaseException]) -> None:
            with contextlib.suppress(kind):
                gradient(remat.checkpoint(f, x, name="failing"), x)

        def other(t: torch.Tensor) -> torch.Tensor:
            return t.sin() if remat.is_recomputing() else t.sin().exp().cos()

        def inner(t: torch.Tensor) -> torch.Tensor:
            return remat.checkpoint(one, t, [object()], name="inner").sin()

        def one(t: torch.Tensor, anything: object = None, *, scale: float = 1.0) -> torch.Tensor:
            return (t @ w).sin().exp() * scale

        def keeps(context: remat.PolicyContext) -> bool:
            calls.append(1)
            calls.clear()
            return "mm" in context.op_name

        theirs = functools.partial(upstream.checkpoint, use_reentrant=False)
        selective = functools.partial(
            upstream.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
        )
        yield lambda: gradient(remat.checkpoint(operators, remat.checkpoint(operators, x)), x)
        # stopped
        yield lambda: gradient(remat.checkpoint(lambda t: (t.sin().exp().cos() + 1) * 2, x), x)
        yield lambda: gradient(
            remat.checkpoint(one, x, [object()], scale=2.0, name="kept", early_stop=False), x
        )
        yield lambda: remat.checkpoint(one, x, {"any": object()}).detach()  # no backward
        yield lambda: failed(failing, LookupError)
        yield lambda: failed(other, remat.CheckpointError)
        yield lambda: gradient(remat.checkpoint(inner, x, policy=remat.save_matmuls()), x)
        yield lambda: gradient(remat.checkpoint(one, x, policy=keeps), x)
        yield lambda: gradient(
            remat.checkpoint(one, x, policy=remat.Policy(keeps, ask_again=True)), x
        )

        def installed() -> None:
            with remat.installed():
                gradient(theirs(inner, x), x)
                gradient(theirs(one, x, context_fn=selective), x)
                with contextlib.suppress(LookupError):
                    gradient(theirs(failing, x), x)
                with contextlib.suppress(remat.CheckpointError):
                    gradient(theirs(other, x), x)

        yield installed

    def test_many_steps_do_not_grow(self) -> None:
        for number, step in enumerate(self.steps()):
            for _ in range(200):
                step()
            gc.collect()
            blocks, objects = sys.getallocatedblocks(), len(gc.get_objects())
            for _ in range(STEPS // 10):
                step()
            gc.collect()
            self.assertLess(sys.getallocatedblocks() - blocks, 300, f"step {number}")
            self.assertLess(len(gc.get_objects()) - objects, 50, f"step {number}")

    @unittest.skipIf(
        SLOWNESS > 1,
        "looks at every object of the process, for which a sanitizer takes many minutes",
    )
    def test_every_reference_is_given_back(self) -> None:
        def total() -> int:
            """Returns the sum of all reference counts: of the collector's objects, and of the
            objects that these refer to."""
            gc.collect()
            known = {id(each): each for each in gc.get_objects()}
            for each in [child for each in known.values() for child in gc.get_referents(each)]:
                known[id(each)] = each
            references = sum(map(sys.getrefcount, known.values()))
            return references - 2 * len(known)  # without those of this function and of the call

        for number, step in enumerate(self.steps()):
            grown = []
            for _ in range(3):
                before = total()
                for _ in range(50):
                    step()
                grown.append(total() - before)
            # One that is kept each time would be 50.
            self.assertLess(min(grown), 25, f"step {number}: {grown}")

    def test_a_graph_may_die_in_any_thread(self) -> None:
        graphs = [remat.checkpoint(operators, leaf()) for _ in range(20)]
        thread = threading.Thread(target=graphs.clear)
        thread.start()
        thread.join()
        self.assertEqual(remat.counters()["frames_alive"], 0)


if __name__ == "__main__":
    unittest.main()
