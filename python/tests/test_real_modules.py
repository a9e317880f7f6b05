"""Modules of other people's libraries whose forward writes to buffers or members.

Ten steps of training, plain and in every form of region, are bit-equal in outputs, gradients,
parameters, buffers, attributes and random state, or end in the error that the documents name.

    pip install -r python/tests/real_modules.txt
    cd python/tests
    REMAT_TEST_REAL_MODULES=1 PYTHONPATH=../../build/python python -m unittest test_real_modules

None of these libraries is needed otherwise. A module whose library is missing is skipped.
"""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import os
import unittest
import warnings
import weakref
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat
from common import Case
from real_modules import PROGRAMS, STEPS, Program


# ---- the forms of a region ----------------------------------------------------------------------

Call = Callable[[torch.Tensor], torch.Tensor]


def applied(names: str) -> Callable[[nn.Module], Call]:
    def form(module: nn.Module) -> Call:
        holder = nn.Module()
        holder.root = module
        remat.apply(holder, names=names)
        return module

    return form


def inside(module: nn.Module) -> Call:
    remat.Checkpointed(module.inner)  # type: ignore[arg-type]
    return functools.partial(remat.checkpoint, module)


def chained(module: nn.Module) -> Call:
    chain = nn.Sequential(module, nn.Identity())
    return lambda x: remat.checkpoint_sequential(chain, 2, x, checkpoint_last=True)


FORMS: dict[str, Callable[[nn.Module], Call]] = {
    "function": lambda m: lambda x: remat.checkpoint(m, x),
    "method": lambda m: lambda x: remat.checkpoint(m.forward, x),
    "partial": lambda m: lambda x: remat.checkpoint(functools.partial(m, x)),
    "modules": lambda m: lambda x: remat.checkpoint(lambda t: m(t), x, modules=[m]),
    "decorator": lambda m: remat.checkpoint(modules=[m])(lambda x: m(x)),
    "Checkpointed": lambda m: remat.Checkpointed(m),
    "apply": applied("root"),
    "apply to the library's": applied("root.inner"),
    "apply to all": applied("**"),
    "checkpoint_sequential": chained,
    "nested": lambda m: lambda x: remat.checkpoint(
        lambda t: remat.checkpoint(m, t), x, modules=[m]
    ),
    "Checkpointed inside": inside,
    "no early stop": lambda m: lambda x: remat.checkpoint(m, x, early_stop=False),
    "values compared": lambda m: lambda x: remat.checkpoint(m, x, determinism_check="values"),
    "matrix products kept": lambda m: lambda x: remat.checkpoint(m, x, policy=remat.save_matmuls()),
}


def plain(module: nn.Module) -> Call:
    return module


def upstream(module: nn.Module) -> Call:
    return lambda x: torch_checkpoint(module, x, use_reentrant=False)


def upstream_without_generators(module: nn.Module) -> Call:
    return lambda x: torch_checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)


# ---- what is compared ---------------------------------------------------------------------------

OF_EVERY_MODULE = set(nn.Module().__dict__) - {"training"}


def noted(value: Any, depth: int = 0) -> Any:
    """Returns a copy of tensors, numbers, texts, and of containers and objects of them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    ):
        return value
    if depth == 5 or isinstance(value, (type, nn.Module)):
        return type(value).__name__
    if isinstance(value, dict):
        return {str(key): noted(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return [noted(each, depth + 1) for each in value]
    if callable(value) or not hasattr(value, "__dict__"):
        return type(value).__name__
    return {
        "": type(value).__name__,
        **{name: noted(each, depth + 1) for name, each in vars(value).items()},
    }


def state_of(module: nn.Module) -> dict[str, Any]:
    """Returns parameters, buffers and attributes of a module and of all below it."""
    found: dict[str, Any] = {}
    for path, each in module.named_modules():
        for name, value in {**each._parameters, **each._buffers, **vars(each)}.items():
            if name not in OF_EVERY_MODULE and not name.startswith("_remat"):
                found[f"{path}.{name}"] = noted(value)
    return found


def tensors_in(module: nn.Module) -> dict[str, weakref.ref[torch.Tensor]]:
    """Returns weak references to a module's tensors: forward may assign another one with the same
    contents."""
    return {
        f"{path}.{name}": weakref.ref(value)
        for path, each in module.named_modules()
        for name, value in {**each._buffers, **vars(each)}.items()
        if isinstance(value, torch.Tensor)
    }


def difference(one: Any, other: Any, path: str = "") -> Optional[str]:
    """Returns the first difference of the two, or None."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(
                one.contiguous().flatten().view(torch.uint8),
                other.contiguous().flatten().view(torch.uint8),
            )
        )
        return None if same else path or "its contents"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{path} {sorted(one.keys() ^ other.keys())}"
        return next(
            filter(None, (difference(one[key], other[key], f"{path}/{key}") for key in one)), None
        )
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next(
            filter(
                None, (difference(a, b, f"{path}/{i}") for i, (a, b) in enumerate(zip(one, other)))
            ),
            None,
        )
    same = type(one) is type(other) and (one == other or one != one)
    return None if same else f"{path}: {one} and {other}"[:200]


# ---- ten steps ----------------------------------------------------------------------------------

SCHEDULES = ("one forward", "a forward without backward", "two forwards")


class Training(NamedTuple):
    steps: list[dict[str, Any]]
    error: Optional[Exception]  # that ended it


def inputs_of(program: Program, step: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return [torch.randn(program.shape(step), generator=made).requires_grad_() for _ in range(2)]


def train(
    program: Program, form: Callable[[nn.Module], Call], schedule: str, steps: int = STEPS
) -> Training:
    torch.manual_seed(1)
    module = program.make().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    call = form(module)
    torch.manual_seed(2)
    found: list[dict[str, Any]] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        program.begin(module)
        return call(x)

    try:
        for step in range(steps):
            inputs = inputs_of(program, step)
            optimizer.zero_grad()
            results = [run(inputs[0])]
            if schedule == "a forward without backward":
                run(inputs[1]).detach()
            elif schedule == "two forwards":
                results.append(run(inputs[1]))
            note: dict[str, Any] = {"outputs": noted(results), "left by forward": state_of(module)}
            for each in reversed(results):
                each.square().sum().backward()
            del results, each
            note["left by backward"] = state_of(module)
            note["gradients"] = noted(
                [x.grad for x in inputs] + [p.grad for p in module.parameters()]
            )
            note["random state"] = torch.get_rng_state()
            found.append(note)
            optimizer.step()
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        return Training(found, error.with_traceback(None))
    finally:
        program.begin(module)  # state with a history would keep its regions alive
    return Training(found, None)


def without(step: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    def rest(found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        return {name: value for name, value in found.items() if name not in names}

    return {what: rest(found) for what, found in step.items()}


def outcome(found: Training, expected: Training, beyond: tuple[str, ...] = ()) -> str:
    """Returns "equal", the first difference of the two, or the kind of the error that ended the
    training."""
    for step, (mine, theirs) in enumerate(zip(found.steps, expected.steps)):
        where = difference(
            without(mine, (*beyond, ".last_seconds")), without(theirs, (*beyond, ".last_seconds"))
        )
        if where is not None:
            return f"different in step {step}: {where}"
        seconds = [mine[left][".last_seconds"] for left in ("left by forward", "left by backward")]
        if seconds[0] != seconds[1]:
            return f"a time was set again in step {step}"
    if found.error is None:
        return "equal" if len(found.steps) == len(expected.steps) else "longer"
    kind = getattr(found.error, "kind", None)
    return kind.name if kind is not None else f"{type(found.error).__name__}: {found.error}"


class Held(NamedTuple):
    """[bytes] alive between forward and backward, and of state that forward wrote or assigned."""

    held: int
    written: int


def held_by(program: Program, form: Callable[[nn.Module], Call]) -> Held:
    torch.manual_seed(1)
    module = program.make().train()
    call = form(module)
    meter = remat.MemoryMeter()
    held = written = 0
    for step in range(4):
        inputs = inputs_of(program, step)
        program.begin(module)
        before_state, tensors = state_of(module), tensors_in(module)
        gc.collect()
        before = meter.live_bytes
        result = call(inputs[0])
        gc.collect()
        held = meter.live_bytes - before
        after = state_of(module)
        assigned = {
            name for name, value in tensors_in(module).items() if tensors.get(name) is not value
        }
        written = sum(
            bytes_of(value)
            for name, value in after.items()
            if name in assigned or difference(value, before_state.get(name))
        )
        result.square().sum().backward()
        del result
    return Held(held, written)


def bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, list) else 0


class RealModules(Case):
    def check_outcome(self, program: Program, form: str, found: str, message: str) -> None:
        is_allowed = found in program.error.split() and form in (program.error_of or FORMS)
        self.assertTrue(found == "equal" or is_allowed, f"{message}: {found}")

    def check_trainings(self, program: Program, name: str) -> None:
        for schedule in SCHEDULES:
            expected = train(program, plain, schedule)
            if expected.error is not None:
                continue  # torch itself refuses it: it writes to what is saved
            with self.subTest(f"{name}, {schedule}"):
                for form, make in FORMS.items():
                    found = outcome(train(program, make, schedule), expected, program.beyond)
                    self.check_outcome(program, form, found, f"{name}, {schedule}, {form}")
                theirs = train(program, upstream, schedule)
                with remat.installed():
                    drop_in = train(program, upstream, schedule)
                self.assertEqual(
                    drop_in.error is None, theirs.error is None, f"{name}: {drop_in.error}"
                )
                times = (*program.beyond, ".last_seconds")
                for mine, other in zip(drop_in.steps, theirs.steps):
                    self.assertIsNone(difference(without(mine, times), without(other, times)))

    def check_bytes(self, program: Program, name: str) -> None:
        if program.error and not program.error_of:
            return
        try:
            theirs = held_by(program, upstream_without_generators)
        except RuntimeError:  # it cannot run the module
            theirs = held_by(program, plain)
        for form in ("function", "Checkpointed", "nested"):
            if form in program.error_of:
                continue
            ours = held_by(program, FORMS[form])
            limit = theirs.held + 2 * ours.written
            self.assertLessEqual(ours.held, limit, f"{name}, {form}: {ours.written} bytes written")

    def test_modules_of_others_are_as_plain_or_end_in_a_clear_error(self) -> None:
        if not os.environ.get("REMAT_TEST_REAL_MODULES"):
            self.skipTest("it takes minutes, and libraries: set REMAT_TEST_REAL_MODULES")
        chosen = os.environ["REMAT_TEST_REAL_MODULES"]  # 1, or a part of the names
        ran, missing = 0, set()
        for name, program in PROGRAMS.items():
            if chosen != "1" and chosen not in name:
                continue
            try:
                importlib.import_module(program.library)
            except (ImportError, OSError, RuntimeError):
                missing.add(program.library)
                continue
            with self.subTest(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.check_trainings(program, name)
                self.check_bytes(program, name)
                ran += 1
        if missing:
            self.skipTest(f"{ran} modules compared; not installed: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    unittest.main()
