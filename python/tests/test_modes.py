"""Regions with native policies beside programs that read the stack of dispatch modes. Each program
runs in a process of its own, which must come to its end, with its gradients without a region."""

from __future__ import annotations

import textwrap
import unittest

import torch

import remat
from common import Case, leaf, run_script, whole

# The program defines `f`, and perhaps `inputs`, of which the last is captured, and `values_of` a
# gradient. Natively a second backward works.
FRAME = """
import functools, sys
import torch
import remat
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

torch.manual_seed(0)
values_of = lambda gradient: gradient
w = torch.randn(4, 4, requires_grad=True)
x = torch.randn(4, 4, requires_grad=True)
inputs = [x, w]
num_modes = 0

{program}

OPS = [torch.ops.aten.mm.default, torch.ops.aten.sin.default]
context_fn = functools.partial(create_selective_checkpoint_contexts, OPS)
ways = {{
    "plain": f,
    "own": lambda *args: remat.checkpoint(f, *args, policy=remat.save_ops(OPS)),
    "values": lambda *args: remat.checkpoint(f, *args, policy=remat.save_ops(OPS),
                                             determinism_check="values"),
    "drop-in": lambda *args: checkpoint(f, *args, use_reentrant=False, context_fn=context_fn),
}}
found = {{}}
for way, call in ways.items():
    with remat.installed():
        torch.manual_seed(1)
        frames = remat.counters()["frames_created"]
        result = call(*inputs[:-1]).sum()
        num_frames = remat.counters()["frames_created"] - frames
        assert num_frames == (way != "plain"), num_frames
        for is_last in (False, True):
            gradients = torch.autograd.grad(result, inputs, retain_graph=not is_last)
            found[way, is_last] = [values_of(each) for each in gradients]
    del result, gradients
assert torch._C._len_torch_dispatch_stack() == num_modes
for key, gradients in found.items():
    for one, other in zip(gradients, found["plain", True]):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), key
        assert isinstance(one, torch._subclasses.FakeTensor) or torch.equal(one, other), key
print("the same")
"""

WRAPPER = """
class Sized(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
            dispatch_sizes_strides_policy="sizes", dispatch_device=True, dispatch_layout=True,
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        answers = {
            torch.ops.aten.sym_size.default: lambda inner: inner.shape,
            torch.ops.aten.size.default: lambda inner: inner.shape,
            torch.ops.aten.sym_stride.default: lambda inner: inner.stride(),
            torch.ops.aten.stride.default: lambda inner: inner.stride(),
            torch.ops.aten.dim.default: lambda inner: inner.dim(),
            torch.ops.prim.device.default: lambda inner: inner.device,
            torch.ops.prim.layout.default: lambda inner: inner.layout,
        }
        if func in answers:
            return answers[func](args[0].inner)
        inner = lambda t: t.inner if isinstance(t, Sized) else t
        outer = lambda t: Sized(t) if isinstance(t, torch.Tensor) else t
        return tree_map(outer, func(*tree_map(inner, args), **tree_map(inner, kwargs or {})))
"""


class Modes(Case):
    def check(self, program: str) -> None:
        ended = run_script(FRAME.format(program=textwrap.dedent(program)))
        self.assertEqual(
            (ended.returncode, ended.stdout.splitlines()[-1:]), (0, ["the same"]), ended.stdout
        )

    def test_tensors_whose_class_answers_for_sizes(self) -> None:
        self.check(
            WRAPPER
            + textwrap.dedent("""
                inputs = [Sized(torch.randn(4, 4)).requires_grad_(), w]
                values_of = lambda gradient: (
                    gradient.inner if isinstance(gradient, Sized) else gradient)
                def f(x):
                    y = (x @ w).sin() * x.shape[0]
                    return ((y @ w) * y.stride(0)).sin().view(4, 4)
                """)
        )

    @whole
    def test_tensors_whose_class_answers_for_sizes_made_inside(self) -> None:
        self.check(
            WRAPPER
            + textwrap.dedent("""
                def f(x):
                    scale = Sized(torch.full((4, 4), 2.0))
                    (scale @ scale).sin()
                    return ((x @ w).sin() * scale.shape[0] @ w).sin()
                """)
        )

    def test_values_with_names_whose_class_has_its_elements_elsewhere(self) -> None:
        # No other tensor can be made from the storage, sizes and keys of such a tensor.
        ended = run_script("""
import torch, remat
from torch.testing._internal.two_tensor import TwoTensor

def two():
    torch.manual_seed(0)
    return TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()

def jagged():
    torch.manual_seed(0)
    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).requires_grad_()

parts = {two: lambda t: [t.a, t.b], jagged: lambda t: [t.values()]}
name = remat.checkpoint_name
functions = [
    lambda t: name(t.sin(), "a").exp(),
    lambda t: name(t, "a").exp().sin(),
    lambda t: name(t.sin().unsqueeze(-1), "a").exp(),
    lambda t: name((t * 2).sin(), "a") * t,
    lambda t: remat.pin(t.sin()).exp(),
]
for make, parts_of in parts.items():
    for i, f in enumerate(functions):
        plain = make()
        f(plain).sum().backward()
        for policy in (None, remat.save_names(["a"]), remat.save_all_but_names([]),
                       lambda question: True):
            x = make()
            y = remat.checkpoint(f, x, policy=policy).sum()
            for _ in range(2):
                (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
                for found, wanted in zip(parts_of(gradient), parts_of(plain.grad)):
                    assert torch.equal(found, wanted), (make, i, policy)
print("over")
""")
        self.assertEqual(
            (ended.returncode, ended.stdout.splitlines()[-1:]), (0, ["over"]), ended.stdout
        )

    @whole
    def test_jagged_tensors(self) -> None:
        self.check("""
            values_of = lambda gradient: gradient.values() if gradient.is_nested else gradient
            parts = [torch.randn(3, 4), torch.randn(5, 4)]
            inputs = [torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True), w]
            f = lambda x: ((x @ w).sin() * x.shape[0]).sin() @ w
            """)

    @whole
    def test_nested_tensors(self) -> None:
        self.check("""
            values_of = lambda gradient: torch.cat([each.flatten() for each in gradient.unbind()])
            inputs = [torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)],
                                                 requires_grad=True), w]
            f = lambda x: torch.nested.to_padded_tensor(torch.nn.functional.linear(x, w), 0.0).sin()
            """)

    def test_fake_tensors_around(self) -> None:
        self.check("""
            from torch._subclasses.fake_tensor import FakeTensorMode
            fake = FakeTensorMode()
            inputs = [fake.from_tensor(x), fake.from_tensor(w)]
            def f(x):
                with fake:
                    return ((x @ inputs[1]).sin() @ inputs[1]).sin()
            """)

    @whole
    def test_a_fake_mode_around(self) -> None:
        self.check("""
            from torch._subclasses.fake_tensor import FakeTensorMode
            FakeTensorMode().__enter__()
            w = torch.randn(4, 4, requires_grad=True)
            inputs = [torch.randn(4, 4, requires_grad=True), w]
            f = lambda x: ((x @ w).sin() @ w).sin()
            num_modes = 1
            """)

    def test_a_fake_mode_inside(self) -> None:
        self.check("""
            from torch._subclasses.fake_tensor import FakeTensorMode
            def f(x):
                with FakeTensorMode():
                    rows = (torch.ones(3, 3) + torch.ones(3, 3)).cos().shape[0]
                return ((x @ w).sin() @ w).sin() * rows
            """)

    @whole
    def test_functionalize_inside(self) -> None:
        self.check("""
            f = lambda x: torch.func.functionalize(lambda t: (t @ w).sin_().cos())(x).sin()
            """)

    def test_batched_gradients_of_what_draws(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x.sin(), 0.5).exp()

        def nested(x: torch.Tensor) -> torch.Tensor:
            return remat.checkpoint(function, x).sin()

        x = leaf(8)
        directions = torch.eye(8)
        for region in (function, nested):
            with remat.disable_checkpoint():
                torch.manual_seed(3)
                expected = torch.autograd.grad(region(x), x, directions, is_grads_batched=True)
            torch.manual_seed(3)
            y = remat.checkpoint(region, x)
            for _ in range(2):
                found = torch.autograd.grad(
                    y, x, directions, is_grads_batched=True, retain_graph=True
                )
                self.check_equal(found, expected)
            found = torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True))(
                directions
            )
            self.check_equal(found, expected)

    def test_vmap_and_grad_inside(self) -> None:
        self.check("""
            def f(x):
                y = torch.vmap(lambda row: torch.mv(w, row).sin())(x) @ w
                return torch.func.grad(lambda t: ((t @ w).sin() @ w).sum())(y).sin()
            """)

    def test_other_modes_inside(self) -> None:
        self.check("""
            from torch.utils._python_dispatch import (
                _disable_current_modes, _get_current_dispatch_mode,
                _get_current_dispatch_mode_stack,
            )
            from torch.utils.flop_counter import FlopCounterMode

            class Doubling(TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    result = func(*args, **(kwargs or {}))
                    return result * 2 if func is torch.ops.aten.sin.default else result

            def f(x):
                [str(mode) for mode in _get_current_dispatch_mode_stack()]
                _get_current_dispatch_mode()
                with _disable_current_modes():
                    y = x.cos() @ w
                with FlopCounterMode(display=False) as flops:
                    y = (y @ w).sin()
                assert flops.get_total_flops() == 2 * 4**3, flops.get_total_flops()
                with Doubling():
                    y = (y @ w).sin()
                return (y @ w).sin()
            """)

    def test_a_mode_around_that_is_entered_again_in_recomputes(self) -> None:
        self.check("""
            class Adding(TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                    result = func(*args, **(kwargs or {}))
                    return result + 1 if func is torch.ops.aten.sin.default else result

            def f(x):
                with Adding():
                    return ((x @ w).sin() @ w).sin() @ w
            """)

    @whole
    def test_operators_of_higher_order(self) -> None:
        self.check("""
            from torch._higher_order_ops.associative_scan import associative_scan
            def f(x):
                y = torch.ops.higher_order.wrap(lambda t: (t @ w).sin(), x)
                z = torch.cond(y.sum() > 100, lambda t: t.cos(), lambda t: (t @ t).sin(), (y,))
                with torch.no_grad():
                    count = torch.while_loop(lambda i: i < 3, lambda i: (i + 1,),
                                             (torch.zeros((), dtype=torch.long),))[0]
                return (z @ w).sin() * count
            """)

    @whole
    def test_flex_attention(self) -> None:
        self.check("""
            from torch.nn.attention.flex_attention import flex_attention
            queries = torch.randn(1, 2, 16, 8)
            def f(x):
                with torch.no_grad():
                    attended = flex_attention(
                        queries, queries, queries,
                        score_mod=lambda score, b, h, q, k: score + q - k)
                return ((x @ w).sin() @ w).sin() * attended.sum()
            """)

    @whole
    def test_compiled_functions_inside(self) -> None:
        self.check("""
            compiled = torch.compile(lambda t: (t @ w).sin() @ w, backend="aot_eager")
            f = lambda x: compiled(x).sin() @ w
            """)

    @whole
    def test_traces_inside(self) -> None:
        self.check("""
            from torch.fx.experimental.proxy_tensor import make_fx
            def f(x):
                traced = make_fx(lambda t: (t + t).cos())(torch.ones(4, 4))
                return traced(x @ w).sin() @ w
            """)

    @whole
    def test_custom_operators_of_python(self) -> None:
        self.check("""
            @torch.library.custom_op("remat_test::twice_sin", mutates_args=())
            def twice_sin(t: torch.Tensor) -> torch.Tensor:
                return t.sin() * 2

            twice_sin.register_autograd(
                lambda ctx, g: g * 2 * ctx.saved_tensors[0].cos(),
                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
            )
            f = lambda x: twice_sin(x @ w).sin() @ w
            """)

    @whole
    def test_distributed_tensors(self) -> None:
        self.check("""
            import torch.distributed as dist
            from torch.distributed.tensor import Replicate, Shard
            from torch.distributed.tensor import distribute_tensor, init_device_mesh
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            mesh = init_device_mesh("cpu", (1,))
            values_of = lambda gradient: gradient.to_local()
            w = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()]).requires_grad_()
            inputs = [distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_(), w]
            f = lambda x: ((x @ w).sin() @ w).sin()
            """)


if __name__ == "__main__":
    unittest.main()
