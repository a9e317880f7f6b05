"""Policies that know the running module and the parameter that an operator reads; tables."""

from __future__ import annotations

import copy
import gc
import pickle
import unittest
import warnings
import weakref
from typing import Any

import torch
import torch.nn as nn

import remat
from common import Case, gradient, leaf


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        result: torch.Tensor = self.out(torch.softmax(q @ k.t(), -1) @ v)
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x).tanh()).sin() + x


class Net(nn.Module):
    """Blocks that are regions with a policy."""

    def __init__(self, policy: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.policy = policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.policy is None else remat.checkpoint(layer, x, policy=self.policy)
        return x


class Noting:
    """A policy function that notes operator, module and parameter of each question."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    def __call__(self, call: remat.PolicyContext) -> bool:
        name = call.op_name.split("::")[1].split(".")[0]
        if name in ("mm", "addmm", "tanh", "_softmax"):
            self.asked.append((name, call.module_path, call.parameter_path))
        return False


def layer_questions(path: str) -> list[tuple[str, str, str]]:
    attention = f"{path}.attention"
    return [
        ("addmm", f"{attention}.qkv", f"{attention}.qkv.bias"),
        ("mm", attention, ""),
        ("_softmax", attention, ""),
        ("mm", attention, ""),
        ("addmm", f"{attention}.out", f"{attention}.out.bias"),
        ("tanh", path, ""),
        ("addmm", f"{path}.mlp", f"{path}.mlp.bias"),
    ]


class Paths(Case):
    def test_a_policy_sees_module_and_parameter(self) -> None:
        noting = Noting()
        net, x = Net(noting), leaf()
        net(x)
        self.assertEqual(noting.asked, layer_questions("layers.0") + layer_questions("layers.1"))

    def test_paths_inside_a_recompute_are_those_of_forward(self) -> None:
        noting = Noting()

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net(noting)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.net(x).cos()

        class Around(nn.Module):
            """Calls backward while a module runs that has no part in the recompute."""

            def forward(self, y: torch.Tensor) -> None:
                y.sum().backward()

        for make in (
            lambda model: lambda x: remat.checkpoint(model, x),
            lambda model: remat.Checkpointed(model),
        ):
            model = Outer()
            noting.asked.clear()
            y = make(model)(leaf())
            expected = layer_questions("net.layers.0") + layer_questions("net.layers.1")
            self.assertEqual(noting.asked, expected)
            noting.asked.clear()
            Around()(y)
            self.assertEqual(noting.asked, expected)

    def test_a_registered_tree_has_its_own_paths(self) -> None:
        noting = Noting()
        net = Net()
        holder = nn.ModuleDict({"model": net})
        remat.register_tree(holder)
        remat.checkpoint(net.layers[1], leaf(), policy=noting)
        self.assertEqual(noting.asked, layer_questions("model.layers.1"))

    def test_without_modules_there_are_no_paths(self) -> None:
        noting = Noting()
        remat.checkpoint(torch.tanh, leaf(), policy=noting)
        self.assertEqual(noting.asked, [("tanh", "", "")])

    def test_paths_keep_no_module(self) -> None:
        net = Net(Noting())
        net(leaf())
        gone = weakref.ref(net)
        del net
        gc.collect()
        self.assertIsNone(gone())

    def test_results_are_seen_after_the_operator(self) -> None:
        sizes: list[int] = []

        def large(call: remat.PolicyContext) -> bool:
            if call.op_name == "aten::addmm.default":
                sizes.append(call.results[0].numel())
                self.assertEqual(len(call.args), 5)
            result = call.results[0] if call.results else None
            return isinstance(result, torch.Tensor) and result.numel() > 16

        net, x = Net(remat.Policy(large, ask_after=True)), leaf()
        plain = copy.deepcopy(net)
        plain.policy = None
        self.check_equal(gradient(net(x), x), gradient(plain(x), x))
        self.assertEqual(sizes, [48, 16, 16, 48, 16, 16])
        with self.assertRaisesRegex(ValueError, "ask_after and ask_again"):
            remat.Policy(large, ask_after=True, ask_again=True)


class Tables(Case):
    def kept(self, policy: Any) -> int:
        """Returns the number of results that a net keeps with the policy, whose gradients are those
        without."""
        net, x = Net(policy), leaf()
        plain = copy.deepcopy(net)
        plain.policy = None
        with remat.Recorder() as recorder:
            y = net(x)
        self.check_equal(gradient(y, x, retain_graph=True), gradient(plain(x), x))
        self.check_equal(gradient(y, x), gradient(plain(x), x))
        decisions = [each for region in recorder.report().regions for each in region.decisions]
        return sum(each.calls for each in decisions if each.outcome == "kept")

    def test_the_first_line_that_matches_answers(self) -> None:
        both = {"layers.*.attention.**: aten::addmm": "save", "*": "recompute"}
        for table in (
            both,
            "layers.*.attention.**: aten::addmm = save; * = recompute",
            remat.policy_table(both),
            remat.Policy.parse("# all\nlayers.*.attention.**: aten::addmm = save\n* = recompute\n"),
        ):
            self.assertEqual(self.kept(table), 4)
        self.assertEqual(self.kept({"layers.0.mlp: aten::addmm": True}), 1)
        self.assertEqual(self.kept({"layers.0.**": False, "aten::addmm": "must_save"}), 3)
        save = remat.CheckpointPolicy.PREFER_SAVE
        self.assertEqual(self.kept({"layers.*.attention: aten::mm|aten::_softmax": save}), 6)

    def test_a_table_is_written_as_it_was_made(self) -> None:
        policy = remat.Policy.parse("aten::mm = save")
        self.assertEqual(repr(policy), "remat.Policy.parse('aten::mm = save')")
        self.assertEqual(repr(pickle.loads(pickle.dumps(policy))), repr(policy))
        table = pickle.loads(pickle.dumps(remat.policy_table({"*": "save"})))
        self.assertIn("remat.policy_table({'*': ", repr(table))

    def test_wrong_tables_are_refused(self) -> None:
        for text, cause in (
            ("layers.*", "no `= ANSWER`"),
            ("layers.* = keep", "no answer"),
            ("layers.*: aten::nothing = save", "there is no operator"),
            ("* = save; aten::mm = save", "matches everything"),
        ):
            with self.assertRaisesRegex(ValueError, cause):
                remat.Policy.parse(text)
            with self.assertRaisesRegex(ValueError, cause):
                remat.checkpoint(torch.sin, leaf(), policy=text)
        with self.assertRaisesRegex(ValueError, "Hint: give one of save"):
            remat.policy_table({"*": "keep"})
        with self.assertRaisesRegex(ValueError, "had no lines"):
            remat.policy_table({})
        with self.assertRaisesRegex(TypeError, "a dict from patterns to answers"):
            remat.policy_table("*")  # type: ignore[arg-type]

    def test_unknown_paths_are_reported_once(self) -> None:
        net = Net({"lay.**: aten::addmm": "save", "layers.**": "save"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net(leaf())
            net(leaf())
        told = [str(each.message) for each in caught if "paths of modules" in str(each.message)]
        self.assertEqual(len(told), 1)
        self.assertIn('"lay.**: aten::addmm"', told[0])

    def test_a_choice_of_modules_has_a_policy(self) -> None:
        net, x = Net(), leaf()
        text = "name=layers.*,policy=layers.0.attention.qkv: aten::addmm=save; *=recompute"
        remat.apply(net, text)
        with remat.Recorder() as recorder:
            y = net(x)
        decisions = [each for region in recorder.report().regions for each in region.decisions]
        self.assertEqual(sum(each.calls for each in decisions if each.outcome == "kept"), 1)
        plain = copy.deepcopy(net)
        remat.remove(plain)
        self.check_equal(gradient(y, x), gradient(plain(x), x))
        with self.assertRaisesRegex(ValueError, "the choice had a policy"):
            remat.apply(net, text, policy=remat.save_matmuls())
        with self.assertRaisesRegex(ValueError, "no `= ANSWER`"):
            remat.ModuleChoice.parse("name=layers.*,policy=aten::mm")


class SaveRegion(Case):
    @staticmethod
    def squared(u: torch.Tensor) -> torch.Tensor:
        return u.exp() * u

    def test_names_are_chosen_by_patterns(self) -> None:
        calls: list[str] = []

        def noted(name: str, u: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return self.squared(u)

        def function(t: torch.Tensor) -> torch.Tensor:
            a = remat.save_region("attention.qkv", noted, "qkv", t.sin())
            return remat.save_region("attention.out", noted, "out", a.cos()).tanh()

        x = leaf()
        plain = gradient(function(x), x)
        for policy, expected in (
            (None, ["qkv", "out"]),
            ("name=attention.* = save", ["qkv", "out"]),
            ({"name=*.qkv": "save", "*": "recompute"}, ["qkv", "out", "out"]),
            (remat.save_names(["attention.out"]), ["qkv", "out", "qkv"]),
        ):
            calls.clear()
            self.check_equal(gradient(remat.checkpoint(function, x, policy=policy), x), plain)
            self.assertEqual(calls, expected)

    def test_arguments_and_unread_results_are_not_kept(self) -> None:
        def held(function: Any) -> int:
            x = torch.randn(64, 128, requires_grad=True)
            meter = remat.MemoryMeter()
            before = meter.live_bytes
            y = remat.checkpoint(function, x)
            return int(meter.live_bytes - before - y.nbytes)

        size = 64 * 128 * 4
        product = lambda h: h.view(2, 32, 128).pow(2).view(64, 128)  # noqa: E731
        self.assertEqual(held(lambda t: remat.save_region(product, t.sin()).cos()), size)
        self.assertEqual(held(lambda t: remat.save_region(product, t.sin()) + 1), 0)
        self.assertEqual(held(lambda t: remat.save_region(lambda h: h.t(), t.sin()).t().cos()), 0)

    def test_gradients_are_those_of_plain_autograd(self) -> None:
        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, u: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(u)
                return u**3

            @staticmethod
            def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
                (u,) = ctx.saved_tensors
                return slope * 3 * u**2

        def writes(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return v.exp() * u.mul_(2)

        def of_all(each: Any) -> torch.Tensor:
            return each["a"] * each["b"][0]

        for function in (
            lambda t: remat.save_region(lambda u, v: u * v.exp(), t.sin(), t.cos()).tanh(),
            lambda t: remat.save_region(Cube.apply, t.sin()).exp(),
            lambda t: remat.save_region(Cube.apply, t).exp(),
            lambda t: remat.save_region(lambda u: (u * u, u, u.t()), t.sin())[2].exp(),
            lambda t: remat.save_region(writes, t.sin().detach().clone(), t.cos()).exp(),
            lambda t: remat.save_region(of_all, {"a": t.sin(), "b": [t]}),
        ):
            x = leaf()
            expected = gradient(function(x), x)
            (slope,) = gradient(function(x), x, create_graph=True)
            twice = gradient(slope.sin(), x)
            for depth in range(1, 4):
                nested = function
                for _ in range(depth):
                    nested = lambda t, f=nested: remat.checkpoint(f, t)  # noqa: E731
                y = nested(x)
                self.check_equal(gradient(y, x, retain_graph=True), expected)
                (slope,) = gradient(y, x, create_graph=True)
                self.check_equal(gradient(slope.sin(), x), twice)


if __name__ == "__main__":
    unittest.main()
