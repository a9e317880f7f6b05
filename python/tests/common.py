"""The shared parts of the package's tests."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import unittest
from typing import Any, Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import remat
from remat import _errors, _extension


def leaf(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *(sizes or (4, 4)), generator=torch.Generator().manual_seed(seed)
    ).requires_grad_()


def gradient(result: Any, *inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(result.sum(), inputs, **options)


def operators(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().cos().matmul(x)


class Counting(TorchDispatchMode):
    """Counts products of matrices (`aten::mm`)."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.products += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class Table(torch.nn.Module):
    """Fills a table once for each length, and remembers this in a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(8))
        self.filled = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.filled:
            self.table[: len(x)] = torch.arange(1.0, len(x) + 1)
            self.filled = len(x)
        return (x * self.table[: len(x)].clone()).sin()


# The collector runs after each test, and need not look at what was imported.
gc.collect()
gc.freeze()

# `./dev test` sets it: tests that take long run a part of their cases; `./dev test --all` runs all
# of them.
IS_SAMPLE = os.environ.get("REMAT_TEST_SAMPLE") == "1"
whole = unittest.skipIf(IS_SAMPLE, "runs with ./dev test --all")


def sampled(cases: Sequence[Any], number: int = 1) -> Sequence[Any]:
    """Returns the first cases where a sample is asked for, otherwise all."""
    return cases[:number] if IS_SAMPLE else cases


# Under sanitizers programs take several times longer: how many.
SLOWNESS = int(os.environ.get("REMAT_TEST_SLOWNESS", "1"))


def run_python(*arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, with the package that this one has."""
    folder = os.path.dirname(os.path.dirname(remat.__file__))
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        text=True, timeout=SLOWNESS * timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_script(text: str, *arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    return run_python("-c", text, *arguments, timeout=timeout)


# Words of C++ programs, which users of the package must not see. Operators have names of their own.
FOREIGN = re.compile(
    r"remat::|\b(?:at|c10)::|\b[A-Z]\w*::|\b[A-Z]\w*(?:Guard|Options)\b|\w = (?:true|false)\b"
)
foreign_texts: list[str] = []


def _checked_error(*facts: Any) -> remat.CheckpointError:
    error = _errors.make_error(*facts)
    if FOREIGN.search(str(error)):
        foreign_texts.append(str(error))
    return error


# Every error that the library makes in a test comes by here.
_extension._remat._set_names(make_error=_checked_error)


class Case(unittest.TestCase):
    """Fails a test that leaves a region, a hook or an installation behind, or sees an error in
    another language's words."""

    def setUp(self) -> None:
        torch.manual_seed(0)

    def tearDown(self) -> None:
        gc.collect()
        left = []
        counters = remat.counters()
        for name in ("frames_alive", "recomputed_bytes_alive"):
            if counters[name]:
                left.append(f"{name} = {counters[name]}")
        if remat.is_checkpointing() or remat.is_recomputing():
            left.append("a region is open")
        if remat.is_installed():
            left.append("the drop-in is installed")
        # torch before 2.9 does not tell
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is not None and top(False) is not None:
            left.append("hooks")
        if torch._C._len_torch_dispatch_stack():
            left.append("a dispatch mode")
        self.assertEqual(left, [], "left behind")
        foreign, foreign_texts[:] = foreign_texts[:], []
        self.assertEqual(foreign, [], "words of C++")

    def check_equal(self, found: Any, expected: Any, message: str = "") -> None:
        if isinstance(expected, torch.Tensor):
            self.assertIsInstance(found, torch.Tensor, message)
            self.assertTrue(torch.equal(found, expected), message)
        elif isinstance(expected, (tuple, list)):
            self.assertEqual(len(found), len(expected), message)
            for each, other in zip(found, expected):
                self.check_equal(each, other, message)
        else:
            self.assertEqual(found, expected, message)


class CountedFunction:
    """A function that counts its runs, and how many came to their end."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.runs, self.ends = function, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        result = self.function(*args, **kwargs)
        self.ends += 1
        return result
