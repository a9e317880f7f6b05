"""Random programs with regions, each run plainly, with `remat.checkpoint` and with
`torch.utils.checkpoint` served by remat: results and gradients must be the same bits.

    random_programs.py FIRST:LAST      programs of these seeds; what differs is made smaller and
    printed
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import random
import sys
import tempfile
import types
from typing import Any, Callable, ContextManager, Iterator

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
)

import remat

Tensor = torch.Tensor
aten = torch.ops.aten
SIZE = 4  # of a square matrix, which every value is
WAYS = ("plain", "own", "drop-in")
# since torch 2.8
UPSTREAM_TAKES_EARLY_STOP = "early_stop" in inspect.signature(checkpoint).parameters
BACKWARDS = ("backward", "grad", "twice", "double", "in parts", "inputs")
GUARDS = (None, "hooks", "cpu", "disk", "tiers", "cache", "no stop")
POLICIES = (
    None, None, None, "matmuls", "operators", "function", "offload", "names", "all but names"
)
CALLS = ("positional", "keyword", "nested", "closure", "module")


@dataclasses.dataclass
class Region:
    block: list[Any]
    call: str = "positional"
    policy: str | None = None
    early_stop: bool | None = None
    has_hook: bool = False  # on its result


@dataclasses.dataclass
class Operation:
    name: str
    number: int  # which parameter


@dataclasses.dataclass
class Program:
    block: list[Any]
    backward: str = "backward"
    guard: str | None = None
    dtype: torch.dtype = torch.float32


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad * ctx.factor, None


# ================================================================================
# Operations
# ================================================================================

# Each: a matrix of a matrix, a parameter, and the run, which says how values are pinned in it.


def _in_place(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    y = x.clone()
    y.mul_(w).add_(1)
    y[0] = w[0]
    y[:, 1] *= 2
    return y


def _without_grad(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    with torch.no_grad():
        mean = x.abs().mean()
    return x * mean


def _autocast(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.float() @ w.float()
    return x + y.to(x.dtype)


def _catches(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    try:
        x @ x.new_ones(SIZE - 1, SIZE)
    except RuntimeError:
        pass
    return x.cos()


def _gradient_inside(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        (grad,) = torch.autograd.grad((leaf.sin() * run.constant).sum(), leaf)
    return x * grad


def _hooked(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    y = x.tanh()
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.7)
    return y


def _loop(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    for step in range(3):
        x = torch.tanh(x * w + step)
    return x


def _in_containers(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    values = {"a": x * 2, "b": [x.sin(), w]}
    return values["a"] * values["b"][0] + values["b"][1]


def _halves(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    a, b = x.split(SIZE // 2)
    return torch.cat([b, a * w[: SIZE // 2]])


def _maxima(x: Tensor, w: Tensor, run: "Run") -> Tensor:
    values, places = (x.sin() * x.cos()).max(0)
    return x + values + places


OPERATIONS: dict[str, Callable[[Tensor, Tensor, "Run"], Tensor]] = {
    "sin": lambda x, w, run: x.sin(),
    "mul": lambda x, w, run: x * w,
    "mm": lambda x, w, run: x @ w * 0.5,
    "number": lambda x, w, run: x * 2 / 3 + 1,
    "exp": lambda x, w, run: x.clamp(-2, 2).exp() * 0.3,
    "softmax": lambda x, w, run: x.softmax(-1),
    "gelu": lambda x, w, run: F.gelu(x),
    "layer_norm": lambda x, w, run: F.layer_norm(x, (SIZE,), w[0]),
    "linear": lambda x, w, run: run.linear(x),
    "batch_norm": lambda x, w, run: run.norm(x),
    "lstm": lambda x, w, run: run.lstm(x[:, None])[0][:, 0],
    "conv": lambda x, w, run: F.conv1d(x[None], w[:, :, None])[0] * 0.5,
    "attention": lambda x, w, run: F.scaled_dot_product_attention(x[None], x[None], x[None] * w)[0],
    "einsum": lambda x, w, run: torch.einsum("ij,jk->ik", x, w) * 0.5,
    "view": lambda x, w, run: x.t().contiguous().view(2, -1).reshape(SIZE, SIZE),
    "cat": lambda x, w, run: torch.cat([x, w])[2 : 2 + SIZE],
    "stack": lambda x, w, run: torch.stack([x, x.sin()]).sum(0),
    "split": _halves,
    "max": _maxima,
    "where": lambda x, w, run: torch.where(x > 0, x * w, x.tanh()),
    "std": lambda x, w, run: x - x.std(0, keepdim=True),
    "norm": lambda x, w, run: x / (x.norm() + 1),
    "cumsum": lambda x, w, run: x.cumsum(0) * 0.5,
    "fft": lambda x, w, run: torch.fft.ifft(torch.fft.fft(x) * 2).real.contiguous(),
    "bfloat16": lambda x, w, run: x + (x.bfloat16() * w.bfloat16()).to(x.dtype),
    "vmap": lambda x, w, run: torch.func.vmap(lambda row: row.sin() * row.sum())(x),
    "dropout": lambda x, w, run: F.dropout(x, 0.3),
    "alpha_dropout": lambda x, w, run: F.alpha_dropout(x, 0.2, True),
    "random": lambda x, w, run: x + torch.rand_like(x) * w,
    "bernoulli": lambda x, w, run: x * torch.bernoulli(torch.full_like(x, 0.6)),
    "permuted": lambda x, w, run: x[torch.randperm(SIZE)],
    "item": lambda x, w, run: x * (1.5 if x.sum().item() > 0 else 0.5),
    "detach": lambda x, w, run: x + x.detach().cos(),
    "captured": lambda x, w, run: x * run.captured.cos(),
    "function": lambda x, w, run: _Square.apply(x.tanh(), 0.5),  # type: ignore[no-any-return]
    "pin": lambda x, w, run: run.pin(x.sin()),
    "save_region": lambda x, w, run: run.save_region(lambda y: (y @ w).tanh(), x),
    "name": lambda x, w, run: run.name(x.sigmoid(), "n"),
    "in place": _in_place,
    "no_grad": _without_grad,
    "autocast": _autocast,
    "catches": _catches,
    "gradient inside": _gradient_inside,
    "hook": _hooked,
    "loop": _loop,
    "containers": _in_containers,
}


# ================================================================================
# Programs
# ================================================================================


def program_of(seed: int) -> Program:
    dice = random.Random(seed)

    def block(depth: int, length: int) -> list[Any]:
        made: list[Any] = []
        for _ in range(length):
            if depth < 3 and dice.random() < 0.22:
                made.append(region(depth + 1))
            else:
                made.append(Operation(dice.choice(list(OPERATIONS)), dice.randrange(3)))
        return made

    def region(depth: int) -> Region:
        return Region(
            block(depth, dice.randrange(1, 6)),
            dice.choice(CALLS),
            dice.choice(POLICIES),
            dice.choice([None, None, True, False]),
            dice.random() < 0.15,
        )

    length = dice.randrange(2, 6)
    guard = dice.choice([None] * 6 + list(GUARDS))
    return Program(
        block(0, length), dice.choice(BACKWARDS), guard, dice.choice([torch.float32, torch.float64])
    )


class Run:
    """One program in one of the ways."""

    def __init__(self, program: Program, way: str, seed: int, folder: str) -> None:
        torch.manual_seed(seed)
        self.program, self.way, self.folder = program, way, folder
        dtype = program.dtype
        self.linear = torch.nn.Linear(SIZE, SIZE, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(SIZE, dtype=dtype)
        self.lstm = torch.nn.LSTM(SIZE, SIZE, dtype=dtype)
        self.parameters = [
            torch.randn(SIZE, SIZE, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        self.x = torch.randn(SIZE, SIZE, dtype=dtype, requires_grad=True)
        self.constant = torch.randn(SIZE, SIZE, dtype=dtype)
        self.captured = self.x * 1.1
        is_own = way == "own"
        self.pin = remat.pin if is_own else lambda x: x
        self.save_region = remat.save_region if is_own else lambda function, x: function(x)
        self.name = remat.checkpoint_name if is_own else lambda x, name: x

    def block(self, block: list[Any], x: Tensor) -> Tensor:
        for each in block:
            if isinstance(each, Region):
                x = self.region(each, x)
            else:
                x = OPERATIONS[each.name](x, self.parameters[each.number], self)
        return x

    def region(self, region: Region, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return self.block(region.block, x)

        is_closure = region.call == "closure" and x.requires_grad
        if self.way == "plain":
            y = body(x) + 0 * self.x if is_closure else body(x)
        else:
            call, options = self.call_of(region)
            if is_closure:
                y = call(lambda z: body(x) + 0 * z, self.x, **options)
            elif region.call == "keyword":
                y = call(lambda number, *, x: body(x), 1, x=x, **options)
            elif region.call == "nested":
                y, _ = call(
                    lambda tree, text: (body(tree["x"][0]), text), {"x": [x]}, "text", **options
                )
            elif region.call == "module":
                module = torch.nn.Module()
                module.forward = body  # type: ignore[method-assign]
                y = call(module, x, **options)
            else:
                y = call(body, x, **options)
        if region.has_hook and y.requires_grad:
            y.register_hook(lambda grad: grad * 1.5)
        return y

    def call_of(self, region: Region) -> tuple[Callable[..., Any], dict[str, Any]]:
        takes_early_stop = self.way == "own" or UPSTREAM_TAKES_EARLY_STOP
        is_said = region.early_stop is not None and takes_early_stop
        options: dict[str, Any] = {"early_stop": region.early_stop} if is_said else {}
        if self.way == "own":
            policies: dict[str, Callable[[], Any]] = {
                "matmuls": remat.save_matmuls,
                "operators": lambda: remat.save_ops(
                    ["aten::sin", "aten::tanh", "aten::exp", "aten::_softmax"]
                ),
                "function": lambda: (
                    lambda context: "mm" in context.op_name or "mul" in context.op_name
                ),
                "offload": lambda: remat.offload_ops(["aten::mm", "aten::mul"]),
                "names": lambda: remat.save_names(["n"]),
                "all but names": lambda: remat.save_all_but_names(["n"]),
            }
            if region.policy is not None:
                options["policy"] = policies[region.policy]()
            return remat.checkpoint, options | {"modules": (self.norm,)}
        contexts: dict[str | None, Any] = {
            "matmuls": [aten.mm.default, aten.addmm.default],
            "operators": [aten.sin.default, aten.tanh.default, aten.exp.default],
            "function": lambda context, op, *_, **__: (
                CheckpointPolicy.MUST_SAVE
                if op in (aten.mm.default, aten.mul.Tensor)
                else CheckpointPolicy.PREFER_RECOMPUTE
            ),
        }
        if region.policy in contexts:
            kept = contexts[region.policy]
            options["context_fn"] = lambda: create_selective_checkpoint_contexts(kept)
        return checkpoint, options | {"use_reentrant": False}

    def guards(self) -> Iterator[ContextManager[Any]]:
        if self.program.guard == "hooks":
            yield torch.autograd.graph.saved_tensors_hooks(
                lambda saved: saved.clone(), lambda kept: kept
            )
        if self.way == "plain":
            return
        guards: dict[str | None, Callable[[], ContextManager[Any]]] = {
            "cpu": remat.save_on_cpu,
            "disk": lambda: remat.save_on_disk(self.folder),
            "tiers": lambda: remat.save_in_tiers(directory=self.folder, host_bytes=200),
            "cache": remat.recompute_cache,
            "no stop": lambda: remat.early_stop(False),
        }
        if self.program.guard in guards:
            yield guards[self.program.guard]()

    def results(self) -> list[Tensor | None]:
        """Returns the output, gradients, the generator's state, and, except for the drop-in,
        running statistics."""
        leaves = [self.x, *self.parameters]
        for module in (self.linear, self.norm, self.lstm):
            leaves += module.parameters()
        with contextlib.ExitStack() as stack:
            for guard in self.guards():
                stack.enter_context(guard)
            y = self.block(self.program.block, self.x)
        drawn = torch.rand(1)
        loss = (y.float() ** 2).sum()
        found: list[Tensor | None] = [y.detach(), drawn]
        backward = self.program.backward
        if backward == "grad":
            found += torch.autograd.grad(loss, leaves, allow_unused=True)
        elif backward == "in parts":
            found += torch.autograd.grad(loss, leaves[1:2], allow_unused=True, retain_graph=True)
            found += torch.autograd.grad(loss, self.x, allow_unused=True)
        elif backward == "inputs":
            loss.backward(inputs=[self.x])
            found.append(self.x.grad)
        elif backward == "double":
            (grad,) = torch.autograd.grad(loss, self.x, create_graph=True)
            if grad.requires_grad:
                grad.square().sum().backward()
            found += [grad.detach(), *(leaf.grad for leaf in leaves)]
        else:
            if backward == "twice":
                loss.backward(retain_graph=True)
            loss.backward()
            found += [leaf.grad for leaf in leaves]
        if self.way != "drop-in":  # which restores no buffers, as upstream
            found.append(self.norm.running_mean)
        return found


# ================================================================================
# Differences
# ================================================================================


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:  # a gradient of zeros, or none
        there = one if other is None else other
        return there is None or not bool(there.any())
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    )


def _outcome(program: Program, way: str, seed: int, folder: str) -> list[Tensor | None] | Exception:
    try:
        with remat.installed() if way == "drop-in" else contextlib.nullcontext():
            return Run(program, way, seed, folder).results()
    except Exception as error:
        # Its frames hold the graph.
        return error.with_traceback(None)


def difference(program: Program, seed: int, folder: str) -> str:
    """Returns the differences; empty if all ways agree."""
    plain = _outcome(program, "plain", seed, folder)
    for way in WAYS[1:]:
        found = _outcome(program, way, seed, folder)
        if isinstance(plain, Exception):
            if not isinstance(found, Exception):
                return f"{way}: plainly raises {plain!r}"
        elif isinstance(found, Exception):
            # A kept tensor that is written to is refused.
            if getattr(found, "kind", None) is not remat.ErrorKind.SELECTIVE_MUTATION:
                return f"{way}: raises {type(found).__name__}: {found}"
        else:
            for position, (one, other) in enumerate(zip(plain, found)):
                if not _is_same(one, other):
                    return f"{way}: result {position} differs"
    return ""


def _regions(block: list[Any]) -> Iterator[Region]:
    for each in block:
        if isinstance(each, Region):
            yield each
            yield from _regions(each.block)


def _smaller(program: Program) -> Iterator[Program]:
    """Yields the program with one thing less: a statement, a call around statements, an option."""
    for place in range(1 + len(list(_regions(program.block)))):
        for position in range(1000):
            less = copy.deepcopy(program)
            block = [less.block, *(each.block for each in _regions(less.block))][place]
            if position >= len(block):
                break
            removed = block.pop(position)
            yield less
            if isinstance(removed, Region):
                less = copy.deepcopy(less)
                [less.block, *(each.block for each in _regions(less.block))][place][
                    position:position
                ] = removed.block
                yield less
    simplest = types.SimpleNamespace(
        call="positional", policy=None, early_stop=None, has_hook=False
    )
    for place, region in enumerate(_regions(program.block)):
        for name, value in vars(simplest).items():
            if getattr(region, name) != value:
                less = copy.deepcopy(program)
                setattr(list(_regions(less.block))[place], name, value)
                yield less
    for name, value in (("guard", None), ("backward", "backward")):
        if getattr(program, name) != value:
            yield dataclasses.replace(copy.deepcopy(program), **{name: value})


def smallest(program: Program, seed: int, folder: str) -> Program:
    """Returns a smaller program that still differs in the same way."""
    way = difference(program, seed, folder).split(":")[0]
    while True:
        for less in _smaller(program):
            if difference(less, seed, folder).split(":")[0] == way:
                program = less
                break
        else:
            return program


def findings(seeds: range) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            program = program_of(seed)
            if difference(program, seed, folder):
                program = smallest(program, seed, folder)
                yield f"seed {seed}: {difference(program, seed, folder)}\n  {program}"


def main() -> None:
    torch.set_num_threads(1)
    first, last = map(int, sys.argv[1].split(":"))
    count = 0
    for each in findings(range(first, last)):
        print(each, flush=True)
        count += 1
    print(f"{last - first} programs, {count} findings")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
