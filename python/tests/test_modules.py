"""Modules that are regions: gradients, buffers, names, copies; and the choice of modules in a
tree."""

from __future__ import annotations

import abc
import copy
import io
import pickle
import threading
import unittest
import warnings
from typing import Any
from unittest import mock

import torch
import torch.nn as nn

import remat
from common import Case
from remat import _region_class

torch.set_num_threads(1)  # small tensors, maybe on a busy machine


class Block(nn.Module):
    def __init__(self, width: int = 8, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.25)
        self.calls: list[int] = []  # in a list, which recomputes do not put back

    @property
    def runs(self) -> int:
        return len(self.calls)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls.append(1)
        return x + self.dropout(self.norm(self.linear(x)).sin()) * scale


class Wide(Block):
    pass


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.Sequential(Block(norm=norm), Block(norm=norm), Wide(norm=norm))
        self.list = nn.ModuleList([Block(norm=norm), Block(norm=norm)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.stem(x))
        for each in self.list:
            x = each(x, scale=0.5)
        return x


def made(norm: bool = False) -> Net:
    torch.manual_seed(3)
    return Net(norm)


def train(net: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Returns losses, parameters and buffers after some steps."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(each.detach().clone() for each in net.state_dict().values())]


class Static(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()


class BuiltIn(nn.Module):
    forward = torch.sigmoid


class OfClass(nn.Module):
    factor = 2

    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return (x * cls.factor).sin().exp()


class Registered(nn.Module):
    known: dict[str, type] = {}

    def __init_subclass__(cls, *, tag: str, **others: object) -> None:
        super().__init_subclass__(**others)
        Registered.known[tag] = cls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()


class Tagged(Registered, tag="tagged"):
    pass


class Heard(Registered, tag="heard"):
    heard: list[type] = []

    def __init_subclass__(cls) -> None:
        cls.heard.append(cls)


class Counting(abc.ABCMeta):
    made: list[str] = []

    def __new__(meta, name: str, bases: Any, body: Any, *, wanted: bool) -> Any:  # noqa: N804
        meta.made.append(name)
        return super().__new__(meta, name, bases, body)

    def __init__(cls, name: str, bases: Any, body: Any, *, wanted: bool) -> None:
        super().__init__(name, bases, body)


class Counted(nn.Module, metaclass=Counting, wanted=True):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()


class Fixed(nn.Module):
    def __setattr__(self, name: str, value: object) -> None:
        if name == "__class__":
            raise TypeError("it is what it is")
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()


class NeverChanges(Fixed):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return NeverChanges


class Modules(Case):

    def test_modules_of_any_class_are_regions_or_refused(self) -> None:
        x = torch.linspace(0, 1, 8, requires_grad=True)
        for kind in (Static, BuiltIn, OfClass, Tagged, Heard, Counted, Fixed, NeverChanges):
            with self.subTest(kind=kind.__name__):
                net = nn.Sequential(kind())
                (wanted,) = torch.autograd.grad(net(x).sum(), x)
                applied = remat.apply(net, predicate=lambda path, module: path == "0")
                self.assertEqual(len(applied.regions) + len(applied.refused), 1, str(applied))
                for made in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
                    before = remat.counters()["frames_created"]
                    self.check_equal(torch.autograd.grad(made(x).sum(), x), (wanted,))
                    self.assertEqual(
                        remat.counters()["frames_created"] - before, len(applied.regions)
                    )
                self.assertIsInstance(net[0], kind)
                self.assertIs(remat.plain_class(net[0]), kind)
                remat.remove(net)
                self.assertIs(type(net[0]), kind)
        self.assertEqual(Registered.known, {"tagged": Tagged, "heard": Heard})
        self.assertEqual((Heard.heard, Counting.made), ([], ["Counted"]))
        with self.assertRaises(TypeError):
            type("Other", (Tagged,), {})

        class Other(Heard):
            pass

        self.assertEqual(Heard.heard, [Other])

    def test_a_class_that_cannot_change_is_refused(self) -> None:
        net = nn.Sequential(nn.Tanh(), nn.Linear(2, 2))
        with mock.patch.object(
            _region_class, "_class_of_regions", side_effect=TypeError("layouts differ")
        ):
            applied = remat.apply(net, types=nn.Tanh)
        self.assertEqual([each.path for each in applied.refused], ["0"])
        self.assertIn("its class cannot change: layouts differ", str(applied))
        self.assertFalse(remat.is_checkpointed(net[0]))

    def assert_same(self, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        self.assertEqual(len(found), len(wanted))
        for i, (a, b) in enumerate(zip(found, wanted)):
            self.assertTrue(torch.equal(a, b), f"tensor {i} differs: {a} {b}")

    def frames(self, call: object) -> int:
        before = remat.counters()["frames_created"]
        call()  # type: ignore[operator]
        return remat.counters()["frames_created"] - before

    def test_a_checkpointed_module_trains_as_without_and_its_running_statistics_move_once(
        self,
    ) -> None:
        for norm in (False, True):
            plain, net = made(norm), made(norm)
            applied = remat.apply(net, types=Block)
            self.assertEqual(len(applied.regions), 5)
            wanted = train(plain)
            runs = remat.counters()["recomputes"]
            self.assert_same(train(net), wanted)
            self.assertEqual(remat.counters()["recomputes"] - runs, 15)
            self.assertEqual(net.layers[0].runs, 6)  # forward and recompute of three steps
            for name, buffer in plain.named_buffers():
                self.assertTrue(torch.equal(buffer, net.get_buffer(name)), name)

    def test_nested_regions_with_batch_norm(self) -> None:
        plain, net = made(True), made(True)
        remat.apply(net, types=Block)
        remat.Checkpointed(net, name="all")
        remat.Checkpointed(net.layers)
        self.assert_same(train(net), train(plain))

    def test_modules_that_are_no_regions_are_known_to_those_around(self) -> None:
        plain, net = made(True), made(True)
        remat.apply(net, names="**")
        remat.set_checkpointing(net, False)
        run = remat.checkpointed(lambda x: net(x))
        results = []
        for module, function in ((plain, plain), (net, run)):
            torch.manual_seed(1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                function(torch.randn(6, 8)).sum().backward()
            results.append([*(p.grad for p in module.parameters()), *module.buffers()])
        self.assert_same(results[1], results[0])

    def test_checkpoint_of_a_module_or_its_method_restores_buffers(self) -> None:
        import functools

        ways = {
            "module": lambda m, x: remat.checkpoint(m, x),
            "method": lambda m, x: remat.checkpoint(m.forward, x),
            "partial": lambda m, x: remat.checkpoint(functools.partial(m, scale=1.0), x),
            "named": lambda m, x: remat.checkpoint(lambda y: m(y), x, modules=[m]),
        }
        for name, way in ways.items():
            results = []
            for run in (lambda m, x: m(x), way):
                torch.manual_seed(1)
                block = Block(norm=True)
                x = torch.randn(6, 8, requires_grad=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    run(block, x).sum().backward()
                results.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
            self.assertEqual(int(block.norm.num_batches_tracked), 1, name)
            self.assert_same(results[1], results[0])

    def test_buffers_ignored_move_twice_and_unknown_ones_are_warned_of(self) -> None:
        block = Block(norm=True)
        remat.checkpoint(
            block, torch.randn(6, 8, requires_grad=True), buffers="ignore"
        ).sum().backward()
        self.assertEqual(int(block.norm.num_batches_tracked), 2)
        with self.assertWarnsRegex(UserWarning, "a batch norm in training mode ran in a region"):
            remat.checkpoint(
                lambda x: block(x), torch.randn(6, 8, requires_grad=True)
            ).sum().backward()

    def test_skip_batch_norm_runs_plainly(self) -> None:
        block = remat.Checkpointed(Block(norm=True), buffers="skip_batch_norm")
        with self.assertWarnsRegex(UserWarning, "skipped"):
            self.assertEqual(self.frames(lambda: block(torch.randn(6, 8))), 0)
        other = remat.Checkpointed(Block(), buffers="skip_batch_norm")
        self.assertEqual(self.frames(lambda: other(torch.randn(6, 8))), 1)

    def test_a_buffer_that_forward_assigns_anew_is_forwards_in_the_recompute(self) -> None:
        class Average(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.ones(8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = (x * self.mean).sin()
                self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
                return y

        results = []
        for module in (Average(), remat.Checkpointed(Average())):
            torch.manual_seed(2)
            xs = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
            for x in xs:
                module(x).sum().backward()
            results.append([*(x.grad for x in xs), module.mean])
        self.assert_same(results[1], results[0])

    def test_training_flags_are_forwards_in_the_recompute(self) -> None:
        results = []
        for switch in (False, True):
            block = remat.Checkpointed(Block(norm=True))
            torch.manual_seed(1)
            with torch.no_grad():
                for p in block.parameters():
                    p.copy_(torch.randn_like(p))
            x = torch.randn(6, 8, requires_grad=True)
            loss = block(x).sum()
            if switch:
                block.eval()
            loss.backward()
            self.assertEqual(block.training, not switch)
            self.assertEqual(block.norm.training, not switch)
            results.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
        self.assert_same(results[1], results[0])

    def test_training_flags_of_two_threads(self) -> None:
        block = remat.Checkpointed(Block(), training_only=False)
        x = torch.randn(6, 8)
        losses = []
        for training in (True, False) * 4:
            block.train(training)
            losses.append(block(x).sum())
        block.train()
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertTrue(block.training and block.dropout.training)
        self.assertEqual(block.runs, 16)

    def test_in_eval_mode_it_runs_plainly_unless_told(self) -> None:
        x = torch.randn(2, 8)
        block = remat.Checkpointed(Block()).eval()
        self.assertEqual(self.frames(lambda: block(x)), 0)
        remat.Checkpointed(block, training_only=False)
        self.assertEqual(self.frames(lambda: block(x)), 1)

    def test_a_backward_through_a_module_that_is_off_in_eval_mode_is_warned_of_once(self) -> None:
        class OffInEval(Block):
            pass

        def texts(run: Any) -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run()
            return [str(each.message) for each in caught]

        model = nn.Sequential(OffInEval(), OffInEval()).eval()
        remat.apply(model, types=OffInEval)
        x = torch.randn(4, 8, requires_grad=True)
        self.assertEqual(texts(lambda: model(x)), [])
        self.assertEqual(texts(lambda: remat.checkpoint(model, x).sum().backward()), [])
        with remat.disable_checkpoint():
            y = model(x).sum()
        self.assertEqual(texts(y.backward), [])
        (text,) = texts(lambda: model(x).sum().backward())
        self.assertRegex(text, "OffInEval in eval mode, which ran without a region")
        self.assertEqual(texts(lambda: model(x).sum().backward()), [])

    def test_names_classes_and_text_stay(self) -> None:
        plain, net = made(True), made(True)
        remat.apply(net, names="layers.*|list.*")
        self.assertEqual(list(net.state_dict()), list(plain.state_dict()))
        self.assertEqual(
            [name for name, _ in net.named_modules()], [name for name, _ in plain.named_modules()]
        )
        self.assertEqual(str(net), str(plain))
        self.assertIsInstance(net.layers[0], Block)
        self.assertIs(remat.plain_class(net.layers[0]), Block)
        plain.load_state_dict(net.state_dict())
        net.load_state_dict(plain.state_dict())
        import inspect

        self.assertEqual(
            inspect.signature(net.layers[0].forward), inspect.signature(plain.layers[0].forward)
        )

    def test_copies_and_pickles_are_regions_of_their_own(self) -> None:
        net = made(True)
        remat.apply(net, types=Block, determinism_check="layout")
        wanted = train(made(True))
        stored = io.BytesIO()
        torch.save(net, stored)
        stored.seek(0)
        copies = {
            "deepcopy": copy.deepcopy(net),
            "pickle": pickle.loads(pickle.dumps(net)),
            "torch.save": torch.load(stored, weights_only=False),
        }
        for name, each in copies.items():
            with self.subTest(name):
                self.assertEqual(sum(map(remat.is_checkpointed, each.modules())), 5)
                frames = remat.counters()["frames_created"]
                self.assert_same(train(each), wanted)
                self.assertEqual(remat.counters()["frames_created"] - frames, 15)
                remat.set_checkpointing(each, False)
        self.assertTrue(remat.is_checkpointed(net.layers[0]))
        self.assertEqual(net.layers[0].runs, 0)

    def test_hooks_of_the_module_run_once_and_outside(self) -> None:
        seen = []
        block = remat.Checkpointed(Block())
        block.register_forward_hook(lambda *_: seen.append("own"))
        block.linear.register_forward_hook(lambda *_: seen.append("inside"))
        block(torch.randn(2, 8, requires_grad=True)).sum().backward()
        self.assertEqual(seen, ["inside", "own", "inside"])

    def test_remove_gives_the_class_back_and_graphs_still_recompute(self) -> None:
        net = made()
        remat.apply(net, types=Block)
        loss = net(torch.randn(3, 8)).sum()
        removed = remat.remove(net, types=Wide)
        self.assertEqual(removed, [("layers.2", "Wide")])
        self.assertIs(type(net.layers[2]), Wide)
        self.assertEqual(len(remat.remove(net)), 4)
        self.assertEqual(remat.remove(net), [])
        self.assertTrue(all(type(each) is Block for each in net.list))
        self.assertNotIn("_remat_region", net.list[0].__dict__)
        loss.backward()
        self.assertEqual(net.list[0].runs, 2)

    def test_a_forward_that_is_put_into_the_class_later_runs(self) -> None:
        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x).sin()

        module = remat.Checkpointed(Own())
        x = torch.randn(3, 8)
        before = module(x)
        Own.forward = lambda self, x: self.linear(x).cos()  # type: ignore[method-assign]
        self.assertTrue(torch.equal(module(x), module.linear(x).cos()))
        other = remat.Checkpointed(Own())
        self.assertTrue(torch.equal(other(x), other.linear(x).cos()))
        plain = torch.autograd.grad(module.linear(x).sin().sum(), module.linear.weight)[0]
        self.assertTrue(
            torch.equal(torch.autograd.grad(before.sum(), module.linear.weight)[0], plain)
        )

    def test_parametrizations_come_and_go(self) -> None:
        from torch.nn.utils import parametrizations, parametrize

        def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
            runs = remat.counters()["recomputes"]
            found = list(torch.autograd.grad(module(x).sin().sum(), list(module.parameters())))
            self.assertEqual(
                remat.counters()["recomputes"] - runs, 1 if remat.is_checkpointed(module) else 0
            )
            return found

        x = torch.randn(3, 8)
        for first in ("region", "parametrization"):
            for last in ("region", "parametrization"):
                module, plain = (copy.deepcopy(made().stem) for _ in range(2))
                parametrizations.weight_norm(plain)
                if first == "region":
                    remat.Checkpointed(module)
                parametrizations.weight_norm(module)
                if first == "parametrization":
                    remat.Checkpointed(module)
                self.assertTrue(all(map(torch.equal, gradients(module, x), gradients(plain, x))))
                self.assertEqual(type(copy.deepcopy(module)).__name__, "ParametrizedLinear")
                parametrize.remove_parametrizations(plain, "weight")
                if last == "region":
                    self.assertEqual(len(remat.remove(module)), 1)
                    gradients(module, x)
                parametrize.remove_parametrizations(module, "weight")
                self.assertTrue(all(map(torch.equal, gradients(module, x), gradients(plain, x))))
                if last == "parametrization":
                    self.assertTrue(remat.is_checkpointed(module))
                    remat.remove(module)
                self.assertIs(type(module), nn.Linear)

    def test_levels(self) -> None:
        net = made()
        remat.apply(net, types=Wide, level=2)
        remat.apply(net, names="list.*", level=1)
        remat.Checkpointed(net.stem, level=0)
        for level, regions in ((0, 0), (1, 2), (2, 3), (9, 3)):
            remat.set_checkpoint_level(net, level)
            self.assertEqual(sum(map(remat.is_checkpointed, net.modules())), regions)

    def test_what_a_choice_means(self) -> None:
        def chosen(choice: object = None, **conditions: object) -> list[str]:
            applied = remat.apply(made(), choice, **conditions)  # type: ignore[arg-type]
            return [each.path for each in (*applied.regions, *applied.refused)]

        self.assertEqual(chosen(names="layers.*"), ["layers.0", "layers.1", "layers.2"])
        self.assertEqual(chosen(names="l*"), ["layers", "list"])
        self.assertEqual(
            chosen(names="layers.0**"),
            ["layers.0", "layers.0.linear", "layers.0.norm", "layers.0.dropout"],
        )
        self.assertEqual(chosen(names="li?t.1"), ["list.1"])
        self.assertEqual(chosen(names=["layers.1", "list.1"]), ["layers.1", "list.1"])
        self.assertEqual(chosen(types=Wide), ["layers.2"])
        self.assertEqual(chosen(types="Block"), ["layers.0", "layers.1", "list.0", "list.1"])
        self.assertEqual(chosen(types=Block, every=2), ["layers.0", "layers.2", "list.1"])
        self.assertEqual(
            chosen(types=[Wide, "torch.nn.modules.linear.Linear"], names="stem|layers.*"),
            ["stem", "layers.2"],
        )
        self.assertEqual(chosen(types="Net"), [""])
        self.assertEqual(chosen("every=2,name=layers.*,type=Block|Wide"), ["layers.0", "layers.2"])
        self.assertEqual(
            chosen(predicate=lambda path, module: path.endswith("1") and isinstance(module, Block)),
            ["layers.1", "list.1"],
        )

    def test_wrong_choices(self) -> None:
        for text, cause in {
            "": "the text was empty",
            "evry=2": 'there is no key "evry"',
            "layers": "it has no `=`",
            "name=a,name=b": "the key name appears twice",
            "name=": "its value is empty",
            "every=0": '"0" is not a number of at least 1',
            "name=a||b": "a pattern beside `|` is empty",
        }.items():
            with self.assertRaisesRegex(ValueError, cause.replace("|", r"\|").replace("`", "`")):
                remat.ModuleChoice.parse(text)
        with self.assertRaisesRegex(ValueError, "no condition"):
            remat.apply(made(), every=2)
        with self.assertRaisesRegex(ValueError, "no module of the tree matches"):
            remat.apply(made(), types="Blok")
        with self.assertRaisesRegex(TypeError, "no option"):
            remat.apply(made(), types=Block, erly_stop=True)

    def test_what_cannot_be_a_region_is_named(self) -> None:
        net = made()
        net.stem.forward = net.stem.forward  # type: ignore[method-assign]
        applied = remat.apply(net, names="list|stem|layers.0")
        self.assertEqual([each.path for each in applied.regions], ["layers.0"])
        self.assertEqual([each.path for each in applied.refused], ["stem", "list"])
        self.assertIn("no region: list (ModuleList): it has no forward", str(applied))
        self.assertIn("choose its children: name=list.*", str(applied))
        lazy = nn.LazyLinear(3)
        with self.assertRaisesRegex(ValueError, "lazy"):
            remat.Checkpointed(lazy)
        lazy(torch.ones(2, 2))
        remat.Checkpointed(lazy)
        with self.assertRaisesRegex(ValueError, "script module"):
            remat.Checkpointed(torch.jit.script(nn.Linear(2, 2)))

    def test_an_error_names_the_modules_path(self) -> None:
        net = made()
        remat.apply(net, names="list.1", name="net")
        loss = net(torch.randn(3, 8)).sum()
        with torch.no_grad():
            net.list[1].linear.weight.add_(1)
        with self.assertRaises(remat.CheckpointError) as raised:
            loss.backward()
        self.assertEqual(raised.exception.region, "net list.1")
        self.assertIs(raised.exception.kind, remat.ErrorKind.CAPTURE_CHANGED)

    def test_it_dies_with_the_last_reference(self) -> None:
        import gc
        import weakref

        gc.collect()
        gc.disable()
        try:
            net = made(True)
            remat.apply(net, types=Block)
            loss = net(torch.randn(3, 8)).sum()
            alive = remat.counters()["frames_alive"]
            gone = weakref.ref(net.list[0])
            del net
            self.assertIsNotNone(gone())  # the graph keeps it
            del loss
            self.assertEqual(remat.counters()["frames_alive"], alive - 5)
            self.assertIsNone(gone())
        finally:
            gc.enable()


class SaveRegion(Case):
    def test_what_it_runs_is_not_run_again(self) -> None:
        runs = []

        def kernel(x: torch.Tensor) -> dict[str, object]:
            runs.append(1)
            return {"sin": x.sin(), "more": (x.cos(), 7)}

        def function(x: torch.Tensor) -> torch.Tensor:
            kept = remat.save_region(kernel, x * 2)
            return (kept["sin"] * kept["more"][0]).exp() * kept["more"][1]

        x, y = (
            torch.randn(9, generator=torch.Generator().manual_seed(1)).requires_grad_()
            for _ in range(2)
        )
        function(x).sum().backward()
        runs.clear()
        remat.checkpoint(function, y).sum().backward()
        self.assertEqual(len(runs), 1)
        self.assertTrue(torch.equal(x.grad, y.grad))

    def test_it_raises_what_the_function_raises(self) -> None:
        def broken(x: torch.Tensor) -> torch.Tensor:
            raise KeyError("here")

        with self.assertRaisesRegex(KeyError, "here"):
            remat.checkpoint(
                lambda x: remat.save_region(broken, x), torch.ones(2, requires_grad=True)
            )
        with self.assertRaises(KeyError):
            remat.save_region(broken, torch.ones(2))
        self.assertEqual(remat.save_region(lambda a, b=2: a + b, 1), 3)


class Parts(nn.Module):
    """Calls its first block as a module, the parts of the second one, and the class's forward of
    the third one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, _ = self.blocks
        x = second[1](second[0](first(x)))
        return nn.Sequential.forward(third, x)  # type: ignore[arg-type]


class Unused(Case):
    def unused(self, model: nn.Module, result: torch.Tensor) -> list[str]:
        return [each.path for each in remat.unused_regions(model, result)]

    def test_modules_that_are_called_past_their_regions_are_found(self) -> None:
        model, x = Parts(), torch.ones(2, 4)
        remat.apply(model, names="blocks.*")
        result = model(x)
        # the fourth is in no graph
        self.assertEqual(self.unused(model, result), ["blocks.1", "blocks.2"])
        found = remat.unused_regions(model, result.sum())[0]
        self.assertEqual(found.type, "Sequential")
        self.assertIn("blocks.1", found.cure)
        result.sum().backward()
        self.assertEqual(self.unused(model, result), ["blocks.1", "blocks.2"])
        remat.set_checkpointing(model.blocks[2], False)
        self.assertEqual(self.unused(model, result), ["blocks.1"])
        model.blocks[1].eval()
        self.assertEqual(self.unused(model, result), [])
        model.blocks[1].train()
        model.blocks[1](x)
        self.assertEqual(self.unused(model, result), [])
        remat.reset_unused_regions(model)
        self.assertEqual(self.unused(model, result), ["blocks.0", "blocks.1"])

    def test_what_counts_as_reached(self) -> None:
        for reach, is_reached in (
            (lambda model: model.blocks[0](torch.ones(2, 4)), True),
            (torch.no_grad()(lambda model: model.blocks[0](torch.ones(2, 4))), False),
            (remat.disable_checkpoint()(lambda model: model.blocks[0](torch.ones(2, 4))), True),
        ):
            model = Parts()
            remat.apply(model, names="blocks.0")
            reach(model)
            block = model.blocks[0]
            result = nn.Sequential.forward(block, torch.ones(2, 4))  # type: ignore[arg-type]
            self.assertEqual(self.unused(model, result), [] if is_reached else ["blocks.0"])
            again = copy.deepcopy(model)
            block = again.blocks[0]
            result = nn.Sequential.forward(block, torch.ones(2, 4))  # type: ignore[arg-type]
            self.assertEqual(self.unused(again, result), ["blocks.0"])
            again = pickle.loads(pickle.dumps(model))
            self.assertTrue(remat.is_checkpointed(again.blocks[0]))

    def test_a_result_without_a_graph_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "the result had no graph"):
            remat.unused_regions(Parts(), torch.ones(1))


if __name__ == "__main__":
    unittest.main()
