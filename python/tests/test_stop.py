"""The ends of a Python function's recompute, which are upstream's and unseen by other running
code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import os
import signal
import sys
import threading
import time
import unittest
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import remat
import signals
from common import Case, leaf

region = functools.partial(checkpoint, use_reentrant=False)
Log = list[str]
Function = Callable[[torch.Tensor, Log], torch.Tensor]


def ways(function: Callable[[torch.Tensor], torch.Tensor], name: str = "sin") -> list[str]:
    """Runs the region forward and backward, and returns the end of each call of the operator with
    this name: 'return' or 'exception'."""
    ends: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if (
            event.startswith("c_")
            and getattr(argument, "__name__", "") == name
            and event != "c_call"
        ):
            ends.append(event[2:])

    x = leaf(3)
    y = region(function, x).sum()
    sys.setprofile(profile)
    try:
        y.backward()
    finally:
        sys.setprofile(None)
    return ends


class Logged:
    """Says when it dies, in steps between which the interpreter may be asked for anything."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __del__(self) -> None:
        self.log.append("dying")
        len(str(self.log))
        self.log.append("dead")


class Iterating(Logged):
    def __init__(self, log: Log, tensor: torch.Tensor) -> None:
        super().__init__(log)
        self.tensor: torch.Tensor | None = tensor

    def __iter__(self) -> Iterating:
        return self

    def __next__(self) -> torch.Tensor:
        if self.tensor is None:
            raise StopIteration
        tensor, self.tensor = self.tensor, None
        return tensor


class LogsFunctions(TorchFunctionMode):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "?")
        self.log.append(f"before {name}")
        result = func(*args, **(kwargs or {}))
        self.log.append(f"after {name}")
        return result


def plain(t: torch.Tensor, log: Log) -> torch.Tensor:
    log.append("begin")
    t = torch.cos(t)
    log.append("middle")
    t = torch.sin(t)
    log.append("end")
    return t


def by_method(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = t.cos().sin()
    log.append("end")
    return t


def by_operator(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = t * t  # no call: the interpreter is not asked after it
    log.append("end")
    return t


def in_place(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = t.clone()
    t.exp_()
    log.append("end")
    return t


def by_star(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = torch.sin(*(t,))
    log.append("end")
    return t


def by_keyword(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = torch.sin(input=t)
    log.append("end")
    return t


def by_builtin(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = operator.mul(t, t)
    log.append("end")
    return t


def by_partial(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = functools.partial(torch.mul, other=t)(t)
    log.append("end")
    return t


def by_reduce(t: torch.Tensor, log: Log) -> torch.Tensor:
    t = functools.reduce(torch.mul, [t, t, t])
    log.append("end")
    return t


def by_map(t: torch.Tensor, log: Log) -> torch.Tensor:
    t, *_ = list(map(torch.sin, [t, t]))
    log.append("end")
    return t


def in_a_comprehension(t: torch.Tensor, log: Log) -> torch.Tensor:
    return sum(
        [(log.append(f"{i}"), torch.sin(t), log.append("after"))[1] for i in range(3)], start=t
    )


def in_a_generator(t: torch.Tensor, log: Log) -> torch.Tensor:
    def steps() -> Iterator[torch.Tensor]:
        try:
            yield torch.cos(t)
            yield torch.sin(t)
            log.append("went on")
        finally:
            log.append("closed")

    total = sum(steps(), start=t)
    log.append("end")
    return total


def inside_of_others(t: torch.Tensor, log: Log) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        t = torch.sin(t)
        log.append("inner")
        return t

    t = (lambda t: (inner(t), log.append("lambda"))[0])(t)
    log.append("end")
    return t


def with_contexts(t: torch.Tensor, log: Log) -> torch.Tensor:
    @contextlib.contextmanager
    def logged(name: str) -> Iterator[None]:
        log.append(f"enter {name}")
        try:
            yield
        except BaseException as error:
            log.append(f"{name} left by {type(error).__mro__[-3].__name__}")
            raise
        finally:
            log.append(f"exit {name}")

    with logged("outer"):
        try:
            with logged("inner"):
                t = torch.sin(t)
                log.append("last in inner")
            log.append("last in outer")
        finally:
            log.append("finally")
            len(str(log))
    log.append("end")
    return t


def in_a_module(t: torch.Tensor, log: Log) -> torch.Tensor:
    module = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid())
    for each in module:
        each.register_forward_hook(lambda module, *_: log.append(type(module).__name__))
    t = module(t)
    log.append("end")
    return t


def in_a_mode(t: torch.Tensor, log: Log) -> torch.Tensor:
    with LogsFunctions(log):
        t = torch.sin(torch.cos(t))
        log.append("end")
    return t


def in_a_function(t: torch.Tensor, log: Log) -> torch.Tensor:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(t)
            log.append("saved")
            return t * t

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            (t,) = ctx.saved_tensors
            return gradient * 2 * t

    t = Square.apply(t)
    log.append("end")
    return t


def whose_arguments_die(t: torch.Tensor, log: Log) -> torch.Tensor:
    # `list` drops the iterator before it returns, and so before the interpreter is asked.
    (t,) = list(map(torch.sin, Iterating(log, t)))
    log.append("end")
    return t


def that_dies(t: torch.Tensor, log: Log) -> torch.Tensor:
    kept = Logged(log)
    t = torch.sin(t)
    log.append("end")
    del kept
    return t


def that_catches(t: torch.Tensor, log: Log) -> torch.Tensor:
    for i in range(3):
        try:
            t = torch.sin(t)
        except Exception:
            log.append("caught")
    log.append("end")
    return t


def nested(t: torch.Tensor, log: Log) -> torch.Tensor:
    for name in "abc":
        log.append(name)
        t = region(plain, t, log)
        log.append(f"after {name}")
    return t


def nested_with_contexts(t: torch.Tensor, log: Log) -> torch.Tensor:
    for name in "ab":
        try:
            log.append(name)
            t = region(with_contexts, torch.sin(t), log)
            log.append(f"after {name}")
        finally:
            log.append(f"finally {name}")
    return t


FUNCTIONS: list[Function] = [
    plain, by_method, by_operator, in_place, by_star, by_keyword, by_builtin, by_partial, by_reduce,
    by_map, in_a_comprehension,
    in_a_generator, inside_of_others, with_contexts, in_a_module, in_a_mode, in_a_function,
    that_dies, that_catches, nested,
    nested_with_contexts,
]  # fmt: skip


def logged_step(function: Function, size: int, installed: bool) -> tuple[Log, torch.Tensor]:
    log: Log = []
    x = leaf(size)
    with contextlib.ExitStack() as stack:
        if installed:
            remat.install()
            stack.callback(remat.uninstall)
        y = region(function, x, log)
        log.append("backward")
        y.sum().backward()
    assert x.grad is not None
    return log, x.grad


class AsUpstream(Case):
    def test_programs_see_the_same(self) -> None:
        for function in FUNCTIONS:
            for size in (3, 5000):
                with self.subTest(function=function.__name__, size=size):
                    # The interpreter replaces the instructions that it was given.
                    for _ in range(3):
                        log, gradient = logged_step(function, size, installed=False)
                        ours, our_gradient = logged_step(function, size, installed=True)
                        self.assertEqual(ours, log)
                        self.assertTrue(torch.equal(our_gradient, gradient))

    def test_programs_see_the_same_on_other_threads_and_with_a_tracer(self) -> None:
        def check() -> None:
            for function in FUNCTIONS:
                with self.subTest(function=function.__name__):
                    expected, ours = (
                        logged_step(function, 3, installed)[0] for installed in (False, True)
                    )
                    self.assertEqual(ours, expected)

        thread = threading.Thread(target=check)
        thread.start()
        thread.join()
        lines: Log = []

        def tracer(frame: Any, event: str, argument: Any) -> Any:
            lines.append(event)
            return tracer

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            check()
        finally:
            sys.settrace(before)
        self.assertIn("exception", lines)

    def test_destructors_run_to_their_end(self) -> None:
        log, _ = logged_step(whose_arguments_die, 3, installed=True)
        self.assertEqual(log, ["dying", "dead", "end", "backward", "dying", "dead"])


class DropIn(Case):
    def setUp(self) -> None:
        super().setUp()
        remat.install()

    def tearDown(self) -> None:
        remat.uninstall()
        super().tearDown()


class Ways(DropIn):
    @unittest.skipIf(
        sys.version_info < (3, 11), "the interpreter does not tell which instruction is at work"
    )
    def test_a_small_operator_returns_and_no_exception_passes_it(self) -> None:
        self.assertEqual(ways(lambda t: torch.sin(t)), ["return"])
        self.assertEqual(ways(lambda t: torch.sin(t) + 1), ["return"])

    def test_else_the_operator_ends_with_it(self) -> None:
        self.assertEqual(ways(lambda t: torch.sin(t.expand(5000, 3))), ["exception"])

    def test_on_other_threads_the_operator_ends_with_it(self) -> None:
        found: list[list[str]] = []
        thread = threading.Thread(target=lambda: found.append(ways(lambda t: torch.sin(t))))
        thread.start()
        thread.join()
        self.assertEqual(found, [["exception"]])

    @unittest.skipIf(
        sys.version_info < (3, 11), "the interpreter does not tell which instruction is at work"
    )
    def test_a_child_of_a_fork_does_the_same(self) -> None:
        def fork() -> None:
            child = os.fork()
            if child == 0:
                try:
                    os._exit(ways(lambda t: torch.sin(t)) != ["return"])
                finally:
                    os._exit(2)
            ends.append(os.waitpid(child, 0)[1])

        ends: list[int] = []
        fork()
        thread = threading.Thread(target=fork)  # the main thread of its child
        thread.start()
        thread.join()
        self.assertEqual(ends, [0, 0])

    def test_own_regions_end_so_too(self) -> None:
        x = leaf(3)
        log: Log = []

        def function(t: torch.Tensor) -> torch.Tensor:
            t = torch.sin(t) + 1  # a node after the last tensor: that much is worth a stop
            log.append("end")
            return t

        remat.checkpoint(function, x).sum().backward()
        self.assertEqual(log, ["end"])
        self.assertTrue(torch.equal(x.grad, x.detach().cos()))  # type: ignore[arg-type]

    def test_a_function_without_a_frame(self) -> None:
        x = leaf(3)
        for function in (torch.sin, functools.partial(torch.mul, x), operator.neg):
            self.assertEqual(
                torch.autograd.grad(region(function, x).sum(), x)[0].tolist(),
                torch.autograd.grad(function(x).sum(), x)[0].tolist(),
            )


class Exceptions(Case):
    """The exception of a signal's handler arrives, whenever it comes."""

    def test_at_any_time(self) -> None:
        for way in signals.WAYS:
            with self.subTest(way=way):
                raised, caught = signals.count(way, 300, seconds=2)
                self.assertEqual(caught, raised)
                self.assertGreater(raised, 0)

    def check_between_question_and_stop(
        self, region: Callable[..., torch.Tensor], rest: int
    ) -> None:
        """The handler runs where the last operator has been asked for a stop, and its call has not
        returned."""

        class Raises(Iterating):
            def __next__(self) -> torch.Tensor:
                if self.tensor is None and remat.is_recomputing():
                    signal.raise_signal(signal.SIGTERM)
                return super().__next__()

        def function(t: torch.Tensor) -> torch.Tensor:
            (t,) = list(map(torch.sin, Raises([], t)))
            return t + rest

        def end(*_: Any) -> None:
            sys.exit("asked to end")

        before = signal.signal(signal.SIGTERM, end)
        try:
            y = region(function, leaf(3)).sum()
            with self.assertRaisesRegex(SystemExit, "asked to end"):
                y.backward()
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_between_question_and_stop(self) -> None:
        self.check_between_question_and_stop(remat.checkpoint, 1)
        with remat.installed():
            self.check_between_question_and_stop(region, 0)

    def test_while_the_function_is_left(self) -> None:
        def function(t: torch.Tensor) -> torch.Tensor:
            try:
                return (torch.sin(t.expand(5000, 3)) + 1).exp().cos()
            finally:
                if remat.is_recomputing():
                    signal.raise_signal(signal.SIGALRM)

        def handle(*_: Any) -> None:
            raise signals.Timeout

        before = signal.signal(signal.SIGALRM, handle)
        try:
            for call in (remat.checkpoint, region):
                with remat.installed():
                    y = call(function, leaf(3)).sum()
                with self.assertRaises(signals.Timeout):
                    y.backward()
        finally:
            signal.signal(signal.SIGALRM, before)

    def test_what_a_function_raises_instead_of_the_stop_arrives(self) -> None:
        def function(t: torch.Tensor) -> torch.Tensor:
            try:
                return (torch.sin(t.expand(5000, 3)) + 1).exp().cos()
            except Exception:
                raise LookupError("mine") from None

        y = remat.checkpoint(function, leaf(3)).sum()
        with self.assertRaisesRegex(LookupError, "mine"):
            y.backward()

    def test_what_an_observer_exits_with_arrives(self) -> None:
        with remat.observe_recomputes(end=lambda phase: sys.exit("asked to end")):
            y = remat.checkpoint(torch.sin, leaf(3)).sum()
        with self.assertRaisesRegex(SystemExit, "asked to end"):
            y.backward()


class Interrupted(DropIn):
    def test_who_interrupts_the_rest_of_a_call_is_heard(self) -> None:
        class Interrupts(Iterating):
            def __next__(self) -> torch.Tensor:
                if self.tensor is None and remat.is_recomputing():
                    self.log.append("interrupts")
                    signal.raise_signal(signal.SIGINT)
                return super().__next__()

        def function(t: torch.Tensor) -> torch.Tensor:
            (t,) = list(map(torch.sin, Interrupts(log, t)))  # asked again after the operator
            return t

        log: Log = []
        x = leaf(3)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            y = region(function, x).sum()
            with self.assertRaises(KeyboardInterrupt):
                y.backward()
                for _ in range(1000):
                    time.sleep(0)
        finally:
            signal.signal(signal.SIGINT, before)
        self.assertIn("interrupts", log)

    def test_under_a_mode_the_operator_ends_with_it(self) -> None:
        class Logs(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                log.append(f"{func.__name__} {remat.is_recomputing()}")
                return func(*args, **(kwargs or {}))

        log: Log = []
        x = leaf(3)
        y = region(lambda t: torch.sin(t), x).sum()
        with Logs():
            y.backward()
        self.assertNotIn("sin.default True", log)
        self.assertIn("cos.default False", log)
        self.assertTrue(torch.equal(x.grad, x.detach().cos()))  # type: ignore[arg-type]

    def test_signals_at_any_time_lose_nothing(self) -> None:
        seen = 0

        def handle(*_: Any) -> None:
            nonlocal seen
            len([each for each in range(5)])
            seen += 1

        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            log, gradient = logged_step(nested_with_contexts, 3, installed=False)
            for _ in range(300):
                ours, our_gradient = logged_step(nested_with_contexts, 3, installed=True)
                self.assertEqual(ours, log)
                self.assertTrue(torch.equal(our_gradient, gradient))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.assertGreater(seen, 50)

    def test_calls_that_others_leave_to_the_interpreter(self) -> None:
        called: list[int] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        leave = ctypes.pythonapi.Py_AddPendingCall
        leave.argtypes = [kind, ctypes.c_void_p]
        count = kind(lambda _: called.append(1) or 0)

        def function(t: torch.Tensor, log: Log) -> torch.Tensor:
            for _ in range(20):
                leave(count, None)
            return plain(t, log)

        log, _ = logged_step(function, 3, installed=True)
        self.assertEqual(log, ["begin", "middle", "end", "backward", "begin", "middle"])
        self.assertEqual(len(called), 40)

        # A whole step in such a call: no other runs meanwhile, so that the function goes on to its
        # end.
        gradients: list[torch.Tensor] = []
        step = kind(lambda _: gradients.append(logged_step(plain, 3, installed=True)[1]) or 0)
        leave(step, None)
        for _ in range(100):
            time.sleep(0)
        self.assertTrue(torch.equal(gradients[0], logged_step(plain, 3, installed=False)[1]))
        # No error of it is left to be raised.
        self.assertEqual(
            logged_step(plain, 3, installed=True)[0],
            ["begin", "middle", "end", "backward", "begin", "middle"],
        )

    def test_threads_beside(self) -> None:
        over = threading.Event()

        def spin() -> None:
            while not over.is_set():
                len([each for each in range(20)])

        threads = [threading.Thread(target=spin) for _ in range(3)]
        for each in threads:
            each.start()
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for _ in range(20):
                log, _gradient = logged_step(nested, 3, installed=True)
                self.assertEqual(log.count("end"), 3 + 2)
        finally:
            sys.setswitchinterval(before)
            over.set()
            for each in threads:
                each.join()


if __name__ == "__main__":
    unittest.main()
