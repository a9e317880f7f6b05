"""State that a module's forward writes to: buffers, names of buffers, and plain members."""

from __future__ import annotations

import copy
import time
import unittest
from typing import Any, Callable

import torch
import torch.nn as nn

import remat
from common import Case, Table

torch.set_num_threads(1)  # small tensors, maybe on a busy machine


class TableOfObject(Table):
    """Remembers it where no region looks."""

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[str, int] = {"filled": 0}

    @property
    def filled(self) -> int:
        return self.done["filled"] if "done" in self.__dict__ else 0

    @filled.setter
    def filled(self, value: int) -> None:
        if "done" in self.__dict__:
            self.done["filled"] = value


class Rope(nn.Module):
    """A module as rotary embeddings with a dynamic length: the buffer's name is given to another
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(0.1, 1, 4), persistent=False)
        self.original_inv_freq = self.inv_freq
        self.longest = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.longest:
            self.register_buffer("inv_freq", self.original_inv_freq / len(x), persistent=False)
            self.longest = len(x)
        elif len(x) < 4 < self.longest:
            self.register_buffer("inv_freq", self.original_inv_freq, persistent=False)
            self.longest = 4
        return (x[:, None] * self.inv_freq).sin().sum(1) * x


class Lazy(nn.Module):
    """Makes its buffers in its first forward, and takes one away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("old", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", x.detach().abs() + self.old)
            del self.old
        return (x * self.scale).sin()


class Codebook(nn.Module):
    """A module as vector quantization: an estimate by `.data`, initialized by its first batch, and
    a call counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.zeros(5, 4))
        self.register_buffer("initted", torch.tensor(False))
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.last_time = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last_time = time.perf_counter()
        x = self.linear(x)
        if not self.initted:
            self.embed.data.copy_(x.detach()[:5])
            self.initted.fill_(True)
        nearest = torch.cdist(x.detach(), self.embed).argmin(1)
        quantized = self.embed[nearest]
        one_hot = torch.nn.functional.one_hot(nearest, 5).to(x.dtype)
        self.embed.data.lerp_(one_hot.t() @ x.detach(), 0.1)
        return x * quantized * self.calls


class Bias(nn.Module):
    """A module as biases of positions: a buffer that is None until a forward makes it, and later a
    longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.linspace(0.1, 1, 9), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None or len(self.bias) < len(x):
            self.register_buffer("bias", self.slopes[: len(x)] * 2, persistent=False)
        return (x * self.bias[: len(x)]).sin()


class Running(nn.Module):
    """Keeps state in tensors that are no buffers: a mean, and the longest input."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.longest = torch.zeros(()), torch.tensor(0)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if len(x) > self.longest else 1.0
        self.longest = torch.maximum(self.longest, torch.tensor(len(x)))
        self.mean = self.mean * 0.9 + x.detach().mean()
        self.last = x.detach() * scale
        return (x * self.mean * scale).sin() * self.last


class Assigned(nn.Module):
    """A module whose forward computes weights, and leaves them in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = self.base * x.detach().sum()
        return (x * self.weight).sin()


class Neuron(nn.Module):
    """A module as a spiking neuron: a number that its first step makes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.v: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.v = self.v + x / 2
        return self.v.sin()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 1.0).exp()


def state_of(module: nn.Module) -> dict[str, Any]:
    """Returns buffers and members, without times."""
    found: dict[str, Any] = {}
    for path, each in module.named_modules():
        for name, value in {**each.__dict__, **each._buffers}.items():
            if name != "last_time" and isinstance(
                value, (int, float, str, bool, tuple, torch.Tensor, type(None))
            ):
                found[f"{path}.{name}"] = (
                    value.detach().clone() if isinstance(value, torch.Tensor) else value
                )
    return found


Region = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def applied(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "_as_list"):
        object.__setattr__(module, "_as_list", nn.ModuleList([module]))
        remat.apply(module._as_list, remat.ModuleChoice(names=["0"]))
    return module(x)  # type: ignore[no-any-return]


REGIONS: dict[str, Region] = {
    "function": lambda m, x: remat.checkpoint(m, x),
    "method": lambda m, x: remat.checkpoint(m.forward, x),
    "modules": lambda m, x: remat.checkpoint(lambda t: m(t), x, modules=[m]),
    "sequential": lambda m, x: remat.checkpoint_sequential(
        nn.Sequential(m), 1, x, checkpoint_last=True
    ),
    "nested": lambda m, x: remat.checkpoint(lambda t: remat.checkpoint(m, t), x, modules=[m]),
}


class Written(Case):
    def steps(
        self, module: nn.Module, region: Region, lengths: list[int], wide: int = 0
    ) -> list[Any]:
        """Returns gradients and state of some steps: alone, two forwards before one backward, and a
        forward without one."""
        torch.manual_seed(1)
        found: list[Any] = []
        for length in lengths:
            x = torch.rand(*([length, wide] if wide else [length]), requires_grad=True)
            y = region(module, x)
            other = region(module, x * 0.5)
            region(module, x).detach()
            found.append(torch.autograd.grad(other.sum(), x)[0])
            found.append(torch.autograd.grad(y.sum(), x)[0])
            found.append(state_of(module))
        if isinstance(module, Assigned):
            del module.weight  # its graph has the region, and the region the module
        return found

    def check_same(self, actual: list[Any], expected: list[Any], message: str) -> None:
        for mine, plain in zip(actual, expected):
            if isinstance(plain, dict):
                self.assertEqual(mine.keys(), plain.keys(), message)
                for name in plain:
                    if isinstance(plain[name], torch.Tensor):
                        self.assertTrue(torch.equal(mine[name], plain[name]), f"{message}: {name}")
                    else:
                        self.assertEqual(mine[name], plain[name], f"{message}: {name}")
            else:
                self.assertTrue(torch.equal(mine, plain), message)

    def test_modules_that_write_are_as_plain_in_every_form_of_region(self) -> None:
        programs: list[tuple[Callable[[], nn.Module], list[int], int]] = [
            (Table, [2, 3, 3, 8], 0),
            (TableOfObject, [2, 3, 3, 8], 0),
            (Rope, [4, 6, 9, 3, 7], 0),
            (Lazy, [3, 3, 3], 0),
            (Codebook, [6, 6, 6], 4),
            (Bias, [4, 6, 3, 9], 0),
            (Running, [2, 3, 2, 8], 0),
            (Assigned, [2, 3, 4], 0),
            (lambda: Outer(Running()), [2, 3, 2], 0),
            (lambda: Outer(Table()), [2, 3, 8], 0),
            (lambda: Outer(Rope()), [4, 6, 3], 0),
            (lambda: Outer(nn.BatchNorm1d(4)), [4, 6], 4),
        ]
        for make, lengths, wide in programs:
            torch.manual_seed(2)
            module = make()
            expected = self.steps(copy.deepcopy(module), lambda m, x: m(x), lengths, wide)
            for name, region in REGIONS.items():
                message = f"{type(module).__name__} as {name}"
                self.check_same(
                    self.steps(copy.deepcopy(module), region, lengths, wide), expected, message
                )
            checkpointed = remat.Checkpointed(copy.deepcopy(module))
            actual = self.steps(checkpointed, lambda m, x: m(x), lengths, wide)
            self.check_same(actual, expected, f"{type(module).__name__} as Checkpointed")

    def test_a_number_that_becomes_a_tensor_is_a_number_again(self) -> None:
        x = torch.rand(3, requires_grad=True)
        (plain,) = torch.autograd.grad(Neuron()(x).sum(), x)
        module = Neuron()
        y = remat.checkpoint(module, x)
        kept = module.v
        self.assertTrue(torch.equal(torch.autograd.grad(y.sum(), x)[0], plain))
        self.assertIs(module.v, kept)

    def test_a_write_of_the_same_contents_is_not_repeated_over_a_later_one(self) -> None:
        class Flag(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("flag", torch.ones(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.flag.data.copy_(x.detach().max() > 1)
                return (x * self.flag.clone()).sin()

        module = Flag()
        y = remat.checkpoint(module, torch.full((3,), 2.0, requires_grad=True))  # it was one before
        remat.checkpoint(module, torch.zeros(3, requires_grad=True))
        y.sum().backward()
        self.assertEqual(module.flag.item(), 0)

    def test_a_recompute_puts_back_the_tensor_that_forward_left_in_an_attribute(self) -> None:
        module = Assigned()
        x = torch.rand(3, requires_grad=True)
        y = remat.checkpoint(module, x)
        left = module.weight
        y.sum().backward()
        self.assertIs(module.weight, left)
        del module.weight  # its graph has the region, and the region the module

    def test_buffers_with_a_history_keep_no_region_alive(self) -> None:
        class Potential(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("level", torch.zeros(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.level = 0.9 * self.level + x
                return self.level.sin()

        def twice(x: torch.Tensor) -> torch.Tensor:
            return remat.checkpoint(module, remat.checkpoint(module, x))

        module = Potential()
        forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "alone": lambda x: remat.checkpoint(module, x),
            "nested": lambda x: remat.checkpoint(
                lambda t: remat.checkpoint(module, t), x, modules=[module]
            ),
            "two inside": lambda x: remat.checkpoint(twice, x, modules=[module]),
        }
        for name, form in forms.items():
            for runs_backward in (False, True):
                with self.subTest(name=name, runs_backward=runs_backward):
                    y = form(torch.rand(3, requires_grad=True))
                    if runs_backward:
                        y.sum().backward()
                    del y
                    module.level = torch.zeros(3)
                    self.assertEqual(remat.counters()["frames_alive"], 0)

    def test_a_buffer_that_no_region_reads_may_change_between_forward_and_backward(self) -> None:
        norm = nn.BatchNorm1d(3)
        x = torch.randn(4, 3, requires_grad=True)

        def nested(t: torch.Tensor) -> torch.Tensor:
            return remat.checkpoint(lambda u: u.exp(), t.sin(), modules=[norm])

        y = norm(remat.checkpoint(nested, x, modules=[norm]))
        (found,) = torch.autograd.grad(y.sin().sum(), x)
        (expected,) = torch.autograd.grad(norm(x.sin().exp()).sin().sum(), x)
        self.assertTrue(torch.equal(found, expected))

    def test_a_module_that_cannot_be_run_again_is_named(self) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("sums", torch.zeros(2))
                self.calls: list[int] = []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls.append(1)
                self.sums.fill_(len(self.calls))
                return x.sin() * self.sums.clone()

        module = Outer(Counts())
        y = remat.checkpoint(module, torch.rand(2, requires_grad=True))
        with self.assertRaisesRegex(
            remat.CheckpointError,
            r"The recompute left buffer 'inner\.sums' of Outer with other contents than forward "
            r"did",
        ):
            y.sum().backward()

    def test_buffers_that_nobody_writes_hold_no_bytes(self) -> None:
        class Masks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mask", torch.ones(512, 512))
                self.register_buffer("sparse", torch.eye(3).to_sparse())
                self.register_buffer("wide", torch.ones(1, 1).expand(300, 300))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (
                    torch.sparse.mm(self.sparse, x.sin()) * self.mask[:3, :3] * self.wide[:3, :3]
                ).exp()

        module = Masks()
        x = torch.ones(3, 3, requires_grad=True)
        meter = remat.MemoryMeter()
        before = meter.live_bytes
        y = remat.checkpoint(lambda t: module(t), x)
        held = meter.live_bytes - before
        z = remat.checkpoint(module, x)
        self.assertEqual(meter.live_bytes - before, 2 * held)
        self.assertTrue(
            torch.equal(torch.autograd.grad(z.sum(), x)[0], torch.autograd.grad(y.sum(), x)[0])
        )

    def test_members_of_many_modules_cost_little(self) -> None:
        net = nn.Sequential(*[nn.Identity() for _ in range(1000)])
        x = torch.rand(4, requires_grad=True)

        def once(function: Callable[[torch.Tensor], torch.Tensor]) -> float:
            begin = time.perf_counter()
            remat.checkpoint(function, x.sin()).sum().backward()
            return time.perf_counter() - begin

        module = min(once(net) for _ in range(10))
        plain = min(once(lambda t: net(t)) for _ in range(10))
        # 30,000 attributes are looked at four times; a thousand calls in forward and recompute take
        # some milliseconds.
        self.assertLess(module - plain, 0.25)  # on a busy machine, too


if __name__ == "__main__":
    unittest.main()
