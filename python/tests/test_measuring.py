"""`measure` and `fit` leave a program as it was: attributes, buffers, gradients, hooks,
generators."""

from __future__ import annotations

import collections
import contextlib
import functools
import unittest
import warnings
from typing import Any, Callable

import torch
import torch.nn as nn

import remat
from common import Case, Table

torch.set_num_threads(1)  # small tensors, maybe on a busy machine


class Everything(nn.Module):
    """Changes all that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("sum", torch.zeros(4))
        self.register_buffer("same", self.sum)
        self.register_buffer("part", self.sum[:2])
        self.register_buffer("none", None)
        self.count, self.flag, self.text, self.nothing = 0, False, "", None
        self.pair: tuple[Any, ...] = (1, torch.zeros(2))
        self.list, self.names, self.set = [torch.zeros(2)], {"a": torch.zeros(2)}, {1}
        self.ordered = collections.OrderedDict(a=[1])
        self.latest: collections.deque[Any] = collections.deque([torch.zeros(2)])
        self.plain = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(3)
        self.child = nn.Dropout(0.5)
        self.hidden = [Table()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sum += 1
        self.part.mul_(2)
        self.count, self.flag, self.text, self.nothing = self.count + 1, True, self.text + "x", x
        self.pair[1].add_(1)
        self.pair = (2, self.pair[1])
        self.list[0].add_(1)
        self.list.append(x)
        self.names["a"].add_(1)
        self.names["b"] = x
        self.set.add(self.count)
        self.ordered["a"].append(2)
        self.ordered["b"] = []
        self.latest[0].add_(1)
        self.latest.append(x)
        self.plain.add_(1)
        self.none = x.detach()
        self.extra = nn.Linear(2, 2)
        self.child.eval()
        self.child.register_forward_hook(lambda *_: None)
        assert self.same is self.sum and self.part.data_ptr() == self.sum.data_ptr()
        return self.hidden[0](x * self.weight) * torch.rand(len(x), generator=self.generator)


def state_of(value: Any) -> Any:
    """Returns the comparable state of a module, and of all that is in it."""
    if isinstance(value, nn.Module):
        return {name: state_of(each) for name, each in vars(value).items()}
    if isinstance(value, torch.Tensor):
        return id(value), value._version, value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return id(value), [(key, state_of(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return id(value), [state_of(each) for each in value]
    return value if not isinstance(value, set) else sorted(value)


def loss(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


class Measuring(Case):
    def unchanged(self, module: Any, stages: list[Callable[..., Any]], x: torch.Tensor) -> None:
        before = state_of(module)
        remat.measure(stages, x, repeats=1)
        self.assertEqual(state_of(module), before)
        remat.fit(stages, x, 10**9, repeats=1)
        self.assertEqual(state_of(module), before)

    def test_a_module_that_fills_a_table_once(self) -> None:
        x = torch.ones(3)
        wanted = Table()(x)
        table = Table()
        remat.measure([table, loss], torch.ones(3, requires_grad=True))
        self.check_equal(table(x), wanted)
        net = nn.Sequential(Table(), nn.Tanh(), nn.Linear(3, 1))
        remat.fit(net, torch.ones(3, requires_grad=True), 10**6)
        remat.remove(net)
        self.check_equal(net[0](x), wanted)

    def test_all_that_modules_hold_is_as_it_was(self) -> None:
        x = torch.ones(4, requires_grad=True)
        module = Everything()
        everything = module
        self.unchanged(module, [module, loss], x)
        self.unchanged(module, [module.forward, loss], x)
        self.unchanged(module, [lambda x: module(x), loss], x)
        self.unchanged(module, [lambda x, module=module: module(x), loss], x)  # type: ignore[misc]
        self.unchanged(module, [functools.partial(lambda f, x: f(x), module), loss], x)
        self.unchanged(module, [lambda x: [each(x) for each in [everything]][0], loss], x)
        blocks = [module]
        self.unchanged(module, [lambda x: blocks[0](x), loss], x)
        inner = lambda x: module(x)  # noqa: E731
        self.unchanged(module, [lambda x: inner(x), loss], x)
        self.unchanged(GLOBAL[0], [lambda x: GLOBAL[0](x), loss], x)

    def test_an_object_that_is_called_is_as_it_was(self) -> None:
        class Counter:
            def __init__(self) -> None:
                self.calls, self.module = 0, Table()

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                y: torch.Tensor = self.module(x)
                return y

        counter = Counter()
        remat.measure([counter, loss], torch.ones(4, requires_grad=True))
        self.assertEqual((counter.calls, counter.module.filled), (0, 0))
        self.assertEqual(counter.module.table.tolist(), [0.0] * 8)

    def test_also_where_a_stage_raises(self) -> None:
        x = torch.ones(4, requires_grad=True)
        for run in (1, 2, 5, 9):
            module, runs = Everything(), [0]
            before = state_of(module)

            def fails(x: torch.Tensor) -> torch.Tensor:
                runs[0] += 1
                if runs[0] >= run:
                    raise KeyError("gave up")
                return loss(x)

            module.weight.grad = torch.full((4,), 3.0)
            for call in (
                lambda: remat.measure([module, fails], x),
                lambda: remat.fit([module, fails], x, 10**9),
            ):
                runs[0] = 0
                with self.assertRaisesRegex(KeyError, "gave up"):
                    call()
                self.assertEqual(state_of(module), before)
                self.assertEqual(module.weight.grad.tolist(), [3.0] * 4)
            module.weight.grad = None
        table = remat.Checkpointed(nn.Sequential(Table(), nn.Tanh()))
        with self.assertRaises(remat.InfeasibleBudget):
            remat.fit(table, torch.ones(3, requires_grad=True), 1)
        self.assertTrue(remat.is_checkpointed(table))

    def test_buffers_of_unusual_layouts(self) -> None:
        class Scaled(nn.Module):
            def __init__(
                self, buffer: torch.Tensor, reads: Callable[[torch.Tensor], torch.Tensor]
            ) -> None:
                super().__init__()
                self.register_buffer("buffer", buffer)
                self.reads = reads

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.sin() * self.reads(self.buffer)

        eye = torch.eye(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layouts in beta state
            kinds: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
                "CSR": (eye.to_sparse_csr(), lambda b: b.values().sum()),
                "COO": (eye.to_sparse().coalesce(), lambda b: b.values().sum()),
                "meta": (torch.ones(3, device="meta"), lambda b: torch.ones(b.shape)),
                "nested": (
                    torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
                    lambda b: b.unbind()[0],
                ),
                "expanded": (torch.ones(1, 1).expand(3, 3), lambda b: b * 1),
                "transposed": (torch.arange(9.0).view(3, 3).t(), lambda b: b.add_(1).clone()),
                "complex": (torch.ones(3, dtype=torch.complex64).conj(), lambda b: b.real.clone()),
                "quantized": (
                    torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
                    lambda b: b.dequantize(),
                ),
            }
            if torch.backends.mkldnn.is_available():
                kinds["mkldnn"] = (eye.to_mkldnn(), lambda b: b.to_dense())
            x = torch.ones(3, 3, requires_grad=True)
            for name, (buffer, reads) in kinds.items():
                with self.subTest(kind=name):
                    module = Scaled(buffer, reads)
                    try:
                        remat.checkpoint(Scaled(buffer, reads), x).sum().backward()
                        is_no_region = contextlib.nullcontext()
                    except RuntimeError as error:
                        is_no_region = self.assertRaises(type(error))  # type: ignore[assignment]
                    version = buffer._version
                    with is_no_region:
                        remat.measure([module, loss], x, repeats=1)
                    self.assertIs(module.buffer, buffer)
                    self.assertEqual(buffer._version, version)

    def test_a_stage_that_resizes_a_buffer(self) -> None:
        class Resizes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.ones(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.scale.shape != x.shape:
                    self.scale.resize_(x.shape).fill_(2)
                return x.sin() * self.scale.clone()

        module = Resizes()
        remat.measure([module, loss], torch.ones(5, requires_grad=True))
        self.assertEqual(module.scale.tolist(), [1.0])
        from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fake = FakeQuantize(
                MovingAveragePerChannelMinMaxObserver, dtype=torch.qint8,
                qscheme=torch.per_channel_symmetric, quant_min=-128, quant_max=127,
            )  # fmt: skip
            before = {name: each.clone() for name, each in fake.named_buffers()}
            remat.measure(
                [nn.Linear(4, 4), fake, loss], torch.ones(3, 4, requires_grad=True), repeats=1
            )
        for name, each in fake.named_buffers():
            self.check_equal(each, before[name], name)

    def test_no_hook_of_a_parameter_runs(self) -> None:
        linear = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
        before = {name: each.clone() for name, each in linear.state_dict().items()}
        calls = []

        def step(parameter: torch.Tensor) -> None:
            calls.append("step")
            optimizer.step()
            optimizer.zero_grad()

        for each in linear.parameters():
            each.register_post_accumulate_grad_hook(step)
            each.register_hook(lambda gradient: calls.append("hook"))
        x = torch.ones(2, 4)
        remat.measure([linear, loss], x)
        remat.fit(nn.Sequential(linear, nn.Tanh()), x, 10**9)
        self.assertEqual(calls, [])
        for name, each in linear.state_dict().items():
            self.check_equal(each, before[name])
        self.assertIsNone(linear.weight.grad)
        linear(x).sum().backward()
        self.assertEqual(sorted(calls), ["hook"] * 2 + ["step"] * 2)
        self.assertFalse(torch.equal(linear.weight, before["weight"]))
        self.assertIsNone(linear.weight.grad)

    def test_in_a_region_it_measures_as_if_it_were_not_in_one(self) -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

        def f(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = net(x.sin())
            return y

        def measuring(x: torch.Tensor) -> torch.Tensor:
            remat.measure([*net, loss], x, repeats=1)
            return f(x)

        x = torch.randn(6, 4, requires_grad=True)
        found = []
        for call in (f, lambda x: remat.checkpoint(measuring, x, modules=[net])):
            net[1].reset_running_stats()
            torch.manual_seed(3)
            gradients = torch.autograd.grad(call(x).sum(), [x, *net.parameters()])
            found.append([*gradients, *(each.clone() for each in net.buffers())])
        self.check_equal(found[1], found[0])

    def test_which_regions_were_reached_is_as_it_was(self) -> None:
        block = remat.Checkpointed(nn.Linear(4, 4))
        remat.measure([block, loss], torch.ones(2, 4))
        result = nn.functional.linear(torch.ones(2, 4), block.weight)
        self.assertEqual([each.type for each in remat.unused_regions(block, result)], ["Linear"])

    def test_script_and_lazy_modules(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script = torch.jit.script(nn.BatchNorm1d(4))
        before = [each.clone() for each in script.buffers()]
        remat.measure([script, loss], torch.randn(3, 4))
        self.check_equal([*script.buffers()], before)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lazy = nn.Sequential(nn.LazyLinear(3), nn.Tanh())
        remat.measure([*lazy, loss], torch.randn(3, 4))
        self.assertIs(type(lazy[0]), nn.Linear)
        self.assertEqual(lazy(torch.randn(3, 4)).shape, (3, 3))


GLOBAL: list[nn.Module] = [Everything()]

if __name__ == "__main__":
    unittest.main()
