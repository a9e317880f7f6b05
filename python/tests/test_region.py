"""`remat.checkpoint`: results, arguments, errors, backward inside, lifetime."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn as nn
import torch.utils.checkpoint as upstream
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from common import SLOWNESS, Case, CountedFunction, gradient, leaf, sampled


STEPS = int(os.environ.get("REMAT_TEST_STEPS", "2000"))  # of what must not grow; 20000 take minutes


def operators(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().cos().matmul(x)


def keeps_products(context: remat.PolicyContext) -> bool:
    return context.op_name == "aten::mm.default"


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
            return remat.checkpoint(f, f(t, generator), generator) * torch.rand(t.shape, generator=generator)

        x = leaf(seed=1)
        for function, keyword in ((f, False), (f, True), (outer, True)):
            found = []
            for is_region in (False, True):
                generator = torch.Generator().manual_seed(3)
                torch.rand(2, generator=generator)
                given: Any = ((x,), {"generator": generator}) if keyword else ((x, generator), {})
                call = remat.checkpoint if is_region else lambda g, *args, **kwargs: g(*args, **kwargs)
                y = call(function, *given[0], **given[1])
                drawn = torch.rand(2, generator=generator)
                found.append([*gradient(y, x, retain_graph=True), drawn, torch.rand(2, generator=generator),
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
                y = run(lambda t, held: (t * torch.empty_like(t).bernoulli_(0.5, generator=held[0])).exp(), x, [generator])
            elif kind == "nested":
                y = run(lambda t: run(module, t) * torch.rand(t.shape, generator=generator), x)
            else:
                y = run(lambda t: (t * torch.randperm(16, generator=generator).view_as(t)).sin(), x)
            torch.rand(2, generator=generator)
            found = gradient(y, x, retain_graph=True)
            return [*found, torch.rand(2, generator=generator), *gradient(y, x)]

        ways = {
            "own": remat.checkpoint,
            "drop-in": lambda f, *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False),
        }
        for kind in ("module", "list", "nested", "captured"):
            x = leaf(seed=1)
            plain = program(kind, x, lambda f, *args: f(*args))
            for way, run in ways.items():
                with remat.installed(), self.subTest(kind=kind, way=way):
                    self.check_equal(program(kind, x, run), plain)
        # Without, it moves on in the recompute.
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
        for options in ({}, {"early_stop": False}, {"determinism_check": "values"}, {"policy": remat.save_matmuls()}):
            with self.subTest(options=options):
                self.check_equal(program(lambda f, *args: remat.checkpoint(f, *args, **options)), plain)
        self.check_equal(program(lambda f, *args: remat.checkpoint(lambda *a: remat.checkpoint(f, *a), *args)), plain)

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
        # What was in a variable goes with the graph.
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
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        text = "the function mode Scales was active around the call of the region.*open the mode inside the region's function"
        with Scales():
            y = remat.checkpoint(f, x).sum()
            for backward in (y.backward, lambda: torch.autograd.grad(y, x), lambda: torch.autograd.backward([y])):
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
        with self.assertRaisesRegex(ValueError, "determinism_check must be one of .*'metadata'.*'sometimes'"):
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


class Levels(Case):
    def test_levels_decide_which_calls_are_regions(self) -> None:
        x = leaf()
        plain = gradient(operators(x), x)
        for training_level, level, is_region in ((None, 3, True), (None, 0, False), (2, 1, True), (2, 2, True), (2, 3, False),
                                                 (0, 1, False), (9, 0, False), (0, None, True)):  # fmt: skip
            before = remat.counters()["frames_created"]
            if training_level is None:
                y = remat.checkpoint(operators, x, level=level)
            else:
                with remat.checkpoint_level(training_level):
                    y = remat.checkpoint(operators, x, level=level)
            self.assertEqual(remat.counters()["frames_created"] - before, int(is_region), (training_level, level))
            self.check_equal(gradient(y, x), plain)
        with self.assertRaisesRegex(TypeError, "level must be an int"):
            remat.checkpoint(operators, x, level="2")

    def test_recomputes_see_the_level_that_forward_saw(self) -> None:
        x = leaf()
        inner = remat.checkpoint(level=2)(torch.sin)
        f = lambda x: inner(x).exp()  # noqa: E731
        plain = gradient(f(x), x)
        for training_level, regions in ((1, 1), (2, 3)):  # two in forward and recompute of the outer one
            before = remat.counters()["frames_created"]
            with remat.checkpoint_level(training_level):
                y = remat.checkpoint(f, x, level=1, early_stop=False)
            with remat.checkpoint_level(3 - training_level):
                self.check_equal(gradient(y, x), plain)
            self.assertEqual(remat.counters()["frames_created"] - before, regions)

    def test_a_module_that_is_no_region_by_its_level_leaves_its_buffers_to_the_region_around(self) -> None:
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
        """Backward of a region whose recompute saves something else."""
        x, is_first = leaf(), [True]

        def f(x: torch.Tensor) -> torch.Tensor:
            factor = torch.ones(4, 4)
            if not is_first:
                factor = change(factor)
            is_first.clear()
            return (x * factor).sin()

        y = remat.checkpoint(f, x, determinism_check="values", value_comparison=remat.ValueComparison(**rule))
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
        for rule in ({"absolute_tolerance": -1}, {"relative_tolerance": float("nan")}, {"max_elements": -1}, {"nan": "no"}):
            with self.assertRaisesRegex(ValueError, "remat.ValueComparison"):
                remat.ValueComparison(**rule)  # type: ignore[arg-type]
        with self.assertRaisesRegex(TypeError, "must be a remat.ValueComparison"):
            remat.checkpoint(torch.sin, leaf(), value_comparison=0.1)  # type: ignore[call-overload]


class Arguments(Case):
    def test_leaves_are_the_same_objects(self) -> None:
        seen: list[object] = []
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.mark = "mine"  # type: ignore[attr-defined]

        def f(p: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
            seen.append((p, plain))
            return (p * plain).sin().exp()

        constant = torch.ones(4)
        gradient(remat.checkpoint(f, parameter, constant), parameter)
        self.assertEqual(len(seen), 2)
        for each in seen:
            self.assertIs(each[0], parameter)  # type: ignore[index]
            self.assertIs(each[1], constant)  # type: ignore[index]

    def test_results_keep_class_and_attributes(self) -> None:
        class Marked(torch.Tensor):
            pass

        for kind in (torch.Tensor, Marked):
            x = torch.ones(4).as_subclass(kind).requires_grad_()
            middle = x * 2
            middle.mark = "mine"  # type: ignore[attr-defined]
            seen = []

            def f(t: torch.Tensor) -> torch.Tensor:
                seen.append((type(t), getattr(t, "mark", None), t.requires_grad, t.is_leaf))
                return t.sin().exp()

            gradient(remat.checkpoint(f, middle), x)
            self.assertEqual(seen, [(kind, "mine", True, False)] * 2)

    def test_tensors_of_wrapping_classes(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        def step(call: object, chained: bool) -> tuple[torch.Tensor, torch.Tensor]:
            x = TwoTensor(torch.ones(3, 3) * 0.3, torch.ones(3, 3) * 0.4).requires_grad_()
            y = call((x * 1) if chained else x)  # type: ignore[operator]
            y.sum().backward()
            return x.grad.a, x.grad.b

        f = lambda t: (t @ t).sin().exp().sin()  # noqa: E731
        policies = [None, remat.save_matmuls(), remat.save_ops(["aten::sin", "aten::exp"]), remat.save_ops(["aten::bmm"])]
        for policy in policies:
            for chained in (False, True):
                ours = step(lambda t: remat.checkpoint(f, t, policy=policy), chained)
                self.check_equal(ours, step(f, chained))

    def test_arguments_that_are_no_tensors_stay_what_they_are(self) -> None:
        x = leaf()
        marker, seen = object(), []
        remat_call = remat.checkpoint(lambda t, m, items: (seen.append((m, items)), t.sin().exp())[1], x, marker, [x])
        gradient(remat_call, x)
        self.assertTrue(all(m is marker and items[0] is x for m, items in seen))

    def test_containers_may_change_after_the_call(self) -> None:
        a, b, w = leaf(), leaf(seed=1), leaf(seed=2)

        class Features:
            def __init__(self) -> None:
                self.all = [a * 2]

        def total(features: Any) -> torch.Tensor:
            found: list[torch.Tensor] = []
            torch.utils._pytree.tree_map_only(torch.Tensor, found.append, features)
            return (sum(found) * w).sin()

        makers: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "append": (lambda: [a * 2], lambda features: features.append(b)),
            "pop": (lambda: [a * 2, a], lambda features: features.pop()),
            "a leaf replaced": (lambda: [a], lambda features: features.__setitem__(0, b)),
            "replaced": (lambda: [a * 2], lambda features: features.__setitem__(0, b * 2)),
            "dictionary": (lambda: {"x": a}, lambda features: features.update(x=b, y=b)),
            "in a tuple": (lambda: (a, [a.sin()], "text"), lambda features: features[1].append(b)),
            "deep": (lambda: [{"x": ([a],)}], lambda features: features[0]["x"][0].append(b)),
            "ordered": (lambda: collections.OrderedDict(x=a), lambda features: features.update(x=b)),
            "default": (lambda: collections.defaultdict(list, x=[a]), lambda features: features["x"].append(b)),
            "deque": (lambda: collections.deque([a]), lambda features: features.append(b)),
        }
        for name, (make, change) in makers.items():
            for with_keyword in (False, True):
                with self.subTest(name, with_keyword=with_keyword):
                    plain = gradient(total(make()), a, w)
                    features = make()
                    if with_keyword:
                        result = remat.checkpoint(lambda *, features: total(features), features=features)
                    else:
                        result = remat.checkpoint(total, features)
                    change(features)
                    for _ in range(2):
                        for one, other in zip(plain, gradient(result, a, w, retain_graph=True)):
                            self.assertTrue(torch.equal(one, other))

    def test_functions_may_change_containers(self) -> None:
        x, w = leaf(), leaf(seed=1)

        def block(x: torch.Tensor, losses: list[torch.Tensor], seen: set[int]) -> torch.Tensor:
            self.assertEqual((len(losses), len(seen)), (0, 0))
            losses.append((x * w).exp().sum())
            seen.add(1)
            return (x * w).sin() * losses[0]

        losses: list[torch.Tensor] = []
        seen: set[int] = set()
        result = remat.checkpoint(block, x, losses, seen)
        self.assertEqual((len(losses), seen), (1, {1}))  # the caller's own
        seen.add(2)
        plain = gradient(block(x, [], set()), x, w)
        for _ in range(2):
            for one, other in zip(plain, gradient(result, x, w, retain_graph=True)):
                self.assertTrue(torch.equal(one, other))
        self.assertEqual((len(losses), seen), (1, {1, 2}))

    def test_containers_keep_their_shape(self) -> None:
        x = leaf()
        shared = [x * 1]
        cyclic: list[Any] = [x]
        cyclic.append(cyclic)
        size = x.size()

        def check(first: Any, again: Any, cyclic: Any, size: Any, text: Any) -> torch.Tensor:
            self.assertIs(first["a"], again[0])
            self.assertIs(cyclic[1], cyclic)
            self.assertEqual((list(first), type(size), text), (["b", "a"], torch.Size, ("text", 1)))
            return (first["a"][0] * cyclic[0]).sin()

        result = remat.checkpoint(check, {"b": 1, "a": shared}, (shared,), cyclic, size, ("text", 1))
        (found,) = gradient(result, x)
        (plain,) = gradient((x * x).sin(), x)
        torch.testing.assert_close(found, plain)
        kept = weakref.ref(shared[0])
        del result, found, shared
        cyclic.clear()
        gc.collect()
        self.assertIsNone(kept())

    def test_one_tensor_twice_is_one_tensor(self) -> None:
        x = leaf()
        seen = []
        f = lambda a, b: (seen.append(a is b), (a * b).sin().exp())[1]  # noqa: E731
        gradient(remat.checkpoint(f, x * 1, x), x)
        y = x * 1
        gradient(remat.checkpoint(f, y, y), x)
        self.assertEqual(seen, [False, False, True, True])

    def test_a_region_does_not_keep_the_graph_above(self) -> None:
        x = leaf()
        middle = x.sin()
        node = middle.grad_fn
        kept = remat.checkpoint(lambda t: t.exp().sin().detach(), middle)
        alive = remat.counters()["frames_alive"]
        self.assertEqual(alive, 0)
        del middle, node, kept

    def test_a_changed_argument_is_an_error(self) -> None:
        x = leaf()
        y = x * 1
        z = remat.checkpoint(operators, y)
        with torch.no_grad():
            y.add_(1)
        with self.assertRaisesRegex(remat.CheckpointError, "modified by an inplace operation") as caught:
            gradient(z, x)
        self.assertIs(caught.exception.kind, remat.ErrorKind.INPUT_CHANGED)

    def test_an_argument_whose_memory_was_freed_is_an_error(self) -> None:
        x = leaf()
        between = x * 1
        y = remat.checkpoint(lambda t: (t * 1).sin().exp(), between)
        between.untyped_storage().resize_(0)
        with self.assertRaises(remat.CheckpointError) as raised:
            y.sum().backward()
        self.assertEqual(raised.exception.kind, remat.ErrorKind.INPUT_CHANGED)

    def test_an_argument_that_the_function_fills_before_it_reads(self) -> None:
        for options in ({"capture_check": "ignore"}, {"input_mode": "copy_on_write"}):
            for make in (lambda x: x * 2, lambda x: x.detach() * 2):  # with a history, and without
                x = leaf()
                between = make(x)
                kept: list[torch.Tensor] = []

                def fill(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
                    storage = t.untyped_storage()
                    if storage.size() == 0:
                        storage.resize_(kept[0].untyped_storage().size())
                        storage.copy_(kept[0].untyped_storage())
                    return (x * t).sin().exp()

                expected = gradient(fill(x, make(x)), x)
                y = remat.checkpoint(fill, x, between, **options)
                kept.append(between.detach().clone())
                between.untyped_storage().resize_(0)
                self.check_equal(gradient(y, x, retain_graph=True), expected)
                self.check_equal(gradient(y, x), expected)

    def test_running_statistics_as_arguments(self) -> None:
        def f(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
            centred = x - mean  # reads what the norm moves
            return torch.nn.functional.batch_norm(x, mean, variance, training=True).sin() * centred

        x = torch.randn(6, 2, requires_grad=True)
        plain = torch.zeros(2), torch.ones(2)
        expected = gradient(f(x, *plain), x)
        own = torch.zeros(2), torch.ones(2)
        text = '(?s)running statistics.*input_mode="copy_on_write"'
        with self.assertRaisesRegex(remat.CheckpointError, text) as caught:
            gradient(remat.checkpoint(lambda *all: f(*all), x, *own), x)
        self.assertIs(caught.exception.kind, remat.ErrorKind.INPUT_CHANGED)
        own = torch.zeros(2), torch.ones(2)
        y = remat.checkpoint(f, x, *own, input_mode="copy_on_write")
        for _ in range(2):
            self.check_equal(gradient(y, x, retain_graph=True), expected)
        self.check_equal(own, plain)

    def test_wrapping_classes_as_copies(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        def gradients(around: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]) -> torch.Tensor:
            torch.manual_seed(0)
            a = torch.randn(4, 4)
            x = TwoTensor(a, a * 2).requires_grad_()
            around(lambda t: (t @ t).sin(), x).sum().backward()
            return x.grad.a + x.grad.b

        expected = gradients(lambda f, x: f(x))
        for around in (lambda f, x: remat.checkpoint(f, x, input_mode="copy_on_write"),
                       lambda f, x: remat.checkpoint_sequential([f], 1, x),
                       lambda f, x: remat.checkpoint(lambda t: remat.checkpoint(f, t), x)):  # fmt: skip
            self.check_equal(gradients(around), expected)
        twice = gradients(lambda f, x: f(f(x)))
        self.check_equal(gradients(lambda f, x: remat.checkpoint_sequential([f, f], 2, x)), twice)

    def test_views_of_jagged_arguments_are_inputs(self) -> None:
        parts = [torch.randn(n, 8, requires_grad=True) for n in (3, 5)]

        def attention(n: torch.Tensor) -> torch.Tensor:
            heads = n.unflatten(-1, [2, 4]).transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)

        def jagged() -> torch.Tensor:
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        def found(region: Callable[..., torch.Tensor], f: Any, n: torch.Tensor) -> Any:
            y = region(f, n)
            return torch.autograd.grad((y.values() if y.is_nested else y).sum(), parts)

        functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda n: n.sin().values().exp(),
            lambda n: n.unflatten(-1, [2, 4]).sin(),
            lambda n: n.unflatten(-1, [2, 4]).transpose(1, 2).transpose(1, 2).sin(),
            lambda n: n.values().sin() * n.values(),
            attention,
            # `_values` is the tensor inside, which has a history of its own.
            lambda n: n.unflatten(-1, [2, 4])._values.sin(),
            lambda n: n.view(2, -1, 2, 4)._values.exp(),
            lambda n: n._values.exp() + n._values,
        ]
        for number, f in enumerate(functions):
            # What autograd makes below itself has a tensor inside without a history.
            makes = (jagged, lambda: jagged() * 2) if number < 5 else (jagged,)
            for make in makes:
                with self.subTest(number=number):
                    expected = found(lambda f, n: f(n), f, make())
                    self.check_equal(found(remat.checkpoint, f, make()), expected)
                    twice = lambda t, f=f: remat.checkpoint(f, t)  # noqa: E731
                    self.check_equal(found(remat.checkpoint, twice, make()), expected)

    def test_a_captured_jagged_tensor_that_changed_is_an_error(self) -> None:
        x = leaf(8, 8)
        values = torch.randn(8, 8)
        for changes_values in (True, False):
            n = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 8]))
            y = remat.checkpoint(lambda t: (t * n.unflatten(-1, [2, 4]).values().flatten(1)).sin(), x)
            (values if changes_values else n.values()).add_(1)
            with self.assertRaises(remat.CheckpointError) as caught:
                gradient(y, x)
            self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)

    def test_containers_keep_their_identity(self) -> None:
        x = leaf()
        shared: dict[str, Any] = {"list": [1], "set": {1}, "dict": {1: [2]}, "deque": collections.deque([1]),
                                  "default": collections.defaultdict(list, {1: [2]}), "tuple": ([1],)}  # fmt: skip
        ring: list[Any] = [1]
        ring.append((ring, [ring]))
        runs = 0

        def f(t: torch.Tensor, first: Any, second: Any, ring: Any, *, third: Any) -> torch.Tensor:
            nonlocal runs
            runs += 1
            for name, each in shared.items():
                self.assertIs(first[name], second[0][name])
                self.assertIs(first[name], third[name][0])
                if runs > 1:
                    self.assertIsNot(first[name], each)
                self.assertEqual(first[name], each)
            self.assertIs(ring[1][0], ring)
            self.assertIs(ring[1][1][0], ring)
            return t.sin().exp()

        y = remat.checkpoint(f, x, dict(shared), [shared], ring, third={name: [each] for name, each in shared.items()})
        gradient(y, x)
        self.assertEqual(runs, 2)

    def test_many_small_containers_cost_what_they_weigh(self) -> None:
        x = leaf()

        def seconds(count: int) -> float:
            for container in ([[i] for i in range(count)], [([i],) for i in range(count)], {i: {i: i} for i in range(count)}):
                begin = time.process_time()
                gradient(remat.checkpoint(lambda t, _: t.sin().exp(), x, container), x)
                total = time.process_time() - begin
            return total

        small = min(seconds(2000) for _ in range(3))
        self.assertLess(seconds(64000), 150 * small)  # 32 times as many; all by all were a thousand times

    def test_functions_that_write_to_their_arguments(self) -> None:
        x = leaf()
        relu = torch.nn.ReLU(inplace=True)
        f = lambda t: relu(t).sin().exp()  # noqa: E731
        plain = gradient(f(x * 1), x)
        self.check_equal(gradient(remat.checkpoint(f, x * 1, input_mode="copy_on_write"), x), plain)
        with self.assertRaises(remat.CheckpointError):
            gradient(remat.checkpoint(f, x * 1), x)

    def test_a_changed_parameter_is_an_error(self) -> None:
        x, w = leaf(seed=1), leaf(seed=2)
        f = lambda t: (t * w).sin().exp()  # noqa: E731
        y = remat.checkpoint(f, x, name="mine")
        with torch.no_grad():
            w.add_(1)
        with self.assertRaisesRegex(remat.CheckpointError, "mine") as caught:
            gradient(y, x, retain_graph=True)
        self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
        y = remat.checkpoint(f, x, capture_check="ignore")
        with torch.no_grad():
            w.add_(1)
        self.check_equal(gradient(y, x), gradient(f(x), x))

    def test_a_changed_bias_that_nothing_saved_is_an_error(self) -> None:
        layer = torch.nn.Linear(4, 4)
        x = torch.randn(2, 4)  # needs no gradient: neither weight nor bias is saved
        for changed in (layer.weight, layer.bias):
            y = remat.checkpoint(lambda t: layer(t).relu().exp(), x, modules=[layer])
            alone = remat.checkpoint(layer, x)  # nothing that is saved depends on them
            with torch.no_grad():
                changed.add_(1)
            with self.assertRaisesRegex(remat.CheckpointError, "does not save") as caught:
                y.sum().backward()
            self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
            alone.sum().backward()

    def test_fast_weights_that_are_replaced_are_those_of_forward_or_an_error(self) -> None:
        x, first = leaf(seed=1), leaf(seed=2)

        def after_two_steps(around: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor],
                            way: str) -> torch.Tensor:
            w, held = first, [first]
            try:
                for _ in range(2):
                    function = {"value": lambda t, w=w: (t * w).sin(), "closure": lambda t: (t * w).sin(),
                                "list": lambda t: (t * held[0]).sin()}[way]  # fmt: skip
                    step, = torch.autograd.grad(around(function, x).sum(), w, create_graph=True)
                    w = held[0] = w - 0.1 * step
                return gradient((x * w).sin(), first)
            finally:
                w = held[0] = first  # what a closure owns of its own graph is a cycle

        plain = after_two_steps(lambda f, t: f(t), "value")
        for way in ("value", "closure"):
            self.check_equal(after_two_steps(remat.checkpoint, way), plain)
        with self.assertRaises(remat.CheckpointError) as caught:
            after_two_steps(remat.checkpoint, "list")
        self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)


    def test_another_leaf_in_the_place_of_a_captured_one_is_an_error(self) -> None:
        x = leaf(seed=1)
        for other, is_error in ((leaf(seed=3), True), (leaf(seed=2), False)):
            held = [leaf(seed=2)]
            f = lambda t: (t * held[0]).sin().exp()  # noqa: E731
            plain = gradient(f(x), x)
            y = remat.checkpoint(f, x)
            held[0] = other
            if is_error:
                with self.assertRaises(remat.CheckpointError) as caught:
                    gradient(y, x)
                self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
            else:
                self.check_equal(gradient(y, x), plain)

    def test_parameters_that_stood_in_around_forward_are_an_error(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        others = {name: (each.detach() + 1).requires_grad_() for name, each in model.named_parameters()}
        x = torch.randn(3, 8, requires_grad=True)
        remat.apply(model, names="0")
        y = torch.func.functional_call(model, others, (x,))
        with self.assertRaisesRegex(remat.CheckpointError, "parameter 'weight' of Linear") as caught:
            gradient(y, x, retain_graph=True)
        self.assertIs(caught.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
        remat.remove(model)
        plain = gradient(torch.func.functional_call(model, others, (x,)), x)
        with_others = lambda: gradient(y, x)  # noqa: E731
        for name, each in others.items():  # with them in place again the same backward is right
            setattr(model.get_submodule(name.partition(".")[0]), name.partition(".")[2], torch.nn.Parameter(each.detach()))
        self.check_equal(with_others(), plain)

    def test_leaves_that_the_function_makes_are_equal_in_each_run(self) -> None:
        x = leaf(seed=1)
        for scale in (1.0, 2.0):

            def f(t: torch.Tensor) -> torch.Tensor:
                made = (t.detach() * scale).requires_grad_()
                return (made.sin() * t).exp()

            self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

        def hooked(t: torch.Tensor) -> torch.Tensor:  # arguments that come back rounded are no other leaves
            with remat.save_as(torch.bfloat16):
                return remat.checkpoint(lambda each: each.sin().exp(), t)

        gradient(hooked(x), x)


class Hooks(Case):
    """What a function registers on tensors from outside is registered once, as plain execution does."""

    def gradients(self, register: Callable[[torch.Tensor], object], is_argument: bool, around: Callable[..., torch.Tensor],
                  times: int = 1) -> list[torch.Tensor]:
        torch.manual_seed(0)
        w, x = leaf(), leaf()

        def f(t: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
            factor = arguments[0] if is_argument else w
            register(factor)
            return (t.sin() * factor).exp()

        y = x
        for _ in range(times):
            y = around(f, y, w) if is_argument else around(f, y)
        y.sum().backward()
        assert w.grad is not None and x.grad is not None
        return [w.grad, x.grad]

    def test_hooks_on_leaves_from_outside(self) -> None:
        def node(t: torch.Tensor) -> torch.autograd.graph.Node:
            made = t.expand_as(t).grad_fn
            assert made is not None
            return made.next_functions[0][0]  # type: ignore[return-value]

        def halve(t: torch.Tensor) -> None:
            assert t.grad is not None
            t.grad.mul_(0.5)

        kinds: dict[str, Callable[[torch.Tensor], object]] = {
            "tensor": lambda t: t.register_hook(lambda g: g * 2),
            "after accumulation": lambda t: t.register_post_accumulate_grad_hook(halve),
            "before the node": lambda t: node(t).register_prehook(lambda g: (g[0] * 2,)),
            "two": lambda t: (t.register_hook(lambda g: g * 2), t.register_hook(lambda g: g + 1)),
        }
        plainly = lambda f, *arguments: f(*arguments)  # noqa: E731
        for name, register in kinds.items():
            for is_argument in (False, True):
                for times in (1, 2):
                    with self.subTest(name=name, is_argument=is_argument, times=times):
                        self.assertTrue(all(map(torch.equal, self.gradients(register, is_argument, remat.checkpoint, times),
                                                self.gradients(register, is_argument, plainly, times))))

    def test_hooks_run_as_often_as_they_are_registered(self) -> None:
        w, x = leaf(), leaf()
        calls = []
        w.register_hook(lambda g: calls.append("before"))

        def f(t: torch.Tensor) -> torch.Tensor:
            w.register_hook(lambda g: calls.append("inside"))
            return t.sin() * w

        y = remat.checkpoint(f, x)
        w.register_hook(lambda g: calls.append("behind"))
        y.sum().backward()
        self.assertEqual(calls, ["before", "inside", "behind"])
        w.register_hook(lambda g: calls.append("later"))
        calls.clear()
        (w * 2).sum().backward()
        self.assertEqual(calls, ["before", "inside", "behind", "later"])

    def test_a_hook_that_only_a_recompute_registers_is_gone(self) -> None:
        w, x = leaf(), leaf()
        runs, calls = [], []

        def f(t: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            if len(runs) == 2:
                w.register_hook(lambda g: calls.append("recompute's"))
            return t.sin() * w

        remat.checkpoint(f, x).sum().backward()
        self.assertEqual(len(runs), 2)
        w.register_hook(lambda g: calls.append("later"))
        (w * 2).sum().backward()
        self.assertEqual(calls, ["later"])


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self.inner.scale  # type: ignore[assignment]
        return self.inner(x).sin() * scale


class Names(Case):
    def test_a_changed_buffer_is_called_by_its_path(self) -> None:
        module = Named()
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda x: remat.checkpoint(module, x), lambda x: remat.checkpoint(lambda t: module(t), x, modules=[module]),
            lambda x: remat.Checkpointed(module)(x)]
        for call in calls:
            y = call(torch.randn(3, 4, requires_grad=True))
            with torch.no_grad():
                module.inner.scale.add_(1)  # type: ignore[operator,union-attr]
            with self.assertRaises(remat.CheckpointError) as raised:
                y.sum().backward()
            self.assertIn("buffer 'inner.scale' of Named", str(raised.exception))

    def change_in(self, module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> str:
        """What backward raises if a tensor is changed before it."""
        y = call(torch.randn(3, 4, requires_grad=True))
        with torch.no_grad():
            tensor.add_(1)
        with self.assertRaises(remat.CheckpointError) as raised:
            y.sum().backward()
        self.assertEqual(raised.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
        return str(raised.exception)

    def test_a_changed_parameter_is_called_by_its_path(self) -> None:
        for module in (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sigmoid()), Named()):
            path, owner = ("0.0.weight", "Sequential") if isinstance(module, nn.Sequential) else ("inner.weight", "Named")
            weight = module.get_parameter(path)
            checkpointed = remat.Checkpointed(copy.deepcopy(module))
            calls: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = [
                (lambda x: remat.checkpoint(module, x), weight),
                (lambda x: remat.checkpoint(module.forward, x), weight),
                (lambda x: remat.checkpoint(functools.partial(module), x), weight),
                (lambda x: remat.checkpoint(lambda t: module(t), x, modules=[nn.Linear(2, 2), module]), weight),
                (lambda x: remat.checkpoint(module, x, buffers="ignore"), weight),
                (lambda x: remat.run(remat.Plan(2, [(1, 1)]), [module, torch.sum], x), weight),
                (lambda x: remat.checkpoint(lambda t: remat.checkpoint(module, t).exp(), x), weight),
                (checkpointed, checkpointed.get_parameter(path)),
            ]
            for call, tensor in calls:
                text = self.change_in(module, call, tensor)
                self.assertRegex(text, f"parameter '{path}' of {owner} .(saved tensor at|captured tensor that)")
                self.assertNotIn("StandIn", text)
        # Nobody says whose it is.
        self.assertIn("name it in `modules`", self.change_in(module, lambda x: remat.checkpoint(lambda t: module(t), x), weight))

    def test_a_parameter_of_a_region_around_is_called_by_its_path(self) -> None:
        module = Named()
        module.forward = lambda x: remat.checkpoint(lambda t: module.inner(t).sin(), x).exp()  # type: ignore[method-assign]
        text = self.change_in(module, lambda x: remat.checkpoint(module, x), module.inner.weight)
        self.assertIn("parameter 'inner.weight' of Named", text)

    def test_a_changed_argument_that_is_a_parameter_is_called_by_its_path(self) -> None:
        module = Named()
        y = remat.checkpoint(lambda t, w: (t @ w).sin(), torch.randn(3, 4), module.inner.weight, modules=[module])
        with torch.no_grad():
            module.inner.weight.add_(1)
        with self.assertRaises(remat.CheckpointError) as raised:
            y.sum().backward()
        self.assertEqual(raised.exception.kind, remat.ErrorKind.INPUT_CHANGED)
        self.assertIn("parameter 'inner.weight' of Named", str(raised.exception))

    def test_names_keep_nothing_alive(self) -> None:
        module, other = Named(), Named()
        known = [weakref.ref(module), weakref.ref(other)]
        gc.disable()
        self.addCleanup(gc.enable)
        y = remat.checkpoint(lambda t: t.sin(), remat.checkpoint(module, leaf()), modules=[other])
        count = sys.getrefcount(module)
        for _ in range(100):
            remat.checkpoint(module, leaf()).sum().backward()
        self.assertEqual(sys.getrefcount(module), count)
        del module, other
        self.assertNotIn(None, [each() for each in known])  # the graph has them
        del y
        self.assertEqual([each() for each in known], [None, None])


class Stops(Case):
    def test_a_recompute_ends_with_the_last_tensor_needed(self) -> None:
        x = leaf(128, 128)
        f = CountedFunction(lambda t: (t.sin().exp().cos() + 1) * 2)
        gradient(remat.checkpoint(f, x), x)
        self.assertEqual((f.runs, f.ends), (2, 1))
        f = CountedFunction(f.function)
        gradient(remat.checkpoint(f, x, early_stop=False), x)
        self.assertEqual((f.runs, f.ends), (2, 2))

    def test_contexts_are_left(self) -> None:
        x = leaf(128, 128)
        events = []

        @contextlib.contextmanager
        def context() -> object:  # type: ignore[misc]
            events.append("in")
            try:
                yield
            finally:
                events.append("out")

        def f(t: torch.Tensor) -> torch.Tensor:
            with context():
                return t.sin().exp().cos() + 1

        gradient(remat.checkpoint(f, x), x)
        self.assertEqual(events, ["in", "out"] * 2)

    def test_a_function_may_catch_everything(self) -> None:
        x = leaf(128, 128)

        def f(t: torch.Tensor) -> torch.Tensor:
            try:
                return t.sin().exp().cos()
            except BaseException:
                return t.tanh().sigmoid()

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(x.sin().exp().cos(), x))

    def test_a_function_may_turn_it_into_another_exception(self) -> None:
        x = leaf(128, 128)

        def f(t: torch.Tensor) -> torch.Tensor:
            try:
                return t.sin().exp().cos()
            except Exception as error:
                raise ValueError("mine") from error

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(x.sin().exp().cos(), x))

    def test_custom_functions_are_stopped(self) -> None:
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):  # type: ignore[no-untyped-def]
                ctx.save_for_backward(t)
                return t * t

            @staticmethod
            def backward(ctx, g):  # type: ignore[no-untyped-def]
                (t,) = ctx.saved_tensors
                return g * 2 * t

        x = leaf(128, 128)
        f = lambda t: Square.apply(Square.apply(t.sin())) + 1  # noqa: E731
        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

    def test_a_generator_and_a_comprehension_are_ended(self) -> None:
        x = leaf(128, 128)

        def parts(t: torch.Tensor) -> object:
            for _ in range(3):
                t = t.sin().exp()
                yield t

        f = lambda t: sum(each for each in parts(t)) + 1  # type: ignore[attr-defined]  # noqa: E731
        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))


class Waiting(Case):
    """A recompute that forward itself waits for runs nothing that forward has not run yet."""

    def check(self, before: Callable[[torch.Tensor], Any]) -> None:
        def run(call: Callable[..., Any]) -> tuple[list[float], int, list[float]]:
            runs: list[int] = []

            def function(t: torch.Tensor) -> torch.Tensor:
                before(w)
                runs.append(1)
                return t.mul_(3)

            w, x = leaf(2), leaf(2, seed=1)
            argument = x * 1
            (gradient,) = torch.autograd.grad(call(function, argument).sum(), x)
            return argument.tolist(), len(runs), gradient.tolist()

        expected = run(lambda function, x: function(x))
        self.assertEqual(run(remat.checkpoint), expected)
        with remat.installed():
            self.assertEqual(run(lambda function, x: upstream.checkpoint(function, x, use_reentrant=False)), expected)

    def test_saved_tensors_that_a_function_reads(self) -> None:
        self.check(lambda w: w.exp().grad_fn._saved_result.clone())  # type: ignore[union-attr]
        self.check(lambda w: w.sin().grad_fn._saved_self.clone())  # type: ignore[union-attr]

    def test_a_backward_with_a_region_in_a_hook(self) -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                own = gradient.detach().requires_grad_()
                return gradient * torch.autograd.grad(remat.checkpoint(lambda t: t.sin().exp(), own).sum(), own)[0]

        def before(w: torch.Tensor) -> None:
            y = w * 2
            y.register_hook(hook)
            torch.autograd.grad(y, y, torch.ones_like(y), retain_graph=True)

        self.check(before)


class Errors(Case):
    def test_exceptions_arrive_as_they_are(self) -> None:
        class Mine(Exception):
            pass

        x = leaf()
        for kind in (Mine, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit):
            raised: list[BaseException] = []

            def failing(t: torch.Tensor) -> torch.Tensor:
                y = t.sin().exp()
                if remat.is_recomputing():
                    raised.append(kind("in the recompute"))
                    raise raised[0]
                return y.cos()

            y = remat.checkpoint(failing, x)
            names = []
            try:
                gradient(y, x, retain_graph=True)
            except kind as error:
                self.assertIs(error, raised[0])
                names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            self.assertIn("failing", names)
            raised.clear()  # it knows this frame, which knows `y`, whose region knows the function, and so it

            def failing_at_once(t: torch.Tensor) -> torch.Tensor:
                raise kind("in forward")

            with self.assertRaises(kind):
                remat.checkpoint(failing_at_once, x)

    def test_the_same_backward_can_be_tried_again(self) -> None:
        x = leaf()
        attempts = []

        def f(t: torch.Tensor) -> torch.Tensor:
            attempts.append(1)
            y = t.sin().exp()
            if len(attempts) == 2:
                raise MemoryError("once")
            return y.cos()

        y = remat.checkpoint(f, x)
        with self.assertRaises(MemoryError):
            gradient(y, x, retain_graph=True)
        self.check_equal(gradient(y, x), gradient(x.sin().exp().cos(), x))

    def test_errors_know_what_is_wrong(self) -> None:
        x = leaf()

        def f(t: torch.Tensor) -> torch.Tensor:
            y = t.sin()
            return y if remat.is_recomputing() else y.exp().cos()

        with self.assertRaises(upstream.CheckpointError) as caught:
            gradient(remat.checkpoint(f, x, name="block 3"), x)
        error = caught.exception
        self.assertIsInstance(error, remat.CheckpointError)
        self.assertIs(error.kind, remat.ErrorKind.FEWER_TENSORS)
        self.assertEqual((error.region, error.forward_count, error.recompute_count), ("block 3", 3, 1))
        first, second = str(error).split("\n")[:2]
        self.assertTrue(first.startswith("torch.utils.checkpoint: A different number of tensors was saved"), first)
        self.assertEqual(second, "Number of tensors saved during forward: 3")
        self.assertNotIn("::", str(error))

        def g(t: torch.Tensor) -> torch.Tensor:
            return (t[:2] if remat.is_recomputing() else t).sin().exp()

        with self.assertRaises(remat.CheckpointError) as caught_too:
            gradient(remat.checkpoint(g, x), x)
        self.assertIs(caught_too.exception.kind, remat.ErrorKind.METADATA_MISMATCH)
        self.assertEqual(caught_too.exception.mismatches[0].position, 0)
        self.assertEqual(caught_too.exception.mismatches[0].forward_tensor, "")

    def test_a_debug_report_names_the_operator(self) -> None:
        x = leaf()
        f = lambda t: (t.sin() if remat.is_recomputing() else t.cos().exp()).tanh()  # noqa: E731
        with self.assertRaisesRegex(remat.CheckpointError, "aten::cos"):
            gradient(remat.checkpoint(f, x, debug=True), x)

    def test_a_recursion_error_is_one(self) -> None:
        x = leaf()

        def endless(t: torch.Tensor) -> torch.Tensor:
            return endless(t)

        f = lambda t: endless(t) if remat.is_recomputing() else t.sin().exp()  # noqa: E731
        with self.assertRaises(RecursionError):
            gradient(remat.checkpoint(f, x), x)


class BackwardInside(Case):
    def test_gradients_accumulate_once(self) -> None:
        w = leaf(seed=2)

        def f(t: torch.Tensor) -> torch.Tensor:
            own = t.detach().requires_grad_()
            (own * w).sin().sum().backward()
            return (t * own.grad).sin()

        for call in (torch.autograd.backward, torch.Tensor.backward):
            x = leaf(seed=1)
            plain = f(x)
            call(plain.sum())
            expected = (x.grad.clone(), w.grad.clone())
            x.grad = w.grad = None
            for early_stop in (True, False):
                call(remat.checkpoint(f, x, early_stop=early_stop).sum())
                self.check_equal((x.grad, w.grad), expected)
                x.grad = w.grad = None

    def test_gradients_of_the_region_itself(self) -> None:
        x = leaf()

        def f(t: torch.Tensor) -> torch.Tensor:
            y = t.sin().exp()
            (slope,) = torch.autograd.grad(y.sum(), t, create_graph=True)
            return y * slope

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

    def test_edges_of_the_graph_are_roots_and_targets(self) -> None:
        x = leaf()

        def f(t: torch.Tensor) -> torch.Tensor:
            own = t.detach().requires_grad_()
            y = own.sin().exp()
            edge = torch.autograd.graph.get_gradient_edge(y)
            target = torch.autograd.graph.get_gradient_edge(own)
            (slope,) = torch.autograd.grad([edge], [target], [torch.ones_like(y)])
            return (t * slope).cos()

        self.check_equal(gradient(remat.checkpoint(f, x), x), gradient(f(x), x))

    def test_a_backward_beyond_the_region_is_refused(self) -> None:
        x = leaf()
        above = x.exp()

        def f(t: torch.Tensor) -> torch.Tensor:
            y = t.sin()
            (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return y.cos() * slope

        with self.assertRaises(remat.CheckpointError) as caught:
            gradient(remat.checkpoint(f, above), x)
        self.assertIs(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)

    def test_backward_from_inside_backward(self) -> None:
        x = leaf()

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):  # type: ignore[no-untyped-def]
                ctx.save_for_backward(t)
                return t.clone()

            @staticmethod
            def backward(ctx, g):  # type: ignore[no-untyped-def]
                (t,) = ctx.saved_tensors
                with torch.enable_grad():
                    own = t.detach().requires_grad_()
                    return g * gradient(remat.checkpoint(operators, own), own)[0]

        f = lambda t: Inner.apply(t.sin()).exp()  # noqa: E731
        found = gradient(remat.checkpoint(f, x), x)
        expected = gradient(f(x), x)
        self.check_equal(found, expected)


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
        selective = functools.partial(upstream.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        yield lambda: gradient(remat.checkpoint(operators, remat.checkpoint(operators, x)), x)
        yield lambda: gradient(remat.checkpoint(lambda t: (t.sin().exp().cos() + 1) * 2, x), x)  # stopped
        yield lambda: gradient(remat.checkpoint(one, x, [object()], scale=2.0, name="kept", early_stop=False), x)
        yield lambda: remat.checkpoint(one, x, {"any": object()}).detach()  # no backward
        yield lambda: failed(failing, LookupError)
        yield lambda: failed(other, remat.CheckpointError)
        yield lambda: gradient(remat.checkpoint(inner, x, policy=remat.save_matmuls()), x)
        yield lambda: gradient(remat.checkpoint(one, x, policy=keeps), x)
        yield lambda: gradient(remat.checkpoint(one, x, policy=remat.Policy(keeps, ask_again=True)), x)

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

    @unittest.skipIf(SLOWNESS > 1, "looks at every object of the process, for which a sanitizer takes many minutes")
    def test_every_reference_is_given_back(self) -> None:
        def total() -> int:
            """The sum of all reference counts: of what the collector knows, and of what that refers to."""
            gc.collect()
            known = {id(each): each for each in gc.get_objects()}
            for each in [child for each in known.values() for child in gc.get_referents(each)]:
                known[id(each)] = each
            references = sum(map(sys.getrefcount, known.values()))
            return references - 2 * len(known)  # without those of this function and of the call

        gc.unfreeze()  # it counts references to what was imported, too
        self.addCleanup(gc.freeze)
        for number, step in enumerate(sampled(list(self.steps()), 3)):
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


class Counting(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Policies(Case):
    def test_kept_results_are_not_computed_again(self) -> None:
        x = leaf()
        f = lambda t: (t @ t).sin().exp() @ t  # noqa: E731
        plain = gradient(f(x), x)
        for policy in (
            remat.save_matmuls(),
            remat.save_ops([torch.ops.aten.mm.default]),
            remat.save_ops([torch.ops.aten.mm, "aten::bmm"]) | remat.save_ops(["aten::exp"]),
            lambda context: context.op_name == "aten::mm.default",
            remat.Policy(lambda context: remat.CheckpointPolicy.MUST_SAVE if "mm" in context.op_name else False),
        ):
            y = remat.checkpoint(f, x, policy=policy)
            with Counting() as counting:
                self.check_equal(gradient(y, x, retain_graph=True), plain)
            # Four products are backward's own.
            self.assertEqual(counting.products, 4)
            self.check_equal(gradient(y, x), plain)

    def test_an_exception_of_a_policy_arrives(self) -> None:
        x = leaf()

        def policy(context: remat.PolicyContext) -> bool:
            raise LookupError("no answer")

        with self.assertRaisesRegex(LookupError, "no answer"):
            remat.checkpoint(operators, x, policy=policy)

    def test_a_policy_that_returns_something_else_is_told_so(self) -> None:
        def forgets(context: remat.PolicyContext) -> Any:
            if context.op_name == "aten::mm.default":
                return True

        for answer in (forgets, lambda context: "no", lambda context: 1, lambda context: [True]):
            for policy in (answer, remat.Policy(answer), remat.save_matmuls() | remat.Policy(answer)):
                with self.assertRaises(ValueError) as raised:
                    remat.checkpoint(lambda t: (t @ t).sin().exp(), leaf(), policy=policy)
                text = str(raised.exception)
                self.assertIn("when it was asked about aten::", text)
                self.assertIn("Hint: return a CheckpointPolicy, such as CheckpointPolicy.MUST_SAVE, or a bool", text)
                self.assertEqual("returned None" in text and "without `return`" in text, answer is forgets)
        for answer in (lambda context: remat.CheckpointPolicy.MUST_SAVE, lambda context: False):
            remat.checkpoint(operators, leaf(), policy=answer).sum().backward()

    def test_a_context_is_over_after_the_call(self) -> None:
        kept = []
        remat.checkpoint(operators, leaf(), policy=lambda context: bool(kept.append(context)))
        with self.assertRaisesRegex(ValueError, "during the call"):
            kept[0].op_name

    def test_operators_written_in_python(self) -> None:
        counts = [0]
        with torch.library._scoped_library("remat_test", "FRAGMENT"):

            @torch.library.custom_op("remat_test::sine", mutates_args=())
            def sine(x: torch.Tensor) -> torch.Tensor:
                counts[0] += 1
                return x.sin()

            sine.register_autograd(
                lambda ctx, g: g * ctx.saved_tensors[0].cos(),
                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            )
            x = leaf()
            f = lambda t: (sine(t) * t.sin().exp()).sin()  # noqa: E731
            plain = gradient(x.sin() * x.sin().exp(), x)
            del plain
            expected = gradient(f(x), x)
            counts[0] = 0
            y = remat.checkpoint(f, x, policy=remat.save_ops(["remat_test::sine"]))
            self.check_equal(gradient(y, x), expected)
            self.assertEqual(counts[0], 1)

    def test_they_are_copied_and_pickled(self) -> None:
        import copy
        import pickle

        x = leaf()
        f = lambda t: (t @ t).sin().exp() @ t  # noqa: E731
        plain = gradient(f(x), x)
        for policy, text in (
            (remat.save_matmuls(), "remat.save_matmuls()"),
            (remat.save_ops([torch.ops.aten.mm], ask_again=True), "remat.save_ops(['aten::mm'], ask_again=True)"),
            (remat.save_matmuls(allow_cache_entry_mutation=True), "remat.save_matmuls(allow_cache_entry_mutation=True)"),
            (remat.save_matmuls() | remat.offload_ops(["aten::sin"], min_offload_bytes=0, prefetch_depth=0),
             "remat.save_matmuls() | remat.offload_ops(['aten::sin'], min_offload_bytes=0, prefetch_depth=0)"),
            (remat.save_names(["a"]) | remat.save_ops(["aten::mm"]),
             "remat.save_names(['a']) | remat.save_ops(['aten::mm'])"),
            (remat.Policy(keeps_products), f"remat.Policy({keeps_products!r})"),
        ):  # fmt: skip
            self.assertIs(copy.deepcopy({"policy": policy})["policy"], policy)
            again = pickle.loads(pickle.dumps(policy))
            self.assertEqual((repr(policy), repr(again)), (text, text))
            y = remat.checkpoint(f, x, policy=again)
            with Counting() as counting:
                self.check_equal(gradient(y, x), plain)
            self.assertEqual(counting.products, 4)  # backward's own: the region's two are kept

    def test_kept_results_may_be_written_to_on_request(self) -> None:
        x, w = leaf(1, 3, 6, 6), leaf(3, 3, 3, 3, seed=1)
        f = lambda t: torch.relu_(remat.checkpoint_name(torch.conv2d(t, w), "products"))  # noqa: E731
        plain = gradient(f(x), x, w)
        # A policy that only prefers computes the product again.
        for one, other in zip(plain, gradient(remat.checkpoint(f, x, policy=remat.save_matmuls()), x, w)):
            self.assertTrue(torch.equal(one, other))
        makers: list[Callable[..., remat.Policy]] = [
            functools.partial(remat.save_ops, ["aten::convolution"]),
            functools.partial(remat.offload_ops, ["aten::convolution"]),
            functools.partial(remat.save_names, ["products"]),
            functools.partial(remat.save_all_but_names, ["others"]),
            functools.partial(remat.offload_names, ["products"]),
            functools.partial(remat.Policy, lambda context: context.op_name.startswith("aten::convolution")),
        ]
        for make in makers:
            with self.subTest(make):
                with self.assertRaises(remat.CheckpointError) as raised:
                    gradient(remat.checkpoint(f, x, policy=make()), x, w)
                self.assertEqual(raised.exception.kind, remat.ErrorKind.SELECTIVE_MUTATION)
                self.assertIn("set allow_cache_entry_mutation=True", str(raised.exception))
                result = remat.checkpoint(f, x, policy=make(allow_cache_entry_mutation=True))
                for one, other in zip(plain, gradient(result, x, w)):
                    self.assertTrue(torch.equal(one, other))

    def test_wrong_numbers_of_offload(self) -> None:
        for name in ("min_offload_bytes", "prefetch_depth", "max_bytes_in_flight", "keep_last"):
            for make in (remat.offload_ops, remat.offload_names):
                with self.assertRaisesRegex(ValueError, name):
                    make(["aten::mm"], **{name: -1})

    def test_numbers_are_compared_by_value(self) -> None:
        x = leaf()
        names: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: (t * 2).sin(), lambda t: (t / 3).sin(), lambda t: (0.5 * t).exp().sin(),
            lambda t: remat.checkpoint_name(t * 2, "doubled").sin(), lambda t: (t * torch.tensor([2.0])).sin()]
        for f in names:
            expected = gradient(f(x), x)
            for policy in (remat.save_ops(["aten::mul", "aten::div"]), remat.save_names(["doubled"])):
                self.check_equal(gradient(remat.checkpoint(f, x, policy=policy, name="numbers"), x), expected)
        factors = iter((2, 3))
        y = remat.checkpoint(lambda t: (t * next(factors)).sin(), x, policy=remat.save_ops(["aten::mul"]))
        with self.assertRaises(remat.CheckpointError) as raised:
            y.sum().backward()
        self.assertEqual(raised.exception.kind, remat.ErrorKind.SELECTIVE_MISMATCH)
        self.assertIn("has other contents", str(raised.exception))

    def test_names_and_pins(self) -> None:
        x = leaf()
        f = lambda t: remat.checkpoint_name(t.sin(), "kept").exp() * remat.pin(t.cos())  # noqa: E731
        plain = lambda t: t.sin().exp() * t.cos()  # noqa: E731
        expected = gradient(plain(x), x)
        for policy in (remat.save_names(["kept"]), remat.save_all_but_names(["other"]), None):
            self.check_equal(gradient(remat.checkpoint(f, x, policy=policy), x), expected)


if __name__ == "__main__":
    unittest.main()
