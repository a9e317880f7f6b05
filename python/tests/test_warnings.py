"""Warnings of the library that a Python program can get: they come through `warnings`, in Python's
words."""

from __future__ import annotations

import contextlib
import tempfile
import unittest
import warnings
from collections.abc import Iterator
from typing import Any, Callable

import torch

import remat
from common import FOREIGN, Case, leaf, run_script


class Warnings(Case):
    def check(self, action: Callable[[], object], text: str) -> None:
        """Asserts that `action` warns once, in these words."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            action()
        said = [str(each.message) for each in seen]
        self.assertEqual(len(said), 1, said)
        self.assertRegex(said[0], "(?s)" + text)
        self.assertIsNone(FOREIGN.search(said[0]), said[0])
        self.assertNotIn("Exception raised from", said[0])  # a stack of C++
        self.assertNotIn(".cpp", said[0])
        self.assertIs(seen[0].category, UserWarning)

    def test_running_statistics(self) -> None:
        norm = torch.nn.BatchNorm1d(4)
        self.check(
            lambda: remat.checkpoint(lambda t: norm(t).sin(), leaf(), name="statistics"),
            r'^remat\.checkpoint: a batch norm .* ran in region "statistics".*name it in '
            r'`modules`.*set buffers="ignore"',
        )

    def test_functions_that_run_later(self) -> None:
        async def awaits(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        def yields(x: torch.Tensor) -> Iterator[torch.Tensor]:
            yield x.sin()

        for function, kind in ((awaits, "coroutine"), (yields, "generator")):
            for run in (remat.checkpoint, lambda f, x: remat.checkpoint(f, x, name="late")):
                made: list[Any] = []
                self.check(
                    lambda: made.append(run(function, leaf())),
                    rf"^remat\.checkpoint: the function returned a {kind}, whose code runs after "
                    "the end of the region",
                )
                made[0].close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with self.assertRaisesRegex(UserWarning, "returned a generator"):
                remat.checkpoint(yields, leaf())

    def test_a_tensor_that_outlives_its_recompute(self) -> None:
        kept: list[torch.Tensor] = []

        def keeps(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            kept.append(y)
            return y.exp().sin()

        def step() -> None:
            remat.checkpoint(keeps, leaf(), name="survivor").sum().backward()
            kept.clear()

        self.check(
            step,
            r'^remat\.checkpoint: a tensor that a recompute of region "survivor".*an attribute '
            r'that holds.*\(in a tuple, a list, a dictionary, a dataclass\), or store it only if '
            r'not remat\.is_recomputing\(\); in a custom Function',
        )

    def test_a_tensor_of_a_class_of_its_own_does_not_outlive_its_recompute(self) -> None:
        # It has an object of Python's beside it, which is no owner.
        ended = run_script("""
import warnings
import torch, remat
from torch.testing._internal.two_tensor import TwoTensor

kept = []
def step(function):
    x = TwoTensor(torch.ones(3, 4), torch.ones(3, 4)).requires_grad_()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        remat.checkpoint(function, x, name=function.__name__).sum().backward()
    kept.clear()
    print(function.__name__, len(seen))
def plain(x):
    return x.sin().exp().cos()
def survivor(x):
    kept.append(x.sin())
    return kept[-1].exp().sin()
step(plain)
step(survivor)
""")
        self.assertEqual(
            (ended.returncode, ended.stdout.splitlines()[-2:]), (0, ["plain 0", "survivor 1"]),
            ended.stdout
        )

    def test_lists_of_operators(self) -> None:
        self.check(lambda: remat.save_ops(["aten::matmul"]), r'^remat\.save_ops: "aten::matmul" '
                                                             'is composed of other')
        self.check(
            lambda: remat.offload_ops(["aten::add_"]),
            r'^remat\.offload_ops: "aten::add_" writes to an argument',
        )

    def test_a_name_that_nobody_gives(self) -> None:
        self.check(
            lambda: (
                remat.checkpoint(lambda t: t.sin().exp(), leaf(), policy=remat.save_names(["up"]))
                .sum()
                .backward()
            ),
            r'^remat: a policy lists "up", but no value was given that name by '
            r"remat\.checkpoint_name",
        )

    def test_an_observer_that_raises(self) -> None:
        def end(phase: remat.PhaseInfo) -> None:
            raise LookupError("mine")

        with remat.observe_recomputes(end=end):
            y = remat.checkpoint(lambda t: t.sin().exp(), leaf()).sum()
        self.check(y.backward, "^remat: an exception from the `end` of observe_recomputes was "
                               "ignored: .*mine")

    def test_a_provider_that_raises_while_an_error_is_on_its_way(self) -> None:
        class Provider:
            restores = 0

            def capture(self) -> int:
                return 0

            def restore(self, state: int) -> None:
                self.restores += 1
                if self.restores > 1:
                    raise LookupError("mine")

        def failing(x: torch.Tensor) -> torch.Tensor:
            if remat.is_recomputing():
                raise ArithmeticError("first")
            return x.sin().exp()

        with remat.state_provider(Provider()):
            y = remat.checkpoint(failing, leaf()).sum()

        def step() -> None:
            with self.assertRaisesRegex(ArithmeticError, "first"):
                y.backward()

        self.check(step, r"^remat\.state_provider: a provider could not restore its state while "
                         "another exception was propagating")

    def test_a_guard_that_a_recompute_opens_too_early(self) -> None:
        class Provider:
            def capture(self) -> int:
                return 0

            def restore(self, state: int) -> None:
                raise LookupError("mine")

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.sin().exp()
            # its recompute would end here, where forward waits for it
            with contextlib.suppress(Exception):
                torch.autograd.grad(y.sum(), x)
            with remat.state_provider(Provider()):
                return y.cos()

        self.check(
            lambda: remat.checkpoint(f, leaf()),
            "^remat: the state of a guard inside a region could not be restored after a "
            "recompute: .*mine",
        )

    def test_a_place_that_fails_at_the_end_of_the_scope(self) -> None:
        class Full:
            def store(self, flat: torch.Tensor) -> Any:
                raise OSError("no room")

            def load(self, contents: Any) -> torch.Tensor:
                raise AssertionError

        x, factor = leaf(64), torch.full((64,), 3.0)

        def step() -> None:
            with remat.save_elsewhere(Full()):
                # an operator may go on writing to what it saves: it moves when the next one comes
                y = x * factor
            y.sum().backward()

        self.check(
            step, r"^remat: a saved tensor stays in memory, since it could not be moved: .*no room"
        )
        self.check_equal(x.grad, factor)

    def test_a_place_that_cannot_cancel(self) -> None:
        class Place:
            begun: list[Any] = []

            def store(self, flat: torch.Tensor) -> Any:
                return [flat.clone()]

            def load(self, contents: Any) -> torch.Tensor:
                return contents[0]

            def begin_load(self, contents: Any) -> None:
                self.begun.append(contents)

            def cancel_load(self, contents: Any) -> None:
                raise LookupError("mine")

        x = leaf(64)
        with remat.save_elsewhere(Place()):
            y = (x * 3).sin()
            z = (x * 2).sin()
        self.check(
            lambda: torch.autograd.grad(z.sum(), x),
            r"^remat: a place for saved tensors could not cancel a load: .*mine",
        )
        self.assertEqual(len(Place.begun), 1)
        del y

    def test_a_file_that_is_full(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = run_script(
                "import resource, sys, time, torch, remat\n"
                "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
                "x = torch.ones(1 << 19, requires_grad=True)\n"
                "with remat.save_in_tiers(host_bytes=1 << 21, directory=sys.argv[1]):\n"
                "    y = x\n"
                "    for i in range(20):\n"
                "        y = y.sin()\n"
                "        time.sleep(0.01)\n"
                "y.sum().backward()\n",
                folder,
            )
        self.assertIn(
            "UserWarning: remat: a saved tensor stays in memory, beyond the budget of its tier, "
            "since it could not be moved: ",
            done.stdout,
        )
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIsNone(FOREIGN.search(done.stdout), done.stdout)
        self.assertNotIn("Exception raised from", done.stdout)


if __name__ == "__main__":
    unittest.main()
