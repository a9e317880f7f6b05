"""Selective checkpointing of torch.utils.checkpoint while remat is installed."""

from __future__ import annotations

import functools
import unittest
import warnings
from typing import Any, Callable
from unittest import mock

import torch
import torch.utils.checkpoint as upstream
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import remat
from remat import _selective as selective
from common import CountedFunction, Counting, gradient, leaf, operators, run_script
from drop_in_case import DropIn, region

# Newer releases of upstream, unlike 2.11 and 2.7, show policy functions the result that they are
# asked about, and find in a second backward that there are no results any more.
SHOWS_HOOKS = hasattr(upstream, "_current_user_saved_tensors_hooks")
SHOWS_RESULTS = hasattr(upstream.SelectiveCheckpointContext(is_recompute=False), "op_output")


class Selective(DropIn):
    OPS = [torch.ops.aten.mm.default]

    def setUp(self) -> None:
        super().setUp()
        remat.install()

    def tearDown(self) -> None:
        remat.uninstall()
        super().tearDown()

    def check(self, context_fn: Any, is_native: bool) -> None:
        x = leaf()
        f = CountedFunction(lambda t: (t @ t).sin().exp() @ t)
        y = region(f, x, context_fn=context_fn)
        plain = gradient(f.function(x), x)
        self.check_equal(gradient(y, x, retain_graph=True), plain)
        if is_native:  # upstream's modes can be used once
            self.check_equal(gradient(y, x), plain)
        elif SHOWS_RESULTS:
            with self.assertRaisesRegex(RuntimeError, "Trying to backward an extra time"):
                gradient(y, x)

    def test_lists_run_natively(self) -> None:
        self.check(functools.partial(create_selective_checkpoint_contexts, self.OPS), True)
        self.check(lambda: create_selective_checkpoint_contexts(self.OPS), True)
        self.check(functools.partial(create_selective_checkpoint_contexts, self.OPS, True), True)

    def test_hooks_around_are_warned_of_where_upstream_does(self) -> None:
        """The test follows torch 2.14, and puts in the parts that older releases lack."""
        text = "choose by respect_saved_tensors_hooks=True|False"
        context_fn = functools.partial(create_selective_checkpoint_contexts, self.OPS)

        def warned(context_fn: Any, hooks: bool) -> list[Any]:
            current = mock.Mock(return_value=(id, id) if hooks else None)
            name = "_current_user_saved_tensors_hooks"
            with mock.patch.object(upstream, name, current, create=True):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    region(lambda t: (t @ t).sin(), leaf(), context_fn=context_fn)
            return [(each.category, str(each.message)) for each in caught]

        self.assertEqual(SHOWS_HOOKS, selective._HOOKS_TEXT is not None)
        with mock.patch.object(selective, "_HOOKS_TEXT", text):
            self.assertEqual(warned(context_fn, True), [(FutureWarning, text)])
            self.assertEqual(warned(lambda: context_fn(), True), [(FutureWarning, text)])
            self.assertEqual(warned(selective.PastHooks(context_fn), True), [])
            self.assertEqual(warned(context_fn, False), [])
            self.assertEqual(warned(upstream.noop_context_fn, True), [])

    def test_policy_functions_run_natively(self) -> None:
        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            if context.is_recompute:
                return None
            save = op is torch.ops.aten.mm.default
            return (
                upstream.CheckpointPolicy.MUST_SAVE
                if save
                else upstream.CheckpointPolicy.PREFER_RECOMPUTE
            )

        def with_options(ops: Any, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return op in ops

        class Config:
            def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
                return op is torch.ops.aten.mm.default

        for each in (
            policy, functools.partial(with_options, self.OPS), Config().policy,
            lambda _, op, *args: "mm" in str(op)
        ):
            self.check(functools.partial(create_selective_checkpoint_contexts, each), True)
            self.check(
                lambda: create_selective_checkpoint_contexts(each, allow_cache_entry_mutation=True),
                True,
            )

    def test_policy_functions_run_in_upstream_s_modes_where_the_program_says_so(self) -> None:
        saves = functools.partial(
            create_selective_checkpoint_contexts,
            lambda context, op, *args, **kwargs: op in self.OPS,
        )
        with remat.installed(native_policy_functions=False):
            self.check(saves, False)
        self.check(saves, False)  # until the last uninstall
        remat.uninstall()
        remat.uninstall()
        remat.install()
        remat.install()
        self.check(saves, True)

    def test_policy_functions_are_asked_what_upstream_asks(self) -> None:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(inplace=True),
            torch.nn.Dropout(0.5),
            torch.nn.Flatten(1), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Softmax(-1),
        )  # fmt: skip
        weight = model[5].weight

        def f(x: torch.Tensor) -> torch.Tensor:
            y = model(x).to(torch.float64, memory_format=torch.contiguous_format)
            y = torch.cat([y, torch.zeros_like(y, dtype=torch.float64)], dim=1).chunk(2, dim=1)[0]
            y = y.clone()
            y[0, :2] = 1.0
            return torch.nn.functional.scaled_dot_product_attention(y[None], y[None], y[None]).sum(
                0, keepdim=True
            )

        def text_of(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                own = "weight" if value is weight else "tensor"
                layout = f"{tuple(value.shape)} {value.stride()}"
                return f"{own} {value.dtype} {layout} {value.requires_grad}"
            if isinstance(value, (list, tuple)):
                return str([text_of(each) for each in value])
            return f"{type(value).__name__} {value}"

        asked: list[Any] = []

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            assert isinstance(op, torch._ops.OpOverload)
            asked.append(
                (op, *map(text_of, args), {name: text_of(value) for name, value in kwargs.items()})
            )
            return False

        x = torch.randn(2, 1, 4, 4).requires_grad_()
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        region(f, x, context_fn=contexts)
        natively = asked[:]
        self.assertEqual(self.num_regions(), 1)
        asked.clear()
        remat.uninstall()
        remat.uninstall()
        try:
            region(f, x, context_fn=contexts)
        finally:
            remat.install()
            remat.install()
        self.assertGreater(len(asked), 20)
        self.assertTrue(any("weight" in str(each) for each in asked))
        # An operator that makes nothing and only passes a value on is no question.
        self.assertEqual(
            natively, [each for each in asked if each[0] is not torch.ops.aten.lift_fresh.default]
        )

    def test_answers_of_policy_functions(self) -> None:
        x = leaf()
        f = CountedFunction(lambda t: (t @ t).sin().exp() @ t)
        # Before 2.11 upstream has no answer that moves anything.
        offload = getattr(
            upstream.CheckpointPolicy, "MUST_CPU_OFFLOAD", upstream.CheckpointPolicy.MUST_SAVE
        )
        for answer in (None, "no answer", 0, offload, True, False):
            y = region(
                f,
                x,
                context_fn=lambda: create_selective_checkpoint_contexts(
                    lambda context, op, *args: answer
                ),
            )
            self.check_equal(gradient(y, x), gradient(f.function(x), x))

        class Mine(Exception):
            pass

        def failing(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            raise Mine(op)

        with self.assertRaises(Mine) as caught:
            region(f, x, context_fn=lambda: create_selective_checkpoint_contexts(failing))
        self.assertIs(caught.exception.args[0], torch.ops.aten.mm.default)

    def test_graphs_do_not_keep_policy_functions(self) -> None:
        import weakref

        x = leaf()

        def made() -> Any:
            seen: list[Any] = []  # what a function sees may lead to the graph that holds it
            policy = lambda context, op, *args, **kwargs: (  # noqa: E731
                bool(seen.append(args)) or len(seen) % 2 == 0
            )
            y = region(
                lambda t: (t @ t).sin().exp() @ t, x,
                context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )
            self.check_equal(
                gradient(y, x, retain_graph=True), gradient((x @ x).sin().exp() @ x, x)
            )
            return weakref.ref(policy), weakref.ref(y)

        self.assertEqual([each() for each in made()], [None, None])

    @unittest.skipUnless(SHOWS_RESULTS, "this torch shows policy functions no results")
    def test_policy_functions_that_could_look_at_results_run_as_upstream_s_modes(self) -> None:
        def keeps(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            all = [context]
            return all[0].op_output is not None

        def closes(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return (lambda: context.op_output)() is not None

        def looks(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return op is torch.ops.aten.mm.default and getattr(context, "op_output") is not None

        def hands_on(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return looks(context, op, *args, **kwargs)

        def renames(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            other = context
            return other.is_recompute

        def finds(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            return locals()["context"].is_recompute

        def takes_all(*args: Any, **kwargs: Any) -> bool:
            return args[0].is_recompute

        @functools.wraps(takes_all)
        def wrapped(*args: Any, **kwargs: Any) -> bool:
            return takes_all(*args, **kwargs)

        class Callable:
            def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
                return False

        for policy in (
            keeps, closes, looks, hands_on, renames, finds, takes_all, wrapped, Callable()
        ):
            x = leaf()
            y = region(
                lambda t: (t @ t).sin().exp() @ t, x,
                context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )
            gradient(y, x, retain_graph=True)
            if policy in (looks, hands_on, keeps, closes):
                with self.assertRaisesRegex(RuntimeError, "Trying to backward an extra time"):
                    gradient(y, x)
            self.assertFalse(selective._may_be_asked_before(policy))
        self.assertFalse(selective._may_be_asked_before(functools.partial(hands_on)))
        self.assertFalse(selective._may_be_asked_before(print))

    def test_flex_attention_meets_upstream_s_modes(self) -> None:
        done = run_script(
            "import functools, torch, remat\n"
            "from torch.nn.attention.flex_attention import flex_attention\n"
            "from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts\n"
            "w = torch.ones(16, 16, requires_grad=True)\n"
            "def f(t):\n"
            "    with torch.no_grad():\n"
            "        t = flex_attention(t, t, t)\n"
            "    return (t[0, 0] @ w).sin()\n"
            "policy = lambda context, op, *args, **kwargs: op is torch.ops.aten.mm.default\n"
            "with remat.installed():\n"
            "    y = checkpoint(f, torch.ones(1, 1, 16, 16), use_reentrant=False,\n"
            "        context_fn=functools.partial(create_selective_checkpoint_contexts, policy))\n"
            "    y.sum().backward()\n"
            "print('equal' if torch.allclose(w.grad, (torch.ones(16, 16) * 16).cos() * 16) else "
            "w.grad)\n"
        )
        if "no rule registered for HOP flex_attention" in done.stdout:
            self.skipTest("this torch's modes know no flex_attention")
        self.assertIn("equal", done.stdout)

    @unittest.skipUnless(SHOWS_RESULTS, "this torch shows policy functions no results")
    def test_results_reach_policy_functions_that_look_at_them(self) -> None:
        asked = []

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(context.op_output)
            save = op is torch.ops.aten.mm.default
            return (
                upstream.CheckpointPolicy.MUST_SAVE
                if save
                else upstream.CheckpointPolicy.PREFER_RECOMPUTE
            )

        self.check(functools.partial(create_selective_checkpoint_contexts, policy), False)
        self.assertTrue(all(isinstance(each, torch.Tensor) for each in asked))

    def test_a_list_that_changes_is_read_at_each_call(self) -> None:
        ops = list(self.OPS)
        context_fn = functools.partial(create_selective_checkpoint_contexts, ops)
        self.check(context_fn, True)
        ops.append(torch.ops.aten.sin.default)
        self.check(context_fn, True)

    def test_wrong_lists_are_upstream_s_errors(self) -> None:
        with self.assertRaisesRegex(ValueError, "to be an OpOverload"):
            region(
                operators, leaf(),
                context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm])
            )

    def test_changed_kept_results_are_errors(self) -> None:
        x = leaf()
        f = lambda t: (t @ t).relu_().sin().exp()  # noqa: E731
        context_fn = functools.partial(create_selective_checkpoint_contexts, self.OPS)
        with self.assertRaisesRegex(RuntimeError, "has been mutated"):
            gradient(region(f, x, context_fn=context_fn), x)
        context_fn = functools.partial(
            create_selective_checkpoint_contexts, self.OPS, allow_cache_entry_mutation=True
        )
        self.check_equal(gradient(region(f, x, context_fn=context_fn), x), gradient(f(x), x))


class Ignored(DropIn):
    def setUp(self) -> None:
        super().setUp()
        self.ignored = set(upstream.SAC_IGNORED_OPS)

    def tearDown(self) -> None:
        upstream.SAC_IGNORED_OPS.clear()
        upstream.SAC_IGNORED_OPS.update(self.ignored)
        super().tearDown()

    def products(self, context_fn: Any) -> int:
        """Returns the number of products that backward makes."""
        x = leaf()
        f = lambda t: (t @ t).sin().exp() @ t  # noqa: E731
        y = region(f, x, context_fn=context_fn)
        with Counting() as counting:
            found = gradient(y, x)
        self.check_equal(found, gradient(f(x), x))
        return counting.products

    def test_operators_that_a_program_adds_run_again(self) -> None:
        mm = torch.ops.aten.mm.default
        asked: list[Any] = []

        def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
            asked.append(op)
            return op is mm

        contexts = [
            functools.partial(create_selective_checkpoint_contexts, [mm]),
            functools.partial(create_selective_checkpoint_contexts, keep),
        ]
        kept = [self.products(each) for each in contexts]
        upstream.SAC_IGNORED_OPS.add(mm)
        asked.clear()
        before = remat.served().policies
        again = [self.products(each) for each in contexts]
        self.assertTrue(all(found > was for found, was in zip(again, kept)), (again, kept))
        self.assertNotIn(mm, asked)
        self.assertEqual(remat.served().policies, before + 2)

    def test_where_one_is_taken_away_upstreams_modes_run(self) -> None:
        upstream.SAC_IGNORED_OPS.discard(torch.ops.prim.device.default)
        before = remat.served().modes.get("SAC_IGNORED_OPS lacks an operator", 0)
        mm = [torch.ops.aten.mm.default]
        self.products(functools.partial(create_selective_checkpoint_contexts, mm))
        self.assertEqual(remat.served().modes["SAC_IGNORED_OPS lacks an operator"], before + 1)


class CountsOfCalls(DropIn):
    def test_calls_are_counted_by_what_became_of_them(self) -> None:
        x = leaf()
        mm = [torch.ops.aten.mm.default]

        class Own(upstream._CachingTorchDispatchMode):
            pass

        def own_modes() -> Any:
            forward, recompute = create_selective_checkpoint_contexts(mm)
            own = Own(forward.policy_fn, forward.storage)
            own.__dict__.update(forward.__dict__)
            return own, recompute

        before = remat.served()
        region(operators, x)
        region(operators, x, preserve_rng_state=False)
        region(operators, x, context_fn=functools.partial(create_selective_checkpoint_contexts, mm))
        f = lambda t: (t @ t).sin() @ t  # noqa: E731
        y = region(f, x, context_fn=own_modes)
        self.check_equal(gradient(y, x), gradient(f(x), x))
        upstream.checkpoint(operators, x, use_reentrant=True)
        with torch.autograd.forward_ad.dual_level():
            region(torch.sin, x)
        now = remat.served()
        self.assertEqual(now.regions - before.regions, 4)
        self.assertEqual(now.policies - before.policies, 1)

        def more(reasons: dict[str, int], old: dict[str, int]) -> dict[str, int]:
            added = {key: count - old.get(key, 0) for key, count in reasons.items()}
            return {key: count for key, count in added.items() if count}

        own = {"its modes are of a class of the program's": 1}
        self.assertEqual(more(now.modes, before.modes), own)
        passed = more(now.passed_on, before.passed_on)
        self.assertEqual(passed.pop("re-entrant", 1), 1)
        self.assertEqual(passed, {"functorch or forward-mode AD": 1})
        self.assertRegex(str(now), r"^remat: \d+ calls of .* served, \d+ \(.*\) passed on; ")

    def test_one_line_at_exit_on_request(self) -> None:
        text = """
import remat, torch
from torch.utils.checkpoint import checkpoint
remat.install(report=True)
remat.install(report=True)
checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False)
"""
        done = run_script(text)
        self.assertEqual(done.returncode, 0, done.stdout)
        lines = [each for each in done.stdout.splitlines() if each.startswith("remat:")]
        self.assertEqual(lines, ["remat: 1 calls of torch.utils.checkpoint served, 0 passed on"])


if __name__ == "__main__":
    unittest.main()
