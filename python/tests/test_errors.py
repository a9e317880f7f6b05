"""Errors of regions: their types and texts, and the names of tensors in them."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import traceback
import unittest
import weakref
from typing import Callable

import torch
import torch.nn as nn
import torch.utils.checkpoint as upstream

import remat
from common import Case, gradient, leaf


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
            lambda x: remat.checkpoint(module, x),
            lambda x: remat.checkpoint(lambda t: module(t), x, modules=[module]),
            lambda x: remat.Checkpointed(module)(x),
        ]
        for call in calls:
            y = call(torch.randn(3, 4, requires_grad=True))
            with torch.no_grad():
                module.inner.scale.add_(1)  # type: ignore[operator,union-attr]
            with self.assertRaises(remat.CheckpointError) as raised:
                y.sum().backward()
            self.assertIn("buffer 'inner.scale' of Named", str(raised.exception))

    def change_in(
        self, module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
    ) -> str:
        """Returns the error of backward if a tensor is changed before it."""
        y = call(torch.randn(3, 4, requires_grad=True))
        with torch.no_grad():
            tensor.add_(1)
        with self.assertRaises(remat.CheckpointError) as raised:
            y.sum().backward()
        self.assertEqual(raised.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)
        return str(raised.exception)

    def test_a_changed_parameter_is_called_by_its_path(self) -> None:
        for module in (
            nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sigmoid()), Named()
        ):
            path, owner = (
                ("0.0.weight", "Sequential")
                if isinstance(module, nn.Sequential)
                else ("inner.weight", "Named")
            )
            weight = module.get_parameter(path)
            checkpointed = remat.Checkpointed(copy.deepcopy(module))
            calls: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = [
                (lambda x: remat.checkpoint(module, x), weight),
                (lambda x: remat.checkpoint(module.forward, x), weight),
                (lambda x: remat.checkpoint(functools.partial(module), x), weight),
                (
                    lambda x: remat.checkpoint(
                        lambda t: module(t), x, modules=[nn.Linear(2, 2), module]
                    ),
                    weight,
                ),
                (lambda x: remat.checkpoint(module, x, buffers="ignore"), weight),
                (lambda x: remat.run(remat.Plan(2, [(1, 1)]), [module, torch.sum], x), weight),
                (
                    lambda x: remat.checkpoint(lambda t: remat.checkpoint(module, t).exp(), x),
                    weight,
                ),
                (checkpointed, checkpointed.get_parameter(path)),
            ]
            for call, tensor in calls:
                text = self.change_in(module, call, tensor)
                self.assertRegex(
                    text, f"parameter '{path}' of {owner} .(saved tensor at|captured tensor that)"
                )
                self.assertNotIn("StandIn", text)
        # No module is known for the tensor.
        self.assertIn(
            "name it in `modules`",
            self.change_in(module, lambda x: remat.checkpoint(lambda t: module(t), x), weight),
        )

    def test_a_parameter_of_a_region_around_is_called_by_its_path(self) -> None:
        module = Named()
        module.forward = (  # type: ignore[method-assign]
            lambda x: remat.checkpoint(lambda t: module.inner(t).sin(), x).exp()
        )
        text = self.change_in(module, lambda x: remat.checkpoint(module, x), module.inner.weight)
        self.assertIn("parameter 'inner.weight' of Named", text)

    def test_a_changed_argument_that_is_a_parameter_is_called_by_its_path(self) -> None:
        module = Named()
        y = remat.checkpoint(
            lambda t, w: (t @ w).sin(), torch.randn(3, 4), module.inner.weight, modules=[module]
        )
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
            # it knows this frame, which knows `y`, whose region knows the function, and so it
            raised.clear()

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
        self.assertEqual(
            (error.region, error.forward_count, error.recompute_count), ("block 3", 3, 1)
        )
        first, second = str(error).split("\n")[:2]
        self.assertTrue(
            first.startswith("torch.utils.checkpoint: A different number of tensors was saved"),
            first,
        )
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


if __name__ == "__main__":
    unittest.main()
