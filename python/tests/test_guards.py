"""Guards: each takes effect in its scope, and leaves nothing behind."""

from __future__ import annotations

import random
import tempfile
import threading
import time
import unittest
import weakref
from pathlib import Path

import torch

import remat
from common import FOREIGN, Case, run_script


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp().cos()


def leaf(size: int = 64) -> torch.Tensor:
    return torch.linspace(0, 1, size).requires_grad_()


def gradient(run: object = function, size: int = 64) -> torch.Tensor:
    x = leaf(size)
    run(x).sum().backward()  # type: ignore[operator]
    assert x.grad is not None
    return x.grad


class Guards(Case):
    def test_save_on_disk(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            meter = remat.MemoryMeter()
            x = leaf(1 << 16)
            before = meter.live_bytes
            with remat.save_on_disk(Path(folder), min_bytes=1):
                y = function(x).sum()
            self.assertLess(meter.live_bytes - before, 1 << 18)  # four tensors of it without
            self.assertEqual(list(Path(folder).iterdir()), [])  # it has no name
            y.backward()
            self.assertTrue(torch.equal(x.grad, gradient(size=1 << 16)))
            with remat.save_on_disk(folder, min_bytes=1):
                self.assertTrue(
                    torch.equal(gradient(lambda x: remat.checkpoint(function, x)), gradient())
                )
        with self.assertRaises(ValueError):
            with remat.save_on_disk("/no/such/folder"):
                pass

    def test_what_moves_is_counted(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            guard = remat.save_on_disk(folder, min_bytes=1, prefetch_depth=0)
            self.assertEqual(guard.counts, remat.MoveCounts(0, 0, 0, 0, 0, 0.0))  # not entered yet
            with guard as moved, remat.Recorder() as recorder:
                y = function(leaf() * 1).sum()
                self.assertIs(moved, guard)
            # The tensors that sin and cos save, and the result that exp saves and cos takes: once.
            self.assertEqual(moved.counts[:5], (2, 2 * 256, 0, 0, 0))
            y.backward()  # after the scope
            self.assertEqual(moved.counts[:5], (2, 2 * 256, 3, 0, 3 * 256))
            self.assertGreater(moved.counts.seconds_waited, 0)
            files = recorder.report().files
            self.assertEqual(
                (files.bytes_written, files.waits > 0, files.waited_s > 0), (2 * 256, True, True)
            )
            with moved:  # again: another scope's
                self.assertEqual(moved.counts.moves, 0)
        with remat.save_on_cpu(min_bytes=1) as moved:
            gradient()
        self.assertEqual(moved.counts.moves, 0)  # all is on the CPU

    def test_allocations_are_not_recorded_beside_the_profiler(self) -> None:
        with torch.autograd.profiler.profile():
            with self.assertRaises(remat.CheckpointError) as caught:
                remat.record_allocations().__enter__()
        self.assertEqual(caught.exception.kind, remat.ErrorKind.UNSUPPORTED)
        self.assertIn("the allocations of this thread cannot be recorded", str(caught.exception))
        self.assertIsNone(FOREIGN.search(str(caught.exception)), str(caught.exception))
        with remat.record_allocations():
            with self.assertRaisesRegex(RuntimeError, "already enabled"):
                with torch.autograd.profiler.profile():
                    pass
        # before, a profile that is refused leaves the profiler broken for the next one
        if torch.__version__ >= "2.12":
            with torch.autograd.profiler.profile():
                pass

    def test_memory_of_python_waits_in_tiers(self) -> None:
        # The thread that writes it frees it, and needs the interpreter's lock for that while
        # another one waits for it.
        ended = run_script(
            """
import array, tempfile, torch, remat
N = 1 << 20
w = torch.ones(N, requires_grad=True)
def twos():
    return torch.frombuffer(array.array("f", [2.0]) * N, dtype=torch.float32)
with tempfile.TemporaryDirectory() as folder:
    for _ in range(3):
        with remat.save_in_tiers(host_bytes=0, directory=folder, max_bytes_in_flight=1,
                                 min_bytes=0):
            results = [remat.checkpoint(lambda t: (t * w).sin(), twos()) for _ in range(8)]
        sum(y.sum() for y in results).backward()
assert torch.allclose(w.grad, 3 * 8 * 2 * torch.full((N,), 2.0).cos())
print("over")
""",
            timeout=60,
        )
        self.assertEqual((ended.returncode, ended.stdout.split()[-1:]), (0, ["over"]), ended.stdout)

    def test_save_in_tiers(self) -> None:
        def chain(x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = x.sin()
            return x

        with tempfile.TemporaryDirectory() as folder:
            meter = remat.MemoryMeter()
            x = leaf(1 << 18)  # 1 MiB
            before = meter.live_bytes
            with remat.save_in_tiers(host_bytes=3 << 20, directory=Path(folder)) as tiers:
                y = chain(x)
            for _ in range(5000):
                if tiers.counts.bytes_on_disk == 4 << 20:
                    break
                time.sleep(0.001)
            self.assertEqual(tiers.counts.bytes_on_disk, 4 << 20)
            self.assertEqual(meter.live_bytes - before, 4 << 20)  # the budget, and y
            y.sum().backward()
            self.assertEqual(tiers.counts.loads, 4)
            self.assertTrue(torch.equal(x.grad, gradient(chain, 1 << 18)))
            with tiers:  # again
                pass
            self.assertEqual(tiers.counts.loads, 0)
        with self.assertRaisesRegex(ValueError, "there is no directory for tensors beyond that"):
            with remat.save_in_tiers(host_bytes=10):
                pass
        with self.assertRaisesRegex(ValueError, r"remat\.save_in_tiers: device_bytes is -1"):
            with remat.save_in_tiers(device_bytes=-1):
                pass

    def test_save_as_is_lossy_and_halves_bytes(self) -> None:
        meter = remat.MemoryMeter()
        x = leaf(1 << 12)
        held = []
        for guard in (remat.save_as(torch.float32), remat.save_as(torch.bfloat16)):
            before = meter.live_bytes
            with guard:
                y = function(x).sum()
            held.append(meter.live_bytes - before)
            (grad,) = torch.autograd.grad(y, x)
            del y
        self.assertLess(held[1], 0.6 * held[0])
        self.assertFalse(torch.equal(grad, gradient(size=1 << 12)))
        self.assertTrue(torch.allclose(grad, gradient(size=1 << 12), atol=0.05))
        with self.assertRaises(ValueError):
            with remat.save_as(torch.int32):
                pass

    def test_save_on_cpu_leaves_tensors_of_the_cpu(self) -> None:
        with remat.save_on_cpu(pin_memory=False, min_bytes=1):
            self.assertTrue(torch.equal(gradient(), gradient()))

    def test_disable_saved_tensors_hooks(self) -> None:
        with remat.disable_saved_tensors_hooks("not here"):
            with self.assertRaisesRegex(RuntimeError, "not here"):
                remat.checkpoint(function, leaf())
        remat.checkpoint(function, leaf()).sum().backward()

    def test_early_stop(self) -> None:
        for enabled in (True, False):
            runs: list[str] = []

            def logged(x: torch.Tensor) -> torch.Tensor:
                y = function(x)
                runs.append("end")
                return y + 1

            with remat.early_stop(enabled):
                y = remat.checkpoint(logged, leaf()).sum()
            y.backward()
            self.assertEqual(len(runs), 1 if enabled else 2)

    def test_disable_checkpoint(self) -> None:
        before = remat.counters()["frames_created"]
        with remat.disable_checkpoint():
            remat.checkpoint(function, leaf()).sum().backward()
        self.assertEqual(remat.counters()["frames_created"], before)

    def test_is_checkpointing_disabled(self) -> None:
        self.assertFalse(remat.is_checkpointing_disabled())
        with remat.disable_checkpoint():
            self.assertTrue(remat.is_checkpointing_disabled())
        self.assertFalse(remat.is_checkpointing_disabled())

    def test_named_generators_in_regions(self) -> None:
        def run(is_region: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
            torch.manual_seed(3)
            tracker = remat.GeneratorTracker()
            tracker.add("model", 1)
            tracker.add("expert", 2)

            def block(x: torch.Tensor) -> torch.Tensor:
                x = torch.dropout(x, 0.1, True).sin()
                with tracker.fork("model"):
                    x = torch.dropout(x, 0.1, True).exp()
                    with tracker.fork("expert"):
                        x = torch.dropout(x, 0.1, True).cos()
                return torch.dropout(x, 0.1, True).sin()

            x, grads = leaf(64), []
            for _ in range(2):
                y = x
                for _ in range(2):
                    y = remat.checkpoint(block, y) if is_region else block(y)
                grads.append(torch.autograd.grad(y.sum(), x)[0])
            return grads, {**tracker.states(), "default": torch.get_rng_state()}

        (grads, states), (plain, plain_states) = run(True), run(False)
        self.assertTrue(all(map(torch.equal, grads, plain)))
        self.assertEqual(states.keys(), plain_states.keys())
        self.assertTrue(all(torch.equal(states[name], plain_states[name]) for name in states))

    def test_named_generators_refuse_wrong_uses(self) -> None:
        tracker = remat.GeneratorTracker()
        tracker.add("model", 1)
        with self.assertRaisesRegex(ValueError, "already"):
            tracker.add("model", 2)
        with self.assertRaisesRegex(ValueError, 'there was no "data"'):
            tracker.fork("data").__enter__()
        with tracker.fork("model"):
            with self.assertRaisesRegex(ValueError, "was forked already"):
                tracker.fork("model").__enter__()
            with self.assertRaisesRegex(RuntimeError, "within a fork"):
                tracker.set_states({})
        other = remat.GeneratorTracker()
        other.set_states(tracker.states())
        self.assertEqual(list(other.states()), ["model"])

    def test_recompute_cache_and_its_limit(self) -> None:
        for limit, recomputes in ((None, 1), (0, 3)):
            x = leaf()
            y = remat.checkpoint(function, x).sum()
            before = remat.counters()["recomputes"]
            with remat.recompute_cache(limit):
                grads = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)]
            self.assertEqual(remat.counters()["recomputes"] - before, recomputes)
            self.assertTrue(all(torch.equal(each, gradient()) for each in grads))
            self.assertEqual(remat.counters()["recomputed_bytes_alive"], 0)

    def test_graph_exec_group(self) -> None:
        x, w = leaf(), leaf()
        y = remat.checkpoint(lambda x, w: x.sin() * w.cos(), x, w).sum()
        before = remat.counters()["recomputes"]
        with remat.graph_exec_group():
            torch.autograd.grad(y, x, retain_graph=True)
            with self.assertRaises(remat.CheckpointError) as raised:
                torch.autograd.grad(y, x, retain_graph=True)
        self.assertIs(raised.exception.kind, remat.ErrorKind.GROUP_OVERLAP)
        self.assertEqual(remat.counters()["recomputes"] - before, 1)

    def test_debug_names_operators(self) -> None:
        calls = []

        def other(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return x.sin() if len(calls) == 1 else x.double().cos()

        with remat.debug():
            y = remat.checkpoint(other, leaf()).sum()
        with self.assertRaisesRegex(remat.CheckpointError, "aten::") as raised:
            y.backward()
        self.assertIn("sin", raised.exception.mismatches[0].forward_op)

    def test_memory_limit(self) -> None:
        meter = remat.MemoryMeter()
        with remat.memory_limit(meter.live_bytes + 1_000_000):
            torch.empty(100_000)
            with self.assertRaises(torch.OutOfMemoryError):
                torch.empty(1_000_000)
        torch.empty(1_000_000)
        with self.assertRaises(ValueError):
            with remat.MemoryLimit(-1):
                pass

    def test_state_provider(self) -> None:
        class RandomState:
            def __init__(self) -> None:
                self.captures = 0

            def capture(self) -> object:
                self.captures += 1
                return random.getstate()

            def restore(self, state: object) -> None:
                random.setstate(state)  # type: ignore[arg-type]

        def drawing(x: torch.Tensor) -> torch.Tensor:
            return (x * random.random()).sin().cos()

        random.seed(1)
        wanted = [gradient(drawing), random.random()]
        random.seed(1)
        provider = RandomState()
        with remat.state_provider(provider):
            found = [gradient(lambda x: remat.checkpoint(drawing, x)), random.random()]
        self.assertTrue(torch.equal(found[0], wanted[0]))
        self.assertEqual(found[1], wanted[1])
        self.assertGreaterEqual(provider.captures, 2)
        gone = weakref.ref(provider)
        del provider
        self.assertIsNone(gone())

    def test_a_provider_that_raises(self) -> None:
        class Broken:
            def capture(self) -> object:
                raise KeyError("capture")

            def restore(self, state: object) -> None:
                pass

        with self.assertRaisesRegex(KeyError, "capture"):
            with remat.state_provider(Broken()):
                remat.checkpoint(function, leaf())

    def test_preserve_generator(self) -> None:
        results = []
        for run in (lambda f, x: f(x), remat.checkpoint):
            generator = torch.Generator().manual_seed(4)

            def drawing(x: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
                return (x * torch.rand(x.shape, generator=generator)).sin()

            with remat.preserve_generator(generator):
                taken = gradient(lambda x: run(drawing, x))  # type: ignore[operator]
                results.append([taken, torch.rand(1, generator=generator)])
        for a, b in zip(*results):
            self.assertTrue(torch.equal(a, b))
        with self.assertRaises(TypeError):
            with remat.preserve_generator(3):  # type: ignore[arg-type]
                pass

    def test_observe_recomputes(self) -> None:
        seen: list[tuple[str, str, str, int]] = []
        with remat.observe_recomputes(
            lambda phase: seen.append(("begin", phase.name, phase.phase, phase.depth)),
            lambda phase: seen.append(("end", phase.name, phase.phase, phase.depth)),
        ):
            y = remat.checkpoint(function, leaf(), name="one").sum()
        y.backward()
        self.assertEqual(seen, [("begin", "one", "recompute", 1), ("end", "one", "recompute", 1)])

        def broken(phase: remat.PhaseInfo) -> None:
            raise KeyError(phase.name)

        with remat.observe_recomputes(begin=broken):
            y = remat.checkpoint(function, leaf(), name="two").sum()
        with self.assertRaisesRegex(KeyError, "two"):
            y.backward()

    def test_current_phase(self) -> None:
        seen = []

        def asking(x: torch.Tensor) -> torch.Tensor:
            seen.append(remat.current_phase())
            return function(x)

        gradient(lambda x: remat.checkpoint(asking, x, name="here"))
        self.assertEqual([each.phase for each in seen], ["forward", "recompute"])
        self.assertEqual(seen[0].frame_id, seen[1].frame_id)
        self.assertEqual((seen[0].name, seen[0].depth), ("here", 1))
        self.assertEqual(remat.current_phase().phase, "none")
        self.assertIn("frame_id=-1", repr(remat.current_phase()))

    def test_guards_nest_are_decorators_and_belong_to_their_thread(self) -> None:
        def frames() -> int:
            before = remat.counters()["frames_created"]
            remat.checkpoint(function, leaf())
            return remat.counters()["frames_created"] - before

        guard = remat.disable_checkpoint()
        with guard:
            with guard:
                self.assertEqual(frames(), 0)
            self.assertEqual(frames(), 0)
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(frames()))
            thread.start()
            thread.join()
            self.assertEqual(found, [1])
        self.assertEqual(frames(), 1)
        self.assertEqual(guard(frames)(), 0)
        self.assertEqual(frames(), 1)
        with self.assertRaises(RuntimeError):
            guard.__exit__(None, None, None)

    def test_errors_are_in_python_s_words(self) -> None:
        for call, text in (
            (
                lambda: remat.memory_limit(-1).__enter__(),
                r"remat\.memory_limit: the limit must be at least 0 bytes",
            ),
            (
                lambda: remat.recompute_cache(-1).__enter__(),
                r"remat\.recompute_cache: max_bytes is -1",
            ),
            (lambda: remat.save_as(torch.int32).__enter__(), r"remat\.save_as: .* torch\.bfloat16"),
            (
                lambda: remat.save_on_disk("/no/such/folder").__enter__(),
                r"remat\.save_on_disk: no file could be made",
            ),
            (
                lambda: remat.save_ops(["aten::no"]),
                r'remat\.save_ops: there is no operator "aten::no"',
            ),
            (lambda: remat.Recorder(max_events=0), r"remat\.Recorder: max_events was 0"),
            (lambda: remat.Plan(0), r"remat\.Plan: a plan needs at least 1 stage"),
            (lambda: remat.Plan.parse("[1"), r"remat\.Plan\.parse: "),
            (
                lambda: remat.solve(remat.ChainCost()),
                r"remat\.solve: a chain needs at least one stage",
            ),
            (
                lambda: remat.run(remat.Plan(2), [torch.sin], leaf()),
                r"remat\.run: the plan has 2 stages",
            ),
        ):
            with self.assertRaisesRegex(ValueError, "(?s)" + text) as caught:
                call()
            self.assertIsNone(FOREIGN.search(str(caught.exception)), str(caught.exception))

        def failing(x: torch.Tensor) -> torch.Tensor:
            raise ValueError("remat:: is what I write")

        with self.assertRaisesRegex(ValueError, "is what I write"):
            remat.measure([failing], leaf())


class Kept:
    """A place that copies, and counts its calls."""

    def __init__(self) -> None:
        self.stored: list[torch.Tensor] = []
        self.events: list[str] = []

    def store(self, flat: torch.Tensor) -> object:
        self.stored.append(flat.clone())
        self.events.append("store")
        return [self.stored[-1]]

    def load(self, contents: list[torch.Tensor]) -> torch.Tensor:
        self.events.append("load")
        return contents[0].clone()


class Places(Case):
    def test_what_is_saved_waits_in_the_place(self) -> None:
        class Contents:
            def __init__(self, flat: torch.Tensor) -> None:
                self.bytes = bytes(flat.tolist())

        class Place:
            alive: weakref.WeakSet[Contents] = weakref.WeakSet()

            def store(self, flat: torch.Tensor) -> Contents:
                assert flat.dtype == torch.uint8 and flat.dim() == 1 and not flat.requires_grad
                contents = Contents(flat)
                self.alive.add(contents)
                return contents

            def load(self, contents: Contents) -> torch.Tensor:
                return torch.frombuffer(bytearray(contents.bytes), dtype=torch.uint8)

        place = Place()
        held = weakref.ref(place)
        x = leaf(1 << 12)
        f = lambda x: function(x).view(64, 64).t().mul(x.view(64, 64)[::2, 1:3].sum())  # noqa: E731
        guard = remat.save_elsewhere(place)
        meter = remat.MemoryMeter()
        with guard:
            before = meter.live_bytes
            y = f(x).sum()
            self.assertLess(meter.live_bytes - before, 1 << 14)  # less than one of them
        # the result of exp, which cos saves, too; the factors of the product
        self.assertEqual(len(Place.alive), 3)
        y.backward(retain_graph=True)
        first = x.grad
        x.grad = None
        y.backward()
        self.check_equal(x.grad, first)
        self.check_equal(x.grad, gradient(f, 1 << 12))
        self.assertEqual(len(Place.alive), 0)
        del place, guard, y
        self.assertIsNone(held())

    def test_regions_inside(self) -> None:
        place = Kept()
        with remat.save_elsewhere(place):
            found = gradient(lambda x: remat.checkpoint(function, x * 2))
        self.assertEqual(place.events, ["store", "load"])  # the region's argument
        self.check_equal(found, gradient(lambda x: function(x * 2)))

    def test_what_stays(self) -> None:
        class Choosy(Kept):
            def takes(self, tensor: torch.Tensor) -> bool:
                return tensor.dtype == torch.float64

            def store(self, flat: torch.Tensor) -> object:
                return super().store(flat) if flat.numel() > 1000 else None

        for dtype, size, num_stored in (
            (torch.float32, 500, 0), (torch.float64, 20, 0), (torch.float64, 500, 1)
        ):
            place = Choosy()
            x = torch.linspace(0, 1, size, dtype=dtype).requires_grad_()
            with remat.save_elsewhere(place):
                y = function(x).sum()
            self.assertEqual(len(place.stored), num_stored)
            y.backward()
            self.check_equal(x.grad, torch.autograd.grad(function(x).sum(), x)[0])
        place = Kept()
        with remat.save_elsewhere(place, min_bytes=1000):
            gradient(size=249)
            self.assertEqual(place.events, [])
            gradient(size=250)
            self.assertEqual(len(place.stored), 1)

    def test_elements(self) -> None:
        class Rounded(Kept):
            stores_bytes = False

            def store(self, flat: torch.Tensor) -> object:
                assert flat.dtype == torch.float32
                return super().store(flat.bfloat16())

            def load(self, contents: list[torch.Tensor]) -> torch.Tensor:
                return super().load(contents).float()

        x = leaf()
        with remat.save_elsewhere(Rounded()):
            y = (x * 2).sin().sum()
        (found,) = torch.autograd.grad(y, x)
        self.check_equal(found, (x * 2).bfloat16().float().cos() * 2)

    def test_the_order_of_loads(self) -> None:
        class Ahead(Kept):
            def begin_load(self, contents: object) -> None:
                self.events.append("begin")

            def cancel_load(self, contents: object) -> None:
                self.events.append("cancel")

        def f(x: torch.Tensor) -> torch.Tensor:
            return (((x * 2).sin() * 2).sin() * 2).sin()

        place = Ahead()
        with remat.save_elsewhere(place):
            y = f(leaf()).sum()
        self.assertEqual(place.events, ["store"] * 3)
        place.events.clear()
        y.backward()
        self.assertEqual(place.events, ["load", "begin", "load", "begin", "load"])
        place = Ahead()
        with remat.save_elsewhere(place, prefetch_depth=0):
            f(leaf()).sum().backward()
        self.assertEqual(place.events, ["store"] * 3 + ["load"] * 3)

    def test_late_stores(self) -> None:
        class Late(Kept):
            def finish_store(self, contents: object) -> None:
                self.events.append("finish")

        place = Late()
        with remat.save_elsewhere(place, max_bytes_in_flight=300):
            x = leaf()  # 256 bytes each
            y = (x * 2).sin()
            z = (y * 2).sin()
        self.assertEqual(place.events, ["store", "finish", "store"])
        z.sum().backward()
        self.assertEqual(place.events[3:], ["finish", "load", "load"])
        with remat.save_elsewhere(place):
            y = leaf() * 2
            z = y.sin().sum()
        y.detach().zero_()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            z.backward()

    def test_errors_keep_their_types_and_can_be_tried_again(self) -> None:
        class Failing(Kept):
            fails = ""
            loaded: object = None

            def store(self, flat: torch.Tensor) -> object:
                if self.fails == "store":
                    raise LookupError("of store")
                return super().store(flat)

            def load(self, contents: list[torch.Tensor]) -> torch.Tensor:
                if self.fails == "load":
                    raise LookupError("of load")
                if self.fails == "result":
                    return self.loaded  # type: ignore[return-value]
                return super().load(contents)

        place = Failing()
        x = leaf()
        with remat.save_elsewhere(place):
            place.fails = "store"
            with self.assertRaisesRegex(LookupError, "of store"):
                (x * 2).exp()
            place.fails = ""
            y = (x * 2).exp().sum()
        place.fails = "load"
        with self.assertRaisesRegex(LookupError, "of load"):
            y.backward()
        place.fails = "result"
        for place.loaded, kind, text in (
            (None, TypeError, "`load` of .* returned a value that does not match .*256 elements "
                              "of torch.uint8 on cpu.*: None"),
            (torch.ones(256), ValueError, r"It returned: '\[256\] of torch.float32 on cpu'"),
            (torch.ones(255).byte(), ValueError, r"It returned: '\[255\] of torch.uint8 on cpu'"),
            (torch.ones(16, 16).byte(), ValueError, r"It returned: '\[16, 16\]"),
            (torch.ones(256, device="meta").byte(), ValueError, "on meta"),
        ):
            with self.assertRaisesRegex(kind, "(?s)" + text) as caught:
                y.backward()
            self.assertIsNone(FOREIGN.search(str(caught.exception)), str(caught.exception))
        place.fails = ""
        y.backward()
        self.check_equal(x.grad, (x * 2).exp() * 2)
        with self.assertRaisesRegex(TypeError, "a place must have a method `load`"):
            remat.save_elsewhere(type("Half", (), {"store": lambda self, flat: None})())
        with self.assertRaisesRegex(ValueError, r"^remat\.save_elsewhere: .*-1"):
            with remat.save_elsewhere(place, min_bytes=-1):
                pass

    def test_nobody_sees_what_a_place_computes(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Seen(TorchDispatchMode):
            ops: list[str] = []

            def __torch_dispatch__(  # type: ignore[no-untyped-def]
                self, func, types, args=(), kwargs=None
            ):
                self.ops.append(str(func))
                return func(*args, **(kwargs or {}))

        class Place(Kept):
            def load(self, contents: list[torch.Tensor]) -> torch.Tensor:
                assert torch.empty(1).device.type == "cpu"
                result = super().load(contents).mul(1)
                assert result.grad_fn is None
                return result

        x, place = leaf(), Place()
        y = x * 2
        with torch.device("meta"), Seen(), remat.save_elsewhere(place):
            z = y.exp()
            (found,) = torch.autograd.grad(z, y, torch.ones_like(z, device="cpu"))
        self.check_equal(found, z)
        self.assertEqual(place.events, ["store", "load"])
        self.assertFalse(
            [each for each in Seen.ops if "clone" in each or "empty" in each], Seen.ops
        )

    def test_threads_that_want_the_same_contents(self) -> None:
        loading, reading = threading.Event(), threading.Event()

        class Slow(Kept):
            def load(self, contents: list[torch.Tensor]) -> torch.Tensor:
                loading.set()
                reading.wait(10)
                # the other one waits for this, with the interpreter's lock if nobody takes care
                time.sleep(0.1)
                return super().load(contents)

        class Reads(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):  # type: ignore[no-untyped-def]
                ctx.save_for_backward(x)
                return x.cos()

            @staticmethod
            def backward(ctx, g):  # type: ignore[no-untyped-def]
                loading.wait(10)
                reading.set()
                (x,) = ctx.saved_tensors  # with the interpreter's lock
                return -x.sin() * g

        x = leaf()
        with remat.save_elsewhere(Slow()):
            y = x * 2
            one, other = y.sin().sum(), Reads.apply(y).sum()
        found: list[torch.Tensor] = []
        threads = [
            threading.Thread(
                target=lambda z=z: found.append(torch.autograd.grad(z, y)[0]), daemon=True
            )
            for z in (one, other)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
            self.assertFalse(each.is_alive(), "a standstill")
        self.assertEqual(len(found), 2)


if __name__ == "__main__":
    unittest.main()
