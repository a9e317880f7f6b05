"""Policies of remat.checkpoint: kept results, names and pins, and wrong answers."""

from __future__ import annotations

import copy
import functools
import pickle
import unittest
from typing import Any, Callable

import torch

import remat
from common import Case, Counting, gradient, leaf, operators


def keeps_products(context: remat.PolicyContext) -> bool:
    return context.op_name == "aten::mm.default"


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
            remat.Policy(
                lambda context: (
                    remat.CheckpointPolicy.MUST_SAVE if "mm" in context.op_name else False
                )
            ),
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
            for policy in (
                answer, remat.Policy(answer), remat.save_matmuls() | remat.Policy(answer)
            ):
                with self.assertRaises(ValueError) as raised:
                    remat.checkpoint(lambda t: (t @ t).sin().exp(), leaf(), policy=policy)
                text = str(raised.exception)
                self.assertIn("for aten::", text)
                self.assertIn(
                    "Hint: return a CheckpointPolicy, such as CheckpointPolicy.MUST_SAVE, or a "
                    "bool",
                    text,
                )
                self.assertEqual(
                    "returned None" in text and "without `return`" in text, answer is forgets
                )
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
        x = leaf()
        f = lambda t: (t @ t).sin().exp() @ t  # noqa: E731
        plain = gradient(f(x), x)
        for policy, text in (
            (remat.save_matmuls(), "remat.save_matmuls()"),
            (remat.save_ops([torch.ops.aten.mm], ask_again=True),
             "remat.save_ops(['aten::mm'], ask_again=True)"),
            (remat.save_matmuls(allow_cache_entry_mutation=True),
             "remat.save_matmuls(allow_cache_entry_mutation=True)"),
            (remat.save_matmuls() | remat.offload_ops(["aten::sin"], min_offload_bytes=0,
                                                      prefetch_depth=0),
             "remat.save_matmuls() | remat.offload_ops(['aten::sin'], min_offload_bytes=0, "
             "prefetch_depth=0)"),
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
        f = lambda t: torch.relu_(  # noqa: E731
            remat.checkpoint_name(torch.conv2d(t, w), "products")
        )
        plain = gradient(f(x), x, w)
        # A policy that only prefers computes the product again.
        for one, other in zip(
            plain, gradient(remat.checkpoint(f, x, policy=remat.save_matmuls()), x, w)
        ):
            self.assertTrue(torch.equal(one, other))
        makers: list[Callable[..., remat.Policy]] = [
            functools.partial(remat.save_ops, ["aten::convolution"]),
            functools.partial(remat.offload_ops, ["aten::convolution"]),
            functools.partial(remat.save_names, ["products"]),
            functools.partial(remat.save_all_but_names, ["others"]),
            functools.partial(remat.offload_names, ["products"]),
            functools.partial(
                remat.Policy, lambda context: context.op_name.startswith("aten::convolution")
            ),
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
            lambda t: remat.checkpoint_name(t * 2, "doubled").sin(),
            lambda t: (t * torch.tensor([2.0])).sin()
        ]
        for f in names:
            expected = gradient(f(x), x)
            for policy in (
                remat.save_ops(["aten::mul", "aten::div"]), remat.save_names(["doubled"])
            ):
                self.check_equal(
                    gradient(remat.checkpoint(f, x, policy=policy, name="numbers"), x), expected
                )
        factors = iter((2, 3))
        y = remat.checkpoint(
            lambda t: (t * next(factors)).sin(), x, policy=remat.save_ops(["aten::mul"])
        )
        with self.assertRaises(remat.CheckpointError) as raised:
            y.sum().backward()
        self.assertEqual(raised.exception.kind, remat.ErrorKind.SELECTIVE_MISMATCH)
        self.assertIn("has other contents", str(raised.exception))

    def test_names_and_pins(self) -> None:
        x = leaf()
        f = lambda t: (  # noqa: E731
            remat.checkpoint_name(t.sin(), "kept").exp() * remat.pin(t.cos())
        )
        plain = lambda t: t.sin().exp() * t.cos()  # noqa: E731
        expected = gradient(plain(x), x)
        for policy in (remat.save_names(["kept"]), remat.save_all_but_names(["other"]), None):
            self.check_equal(gradient(remat.checkpoint(f, x, policy=policy), x), expected)


if __name__ == "__main__":
    unittest.main()
