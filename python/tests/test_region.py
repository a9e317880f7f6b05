"""remat.checkpoint: results, random numbers and settings of regions, levels, comparisons of
values."""

from __future__ import annotations

import gc
import os
import unittest
import weakref
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as upstream
from torch.overrides import TorchFunctionMode

import remat
from common import Case, CountedFunction, gradient, leaf, operators, run_script


class Results(Case):
    def test_gradients_are_those_without_a_region(self) -> None:
        x = leaf()
        f = CountedFunction(operators)
        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(operators(x), x))
        self.assertEqual(f.runs, 2)

    def test_any_result_comes_back_untouched(self) -> None:
        x = leaf()
        marker = object()
        found = remat.checkpoint(lambda t: (t.sin(), [t.cos()], {"a": marker}, None), x)
        self.assertIs(found[2]["a"], marker)
        self.check_equal(gradient(found[0] * found[1][0], x), gradient(x.sin() * x.cos(), x))

    def test_without_grad_mode_the_function_runs_plainly(self) -> None:
        x = leaf()
        before = remat.counters()["frames_created"]
        with torch.no_grad():
            remat.checkpoint(operators, x)
        self.assertEqual(remat.counters()["frames_created"], before)

    def test_keyword_arguments_reach_the_function(self) -> None:
        x, y = leaf(seed=1), leaf(seed=2)

        def f(a: torch.Tensor, *, scale: float, other: torch.Tensor) -> torch.Tensor:
            return (a * scale * other).sin()

        found = remat.checkpoint(f, x, scale=2.0, other=y, name="keywords")
        self.check_equal(gradient(found, x, y), gradient(f(x, scale=2.0, other=y), x, y))

    def test_it_decorates(self) -> None:
        x = leaf()

        @remat.checkpoint(name="decorated", early_stop=False)
        def f(t: torch.Tensor) -> torch.Tensor:
            "its text"
            return operators(t)

        self.assertEqual(f.__doc__, "its text")
        self.check_equal(gradient(f(x), x), gradient(operators(x), x))

        class Layer(torch.nn.Module):
            @remat.checkpoint()
            def forward(self, t: torch.Tensor) -> torch.Tensor:
                return operators(t)

        self.check_equal(gradient(Layer()(x), x), gradient(operators(x), x))

    def test_nested_regions(self) -> None:
        x = leaf()
        inner = lambda t: remat.checkpoint(operators, t)  # noqa: E731
        outer = lambda t: inner(inner(t).sin())  # noqa: E731
        plain = lambda t: operators(operators(t).sin())  # noqa: E731
        self.check_equal(gradient(remat.checkpoint(outer, x), x), gradient(plain(x), x))

    def test_sixty_levels(self) -> None:
        x = leaf()

        def level(n: int, t: torch.Tensor) -> torch.Tensor:
            return t.sin() if n == 0 else remat.checkpoint(level, n - 1, t).cos()

        plain = x.sin()
        for _ in range(60):
            plain = plain.cos()
        self.check_equal(gradient(level(60, x), x), gradient(plain, x))

    def test_second_derivatives(self) -> None:
        x = leaf().double().detach().requires_grad_()
        f = lambda t: remat.checkpoint(operators, t)  # noqa: E731
        self.assertTrue(torch.autograd.gradcheck(f, x))
        self.assertTrue(torch.autograd.gradgradcheck(f, x))

    def test_random_numbers_are_drawn_again(self) -> None:
        x = leaf(64, 64)
        f = lambda t: torch.nn.functional.dropout(t.sin(), 0.5).exp()  # noqa: E731
        torch.manual_seed(3)
        plain = gradient(f(x), x)
        torch.manual_seed(3)
        y = remat.checkpoint(f, x)
        torch.rand(5)
        self.check_equal(gradient(y, x), plain)

    def test_a_generator_that_is_an_argument_is_drawn_from_again(self) -> None:
        def f(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return (t * torch.rand(t.shape, generator=generator)).sin().exp()

        def outer(t: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
            return remat.checkpoint(f, f(t, generator), generator) * torch.rand(
                t.shape, generator=generator
            )

        x = leaf(seed=1)
        for function, keyword in ((f, False), (f, True), (outer, True)):
            found = []
            for is_region in (False, True):
                generator = torch.Generator().manual_seed(3)
                torch.rand(2, generator=generator)
                given: Any = ((x,), {"generator": generator}) if keyword else ((x, generator), {})
                call = (
                    remat.checkpoint if is_region else lambda g, *args, **kwargs: g(*args, **kwargs)
                )
                y = call(function, *given[0], **given[1])
                drawn = torch.rand(2, generator=generator)
                found.append([*gradient(y, x, retain_graph=True), drawn,
                              torch.rand(2, generator=generator),
                              *gradient(y, x)])  # fmt: skip
            self.check_equal(found[1], found[0])
        y = remat.checkpoint(f, x, torch.default_generator)  # as without naming it
        drawn = torch.rand(2)
        gradient(y, x)
        self.assertFalse(torch.equal(drawn, torch.rand(2)))

    def test_a_generator_that_the_function_has_from_elsewhere_is_drawn_from_again(self) -> None:
        class Noisy(torch.nn.Module):
            def __init__(self, generator: torch.Generator) -> None:
                super().__init__()
                self.generator = generator

            def forward(self, t: torch.Tensor) -> torch.Tensor:
                return (t * torch.rand(t.shape, generator=self.generator)).sin().exp()

        def program(kind: str, x: torch.Tensor, run: Any) -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(3)
            module = Noisy(generator)
            if kind == "module":
                y = run(module, run(module, x))
            elif kind == "list":
                y = run(
                    lambda t, held: (
                        t * torch.empty_like(t).bernoulli_(0.5, generator=held[0])
                    ).exp(),
                    x,
                    [generator],
                )
            elif kind == "nested":
                y = run(lambda t: run(module, t) * torch.rand(t.shape, generator=generator), x)
            else:
                y = run(lambda t: (t * torch.randperm(16, generator=generator).view_as(t)).sin(), x)
            torch.rand(2, generator=generator)
            found = gradient(y, x, retain_graph=True)
            return [*found, torch.rand(2, generator=generator), *gradient(y, x)]

        ways = {
            "own": remat.checkpoint,
            "drop-in": lambda f, *args: torch.utils.checkpoint.checkpoint(
                f, *args, use_reentrant=False
            ),
        }
        for kind in ("module", "list", "nested", "captured"):
            x = leaf(seed=1)
            plain = program(kind, x, lambda f, *args: f(*args))
            for way, run in ways.items():
                with remat.installed(), self.subTest(kind=kind, way=way):
                    self.check_equal(program(kind, x, run), plain)
        # Without it, the generator moves on in the recompute.
        generator = torch.Generator().manual_seed(3)
        y = remat.checkpoint(Noisy(generator), leaf(), preserve_rng_state=False)
        before = generator.get_state()
        y.sum().backward()
        self.assertFalse(torch.equal(generator.get_state(), before))

    def test_variables_around_the_function_are_those_of_forward(self) -> None:
        def program(run: Any) -> list[torch.Tensor]:
            x = leaf(seed=1)
            layers = [torch.nn.Linear(4, 4) for _ in range(3)]
            for i, each in enumerate(layers):
                with torch.no_grad():
                    each.weight.copy_(leaf(seed=i + 2))
                    each.bias.zero_()
            y, fast = x, layers[0].weight
            for scale, layer in zip((1.0, 2.0, 3.0), layers):
                y = run(lambda t, by=2.0: (layer(t) * scale + (t @ fast)).sin() * by, y)
                fast = fast - 0.1 * fast.detach()
            state = torch.zeros(4, 4)

            def set_state(t: torch.Tensor) -> None:
                nonlocal state
                state = t.sin()

            def reads_state(t: torch.Tensor) -> torch.Tensor:
                set_state(t)  # which the program does, too, before backward
                return (state * t).exp()

            y = run(reads_state, y.tanh())
            set_state(torch.ones(4, 4))
            return [y.detach(), *gradient(y, x, *(each.weight for each in layers))]

        plain = program(lambda f, *args: f(*args))
        for options in (
            {}, {"early_stop": False}, {"determinism_check": "values"},
            {"policy": remat.save_matmuls()}
        ):
            with self.subTest(options=options):
                self.check_equal(
                    program(lambda f, *args: remat.checkpoint(f, *args, **options)), plain
                )
        self.check_equal(
            program(lambda f, *args: remat.checkpoint(lambda *a: remat.checkpoint(f, *a), *args)),
            plain,
        )

    def test_what_a_function_writes_around_it_stays_the_programs(self) -> None:
        runs, last = 0, None

        def function(t: torch.Tensor) -> torch.Tensor:
            nonlocal runs, last
            runs += 1
            last = t.sin().detach()
            return t.sin().exp()

        x = leaf()
        y = remat.checkpoint(function, x)
        gradient(y, x)
        self.assertEqual(runs, 2)
        # The content of a variable goes with the graph.
        class Held:
            def __call__(self, t: torch.Tensor) -> torch.Tensor:
                return t

        held = Held()
        known = weakref.ref(held)
        z = remat.checkpoint(lambda t: held(t.sin()).exp(), x)
        held = Held()
        self.assertIsNotNone(known())
        gradient(z, x)
        del z
        self.assertIsNone(known())
        h = x.cos()
        gc.disable()
        self.addCleanup(gc.enable)
        for _ in range(3):
            h = remat.checkpoint(lambda t: (t + h).sin().exp(), x)
        self.assertEqual(remat.counters()["frames_alive"], 3)
        h = x
        self.assertEqual(remat.counters()["frames_alive"], 0)

    def test_autocast_is_that_of_forward(self) -> None:
        x, w = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        f = lambda t: (t @ w).sin() @ w  # noqa: E731
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain, ours = f(x), remat.checkpoint(f, x)
        self.check_equal(gradient(ours, x, w), gradient(plain, x, w))

    def test_a_device_context_is_that_of_forward(self) -> None:
        x = leaf()

        def f(t: torch.Tensor) -> torch.Tensor:
            self.assertEqual(torch.empty(1).device.type, "meta")
            return t.sin().exp()

        for early_stop in (True, False):
            with torch.device("meta"):
                y = remat.checkpoint(f, x, early_stop=early_stop)
            self.check_equal(gradient(y, x), gradient(x.sin().exp(), x))

    def test_a_function_mode_around_the_call_that_the_recompute_lacks_is_an_error(self) -> None:
        x = leaf()

        class Scales(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                return result * 1.5 if getattr(func, "__name__", "") == "sin" else result

        def inside(t: torch.Tensor) -> torch.Tensor:
            with Scales():
                return f(t)

        def checkpointed(t: torch.Tensor) -> torch.Tensor:
            with torch.device("cpu"), Scales():
                return remat.checkpoint(f, t)

        f = lambda t: t.sin().exp()  # noqa: E731
        self.check_equal(gradient(remat.checkpoint(inside, x), x), gradient(inside(x), x))
        text = (
            "the function mode Scales was active around the call of the region.*"
            "open the mode inside the region's function"
        )
        with Scales():
            y = remat.checkpoint(f, x).sum()
            for backward in (
                y.backward, lambda: torch.autograd.grad(y, x), lambda: torch.autograd.backward([y])
            ):
                with self.assertRaisesRegex(remat.CheckpointError, "(?s)" + text) as caught:
                    backward()
                self.assertIs(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)
        for y in (checkpointed(x), remat.checkpoint(checkpointed, x)):
            with self.assertRaisesRegex(remat.CheckpointError, "(?s)" + text):
                gradient(y, x)

        def theirs() -> Any:
            with Scales():  # it is not there in the recompute
                return gradient(upstream.checkpoint(f, x, use_reentrant=False), x)

        expected = theirs()
        with remat.installed():
            self.check_equal(theirs(), expected)

    def test_options_are_checked(self) -> None:
        x = leaf()
        with self.assertRaisesRegex(
            ValueError, "determinism_check must be one of .*'metadata'.*'sometimes'"
        ):
            remat.checkpoint(operators, x, determinism_check="sometimes")
        with self.assertRaisesRegex(TypeError, "a policy must be"):
            remat.checkpoint(operators, x, policy=3)
        with self.assertRaises(TypeError):
            remat.checkpoint(operators, x, name=3)
        with self.assertRaises(ValueError):
            remat.save_ops(["aten::no_such_operator"])

    def test_contents_are_compared_on_request(self) -> None:
        x = leaf()
        runs = []

        def f(t: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return (t * len(runs)).sin().exp()

        y = remat.checkpoint(f, x, determinism_check="values", preserve_rng_state=False)
        with self.assertRaises(remat.CheckpointError) as caught:
            gradient(y, x)
        self.assertIs(caught.exception.kind, remat.ErrorKind.VALUE_MISMATCH)


class Misleading(Case):
    def test_options_of_upstream_are_hints(self) -> None:
        for name, hint in {"use_reentrant": "leave it out", "context_fn": "policy="}.items():
            with self.assertRaisesRegex(TypeError, f"{name} was given.*{hint}"):
                remat.checkpoint(operators, leaf(), **{name: False})

        def takes(x: torch.Tensor, use_reentrant: str = "", **others: Any) -> torch.Tensor:
            return x * (2 if use_reentrant == "yes" and others == {"context_fn": 1} else 3)

        x = leaf()
        y = remat.checkpoint(takes, x, use_reentrant="yes", context_fn=1)
        self.check_equal(gradient(y, x), (torch.full_like(x, 2.0),))

        def fails(x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
            raise TypeError("own error")

        with self.assertRaisesRegex(TypeError, "own error"):
            remat.checkpoint(fails, x, use_reentrant=True)

    def test_defaults_of_the_process(self) -> None:
        def stops() -> bool:
            before = remat.counters()["early_stops"]
            remat.checkpoint(lambda x: x.sin().exp() + 1, leaf()).sum().backward()
            return remat.counters()["early_stops"] > before

        self.assertTrue(stops())
        remat.set_default_options("early_stop=false")
        try:
            self.assertFalse(stops())
            self.assertEqual(remat.default_options(), "early_stop=false")
            with remat.early_stop(True):
                self.assertTrue(stops())
        finally:
            remat.set_default_options("")
        self.assertTrue(stops())
        with self.assertRaisesRegex(ValueError, 'there was no option "early"'):
            remat.set_default_options("early=false")

    def test_defaults_from_the_environment(self) -> None:
        script = (
            "import remat, torch\n"
            "x = torch.ones(3, requires_grad=True)\n"
            "with remat.installed():\n"
            "    upstream = torch.utils.checkpoint.checkpoint\n"
            "    upstream(lambda t: t.sin().exp() + 1, x, use_reentrant=False).sum().backward()\n"
            "remat.checkpoint(lambda t: t.sin().exp() + 1, x).sum().backward()\n"
            "print(remat.counters()['early_stops'])\n"
        )
        outputs = {"early_stop=false": "0\n", "": "2\n", "early_stop=never": "ValueError: remat"}
        for text, expected in outputs.items():
            with mock.patch.dict(os.environ, {"REMAT_OPTIONS": text}):
                output = run_script(script).stdout
            self.assertIn(expected, output)


class Levels(Case):
    def test_a_negative_level_is_an_error(self) -> None:
        with self.assertRaisesRegex(ValueError, "level must be 0 or more, and is -1"):
            remat.checkpoint(operators, leaf(), level=-1)
        with self.assertRaises(ValueError):
            remat.checkpoint(level=-1)

    def test_a_module_in_eval_mode_with_a_level_runs_plainly(self) -> None:
        module, x = torch.nn.Linear(4, 4), leaf()
        for call in (module, module.forward):
            for trains, level, frames in ((True, 1, 1), (False, 1, 0), (False, None, 1)):
                module.train(trains)
                before = remat.counters()["frames_created"]
                y = remat.checkpoint(call, x, level=level).exp()
                self.assertEqual(remat.counters()["frames_created"] - before, frames)
                self.check_equal(gradient(y, x), gradient(module(x).exp(), x))

    def test_levels_decide_which_calls_are_regions(self) -> None:
        x = leaf()
        plain = gradient(operators(x), x)
        for training_level, level, is_region in ((None, 3, True), (None, 0, False), (2, 1, True),
                                                 (2, 2, True), (2, 3, False),
                                                 (0, 1, False), (9, 0, False),
                                                 (0, None, True)):  # fmt: skip
            before = remat.counters()["frames_created"]
            if training_level is None:
                y = remat.checkpoint(operators, x, level=level)
            else:
                with remat.checkpoint_level(training_level):
                    y = remat.checkpoint(operators, x, level=level)
            self.assertEqual(
                remat.counters()["frames_created"] - before, int(is_region), (training_level, level)
            )
            self.check_equal(gradient(y, x), plain)
        with self.assertRaisesRegex(TypeError, "level must be an int"):
            remat.checkpoint(operators, x, level="2")

    def test_recomputes_see_the_level_that_forward_saw(self) -> None:
        x = leaf()
        inner = remat.checkpoint(level=2)(torch.sin)
        f = lambda x: inner(x).exp()  # noqa: E731
        plain = gradient(f(x), x)
        # two in forward and recompute of the outer one
        for training_level, regions in ((1, 1), (2, 3)):
            before = remat.counters()["frames_created"]
            with remat.checkpoint_level(training_level):
                y = remat.checkpoint(f, x, level=1, early_stop=False)
            with remat.checkpoint_level(3 - training_level):
                self.check_equal(gradient(y, x), plain)
            self.assertEqual(remat.counters()["frames_created"] - before, regions)

    def test_a_module_that_is_no_region_by_its_level_leaves_its_buffers_to_the_region_around(
        self,
    ) -> None:
        torch.manual_seed(0)
        norm, x = torch.nn.BatchNorm1d(4), leaf(8, 4)
        with remat.checkpoint_level(1):
            y = remat.checkpoint(lambda x: remat.checkpoint(norm, x.sin(), level=2).exp(), x)
        gradient(y, x)
        self.assertEqual(int(norm.num_batches_tracked), 1)

    def test_levels_of_plans(self) -> None:
        x = leaf()
        stages = [torch.sin, torch.exp, torch.sum]
        for training_level, regions in ((1, 0), (2, 2)):
            before = remat.counters()["frames_created"]
            with remat.checkpoint_level(training_level):
                remat.run(remat.Plan.parse("[ck[1] ck[2] 3]"), stages, x, level=2)
            self.assertEqual(remat.counters()["frames_created"] - before, regions)


class Values(Case):
    def read(self, change: Any, **rule: Any) -> None:
        """Runs backward of a region whose recompute saves something else."""
        x, is_first = leaf(), [True]

        def f(x: torch.Tensor) -> torch.Tensor:
            factor = torch.ones(4, 4)
            if not is_first:
                factor = change(factor)
            is_first.clear()
            return (x * factor).sin()

        y = remat.checkpoint(
            f, x, determinism_check="values", value_comparison=remat.ValueComparison(**rule)
        )
        gradient(y, x)

    def test_tolerances_samples_and_nan(self) -> None:
        near, far = (lambda t: t + 1e-6), (lambda t: t + 1e-2)
        for change, rule, agrees in (
            (near, {}, False),
            (near, {"absolute_tolerance": 1e-4}, True),
            (far, {"absolute_tolerance": 1e-4}, False),
            (far, {"relative_tolerance": 0.1}, True),
            (lambda t: t.index_fill(0, torch.tensor([1]), 2), {"max_elements": 1}, True),
            (lambda t: t * 2, {"max_elements": 1}, False),
        ):
            if agrees:
                self.read(change, **rule)
            else:
                with self.assertRaises(remat.CheckpointError) as raised:
                    self.read(change, **rule)
                self.assertIs(raised.exception.kind, remat.ErrorKind.VALUE_MISMATCH)

    def test_which_nan_are_equal(self) -> None:
        x, bits = leaf(), [0x7FC00000, 0x7FC00001]

        def f(x: torch.Tensor) -> torch.Tensor:
            nan = torch.tensor([bits.pop(0)], dtype=torch.int32).view(torch.float32)
            return x * nan

        options = {"determinism_check": "values", "early_stop": False}
        any_nan = remat.ValueComparison(nan="any")
        gradient(remat.checkpoint(f, x, value_comparison=any_nan, **options), x)
        bits[:] = [0x7FC00000, 0x7FC00001]
        with self.assertRaises(remat.CheckpointError):
            gradient(remat.checkpoint(f, x, **options), x)

    def test_wrong_rules(self) -> None:
        for rule in (
            {"absolute_tolerance": -1}, {"relative_tolerance": float("nan")}, {"max_elements": -1},
            {"nan": "no"}
        ):
            with self.assertRaisesRegex(ValueError, "remat.ValueComparison"):
                remat.ValueComparison(**rule)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "must be a remat.ValueComparison"):
            remat.checkpoint(torch.sin, leaf(), value_comparison=0.1)  # type: ignore[call-overload]


if __name__ == "__main__":
    unittest.main()
